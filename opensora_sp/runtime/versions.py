"""Facts that must be equal on all ranks: versions, the source code itself, the kind of device."""

from __future__ import annotations

import hashlib
import platform
from functools import lru_cache
from importlib import metadata
from pathlib import Path

import torch

import opensora_sp

PACKAGE = Path(opensora_sp.__file__).parent
PACKAGES = (
    "colossalai",
    "flash-attn",
    "flash-attn-3",
    "triton",
    "einops",
    "safetensors",
    "transformers",
    "diffusers",
    "av",
)
ABSENT = "not installed"


@lru_cache(maxsize=1)
def source_digest() -> str:
    """Twelve hex digits of the SHA-256 of this package's source files and their names."""
    digest = hashlib.sha256()
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).as_posix().encode()
        digest.update(name + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


def versions() -> dict[str, str]:
    """Versions by name, read without importing any package that takes seconds to load."""
    return {
        "opensora-sp": f"{opensora_sp.__version__} (source {source_digest()})",
        "python": ".".join(platform.python_version_tuple()[:2]),
        "torch": torch.__version__,
        "CUDA of torch": torch.version.cuda or "none",
        **{name: installed(name) for name in PACKAGES},
    }


def installed(package: str) -> str:
    """Version of a package, or ``ABSENT``."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ABSENT


def device_kind() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"

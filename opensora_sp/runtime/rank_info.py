"""Facts of ranks that join the rendezvous, and reasons why a set of ranks cannot start.

Versions, the source code itself and the kind of device must be equal on all ranks.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import metadata
from itertools import starmap
from pathlib import Path
from typing import Any

import torch

import opensora_sp
from opensora_sp.common.files import parse_json

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
MAX_VALUE_LENGTH = 60  # characters of a value in a message
MAX_RANKS = 8  # that a message lists
# What to do about differences in a field of ``RankInfo``.
ADVICE = {
    "versions": "expected the same software and kind of device on every rank; install the same "
    "everywhere; see opensora-sp doctor",
    "settings": "expected the same config on every rank; give every host the same config file, "
    "--cfg-options and --nproc_per_node",
}
RANKS_OF_HOST, UNSET = "LOCAL_WORLD_SIZE", "not set"  # a variable of launchers


@dataclass(frozen=True)
class RankInfo:
    """A rank, what it runs, and its ``error`` if it cannot start.

    ``process`` is its machine (see ``machine_id``) and its number there.
    """

    rank: int
    world_size: int
    host: str
    versions: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    error: str | None = None
    process: tuple[str, int] = ("", 0)

    @classmethod
    def parse(cls, text: bytes) -> RankInfo:
        """Of the JSON that the rank has written."""
        content = parse_json(text, "the report of a rank")
        return cls(**{**content, "process": tuple(content.get("process", ("", 0)))})

    @property
    def name(self) -> str:
        return f"rank {self.rank} ({self.host})"


def find_conflict(joined: list[RankInfo]) -> str | None:
    """Why these ranks, the last of which has just joined, cannot start; None if they can so far."""
    first, last = joined[0], joined[-1]
    if last.error is not None:
        return f"{last.name} cannot start: {last.error}"

    if first.world_size != last.world_size:
        return (
            f"got WORLD_SIZE {first.world_size} on {first.name} and {last.world_size} on "
            f"{last.name}; expected the same on every rank; start all hosts with the same --nnodes "
            "and --nproc_per_node"
        )

    for other in joined[:-1]:
        if other.rank == last.rank:
            return (
                f"got rank {last.rank} twice, on {other.host} and on {last.host}; expected every "
                "rank once; give each host its own --node_rank, and no other run the same "
                "--master_port"
            )
    return None


def find_differences(joined: list[RankInfo]) -> str:
    """The versions or settings that are not equal on all ranks; empty if all are."""
    joined = sorted(joined, key=lambda info: info.rank)

    for kind, advice in ADVICE.items():
        listed = differences(joined, kind)
        if listed:
            return f"got different {kind}: {listed}; {advice}"
    return ""


def differences(joined: list[RankInfo], kind: str) -> str:
    """For each name whose values differ, every value with its ranks and hosts."""
    names: set[str] = set().union(*(getattr(info, kind) for info in joined))
    different = []
    for name in sorted(names):
        ranks_by_text: dict[str, list[RankInfo]] = {}
        for info in joined:
            setting = getattr(info, kind).get(name, "absent")
            text = setting if isinstance(setting, str) else json.dumps(setting)
            ranks_by_text.setdefault(text, []).append(info)

        if len(ranks_by_text) > 1:
            texts = starmap(_with_ranks, ranks_by_text.items())
            different.append(f"{name} {', '.join(texts)}")
    return "; ".join(different)


def _with_ranks(text: str, infos: list[RankInfo]) -> str:
    hosts = sorted({info.host for info in infos[:MAX_RANKS]})
    ranks = format_ranks([info.rank for info in infos])
    return f"{_shorten(text)} on {ranks} ({', '.join(hosts)})"


def format_ranks(ranks: Sequence[int]) -> str:
    """``rank 3``; ``ranks 0, 1``; long ranges as ``ranks 0 to 63``; other long lists are cut."""
    listed = ", ".join(map(str, ranks[:MAX_RANKS]))
    if len(ranks) > MAX_RANKS:
        is_range = ranks[-1] - ranks[0] == len(ranks) - 1
        listed = f"{ranks[0]} to {ranks[-1]}" if is_range else f"{listed}, ..."
    return f"rank{'s' * (len(ranks) != 1)} {listed}"


def _shorten(text: str) -> str:
    return text if len(text) <= MAX_VALUE_LENGTH else text[: MAX_VALUE_LENGTH - 3] + "..."


@lru_cache(maxsize=1)
def source_digest() -> str:
    """Twelve hex digits of the SHA-256 of this package's source files and their names."""
    digest = hashlib.sha256()
    # The version alone is the same for working copies that differ.
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

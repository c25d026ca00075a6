"""The reference page of the Python API, mkdocstrings directives for all public names."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
PACKAGES = (
    "parallel",
    "parallel.strategies",
    "plugin",
    "models",
    "models.kernels",
    "diffusion",
    "encoders",
    "data",
    "checkpoint",
    "config",
    "sampling",
    "integrations.diffusers",
    "checker",
    "device_verification",
)
INTRODUCTION = """\
# Python API

Generated from the docstrings: every name that a package exports. Shapes are written
`[batch, channels, frames, height, width]`; `B` samples, `T` latent frames, `S` patches of a frame,
`C` channels.
"""


def public_names(package: str) -> Iterator[tuple[str, str]]:
    """(name, home module) of a package's ``__all__``, in the order of its imports."""
    exported: list[str] = []
    homes: dict[str, str] = {}
    for node in ast.walk(_tree(package)):
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            exported = ast.literal_eval(node.value)
        elif isinstance(node, ast.ImportFrom):
            home = f"opensora_sp.{package}.{node.module}" if node.level else str(node.module)
            homes.update({alias.asname or alias.name: home for alias in node.names})

    imported = [name for name in homes if name in exported]
    own = [name for name in exported if name not in homes]
    for name in (*imported, *own):
        yield name, homes.get(name, f"opensora_sp.{package}")


def _tree(package: str) -> ast.Module:
    path = ROOT / "opensora_sp" / package.replace(".", "/")
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(path.read_text())


def page() -> str:
    """The page as Markdown for mkdocstrings."""
    parts = [INTRODUCTION]
    for package in PACKAGES:
        description = (ast.get_docstring(_tree(package)) or "").replace("``", "`")
        parts.append(f"## opensora_sp.{package}\n\n{description}\n")
        parts += [f"::: {home}.{name}\n" for name, home in public_names(package)]
    return "\n".join(parts)

"""The reference page of the Python API: a directive of mkdocstrings for every public name of every
package.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
PACKAGES = (
    "parallel",
    "plugin",
    "models",
    "diffusion",
    "encoders",
    "data",
    "checkpoint",
    "config",
    "planner",
    "training",
    "sampling",
    "runtime",
    "runtime.doctor.device",
)
INTRODUCTION = """\
# Python API

Made from the docstrings when this site was built: every name that a package exports. Shapes are written
`[batch, channels, frames, height, width]`; `B` samples, `T` latent frames, `S` patches of a frame, `C` channels.
"""


def public_names(package: str) -> Iterator[tuple[str, str]]:
    """(name, the module that it is imported from) of a package's ``__all__``, in the order of its
    imports.
    """
    tree = ast.parse((ROOT / "opensora_sp" / package.replace(".", "/") / "__init__.py").read_text())
    exported: list[str] = []
    homes: dict[str, str] = {}
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            exported = ast.literal_eval(node.value)
        elif isinstance(node, ast.ImportFrom):
            home = f"opensora_sp.{package}.{node.module}" if node.level else str(node.module)
            homes.update({alias.asname or alias.name: home for alias in node.names})
    own = dict.fromkeys(exported, f"opensora_sp.{package}")
    homes = {name: home for name, home in homes.items() if name in own}
    yield from {**homes, **{name: home for name, home in own.items() if name not in homes}}.items()


def page() -> str:
    """The page as Markdown for mkdocstrings."""
    parts = [INTRODUCTION]
    for package in PACKAGES:
        tree = ast.parse(
            (ROOT / "opensora_sp" / package.replace(".", "/") / "__init__.py").read_text()
        )
        parts.append(
            f"## opensora_sp.{package}\n\n{(ast.get_docstring(tree) or '').replace('``', '`')}\n"
        )
        parts += [f"::: {home}.{name}\n" for name, home in public_names(package)]
    return "\n".join(parts)

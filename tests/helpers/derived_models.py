"""The derived models of docs/custom_model.md: their modules, and cases for SP parity."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from parity_cases import Case
from runs import ROOT, SAMPLE, TRAIN, write_toy_set

WORLD, STREET = "my_package.world.WorldSTDiT3", "my_package.street.StreetSTDiT3"
START = """import runpy, sys
sys.path.insert(0, {folder!r})
sys.argv.pop(0)
runpy.run_path(sys.argv[0], run_name="__main__")
"""
MODULE = re.compile(r"```python\n(# (my_package/\w+\.py)\n.*?)```", re.S)


def write_package(folder: Path) -> Path:
    """The modules of the page as a package in a folder, which goes into ``PYTHONPATH``."""
    page = (ROOT / "docs/custom_model.md").read_text(encoding="utf-8")
    modules = MODULE.findall(page)
    assert len(modules) == 2, [name for _, name in modules]
    for text, name in modules:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    return folder


def write_derived(folder: Path, name: str = WORLD, own: str = "action_size=3,") -> Path:
    """The package, a toy set with a column of files for each further input, configs of runs."""
    write_package(folder)
    manifest = write_toy_set(folder / "clips", 6)
    shapes = {"actions": (9, 3)} if name == WORLD else {"map": (2, 5, 7, 6), "boxes": (32, 4)}
    header, *lines = manifest.read_text().splitlines()
    for clip, line in enumerate(lines):
        for column, shape in shapes.items():
            drawn = np.random.default_rng(clip).normal(size=shape)
            np.save(folder / "clips" / f"{column}-{clip}.npy", drawn)
            line += f",{column}-{clip}.npy"
        lines[clip] = line
    manifest.write_text("\n".join([",".join([header, *shapes]), *lines]) + "\n")

    (folder / "start.py").write_text(START.format(folder=str(folder)))
    for file, text in {
        "train.py": TRAIN.format(manifest=str(manifest)),
        "sample.py": SAMPLE,
    }.items():
        text = text.replace('type="STDiT3",', f'type="{name}", {own}')
        (folder / file).write_text(text)
    return manifest


def with_package(folder: Path, function: Callable[..., Any], *args: Any) -> Any:
    """``function(*args)`` where the package in the folder can be imported."""
    sys.path.insert(0, str(folder))
    try:
        return function(*args)
    finally:
        sys.path.remove(str(folder))
        for name in [name for name in sys.modules if name.startswith("my_package")]:
            del sys.modules[name]


@dataclass(frozen=True)
class DerivedCase(Case):
    model: str = WORLD
    video_frames: int = 6  # which the latents' do not divide

    def options(self) -> dict[str, Any]:
        own = {WORLD: dict(action_size=3), STREET: dict(map_channels=2, box_size=4)}
        return dict(input_sq_size=16, **own.get(self.model, {}))

    def conditions(self, inputs: dict[str, Any]) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(4)
        samples, *size = self.size
        shapes: dict[str, tuple[int, ...]] = {"actions": (self.video_frames, 3)}
        if self.model == STREET:
            shapes = {"map": (2, *size), "boxes": (32, 4)}
        return {
            name: torch.randn(
                samples, *shape, generator=generator, dtype=torch.float64
            ).requires_grad_()
            for name, shape in shapes.items()
        }

"""What a path stands for: a file, a folder of weights, a run and its checkpoints, a checkpoint of Open-Sora 1.x."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

_NAME = re.compile(r"step_(\d{8,})")
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
# What a folder is searched for, safetensors first: the names that Hugging Face and ColossalAI write, then any one file.
_USUAL_SAFE = tuple(
    f"{stem}.safetensors{end}"
    for stem in ("model", "diffusion_pytorch_model")
    for end in ("", ".index.json")
)
_USUAL_PICKLES = tuple(
    f"{stem}.bin{end}"
    for stem in ("pytorch_model", "diffusion_pytorch_model")
    for end in ("", ".index.json")
)
_SAFE = ("*.safetensors.index.json", "*.safetensors")
_PICKLES = ("*.index.json", "*.pt", "*.pth", "*.bin")
_AVERAGES = ("ema.safetensors", "ema", "ema.pt")


def checkpoint_name(step: int) -> str:
    """The folder of the checkpoint written after ``step`` optimizer steps."""
    return f"step_{step:08d}"


def checkpoint_step(folder: Path) -> int | None:
    """The step in the name of a checkpoint's folder; None for any other name."""
    found = _NAME.fullmatch(folder.name)
    return int(found[1]) if found else None


def committed_checkpoints(run_dir: Path) -> list[Path]:
    """Checkpoints of a run that were written to the end, oldest first."""
    if not run_dir.is_dir():
        return []
    found = [p for p in run_dir.iterdir() if _NAME.fullmatch(p.name) and (p / "COMMIT").is_file()]
    return sorted(found, key=lambda p: int(p.name.split("_")[1]))


def newest_checkpoint(place: Path) -> Path | None:
    """``place`` itself if it is a committed checkpoint, else the newest one in it, else None."""
    if (place / "COMMIT").is_file():
        return place
    return next(reversed(committed_checkpoints(place)), None)


def find_weights(path: str | Path, *, ema: bool = False) -> Path:
    """The file or folder of weights that a path stands for.

    A run's folder stands for its newest checkpoint. Of a checkpoint, ours or one of Open-Sora 1.x (``model``,
    ``ema.pt``), ``ema`` chooses the averaged weights.

    Raises:
        ValueError: if there are none, or several and nothing says which.
    """
    place = Path(path)
    if place.is_file():
        return place
    if not place.is_dir():
        hint = "check the path"
        if _HUB_NAME.fullmatch(str(path)):
            hint += f", or download it: hf download {path} --local-dir DIR"
        raise ValueError(
            f"got checkpoint {str(path)!r}, which is not on disk; expected a file or a folder; {hint}"
        )
    if (place / "adapter_config.json").is_file():
        raise ValueError(
            f"got checkpoint {str(path)!r}, which holds LoRA adapters; expected the weights of a whole model; merge "
            "the adapters into it (peft: merge_and_unload) and save that with save_pretrained"
        )
    if _first(place, _USUAL_SAFE + _USUAL_PICKLES) is not None:
        return place
    checkpoint = newest_checkpoint(place)
    if checkpoint is not None:
        return checkpoint / ("ema" if ema else "model")
    if (place / "model").exists() and not _NAME.fullmatch(
        place.name
    ):  # such a one without COMMIT is cut off
        return _averages(place) if ema else place / "model"
    weight_file(place)
    return place


def weight_file(place: Path) -> Path:
    """The file to begin with: ``place`` itself, or a folder's file of weights or index of its shards."""
    if place.is_file():
        return place
    for usual, patterns in ((_USUAL_SAFE, _SAFE), (_USUAL_PICKLES, _PICKLES)):
        file = _first(place, usual) or _only(place, patterns)
        if file is not None:
            return file
    raise ValueError(
        f"got checkpoint {str(place)!r}, which holds no weights; expected a file of weights, a folder with one (or "
        "with shards and their index), a run's folder or a committed checkpoint; check the path"
    )


def weight_files(place: Path) -> list[Path]:
    """All files of the weights at a place: one, or an index and the shards that it names."""
    first = weight_file(place)
    if not first.name.endswith(".index.json"):
        return [first]
    return [first, *(first.parent / shard for shard in sorted(set(shard_of(first).values())))]


def shard_of(index: Path) -> dict[str, str]:
    """Tensor -> file beside the index, all of which are there.

    Raises:
        ValueError: if it is no index, or names files that are absent or in other folders.
    """
    try:
        places: dict[str, str] = dict(json.loads(index.read_text())["weight_map"])
        names = sorted(set(places.values()))
        if not names or not all(isinstance(name, str) for name in names):
            raise TypeError(f"files {names}")
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"got {index}, which is not an index of shards ({error!r}); expected JSON with a weight_map; download it "
            "again"
        ) from None
    outside = [name for name in names if Path(name).name != name]
    if outside:
        raise ValueError(
            f"got {index}, which names {outside[0]!r}; expected files of its own folder; do not use weights from this "
            "source"
        )
    absent = [name for name in names if not (index.parent / name).is_file()]
    if absent:
        raise ValueError(
            f"got {index}, of whose {len(names)} shards {len(absent)} are absent ({', '.join(absent[:4])}); expected "
            "all of them beside it; download or copy the rest"
        )
    return places


def flush(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _first(folder: Path, names: tuple[str, ...]) -> Path | None:
    return next((folder / name for name in names if (folder / name).is_file()), None)


def _only(folder: Path, patterns: tuple[str, ...]) -> Path | None:
    """The one file of the first pattern that any fit; several are refused."""
    for pattern in patterns:
        found = sorted(
            p for p in folder.glob(pattern) if not p.name.startswith(("optim", "pytorch_optim"))
        )
        if len(found) > 1:
            names = ", ".join(p.name for p in found[:6])
            raise ValueError(
                f"got {folder}, which holds {len(found)} files of weights ({names}{', ...' if found[6:] else ''}) "
                "and no index of them; expected one; pass the path of the file"
            )
        if found:
            return found[0]
    return None


def _averages(checkpoint: Path) -> Path:
    for name in _AVERAGES:
        if (checkpoint / name).exists():
            return checkpoint / name
    raise ValueError(
        f"got checkpoint {str(checkpoint)!r} without averaged weights; expected one of {list(_AVERAGES)} beside model; "
        "take the trained weights (use_ema=False)"
    )

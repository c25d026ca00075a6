"""Paths of weights: files, folders, runs and their checkpoints, checkpoints of Open-Sora 1.x."""

from __future__ import annotations

import re
from pathlib import Path

from .hub import WEIGHTS, describe_missing, is_optimizer, local_path
from .tensor_file import ShardIndex, is_index

_NAME = re.compile(r"step_(\d{8,})")
_DAMAGED_NAME = re.compile(r"step_\d{8,}\.damaged(-\d+)?")

# Names that Hugging Face and ColossalAI write.
_KNOWN_SAFETENSORS = tuple(patterns[0] for patterns in WEIGHTS.safetensors[:-1])
_KNOWN_PICKLES = (
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
    "diffusion_pytorch_model.bin",
    "diffusion_pytorch_model.bin.index.json",
)
# In the order of the search: safetensors first; indexes of variants as in INDEX_NAME.
_WEIGHTS = (
    *_KNOWN_SAFETENSORS,
    "*.safetensors.index.json",
    "*.safetensors.index.*.json",
    "*.safetensors",
    *_KNOWN_PICKLES,
    "*.index.json",
    "*.index.*.json",
    "*.pt",
    "*.pth",
    "*.bin",
)
LOG = "train.log"
"""The log in a run's folder, from the run's start on."""
# Next to LoRA adapters, as peft names it.
ADAPTER_CONFIG = "adapter_config.json"
_EMA_WEIGHTS = ("ema.safetensors", "ema", "ema.pt")


def checkpoint_name(step: int) -> str:
    """The folder of the checkpoint written after ``step`` optimizer steps."""
    return f"step_{step:08d}"


def checkpoint_step(folder: Path) -> int | None:
    """The step in the name of a checkpoint's folder; None for any other name."""
    match = _NAME.fullmatch(folder.name)
    return int(match[1]) if match else None


def is_committed(folder: Path) -> bool:
    """True if the save of a checkpoint was completed, or if that cannot be read now."""
    try:
        return (folder / "COMMIT").is_file()
    except OSError:
        return True


def committed_checkpoints(run_dir: Path) -> list[Path]:
    """Checkpoints of a run whose save was completed, oldest first.

    Raises:
        ValueError: if the folder cannot be read now.
    """
    named = [path for path in _content(run_dir) if checkpoint_step(path) is not None]
    return sorted(filter(is_committed, named), key=lambda path: checkpoint_step(path) or 0)


def all_checkpoints(run_dir: Path) -> list[Path]:
    """Checkpoints of a run, also interrupted ones and those set aside as damaged."""
    return [
        path
        for path in _content(run_dir)
        if checkpoint_step(path) is not None or _DAMAGED_NAME.fullmatch(path.name)
    ]


def had_checkpoints(run_dir: Path) -> bool:
    """True if a checkpoint was ever committed in a run's folder, even if none is left of it.

    ``latest`` is written after each commit. An interrupted first save leaves only ``.partial-*``,
    or a folder without ``COMMIT``.
    """
    names = [path.name for path in _content(run_dir)]
    has_traces = "latest" in names or any(map(_DAMAGED_NAME.fullmatch, names))
    return has_traces or bool(committed_checkpoints(run_dir))


def newest_checkpoint(path: Path) -> Path | None:
    """``path`` itself if it is a committed checkpoint, else the newest one in it, else None."""
    if is_committed(path):
        return path
    return next(reversed(committed_checkpoints(path)), None)


def _content(run_dir: Path) -> list[Path]:
    """Files and folders in a run's folder; none where there is no such folder."""
    try:
        return list(run_dir.iterdir()) if run_dir.is_dir() else []
    except OSError as error:
        raise ValueError(
            f"got {run_dir}, which cannot be read now ({error.strerror}); expected a run's folder; "
            "check the disk and the permissions, then start again"
        ) from None


def find_weights(path: str | Path, *, ema: bool = False, allow_pickle: bool = False) -> Path:
    """Resolve a path, or a name on the Hugging Face hub, to a file or folder of weights.

    A run's folder resolves to its newest checkpoint, ``owner/repository[/path][@revision]`` to the
    hub's cache, where it is not on disk.

    Args:
        ema: choose the EMA weights of a checkpoint, ours or of Open-Sora 1.x (``ema.pt``).
        allow_pickle: also fetch pickled weights from the hub.

    Raises:
        ValueError: if there are no weights, or several files without an index.
    """
    name, path = str(path), local_path(path, allow_pickle=allow_pickle)
    if path.is_file():
        return path
    if not path.is_dir():
        raise ValueError(
            f"got checkpoint {name!r}, which is not on disk ({describe_missing(name)}); expected a "
            "file, a folder, or a name on the hub, whose first part is no folder here; check the "
            "path"
        )

    _refuse_adapters(path, name)
    if any((path / name).is_file() for name in _KNOWN_SAFETENSORS + _KNOWN_PICKLES):
        return path

    checkpoint = newest_checkpoint(path)
    if checkpoint is not None:
        part = checkpoint / ("ema" if ema else "model")
        # Their tensors fit no model by name, which would be reported as a model that differs.
        _refuse_adapters(part, name)
        return part

    # A folder step_... without COMMIT is an interrupted save of ours, not one of Open-Sora 1.x.
    if (path / "model").exists() and checkpoint_step(path) is None:
        return _ema_weights(path) if ema else path / "model"

    weight_file(path)
    return path


def _refuse_adapters(folder: Path, name: str) -> None:
    """Raise ValueError if a folder holds LoRA adapters, which need the weights of a model."""
    if (folder / ADAPTER_CONFIG).is_file():
        raise ValueError(
            f"got checkpoint {name!r}, which holds LoRA adapters; expected the weights of a whole "
            f"model; pass the model that they are for, and --lora {name}, in a training "
            f"lora.load={name}, or merge them: "
            f"opensora-sp convert MODEL OUT --merge-lora {name}"
        )


def weight_file(path: Path) -> Path:
    """The first file to open: ``path`` itself, or a folder's file of weights or index of shards.

    Raises:
        ValueError: if there is none, or several files without an index.
    """
    if path.is_file():
        return path

    for pattern in _WEIGHTS:
        files = [file for file in sorted(path.glob(pattern)) if not is_optimizer(file.name)]
        if len(files) > 1:
            names = ", ".join(file.name for file in files[:6])
            more = ", ..." if len(files) > 6 else ""
            raise ValueError(
                f"got {path}, which holds {len(files)} files of weights ({names}{more}) and no "
                "index of them; expected one; pass the path of the file"
            )
        if files:
            return files[0]

    is_run = (path / LOG).is_file()
    reason = " yet, since its training has saved no checkpoint" if is_run else ""
    raise ValueError(
        f"got checkpoint {str(path)!r}, which holds no weights{reason}; expected a file of "
        "weights, a folder with one (or with shards and their index), a run's folder or a "
        "committed checkpoint; check the path"
    )


def weight_files(path: Path) -> list[Path]:
    """All files of the weights at a path: one, or an index and its shards."""
    first = weight_file(path)
    if not is_index(first):
        return [first]

    index = ShardIndex.read(first)
    index.check_complete()
    return [first, *index.files]


def _ema_weights(checkpoint: Path) -> Path:
    for name in _EMA_WEIGHTS:
        if (checkpoint / name).exists():
            return checkpoint / name
    raise ValueError(
        f"got checkpoint {str(checkpoint)!r} without EMA weights; expected one of "
        f"{list(_EMA_WEIGHTS)} next to model; take the trained weights (use_ema=False, --no-ema)"
    )

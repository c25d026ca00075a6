"""Which checkpoint a run resumes from: the newest that is whole and equal on all ranks.

Saves refuse weights that are not finite, so a whole checkpoint is finite. One that contradicts its
own digests is set aside. One that cannot be read now, or is of
another format, is passed over and stays as it is. Where a checkpoint was once committed and none
can be resumed, every start raises an error, until the user asks for a start from step 0.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist

from opensora_sp.checkpoint import (
    DamagedCheckpointError,
    checkpoint_step,
    committed_checkpoints,
    newest_checkpoint,
    on_rank_0,
    verify,
)
from opensora_sp.checkpoint.checkpoint_folder import read_commit, set_aside
from opensora_sp.checkpoint.hub import describe_missing
from opensora_sp.checkpoint.paths import all_checkpoints, had_checkpoints

logger = logging.getLogger(__name__)


def find_checkpoint(run_dir: Path, resume: str) -> Path | None:
    """The checkpoint of ``--resume auto|none|PATH``; None for ``none`` and a new folder.

    ``auto`` skips checkpoints that are visibly damaged, without reading large files.

    Raises:
        ValueError: if ``auto`` finds no whole checkpoint where there once was one; if PATH is
            neither a committed checkpoint nor a folder that holds one, or it is damaged, or
            ``run_dir`` holds newer ones.
    """
    if resume == "none":
        return None
    if resume == "auto":
        return find_good(run_dir, thorough=False).or_raise(run_dir)

    checkpoint = newest_checkpoint(Path(resume))
    if checkpoint is None:
        reason = "holds no committed checkpoint"
        if not Path(resume).exists():
            reason = f"is not on disk ({describe_missing(resume)})"
        raise ValueError(
            f"got checkpoint path {resume!r}, which {reason}; expected a folder step_... or a "
            "run's folder; check the path"
        )
    _check_newest(checkpoint, run_dir)
    verify(checkpoint, thorough=False)
    return checkpoint


def _check_newest(checkpoint: Path, run_dir: Path) -> None:
    """Raise ValueError if ``run_dir`` holds a checkpoint of a later step."""
    step = checkpoint_step(checkpoint) or 0
    committed = committed_checkpoints(run_dir)
    newer = [folder for folder in committed if (checkpoint_step(folder) or 0) > step]
    if newer:
        raise ValueError(
            f"got --resume {checkpoint} while {run_dir} holds newer checkpoints, up to "
            f"{newer[-1].name}; expected the newest of them; move the newer ones away, or pass "
            "another --cfg-options outputs=..."
        )


@dataclass
class Search:
    """The newest good checkpoint of a run, and the errors of newer ones."""

    checkpoint: Path | None = None
    problems: dict[Path, ValueError] = field(default_factory=dict)

    def or_raise(self, run_dir: Path) -> Path | None:
        """The checkpoint; None in a folder that never had one.

        Raises:
            ValueError: if there once was one, and none is good.
        """
        if self.checkpoint is not None or not had_checkpoints(run_dir):
            return self.checkpoint

        reasons = [f"the newest: {error}" for error in self.problems.values()]
        reason = reasons[0] if reasons else "only its traces are left"
        raise ValueError(
            f"got {run_dir}, which had checkpoints, of which none can be resumed ({reason}); "
            "expected one; restore it, or start from step 0 with --resume none or another "
            "--cfg-options outputs=..."
        )


def find_good(run_dir: Path, *, thorough: bool = True) -> Search:
    """Look for the newest checkpoint that is whole; changes nothing.

    Args:
        thorough: read all of a checkpoint; otherwise see ``verify``.
    """
    search = Search()
    # An older checkpoint costs steps, so the newest that is good is taken.
    for candidate in reversed(committed_checkpoints(run_dir)):
        try:
            verify(candidate, thorough=thorough)
        except ValueError as error:
            search.problems[candidate] = error
        else:
            search.checkpoint = candidate
            break
    return search


def choose_checkpoint(run_dir: Path, checkpoint: Path | None, *, resume: str | None) -> Path | None:
    """The checkpoint to resume from, verified by rank 0 and visible to every rank. Collective.

    With ``resume="auto"``, the newest good one is chosen, and damaged newer ones are set aside.
    With ``"none"``, all that are left are set aside.

    Args:
        checkpoint: what ``find_checkpoint`` returned on this rank.

    Raises:
        ValueError: if ranks see different checkpoints, or none is good; for "none", if one is.
    """
    # Each rank has looked by itself, and file systems may lag behind each other.
    agree_on(checkpoint)
    chosen: list[Path | None] = [checkpoint]
    with on_rank_0("checking a checkpoint") as is_rank_0:
        if is_rank_0 and resume == "auto":
            # Reading all files takes long, so rank 0 does it for all.
            chosen = [_choose_good(run_dir)]
        elif is_rank_0 and resume == "none":
            _set_all_aside(run_dir)
        elif is_rank_0 and checkpoint is not None:
            verify(checkpoint)

    dist.broadcast_object_list(chosen, src=0)
    return chosen[0]


def _choose_good(run_dir: Path) -> Path | None:
    """The newest good checkpoint, after damaged newer ones are set aside; see ``Search``."""
    search = find_good(run_dir)
    chosen = search.or_raise(run_dir)
    for candidate, error in search.problems.items():
        # Only what its own digests refuse will never be readable.
        is_damaged = isinstance(error, DamagedCheckpointError)
        action = f"set aside as {set_aside(candidate).name}" if is_damaged else "passed over"
        logger.warning("%s; %s", error, action)
    return chosen


def _set_all_aside(run_dir: Path) -> None:
    """Begin anew in a folder without a good checkpoint; the rest of others is kept."""
    good = find_good(run_dir).checkpoint
    if good is not None:
        raise ValueError(
            f"got --resume none while {good} can be resumed; expected a folder without such a "
            "checkpoint; pass --resume auto or another --cfg-options outputs=..."
        )

    for folder in all_checkpoints(run_dir):
        logger.warning("%s is set aside as %s", folder, set_aside(folder, "previous").name)
    # It would be a trace of checkpoints that can no longer be resumed.
    (run_dir / "latest").unlink(missing_ok=True)


def agree_on(checkpoint: Path | None) -> None:
    """Raise ValueError on every rank unless all of them see the same checkpoint. Collective."""
    local = None if checkpoint is None else (checkpoint.name, read_commit(checkpoint))
    seen: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(seen, local)

    if any(other != seen[0] for other in seen):
        names = [None if other is None else other[0] for other in seen]
        raise ValueError(
            f"got different checkpoints on different ranks ({names}, rank by rank); expected the "
            "same; put the run's folder on a disk that all nodes share"
        )

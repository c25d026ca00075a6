"""Comparison of the clips of a run on all ranks, and with the checkpoint that it resumes from."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from opensora_sp.runtime.rank_info import RankInfo, differences

# What ``build.order_state`` has of the clips; the rest is of the config.
OF_CLIPS = ("num_samples", "buckets")


def agree_on_clips(clips: Mapping[str, str]) -> None:
    """Raise ValueError on every rank unless all ranks have the same clips. Collective.

    Args:
        clips: what must be equal by its name, such as a manifest's ``fingerprint``.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    gathered: list[Any] = [None] * world_size
    dist.all_gather_object(
        gathered, RankInfo(rank, world_size, socket.gethostname(), settings=clips)
    )

    different = differences(gathered, "settings")
    if different:
        raise ValueError(
            f"got different clips on different ranks: {different}; expected the same lines in the "
            "same order on every rank; copy the files of one host to the others"
        )


def by_name(fingerprint: Mapping[str, str], key: str = "dataset.manifest") -> dict[str, str]:
    """A fingerprint with the config key of its manifest in its names."""
    return {f"{key} {column}": summary for column, summary in fingerprint.items()}


def changes(ours: Mapping[str, Any], recorded: Mapping[str, Any]) -> dict[str, str]:
    """For each name that both have with different values, the two values."""
    changed = {}
    for name in ours:
        if name in recorded and ours[name] != recorded[name]:
            changed[name] = f"{name} {ours[name]} (there {recorded[name]})"
    return changed

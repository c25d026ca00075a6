"""How ``opensora-sp plan`` shows the cut of the ranks that a step with all buckets would make."""

from __future__ import annotations

from opensora_sp.config import TrainConfig
from opensora_sp.data import MicroBatch, busy_seconds
from opensora_sp.data.buckets import Buckets
from opensora_sp.data.schedule import schedule
from opensora_sp.features.build import Work
from opensora_sp.features.group_seconds import GroupSeconds
from opensora_sp.parallel.cost_model import GPUS
from opensora_sp.rank_groups import fixed_groups, nested_groups
from opensora_sp.runtime.cost_model_file import cost_model_of


def describe_cut(
    cfg: TrainConfig, world_size: int, ranks_per_node: int | None, gpu: str | None
) -> list[str]:
    """A step with one micro-batch of each bucket, at 16:9: the group and seconds of each.

    There are none for a config whose steps are not scheduled, or that leaves out a batch size.

    Args:
        ranks_per_node: None for all ranks on one node.
        gpu: a name in ``GPUS``, unless the config has a cost model; an H100 otherwise.
    """
    if not cfg.schedules_groups or cfg.bucket_config is None:
        return []
    buckets = Buckets.of(cfg.bucket_config)
    if buckets.without_batch_size:
        return []

    rates = cost_model_of(cfg.cost_model, default=GPUS[gpu or "H100"])
    per_node = ranks_per_node or world_size
    work = Work(cfg, options=cfg.parallel_options(rates))
    seconds = GroupSeconds(cfg, work, ranks_per_node=per_node)
    if isinstance(cfg.sp_size, int):
        family = fixed_groups(world_size, cfg.sp_size)
    else:
        family = nested_groups(world_size, per_node)

    step = []
    for number, entry in enumerate(buckets.kept):
        ids = tuple(range(entry.batch_size or 1))
        step.append(MicroBatch(number, 0, entry.shape_at(9 / 16), ids, 0.0, entry.name))
    assigned = schedule(step, family, seconds)
    busy = busy_seconds(assigned, world_size, seconds)

    lines = [
        f"a step with a micro-batch of each bucket, scheduled by the speeds of {rates.name} alone, "
        f"takes {busy.max():.3g} s;",
        f"the slowest rank computes {busy.max() / busy.mean() - 1:.1%} longer than the mean:",
        f"{'bucket':>14} {'clips':>6} {'ranks':>6} {'s':>8}  group",
    ]
    for one, group in assigned:
        lines.append(
            f"{one.bucket:>14} {len(one.ids):>6} {group.size:>6} {seconds(one, group):>8.3g}  "
            f"{group}"
        )
    return lines

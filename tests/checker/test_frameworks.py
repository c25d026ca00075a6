"""The checker on parallelism of torch, diffusers and this package."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from checked_model import Model, apply, check
from full_attention_models import wan
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from opensora_sp.checker import Applied
from opensora_sp.parallel import SequenceMesh, parallelize


def test_fully_sharded_parameters() -> None:
    def sharded(model: Model, group: Any) -> None:
        mesh = DeviceMesh.from_group(group, "cpu")
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)

    report = check(apply=sharded)
    assert report.ok, str(report)
    assert (report.reduction, report.compared) == ("none", 1.0)


def test_wrapped_model_whose_gradients_are_averaged_but_are_parts() -> None:
    """DDP takes the mean; gradients of a gather that takes its slice need the sum."""

    def wrapped(model: Model, group: Any) -> Applied:
        apply(model, group)
        return Applied(nn.parallel.DistributedDataParallel(model, process_group=group), "none")

    report = check(apply=wrapped)
    assert report.first_module is None
    assert set(report.gradients.values()) == {"divided by P"}
    assert len(report.gradients) == 8


def build() -> nn.Module:
    return wan(heads=4, frames=2)[0]


def batch(seed: int) -> dict[str, Any]:
    inputs = wan(heads=4, frames=2)[1]
    inputs["encoder_hidden_states"] = inputs["encoder_hidden_states"][:, :4]
    return {**inputs, "return_dict": False}


def ours(model: nn.Module, group: Any) -> str:
    parallelize(model, SequenceMesh(dist.get_world_size()))
    return "mean"


def diffusers(model: Any, group: Any) -> None:
    from diffusers import ContextParallelConfig

    # diffusers numbers the ranks by a count of devices, which is zero on CPUs.
    torch.accelerator.device_count = dist.get_world_size
    model.enable_parallelism(config=ContextParallelConfig(ulysses_degree=dist.get_world_size()))


@pytest.mark.parametrize("ranks, parallelism", [(3, ours), (2, diffusers)])
def test_video_transformer(ranks: int, parallelism: Any) -> None:
    report = check(ranks, build=build, batch=batch, apply=parallelism, seconds=120)
    assert report.ok, str(report)
    assert report.compared >= 0.9
    assert report.precision.startswith("float64")

"""ColossalAI's ZeRO optimizer on any device, with its shards reachable by parameter name."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from ._colossalai import LowLevelZeroOptimizer


class SequenceZeroOptimizer(LowLevelZeroOptimizer):
    """ZeRO stages 1 and 2 over the whole dp x sp world.

    ZeRO averages gradients over all ranks, which is the rule that the sequence-parallel collectives are made for.
    """

    def _sanity_checks(self) -> None:
        # ColossalAI insists on CUDA or NPU here; with the accelerator of this package ZeRO runs on CPU as well.
        for group in self.optim.param_groups:
            wrong = next((p for p in group["params"] if p.dtype != self._dtype), None)
            if wrong is not None:
                raise ValueError(
                    f"got parameters of {self._dtype} and of {wrong.dtype}; expected one dtype; cast the model first"
                )

    def _unscale_and_clip_grads(self, grad_groups_flat: list[Tensor], total_norm: float) -> None:
        super()._unscale_and_clip_grads(grad_groups_flat, total_norm)
        # ColossalAI leaves the fp16 loss scale in the norm that it reports.
        scale = 1.0 if self.mixed_precision_mixin is None else self.mixed_precision_mixin.get_grad_div_scale()
        self._current_grad_norm = total_norm / scale


class NamedShards:
    """A boosted model's trainable parameters by name, and what ZeRO keeps of each on this rank.

    A shard is one rank's part of a tensor that was flattened and padded to a multiple of the world size.
    """

    def __init__(self, module: nn.Module, optimizer: SequenceZeroOptimizer) -> None:
        self.optimizer = optimizer
        masters = optimizer.get_working_to_master_map()
        self.working = {name: p for name, p in module.named_parameters() if id(p) in masters}
        self.masters: dict[str, Tensor] = {name: masters[id(p)] for name, p in self.working.items()}

    def states(self) -> dict[str, dict[str, Tensor | int]]:
        """The wrapped optimizer's state per parameter name, shards and scalars alike; empty before the first step."""
        return {name: dict(self.optimizer.optim.state.get(master, {})) for name, master in self.masters.items()}

    def gather(self, name: str, shard: Tensor) -> Tensor | None:
        """The whole tensor, on the CPU of rank 0; None elsewhere. Collective."""
        whole = self.whole(name, shard)
        return whole.cpu().clone() if dist.get_rank() == 0 else None

    def whole(self, name: str, shard: Tensor) -> Tensor:
        """The whole tensor, on every rank and its device. Collective."""
        like = self.working[name]
        flat = shard.new_empty(shard.numel() * dist.get_world_size())
        dist.all_gather_into_tensor(flat, shard.contiguous())
        return flat[: like.numel()].view(like.shape)

    def gather_all(self, shards: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Whole tensors by name on rank 0, one after the other; nothing elsewhere. Collective."""
        for name, shard in shards.items():
            if (whole := self.gather(name, shard)) is not None:
                yield name, whole

    def cut(self, name: str, whole: Tensor) -> Tensor:
        """This rank's shard of a whole tensor, on the device and in the dtype of the master."""
        master, world = self.masters[name], dist.get_world_size()
        flat = F.pad(whole.reshape(-1), (0, master.numel() * world - whole.numel()))
        return flat.view(world, -1)[dist.get_rank()].to(master).clone()

    @torch.no_grad()
    def set_weight(self, name: str, whole: Tensor) -> None:
        """Put a whole fp32 tensor into the master shard and the working parameter."""
        self.masters[name].copy_(self.cut(name, whole))
        self.working[name].copy_(whole)

    def set_state(self, name: str, state: dict[str, Tensor]) -> None:
        """Replace the optimizer state of one parameter by whole tensors; scalars stay whole, integers become int."""

        def own(value: Tensor) -> Tensor | int:
            if value.ndim:
                return self.cut(name, value)
            return value.clone() if value.is_floating_point() else int(value)

        self.optimizer.optim.state[self.masters[name]] = {key: own(value) for key, value in state.items()}

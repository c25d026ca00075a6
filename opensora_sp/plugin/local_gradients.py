"""Gradients that each rank sums up locally in fp32 and that are reduced once per step.

ColossalAI reduces gradients in each backward pass, in the order in which they come. All ranks must
then run equally many passes, and sums over micro-batches are as precise as the weights. Here a
backward pass sends nothing: ranks may run any number of micro-batches, or none.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from opensora_sp.parallel.communication import communicating

from .zero_optimizer import GATHERED_BUCKETS, SequenceZeroOptimizer


class LocalGradients:
    """The sums of the gradients of one parameter group on this rank, zero at first.

    Args:
        parameters: of one dtype; in 16 bits their gradients are summed in fp32, in fp64 in fp64.

    Attributes:
        sums: ``[world, N]``. A gradient is padded to a multiple of the world size, and row ``r``
            holds the part that rank ``r`` keeps after the reduction. The parameters follow each
            other in the order of the group.
    """

    def __init__(self, parameters: list[Tensor]) -> None:
        world, dtype = dist.get_world_size(), parameters[0].dtype
        self._sizes = [-(-parameter.numel() // world) for parameter in parameters]
        self.sums = torch.zeros(
            (world, sum(self._sizes)),
            dtype=torch.promote_types(dtype, torch.float32),
            device=parameters[0].device,
        )

        ids = [id(parameter) for parameter in parameters]
        self._columns = dict(zip(ids, self.sums.split(self._sizes, dim=1), strict=True))

    def add(self, parameter: Tensor, gradient: Tensor) -> None:
        """Add a gradient ``[*]`` of one of the parameters."""
        columns, flat = self._columns[id(parameter)], gradient.reshape(-1)
        size = columns.shape[1]
        rows = flat.numel() // size

        columns[:rows].add_(flat[: rows * size].view(rows, size))
        rest = flat[rows * size :]
        if len(rest):
            columns[rows, : len(rest)].add_(rest)

    def reduce(self, max_elements: int) -> list[Tensor]:
        """Average over the ranks, in pieces of at most ``max_elements`` elements. Collective.

        Returns:
            this rank's shards, ``[n]`` of each parameter, as views of its row of ``sums``. The
            other rows keep what was sent.
        """
        world = len(self.sums)
        local_sums = self.sums[dist.get_rank()]
        if world > 1:
            # In pieces, since each is copied before it is sent.
            width = max(1, max_elements // world)
            pieces = zip(self.sums.split(width, dim=1), local_sums.split(width), strict=True)
            for columns, mean in pieces:
                self._reduce_piece(columns, mean)
        return list(local_sums.split(self._sizes))

    def _reduce_piece(self, columns: Tensor, mean: Tensor) -> None:
        """Set this rank's part ``[n]`` to its mean; the columns ``[world, n]`` are of one piece."""
        # A single column, flattened, is a view with strides, which NCCL does not take.
        received, sent = torch.empty_like(mean), columns.contiguous().flatten()
        with communicating("zero", mean.device, backward=True):
            dist.reduce_scatter_tensor(received, sent)
        # Divided after the sum, in its precision.
        torch.div(received, len(columns), out=mean)


class AccumulatingZeroOptimizer(SequenceZeroOptimizer):
    """``SequenceZeroOptimizer`` with ``LocalGradients``, at ZeRO stages 1 and 2 alike.

    A gradient is added to the sums as soon as autograd has accumulated it, and ``param.grad`` is
    freed. ``step``, ``step_if_finite``, ``clip_grad_by_norm`` and ``clip_grad_by_value`` reduce the
    sums, whichever comes first, in the same order on all ranks. A parameter without a gradient, and
    a rank without a backward pass, contribute zeros.

    No backward pass communicates, so ``no_sync`` only keeps ``step`` from doing anything.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # Both stages keep this rank's shards alone, as ColossalAI does at stage 2, where hooks call
        # _add_to_bucket for each gradient.
        super().__init__(*args, **{**kwargs, "partition_grad": True})
        self._are_reduced = False
        # In ``no_sync``.
        self._is_held = False
        self._local: dict[int, LocalGradients] = {
            group: LocalGradients(parameters)
            for group, parameters in self._working_param_groups.items()
            if parameters
        }

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, ``step`` does nothing. Gradients are accumulated locally anyway."""
        before, self._is_held = self._is_held, True
        try:
            yield
        finally:
            self._is_held = before

    @torch.no_grad()
    def _add_to_bucket(self, param: Tensor, group_id: int) -> None:
        if self._are_reduced:
            raise RuntimeError(
                "got a backward pass after the gradients of the ranks were averaged (step, "
                "clip_grad_by_norm or clip_grad_by_value); expected all passes of a step before; "
                "call zero_grad after each step"
            )
        assert param.grad is not None
        self._local[group_id].add(param, param.grad)
        # Freed at once, so that memory holds the sums and a few gradients.
        param.grad = None

    def _reduce_grad(self, partition_grad: bool) -> None:
        """Called at the end of a backward pass: the reduction waits for the step."""

    def _average_gradients(self) -> None:
        """Give ColossalAI's stores this rank's shards of the mean gradients. Collective, once."""
        if self._are_reduced:
            return
        self._are_reduced = True

        max_elements = GATHERED_BUCKETS * self._reduce_bucket_size
        for group, local in self._local.items():
            shards = local.reduce(max_elements)
            weights = self._master_param_groups_of_current_rank[group]
            parameters = self._working_param_groups[group]
            for parameter, shard, weight in zip(parameters, shards, weights, strict=True):
                store = self.pid_to_grad_store[id(parameter)]
                # Without master weights, a gradient has the dtype of the model's weights.
                gradient = shard.to(weight.dtype)
                store.append_gradients_by_param_id(gradient, group, id(parameter))

    def step(self, closure: None = None) -> None:
        if self._is_held:
            return
        self._average_gradients()
        super().step(closure)

    def step_if_finite(self, loss: Tensor) -> Tensor:
        self._average_gradients()
        return super().step_if_finite(loss)

    def _gradients(self) -> list[Tensor]:
        self._average_gradients()
        return super()._gradients()

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        for local in self._local.values():
            # In place: the columns of parameters are views of it.
            local.sums.zero_()
        self._are_reduced = False

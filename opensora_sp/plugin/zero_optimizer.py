"""ColossalAI's ZeRO optimizer on any device, with its shards reachable by parameter name."""

from __future__ import annotations

from contextlib import nullcontext
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from opensora_sp.checkpoint.zero_shards import NamedShards
from opensora_sp.parallel.communication import communicating

from ._colossalai import LowLevelZeroOptimizer, get_accelerator
from .fused_step import Bucket, can_fuse, flattened, fused, in_buckets
from .loss_scale import LossScale

# Weights are gathered in pieces that are as large as so many buckets of gradients.
GATHERED_BUCKETS = 8


class SequenceZeroOptimizer(LowLevelZeroOptimizer):
    """ZeRO stages 1 and 2 over the whole dp x sp world.

    ZeRO averages gradients over all ranks, which is the rule that the sequence-parallel collectives
    are made for.

    With torch's Adam or AdamW a step is a few kernels for all parameters, on CPU too, and the host
    waits for none of them: see ``is_fused``. Other optimizers take ColossalAI's step.
    """

    # Set by the plugin, which knows the parameters' names.
    shards: NamedShards

    mixed_precision_mixin: Any
    # A number after ColossalAI's step.
    _current_grad_norm: Tensor | float | None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Parameters in the bucket, with the stream on which each gradient was accumulated.
        self._grad_streams: list[tuple[Tensor, Any]] = []
        self._buckets: list[Bucket] = []
        if isinstance(self.optim, torch.optim.Adagrad):
            # Its state exists from the start, so far of whole weights.
            sharded = torch.optim.Adagrad(self.optim.param_groups, **self.optim.defaults)
            self.optim.state = sharded.state

        self._loss_scale: LossScale | None = None
        if self._dtype is torch.float16:
            scaler = self.mixed_precision_mixin.grad_scaler
            self._loss_scale = LossScale(scaler, self._has_overflow)
            self.mixed_precision_mixin = self._loss_scale

    def _create_master_param_current_rank(self, param_list: list[Tensor]) -> list[Tensor]:
        shards: list[Tensor] = super()._create_master_param_current_rank(param_list)
        if not self._master_weights:
            # They are views of the model's weights.
            return shards

        # One buffer, so that a step casts and gathers all weights in a few kernels.
        views = flattened(shards)
        for shard, view in zip(shards, views, strict=True):
            working = self.master_to_working_param.pop(id(shard))
            self.link_master_and_working_param(view, working)
        return views

    def _sanity_checks(self) -> None:
        # ColossalAI insists on CUDA or NPU here; with the accelerator of this package ZeRO runs on
        # CPU as well.
        for group in self.optim.param_groups:
            wrong = next((p for p in group["params"] if p.dtype != self._dtype), None)
            if wrong is not None:
                raise ValueError(
                    f"got parameters of {self._dtype} and of {wrong.dtype}; expected one dtype; "
                    "cast the model first"
                )

    def backward(self, loss: Tensor, inputs: Any = None, retain_graph: bool = False) -> None:
        """Accumulate and reduce gradients, as ColossalAI does; but the host does not wait for them.

        ColossalAI's method ends with a synchronization of the device. Here the compute stream
        waits for the stream of the reduction, see ``_reduce_grad``.
        """
        # Stage 2 keeps only this rank's shard of a gradient, which a later pass could not be added
        # to.
        assert self.require_grad_sync or not self._partition_grads, "no_sync needs ZeRO stage 1"
        if self.mixed_precision_mixin is not None:
            loss = self.mixed_precision_mixin.pre_backward(loss)

        with nullcontext() if self._backward_context is None else self._backward_context():
            loss.backward(inputs=inputs, retain_graph=retain_graph)
        if self.require_grad_sync:
            self._reduce_grad(self._partition_grads)

    def _add_to_bucket(self, param: Tensor, group_id: int) -> None:
        super()._add_to_bucket(param, group_id)
        self._grad_streams.append((param, get_accelerator().current_stream()))

    def _run_reduction(self) -> None:
        self._wait_for_gradients()
        if self._overlap_communication:
            # On a separate stream, which _reduce_grad waits for.
            super()._run_reduction()
            return

        with communicating("zero", self._device(), backward=True):
            super()._run_reduction()

    def _wait_for_gradients(self) -> None:
        """Let the current stream wait for the streams on which the bucket's gradients were summed.

        ColossalAI reads all gradients of a bucket on the stream of the last one. Where autograd
        uses several streams, nothing else orders these.
        """
        current = get_accelerator().current_stream()
        others = [(param, stream) for param, stream in self._grad_streams if stream != current]
        self._grad_streams.clear()
        for stream in {stream for _, stream in others}:
            current.wait_stream(stream)

        for param, _ in others:
            # The bucket drops them as soon as it has queued what reads them.
            if param.grad is not None:
                param.grad.record_stream(current)

    def _reduce_grad(self, partition_grad: bool) -> None:
        super()._reduce_grad(partition_grad)
        if self._overlap_communication:
            with communicating("zero", self._device(), backward=True):
                for store in self.pg_to_bucket_store.values():
                    torch.cuda.current_stream().wait_stream(store.comm_stream)

    @property
    def is_fused(self) -> bool:
        """True if ``step`` uses fused kernels: with torch's Adam or AdamW, unless its options or
        ZeRO's ask for another way.

        The former are ``foreach``, ``differentiable`` and ``fused=False``; the latter are weights
        on the CPU, gathered asynchronously, in fp8, or without fp32 master weights.
        """
        if self._cpu_offload or self._overlap_allgather or self._fp8_communication:
            return False
        return self._master_weights and can_fuse(self.optim)

    def step(self, closure: None = None) -> None:
        if self.is_fused and closure is None:
            if self.require_grad_sync:
                self._fused_step(None)
            return

        super().step(closure)

    def _device(self) -> torch.device:
        return torch.device(get_accelerator().name)

    def step_if_finite(self, loss: Tensor) -> Tensor:
        """``step``, unless the loss or a gradient of any rank is infinite or NaN: then all ranks
        skip it.

        A skipped step leaves parameters, moments and fp32 master weights as they are. Gradients are
        cleared in either case. Non-finite values reach all ranks in the sum of squares of the
        gradient norm. Where ``is_fused``, that is the only reduction of a step, which is skipped on
        the device, and the host does not wait for it.

        Args:
            loss: a scalar, of this rank or of all.

        Returns:
            whether the step was taken, a boolean ``[]`` on the device. In fp16 it is not where the
            loss scale was too large, either.
        """
        # 0 where the loss is finite, else NaN, so that it travels in the sum of squares without
        # another collective.
        witness = (loss.detach().double() * 0.0).sum()
        if self.is_fused and self.require_grad_sync:
            taken = self._fused_step(witness)
        else:
            taken = torch.tensor(self._step_if_finite_on_host(witness), device=loss.device)

        self.zero_grad()
        return taken

    # A step on the device

    @torch.no_grad()
    def _fused_step(self, witness: Tensor | None) -> Tensor:
        """The step where ``is_fused``; returns whether it was taken, a boolean ``[]``.

        Without a ``witness``, only fp16 skips steps.
        """
        gradients = self._give_gradients_to_master_weights()
        squares = self._sum_of_squares(gradients, witness)
        finite, norm = squares.isfinite(), squares.sqrt()
        skips = witness is not None or self._loss_scale is not None

        divisor = self._gradient_divisor(norm)
        with fused(self.optim, divisor, (~finite).float() if skips else None):
            self.optim.step()
        for weights in self._master_param_groups_of_current_rank.values():
            for weight in weights:
                weight.grad = None

        if self._loss_scale is not None:
            norm = norm / self._loss_scale.scale
            self._loss_scale.update(~finite)
        if skips:
            before = self._current_grad_norm
            # The log shows the norm of the last step that was taken.
            norm = torch.where(finite, norm, 0.0 if before is None else before)
        self._current_grad_norm = norm

        self._gather_weights()
        return finite

    def _give_gradients_to_master_weights(self) -> list[Tensor]:
        """Set ``grad`` of the master weights to fp32 copies; returns this rank's gradients.

        Parameters without a gradient, as in dropped layers, are left out.
        """
        weights, gradients = [], []
        for group, shards in self._master_param_groups_of_current_rank.items():
            for working, shard in zip(self._working_param_groups[group], shards, strict=True):
                gradient = self.get_working_grad_by_param_id(id(working))
                if gradient is not None:
                    weights.append(shard)
                    gradients.append(gradient)

        copies = gradients
        if gradients and gradients[0].dtype != torch.float32:
            total = sum(weight.numel() for weight in weights)
            buffer = weights[0].new_empty(total)
            copies = list(buffer.split([weight.numel() for weight in weights]))
            torch._foreach_copy_(copies, gradients)
        for weight, copy in zip(weights, copies, strict=True):
            weight.grad = copy
        return gradients

    def _sum_of_squares(self, gradients: list[Tensor], witness: Tensor | None = None) -> Tensor:
        """The sum over all gradients of all ranks, float32 ``[]``. Collective."""
        # Ranks without a gradient take part as well.
        total = torch.zeros((), dtype=torch.float64, device=self._device())
        if gradients:
            norms = torch._foreach_norm(gradients, 2, dtype=torch.float64)
            total += torch.stack(norms).square().sum()
        if witness is not None:
            total += witness

        # As in ColossalAI. Second moments are fp32: a sum that overflows is not finite for them.
        squares = total.float()
        # Of shards: each rank has summed other numbers.
        dist.all_reduce(squares)
        return squares

    def _gradient_divisor(self, norm: Tensor) -> Tensor | None:
        """The divisor of gradients of this norm, for the loss scale and for clipping."""
        scale = None if self._loss_scale is None else self._loss_scale.scale
        if self._clip_grad_norm <= 0.0:
            return scale

        unscaled = norm if scale is None else norm / scale
        excess = (unscaled + 1e-6) / self._clip_grad_norm
        # NaN is not clipped.
        divisor = torch.where(excess > 1, excess, 1.0)
        return divisor if scale is None else divisor * scale

    def _gather_weights(self) -> None:
        """Set the model's weights to the master weights of all ranks."""
        self._buckets = self._buckets or self._make_buckets()
        with communicating("zero", self._device()):
            for bucket in self._buckets:
                bucket.gather()

    def _make_buckets(self) -> list[Bucket]:
        all_shards = self._master_param_groups_of_current_rank
        max_elements = GATHERED_BUCKETS * self._reduce_bucket_size
        if self._dtype != torch.float32 or dist.get_world_size() == 1:
            # They fit where fp32 copies of the gradients have been, or are gathered in place.
            shards_of_rank = chain.from_iterable(all_shards.values())
            max_elements = max(max_elements, sum(shard.numel() for shard in shards_of_rank))

        buckets: list[Bucket] = []
        for group, shards in all_shards.items():
            params = self._working_param_groups[group]
            whole = [self._working_param_to_padded_working_param[p] for p in params]
            buckets += in_buckets(zip(shards, whole, strict=True), max_elements)
        return buckets

    def _has_overflow(self) -> Tensor:
        return ~self._sum_of_squares(self._gradients()).isfinite()

    # ColossalAI's step

    def _step_if_finite_on_host(self, witness: Tensor) -> bool:
        """Take ColossalAI's ``step`` if all is finite, which the host reads first."""
        if not self.require_grad_sync:
            return False

        finite = self._sum_of_squares(self._gradients(), witness).isfinite()
        if finite:
            self.step()
        elif self._loss_scale is not None:
            self._loss_scale.update(~finite)
        return bool(finite)

    def clip_grad_by_norm(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip the gradients of the next ``step`` to a global norm; return the norm before.

        ColossalAI's method clips the gradients of the fp32 master weights, which do not exist
        before ``step``.

        Raises:
            ValueError: if ``norm_type`` is not 2.
        """
        if norm_type != 2.0:
            raise ValueError(
                f"got norm_type {norm_type}; expected 2, the norm that is summed over shards; "
                "leave it out"
            )

        gradients = self._gradients()
        norm = self._sum_of_squares(gradients).sqrt() / self._scale()
        # Read, because a factor on the device would be rounded to the precision of the gradients.
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0).item()
        if gradients:
            torch._foreach_mul_(gradients, factor)
        return norm

    def clip_grad_by_value(self, clip_value: float, *args: Any, **kwargs: Any) -> None:
        """Clip each number of the gradients of the next ``step``."""
        # Gradients still have fp16's loss scale; the limit is for those without it.
        limit = float(clip_value * self._scale())
        for gradient in self._gradients():
            gradient.clamp_(-limit, limit)

    def _gradients(self) -> list[Tensor]:
        """This rank's shards of the gradients, as reduced."""
        gradients = []
        for group in range(self.num_param_groups):
            gradients += self.get_working_grads_by_group_id(group)
        return gradients

    def _scale(self) -> Tensor | float:
        return 1.0 if self._loss_scale is None else self._loss_scale.scale

    def loss_scale_state(self) -> dict[str, float] | None:
        """The state of fp16's dynamic loss scale, as JSON; None in other precisions."""
        return None if self._loss_scale is None else self._loss_scale.state()

    def set_loss_scale_state(self, state: dict[str, float] | None) -> None:
        """Restore a saved loss scale, if there is one and the precision is fp16."""
        if self._loss_scale is not None and state is not None:
            self._loss_scale.load(state)

    def _unscale_and_clip_grads(self, grad_groups_flat: list[Tensor], total_norm: float) -> None:
        super()._unscale_and_clip_grads(grad_groups_flat, total_norm)
        # ColossalAI leaves the fp16 loss scale in the norm that it reports.
        scale = 1.0 if self._loss_scale is None else self._loss_scale.get_grad_div_scale()
        self._current_grad_norm = total_norm / scale

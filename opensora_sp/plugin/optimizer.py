"""ColossalAI's ZeRO optimizer on any device, with its shards reachable by parameter name."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from typing import Any

import torch
from torch import Tensor

from opensora_sp.checkpoint import NamedShards
from opensora_sp.parallel.debug.comm_timing import communicating

from ._colossalai import LowLevelZeroOptimizer, get_accelerator


class _NotFiniteError(Exception):
    """Leaves ZeRO's step before it changes anything."""


class SequenceZeroOptimizer(LowLevelZeroOptimizer):
    """ZeRO stages 1 and 2 over the whole dp x sp world.

    ZeRO averages gradients over all ranks, which is the rule that the sequence-parallel collectives
    are made for.
    """

    # Set by the plugin, which knows the parameters' names.
    shards: NamedShards

    # In ``step_if_finite``: zero, or NaN if the loss is not finite.
    _witness: Tensor | None = None
    _step_taken = False
    _current_grad_norm: float | None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Parameters in the bucket, with the stream on which each gradient was accumulated.
        self._grad_streams: list[tuple[Tensor, Any]] = []

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
            # On a stream of its own, which _reduce_grad waits for.
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

    def step(self, closure: None = None) -> None:
        # The new weights are gathered between the end of the wrapped optimizer's step and that of
        # this one.
        with ExitStack() as gathering:

            def gather_next(*_: Any) -> None:
                gathering.enter_context(communicating("zero", self._device()))

            handle = self.optim.register_step_post_hook(gather_next)
            gathering.callback(handle.remove)
            super().step(closure)

    def _device(self) -> torch.device:
        return torch.device(get_accelerator().name)

    def step_if_finite(self, loss: Tensor) -> bool:
        """``step``, unless the loss or a gradient of any rank is infinite or NaN: then all ranks
        skip it.

        A skipped step leaves parameters, moments and fp32 master weights as they are. Gradients are
        cleared in either case. Non-finite values reach all ranks in the sum of squares of ZeRO's
        gradient norm, so there is no further communication or synchronization.

        Args:
            loss: a scalar, of this rank or of all.

        Returns:
            whether the step was taken. In fp16 it is not where the loss scale was too large,
            either.
        """
        norm = self._current_grad_norm
        self._witness, self._step_taken = loss.detach().double() * 0.0, False
        try:
            self.step()
        except _NotFiniteError:
            self._current_grad_norm = norm
            # As ``step`` ends.
            for group, weights in self._master_param_groups_of_current_rank.items():
                self.optim.param_groups[group]["params"] = weights
                for master_weight in weights:
                    master_weight.grad = None
        finally:
            self._witness = None

        self.zero_grad()
        return self._step_taken

    def _compute_grad_norm(self, dp_pg: Any, gradients: list[Tensor], norm_type: int = 2) -> float:
        if self._witness is not None:
            gradients = [*gradients, self._witness]
        norm: float = super()._compute_grad_norm(dp_pg, gradients, norm_type)
        return norm

    def clip_grad_by_norm(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        **kwargs: Any,
    ) -> Tensor:
        """Clip the gradients of the next ``step`` to a global norm; return the norm before.

        ColossalAI's method clips the gradients of the fp32 master weights, which do not exist
        before ``step``.

        Raises:
            ValueError: if ``norm_type`` is not 2, or on ``error_if_nonfinite`` the norm is not
                finite.
        """
        if norm_type != 2.0:
            raise ValueError(
                f"got norm_type {norm_type}; expected 2, the norm that is summed over shards; "
                "leave it out"
            )

        norms, clipped = [], []
        for store, gradients in self._gradient_shards():
            norms.append(self._compute_grad_norm(store.torch_pg, gradients))
            clipped += gradients
        norm = torch.tensor(norms, dtype=torch.float64).square().sum().sqrt() / self._loss_scale()
        if error_if_nonfinite and not norm.isfinite():
            raise ValueError(
                f"got a gradient norm of {norm.item()}; expected a finite one; skip this step"
            )

        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0).item()
        for gradient in clipped:
            gradient.mul_(factor)
        return norm.float()

    def clip_grad_by_value(self, clip_value: float, *args: Any, **kwargs: Any) -> None:
        """Clip each number of the gradients of the next ``step``."""
        limit = clip_value * self._loss_scale()
        for _, gradients in self._gradient_shards():
            for gradient in gradients:
                gradient.clamp_(-limit, limit)

    def _gradient_shards(self) -> Iterator[tuple[Any, list[Tensor]]]:
        """This rank's gradients, by parameter group and ColossalAI's store of them."""
        for group in range(self.num_param_groups):
            for store in self.pg_to_grad_store.values():
                yield store, store.get_working_grads_by_group_id(group)

    def _loss_scale(self) -> float:
        # get_grad_div_scale() may be called only once a step.
        return getattr(self.mixed_precision_mixin, "loss_scale", 1.0)

    def loss_scale_state(self) -> dict[str, float] | None:
        """The state of fp16's dynamic loss scale, as JSON; None in other precisions.

        ColossalAI's own ``state_dict`` of it has no step counts.
        """
        scaler = getattr(self.mixed_precision_mixin, "grad_scaler", None)
        if scaler is None:
            return None
        return {
            "scale": scaler.scale.item(),
            "growth": scaler._growth_step,
            "hysteresis": scaler._hysteresis_step,
        }

    def set_loss_scale_state(self, state: dict[str, float] | None) -> None:
        """Restore a saved loss scale, if there is one and the precision is fp16."""
        scaler = getattr(self.mixed_precision_mixin, "grad_scaler", None)
        if scaler is not None and state is not None:
            scaler._scale.fill_(state["scale"])
            scaler._growth_step = int(state["growth"])
            scaler._hysteresis_step = int(state["hysteresis"])

    def _unscale_and_clip_grads(self, grad_groups_flat: list[Tensor], total_norm: float) -> None:
        if self._witness is not None and not math.isfinite(total_norm):
            raise _NotFiniteError
        self._step_taken = True
        super()._unscale_and_clip_grads(grad_groups_flat, total_norm)
        # ColossalAI leaves the fp16 loss scale in the norm that it reports.
        self._current_grad_norm = total_norm / self._loss_scale()

"""ColossalAI's ZeRO optimizer on any device, with its shards reachable by parameter name."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from opensora_sp.checkpoint import Part, Spec
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
            # ColossalAI synchronizes on the host next. The compute stream waits as long:
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


class NamedShards:
    """A boosted model's trainable parameters by name, and what ZeRO keeps of each on this rank.

    A shard is one rank's part of a tensor that was flattened and padded to a multiple of the world
    size.
    """

    def __init__(self, module: nn.Module, optimizer: SequenceZeroOptimizer) -> None:
        self.optimizer = optimizer
        shards = optimizer.get_working_to_master_map()
        self.working = {name: p for name, p in module.named_parameters() if id(p) in shards}
        self.master_weights: dict[str, Tensor] = {
            name: shards[id(p)] for name, p in self.working.items()
        }

    def states(self) -> dict[str, dict[str, Tensor | int]]:
        """The wrapped optimizer's state by parameter name, shards and scalars; empty before the
        first step.
        """
        state = self.optimizer.optim.state
        return {name: dict(state.get(weight, {})) for name, weight in self.master_weights.items()}

    def whole(self, name: str, shard: Tensor) -> Tensor:
        """The whole tensor, on every rank and its device. Collective."""
        like = self.working[name]
        flat = shard.new_empty(shard.numel() * dist.get_world_size())
        dist.all_gather_into_tensor(flat, shard.contiguous())
        return flat[: like.numel()].view(like.shape)

    def part(self, name: str, shard: Tensor) -> Part:
        """This rank's part of a checkpoint's tensor with a parameter's shape."""
        return Part(shard, Spec(shard.dtype, tuple(self.working[name].shape)), sharded=True)

    def state_parts(self) -> dict[str, Part]:
        """The optimizer's state as parts of tensors, ``"exp_avg/<parameter>"`` and the like."""
        parts = {}
        for name, state in self.states().items():
            for kind, value in state.items():
                if isinstance(value, Tensor) and value.ndim:
                    parts[f"{kind}/{name}"] = self.part(name, value)
                elif value is not None:
                    # HybridAdam counts its steps in an int.
                    parts[f"{kind}/{name}"] = Part.whole(torch.as_tensor(value))
        return parts

    def groups(self) -> list[dict[str, Any]]:
        """The optimizer's parameter groups as JSON values: parameter names and settings."""
        names = {id(weight): name for name, weight in self.master_weights.items()}
        groups = []
        for group in self.optimizer.param_groups:
            parameters = [names[id(p)] for p in group["params"]]
            groups.append({"parameters": parameters, **_json_values(group)})
        return groups

    def check_groups(self, saved: list[dict[str, Any]], source: Any) -> None:
        """Raise ValueError unless the saved groups hold the same parameters as ours."""
        ours = self.groups()
        here, there = _group_numbers(ours), _group_numbers(saved)

        differences = [f"missing {name}" for name in here if name not in there]
        differences += [f"unexpected {name}" for name in there if name not in here]
        for name, number in here.items():
            if there.get(name, number) != number:
                differences.append(
                    f"{name} is in group {there[name]} there, in group {number} here"
                )

        if differences or len(ours) != len(saved):
            raise ValueError(
                f"got optimizer state of other parameter groups in {source} ({len(saved)} groups "
                f"there, {len(ours)} here; {', '.join(differences[:4])}); expected the same "
                "parameters in the same groups; build the optimizer as it was when the state was "
                "saved"
            )

    def check_states(self, found: dict[str, tuple[int, ...]], source: Any) -> None:
        """Raise ValueError unless tensors ``kind/<parameter>`` have the parameter's shape, or none."""
        for key, shape in found.items():
            parameter = self.working.get(key.partition("/")[2])
            if parameter is None or shape not in ((), tuple(parameter.shape)):
                wanted = "no such parameter" if parameter is None else list(parameter.shape)
                raise ValueError(
                    f"got optimizer state of another model in {source}: {key} is {list(shape)}; "
                    f"expected {wanted}; change the checkpoint or the model"
                )

    def cut(self, name: str, whole: Tensor) -> Tensor:
        """This rank's shard of a whole tensor, with the device and dtype of the master weight."""
        like, world = self.master_weights[name], dist.get_world_size()
        flat = F.pad(whole.reshape(-1), (0, like.numel() * world - whole.numel()))
        return flat.view(world, -1)[dist.get_rank()].to(like).clone()

    @torch.no_grad()
    def set_weight(self, name: str, whole: Tensor) -> None:
        """Set the fp32 master weight and the working parameter to a whole fp32 tensor."""
        self.master_weights[name].copy_(self.cut(name, whole))
        self.working[name].copy_(whole)

    def set_state(self, name: str, state: dict[str, Tensor]) -> None:
        """Replace the optimizer state of one parameter by whole tensors; integers become int."""

        def own(value: Tensor) -> Tensor | int:
            if value.ndim:
                return self.cut(name, value)
            return value.clone() if value.is_floating_point() else int(value)

        own_state = {key: own(value) for key, value in state.items()}
        self.optimizer.optim.state[self.master_weights[name]] = own_state


def _group_numbers(groups: list[dict[str, Any]]) -> dict[str, int]:
    """The number of the group that holds each parameter."""
    numbers: dict[str, int] = {}
    for number, group in enumerate(groups):
        numbers.update(dict.fromkeys(group["parameters"], number))
    return numbers


def _json_values(group: dict[str, Any]) -> dict[str, Any]:
    """The settings of a parameter group that JSON can hold; tensors become numbers."""
    values = {}
    for key, value in group.items():
        if isinstance(value, Tensor):
            value = value.item()
        if key != "params" and isinstance(value, bool | int | float | str | list | tuple | None):
            values[key] = value
    return values

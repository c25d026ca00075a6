"""fp16's dynamic loss scale, kept and updated on the device."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ._colossalai import MixedPrecisionMixin


class LossScale(MixedPrecisionMixin):
    """The rule of ColossalAI's ``DynamicGradScaler``, which the host need not wait for.

    An overflow counts, and from the ``hysteresis``-th on it lowers the scale. ``growth_interval``
    steps in a row without one raise the scale and forget the overflows.

    Args:
        scaler: a ``DynamicGradScaler``, with the constants and the initial scale.
        overflow: whether a gradient of any rank is not finite, a boolean ``[]``. Collective.
    """

    dtype = torch.float16

    def __init__(self, scaler: Any, overflow: Callable[[], Tensor]) -> None:
        self.overflow = overflow
        self.growth_factor, self.backoff_factor = scaler._growth_factor, scaler._backoff_factor
        self.growth_interval, self.hysteresis = scaler._growth_interval, scaler._hysteresis
        self.min_scale = 0.0 if scaler._min_scale is None else float(scaler._min_scale)
        self.max_scale = math.inf if scaler._max_scale is None else float(scaler._max_scale)

        # Three scalars, which stay on the device.
        self.scale: Tensor = scaler.scale.detach().clone().reshape(())
        self.good_steps = torch.zeros_like(self.scale)
        self.overflows = torch.zeros_like(self.scale)
        self._of_gradients = self.loss_scale

    @property
    def loss_scale(self) -> float:
        """The scale as a number; waits for the device."""
        return float(self.scale)

    def update(self, overflow: Tensor) -> None:
        """Adapt the scale after a step, which was skipped where ``overflow`` (boolean ``[]``)."""
        overflows = self.overflows + overflow
        good_steps = (self.good_steps + 1) * ~overflow
        grows = good_steps == self.growth_interval
        shrinks = overflow & (overflows >= self.hysteresis)

        lower = (self.scale * self.backoff_factor).clamp(min=self.min_scale)
        higher = (self.scale * self.growth_factor).clamp(max=self.max_scale)
        scale = torch.where(shrinks, lower, self.scale)
        self.scale = torch.where(grows, higher, scale)
        self.good_steps, self.overflows = good_steps * ~grows, overflows * ~grows

    def state(self) -> dict[str, float]:
        """The state as JSON values; ColossalAI's own ``state_dict`` has no step counts."""
        values = torch.stack([self.scale, self.good_steps, self.overflows])
        scale, growth, hysteresis = values.tolist()
        return {"scale": scale, "growth": int(growth), "hysteresis": int(hysteresis)}

    def load(self, state: dict[str, float]) -> None:
        """Restore a ``state``."""
        self.scale.fill_(state["scale"])
        self.good_steps.fill_(state["growth"])
        self.overflows.fill_(state["hysteresis"])

    # Called by ColossalAI

    def pre_backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return loss * self.scale

    def pre_backward_by_grad(self, tensor: Tensor, grad: Tensor) -> Tensor:
        return grad

    def should_skip_step(self) -> bool:
        overflow = self.overflow()
        self._of_gradients = self.loss_scale
        self.update(overflow)
        return bool(overflow)

    def pre_zero_grad(self) -> None:
        pass

    def get_grad_div_scale(self) -> float:
        # Of the gradients at hand: the next ones may have another.
        return self._of_gradients

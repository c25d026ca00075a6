"""Rectified flow as a scheduler of diffusers: the noise levels of a pipeline's sampler.

Its Euler steps are those of diffusers' ``FlowMatchEulerDiscreteScheduler`` at these levels. It is
no subclass: its config would have a ``shift`` and other settings that change nothing here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from diffusers import ConfigMixin, SchedulerMixin
from diffusers.configuration_utils import register_to_config

from opensora_sp.config.components import check_options
from opensora_sp.diffusion import RectifiedFlow
from opensora_sp.diffusion.process import Geometry


class OpenSoraScheduler(SchedulerMixin, ConfigMixin):
    """The timesteps and guidance of ``RectifiedFlow``.

    Diffusers' own scheduler takes its ``sigmas``, and as velocity noise minus data: the model's
    output with the other sign.

    Args:
        num_train_timesteps: N; the noise level is ``timestep / N``.
        flow: values of ``RectifiedFlow`` but for ``num_timesteps``, which this is.

    Raises:
        ValueError: for what ``RectifiedFlow`` refuses.
    """

    # Of the base classes, which have no types.
    from_config: Callable[..., OpenSoraScheduler]
    save_pretrained: Callable[..., None]

    @register_to_config
    def __init__(self, num_train_timesteps: int = 1000, flow: dict[str, Any] | None = None) -> None:
        self.flow = RectifiedFlow(
            **check_options(
                "scheduler", {**(flow or {}), "num_timesteps": num_train_timesteps}, RectifiedFlow
            )
        )

    @classmethod
    def of(cls, scheduler: dict[str, Any]) -> OpenSoraScheduler:
        """The scheduler of a config's ``scheduler=dict(type="rflow", ...)``.

        Raises:
            ValueError: for another type.
        """
        options = {key: scheduler[key] for key in scheduler if key != "type"}
        if scheduler.get("type", "rflow") != "rflow":
            raise ValueError(
                f"got scheduler.type {scheduler['type']!r} for a pipeline of diffusers; expected "
                "'rflow', as in Open-Sora 1.2 and 1.3; sample this model with scripts/inference.py"
            )
        return cls(options.pop("num_timesteps", 1000), options)

    def flow_of(
        self, num_inference_steps: int | None, guidance_scale: float | None, **further: Any
    ) -> RectifiedFlow:
        """The process with other values of its options; None keeps the config's."""
        asked = {"num_sampling_steps": num_inference_steps, "cfg_scale": guidance_scale, **further}
        changes: Any = {name: asked[name] for name in asked if asked[name] is not None}
        return replace(self.flow, **check_options("scheduler", changes, RectifiedFlow))

    def sigmas(
        self, num_inference_steps: int | None = None, *, geometry: Geometry | None = None
    ) -> list[float]:
        """The noise levels of a sampling, from 1 down.

        Args:
            num_inference_steps: by default as in the config.
            geometry: of the videos, which a timestep transform needs; its first sample counts.

        Raises:
            ValueError: without the geometry that a timestep transform needs.
        """
        flow = self.flow_of(num_inference_steps, None)
        steps = flow.sampling_timesteps(1, geometry, dtype=torch.float32, device="cpu")
        levels: list[float] = (torch.cat(steps).float() / flow.num_timesteps).tolist()
        return levels

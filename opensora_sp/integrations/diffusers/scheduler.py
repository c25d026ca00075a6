"""Rectified flow as a scheduler of diffusers.

diffusers' ``FlowMatchEulerDiscreteScheduler`` takes the same Euler steps. Its noise levels are
others: in the pinned version they end at 1/1000, are shifted twice by one constant ``shift``, and
cannot be passed. So a subclass has the levels of ``RectifiedFlow``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.configuration_utils import register_to_config

from opensora_sp.config.components import check_options
from opensora_sp.diffusion import Geometry, RectifiedFlow


class OpenSoraScheduler(FlowMatchEulerDiscreteScheduler):
    """The timesteps of ``RectifiedFlow``, with diffusers' Euler step.

    ``step`` takes diffusers' velocity, noise minus data: the model's output with the other sign.

    Args:
        num_train_timesteps: N; the noise level is ``timestep / N``.
        flow: values of ``RectifiedFlow`` but for ``num_timesteps``, which this is.

    Raises:
        ValueError: for what ``RectifiedFlow`` refuses.
    """

    # Of the base class, which has no types.
    config_name: str
    from_config: Callable[..., OpenSoraScheduler]
    save_pretrained: Callable[..., None]

    @register_to_config
    def __init__(self, num_train_timesteps: int = 1000, flow: dict[str, Any] | None = None) -> None:
        # Undecorated: the decorator would add the base class's ``shift`` to this config.
        init: Any = FlowMatchEulerDiscreteScheduler.__init__
        init.__wrapped__(self, num_train_timesteps)
        self.flow = RectifiedFlow(
            **check_options(
                "scheduler",
                {**(flow or {}), "num_timesteps": num_train_timesteps},
                RectifiedFlow,
            )
        )

    @classmethod
    def of(cls, scheduler: dict[str, Any]) -> OpenSoraScheduler:
        """The scheduler of a config's ``scheduler=dict(type="rflow", ...)``.

        Raises:
            ValueError: for another type.
        """
        options = {key: value for key, value in scheduler.items() if key != "type"}
        if scheduler.get("type", "rflow") != "rflow":
            raise ValueError(
                f"got scheduler.type {scheduler['type']!r} for a pipeline of diffusers; expected "
                "'rflow', as in Open-Sora 1.2 and 1.3; sample this model with scripts/inference.py"
            )
        return cls(options.pop("num_timesteps", 1000), options)

    def flow_of(
        self, num_inference_steps: int | None, guidance_scale: float | None
    ) -> RectifiedFlow:
        """The process with other steps and guidance; None keeps what the config has."""
        own = dict(num_sampling_steps=num_inference_steps, cfg_scale=guidance_scale)
        given: dict[str, Any] = {name: value for name, value in own.items() if value is not None}
        return replace(self.flow, **given)

    def set_timesteps(
        self,
        num_inference_steps: int | None = None,
        device: str | torch.device | None = None,
        *,
        geometry: Geometry | None = None,
    ) -> None:
        """Set the timesteps of a sampling, from N down.

        Args:
            num_inference_steps: by default as in the config.
            geometry: of the videos, which a timestep transform needs; its first sample counts.

        Raises:
            ValueError: without the geometry that a timestep transform needs.
        """
        flow = self.flow_of(num_inference_steps, None)
        found = flow.sampling_timesteps(1, geometry, dtype=torch.float32, device="cpu")
        timesteps = torch.stack([t[0] for t in found]).float()

        self.num_inference_steps = flow.num_sampling_steps
        self.timesteps = timesteps.to(device)
        sigmas = timesteps / flow.num_timesteps
        self.sigmas = torch.cat([sigmas, torch.zeros(1)]).to(device)
        self._step_index = self._begin_index = None

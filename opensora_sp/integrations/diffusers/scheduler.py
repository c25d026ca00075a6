"""Rectified flow as a scheduler of diffusers.

The Euler steps equal diffusers' ``FlowMatchEulerDiscreteScheduler``, at the noise levels of
``RectifiedFlow``. It is no subclass: its config would have a ``shift`` and other settings that
change nothing here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from diffusers import ConfigMixin, SchedulerMixin
from diffusers.configuration_utils import register_to_config
from diffusers.schedulers.scheduling_utils import SchedulerOutput
from torch import Tensor

from opensora_sp.config.components import check_options
from opensora_sp.diffusion import Geometry, RectifiedFlow


class OpenSoraScheduler(SchedulerMixin, ConfigMixin):
    """The timesteps of ``RectifiedFlow``, with diffusers' Euler step.

    ``step`` takes diffusers' velocity, noise minus data: the model's output with the other sign.

    Args:
        num_train_timesteps: N; the noise level is ``timestep / N``.
        flow: values of ``RectifiedFlow`` but for ``num_timesteps``, which this is.

    Raises:
        ValueError: for what ``RectifiedFlow`` refuses.
    """

    # Of the base classes, which have no types.
    from_config: Callable[..., OpenSoraScheduler]
    save_pretrained: Callable[..., None]
    # Noise levels are as many as the calls of the model, and latents begin as standard noise.
    order = 1
    init_noise_sigma = 1.0

    @register_to_config
    def __init__(self, num_train_timesteps: int = 1000, flow: dict[str, Any] | None = None) -> None:
        self.timesteps = self.sigmas = torch.empty(0)
        self._step_index: int | None = None
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
        options = {key: scheduler[key] for key in scheduler if key != "type"}
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
        asked = {"num_sampling_steps": num_inference_steps, "cfg_scale": guidance_scale}
        changes: Any = {name: asked[name] for name in asked if asked[name] is not None}
        return replace(self.flow, **changes)

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
        steps = flow.sampling_timesteps(1, geometry, dtype=torch.float32, device="cpu")
        timesteps = torch.cat(steps).float()

        self.num_inference_steps = flow.num_sampling_steps
        self.timesteps = timesteps.to(device)
        sigmas = timesteps / flow.num_timesteps
        self.sigmas = torch.cat([sigmas, torch.zeros(1)]).to(device)
        self._step_index = None

    def step(
        self, model_output: Tensor, timestep: Tensor, sample: Tensor, return_dict: bool = True
    ) -> SchedulerOutput | tuple[Tensor]:
        """The latents after an Euler step, in float32 rounded to the dtype of ``model_output``.

        Args:
            model_output: noise minus data, as the shape of ``sample``.
            timestep: an entry of ``timesteps``. In the first call it says where to begin; each
                further call takes the next one.
            sample: the latents before.
            return_dict: False returns a tuple.

        Raises:
            ValueError: without timesteps, or for a first one that is none of them.
        """
        if self._step_index is None:
            self._step_index = self._index_of(timestep)
        i = self._step_index
        # Timesteps may repeat after rounding, indices do not.
        self._step_index += 1
        moved = sample.float() + (self.sigmas[i + 1] - self.sigmas[i]) * model_output
        moved = moved.to(model_output.dtype)
        return SchedulerOutput(prev_sample=moved) if return_dict else (moved,)

    def _index_of(self, timestep: Tensor) -> int:
        indices = (self.timesteps == float(timestep)).nonzero()
        if len(indices) == 0:
            raise ValueError(
                f"got timestep {float(timestep):g}; expected one of {len(self.timesteps)} in "
                "timesteps; call set_timesteps, and loop over scheduler.timesteps"
            )
        return int(indices[0])

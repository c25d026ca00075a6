"""From prompts to videos, on however many processes share the model.

Legend: B prompts, c latent channels, f x h x w latent size, L text tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from opensora_sp.config import InferenceConfig, build_component
from opensora_sp.config.schema import SCHEDULERS
from opensora_sp.models import sample_numbers
from opensora_sp.models.registry import model_class
from opensora_sp.randomness import normal

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}


class Pipeline:
    """A model with its encoders and scheduler.

    The noise of a video depends on (seed, index of its prompt) alone, so the number of processes and how prompts are
    batched do not change what is sampled.
    """

    def __init__(
        self, cfg: InferenceConfig, model: nn.Module, vae: Any, text_encoder: Any, device: torch.device
    ) -> None:
        self.cfg, self.model, self.vae, self.text_encoder, self.device = cfg, model, vae, text_encoder, device
        self.flow = build_component(cfg.scheduler, SCHEDULERS)  # a DiffusionProcess
        self.dtype = torch.float64 if cfg.precision == "fp64" else torch.float32

    @torch.no_grad()
    def latents(
        self, prompts: Sequence[str], indices: Sequence[int], *, on_step: Callable[[], object] | None = None
    ) -> Tensor:
        """Sample latents ``[B, c, f, h, w]``; noise is that of ``indices``. Collective in the SP group."""
        cfg, size = self.cfg, len(prompts)
        shape = (self.vae.channels, *self.vae.latent_size(cfg.num_frames, *cfg.size))

        def noise(purpose: str, *counters: int) -> Tensor:
            drawn = torch.stack([normal(shape, cfg.seed, purpose, index, *counters) for index in indices])
            return drawn.to(self.device, self.dtype)

        z = noise("sample")
        y, mask = (part.to(self.device) for part in self.text_encoder.encode(list(prompts)))
        height, width = (torch.full((size,), float(side), device=self.device) for side in cfg.size)
        fps, names = torch.full_like(height, cfg.fps), model_class(cfg.model["type"]).sample_inputs
        numbers = sample_numbers(names, height=height, width=width, fps=fps, num_frames=cfg.num_frames)
        twice = dict(y=y, mask=mask, **numbers)
        predict = self.flow.guide(
            self.model,
            drop_caption=torch.arange(2 * size, device=self.device) >= size,
            **{name: torch.cat([value, value]) for name, value in twice.items()},
        )
        geometry = self.flow.geometry(height, width, latent_frames=z.shape[2], video_frames=cfg.num_frames)
        latents = self.flow.sample(
            predict, z, geometry=geometry, draw_noise=lambda k: noise("sample_draw", k), on_step=on_step
        )
        if not latents.isfinite().all():
            raise ValueError(
                f"got latents that are not finite for {list(prompts)}; expected numbers; check the checkpoint, or "
                "sample with precision 'fp32'"
            )
        return latents

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """Videos ``[B, 3, F, height, width]`` in [-1, 1]."""
        video = self.vae.decode(latents.float(), num_frames=self.cfg.num_frames)
        return video[..., : self.cfg.size[0], : self.cfg.size[1]].clamp(-1, 1)

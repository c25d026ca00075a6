"""From prompts to videos, on however many processes share the model.

Legend: B prompts, c latent channels, f x h x w latent size, L text tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from opensora_sp.config import InferenceConfig, build_component
from opensora_sp.config.schema import SCHEDULERS
from opensora_sp.data import read_frames, to_clip
from opensora_sp.models import sample_numbers
from opensora_sp.models.registry import model_class
from opensora_sp.randomness import normal

from .conditioning import Insertion, Prompt, insert_references, prompt_of_loop


@dataclass(frozen=True)
class Given:
    """What is given of one video: latents ``[c, f_i, h, w]``, and where their frames go."""

    references: list[Tensor]
    insertions: list[Insertion]

    def going_on(self, last: Tensor, end: Insertion) -> Given:
        """With the latents of the loop before as one more reference."""
        return Given([*self.references, last], [replace(end, reference=len(self.references)), *self.insertions])


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
        self,
        prompts: Sequence[str],
        indices: Sequence[int],
        *,
        given: Sequence[Given] | None = None,
        loop: int = 0,
        on_step: Callable[[], object] | None = None,
    ) -> Tensor:
        """Sample latents ``[B, c, f, h, w]``; noise is that of ``indices``. Collective in the SP group.

        Args:
            given: for each prompt, frames of references and where they go; those of other loops are left out.
            loop: which part of a looped video this is.
        """
        cfg, size = self.cfg, len(prompts)
        shape = (self.vae.channels, *self.vae.latent_size(cfg.num_frames, *cfg.size))

        def noise(purpose: str, *counters: int) -> Tensor:
            counters = (*counters, loop) if loop else counters
            drawn = torch.stack([normal(shape, cfg.seed, purpose, index, *counters) for index in indices])
            return drawn.to(self.device, self.dtype)

        z, levels = self._insert(noise("sample"), given, loop)
        y, mask = self._captions(prompts)
        height, width = (torch.full((size,), float(side), device=self.device) for side in cfg.size)
        fps, names = torch.full_like(height, cfg.fps), model_class(cfg.model["type"]).sample_inputs
        numbers = sample_numbers(names, height=height, width=width, fps=fps, num_frames=cfg.num_frames)
        drop = torch.arange(2 * size, device=self.device) >= size
        predict = self.flow.guide(
            self.model,
            drop_caption=drop & (cfg.negative_prompt is None),
            y=y,
            mask=mask,
            **{name: torch.cat([value, value]) for name, value in numbers.items()},
        )
        geometry = self.flow.geometry(height, width, latent_frames=z.shape[2], video_frames=cfg.num_frames)
        latents = self.flow.sample(
            predict,
            z,
            geometry=geometry,
            frame_levels=levels,
            draw_noise=lambda k: noise("sample_draw", k),
            on_step=on_step,
        )
        if not latents.isfinite().all():
            raise ValueError(
                f"got latents that are not finite for {list(prompts)}; expected numbers; check the checkpoint, or "
                "sample with precision 'fp32'"
            )
        return latents

    def _captions(self, prompts: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Text features and masks of the doubled batch: the prompts, then what guidance moves away from."""
        away = list(prompts) if self.cfg.negative_prompt is None else [self.cfg.negative_prompt] * len(prompts)
        y, mask = self.text_encoder.encode([*prompts, *away])
        return y.to(self.device), mask.to(self.device)

    def _insert(self, z: Tensor, given: Sequence[Given] | None, loop: int) -> tuple[Tensor, Tensor | None]:
        """Put given frames into the noise; the level of each frame ``[B, f]``, None where nothing is given."""
        if given is None or not any(i.loop == loop for one in given for i in one.insertions):
            return z, None
        align = getattr(self.vae, "chunk_latent_frames", None)
        placed = [
            insert_references(one_z, one.references, one.insertions, loop=loop, align=align)
            for one_z, one in zip(z, given, strict=True)
        ]
        return torch.stack([one_z for one_z, _ in placed]), torch.stack([levels for _, levels in placed]).to(z.dtype)

    @torch.no_grad()
    def given(self, prompt: Prompt) -> Given:
        """Read and encode a prompt's references, resized to the videos' size."""
        latents = []
        for path in prompt.references:
            clip = to_clip(read_frames(path), self.cfg.size)
            latents.append(self.vae.encode(clip[None].to(self.device))[0].to(self.dtype))
        return Given(latents, prompt.insertions)

    def looped(
        self,
        prompts: Sequence[Prompt],
        indices: Sequence[int],
        *,
        on_step: Callable[[], object] | None = None,
    ) -> list[Tensor]:
        """Latents of all loops, ``[B, c, f, h, w]`` each; a loop after the first begins with the end of the last."""
        cfg, parts = self.cfg, list[Tensor]()
        given = [self.given(prompt) for prompt in prompts]
        for loop in range(cfg.loop):
            if parts:
                end = Insertion(loop, 0, -cfg.condition_frame_length, 0, cfg.condition_frame_length)
                end = replace(end, edit=cfg.condition_frame_edit)
                given = [one.going_on(last, end) for one, last in zip(given, parts[-1], strict=True)]
            texts = [prompt_of_loop(prompt.text, loop) for prompt in prompts]
            parts.append(self.latents(texts, indices, given=given, loop=loop, on_step=on_step))
        return parts

    @torch.no_grad()
    def video(self, parts: Sequence[Tensor]) -> Tensor:
        """Decode the loops of one video, ``[c, f, h, w]`` each -> ``[3, F, height, width]``, overlaps left out."""
        clips = [self.decode(part[None])[0] for part in parts]
        shared = self._frames_of(self.cfg.condition_frame_length)
        return torch.cat([clips[0], *(clip[:, shared:] for clip in clips[1:])], dim=1)

    def _frames_of(self, latent_frames: int) -> int:
        """Frames of video that so many latent frames stand for."""
        counts = (n for n in range(1, self.cfg.num_frames + 1))
        return max((n for n in counts if self.vae.latent_size(n, *self.cfg.size)[0] <= latent_frames), default=0)

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """Videos ``[B, 3, F, height, width]`` in [-1, 1]."""
        video = self.vae.decode(latents.float(), num_frames=self.cfg.num_frames)
        return video[..., : self.cfg.size[0], : self.cfg.size[1]].clamp(-1, 1)

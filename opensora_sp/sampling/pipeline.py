"""From requests to latents, on however many processes share the model.

Legend: B videos, c latent channels, f x h x w latent size, L text tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from opensora_sp.config import InferenceConfig, build_component
from opensora_sp.config.schema import SCHEDULERS
from opensora_sp.data import read_frames, to_clip
from opensora_sp.diffusion import unguided
from opensora_sp.models import Text, sample_numbers
from opensora_sp.parallel import SequenceMesh

from .conditioning import Insertion, Prompt, insert_references, prompt_of_loop
from .decoding import Frames, decode, frames_of
from .requests import Request

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Given:
    """What is given of one video: latents ``[c, f_i, h, w]``, and where their frames go."""

    references: list[Tensor]
    insertions: list[Insertion]

    def going_on(self, last: Tensor, end: Insertion) -> Given:
        """With the latents of the loop before as one more reference."""
        return Given(
            [*self.references, last],
            [replace(end, reference=len(self.references)), *self.insertions],
        )


class Pipeline:
    """A model with its encoders and scheduler. Requests of a batch have one shape."""

    def __init__(
        self,
        cfg: InferenceConfig,
        model: nn.Module,
        vae: Any,
        text_encoder: Any,
        device: torch.device,
    ) -> None:
        self.cfg, self.model, self.vae, self.text_encoder, self.device = (
            cfg,
            model,
            vae,
            text_encoder,
            device,
        )
        self.flow = build_component(cfg.scheduler, SCHEDULERS)  # a DiffusionProcess
        self.guides = self.flow.cfg_scale != 1
        self.dtype = torch.float64 if cfg.precision == "fp64" else torch.float32

    @torch.no_grad()
    def latents(
        self,
        batch: Sequence[Request],
        *,
        text: Text | None = None,
        given: Sequence[Given] | None = None,
        loop: int = 0,
        on_step: Callable[[], object] | None = None,
    ) -> Tensor:
        """Sample latents ``[B, c, f, h, w]``. Collective in the SP group.

        Args:
            text: what ``encode`` made of the prompts of this loop, if it has been called.
            given: for each request, frames of references and where they go; those of other loops
                are left out.
            loop: which part of a looped video this is.
        """
        num_frames, *pixels = batch[0].shape
        shape = (self.vae.channels, *self.vae.latent_size(num_frames, *pixels))

        def noise(purpose: str, *counters: int) -> Tensor:
            drawn = [request.noise(shape, purpose, *counters, loop=loop) for request in batch]
            return torch.stack(drawn).to(self.device, self.dtype)

        z, levels = self._insert(noise("sample"), given, loop)
        height, width = (
            torch.full((len(batch),), float(side), device=self.device) for side in pixels
        )
        fps = torch.tensor([request.fps for request in batch], device=self.device)
        names = self.cfg.model_spec.model_class.sample_inputs
        numbers = sample_numbers(names, height=height, width=width, fps=fps, num_frames=num_frames)
        if self.guides:
            numbers = {name: torch.cat([value, value]) for name, value in numbers.items()}
        predict = self.flow.guide if self.guides else unguided
        latents = self.flow.sample(
            predict(self.model, y=text or self.encode(batch, loop), **numbers),
            z,
            geometry=self.flow.geometry(
                height, width, latent_frames=z.shape[2], video_frames=num_frames
            ),
            frame_levels=levels,
            draw_noise=lambda k: noise("sample_draw", k),
            on_step=on_step,
        )
        if not latents.isfinite().all():
            raise ValueError(
                "got latents that are not finite for "
                f"{[request.prompt.text for request in batch]}; expected numbers; check the "
                "checkpoint, or sample with precision 'fp32'"
            )
        return latents

    @torch.no_grad()
    def encode(self, batch: Sequence[Request], loop: int = 0) -> Text:
        """What the model is told at every step: the prompts, and with guidance behind them what it
        moves away from.

        That is the negative prompt, or else no caption. A text that several requests share is
        encoded once.
        """
        texts = [prompt_of_loop(request.prompt.text, loop) for request in batch]
        drop = torch.zeros(len(batch), dtype=torch.bool)
        if self.guides:
            drop = torch.cat(
                [drop, torch.tensor([request.negative_prompt is None for request in batch])]
            )
            texts += [
                text if r.negative_prompt is None else r.negative_prompt
                for text, r in zip(texts, batch)
            ]
        distinct = list(dict.fromkeys(texts))
        y, mask = self.text_encoder.encode(distinct)
        places = [distinct.index(text) for text in texts]
        y, mask = (torch.stack([z[place] for place in places]) for z in (y, mask))
        # The mask and what is dropped stay on the CPU, where the model counts text tokens.
        return self.model.encode_text(y.to(self.device), mask.cpu(), drop)  # type: ignore[operator]

    def tell_truncation(self, requests: Sequence[Request]) -> None:
        """Warn of texts that are longer than the model takes."""
        texts = [
            prompt_of_loop(r.prompt.text, loop) for r in requests for loop in range(self.cfg.loop)
        ]
        texts += [request.negative_prompt or "" for request in requests]
        room = self.text_encoder.max_length
        for text in dict.fromkeys(texts):
            if (count := self.text_encoder.num_tokens(text)) > room:
                logger.warning(
                    "got %d tokens, of which the model takes %d; the last are left out: %r",
                    count,
                    room,
                    text,
                )

    def _insert(
        self, z: Tensor, given: Sequence[Given] | None, loop: int
    ) -> tuple[Tensor, Tensor | None]:
        """Put given frames into the noise; the level of each frame ``[B, f]``, None where nothing
        is given.
        """
        if given is None or not any(i.loop == loop for one in given for i in one.insertions):
            return z, None
        align = getattr(self.vae, "chunk_latent_frames", None)
        placed = [
            insert_references(one_z, one.references, one.insertions, loop=loop, align=align)
            for one_z, one in zip(z, given, strict=True)
        ]
        return torch.stack([one_z for one_z, _ in placed]), torch.stack(
            [levels for _, levels in placed]
        ).to(z.dtype)

    @torch.no_grad()
    def given(self, prompt: Prompt, size: tuple[int, int]) -> Given:
        """Read and encode a prompt's references, resized to the video's size."""
        latents = []
        for path in prompt.references:
            clip = to_clip(read_frames(path), size)
            latents.append(self.vae.encode(clip[None].to(self.device))[0].to(self.dtype))
        return Given(latents, prompt.insertions)

    def looped(
        self, batch: Sequence[Request], *, on_step: Callable[[], object] | None = None
    ) -> list[Tensor]:
        """Latents of all loops, ``[B, c, f, h, w]`` each; a loop after the first begins with the
        end of the last.
        """
        cfg, parts = self.cfg, list[Tensor]()
        given = [self.given(request.prompt, request.size) for request in batch]
        told: list[str] = []
        for loop in range(cfg.loop):
            if parts:
                end = Insertion(loop, 0, -cfg.condition_frame_length, 0, cfg.condition_frame_length)
                end = replace(end, edit=cfg.condition_frame_edit)
                given = [
                    one.going_on(last, end) for one, last in zip(given, parts[-1], strict=True)
                ]
            texts = [prompt_of_loop(request.prompt.text, loop) for request in batch]
            if texts != told:
                told, text = texts, self.encode(batch, loop)
            parts.append(self.latents(batch, text=text, given=given, loop=loop, on_step=on_step))
        return parts

    def num_frames(self, request: Request) -> int:
        """Frames of the whole video, all its loops."""
        shared = frames_of(
            self.vae, self.cfg.condition_frame_length, request.num_frames, request.size
        )
        return request.num_frames + (self.cfg.loop - 1) * (request.num_frames - shared)

    def frames(
        self, batch: Sequence[Request], parts: Sequence[Tensor], mesh: SequenceMesh
    ) -> Frames:
        """Decode the latents of ``looped``; see ``decode``. Overlaps of loops are left out."""
        return decode(
            self.vae,
            parts,
            num_frames=batch[0].num_frames,
            size=batch[0].size,
            overlap=self.cfg.condition_frame_length,
            mesh=mesh,
        )

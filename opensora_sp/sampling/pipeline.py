"""From requests to latents, on the ranks that share the model.

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
from opensora_sp.config.components import SCHEDULERS
from opensora_sp.data.transforms import to_clip
from opensora_sp.data.video import read_frames
from opensora_sp.diffusion.cached_steps import (
    CachedPrediction,
    SamplingStep,
    describe_steps,
    sampling_steps,
)
from opensora_sp.diffusion.guidance import ConditioningFrames, predictions_per_step, unguided
from opensora_sp.diffusion.process import DiffusionProcess, OnStep, size_conditions
from opensora_sp.encoders import planned_whole_frames
from opensora_sp.models import Text
from opensora_sp.models.block_cache import BlockCache
from opensora_sp.parallel import SequenceMesh

from .decoding import Frames, decode
from .prompts import Prompt, prompt_of_loop
from .reference_frames import Insertion, frames_of_kind, insert_references
from .requests import Request, extra_inputs, first_frames

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PlacedReferences:
    """Conditioning frames of one video: reference latents ``[c, f_i, h, w]`` and their places."""

    references: list[Tensor]
    insertions: list[Insertion]

    def with_reference(self, latents: Tensor, insertion: Insertion) -> PlacedReferences:
        """Add a reference; ``insertion`` says where its frames are placed."""
        added = replace(insertion, reference=len(self.references))
        return PlacedReferences([*self.references, latents], [added, *self.insertions])

    def in_loop(self, loop: int) -> bool:
        """True if any frame is placed in this loop."""
        return any(insertion.loop == loop for insertion in self.insertions)


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
        self.cfg = cfg
        self.model = model
        self.vae = vae
        self.text_encoder = text_encoder
        self.device = device

        self.process: DiffusionProcess = build_component(cfg.scheduler, SCHEDULERS)
        self.dtype = torch.float64 if cfg.precision == "fp64" else torch.float32

    @torch.no_grad()
    def latents(
        self,
        batch: Sequence[Request],
        *,
        text: Text | None = None,
        conditioning: Sequence[PlacedReferences] | None = None,
        conditioning_frames: ConditioningFrames | None = None,
        loop: int = 0,
        on_step: OnStep | None = None,
    ) -> Tensor:
        """Sample latents ``[B, c, f, h, w]``. Collective in the SP group.

        Args:
            text: the result of ``encode`` for the prompts of this loop; encoded here if None.
            conditioning: for each request, its conditioning frames; other loops' are ignored.
            conditioning_frames: further inputs of the model (Open-Sora 1.3).
            loop: which part of a looped video this is.
            on_step: called after each step; may return other latents.

        Raises:
            ValueError: if the latents are not finite.
        """
        shape = (self.vae.channels, *self.vae.latent_size(*batch[0].shape))

        def noise(purpose: str, *counters: int) -> Tensor:
            drawn = [request.noise(shape, purpose, *counters, loop=loop) for request in batch]
            return torch.stack(drawn).to(self.device, self.dtype)

        z, levels = noise("sample"), None
        if conditioning is not None and any(placed.in_loop(loop) for placed in conditioning):
            z, levels = self._insert(z, conditioning, loop)

        geometry, numbers = size_conditions(
            self.process,
            self.cfg.model_spec.model_class.sample_inputs,
            batch[0].shape,
            torch.tensor([request.fps for request in batch], device=self.device),
            latent_frames=z.shape[2],
        )
        numbers |= self._extra_inputs(batch, loop)
        copies = self._copies(conditioning_frames)
        text = text or self.encode(batch, loop, copies=copies)
        steps = sampling_steps(self.process, batch[0].shape, z.shape[2])
        if described := describe_steps(steps):
            logger.info("%s", described)
        computed = [step.computed for step in steps]
        cache = None if all(computed) else BlockCache()
        predict = self._prediction(text, numbers, copies, conditioning_frames, steps, cache)
        if cache is not None:
            predict = CachedPrediction(predict, cache, computed)
        special: dict[str, Any] = {}
        if conditioning_frames is not None:
            # Not every process takes them.
            special["conditioning_frames"] = conditioning_frames
        latents = self.process.sample(
            predict,
            z,
            geometry=geometry,
            frame_levels=levels,
            **special,
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

    def _extra_inputs(self, batch: Sequence[Request], loop: int) -> dict[str, Tensor]:
        """The model's further inputs ``[B, ...]``; predictions without the prompt have them too."""
        if not self.cfg.model_spec.model_class.extra_inputs:
            return {}
        start = first_frames(self.cfg, batch[0], self.vae.latent_size)[loop]
        inputs = [extra_inputs(self.cfg, request, start) for request in batch]
        stacked = {}
        for name in inputs[0]:
            stacked[name] = torch.stack([arrays[name] for arrays in inputs]).to(self.device)
        return stacked

    def _copies(self, conditioning_frames: ConditioningFrames | None) -> int:
        """Predictions of a step; a loop without conditioning frames is guided by text alone."""
        by_frames = conditioning_frames is not None and bool(conditioning_frames.index)
        return predictions_per_step(self.process, by_frames=by_frames)

    def _prediction(
        self,
        text: Text,
        numbers: dict[str, Tensor],
        copies: int,
        conditioning_frames: ConditioningFrames | None,
        steps: Sequence[SamplingStep],
        cache: BlockCache | None,
    ) -> Callable[..., Tensor]:
        """The model's prediction as a function of latents and timestep, guided where asked for."""
        # Models from outside of the package may not take one.
        further = {} if cache is None else {"block_cache": cache}
        if copies == 1:
            return unguided(self.model, y=text, **numbers, **further)

        inputs: dict[str, Any] = {name: torch.cat([x] * copies) for name, x in numbers.items()}
        inputs |= further
        if not all(step.guided for step in steps):
            inputs["guided"] = [step.guided for step in steps]
        if conditioning_frames is not None and conditioning_frames.index:
            null = self._null_text(copies * len(conditioning_frames.latents))
            inputs |= conditioning_frames.guided_inputs() | dict(y_null=null)
        return self.process.guide(self.model, y=text, **inputs)

    def _null_text(self, count: int) -> Text:
        """The null caption of so many samples, which conditioning frames attend to."""
        y = torch.zeros(count, 1, 1, self.text_encoder.width, device=self.device)
        encode_text: Any = self.model.encode_text
        return encode_text(y, None, torch.ones(count, dtype=torch.bool))

    @torch.no_grad()
    def encode(self, batch: Sequence[Request], loop: int = 0, *, copies: int | None = None) -> Text:
        """The text condition of every step: the prompts and, with guidance, the negative prompts.

        A request without a negative prompt is guided away from the unconditional prediction. A text
        that several requests share is encoded once.

        Args:
            copies: predictions of a step; the first is for the prompts. By default as without
                conditioning frames.
        """
        # Prompts first, then as many for each further prediction: the order of guidance.
        texts = [prompt_of_loop(request.prompt.text, loop) for request in batch]
        prompts, drop = list(texts), [False] * len(batch)
        for _ in range((copies or self._copies(None)) - 1):
            negative = [request.negative_prompt for request in batch]
            drop += [text is None for text in negative]
            texts += [prompt if text is None else text for prompt, text in zip(prompts, negative)]

        # T5 is expensive, and prompts often share their negative prompt.
        distinct = list(dict.fromkeys(texts))
        y, mask = self.text_encoder.encode(distinct)
        indices = [distinct.index(text) for text in texts]
        y, mask = (torch.stack([z[index] for index in indices]) for z in (y, mask))

        # The mask and ``drop`` stay on the CPU, where the model counts text tokens.
        encode_text: Any = self.model.encode_text
        return encode_text(y.to(self.device), mask.cpu(), torch.tensor(drop))

    def _insert(
        self, z: Tensor, conditioning: Sequence[PlacedReferences], loop: int
    ) -> tuple[Tensor, Tensor]:
        """Put conditioning frames into the noise; also returns the level of each frame ``[B, f]``.

        The level is the share of the noise schedule in which a frame is generated.
        """
        align = getattr(self.vae, "chunk_latent_frames", None)
        if getattr(self.vae, "chunk_overlap", 0):
            # A frame may begin anywhere: the release aligns none with these chunks.
            align = None
        latents, levels = [], []
        for noise, placed in zip(z, conditioning, strict=True):
            inserted, level = insert_references(
                noise, placed.references, placed.insertions, loop=loop, align=align
            )
            latents.append(inserted)
            levels.append(level)
        return torch.stack(latents), torch.stack(levels).to(z.dtype)

    @torch.no_grad()
    def conditioning(self, prompt: Prompt, size: tuple[int, int]) -> PlacedReferences:
        """Read and encode a prompt's references, resized to the video's (height, width)."""
        latents = []
        for path in prompt.references:
            frames = read_frames(path, self.cfg.limits)
            frames = frames[: planned_whole_frames(self.cfg.vae, len(frames))]
            clip = to_clip(frames, size)
            latents.append(self.vae.encode(clip[None].to(self.device))[0].to(self.dtype))
        return PlacedReferences(latents, prompt.insertions)

    def looped(
        self,
        batch: Sequence[Request],
        *,
        on_step: OnStep | None = None,
    ) -> list[Tensor]:
        """Latents ``[B, c, f, h, w]`` of each loop. Collective in the SP group.

        A loop after the first begins with the last frames of the loop before.
        """
        cfg, parts = self.cfg, list[Tensor]()
        conditioning = [self.conditioning(request.prompt, request.size) for request in batch]
        length = cfg.condition_frame_length
        encoded, text = list[Any](), None

        for loop in range(cfg.loop):
            conditioning_frames = None
            if cfg.cond_type is not None:
                conditioning_frames = self._frames_of_kind(batch, conditioning, parts, loop)
            elif parts:
                end = Insertion(
                    loop, reference_start=-length, length=length, edit=cfg.condition_frame_edit
                )
                conditioning = [
                    placed.with_reference(last, end)
                    for placed, last in zip(conditioning, parts[-1], strict=True)
                ]

            # Most prompts are the same in all loops, and encoding is expensive.
            copies = self._copies(conditioning_frames)
            wanted = [copies, *(prompt_of_loop(request.prompt.text, loop) for request in batch)]
            if wanted != encoded:
                encoded, text = wanted, self.encode(batch, loop, copies=copies)

            parts.append(
                self.latents(
                    batch,
                    text=text,
                    conditioning=None if conditioning_frames is not None else conditioning,
                    conditioning_frames=conditioning_frames,
                    loop=loop,
                    on_step=on_step,
                )
            )
        return parts

    def _frames_of_kind(
        self,
        batch: Sequence[Request],
        conditioning: Sequence[PlacedReferences],
        parts: Sequence[Tensor],
        loop: int,
    ) -> ConditioningFrames:
        """The conditioning frames of a loop of a single video, by ``cond_type``."""
        cfg, (request,) = self.cfg, batch
        assert cfg.cond_type is not None
        size = (self.vae.channels, *self.vae.latent_size(*request.shape))
        return frames_of_kind(
            cfg.cond_type,
            conditioning[0].references,
            parts[-1][0] if parts else None,
            loop=loop,
            loops=cfg.loop,
            length=cfg.condition_frame_length,
            latent=torch.zeros(size, device=self.device, dtype=self.dtype),
        )

    def num_frames(self, request: Request) -> int:
        """Frames of the whole video, all its loops."""
        return request.num_frames + first_frames(self.cfg, request, self.vae.latent_size)[-1]

    def frames(
        self, batch: Sequence[Request], parts: Sequence[Tensor], mesh: SequenceMesh
    ) -> Frames:
        """Decode the latents of ``looped``, without the overlaps of loops; see ``decode``."""
        return decode(
            self.vae,
            parts,
            num_frames=batch[0].num_frames,
            size=batch[0].size,
            overlap=self.cfg.condition_frame_length,
            mesh=mesh,
        )

"""Open-Sora's text- and image-to-video sampling as a pipeline of diffusers.

The pipeline turns diffusers' arguments into requests of this package's sampler, which does the
rest. So latents equal the latents of ``scripts/inference.py`` for the same noise.

Legend: B videos, F frames, c latent channels, f x h x w latent size.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from diffusers import DiffusionPipeline
from diffusers.utils import BaseOutput
from diffusers.utils.torch_utils import randn_tensor
from pydantic import ValidationError
from torch import Tensor

from opensora_sp.checkpoint import from_pretrained
from opensora_sp.common.importing import nearest
from opensora_sp.common.tensors import DTYPES
from opensora_sp.config import InferenceConfig, build_component
from opensora_sp.config.draft import explain
from opensora_sp.diffusion import RectifiedFlow
from opensora_sp.models.base import ConditionedModel
from opensora_sp.parallel import SequenceMesh
from opensora_sp.sampling.decoding import collected
from opensora_sp.sampling.requests import latent_frames

from .adapter_methods import AdapterMethods
from .image_sampler import (
    OUTPUT_TYPES,
    GeneratedRequest,
    Hooked,
    ImagePrompt,
    ImageSampler,
    as_output,
    frame_of,
    one_each,
    texts_of,
)
from .pipeline_folder import ENCODERS, PARTS, PipelineFolder, write_pipeline
from .scheduler import OpenSoraScheduler

PRECISIONS = {dtype: name for name, dtype in DTYPES.items()}
# diffusers has no types.
Base: Any = DiffusionPipeline
StepCallback = Callable[[Any, int, Tensor, dict[str, Any]], "dict[str, Any] | None"]


@dataclasses.dataclass
class OpenSoraPipelineOutput(BaseOutput):
    """``frames``: B videos in the type that was asked for, or latents ``[B, c, f, h, w]``."""

    frames: Any


class OpenSoraPipeline(AdapterMethods, Base):
    """Videos from texts and images by a model trained with rectified flow (Open-Sora 1.2, 1.3).

    It takes no embeddings, timesteps or number of videos per prompt.

    Args:
        vae: a ``LatentEncoder``.
        text_encoder: a ``TextEncoder``, which has its tokenizer.
        scheduler: an ``OpenSoraScheduler``.
        vae_config, text_encoder_config: their entries in a sampling config, such as
            ``dict(type="t5", from_pretrained=..., max_length=300)``.
    """

    # diffusers takes arguments without a default for components.
    def __init__(
        self,
        transformer: ConditionedModel,
        vae: Any,
        text_encoder: Any,
        scheduler: OpenSoraScheduler,
        vae_config: dict[str, Any] | None = None,
        text_encoder_config: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.register_modules(
            transformer=transformer, vae=vae, text_encoder=text_encoder, scheduler=scheduler
        )
        self.register_to_config(vae_config=vae_config, text_encoder_config=text_encoder_config)

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | Path,
        *,
        dtype: torch.dtype | None = None,
        lora: Sequence[str] = (),
        **components: Any,
    ) -> OpenSoraPipeline:
        """Load a folder with ``model_index.json``, or ``owner/name[/path][@revision]`` of the hub.

        Args:
            dtype: of the transformer, by default as stored. Encoders have their own.
            lora: adapters to merge into the transformer for good, each ``PATH`` or ``PATH:SCALE``,
                of a run the EMA; see ``opensora_sp.checkpoint.from_pretrained``.
            components: ``transformer``, ``vae``, ``text_encoder`` or ``scheduler`` to take instead
                of the folder's.

        Raises:
            ValueError: if the folder, one of its files or a component's name is wrong.
        """
        unknown = sorted(components.keys() - set(PARTS))
        if unknown:
            known = ["dtype", "lora", *PARTS]
            advice = nearest(unknown[0], known, otherwise="remove it")
            raise ValueError(f"got {unknown[0]!r}; expected some of {known}; {advice}")
        if lora and "transformer" in components:
            raise ValueError(
                f"got lora {list(lora)} and a transformer; expected adapters for the "
                "folder's; merge them into yours: from_pretrained(PATH, lora=[...])"
            )

        folder = PipelineFolder.open(pretrained_model_name_or_path, components)
        if "transformer" not in components:
            weights = folder.path / "transformer"
            components["transformer"] = from_pretrained(weights, dtype=dtype, lora=lora, ema=True)
        if "scheduler" not in components:
            components["scheduler"] = folder.scheduler()

        for key, known_types in ENCODERS.items():
            config = folder.index.get(f"{key}_config") or {}
            if key not in components:
                config = folder.encoder_config(key)
                components[key] = build_component(config, known_types)
            elif config.get("type") not in known_types:
                # Data may not name an import: the class is that which the object has.
                encoder = type(components[key])
                config = {**config, "type": f"{encoder.__module__}.{encoder.__qualname__}"}
            components[f"{key}_config"] = config

        components["transformer"].requires_grad_(False).eval()
        return cls(**components)

    def save_pretrained(
        self,
        save_directory: str | Path,
        *,
        max_shard_size: int | str = "5GB",
        allow_pickle: bool = False,
    ) -> None:
        """Write a folder that ``from_pretrained`` reads; see ``write_pipeline``.

        The weights of encoders are read from their ``from_pretrained``.
        """
        write_pipeline(
            save_directory,
            self.transformer,
            vae=self.config.vae_config,
            text_encoder=self.config.text_encoder_config,
            scheduler=self.scheduler,
            allow_pickle=allow_pickle,
            max_shard_size=max_shard_size,
        )

    # --- devices

    @property
    def device(self) -> torch.device:
        """The device of the transformer."""
        return next(self.transformer.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the transformer."""
        return self.transformer.dtype

    def to(self, *args: Any, **kwargs: Any) -> OpenSoraPipeline:
        """Move all components to a device. A dtype is the transformer's alone."""
        kwargs.pop("silence_dtype_warnings", None)
        # As torch.nn.Module.to takes its arguments.
        device, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
        self.transformer.to(device=device, dtype=dtype)
        if device is not None:
            self.vae.to(device)
            self.text_encoder.to(device)
        return self

    @property
    def model_cpu_offload_seq(self) -> str:
        """The order in which components take the device; those without weights do not."""
        order = ("text_encoder", "transformer", "vae")
        return "->".join(name for name in order if self._has_weights(name))

    @property
    def _exclude_from_cpu_offload(self) -> list[str]:
        return [name for name in ENCODERS if not self._has_weights(name)]

    def _has_weights(self, name: str) -> bool:
        component = getattr(self, name)
        is_module = isinstance(component, torch.nn.Module)
        return is_module and next(component.parameters(), None) is not None

    # --- sampling

    @torch.no_grad()
    def __call__(
        self,
        prompt: str | Sequence[str],
        image: Any = None,
        num_frames: int = 51,
        height: int = 240,
        width: int = 426,
        num_inference_steps: int | None = None,
        guidance_scale: float | None = None,
        generator: torch.Generator | list[torch.Generator] | None = None,
        callback_on_step_end: StepCallback | None = None,
        output_type: str = "pil",
        *,
        negative_prompt: str | Sequence[str] | None = None,
        guidance_interval: tuple[float, float] | None = None,
        cache_threshold: float | None = None,
        fps: float = 24.0,
        latents: Tensor | None = None,
        return_dict: bool = True,
    ) -> OpenSoraPipelineOutput | tuple[Any]:
        """Sample videos.

        Args:
            prompt: one text, or one for each video.
            image: the first frame of all videos, or one for each; resized and cropped to their
                size. A PIL image, uint8 ``[height, width, 3]`` or a tensor ``[3, height, width]``
                in [0, 1]. Models with ``use_cond`` (Open-Sora 1.3) take one video at a time then.
            num_frames, height, width: of the videos, in pixels; 1 frame is an image.
            num_inference_steps, guidance_scale: by default as in the scheduler's config. A scale of
                1 is no guidance.
            generator: of the noise; a list has one for each video.
            callback_on_step_end: called as ``(pipeline, step, timestep, {"latents": latents})``
                after each step; may return other latents in such a dict.
            output_type: "pil", "np" or "pt" (``as_output``), or "latent".
            negative_prompt: by default no caption.
            guidance_interval, cache_threshold: see ``SamplingOptions``; by default as configured.
            fps: frames per second, an input of the model.
            latents: noise ``[B, c, f, h, w]`` to begin with, instead of the generator's.
            return_dict: False returns a tuple.

        Raises:
            ValueError: for values that do not fit the model, the autoencoder or each other.
        """
        if output_type not in OUTPUT_TYPES:
            raise ValueError(
                f"got output_type {output_type!r}; expected one of {OUTPUT_TYPES}; choose one"
            )
        texts = texts_of(prompt)
        images = [frame_of(given) for given in one_each("image", image, len(texts))]
        less = dict(guidance_interval=guidance_interval, cache_threshold=cache_threshold)
        flow = self._scheduler().flow_of(num_inference_steps, guidance_scale, **less)
        # What a sampling config refuses, a call refuses in the same words.
        cfg = self._config(
            flow,
            num_frames=num_frames,
            image_size=(height, width),
            fps=fps,
            batch_size=len(texts),
            cond_type=self._kind_of_conditioning(images),
        )
        sampler = self._sampler(cfg)
        requests = self._requests(cfg, texts, images, negative_prompt, generator, latents)

        with self.progress_bar(total=flow.num_sampling_steps) as bar:
            on_step = partial(self._end_step, bar, callback_on_step_end)
            parts = sampler.looped(requests, on_step=on_step)

        frames: Any = parts[0]
        if output_type != "latent":
            decoded = sampler.frames(requests, parts, SequenceMesh(1))
            frames = as_output(collected(decoded, len(requests)), output_type)
        self.maybe_free_model_hooks()
        return OpenSoraPipelineOutput(frames=frames) if return_dict else (frames,)

    def _end_step(
        self, bar: Any, callback: StepCallback | None, step: int, t: Tensor, latents: Tensor
    ) -> Tensor | None:
        """Call the callback after a step; returns the latents that it puts in place, if any."""
        bar.update()
        if callback is None:
            return None
        returned = callback(self, step, t[0], {"latents": latents})
        return (returned or {}).get("latents")

    def _scheduler(self) -> OpenSoraScheduler:
        if not isinstance(self.scheduler, OpenSoraScheduler):
            raise ValueError(
                f"got the scheduler {type(self.scheduler).__name__}; expected OpenSoraScheduler, "
                "whose timesteps depend on the videos' size; set pipeline.scheduler = "
                "OpenSoraScheduler.of(dict(use_timestep_transform=True))"
            )
        return self.scheduler

    def _kind_of_conditioning(self, images: Sequence[Any]) -> str | None:
        takes_frames = getattr(self.transformer.config, "use_cond", False)
        return "i2v_head" if takes_frames and any(image is not None for image in images) else None

    def _config(self, flow: RectifiedFlow, **values: Any) -> InferenceConfig:
        """The call as a sampling config, which checks that its values fit each other."""
        model = self.transformer
        try:
            return InferenceConfig(
                model={"type": type(model).__name__, **dataclasses.asdict(model.config)},
                vae=self.config.vae_config,
                text_encoder=self.config.text_encoder_config,
                scheduler={"type": "rflow", **dataclasses.asdict(flow)},
                precision=PRECISIONS[self.dtype],
                **values,
            )
        except ValidationError as error:
            message = explain(error, InferenceConfig, "the arguments of the pipeline")
            raise ValueError(message) from None

    def _sampler(self, cfg: InferenceConfig) -> ImageSampler:
        transformer: Any = Hooked(self.transformer, "encode_text")
        return ImageSampler(
            cfg,
            transformer,
            Hooked(self.vae, "encode", "decode"),
            Hooked(self.text_encoder, "encode"),
            self._execution_device,
        )

    def _requests(
        self,
        cfg: InferenceConfig,
        texts: Sequence[str],
        images: Sequence[Any],
        negative_prompt: str | Sequence[str] | None,
        generator: torch.Generator | list[torch.Generator] | None,
        latents: Tensor | None,
    ) -> list[GeneratedRequest]:
        """A request for each text.

        Raises:
            ValueError: for other numbers of arguments than of texts, generators that are none, or
                videos and latents of a size that does not fit.
        """
        negatives = one_each("negative_prompt", negative_prompt, len(texts))
        requests = []
        for i, drawn_by in enumerate(one_each("generator", generator, len(texts))):
            if not isinstance(drawn_by, torch.Generator | None):
                raise ValueError(
                    f"got {drawn_by!r:.80} as generator; expected a torch.Generator, or a list "
                    "with one for each video; write torch.Generator().manual_seed(SEED) for a seed"
                )
            options = dict(generator=drawn_by, device=self._execution_device, dtype=torch.float32)
            request = GeneratedRequest(
                prompt=ImagePrompt(texts[i], frames=images[i]),
                num_frames=cfg.num_frames,
                size=cfg.size,
                fps=cfg.fps,
                seed=cfg.seed,
                negative_prompt=negatives[i],
                draw=partial(randn_tensor, **options),
                latents=None if latents is None else latents[i],
            )
            latent_frames(cfg, request)
            requests.append(request)

        size = self.vae.latent_size(*requests[0].shape)
        wanted = [len(texts), self.vae.channels, *size]
        if latents is not None and [*latents.shape] != wanted:
            raise ValueError(
                f"got latents {[*latents.shape]}; expected noise {wanted} for {len(texts)} videos "
                f"of {requests[0].shape}; pass such a tensor, or a generator"
            )
        return requests

"""Open-Sora's text- and image-to-video sampling as a pipeline of diffusers.

The pipeline turns diffusers' arguments into requests of this package's sampler, which does the
rest. So latents equal those of ``scripts/inference.py`` for the same noise.

Legend: B videos, F frames, c latent channels, f x h x w latent size.
"""

from __future__ import annotations

import dataclasses
import inspect
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
from opensora_sp.config import InferenceConfig, explain
from opensora_sp.diffusion import RectifiedFlow
from opensora_sp.models.base import ConditionedModel
from opensora_sp.parallel import SequenceMesh
from opensora_sp.sampling.decoding import collected
from opensora_sp.sampling.requests import latent_frames

from .folder import ENCODERS, PipelineFolder, write_pipeline
from .images import as_output, check_output_type, images_of, warn_of_sizes
from .sampler import (
    GeneratedRequest,
    Hooked,
    ImagePrompt,
    ImageSampler,
    check_generators,
    check_same_length,
    prompts_of,
)
from .scheduler import OpenSoraScheduler
from .unsupported import METHODS, attribute_error, check_arguments

PRECISIONS = {dtype: name for name, dtype in DTYPES.items()}
StepCallback = Callable[[Any, int, Tensor, dict[str, Any]], "dict[str, Any] | None"]


@dataclasses.dataclass
class OpenSoraPipelineOutput(BaseOutput):
    """``frames``: B videos in the type that was asked for, or latents ``[B, c, f, h, w]``."""

    frames: Any


class OpenSoraPipeline(DiffusionPipeline):
    """Videos from texts and images by a model trained with rectified flow (Open-Sora 1.2, 1.3).

    Args:
        transformer: the model.
        vae: a ``LatentEncoder``.
        text_encoder: a ``TextEncoder``, which has its tokenizer.
        scheduler: an ``OpenSoraScheduler``.
        vae_config, text_encoder_config: what a sampling config says of them, such as
            ``dict(type="t5", from_pretrained=..., max_length=300)``.

    Raises:
        ValueError: without these.
    """

    transformer: ConditionedModel
    vae: Any
    text_encoder: Any
    scheduler: Any
    # Of the base class, which has no types.
    config: Any
    progress_bar: Callable[..., Any]
    register_modules: Callable[..., None]
    register_to_config: Callable[..., None]
    maybe_free_model_hooks: Callable[[], None]
    _execution_device: torch.device

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
        # diffusers takes arguments without a default for components.
        if vae_config is None or text_encoder_config is None:
            raise ValueError(
                f"got vae_config {vae_config} and text_encoder_config {text_encoder_config}; "
                "expected both, as in a sampling config; pass for example "
                "vae_config=dict(type='OpenSoraVAE_V1_2', from_pretrained=...)"
            )
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
            lora: adapters to merge into the transformer, each ``PATH`` or ``PATH:SCALE``; see
                ``opensora_sp.checkpoint.from_pretrained``.
            components: ``transformer``, ``vae``, ``text_encoder`` or ``scheduler`` to take instead
                of the folder's.

        Raises:
            ValueError: if the folder, one of its files or a component's name is wrong.
        """
        folder = PipelineFolder.open(pretrained_model_name_or_path, components)
        loaders: dict[str, Callable[[], Any]] = {
            "transformer": lambda: from_pretrained(
                folder.path / "transformer", dtype=dtype, lora=lora
            ),
            "scheduler": folder.scheduler,
            **{key: partial(folder.encoder, key) for key in ENCODERS},
        }
        unknown = sorted(components.keys() - loaders.keys())
        if unknown:
            known = ["dtype", "lora", *loaders]
            advice = nearest(unknown[0], known, otherwise="remove it")
            raise ValueError(f"got {unknown[0]!r}; expected some of {known}; {advice}")
        if lora and "transformer" in components:
            raise ValueError(
                f"got lora {list(lora)} and a transformer; expected adapters for that of the "
                "folder; merge them into yours: from_pretrained(PATH, lora=[...])"
            )

        parts: dict[str, Any] = {
            name: components.get(name) or load() for name, load in loaders.items()
        }
        parts["transformer"].requires_grad_(False).eval()
        configs: dict[str, Any] = {
            f"{key}_config": folder.index.get(f"{key}_config") or {} for key in ENCODERS
        }
        for key in ENCODERS:
            if key not in components:
                configs[f"{key}_config"] = folder.encoder_config(key)
            elif configs[f"{key}_config"].get("type") not in ENCODERS[key]:
                # Data may not name what is imported: it is the class of the object.
                cls_of = type(components[key])
                name = f"{cls_of.__module__}.{cls_of.__qualname__}"
                configs[f"{key}_config"] = {**configs[f"{key}_config"], "type": name}
        return cls(**parts, **configs)

    def save_pretrained(
        self,
        save_directory: str | Path,
        *,
        max_shard_size: int | str = "5GB",
        allow_pickle: bool = False,
    ) -> None:
        """Write a folder that ``from_pretrained`` reads; see ``write_pipeline``.

        The weights of encoders are those of their ``from_pretrained``.
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

    def __getattr__(self, name: str) -> Any:
        if name in METHODS:
            raise attribute_error(name)
        return super().__getattr__(name)  # type: ignore[misc]

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
        fps: float = 24.0,
        latents: Tensor | None = None,
        return_dict: bool = True,
        **unsupported: Any,
    ) -> OpenSoraPipelineOutput | tuple[Any]:
        """Sample videos.

        Args:
            prompt: one text, or one for each video.
            image: the first frame of all videos, or one for each; resized and cropped to their
                size. A PIL image, uint8 ``[height, width, 3]`` or a tensor ``[3, height, width]``
                in [0, 1]. Models with ``use_cond`` (Open-Sora 1.3) take one video at a time then.
            num_frames, height, width: of the videos, in pixels; 1 frame is an image.
            num_inference_steps, guidance_scale: by default those of the scheduler's config. A scale
                of 1 is no guidance.
            generator: of the noise; a list has one for each video.
            callback_on_step_end: called as ``(pipeline, step, timestep, {"latents": latents})``
                after each step; may return other latents in such a dict.
            output_type: "pil", "np" or "pt" (``as_output``), or "latent".
            negative_prompt: by default no caption.
            fps: frames per second, an input of the model.
            latents: noise ``[B, c, f, h, w]`` to begin with, instead of the generator's.
            return_dict: False returns a tuple.
            unsupported: arguments of other pipelines, which may be None.

        Raises:
            ValueError: for values that do not fit the model, the autoencoder or each other, and
                for other arguments.
        """
        check_arguments(unsupported, [*inspect.signature(self).parameters][:-1])
        check_output_type(output_type)
        prompts = prompts_of(prompt)
        images = images_of(image, len(prompts))
        flow = self._flow(num_inference_steps, guidance_scale)
        cfg = self._config(
            flow,
            num_frames=num_frames,
            image_size=(height, width),
            fps=fps,
            batch_size=len(prompts),
            cond_type=self._kind_of_conditioning(images),
        )
        sampler = self._sampler(cfg)
        requests = self._requests(cfg, prompts, images, negative_prompt, generator, latents)

        warn_of_sizes(images, cfg.size)
        sampler.warn_of_truncation(requests)
        with self.progress_bar(total=flow.num_sampling_steps) as bar:
            edit = self._edited_by(callback_on_step_end)
            parts = sampler.looped(requests, on_step=bar.update, edit_step=edit)

        frames: Any = parts[0]
        if output_type != "latent":
            decoded = sampler.frames(requests, parts, SequenceMesh(1))
            frames = as_output(collected(decoded, len(requests)), output_type)
        self.maybe_free_model_hooks()
        return OpenSoraPipelineOutput(frames=frames) if return_dict else (frames,)

    def _flow(self, num_inference_steps: int | None, guidance_scale: float | None) -> RectifiedFlow:
        if not isinstance(self.scheduler, OpenSoraScheduler):
            raise ValueError(
                f"got the scheduler {type(self.scheduler).__name__}; expected OpenSoraScheduler, "
                "whose timesteps depend on the videos' size; set pipeline.scheduler = "
                "OpenSoraScheduler.of(dict(use_timestep_transform=True))"
            )
        return self.scheduler.flow_of(num_inference_steps, guidance_scale)

    def _kind_of_conditioning(self, images: Sequence[Any]) -> str | None:
        takes_frames = getattr(self.transformer.config, "use_cond", False)
        return "i2v_head" if takes_frames and any(one is not None for one in images) else None

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
        prompts: Sequence[str],
        images: Sequence[Any],
        negative_prompt: str | Sequence[str] | None,
        generator: torch.Generator | list[torch.Generator] | None,
        latents: Tensor | None,
    ) -> list[GeneratedRequest]:
        """A request for each prompt.

        Raises:
            ValueError: for other numbers of values than of prompts, generators that are none, or
                videos and latents of a size that does not fit.
        """
        count = len(prompts)
        negative = negative_prompt
        negatives = (
            [negative] * count if negative is None or isinstance(negative, str) else negative
        )
        generators = generator if isinstance(generator, list) else [generator] * count
        for name, values in (("negative_prompt", negatives), ("generator", generators)):
            check_same_length(name, values, count)
        check_generators(generators)

        device, dtype = self._execution_device, torch.float32
        requests = [
            GeneratedRequest(
                prompt=ImagePrompt(text, frames=images[i]),
                num_frames=cfg.num_frames,
                size=cfg.size,
                fps=cfg.fps,
                seed=cfg.seed,
                negative_prompt=negatives[i],
                draw=partial(randn_tensor, generator=generators[i], device=device, dtype=dtype),
                latents=None if latents is None else latents[i],
            )
            for i, text in enumerate(prompts)
        ]
        self._check_sizes(cfg, requests, latents)
        return requests

    def _check_sizes(
        self, cfg: InferenceConfig, requests: Sequence[GeneratedRequest], latents: Tensor | None
    ) -> None:
        for request in requests:
            latent_frames(cfg, request)

        size = (self.vae.channels, *self.vae.latent_size(*requests[0].shape))
        wanted = (len(requests), *size)
        if latents is not None and tuple(latents.shape) != wanted:
            raise ValueError(
                f"got latents {[*latents.shape]}; expected noise {[*wanted]} for {len(requests)} "
                f"videos of {requests[0].shape}; pass such a tensor, or a generator"
            )

    def _edited_by(
        self, callback: StepCallback | None
    ) -> Callable[[int, Tensor, Tensor], Tensor] | None:
        """diffusers' callback as the sampler takes it."""
        if callback is None:
            return None

        def edit(step: int, t: Tensor, latents: Tensor) -> Tensor:
            returned = callback(self, step, t[0], {"latents": latents}) or {}
            edited: Tensor = returned.get("latents", latents)
            return edited

        return edit

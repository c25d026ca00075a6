"""Peak memory of sampling with its encoders, and which weights wait on the host.

Sampling has three phases, one after the other: text features, steps of the model, decoding. Weights
stay on the device between calls where memory suffices. Otherwise, in this order: the text encoder
is copied layer by layer, the autoencoder for its calls alone, and it decodes a frame at a time.

Networks are traced on meta tensors, as in training (``trace.py``). Not counted: what
cuDNN takes as workspace, and the encoding of references, which takes less than decoding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from opensora_sp.common.tensors import DTYPES
from opensora_sp.config import InferenceConfig
from opensora_sp.config.components import SCHEDULERS, build_component, split_type
from opensora_sp.data.buckets import BatchSpec
from opensora_sp.data.transforms import quantized
from opensora_sp.diffusion.guidance import predictions_per_step
from opensora_sp.encoders import LATENT_ENCODERS, TEXT_ENCODERS
from opensora_sp.encoders.interface import decoded_pieces
from opensora_sp.encoders.loading import FrozenEncoder, weight_bytes

from .live_peak import CUBLAS_WORKSPACE, AllocatorPeak, LivePeak
from .memory import MemoryPeak
from .run_estimator import Memory, RunEstimator

aten = torch.ops.aten
FREE_SHARE = 0.9
"""Of the free memory, what the peak may be: the rest is for workspaces and fragmentation."""
FRAMES_AT_ONCE = {
    "VideoAutoencoderKL": "micro_batch_size",
    "OpenSoraVAE_V1_2": "micro_batch_size",
    "OpenSoraVAE_V1_3": "micro_batch_size_2d",
}
"""By type of autoencoder, the option that bounds the frames that are decoded at once."""


@dataclass(frozen=True)
class SamplingMemory:
    """Bytes of a rank at the peak of each phase, weights included.

    Attributes:
        text: while captions are encoded.
        steps: in a step of the model.
        decoding: of the largest piece that the autoencoder decodes at once.
        placement: which weights wait on the host, in words.
    """

    text: int
    steps: int
    decoding: int
    placement: str

    @property
    def peak(self) -> int:
        return max(self.text, self.steps, self.decoding)

    def describe(self) -> str:
        """For the log and the planner's table."""
        numbers = [f"{n / 1e9:.3f}" for n in (self.text, self.steps, self.decoding)]
        return (
            f"{self.placement}; GB at the peak: {numbers[0]} encoding text, {numbers[1]} in steps, "
            f"{numbers[2]} decoding"
        )


@dataclass(frozen=True)
class Traced:
    """Bytes of an encoder wherever its weights are: all of them, those that a call has when layers
    are copied one at a time, and activations.
    """

    weights: int = 0
    streamed: int = 0
    activations: int = 0

    def between_calls(self, offload: Any) -> int:
        """Bytes of weights on the device between calls, with the encoder's option ``offload``."""
        return 0 if offload else self.weights

    def in_call(self, offload: Any) -> int:
        """Bytes that a call adds to these."""
        if not offload:
            return self.activations
        return self.activations + (self.streamed if offload == "layers" else self.weights)


def placements(cfg: InferenceConfig) -> Iterator[InferenceConfig]:
    """The config with encoders that need less and less memory on the device.

    What the config itself says of ``offload`` stays.
    """
    yield cfg
    text_encoder, vae = dict(cfg.text_encoder), dict(cfg.vae)
    if _can_offload("text_encoder", text_encoder, TEXT_ENCODERS):
        text_encoder["offload"] = "layers"
        yield cfg.model_copy(update=dict(text_encoder=text_encoder))

    if _can_offload("vae", vae, LATENT_ENCODERS):
        vae["offload"] = True
        yield cfg.model_copy(update=dict(text_encoder=text_encoder, vae=dict(vae)))
    frames = FRAMES_AT_ONCE.get(vae["type"])
    if frames is not None and vae.get(frames) != 1:
        vae[frames] = 1
        yield cfg.model_copy(update=dict(text_encoder=text_encoder, vae=dict(vae)))


def placed(
    run: RunEstimator, spec: BatchSpec, memory: Memory
) -> tuple[InferenceConfig, SamplingMemory]:
    """The first of ``placements`` whose peak fits into the run's memory, or the last, and its
    estimate.

    Args:
        spec: the largest batch, whose model alone takes ``memory``.
    """
    assert isinstance(run.cfg, InferenceConfig)
    tracer = EncoderTracer(spec, run.device)
    chosen, estimate = run.cfg, None
    for placement in placements(run.cfg):
        chosen = placement
        estimate = sampling_memory(placement, tracer, memory.peak, memory.kept.total)
        if estimate.peak <= FREE_SHARE * run.memory:
            break
    assert estimate is not None
    return chosen, estimate


def sampling_memory(
    cfg: InferenceConfig, tracer: EncoderTracer, steps: MemoryPeak, weights: int
) -> SamplingMemory:
    """The estimate of one placement.

    Args:
        steps: the peak of a call of the model, whose weights have so many bytes.
    """
    offloads = [cfg.text_encoder.get("offload"), cfg.vae.get("offload")]
    traced = [tracer.text(cfg), tracer.vae(cfg)]
    encoders = sum(map(Traced.between_calls, traced, offloads))
    kept = weights + encoders + (CUBLAS_WORKSPACE if tracer.device == "cuda" else 0)
    text, decoding = map(Traced.in_call, traced, offloads)
    return SamplingMemory(
        text=kept + text,
        steps=steps.total + encoders + _keys_and_values(cfg, tracer.spec),
        decoding=kept + decoding,
        placement=describe_placement(cfg),
    )


def describe_placement(cfg: InferenceConfig) -> str:
    """Placement of the encoders' weights, in words."""
    parts = []
    for name, section in (("text encoder", cfg.text_encoder), ("autoencoder", cfg.vae)):
        if section.get("offload"):
            layers = ", by layers" if section["offload"] == "layers" else ""
            parts.append(f"{name} on the host{layers}")
    parts = parts or ["all weights on the device"]
    frames = FRAMES_AT_ONCE.get(cfg.vae["type"], "")
    if cfg.vae.get(frames) is not None:
        parts.append(f"{frames} {cfg.vae[frames]}")
    return ", ".join(parts)


def _can_offload(key: str, config: dict[str, Any], known: dict[str, Any]) -> bool:
    cls = known.get(split_type(key, config)[0])
    return hasattr(cls, "planned") and "offload" not in config


def _encoder(key: str, config: dict[str, Any], known: dict[str, Any]) -> Any:
    """The encoder without weights; None for a class from outside, which may load them."""
    name, options = split_type(key, config)
    cls = known.get(name)
    if cls is None:
        return None
    return cls.planned(**options) if hasattr(cls, "planned") else cls(**options)


class FusedAttention(TorchFunctionMode):
    """Attention of meta tensors by the fused kernel of a device.

    torch takes its mathematical definition there, whose scores no device would keep. Heads of an
    autoencoder are wider than FlashAttention takes, so that CUDA has the memory-efficient kernel.
    """

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device = device

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is not F.scaled_dot_product_attention or kwargs.get("attn_mask") is not None:
            return func(*args, **kwargs)

        causal, scale = kwargs.get("is_causal", False), kwargs.get("scale")
        if self.device == "cuda":
            return aten._scaled_dot_product_efficient_attention(
                *args[:3], None, False, 0.0, causal, scale=scale
            )[0]
        return aten._scaled_dot_product_flash_attention_for_cpu(
            *args[:3], 0.0, causal, scale=scale
        )[0]


@contextmanager
def _counting(device: str) -> Iterator[LivePeak]:
    """A context that counts the bytes of meta tensors as a device would have them."""
    live = AllocatorPeak() if device == "cuda" else LivePeak()
    with live, FusedAttention(device), torch.no_grad():
        yield live


class EncoderTracer:
    """Memory of encoders for batches of one shape; each is traced once."""

    def __init__(self, spec: BatchSpec, device: str) -> None:
        self.spec, self.device = spec, device
        self._traced: dict[str, Traced] = {}

    def text(self, cfg: InferenceConfig) -> Traced:
        """Of the text encoder, for the longest prompts."""
        # Prompts and negative prompts are encoded together; without these, a text is encoded once.
        count = self.spec.batch_size * (1 + (cfg.negative_prompt is not None))
        return self._once(cfg.text_encoder, lambda: self._trace_text(cfg.text_encoder, count))

    def vae(self, cfg: InferenceConfig) -> Traced:
        """Of the autoencoder, when it decodes its largest piece."""
        return self._once(cfg.vae, lambda: self._trace_vae(cfg.vae, cfg.loop))

    def _once(self, config: dict[str, Any], trace: Callable[[], Traced]) -> Traced:
        key = repr(sorted((name, option) for name, option in config.items() if name != "offload"))
        if key not in self._traced:
            self._traced[key] = trace()
        return self._traced[key]

    def _trace_text(self, config: dict[str, Any], count: int) -> Traced:
        encoder = _encoder("text_encoder", config, TEXT_ENCODERS)
        if not isinstance(encoder, FrozenEncoder):
            return Traced()

        text_encoder: Any = encoder
        with torch.device("meta"):
            ids = torch.zeros(count, text_encoder.max_length, dtype=torch.int64)
        with _counting(self.device) as live:
            text_encoder.features(ids, torch.ones_like(ids))
        whole = weight_bytes(encoder)
        layers = [weight_bytes(layer) for layer in encoder.streamed_layers]
        return Traced(whole, whole - sum(layers) + max(layers, default=0), live.peak)

    def _trace_vae(self, config: dict[str, Any], loop: int) -> Traced:
        vae = _encoder("vae", config, LATENT_ENCODERS)
        if vae is None:
            return Traced()

        spec = self.spec
        size = vae.latent_size(spec.num_frames, *spec.image_size)
        latents = torch.zeros(spec.batch_size, vae.channels, *size, device="meta")
        pieces = decoded_pieces(vae, spec.num_frames, size[0])
        largest = max(pieces, key=lambda piece: piece.frames.stop - piece.frames.start)
        with _counting(self.device) as live:
            _decode(vae, latents[:1, :, largest.latents], largest.frames, spec.image_size)
        weights = weight_bytes(vae) if isinstance(vae, FrozenEncoder) else 0
        return Traced(weights, weights, live.peak + loop * latents.nbytes)


def _decode(vae: Any, latents: Tensor, frames: slice, size: tuple[int, int]) -> Tensor:
    """The frames of one piece, as sampling makes them, on the device."""
    video = vae.decode(latents, num_frames=frames.stop - frames.start)[0]
    return quantized(video[:, :, : size[0], : size[1]])


def _keys_and_values(cfg: InferenceConfig, spec: BatchSpec) -> int:
    """Bytes that sampling keeps of the text for all steps: tokens, keys and values of each
    block, for prompts of the greatest length and their guidance.
    """
    process = build_component(cfg.scheduler, SCHEDULERS)
    copies = predictions_per_step(process, by_frames=cfg.cond_type is not None)
    model = cfg.model_spec.config
    tokens = copies * spec.batch_size * model.model_max_length
    numbers_of_token = model.hidden_size * (1 + 2 * model.num_blocks)
    return int(tokens * numbers_of_token * DTYPES[cfg.precision].itemsize)

"""Peak memory of sampling with its encoders, and which weights wait on the host.

Sampling has three phases, one after the other: text features, steps of the model, decoding. Weights
stay on the device between calls where memory suffices. Otherwise, in this order: the text encoder
is copied layer by layer, the autoencoder for its calls alone, and it decodes a frame at a time.

Networks are traced on meta tensors, as those of training are (``trace.py``). Not counted: what
cuDNN takes as workspace, and the encoding of references, which takes less than decoding.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from opensora_sp.config import InferenceConfig
from opensora_sp.config.components import SCHEDULERS, build_component, split_type
from opensora_sp.data.transforms import quantized
from opensora_sp.diffusion import predictions_per_step
from opensora_sp.dtypes import DTYPES
from opensora_sp.encoders import LATENT_ENCODERS, TEXT_ENCODERS, decoded_pieces
from opensora_sp.encoders.loading import FrozenEncoder, weight_bytes
from opensora_sp.memory import LivePeak

from .batches import BatchSpec
from .cuda_memory import CUBLAS_WORKSPACE, AllocatorPeak
from .memory import MemoryPeak

aten = torch.ops.aten
FREE_SHARE = 0.9
"""Of the free memory, what the peak may be: the rest is for workspaces and fragmentation."""


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
class EncoderMemory:
    """Bytes of an encoder: weights on the device between calls, in a call, and activations."""

    resident: int
    in_call: int
    activations: int


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
        yield cfg.model_copy(update=dict(text_encoder=text_encoder, vae=vae))
    for name in ("micro_batch_size", "micro_batch_size_2d"):
        if _decodes_by_frame(vae, name):
            vae = {**vae, name: 1}
            yield cfg.model_copy(update=dict(text_encoder=text_encoder, vae=vae))


def placed(
    cfg: InferenceConfig,
    spec: BatchSpec,
    steps: MemoryPeak,
    weights: int,
    *,
    memory: float,
    device: str = "cuda",
) -> tuple[InferenceConfig, SamplingMemory]:
    """The first of ``placements`` whose peak fits, or the last, and its estimate.

    Args:
        spec: the largest batch.
        steps: the peak of a call of the model, whose weights have so many bytes.
        memory: bytes that may be allocated on the device.
    """
    chosen, estimate = cfg, None
    for one in placements(cfg):
        chosen, estimate = one, sampling_memory(one, spec, steps, weights, device=device)
        if estimate.peak <= memory:
            break
    assert estimate is not None
    return chosen, estimate


def sampling_memory(
    cfg: InferenceConfig, spec: BatchSpec, steps: MemoryPeak, weights: int, *, device: str = "cuda"
) -> SamplingMemory:
    """The estimate of one placement; see ``placed``."""
    text, vae = _text_memory(cfg, spec, device), _vae_memory(cfg, spec, device)
    encoders = text.resident + vae.resident
    kept = weights + encoders + (CUBLAS_WORKSPACE if device == "cuda" else 0)
    return SamplingMemory(
        text=kept + text.in_call + text.activations,
        steps=steps.total + encoders + _keys_and_values(cfg, spec),
        decoding=kept + vae.in_call + vae.activations,
        placement=describe_placement(cfg),
    )


def describe_placement(cfg: InferenceConfig) -> str:
    """Which weights of encoders wait on the host, in words."""
    parts = []
    for key, offload in (
        ("text encoder", cfg.text_encoder.get("offload")),
        ("autoencoder", cfg.vae.get("offload")),
    ):
        if offload:
            parts.append(f"{key} on the host{', by layers' if offload == 'layers' else ''}")
    sizes = {name: cfg.vae.get(name) for name in ("micro_batch_size", "micro_batch_size_2d")}
    frames = [f"{name} {size}" for name, size in sizes.items() if size is not None]
    return ", ".join([*(parts or ["all weights on the device"]), *frames])


def _can_offload(key: str, config: dict[str, Any], known: dict[str, Any]) -> bool:
    cls = known.get(split_type(key, config)[0])
    return hasattr(cls, "planned") and "offload" not in config


def _decodes_by_frame(vae: dict[str, Any], name: str) -> bool:
    """Whether an option bounds the frames that are decoded at once, and is not 1 already."""
    own = {"VideoAutoencoderKL": "micro_batch_size", "OpenSoraVAE_V1_2": "micro_batch_size"}
    own["OpenSoraVAE_V1_3"] = "micro_batch_size_2d"
    return own.get(vae["type"]) == name and vae.get(name) != 1


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
def _traced(device: str) -> Iterator[LivePeak]:
    """A context that counts the bytes of meta tensors as a device would have them."""
    live = AllocatorPeak() if device == "cuda" else LivePeak()
    with live, FusedAttention(device), torch.no_grad():
        yield live


def _weights_of(encoder: Any, offload: Any) -> tuple[int, int]:
    """Bytes of weights on the device between calls, and of those that a call adds."""
    whole = weight_bytes(encoder)
    if not offload:
        return whole, 0
    if offload != "layers":
        return 0, whole
    layers = [weight_bytes(layer) for layer in encoder.streamed_layers]
    return 0, whole - sum(layers) + max(layers, default=0)


def _text_memory(cfg: InferenceConfig, spec: BatchSpec, device: str) -> EncoderMemory:
    encoder = _encoder("text_encoder", cfg.text_encoder, TEXT_ENCODERS)
    if not isinstance(encoder, FrozenEncoder):
        return EncoderMemory(0, 0, 0)

    # Prompts and negative prompts are encoded together; without these, a text is encoded once.
    count = spec.batch_size * (1 + (cfg.negative_prompt is not None))
    features: Any = encoder.features
    with torch.device("meta"):
        ids = torch.zeros(count, encoder.max_length, dtype=torch.int64)
    with _traced(device) as live:
        features(ids, torch.ones_like(ids))
    return EncoderMemory(*_weights_of(encoder, cfg.text_encoder.get("offload")), live.peak)


def _vae_memory(cfg: InferenceConfig, spec: BatchSpec, device: str) -> EncoderMemory:
    vae = _encoder("vae", cfg.vae, LATENT_ENCODERS)
    if vae is None:
        return EncoderMemory(0, 0, 0)

    size = vae.latent_size(spec.num_frames, *spec.image_size)
    latents = torch.zeros(spec.batch_size, vae.channels, *size, device="meta")
    pieces = decoded_pieces(vae, spec.num_frames, size[0])
    largest = max(pieces, key=lambda piece: piece.frames.stop - piece.frames.start)
    with _traced(device) as live:
        _decode(vae, latents[:1, :, largest.latents], largest.frames, spec.image_size)
    own = _weights_of(vae, cfg.vae.get("offload")) if isinstance(vae, FrozenEncoder) else (0, 0)
    return EncoderMemory(*own, live.peak + cfg.loop * latents.nbytes)


def _decode(vae: Any, latents: Tensor, frames: slice, size: tuple[int, int]) -> Tensor:
    """The frames of one piece, as sampling makes them, on the device."""
    video = vae.decode(latents, num_frames=frames.stop - frames.start)[0]
    return quantized(video[:, :, : size[0], : size[1]])


def _keys_and_values(cfg: InferenceConfig, spec: BatchSpec) -> int:
    """Bytes of what sampling keeps of the text for all steps: tokens, keys and values of each
    block, for prompts of the greatest length and their guidance.
    """
    process = build_component(cfg.scheduler, SCHEDULERS)
    copies = predictions_per_step(process, by_frames=cfg.cond_type is not None)
    model = cfg.model_spec.config
    tokens = copies * spec.batch_size * model.model_max_length
    of_token = model.hidden_size * (1 + 2 * model.num_blocks)
    return int(tokens * of_token * DTYPES[cfg.precision].itemsize)

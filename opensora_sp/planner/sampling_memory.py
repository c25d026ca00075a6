"""Peak memory of sampling with its encoders, and which weights wait on the host.

Sampling has three phases, one after the other: text features, steps of the model, decoding. Weights
stay on the device between calls where memory suffices. Otherwise, in this order: the text encoder
is copied layer by layer, the autoencoder for its calls alone, and it decodes a frame at a time.

Networks are traced on meta tensors, as in training (``trace.py``). Not counted: what
cuDNN takes as workspace, and the encoding of references, which takes less than decoding.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from opensora_sp.config import InferenceConfig
from opensora_sp.config.components import split_type
from opensora_sp.data.buckets import BatchSpec
from opensora_sp.data.transforms import quantized
from opensora_sp.encoders import LATENT_ENCODERS, TEXT_ENCODERS
from opensora_sp.encoders.interface import decoded_pieces
from opensora_sp.encoders.loading import FrozenEncoder, weight_bytes

from .live_peak import CUBLAS_WORKSPACE, AllocatorPeak, LivePeak, fused_attention
from .run_estimator import Memory, RunEstimator

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

    def on_device(self, offload: Any) -> tuple[int, int]:
        """Bytes between calls, and those that a call adds, with the encoder's ``offload``."""
        if not offload:
            return self.weights, self.activations
        copied = self.streamed if offload == "layers" else self.weights
        return 0, copied + self.activations


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
    tracer = EncoderTracer(run, spec)
    for cfg in placements(run.cfg):
        estimate = sampling_memory(cfg, tracer, memory)
        if estimate.peak <= FREE_SHARE * run.memory:
            break
    return cfg, estimate


def sampling_memory(cfg: InferenceConfig, tracer: EncoderTracer, memory: Memory) -> SamplingMemory:
    """The estimate of one placement; the model alone takes ``memory``."""
    run = tracer.run
    text, text_call = tracer.text.on_device(cfg.text_encoder.get("offload"))
    vae, vae_call = tracer.vae(cfg).on_device(cfg.vae.get("offload"))
    kept = memory.kept.total + text + vae + (CUBLAS_WORKSPACE if run.device == "cuda" else 0)
    return SamplingMemory(
        text=kept + text_call,
        steps=memory.peak.total + text + vae + _keys_and_values(run, tracer.spec),
        decoding=kept + vae_call,
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


@contextmanager
def _counting(device: str) -> Iterator[LivePeak]:
    """A context that counts the bytes of meta tensors as a device would have them."""
    live = AllocatorPeak() if device == "cuda" else LivePeak()
    with live, fused_attention(device), torch.no_grad():
        yield live


class EncoderTracer:
    """Memory of a run's encoders for batches of one shape; each is traced once."""

    def __init__(self, run: RunEstimator, spec: BatchSpec) -> None:
        self.run, self.spec = run, spec
        self._vaes: dict[Any, Traced] = {}

    @cached_property
    def text(self) -> Traced:
        """Of the text encoder, for the longest prompts."""
        cfg: Any = self.run.cfg
        encoder = _encoder("text_encoder", cfg.text_encoder, TEXT_ENCODERS)
        if not isinstance(encoder, FrozenEncoder):
            return Traced()

        text_encoder: Any = encoder
        # Prompts and negative prompts are encoded together; without these, a text is encoded once.
        count = self.spec.batch_size * (1 + (cfg.negative_prompt is not None))
        with torch.device("meta"):
            ids = torch.zeros(count, text_encoder.max_length, dtype=torch.int64)
        with _counting(self.run.device) as live:
            text_encoder.features(ids, torch.ones_like(ids))
        whole = weight_bytes(encoder)
        layers = [weight_bytes(layer) for layer in encoder.streamed_layers]
        return Traced(whole, whole - sum(layers) + max(layers, default=0), live.peak)

    def vae(self, cfg: InferenceConfig) -> Traced:
        """Of the autoencoder, when it decodes its largest piece."""
        frames = cfg.vae.get(FRAMES_AT_ONCE.get(cfg.vae["type"], ""))
        if frames not in self._vaes:
            self._vaes[frames] = self._trace_vae(cfg)
        return self._vaes[frames]

    def _trace_vae(self, cfg: InferenceConfig) -> Traced:
        vae = _encoder("vae", cfg.vae, LATENT_ENCODERS)
        if vae is None:
            return Traced()

        spec = self.spec
        size = vae.latent_size(spec.num_frames, *spec.image_size)
        latents = torch.zeros(spec.batch_size, vae.channels, *size, device="meta")
        pieces = decoded_pieces(vae, spec.num_frames, size[0])
        largest = max(pieces, key=lambda piece: piece.frames.stop - piece.frames.start)
        frames, (height, width) = largest.frames.stop - largest.frames.start, spec.image_size
        with _counting(self.run.device) as live:
            # As sampling makes the frames of one piece.
            video = vae.decode(latents[:1, :, largest.latents], num_frames=frames)[0]
            quantized(video[:, :, :height, :width])
        weights = weight_bytes(vae) if isinstance(vae, FrozenEncoder) else 0
        return Traced(weights, weights, live.peak + cfg.loop * latents.nbytes)


def _keys_and_values(run: RunEstimator, spec: BatchSpec) -> int:
    """Bytes that sampling keeps of the text for all steps: tokens, keys and values of each
    block, for prompts of the greatest length and their guidance.
    """
    tokens = run.predictions * spec.batch_size * run.config.model_max_length
    numbers_of_token = run.config.hidden_size * (1 + 2 * run.config.num_blocks)
    return int(tokens * numbers_of_token * run.dtype.itemsize)

"""A transformer of diffusers on a number of GPUs: bytes sent and peak memory of a training step.

The whole step is traced on meta tensors, as the rank with the most tokens computes it: that is the
last. The optimizer is the plugin's, without EMA weights.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from opensora_sp.common.files import read_json
from opensora_sp.common.graphs import is_backward_running
from opensora_sp.parallel import CommLedger, SequenceMesh, parallelize
from opensora_sp.parallel.collectives import all_to_all

from .live_peak import CUBLAS_WORKSPACE, AllocatorPeak, fused_attention
from .memory import GradientBucket, MemoryPeak, ModelSizes, Persistent, Zero

ADAPTED = ["to_q", "to_k", "to_v", "to_out.0"]


@dataclass(frozen=True)
class Batch:
    """Clips of one shape: frames and pixels of the video, and tokens of each text."""

    size: int
    frames: int
    height: int
    width: int
    text: int

    def check_sides(self, pixels: int) -> None:
        """Raise ValueError unless the sides are multiples of the pixels of a token."""
        if self.height % pixels or self.width % pixels:
            raise ValueError(
                f"got --size {self.height} {self.width}; expected multiples of {pixels}, the "
                "pixels of a token; round them"
            )


@dataclass(frozen=True)
class StepEstimate:
    """A training step on the rank with the most tokens.

    Attributes:
        lora: rank of the adapters that are trained alone; None if all weights are.
        checkpointing: gradient checkpointing of blocks.
        forward, backward: bytes sent to other ranks. With ``recompute_communication`` the bytes of
            forward are sent once more.
        kept: bytes received from other ranks and kept for the recomputation of blocks.
        saved: bytes of activations at the end of the forward pass, with those.
        state: bytes of weights and of the optimizer's state.
    """

    lora: int | None
    checkpointing: bool
    forward: int
    backward: int
    kept: int
    saved: int
    state: Persistent
    peak: MemoryPeak


def build(source: str, changes: Mapping[str, Any]) -> Any:
    """The model on the meta device, of a class name or of a folder with its ``config.json``.

    Raises:
        ValueError: if the inputs of the class are not known.
    """
    config = Path(source) / "config.json"
    settings = read_json(config) if config.is_file() else {"_class_name": source}
    name = settings.get("_class_name") if isinstance(settings, dict) else None
    if name not in INPUTS:
        raise ValueError(
            f"got a model of class {name}; expected one of {sorted(INPUTS)}, whose inputs are "
            "known; name one, or a folder with its config.json, or the path of a config"
        )
    # Takes seconds.
    import diffusers

    model_class = getattr(diffusers, name)
    unknown = sorted(changes.keys() - inspect.signature(model_class).parameters.keys())
    try:
        if unknown:
            raise TypeError(f"unknown: {', '.join(unknown)}")
        with torch.device("meta"):
            return model_class.from_config({**settings, **changes})
    # Diffusers checks no types.
    except Exception as error:
        raise ValueError(
            f"got a config of {name} from which it cannot be built ({error}); expected values that "
            f"its constructor takes; correct {config if config.is_file() else '--cfg-options'}"
        ) from error


def estimate(
    model: Any,
    batch: Batch,
    *,
    gpus: int,
    ranks: int,
    dtype: torch.dtype = torch.bfloat16,
    lora: int | None = None,
    checkpointing: bool = True,
) -> StepEstimate:
    """A training step of a model that ``build`` has made, which is changed.

    Args:
        gpus: processes, over which ZeRO stage 2 shards; ``ranks`` of them share the batch.
        lora: rank of adapters that are trained alone.
    """
    with torch.device("meta"):
        inputs = INPUTS[type(model).__name__](model.config, batch)
        if lora is not None:
            from peft import LoraConfig

            model.requires_grad_(False)
            model.add_adapter(LoraConfig(r=lora, target_modules=ADAPTED))
    inputs = {name: tensor.to(dtype) for name, tensor in inputs.items()}
    # ModelMixin.to warns of modules that are small.
    nn.Module.to(model, dtype)
    if checkpointing:
        model.enable_gradient_checkpointing()
    mesh = SequenceMesh.imagined(ranks, ranks - 1)
    parallelize(model, mesh)

    zero = Zero(gpus, 2, dtype.itemsize)
    trainable = [p.numel() for p in model.parameters() if p.requires_grad]
    tensors = [*model.parameters(), *model.buffers()]
    frozen = sum(tensor.numel() for tensor in tensors) - sum(trainable)
    sizes = ModelSizes((), (), tuple(trainable), frozen)
    state = Persistent.training(sizes, zero, saves_frozen=lora is None)
    state = dataclasses.replace(state, ema=0)

    # The engine learns in a first pass which blocks are recomputed.
    for _ in range(2 if checkpointing and ranks > 1 else 1):
        trace = _Trace(GradientBucket(zero, sizes), mesh.sp_group)
        peaks = trace.step(model, inputs)
    moment, gradients, activations = max(peaks, key=lambda peak: sum(peak[1:]))
    total = state.total + gradients + activations
    return StepEstimate(
        lora,
        checkpointing,
        forward=trace.sent("forward"),
        backward=trace.sent("backward"),
        kept=trace.received if checkpointing else 0,
        saved=trace.saved,
        state=state,
        peak=MemoryPeak(total, moment, gradients, activations, trace.largest),
    )


class _Trace(AllocatorPeak):
    """Counts live bytes, and what exchanges would send: of meta tensors they send nothing."""

    def __init__(self, bucket: GradientBucket, group: Any) -> None:
        super().__init__()
        self.bucket, self.group, self.counter = bucket, group, CommLedger()
        self.received = self.saved = 0

    def step(self, model: Any, inputs: dict[str, Tensor]) -> list[tuple[str, int, int]]:
        """Trace a step; its moments, with the bytes of gradients and of activations."""
        peaks: list[tuple[str, int, int]] = []
        constant = 2 * CUBLAS_WORKSPACE + sum(tensor.nbytes for tensor in inputs.values())

        def count(parameter: Tensor) -> None:
            peaks.append(("backward", self.bucket.take_peak(), self.peak + constant))
            self.bucket.add(parameter.numel())
            parameter.grad = None
            self.reset_peak()

        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        hooks = [parameter.register_post_accumulate_grad_hook(count) for parameter in trained]
        with self, self.counter, fused_attention("cuda"):
            (output,) = model(**inputs, return_dict=False)
            self.saved = self.live
            (output.float() - 1).square().mean().backward()
        for hook in hooks:
            hook.remove()

        self.bucket.reduce()
        peaks.append(("backward", self.bucket.take_peak(), constant))
        peaks.append(("optimizer step", self.bucket.at_step(), constant))
        return peaks

    def sent(self, phase: str) -> int:
        """Bytes sent in a phase."""
        return sum(number for key, number in self.counter.bytes.items() if key[1] == phase)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if func is torch.ops.opensora_sp.exchange.default:
            tokens, _, _, send, recv, _, kind, backward = args
            # Recomputation takes what was kept.
            if backward or not is_backward_running():
                all_to_all(tokens, send, recv, self.group, kind=kind, backward=backward)
            if not is_backward_running():
                self.received += result.nbytes
        return result


# The inputs of the models, as their pipelines make them.


def _wan(config: Any, batch: Batch) -> dict[str, Tensor]:
    batch.check_sides(8 * max(config.patch_size[1:]))
    latents = (batch.frames - 1) // 4 + 1, batch.height // 8, batch.width // 8
    inputs = dict(
        hidden_states=torch.zeros(batch.size, config.in_channels, *latents),
        timestep=torch.zeros(batch.size),
        encoder_hidden_states=torch.zeros(batch.size, batch.text, config.text_dim),
    )
    if config.image_dim is not None:
        inputs["encoder_hidden_states_image"] = torch.zeros(batch.size, 257, config.image_dim)
    return inputs


def _flux(config: Any, batch: Batch) -> dict[str, Tensor]:
    # Pipelines pack two by two positions of latents into a token.
    batch.check_sides(16)
    tokens = (batch.height // 16) * (batch.width // 16)
    inputs = dict(
        hidden_states=torch.zeros(batch.size, tokens, config.in_channels),
        encoder_hidden_states=torch.zeros(batch.size, batch.text, config.joint_attention_dim),
        pooled_projections=torch.zeros(batch.size, config.pooled_projection_dim),
        timestep=torch.zeros(batch.size),
        img_ids=torch.zeros(tokens, 3),
        txt_ids=torch.zeros(batch.text, 3),
    )
    if config.guidance_embeds:
        inputs["guidance"] = torch.zeros(batch.size)
    return inputs


INPUTS: dict[str, Callable[[Any, Batch], dict[str, Tensor]]] = {
    "WanTransformer3DModel": _wan,
    "FluxTransformer2DModel": _flux,
}

"""Trainable parameters of a run (all, some by name, or adapters alone), optimizer, EMA weights.

Checkpoints of a run with LoRA adapters hold the adapters alone. So ``load`` names the weights that
they are for at every start, also where a run resumes, and has to name the same ones.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from opensora_sp.checkpoint.adapters import (
    AdapterKind,
    Adapters,
    Base,
    adapter_files,
    base_digest,
    check_adapters,
    open_adapters,
)
from opensora_sp.checkpoint.reader import Weights, open_weights
from opensora_sp.checkpoint.state_dict import fitted
from opensora_sp.checkpoint.writer import on_rank_0
from opensora_sp.checkpoint.zero_shards import copy_weights
from opensora_sp.common.tensors import to_device
from opensora_sp.config import TrainConfig
from opensora_sp.config.optimizer_options import Optimizer
from opensora_sp.config.sections import Lora
from opensora_sp.data.randomness import generator
from opensora_sp.models.base import ConditionedModel
from opensora_sp.models.feature_dropout import FeatureDropout
from opensora_sp.models.lora import add_lora, chosen, matches, target_layers
from opensora_sp.models.quantized import quantize_blocks

logger = logging.getLogger(__name__)


def choose_trained(model: nn.Module, cfg: TrainConfig) -> None:
    """Freeze what a config does not train, quantise what it quantises, and add its adapters.

    Raises:
        ValueError: as ``freeze``, ``quantize_blocks`` and ``add_lora`` do.
    """
    freeze(model, cfg.freeze)
    if cfg.lora is not None:
        if cfg.lora.quantize is not None:
            quantize_blocks(model)
        add_lora(model, **cfg.lora.layer_options)


def freeze(model: nn.Module, patterns: Sequence[str]) -> None:
    """Freeze parameters by patterns of names; the last match decides, ``!pattern`` trains.

    Raises:
        ValueError: if a pattern matches no parameter, or no parameter is trained.
    """
    parameters = dict(model.named_parameters())
    for pattern in patterns:
        if not any(matches(name, pattern) for name in parameters):
            # A pattern with a typing error would train what was meant to be frozen.
            modules = list(dict.fromkeys(name.partition(".")[0] for name in parameters))
            raise ValueError(
                f"got {pattern!r} in freeze, which matches no parameter; expected patterns of "
                f"names in {modules}; write for example 'y_embedder.*'"
            )

    for name in chosen(parameters, patterns):
        parameters[name].requires_grad_(False)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError(
            f"got freeze {tuple(patterns)}, which leaves nothing to train; expected some "
            "parameters; add '!pattern' for the parameters to train"
        )


def check_trained(cfg: TrainConfig) -> None:
    """Raise ValueError as ``choose_trained`` would, without allocating the model."""
    if cfg.freeze or cfg.lora is not None:
        with torch.device("meta"):
            choose_trained(cfg.model_spec.build(), cfg)


def initial_weights(cfg: TrainConfig) -> Weights:
    """The weights that ``cfg.load`` names, in any layout; of a run's checkpoint not the EMA."""
    assert cfg.load is not None
    return open_weights(cfg.load, allow_pickle=cfg.allow_pickle)


# LoRA


@dataclass(frozen=True)
class LoraRun:
    """The adapters of a run.

    Attributes:
        layers: names of the adapted layers.
        base: the weights that they are trained on.
    """

    layers: list[str]
    settings: Lora
    base: Base

    def files(self) -> dict[str, bytes]:
        """The JSON files next to the adapters, by name."""
        kind, dropout = kind_of(self.settings), self.settings.dropout
        return adapter_files(self.layers, kind, self.base, dropout=dropout)


def kind_of(lora: Lora) -> AdapterKind:
    """Rank and scale of the adapters of a config."""
    return AdapterKind(lora.rank, lora.alpha, lora.use_rslora, lora.use_dora)


def load_base(cfg: TrainConfig, module: ConditionedModel) -> LoraRun:
    """Copy the weights of ``load`` into the bare model, to which adapters are added. Collective."""
    assert cfg.lora is not None and cfg.load is not None
    weights = fitted(initial_weights(cfg), module, convert=cfg.convert)
    layers = target_layers(module, cfg.lora.targets)
    sha256 = [""]
    with on_rank_0("reading the weights of load") as is_rank_0:
        if is_rank_0:
            # By one rank: all would read the whole file.
            sha256 = [base_digest(weights, layers)]
    dist.broadcast_object_list(sha256, src=0)

    copy_weights(weights, module, None)
    return LoraRun(layers, cfg.lora, Base(cfg.load, sha256[0]))


def start_of(lora: Lora) -> list[Adapters]:
    """The adapters of ``lora.load``, of a run not the EMA; none where new ones are trained."""
    return [] if lora.load is None else [open_adapters(lora.load, ema=False)]


def check_start(cfg: TrainConfig, lora: Lora) -> None:
    """Raise ValueError unless ``lora.load``, if set, are adapters as the config describes them."""
    for adapters in start_of(lora):
        with torch.device("meta"):
            bare = cfg.model_spec.build()
        check_adapters(adapters, bare)
        expected, layers = kind_of(lora), target_layers(bare, lora.targets)
        differing = set(adapters.layers).symmetric_difference(layers)
        if adapters.kind != expected or differing or adapters.scale != 1:
            where = f"for {sorted(differing)[0]!r} in one of them alone, " if differing else ""
            raise ValueError(
                f"got lora.load {lora.load!r}, whose {len(adapters.layers)} adapters have "
                f"{adapters.kind} and scale {adapters.scale:g}; expected {where}{len(layers)} "
                f"layers of lora.targets, {expected} and scale 1; set rank, alpha, targets, "
                "use_rslora and use_dora as in their adapter_config.json"
            )


@torch.no_grad()
def load_start(run: LoraRun, module: nn.Module) -> None:
    """Copy the checked adapters of ``lora.load``, if set, into a model that has new ones."""
    parameters = dict(module.named_parameters())
    for adapters in start_of(run.settings):
        theirs = adapters.base
        if theirs is not None and theirs.sha256 != run.base.sha256:
            message = "lora.load %s was trained on other weights (%s) of this model than %s"
            logger.warning(message, adapters.path, theirs.name, run.base.name)
        for name, stored in adapters.weights.tensors.items():
            parameters[name].copy_(stored.read())


class DropoutDraws:
    """Draws of the adapters' dropout, which depend on the seed and the micro-batch alone."""

    def __init__(self, module: nn.Module, seed: int) -> None:
        self.seed = seed
        modules = module.modules()
        self.layers = [module for module in modules if isinstance(module, FeatureDropout)]
        self.weight = next(p for p in module.parameters() if p.requires_grad)

    @contextmanager
    def dropped(self, micro_batch: int) -> Iterator[None]:
        """Drop features in forward and backward of a micro-batch, not in validation after it."""
        self.draw(micro_batch)
        try:
            yield
        finally:
            for layer in self.layers:
                layer.kept = None

    def draw(self, micro_batch: int) -> None:
        """Set the features that the micro-batch of this number keeps."""
        if not self.layers:
            return
        sizes, rate = [layer.features for layer in self.layers], self.layers[0].rate
        draws = generator(self.seed, "lora_dropout", micro_batch)
        drawn = torch.from_numpy(draws.random(sum(sizes), dtype=np.float32))
        # One transfer and few kernels for all layers.
        kept = to_device(drawn, self.weight.device).ge(rate).to(self.weight.dtype) / (1 - rate)
        for layer, part in zip(self.layers, kept.split(sizes), strict=True):
            layer.kept = part


def check_base(run: LoraRun, checkpoint: Path) -> None:
    """Raise ValueError if a checkpoint's adapters were trained on other weights than ``load``."""
    saved = open_adapters(str(checkpoint / "model")).base
    if saved is not None and saved.sha256 != run.base.sha256:
        raise ValueError(
            f"got load {run.base.name!r} to resume from {checkpoint}, whose adapters are for other "
            f"weights ({saved.name!r} when it was written); expected the same; change load back, "
            "or start a new run with another --cfg-options outputs=..."
        )


# The optimizer


def make_optimizer(cfg: TrainConfig, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """An elementwise optimizer of torch by its name, or ColossalAI's HybridAdam on CUDA.

    It has no state yet: the plugin, which shards the weights, makes what a class begins with.

    Raises:
        ValueError: for numbers that the class refuses.
    """
    name, options = cfg.optimizer.type, cfg.optimizer.options
    if name == "HybridAdam":
        from opensora_sp.plugin.fused_step import hybrid_adam

        return hybrid_adam(parameters, **options)

    try:
        optimizer: torch.optim.Optimizer = getattr(torch.optim, name)(parameters, **options)
    except ValueError as error:
        raise ValueError(
            f"got options {options} of optimizer.type {name!r}; expected what torch.optim.{name} "
            f"takes ({error}); change them"
        ) from None
    # Adagrad begins with a state of whole weights; the plugin makes one of this rank's shards.
    optimizer.state.clear()
    return optimizer


def check_optimizer(cfg: TrainConfig) -> None:
    """Raise ValueError if torch's class refuses the options; HybridAdam is not built for this."""
    if cfg.optimizer.type != "HybridAdam":
        make_optimizer(cfg, [nn.Parameter(torch.zeros(1))])


def check_same_state(cfg: TrainConfig, saved: dict[str, Any], checkpoint: Path) -> None:
    """Raise ValueError if a checkpoint's moments are of another optimizer than the config's.

    Args:
        saved: ``optimizer`` of the config that the checkpoint was written with.
    """
    theirs = Optimizer(**saved)
    if theirs.moments != cfg.optimizer.moments or theirs.scalars != cfg.optimizer.scalars:
        raise ValueError(
            f"got optimizer.type {cfg.optimizer.type!r} to resume from {checkpoint}, which has the "
            f"state of {theirs.type!r}; expected an optimizer with the same moments; change it "
            f"back, or start a new run from these weights with --cfg-options load={checkpoint}"
        )


# Learning rate and EMA decay: functions of the step alone, so that resuming needs no state


def learning_rate(cfg: TrainConfig, step: int) -> float:
    """Learning rate of a step, counted from 0: linear warm-up, then ``cfg.lr_schedule``.

    Warm-up reaches ``optimizer.lr`` after ``warmup_steps``, as Open-Sora's does. Linear and cosine
    decay then go down to zero at ``max_steps``.
    """
    warm = min(1.0, (step + 1) / (cfg.warmup_steps + 1))
    if cfg.lr_schedule == "constant":
        return cfg.optimizer.lr * warm
    progress = max(0, step - cfg.warmup_steps) / max(1, cfg.max_steps - cfg.warmup_steps)
    if cfg.lr_schedule == "linear":
        return cfg.optimizer.lr * warm * (1 - progress)
    return cfg.optimizer.lr * warm * 0.5 * (1 + math.cos(math.pi * progress))


def ema_decay(decay: float, step: int, *, warmup: bool) -> float:
    """EMA decay of a step, counted from 0; see ``ema_warmup`` in ``TrainConfig``."""
    return min(decay, (1 + step) / (10 + step)) if warmup else decay


def describe_schedule(cfg: TrainConfig) -> list[str]:
    """Optimizer, learning rate and EMA weights, for the log and the plan."""
    optimizer, rate = cfg.optimizer, f"{cfg.optimizer.lr:.3g}"
    moments = ", ".join(optimizer.moments) or "no moments"

    end = f"step {cfg.max_steps}" if cfg.max_steps else f"the end of epoch {cfg.epochs}"
    if cfg.lr_schedule == "constant":
        after = f"constant at {rate}"
    else:
        after = f"{cfg.lr_schedule} decay from {rate} to 0 at {end}"
    warmup = f"{cfg.warmup_steps} steps of warm-up, then " if cfg.warmup_steps else ""

    growing = f" (growing from {ema_decay(cfg.ema_decay, 0, warmup=True):.3g})"
    return [
        f"optimizer: {optimizer.type} ({moments}), weight decay {optimizer.weight_decay:g}",
        f"learning rate: {warmup}{after}",
        f"EMA weights: decay {cfg.ema_decay:g}{growing if cfg.ema_warmup else ''}",
    ]


# EMA weights


class ShardedEma:
    """Average of the fp32 master weights; each rank keeps the shards that ZeRO assigns to it.

    It begins at the weights of its creation.

    Args:
        master_weights: this rank's shards, by parameter.
        decay: of a step, in [0, 1).
        warmup: let the decay grow with the step, ``min(decay, (1 + step) / (10 + step))``, so that
            the first steps are forgotten. Open-Sora's releases do not.

    Attributes:
        shards: the average, by parameter. Shards that are views of one buffer have averages that
            are views of one buffer, and are averaged by one kernel.
    """

    def __init__(
        self, master_weights: dict[str, Tensor], decay: float, *, warmup: bool = True
    ) -> None:
        self.decay, self.warmup = decay, warmup
        self.shards: dict[str, Tensor] = {}
        # Buffers of master weights, by their identity, with the averages.
        self._buffers: dict[int, tuple[Tensor, Tensor]] = {}

        for name, shard in master_weights.items():
            # By the buffer, since an average for each of hundreds of shards would be as many
            # kernels.
            buffer = shard if shard._base is None else shard._base
            if id(buffer) not in self._buffers:
                self._buffers[id(buffer)] = buffer, buffer.detach().clone()
            average = self._buffers[id(buffer)][1]
            place = int(shard.storage_offset()) - int(buffer.storage_offset())
            # As many views as shards, so that checkpoints name them, of few buffers.
            self.shards[name] = average.as_strided(shard.shape, shard.stride(), place)

    @torch.no_grad()
    def update(self, step: int, taken: Tensor) -> None:
        """Average in the weights after optimizer step ``step``, counted from 0.

        Args:
            taken: whether the step was taken, a boolean ``[]`` on the device of the weights. A step
                that was skipped leaves the average as it is. The host does not wait for it.
        """
        # A factor of 0 in place of a branch: whether the step was taken is known on the device
        # alone.
        weight = (1 - ema_decay(self.decay, step, warmup=self.warmup)) * taken
        for buffer, average in self._buffers.values():
            average.lerp_(buffer, weight.to(average.dtype))

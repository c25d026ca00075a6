"""LoRA adapters on disk, in peft's layout, and merged into the weights that they are for.

A folder of adapters::

    adapter_config.json          rank, alpha, kind and layers, as peft reads them
    adapter_model.safetensors    "base_model.model.<layer>.lora_A.weight", "...lora_B.weight", and
                                 with DoRA "...lora_magnitude_vector"
    base.json, config.json       ours: which weights they were trained on, and their model

Merging adds ``scale * alpha / rank * B A`` to the weight of a layer (Hu et al., 2021). Adapters of
DoRA (Liu et al., 2024) add ``scale`` times the change that they make to the weight alone.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor, nn

from opensora_sp.common.files import read_json
from opensora_sp.common.importing import nearest
from opensora_sp.models.lora import ADAPTER

from .hub import ADAPTERS, describe_missing, local_path
from .paths import ADAPTER_CONFIG, newest_checkpoint
from .reader import Stored, Weights, open_weights
from .tensor_file import as_bytes

ADAPTER_WEIGHTS, BASE_FACTS = "adapter_model.safetensors", "base.json"
MAX_SCALE = 1000.0
# Values of an adapter_config.json under which adapters are what this file merges.
MUST_BE: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "use_dora": (False, True),
    "fan_in_fan_out": (False,),
    "modules_to_save": (None, []),
    "rank_pattern": (None, {}),
    "alpha_pattern": (None, {}),
    "layer_replication": (None, []),
    # Others also change the weights that the adapters are for.
    "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal"),
}
# The norms of DoRA, between ".lora_" and the name of the adapter.
NORMS = "magnitude_vector"
_NAME = re.compile(
    r"(?:base_model\.model\.)?(.+)\.lora_(?:([AB])(?:\.\w+)?\.weight|(magnitude_vector)(?:\.\w+)*)"
)
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Base:
    """The weights that adapters were trained on.

    Attributes:
        name: where they came from.
        sha256: of the adapted layers' weights, see ``base_digest``.
    """

    name: str
    sha256: str


@dataclass(frozen=True)
class AdapterKind:
    """Rank and scale of adapters, as in ``adapter_config.json``."""

    rank: int
    alpha: float
    use_rslora: bool = False
    use_dora: bool = False

    @property
    def scaling(self) -> float:
        """By which ``B A`` is multiplied."""
        return self.alpha / (math.sqrt(self.rank) if self.use_rslora else self.rank)


@dataclass(frozen=True)
class Adapters:
    """Opened adapters; none of their tensors are read yet.

    Attributes:
        weights: A ``[rank, in]`` and B ``[out, rank]``, as "<layer>.lora_A.default.weight", the
            names of a model's parameters; with DoRA also the norms ``[out]``.
        kind: rank and scale.
        base: None in folders of other programs.
        scale: by which they are multiplied beyond ``kind.scaling``.
    """

    path: Path
    weights: Weights
    kind: AdapterKind
    base: Base | None
    scale: float = 1.0

    @property
    def layers(self) -> list[str]:
        """The names of the adapted layers."""
        return list(dict.fromkeys(layer_of(name) for name in self.weights.tensors))

    def pair(self, layer: str) -> tuple[Stored, Stored]:
        """A and B of a layer."""
        tensors = self.weights.tensors
        return tensors[parameter_name(layer, "A")], tensors[parameter_name(layer, "B")]

    def delta(self, layer: str, weight: Tensor) -> Tensor:
        """Change of a layer's weight, ``[out, in]`` in at least float32."""
        down, up = (stored.read().to(weight) for stored in self.pair(layer))
        if not self.kind.use_dora:
            return self.scale * self.kind.scaling * (up @ down)

        changed: Tensor = weight + self.kind.scaling * (up @ down)
        norms = self.weights.tensors[parameter_name(layer, NORMS)].read().to(weight)
        ratios: Tensor = norms / torch.linalg.norm(changed, dim=1)
        return self.scale * (ratios[:, None] * changed - weight)


def parameter_name(layer: str, matrix: str) -> str:
    """The parameter of a model with adapters: of a layer, "A", "B" or ``NORMS``."""
    return f"{layer}.lora_{matrix}.{ADAPTER}.weight"


def layer_of(parameter: str) -> str:
    """The adapted layer of a parameter."""
    return parameter.rpartition(".lora_")[0]


def name_on_disk(parameter: str) -> str:
    """peft's name of a parameter, without the name of the adapter."""
    if parameter.endswith(f".lora_{NORMS}.{ADAPTER}.weight"):
        return f"base_model.model.{parameter.removesuffix(f'.{ADAPTER}.weight')}"
    return f"base_model.model.{parameter.replace(f'.{ADAPTER}.', '.')}"


def adapter_files(
    layers: Sequence[str], kind: AdapterKind, base: Base, *, dropout: float = 0.0
) -> dict[str, bytes]:
    """The JSON files of a folder of adapters, by name."""
    peft = {
        "peft_type": "LORA",
        "r": kind.rank,
        "lora_alpha": kind.alpha,
        "lora_dropout": dropout,
        "use_rslora": kind.use_rslora,
        "use_dora": kind.use_dora,
        "bias": "none",
        "target_modules": sorted(layers),
        "base_model_name_or_path": base.name,
        "inference_mode": True,
    }
    files = {ADAPTER_CONFIG: peft, BASE_FACTS: vars(base)}
    return {name: (json.dumps(facts, indent=1) + "\n").encode() for name, facts in files.items()}


def find_adapters(path: str | Path, *, ema: bool = True) -> Path | None:
    """The folder of the adapters at a path: itself, its file, or of a run's newest checkpoint.

    None if there are none.
    """
    folder = Path(path)
    if folder.is_file():
        folder = folder.parent
    elif folder.is_dir() and not (folder / ADAPTER_CONFIG).is_file():
        checkpoint = newest_checkpoint(folder)
        if checkpoint is not None:
            folder = checkpoint / ("ema" if ema else "model")
    return folder if (folder / ADAPTER_CONFIG).is_file() else None


def parse_source(text: str) -> tuple[str, float]:
    """``PATH`` or ``PATH:SCALE`` -> path and scale.

    Raises:
        ValueError: for a scale that is no finite number, or beyond ``MAX_SCALE``.
    """
    path, _, number = text.rpartition(":")
    # A file may have a colon in its name.
    if not path or Path(text).exists():
        return text, 1.0
    try:
        scale = float(number)
    except ValueError:
        return text, 1.0
    # nan is no number up to it, either.
    if not abs(scale) <= MAX_SCALE:
        raise ValueError(
            f"got adapters {text!r} with the scale {number}; expected a finite number up to "
            f"{MAX_SCALE:g}; write for example {path}:0.8"
        )
    return path, scale


def open_adapters(source: str, *, ema: bool = True) -> Adapters:
    """Open adapters; only names and shapes are read.

    Args:
        source: ``PATH`` or ``PATH:SCALE``; see ``find_adapters``. A PATH that is not on disk is a
            name on the Hugging Face hub, ``owner/repository[/path][@revision]``.
        ema: choose the EMA weights of a run's checkpoint.

    Raises:
        ValueError: if there are none in safetensors, or they are of another kind than what
            ``adapter_files`` describes.
    """
    path, scale = parse_source(source)
    place = local_path(path, kind=ADAPTERS, more=(BASE_FACTS,))
    folder = find_adapters(place, ema=ema)
    if folder is None:
        missing = "" if place.exists() else f" ({describe_missing(path)})"
        raise ValueError(
            f"got adapters {path!r}, where there is no {ADAPTER_CONFIG}{missing}; expected a run "
            "that was trained with lora=dict(...), its checkpoint, a folder that peft wrote, or a "
            "name on the hub, whose first part is no folder here; check the path, or pass whole "
            "weights as --ckpt"
        )

    config = read_json(folder / ADAPTER_CONFIG)
    kind = _kind(config, folder)
    file = folder / ADAPTER_WEIGHTS
    if not file.is_file():
        raise ValueError(
            f"got {folder} with {ADAPTER_CONFIG} and without {ADAPTER_WEIGHTS}; expected both; "
            "copy the folder again, or save a pickled adapter_model.bin with peft's "
            "save_pretrained(..., safe_serialization=True)"
        )
    weights = open_weights(file)
    tensors = _by_parameter(weights.tensors, folder, with_norms=kind.use_dora)
    ranks = {stored.shape[0] for name, stored in tensors.items() if ".lora_A." in name}
    if ranks - {config["r"]}:
        raise ValueError(
            f"got {folder / ADAPTER_CONFIG} with r = {config['r']} for adapters of rank "
            f"{sorted(ranks)}; expected the same rank; copy both files again from one folder"
        )
    return Adapters(folder, replace(weights, tensors=tensors), kind, _base(folder), scale)


def _base(folder: Path) -> Base | None:
    """The recorded weights that adapters were trained on; None if nothing is recorded."""
    file = folder / BASE_FACTS
    if not file.is_file():
        return None
    try:
        return TypeAdapter(Base).validate_python(read_json(file))
    except ValidationError:
        raise ValueError(
            f"got {file} without texts for name and sha256; expected what a training writes; copy "
            "the file again, or remove it"
        ) from None


def _kind(config: Any, folder: Path) -> AdapterKind:
    """Rank and scale of an ``adapter_config.json``."""
    others = ["no names and values"]
    if isinstance(config, dict):
        differing = [key for key in MUST_BE if config.get(key, MUST_BE[key][0]) not in MUST_BE[key]]
        others = [f"{key} = {config[key]!r}" for key in differing]
    if others:
        raise ValueError(
            f"got {folder / ADAPTER_CONFIG} with {', '.join(others)}; expected LoRA or DoRA of "
            "linear layers; merge such adapters with peft (merge_and_unload) and pass the result "
            "as --ckpt"
        )
    try:
        # Rank-stabilised LoRA (Kalajdzievski, 2023), which peft writes with the same keys.
        kind = AdapterKind(
            rank=int(config["r"]),
            alpha=float(config["lora_alpha"]),
            use_rslora=bool(config.get("use_rslora")),
            use_dora=bool(config.get("use_dora")),
        )
        # A rank of zero has no scale.
        _ = kind.scaling
        return kind
    except (KeyError, TypeError, ValueError, ZeroDivisionError):
        raise ValueError(
            f"got {folder / ADAPTER_CONFIG} with r = {config.get('r')!r} and lora_alpha = "
            f"{config.get('lora_alpha')!r}; expected two numbers; copy the file again"
        ) from None


def _by_parameter(
    tensors: Mapping[str, Stored], folder: Path, *, with_norms: bool
) -> dict[str, Stored]:
    """The tensors by names of parameters, A and B of each layer, and with DoRA its norms."""
    matrices = {"A": 2, "B": 2, **({NORMS: 1} if with_norms else {})}
    parameters = {}
    for name, stored in tensors.items():
        match = _NAME.fullmatch(name)
        matrix = "" if match is None else match[2] or match[3]
        if match is None or len(stored.shape) != matrices.get(matrix):
            raise ValueError(
                f"got {name} {list(stored.shape)} among the adapters in {folder}; expected lora_A "
                f"and lora_B of linear layers alone, and with use_dora their lora_{NORMS}; merge "
                "such adapters with peft (merge_and_unload) and pass the result as --ckpt"
            )
        parameters[parameter_name(match[1], matrix)] = stored

    for name in parameters:
        layer = layer_of(name)
        missing = [m for m in matrices if parameter_name(layer, m) not in parameters]
        if missing:
            raise ValueError(
                f"got adapters of {layer} in {folder} without lora_{missing[0]}; expected "
                f"{', '.join(matrices)} of each layer; copy the file again"
            )
    return parameters


def check_adapters(adapters: Adapters, model: nn.Module) -> None:
    """Raise ValueError unless a bare model, which may be on the meta device, has their layers.

    The message has the nearest name of a layer that is missing.
    """
    layers = {
        name: tuple(module.weight.shape)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
    }
    advice = "pass the model that they were trained on"
    if adapters.base is not None:
        advice += f", {adapters.base.name}"

    unknown = [name for name in adapters.layers if name not in layers]
    if unknown:
        more = f" and {len(unknown) - 1} more" if len(unknown) > 1 else ""
        raise ValueError(
            f"got adapters of {unknown[0]!r}{more} in {adapters.path}; expected linear layers of "
            f"{type(model).__name__} as configured ({nearest(unknown[0], layers)}); {advice}"
        )

    for name in adapters.layers:
        down, up = (stored.shape for stored in adapters.pair(name))
        norms = adapters.weights.tensors.get(parameter_name(name, NORMS))
        fits = norms is None or norms.shape == up[:1]
        if (up[0], down[1]) != layers[name] or up[1] != down[0] or not fits:
            raise ValueError(
                f"got adapters of another model in {adapters.path}: {name} has A {list(down)} and "
                f"B {list(up)}; expected them for a weight {list(layers[name])}; {advice}"
            )


def merged(weights: Weights, adapters: Sequence[Adapters]) -> Weights:
    """Weights of a bare model with checked adapters added, in the dtype of the weights.

    Sums are computed in at least float32 when a tensor is read, and rounded once.
    """
    tensors, notes = dict(weights.tensors), list(weights.notes)
    by_layer: dict[str, list[Adapters]] = {}
    for source in adapters:
        summary = f"{len(source.layers)} adapters of {source.path}, scale {source.scale:g}"
        notes.append(f"merged {summary}")
        for layer in source.layers:
            by_layer.setdefault(layer, []).append(source)

    for layer, added in by_layer.items():
        stored = _weight_of(weights, layer)
        tensors[f"{layer}.weight"] = Stored(stored.shape, partial(_sum, stored, layer, added))
    return replace(weights, tensors=tensors, notes=tuple(notes))


def _weight_of(weights: Weights, layer: str) -> Stored:
    """The weight of a layer; a model may be loaded without some of its tensors."""
    stored = weights.tensors.get(f"{layer}.weight")
    if stored is None:
        raise ValueError(
            f"got adapters of {layer}, whose weight is not in {weights.path}; expected the weights "
            "of all adapted layers; load the model with strict=True, or leave the adapters out"
        )
    return stored


def _sum(stored: Stored, layer: str, adapters: Sequence[Adapters]) -> Tensor:
    # Sums of bf16 would round once for each adapter.
    weight = stored.read()
    wide = torch.promote_types(weight.dtype, torch.float32)
    total = weight.to(wide)
    for source in adapters:
        total = total + source.delta(layer, weight.to(wide))
    return total.to(weight.dtype)


def base_digest(weights: Weights, layers: Iterable[str]) -> str:
    """SHA-256 of the weights of layers, rounded to bf16.

    So it is the same for a file in fp32 and its conversion to bf16, and does not depend on tensors
    that conversions change. It reads these weights once: a few seconds for a model of 1 B.
    """
    hashed = hashlib.sha256()
    # Sorted: adapters list their layers in any order.
    for layer in sorted(layers):
        rounded = _weight_of(weights, layer).read().to(torch.bfloat16)
        hashed.update(layer.encode() + b"\0")
        hashed.update(as_bytes(rounded).numpy().data)
    return hashed.hexdigest()


def warn_of_other_base(weights: Weights, adapters: Sequence[Adapters]) -> None:
    """Warn if adapters are merged into other weights than they were trained on."""
    for source in adapters:
        base = source.base
        if base is not None and base_digest(weights, source.layers) != base.sha256:
            logger.warning(
                f"adapters: {source.path} were trained on other weights ({base.name}) of this "
                f"model than {weights.path}; samples may be worse"
            )

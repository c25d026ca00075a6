"""Low-rank adapters (LoRA; Hu et al., 2021) on the linear layers of a model, by peft.

A layer ``W x + b`` becomes ``W x + b + alpha / rank * B A x``. Only A ``[rank, in]`` and B ``[out,
rank]`` are trained. A is drawn and B begins at zero, so the model computes at first what it did.
With rsLoRA (Kalajdzievski, 2023) the factor is ``alpha / sqrt(rank)``. With DoRA (Liu et al., 2024)
the norms of the rows of the sum are trained as well, in a vector ``[out]``.

peft's layer takes the place of a ``Linear`` and keeps it as ``base_layer``. What a model computes
from a layer's weight without calling the layer would leave its adapter out: functions of weights
run for plain layers alone (``layers.py: is_plain``), and only ``Linear`` layers can be chosen, not
the convolution of ``PatchEmbed3D``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn

from opensora_sp.common.importing import nearest

# All linear layers of all blocks: self-attention, cross-attention and MLP.
DEFAULT_TARGETS = ("*blocks.*",)
# peft's name of the one adapter of each layer, and of the layer that it adapts.
ADAPTER, BASE = "default", "base_layer"


def matches(name: str, pattern: str) -> bool:
    """Whether a pattern of ``fnmatch``, with or without the ``!`` of an exception, fits a name."""
    return fnmatchcase(name, pattern.removeprefix("!"))


def chosen(names: Iterable[str], patterns: Sequence[str]) -> list[str]:
    """The names that patterns choose: the last that matches decides, ``!pattern`` excludes."""
    chosen_names = []
    for name in names:
        matching = [pattern for pattern in patterns if matches(name, pattern)]
        if matching and not matching[-1].startswith("!"):
            chosen_names.append(name)
    return chosen_names


def add_lora(
    model: nn.Module,
    *,
    rank: int,
    alpha: float,
    targets: Sequence[str] = DEFAULT_TARGETS,
    **options: Any,
) -> None:
    """Freeze a model and add trainable adapters to its linear layers, in place.

    Names of the frozen parameters change from ``<layer>.weight`` to ``<layer>.base_layer.weight``.
    Weights are drawn by torch's global generator, in the layers' dtype and on their device. The
    norms of DoRA begin at the norms of the weights.

    Args:
        rank: of A and B.
        alpha: scale of the adapters, times ``rank``.
        targets: names of layers or patterns of them; the last match decides, ``!pattern`` excludes.
        options: ``dropout``, ``use_rslora`` and ``use_dora`` of ``AdaptedLinear``.

    Raises:
        ValueError: if a pattern matches no linear layer, or none is chosen, or DoRA would divide by
            the norm of a row of zeros.
    """
    # Imports peft, which takes seconds.
    from .adapted_linear import AdaptedLinear

    names = target_layers(model, targets)
    model.requires_grad_(False)
    for name in names:
        parent, _, child = name.rpartition(".")
        layer: Any = model.get_submodule(name)
        adapted = AdaptedLinear(layer, ADAPTER, rank=rank, alpha=alpha, **options)
        for vector in adapted.lora_magnitude_vector.parameters():
            _check_norms(name, vector)
        # On the meta device peft leaves its weights in float32, and int8 weights are not cast.
        dtype = (layer.weight if layer.bias is None else layer.bias).dtype
        setattr(model.get_submodule(parent), child, adapted.to(dtype))


def _check_norms(layer: str, norms: Tensor) -> None:
    """Raise ValueError if a row of a layer's weight is zero; on the meta device none is known."""
    if norms.device.type != "meta" and not norms.all():
        raise ValueError(
            f"got lora.use_dora for {layer}, whose weight has rows of zeros; expected rows whose "
            f"norm is not zero, by which DoRA divides; add '!{layer}' to lora.targets, or set "
            "lora.use_dora=False"
        )


def target_layers(model: nn.Module, targets: Sequence[str]) -> list[str]:
    """The names of the linear layers that patterns choose.

    Raises:
        ValueError: if a pattern matches none, with the nearest names, or none is chosen.
    """
    layers = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    for pattern in targets:
        if not any(matches(name, pattern) for name in layers):
            raise ValueError(
                f"got {pattern!r} in lora.targets, which matches no linear layer of "
                f"{type(model).__name__}; expected names of layers, or patterns such as "
                f"{list(DEFAULT_TARGETS)}; {_nearest(pattern, layers)}"
            )

    names = chosen(layers, targets)
    if not names:
        raise ValueError(
            f"got lora.targets {list(targets)}, which leave no layer to adapt; expected at least "
            "one; put exceptions ('!pattern') after the patterns that they restrict"
        )
    return names


def targets_of_any_block(model: nn.Module, targets: Sequence[str]) -> tuple[str, ...]:
    """Patterns that choose, in all blocks, what ``targets`` choose in any: for a model like this
    one with fewer blocks.
    """
    layers = target_layers(model, targets)
    return tuple(dict.fromkeys(re.sub(r"\.\d+\.", ".*.", layer) for layer in layers))


def _nearest(pattern: str, layers: Sequence[str]) -> str:
    """The advice for a pattern without a match: the nearest name, or the nearest end of names."""
    text = pattern.removeprefix("!")
    ends: dict[str, None] = {}
    for name in layers:
        parts = name.split(".")
        ends.update(dict.fromkeys(f"*.{'.'.join(parts[i:])}" for i in (-1, -2)))
    # The end of a name alone is what peft would take.
    if f"*.{text}" in ends:
        return f"did you mean '*.{text}'?"
    return nearest(text, [*ends, *layers], otherwise=f"take some of {list(ends)[:8]}")


def lora_layers(model: nn.Module) -> dict[str, Any]:
    """The adapted layers by name."""
    return {
        name.removesuffix(f".{BASE}"): model.get_submodule(name.removesuffix(f".{BASE}"))
        for name, _ in model.named_modules()
        if name.endswith(f".{BASE}")
    }

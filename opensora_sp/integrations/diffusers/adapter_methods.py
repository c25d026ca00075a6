"""LoRA in the pipeline, by the names that diffusers' ``LoraBaseMixin`` has for it.

diffusers' mixin keeps peft's layers in a ``ModelMixin``. Here adapters are merged into the weights,
as in all sampling of this package: a step takes no more time, and results are the same. The weights
before are kept on the CPU until the adapters change.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from opensora_sp.checkpoint.adapters import (
    MAX_SCALE,
    Adapters,
    check_adapters,
    merged,
    open_adapters,
    warn_of_other_base,
)
from opensora_sp.checkpoint.reader import Stored, Weights
from opensora_sp.common.importing import nearest


class AdapterMethods:
    """Adapters of a pipeline's ``transformer``: loaded ones by name, and the scales of active ones.

    A layer's weight is the sum of its weight before and the change of each active adapter, times
    its scale.
    """

    transformer: Any

    def __init__(self) -> None:
        super().__init__()
        self._loaded: dict[str, Adapters] = {}
        self._scales: dict[str, float] = {}
        # Weights of adapted layers without adapters, by the name of the parameter.
        self._weights_before: dict[str, Tensor] = {}

    def load_lora_weights(
        self, pretrained_model_name_or_path: str | Path, adapter_name: str | None = None
    ) -> None:
        """Load adapters, and let them be the only active ones.

        Args:
            pretrained_model_name_or_path: ``PATH`` or ``PATH:SCALE``, see ``open_adapters``; of a
                run the EMA.
            adapter_name: by default ``default_`` and a number that is free.

        Raises:
            ValueError: if they cannot be read or belong to another model, or the name is taken.
        """
        number = len(self._loaded)
        while f"default_{number}" in self._loaded:
            number += 1
        name = adapter_name or f"default_{number}"
        if name in self._loaded:
            raise ValueError(
                f"got adapter_name {name!r} twice; expected a new name; choose one, or call "
                "unload_lora_weights() first"
            )
        adapters = open_adapters(str(pretrained_model_name_or_path))
        check_adapters(adapters, self.transformer)
        self._restore()
        warn_of_other_base(self._weights_of([adapters]), [adapters])
        self._loaded[name] = adapters
        self.set_adapters(name)

    def set_adapters(
        self,
        adapter_names: str | Sequence[str],
        adapter_weights: float | Sequence[float] | None = None,
    ) -> None:
        """Let these adapters be active, each with its scale, 1 by default.

        Raises:
            ValueError: for names that are not loaded or given twice, or scales that do not fit.
        """
        names = [adapter_names] if isinstance(adapter_names, str) else [*adapter_names]
        scales = 1.0 if adapter_weights is None else adapter_weights
        if isinstance(scales, int | float):
            scales = [scales] * len(names)
        if len(scales) != len(names):
            raise ValueError(
                f"got {len(scales)} adapter_weights for the adapters {names}; expected one, or one "
                "for each; pass as many"
            )
        if len({*names}) < len(names):
            raise ValueError(f"got the adapters {names}; expected each once; add up their scales")
        for name in names:
            if name not in self._loaded:
                known = [*self._loaded]
                advice = nearest(name, known, otherwise="call load_lora_weights first")
                raise ValueError(f"got adapter {name!r}; expected some of {known}; {advice}")
        self._merge(dict(zip(names, scales, strict=True)))

    def get_active_adapters(self) -> list[str]:
        """The names of the adapters that are merged into the weights."""
        return [*self._scales]

    def get_list_adapters(self) -> dict[str, list[str]]:
        """The names of the loaded adapters of each component."""
        return {"transformer": [*self._loaded]}

    def fuse_lora(self, *, lora_scale: float = 1.0) -> None:
        """Keep the weights with their active adapters, times a scale, and forget the adapters."""
        self._merge({name: lora_scale * scale for name, scale in self._scales.items()})
        self._weights_before = {}
        self.unload_lora_weights()

    def unload_lora_weights(self) -> None:
        """Forget the adapters, and restore the weights unless they are fused."""
        self._restore()
        self._loaded, self._scales = {}, {}

    @torch.no_grad()
    def _merge(self, scales: dict[str, float]) -> None:
        for name, scale in scales.items():
            # nan is no number up to it, either.
            if not abs(scale) <= MAX_SCALE:
                raise ValueError(
                    f"got the scale {scale} for the adapter {name!r}; expected a finite number up "
                    f"to {MAX_SCALE:g}; pass for example 0.8"
                )
        self._restore()
        loaded = self._loaded
        active = [replace(loaded[name], scale=loaded[name].scale * scales[name]) for name in scales]

        parameters = dict(self.transformer.named_parameters())
        before = self._weights_of(active)
        for name, stored in merged(before, active).tensors.items():
            self._weights_before[name] = before.tensors[name].read()
            parameters[name].copy_(stored.read())
        self._scales = scales

    @torch.no_grad()
    def _restore(self) -> None:
        parameters = dict(self.transformer.named_parameters())
        for name, weight in self._weights_before.items():
            parameters[name].copy_(weight)
        self._weights_before, self._scales = {}, {}

    def _weights_of(self, adapters: Sequence[Adapters]) -> Weights:
        """The transformer's weights of all layers of some adapters, as copies on the CPU."""
        tensors = {}
        for source in adapters:
            for layer in source.layers:
                weight = self.transformer.get_submodule(layer).weight.detach()
                read = partial(weight.to, "cpu", copy=True)
                tensors[f"{layer}.weight"] = Stored(tuple(weight.shape), read)
        return Weights(Path("transformer"), "", None, tensors)

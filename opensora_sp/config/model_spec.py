"""The ``model`` section of a config, parsed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from opensora_sp.models.base import ConditionedModel
from opensora_sp.models.registry import model_class, resolve_config

from .components import split_type


@dataclass(frozen=True)
class ModelSpec:
    """A model by name and its complete configuration; nothing is built yet.

    Attributes:
        name: class name or preset, for example "STDiT3-XL/2".
        config: the ``Config`` of the class, with the preset's values filled in.
    """

    name: str
    config: Any

    @classmethod
    def parse(cls, section: dict[str, Any]) -> ModelSpec:
        """``dict(type=name, **options)`` -> spec.

        Raises:
            ValueError: for an unknown name, an unknown option, or values that do not fit together.
        """
        name, options = split_type("model", section)
        return cls(name, resolve_config(name, **options))

    @property
    def model_class(self) -> type[ConditionedModel]:
        return model_class(self.name)

    @property
    def input_size(self) -> tuple[int, int, int] | None:
        """The latent size that position tables are made for; None for models of any size."""
        size = getattr(self.config, "input_size", None)
        return None if size is None else tuple(size)

    def with_options(self, **options: Any) -> ModelSpec:
        """The same model with some options changed."""
        return replace(self, config=replace(self.config, **options))

    def build(self) -> ConditionedModel:
        """The model with freshly initialised weights, on the current default device."""
        return self.model_class(self.config)

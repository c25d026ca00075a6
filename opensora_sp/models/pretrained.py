"""Methods that load and save a model; ``opensora_sp.checkpoint`` does the work."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

Model = TypeVar("Model", bound="Pretrained")


class Pretrained:
    """Loading and saving. ``opensora_sp.checkpoint`` is imported when a method is called."""

    @classmethod
    def from_pretrained(
        cls: type[Model],
        path: str | Path,
        *,
        allow_pickle: bool = False,
        strict: bool = True,
        ema: bool = False,
        convert: Collection[str] = (),
        dtype: torch.dtype | None = None,
        **config: Any,
    ) -> Model:
        """Build a model of this class from weights in any layout.

        The arguments are those of ``opensora_sp.checkpoint.from_pretrained``.
        """
        from opensora_sp.checkpoint import from_pretrained

        return from_pretrained(  # type: ignore[return-value]
            path,
            model=cls.__name__,
            allow_pickle=allow_pickle,
            strict=strict,
            ema=ema,
            convert=convert,
            dtype=dtype,
            **config,
        )

    def save_pretrained(self, path: str | Path, *, max_shard_size: int | str = "5GB") -> None:
        """Write ``config.json`` and safetensors into a new folder.

        The arguments are those of ``opensora_sp.checkpoint.save_pretrained``.
        """
        from opensora_sp.checkpoint import save_pretrained

        save_pretrained(self, path, max_shard_size=max_shard_size)  # type: ignore[arg-type]

    def position_tables(self) -> dict[str, Tensor]:
        """Buffers in the state dict that follow from the configuration, by name."""
        return {}

"""The model card (``README.md``) beside exported weights, as the Hugging Face hub shows it."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import ModelCard, ModelCardData

from opensora_sp.common.files import read_small_file
from opensora_sp.models.base import ConditionedModel

from .model_config import model_config_json

CARD = "README.md"
MAX_BYTES = 1 << 20
UNKNOWN_LICENSE = "unknown"
CONTENT = """---
{data}
---

# {name}

{name} with {millions:.1f} M parameters in {dtype}, exported by `opensora_sp`. {origin}

## Sample

`CONFIG` is a sampling config with the autoencoder, the text encoder and the scheduler that the
model was trained with.

```bash
torchrun --nproc_per_node 2 scripts/inference.py CONFIG --ckpt {folder} --prompt "a red fox"
```

```python
from opensora_sp.checkpoint import from_pretrained

model = from_pretrained("{folder}")
```

## Configuration

```json
{config}
```

## License

{license_text}
"""


def model_card(
    model: ConditionedModel, folder: str, *, license: str | None, base_model: str | None
) -> ModelCard:
    """The card of a model.

    Args:
        folder: the name of its folder, for commands.
        license: an identifier of the hub, such as "apache-2.0"; None if it is not known.
        base_model: the name on the hub of the weights that it was made of, if there are such.
    """
    name = type(model).__name__
    data = ModelCardData(
        license=license or UNKNOWN_LICENSE,
        library_name="opensora_sp",
        pipeline_tag="text-to-video",
        base_model=base_model,
        tags=["text-to-video", "diffusion", name.lower()],
    )
    origin = f"It was made of `{base_model}`." if base_model else ""
    text = f"`{license}`."
    if license is None:
        text = "Not stated. Weights made of others are under the license of those."

    content = CONTENT.format(
        data=data.to_yaml(),
        name=name,
        millions=sum(p.numel() for p in model.parameters()) / 1e6,
        dtype=str(model.dtype).removeprefix("torch."),
        origin=origin,
        folder=folder,
        config=model_config_json(name, model.config).decode().strip(),
        license_text=text,
    )
    return ModelCard(content)


def saved_license(source: Path) -> str | None:
    """The license that the card beside some weights states; None without one that can be read."""
    card = (source if source.is_dir() else source.parent) / CARD
    # Cards are written by anyone: one that cannot be parsed states no license.
    try:
        content = read_small_file(card, MAX_BYTES, "a model card").decode()
        stated = ModelCard(content, ignore_metadata_errors=True).data.to_dict().get("license")
    except Exception:
        return None
    known = isinstance(stated, str) and stated != UNKNOWN_LICENSE
    return stated if known else None

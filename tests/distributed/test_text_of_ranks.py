"""Ranks project the captions of their own samples only."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from parity_cases import Case, make_inputs, make_model
from ranks import run_ranks

from opensora_sp.models.layers import CrossAttention
from opensora_sp.parallel import SequenceMesh, parallelize

pytestmark = pytest.mark.core
SAMPLES, TOKENS = 5, 6
IMAGES = Case((SAMPLES, 1, 6, 8))


def projected(encode: bool) -> set[int]:
    """Numbers of text tokens that the blocks of this rank project, or are given projected."""
    model, inputs = make_model(IMAGES), make_inputs(IMAGES)
    parallelize(model, SequenceMesh(dist.get_world_size()))
    counts: set[int] = set()

    def seen(module: CrossAttention, args: tuple, options: dict) -> None:
        text, given = args[1], options["keys_values"]
        assert given is None or len(given) == len(text)
        counts.add(len(text))

    for module in model.modules():
        if isinstance(module, CrossAttention):
            module.register_forward_pre_hook(seen, with_kwargs=True)
    if encode:
        inputs["y"] = model.encode_text(inputs["y"])
    with torch.no_grad():
        model(**inputs)
    return counts


@pytest.mark.parametrize("encode", [False, True])
def test_captions_of_local_samples(encode: bool) -> None:
    """60 patches of 5 images on 2 ranks: images 0 to 2, or 2 to 4, in either layout."""
    for counts in run_ranks(2, projected, encode):
        assert counts and max(counts) == 3 * TOKENS
    assert run_ranks(1, projected, encode) == [{SAMPLES * TOKENS}]

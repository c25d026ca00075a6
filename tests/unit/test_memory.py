"""No tensor is quadratic in a length, and none holds more than a few activations."""

from __future__ import annotations

import pytest
import torch
from tiny_models import TINY
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from opensora_sp.models import build_model
from opensora_sp.models.conditions import MAX_TABLES, Conditioning, Text

pytestmark = pytest.mark.core


class LargestTensor(TorchDispatchMode):
    """Remembers the largest result of any operation, forward or backward."""

    def __init__(self) -> None:
        super().__init__()
        self.numel, self.operation = 0, ""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.numel() > self.numel:
                self.numel, self.operation = tensor.numel(), str(func)
        return result


OPTIONS = {
    "STDiT": {},
    "STDiT2": {},
    "STDiT3": {},
    "windows": dict(kernel_size=(4, 4, -1), use_spatial_rope=True),
    "whole clips": dict(full_attention=True),
}


def largest(name: str, T: int, side: int, masks: bool) -> tuple[LargestTensor, int]:
    width, text = 12, 40
    options = OPTIONS[name] | (dict(input_size=(T, side, side)) if name == "STDiT" else {})
    settings = dict(TINY, hidden_size=width, depth=1, num_heads=2, mlp_ratio=1.0)
    settings |= dict(caption_channels=4, model_max_length=text, patch_size=(1, 1, 1), **options)
    model = build_model(name if name.startswith("STDiT") else "STDiT3", **settings)
    inputs = dict(
        x=torch.randn(2, 2, T, side, side),
        timestep=torch.tensor([1.0, 2.0]),
        y=torch.randn(2, 1, text, 4),
    )

    if name == "STDiT2":
        inputs.update(
            (size, torch.tensor([1.0, 2.0]))
            for size in ("num_frames", "height", "width", "ar", "fps")
        )

    if masks:
        inputs["mask"] = torch.arange(text) < torch.tensor([[25], [10]])
        inputs["x_mask"] = torch.rand(2, T) < 0.5
        inputs["video_mask"] = torch.ones(2, T, side, side, dtype=torch.bool)
        inputs["video_mask"][1, T // 2 :] = inputs["video_mask"][0, :, : side // 4] = False

    with LargestTensor() as seen:
        model(**inputs).square().sum().backward()
    return seen, 2 * T * side * side * width


@pytest.mark.parametrize("name", list(OPTIONS))
@pytest.mark.parametrize("masks", [False, True])
@pytest.mark.parametrize(
    ("T", "side"), [(2, 24), (500, 1)], ids=["long spatial rows", "long temporal rows"]
)
def test_no_tensor_is_quadratic_in_a_length(name: str, T: int, side: int, masks: bool) -> None:
    seen, activation = largest(name, T, side, masks)
    # The MLP's hidden layer has 4 C numbers for each token, a modulation 6 C for each frame.
    bound = 6 * activation if side == 1 else 4 * activation
    assert seen.numel <= bound, f"{seen.operation} makes {seen.numel} numbers"
    scores = 2 * 2 * T * (side * side) ** 2 if side > 1 else 2 * 2 * T**2
    assert scores > bound  # so the bound would catch an explicit matrix of scores


def test_tables_of_all_blocks_are_made_at_once_unless_they_are_large() -> None:
    """Of the 56 blocks of STDiT3-XL/2: a batch of 475 images would keep 0.7 GB."""
    for samples, are_small in ((1, True), (475, False)):
        modulation = torch.empty(samples, 1, 6, 1152, dtype=torch.bfloat16, device="meta")
        conditioning = Conditioning(modulation, None, Text(torch.empty(0, 1152), [0]))
        tables = conditioning.tables([torch.empty(6, 1152, device="meta")] * 56)
        assert len(tables) == 56 and all((table is not None) == are_small for table in tables)
        assert sum(table.nbytes for table in tables if table is not None) <= MAX_TABLES

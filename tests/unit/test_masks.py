"""Masks of clips that do not fill their batch: their overhead, what they exclude, and errors."""

from __future__ import annotations

import pytest
import torch
from tiny_models import TINY

from opensora_sp.models import Attend, PatchGrid, build_model, token_layout
from opensora_sp.models.packing import VideoMask
from opensora_sp.models.token_layout import SPATIAL, TEMPORAL
from opensora_sp.parallel import Options, SequenceMesh
from opensora_sp.parallel.strategies import SwitchRows
from opensora_sp.planner.live_peak import LivePeak

pytestmark = pytest.mark.core
PATCH = (1, 2, 2)


def mask_bytes(positions: torch.Tensor, ranks: int, rank: int, layout: str) -> tuple[int, int]:
    """Bytes at the peak of planning a rank's part of a mask, and those kept for the blocks."""
    mode = SwitchRows(SequenceMesh.imagined(ranks, rank), Options(), heads=16)
    grid = PatchGrid(
        len(positions),
        tuple(positions.shape[1:]),
        PATCH,
        mask=VideoMask(positions, PATCH, positions),
    )
    rows = mode.local_rows(grid.rows(layout))
    with LivePeak() as live:
        groups = rows.groups()
    assert groups is not None and groups.index is not None
    assert sum(groups.lengths) == len(groups.index)
    return live.peak, groups.index.numel() * groups.index.element_size()


@pytest.mark.parametrize("layout", [SPATIAL, TEMPORAL])
@pytest.mark.parametrize("sp_size", [2, 4, 8])
def test_a_mask_of_1_24_60_80_is_planned_in_parts(sp_size: int, layout: str) -> None:
    """Elsewhere ``sp_size`` copies, and a matrix of all tokens with all, ended such runs."""
    positions = torch.zeros(1, 24, 60, 80, dtype=torch.bool)
    positions[:, :22, :52, :74] = True
    whole_peak, whole_kept = mask_bytes(positions, 1, 0, layout)
    tokens = 24 * 30 * 40
    parts = [mask_bytes(positions, sp_size, rank, layout) for rank in range(sp_size)]
    # One number per token, on one rank each.
    assert sum(kept for _, kept in parts) == whole_kept == 22 * 26 * 37 * 8
    assert max(peak for peak, _ in parts) <= 1.1 * whole_peak / sp_size
    assert whole_peak <= 40 * tokens  # and nothing larger on the way


def attended(layout: str, kernel: tuple[int, int] | None, full: bool) -> None:
    """Attention over units of which some have no token inside of the clip."""
    positions = torch.zeros(2, 4, 6, 6, dtype=torch.bool)
    positions[0, :2, :3, 1:5] = True  # sample 1 holds nothing at all
    grid = PatchGrid(
        2, (4, 6, 6), (1, 1, 1), kernel, full, mask=VideoMask(positions, (1, 1, 1), positions)
    )
    rows = grid.rows(layout)
    inside = rows.inside(positions.device)[..., 0]  # [R, L]
    q, k, v = (
        torch.randn(rows.count, rows.length, 2, 4, dtype=torch.float64, requires_grad=True)
        for _ in range(3)
    )
    out = Attend()(q, k, v, rows)

    assert not out[~inside].any() and out[inside].abs().min() > 0
    (out * torch.randn_like(out)).sum().backward()
    for z in (q, k, v):
        assert torch.isfinite(z.grad).all() and not z.grad[~inside].any() and z.grad[inside].any()

    # Nobody looks there.
    changed = [z.detach().masked_fill(~inside[..., None, None], 1e9) for z in (q, k, v)]
    assert torch.equal(Attend()(*changed, rows), out)


@pytest.mark.parametrize(
    ("layout", "kernel", "full"),
    [
        (SPATIAL, None, False),
        (TEMPORAL, None, False),
        (TEMPORAL, (2, 3), False),
        (SPATIAL, None, True),
    ],
    ids=["spatial rows", "temporal rows", "windows", "whole clips"],
)
def test_units_without_a_token_inside_of_a_clip_give_zero_and_zero_gradients(
    layout: str, kernel: tuple[int, int] | None, full: bool
) -> None:
    attended(layout, kernel, full)


SMALL = dict(TINY, hidden_size=12, num_heads=2, caption_channels=4, model_max_length=3)


def test_a_mask_that_leaves_nothing_out_changes_no_bit() -> None:
    model = build_model("STDiT3", **SMALL | dict(depth=1))
    torch.nn.init.normal_(model.final_layer.linear.weight)
    inputs = dict(
        x=torch.randn(2, 2, 3, 4, 5), timestep=torch.tensor([1.0, 9.0]), y=torch.randn(2, 1, 3, 4)
    )
    everything = torch.ones(2, 3, 4, 5, dtype=torch.bool)
    assert torch.equal(model(**inputs, video_mask=everything), model(**inputs))


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (torch.ones(2, 3, 4, 6, dtype=torch.bool), r"\(2, 3, 4, 6\), .*expected \[2, 3, 4, 5\]"),
        (torch.ones(2, 3, 4, 5), r"torch.float32 on cpu; expected \[2, 3, 4, 5\], torch.bool on"),
        (
            torch.ones(2, 3, 4, 5, dtype=torch.bool, device="meta"),
            r"torch.bool on meta; expected .* torch.bool on cpu",
        ),
    ],
    ids=["shape", "dtype", "device"],
)
def test_masks_that_do_not_fit_are_refused(mask: torch.Tensor, message: str) -> None:
    model = build_model(
        "STDiT3", in_channels=2, hidden_size=12, depth=1, num_heads=2, caption_channels=4
    )
    inputs = dict(
        x=torch.randn(2, 2, 3, 4, 5), timestep=torch.tensor([1.0, 9.0]), y=torch.randn(2, 1, 3, 4)
    )
    with pytest.raises(ValueError, match="got video_mask of shape .*" + message):
        model(**inputs, video_mask=mask)


COND = dict(SMALL, use_cond=True)


def conditioned() -> tuple[torch.nn.Module, dict]:
    torch.manual_seed(0)
    model = build_model("STDiT3", **COND)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    x, y = torch.randn(2, 2, 3, 4, 5), torch.randn(2, 1, 3, 4)
    given = dict(cond=torch.randn_like(x), cond_mask=torch.ones_like(x), y_null=torch.randn_like(y))
    return model, dict(x=x, timestep=torch.tensor([1.0, 9.0]), y=y, **given)


def test_a_frame_may_be_named_twice() -> None:
    """As the first and last frame of an image are; the other frames attend to the same text."""
    model, inputs = conditioned()
    once = model(**inputs, mask_index=[1])
    assert torch.equal(model(**inputs, mask_index=[1, 1]), once)
    assert not torch.equal(model(**inputs, mask_index=[1, 2]), once)
    image = inputs | {name: inputs[name][:, :, :1] for name in ("x", "cond", "cond_mask")}
    assert torch.equal(model(**image, mask_index=[0, 0]), model(**image, mask_index=[0]))


def test_the_text_of_conditioning_frames_may_be_encoded_as_well() -> None:
    model, inputs = conditioned()
    wanted = model(**inputs, mask_index=[1])
    encoded = {name: model.encode_text(inputs[name]) for name in ("y", "y_null")}
    for names in (["y"], ["y_null"], ["y", "y_null"]):
        found = model(**inputs | {name: encoded[name] for name in names}, mask_index=[1])
        torch.testing.assert_close(found, wanted)
    for y_null in (
        inputs["y_null"][:1],
        inputs["y_null"][..., :2],
        model.encode_text(inputs["y_null"][:1]),
    ):
        for y in (inputs["y"], encoded["y"]):
            with pytest.raises(ValueError, match="got .*; expected "):
                model(**inputs | dict(y=y, y_null=y_null), mask_index=[1])


def test_the_order_of_windows_is_brought_to_the_device_once_for_a_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not at each of the 2 N - 1 switches, of which each waited for a copy of it."""
    model = build_model("STDiT3", **COND, kernel_size=(2, 2, -1))
    copied = []
    copy = token_layout.to_device
    monkeypatch.setattr(
        token_layout, "to_device", lambda *args: copied.append(len(args[0])) or copy(*args)
    )
    with torch.no_grad():
        for _ in range(2):
            model(torch.randn(2, 2, 3, 4, 5), torch.tensor([1.0, 9.0]), torch.randn(2, 1, 3, 4))
    assert copied == [6, 6]  # the patches of a frame, in each of the two batches


def test_one_size_is_the_size_of_each_clip() -> None:
    model, inputs = conditioned()
    everything, side = torch.ones(2, 3, 4, 5, dtype=torch.bool), torch.tensor([8.0])
    inputs = {name: inputs[name] for name in ("x", "timestep", "y")}
    one = model(**inputs, height=side, width=side, video_mask=everything)
    sides = side.expand(2)
    assert torch.equal(one, model(**inputs, height=sides, width=sides, video_mask=everything))


def test_numbers_of_another_count_of_samples_are_refused() -> None:
    model, inputs = conditioned()
    inputs = {name: inputs[name] for name in ("x", "timestep", "y")}
    for name, count in (("fps", 3), ("fps", 4), ("height", 0), ("width", 3)):
        with pytest.raises(ValueError, match=f"got {name} of {count} samples; expected 2; pass"):
            model(**inputs, **{name: torch.ones(count)})

"""Windows (Open-Sora 1.3), full attention, and clips of several sizes in one batch, with SP.

The result is that of one process in float64: output, input gradients, every parameter gradient.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from parity_cases import DEPTH, assert_one_process_result, make_inputs, make_model
from ranks import run_ranks
from window_cases import MIXED, Sizes, WindowCase

from opensora_sp.models import build_model
from opensora_sp.parallel import CommLedger, SequenceMesh
from opensora_sp.parallel.strategies import heads

pytestmark = pytest.mark.core
EVERYTHING = dict(mask=True, x_mask=True, drop_caption=True, drop_path=True)
WINDOWS = [
    # 4 x 5 patches: 4 windows of 6, 4, 6 and 4.
    WindowCase((1, 5, 7, 9), kernel=(2, 3), checkpoint=True),
    WindowCase((2, 3, 9, 6), kernel=(2, 2), mask=True),
    WindowCase((1, 1, 9, 7), kernel=(3, 2), checkpoint=True),  # an image
    WindowCase((3, 4, 5, 10), kernel=(2, 2), output="full", **EVERYTHING),
    WindowCase((2, 5, 8, 8), kernel=(2, -1), cond=True, checkpoint=True, **EVERYTHING),
    WindowCase((1, 9, 5, 5), kernel=(8, 8), checkpoint=True),  # one window: fewer than ranks
    # Few frames and few windows.
    WindowCase((1, 2, 6, 8), kernel=(2, 2), heads=4, cond=True, checkpoint=True),
]
FULL = [
    WindowCase((1, 5, 5, 4), full=True, checkpoint=True, heads=3),
    WindowCase((3, 2, 5, 4), full=True, output="full", model="STDiT2", **EVERYTHING),
    WindowCase((1, 4, 4, 4), full=True, model="STDiT", heads=1),  # fewer heads than ranks
]
SMALL: Sizes = ((2, 4, 4),)  # one clip in a batch made for others
MASKED = [
    WindowCase((3, 5, 8, 6), clips=MIXED, checkpoint=True, **EVERYTHING),
    WindowCase((3, 5, 8, 6), clips=MIXED, model="STDiT2", output="full", mask=True),
    WindowCase((3, 5, 8, 6), clips=MIXED, model="STDiT", checkpoint=True),
    WindowCase((3, 5, 8, 6), clips=MIXED, kernel=(2, 2), cond=True, checkpoint=True, **EVERYTHING),
    WindowCase((3, 5, 8, 6), clips=MIXED, full=True, mask=True),
    WindowCase((1, 7, 9, 8), clips=SMALL, checkpoint=True),  # most ranks hold nothing of the clip
    WindowCase((1, 2, 8, 8), clips=SMALL, heads=4, checkpoint=True),  # frames x heads
    # Windows x heads.
    WindowCase((1, 6, 8, 8), clips=SMALL, heads=4, kernel=(8, 8), checkpoint=True),
]
CASES = [*WINDOWS, *FULL, *MASKED]
# With Ulysses three ranks have one, one and two heads.
FOUR_HEADS = replace(MASKED[0], heads=4)
VARIED = [WINDOWS[0], WINDOWS[3], WINDOWS[4], FULL[1], FOUR_HEADS, MASKED[3], MASKED[4]]
BASELINES = [dict(strategy="ulysses"), dict(strategy="split_gather")]


def expected_mode(case: WindowCase, ranks: int) -> str:
    """Where heads are always the cheaper way for few units."""
    B, T = case.size[0], case.patches[0]
    if B % ranks == 0:
        return "WholeSamples"
    if case.full:
        return "SplitClips"
    if case.kernel and B * case.num_windows < ranks <= B * T:
        return "SplitWindows"
    return "SplitHeads" if ranks > B * T else "SwitchRows"


def check_traffic(case: WindowCase, ranks: int, counter: CommLedger) -> None:
    """Exchanges of each kind, once forward and once backward, none in recompute."""
    attentions = {"SplitHeads": 1, "SplitWindows": 1, "SplitClips": 2}
    mode = expected_mode(case, ranks)
    expected = {
        "switch": 2 * DEPTH - 1 if mode == "SwitchRows" else 0,
        "heads": 2 * DEPTH * attentions.get(mode, 0),
    }
    for kind, calls in expected.items():
        assert counter.calls[kind, "forward"] == counter.calls[kind, "backward"] == calls, (
            case,
            mode,
            counter.calls,
        )
    assert not [key for key in counter.calls if key[1] == "recompute"], (case, counter.calls)


def check_other_ways(case: WindowCase, mesh: SequenceMesh) -> None:
    """Strategies that the shape does not choose; "switch" sends nothing of whole samples."""
    for options in BASELINES:
        assert_one_process_result(case, mesh, **options)
    if case.full or case.size[0] % mesh.sp_size == 0:
        return
    # Some switches are sent in chunks.
    counter = assert_one_process_result(case, mesh, overlap_backward=True, overlap_chunks=2)
    assert counter.calls["switch", "backward"] > 2 * DEPTH - 1


def compare_on_ranks(sp_sizes: list[int]) -> None:
    cheap = heads.FewUnitsCosts(whole=1.0, heads=0.0)
    heads.few_units_costs = lambda *_, **__: cheap
    for sp_size in sp_sizes:
        mesh = SequenceMesh(sp_size=sp_size)
        for case in CASES:
            check_traffic(case, sp_size, assert_one_process_result(case, mesh))
        for case in VARIED if sp_size in (2, 3) else []:
            check_other_ways(case, mesh)


@pytest.mark.parametrize("sp_sizes", [[3], pytest.param([2, 4], marks=pytest.mark.slow)], ids=str)
def test_output_and_every_gradient_equal_one_process(sp_sizes: list[int]) -> None:
    run_ranks(max(sp_sizes), compare_on_ranks, sp_sizes)


def model_alone(case: WindowCase, model: torch.nn.Module, clip: tuple[int, ...]) -> torch.nn.Module:
    """The model for one clip: STDiT has position tables of one size."""
    options = dict(model.config.__dict__)
    if case.model == "STDiT":
        options["input_size"] = whole_patches(case, clip)

    alone = build_model(case.model, **options).double()
    tables = [name for name in model.state_dict() if name.startswith("pos_embed")]
    weights = {name: value for name, value in model.state_dict().items() if name not in tables}
    alone.load_state_dict(weights, strict=False)
    return alone


def whole_patches(case: WindowCase, clip: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(-(-n // patch) * patch for n, patch in zip(clip, case.patch, strict=True))


def inputs_alone(case: WindowCase, inputs: dict[str, Any], sample: int) -> dict[str, Any]:
    """One clip of the batch in its own size; STDiT's is padded to whole patches."""
    clip = case.clips[sample]
    frames, height, width = clip
    alone = {
        name: value[sample : sample + 1]
        for name, value in inputs.items()
        if torch.is_tensor(value) and name != "video_mask"
    }

    for name in {"x", "cond", "cond_mask"} & set(alone):
        alone[name] = alone[name].detach()[:, :, :frames, :height, :width].clone()
    if "x_mask" in alone:
        alone["x_mask"] = alone["x_mask"][:, :frames]
    if "drop_path" in inputs:
        alone["drop_path"] = inputs["drop_path"][:, sample : sample + 1]
    if case.cond:
        alone["mask_index"] = [frame for frame in inputs["mask_index"] if frame < frames]

    if case.model == "STDiT":
        _, lines, columns = whole_patches(case, clip)
        alone["x"] = torch.nn.functional.pad(alone["x"], (0, columns - width, 0, lines - height))
    alone["x"].requires_grad_()
    return alone


@pytest.mark.parametrize("case", MASKED[:5], ids=lambda case: case.model)
def test_each_clip_of_a_batch_of_different_sizes_is_treated_as_if_it_were_alone(
    case: WindowCase,
) -> None:
    """Outputs inside of a clip and gradients of its latents are the clip's own; outside, zero."""
    model, inputs = make_model(case), make_inputs(case)
    model.set_grad_checkpoint(False)
    output = model(**inputs)
    probe = torch.sin(torch.arange(output.numel(), dtype=torch.float64)).view(output.shape)
    (output * probe).sum().backward()
    gradient = inputs["x"].grad

    outside = ~inputs["video_mask"][:, None]
    assert not output.masked_select(outside).any()
    assert not gradient.masked_select(outside).any()

    for sample, clip in enumerate(case.clips):
        inside = (slice(None), slice(None), *map(slice, clip))
        cut = (slice(sample, sample + 1), *inside[1:])
        alone = inputs_alone(case, inputs, sample)

        expected = model_alone(case, model, clip)(**alone)[inside]
        assert (output[cut] - expected).abs().max() <= 1e-9 * expected.abs().max()
        (expected * probe[cut]).sum().backward()
        wanted = alone["x"].grad[inside]
        assert (gradient[cut] - wanted).abs().max() <= 1e-9 * wanted.abs().max()

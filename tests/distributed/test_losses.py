"""Losses on shards: on 1, 2 and 3 ranks losses and gradients are those of one process, in float64.

Then training and sampling with IDDPM and frame masks as users start them.

The elementwise terms themselves are compared with the reference values in the golden tests.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from parity_cases import Case, make_inputs, make_model
from ranks import run_ranks
from runs import write_random_model
from window_cases import MIXED, WindowCase

from opensora_sp.config import load_inference_config
from opensora_sp.diffusion import IDDPM, RectifiedFlow, rank_loss
from opensora_sp.diffusion.process import Noised
from opensora_sp.parallel import SequenceMesh, parallelize
from opensora_sp.parallel.engine import Shard
from opensora_sp.sampling.requests import requests_of
from opensora_sp.sampling.run import build_pipeline

pytestmark = pytest.mark.core
PROCESSES = [
    RectifiedFlow(),
    IDDPM(),
    IDDPM(use_kl=True, table_dtype="float32"),
    IDDPM(learn_sigma=False),
    IDDPM(predict_xstart=True, timestep_respacing="100"),
    IDDPM(learn_sigma=False, sigma_small=True, use_kl=True, noise_schedule="squaredcos_cap_v2"),
]
# Sizes that the patch does not divide, rows that the ranks do not divide, ranks without rows.
CASES = [
    Case((2, 5, 7, 9), x_mask=True),
    Case((3, 5, 5, 7), patch=(2, 2, 2), x_mask=True, mask=True),
    Case((3, 3, 6, 5)),
    Case((1, 16, 2, 2)),
    Case((1, 1, 5, 3)),
]
PAIRS = [*product(CASES[:2], PROCESSES), *product(CASES[2:], PROCESSES[:2])]


def noised_batch(case: Case, process, inputs: dict) -> Noised:
    generator = torch.Generator().manual_seed(4)
    x_start = torch.randn(inputs["x"].shape, generator=generator, dtype=torch.float64).clamp(-1, 1)
    noise = torch.randn(x_start.shape, generator=generator, dtype=torch.float64)
    t = process.timesteps_from(torch.tensor([0.0, 0.4, 0.99], dtype=torch.float64)[: len(x_start)])
    x_mask = inputs.get("x_mask")
    if x_mask is not None:
        x_mask[-1] = False  # a sample without anything to learn
    return Noised.of(process, x_start, noise, t, x_mask)


Step = tuple[torch.Tensor, dict[str, torch.Tensor], int]


def step(case: Case, process, mesh: SequenceMesh | None) -> Step:
    """Each sample's loss, gradients averaged over the ranks, and the rows of this rank.

    Without a mesh: in one process.
    """
    model, inputs = make_model(case), make_inputs(case)
    noised = noised_batch(case, process, inputs)
    inputs |= dict(x=noised.x_t, timestep=process.network_time(noised.t))
    if mesh is None:
        losses = process.losses(model(**inputs), noised)
        losses.mean().backward()
        return (
            losses.detach(),
            {name: p.grad for name, p in model.named_parameters() if p.requires_grad},
            0,
        )

    shard = parallelize(model, mesh)(**inputs, output="shards")
    losses = process.losses(shard, noised)
    rank_loss(losses, global_samples=len(losses), world_size=mesh.sp_size).backward()
    losses = losses.detach()
    dist.all_reduce(losses)
    gradients = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    for gradient in gradients.values():
        dist.all_reduce(gradient)
        gradient /= mesh.sp_size
    return losses, gradients, shard.rows.count


@pytest.fixture(scope="module")
def one_process() -> list[Step]:
    return [step(case, process, None) for case, process in PAIRS]


def compare_on_ranks(one_process: list[Step]) -> tuple[float, list[int]]:
    """For each pair: the largest relative difference of a gradient, and the rows of this rank."""
    mesh = SequenceMesh(sp_size=dist.get_world_size())
    worst, held = 0.0, []
    for (case, process), (wanted, wanted_gradients, _) in zip(PAIRS, one_process, strict=True):
        losses, gradients, count = step(case, process, mesh)
        torch.testing.assert_close(losses, wanted, rtol=1e-10, atol=1e-12)
        assert (wanted[-1] == 0) == case.x_mask and gradients.keys() == wanted_gradients.keys()
        largest = max(g.abs().max().item() for g in wanted_gradients.values())
        for name, gradient in wanted_gradients.items():
            difference = (gradients[name] - gradient).abs().max().item()
            allowed = 1e-9 * gradient.abs().max().item() + 1e-12 * largest
            assert difference <= allowed, (
                f"{case} {process}: {name} differs by {difference}, allowed {allowed}"
            )
            worst = max(worst, difference / largest)
        held.append(count)

    return worst, held


def sample_latents(folder: Path) -> torch.Tensor:
    mesh = SequenceMesh(dist.get_world_size() if dist.is_initialized() else 1)
    found = []
    for sampler in ("ancestral", "ddim"):
        scheduler = {"type": "iddpm", "num_sampling_steps": 3, "cfg_channel": 2, "sampler": sampler}
        options = ["precision=fp64", "model.pred_sigma=True", f"scheduler={scheduler}"]
        cfg = load_inference_config(folder / "sample.py", options)
        pipeline = build_pipeline(cfg, folder, mesh, torch.device("cpu"))
        found.append(pipeline.latents(requests_of(cfg, ["a red circle"])))
    return torch.stack(found)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a sampling config and weights drawn at random."""
    return write_random_model(tmp_path_factory.mktemp("trained"), "model.pred_sigma=True")


def on_ranks(one_process: list[Step], folder: Path) -> tuple[float, list[int], torch.Tensor]:
    return *compare_on_ranks(one_process), sample_latents(folder)


@pytest.fixture(scope="module", params=[1, 2, 3])
def found(request: pytest.FixtureRequest, one_process: list[Step], trained: Path) -> list[tuple]:
    """What each of the ranks found: one spawn for both tests."""
    return run_ranks(request.param, on_ranks, one_process, trained)


def test_losses_and_every_gradient_on_shards_equal_one_process(found: list[tuple]) -> None:
    assert max(worst for worst, _, _ in found) < 1e-9
    if len(found) == 3:
        rows = list(zip(*(held for _, held, _ in found), strict=True))  # of the ranks, pair by pair
        assert any(max(of_pair) != min(of_pair) > 0 for of_pair in rows) and any(
            0 in of_pair for of_pair in rows
        ), rows


def test_sampling_with_iddpm_does_not_depend_on_the_number_of_processes(
    found: list[tuple], trained: Path
) -> None:
    alone = sample_latents(trained)
    assert not torch.equal(alone[0], alone[1])  # two samplers
    for _, _, ours in found:
        assert (ours - alone).abs().max() <= 1e-9 * alone.abs().max()


@pytest.mark.parametrize("process", PROCESSES[:4], ids=lambda p: type(p).__name__)
def test_a_masked_loss_is_that_of_the_frames_that_count(process) -> None:
    case = Case((2, 5, 6, 6))
    inputs = make_inputs(case)
    inputs["x_mask"] = torch.tensor([[True, False, True, True, False], [False] * 5])
    mask = inputs["x_mask"][0].clone()
    noised = noised_batch(case, process, inputs)
    output = torch.randn(
        2, 4, 5, 6, 6, generator=torch.Generator().manual_seed(5), dtype=torch.float64
    )
    losses = process.losses(output, noised)
    parts = [z[:1, :, mask] for z in (noised.x_t, noised.target, noised.x_start)]
    only = Noised(x_t=parts[0], target=parts[1], x_start=parts[2], t=noised.t[:1], x_mask=None)
    torch.testing.assert_close(losses[:1], process.losses(output[:1, :, mask], only))
    assert losses[1] == 0


@pytest.mark.parametrize("process", PROCESSES[:4], ids=lambda p: type(p).__name__)
def test_clips_of_different_sizes_have_the_losses_that_they_have_alone(process) -> None:
    """Whatever their batch has around them, for whole outputs and for shards."""
    case = WindowCase((3, 5, 8, 6), clips=MIXED, x_mask=True)
    model, inputs = make_model(case), make_inputs(case)
    noised = replace(noised_batch(case, process, inputs), video_mask=inputs["video_mask"])
    output = model(**inputs)
    losses = process.losses(output, noised)

    for sample, (frames, height, width) in enumerate(MIXED):
        cut = (slice(sample, sample + 1), slice(None), slice(frames), slice(height), slice(width))
        alone = Noised(
            x_t=noised.x_t[cut],
            target=noised.target[cut],
            x_start=noised.x_start[cut],
            t=noised.t[cut[0]],
            x_mask=noised.x_mask[cut[0], cut[2]],
        )
        torch.testing.assert_close(losses[cut[0]], process.losses(output[cut], alone))

    shard = parallelize(model, SequenceMesh(1))(**inputs, output="shards")
    torch.testing.assert_close(process.losses(shard, replace(noised, video_mask=None)), losses)


@pytest.mark.parametrize("x_mask", [False, True])
@pytest.mark.parametrize("process", PROCESSES, ids=lambda p: type(p).__name__)
def test_predictions_for_padding_and_conditioning_frames_do_not_count(
    process, x_mask: bool
) -> None:
    """Not even where it is infinite: neither in the loss nor as a NaN in a gradient."""
    case = Case((2, 5, 7, 9), x_mask=x_mask)
    inputs = make_inputs(case)
    noised = noised_batch(case, process, inputs)
    shard = parallelize(make_model(case), SequenceMesh(1))(**inputs, output="shards")
    counts = torch.ones(2, 5) if noised.x_mask is None else noised.x_mask
    counted = shard.rows.slice(counts).bool()  # [R, L, V]; beyond the border zero

    assert 0 < counted.sum() < counted.numel()
    losses = []
    for outside in (0.0, float("inf")):
        tensor = (
            shard.tensor.detach()
            .unflatten(-1, (counted.shape[-1], -1))
            .masked_fill(~counted[..., None], outside)
        )
        tensor = tensor.flatten(-2).requires_grad_()
        losses.append(process.losses(Shard(tensor, shard.rows), noised))
        losses[-1].sum().backward()
        gradient = tensor.grad.unflatten(-1, (counted.shape[-1], -1))
        assert gradient.isfinite().all() and not gradient[~counted].any()
        assert gradient[counted].any()

    assert torch.equal(*losses)

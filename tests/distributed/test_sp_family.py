"""STDiT and STDiT2 under sequence parallelism: the one-process result in float64, and what is sent for it.

A block of these models has two parts with a switch between, so N blocks make 2N - 1 switches.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from test_sp_parity import DEPTH, Case, drawn, gradients
from test_sp_parity import make_inputs as make_stdit3_inputs

from opensora_sp.diffusion import rank_loss, velocity_loss
from opensora_sp.models import build_model, hook_points
from opensora_sp.parallel import CommLedger, Options, SequenceMesh, parallelize
from opensora_sp.parallel.batch_shape import BatchShape
from opensora_sp.parallel.cost_model import CostModel
from opensora_sp.parallel.strategies import SplitHeads

pytestmark = pytest.mark.core
BLOCKS = DEPTH  # of a spatial and a temporal part each
CHUNKS = 2


@dataclass(frozen=True)
class FamilyCase(Case):
    model: str = "STDiT2"

    @property
    def patches(self) -> tuple[int, int]:
        """T, S."""
        frames, height, width = (
            -(-n // patch) for n, patch in zip(self.size[1:], self.patch, strict=True)
        )
        return frames, height * width

    def build(self) -> torch.nn.Module:
        return make_model(self)

    def inputs(self) -> dict[str, torch.Tensor]:
        return make_inputs(self)


FULL = FamilyCase((1, 1, 1, 1), mask=True, x_mask=True, drop_caption=True, drop_path=True)
STDIT2 = [  # which pads what its patch does not divide
    FamilyCase((1, 5, 7, 9), checkpoint=True),
    FamilyCase((2, 3, 5, 6), mask=True),
    FamilyCase((1, 1, 4, 3), checkpoint=True),  # an image
    replace(FULL, size=(3, 5, 6, 5), output="full"),
    replace(FULL, size=(2, 5, 5, 7), patch=(2, 2, 2), checkpoint=True),
    replace(FULL, size=(1, 8, 5, 5), checkpoint=True),
]
STDIT = [
    replace(case, model="STDiT", size=size)
    for case, size in zip(
        STDIT2,
        [(1, 5, 6, 10), (2, 3, 6, 2), (1, 1, 4, 6), (3, 5, 6, 2), (2, 6, 6, 6), (1, 8, 6, 6)],
        strict=True,
    )
]
CASES = [*STDIT, *STDIT2]
IMAGES = [STDIT[2], STDIT2[2]]
VARIED = [STDIT[3], STDIT[5], STDIT2[3], STDIT2[5]]  # shared in other ways, too
OTHER_WAYS = [dict(strategy="ulysses"), dict(strategy="split_gather"), dict(placement="branch")]
SMALL_CHUNKS = CostModel(flops=400e12, bandwidth=100e9, latency=0)
OVERLAP = dict(overlap_backward=True, overlap_chunks=CHUNKS, cost_model=SMALL_CHUNKS)


def make_model(case: FamilyCase) -> torch.nn.Module:
    torch.manual_seed(0)
    own = (
        dict(input_size=case.size[1:], space_scale=0.5)
        if case.model == "STDiT"
        else dict(qk_norm=True)
    )
    model = build_model(
        case.model, in_channels=2, hidden_size=4 * case.heads, depth=BLOCKS, num_heads=case.heads,
        patch_size=case.patch, caption_channels=5, model_max_length=6, mlp_ratio=2.0, drop_path=0.3, **own,
    ).double()  # fmt: skip
    return drawn(model, case)


def make_inputs(case: FamilyCase) -> dict[str, torch.Tensor]:
    inputs = make_stdit3_inputs(case)
    sizes = {name: inputs.pop(name) for name in ("fps", "height", "width")}
    if case.model == "STDiT2":
        samples = torch.arange(case.size[0], dtype=torch.float64)
        inputs.update(sizes, num_frames=16 + samples, ar=sizes["height"] / sizes["width"] + samples)
    return inputs


def run_step(
    case: FamilyCase, mesh: SequenceMesh | None, **options
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], CommLedger]:
    """Output (whole), gradients averaged over the ranks, and what was sent; without a mesh, in one process."""
    model, inputs = case.build(), case.inputs()
    target = torch.randn(
        inputs["x"].shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64
    )
    masks = inputs.get("x_mask"), inputs.get("video_mask")
    ranks, shards = 1, {}
    if mesh is not None:
        parallelize(model, mesh, **options)
        ranks, shards = mesh.sp_size, dict(output="shards")
    with CommLedger() as ledger:
        if case.output == "shards":
            losses = velocity_loss(model(**inputs, **shards), target, *masks)
            rank_loss(losses, global_samples=len(target), world_size=ranks).backward()
        else:
            output = model(**inputs)
            velocity_loss(output, target, *masks).mean().backward()
    if case.output == "shards":
        with torch.no_grad():
            output = model(**inputs)
    found = gradients(model, inputs)
    if mesh is not None:
        together = torch.cat([gradient.flatten() for gradient in found.values()])
        dist.all_reduce(together, group=mesh.sp_group)
        parts = (together / ranks).split([gradient.numel() for gradient in found.values()])
        found = {
            name: part.view(found[name].shape) for name, part in zip(found, parts, strict=True)
        }
    return output.detach(), found, ledger


class Parity:
    """Compares with one process, whose result is computed once per case, and remembers the worst difference."""

    def __init__(self, mesh: SequenceMesh) -> None:
        self.mesh, self.worst, self.comparisons = mesh, 0.0, 0
        self._wanted: dict[FamilyCase, dict[str, torch.Tensor]] = {}

    def check(self, case: FamilyCase, **options) -> CommLedger:
        if case not in self._wanted:
            output, found, _ = run_step(case, None)
            self._wanted[case] = {"output": output, **found}
        output, found, ledger = run_step(case, self.mesh, **options)
        wanted = self._wanted[case]
        largest = max(
            gradient.abs().max().item() for name, gradient in wanted.items() if name != "output"
        )
        for name, ours in {"output": output, **found}.items():
            scale = wanted[name].abs().max().item()
            difference = (ours - wanted[name]).abs().max().item()
            assert difference <= 1e-9 * scale + 1e-12 * largest, (
                f"{case} {options}: {name} differs by {difference}"
            )
            self.worst = max(self.worst, difference / max(scale, 1e-3 * largest))
            self.comparisons += 1
        return ledger

    def check_switch(self, case: FamilyCase) -> None:
        """The default strategy, with the number of switches that it is known to make."""
        ledger = self.check(case)
        ranks, heads = self.mesh.sp_size, case.heads
        whole_samples = case.size[0] % ranks == 0
        shape = BatchShape(case.size[0], *case.patches, 4 * heads, heads)
        by_heads = SplitHeads.applies(shape, Options(), ranks) and not whole_samples
        switches = 0 if whole_samples or by_heads else 2 * BLOCKS - 1
        for kind, calls in [("switch", switches), ("heads", 2 * BLOCKS if by_heads else 0)]:
            assert ledger.calls[kind, "forward"] == ledger.calls[kind, "backward"] == calls, (
                case,
                ledger.calls,
            )
        assert not [key for key in ledger.calls if key[1] == "recompute"], (case, ledger.calls)
        assert bool(ledger.calls["gather", "forward"]) == (case.output == "full")

    def check_overlap(self, case: FamilyCase) -> None:
        """A block's second part sends its end in chunks; the first, which ends with attention, in one."""
        ledger = self.check(case, **OVERLAP)
        frames, patches = case.patches
        if (
            case.size[0] % self.mesh.sp_size
            and case.size[0] * min(frames, patches) >= CHUNKS * self.mesh.sp_size
        ):
            calls = BLOCKS + CHUNKS * (BLOCKS - 1)
            assert (
                ledger.calls["switch", "forward"] == ledger.calls["switch", "backward"] == calls
            ), ledger.calls
        assert not [key for key in ledger.calls if key[1] == "recompute"], (case, ledger.calls)


def compare_on_ranks() -> tuple[float, int]:
    parity = Parity(SequenceMesh(sp_size=dist.get_world_size()))
    for case in CASES:
        parity.check_switch(case)
    for case in VARIED:
        for options in OTHER_WAYS:
            parity.check(case, **options)
        parity.check_overlap(case)
        wrapped = parallelize(make_model(case), parity.mesh)
        assert all(
            point.attached for point in wrapped.modules() if isinstance(point, hook_points.Point)
        )

    # Whole rows also where most ranks then hold no spatial row.
    SplitHeads.applies = classmethod(lambda *_: False)
    for case in IMAGES:
        parity.check_switch(case)
    return parity.worst, parity.comparisons


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_output_and_every_gradient_equal_one_process(num_ranks: int) -> None:
    for worst, comparisons in run_ranks(num_ranks, compare_on_ranks):
        assert worst <= 1e-9 and comparisons > 1000


@pytest.mark.parametrize("model", ["STDiT", "STDiT2"])
def test_a_checkpointed_block_is_two_recomputed_segments(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = replace(STDIT[0], model=model)
    segments: list[int] = []  # of each checkpointed function, how often it ran
    original = hook_points.checkpoint

    def counted(function, *args, **options):
        index = len(segments)
        segments.append(0)

        def run(*args):
            segments[index] += 1
            return function(*args)

        return original(run, *args, **options)

    monkeypatch.setattr(hook_points, "checkpoint", counted)
    runs = {"attn": 0, "attn_temp": 0, "mlp": 0}
    bare = make_model(case)
    for block in bare.blocks:
        for name in runs:
            block.get_submodule(name).register_forward_pre_hook(
                lambda *_, _n=name: runs.__setitem__(_n, runs[_n] + 1)
            )
    output = bare(**make_inputs(case))
    assert segments == [1] * (2 * BLOCKS) and set(runs.values()) == {BLOCKS}
    output.sum().backward()
    assert segments == [2] * (2 * BLOCKS) and set(runs.values()) == {2 * BLOCKS}
    segments.clear()
    with torch.no_grad():
        assert torch.equal(bare(**make_inputs(case)), output) and not segments
    bare.set_grad_checkpoint(False)
    bare(**make_inputs(case)).sum().backward()
    assert not segments


@pytest.mark.parametrize("case", [STDIT[3], STDIT2[3]], ids=["STDiT", "STDiT2"])
def test_sp_size_1_is_bitwise_the_bare_model(case: FamilyCase) -> None:
    bare, wrapped = make_model(case), parallelize(make_model(case), SequenceMesh(sp_size=1))
    assert torch.equal(wrapped(**make_inputs(case)), bare(**make_inputs(case)))

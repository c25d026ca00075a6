"""Cases of all STDiT models, and the comparison of ranks with one process in float64."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from parity_cases import DEPTH, Case, drawn, gradients
from parity_cases import make_inputs as make_stdit3_inputs

from opensora_sp.diffusion import rank_loss, velocity_loss
from opensora_sp.models import build_model
from opensora_sp.parallel import CommLedger, Options, SequenceMesh, parallelize
from opensora_sp.parallel.batch_shape import BatchShape
from opensora_sp.parallel.cost_model import CostModel
from opensora_sp.parallel.strategies import SplitHeads

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
        case.model,
        in_channels=2,
        hidden_size=4 * case.heads,
        depth=BLOCKS,
        num_heads=case.heads,
        patch_size=case.patch,
        caption_channels=5,
        model_max_length=6,
        mlp_ratio=2.0,
        drop_path=0.3,
        **own,
    ).double()
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
    """Output (whole), gradients averaged over the ranks, and the communication counted.

    Without a mesh, in one process.
    """
    model, inputs = case.build(), case.inputs()
    target = torch.randn(
        inputs["x"].shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64
    )
    masks = inputs.get("x_mask"), inputs.get("video_mask")
    ranks, shards = 1, {}

    if mesh is not None:
        parallelize(model, mesh, **options)
        ranks, shards = mesh.sp_size, dict(output="shards")

    with CommLedger() as counter:
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
    return output.detach(), found, counter


class Parity:
    """Compares with one process, and remembers the largest difference.

    The result of one process is computed once per case.
    """

    def __init__(self, mesh: SequenceMesh) -> None:
        self.mesh, self.worst, self.comparisons = mesh, 0.0, 0
        self._wanted: dict[FamilyCase, dict[str, torch.Tensor]] = {}

    def check(self, case: FamilyCase, **options) -> CommLedger:
        if case not in self._wanted:
            output, found, _ = run_step(case, None)
            self._wanted[case] = {"output": output, **found}
        output, found, counter = run_step(case, self.mesh, **options)
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
        return counter

    def check_switch(self, case: FamilyCase) -> None:
        """The default strategy, with the number of switches that it is known to make."""
        counter = self.check(case)
        ranks, heads = self.mesh.sp_size, case.heads
        whole_samples = case.size[0] % ranks == 0
        shape = BatchShape(case.size[0], *case.patches, 4 * heads, heads)
        by_heads = SplitHeads.applies(shape, Options(), ranks)
        switches = 0 if whole_samples or by_heads else 2 * BLOCKS - 1
        for kind, calls in [("switch", switches), ("heads", 2 * BLOCKS if by_heads else 0)]:
            assert counter.calls[kind, "forward"] == counter.calls[kind, "backward"] == calls, (
                case,
                counter.calls,
            )
        assert not [key for key in counter.calls if key[1] == "recompute"], (case, counter.calls)
        assert bool(counter.calls["gather", "forward"]) == (case.output == "full")

    def check_overlap(self, case: FamilyCase) -> None:
        """A block's second part sends its end in chunks, the first part (attention) in one."""
        counter = self.check(case, **OVERLAP)
        frames, patches = case.patches
        if (
            case.size[0] % self.mesh.sp_size
            and case.size[0] * min(frames, patches) >= CHUNKS * self.mesh.sp_size
        ):
            calls = BLOCKS + CHUNKS * (BLOCKS - 1)
            assert (
                counter.calls["switch", "forward"] == counter.calls["switch", "backward"] == calls
            ), counter.calls
        assert not [key for key in counter.calls if key[1] == "recompute"], (case, counter.calls)

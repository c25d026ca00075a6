"""Cases of STDiT3 whose results on several ranks are compared with one process, in float64.

All parameters are drawn at random first (zero-initialised gates hide errors), and gradients are
averaged over the ranks, as ZeRO and DDP average them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import torch
import torch.distributed as dist

from opensora_sp.diffusion import rank_loss, velocity_loss
from opensora_sp.models import build_model
from opensora_sp.parallel import CommLedger, SequenceMesh, parallelize

DEPTH = 2


@dataclass(frozen=True)
class Case:
    size: tuple[int, int, int, int]  # B, frames, height, width
    patch: tuple[int, int, int] = (1, 2, 2)
    heads: int = 3
    mask: bool = False
    x_mask: bool = False
    drop_caption: bool = False
    drop_path: bool = False
    checkpoint: bool | tuple[int, ...] = False  # as set_grad_checkpoint takes it
    output: str = "shards"


PLAIN = [
    Case((1, 5, 7, 9)),
    Case((2, 3, 5, 6)),
    Case((3, 5, 6, 5), output="full"),
    Case((1, 1, 4, 3)),  # an image: ranks beyond the first hold no spatial row
    Case((1, 16, 2, 2)),  # one patch per frame: all but one rank hold no temporal row
    Case((1, 7, 5, 7), patch=(2, 2, 2)),
]


FULL = replace(Case((1, 1, 1, 1)), mask=True, x_mask=True, drop_caption=True, drop_path=True)


def make_model(case: Case) -> torch.nn.Module:
    torch.manual_seed(0)
    model = build_model(
        "STDiT3",
        in_channels=2,
        hidden_size=4 * case.heads,
        depth=DEPTH,
        num_heads=case.heads,
        patch_size=case.patch,
        caption_channels=5,
        model_max_length=6,
        mlp_ratio=2.0,
        drop_path=0.3,
        input_sq_size=16,
    ).double()
    return drawn(model, case)


def drawn(model: torch.nn.Module, case: Case) -> torch.nn.Module:
    """With all parameters drawn at random, and checkpointed as the case says."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(
                torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.3
            )
    model.set_grad_checkpoint(case.checkpoint)
    return model


def make_inputs(case: Case) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    B, frames, height, width = case.size
    inputs = dict(
        x=normal(B, 2, frames, height, width).requires_grad_(),
        timestep=torch.linspace(900, 100, B, dtype=torch.float64),
        y=normal(B, 1, 6, 5).requires_grad_(),
        fps=torch.full((B,), 8.0, dtype=torch.float64),
        height=torch.full((B,), 20.0, dtype=torch.float64),
        width=torch.full((B,), 24.0, dtype=torch.float64),
    )
    if case.mask:
        lengths = torch.tensor([4, 6, 0])[:B]  # no token in use counts as the first one
        inputs["mask"] = (torch.arange(6) < lengths[:, None]).long()
    if case.x_mask:
        of_patch = torch.rand(B, -(-frames // case.patch[0]), generator=generator) < 0.5
        of_patch[0, 0] = True
        inputs["x_mask"] = of_patch.repeat_interleave(case.patch[0], dim=1)[:, :frames]
    if case.drop_caption:
        inputs["drop_caption"] = torch.arange(B) == B - 1
    if case.drop_path:
        inputs["drop_path"] = torch.rand(2 * DEPTH, B, generator=generator) < 0.3
    return inputs


def gradients(model: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    found = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    found.update(x=inputs["x"].grad, y=inputs["y"].grad)
    for name, gradient in found.items():
        if name == "y" and gradient is None:  # every caption dropped
            found[name] = torch.zeros_like(inputs["y"])
        else:
            assert gradient is not None, f"{name} has no gradient"
    return found


def run_step(
    case: Case, mesh: SequenceMesh | None, **options
) -> tuple[torch.Tensor, dict[str, torch.Tensor], CommLedger]:
    """Output (whole), gradients averaged over the ranks, and the communication counted.

    Without a mesh, in one process.
    """
    model, inputs = make_model(case), make_inputs(case)
    target = torch.randn(
        inputs["x"].shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64
    )
    x_mask = inputs.get("x_mask")
    ranks, shards = 1, {}

    if mesh is not None:
        parallelize(model, mesh, **options)
        ranks, shards = mesh.sp_size, dict(output="shards")
    with torch.no_grad():
        whole = model(**inputs)

    with CommLedger() as counter:
        if case.output == "shards":
            losses = velocity_loss(model(**inputs, **shards), target, x_mask)
            rank_loss(losses, global_samples=len(target), world_size=ranks).backward()
        else:
            velocity_loss(model(**inputs), target, x_mask).mean().backward()

    found = gradients(model, inputs)
    if mesh is not None:
        for gradient in found.values():
            dist.all_reduce(gradient)
            gradient /= ranks
    return whole, found, counter


@cache
def one_process_step(case: Case) -> tuple[torch.Tensor, dict[str, torch.Tensor], CommLedger]:
    return run_step(case, None)


def assert_one_process_result(case: Case, mesh: SequenceMesh, **options) -> CommLedger:
    whole, found, counter = run_step(case, mesh, **options)
    reference, wanted, _ = one_process_step(case)
    largest = max(g.abs().max().item() for g in wanted.values())
    pairs = {"output": (whole, reference), **{name: (found[name], wanted[name]) for name in wanted}}
    for name, (ours, theirs) in pairs.items():
        allowed = 1e-9 * theirs.abs().max().item() + 1e-12 * largest
        difference = (ours - theirs).abs().max().item()
        assert difference <= allowed, (
            f"{case} {options}: {name} differs by {difference}, allowed {allowed}"
        )
    return counter

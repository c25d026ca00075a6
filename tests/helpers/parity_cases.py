"""Cases of all STDiT models whose results on ranks are compared with one process, in float64.

All parameters are drawn at random first (zero-initialised gates hide errors), and gradients are
averaged over the ranks, as ZeRO and DDP average them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from random_weights import draw_weights

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
    model: str = "STDiT3"
    head_size: ClassVar[int] = 4

    @property
    def patches(self) -> tuple[int, int]:
        """T, S."""
        frames, height, width = (
            -(-n // patch) for n, patch in zip(self.size[1:], self.patch, strict=True)
        )
        return frames, height * width

    def options(self) -> dict[str, Any]:
        """Options that only this model has."""
        if self.model == "STDiT":
            return dict(input_size=self.size[1:], space_scale=0.5)
        return dict(qk_norm=True) if self.model == "STDiT2" else dict(input_sq_size=16)

    def pixels(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Height and width of each sample, ``[B]``."""
        ones = torch.ones(self.size[0], dtype=torch.float64)
        return 20 * ones, 24 * ones

    def conditions(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Further inputs, made from the others."""
        return {}


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
        case.model,
        in_channels=2,
        hidden_size=case.head_size * case.heads,
        depth=DEPTH,
        num_heads=case.heads,
        patch_size=case.patch,
        caption_channels=5,
        model_max_length=6,
        mlp_ratio=2.0,
        drop_path=0.3,
        **case.options(),
    ).double()
    model.set_grad_checkpoint(case.checkpoint)
    return draw_weights(model, seed=1, std=0.3)


def make_inputs(case: Case) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(2)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    B, frames, height, width = case.size
    inputs = dict(
        x=normal(B, 2, frames, height, width).requires_grad_(),
        timestep=torch.linspace(900, 100, B, dtype=torch.float64),
        y=normal(B, 1, 6, 5).requires_grad_(),
    )
    height, width = case.pixels()
    if case.model != "STDiT":
        inputs.update(fps=torch.full((B,), 8.0, dtype=torch.float64), height=height, width=width)
    if case.model == "STDiT2":
        samples = torch.arange(B, dtype=torch.float64)
        inputs.update(num_frames=16 + samples, ar=height / width + samples)

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
    return inputs | case.conditions(inputs)


def gradients(model: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    found = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    found.update((name, z.grad) for name, z in inputs.items() if getattr(z, "requires_grad", False))
    for name, gradient in found.items():
        if name == "y" and gradient is None:  # every caption dropped
            found[name] = torch.zeros_like(inputs["y"])
        else:
            assert gradient is not None, f"{name} has no gradient"
    return found


def run_step(
    case: Case, mesh: SequenceMesh | None, **options: Any
) -> tuple[torch.Tensor, dict[str, torch.Tensor], CommLedger]:
    """Output (whole), gradients averaged over the ranks, and the communication counted.

    Without a mesh, in one process.
    """
    model, inputs = make_model(case), make_inputs(case)
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
            whole = model(**inputs)
            velocity_loss(whole, target, *masks).mean().backward()
    if case.output == "shards":
        with torch.no_grad():
            whole = model(**inputs)

    found = gradients(model, inputs)
    if mesh is not None:
        found = mean_over_ranks(found, mesh)
    return whole.detach(), found, counter


def mean_over_ranks(found: dict[str, torch.Tensor], mesh: SequenceMesh) -> dict[str, torch.Tensor]:
    together = torch.cat([gradient.flatten() for gradient in found.values()])
    dist.all_reduce(together, group=mesh.sp_group)
    parts = (together / mesh.sp_size).split([gradient.numel() for gradient in found.values()])
    return {name: part.view(found[name].shape) for name, part in zip(found, parts, strict=True)}


@cache
def one_process_step(
    case: Case, mesh: SequenceMesh
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Output and gradients without a mesh: the first rank computes them, for all of its group."""
    is_first = mesh.sp_rank == 0
    found = [run_step(case, None)[:2] if is_first else None]
    if mesh.sp_group is not None:
        first = dist.get_global_rank(mesh.sp_group, 0)
        dist.broadcast_object_list(found, first, mesh.sp_group)
    return found[0]


def assert_one_process_result(case: Case, mesh: SequenceMesh, **options: Any) -> CommLedger:
    """Compare output and gradients with one process; the communication of the step."""
    whole, found, counter = run_step(case, mesh, **options)
    reference, wanted = one_process_step(case, mesh)
    largest = max(gradient.abs().max().item() for gradient in wanted.values())

    pairs = {"output": (whole, reference), **{name: (found[name], wanted[name]) for name in wanted}}
    for name, (ours, theirs) in pairs.items():
        scale = theirs.abs().max().item()
        difference, allowed = (ours - theirs).abs().max().item(), 1e-9 * scale + 1e-12 * largest
        assert difference <= allowed, (
            f"{case} {options}: {name} differs by {difference}, allowed {allowed}"
        )
    return counter

"""Time of a forward and backward step of the plain model, against a naive implementation.

python -m benchmarks model_step

Checks the ratios of two sizes with C=288, depth 4.

The naive model has the same parameters and output. It has explicit attention scores, separate
operations for modulation, norm and rotation, and rearranges tokens around each temporal attention.
Both take turns in one process on one thread; the result is the median of the ratios. On CPU it is
of CPU time, which other processes disturb less than wall time; on CUDA, in bf16, of wall time, and
the model runs the Triton kernels that a run would, after they were verified.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from opensora_sp.device_verification import choose_kernels
from opensora_sp.models import build_model

SIZES = [((16, 256), 1.0), ((4, 1024), 1.3)]  # (T, S), and the smallest speedup
HEADS, TEXT, TEXT_WIDTH = 4, 120, 64


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")


def run(args: argparse.Namespace) -> dict[str, Any]:
    torch.set_num_threads(1)
    print(
        f"torch {torch.__version__}, {args.device}, load {os.getloadavg()[0]:.1f} on "
        f"{os.cpu_count()} cores"
    )

    compared = [compare(args, *size, at_least) for size, at_least in SIZES]
    return {"sizes": compared, "kept": all(one["kept"] for one in compared)}


def compare(args: argparse.Namespace, T: int, S: int, at_least: float) -> dict[str, Any]:
    """Print the ratio at T frames of S patches, and whether it is at least ``at_least``."""
    dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
    torch.manual_seed(0)
    model = build_model(
        "STDiT3",
        hidden_size=288,
        depth=4,
        num_heads=HEADS,
        caption_channels=TEXT_WIDTH,
        model_max_length=TEXT,
    )
    model.to(args.device, dtype)
    choose_kernels("auto", model, dtype=dtype, device=torch.device(args.device))
    for parameter in model.parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter, std=0.05)

    x, t, y = inputs(model, T, S, args.device)
    with torch.no_grad():
        ours, theirs = model(x, t, y), naive(model, x, t, y).float()
    difference = ((ours - theirs).abs().max() / theirs.abs().max()).item()
    assert difference < (1e-4 if dtype == torch.float32 else 5e-2), difference

    steps = [step_of(model, f) for f in (lambda: model(x, t, y), lambda: naive(model, x, t, y))]
    rounds = [[seconds(step, args.device) for step in steps] for _ in range(args.repeats + 1)][1:]

    ratios = [slow / fast for fast, slow in rounds]
    ours_s, naive_s = (median(times) for times in zip(*rounds, strict=True))
    kept = median(ratios) >= at_least
    print(
        f"T={T} S={S} C=288 depth 4, {dtype}: naive {naive_s:.3f} s / ours {ours_s:.3f} s: median "
        f"of the ratios {median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}), limit "
        f"{at_least}: {'kept' if kept else 'MISSED'}; load {os.getloadavg()[0]:.1f}"
    )
    return {"T": T, "S": S, "ratios": ratios, "limit": at_least, "kept": kept}


def inputs(model: nn.Module, T: int, S: int, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Latents of T frames of S patches, timesteps, text features; all text in use."""
    config = model.config
    H = max(h for h in range(1, int(S**0.5) + 1) if S % h == 0)
    x = torch.randn(1, 4, T, 2 * H, 2 * S // H, device=device)
    y = torch.randn(1, 1, config.model_max_length, config.caption_channels, device=device)
    return x, torch.full((1,), 500.0, device=device), y


def step_of(model: nn.Module, forward: Callable[[], Tensor]) -> Callable[[], None]:
    def step() -> None:
        model.zero_grad(set_to_none=True)
        forward().square().mean().backward()

    return step


def seconds(step: Callable[[], None], device: str) -> float:
    clock = time.perf_counter if device == "cuda" else time.process_time
    start = clock()
    step()
    if device == "cuda":
        torch.cuda.synchronize()
    return clock() - start


def naive(model: nn.Module, x: Tensor, timestep: Tensor, y: Tensor) -> Tensor:
    """The equations of STDiT3 with the parameters of ``model``; tokens are ``[B, T * S, C]``."""
    B, _, T, H, W = (*x.shape[:3], x.shape[3] // 2, x.shape[4] // 2)
    x = rearrange(model.x_embedder.proj(x.to(model.dtype)), "b c t h w -> b t (h w) c")
    rows = model.config.grid(B, (T, 2 * H, 2 * W)).rows("spatial")
    positions = model.pos_embed(rows, x.device)  # [1, S, C]
    x = (x + positions.to(x.dtype)).flatten(1, 2)
    t = model.t_embedder(timestep) + model.fps_embedder(timestep.new_full((1,), 24.0), B)
    modulation = model.t_block(t).view(B, 6, -1)
    text = model.y_embedder(y[:, 0].to(model.dtype))

    to_spatial = ("b (t s) c -> (b t) s c", "(b t) s c -> b (t s) c")
    to_temporal = ("b (t s) c -> (b s) t c", "(b s) t c -> b (t s) c")
    for spatial, temporal in zip(model.spatial_blocks, model.temporal_blocks, strict=True):
        x = naive_block(spatial, x, modulation, text, to_spatial, T, None)
        x = naive_block(temporal, x, modulation, text, to_temporal, T, model.rope.freqs)

    shift, scale = (model.final_layer.scale_shift_table + t[:, None]).chunk(2, dim=1)
    x = model.final_layer.linear(naive_layer_norm(x) * (1 + scale) + shift)
    return rearrange(x, "b (t h w) (p q c) -> b c t (h p) (w q)", t=T, h=H, p=2, q=2)


def naive_block(
    block: nn.Module,
    x: Tensor,
    modulation: Tensor,
    text: Tensor,
    patterns: tuple[str, str],
    T: int,
    freqs: Tensor | None,
) -> Tensor:
    entries = (block.scale_shift_table + modulation).chunk(6, dim=1)
    shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = entries

    rows = rearrange(naive_layer_norm(x) * (1 + scale) + shift, patterns[0], t=T)
    q, k, v = rearrange(block.attn.qkv(rows), "r l (three h d) -> three r h l d", three=3, h=HEADS)
    q, k = naive_norm(block.attn.q_norm, q), naive_norm(block.attn.k_norm, k)
    if freqs is not None:
        q, k = naive_rotation(q, freqs), naive_rotation(k, freqs)
    out = block.attn.proj(rearrange(naive_attention(q, k, v), "r h l d -> r l (h d)"))
    x = x + gate * rearrange(out, patterns[1], b=len(x))

    q = rearrange(block.cross_attn.q_linear(x), "b n (h d) -> b h n d", h=HEADS)
    k, v = rearrange(
        block.cross_attn.kv_linear(text), "b n (two h d) -> two b h n d", two=2, h=HEADS
    )
    x = x + block.cross_attn.proj(rearrange(naive_attention(q, k, v), "b h n d -> b n (h d)"))

    hidden = F.gelu(
        block.mlp.fc1(naive_layer_norm(x) * (1 + mlp_scale) + mlp_shift), approximate="tanh"
    )
    return x + mlp_gate * block.mlp.fc2(hidden)


def naive_layer_norm(x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], eps=1e-6)


def naive_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-2, -1)
    return scores.softmax(dim=-1) @ v


def naive_norm(norm: nn.Module, q: Tensor) -> Tensor:
    wide = q.float()
    return norm.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + norm.eps)).to(
        q.dtype
    )


def naive_rotation(q: Tensor, freqs: Tensor) -> Tensor:
    angles = torch.arange(q.shape[-2], device=q.device)[:, None] * freqs
    cos, sin = (f(angles).repeat_interleave(2, dim=-1).to(q.dtype) for f in (torch.cos, torch.sin))
    turned = torch.stack([-q[..., 1::2], q[..., ::2]], dim=-1).flatten(-2)
    return q * cos + turned * sin

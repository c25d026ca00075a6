"""Peak memory of a spatial and a temporal block with masks, against the lower bound.

    python -m benchmarks attention_memory
    python -m benchmarks attention_memory --tokens 20000

The default is 200,000 tokens per clip (minutes and 15 GB on CPU).

On CPU the live tensor bytes are counted, on CUDA the allocator reports the peak. The batch has two
clips of different sizes; at least a fifth of the text and of the video is masked. The lower bound
is all tensors that autograd saves without masks, the gradients of the weights, and one gradient of
the tokens.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
from torch import Tensor, nn

from opensora_sp.models import build_model
from opensora_sp.planner.live_peak import LivePeak

FRAMES, COLUMNS, WIDTH, HEADS, TEXT = 50, 40, 144, 2, 300
MAX_TOKENS = 200_000


def batch(tokens: int, masks: bool, device: torch.device) -> dict[str, Tensor]:
    """Two clips; with masks, one is shorter and one smaller, and captions differ in length."""
    size = (FRAMES, tokens // FRAMES // COLUMNS, COLUMNS)
    inputs = dict(
        x=torch.randn(2, 4, *size, device=device),
        timestep=torch.tensor([900.0, 100.0], device=device),
        y=torch.randn(2, 1, TEXT, 64, device=device),
    )
    if masks:
        video = torch.zeros(2, *size, dtype=torch.bool, device=device)
        video[0, : FRAMES * 4 // 5] = True
        video[1, :, : size[1] * 9 // 10, : COLUMNS * 17 // 20] = True
        lengths = torch.tensor([[TEXT * 4 // 5], [TEXT // 2]], device=device)
        text = torch.arange(TEXT, device=device) < lengths
        assert max(video.float().mean((1, 2, 3)).max(), text.float().mean(1).max()) <= 0.8
        inputs |= dict(video_mask=video, mask=text.long())
    return inputs


def peak_of(model: nn.Module, inputs: dict[str, Tensor], device: torch.device) -> int:
    """Peak bytes of a forward and backward pass, without weights and inputs."""
    model.zero_grad(set_to_none=True)
    if device.type == "cuda":
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        model(**inputs).square().mean().backward()
        return torch.cuda.max_memory_allocated() - before
    with LivePeak() as live:
        model(**inputs).square().mean().backward()
    return live.peak


def saved_bytes(model: nn.Module, inputs: dict[str, Tensor]) -> int:
    """Bytes of the storages that autograd saves for backward, without weights and inputs."""
    existing = (*model.parameters(), *model.buffers(), *inputs.values())
    own = {tensor.untyped_storage()._cdata for tensor in existing}
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            kept[storage._cdata] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = model(**inputs)
    del output
    return sum(kept.values())


def pair_of_blocks(device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    model = build_model(
        "STDiT3",
        depth=1,
        hidden_size=WIDTH,
        num_heads=HEADS,
        patch_size=(1, 1, 1),
        caption_channels=64,
        model_max_length=TEXT,
    )
    return model.to(device)


def measure_masks(tokens: int, device: torch.device) -> dict[str, Any]:
    """Print peaks with and without masks, and their ratios to the bounds; returns both."""
    model, fewer = pair_of_blocks(device), tokens // 4

    peaks = {}
    for count in (fewer, tokens):
        for masked in (False, True):
            start = time.perf_counter()
            peak = peak_of(model, batch(count, masked, device), device)
            peaks[count, masked] = peak
            print(
                f"{count:,} tokens per clip, {'with' if masked else 'no'} masks: "
                f"peak {peak / 1e9:.2f} GB ({time.perf_counter() - start:.0f} s)",
                flush=True,
            )

    activation = 2 * tokens * WIDTH * 4
    saved = 4 * saved_bytes(model, batch(fewer, False, device))
    gradients = sum(p.numel() * p.element_size() for p in model.parameters())
    parts = {
        "saved for backward": saved,
        "gradients of weights": gradients,
        "a gradient of the tokens": activation,
    }
    listed = ", ".join(f"{what} {size / 1e9:.3f} GB" for what, size in parts.items())
    print(f"lower bound: {listed}; {saved / activation:.1f} activations are saved")

    masked = peaks[tokens, True]
    ratios = {
        "masks / no masks": masked / peaks[tokens, False],
        "masks / lower bound": masked / sum(parts.values()),
        f"growth from {fewer:,} tokens": masked / peaks[fewer, True],
    }
    for (name, ratio), bound in zip(ratios.items(), (1.15, 1.3, 4.2), strict=True):
        print(f"{name}: {ratio:.3f} (bound {bound})")
    return {"tokens": tokens, "peak_bytes": masked, "lower_bound_bytes": parts, "ratios": ratios}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--tokens", type=int, default=MAX_TOKENS, help="tokens of a clip, in steps of 8,000"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")


def run(args: argparse.Namespace) -> dict[str, Any]:
    step = 4 * FRAMES * COLUMNS
    return measure_masks(max(step, args.tokens // step * step), torch.device(args.device))

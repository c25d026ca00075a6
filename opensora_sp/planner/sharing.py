"""How a batch is shared: the mode, why it was chosen, who holds what, and how evenly.

Rows, modes and costs are those of ``opensora_sp.parallel``; nothing of them is worked out anew here.

Legend: B samples, T frames, S patches, C hidden width, H heads, P ranks of one SP group.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

from opensora_sp.parallel import Options
from opensora_sp.parallel.cost import attention_flops, block_flops, few_rows_costs, pair_flops
from opensora_sp.parallel.layout import SPATIAL_ROWS, TEMPORAL_ROWS, run_sizes
from opensora_sp.parallel.modes import (
    BranchSwitch,
    SplitGather,
    SplitHeads,
    SwitchRows,
    Ulysses,
    WholeSamples,
    choose_mode,
)

Mode = type[WholeSamples]
SAMPLES, FRAME_HEADS, HEADS = "b | t s", "b t h | s", "h | b t s"
LAYOUTS: dict[Mode, tuple[str, ...]] = {
    WholeSamples: (SAMPLES,),
    SwitchRows: (SPATIAL_ROWS, TEMPORAL_ROWS),
    BranchSwitch: (SPATIAL_ROWS, TEMPORAL_ROWS),
    SplitHeads: (FRAME_HEADS, TEMPORAL_ROWS),
    Ulysses: (HEADS, TEMPORAL_ROWS),
    SplitGather: (TEMPORAL_ROWS,),
}
UNITS = {
    SAMPLES: "samples (B)",
    SPATIAL_ROWS: "spatial rows (B*T)",
    TEMPORAL_ROWS: "temporal rows (B*S)",
    FRAME_HEADS: "heads of frames (B*T*H)",
    HEADS: "heads (H)",
}


@dataclass(frozen=True)
class Shape:
    """A batch's tokens, B x T x S, in a model of ``depth`` pairs of blocks."""

    num_samples: int
    frames: int
    patches: int
    width: int
    heads: int
    depth: int

    @property
    def tokens(self) -> int:
        return self.num_samples * self.frames * self.patches

    @property
    def sizes(self) -> dict[str, int]:
        """The axes by the letters that layouts are written in."""
        return {"b": self.num_samples, "t": self.frames, "s": self.patches}

    def mode(self, options: Options, ranks: int) -> Mode:
        """The mode that the engine takes for this batch."""
        if ranks == 1:
            return WholeSamples
        return choose_mode(options, (self.num_samples, self.frames, self.patches), self.width, self.heads, ranks)

    def units(self, layout: str, ranks: int) -> list[int]:
        """Units of a layout that each rank holds."""
        axes = {**self.sizes, "h": self.heads}
        return run_sizes(math.prod(axes[axis] for axis in layout.partition("|")[0].split()), ranks)


@dataclass(frozen=True)
class Sharing:
    """Who holds what in one mode.

    ``units`` are counts per rank by kind of unit; ``work`` is relative forward work per rank, 1 the mean;
    ``imbalance`` is how much longer the busiest rank works than the mean, 0.25 for a quarter.
    """

    mode: str
    why: str
    units: dict[str, list[int]]
    tokens: list[int]
    work: list[float]
    imbalance: float
    idle: list[str]


def share(shape: Shape, options: Options, ranks: int) -> Sharing:
    """How ``ranks`` share a batch."""
    mode = shape.mode(options, ranks)
    units = {UNITS[layout]: shape.units(layout, ranks) for layout in LAYOUTS[mode]}
    work = _work(mode, shape, ranks)
    mean = sum(work) / ranks
    held = SAMPLES if mode is WholeSamples else TEMPORAL_ROWS
    return Sharing(
        mode=mode.__name__,
        why=_why(mode, shape, options, ranks),
        units=units,
        tokens=[n * shape.tokens // sum(units[UNITS[held]]) for n in units[UNITS[held]]],
        work=[one / mean for one in work],
        imbalance=max(work) / mean - 1,
        idle=[_idle(what, sizes) for what, sizes in units.items() if min(sizes) == 0],
    )


def _work(mode: Mode, shape: Shape, ranks: int) -> list[float]:
    """FLOPs of a spatial and a temporal block on each rank."""
    B, T, S, C, H = shape.num_samples, shape.frames, shape.patches, shape.width, shape.heads
    every_attention = attention_flops(B * T, S, C) + attention_flops(B * S, T, C)
    if mode is WholeSamples:
        return [n / B * pair_flops(B, T, S, C) for n in shape.units(SAMPLES, ranks)]
    temporal = shape.units(TEMPORAL_ROWS, ranks)
    if mode in (SwitchRows, BranchSwitch):
        spatial = shape.units(SPATIAL_ROWS, ranks)
        tokens = [(2 * t * T) if mode is BranchSwitch else (s * S + t * T) for s, t in zip(spatial, temporal)]
        attention = [attention_flops(s, S, C) + attention_flops(t, T, C) for s, t in zip(spatial, temporal)]
    elif mode is SplitHeads:
        tokens = [2 * t * T for t in temporal]
        heads = shape.units(FRAME_HEADS, ranks)
        attention = [attention_flops(n, S, C // H) + attention_flops(t, T, C) for n, t in zip(heads, temporal)]
    else:
        tokens = [2 * t * T for t in temporal]
        shares = [n / H for n in shape.units(HEADS, ranks)] if mode is Ulysses else [1.0] * ranks
        attention = [part * every_attention for part in shares]
    return [block_flops(n, C) + a for n, a in zip(tokens, attention)]


def _why(mode: Mode, shape: Shape, options: Options, ranks: int) -> str:
    B, T, H = shape.num_samples, shape.frames, shape.heads
    if ranks == 1:
        return "sp_size is 1: one rank holds the whole batch, nothing is sent"
    if options.strategy != "switch":
        return f"the config says strategy={options.strategy!r}, a baseline that sends more than 'switch'"
    if mode is WholeSamples:
        return f"{ranks} ranks divide B={B}: each holds {B // ranks} whole samples, no token moves"
    if mode is BranchSwitch:
        sent = f", sent as {options.comm_dtype}" if options.comm_dtype else ""
        return f"the config says placement='branch': spatial attention's input and output switch layout{sent}"
    if ranks <= B * T:
        return (
            f"B*T={B * T} frames are enough for {ranks} ranks: each holds whole rows, and tokens switch between "
            "spatial and temporal rows"
        )
    rows, heads = (few_rows_costs(B, T, shape.patches, shape.width, H, ranks)[way] / 1e9 for way in ("rows", "heads"))
    costs = f"{rows:.3g} GFLOP-equivalents a spatial block by whole frames, {heads:.3g} by frames x heads"
    way = "frames x heads share spatial attention" if mode is SplitHeads else "whole frames go to some ranks"
    return f"B*T={B * T} frames are fewer than {ranks} ranks: {way}, the cheaper way ({costs})"


def _idle(what: str, sizes: list[int]) -> str:
    without = [rank for rank, size in enumerate(sizes) if size == 0]
    listed = ", ".join(map(str, without[:8])) + (", ..." if len(without) > 8 else "")
    return (
        f"{what} are {sum(sizes)}, fewer than the {len(sizes)} ranks: {len(without)} of these hold no unit and wait "
        f"(rank {listed})"
    )


def options_of(how: object) -> Options:
    """The engine's options from a config's ``sequence_parallel`` (a model, a dict, or None for the defaults)."""
    values = dict(how) if how else {}  # type: ignore[call-overload]
    return Options(**{key: value for key, value in values.items() if key in asdict(Options())})

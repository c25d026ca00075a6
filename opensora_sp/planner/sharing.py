"""How a batch is shared: the mode, why it was chosen, who holds what, and how evenly.

Rows, modes and costs are those of ``opensora_sp.parallel``; nothing of them is worked out anew here.

Legend: B samples, T frames, S patches, C hidden width, H heads, P ranks of one SP group.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from opensora_sp.models.config import SharedConfig
from opensora_sp.parallel import Options
from opensora_sp.parallel.cost_model import attention_flops, block_flops, few_frames_costs
from opensora_sp.parallel.layout import (
    SPATIAL_ROWS,
    TEMPORAL_ROWS,
    WINDOW_COLUMNS,
    WINDOW_ROWS,
    Partition,
    runs,
    unit_runs,
)
from opensora_sp.parallel.strategies import (
    BranchSwitch,
    SplitBoth,
    SplitClips,
    SplitGather,
    SplitHeads,
    SplitWindows,
    SwitchRows,
    Ulysses,
    WholeSamples,
    choose_mode,
)

Mode = type[WholeSamples]
SAMPLES, FRAME_HEADS, WINDOW_HEADS, CLIP_HEADS = "b | t s", "b t h | s", "b w h | p t", "b h | s t"
HEADS, EVERYTHING = "h | b t s", "everything, everywhere"
UNITS = {
    SAMPLES: "samples (B)",
    SPATIAL_ROWS: "spatial rows (B*T)",
    TEMPORAL_ROWS: "temporal rows (B*S)",
    WINDOW_ROWS: "windows (B*W)",
    WINDOW_COLUMNS: "temporal rows (B*S)",
    FRAME_HEADS: "heads of frames (B*T*H)",
    WINDOW_HEADS: "heads of windows (B*W*H)",
    CLIP_HEADS: "heads of clips (B*H)",
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
    windows: Partition | None = None  # of temporal attention
    full: bool = False  # attention over whole clips

    @classmethod
    def of(cls, config: SharedConfig, num_samples: int, latent_size: tuple[int, int, int]) -> Shape:
        """The shape of a batch of such latents in a model of this configuration."""
        grid = config.grid(num_samples, latent_size)
        return cls(
            num_samples,
            grid.frames,
            grid.patches_per_frame,
            config.hidden_size,
            config.num_heads,
            config.depth,
            windows=grid.windows,
            full=grid.full,
        )

    @property
    def patches_per_frame(self) -> int:
        return self.patches

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
        return choose_mode(options, self, self.width, self.heads, ranks)

    def axes(self, layout: str) -> dict[str, int]:
        return {**self.sizes, "h": self.heads} if "h" in layout.split() else self.sizes

    def units(self, layout: str, ranks: int) -> list[int]:
        """Units of a layout that each rank holds."""
        return [
            last - first
            for first, last in unit_runs(self.axes(layout), layout, ranks, self.windows)
        ]

    def entries(self, layout: str, ranks: int) -> list[int]:
        """Tokens, or heads of tokens, that each rank holds in a layout."""
        return [
            stop - start for start, stop in runs(self.axes(layout), layout, ranks, self.windows)
        ]

    def layouts(self, mode: Mode) -> Layouts:
        """Where tokens lie in a spatial and in a temporal block of a mode, and by what its attentions are dealt out."""
        held = WINDOW_ROWS if self.windows else TEMPORAL_ROWS
        columns = WINDOW_COLUMNS if self.windows else TEMPORAL_ROWS
        return {
            WholeSamples: Layouts((SAMPLES, SAMPLES), (SAMPLES, SAMPLES)),
            SwitchRows: Layouts((SPATIAL_ROWS, held), (SPATIAL_ROWS, held)),
            BranchSwitch: Layouts((held, held), (SPATIAL_ROWS, held)),
            SplitHeads: Layouts((held, held), (FRAME_HEADS, held)),
            SplitWindows: Layouts((SPATIAL_ROWS, SPATIAL_ROWS), (SPATIAL_ROWS, WINDOW_HEADS)),
            SplitBoth: Layouts((columns, columns), (FRAME_HEADS, WINDOW_HEADS)),
            SplitClips: Layouts((held, held), (CLIP_HEADS, CLIP_HEADS)),
            Ulysses: Layouts((columns, columns), (HEADS, HEADS)),
            SplitGather: Layouts((columns, columns), (EVERYTHING, EVERYTHING)),
        }[mode]


@dataclass(frozen=True)
class Layouts:
    """In a spatial and in a temporal block: who holds the tokens, and who attends for them."""

    tokens: tuple[str, str]
    attention: tuple[str, str]

    def all(self) -> list[str]:
        """Each layout once, those of the attention first."""
        return [
            layout
            for layout in dict.fromkeys((*self.attention, *self.tokens))
            if layout != EVERYTHING
        ]


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
    layouts = shape.layouts(mode)
    units = {UNITS[layout]: shape.units(layout, ranks) for layout in layouts.all()}
    work = _work(shape, layouts, ranks)
    mean = sum(work) / ranks
    return Sharing(
        mode=mode.__name__,
        why=_why(mode, shape, options, ranks),
        units=units,
        tokens=shape.entries(layouts.tokens[1], ranks),
        work=[one / mean for one in work],
        imbalance=max(work) / mean - 1,
        idle=[_idle(what, sizes) for what, sizes in units.items() if min(sizes) == 0],
    )


def busiest_work(shape: Shape, options: Options, ranks: int) -> float:
    """FLOPs of a forward pass through the blocks on the rank that has most of them."""
    return shape.depth * max(_work(shape, shape.layouts(shape.mode(options, ranks)), ranks))


def attention_work(shape: Shape) -> float:
    """FLOPs of one spatial and one temporal attention, the whole batch."""
    return sum(_attention(shape, SAMPLES, is_temporal, 1)[0] for is_temporal in (False, True))


def _work(shape: Shape, layouts: Layouts, ranks: int) -> list[float]:
    """FLOPs of a spatial and a temporal block on each rank."""
    work = [0.0] * ranks
    for tokens, attention, is_temporal in zip(
        layouts.tokens, layouts.attention, (False, True), strict=True
    ):
        held = shape.entries(tokens, ranks)
        attended = _attention(shape, attention, is_temporal, ranks)
        work = [
            one + block_flops(n, shape.width) + a
            for one, n, a in zip(work, held, attended, strict=True)
        ]
    return work


def _attention(shape: Shape, layout: str, is_temporal: bool, ranks: int) -> list[float]:
    """FLOPs of an attention, dealt out in a layout, on each rank."""
    B, T, S, C = shape.num_samples, shape.frames, shape.patches, shape.width
    if shape.full:
        lengths = [T * S]
    elif is_temporal:
        lengths = [size * T for size in shape.windows.sizes] if shape.windows else [T] * S
    else:
        lengths = [S] * T
    of_sample = sum(attention_flops(1, length, C) for length in lengths)
    if layout == EVERYTHING:
        return [B * of_sample] * ranks
    if layout in (SAMPLES, HEADS, CLIP_HEADS):  # whose units are alike
        units = shape.units(layout, ranks)
        return [B * of_sample * n / sum(units) for n in units]
    heads = shape.heads if "h" in layout.split() else 1
    of_units = [
        attention_flops(1, length, C // heads) for length in lengths for _ in range(heads)
    ] * B
    return [
        sum(of_units[first:last])
        for first, last in unit_runs(shape.axes(layout), layout, ranks, shape.windows)
    ]


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
    if mode is SplitClips:
        return f"full attention over clips is dealt out by B*H={B * H} heads of clips; all else by temporal rows"
    if mode in (SplitWindows, SplitBoth):
        few = f"B*W={B * len(shape.windows.sizes)} windows" if shape.windows else ""
        few = f"{few} and B*T={B * T} frames" if mode is SplitBoth else few
        return f"{few} are fewer than {ranks} ranks: their attention is dealt out by heads as well, the cheaper way"
    if ranks <= B * T:
        return (
            f"B*T={B * T} frames are enough for {ranks} ranks: each holds whole rows, and tokens switch between "
            "spatial and temporal rows"
        )
    costs_of = few_frames_costs(B, T, shape.patches, shape.width, H, ranks)
    rows, heads = (costs_of[way] / 1e9 for way in ("units", "heads"))
    costs = f"{rows:.3g} GFLOP-equivalents a spatial block by whole frames, {heads:.3g} by frames x heads"
    way = (
        "frames x heads share spatial attention"
        if mode is SplitHeads
        else "whole frames go to some ranks"
    )
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

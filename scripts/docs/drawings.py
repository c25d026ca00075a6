"""The drawings of docs/images; tokens are distributed by the layouts of the engine itself.

python scripts/docs/drawings.py
"""

from __future__ import annotations

from collections.abc import Callable
from html import escape
from itertools import chain
from pathlib import Path

from opensora_sp.data.dataset import ClipShape
from opensora_sp.data.sampler import MicroBatch
from opensora_sp.data.schedule import Assigned, busy_seconds, schedule
from opensora_sp.parallel.layout import balanced_range, balanced_sizes
from opensora_sp.parallel.rank_groups import RankGroup, fixed_groups, nested_groups

IMAGES = Path(__file__).parent.parent.parent / "docs" / "images"
RANKS = ("#4263eb", "#f08c00", "#0ca678", "#ae3ec9")
INK, SOFT, LINE, PAPER, OUTSIDE = "#212529", "#868e96", "#ced4da", "#ffffff", "#e9ecef"
FONT = "-apple-system,'Segoe UI',Roboto,'Helvetica Neue',Arial,sans-serif"
CELL, GAP = 30, 4
STEP = CELL + GAP


class Drawing:
    """Shapes on a sheet of white paper, as SVG."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'width="{width}" height="{height}" '
            f'font-family="{FONT}" role="img">',
            f"<title>{escape(title)}</title>",
            f'<rect width="{width}" height="{height}" rx="14" fill="{PAPER}"/>',
            '<defs><marker id="a" viewBox="0 0 8 8" refX="6" refY="4" markerWidth="7" '
            'markerHeight="7" '
            f'orient="auto-start-reverse"><path d="M0 0.5L7.5 4L0 7.5z" fill="{INK}"/>'
            "</marker></defs>",
        ]

    def box(
        self, x: float, y: float, w: float, h: float, fill: str, stroke: str = "none", rx: float = 5
    ) -> None:
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="{rx:g}" fill="{fill}" '
            f'stroke="{stroke}" stroke-width="1.5"/>'
        )

    def text(
        self,
        x: float,
        y: float,
        text: str,
        size: float = 13,
        fill: str = INK,
        anchor: str = "middle",
        bold: bool = False,
    ) -> None:
        weight = ' font-weight="600"' if bold else ""
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size:g}" fill="{fill}" '
            f'text-anchor="{anchor}"{weight}>'
            f"{escape(text)}</text>"
        )

    def head(self, x: float, title: str, subtitle: str) -> None:
        self.text(x, 36, title, 17, bold=True)
        self.text(x, 57, subtitle, 12.5, SOFT)

    def side(self, x: float, y: float, text: str) -> None:
        """Text rotated to read upwards."""
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" font-size="12" fill="{SOFT}" text-anchor="middle" '
            f'transform="rotate(-90 {x:g} {y:g})">{escape(text)}</text>'
        )

    def line(
        self, x1: float, y1: float, x2: float, y2: float, color: str = INK, width: float = 1.8
    ) -> None:
        self.parts.append(
            f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke="{color}" '
            f'stroke-width="{width:g}" stroke-linecap="round"/>'
        )

    def arrow(self, x1: float, y1: float, x2: float, y2: float) -> None:
        self.parts.append(
            f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke="{INK}" '
            'stroke-width="1.8" marker-end="url(#a)"/>'
        )

    def dot(self, x: float, y: float, radius: float, fill: str = PAPER) -> None:
        self.parts.append(f'<circle cx="{x:g}" cy="{y:g}" r="{radius:g}" fill="{fill}"/>')

    def legend(self, x: float, y: float, ranks: int, step: float = 92) -> float:
        for rank in range(ranks):
            self.box(x, y - 12, 15, 15, RANKS[rank], rx=4)
            self.text(x + 22, y, f"rank {rank}", anchor="start")
            x += step
        return x

    def svg(self) -> str:
        return "\n".join([*self.parts, "</svg>"]) + "\n"


def holder(row: int, rows: int, ranks: int) -> int:
    """The rank that holds a row."""
    ranges = [balanced_range(rows, ranks, rank) for rank in range(ranks)]
    return next(rank for rank, (start, stop) in enumerate(ranges) if start <= row < stop)


def layouts() -> str:
    """Five frames of six patches on three ranks in both layouts; dots: tokens that do not move."""
    frames, patches, ranks = 5, 6, 3
    sheet = Drawing(720, 344, "Spatial and temporal layout of 5 frames of 6 patches on 3 ranks")
    left, right, top = 58, 458, 92
    for x, title, about in (
        (left, "spatial layout", "a row is a frame: attention over its patches"),
        (right, "temporal layout", "a row is a patch: attention over its frames"),
    ):
        middle = x + patches * STEP / 2 - GAP / 2
        sheet.head(middle, title, about)
        sheet.text(middle, top - 10, "patches s →", 12, SOFT)
        sheet.side(x - 14, top + frames * STEP / 2, "← frames t")

    for t in range(frames):
        for s in range(patches):
            spatial, temporal = holder(t, frames, ranks), holder(s, patches, ranks)
            for x, rank in ((left, spatial), (right, temporal)):
                sheet.box(x + s * STEP, top + t * STEP, CELL, CELL, RANKS[rank])
            if spatial == temporal:
                sheet.dot(right + s * STEP + CELL / 2, top + t * STEP + CELL / 2, 4.5)

    for t in range(frames):
        y = top + t * STEP + CELL / 2
        sheet.line(left + 9, y, left + patches * STEP - GAP - 9, y, "rgba(255,255,255,.75)", 2)

    for s in range(patches):
        x = right + s * STEP + CELL / 2
        sheet.line(x, top + 9, x, top + frames * STEP - GAP - 9, "rgba(255,255,255,.75)", 2)

    middle = (left + patches * STEP - GAP + right - 28) / 2
    sheet.text(middle, 150, "switch", 16, bold=True)
    sheet.arrow(middle - 52, 164, middle + 52, 164)
    sheet.arrow(middle + 52, 184, middle - 52, 184)
    sheet.text(middle, 206, "one all-to-all", 12, SOFT)
    sheet.text(middle, 222, "sizes known beforehand", 12, SOFT)
    x = sheet.legend(166, 310, ranks)
    sheet.dot(x + 14, 305, 8, SOFT)
    sheet.dot(x + 14, 305, 4.5)
    sheet.text(x + 30, 310, "stays on its rank, is not sent", anchor="start")
    return sheet.svg()


def heads() -> str:
    """An image on four ranks: one frame, so spatial attention is distributed by heads."""
    ranks, patches, heads = 4, 8, 4
    sheet = Drawing(
        720,
        286,
        "One frame on 4 ranks: patches for all work on single tokens, heads for spatial attention",
    )
    left, right, top = 44, 470, 96
    sheet.head(left + patches * STEP / 2, "all other work", "each rank has a run of the patches")

    for s in range(patches):
        sheet.box(left + s * STEP, top + 1.5 * STEP, CELL, CELL, RANKS[holder(s, patches, ranks)])
    sheet.text(left + patches * STEP / 2, top + 3.1 * STEP, "patches s →", 12, SOFT)

    sheet.head(right + 104, "spatial attention", "each rank has all patches of a head")
    for h in range(heads):
        sheet.box(
            right, top + h * STEP, patches * (STEP - 8) - GAP, CELL, RANKS[holder(h, heads, ranks)]
        )
        sheet.text(right - 12, top + h * STEP + 20, f"head {h}", 12, SOFT, anchor="end")
        y = top + h * STEP + CELL / 2
        sheet.line(
            right + 12, y, right + patches * (STEP - 8) - GAP - 12, y, "rgba(255,255,255,.75)", 2
        )

    middle = (left + patches * STEP + right - 60) / 2
    sheet.text(middle, top + 1.3 * STEP, "q, k, v", 14, bold=True)
    sheet.arrow(middle - 36, top + 1.55 * STEP, middle + 36, top + 1.55 * STEP)
    sheet.arrow(middle + 36, top + 2.1 * STEP, middle - 36, top + 2.1 * STEP)
    sheet.text(middle, top + 2.65 * STEP, "output", 14, bold=True)
    sheet.legend(172, 264, ranks)
    return sheet.svg()


def gradients() -> str:
    """A loss in numbers: what each rank computes, and why the mean over the ranks is right."""
    errors, ranks = (6, 3, 3, 0, 3), 3
    sizes, whole = balanced_sizes(len(errors), ranks), sum(errors) / len(errors)
    sheet = Drawing(720, 392, "The loss of a clip of five rows on three ranks")
    sheet.head(
        360,
        "one clip, five rows of tokens, three ranks",
        "numbers are the squared errors of the rows",
    )

    columns, row = (72, 292, 512), 0
    ours, local = [], []
    for rank, x in enumerate(columns):
        held = errors[row : row + sizes[rank]]
        row += sizes[rank]
        ours.append(sum(held) / len(errors) * ranks)
        local.append(sum(held) / len(held))
        middle = x + 68
        start = middle - len(held) * 44 / 2
        for i, error in enumerate(held):
            sheet.box(start + i * 44, 82, 40, 40, RANKS[rank], rx=7)
            sheet.text(start + i * 44 + 20, 108, str(error), 17, PAPER, bold=True)

        sheet.arrow(middle, 130, middle, 156)
        terms = " + ".join(map(str, held))
        numerator = f"({terms})" if len(held) > 1 else terms
        sheet.text(middle, 178, f"{numerator} / {len(errors)} × {ranks}", 14)
        sheet.text(middle, 204, f"loss {ours[-1]:.1f}", 16, RANKS[rank], bold=True)
        sheet.arrow(middle, 214, 360 + (middle - 360) * 0.55, 248)
    assert abs(sum(ours) / ranks - whole) < 1e-12 < abs(sum(local) / ranks - whole)

    sheet.box(186, 254, 348, 50, "#edf2ff", RANKS[0], rx=10)
    losses = " + ".join(f"{one:.1f}" for one in ours)
    sheet.text(360, 275, f"mean over the ranks: ({losses}) / {ranks} = {whole:g}", 14)
    values = " + ".join(map(str, errors))
    clip_mean = f"the clip's mean: ({values}) / {len(errors)} = {whole:g}"
    sheet.text(360, 295, clip_mean, 14, bold=True)

    means = " + ".join(f"{one:g}" for one in local)
    notes = {
        338: f"The mean of local means would be ({means}) / {ranks} = {sum(local) / ranks:g}:",
        357: "rows of small shards would weigh more, and every gradient be off.",
        378: "ZeRO and DDP take the mean over the ranks anyway.",
    }
    for y, note in notes.items():
        sheet.text(360, y, note, 13, SOFT)
    return sheet.svg()


def masks() -> str:
    """Packed captions, clips of different sizes, conditioning frames."""
    sheet = Drawing(720, 330, "Three masks: text, clips of different sizes, conditioning frames")
    for x, title, about in (
        (130, "text", "captions are packed"),
        (366, "sizes", "only what is inside attends"),
        (602, "conditioning frames", "modulated with timestep 0"),
    ):
        sheet.head(x, title, about)
    _packed_text(sheet, 36, 92)
    _sizes(sheet, 282, 92)
    _conditioning(sheet, 520, 92)
    for x in (248, 484):
        sheet.line(x, 84, x, 300, LINE, 1.2)
    return sheet.svg()


def _packed_text(sheet: Drawing, x: float, y: float) -> None:
    size, step, lengths = 26, 30, (4, 2, 5)
    for caption, length in enumerate(lengths):
        for i in range(6):
            fill = RANKS[caption] if i < length else OUTSIDE
            sheet.box(x + i * step + 4, y + caption * step, size, size, fill)
    sheet.arrow(x + 94, y + 98, x + 94, y + 122)

    small, place = 15.5, 0
    for caption, length in enumerate(lengths):
        for _ in range(length):
            sheet.box(x + 1 + place * (small + 1.5), y + 132, small, 26, RANKS[caption], rx=3)
            place += 1
    sheet.text(x + 94, y + 182, f"lengths {', '.join(map(str, lengths))}, on the host", 12.5)
    sheet.text(x + 94, y + 201, "no padding, no mask tensor", 12.5, SOFT)


def _sizes(sheet: Drawing, x: float, y: float) -> None:
    wide, tall, step = (5, 3), (3, 4), 20
    for clip, (columns, rows) in enumerate((wide, tall)):
        start = x + clip * 92
        for i in range(5):
            for j in range(4):
                inside = i < columns and j < rows
                sheet.box(
                    start + i * 16, y + j * step, 14, 17, RANKS[clip] if inside else OUTSIDE, rx=3
                )

    sheet.arrow(x + 84, y + 98, x + 84, y + 122)

    place = 0.0
    for clip, (columns, rows) in enumerate((wide, tall)):
        for _ in range(columns * rows):
            sheet.box(x - 6 + place, y + 132, 5.4, 26, RANKS[clip], rx=1.5)
            place += 6.6
    inside = " + ".join(str(columns * rows) for columns, rows in (wide, tall))
    sheet.text(x + 84, y + 182, f"{inside} tokens of 2 × 20 attend", 12.5)
    sheet.text(x + 84, y + 201, "outside: output and gradient are 0", 12.5, SOFT)


def _conditioning(sheet: Drawing, x: float, y: float) -> None:
    step, count = 34, 2
    for t in range(5):
        sheet.box(x + t * step, y + 10, CELL, 62, RANKS[2] if t < count else RANKS[0])
        sheet.text(x + t * step + CELL / 2, y + 46, "0" if t < count else "t", 16, PAPER, bold=True)
    sheet.text(x + 83, y + 92, "timestep of each frame", 12.5, SOFT)

    sheet.arrow(x + 83, y + 102, x + 83, y + 122)
    for t in range(5):
        sheet.box(x + t * step, y + 132, CELL, 26, OUTSIDE if t < count else RANKS[0])
        sign, fill = ("–", SOFT) if t < count else ("✓", PAPER)
        sheet.text(x + t * step + CELL / 2, y + 150, sign, 14, fill)

    sheet.text(x + 83, y + 182, "no loss on conditioning frames", 12.5)
    sheet.text(x + 83, y + 201, "the same in both layouts", 12.5, SOFT)


# Seconds on one rank of a step's micro-batches, by what they hold.
MIXED = {"a clip of 16 s": [12.0], "clips of 2 s": [4.0, 4.0, 3.0], "images": [2.0, 2.0, 1.5, 1.5]}


def mixed_sizes() -> str:
    """A step on eight ranks, in pairs of ranks and scheduled on groups of any size."""
    world, costs = 8, list(chain.from_iterable(MIXED.values()))
    shape = ClipShape(1, 1, 1)
    micro_batches = [MicroBatch(n, 0, shape, (n,), cost) for n, cost in enumerate(costs)]

    sheet = Drawing(720, 352, "A step of eight micro-batches on eight ranks")
    for x, title, about, family in (
        (70, "sp_size=2", "replicas of two ranks wait for the long clip", fixed_groups(world, 2)),
        (420, 'sp_size="auto"', "a group of ranks for each micro-batch", nested_groups(world, 8)),
    ):
        sheet.head(x + 130, title, about)
        sheet.side(x - 14, 84 + world * 13, "ranks")
        _timeline(sheet, x, 84, schedule(micro_batches, family, _shared_seconds), world)

    x = 150.0
    for kind, name in enumerate(MIXED):
        sheet.box(x, 318, 15, 15, RANKS[kind], rx=4)
        sheet.text(x + 22, 330, name, anchor="start")
        x += 130
    sheet.box(x, 318, 15, 15, OUTSIDE, rx=4)
    sheet.text(x + 22, 330, "waiting", anchor="start")
    return sheet.svg()


def _shared_seconds(micro_batch: MicroBatch, group: RankGroup) -> float:
    # The ranks of a group lose a little in exchanges.
    return micro_batch.cost / group.size + 0.04 * (group.size - 1)


def _timeline(sheet: Drawing, x: float, y: float, assigned: list[Assigned], world: int) -> None:
    """Micro-batches from left to right, a row for each rank."""
    width, tall = 42.0, 26
    end = busy_seconds(assigned, world, _shared_seconds).max()
    sheet.box(x, y, end * width, world * tall - 2, OUTSIDE)

    free = [0.0] * world
    for micro_batch, group in assigned:
        begin, taken = free[group.start], _shared_seconds(micro_batch, group)
        sheet.box(
            x + begin * width,
            y + group.start * tall,
            taken * width - 2,
            group.size * tall - 2,
            RANKS[_kind(micro_batch.number)],
        )
        free[group.start : group.stop] = [begin + taken] * group.size
    sheet.text(x, y + world * tall + 18, "time →", 12, SOFT, anchor="start")


def _kind(number: int) -> int:
    """Which kind of ``MIXED`` a micro-batch is of."""
    kinds: list[int] = []
    for kind, costs in enumerate(MIXED.values()):
        kinds += [kind] * len(costs)
    return kinds[number]


def favicon() -> str:
    """Nine tokens of three ranks."""
    cells = ""
    for t in range(3):
        for s in range(3):
            cells += (
                f'<rect x="{2 + 10 * s}" y="{2 + 10 * t}" width="8" height="8" rx="2" '
                f'fill="{RANKS[t]}"/>'
            )
    return f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 32 32">{cells}</svg>\n'


DRAWINGS: dict[str, Callable[[], str]] = {
    "layouts.svg": layouts,
    "heads.svg": heads,
    "gradients.svg": gradients,
    "masks.svg": masks,
    "mixed_sizes.svg": mixed_sizes,
    "favicon.svg": favicon,
}

if __name__ == "__main__":
    for name, draw in DRAWINGS.items():
        (IMAGES / name).write_text(draw(), encoding="utf-8")

"""Types of the checker's definitions, which users write, and of its report."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from torch import nn

SHOWN = 12  # rows of a list that the table shows


class DefinitionError(ValueError):
    """The definition cannot be checked; got / expected / what to do."""


@dataclass(frozen=True)
class Cut:
    """Rank r holds the r-th part of axis ``dim``, such as tokens or attention heads."""

    dim: int


Layout = Cut | Literal["replicated"]


@dataclass
class Applied:
    """Results of ``apply``; all are optional.

    Attributes:
        model: the model to run, where ``apply`` has wrapped it.
        gradients: reduction of the ranks' gradients that is right: "sum", "mean", or "none" if each
            rank has them whole. By default the checker infers it.
        layouts: of modules' outputs, by the module's name; "output" is the model's.
    """

    model: nn.Module | None = None
    gradients: Literal["sum", "mean", "none"] | None = None
    layouts: dict[str, Layout] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.gradients not in (None, "sum", "mean", "none"):
            raise DefinitionError(
                f"got {self.gradients!r} from apply; expected None, 'sum', 'mean', 'none' or "
                "Applied(...), the reduction of the ranks' gradients; return one of them"
            )


@dataclass
class Difference:
    """A module whose gathered output differs.

    Attributes:
        error: largest difference, relative to the largest entry in one process.
        bound: of the error, that rounding explains.
    """

    name: str
    error: float
    bound: float
    layout: str


@dataclass
class Finding:
    """Anything but a module or a gradient.

    Attributes:
        kind: "random" (a second run differs), "seed" (another seed per rank changes the result),
            "batch" (a batch of two differs from two of one), "adapter" (a fresh adapter changes the
            output), "waiting" (ranks wait for each other), "error" (a rank raises), "loss",
            "gradient norm", "validation loss", or "bytes" (communication that changes nothing).
        module: in whose forward pass, where that is known.
    """

    kind: str
    text: str
    module: str | None = None


@dataclass
class Report:
    """Differences between one process and P ranks.

    Attributes:
        first_module: the first in the order of the forward pass (in which a module follows its
            children) whose gathered output differs; "output" is the model's.
        gradients: parameter -> "times P", "divided by P", "missing", "sign" or "different".
        inputs: the same for floating-point inputs.
        reduction: of the ranks' gradients that is right: "sum", "mean" or "none", declared
            or inferred.
        compared: share of the modules' outputs that could be compared.
        precision: the lowest that the forward pass uses, and the bound that follows.
    """

    ranks: int
    first_module: str | None = None
    modules: list[Difference] = field(default_factory=list)
    gradients: dict[str, str] = field(default_factory=dict)
    inputs: dict[str, str] = field(default_factory=dict)
    reduction: str = "none"
    findings: list[Finding] = field(default_factory=list)
    compared: float = 0.0
    not_compared: list[str] = field(default_factory=list)
    precision: str = "not known"

    @property
    def ok(self) -> bool:
        """True if nothing differs."""
        return not (self.modules or self.gradients or self.inputs or self.findings)

    def to_dict(self) -> dict[str, Any]:
        """All fields and ``ok``, for JSON."""
        return {"ok": self.ok, **asdict(self)}

    def __str__(self) -> str:
        verdict = "no difference" if self.ok else "DIFFERENT"
        lines = [f"{verdict}: one process and {self.ranks} ranks ({self.precision})"]
        if self.first_module is not None:
            lines.append(f"first module that differs: {self.first_module}")
        modules = [f"{row.error:9.1e}  {row.name} ({row.layout})" for row in self.modules]
        lines += _section("modules in the order of the forward pass", modules)
        for title, kinds in {"parameters": self.gradients, "inputs": self.inputs}.items():
            rows = [f"{kind:>14}  {name}" for name, kind in kinds.items()]
            lines += _section(f"gradients of {title}", rows)
        for finding in self.findings:
            where = f" in {finding.module}" if finding.module else ""
            lines.append(f"{finding.kind}{where}: {finding.text}")
        lines.append(f"compared: {self.compared:.0%} of the modules' outputs")
        lines.append(f"reduction of gradients: {self.reduction}")
        return "\n".join([*lines, *_section("not compared", self.not_compared)])


def _section(title: str, rows: list[str]) -> list[str]:
    if not rows:
        return []
    hidden = [f"  ... and {len(rows) - SHOWN} more (all are in --json)"] * (len(rows) > SHOWN)
    return [f"{title}:", *(f"  {row}" for row in rows[:SHOWN]), *hidden]

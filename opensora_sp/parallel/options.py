"""The options of sequence parallelism: strategy, placement, precision and overlap of the exchanges."""

from __future__ import annotations

from dataclasses import dataclass

from .cost_model import H100, CostModel

PLACEMENTS = ("stream", "branch")
STREAM_SWITCH = ("switch", "stream")  # between the blocks, where overlap is possible
COMM_DTYPES = ("bf16", "fp8")


@dataclass(frozen=True, kw_only=True)
class Options:
    """How ranks work together; see ``parallelize``. Checks itself."""

    strategy: str = "switch"
    placement: str = "stream"
    comm_dtype: str | None = None
    overlap_chunks: int = 1
    overlap_backward: bool = False
    recompute_communication: bool = False
    cost_model: CostModel = H100

    def __post_init__(self) -> None:
        from .strategies import strategy_options  # whose signatures have Options

        known = dict(
            strategy=strategy_options(), placement=PLACEMENTS, comm_dtype=(None, *COMM_DTYPES)
        )
        for name, values in known.items():
            if getattr(self, name) not in values:
                raise ValueError(
                    f"got {name} {getattr(self, name)!r}; expected one of {values}; choose one of these"
                )
        if self.overlap_chunks < 1:
            raise ValueError(
                f"got overlap_chunks {self.overlap_chunks}; expected at least 1; 1 turns chunks off"
            )
        if self.placement == "branch" and self.strategy != "switch":
            raise ValueError(
                f"got placement 'branch' with strategy {self.strategy!r}; expected strategy 'switch'; change either"
            )
        if self.comm_dtype is not None and self.placement != "branch":
            raise ValueError(
                f"got comm_dtype {self.comm_dtype!r} with placement {self.placement!r}, which moves the residual "
                "stream; expected None there, the model's own dtype: rounding would add up over the blocks; set "
                "placement='branch' or leave comm_dtype out"
            )
        if (self.overlap_chunks > 1 or self.overlap_backward) and (
            self.strategy,
            self.placement,
        ) != STREAM_SWITCH:
            raise ValueError(
                f"got overlap_chunks {self.overlap_chunks} and overlap_backward {self.overlap_backward} with strategy "
                f"{self.strategy!r} and placement {self.placement!r}; expected 'switch' and 'stream', where switches "
                "lie between blocks; change these or leave the overlap out"
            )

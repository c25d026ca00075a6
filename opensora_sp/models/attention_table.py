"""Which kernel computes an attention: one table, read from the top (``TABLE``).

The choice depends on what attends to what (``Sequences``), on the device and on the packages
installed for it (``Platform``). A name in a config (``KERNELS``) overrides it. Nothing here
computes attention: ``attention.py`` runs the kernel that is chosen.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec

import torch

LABELS = {
    "spatial": "spatial attention",
    "temporal": "temporal attention",
    "cross": "cross-attention",
}
KINDS = tuple(LABELS)
SELF = ("spatial", "temporal")

KERNELS = {
    "short_rows": "the Triton kernel for short rows",
    "flash": "flash-attn",
    "flash3": "flash-attn 3",
    "cudnn": "cuDNN",
    "sdpa": "torch SDPA",
    "reference": "explicit softmax",
}
NAMES = ("auto", *KERNELS)

# The module that each package of Dao-AILab is imported as.
PACKAGES = {"flash": "flash_attn", "flash3": "flash_attn_interface"}
# What these take, ``flash_obstacle`` states.
FLASH_KERNELS = (*PACKAGES, "cudnn")

HOPPER = (9, 0)
DATA_CENTER = ((9, 0), (10, 0), (10, 3))  # Hopper and Blackwell
# Older ones are wrong if 128 does not divide a length (pytorch#169849).
SAFE_CUDNN = 91501

# What the Triton kernel for short rows takes.
LENGTHS, HEAD_WIDTHS = range(1, 33), range(1, 129)

ANY = range(sys.maxsize)
# More than one tile of queries.
LONG = range(129, sys.maxsize)


@dataclass(frozen=True)
class Entry:
    """A row of the table: a kernel, what it is the first choice for, and why.

    Args:
        kernel: a name in ``KERNELS``.
        reason: why it is, where those above it in the table do not apply.
        lengths: tokens of the sequences. Unknown lengths are in ``ANY`` alone.
        packed: whether also for sequences of unequal lengths.
        capabilities: of GPUs, None for all.
        verified: only where the Triton kernel for short rows may run.
    """

    kernel: str
    reason: str
    kinds: tuple[str, ...] = KINDS
    lengths: range = ANY
    packed: bool = True
    capabilities: tuple[tuple[int, int], ...] | None = None
    verified: bool = False

    def suits(self, sequences: Sequences, platform: Platform) -> bool:
        """Whether this is a good choice. ``obstacle`` is about whether it is possible."""
        length = sequences.length
        return (
            (sequences.kind is None or sequences.kind in self.kinds)
            and (self.lengths == ANY if length is None else length in self.lengths)
            and (self.packed or not sequences.packed)
            and (not self.verified or sequences.short_rows)
            and (self.capabilities is None or platform.capability in self.capabilities)
        )


# The first entry that suits and has no obstacle is taken. cuDNN takes no packed tokens: lengths of
# texts change with each batch, and it would make a new plan for each.
TABLE = (
    Entry(
        "short_rows",
        "no tile is padded to 64 tokens or more",
        kinds=SELF,
        lengths=range(2, LENGTHS.stop),
        packed=False,
        verified=True,
    ),
    Entry(
        "flash3",
        "Hopper's asynchronous products, heads padded to a multiple of 32",
        kinds=SELF,
        lengths=LONG,
    ),
    # Its queries are long, whatever the length of the text.
    Entry("flash3", "Hopper's asynchronous products", kinds=("cross",), capabilities=(HOPPER,)),
    Entry(
        "cudnn",
        "faster than FlashAttention-2 on Hopper and Blackwell from one tile of tokens on",
        kinds=SELF,
        lengths=LONG,
        packed=False,
        capabilities=DATA_CENTER,
    ),
    Entry("flash", "flash-attn is installed"),
    Entry("sdpa", "torch's FlashAttention-2, or its memory-efficient kernel"),
    Entry("reference", "takes anything"),
)


@dataclass(frozen=True)
class Sequences:
    """What attends to what, as far as a choice depends on it.

    Args:
        dtype, head_width: of queries, keys and values.
        kind: one of ``KINDS``; None for a call that names none.
        length: tokens of a sequence that attends to itself, at most; None if that is not known.
        packed: whether sequences may differ in length.
        short_rows: whether the Triton kernel for short rows may run (``kernels.chosen``).
        refused: names in ``KERNELS`` that failed verification on this device.
    """

    dtype: torch.dtype
    head_width: int
    kind: str | None = None
    length: int | None = None
    packed: bool = False
    short_rows: bool = False
    refused: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Platform:
    """A device, and the packages installed for it.

    Args:
        capability: compute capability of the GPU; None for other devices.
        packages: names in ``PACKAGES`` whose modules can be imported.
        cudnn: version as ``torch.backends.cudnn.version()``, 0 without.
        deterministic: gradients must not be summed by atomics
            (``torch.use_deterministic_algorithms``).
    """

    capability: tuple[int, int] | None
    packages: tuple[str, ...] = ()
    cudnn: int = 0
    deterministic: bool = False

    @classmethod
    def of(cls, device: torch.device, deterministic: bool) -> Platform:
        """The platform of a device of this machine.

        Meta tensors stand for tensors of a recent GPU with torch's own kernels.
        """
        if device.type != "cuda":
            return cls(HOPPER if device.type == "meta" else None, deterministic=deterministic)
        packages = tuple(name for name, module in PACKAGES.items() if find_spec(module))
        capability = torch.cuda.get_device_capability(device)
        return cls(capability, packages, torch.backends.cudnn.version() or 0, deterministic)


@dataclass(frozen=True)
class Choice:
    """A kernel, a name in ``KERNELS``, and the reason for it."""

    kernel: str
    reason: str


@dataclass(frozen=True)
class Backend:
    """A kernel for one kind of tensors; ``attention.resolve`` resolves a name to it.

    Args:
        name: a name in ``KERNELS``.
        processors: multiprocessors of the device. Packed queries are cut into pieces for them.
        deterministic: gradients of queries are summed without atomics
            (``torch.use_deterministic_algorithms``).
    """

    name: str
    processors: int = 1
    deterministic: bool = False


def names_by_kind(setting: str | Mapping[str, str]) -> dict[str, str]:
    """The name that a config sets for each kind: one for all, or a dict, which may leave some out.

    Raises:
        ValueError: for an unknown kind or name.
    """
    if isinstance(setting, str):
        setting = dict.fromkeys(KINDS, setting)
    if not setting.keys() <= set(KINDS):
        raise ValueError(
            f"got attention {dict(setting)}; expected a name for some of {KINDS}; correct the keys"
        )
    names = {kind: setting.get(kind, "auto") for kind in KINDS}
    for name in names.values():
        check_name(name)
    return names


def check_name(name: str) -> None:
    """Raise ValueError for a name that is none of ``NAMES``."""
    if name not in NAMES:
        raise ValueError(f"got attention {name!r}; expected one of {NAMES}; choose one of these")


def choose(name: str, sequences: Sequences, platform: Platform) -> Choice:
    """The kernel that a name stands for: "auto" is read from the table.

    Raises:
        ValueError: for an unknown name, or a kernel that cannot run.
    """
    check_name(name)
    if name == "auto":
        return _from_table(sequences, platform)

    problem = obstacle(name, sequences, platform)
    if problem is None:
        return Choice(name, "asked for")
    # Torch would build whole matrices of scores.
    if name == "sdpa":
        return Choice("reference", problem)
    raise ValueError(
        f"got attention {name!r}, but {problem}; expected a kernel that takes these tensors here; "
        "install what it needs (docs/install.md) or change the precision, or set attention='auto'"
    )


def _from_table(sequences: Sequences, platform: Platform) -> Choice:
    problems: list[str] = []
    for entry in TABLE:
        if entry.suits(sequences, platform):
            problem = obstacle(entry.kernel, sequences, platform)
            if problem is None:
                return Choice(entry.kernel, "; ".join(problems) or entry.reason)
            if problem not in problems:
                problems.append(problem)
    raise AssertionError("the last entry takes anything")


def obstacle(name: str, sequences: Sequences, platform: Platform) -> str | None:
    """Why a kernel cannot take such tensors on such a device; None if it can."""
    if name in sequences.refused:
        return f"{KERNELS[name]} failed verification on this device"
    problem = flash_obstacle(sequences, platform) if name in FLASH_KERNELS else None
    check = OBSTACLES.get(name)
    return problem or (check(sequences, platform) if check else None)


def flash_obstacle(sequences: Sequences, platform: Platform) -> str | None:
    """Why no kernel of FlashAttention can take such tensors, of a package or of torch."""
    if platform.capability is None:
        return "the tensors are not on a GPU"
    if sequences.dtype not in (torch.float16, torch.bfloat16):
        return f"{sequences.dtype} is not fp16 or bf16"
    if sequences.head_width > 256:
        return f"a head is {sequences.head_width} wide, over 256"
    if platform.capability < (8, 0):
        return "the GPU's compute capability is below 8.0"
    return None


def _short_rows(sequences: Sequences, platform: Platform) -> str | None:
    if not sequences.short_rows:
        return "it is off or was not verified on this device"
    if sequences.head_width not in HEAD_WIDTHS:
        return f"a head is {sequences.head_width} wide, over {HEAD_WIDTHS[-1]}"
    if sequences.packed or sequences.length not in LENGTHS:
        return f"rows are not of one length up to {LENGTHS[-1]}"
    return None


def _flash2(_: Sequences, platform: Platform) -> str | None:
    return None if "flash" in platform.packages else "flash-attn is not installed"


def _flash3(sequences: Sequences, platform: Platform) -> str | None:
    if platform.capability != HOPPER:
        return "flash-attn 3 is made for compute capability 9.0"
    if "flash3" not in platform.packages:
        return "flash-attn 3 is not installed"
    if sequences.head_width % 8:
        return f"flash-attn 3 takes heads in multiples of 8, not {sequences.head_width}"
    return None


def _cudnn(sequences: Sequences, platform: Platform) -> str | None:
    if platform.cudnn < SAFE_CUDNN:
        return f"cuDNN {_dotted(platform.cudnn)} is older than {_dotted(SAFE_CUDNN)}"
    if sequences.head_width % 8 or sequences.head_width > 128:
        return f"cuDNN takes heads in multiples of 8 up to 128, not {sequences.head_width}"
    if platform.deterministic:
        return "cuDNN's gradients are not deterministic"
    return None


def _sdpa(sequences: Sequences, platform: Platform) -> str | None:
    """Why torch would build whole matrices of scores for such tensors."""
    dtype, width = sequences.dtype, sequences.head_width
    if platform.capability is None:
        return None
    if dtype == torch.float64:
        return "torch has no fused kernel for float64 on a GPU"
    if width * dtype.itemsize % 16:
        return f"torch's fused kernels take heads in multiples of 16 bytes, not {width} x {dtype}"
    return None


OBSTACLES: dict[str, Callable[[Sequences, Platform], str | None]] = {
    "short_rows": _short_rows,
    "flash": _flash2,
    "flash3": _flash3,
    "cudnn": _cudnn,
    "sdpa": _sdpa,
}


def _dotted(cudnn: int) -> str:
    """90100 -> "9.1.0"."""
    return f"{cudnn // 10_000}.{cudnn // 100 % 100}.{cudnn % 100}"

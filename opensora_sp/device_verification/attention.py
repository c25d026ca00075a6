"""Attention runs on a device by kernels whose values and gradients were compared there.

The kernel that the table chooses for each kind of attention (``models/attention_table.py``) is
compared with the definition at the head width and lengths of the run. One that differs or raises an
error is left out on all ranks, and the next row of the table is compared.

Legend: R rows, L tokens of a row, N packed tokens, H heads, D head width.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from opensora_sp.config import InferenceConfig, TrainConfig
from opensora_sp.encoders import planned_latent_size
from opensora_sp.models.attention import (
    Backend,
    attention,
    choose_backends,
    set_refused,
)
from opensora_sp.models.attention_table import (
    KERNELS,
    KINDS,
    LABELS,
    Platform,
    Sequences,
    names_by_kind,
    obstacle,
)
from opensora_sp.models.kernels.examples import Example, normal
from opensora_sp.models.kernels.verification import compare
from opensora_sp.models.packing import Lengths
from opensora_sp.parallel.agreement import gathered
from opensora_sp.planner.batches import batches_by_name
from opensora_sp.runtime.versions import source_digest

from .verdicts import OK, device_facts, verdicts_of

logger = logging.getLogger(__name__)

# Some kernels are wrong only where 128 does not divide a length, or leaves 64.
ODD_LENGTHS = (405, 704, 1590)
MAX_LENGTH = 2048  # of examples; more would take the CPU minutes
MAX_SCORES = 2**21  # numbers in one tensor of the definition: 16 MB in float64
MANY_ROWS = 300
# All scores lie near this, so that their exponentials are zero in float32.
LOW_SCORE = -120.0
TILE = 128  # Up to one tile of tokens no kernel is chosen for its speed.

VERIFIED_ELSEWHERE = ("short_rows", "reference")  # as a Triton kernel; the definition


@dataclass(frozen=True, eq=False)
class Case:
    """A call of a model, by what the choice of its kernel depends on and by its arguments."""

    sequences: Sequences
    example: Example


def choose_attention(
    cfg: TrainConfig | InferenceConfig, model: Any, *, dtype: torch.dtype, device: torch.device
) -> None:
    """Leave out kernels of attention that are not right on a device, on all ranks. Collective.

    Logs a warning if there are any. Call it after ``choose_kernels``, which decides on the Triton
    kernel for short rows.

    Args:
        model: an STDiT model, of whose parameters some are trained in a training run.
        dtype: of its tokens.

    Raises:
        ValueError: on every rank, if the config names a kernel that is not right.
    """
    set_refused({})
    if device.type == "cpu":
        return

    start = time.perf_counter()
    names = names_by_kind(model.config.attention)
    trained = any(parameter.requires_grad for parameter in model.parameters())
    lengths = run_lengths(cfg, model.config)
    cases = list(cases_of(model.config, lengths, dtype, trained=trained))
    facts = device_facts(device) | {
        "source": source_digest(),
        "dtype": str(dtype),
        "attention": names,
        "heads": [model.config.num_heads, model.config.hidden_size],
        "lengths": lengths,
        "trained": trained,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "platform": Platform.of(device, deterministic=False).describe(),
    }

    refused: dict[str, dict[str, str]] = {kind: {} for kind in KINDS}  # by kernel the reason
    while True:
        failed = _failed(cases, names, refused, facts, device)
        for kind, kernel in failed:
            refused[kind][kernel] = failed[kind, kernel]
        set_refused(refused)
        if not failed:
            break
        _require(failed, names)

    reasons = [
        f"{LABELS[kind]} by {KERNELS[kernel]}: {reason}"
        for kind, kernels in refused.items()
        for kernel, reason in kernels.items()
    ]
    if reasons:
        logger.warning(
            "kernels of attention are replaced by others (%s): results stay right, steps may take "
            "longer; report it with the output of opensora-sp doctor --device cuda",
            "; ".join(reasons),
        )
    logger.info("attention: verified in %.1f s", time.perf_counter() - start)


def _failed(
    cases: Collection[Case],
    names: Mapping[str, str],
    refused: Mapping[str, Collection[str]],
    facts: dict[str, Any],
    device: torch.device,
) -> dict[tuple[str, str], str]:
    """The kernels that would run now and are not right, by kind and kernel, and why. Collective."""
    taken: dict[tuple[str, str], list[Case]] = {}
    backends: dict[str, Backend] = {}
    for case in cases:
        kind = case.sequences.kind
        assert kind is not None
        backend = getattr(choose_backends(names, {kind: case.sequences}, device), kind)
        if backend.name not in VERIFIED_ELSEWHERE:
            taken.setdefault((kind, backend.name), []).append(case)
            backends[backend.name] = backend

    # Ranks of other machines may have other packages.
    local_labels = {"{} attention by {}".format(*key): "taken" for key in taken}
    rank_labels = gathered(local_labels, None) if dist.is_initialized() else {0: local_labels}
    labels = sorted(set().union(*rank_labels.values()))

    def check(label: str) -> str:
        kind, *_, name = label.split()
        kind_cases = [case for case in cases if case.sequences.kind == kind]
        backend = backends.get(name) or Backend(name, 1, facts["deterministic"])
        return verify_backend(backend, taken.get((kind, name), kind_cases), device)

    checks = {label: partial(check, label) for label in labels}
    so_far = {kind: sorted(kernels) for kind, kernels in refused.items()}
    failed: dict[tuple[str, str], str] = {}
    for label, verdict in verdicts_of(checks, facts | {"refused": so_far}, device).items():
        kind, *_, name = label.split()
        if verdict != OK:
            failed[kind, name] = verdict
    return failed


def verify_backend(backend: Backend, cases: Collection[Case], device: torch.device) -> str:
    """OK, or how a kernel of attention differs from the definition, or why it cannot run here."""
    platform = Platform.of(device, backend.deterministic)
    for case in cases:
        if problem := obstacle(backend.name, case.sequences, platform):
            return problem
        kernel = partial(attention, backend=backend)
        for difference in compare(kernel, define, case.example, case.sequences.dtype, device):
            if not difference.ok:
                return str(difference)
    return OK


def _require(failed: Mapping[tuple[str, str], str], names: Mapping[str, str]) -> None:
    """Raise ValueError if a config names a kernel that failed."""
    for (kind, kernel), reason in failed.items():
        if names[kind] == kernel:
            raise ValueError(
                f"got attention {kernel!r} for {LABELS[kind]}, which is not right on this device "
                f"({reason}); expected the values and gradients of its definition; set "
                "attention='auto', which takes another kernel, and report it with the output of "
                "opensora-sp doctor --device cuda"
            )


def run_lengths(cfg: TrainConfig | InferenceConfig, config: Any) -> dict[str, list[int]]:
    """Tokens of the sequences of a run's batches, ascending, by kind of attention."""
    lengths: dict[str, set[int]] = {kind: set() for kind in KINDS}
    for batch in batches_by_name(cfg).values():
        size = planned_latent_size(cfg.vae, batch.num_frames, *batch.image_size)
        for kind, sequences in config.sequences(config.grid(1, size), torch.float32).items():
            lengths[kind].add(sequences.length or 1)
    return {kind: sorted(lengths[kind]) for kind in KINDS}


def cases_of(
    config: Any, lengths: Mapping[str, Collection[int]], dtype: torch.dtype, *, trained: bool
) -> Iterator[Case]:
    """Small calls of each kind of attention, which differ in their lengths.

    Args:
        config: of an STDiT model.
        lengths: of a run's sequences, by kind. The shortest, the longest, and the longest that 128
            does not divide are taken.
        trained: whether gradients are compared, too.
    """
    width = config.hidden_size // config.num_heads

    def case(kind: str, label: str, shapes: Any, lengths: Lengths | None, **options: Any) -> Case:
        heads = max(1, min(config.num_heads, MAX_SCORES // max(1, _scores(shapes, lengths))))
        q, k, v = (normal(*shape, heads, width, seed=i) for i, shape in enumerate(shapes))
        if options.pop("low", False):
            q[..., 0], k[..., 0] = 1.0, LOW_SCORE * width**0.5
        arguments = dict(q=q, k=k, v=v, lengths=lengths)
        gradients = ("q", "k", "v") if trained else ()
        example = Example(f"{LABELS[kind]} over {label}", arguments, gradients=gradients)
        return Case(Sequences(dtype, width, kind, **options), example)

    for kind in KINDS if config.alternates else ("spatial", "cross"):
        if kind == "cross":
            text = config.model_max_length
            for queries, keys in (
                ((1590, 1590), (text, text)),
                ((405, 0, 131, 64), (text, 7, 1, max(1, text // 2))),
            ):
                shapes = [(sum(queries),), (sum(keys),), (sum(keys),)]
                label = f"texts of {', '.join(map(str, keys))} tokens"
                yield case(kind, label, shapes, (queries, keys), length=text, packed=True)
            continue

        for length in _some(lengths[kind]):
            yield case(kind, f"{length} tokens", [(2, length)] * 3, None, length=length)
        if max(lengths[kind], default=0) > TILE:
            yield case(kind, "low scores", [(2, 704)] * 3, None, length=704, low=True)
            yield case(kind, "many rows", [(MANY_ROWS, 136)] * 3, None, length=136)
        packed = (405, 1, 131)
        shapes = [(sum(packed),)] * 3
        label = "rows of 405, 1 and 131 tokens"
        yield case(kind, label, shapes, (packed, packed), length=405, packed=True)


def _some(lengths: Collection[int]) -> list[int]:
    """Lengths to compare: of a run, and such that kernels have been wrong at."""
    possible = sorted(min(length, MAX_LENGTH) for length in lengths if length > 1)
    odd = [length for length in possible if length % TILE]
    known = ODD_LENGTHS if possible and possible[-1] > TILE else ()
    return sorted({*possible[:1], *possible[-1:], *odd[-1:], *known})


def _scores(shapes: Any, lengths: Lengths | None) -> int:
    """Scores of a head."""
    if lengths is not None:
        return sum(q * k for q, k in zip(*lengths, strict=True))
    (rows, queries), (_, keys) = shapes[:2]
    return int(rows * queries * keys)


def define(q: Tensor, k: Tensor, v: Tensor, lengths: Lengths | None = None) -> Tensor:
    """Attention by its definition, with each result rounded to the dtype of the tensors.

    The arguments are as in ``attention``.
    """
    if lengths is None:
        scores = torch.einsum("rqhd,rkhd->rhqk", q * q.shape[-1] ** -0.5, k)
        return torch.einsum("rhqk,rkhd->rqhd", scores.softmax(dim=-1), v)
    samples = zip(q.split(lengths[0]), k.split(lengths[1]), v.split(lengths[1]), strict=True)
    return torch.cat([define(*(z[None] for z in sample))[0] for sample in samples])

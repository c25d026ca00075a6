"""``opensora-sp doctor --device``: results of this host's GPUs compared with a CPU's.

Kernels and models are compared as in ``models/kernels/verification.py``: the error on the device
may be a few times what rounding does on the CPU. The parallel strategies are compared with one
rank, as ``opensora-sp verify`` does.
"""

from __future__ import annotations

import copy
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import product
from tempfile import TemporaryDirectory
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from opensora_sp.common.error_file import wait_until
from opensora_sp.models import build_model
from opensora_sp.models.attention_table import KERNELS, Backend, Platform
from opensora_sp.models.attention_table import obstacle as attention_obstacle
from opensora_sp.models.kernels.examples import kernel_names
from opensora_sp.models.kernels.verification import (
    CPU,
    Difference,
    cases_of,
    differences,
    first_line,
    obstacle,
    verify_backend,
    verify_kernel,
)
from opensora_sp.models.registry import CLASSES, REFERENCE, VARIANTS, has_one_size, resolve_config
from opensora_sp.parallel import SequenceMesh, parallelize, shutdown_process_group, unwrap
from opensora_sp.parallel.parity import verify_step
from opensora_sp.runtime.host_checks import use_device
from opensora_sp.runtime.rank_info import versions
from opensora_sp.training.sp_verification import fill_zero_parameters, small_batch

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
TIMEOUT = 90.0  # seconds for all checks of the ranks
STRATEGIES: dict[str, dict[str, Any]] = {
    "switch": {},
    "switch, overlapped": dict(overlap_chunks=2, overlap_backward=True),
    "ulysses": dict(strategy="ulysses"),
    "split_gather": dict(strategy="split_gather"),
}


@dataclass(frozen=True)
class Setup:
    """Where the checks run: this device, and as many ranks. They are smaller on a CPU."""

    device: torch.device
    num_ranks: int

    @property
    def name(self) -> str:
        """The devices, for a heading."""
        if self.device.type == "cpu":
            return f"CPU, {self.num_ranks} ranks"
        return f"{self.num_ranks} x {torch.cuda.get_device_name(self.device)}"


def setup_for(device: str) -> Setup:
    """The checks' setup on "cuda" or "cpu".

    Raises:
        ValueError: if there is no such device.
    """
    if device == "cpu":
        return Setup(CPU, num_ranks=2)
    if not torch.cuda.is_available():
        raise ValueError(
            "got --device cuda, and torch sees no GPU; expected at least one; look at the driver "
            "and CUDA_VISIBLE_DEVICES, or pass --device cpu to run the same checks, small, on CPU"
        )
    return Setup(torch.device("cuda", 0), num_ranks=torch.cuda.device_count())


@dataclass(frozen=True)
class Finding:
    """One line of the table.

    Attributes:
        got: the largest error, in multiples of the largest that passes; None after an error or a
            skip.
        note: the worst result, the reason of a skip, or the error.
    """

    name: str
    got: float | None = None
    note: str = ""
    is_skipped: bool = False

    @property
    def verdict(self) -> Literal["ok", "FAIL", "skip"]:
        if self.is_skipped:
            return "skip"
        # NaN is never below.
        return "ok" if self.got is not None and self.got <= 1 else "FAIL"

    def to_dict(self) -> dict[str, Any]:
        """JSON values; numbers that JSON lacks (NaN, infinity) become text."""
        fields = asdict(self) | {"verdict": self.verdict}
        if self.got is not None and not math.isfinite(self.got):
            fields["got"] = str(self.got)
        return fields


Check = Callable[[Setup], Iterator[Finding]]


@dataclass
class Examination:
    """What the checks of a device found, so far.

    Attributes:
        seconds: that all checks took.
        complete: whether all checks have run.
    """

    setup: Setup
    findings: list[Finding] = field(default_factory=list)
    seconds: float = 0.0
    complete: bool = False

    def run(self) -> Iterator[Finding]:
        """Run all checks; an error in one is a finding, and the next one runs."""
        start = time.perf_counter()
        for name, check in CHECKS.items():
            for finding in _findings(name, check, self.setup):
                self.findings.append(finding)
                self.seconds = time.perf_counter() - start
                yield finding
        self.complete = True

    @property
    def ok(self) -> bool:
        return self.complete and all(finding.verdict != "FAIL" for finding in self.findings)

    def to_dict(self) -> dict[str, Any]:
        """JSON values."""
        return {
            "device": self.setup.name,
            "facts": versions(),
            "findings": [finding.to_dict() for finding in self.findings],
            "seconds": round(self.seconds, 2),
            "complete": self.complete,
            "ok": self.ok,
        }


def _findings(name: str, check: Check, setup: Setup) -> Iterator[Finding]:
    try:
        yield from check(setup)
    # Drivers and compilers may raise anything.
    except Exception as error:
        yield Finding(name, note=first_line(error))


def _worst(name: str, compared: Sequence[Difference]) -> Finding:
    worst = max(compared, key=lambda difference: difference.ratio)
    return Finding(name, worst.ratio, note=str(worst))


# Kernels, as a run verifies them, for the widths of XL/2


def check_attention(kernel: str, dtype: str, setup: Setup) -> Iterator[Finding]:
    """A kernel of attention in the calls of a model that it can run here."""
    platform = Platform.of(setup.device, deterministic=False)
    lengths = {"spatial": [100] if setup.device == CPU else [256], "temporal": [16]}
    cases, problem = [], None
    for case in cases_of(resolve_config(REFERENCE), lengths, DTYPES[dtype], trained=True):
        if problem_here := attention_obstacle(kernel, case.sequences, platform):
            problem = problem_here
        else:
            cases.append(case)
    label = f"attention {kernel}, {dtype}"
    if cases:
        yield _worst(label, list(verify_backend(Backend(kernel), cases, setup.device)))
    else:
        yield Finding(label, note=str(problem), is_skipped=True)


def check_kernel(kernel: str, setup: Setup) -> Iterator[Finding]:
    """The worst value or gradient of a Triton kernel, in bfloat16 and in float32."""
    is_gpu = setup.device.type == "cuda"
    reason = obstacle(setup.device) if is_gpu else "Triton compiles for GPUs"
    if reason:
        yield Finding(f"kernel {kernel}", note=reason, is_skipped=True)
        return

    config = resolve_config(REFERENCE)
    yield _worst(f"kernel {kernel}", verify_kernel(kernel, config, torch.bfloat16, setup.device))


# Models: forward and backward against float64 on the CPU


def small_model(name: str, setup: Setup) -> tuple[Any, dict[str, Any]]:
    """A model of two blocks with the head width of XL/2, in float64 on CPU, and inputs for it."""
    # Frames, height, width. The CPU's part of all checks takes a minute on two cores.
    latents = (4, 8, 8) if setup.device == CPU else (8, 32, 32)
    cls, options = VARIANTS[name]
    if has_one_size(CLASSES[cls]):
        options = options | dict(input_size=latents)

    torch.manual_seed(0)
    model = build_model(
        cls,
        hidden_size=144,
        depth=2,
        num_heads=2,
        caption_channels=32,
        model_max_length=20,
        **options,
    ).double()
    fill_zero_parameters(model, std=0.1)
    return model, small_batch(model, (2, *latents))


def check_model(name: str, setup: Setup) -> Iterator[Finding]:
    """In fp32 and bf16: the worst of the output and of all parameters' gradients."""
    # All start from the same weights and inputs, which every dtype holds.
    rounded = copy_to(CPU, torch.bfloat16, *small_model(name, setup))
    exact = step(*copy_to(CPU, torch.float64, *rounded))
    for dtype_name, dtype in DTYPES.items():
        rounding = step(*copy_to(CPU, dtype, *rounded))
        with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
            results = step(*copy_to(setup.device, dtype, *rounded))
        compared = differences(results, rounding, rounding, exact, dtype)
        yield _worst(f"{name}, {dtype_name}", list(compared))


def copy_to(
    device: torch.device, dtype: torch.dtype, model: Any, inputs: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """Copies of a model and its inputs; timesteps and sizes are never rounded to bf16."""
    wide = torch.promote_types(dtype, torch.float32)
    copied = {}
    for name, tensor in inputs.items():
        is_exact = name == "timestep" or name in model.sample_inputs
        # The host reads the lengths of texts from the mask.
        target = CPU if name == "mask" else device
        copied[name] = tensor.to(target)
        if tensor.is_floating_point():
            copied[name] = tensor.to(target, wide if is_exact else dtype)
    return copy.deepcopy(model).to(device, dtype), copied


def step(model: Any, inputs: dict[str, Any]) -> dict[str, Tensor]:
    """The output and all gradients of a weighted sum of it, by name, in float64 on the CPU."""
    output = model(**inputs)
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(output)
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    gradients = torch.autograd.grad((output * weights).mean(), list(named.values()))
    results = {"the output": output.detach()} | dict(zip(named, gradients, strict=True))
    return {name: tensor.to(CPU, torch.float64) for name, tensor in results.items()}


# Ranks: parallel strategies, one process for each GPU


def check_strategies(setup: Setup) -> Iterator[Finding]:
    """Each parallel strategy, in fp32, against one rank; ranks that fail or hang are a finding."""
    if setup.num_ranks == 1:
        yield Finding("parallel strategies", note="one GPU", is_skipped=True)
        return

    results = mp.get_context("spawn").SimpleQueue()
    error: Exception | None = None
    with TemporaryDirectory() as folder:
        arguments = (setup, f"file://{folder}/store", results)
        workers = mp.spawn(verify_strategies, arguments, nprocs=setup.num_ranks, join=False)
        try:
            if not wait_until(lambda: workers.join(timeout=0.2), TIMEOUT):
                error = TimeoutError(f"no answer within {TIMEOUT:.0f} s")
        # An error of mp.spawn, with a rank's traceback as its text.
        except Exception as raised:
            error = RuntimeError(str(raised).strip().splitlines()[-1])
        for process in workers.processes:
            process.kill()

    while not results.empty():
        yield results.get()
    if error is not None:
        raise error


def verify_strategies(rank: int, setup: Setup, store: str, results: Any) -> None:
    """Verify each strategy as one of the ranks, of which rank 0 puts the findings. Collective."""
    device, backend = setup.device, "gloo"
    if device.type == "cuda":
        device, backend = use_device(rank)
    else:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // setup.num_ranks))
    os.environ["LOCAL_RANK"] = str(rank)
    dist.init_process_group(backend, store, rank=rank, world_size=setup.num_ranks)

    mesh = SequenceMesh(setup.num_ranks)
    model, inputs = copy_to(device, torch.float32, *small_model(REFERENCE, setup))
    # With two samples, each of two ranks would take one.
    sample = {name: tensor[:1] for name, tensor in inputs.items()}
    model.set_grad_checkpoint(True)
    for name, options in STRATEGIES.items():
        parallelize(model, mesh, **options)
        verdict = verify_step(model, (), sample)
        unwrap(model)
        if rank == 0:
            label = f"strategy {name}, {setup.num_ranks} ranks"
            parameter, difference = verdict.worst
            results.put(Finding(label, difference / verdict.tolerance, note=f"worst: {parameter}"))
    shutdown_process_group()


# In the order in which they run, quick ones first.
CHECKS: dict[str, Check] = {
    **{
        f"attention {kernel}, {dtype}": partial(check_attention, kernel, dtype)
        for kernel, dtype in product(KERNELS, DTYPES)
    },
    **{name: partial(check_model, name) for name in VARIANTS},
    **{f"kernel {name}": partial(check_kernel, name) for name in kernel_names()},
    "parallel strategies": check_strategies,
}

"""Checks of several ranks: ZeRO, the parallel strategies and the links, one process per GPU."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from opensora_sp.common.error_file import wait_until
from opensora_sp.common.importing import PackageError, check_colossalai
from opensora_sp.models.registry import REFERENCE
from opensora_sp.parallel import SequenceMesh, parallelize, shutdown_process_group, unwrap
from opensora_sp.parallel.debug.parity import verify_step
from opensora_sp.runtime.doctor.probe import measure
from opensora_sp.runtime.host_checks import use_device

from .findings import Finding, Setup, findings_of, largest_of, relative_errors
from .one_device import copy_to, small_model

# Seconds for all checks of the ranks.
TIMEOUT = 90.0
STRATEGIES: dict[str, dict[str, Any]] = {
    "switch": {},
    "switch, overlapped": dict(overlap_chunks=2, overlap_backward=True),
    "ulysses": dict(strategy="ulysses"),
    "split_gather": dict(strategy="split_gather"),
}
# Relative error of an update in fp32.
ZERO_BOUND = 1e-3
# GB/s from each rank: PCIe 3 reaches 6 to 12, NVLink hundreds.
MIN_BANDWIDTH = 1.0


def check_strategies(setup: Setup) -> Iterator[Finding]:
    """Each parallel strategy, in fp32, against one rank. Collective."""
    ranks = dist.get_world_size()
    if ranks == 1:
        yield Finding.skip("parallel strategies", "one GPU")
        return

    mesh = SequenceMesh(ranks)
    model, inputs = copy_to(setup.device, torch.float32, *small_model(REFERENCE, setup))
    inputs = _sample(inputs, 0)
    model.set_grad_checkpoint(True)
    for name, options in STRATEGIES.items():
        parallelize(model, mesh, **options)
        verdict = verify_step(model, (), inputs)
        unwrap(model)

        worst, difference = verdict.worst
        label = f"strategy {name}, {ranks} ranks"
        yield Finding(label, difference, verdict.tolerance, note=f"worst: {worst}")


def check_zero(setup: Setup) -> Iterator[Finding]:
    """One SGD step with ZeRO, one sample per rank, against one process with all. Collective."""
    try:
        check_colossalai()
    except PackageError as error:
        yield Finding.skip("ZeRO", str(error))
        return

    for stage in (1, 2):
        model, inputs = copy_to(setup.device, torch.float32, *small_model(REFERENCE, setup))
        before = copy.deepcopy(model)
        expected = _updates(before, _plain_step(copy.deepcopy(model), inputs))
        updates = _updates(before, _zero_step(model, inputs, stage))
        worst, name = largest_of(relative_errors(updates, expected))
        label = f"ZeRO {stage}, {dist.get_world_size()} ranks"
        yield Finding(label, worst, ZERO_BOUND, note=f"worst: {name}")


def _updates(before: Any, model: Any) -> dict[str, Tensor]:
    after = dict(model.named_parameters())
    trained = {name: p for name, p in before.named_parameters() if p.requires_grad}
    return {name: (after[name] - p).detach().cpu() for name, p in trained.items()}


def _sample(inputs: dict[str, Any], rank: int) -> dict[str, Any]:
    """A rank's sample: one of the two in the batch, with latents that differ between ranks."""
    sample = {n: v[rank % 2][None] if isinstance(v, Tensor) else v for n, v in inputs.items()}
    return sample | {"x": sample["x"] * (1.0 + 0.1 * rank)}


def _loss(model: Any, inputs: dict[str, Any]) -> Tensor:
    loss: Tensor = model(**inputs).square().mean()
    return loss


def _sgd(model: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)


def _plain_step(model: Any, inputs: dict[str, Any]) -> Any:
    ranks = dist.get_world_size()
    optimizer = _sgd(model)
    for rank in range(ranks):
        (_loss(model, _sample(inputs, rank)) / ranks).backward()
    optimizer.step()
    return model


def _zero_step(model: Any, inputs: dict[str, Any], stage: int) -> Any:
    from opensora_sp.plugin import SequenceParallelPlugin
    from opensora_sp.plugin._colossalai import Booster

    plugin = SequenceParallelPlugin(stage=stage, precision="fp32")
    boosted, wrapped, *_ = Booster(plugin=plugin).boost(model, _sgd(model))
    wrapped.backward(_loss(boosted, _sample(inputs, dist.get_rank())))
    wrapped.step()
    return boosted.unwrap()


def check_links(setup: Setup) -> Iterator[Finding]:
    """Bandwidth of an all-to-all from each rank. Collective."""
    if dist.get_world_size() == 1:
        yield Finding.skip("all-to-all between GPUs", "one GPU")
        return

    measured = measure(setup.device)
    backend = measured["backend"]
    note = f"round trip {measured['round_trip'] * 1e3:.2f} ms"
    bound = MIN_BANDWIDTH if setup.device.type == "cuda" else 0.0
    yield Finding(f"all-to-all, {backend}", measured["rate"] / 1e9, bound, "GB/s", True, note)


RANK_CHECKS: dict[str, Callable[[Setup], Iterator[Finding]]] = {
    "ZeRO": check_zero,
    "strategies": check_strategies,
    "links": check_links,
}


def check_ranks(setup: Setup) -> Iterator[Finding]:
    """Run ``RANK_CHECKS`` on processes of their own; a rank that fails or hangs is a finding."""
    results = mp.get_context("spawn").SimpleQueue()
    with TemporaryDirectory() as folder:
        arguments = (setup, f"file://{folder}/store", results)
        workers = mp.spawn(_run_checks, arguments, nprocs=setup.num_ranks, join=False)
        error = _wait_for(workers)

    count = 0
    while not results.empty():
        count += 1
        yield results.get()
    if error is not None:
        yield Finding.of_error(f"ranks, after {count} findings", error)


def _wait_for(workers: Any) -> Exception | None:
    """Wait until all ranks have exited; returns the first error of a rank."""
    error: Exception | None = None
    try:
        if not wait_until(lambda: workers.join(timeout=0.2), TIMEOUT):
            error = TimeoutError(f"no answer within {TIMEOUT:.0f} s")
    # An error of mp.spawn, with a rank's traceback as its text.
    except Exception as raised:
        error = RuntimeError(str(raised).strip().splitlines()[-1])

    for process in workers.processes:
        if process.is_alive():
            process.kill()
    return error


def _run_checks(rank: int, setup: Setup, store: str, results: Any) -> None:
    device, backend = setup.device, "gloo"
    if device.type == "cuda":
        device, backend = use_device(rank)
    else:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // setup.num_ranks))

    os.environ["LOCAL_RANK"] = str(rank)
    dist.init_process_group(backend, store, rank=rank, world_size=setup.num_ranks)

    rank_setup = Setup(device, setup.num_ranks, setup.small)
    for name, check in RANK_CHECKS.items():
        # After an error the next check still runs; if other ranks hang, TIMEOUT ends them.
        for finding in findings_of(name, check, rank_setup):
            if rank == 0:
                results.put(finding)
    shutdown_process_group()

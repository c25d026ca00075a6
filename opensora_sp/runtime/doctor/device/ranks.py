"""What takes process groups: ZeRO, the parallel strategies and the links, on one process per local GPU."""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Callable, Iterator
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from opensora_sp.parallel import (
    SequenceMesh,
    parallelize,
    shutdown_process_group,
    unwrap,
    verify_step,
)
from opensora_sp.runtime.doctor.probe import measure

from .findings import Finding, Setup, worst_error
from .models import on, small

LIMIT = 90.0  # seconds after which ranks are given up
STRATEGIES: dict[str, dict[str, Any]] = {
    "switch": {},
    "switch, overlapped": dict(overlap_chunks=2, overlap_backward=True),
    "branch": dict(placement="branch"),
    "ulysses": dict(strategy="ulysses"),
    "split_gather": dict(strategy="split_gather"),
}
ZERO_BOUND = 1e-3  # of an update in fp32, against the same in one process
LEAST_LINK = 1.0  # GB/s from each rank: PCIe 3 gives 6 to 12, NVLink hundreds

RankCheck = Callable[[Setup], Iterator[Finding]]


def check_strategies(setup: Setup) -> Iterator[Finding]:
    """Each way to share a batch, in fp32, against one rank. Collective."""
    ranks = dist.get_world_size()
    if ranks == 1:
        yield Finding.skip("parallel strategies", "one GPU: no batch is shared")
        return

    mesh = SequenceMesh(ranks)
    model, inputs = on(setup.device, torch.float32, *small("STDiT3", setup))
    inputs = {
        name: value[:1] if isinstance(value, Tensor) else value for name, value in inputs.items()
    }
    model.set_grad_checkpoint(True)
    for name, options in STRATEGIES.items():
        parallelize(model, mesh, **options)
        verdict = verify_step(model, (), inputs)
        unwrap(model)
        worst, difference = verdict.worst
        yield Finding(
            f"strategy {name}, {ranks} ranks",
            difference,
            verdict.tolerance,
            note=f"the worst: {worst}",
        )


def check_zero(setup: Setup) -> Iterator[Finding]:
    """One step of SGD with ZeRO, each rank with a sample of its own, against one process with all. Collective."""
    for stage in (1, 2):
        model, inputs = on(setup.device, torch.float32, *small("STDiT3", setup))
        before = {
            name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad
        }
        expected = _updates(before, _plain_step(copy.deepcopy(model), inputs))
        found = _updates(before, _zero_step(model, inputs, stage))
        worst, name = worst_error(found, expected)
        yield Finding(
            f"ZeRO {stage}, {dist.get_world_size()} ranks",
            worst,
            ZERO_BOUND,
            note=f"the worst: {name}",
        )


def _updates(before: dict[str, Tensor], model: Any) -> dict[str, Tensor]:
    after = dict(model.named_parameters())
    return {name: (after[name].detach() - one).cpu() for name, one in before.items()}


def _sample(inputs: dict[str, Any], rank: int) -> dict[str, Any]:
    """A sample for a rank: one of the two in the batch, of which each rank's latents are its own."""
    one = {n: v[rank % 2][None] if isinstance(v, Tensor) else v for n, v in inputs.items()}
    return one | {"x": one["x"] * (1.0 + 0.1 * rank)}


def _loss(model: Any, inputs: dict[str, Any]) -> Tensor:
    loss: Tensor = model(**inputs).square().mean()
    return loss


def _plain_step(model: Any, inputs: dict[str, Any]) -> Any:
    ranks = dist.get_world_size()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
    for rank in range(ranks):
        (_loss(model, _sample(inputs, rank)) / ranks).backward()
    optimizer.step()
    return model


def _zero_step(model: Any, inputs: dict[str, Any], stage: int) -> Any:
    from opensora_sp.plugin import SequenceParallelPlugin
    from opensora_sp.plugin._colossalai import Booster

    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
    plugin = SequenceParallelPlugin(stage=stage, precision="fp32")
    boosted, wrapped, *_ = Booster(plugin=plugin).boost(model, optimizer)
    wrapped.backward(_loss(boosted, _sample(inputs, dist.get_rank())))
    wrapped.step()
    return boosted.unwrap()


def check_links(setup: Setup) -> Iterator[Finding]:
    """What an all-to-all carries from each rank. Collective."""
    if dist.get_world_size() == 1:
        yield Finding.skip("all-to-all between GPUs", "one GPU")
        return
    measured = measure(setup.device)
    least = LEAST_LINK if setup.device.type == "cuda" else 0.0
    note = f"{measured['ranks']} ranks, {measured['backend']}, round trip {measured['round_trip'] * 1e3:.2f} ms"
    yield Finding(
        f"all-to-all, {measured['backend']}", measured["rate"] / 1e9, least, "GB/s", True, note
    )


RANK_CHECKS: dict[str, RankCheck] = {
    "ZeRO": check_zero,
    "strategies": check_strategies,
    "links": check_links,
}


def check_ranks(setup: Setup) -> Iterator[Finding]:
    """All of ``RANK_CHECKS``, on processes of their own; what ranks leave unanswered is a finding, too."""
    results = mp.get_context("spawn").SimpleQueue()
    found: list[Finding] = []
    with TemporaryDirectory() as folder:
        arguments = (setup, f"file://{folder}/store", results)
        workers = mp.spawn(_on_rank, arguments, nprocs=setup.num_ranks, join=False)
        error = _ended(workers, results, found)
    yield from found
    if error is not None:
        done = {finding.name for finding in found}
        yield Finding.of_error(f"ranks, after {len(done)} findings", error)


def _ended(workers: Any, results: Any, found: list[Finding]) -> Exception | None:
    """Collect what rank 0 finds until all ranks have ended; the error of the first that did not end well."""
    deadline = time.monotonic() + LIMIT
    error: Exception | None = None
    ended = False
    try:
        while not ended and time.monotonic() < deadline:
            ended = workers.join(timeout=0.2)
            while not results.empty():
                found.append(results.get())
    except Exception as raised:  # mp.spawn's, with a rank's traceback as its text
        last = [line for line in str(raised).splitlines() if line.strip()][-1]
        error = RuntimeError(last)
    else:
        if not ended:
            error = TimeoutError(f"no answer within {LIMIT:.0f} s")

    for process in workers.processes:
        if process.is_alive():
            process.kill()
    while not results.empty():
        found.append(results.get())
    return error


def _on_rank(rank: int, setup: Setup, store: str, results: Any) -> None:
    cuda = setup.device.type == "cuda"
    device = torch.device("cuda", rank) if cuda else setup.device
    if cuda:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // setup.num_ranks))

    os.environ["LOCAL_RANK"] = str(rank)
    dist.init_process_group(
        "nccl" if cuda else "gloo", store, rank=rank, world_size=setup.num_ranks
    )
    own = Setup(device, setup.num_ranks, setup.small)
    for name, check in RANK_CHECKS.items():
        try:
            for finding in check(own):
                if rank == 0:
                    results.put(finding)
        except (
            Exception
        ) as error:  # one check must not end the others; a rank that hangs for it, LIMIT does
            if rank == 0:
                results.put(Finding.of_error(name, error))
    shutdown_process_group()

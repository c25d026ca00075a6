"""Training across two hosts, as users start it: one-host results, a rank that dies, resume."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import hosts
import pytest
from hosts import Host
from polling import wait_until
from ranks import run_ranks
from runs import losses, write_training

from opensora_sp.checkpoint.paths import newest_checkpoint
from opensora_sp.config import load_train_config
from opensora_sp.training.run import train

pytestmark = [pytest.mark.slow, pytest.mark.serial]

NOTICED = 60.0  # seconds after which a rank must have ended when the rank of another host is dead


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Host]]:
    reason = hosts.lacking()
    if reason:
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("pair")
    (folder / "hostfile").write_text("alpha\nbeta\n")
    with hosts.hosts(folder, "alpha", "beta") as made:
        yield made


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_training(tmp_path_factory.mktemp("set"), 14)


def colossalai_run(
    pair: list[Host], config: Path, outputs: Path, *options: str
) -> list[str | Path]:
    hostfile = pair[0].folder.parent / "hostfile"
    launcher = ["colossalai", "run", "--nproc_per_node", "1", "--hostfile", hostfile]
    return [*launcher, "scripts/train.py", config, "--cfg-options", f"outputs={outputs}", *options]


def train_here(config: Path, outputs: Path, steps: int) -> None:
    train(load_train_config(config, [f"outputs={outputs}", f"max_steps={steps}"]))


def test_two_hosts_train_as_one_and_resume_after_one_lost_its_rank(
    pair: list[Host], config: Path, tmp_path: Path
) -> None:
    alpha, beta = pair
    outputs = tmp_path / "run"
    running = alpha.start(*colossalai_run(pair, config, outputs, "max_steps=100000"))
    wait_until(lambda: running.poll() is not None or newest_checkpoint(outputs), 200)
    (victim,) = beta.ranks() or [0]
    assert victim and running.poll() is None, running.communicate()[0]
    os.kill(victim, signal.SIGKILL)
    killed = time.monotonic()
    wait_until(lambda: not alpha.ranks(), NOTICED)  # by itself
    reported, _ = running.communicate(timeout=NOTICED)
    assert time.monotonic() - killed < NOTICED and running.returncode == 1, reported
    assert "alpha: failure" in reported and "beta: failure" in reported and not beta.ranks()

    last = int(newest_checkpoint(outputs).name.removeprefix("step_")) + 3
    resumed = alpha.run(
        *colossalai_run(pair, config, outputs, f"max_steps={last}", "--resume", "auto"), timeout=300
    )
    assert resumed.returncode == 0 and "resumed from" in resumed.stderr, (
        resumed.stdout + resumed.stderr
    )
    run_ranks(2, train_here, config, tmp_path / "one_host", last)
    assert len(losses(outputs)) == last and losses(outputs) == losses(tmp_path / "one_host")


BLAMED = (
    "rank 0 stops: rank 1 has sent no heartbeat for 6 s (peer_timeout)",
    "rank 1 stops: rank 0, which hosts the store of the heartbeats",
)


def test_ranks_that_the_network_separates_end(
    pair: list[Host], config: Path, tmp_path: Path
) -> None:
    """Packets vanish: each names the other within ``peer_timeout`` + 5 s.

    The campaign of hangs has this, and frozen hosts, for each rank of three.
    """
    runs = [
        host.start(*torchrun(config, tmp_path / "run", node, "peer_timeout=6"))
        for node, host in enumerate(pair)
    ]
    try:
        wait_until(lambda: newest_checkpoint(tmp_path / "run"), 200)
        pair[1].cut_off()
        wait_until(lambda: not any(host.ranks() for host in pair), 6 + 5)
    finally:
        pair[1].connect()

    for rank, run in enumerate(runs):
        reported, _ = run.communicate(timeout=NOTICED)
        assert BLAMED[rank] in reported and f"rank {rank} was at:" in reported, reported


def torchrun(config: Path, outputs: Path, node: int, *options: str) -> list[str | Path]:
    launcher = ["torchrun", "--nnodes", "2", "--nproc_per_node", "1", "--node_rank", str(node)]
    master = ["--master_addr", "alpha", "--master_port", "29601"]
    options = (f"outputs={outputs}", "max_steps=100000", *options)
    return [*launcher, *master, "scripts/train.py", config, "--cfg-options", *options]


def test_torchrun_joins_at_a_rendezvous(pair: list[Host], config: Path, tmp_path: Path) -> None:
    rendezvous = ["--rdzv_backend", "c10d", "--rdzv_endpoint", "alpha:29600", "--rdzv_id", "run-1"]
    two_nodes = ["--nnodes", "2", "--nproc_per_node", "1"]
    command = ["torchrun", *two_nodes, *rendezvous, "scripts/train.py", config]
    runs = [
        host.start(*command, "--cfg-options", f"outputs={tmp_path}/run", "max_steps=3")
        for host in pair
    ]
    reported = [run.communicate(timeout=300)[0] for run in runs]

    assert [run.returncode for run in runs] == [0, 0], "\n\n".join(reported)
    run_ranks(2, train_here, config, tmp_path / "one_host", 3)
    assert losses(tmp_path / "run") == losses(tmp_path / "one_host")

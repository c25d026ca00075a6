"""What keeps ranks from starting is one sentence on every rank, before any long work."""

from __future__ import annotations

import os
import socket
import subprocess
from collections import namedtuple
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import free_port, run_ranks
from runs import BIN, ROOT, TRAIN, write_toy_set

from opensora_sp.config import load_train_config
from opensora_sp.parallel import shutdown_process_group
from opensora_sp.runtime import host_checks, rendezvous
from opensora_sp.runtime.environment import Launch
from opensora_sp.runtime.host_checks import check_machine, check_shared_memory
from opensora_sp.runtime.rendezvous import join_rendezvous, raise_on_all_ranks
from opensora_sp.training.preflight import preflight

PLACE = {
    "RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}


def launch(**other: object) -> Launch:
    given = dict(rank=1, world_size=2, local_rank=0, local_world_size=2, agent_store=False)
    return Launch(**{"master": ("127.0.0.1", 29500), **given, **other})


def test_without_a_launcher_a_process_is_alone() -> None:
    assert Launch.read({"PATH": "/bin"}) is None
    assert Launch.read({**PLACE, "LOCAL_WORLD_SIZE": "2"}).spans_hosts
    assert not Launch.read(PLACE).spans_hosts


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"WORLD_SIZE": None}, "got RANK=1, LOCAL_RANK=1, .* but no WORLD_SIZE; expected all"),
        ({"MASTER_ADDR": None, "RANK": None}, "but no RANK, MASTER_ADDR"),
        ({"RANK": "4"}, "got RANK 4, WORLD_SIZE 4, .* expected ranks from 0 to the number of"),
        ({"LOCAL_WORLD_SIZE": "1"}, "LOCAL_RANK 1, LOCAL_WORLD_SIZE 1 "),
        ({"LOCAL_WORLD_SIZE": "8"}, "LOCAL_WORLD_SIZE 8 "),
        ({"WORLD_SIZE": "two"}, "got WORLD_SIZE='two' in the environment; expected an integer"),
    ],
)
def test_an_environment_that_cannot_be_true_is_refused(
    change: dict[str, str | None], message: str
) -> None:
    given = {name: value for name, value in {**PLACE, **change}.items() if value is not None}
    with pytest.raises(ValueError, match=message):
        Launch.read(given)


def test_the_interfaces_are_those_of_this_machine() -> None:
    assert set(host_checks.interfaces()) == {name for _, name in socket.if_nameindex()}


def test_a_gpu_that_was_asked_for_must_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    with pytest.raises(ValueError, match=r"got CUDA_VISIBLE_DEVICES=0,1 on .*, but no GPU that"):
        check_machine(launch())

    # This rank runs alone.
    with (
        pytest.raises(ValueError, match="got CUDA_VISIBLE_DEVICES=0,1"),
        raise_on_all_ranks(),
    ):
        raise AssertionError("not before the check")

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    check_machine(launch())
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(host_checks, "glob", lambda pattern: ["/dev/nvidia0"])

    with pytest.raises(ValueError, match="got the device /dev/nvidia0 on .* CUDA_VISIBLE_DEVICES="):
        check_machine(launch())


def test_more_ranks_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    host_checks.check_devices(launch(local_rank=1))
    with pytest.raises(ValueError, match="got 3 or more ranks on .*, where torch sees 2 GPUs"):
        host_checks.check_devices(launch(local_rank=2))


def test_gloo_listens_where_other_hosts_reach_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host's own name may resolve to 127.0.1.1, which gloo would advertise."""
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(host_checks, "_route_to", lambda master: ("10.0.0.5", "eth0"))
    check_machine(launch())
    assert "GLOO_SOCKET_IFNAME" not in os.environ
    check_machine(launch(local_world_size=1))
    assert os.environ.pop("GLOO_SOCKET_IFNAME") == "eth0"


def test_workers_need_shared_memory_for_their_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("Usage", "total used free")
    monkeypatch.setattr(
        host_checks.shutil, "disk_usage", lambda path: usage(64_000_000, 0, 60_000_000)
    )
    check_shared_memory(2_000_000, num_workers=4, local_ranks=3)
    check_shared_memory(2_000_000_000, num_workers=0, local_ranks=3)

    with pytest.raises(ValueError, match=r"got 60.0 MB free of 64.0 MB .* at least 64.0 MB for 4"):
        check_shared_memory(2_000_000, num_workers=4, local_ranks=4)

    (tmp_path / "config.py").write_text(TRAIN.format(manifest=str(write_toy_set(tmp_path, 3))))
    monkeypatch.setattr(host_checks.shutil, "disk_usage", lambda path: usage(10_000, 0, 10_000))
    with pytest.raises(ValueError, match="got 0.0 MB free of 0.0 MB in /dev/shm"):
        preflight(load_train_config(tmp_path / "config.py", ["sp_size=1", "num_workers=1"]), None)


def start(port: int, case: str) -> tuple[str | None, str | None]:
    """What a rank of three is reported in a case, as a run or a loop of the user's would be."""
    rank = int(os.environ["RANK"])
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), OPENSORA_SP_JOIN_TIMEOUT="60")
    place, versions = dict(os.environ), rendezvous.versions
    settings = {"seed": 42, "model": {"depth": 28}}

    if rank == 2:
        if case == "versions":
            rendezvous.versions = lambda: {**versions(), "torch": "1.13.1"}
        elif case == "settings":
            settings = {"seed": 42, "model": {"depth": 4}}
        elif case == "world size":
            os.environ.update(WORLD_SIZE="4", RANK="3")
        elif case == "rank twice":
            os.environ["RANK"] = "1"

    if case == "missing":
        os.environ["OPENSORA_SP_JOIN_TIMEOUT"] = "4"
    try:
        with raise_on_all_ranks():
            if case == "cannot start" and rank == 1:
                raise ValueError("got no manifest; expected one; write it")
            if case == "breaks" and rank == 0:
                raise KeyError("depth")
        if case == "missing" and rank == 2:
            return None, None
        store = join_rendezvous(settings)
        if case == "fine":
            dist.init_process_group("gloo")
            shutdown_process_group()
        assert store is not None
        return None, None
    except Exception as error:
        return type(error).__name__, str(error)
    finally:
        os.environ.update({name: place[name] for name in ("RANK", "WORLD_SIZE")})
        rendezvous.versions = versions


def start_in_all_cases(ports: dict[str, int]) -> dict[str, tuple[str | None, str | None]]:
    shutdown_process_group()  # what follows is as if nobody had met
    return {case: start(port, case) for case, port in ports.items()}


CASES = ("fine", "versions", "settings", "world size", "rank twice")
CASES += ("cannot start", "breaks", "missing")


@pytest.mark.slow
@pytest.mark.core
def test_all_ranks_start_or_all_raise_the_same_error() -> None:
    ports = {case: free_port() for case in CASES}
    reported = run_ranks(3, start_in_all_cases, ports)
    host = socket.gethostname()
    said = {case: [rank[case] for rank in reported] for case in CASES}

    assert said["fine"] == [(None, None)] * 3
    both, third = f"on ranks 0, 1 ({host})", f"on rank 2 ({host})"
    for case, begin in {
        "versions": f"got different versions: torch {torch.__version__} {both}, 1.13.1 {third}; ",
        "settings": f'got different settings: model {{"depth": 28}} {both}, {{"depth": 4}} {third}',
        "world size": "got WORLD_SIZE ",
        "rank twice": f"got rank 1 twice, on {host} and on {host}; expected every rank once",
    }.items():
        assert len(set(said[case])) == 1 and said[case][0][0] == "ValueError", (case, said[case])
        assert said[case][0][1].startswith(begin), said[case]

    why = "got no manifest; expected one; write it"
    other = ("ValueError", f"rank 1 ({host}) cannot start: {why}")
    assert said["cannot start"] == [other, ("ValueError", why), other]

    broken = ("ValueError", f"rank 0 ({host}) cannot start: KeyError: 'depth'")
    assert said["breaks"] == [("KeyError", "'depth'"), broken, broken]
    assert said["missing"][0] == said["missing"][1] and said["missing"][2] == (None, None)
    assert said["missing"][0][1].startswith(
        f"got 2 of 3 ranks within 4 s, from {host}; expected all, but rank 2 did not"
    )


def test_a_port_in_use_and_a_first_host_that_does_not_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in PLACE.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("OPENSORA_SP_JOIN_TIMEOUT", "1")
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        monkeypatch.setenv("MASTER_PORT", str(taken.getsockname()[1]))
        monkeypatch.setenv("RANK", "0")
        with pytest.raises(ValueError, match=r"to rank 0 at 127.0.0.1:\d+ .*address already in"):
            join_rendezvous()

    monkeypatch.setenv("RANK", "1")
    with socket.socket() as reserved:
        # Nobody listens there, and nobody else can.
        reserved.bind(("127.0.0.1", 0))
        monkeypatch.setenv("MASTER_PORT", str(reserved.getsockname()[1]))
        with pytest.raises(
            ValueError,
            # The second, if a busy machine takes 2 s more to notice.
            match=r"got no connection from .* to rank 0 at 127.0.0.1:\d+ within 1 s "
            r"\(.*(timed out|no answer)",
        ):
            join_rendezvous()

    monkeypatch.setenv("OPENSORA_SP_JOIN_TIMEOUT", "soon")
    with pytest.raises(ValueError, match="got OPENSORA_SP_JOIN_TIMEOUT='soon'"):
        join_rendezvous()


def test_the_slurm_script(tmp_path: Path) -> None:
    """It passes both checkers and starts what torchrun expects, arguments with blanks included."""
    script = ROOT / "scripts/train.slurm"
    subprocess.run(["bash", "-n", script], check=True)
    checked = subprocess.run([BIN / "shellcheck", script], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout
    (tmp_path / "scontrol").write_text("#!/bin/sh\nprintf 'node7\\nnode8\\n'\n")
    (tmp_path / "srun").write_text("#!/bin/sh\nprintf '%s\\n' \"$@\"\n")
    for tool in ("scontrol", "srun"):
        (tmp_path / tool).chmod(0o755)
    job = {"SLURM_JOB_NODELIST": "node[7-8]", "SLURM_JOB_ID": "123456", "SLURM_NNODES": "2"}
    done = subprocess.run(
        ["bash", script, "a.py", "--cfg-options", "prompt=a red fox"],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin", **job},
        capture_output=True,
        text=True,
        check=True,
    )
    words = done.stdout.splitlines()
    assert words[:2] == ["--kill-on-bad-exit=1", "torchrun"] and "node7:23456" in words
    given = ["a.py", "--cfg-options", "prompt=a red fox"]
    assert words[-6:] == ["scripts/train.py", *given, "--resume", "auto"]
    from torch.distributed.run import parse_args

    parsed = parse_args(words[2:])
    assert (parsed.nnodes, parsed.nproc_per_node) == ("2", "gpu")
    assert (parsed.rdzv_backend, parsed.rdzv_id) == ("c10d", "123456")

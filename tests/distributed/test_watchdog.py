"""The watchdog by itself; the campaign of hangs has it in trainings."""

from __future__ import annotations

import os
import re
import signal
import socket
import struct
import threading
import time
from contextlib import ExitStack

import psutil
import pytest
import torch
import torch.distributed as dist
from exits import recorded_exits
from logs import captured_lines
from polling import wait_until
from ranks import run_ranks, run_together

from opensora_sp.parallel import shutdown_process_group
from opensora_sp.runtime import rendezvous, run_store
from opensora_sp.runtime.rendezvous import join_rendezvous
from opensora_sp.runtime.watchdog import Watchdog

pytestmark = pytest.mark.core  # the watchdog reads what torch does not guarantee


def no_step_in_time() -> tuple[list[int], list[str]]:
    """Rank 1 is asked to stop, and no rank does."""
    lines = captured_lines()
    with recorded_exits() as codes, Watchdog(join_rendezvous(), grace_time=2.0):
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        wait_until(lambda: codes)
    return codes, lines


def stuck() -> tuple[list[int], list[str]]:
    """Rank 1 does not join a collective."""
    lines = captured_lines()
    with recorded_exits() as codes, Watchdog(join_rendezvous(), collective_timeout=2.0):
        if dist.get_rank() == 1:
            wait_until(lambda: codes)
            time.sleep(2)  # until rank 0 would have ended, too
        dist.all_reduce(torch.ones(2, 3))
    return codes, lines


def far_away() -> tuple[str, list[str]]:
    """Rank 1 is on another machine, where its number is nobody's, and is cut off."""
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    lines = captured_lines()
    rendezvous.machine_id = run_store.machine_id = lambda: f"machine {dist.get_rank()}"
    error = ""

    if dist.get_rank() == 1:
        one = Watchdog(join_rendezvous())
        one.__enter__()
        one._ended.set()  # so that it writes no heartbeat any more
        one._thread.join()
        shutdown_process_group(drain=False)
        time.sleep(9)
        return error, lines

    try:
        with Watchdog(join_rendezvous()):
            dist.all_reduce(torch.ones(2))
    except SystemExit as end:
        error = str(end)

    shutdown_process_group(drain=False)
    return error, lines


def busy_and_late() -> list[str]:
    """Python that computes for longer than ``peer_timeout``, and ranks that leave one by one."""
    lines = captured_lines()
    with Watchdog(join_rendezvous(), peer_timeout=5.0) as one:
        deadline = time.monotonic() + 7
        while dist.get_rank() == 1 and time.monotonic() < deadline:
            sum(range(100_000))
        dist.barrier()
        time.sleep(3 * dist.get_rank())
    assert one.stop_reason is None and threading.active_count() < 20
    return lines


def interrupted() -> tuple[list[int], list[str], str]:
    """Rank 1 gets SIGINT twice at once, as from terminal and launcher; and later a second one."""
    lines = captured_lines()
    with recorded_exits() as codes, Watchdog(join_rendezvous()) as one:
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
        wait_until(lambda: one.stop_reason)
        assert not codes and one.is_interrupted
        reason = one.why_to_stop()
        dist.barrier()

        if dist.get_rank() == 1:
            time.sleep(1.5)
            os.kill(os.getpid(), signal.SIGTERM)  # as torchrun passes a second Ctrl-C on
            wait_until(lambda: codes)
    return codes, lines, reason


def joined_late() -> tuple[list[int], list[str]]:
    """Rank 1 joins after ``collective_timeout``, just before rank 0 would report that."""
    lines = captured_lines()
    with recorded_exits() as codes, Watchdog(join_rendezvous(), collective_timeout=2.0):
        dist.all_reduce(torch.ones(2))
        time.sleep(3.7 * dist.get_rank())
        dist.all_reduce(torch.ones(2))
        time.sleep(6)  # until the second all_reduce, the newest of its group, is overdue as well
    return codes, lines


def interrupted_at_once() -> tuple[list[int], list[str]]:
    """Rank 1 alone gets SIGINT, in a run that has no step to finish."""
    lines = captured_lines()
    with recorded_exits() as codes, Watchdog(join_rendezvous(), grace_time=0):
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGINT)
        wait_until(lambda: codes)
    return codes, lines


def interrupted_then_failed() -> tuple[list[int], list[str]]:
    """After SIGINT, and before the run has stopped, rank 1 does not join a collective."""
    lines = captured_lines()
    with recorded_exits() as codes, Watchdog(join_rendezvous(), collective_timeout=2.0) as one:
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGINT)
        wait_until(lambda: one.stop_reason)

        if dist.get_rank() == 1:
            wait_until(lambda: codes)
            time.sleep(2)  # until rank 0 would have ended, too
        dist.all_reduce(torch.ones(2))
    return codes, lines


def listening() -> set[int]:
    """The ports at which this process listens."""
    connections = psutil.Process().net_connections("tcp")
    return {one.laddr.port for one in connections if one.status == "LISTEN"}


def visited_by_other_programs() -> tuple[list[int], list[str], int, str]:
    """Programs that reach the watchdog's port, where rank 0 listens, and speak no TCPStore."""
    lines, before = captured_lines(), listening()
    with recorded_exits() as codes, Watchdog(join_rendezvous(), peer_timeout=4.0) as watchdog:
        ports = [listening() - before]
        num_ports = len(ports[0])
        dist.broadcast_object_list(ports, src=0)
        if dist.get_rank() == 1:
            for port in ports[0]:
                send_garbage(port)
        dist.barrier()
        reason = watchdog.why_to_stop()
    return codes, lines, num_ports, reason


def send_garbage(port: int) -> None:
    half_a_request = struct.pack("=BIB", 0, 0x3C85F7CE, 1)
    with ExitStack() as connections:
        for sent in (b"GET / HTTP/1.1\r\nHost: a\r\n\r\n", bytes(range(256)) * 64, half_a_request):
            connection = socket.create_connection(("127.0.0.1", port), 1)
            connections.enter_context(connection)
            connection.sendall(sent)
        # Until all ranks have read heartbeats meanwhile.
        time.sleep(6)


# Those that wait longest come first.
CASES = (
    joined_late,
    visited_by_other_programs,
    far_away,
    stuck,
    interrupted_then_failed,
    no_step_in_time,
    interrupted,
    interrupted_at_once,
)


@pytest.fixture(scope="module")
def found() -> dict[str, list]:
    """By the name of the case what each rank returns."""
    return run_together(2, CASES, at_once=len(CASES))


@pytest.mark.slow
def test_slow_and_late_ranks_alarm_nobody() -> None:
    assert run_ranks(2, busy_and_late) == [[], []]


def test_a_run_that_does_not_stop_is_ended(found: dict[str, list]) -> None:
    for rank, (codes, lines) in enumerate(found["no_step_in_time"]):
        assert codes == [1]
        assert lines[0] == "rank 1: SIGTERM; stopping within two steps, with a checkpoint"
        assert lines[1].startswith(
            f"rank {rank} stops: rank 1: SIGTERM, but the run did not stop within 2 s (grace_time)"
        )


def test_a_stuck_collective_is_named_and_those_that_did_not_come(found: dict[str, list]) -> None:
    for rank, (codes, lines) in enumerate(found["stuck"]):
        assert codes == [1] and lines[0].startswith(
            f"rank {rank} stops: rank 0 has waited 2 s (collective_timeout) for "
        )
        called = r"all_reduce\(tensor \[2, 3\] float32\), number \d+ of .*"
        assert re.search(called + r"test_watchdog.py:\d+ \(stuck\)", lines[0])
        absent = (
            r"ranks \[0\] joined, missing: rank 1, which has called \d+ and is at .*\(wait_until\)"
        )
        assert re.search(absent, lines[0])


def test_a_rank_on_another_machine_is_missed_where_its_connection_breaks(
    found: dict[str, list],
) -> None:
    error, lines = found["far_away"][0]
    assert error == "1" and "rank 0 stops: ranks [1] have failed: no heartbeat for 5 s" in lines[0]


def test_garbage_on_the_port_of_the_store_ends_no_run(found: dict[str, list]) -> None:
    for rank, visited in enumerate(found["visited_by_other_programs"]):
        assert visited == ([], [], 1 - rank, "")


def test_sigint_is_passed_on_and_a_second_signal_ends_the_process(found: dict[str, list]) -> None:
    """SIGINT twice within a second is one Ctrl-C."""
    for rank, (codes, lines, reason) in enumerate(found["interrupted"]):
        assert codes == [130] * rank and reason == "rank 1: SIGINT"
        assert lines == ["rank 1: SIGINT; stopping within two steps, with a checkpoint"]


def test_a_rank_that_joins_late_does_not_end_the_run(found: dict[str, list]) -> None:
    assert found["joined_late"] == [([], []), ([], [])]


def test_sigint_on_one_rank_ends_all_ranks_with_130(found: dict[str, list]) -> None:
    for rank, (codes, lines) in enumerate(found["interrupted_at_once"]):
        assert codes == [130] and lines == [f"rank {rank} stops: rank 1: SIGINT"]


def test_a_failure_after_sigint_is_a_failure(found: dict[str, list]) -> None:
    for rank, (codes, lines) in enumerate(found["interrupted_then_failed"]):
        assert lines[0] == "rank 1: SIGINT; stopping within two steps, with a checkpoint"
        assert lines[1].startswith(
            f"rank {rank} stops: rank 0 has waited 2 s (collective_timeout) for "
        )
        assert codes == [1]

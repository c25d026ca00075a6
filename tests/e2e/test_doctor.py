"""The doctor reports what would keep a run from starting: here, and on healthy and faulty hosts."""

from __future__ import annotations

import json
import shutil
import socket
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import hosts
import pytest
from hosts import NOBODY, Host
from ranks import free_port
from runs import run

from opensora_sp.cli import main
from opensora_sp.runtime import versions
from opensora_sp.runtime.doctor import host_report
from opensora_sp.runtime.doctor.ssh import Remote, read_hostfile

pytestmark = [pytest.mark.slow, pytest.mark.serial]

LOOKED_AT = {
    "opensora-sp",
    "python",
    "torch",
    "ColossalAI",
    "flash-attn",
    "packages",
    "torchrun",
    "memory",
    "shared memory",
    "network",
    "environment",
}


def test_a_machine_that_is_well(tmp_path: Path) -> None:
    port = free_port()
    code = "from opensora_sp.cli import main; main()"
    done = run("-c", code, "doctor", "--json", "--master-port", str(port))
    found = json.loads(done.stdout)
    checks = {check["name"]: check for check in found["checks"]}
    assert done.returncode == 0 and found["ok"], done.stdout + done.stderr
    assert set(checks) >= LOOKED_AT | {f"port {port}"}
    assert metadata.version("torch").split("+")[0] in checks["torch"]["found"]
    assert versions.source_digest() in checks["opensora-sp"]["found"]
    assert "round trip" in found["collective"]["found"] and "GB/s" in found["collective"]["found"]
    assert found["facts"] == versions.versions()


def test_a_port_in_use_fails_and_is_reported_as_a_table(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("HF_TOKEN", "a secret")
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(SystemExit) as left:
            main(["doctor", "--no-collective", "--master-port", str(port)])

    reported = capsys.readouterr().out
    assert left.value.code == 1
    assert (
        f"  FAIL port {port} " in reported
        and "in use, by process" in reported
        and "-> pass another --master_port" in reported
    )
    assert "OMP_NUM_THREADS=1" in reported and "secret" not in reported
    assert "1 of " in reported.splitlines()[-1] and " checks failed" in reported.splitlines()[-1]


@pytest.mark.parametrize(
    ("name", "value", "survives"),
    [
        ("A", "plain value", True),
        ("A", "", True),  # not sent
        ("A", "two\nlines", True),  # not sent
        ("A", 'say "hi"', False),
        ("A", "`id`", False),
        ("A", "$HOME", False),
        ("BASH_FUNC_x%%", "y", False),
        ("A.B", "y", False),
        ("UID", "0", False),
    ],
)
def test_variables_that_colossalai_run_cannot_carry(name: str, value: str, survives: bool) -> None:
    assert host_report._survives_colossalai_run(name, value) is survives


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a slots=8\n", "got the line 'a slots=8'"),
        ("# mine\na\n", "got the line '# mine'"),
        ("a\n\nb\na\n", "got the host 'a' twice"),
        ("\n", "without a host"),
    ],
)
def test_hostfiles_are_those_of_colossalai_run(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "hosts").write_text(text)
    with pytest.raises(ValueError, match=message):
        read_hostfile(str(tmp_path / "hosts"))
    with pytest.raises(ValueError, match="which is not a file"):
        read_hostfile(str(tmp_path / "none"))


def test_a_host_without_ssh_server_is_reported_so() -> None:
    check = Remote.of("127.0.0.1", free_port()).connect()
    assert (check.status, check.found) == ("FAIL", "connection refused: no ssh server at this port")


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Host]]:
    reason = hosts.lacking()
    if reason:
        pytest.skip(reason)
    with hosts.hosts(tmp_path_factory.mktemp("three"), "alpha", "beta", "gamma") as made:
        yield made


def doctor(hostfile: Path, *options: str) -> list[str | Path]:
    return ["python", "-m", "opensora_sp.cli", "doctor", "--hostfile", hostfile, *options]


def test_hosts_that_are_well_are_compared_and_tried_together(
    three: list[Host], tmp_path: Path
) -> None:
    (tmp_path / "hosts").write_text("alpha\nbeta\n")
    done = three[0].run(*doctor(tmp_path / "hosts"))
    assert done.returncode == 0, done.stdout + done.stderr
    for expected in (
        "host alpha",
        "host beta",
        "ok   ssh",
        "ok   clock",
        "ok   same as alpha",
        "2 ranks, gloo: round",
    ):
        assert expected in done.stdout, done.stdout


def test_what_ails_a_host_is_reported(three: list[Host], tmp_path: Path) -> None:
    """gamma has another ColossalAI, a clock 100 s ahead, and takes 127.0.1.1 for its address.

    One more host does not answer, and another is unknown.
    """
    alpha, _, gamma = three
    about = Path(str(metadata.distribution("colossalai")._path)) / "METADATA"
    gamma.replace(about, about.read_text().replace("\nVersion: 0.5.0", "\nVersion: 0.4.9", 1))
    date = Path(shutil.which("date")).resolve()
    shutil.copy(date, tmp_path / "date")
    gamma.replace(
        date, f"#!/bin/sh\nexec {tmp_path}/date --date='+100 seconds' \"$@\"\n", mode=0o755
    )
    gamma.replace(
        Path("/etc/hosts"), f"127.0.0.1 localhost\n127.0.1.1 gamma\n{alpha.address} alpha\n"
    )
    (tmp_path / "hosts").write_text(f"alpha\ngamma\n{NOBODY}\nnowhere\n")
    done = alpha.run(*doctor(tmp_path / "hosts", "--json"))

    assert done.returncode == 1, done.stdout + done.stderr
    found = json.loads(done.stdout)
    failing = {
        report["host"]: {
            check["name"]: check["found"] for check in report["checks"] if check["status"] == "FAIL"
        }
        for report in [found, *found["hosts"]]
    }
    assert (
        failing["alpha"] == {}
        and failing[NOBODY].keys() == {"ssh"}
        and "not reachable" in failing[NOBODY]["ssh"]
    )
    assert failing["nowhere"] == {"ssh": "unknown host name"}
    assert failing["gamma"]["same as alpha"] == "colossalai 0.4.9 (0.5.0 on alpha)"

    skew = float(failing["gamma"]["clock"].split()[0])
    assert failing["gamma"].keys() == {"same as alpha", "clock", "own address"} and 90 < skew < 110
    assert failing["gamma"]["own address"].startswith(
        "the host name 'gamma', which resolves to 127.0.1.1 on this host"
    )
    assert f"set GLOO_SOCKET_IFNAME=eth0 (address {gamma.address})" in done.stdout
    assert found["collective"]["found"] == f"skipped: fix gamma, {NOBODY}, nowhere first"

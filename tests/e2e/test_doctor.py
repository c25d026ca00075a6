"""The doctor reports what would keep a run from starting: here, and on healthy and faulty hosts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import hosts
import pytest
from hosts import Host
from runs import run

from opensora_sp.cli import main
from opensora_sp.common import importing
from opensora_sp.runtime import rank_info

pytestmark = [pytest.mark.slow, pytest.mark.serial]

LOOKED_AT = {"opensora-sp", "python", "torch", "ColossalAI", "packages"}
LOOKED_AT |= {"shared memory", "network", "environment"}


def test_a_machine_that_is_well(tmp_path: Path) -> None:
    code = "from opensora_sp.cli import main; main()"
    done = run("-c", code, "doctor", "--json")
    report = json.loads(done.stdout)
    checks = {check["name"]: check for check in report["checks"]}
    assert done.returncode == 0 and report["ok"], done.stdout + done.stderr
    assert set(checks) >= LOOKED_AT
    assert metadata.version("torch").split("+")[0] in checks["torch"]["result"]
    assert rank_info.source_digest() in checks["opensora-sp"]["result"]
    collective = report["collective"]["result"]
    assert "round trip" in collective and "GB/s" in collective
    assert report["facts"] == rank_info.versions()


def test_a_device_that_is_absent_fails_and_is_reported_as_a_table(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("HF_TOKEN", "a secret")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with pytest.raises(SystemExit) as left:
        main(["doctor", "--no-collective"])

    reported = capsys.readouterr().out
    assert left.value.code == 1
    assert "  FAIL devices " in reported and "-> expected a driver" in reported
    assert "OMP_NUM_THREADS=1" in reported and "secret" not in reported
    assert "1 of " in reported.splitlines()[-1] and " checks failed" in reported.splitlines()[-1]


def test_colossalai_is_missed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importing, "is_installed", lambda module: module != "colossalai")
    main(["doctor", "--no-collective"])
    reported = capsys.readouterr().out
    assert "  warn ColossalAI " in reported and "pip install" in reported


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Host]]:
    reason = hosts.lacking()
    if reason:
        pytest.skip(reason)
    with hosts.hosts(tmp_path_factory.mktemp("pair"), "alpha", "beta") as made:
        yield made


def doctor(hostfile: Path, *options: str) -> list[str | Path]:
    launcher = ["colossalai", "run", "--nproc_per_node", "1", "--hostfile", hostfile]
    return [*launcher, "-m", "opensora_sp.cli", "doctor", *options]


def test_hosts_of_a_launcher_are_examined_and_tried_together(
    pair: list[Host], tmp_path: Path
) -> None:
    """beta takes 127.0.1.1 for its address, as many distributions do."""
    known = f"127.0.0.1 localhost\n127.0.1.1 beta\n{pair[0].address} alpha\n"
    pair[1].replace(Path("/etc/hosts"), known)
    (tmp_path / "hosts").write_text("alpha\nbeta\n")
    done = pair[0].run(*doctor(tmp_path / "hosts"))
    assert done.returncode == 0, done.stdout + done.stderr
    for expected in ("host alpha", "host beta", "2 ranks, gloo: round"):
        assert expected in done.stdout, done.stdout


def test_hosts_that_differ_are_refused_by_name(pair: list[Host], tmp_path: Path) -> None:
    """beta has another ColossalAI."""
    alpha, beta = pair
    (tmp_path / "hosts").write_text("alpha\nbeta\n")
    about = Path(str(metadata.distribution("colossalai")._path)) / "METADATA"
    beta.replace(about, about.read_text().replace("\nVersion: 0.5.0", "\nVersion: 0.4.9", 1))
    done = alpha.run(*doctor(tmp_path / "hosts"))
    assert done.returncode, done.stdout + done.stderr
    assert "got different versions: colossalai 0.5.0 on rank 0 (alpha), 0.4.9 on rank 1 (beta)" in (
        done.stdout + done.stderr
    )

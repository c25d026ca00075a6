"""What a run prints: each message once for all ranks, its last lines, errors, no "\\r"."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest
from runs import ROOT, TRAIN, run, write_toy_set

from opensora_sp import cli
from opensora_sp.common import error_file
from opensora_sp.common.console import report_errors
from opensora_sp.common.error_file import write_error_file
from opensora_sp.config import load_inference_config, load_train_config
from opensora_sp.data.manifest import Manifest
from opensora_sp.training.summary import conclude, write_sampling_config

OURS = re.compile(r'File ".*(opensora_sp|scripts)/')


def manifest_of(folder: Path, *, frames: list[int], broken: tuple[int, ...] = ()) -> Path:
    """Clips without captions, with the number of frames that each is said to have."""
    manifest = write_toy_set(folder, len(frames), broken=broken)
    lines = [f"{i}.mp4,,{count}" for i, count in enumerate(frames)]
    manifest.write_text("\n".join(["path,text,num_frames", *lines]) + "\n")
    return manifest


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Three steps on two ranks, with clips that are too short, none with a caption.

    Returns the run's folder and its output.
    """
    folder = tmp_path_factory.mktemp("set")
    manifest = manifest_of(folder / "train", frames=[6, 6, 6, 4, 6, 6, 6, 1])
    heldout = write_toy_set(folder / "heldout", 2)
    validation = f"validation = dict(every=3, manifest={str(heldout)!r}, bins=2)\n"
    (folder / "config.py").write_text(TRAIN.format(manifest=str(manifest)) + validation)
    options = (f"outputs={folder / 'a run'}", "max_steps=3", "num_workers=1")
    command = ("scripts/train.py", folder / "config.py", "--cfg-options", *options)
    found = run(*command, launcher="torchrun", ranks=2)

    assert found.returncode == 0, found.stderr
    return folder / "a run", found.stdout + found.stderr


@pytest.mark.slow
def test_each_message_stands_once_whatever_the_number_of_ranks(done: tuple[Path, str]) -> None:
    run_dir, output = done
    for text in (output, (run_dir / "train.log").read_text()):
        clips = "6 clips (2 of 8 skipped, too short for 5 frames), 2 micro-batches of 3 per step"
        assert text.count(clips) == 1
        assert text.count("none of the 8 clips has a caption") == 1
        assert text.count("finished: ") == 1
        assert "\r" not in text


@pytest.mark.slow
def test_a_run_ends_with_steps_time_losses_checkpoint_and_the_command_to_sample(
    done: tuple[Path, str],
) -> None:
    run_dir, _ = done
    lines = [
        line.partition(" INFO ")[2] for line in (run_dir / "train.log").read_text().splitlines()
    ]
    (heldout,) = [line for line in lines if line.startswith("step 3/3 | held-out loss ")]
    loss = next(line for line in lines if line.startswith("step 3/3 | loss ")).split(" | ")[1]
    finished, checkpoint, sample = lines[-3:]
    heldout = heldout.partition(" | ")[2]
    assert re.fullmatch(
        rf"finished: 3 of 3 steps \| 0:\d\d:\d\d \| last {loss} \| {heldout} \(step 3\)", finished
    )
    assert checkpoint == f"checkpoint: {run_dir / 'step_00000003'}"

    there, command = sample.removeprefix("sample from it: ").split(" && ")
    assert there == f"cd {ROOT}"
    command = shlex.split(command)
    assert command[:2] == ["opensora-sp", "sample"] and command[-2:] == ["--prompt", "TEXT"]
    found = run("-m", "opensora_sp.cli", *command[1:], "--num-sampling-steps", "1", "--seed", "1")
    assert found.returncode == 0 and "\r" not in found.stdout + found.stderr, found.stderr
    assert len(list((run_dir / "samples").glob("*.mp4"))) == 1


def test_the_command_to_sample_can_be_pasted_in_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The shell from which ``my_project/run.sh`` was started is not in the project."""
    project, command = tmp_path / "my project", tmp_path / "bin" / "opensora-sp"
    run_dir = project / "outputs" / "first"
    run_dir.mkdir(parents=True)
    command.parent.mkdir()
    command.write_text("#!/bin/sh\npwd\nprintf '%s\\n' \"$@\"\n")
    command.chmod(0o755)
    (project / "config.py").write_text(TRAIN.format(manifest="clips.csv"))

    monkeypatch.chdir(project)
    with caplog.at_level("INFO"):
        conclude(load_train_config("config.py"), run_dir.relative_to(project), 1.0, 2.0)
    pasted = caplog.messages[-1].removeprefix("sample from it: ")
    path = f"{command.parent}:{os.environ['PATH']}"
    ran = subprocess.run(
        ["sh", "-c", pasted], cwd="/", env={"PATH": path}, capture_output=True, text=True
    )
    expected = "sample outputs/first/sample.py --ckpt outputs/first --prompt TEXT"
    assert ran.stdout.splitlines() == [str(project), *expected.split()], ran.stderr


def test_samples_have_the_frame_rate_of_the_clips(tmp_path: Path) -> None:
    config, manifest = tmp_path / "config.py", tmp_path / "clips.csv"
    config.write_text(TRAIN.format(manifest=str(manifest)))
    manifest.write_text("path,text,fps\na.mp4,,8\nb.mp4,,12\nc.mp4,,30\nd.jpg,,\n")

    def rate(*options: str) -> float:
        cfg = load_train_config(config, [*options])
        write_sampling_config(cfg, tmp_path, Manifest(manifest))
        return load_inference_config(tmp_path / "sample.py").fps

    assert rate() == 12 and rate("dataset.frame_interval=3") == 4
    assert rate("validation=dict(every=1,prompts=['a'],fps=5)") == 5

    manifest.write_text("path,text\na.mp4,\n")
    assert rate() == 24


@pytest.mark.slow
@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("sp_size=3", "got sp_size 3 with 2 processes; expected an sp_size that divides"),
        ("dataset.max_bad_fraction=0.0", "corrupt clips of 6 read, the last"),
    ],
)
def test_an_error_of_the_user_stands_once_in_the_log_and_once_in_the_report(
    option: str, message: str, tmp_path: Path
) -> None:
    """Before the ranks have joined, and in a step: raised by both ranks."""
    manifest = manifest_of(tmp_path / "set", frames=[6] * 6, broken=(1, 2))
    (tmp_path / "config.py").write_text(TRAIN.format(manifest=str(manifest)))
    options = (option, f"outputs={tmp_path / 'run'}")
    command = ("scripts/train.py", tmp_path / "config.py", "--cfg-options", *options)
    found = run(*command, launcher="torchrun", ranks=2)

    assert found.returncode == 1
    log, separator, report = found.stderr.partition("scripts/train.py FAILED")
    assert separator and log.count(message) == 1 and report.count(message) == 1, found.stderr
    assert message in report.partition("Root Cause")[2]
    assert "new message format" not in log
    assert not OURS.search(found.stderr)

    if (tmp_path / "run").exists():
        assert (tmp_path / "run" / "train.log").read_text().count(message) == 1


def test_a_message_that_is_in_the_log_is_not_printed_again(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    for is_logged in (False, True):
        error = ValueError("got a; expected b; do c")
        error.is_logged = is_logged
        with pytest.raises(SystemExit, match="2"), report_errors():
            raise error
        assert ("got a" in capsys.readouterr().err) != is_logged
    with pytest.raises(SystemExit, match="130"), report_errors():
        raise KeyboardInterrupt
    assert capsys.readouterr().err == ""


@pytest.fixture
def torchruns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file for the reason of a failure, in the folders that torchrun makes."""
    file = tmp_path / "attempt_0" / "1" / "error.json"
    file.parent.mkdir(parents=True)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    return file


def test_of_the_ranks_of_a_host_the_first_to_fail_prints(
    torchruns: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert write_error_file("got a") and write_error_file("got b")  # both of this process
    first = json.loads(torchruns.read_text())
    assert first["message"]["message"] == "got a"
    monkeypatch.setattr(os, "getpid", lambda: 2**22 + 1)
    monkeypatch.setattr(error_file, "EXIT_TIMEOUT", 0.2)
    # In the same second, and with a file of its own: torchrun reports the earliest reason.
    monkeypatch.setattr(error_file.time, "time", lambda: first["timestamp"] + 0.9)
    other = torchruns.parent.parent / "0" / torchruns.name
    other.parent.mkdir()
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(other))
    with pytest.raises(SystemExit, match="2"), report_errors():
        raise ValueError("got c")
    assert capsys.readouterr().err == ""
    assert json.loads(other.read_text()) == {"message": "", "timestamp": first["timestamp"] + 1}


@pytest.mark.parametrize("place", ["mine", "missing/0", "attempt_0", "closed/attempt_0/0"])
def test_an_error_file_that_is_not_of_torchrun_hides_no_error(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "first_to_fail").write_text("4194305")  # as an earlier version left it
    (tmp_path / "closed").touch()  # a file: nothing can be written below, whoever runs this
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / place / "error.json"))
    for _ in range(2):
        with pytest.raises(SystemExit, match="2"), report_errors():
            raise ValueError("got a; expected b; do c")
        assert "got a" in capsys.readouterr().err
    assert not list(tmp_path.glob("*/first_to_fail"))


FIRST = """
import runpy, sys
from opensora_sp import cli
from opensora_sp.common import error_file

def stop():
    assert called and not {"torch", "numpy", "pydantic", "mmengine"} & set(sys.modules)
    sys.exit(7)

called = []
cli.end_with_launchers, cli.exit_on_interrupt = lambda: called.append(True), stop
sys.argv = sys.argv[1:]
if len(sys.argv) == 1:
    runpy.run_path(sys.argv[0], run_name="__main__")
cli.main(sys.argv[1:])
"""


@pytest.mark.parametrize(
    "command",
    [
        *([f"scripts/{name}.py"] for name in ("train", "inference", "precompute")),
        *(["opensora-sp", name] for name in cli.RUNS),
    ],
)
def test_runs_import_nothing_slow_before_they_end_with_launchers_and_handle_ctrl_c(
    command: list[str],
) -> None:
    done = run("-c", FIRST, *command)
    assert done.returncode == 7, done.stderr

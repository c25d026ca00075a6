"""The studio without its page: folders, checks of requests, the queue, ranks, curves of runs."""

from __future__ import annotations

import ast
import json
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
from polling import wait_until
from ranks import warm_context
from studio_runs import log_step, write_run

from opensora_sp.cli import main
from opensora_sp.data import read_video
from opensora_sp.runtime.local_ranks import LocalRanks
from opensora_sp.sampling.session import serve
from opensora_sp.studio import views
from opensora_sp.studio.folders import Folders
from opensora_sp.studio.jobs import Job, Queue, work_of
from opensora_sp.training.report import RunRecord

OUTSIDE = "got the path .*; expected one inside of .*; choose another"


@pytest.fixture
def folders(trained: Path, tmp_path: Path) -> Folders:
    return Folders.of([str(trained)], str(tmp_path / "studio"))


def test_paths_outside_of_the_folders_are_refused(
    trained: Path, folders: Folders, tmp_path: Path
) -> None:
    """Also where a link or the prompt leads there, and before anything is opened."""
    (folders.outputs / "link").symlink_to(tmp_path)
    secret = tmp_path / "secret.png"
    os.mkfifo(secret)  # whoever opens it waits for ever

    assert folders.checked(trained / "model.safetensors").is_file()
    for path in (secret, folders.outputs / "link" / "secret.png", trained / ".." / "x", "", "a/b"):
        with pytest.raises(ValueError, match=OUTSIDE):
            folders.checked(path)

    in_prompt = json.dumps({"reference_path": str(secret)})
    for values in (
        {"ckpt": str(tmp_path), "prompt": "a"},
        {"ckpt": "hpcai-tech/OpenSora-STDiT-v3", "prompt": "a"},
        {"ckpt": str(trained), "prompt": "a", "lora": [f"{tmp_path}:0.5"]},
        {"ckpt": str(trained), "prompt": "a", "reference_path": str(secret)},
        {"ckpt": str(trained), "prompt": f"a{in_prompt}"},
    ):
        with pytest.raises(ValueError, match=OUTSIDE):
            work_of(values, folders, nproc=1, outputs=folders.outputs)

    with pytest.raises(ValueError, match="got 'nowhere', which is no folder"):
        Folders.of(["nowhere"], str(tmp_path))


def test_requests_are_checked_as_those_of_the_command(trained: Path, folders: Folders) -> None:
    good = {"ckpt": str(trained), "prompt": "a red circle", "resolution": "", "num_frames": "1"}
    work = work_of(good | {"seed": "7"}, folders, nproc=2, outputs=folders.outputs)
    assert work.weights == trained and work.request.shape == (1, 28, 24)
    assert work.request.seed == 7 and work.cfg.sp_size == 2 and work.cfg.format == "mp4"

    for change, message in (
        ({"prompt": " "}, "got no prompts; expected at least one"),
        ({"resolution": "wide"}, "resolution"),
        ({"num_frames": "100000"}, "got clips of 100,000 frames of 28 x 24 pixels"),
        ({"scheduler.cfg_scale": "much"}, "cfg_scale"),
        ({"mask_strategy": "0,9"}, "with 0 references; expected a reference below"),
        ({"ckpt": str(folders.outputs)}, "without sample.py; expected a run"),
    ):
        with pytest.raises(ValueError, match=message):
            work_of(good | change, folders, nproc=1, outputs=folders.outputs)


def test_lists_of_runs_and_weights(trained: Path, folders: Folders) -> None:
    assert folders.weights() == [trained] and folders.adapters() == []
    assert folders.trained() == [] and folders.history() == []

    (folders.outputs / "1").mkdir()
    for name in ("000-a.json", "000-a.mp4", "000-a.png"):
        (folders.outputs / "1" / name).touch()
    assert folders.history() == [folders.outputs / "1" / "000-a.mp4"]


class HeldRanks:
    """Ranks whose work ends when the test lets it."""

    nproc = 1

    def __init__(self) -> None:
        self.proceed, self.seen = threading.Semaphore(0), list[str]()

    def run(self, work: Any, *, on_step: Any, is_cancelled: Any) -> tuple[str, ...]:
        self.seen.append(work.request.prompt.text)
        on_step(1, 2, b"PNG")
        on_step(2, 2, b"")
        self.proceed.acquire()
        if work.request.prompt.text == "fails":
            raise ValueError("got a; expected b; do c")
        return ("cancelled",) if is_cancelled() else ("done", "video.mp4")


def test_the_queue_samples_in_order_and_survives_failures(trained: Path, folders: Folders) -> None:
    ranks = HeldRanks()
    queue = Queue(folders, ranks)  # type: ignore[arg-type]
    jobs = [queue.submit({"ckpt": str(trained), "prompt": name}) for name in ("fails", "b", "c")]
    jobs.append(queue.submit({"ckpt": str(trained), "prompt": "d"}))
    assert len({job.work.cfg.outputs for job in jobs}) == 4

    wait_until(lambda: jobs[0].steps == (2, 2), 10)
    assert [job.state for job in jobs] == ["running", "waiting", "waiting", "waiting"]
    assert queue.jobs == jobs and jobs[0].preview == b"PNG"

    jobs[1].cancelled.set()  # before its turn: no rank sees it
    ranks.proceed.release()
    wait_until(lambda: jobs[2].state == "running", 10)
    jobs[2].cancelled.set()
    ranks.proceed.release()
    ranks.proceed.release()
    wait_until(lambda: not queue.jobs, 10)
    assert [job.state for job in jobs] == ["failed", "cancelled", "cancelled", "done"]
    assert ranks.seen == ["fails", "c", "d"] and jobs[3].video == Path("video.mp4")
    assert views.progress(jobs[0]).count("<br>") == 2 and "role='alert'" in views.progress(jobs[0])


def ended(queue: Queue, values: dict[str, Any], at_step: Any = None) -> Job:
    """A job that has ended; ``at_step`` is called once, when its first step has."""
    job = queue.submit(values)
    if at_step is not None:
        wait_until(lambda: job.steps != (0, 0) or job.has_ended, 60)
        at_step(job)
    wait_until(lambda: job.has_ended, 60)
    return job


@pytest.mark.slow
def test_two_ranks_keep_the_model_cancel_together_and_start_again(
    trained: Path, folders: Folders
) -> None:
    ranks = LocalRanks(2, serve, folders.outputs / "ranks.log", warm_context())
    queue = Queue(folders, ranks)
    values = {"ckpt": str(trained), "prompt": "a red circle", "seed": "3"}
    long = values | {"scheduler.num_sampling_steps": "20000"}
    try:
        first = ended(queue, values)
        assert first.state == "done", first.error + ranks.log.read_text()
        assert first.steps == (4, 4) and first.preview.startswith(b"\x89PNG")
        assert first.video is not None
        facts = json.loads(first.video.with_suffix(".json").read_text())
        assert facts["seed"] == 3 and len(facts["checkpoint_sha256"]) == 64
        pids = [process.pid for process in ranks.processes]

        stopped = ended(queue, long, lambda job: job.cancelled.set())
        assert stopped.state == "cancelled" and stopped.steps[0] < 20000
        assert not Path(stopped.work.cfg.outputs).exists()

        # The same ranks and weights, and the same noise.
        again = ended(queue, values)
        assert again.video is not None and again.video.parent != first.video.parent
        assert (
            read_video(again.video, num_frames=5)[0] == read_video(first.video, num_frames=5)[0]
        ).all()
        assert [process.pid for process in ranks.processes] == pids
        assert ranks.log.read_text().count("wrote ") == 2

        failed = ended(queue, long, lambda job: os.kill(pids[1], signal.SIGKILL))
        assert failed.state == "failed" and "rank 1 (-9)" in failed.error
        assert failed.error.startswith("got the end of") and "; expected all 2" in failed.error
        assert ended(queue, values).state == "done"
        assert not {process.pid for process in ranks.processes} & set(pids)
    finally:
        ranks.stop()


def test_runs_are_overlaid_and_change_while_they_train(tmp_path: Path) -> None:
    one, other = write_run(tmp_path / "one"), write_run(tmp_path / "other")
    assert "logged a step" in views.training([tmp_path])

    videos = one / "validation" / "step_00000003"
    videos.mkdir(parents=True)
    for name in ("000-<a>.json", "000-<a>.mp4"):
        (videos / name).touch()
    shown, both = views.training([one]), views.training([one, other])
    for curve in ("training loss", "held-out loss by timestep", "idle time: share of each rank"):
        assert f"alt='{curve}'" in shown
    assert shown.count("<img") == both.count("<img") == 6 and both[: len(shown)] != shown
    assert "step 3</figcaption>" in shown and "000-&lt;a&gt;" in shown and "<a>" not in shown

    before = views.changes([str(one)])
    assert before == views.changes([str(one)]) != views.changes([str(other)])
    log_step(one, 4)
    assert views.changes([str(one)]) != before
    assert RunRecord.read(one).lines[-1]["step"] == 4


def test_without_gradio_the_studio_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("opensora_sp.extras.is_installed", lambda module: False)
    with pytest.raises(SystemExit):
        main(["studio"])
    error = capsys.readouterr().err
    assert "got opensora-sp studio, and no package gradio; expected the extra 'studio'" in error


def test_the_studio_has_at_most_400_lines_of_code() -> None:
    """Beside blank lines, comments and docstrings."""
    count = 0
    for path in Path(views.__file__).parent.glob("*.py"):
        tree = ast.parse(path.read_text())
        texts = [one for one in ast.walk(tree) if isinstance(one, ast.Expr)]
        lines = [set(range(one.lineno, (one.end_lineno or 0) + 1)) for one in texts]
        is_text = [isinstance(getattr(one.value, "value", None), str) for one in texts]
        documentation = set().union(*(found for found, text in zip(lines, is_text) if text))
        code = {
            number
            for number, line in enumerate(path.read_text().splitlines(), 1)
            if line.strip() and not line.strip().startswith("#")
        }
        count += len(code - documentation)
    assert 200 < count <= 400

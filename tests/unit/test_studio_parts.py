"""The studio without its page: folders, checks of requests, the queue, ranks, curves of runs."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image
from polling import wait_until
from random_weights import draw_weights
from ranks import warm_context
from runs import ROOT
from safetensors.torch import save_file
from studio_runs import log_step, write_run

from opensora_sp.checkpoint.adapters import AdapterKind, Base, adapter_files, name_on_disk
from opensora_sp.cli import main
from opensora_sp.common.files import shipped_models
from opensora_sp.config import load_inference_config
from opensora_sp.models import build_model
from opensora_sp.models.lora import add_lora, lora_layers
from opensora_sp.parallel import SequenceMesh, closing_process_group
from opensora_sp.runtime.local_ranks import LocalRanks
from opensora_sp.runtime.rendezvous import join_rendezvous
from opensora_sp.runtime.watchdog import Watchdog
from opensora_sp.sampling.outputs import facts_of
from opensora_sp.studio import UPLOADS, session, views
from opensora_sp.studio.folders import Folders, short_names
from opensora_sp.studio.form import (
    FIELDS,
    Job,
    Work,
    placed_frames,
    refused_field,
    settings_of,
    worded,
)
from opensora_sp.studio.jobs import Queue, with_references
from opensora_sp.training.curves import CURVES, Status, changes, config_of, traces

OUTSIDE = "got the path .*; expected one inside of .*; choose another"


@pytest.fixture
def folders(trained: Path, tmp_path: Path) -> Folders:
    return Folders([str(trained)], str(tmp_path / "studio"))


def checked(values: dict[str, Any], folders: Folders, nproc: int = 1) -> Work:
    """The work that the page makes of its fields."""
    return Queue(folders, SimpleNamespace(nproc=nproc)).check(values)  # type: ignore[arg-type]


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
        {"ckpt": str(trained), "prompt": "a", "reference_path": [str(secret)]},
        {"ckpt": str(trained), "prompt": f"a{in_prompt}"},
    ):
        with pytest.raises(ValueError, match=OUTSIDE):
            checked(values, folders)


def test_code_among_uploads_is_not_executed(trained: Path, tmp_path: Path) -> None:
    runs, executed = tmp_path / "runs", tmp_path / "executed"
    for name in ("good", "bare", "linked"):
        shutil.copytree(trained, runs / name)
    folders = Folders([str(runs)], str(runs / "studio"))
    upload = folders.outputs / UPLOADS / "x"
    shutil.copytree(trained, upload)
    (upload / "sample.py").write_text(f"open({str(executed)!r}, 'w')")
    (runs / "bare" / "sample.py").unlink()
    (runs / "linked" / "sample.py").unlink()
    (runs / "linked" / "sample.py").symlink_to(upload / "sample.py")

    for values in (
        {"ckpt": str(upload)},
        {"ckpt": str(upload / "model.safetensors")},
        {"ckpt": str(runs / "linked")},
        {"ckpt": str(runs / "bare"), "lora": [f"{upload}:0.5"]},
        {"ckpt": str(runs / "good"), "lora": [str(upload)]},
    ):
        with pytest.raises(ValueError, match=OUTSIDE):
            checked(values | {"prompt": "a"}, folders)
    assert not executed.exists()

    # Weights that a training has replaced are other ones.
    good = {"ckpt": str(runs / "good"), "prompt": "a"}
    work = checked(good, folders)
    assert work == checked(good, folders)
    os.utime(runs / "good" / "model.safetensors", ns=(1, 1))
    trained_again = checked(good, folders)
    assert trained_again.weights == work.weights and trained_again.versions != work.versions


def test_a_request_is_checked_and_its_error_is_of_a_field(trained: Path, folders: Folders) -> None:
    def check(values: Any) -> Any:
        return checked(values, folders)

    good = dict.fromkeys(FIELDS, "") | {"ckpt": str(trained), "prompt": "a", "num_frames": "1"}
    assert refused_field(good, check) == ""
    work = checked(good | {"seed": "7"}, folders, nproc=2)
    assert work.weights == trained and work.request.shape == (1, 28, 24)
    assert work.request.seed == 7 and work.cfg.sp_size == 2 and work.cfg.format == "mp4"

    for key, setting, part in (
        ("ckpt", None, "got no checkpoint; expected one; fill it in"),
        ("ckpt", str(folders.outputs), "expected one inside of"),
        ("prompt", " ", "got no prompt; expected one; fill it in"),
        ("resolution", "wide", "got Size 'wide'"),
        ("num_frames", "many", "Frames"),
        ("num_frames", "100000", "got clips of 100,000 frames of 28 x 24 pixels"),
        ("fps", "nan", "expected a finite number"),
        ("scheduler.num_sampling_steps", "1000000000", "less than or equal to 100000"),
        ("scheduler.cfg_scale", "nan", "Guidance"),
        ("scheduler.guidance_interval", "0.9, 0.1", "got Guidance interval (0.9, 0.1)"),
        ("scheduler.cache_threshold", "0.1", "got Cache threshold 0.1 without a"),
        ("seed", "x", "seed"),
        ("reference_path", [str(folders.outputs / "none.png")], "none.png"),
        ("mask_strategy", ["0,9"], "with 0 references; expected a reference below"),
        ("lora", [f"{trained}:1e300"], "the scale 1e300; expected a finite number up to 1000"),
    ):
        with pytest.raises((ValueError, OSError)) as caught:
            check(good | {key: setting})
        error = worded(caught.value)
        assert refused_field(good | {key: setting}, check) == key and part in error, error
        assert not re.search(r"scheduler\.|cfg_|--|\.py:", error), error
    # The first of two; and two that do not fit each other.
    assert refused_field(good | {"seed": "x", "resolution": "wide"}, check) == "resolution"
    with pytest.raises(ValueError, match=r"expected even sides.*; take 28x24, or format='gif'"):
        check(good | {"resolution": "29x24", "num_frames": "5"})

    (folders.outputs / "run").mkdir()
    bare = Folders([str(folders.outputs)], str(folders.outputs))
    with pytest.raises(ValueError, match=r"without sample\.py; expected a run"):
        checked({"ckpt": str(bare.outputs / "run"), "prompt": "a"}, bare)


def test_without_runs_there_is_the_model_of_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def served(folders: Folders, **options: Any) -> None:
        (path,) = folders.weights()
        work = checked({"ckpt": str(path), "prompt": "a"}, folders)
        assert work.weights == path and folders.runs == [] and work.request.shape == (8, 72, 72)
        # Nothing else of the package is a run.
        with pytest.raises(ValueError, match=OUTSIDE):
            folders.checked(path.parent, executed=True)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("opensora_sp.studio.server.run", served)
    main(["studio"])


def test_the_history_finds_and_deletes_nothing_else(trained: Path, folders: Folders) -> None:
    for name in ("fir", "oak", "other"):
        folder = folders.outputs / name
        folder.mkdir()
        facts = {"prompt": f"cat {name}", "seed": 5} if name != "other" else {}
        (folder / "000-a.json").write_text(json.dumps(facts))
        for file in ("000-a.mp4", "000-a.png", "000-a.0.png", "000-ab.png"):
            (folder / file).touch()
    assert folders.weights() == [trained, *shipped_models()]
    assert folders.adapters() == folders.trained() == []
    results = folders.history()
    assert [result.caption for result in results] == [
        "cat oak | seed 5 | oak",
        "cat fir | seed 5 | fir",
    ]
    assert results[1].video == folders.outputs / "fir" / "000-a.mp4"
    # Damaged sheets are gray.
    from opensora_sp.studio.page import _sheet

    assert _sheet(results[1]).getextrema() == (128, 128)
    results[1].delete()
    assert [path.name for path in (folders.outputs / "fir").iterdir()] == ["000-ab.png"]


class HeldRanks:
    """Ranks whose work ends when the test lets it."""

    nproc = 1

    def __init__(self) -> None:
        self.proceed, self.seen = threading.Semaphore(0), list[str]()

    def run(self, work: Any, *, on_step: Any, is_cancelled: Any) -> tuple[str, ...]:
        self.seen.append(work.request.prompt.text)
        on_step(1, 3, b"PNG")
        on_step(2, 3, b"")
        self.proceed.acquire()
        if work.request.prompt.text == "fails":
            raise ValueError("got 'a'; expected b; do c")
        return ("cancelled",) if is_cancelled() else ("done", "video.mp4")


def submitted(queue: Queue, values: dict[str, Any]) -> Job:
    job = Job(values)
    queue.submit(job)
    return job


def test_the_queue_samples_in_order_and_survives_failures(trained: Path, folders: Folders) -> None:
    ranks = HeldRanks()
    queue = Queue(folders, ranks)  # type: ignore[arg-type]
    names = ("fails", "b", "c", "d")
    jobs = [submitted(queue, {"ckpt": str(trained), "prompt": name}) for name in names]
    assert len({job.work.cfg.outputs for job in jobs if job.work is not None}) == 4

    wait_until(lambda: jobs[0].steps == (2, 3))
    assert [job.state for job in jobs] == ["running", *["waiting"] * 3]
    assert jobs[0].preview == b"PNG" and "step 2 of 3" in views.progress(jobs[0])
    assert [queue.ahead_of(job) for job in jobs] == [0, 1, 2, 3]

    # Before its turn: it has ended at once, no rank sees it, and nobody waits for it.
    jobs[1].cancel()
    assert jobs[1].state == "cancelled" and queue.ahead_of(jobs[3]) == 2
    refused = submitted(queue, {"ckpt": str(trained), "prompt": ""})
    assert (refused.state, refused.refused_field) == ("failed", "prompt")
    assert "got no prompt" in views.progress(refused)
    ranks.proceed.release()
    wait_until(lambda: jobs[2].steps == (2, 3))
    jobs[2].cancel()
    assert jobs[2].state == "running" and "cancelling" in views.progress(jobs[2])
    ranks.proceed.release(2)
    wait_until(lambda: not queue.jobs)
    assert [job.state for job in jobs] == ["failed", "cancelled", "cancelled", "done"]
    assert ranks.seen == ["fails", "c", "d"] and jobs[3].video == Path("video.mp4")
    parts = "got &#x27;a&#x27;;\nexpected b;\ndo c"
    assert f"<pre role='alert'>{parts}</pre>" in views.progress(jobs[0])
    shown = views.queue([jobs[2], jobs[3], Job({"prompt": "<p>"})], queue.ahead_of)
    assert shown.index("&lt;p&gt;") < shown.index("<b>d</b>") < shown.index("<b>c</b>")
    jobs[3].cancel()
    assert jobs[3].state == "done"


def act(pipe: Any) -> None:
    """A rank that does what its work says."""
    is_rank_0 = os.environ["RANK"] == "0"
    while (work := pipe.recv()) == "answer":
        if is_rank_0:
            pipe.send(("done", "video"))
    if work == "wait":
        time.sleep(60)
    if not is_rank_0:
        time.sleep(0.3)  # until the end of rank 0 is seen
        raise ValueError("got a; expected b; do c")


def fail_one_after_the_other(pipe: Any) -> None:
    """Rank 1 fails, and therefore rank 0: with an error of its own, of which it speaks first."""
    pipe.recv()
    store = join_rendezvous()
    try:
        with closing_process_group(), Watchdog(store, grace_time=0) as watchdog:
            if os.environ["RANK"] == "1":
                raise ValueError("got the first; expected b; do c")
            wait_until(lambda: watchdog._failure is not None, 60)
            raise ArithmeticError("the second")
    finally:
        time.sleep(int(os.environ["RANK"]))


def test_ranks_say_why_they_fail_and_are_closed_for_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = LocalRanks(2, fail_one_after_the_other, tmp_path / "log", warm_context())
    with pytest.raises(ValueError, match="^got the first; expected b; do c$"):
        both.run("work", on_step=print, is_cancelled=lambda: False)

    ranks = LocalRanks(2, act, tmp_path / "log", warm_context())

    def run(work: str) -> tuple[Any, ...]:
        return ranks.run(work, on_step=print, is_cancelled=lambda: False)

    # A start that fails half-way is no start.
    start = ranks._start_rank
    with monkeypatch.context() as patch:
        patch.setattr(ranks, "_start_rank", lambda rank: start(rank) if rank == 0 else 1 / 0)
        for _ in range(2):
            with pytest.raises(ZeroDivisionError):
                run("answer")
            assert ranks.processes == []
    assert run("answer") == ("done", "video")
    with pytest.raises(ValueError, match="got a; expected b; do c"):
        run("fail")

    errors = list[str]()

    def wait() -> None:
        for _ in range(2):
            with pytest.raises(ValueError) as caught:
                run("wait")
            errors.append(str(caught.value))

    thread = threading.Thread(target=wait)
    thread.start()
    wait_until(lambda: len(ranks.processes) == 2)
    ranks.close()
    thread.join(10)
    assert not thread.is_alive() and ranks.processes == []
    assert "got the end of" in errors[0] and "got work for ranks that are closed" in errors[1]


def test_the_start_is_reported_before_torch_is_imported(tmp_path: Path) -> None:
    pytest.importorskip("gradio")
    command = [sys.executable, "-m", "opensora_sp.cli", "studio", str(tmp_path), "--port", "0"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    options: dict[str, Any] = dict(cwd=tmp_path, env=environment, stderr=subprocess.PIPE)
    with subprocess.Popen(command, **options) as process:
        try:
            assert process.stderr is not None
            assert process.stderr.readline().startswith(b"starting: ")
            assert "libtorch" not in Path(f"/proc/{process.pid}/maps").read_text()
        finally:
            process.kill()


def test_ranks_end_with_a_signal_before_the_page_is_served(
    folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the page is built; the queue may have started ranks already."""
    server = pytest.importorskip("opensora_sp.studio.server")
    closed: list[LocalRanks] = []
    monkeypatch.setattr(server, "build", lambda *_: signal.raise_signal(signal.SIGTERM))
    monkeypatch.setattr(server.LocalRanks, "close", lambda ranks: closed.append(ranks))
    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(SystemExit):
            server.run(folders, nproc=1, host="127.0.0.1", port=0)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert len(closed) == 1


def write_adapters(trained: Path, folder: Path) -> Path:
    """Drawn adapters of a model, as a run saves them."""
    options = dict(load_inference_config(trained / "sample.py").model)
    model = build_model(options.pop("type"), **options)
    add_lora(model, rank=2, alpha=4.0)
    draw_weights(model, seed=1)
    parameters = model.named_parameters()
    drawn = {name_on_disk(name): one.data for name, one in parameters if one.requires_grad}
    folder.mkdir()
    save_file(drawn, folder / "adapter_model.safetensors")
    about = adapter_files(list(lora_layers(model)), AdapterKind(2, 4.0), Base("base", "1"))
    for name, data in about.items():
        (folder / name).write_bytes(data)
    return folder


def test_adapters_and_references_are_part_of_the_work(
    trained: Path, folders: Folders, tmp_path: Path
) -> None:
    adapters = write_adapters(trained, tmp_path / "adapters")
    (adapters / "sample.py").touch()
    folders = Folders([str(trained), str(adapters)], str(folders.outputs))
    assert folders.adapters() == [adapters]
    reference = folders.outputs / UPLOADS / "x" / "a.png"
    reference.parent.mkdir(parents=True)
    Image.new("RGB", (24, 28), "red").save(reference)
    values = {"ckpt": str(trained), "prompt": "a", "lora": [f"{adapters}:0.5"]}
    work = checked(values | {"reference_path": [str(reference)], "mask_strategy": ["0"]}, folders)
    assert work.cfg.lora == (f"{adapters}:0.5",) and "adapter_model" in work.versions

    # Kept with the video, for the upload is removed.
    facts = facts_of(work.cfg, with_references(work).request)
    kept = Path(facts["reference_path"])
    assert kept.parent == Path(work.cfg.outputs) and kept.read_bytes() == reference.read_bytes()
    assert settings_of(facts)["lora"] == [f"{adapters}:0.5"]


def test_paths_have_their_shortest_names_that_differ() -> None:
    paths = ["/a/x/first", "/a/y/first", "/a/z", "/a/x/first/step_1", "/b/z/step_1"]
    names = ["x/first", "y/first", "z", "first/step_1", "z/step_1"]
    assert list(short_names([Path(path) for path in paths]).values()) == names


@pytest.mark.parametrize(
    ("state", "age", "lock", "summary", "log"),
    [
        ("running", 0, 0, None, ""),
        ("running", 200, 0, None, ""),  # its lines take 20 s each
        ("stalled", 300, 0, None, ""),
        ("ended", 300, None, 0, "finished: 3 of 3 steps"),
        ("running", 0, 0, 300, ""),  # resumed after its end
        ("failed", 300, None, None, "step 3/9"),
        ("failed", 300, 300, None, "step 3/9"),  # killed
        ("stopped", 300, None, None, "stopped after step 3 of 9 (SIGTERM), with a checkpoint"),
    ],
)
def test_the_state_of_a_run(
    state: str, age: int, lock: int | None, summary: int | None, log: str, tmp_path: Path
) -> None:
    run = write_run(tmp_path / "run")
    log_step(run, 4, step_time=20.0)
    (run / "train.log").write_text(f"{log}\n")
    ages = {"run.lock": lock, "summary.json": summary, "metrics.jsonl": age}
    ages |= {"sessions.jsonl": age, "validation.jsonl": age}
    for name, seconds in ages.items():
        if seconds is None:
            (run / name).unlink(missing_ok=True)
            continue
        written = time.time() - seconds
        (run / name).touch()
        os.utime(run / name, (written, written))
    status = Status.read(run)
    assert (status.state, status.stop, status.last["step"]) == (state, 3, 4)


def test_curves_are_smoothed_and_follow_runs_that_train(tmp_path: Path) -> None:
    first, other = write_run(tmp_path / "first"), write_run(tmp_path / "other")
    runs = {"first": first, "other": other}
    drawn = traces("training loss", runs, smoothing=0.5)
    names = ["first, measured", "first", "other, measured", "other"]
    assert [trace["name"] for trace in drawn] == names
    assert [trace["name"] for trace in drawn if trace["showlegend"]] == ["first", "other"]
    assert len({trace["line"]["color"] for trace in drawn}) == 4
    measured, smooth, *_ = drawn
    assert smooth["x"] == [1, 2, 3] and measured["y"] == [1, 1 / 2, 1 / 3]
    # Weights 1 and 2; then 1, 2 and 4.
    means = [1, (1 + 2 / 2) / 3, (1 + 2 / 2 + 4 / 3) / 7]
    assert smooth["y"] == pytest.approx(means)
    assert len(traces("training loss", runs, smoothing=0.0)) == 2

    before = changes([first])
    assert before == changes([first]) != changes([other])
    log_step(first, 4)
    assert changes([first]) != before
    idle = traces("idle time: share of each rank", {"first": first}, smoothing=0.0)
    assert [trace["name"] for trace in idle] == ["first, rank 0", "first, rank 1", "first"]
    (by_timestep,) = traces("held-out loss by timestep", {"first": first}, smoothing=0.9)
    assert (by_timestep["x"], by_timestep["y"]) == ([0.25, 0.75], [0.4, 0.6])
    (held_out,) = traces("held-out loss", {"first": first}, smoothing=0.9)
    assert held_out["mode"] == "markers"  # one point is no line


def test_curves_of_torn_empty_and_damaged_runs(tmp_path: Path) -> None:
    """What a run has not measured is left out, and what cannot be read."""
    torn, nan, empty = (write_run(tmp_path / name) for name in ("torn", "nan", "empty"))
    with (torn / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "lo')
    (torn / "validation.jsonl").write_text('{"step": 3, "loss": 1, "loss_by_bin": 7}\n')
    lines = [json.loads(line) for line in (nan / "metrics.jsonl").read_text().splitlines()]
    text = "".join(json.dumps(line | {"loss": None}) + "\n" for line in lines)
    (nan / "metrics.jsonl").write_text(text)
    (empty / "metrics.jsonl").write_text("")
    for title in CURVES:
        runs = {"torn": torn, "nan": nan, "empty": empty}
        drawn = traces(title, runs, smoothing=0.0)
        labels = {trace["name"].partition(",")[0] for trace in drawn}
        expected = {"torn", "nan", "empty"}
        if title == "training loss":
            expected = {"torn"}
        elif title.startswith(("speed", "memory")):
            expected = {"torn", "nan"}
        elif title == "held-out loss by timestep":
            expected = {"nan", "empty"}
        assert labels == expected, title
    assert Status.read(empty).last == {} and Status.read(torn).last["step"] == 3


def test_configs_are_read_and_not_executed(tmp_path: Path) -> None:
    (tmp_path / "config.py").write_text("a = dict(b=1)\nc = {'d': {'e': (1, 2)}}\n")
    assert config_of(tmp_path) == {}
    (tmp_path / "config.py").write_text("lr = 0.1\nc = {'d': {'e': (1, 2)}}\n")
    assert config_of(tmp_path) == {"lr": 0.1, "c": {"d": {"e": (1, 2)}}}
    assert config_of(tmp_path / "nowhere") == {}


def test_validation_videos_are_rows_by_prompt_and_run(tmp_path: Path) -> None:
    for name, step in (("one", 3), ("one", 5), ("two", 3)):
        folder = tmp_path / name / "validation" / f"step_{step:08d}"
        folder.mkdir(parents=True)
        for file in ("000-<a>.json", "000-<a>.mp4"):
            (folder / file).touch()
    (tmp_path / "one" / "validation" / "step_x").mkdir()
    shown = views.videos({name: tmp_path / name for name in ("one", "two")})
    assert shown.count("<h4>000-&lt;a&gt; | ") == 2 and "<a>" not in shown
    assert shown.index("step 5") < shown.index("step 3") and shown.count("<video") == 3


def test_settings_of_a_video_sample_it_again(trained: Path, folders: Folders) -> None:
    values = {"ckpt": str(trained), "prompt": "a", "seed": "7", "num_frames": "9", "fps": "12"}
    values |= {"resolution": "28x24", "scheduler.cfg_scale": "2.5", "negative_prompt": "b"}
    values |= {"scheduler.guidance_interval": "0.25, 1"}
    work = checked(values, folders)
    settings = settings_of(facts_of(work.cfg, work.request))
    assert settings | values == settings and [*settings] == [*FIELDS]
    assert checked(settings, folders).request == work.request


def test_placed_references_are_drawn_as_they_are_inserted(trained: Path, folders: Folders) -> None:
    for name in ("a.png", "b.png"):
        Image.new("RGB", (24, 28), "red").save(folders.outputs / name)
    paths = [str(folders.outputs / name) for name in ("a.png", "b.png")]
    values = {"ckpt": str(trained), "prompt": "a", "reference_path": paths}
    work = checked(values | {"mask_strategy": ["0,0", "0,1,0,-1,1,0.5"]}, folders)
    assert placed_frames(work) == [[(0, 0.0), (-1, 1.0), (-1, 1.0), (-1, 1.0), (1, 0.5)]]
    shown = views.frames(placed_frames(work))
    assert "frame 0 by reference 1, frame 4 by reference 2" in shown
    assert shown.count("data-edit='1'") == 3 and "data-edit='0.5'>2<" in shown


def test_the_memory_of_a_model_is_free_before_the_next_one_is_loaded(
    trained: Path, folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU, where two might not fit: the cache of torch's allocator, too."""
    living, events = weakref.WeakSet[Any](), list[Any]()

    class Loaded:
        model = vae = text_encoder = None

        def __init__(self, *_: Any) -> None:
            self.cycle = self  # only the garbage collector frees it
            living.add(self)
            events.append("build")

    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: events.append(len(living)))
    monkeypatch.setattr(session, "build_pipeline", Loaded)
    monkeypatch.setattr(session, "Pipeline", lambda *_: None)
    ranks = session.Session(SequenceMesh(1), torch.device("cuda"), SimpleNamespace())  # type: ignore[arg-type]
    values = {"ckpt": str(trained), "prompt": "a"}
    first = checked(values, folders)
    os.utime(trained / "model.safetensors")
    for work in (first, first, checked(values, folders)):
        ranks._pipeline(work)
    assert events == [0, "build", 0, "build"]


@pytest.mark.slow
def test_what_cannot_be_served_is_an_error_of_three_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("gradio")
    for name in ("GRADIO_ANALYTICS_ENABLED", "GRADIO_TEMP_DIR", "HF_HUB_OFFLINE"):
        monkeypatch.setenv(name, "True")  # what is set here, pytest sets back
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    (tmp_path / "file").touch()
    for arguments, part in (
        (["nowhere"], "got 'nowhere', which is no folder"),
        (["runs", "--nproc", "0"], "got --nproc 0; expected at least 1"),
        (["runs", "--outputs", "file/studio"], "got --outputs 'file/studio', but"),
        (["runs", "--port", "70000"], "got --host 127.0.0.1 and --port 70000 to listen on"),
        (["runs", "--host", "192.0.2.1"], "got --host 192.0.2.1"),
    ):
        with pytest.raises(SystemExit) as end:
            main(["studio", *arguments])
        error = capsys.readouterr().err
        assert end.value.code == 2 and part in error, error
        assert "; expected" in error and error.count(";") >= 2, error


def test_without_gradio_the_studio_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("opensora_sp.common.importing.is_installed", lambda module: False)
    with pytest.raises(SystemExit):
        main(["studio"])
    error = capsys.readouterr().err
    assert "got opensora-sp studio, and no package gradio; expected the extra 'studio'" in error

"""Sampling: the same videos on any number of processes, output files, refused mistakes."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import combinations, product
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from PIL import Image
from ranks import run_ranks
from runs import CURVE, run_forked
from safetensors.torch import load_file, save_file

from opensora_sp.checkpoint.checkpoint_folder import CheckpointFolder
from opensora_sp.checkpoint.writer import Part, SaveJob, Saver
from opensora_sp.config import load_inference_config
from opensora_sp.data.video import read_video
from opensora_sp.parallel import CommLedger, SequenceMesh
from opensora_sp.sampling import read_prompts
from opensora_sp.sampling.requests import requests_of
from opensora_sp.sampling.run import _remaining_requests, _sample_all, build_pipeline, preflight

PROMPTS = [
    "a red circle",
    "a long caption of a blue square",
    "white",
    "a green triangle on a red background",
]


FRAMES = (5, 1, 16)
TOLERANCES = {"fp64": 1e-9, "fp32": 1e-4, "fp64, cached": 1e-9}
# The two steps in the middle reuse the residual of the first, and the last has no guidance.
CACHED = {"cache_threshold": 0.6, "cache_curve": CURVE, "guidance_interval": (0.3, 1.0)}
Found = dict[tuple[str, int], tuple[torch.Tensor, torch.Tensor, int]]


def sample_latents(folder: Path) -> Found:
    """Four steps with guidance 4, twice, by precision and frames; and elements sent in blocks."""
    mesh = SequenceMesh(dist.get_world_size() if dist.is_initialized() else 1)
    found = {}
    for precision, num_frames in product(TOLERANCES, FRAMES):
        values = {"precision": precision[:4], "num_frames": num_frames}
        values["scheduler.num_sampling_steps"] = 4
        if "cached" in precision:
            values |= {f"scheduler.{key}": option for key, option in CACHED.items()}
        cfg = load_inference_config(folder / "sample.py", values=values)
        assert cfg.scheduler["cfg_scale"] == 4
        pipeline = build_pipeline(cfg, folder, mesh, torch.device("cpu"))
        request = [replace(requests_of(cfg, PROMPTS[:1])[0], place=5)]
        with CommLedger() as counter:
            first = pipeline.latents(request)
        sent = counter.elements["switch", "forward"] + counter.elements["heads", "forward"]
        found[precision, num_frames] = (first, pipeline.latents(request), sent)

    return found


@pytest.fixture(scope="module")
def on(trained: Path) -> Callable[[int], list[Found]]:
    """What each of so many processes finds; they are started once."""
    return cache(
        lambda ranks: (
            [sample_latents(trained)] if ranks == 1 else run_ranks(ranks, sample_latents, trained)
        )
    )


@pytest.mark.parametrize("num_ranks", [2, 3, pytest.param(4, marks=pytest.mark.slow)])
def test_latents_do_not_depend_on_the_number_of_processes(
    on: Callable[[int], list[Found]], num_ranks: int
) -> None:
    (alone,) = on(1)
    for of_rank, key in product(on(num_ranks), alone):
        precision, num_frames = key
        ours, again, _ = of_rank[key]
        wanted = alone[key][0]
        assert ours.shape[2] == num_frames
        assert ours.dtype == (torch.float32 if precision == "fp32" else torch.float64)
        assert torch.equal(ours, again)  # bitwise for the same number of processes
        assert (ours - wanted).abs().max() <= TOLERANCES[precision] * wanted.abs().max()

    for num_frames in FRAMES:
        all_steps, cached = (alone[name, num_frames][0] for name in ("fp64", "fp64, cached"))
        assert (cached - all_steps).abs().max() > 1e-4 * all_steps.abs().max()


def test_guidance_of_one_prompt_on_2_processes_moves_no_token(
    on: Callable[[int], list[Found]],
) -> None:
    """Guidance doubles the batch: two ranks take a half each. Three have to exchange tokens."""
    for ranks, has_to_send in ((2, False), (3, True)):
        for of_rank in on(ranks):
            guided = (sent for (name, _), (_, _, sent) in of_rank.items() if "cached" not in name)
            assert all(bool(sent) == has_to_send for sent in guided)


def test_weights_that_are_not_those_of_the_manifest_are_refused(
    trained: Path, tmp_path: Path
) -> None:
    """Also where rank 0 alone looks at them; of a checkpoint, what is not read is not checked."""
    checkpoint = tmp_path / "step_00000001"
    small = {"ema/config.json": (trained / "config.json").read_bytes(), "state.json": b"{}"}
    folder = CheckpointFolder(checkpoint, small)
    state = load_file(trained / "model.safetensors")
    parts = {name: Part.whole(tensor) for name, tensor in state.items()}
    Saver().save(SaveJob(folder, {"ema/model.safetensors": parts}))
    cfg = load_inference_config(
        trained / "sample.py", values={"ckpt": str(tmp_path), "prompts": ["a"]}
    )
    (checkpoint / "state.json").write_text("[]")
    requests, weights = preflight(cfg)
    manifest = json.loads((checkpoint / "manifest.json").read_text())

    _, digest = _remaining_requests(cfg, requests, weights, tmp_path)
    assert digest == manifest["files"]["ema/model.safetensors"]["sha256"]

    with (checkpoint / "ema" / "model.safetensors").open("r+b") as file:
        file.seek(-3, 2)
        file.write(b"x")

    with pytest.raises(ValueError, match="got a damaged checkpoint: .*ema/model.safetensors has"):
        _remaining_requests(cfg, requests, weights, tmp_path)


def test_noise_depends_on_the_prompts_place_alone(trained: Path) -> None:
    cfg = load_inference_config(trained / "sample.py", ["precision=fp64"])
    pipeline = build_pipeline(cfg, trained, SequenceMesh(1), torch.device("cpu"))
    requests = requests_of(cfg, PROMPTS)
    batched = pipeline.latents(requests)
    for i, request in enumerate(requests):
        torch.testing.assert_close(batched[i], pipeline.latents([request])[0], rtol=1e-9, atol=1e-9)
    changes = (dict(place=7), dict(sample=1), dict(seed=7))
    other_noise = [replace(requests[0], **change) for change in changes]
    found = [batched[0], *(pipeline.latents([request])[0] for request in other_noise)]
    assert not any(torch.allclose(one, other) for one, other in combinations(found, 2))


@pytest.mark.parametrize(
    ("ranks", "groups"), [(2, "1 group"), pytest.param(4, "2 groups", marks=pytest.mark.slow)]
)
def test_the_script_writes_a_video_and_a_sheet_for_every_prompt(
    trained: Path, tmp_path: Path, ranks: int, groups: str
) -> None:
    (tmp_path / "prompts.txt").write_text("\n".join(PROMPTS[1:]) + "\n\n")
    done = run_forked(
        *("scripts/inference.py", trained / "sample.py", "--ckpt", trained),
        *("--prompt", PROMPTS[0], "--prompts", tmp_path / "prompts.txt"),
        *("--outputs", tmp_path / "out", "--sp-size", "2"),
        ranks=ranks,
    )

    assert done.returncode == 0, done.stdout + done.stderr
    reported = f"4 videos on {ranks} processes: {groups} of 2 (sp_size 2), as asked for"
    assert reported in done.stderr
    assert done.stderr.count(" wrote ") == len(PROMPTS), done.stderr  # of all ranks
    assert f"done: 4 videos in {tmp_path / 'out'}" in done.stderr

    videos = sorted((tmp_path / "out").glob("*.mp4"))
    assert [v.name for v in videos][:2] == [
        "000-a-red-circle.mp4",
        "001-a-long-caption-of-a-blue-square.mp4",
    ]
    assert len(videos) == len(PROMPTS)

    for video, prompt in zip(videos, PROMPTS, strict=True):
        frames, fps = read_video(video, num_frames=5)
        assert frames.shape == (5, 28, 24, 3) and fps == 8
        assert Image.open(video.with_suffix(".png")).width > 100
        assert json.loads(video.with_suffix(".json").read_text())["prompt"] == prompt


def sample_on_hosts(folder: Path, outputs: Path, hosts: list[int], sp_size: int) -> int:
    """The number of videos that this rank has written."""
    os.environ["LOCAL_WORLD_SIZE"] = str(hosts[dist.get_rank()])
    values = {"ckpt": str(folder), "prompts": PROMPTS[:1], "outputs": str(outputs)}
    cfg = load_inference_config(folder / "sample.py", values=values)
    cfg = cfg.model_copy(update={"sp_size": sp_size or None})
    return len(_sample_all(cfg, *preflight(cfg), torch.device("cpu")))


@pytest.mark.parametrize("sp_size", [0, 2])
def test_hosts_may_have_different_numbers_of_processes(
    trained: Path, tmp_path: Path, sp_size: int
) -> None:
    """Ranks that know their own host's alone would form other groups, or use other links.

    By two on a host, no pair spans hosts; by one on a host, each does.
    """
    written = run_ranks(4, sample_on_hosts, trained, tmp_path / "out", [2, 2, 1, 1], sp_size)
    assert sum(written) == 1
    assert len(list((tmp_path / "out").glob("*.mp4"))) == 1


def test_prompt_files(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\n\n two \n")
    (tmp_path / "a.csv").write_text('prompt,seed\n"one, two",1\nthree,2\n')
    assert [one.prompt for one in read_prompts(tmp_path / "a.txt")] == ["one", "two"]
    rows = read_prompts(tmp_path / "a.csv")
    assert [(row.prompt, row.seed) for row in rows] == [("one, two", 1), ("three", 2)]

    (tmp_path / "windows.txt").write_bytes("one\r\ntwo\u2028three\r\n".encode("utf-8-sig"))
    rows = read_prompts(tmp_path / "windows.txt")
    assert [row.prompt for row in rows] == ["one", "two\u2028three"]
    (tmp_path / "windows.csv").write_bytes("prompt,seed\r\none,1\r\n".encode("utf-8-sig"))
    (row,) = read_prompts(tmp_path / "windows.csv")
    assert (row.prompt, row.seed) == ("one", 1)

    (tmp_path / "latin.txt").write_bytes("caf\xe9".encode("latin-1"))
    (tmp_path / "empty.txt").write_text("\n")
    (tmp_path / "b.csv").write_text("words\na\n")
    for name, message in [
        ("none.txt", "which is not a file of prompts"),
        ("empty.txt", "without prompts"),
        ("latin.txt", "got prompts file .*which cannot be read .*expected UTF-8"),
        ("b.csv", r"with the columns \['words'\]"),
        ("a.json", "which is not a file of prompts"),
    ]:
        with pytest.raises(ValueError, match=message):
            read_prompts(tmp_path / name)


def test_what_cannot_work_is_refused(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    good = load_inference_config(
        trained / "sample.py", values={"ckpt": str(trained), "prompts": ["a"]}
    )

    assert preflight(good) == (requests_of(good), trained)
    for change, message in [
        ({"prompts": []}, "got no prompts"),
        ({"ckpt": None}, "got no checkpoint"),
        ({"ckpt": str(tmp_path)}, "which holds no weights"),
        ({"sp_size": 2}, "got sp_size 2 with 3 processes"),
        ({"model": {**good.model, "depth": 3}}, r"another model \(depth is 2 there, 3 here\)"),
    ]:
        with pytest.raises(ValueError, match=message):
            preflight(good.model_copy(update=change))

    monkeypatch.setenv("WORLD_SIZE", "1")
    (tmp_path / "config.json").write_text((trained / "config.json").read_text())
    save_file({"rope.freqs": torch.zeros(4)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="got weights of another model .*missing x_embedder.proj"):
        build_pipeline(good, tmp_path, SequenceMesh(1), torch.device("cpu"))

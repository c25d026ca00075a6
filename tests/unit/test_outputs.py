"""Requests and output files: prompts with sizes, samples, images, GIFs, resuming."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections import Counter
from itertools import chain, product
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from opensora_sp.cli.sample import parse
from opensora_sp.config import InferenceConfig, load_inference_config
from opensora_sp.config.sections import PromptOptions
from opensora_sp.data.video import read_frames
from opensora_sp.models.layers import CaptionEmbedder, CrossAttention
from opensora_sp.parallel import SequenceMesh
from opensora_sp.sampling import outputs, read_prompts, sample
from opensora_sp.sampling.group_choice import choose_groups
from opensora_sp.sampling.outputs import Output, fingerprint, write_batch
from opensora_sp.sampling.requests import batches_of, requests_of
from opensora_sp.sampling.run import build_pipeline, preflight

TABLE = """prompt,num_frames,resolution,seed,fps,negative_prompt
a red circle,,,,,
"white, bright",1,,7,,
a blue square,3,32x16,7,4,red
"""


@pytest.fixture(scope="module")
def asked(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> InferenceConfig:
    """A run that has written what a prompt file asks for, twice each, as GIFs."""
    folder = tmp_path_factory.mktemp("asked")
    (folder / "prompts.csv").write_text(TABLE)
    command = [str(trained / "sample.py"), "--ckpt", str(trained)]
    command += ["--prompts", str(folder / "prompts.csv"), "--outputs", str(folder / "out")]
    cfg = parse([*command, "--gif", "--num-samples", "2", "--num-sampling-steps", "2"])
    sample(cfg)
    return cfg


def facts(cfg: InferenceConfig, name: str) -> dict:
    return json.loads((Path(cfg.outputs) / f"{name}.json").read_text())


def test_each_prompt_has_its_size_seed_and_samples(asked: InferenceConfig, trained: Path) -> None:
    folder = Path(asked.outputs)
    names = ["000-a-red-circle", "001-white-bright", "002-a-blue-square"]
    stems = [name + suffix for name, suffix in product(names, ("", "-s1"))]
    media = {f"{stem}.{'png' if '001' in stem else 'gif'}" for stem in stems}
    sheets, records = {f"{stem}.png" for stem in stems}, {f"{stem}.json" for stem in stems}

    assert {path.name for path in folder.iterdir()} == media | sheets | records
    assert read_frames(folder / "000-a-red-circle.gif").shape == (5, 28, 24, 3)
    assert np.asarray(Image.open(folder / "001-white-bright.png")).shape == (28, 24, 3)
    assert read_frames(folder / "002-a-blue-square-s1.gif").shape == (3, 32, 16, 3)
    assert Image.open(folder / "002-a-blue-square.gif").info["duration"] == 250

    one, other = (np.asarray(Image.open(folder / f"001-white-bright{s}.png")) for s in ("", "-s1"))
    assert (one != other).any()
    reported = facts(asked, "002-a-blue-square-s1")
    wanted = dict(prompt="a blue square", negative_prompt="red", seed=7, sample=1)
    wanted |= dict(num_frames=3, image_size=[32, 16], mask_strategy=None, loop=1)
    assert wanted.items() <= reported.items()
    assert reported["config"]["scheduler"]["num_sampling_steps"] == 2

    weights = (trained / "model.safetensors").read_bytes()
    assert reported["checkpoint_sha256"] == hashlib.sha256(weights).hexdigest()


def test_a_seed_of_its_own_gives_the_same_video_wherever_the_prompt_stands(
    asked: InferenceConfig,
) -> None:
    requests = requests_of(asked, [PromptOptions(prompt="other"), *asked.prompts])
    shape = (3, 2, 4, 4)
    before, after = requests_of(asked), requests_of(asked, asked.prompts[::-1])
    noise = {r.prompt.text: r.noise(shape, "sample", loop=0) for r in before if not r.sample}
    for r in after + requests:
        if not r.sample and r.prompt.text != "other":
            assert torch.equal(noise[r.prompt.text], r.noise(shape, "sample", loop=0)) == (
                r.seed == 7
            )
    different = [r.noise(shape, "sample", loop=loop) for r, loop in product(before[:2], (0, 1))]
    assert len({one.sum().item() for one in different}) == 4


def test_batches_hold_one_shape_and_leave_no_group_without_work(asked: InferenceConfig) -> None:
    requests = requests_of(asked, [*("abcde"), PromptOptions(prompt="f", num_frames=1)])[::2]
    assert [len(batch) for batch in batches_of(requests, 4)] == [4, 1, 1]
    assert [len(batch) for batch in batches_of(requests, 4, groups=3)] == [2, 2, 1, 1]
    for batch in batches_of(requests, 4):
        assert len({request.shape for request in batch}) == 1


def test_progress_is_logged_where_no_terminal_shows_a_bar(
    trained: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("opensora_sp.sampling.run.REPORT_EVERY", 0.0)
    command = [str(trained / "sample.py"), "--ckpt", str(trained), "--num-sampling-steps", "2"]
    options = ["--outputs", str(tmp_path), "--prompt", "a", "--prompt", "b", "--num-frames", "1"]
    with caplog.at_level("INFO", "opensora_sp"):
        sample(parse([*command, *options]))
    reports = re.findall(r"sampling step (\d) of 2, \d+ s left", caplog.text)
    assert reports == ["1", "2"]


def test_an_odd_size_is_refused_where_the_file_would_have_another(trained: Path) -> None:
    command = [str(trained / "sample.py"), "--ckpt", str(trained), "--prompt", "a"]
    with pytest.raises(ValueError, match="got frames of 65x65 .*; expected even sides.*64x64"):
        preflight(parse([*command, "--resolution", "65x65"]))

    named = ["--resolution", "144p", "--aspect-ratio", "9:21"]
    for options in (["--gif"], ["--num-frames", "1"], named):
        size = [] if options == named else ["--resolution", "65x65"]
        assert preflight(parse([*command, *size, *options]))[0]


@pytest.mark.parametrize("text", ["", " ", '{"mask_strategy": "0"}'])
def test_a_prompt_without_text_is_refused(text: str, trained: Path) -> None:
    command = [str(trained / "sample.py"), "--ckpt", str(trained), "--prompt", text]
    with pytest.raises(ValueError, match="got the prompt .*, which has no text; expected some;"):
        preflight(parse(command))


def test_skip_existing_continues_where_a_run_stopped(
    asked: InferenceConfig, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level("INFO", logger="opensora_sp")
    folder, again = Path(asked.outputs), asked.model_copy(update={"skip_existing": True})
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert sample(again) == []
    assert "nothing left to do" in caplog.text

    (folder / "001-white-bright.json").unlink()  # as if it had been interrupted
    (folder / "000-a-red-circle.gif").unlink()
    assert {path.name for path in sample(again)} == {"001-white-bright.png", "000-a-red-circle.gif"}

    untouched = [path for path in before if path.stat().st_mtime_ns == before[path]]
    assert len(untouched) == len(before) - 5
    (folder / "000-a-red-circle.gif").unlink()
    update = {"format": "mp4", "prompts": again.prompts[:1], "num_samples": 1}
    assert sample(again.model_copy(update=update))
    assert (folder / "000-a-red-circle.mp4").is_file()
    assert "000-a-red-circle.mp4 is of another request (other format)" in caplog.text

    sample(again)
    assert not (folder / "000-a-red-circle.mp4").is_file()
    caplog.clear()
    changed = [*again.prompts[:2], again.prompts[2].model_copy(update={"fps": 8.0})]
    written = sample(again.model_copy(update={"prompts": changed}))
    assert {path.name for path in written} == {"002-a-blue-square.gif", "002-a-blue-square-s1.gif"}
    assert "002-a-blue-square.gif is of another request (other fps)" in caplog.text


def test_a_changed_reference_makes_another_request(
    asked: InferenceConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="opensora_sp")
    reference = tmp_path / "first.png"
    Image.new("RGB", (24, 28), "red").save(reference)
    prompt = PromptOptions(prompt="a", num_frames=1, reference_path=str(reference))
    changes = {"prompts": [prompt], "num_samples": 1, "skip_existing": True}
    cfg = asked.model_copy(update={**changes, "outputs": str(tmp_path / "out")})
    (video,) = sample(cfg)
    digest = hashlib.sha256(reference.read_bytes()).hexdigest()
    assert facts(cfg, "000-a")["input_sha256"] == {str(reference): digest}

    # The same bytes at another time are no difference.
    os.utime(reference, (0, 0))
    assert sample(cfg) == []

    Image.new("RGB", (24, 28), "blue").save(reference)
    assert sample(cfg) == [video]
    assert "000-a.png is of another request (other input_sha256" in caplog.text


def test_text_is_encoded_once_for_all_steps_and_samples(trained: Path) -> None:
    cfg = load_inference_config(
        trained / "sample.py", values={"num_samples": 2, "loop": 3, "condition_frame_length": 1}
    )
    pipeline = build_pipeline(cfg, trained, SequenceMesh(1), torch.device("cpu"))
    texts, calls = [], Counter()
    encode = pipeline.text_encoder.encode
    pipeline.text_encoder.encode = lambda given: (texts.append(given), encode(given))[1]
    for module in pipeline.model.modules():
        part = {CaptionEmbedder: "y_proj", CrossAttention: "kv_linear"}.get(type(module))
        if part:
            getattr(module, part).register_forward_hook(lambda *_, part=part: calls.update([part]))

    pipeline.looped(requests_of(cfg, ["a red circle"]))
    assert texts == [["a red circle"]]  # two samples, three loops of four steps
    assert calls == {"y_proj": 1, "kv_linear": 2 * cfg.model["depth"]}

    pipeline.looped(requests_of(cfg, ["|0|a red circle|1|white"]))
    assert texts[1:] == [["a red circle"], ["white"]] and calls["y_proj"] == 3


def test_guidance_of_scale_one_costs_no_second_half(trained: Path) -> None:
    found = {}
    for scale in (1.0, 1.0 + 1e-9):
        cfg = load_inference_config(
            trained / "sample.py", [f"scheduler.cfg_scale={scale}", "precision=fp64"]
        )
        pipeline, sizes = build_pipeline(cfg, trained, SequenceMesh(1), torch.device("cpu")), []
        pipeline.model.register_forward_pre_hook(
            lambda _, args, sizes=sizes: sizes.append(len(args[0]))
        )
        found[scale] = pipeline.latents(requests_of(cfg, ["white"]))
        assert set(sizes) == {1 if scale == 1 else 2}
    torch.testing.assert_close(*found.values(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("prompts", "world", "chosen"),
    [
        (["a"], 2, 2),  # guidance: a half each, nothing sent
        (["a"], 8, 8),
        (["a", "b"], 4, 2),  # as fast as 4, with fewer to wait for
        (list("abcdefgh"), 4, 1),
        (list("abcde"), 4, 4),  # replicas would wait for the fifth
        # An image takes the host as long on a third of the tokens.
        ([PromptOptions(prompt="a", num_frames=1)], 3, 1),
    ],
)
def test_replicas_and_sequence_parallelism_are_mixed_by_estimate(
    prompts: list, world: int, chosen: int
) -> None:
    cfg = load_inference_config("configs/stdit3/inference/64x512x512.py")
    requests = requests_of(cfg, prompts)
    groups = choose_groups(cfg, requests, world)
    assert groups.sp_size == chosen and len(groups.batches) == world // chosen
    batches = chain.from_iterable(groups.batches)
    places = [request.index for request in chain.from_iterable(batches)]
    assert sorted(places) == list(range(len(prompts)))
    count = world // chosen
    assert f"{count} group{'s' * (count > 1)} of {chosen} (sp_size {chosen}), the" in groups.why
    asked_for = choose_groups(cfg.model_copy(update={"sp_size": world}), requests, world)
    assert asked_for.sp_size == world and "as asked for" in asked_for.why


def test_bad_rows_of_prompt_files_are_refused_by_line(trained: Path, tmp_path: Path) -> None:
    for row, message in [
        ("prompt,sed\na,1\n", r"line 2:\n  got the unknown key 'sed'; expected a known one; did"),
        ("prompt,seed\na,1\nb,x\n", r"line 3:\n  got seed = \"x\""),
        ("prompt,num_frames\na,5s\n", r"got num_frames '5s'; expected a positive number or one of"),
        ("prompt,resolution\na,big\n", "expected 'HxW' or a number"),
        (
            "prompt,resolution,aspect_ratio\na,240p,9:15\n",
            "got aspect_ratio '9:15' with resolution '240p'",
        ),
        ("prompt,aspect_ratio\na,9:16\n", "without resolution for 'a'"),
        ("prompt,height\na,16\n", "unknown key 'height'; expected a known one"),
        ("prompt,seed\na,1,2\n", "got more cells than columns"),
    ]:
        (tmp_path / "bad.csv").write_text(row)
        with pytest.raises(ValueError, match=message):
            read_prompts(tmp_path / "bad.csv")

    (tmp_path / "good.csv").write_text(
        "text,num_frames,resolution,aspect_ratio\na,2s,240p,9:16\nb,,4x8,\n"
    )
    wide, small = read_prompts(tmp_path / "good.csv")

    assert (wide.num_frames, wide.size) == (51, (240, 426))
    assert (small.num_frames, small.size) == (None, (4, 8))


def test_flags_override_the_config(trained: Path) -> None:
    flags = ["--resolution", "240p", "--aspect-ratio", "9:16", "--num-frames", "4s"]
    flags += ["--fps", "12", "--cfg-scale", "2", "--sp-size", "3"]
    texts = ["--prompt", "a = b", "--negative-prompt", "none"]
    cfg = parse([str(trained / "sample.py"), *flags, *texts])

    assert (cfg.size, cfg.num_frames, cfg.fps) == ((240, 426), 102, 12)
    assert (cfg.scheduler["cfg_scale"], cfg.sp_size) == (2, 3)
    assert cfg.prompts[0].prompt == "a = b" and cfg.negative_prompt == "none"
    with pytest.raises(ValueError, match="got aspect_ratio '9:16' with image_size"):
        parse([str(trained / "sample.py"), "--aspect-ratio", "9:16"])


def test_a_size_that_a_model_has_no_positions_for_is_refused_before_it_is_loaded(
    trained: Path,
) -> None:
    cfg = load_inference_config(trained / "sample.py", values={"prompts": ["a"]})
    model = {**cfg.model, "type": "STDiT", "input_size": (5, 8, 6)}
    cfg = cfg.model_copy(update={"ckpt": str(trained), "model": model})

    with pytest.raises(ValueError, match=r"latents of \(5, 7, 6\), for 'a'; expected the model's"):
        preflight(cfg)


def test_the_fingerprint_is_that_of_all_files(tmp_path: Path) -> None:
    (tmp_path / "ema").mkdir()
    for name in ("a.safetensors", "b.safetensors"):
        (tmp_path / "ema" / name).write_bytes(name.encode())
    index = tmp_path / "ema" / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"one": "a.safetensors", "two": "b.safetensors"}}))
    first = hashlib.sha256(b"a.safetensors").hexdigest()
    assert fingerprint(tmp_path / "ema" / "a.safetensors") == first
    both = fingerprint(tmp_path / "ema")
    (tmp_path / "ema" / "b.safetensors").write_bytes(b"other")
    assert fingerprint(tmp_path / "ema") not in (both, first)
    (tmp_path / "manifest.json").write_text("not of a checkpoint")
    assert fingerprint(tmp_path / "ema" / "a.safetensors") == first


def test_what_goes_wrong_in_a_file_leaves_nothing_and_is_what_is_reported(
    asked: InferenceConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: outputs.Images, frames: np.ndarray | None = None) -> None:
        self.path.touch()
        raise OSError("no space left" if frames is not None else "cannot be closed")

    monkeypatch.setattr(outputs.Images, "add", full)
    monkeypatch.setattr(outputs.Images, "close", full)
    with pytest.raises(OSError, match="no space left"):
        update = {"outputs": str(tmp_path / "out"), "prompts": asked.prompts[:1]}
        sample(asked.model_copy(update=update))
    assert list((tmp_path / "out").iterdir()) == []


def test_where_nothing_can_be_written_is_reported_first(
    asked: InferenceConfig, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    for name in ("file", "file/out"):
        with pytest.raises(ValueError, match=rf"got outputs '.*{name}', but .*file is no folder"):
            preflight(asked.model_copy(update={"outputs": str(tmp_path / name)}))
    preflight(asked.model_copy(update={"outputs": str(tmp_path / "new" / "out")}))
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("format", ["mp4", "gif"])
def test_a_video_that_cannot_be_written_ends_a_batch_only_where_errors_are_raised(
    asked: InferenceConfig, tmp_path: Path, format: str
) -> None:
    """The partial file of the first video has no room; its contact sheet, that of the second."""
    cfg = asked.model_copy(update={"num_samples": 1, "format": format})
    requests = requests_of(cfg, ["a", "b", "c"])
    for name in (f"000-a.{os.getpid()}.{format}", f"001-b.{os.getpid()}.png"):
        (tmp_path / f".{name}").symlink_to("/dev/full")

    decoded = [(video, np.full((2, 8, 8, 3), video, np.uint8)) for video in (0, 1, 2, 0, 1, 2)]
    pipeline = SimpleNamespace(
        cfg=cfg, num_frames=lambda request: 4, frames=lambda *arguments: iter(decoded)
    )
    mesh = SimpleNamespace(rank=0, sp_rank=0, sp_size=1)

    errors: list[str] = []
    written = write_batch(pipeline, requests, [], mesh, tmp_path, None, errors)
    assert [path.name for path in written] == [f"002-c.{format}"]
    assert len(errors) == 2 and all("No space left on device" in error for error in errors)
    assert not [path.name for path in tmp_path.iterdir() if path.name.startswith(".")]

    (tmp_path / f".000-a.{os.getpid()}.{format}").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left on device"):
        write_batch(pipeline, requests, [], mesh, tmp_path, None)


def test_what_changes_a_video_makes_it_another_request(
    asked: InferenceConfig, tmp_path: Path
) -> None:
    (request,) = requests_of(asked.model_copy(update={"num_samples": 1}), ["a"])
    facts = outputs.facts_of(asked, request)
    output = Output(tmp_path, request, facts, 1)
    output.add(np.zeros((1, 8, 8, 3), np.uint8))
    output.finish()

    assert outputs.differences(tmp_path, request, facts) == []
    for change in ({"convert": ("pred_sigma",)}, {"condition_frame_edit": 0.5}):
        changed = outputs.facts_of(asked.model_copy(update=change), request)
        assert len(outputs.differences(tmp_path, request, changed)) == 1

    output.path.with_suffix(".json").write_text("[]")
    assert outputs.differences(tmp_path, request, facts) == ["a JSON that cannot be read"]


PROMPTS = ["A 3D model of a house.", "waves, in the style of Ukiyo", "A 3D model of a house."]


def parse_vbench(trained: Path, folder: Path, *options: str) -> InferenceConfig:
    (folder / "all_dimension.txt").write_text("\n".join(PROMPTS) + "\n")
    command = [str(trained / "sample.py"), "--vbench-prompts", str(folder / "all_dimension.txt")]
    return parse([*command, "--outputs", str(folder / "out"), *options])


def test_videos_of_vbench_have_the_names_that_it_looks_for(trained: Path, tmp_path: Path) -> None:
    """``PROMPT-INDEX.mp4``, in a folder without other files, as it takes each for a video."""
    cfg = parse_vbench(trained, tmp_path, "--cfg-options", "aes=6.5")
    requests = requests_of(cfg)
    assert [request.name for request in requests] == [
        f"{prompt}-{index}" for prompt, index in product(PROMPTS[:2], range(5))
    ]
    assert requests[1].prompt.text == "A 3D model of a house. aesthetic score: 6.5."
    assert requests_of(parse_vbench(trained, tmp_path, "--num-samples", "2"))[1].sample == 1

    (tmp_path / "out").mkdir()
    facts = outputs.facts_of(cfg, requests[1])
    output = Output(tmp_path / "out", requests[1], facts, 2)
    output.add(np.zeros((2, 8, 8, 3), np.uint8))
    written = output.finish()
    assert written == tmp_path / "out" / "videos" / "A 3D model of a house.-1.mp4"
    assert outputs.differences(tmp_path / "out", requests[1], facts) == []
    found = {str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*.*")}
    name = "A 3D model of a house.-1"
    assert found == {f"videos/{name}.mp4", f"{name}.png", f"{name}.json"}


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        (["a cat", "a cat"], "got the file name 'a cat-0' twice with file_names='prompt'"),
        (["a cat/dog"], "got the file name 'a cat/dog-0' of 11 bytes"),
        (["a" * 200], "expected different names without '/' of at most 200 bytes"),
    ],
)
def test_prompts_that_are_no_file_names_are_refused(
    trained: Path, prompts: list[str], message: str
) -> None:
    cfg = parse([str(trained / "sample.py"), "--cfg-options", "file_names=prompt"])
    with pytest.raises(ValueError, match=message):
        requests_of(cfg, prompts)

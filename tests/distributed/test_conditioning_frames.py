"""Sampling with conditioning frames: image to video, both ends, loops; on several ranks; errors."""

from __future__ import annotations

from itertools import chain
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from PIL import Image
from ranks import run_ranks

from opensora_sp.config import load_inference_config
from opensora_sp.config.sections import PromptOptions
from opensora_sp.data.toy import toy_clip
from opensora_sp.data.video import write_video
from opensora_sp.parallel import SequenceMesh
from opensora_sp.sampling.decoding import collected
from opensora_sp.sampling.requests import requests_of
from opensora_sp.sampling.run import build_pipeline, preflight

BOTH_ENDS, EDIT = "0,0,0,0,1;0,1,0,-1,1", "0,1,0,1,2,0.5"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """An image and a video."""
    folder = tmp_path_factory.mktemp("references")
    Image.fromarray(toy_clip(0, 1).draw(1, 40)[0]).save(folder / "image.png")
    write_video(folder / "video.mp4", toy_clip(0, 2).draw(6, 32), fps=8)
    return [folder / "image.png", folder / "video.mp4"]


def sample(folder: Path, files: list[Path]) -> list[list[torch.Tensor]]:
    """Latents of all loops: both ends conditioned, edited frames, one of two prompts without."""
    mesh = SequenceMesh(dist.get_world_size() if dist.is_initialized() else 1)
    options = [
        "precision=fp64",
        "scheduler.num_sampling_steps=10",
        "loop=2",
        "condition_frame_length=2",
    ]
    cfg = load_inference_config(folder / "sample.py", options)
    pipeline = build_pipeline(cfg, folder, mesh, torch.device("cpu"))
    paths = ";".join(map(str, files))
    prompts = [
        *(
            dict(prompt="|0|a red circle|1|white", reference_path=paths, mask_strategy=s)
            for s in (BOTH_ENDS, EDIT)
        ),
        dict(prompt="white"),
    ]
    requests = requests_of(cfg, [PromptOptions(**prompt) for prompt in prompts])
    found = [pipeline.looped(batch) for batch in (requests[:1], requests[1:2], requests[::2])]
    references = pipeline.conditioning(requests[0].prompt, cfg.size).references
    decoded = collected(pipeline.frames(requests[:1], found[0], mesh), 1)
    return [*found, references, [torch.from_numpy(decoded[0]), pipeline.num_frames(requests[0])]]


@pytest.fixture(scope="module")
def alone(trained: Path, files: list[Path]) -> list[list[torch.Tensor]]:
    return sample(trained, files)


def test_conditioning_frames_stay_and_loops_continue(alone: list[list[torch.Tensor]]) -> None:
    both_ends, edited, batched, (image, video), (decoded, num_frames) = alone
    first, second = both_ends
    assert torch.equal(first[0, :, 0], image[:, 0]) and torch.equal(first[0, :, -1], video[:, 0])
    assert not torch.equal(first[0, :, 1], image[:, 0])
    assert torch.equal(second[0, :, :2], first[0, :, -2:]) and not torch.equal(
        second[0, :, 2:], first[0, :, 2:]
    )
    kept, free = ((z[0, :, 1:3] - video[:, :2]).norm() for z in (edited[0], first))
    assert 0 < kept < free  # edited: neither kept nor lost
    # A neighbour changes nothing.
    torch.testing.assert_close(batched[0][:1], first, rtol=0, atol=1e-9)
    assert decoded.shape == (5 + 5 - 2, 28, 24, 3) and num_frames == 8


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_any_number_of_processes(
    trained: Path,
    files: list[Path],
    alone: list[list[torch.Tensor]],
    num_ranks: int,
) -> None:
    for found in run_ranks(num_ranks, sample, trained, files):
        for ours, theirs in zip(chain(*found[:3]), chain(*alone[:3]), strict=True):
            assert (ours - theirs).abs().max() <= 1e-9 * theirs.abs().max()


def test_what_cannot_be_given_is_refused(
    trained: Path, files: list[Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "text.png").write_text("no image")
    image, broken = files[0], tmp_path / "text.png"

    def strategy(text: str) -> str:
        return f'a cat{{"reference_path": "{image}", "mask_strategy": "{text}"}}'

    cfg = load_inference_config(trained / "sample.py", values={"ckpt": str(trained)})
    for text, reported in [
        ('a cat{"reference_path": "missing.png"}', "got reference 'missing.png', which is not a"),
        (f'a cat{{"reference_path": "{broken}"}}', "which cannot be decoded"),
        ('a cat{"mask_strategy": "0"}', "with 0 references; expected a reference below"),
        ('a cat{"mask": "0"}', "expected text, then at most a JSON object"),
        ("a cat{broken", "expected text, then at most a JSON object"),
        (strategy("0,1"), "with 1 references; expected a reference below"),
        (strategy("0,0,0,5"), "for a video of 5 latent frames; expected a first frame from -5 to"),
        (strategy("1"), "for loop 1 of a video with 1 of them"),
    ]:
        with pytest.raises(ValueError) as error:
            preflight(cfg.model_copy(update={"prompts": [text]}))
        assert reported in str(error.value)
    looped = cfg.model_copy(update={"prompts": ["a cat"], "loop": 2, "condition_frame_length": 5})
    with pytest.raises(ValueError, match="expected fewer than the 5 latent frames of a part"):
        preflight(looped)
    preflight(
        cfg.model_copy(
            update={"prompts": [strategy("1,1,-1")], "loop": 2, "condition_frame_length": 1}
        )
    )
    assert caplog.messages[-1].endswith("image.png of 40x40 pixels is resized and cropped to 28x24")

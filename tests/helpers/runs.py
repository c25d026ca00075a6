"""Tiny training runs, started as users start them."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ranks import HOST, fork_ranks, free_port, torchrun_environment

from opensora_sp.data.toy import toy_clip
from opensora_sp.data.video import write_video

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
CONFIG = """
num_frames = 5
image_size = (28, 24)
vae = dict(type="PatchPoolVAE", pool=(1, 4, 4))
text_encoder = dict(type="HashedBagOfWords", width=8, max_length=12)
model = dict(
    type="STDiT3", in_channels=3, caption_channels=8, model_max_length=12, hidden_size=24,
    depth=2, num_heads=3, mlp_ratio=2.0, pred_sigma=False, class_dropout_prob=0.2, drop_path=0.2,
)
"""
TRAIN = (
    CONFIG
    + """
sp_size = 2
precision = "fp32"
dataset = dict(manifest={manifest!r})
batch_size = 3
micro_batches_per_step = 2
max_steps = 6
warmup_steps = 2
optimizer = dict(lr=1e-3)
grad_clip = 1.0
grad_checkpoint = True
ckpt_every = 3
"""
)
SAMPLE = (
    CONFIG
    + """
precision = "fp32"
fps = 8
scheduler = dict(type="rflow", num_sampling_steps=4, cfg_scale=4.0)
batch_size = 2
"""
)

# A curve for cached steps of its model: the change is the difference of the noise levels.
CURVE: dict[str, Any] = {
    "model": {"type": "STDiT3", "in_channels": 3, "hidden_size": 24, "depth": 2, "num_heads": 3},
    "path": [0.0, 1.0],
    "polynomial": [1.0, 0.0],
}


def write_toy_set(folder: Path, count: int, broken: tuple[int, ...] = ()) -> Path:
    """mp4 files and their manifest; some of the files hold no video."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = ["path,text"]
    for i in range(count):
        clip = toy_clip(0, i)
        write_video(folder / f"{i}.mp4", clip.draw(6, 32), fps=8)
        if i in broken:
            (folder / f"{i}.mp4").write_bytes(b"not a video")
        lines.append(f"{i}.mp4,{clip.caption}")
    (folder / "clips.csv").write_text("\n".join(lines) + "\n")
    return folder / "clips.csv"


def write_training(folder: Path, count: int, broken: tuple[int, ...] = ()) -> Path:
    """A toy set and the config of a training on it."""
    manifest = write_toy_set(folder, count, broken)
    (folder / "config.py").write_text(TRAIN.format(manifest=str(manifest)))
    return folder / "config.py"


def losses(outputs: Path) -> list[float]:
    """The losses that a run has logged."""
    from opensora_sp.training.metrics import read_metrics

    return [line["loss"] for line in read_metrics(outputs)]


def write_random_model(folder: Path, *options: str) -> Path:
    """A sampling config, ``sample.py``, and with its options a model of random weights."""
    from random_weights import draw_weights
    from safetensors.torch import save_file

    from opensora_sp.checkpoint.model_config import write_model_config
    from opensora_sp.config import load_inference_config
    from opensora_sp.models import build_model

    (folder / "sample.py").write_text(SAMPLE)
    cfg = load_inference_config(folder / "sample.py", list(options))
    model = build_model(cfg.model["type"], **{k: v for k, v in cfg.model.items() if k != "type"})
    save_file(draw_weights(model).state_dict(), folder / "model.safetensors")
    write_model_config(folder, "STDiT3", model.config)
    return folder


def features_of(source: Any, clips: list[Any]) -> Any:
    """Features of whole clips, made by one process."""
    from opensora_sp.data.dataset import ClipShape
    from opensora_sp.features.sharded import Features

    shape, device = ClipShape(*clips[0].video.shape[1:]), source.device
    features = Features.filled(0.0, len(clips), shape, source, device)
    features.latents_last.copy_(torch.stack(source.latents(clips)).movedim(1, -1))
    for place, text in enumerate(source.text_features(clips)):
        features.y[place, 0, : len(text)] = text
        features.mask[place, : len(text)] = 1
        features.text_lengths[place] = len(text)
        features.fps[place] = clips[place].fps
    return features


def batch_of(cfg: Any, model_config: Any, features: Any, number: int, ids: Any) -> Any:
    """The batch of clips' features, with what training draws for them as micro-batch ``number``."""
    from opensora_sp.data.sampler import MicroBatch
    from opensora_sp.features.batch import BatchMaker, DrawConfig

    *size, _ = features.latents_last.shape[1:]
    micro_batch = MicroBatch(number, 0, features.shape, tuple(ids), 1.0)
    rules = DrawConfig.of_training(cfg, model_config, model_config.in_channels)
    draws = rules.draw_micro_batch(micro_batch, size)
    return BatchMaker(cfg, features.latents_last.device).make(features, draws)


def run(
    *command: str | Path, launcher: str = "python", ranks: int = 1, timeout: float = 300
) -> subprocess.CompletedProcess:
    """Run a script of the project under ``python``, ``torchrun`` or ``colossalai run``.

    A launcher and its ranks import everything: where neither is the subject, take ``run_forked``.
    """
    port = str(free_port())
    one_node = ["--nproc_per_node", str(ranks), "--master_port", port]
    start: list[str | Path] = {
        "python": [sys.executable],
        "torchrun": [BIN / "torchrun", *one_node],
        "colossalai": [BIN / "colossalai", "run", *one_node],
    }[launcher]

    environment = {
        k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    }
    environment.update(
        PATH=f"{BIN}:{environment['PATH']}", OMP_NUM_THREADS="1", PYTHONPATH=str(ROOT)
    )

    return subprocess.run(
        [str(part) for part in (*start, *command)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def run_forked(
    *command: str | Path, ranks: int = 1, timeout: float = 300, folder: Path = ROOT
) -> subprocess.CompletedProcess:
    """Run a script, or a module with ``-m NAME``, in a folder, on ranks that see what ``torchrun``
    gives them, forked from the warm process.

    Returns the largest exit status, and what all ranks have printed.
    """
    store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    arguments = [str(part) for part in command]
    with tempfile.TemporaryDirectory(prefix="run_forked-") as name:
        outputs = [Path(name) / stream for stream in ("stdout", "stderr")]
        processes = fork_ranks(
            ranks, outputs, torchrun_environment(store.port), _run_script, arguments, folder
        )
        try:
            for process in processes:
                process.join(timeout)
            statuses = [process.exitcode for process in processes]
        finally:
            for process in processes:
                process.kill()
        stdout, stderr = (path.read_text() for path in outputs)

    assert None not in statuses, f"ranks ended with {statuses} after {timeout} s:\n{stdout}{stderr}"
    status = max(map(abs, statuses))
    return subprocess.CompletedProcess(arguments, status, stdout, stderr)


def _run_script(command: list[str], folder: Path) -> None:
    os.chdir(folder)
    if command[0] == "-m":
        # It sets the first word, to the path of the module.
        sys.argv = command[1:]
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
        return
    sys.argv = command
    runpy.run_path(command[0], run_name="__main__")

"""LoRA on several ranks: every strategy and ZeRO stage against one process; runs and samples."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import parity_cases
import pytest
import torch
from parity_cases import DEPTH, FULL, Case, assert_one_process_result
from plugin_cases import GLOBAL_BATCH, STEPS, make_batch, make_model
from random_weights import draw_weights
from ranks import run_ranks
from runs import BIN, TRAIN, run_forked, write_random_model, write_toy_set
from safetensors.torch import load_file, save_file
from torch import nn
from worlds import in_worlds

from opensora_sp.checkpoint import verify
from opensora_sp.checkpoint.paths import committed_checkpoints
from opensora_sp.config import load_train_config
from opensora_sp.diffusion import rank_loss, velocity_loss
from opensora_sp.models import compile_blocks
from opensora_sp.models.lora import add_lora, lora_layers
from opensora_sp.models.quantized import quantize_blocks, stored_tensors
from opensora_sp.models.recompute import OFFLOADED
from opensora_sp.parallel import SequenceMesh, parallelize
from opensora_sp.parallel.cost_model import CostModel
from opensora_sp.training.preflight import preflight
from opensora_sp.training.trainable import DropoutDraws

RANK, ALPHA = 2, 3.0
CLIP = (1, 5, 7, 9)
OVERLAP = dict(overlap_chunks=2, overlap_backward=True)
WAYS: list[tuple[Case, dict[str, Any]]] = [
    (Case(CLIP), {}),
    (Case((1, 6, 5, 6), checkpoint=True), OVERLAP),  # at least two rows on each rank
    (Case(CLIP, checkpoint=True), dict(strategy="ulysses")),
    (Case(CLIP, checkpoint=(OFFLOADED, 0, 3, 6)), {}),
    (Case((1, 1, 4, 3)), {}),  # an image: single tokens, and ranks without any
    (Case((1, 2, 3, 5), heads=4, checkpoint=True), {}),  # heads are distributed on three ranks
    (replace(FULL, size=(2, 5, 5, 7), checkpoint=True), {}),
    (Case(CLIP), dict(strategy="ulysses")),
    (Case(CLIP), dict(strategy="split_gather")),
]


def adapted(model: nn.Module, *, rich: bool = False) -> nn.Module:
    """With adapters of all blocks, whose B is not zero.

    ``rich``: with DoRA, rank-stabilised scaling and dropout, of an int8 base.
    """
    options: dict[str, Any] = {}
    if rich:
        # torchao quantises float32.
        quantize_blocks(model.float())
        model.double()
        options = dict(use_dora=True, use_rslora=True, dropout=0.3)
    add_lora(model, rank=RANK, alpha=ALPHA, **options)
    for module in lora_layers(model).values():
        draw_weights(module.lora_A, seed=3, std=0.3)
        draw_weights(module.lora_B, seed=4, std=0.3)
    DropoutDraws(model, seed=5).draw(6)
    return model


def in_parallel(
    ways: list[tuple[Case, dict[str, Any]]], compiled: bool = False, rich: bool = False
) -> None:
    """Ways of sharing a batch against one process, in float64."""
    free_links = CostModel(flops=400e12, bandwidth=1e30, latency=0)
    bare, mesh = parity_cases.make_model, SequenceMesh(torch.distributed.get_world_size())
    parity_cases.make_model = lambda case: adapted(bare(case), rich=rich)
    if compiled:
        parity_cases.parallelize = lambda model, mesh, **options: compile_blocks(
            parallelize(model, mesh, **options), backend="aot_eager"
        )

    try:
        for case, options in ways:
            counter = assert_one_process_result(case, mesh, cost_model=free_links, **options)
            exchanged = [key for key in counter.calls if key[0] not in ("check", "gather")]
            assert bool(exchanged) == bool(case.size[0] % mesh.sp_size), (case, options)
            if options == OVERLAP:
                assert counter.calls["switch", "forward"] == 2 * (2 * DEPTH - 1)
        assert len(parity_cases.one_process_step(case, mesh)[1]) == (2 + rich) * 28 + 2
    finally:
        parity_cases.make_model, parity_cases.parallelize = bare, parallelize


def boosted(stage: int, accumulate_locally: bool, sp_size: int, rich: bool = False) -> None:
    """Steps of SGD with momentum through the plugin, in float64.

    Without clipping and master weights, which are in float32.
    """
    from opensora_sp.plugin import SequenceParallelPlugin
    from opensora_sp.plugin._colossalai import Booster

    plugin = SequenceParallelPlugin(
        sp_size, stage, "fp32", accumulate_locally=accumulate_locally, master_weights=False
    )
    booster, mesh = Booster(plugin=plugin), plugin.mesh
    bare, alone = (adapted(make_model().double(), rich=rich) for _ in range(2))
    frozen = {
        name: [stored.clone() for stored in stored_tensors(parameter.detach()).values()]
        for name, parameter in bare.named_parameters()
        if not parameter.requires_grad
    }
    optimizers = [
        torch.optim.SGD([p for p in one.parameters() if p.requires_grad], lr=0.05, momentum=0.9)
        for one in (bare, alone)
    ]
    model, optimizer, *_ = booster.boost(bare, optimizers[0])
    assert model.unwrap() is bare

    for step in range(STEPS):
        batch = {
            name: value.double() if value.is_floating_point() else value
            for name, value in make_batch(step).items()
        }
        mine = {name: value[mesh.dp_rank :: mesh.dp_size] for name, value in batch.items()}
        values = velocity_loss(model(**mine, output="shards"), -mine["x"])
        loss = rank_loss(values, global_samples=GLOBAL_BATCH, world_size=mesh.world_size)
        booster.backward(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()

        velocity_loss(alone(**batch), -batch["x"]).mean().backward()
        optimizers[1].step()
        optimizers[1].zero_grad()

    wanted = dict(alone.named_parameters())
    for name, parameter in bare.named_parameters():
        if name in frozen:
            for stored, before in zip(
                stored_tensors(parameter.detach()).values(), frozen[name], strict=True
            ):
                assert torch.equal(stored, before), name
        else:
            torch.testing.assert_close(parameter, wanted[name], rtol=1e-9, atol=1e-12)
    assert len(optimizer.shards.working) == (2 + rich) * 28


def some_ways() -> None:
    rich = [(3, (WAYS[1:2], False, True)), (2, (WAYS[2:3], False, True))]
    in_worlds(in_parallel, [(3, (WAYS[1:3],)), *rich])
    in_worlds(boosted, [(3, (2, False, 3)), (2, (2, True, 2, True))])


def all_ways() -> None:
    in_worlds(in_parallel, [(3, (WAYS,)), (3, (WAYS, False, True))])
    # Compiles for a minute.
    in_worlds(in_parallel, [(2, (WAYS[:1], True))])
    cases = [(2, False, 2), (1, False, 2), (2, True, 2), (2, False, 1)]
    in_worlds(boosted, [(2, case) for case in cases])
    in_worlds(boosted, [(3, (stage, False, 3)) for stage in (1, 2)])


@pytest.mark.parametrize("ways", [some_ways, pytest.param(all_ways, marks=pytest.mark.slow)])
def test_gradients_of_adapters_are_those_of_one_process(ways: Callable[[], None]) -> None:
    """Strategies, recomputation, overlap, compiled blocks, and steps of the plugin."""
    run_ranks(3, ways, timeout=900)


# Runs


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A config, random weights to adapt, and a run of four steps on two processes."""
    folder = tmp_path_factory.mktemp("lora")
    (folder / "base").mkdir()
    write_random_model(folder / "base")
    manifest = write_toy_set(folder / "set", 8)
    lines = [
        TRAIN.format(manifest=str(manifest)).replace("max_steps = 6", "max_steps = 4"),
        "ckpt_every = 2",
        "optimizer = dict(lr=0.05)",
        f"load = {str(folder / 'base')!r}",
        f"lora = dict(rank={RANK}, alpha={ALPHA}, dropout=0.3, use_dora=True, quantize='int8')",
    ]
    (folder / "config.py").write_text("\n".join(lines) + "\n")
    log = train(folder, folder / "run")
    assert "LoRA of rank 2 in 28 layers: 0.0 M trained parameters, on the weights of" in log
    assert f"--ckpt {folder / 'base'} --lora {folder / 'run'}" in log
    return folder


def train(folder: Path, outputs: Path, *more: str, ranks: int = 2) -> str:
    """Four steps; ``more`` are overrides, or options where they begin with dashes."""
    options = [one for one in more if one.startswith("--resume")]
    overrides = [one for one in more if not one.startswith("--resume")]
    command = [folder / "config.py", *options, "--cfg-options", f"outputs={outputs}", *overrides]
    done = run_forked("scripts/train.py", *command, ranks=ranks)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    found = {}
    for file in ("model/adapter_model", "ema/adapter_model", "optimizer"):
        content = load_file(checkpoint / f"{file}.safetensors")
        found |= {f"{file}:{name}": tensor for name, tensor in content.items()}
    return found


def two_steps_of(whole: Path, outputs: Path) -> Path:
    """The folder of a run that ended after its first checkpoint."""
    shutil.copytree(whole, outputs, ignore=shutil.ignore_patterns("step_00000004", "summary.json"))
    return outputs


def test_a_run_saves_its_adapters_alone_and_resumes_bit_by_bit(
    folder: Path, tmp_path: Path
) -> None:
    whole = folder / "run"
    *_, last = committed_checkpoints(whole)
    verify(last)
    assert {path.name for path in (last / "ema").iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
        "base.json",
        "config.json",
    }
    found = tensors(last)
    assert all(".lora_" in name for name in found) and len(found) == 3 * 28 * (2 + 3)
    ups = [tensor for name, tensor in found.items() if "model:" in name and "lora_B" in name]
    assert len(ups) == 2 * 28 and all(up.any() for up in ups)

    resumed = two_steps_of(whole, tmp_path / "run")
    assert "at step 2" in train(folder, resumed, "--resume=auto")
    again = tensors(resumed / "step_00000004")
    assert again.keys() == found.keys()
    assert all(torch.equal(again[name], found[name]) for name in found)


def sample(folder: Path, outputs: Path, ckpt: Path, *more: str) -> dict[str, Any]:
    """The metadata of a video, whose bytes are under "bytes"."""
    arguments = ["--ckpt", ckpt, "--outputs", outputs, "--prompt", "a red circle", *more]
    done = run_forked("scripts/inference.py", folder / "base" / "sample.py", *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    (metadata,) = outputs.glob("*.json")
    (video,) = outputs.glob("*.mp4")
    found: dict[str, Any] = json.loads(metadata.read_text())
    return found | {"bytes": video.read_bytes(), "log": done.stdout + done.stderr}


def test_adapters_are_merged_for_sampling_conversion_and_evaluation(
    folder: Path, tmp_path: Path
) -> None:
    base, run = folder / "base", folder / "run"
    ours = sample(folder, tmp_path / "ours", base, "--lora", str(run))
    halves = ["--lora", f"{run}:0.5", "--lora", f"{run / 'step_00000004' / 'ema'}:0.5"]
    twice = sample(folder, tmp_path / "halves", base, *halves)
    without = sample(folder, tmp_path / "without", base)
    assert "28 adapters of" in ours["log"] and "scale 0.5" in twice["log"]
    assert "trained on other weights" not in ours["log"]
    assert len({one["checkpoint_sha256"] for one in (ours, twice, without)}) == 3
    assert without["bytes"] != ours["bytes"] and "lora" not in without

    command = ["convert", base, tmp_path / "merged", "--merge-lora", run]
    done = run_forked(BIN / "opensora-sp", *command)
    assert done.returncode == 0, done.stderr
    assert "28 adapters of" in done.stderr and "ema, scale 1" in done.stderr
    assert "EMA weights where there are any" in done.stdout
    merged = sample(folder, tmp_path / "converted", tmp_path / "merged")
    assert merged["bytes"] == ours["bytes"]
    # Adapters are for the weights before the merge.
    again = sample(folder, tmp_path / "again", tmp_path / "merged", "--lora", str(run))
    assert "were trained on other weights" in again["log"]


def evaluated(folder: Path, output: Path, ckpt: Path, *more: str | Path) -> list[float]:
    manifest = folder / "set" / "clips.csv"
    arguments = [ckpt, "--manifest", manifest, "--seeds", "1", "--bins", "2", "--output", output]
    done = run_forked(BIN / "opensora-sp", "eval", *arguments, *more)
    assert done.returncode == 0, done.stdout + done.stderr
    (bucket,) = json.loads(output.read_text())["buckets"]
    return [one["mean"] for one in bucket["bins"]]


@pytest.mark.slow
def test_evaluation_of_a_run_of_its_merged_weights_and_of_validation(
    folder: Path, tmp_path: Path
) -> None:
    """Validation runs the model with its adapters, the others merge them."""
    manifest = folder / "set" / "clips.csv"
    validation = f"validation=dict(every=4, manifest={str(manifest)!r}, bins=2)"
    # Validation and its merged weights are of the same base.
    train(folder, tmp_path / "run", validation, "lora.quantize=None")
    (line,) = (tmp_path / "run" / "validation.jsonl").read_text().splitlines()
    wanted = json.loads(line)["loss_by_bin"]

    output, base, run = tmp_path / "eval.json", folder / "base", tmp_path / "run"
    config = ["--config", folder / "config.py"]
    of_run = evaluated(folder, output, run)
    assert "step_00000004/ema:1" in json.loads(output.read_text())["weights"]
    assert evaluated(folder, output, base, *config, "--lora", run) == of_run
    assert evaluated(folder, output, base, *config) != of_run
    torch.testing.assert_close(of_run, wanted, rtol=1e-4, atol=1e-6)


# Bad input


def test_what_does_not_fit_the_run_is_refused_before_it_starts(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = folder / "run"
    monkeypatch.setenv("WORLD_SIZE", "2")

    def refused(message: str, *overrides: str, resume: str | None = None) -> None:
        outputs = f"outputs={run if resume else tmp_path / 'new'}"
        cfg = load_train_config(folder / "config.py", [outputs, *overrides])
        with pytest.raises(ValueError, match=message) as caught:
            preflight(cfg, resume)
        assert "got " in str(caught.value) and "; expected " in str(caught.value)

    cfg = load_train_config(folder / "config.py", [f"outputs={run}"])
    preflight(cfg, "auto")
    refused("which holds LoRA adapters; expected.*--lora", f"load={run}")
    refused("'qkv' in lora.targets.*did you mean '\\*.qkv'", "lora.targets=['qkv']")
    refused("got lora = {'rank': 4.*was written with lora = ", "lora.rank=4", resume="auto")
    refused("got lora = None to resume", "lora=None", resume="auto")
    # Adapters to train further are those that the config describes.
    cfg = load_train_config(folder / "config.py", [f"outputs={tmp_path}", f"lora.load={run}"])
    preflight(cfg, None)
    start = f"lora.load={run}"
    refused(r"rank=2.*expected 28 layers.*rank=4.*set rank", start, "lora.rank=4")
    refused(r"rank=2.*expected.*use_dora=False", start, "lora.use_dora=False")
    refused("for 'spatial_blocks.0.*one of them alone", start, "lora.targets=['*.attn.qkv']")
    refused("got lora.load.*scale 0.5; expected", f"{start}:0.5")
    refused("no adapter_config.json", f"lora.load={folder / 'base'}")


@pytest.mark.slow
def test_a_run_does_not_resume_on_other_weights(folder: Path, tmp_path: Path) -> None:
    run, other = two_steps_of(folder / "run", tmp_path / "run"), tmp_path / "other"
    shutil.copytree(folder / "base", other)
    weights = load_file(other / "model.safetensors")
    weights["spatial_blocks.0.attn.qkv.weight"] += 1
    save_file(weights, other / "model.safetensors")
    overrides = [f"outputs={run}", f"load={other}"]
    command = [folder / "config.py", "--resume=auto", "--cfg-options", *overrides]
    done = run_forked("scripts/train.py", *command, ranks=2)
    assert done.returncode != 0
    assert "whose adapters are for other weights" in done.stdout + done.stderr

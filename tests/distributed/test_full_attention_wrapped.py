"""Models with a token plan inside of DDP, FSDP2, peft, compilers and pipelines, and beside
diffusers' context parallelism.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from full_attention_models import drawn, numbers, wan_pipeline
from full_attention_results import assert_same, is_float, results_of
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from opensora_sp.parallel import SequenceMesh, parallelize, unwrap


def wrappers() -> None:
    """DDP, peft's model, compiled blocks and a compiled model, in float32."""
    mesh = SequenceMesh(dist.get_world_size())
    for wrap in (nn.parallel.DistributedDataParallel, adapted, compile_blocks, compiled):
        torch.manual_seed(1)
        model, inputs = drawn("qwen")
        model = model.float()
        inputs = {name: x.float() if is_float(x) else x for name, x in inputs.items()}
        expected = model(**inputs, return_dict=False)[0]
        called = wrap(parallelize(model, mesh))
        for _ in range(2):
            output = called(**inputs, return_dict=False)[0]
            torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)
        output.sum().backward()


def adapted(model: Any) -> nn.Module:
    """With fresh adapters, which change nothing."""
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(target_modules=["to_q", "to_k", "to_v"]))


def compile_blocks(model: Any) -> nn.Module:
    for block in model.transformer_blocks:
        block.compile(backend="aot_eager")
    return model


def compiled(model: nn.Module) -> Any:
    # What it falls back from is an error.
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    return torch.compile(model, backend="aot_eager")


def sharded_parameters() -> None:
    """``fully_shard`` (FSDP2) around a parallelized model, or before: exact gradients."""
    mesh = SequenceMesh(dist.get_world_size())
    for shards_first in (False, True):
        torch.manual_seed(1)
        model, inputs = drawn("wan")
        model.enable_gradient_checkpointing()
        expected = results_of(model, inputs)

        steps = [partial(parallelize, mesh=mesh), shard_parameters]
        for step in reversed(steps) if shards_first else steps:
            step(model)
        assert isinstance(model.proj_out.weight, DTensor)
        for _ in range(2):
            assert_same(results_of(model, inputs, mesh=mesh), expected, f"FSDP2 {shards_first}")


def shard_parameters(model: Any) -> None:
    devices = init_device_mesh("cpu", (dist.get_world_size(),))
    for module in (*model.blocks, model):
        fully_shard(module, mesh=devices)


def wrapped() -> None:
    wrappers()
    sharded_parameters()


@pytest.mark.slow
def test_wrapped_and_compiled_models() -> None:
    run_ranks(2, wrapped)


@contextmanager
def cpu_as_accelerator() -> Iterator[None]:
    """Where diffusers may ask for the accelerator of a rank."""
    cpu = torch.device("cpu")
    with (
        mock.patch.object(torch._C, "_get_accelerator", lambda *_: cpu),
        mock.patch.object(torch.accelerator, "device_count", lambda: 1),
    ):
        yield


EVEN_TEXT = {"encoder_hidden_states": numbers(2, 6, 6)}
EVEN_WAN = EVEN_TEXT | {"hidden_states": numbers(2, 4, 4, 6, 10)}
EVEN_FLUX = EVEN_TEXT | {
    "hidden_states": numbers(2, 10, 4),
    "img_ids": torch.zeros(10, 3),
    "txt_ids": torch.zeros(6, 3),
}
MASK = {"encoder_attention_mask": torch.ones(2, 6)}
EVEN_AUDIO = {
    "audio_hidden_states": numbers(2, 10, 5),
    "audio_encoder_hidden_states": numbers(2, 6, 6),
    "audio_encoder_attention_mask": torch.ones(2, 6),
    "audio_timestep": torch.arange(20).view(2, 10),
    "audio_num_frames": 10,
}
# Heads, inputs, and the error of diffusers where it does not run: the table of docs/comparison.md.
THEIRS: list[tuple[str, int, dict[str, Any], str]] = [
    ("wan", 4, EVEN_WAN, ""),
    ("flux", 4, EVEN_FLUX, ""),
    ("wan", 4, {}, "must be divisible by mesh size"),
    ("wan", 3, EVEN_WAN, "is invalid for input of size"),
    ("ltx", 4, EVEN_TEXT | MASK, "must match the size of tensor"),
    ("ltx2", 4, EVEN_TEXT | MASK | EVEN_AUDIO, "must match the size of tensor"),
    ("hunyuan", 4, {}, "`cp_plan` must be provided"),
]


def diffusers_own() -> list[str]:
    """Outputs and gradients of diffusers' Ulysses, as ours, or its errors."""
    from diffusers import ContextParallelConfig

    mesh = SequenceMesh(dist.get_world_size())
    errors: list[str] = []
    for name, heads, changes, _ in THEIRS:
        torch.manual_seed(1)
        model, inputs = drawn(name, heads=heads)
        inputs |= changes
        ours = step_of(parallelize(model, mesh), inputs, scale=1 / mesh.sp_size)
        unwrap(model)
        try:
            with cpu_as_accelerator():
                model.enable_parallelism(config=ContextParallelConfig(ulysses_degree=2))
            theirs = step_of(model, inputs, scale=1.0)
        except (AssertionError, RuntimeError, ValueError) as error:
            errors.append(str(error))
            continue
        errors.append("")
        assert_same(theirs, ours, name, bound=1e-6)
    return errors


def step_of(model: nn.Module, inputs: dict[str, Any], scale: float) -> dict[str, Tensor]:
    """Outputs and gradients, summed over the ranks and scaled."""
    model.zero_grad()
    outputs = model(**inputs, return_dict=False)
    sum(output.square().sum() for output in outputs).backward()
    results = {f"output {i}": output.detach() for i, output in enumerate(outputs)}
    for name, parameter in model.named_parameters():
        results[name] = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        results[name] = results[name].clone() * scale
        dist.all_reduce(results[name])
    return results


def test_diffusers_context_parallelism_agrees_where_it_runs() -> None:
    for errors in run_ranks(2, diffusers_own):
        for error, (*_, expected) in zip(errors, THEIRS, strict=True):
            assert expected in error and bool(expected) == bool(error), error


def pipeline() -> None:
    """Samples of a pipeline of tiny parts, with captions of unequal lengths."""
    transformer, _ = drawn("wan")
    pipe = wan_pipeline(transformer.float())
    pipe.set_progress_bar_config(disable=True)

    def sample() -> Tensor:
        return pipe(
            prompt_embeds=numbers(1, 5, 6).float(),
            negative_prompt_embeds=numbers(1, 3, 6).float(),
            height=48,
            width=80,
            num_frames=9,
            num_inference_steps=3,
            output_type="latent",
            generator=torch.Generator().manual_seed(1),
        ).frames

    expected = sample()
    pipe.transformer = parallelize(pipe.transformer, SequenceMesh(dist.get_world_size()))
    torch.testing.assert_close(sample(), expected, rtol=1e-5, atol=1e-5)


def test_a_pipeline_samples_the_latents_of_one_process() -> None:
    run_ranks(3, pipeline)

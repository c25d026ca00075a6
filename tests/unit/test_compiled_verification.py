"""Blocks run compiled on a device only where they were compared with eager mode."""

import dataclasses
import logging

import pytest
import torch

from opensora_sp.device_verification import choose_compiled, compiled, verdicts
from opensora_sp.models import build_model, compile, compile_blocks

pytestmark = pytest.mark.slow  # compiles models

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
SMALL = dict(hidden_size=48, depth=2, num_heads=2, caption_channels=8, model_max_length=6)
MODELS = [
    ("STDiT", dict(input_size=(4, 8, 8))),
    ("STDiT2", {}),
    ("STDiT3", dict(kernel_size=(4, 4, -1), skip_y_embedder=True)),
]


def faulty(graph, inputs):
    """A compiler whose results are wrong by a tenth."""

    def run(*args):
        return [x * 1.1 if torch.is_floating_point(x) else x for x in graph(*args)]

    return run


def model_with(backend, name="STDiT3", **options):
    return compile_blocks(build_model(name, **SMALL, **options), backend=backend)


@pytest.mark.parametrize("name, options", MODELS)
def test_small_models_of_each_kind_are_right(name, options):
    model = model_with("eager", name, **options)
    state = torch.random.get_rng_state()
    assert compiled.compare(model, torch.float32, CPU, trained=True) == "ok"
    assert torch.equal(torch.random.get_rng_state(), state)


def test_a_named_attention_kernel_is_left_to_its_own_verification():
    model = model_with("eager")
    model.config = dataclasses.replace(model.config, attention="short_rows")
    small, _ = compiled._small(model, CPU)
    assert small.config.attention == "auto"


def test_what_was_never_compiled_is_not_verified(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    compile._compiled.cache_clear()
    verdict = compiled.compare(model_with("eager"), torch.float32, CPU, trained=False)
    compile._compiled.cache_clear()
    assert verdict.startswith("nothing was compiled")


@pytest.mark.parametrize("trained", [True, False])
def test_wrong_code_is_found(trained):
    verdict = compiled.compare(model_with(faulty), torch.float32, CPU, trained=trained)
    assert ": a relative error of " in verdict and verdict.endswith("in eager mode")


@pytest.fixture
def compares(monkeypatch, tmp_path):
    """A "device" on the CPU and an empty cache; the calls of `compare`."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(compiled, "device_facts", lambda device: {"device": "a CPU"})
    monkeypatch.setattr(verdicts, "_check_device", lambda *args: None)
    calls, real = [], compiled.compare

    def compare(model, dtype, device, *, trained):
        calls.append(trained)
        return real(model, dtype, CPU, trained=trained)

    monkeypatch.setattr(compiled, "compare", compare)
    return calls


def choose(model, device=CUDA):
    return choose_compiled(model, dtype=torch.float32, device=device)


def test_verified_blocks_run_compiled(compares, caplog):
    caplog.set_level(logging.INFO)
    model = model_with("eager")
    assert choose(model) == choose(model) == {"blocks": "compiled"}
    assert compares == [True] and model.compile_backend == "eager"
    assert caplog.messages[-1].startswith("compiled blocks: verified in ")

    # Sampling compiles other code.
    choose(model.requires_grad_(False))
    assert compares == [True, False]


def test_wrong_blocks_run_in_eager_mode_with_one_warning(compares, caplog):
    model = model_with(faulty)
    assert choose(model) == {"blocks": "eager"}
    assert model.compile_backend is None
    (warning,) = [one.message for one in caplog.records if one.levelno == logging.WARNING]
    assert warning.startswith("blocks run in eager mode instead of compiled (they differ in ")
    assert "or set compile=None" in warning


def test_a_compiler_that_fails_is_replaced(compares, caplog):
    def fails(graph, inputs):
        raise RuntimeError("no C compiler\nand more")

    assert choose(model_with(fails)) == {"blocks": "eager"}
    assert "no C compiler" in caplog.messages[-1]


def test_nothing_is_compared_without_a_device_or_compilation(compares):
    assert choose(build_model("STDiT3", **SMALL)) == {"blocks": "eager"}
    assert choose(model_with("eager"), device=CPU) == {"blocks": "compiled"}
    assert compares == []


def test_a_rank_without_a_compiler_stops_compilation_on_all(compares, monkeypatch, caplog):
    gathered = []

    def of_ranks(own):
        gathered.append(own)
        return own | {"compiled blocks": f"on rank 1: {compiled.NOT_SET}"}

    monkeypatch.setattr(verdicts, "agreed", of_ranks)
    model = model_with("eager")
    for one in (model, build_model("STDiT3", **SMALL)):
        assert choose(one) == {"blocks": "eager"}
    # Both have taken part.
    assert [own["compiled blocks"] for own in gathered] == ["ok", compiled.NOT_SET]
    assert model.compile_backend is None
    assert "(on rank 1: compilation is off" in caplog.text

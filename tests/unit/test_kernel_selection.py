"""Which implementation of a kernel runs, and that torch.compile can trace the choice."""

import pytest
import torch
from interpreter import run_interpreted
from torch._subclasses import FakeTensorMode

from opensora_sp.models import kernels
from opensora_sp.models.attention import resolve
from opensora_sp.models.attention_table import Sequences
from opensora_sp.models.kernels import fused


@pytest.fixture
def fake():
    """Tensors on "cuda" that are none, as compilers use them."""
    with FakeTensorMode():
        yield lambda dtype=torch.bfloat16: torch.empty(4, device="cuda", dtype=dtype)


def test_kernels_on_cuda_run_after_verification_only(fake, monkeypatch):
    monkeypatch.setattr(fused, "_verified", {})
    assert not kernels.chosen("gelu", fake())

    fused.set_verified("gelu", [torch.bfloat16])
    assert kernels.chosen("gelu", fake())
    assert not kernels.chosen("gelu", fake(torch.float32))
    assert not kernels.chosen("qk_norm", fake())


def test_settings(fake, monkeypatch):
    monkeypatch.setattr(fused, "_verified", {"gelu": (torch.bfloat16,)})
    with kernels.using_kernels("torch"):
        assert not kernels.chosen("gelu", fake())

    with kernels.using_kernels("triton"):
        assert kernels.chosen("gelu", fake(torch.float32))
        assert not kernels.chosen("gelu", fake(torch.float64))
    assert kernels.current_kernels() == "auto"


@pytest.mark.parametrize("setting", ["auto", "triton", "torch"])
def test_no_kernels_on_a_cpu(setting):
    with kernels.using_kernels(setting):
        assert not kernels.chosen("gelu", torch.empty(4))


def test_meta_tensors_stand_for_those_of_a_gpu(monkeypatch):
    monkeypatch.setattr(fused, "_verified", {"gelu": (torch.bfloat16,)})
    bf16, fp64 = (torch.empty(4, device="meta", dtype=one) for one in (torch.bfloat16, float))
    assert kernels.chosen("gelu", bf16) and not kernels.chosen("qk_norm", bf16)
    with kernels.using_kernels("triton"):
        assert kernels.chosen("qk_norm", bf16) and not kernels.chosen("qk_norm", fp64)
    with kernels.using_kernels("torch"):
        assert not kernels.chosen("gelu", bf16)


def test_the_planner_traces_the_attention_that_a_config_names():
    sequences = Sequences(torch.bfloat16, 72, length=15)
    with kernels.using_kernels("triton"):
        names = {
            name: resolve(name, sequences, torch.device("meta")).name
            for name in ("auto", "flash", "sdpa", "short_rows")
        }
    assert names.pop("auto") == names.pop("short_rows") == "short_rows"
    assert set(names.values()) == {"sdpa"}


def test_names_are_checked():
    with pytest.raises(ValueError, match="got kernels 'cuda'; expected one of 'auto'"):
        kernels.set_kernels("cuda")


def choose_verified_while_compiled():
    """The same for "auto", which asks what was verified; of fake tensors on "cuda"."""
    chosen = []

    @torch.compile(backend="eager", fullgraph=True)
    def function(x):
        return x + (2 if kernels.chosen("planted", like) else 1)

    kernels.set_kernels("auto")
    with FakeTensorMode(allow_non_fake_inputs=True):
        like = torch.empty(4, device="cuda")
    for dtypes in ([], [torch.float32], [torch.bfloat16]):
        fused.set_verified("planted", dtypes)
        chosen.append(float(function(torch.zeros(()))))
    return chosen


def test_verdicts_are_constants_of_compiled_code():
    assert run_interpreted(choose_verified_while_compiled) == [1, 2, 1]

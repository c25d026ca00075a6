"""Kernels are verified on a device before they run there, and replaced where they differ."""

import logging
import sys
from importlib import import_module
from types import SimpleNamespace

import pytest
import torch
from interpreter import run_interpreted
from planted_kernels import PACKAGE, SIZES, plant

from opensora_sp import device_verification
from opensora_sp.device_verification import choose_kernels
from opensora_sp.models.kernels import examples, fused, using_kernels, verification
from opensora_sp.models.kernels.examples import examples_of, kernel_names
from opensora_sp.models.kernels.verification import (
    NO_TRITON,
    OBSTACLES,
    OLD_GPU,
    obstacle,
    verify_kernel,
)

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
MODEL = SimpleNamespace(config=SIZES)
KERNEL = f"{PACKAGE}.triton.planted"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def _planted_kernels(monkeypatch):
    """Kernels that a test plants are gone after it."""
    monkeypatch.setattr(examples, "EXAMPLES", dict(examples.EXAMPLES))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_kernel_with_the_rounding_of_its_reference_passes(dtype):
    plant()
    found = verify_kernel("planted", SIZES, dtype, CPU)
    names = [
        "output 0 of multiply",
        "gradient of x in multiply",
        "gradient of factor in multiply",
    ]
    if dtype.itemsize == 2:
        names += [f"{name} in float32" for name in names]
    assert [one.result for one in found] == names
    assert all(one.ok for one in found), [str(one) for one in found]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "fault, result",
    [
        ("value", "output 0"),
        ("gradient", "gradient of factor"),
        ("no number", "output 0"),
    ],
)
def test_faults_are_found_and_named(fault, result, dtype):
    plant(fault)
    wrong = [one for one in verify_kernel("planted", SIZES, dtype, CPU) if not one.ok]
    assert wrong and wrong[0].result.startswith(result)


@pytest.mark.parametrize("dtype", DTYPES)
def test_errors_below_the_rounding_of_16_bits_are_found_in_float32(monkeypatch, dtype):
    plant()
    monkeypatch.setattr(sys.modules[KERNEL], "multiply", lambda x, factor: 1.0002 * factor * x)
    wrong = [one for one in verify_kernel("planted", SIZES, dtype, CPU) if not one.ok]
    in_float32 = dtype != torch.float32
    assert wrong and all(one.result.endswith(" in float32") == in_float32 for one in wrong)


def test_a_faulty_device_excuses_no_kernel():
    exact = {"output": verification.normal(100).double()}
    bounds = []
    for error in (0.0, 5e-6, 1.0, float("nan")):
        plain = {"output": exact["output"] + error}
        (found,) = verification.differences(exact, plain, exact, exact, torch.float32)
        bounds.append(found.bound)
    least = verification.MIN_ERROR
    scale = exact["output"].square().mean().sqrt().item()
    assert bounds == pytest.approx([4 * least, 4 * 5e-6 / scale, 16 * least, 4 * least])


@pytest.mark.parametrize("precision", ["highest", "high", "medium"])
def test_the_precision_of_products_stays_what_it_was(precision):
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        with verification._without_tf32():
            assert torch.get_float32_matmul_precision() == "highest"
        assert torch.get_float32_matmul_precision() == precision
    finally:
        torch.set_float32_matmul_precision(before)


def every_kernel():
    """The results of all kernels of the project, interpreted, that differ."""
    config, wrong = SimpleNamespace(hidden_size=48, num_heads=2, mlp_ratio=2.0), []
    for name in kernel_names():
        found = verification._verify(name, config, torch.bfloat16, CPU)
        wrong += [str(one) for one in found if not one.ok]
    return wrong


@pytest.mark.slow
def test_all_kernels_pass_under_the_interpreter():
    assert run_interpreted(every_kernel) == []


@pytest.fixture
def device(monkeypatch):
    """A "device" on the CPU, with one planted kernel."""
    monkeypatch.setattr(device_verification, "kernel_names", lambda: ["planted"])
    monkeypatch.setattr(fused, "_verified", {})
    calls = []

    def verify(name, sizes, dtype, device):
        calls.append((name, sizes, dtype))
        return verify_kernel(name, sizes, dtype, CPU)

    monkeypatch.setattr(device_verification, "verify_kernel", verify)
    monkeypatch.setattr(device_verification, "obstacle", lambda device: None)
    monkeypatch.setattr(device_verification, "_check_device", lambda *args: None)
    # After the test, other tests of this process take the kernels that they always take.
    with using_kernels("auto"):
        yield calls


def choose(setting="auto", dtype=torch.bfloat16, device=CUDA, model=MODEL):
    return choose_kernels(setting, model, dtype=dtype, device=device)


def test_kernels_run_once_they_are_verified(device, caplog):
    plant()
    caplog.set_level(logging.INFO)
    assert choose() == {"planted": "triton"}
    assert device == [("planted", SIZES, torch.bfloat16)]
    assert fused._verified == {"planted": (torch.bfloat16,)}
    (line,) = caplog.messages
    assert line.startswith("kernels: planted by Triton (verified in ")


@pytest.mark.parametrize(
    "fault, reported",
    [
        ("value", "output 0 of multiply: an error of "),
        ("gradient", "gradient of factor in multiply: an error of "),
        ("error", "it could not be compared: RuntimeError: out of resource: shared"),
    ],
)
def test_a_kernel_that_differs_is_replaced_with_one_warning(device, caplog, fault, reported):
    plant(fault)
    caplog.set_level(logging.INFO)
    assert choose() == {"planted": "torch"}
    assert fused._verified == {"planted": ()}

    warning, line = caplog.messages
    assert warning.startswith("kernels are replaced by others (planted: ") and reported in warning
    assert line.startswith("kernels: plain torch (verified in ")


def test_triton_requires_kernels_that_are_right(device):
    plant("gradient")
    with pytest.raises(ValueError, match=r"got kernels='triton', .*\(planted: gradient of factor"):
        choose("triton")


@pytest.mark.parametrize("reason", OBSTACLES)
def test_where_triton_runs_nothing_no_rank_is_left_behind(device, reason, monkeypatch, caplog):
    plant()
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(device_verification, "obstacle", lambda device: reason)
    gathered = []
    monkeypatch.setattr(
        device_verification, "agreed", lambda one: gathered.append(one) or one.copy()
    )

    assert choose() == {"planted": "torch"}
    assert gathered[0]["planted"] == reason
    assert caplog.messages == [f"kernels: plain torch ({reason})"]
    assert not device  # Triton's compiler was not called
    with pytest.raises(ValueError, match=rf"\(planted: {reason}\); expected"):
        choose("triton")


@pytest.mark.parametrize(
    "capability, expected", [((7, 0), OLD_GPU), ((7, 5), OLD_GPU), ((8, 0), None)]
)
def test_nothing_is_compiled_for_gpus_that_no_test_compiles_for(capability, expected, monkeypatch):
    monkeypatch.setattr(verification, "is_installed", lambda name: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert obstacle(CUDA) == expected

    monkeypatch.setattr(verification, "is_installed", lambda name: False)
    assert obstacle(CUDA) == NO_TRITON


def test_triton_is_refused_for_float64(device):
    plant()
    with pytest.raises(ValueError, match=r"for torch.float64 .*; expected .* set kernels="):
        choose("triton", dtype=torch.float64)
    assert fused.current_kernels() == "auto"


def test_an_error_that_breaks_the_device_ends_the_run(monkeypatch):
    def broken(*args, **kwargs):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch, "zeros", broken)
    with pytest.raises(ValueError, match="from gelu .* set kernels='torch'"):
        device_verification._check_device("gelu", CUDA, RuntimeError("CUDA error"))


def test_torch_and_other_devices_verify_nothing(device, caplog):
    plant("error")
    caplog.set_level(logging.INFO)
    assert choose("torch") == choose(device=CPU) == {"planted": "torch"}
    assert choose(dtype=torch.float64) == {"planted": "torch"}
    assert not device
    assert caplog.messages == [
        "kernels: plain torch (as asked for)",
        "kernels: plain torch (the device is cpu)",
        "kernels: plain torch (they compute in float32)",
    ]


def second_derivatives():
    """By function of the kernels, the error of a backward pass that is to be differentiated."""
    errors = {}
    for name in kernel_names():
        for example in examples_of(name, SIZES):
            if example.gradients and example.function not in errors:
                errors[example.function] = error_of_gradients(name, example)
    return errors


def error_of_gradients(name, example):
    function = getattr(import_module(f"opensora_sp.models.kernels.triton.{name}"), example.function)
    arguments = dict(example.arguments)
    inputs = [arguments[one].requires_grad_() for one in example.gradients]
    outputs = function(**arguments)
    output = outputs[-1] if isinstance(outputs, tuple) else outputs
    try:
        torch.autograd.grad(output.square().sum(), inputs, create_graph=True, allow_unused=True)
    except RuntimeError as error:
        return str(error)


def test_second_derivatives_are_refused():
    """Operators without a gradient would leave them out."""
    errors = run_interpreted(second_derivatives)
    assert len(errors) == 8
    for function, error in errors.items():
        assert "got a second derivative of the Triton kernel" in str(error), function

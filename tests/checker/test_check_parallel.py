"""The checker's report of small definitions, its refusals, and its command."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from checked_model import Model, check, cut_tokens
from torch import Tensor, nn

from opensora_sp import cli
from opensora_sp.checker import Applied, Cut, DefinitionError, Report, check_parallel, run
from opensora_sp.checker.layouts import match


@pytest.mark.parametrize("num_ranks, dtype", [(2, "float64"), (3, "float32"), (3, "bfloat16")])
def test_right_parallelism_has_no_difference(num_ranks: int, dtype: str) -> None:
    report = check(num_ranks, dtype=dtype)
    assert report.ok, str(report)
    assert (report.reduction, report.compared) == ("sum", 1.0)
    assert report.precision.startswith(dtype)


def test_recomputation_is_lifted_and_not_recorded_twice() -> None:
    def checkpointed() -> nn.Module:
        model = Model()
        model.checkpointing = True
        return model

    report = check(build=checkpointed)
    assert report.ok, str(report)
    assert report.precision.startswith("float64")


def test_kinds_of_gradients() -> None:
    """The first block's gradients are whole after a sum, and four of its kinds are planted."""
    factors = {"first.weight": 2.0, "first.bias": 0.5, "last.weight": -1.0, "last.bias": 0.0}

    def planted(model: Model, group: Any) -> str:
        cut_tokens(model)
        for name, parameter in model.blocks[0].named_parameters():
            parameter.register_hook(lambda gradient, factor=factors[name]: gradient * factor)
        model.blocks[1].last.bias.register_hook(torch.square)
        return "sum"

    report = check(apply=planted)
    assert report.gradients == {
        "blocks.0.first.weight": "times P",
        "blocks.0.first.bias": "divided by P",
        "blocks.0.last.weight": "sign",
        "blocks.0.last.bias": "missing",
        "blocks.1.last.bias": "different",
    }
    assert (report.first_module, report.inputs) == (None, {})


def test_gradients_that_hooks_have_reduced_are_inferred_as_whole() -> None:
    def reduced(model: Model, group: Any) -> None:
        cut_tokens(model)
        for parameter in model.parameters():
            parameter.register_hook(lambda gradient: dist.all_reduce(gradient) or gradient)

    report = check(apply=reduced)
    assert report.ok, str(report)
    assert report.reduction == "none"


def test_output_that_stays_cut() -> None:
    def stays(model: Model, group: Any) -> Applied:
        cut_tokens(model)
        model.leave = lambda x: x
        return Applied(gradients="sum", layouts={"output": Cut(1)})

    assert check(3, apply=stays).ok


def test_first_module_and_layout_are_named() -> None:
    def wrong(model: Model, group: Any) -> None:
        cut_tokens(model)
        model.blocks[1].register_forward_pre_hook(lambda module, args: (args[0] * 1.001,))

    report = check(apply=wrong)
    assert report.first_module == "blocks.1.first"
    assert [row.name for row in report.modules][-1] == "output"
    assert report.modules[0].layout == "cut on axis 1"
    assert "first module that differs: blocks.1.first" in str(report)


def test_repetitions_of_the_run() -> None:
    """Noise of a rank's own generator, an adapter that is not zero, an exchange of what all have,
    and a batch that mixes its samples.
    """

    def with_adapter() -> nn.Module:
        model = Model()
        model.lora_scale = nn.Parameter(torch.full((4,), 0.1))
        return model

    def disturbed(model: Any, group: Any) -> None:
        def leave(x: Tensor) -> Tensor:
            parts = [torch.empty_like(x) for _ in range(2)]
            dist.all_gather(parts, x.contiguous())
            return parts[0] + model.lora_scale + 0.01 * torch.rand(4) + x.mean(0)

        model.leave = leave

    report = check(build=with_adapter, apply=disturbed)
    assert {finding.kind for finding in report.findings} == {"seed", "batch", "adapter", "bytes"}
    # 2 samples of 7 tokens of 4 numbers of 8 bytes.
    assert "448 bytes" in next(row.text for row in report.findings if row.kind == "bytes")


def test_numbers_of_a_step() -> None:
    def step(model: Model, batch: dict[str, Tensor]) -> dict[str, Any]:
        loss = model(**batch).square().sum() / 7
        loss.backward()
        norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
        return {"loss": loss, "gradient_norm": norm, "validation_loss": loss.detach() + model.extra}

    def with_extra() -> nn.Module:
        model = Model()
        model.extra = 0
        return model

    def stays(model: Any, group: Any) -> str:
        cut_tokens(model)
        model.leave, model.extra = (lambda x: x), dist.get_rank()
        return "sum"

    report = check(build=with_extra, apply=stays, step=step)
    assert not report.modules and not report.gradients
    # The losses of shards sum up; norms and validation losses of shards are nobody's.
    assert [row.kind for row in report.findings] == ["gradient norm", "validation loss"]


def waiting(model: Model, group: Any) -> None:
    cut_tokens(model)
    if dist.get_rank() == 1:
        model.leave = lambda x: x


def raising(model: Model, group: Any) -> None:
    cut_tokens(model)
    if dist.get_rank() == 1:
        model.blocks[1].first = nn.Linear(3, 5).double()


def test_a_rank_that_waits_is_named_with_its_stack(monkeypatch: pytest.MonkeyPatch) -> None:
    report = check(apply=waiting, seconds=3)
    assert [row.kind for row in report.findings] == ["waiting"]
    assert "in forward" in report.findings[0].text and Path(__file__).name in str(report)

    start = time.monotonic()
    monkeypatch.setattr(run, "GRACE", 2.0)
    report = check(apply=raising, seconds=60)
    assert time.monotonic() - start < 30
    error, wait = sorted(report.findings, key=lambda row: row.kind)
    assert (error.kind, error.module, wait.kind) == ("error", "blocks.1.first", "waiting")
    assert "rank 1 raises RuntimeError" in error.text


def torch_context_parallel(model: Model, group: Any) -> None:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.experimental import context_parallel

    tokens = torch.zeros(2, 8, 4)
    mesh = DeviceMesh.from_group(group, "cpu")
    with context_parallel(mesh, buffers=[tokens], buffer_seq_dims=[1]):
        pass


def with_dropout() -> nn.Module:
    model = Model()
    model.enter = nn.Dropout()
    return model


def other_weights() -> nn.Module:
    model = Model()
    nn.init.constant_(model.blocks[0].first.bias, time.monotonic_ns() % 1e9)
    return model


@pytest.mark.parametrize(
    "functions, message",
    [
        ({"build": None}, "got a definition without build"),
        ({"build": with_dropout}, "draws no random numbers"),
        ({"build": other_weights}, "got other weights or another batch on rank 1 than on rank 0"),
        ({"build": lambda: 3}, "got AttributeError from the model in one process"),
        ({"batch": lambda seed: {"y": 1}}, "got TypeError from the model in one process"),
        ({"apply": lambda model, group: "average"}, "got 'average' from apply"),
        ({"apply": torch_context_parallel}, "torch's needs the attention kernels of GPUs"),
    ],
    ids=[
        "no build",
        "dropout",
        "other weights",
        "no module",
        "no batch",
        "answer",
        "torch",
    ],
)
def test_bad_input_is_one_error(functions: dict[str, Any], message: str) -> None:
    with pytest.raises(DefinitionError, match="^got .*expected .*; ") as error:
        check(**functions)
    assert message in str(error.value)


REFERENCE = torch.arange(2 * 12 * 3, dtype=torch.float64).reshape(2, 12, 3).sin()


@pytest.mark.parametrize(
    "parts, layout, error",
    [
        (REFERENCE.split([5, 4, 3], 1), "cut on axis 1", 0.0),
        ([REFERENCE] * 3, "replicated", 0.0),
        ([REFERENCE[:, 0::3], REFERENCE[:, 1::3], REFERENCE[:, 2::3]], "another order", 0.0),
        ([REFERENCE / 4, REFERENCE / 2, REFERENCE / 4], "partial sums", 0.0),
        ([REFERENCE[:, :3], REFERENCE[:, 3:6], REFERENCE[:, 6:9]], "3 of 12 missing", float("inf")),
        (
            [torch.cat([REFERENCE[:, :3], part], 1) for part in REFERENCE[:, 3:].split(3, 1)],
            "its first 3 replicated",
            0.0,
        ),
        (
            [torch.cat([part, REFERENCE[:, 9:]], 1) for part in REFERENCE[:, :9].split(3, 1)],
            "its last 3 replicated",
            0.0,
        ),
        (
            [REFERENCE[:, :6], REFERENCE[:, :6], REFERENCE[:, 6:], REFERENCE[:, 6:]],
            "over 2 ranks in steps of 2",
            0.0,
        ),
        (REFERENCE[:, :, None].tensor_split(3, 2), None, 0.0),
    ],
)
def test_layouts_are_inferred(parts: list[Tensor], layout: str | None, error: float) -> None:
    inferred = match(REFERENCE, list(parts), 1e-9, None, is_final=False)
    if layout is None:
        assert inferred is None
    else:
        assert inferred is not None
        assert layout in inferred.layout and inferred.error == pytest.approx(error)


def test_declared_layouts_are_the_only_ones_compared() -> None:
    parts = list(REFERENCE.flip(1).split(4, 1))
    assert match(REFERENCE, parts, 1e-9, None, is_final=False).error == 0
    assert match(REFERENCE, parts, 1e-9, Cut(1), is_final=False).error > 0.1
    assert match(REFERENCE, parts, 1e-9, None, is_final=True).error > 0.1


def test_command(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Exit status 0, 1 and 2, a table and JSON."""
    file = tmp_path / "definition.py"
    file.write_text(
        "import sys\n"
        f"sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from checked_model import apply, batch, build\n"
    )
    cli.main(["check-parallel", str(file), "--ranks", "3"])
    assert "no difference: one process and 3 ranks (float64, bound 1e-09)" in capfd.readouterr().out

    with file.open("a") as stream:
        stream.write("def apply(model, group):\n    model.leave = lambda x: 1.5 * x\n")
    with pytest.raises(SystemExit) as end:
        cli.main(["check-parallel", str(file), "--json"])
    assert end.value.code == 1
    report = json.loads(capfd.readouterr().out)
    assert (report["ok"], report["first_module"]) == (False, "output")
    assert {"ok", *(field.name for field in dataclasses.fields(Report))} == set(report)

    file.write_text("def build(): pass\n")
    with pytest.raises(SystemExit) as end:
        cli.main(["check-parallel", str(file)])
    assert end.value.code == 2
    assert "got a definition without batch and apply" in capfd.readouterr().err


def test_example_of_the_page(tmp_path: Path) -> None:
    page = Path(__file__).parents[2] / "docs" / "check_parallel.md"
    example = page.read_text().split("```python\n")[1].split("```")[0]
    file = tmp_path / "mine.py"
    file.write_text(example)
    report = check_parallel(file, ranks=3)
    assert report.first_module is None and report.reduction == "sum"
    last = [name.split(".")[2] for name in report.gradients if name.startswith("blocks.1")]
    assert last == ["to_k", "to_k", "to_v", "to_v"]

    assert "# dist.all_reduce" in example
    file.write_text(example.replace("# dist.all_reduce", "dist.all_reduce"))
    report = check_parallel(file, ranks=3)
    assert report.ok and report.reduction == "mean", str(report)

"""``compile="blocks"``: the numbers of eager mode, in float64."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace

import parity_cases
import pytest
import torch
import torch.distributed as dist
from parity_cases import Case, assert_one_process_result
from ranks import run_ranks

from opensora_sp.models import build_model, compile_blocks
from opensora_sp.parallel import SequenceMesh, parallelize
from opensora_sp.parallel.cost_model import CostModel

pytestmark = pytest.mark.core
DEPTH = 2


@pytest.fixture(autouse=True)
def _anew():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def small(name: str) -> torch.nn.Module:
    model = build_model(
        name, hidden_size=24, depth=DEPTH, num_heads=2, caption_channels=8, model_max_length=6
    ).double()
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.3, generator=generator)
    return model


def step(
    model: torch.nn.Module, size: tuple[int, int, int], texts: tuple[int, int]
) -> list[torch.Tensor]:
    """Output and gradients."""
    generator = torch.Generator().manual_seed(sum(texts))
    x, y = (torch.randn(s, generator=generator).double() for s in [(2, 4, *size), (2, 1, 6, 8)])
    numbers = {number: torch.tensor([8.0, 16.0]) for number in model.sample_inputs}
    mask = torch.arange(6) < torch.tensor(texts)[:, None]
    output = model(x.requires_grad_(), torch.tensor([10.0, 900.0]), y, mask, **numbers)
    learned = [p for p in model.parameters() if p.requires_grad]
    return [output.detach(), *torch.autograd.grad(output.square().sum(), [x, *learned])]


@pytest.mark.slow
def test_equal_numbers() -> None:
    plain = small("STDiT3")
    compiled = compile_blocks(copy.deepcopy(plain), backend="eager")
    assert list(compiled.state_dict()) == list(plain.state_dict())

    bucket, another = (3, 4, 4), (2, 6, 4)
    steps = [  # size, lengths of the texts, recomputed
        (bucket, (6, 3), False),
        (bucket, (2, 4), False),
        (bucket, (5, 5), True),
        (another, (1, 1), False),
        (bucket, (3, 3), False),
    ]

    for size, texts, recomputed in steps:
        plain.set_grad_checkpoint(recomputed)
        compiled.set_grad_checkpoint(recomputed)
        found, wanted = step(compiled, size, texts), step(plain, size, texts)
        largest = max(theirs.abs().max().item() for theirs in wanted)
        for ours, theirs in zip(found, wanted, strict=True):
            # Where weights of attention saturate, gradients of queries are rounding errors.
            atol = 1e-9 * theirs.abs().max().item() + 1e-15 * largest
            torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=atol)


@pytest.mark.slow
def test_encoded_texts_of_other_lengths() -> None:
    model = small("STDiT3")
    x, t = torch.randn(2, 4, 3, 4, 4, dtype=torch.float64), torch.tensor([10.0, 900.0])
    texts = [torch.randn(2, 1, length, 8, dtype=torch.float64) for length in (3, 5, 4)]
    with torch.no_grad():
        wanted = [model(x, t, y) for y in texts]
        compile_blocks(model, backend="eager")
        for y, plain in zip(texts, wanted, strict=True):
            torch.testing.assert_close(
                model(x, t, model.encode_text(y)), plain, rtol=1e-9, atol=1e-9
            )


class Around(torch.nn.Module):
    """Has the attributes of what it holds, as peft's wrappers do."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def __getattr__(self, name: str):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("model"), name)


def test_a_compiled_model_can_be_copied_and_refuses_strangers() -> None:
    model = compile_blocks(
        build_model("STDiT3", hidden_size=24, depth=1, num_heads=2), backend="eager"
    )
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert copied.run_compiled.args == ("eager",)
    with pytest.raises(ValueError, match="got a model of class Linear; expected an STDiT model"):
        compile_blocks(torch.nn.Linear(1, 1))

    with pytest.raises(ValueError, match="got a model of class Around.*pass the model that a"):
        compile_blocks(Around(model), backend="eager")


WAYS = [
    (Case((1, 5, 5, 6)), {}),
    (Case((1, 5, 5, 6), checkpoint=True), dict(overlap_chunks=2, overlap_backward=True)),
]


def compiled_in_parallel() -> None:
    mesh = SequenceMesh(sp_size=dist.get_world_size())
    free_links = CostModel(flops=400e12, bandwidth=1e30, latency=0)

    def parallelize_compiled(
        model: torch.nn.Module, mesh: SequenceMesh, **options
    ) -> torch.nn.Module:
        return compile_blocks(
            parallelize(model, mesh, cost_model=free_links, **options), backend="eager"
        )

    parity_cases.parallelize = parallelize_compiled  # what assert_one_process_result calls
    for case, options in WAYS:
        torch._dynamo.reset()
        assert_one_process_result(case, mesh, **options)
        if case is WAYS[0][0]:
            # The texts have other lengths, and the blocks are those of another model.
            assert_one_process_result(replace(case, mask=True), mesh, **options)


@pytest.mark.slow
def test_compiled_blocks_under_sequence_parallelism() -> None:
    run_ranks(2, compiled_in_parallel, timeout=600)

"""``compile="blocks"``: the numbers of the plain model; one graph per kind of block and shape."""

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
from torch._dynamo.testing import CompileCounterWithBackend
from window_cases import WindowCase

from opensora_sp.models import build_model, compile_blocks, packed_operator
from opensora_sp.models.attention import attention
from opensora_sp.models.hook_points import Switch
from opensora_sp.models.packed_operator import packed_attention
from opensora_sp.models.packing import Packing
from opensora_sp.models.token_layout import Rows
from opensora_sp.parallel import SequenceMesh, parallelize
from opensora_sp.parallel.cost_model import CostModel

pytestmark = pytest.mark.core
DEPTH = 3
# One for each part of a block between two switches, a spatial and a temporal one.
GRAPHS = 2


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
@pytest.mark.parametrize(("name", "backend"), [("STDiT3", "aot_eager"), ("STDiT2", "eager")])
def test_equal_numbers_and_no_recompilation_within_a_bucket(name: str, backend: str) -> None:
    plain, counter = small(name), CompileCounterWithBackend(backend)
    compiled = compile_blocks(copy.deepcopy(plain), backend=counter)
    assert list(compiled.state_dict()) == list(plain.state_dict())

    bucket, another = (3, 4, 4), (2, 6, 4)
    steps = [  # size, lengths of the texts, recomputed, graphs that may be new
        (bucket, (6, 3), False, GRAPHS),  # whatever the depth
        (bucket, (2, 4), False, 0),
        (bucket, (5, 5), True, 0),
        (bucket, (1, 6), True, 0),
        (another, (4, 2), True, GRAPHS),
        (another, (1, 1), False, 0),
        (bucket, (3, 3), False, 0),
    ]

    for size, texts, recomputed, new in steps:
        before = counter.frame_count
        plain.set_grad_checkpoint(recomputed)
        compiled.set_grad_checkpoint(recomputed)
        found, wanted = step(compiled, size, texts), step(plain, size, texts)
        largest = max(theirs.abs().max().item() for theirs in wanted)
        for ours, theirs in zip(found, wanted, strict=True):
            # Where weights of attention saturate, gradients of queries are rounding errors.
            atol = 1e-9 * theirs.abs().max().item() + 1e-15 * largest
            torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=atol)
        assert counter.frame_count - before == new, (size, texts, recomputed)


def test_encoded_texts_of_other_lengths_share_their_graphs() -> None:
    model, counter = small("STDiT3"), CompileCounterWithBackend("eager")
    x, t = torch.randn(2, 4, 3, 4, 4, dtype=torch.float64), torch.tensor([10.0, 900.0])
    texts = [torch.randn(2, 1, length, 8, dtype=torch.float64) for length in (3, 5, 4)]
    with torch.no_grad():
        wanted = [model(x, t, y) for y in texts]
        compile_blocks(model, backend=counter)
        for y, plain in zip(texts, wanted, strict=True):
            torch.testing.assert_close(
                model(x, t, model.encode_text(y)), plain, rtol=1e-9, atol=1e-9
            )
            assert counter.frame_count == GRAPHS


def test_tokens_that_a_switch_leaves_where_they_lie_share_the_graphs_of_the_first_block(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A single clip: kernels read tokens that a switch has transposed; the first ones are not."""

    def uncopied(switch: Switch, x: torch.Tensor, rows: Rows) -> tuple[torch.Tensor, Rows]:
        # Kernels write a block's output without gaps.
        return rows.transpose(x.contiguous(), copy=False)

    monkeypatch.setattr(Switch, "local", uncopied)
    model, counter = small("STDiT2"), CompileCounterWithBackend("eager")
    x, y = torch.randn(1, 4, 3, 4, 4).double(), torch.randn(1, 1, 6, 8).double()
    numbers = {number: torch.tensor([8.0]) for number in model.sample_inputs}
    with torch.no_grad():
        wanted = model(x, torch.tensor([10.0]), y, **numbers)
        compile_blocks(model, backend=counter)
        found = model(x, torch.tensor([10.0]), y, **numbers)
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)
    assert counter.frame_count == GRAPHS


# Windows, positions of frame, line and column.
V13 = dict(kernel_size=(2, 2, -1), use_spatial_rope=True, qk_norm=True)


@pytest.mark.slow
@pytest.mark.parametrize("masked", [False, True], ids=["whole clips", "video mask"])
@pytest.mark.parametrize("config", [{}, V13], ids=["plain", "windows, 3D rotary positions"])
def test_nothing_breaks_a_graph(config: dict, masked: bool) -> None:
    """Nor do masks, whose groups of tokens differ from batch to batch, recompile one."""
    options = dict(hidden_size=24, depth=DEPTH, num_heads=2, caption_channels=8, model_max_length=6)
    model, counter = build_model("STDiT3", **options, **config), CompileCounterWithBackend("eager")
    plain = copy.deepcopy(model)
    compile_blocks(model, backend=counter)
    x, t, size = torch.randn(2, 4, 3, 8, 8), torch.tensor([10.0, 900.0]), torch.tensor([8.0, 16.0])
    numbers = dict(fps=size, height=size, width=size)

    torch._dynamo.utils.counters.clear()
    for lines, recomputed in ((6, False), (4, True)):
        if masked:
            numbers["video_mask"] = torch.zeros(2, 3, 8, 8, dtype=torch.bool)
            numbers["video_mask"][0, :2, :lines] = numbers["video_mask"][1, :, :, :4] = True
        model.set_grad_checkpoint(recomputed)
        wanted, found = (one(x, t, torch.ones(2, 1, 6, 8), **numbers) for one in (plain, model))
        found.sum().backward()
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)

    assert not torch._dynamo.utils.counters["graph_break"]
    assert counter.frame_count == GRAPHS


LENGTHS = [
    ([5, 3, 0, 4], [2, 2, 1, 3]),
    ([4, 4], [3, 3]),
    ([1, 1], [1, 1]),
    ([0, 0], [1, 2]),
]


@pytest.mark.parametrize(("queries", "keys"), LENGTHS, ids=str)
def test_the_operator_of_packed_attention_is_attention(queries: list, keys: list) -> None:
    q, k, v = (
        torch.randn(sum(of), 2, 8, dtype=torch.float64, requires_grad=True)
        for of in (queries, keys, keys)
    )
    packing = Packing(queries, keys)
    args = q, k, v, packing.lengths, "sdpa", 1
    torch.library.opcheck(packed_attention, args, test_utils=("test_schema", "test_faketensor"))

    found, wanted = packed_attention(*args)[0], attention(q, k, v, lengths=packing)
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)
    grad = torch.randn_like(found)
    for one, other in zip(*(torch.autograd.grad(z, (q, k, v), grad) for z in (found, wanted))):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_the_operators_backward_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = (torch.randn(10, 2, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
    args = q, k, v, Packing([5, 5], [5, 5]).lengths, "sdpa", 1
    wanted = torch.autograd.grad(packed_attention(*args)[0].square().sum(), (q, k, v))
    monkeypatch.setattr(packed_operator, "MAX_SCORES", 2 * 5 * 2)  # two queries of a row
    found = torch.autograd.grad(packed_attention(*args)[0].square().sum(), (q, k, v))
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


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
    assert (
        copy.deepcopy(model).compile_backend
        == pickle.loads(pickle.dumps(model)).compile_backend
        == "eager"
    )
    with pytest.raises(
        ValueError, match="got a model of class Linear; expected an STDiT model; call"
    ):
        compile_blocks(torch.nn.Linear(1, 1))

    with pytest.raises(
        ValueError, match="got a model of class Around.*pass the model that a wrapper holds"
    ):
        compile_blocks(Around(model), backend="eager")


WAYS = [
    (Case((1, 5, 5, 6)), {}),
    (Case((1, 5, 5, 6), checkpoint=True), dict(overlap_chunks=2, overlap_backward=True)),
    (Case((1, 5, 5, 6), checkpoint=True), dict(placement="branch")),
    (WindowCase((1, 5, 6, 6), kernel=(2, 2)), dict(placement="branch")),
    # Attention by heads: of one frame, of all tokens, of whole clips.
    (Case((1, 1, 5, 6)), {}),
    (Case((1, 5, 5, 6), checkpoint=True), dict(strategy="ulysses")),
    (WindowCase((1, 2, 6, 6), full=True, checkpoint=True), {}),
    (WindowCase((1, 5, 6, 6), kernel=(-1, -1)), {}),
]


def compiled_in_parallel() -> None:
    mesh = SequenceMesh(sp_size=dist.get_world_size())
    counter = CompileCounterWithBackend("eager")
    free_links = CostModel(flops=400e12, bandwidth=1e30, latency=0)

    def parallelize_compiled(
        model: torch.nn.Module, mesh: SequenceMesh, **options
    ) -> torch.nn.Module:
        return compile_blocks(
            parallelize(model, mesh, cost_model=free_links, **options), backend=counter
        )

    parity_cases.parallelize = parallelize_compiled  # what assert_one_process_result calls
    for case, options in WAYS:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        before = counter.frame_count
        assert_one_process_result(case, mesh, **options)
        compiled = counter.frame_count
        # With gradients and without, whatever the depth.
        assert compiled - before == 2 * GRAPHS, (case, options)
        # The texts have other lengths, and the blocks are those of another model.
        assert_one_process_result(replace(case, mask=True), mesh, **options)
        assert counter.frame_count == compiled, (case, options)
        if "overlap_chunks" not in options:
            assert not torch._dynamo.utils.counters["graph_break"], (case, options)


@pytest.mark.slow
def test_compiled_blocks_under_sequence_parallelism() -> None:
    run_ranks(2, compiled_in_parallel, timeout=600)

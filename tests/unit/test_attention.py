"""All attention backends of a machine agree, forward and backward; stand-ins for those it lacks."""

from __future__ import annotations

import importlib.machinery
import sys
import types
from collections.abc import Iterator
from functools import partial

import pytest
import torch

from opensora_sp.models import attention as module
from opensora_sp.models import packing
from opensora_sp.models.attention import MAX_SCORES, _explicit, attention
from opensora_sp.models.attention_table import HOPPER, Platform, Sequences
from opensora_sp.models.layers import SelfAttention
from opensora_sp.models.positions import RotaryEmbedding
from opensora_sp.models.token_layout import TEMPORAL, PatchGrid

pytestmark = pytest.mark.core
HEADS, WIDTH = 2, 8
EQUAL = [  # rows, queries, keys
    (3, 5, 5),
    (2, 1, 7),
    (4, 6, 1),  # one key
    (5, 1, 1),  # images in temporal rows
    (0, 4, 4),  # a rank without rows
]
PACKED = [
    ([4, 4, 4], [3, 3, 3]),
    ([5, 0, 2], [1, 4, 6]),
    ([0, 0], [2, 3]),  # a rank without tokens
    ([7], [5]),
    ([3, 3, 1, 3, 3, 1, 1], [3, 3, 1, 3, 3, 1, 1]),  # padded windows: lengths that come again
    ([2] * 300 + [3] * 200, [2] * 300 + [3] * 200),
]


def drawn(shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(
        shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    ).to(dtype)


def tensors(
    case: tuple, dtype: torch.dtype = torch.float64
) -> tuple[list[torch.Tensor], tuple | None]:
    if len(case) == 3:
        rows, queries, keys = case
        shapes, lengths = [(rows, n, HEADS, WIDTH) for n in (queries, keys, keys)], None
    else:
        shapes, lengths = [(sum(one), HEADS, WIDTH) for one in (case[0], case[1], case[1])], case
    return [drawn(shape, i, dtype).requires_grad_() for i, shape in enumerate(shapes)], lengths


def by_definition(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: tuple | None
) -> torch.Tensor:
    """Sample by sample, head by head."""
    if lengths is None:
        samples = list(zip(q, k, v, strict=True))
    else:
        samples = list(
            zip(
                *(z.split(n) for z, n in zip((q, k, v), (lengths[0], lengths[1], lengths[1]))),
                strict=True,
            )
        )

    out = []
    for one_q, one_k, one_v in samples:
        # Scores of drawn numbers are small.
        heads = [((one_q[:, h] @ one_k[:, h].T) / WIDTH**0.5).exp() for h in range(HEADS)]
        heads = [(w / w.sum(1, keepdim=True)) @ one_v[:, h] for h, w in enumerate(heads)]
        out.append(torch.stack(heads, dim=1))

    return q * 1 if not out else torch.stack(out) if lengths is None else torch.cat(out)


def assert_equal_to_definition(
    case: tuple, backend: str, dtype: torch.dtype = torch.float64, tol: float = 1e-12
) -> None:
    ours, lengths = tensors(case, dtype)
    theirs, _ = tensors(case)
    found, wanted = (
        attention(*ours, lengths=lengths, backend=backend),
        by_definition(*theirs, lengths),
    )

    assert found.shape == ours[0].shape and found.dtype == dtype
    probe = drawn(tuple(found.shape), 9)
    (found * probe.to(dtype)).sum().backward()
    (wanted * probe).sum().backward()
    torch.testing.assert_close(found.double(), wanted, rtol=tol, atol=tol)

    for a, b in zip(ours, theirs, strict=True):
        assert a.grad is not None, "a rank without tokens has gradients of zero, not none"
        torch.testing.assert_close(
            a.grad.double(),
            torch.zeros_like(a).double() if b.grad is None else b.grad,
            rtol=tol,
            atol=tol,
        )


@pytest.mark.parametrize("backend", ["auto", "sdpa", "reference"])
@pytest.mark.parametrize("case", [*EQUAL, *PACKED], ids=lambda case: str(case)[:40])
def test_backends_equal_the_definition(case: tuple, backend: str) -> None:
    assert_equal_to_definition(case, backend)
    assert_equal_to_definition(case, backend, torch.float32, 1e-5)
    assert_equal_to_definition(case, backend, torch.bfloat16, 6e-2)


def test_more_rows_than_a_kernel_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_ROWS", 2)
    calls = []
    monkeypatch.setattr(
        module, "_sdpa_rows", lambda _, q, k, v: calls.append(len(q)) or _explicit(q, k, v)
    )
    assert_equal_to_definition((5, 3, 4), "sdpa")
    assert calls == [2, 2, 1]


def test_the_reference_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    softmax = module.explicit_softmax
    monkeypatch.setattr(
        module,
        "explicit_softmax",
        lambda q, k, v: seen.append(len(q) * q.shape[1] * k.shape[1]) or softmax(q, k, v),
    )

    # Less than a row of scores, some queries, some rows, all.
    for bound in (
        7,
        40,
        100,
        MAX_SCORES,
    ):
        monkeypatch.setattr(module, "MAX_SCORES", bound)
        assert_equal_to_definition((4, 5, 6), "reference")
        assert max(seen) * HEADS <= max(bound, HEADS * 6) and (len(seen) == 1) == (
            bound == MAX_SCORES
        )
        seen.clear()


def test_one_key_is_exact_and_twice_differentiable() -> None:
    (q, k, v), _ = tensors((3, 2, 1))
    assert torch.equal(attention(q, k, v, backend="sdpa"), v.expand(q.shape))
    one_key = partial(attention, backend="sdpa")
    assert torch.autograd.gradcheck(one_key, (q, k, v))
    assert torch.autograd.gradgradcheck(one_key, (q, k, v))


def arrivals(model: torch.nn.Module) -> list[str]:
    """The parameters in the order in which a backward pass brings their gradients."""
    order: list[str] = []
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: order.append(name))
    return order


@pytest.mark.parametrize("norm_last", [False, True])
@pytest.mark.parametrize("linear", [torch.nn.Linear, type("Other", (torch.nn.Linear,), {})])
def test_single_tokens_take_their_values(linear: type[torch.nn.Linear], norm_last: bool) -> None:
    """As by softmax over one key: queries, keys and their norms have no influence."""
    options = dict(qk_norm=True, rope=RotaryEmbedding(8), norm_last=norm_last)
    layer = SelfAttention(16, 2, **options).double()
    layer.qkv = linear(16, 48, dtype=torch.float64)
    x = torch.randn(6, 1, 16, dtype=torch.float64, requires_grad=True)
    wanted = layer.proj(layer.qkv(x)[..., 32:])
    gradients = torch.autograd.grad(wanted.square().sum(), [x, *layer.qkv.parameters()])

    order = arrivals(layer)
    out = layer(x, PatchGrid(2, (1, 1, 3), (1, 1, 1)).rows(TEMPORAL))
    out.square().sum().backward()
    torch.testing.assert_close(out, wanted)
    found = [x.grad, layer.qkv.weight.grad, layer.qkv.bias.grad]
    torch.testing.assert_close(found, list(gradients))
    assert not layer.q_norm.weight.grad.any() and not layer.k_norm.weight.grad.any()

    # ZeRO sums gradients over ranks in this order, also where other ranks have longer clips.
    of_images = list(order)
    order.clear()
    rows = PatchGrid(2, (3, 1, 3), (1, 1, 1)).rows(TEMPORAL)
    layer(torch.randn(6, 3, 16, dtype=torch.float64), rows).square().sum().backward()
    assert of_images == order and len(order) == 6


class StandIn(types.ModuleType):
    """flash-attn 2.x as its documentation says, on CPU; remembers the calls."""

    def __init__(self) -> None:
        super().__init__("flash_attn")
        self.__spec__ = importlib.machinery.ModuleSpec("flash_attn", None)
        self.calls: list[str] = []
        self.asked: list[bool] = []  # for a deterministic backward

    def check(self, *tensors: torch.Tensor) -> None:
        for z in tensors:
            if z.dtype not in (torch.float16, torch.bfloat16):
                raise RuntimeError("FlashAttention only support fp16 and bf16 data type")
            assert z.stride(-1) == 1 and z.numel(), (
                "input tensor must have contiguous last dimension and hold something"
            )

    def flash_attn_func(self, q, k, v, dropout_p=0.0, causal=False, deterministic=False):
        self.asked.append(deterministic)
        self.check(q, k, v)
        assert q.ndim == 4 and q.shape[0] == k.shape[0] and k.shape == v.shape
        assert not causal and not dropout_p
        self.calls.append("rows")
        return _explicit(q, k, v)

    def flash_attn_varlen_func(
        self,
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        dropout_p=0.0,
        causal=False,
        deterministic=False,
    ):
        self.asked.append(deterministic)
        self.check(q, k, v)
        assert q.ndim == 3 and k.shape == v.shape and not causal and not dropout_p
        self.calls.append("varlen")
        parts = []
        for edges, longest, z in ((cu_seqlens_q, max_seqlen_q, q), (cu_seqlens_k, max_seqlen_k, k)):
            assert edges.dtype == torch.int32 and edges.device == z.device and edges.is_contiguous()
            assert type(longest) is int and longest == edges.diff().max() and edges[0] == 0
            assert edges[-1] == len(z), "no rows past the last cu_seqlen"
        assert len(cu_seqlens_q) == len(cu_seqlens_k)
        q_sizes, k_sizes = cu_seqlens_q.diff().tolist(), cu_seqlens_k.diff().tolist()
        for rows in zip(q.split(q_sizes), k.split(k_sizes), v.split(k_sizes), strict=True):
            parts.append(_explicit(*(z[None] for z in rows))[0])
        return torch.cat(parts)


@pytest.fixture
def flash(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    """As if flash-attn were installed and the CPU a GPU that it knows."""
    stand_in = StandIn()
    yield from installed("flash_attn", stand_in, monkeypatch)


def installed(
    name: str, package: types.ModuleType, monkeypatch: pytest.MonkeyPatch
) -> Iterator[types.ModuleType]:
    monkeypatch.setitem(sys.modules, name, package)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: HOPPER)
    of, cuda = Platform.of, torch.device("cuda")
    monkeypatch.setattr(Platform, "of", lambda device, deterministic: of(cuda, deterministic))
    module._choose.cache_clear()
    yield package
    module._choose.cache_clear()


class StandIn3(StandIn):
    """flash-attn 3; early builds also return sums of the softmax."""

    def __init__(self, returns_sums: bool) -> None:
        super().__init__()
        self.returns_sums = returns_sums

    def returned(self, out: torch.Tensor):
        return (out, out.new_zeros(out.shape[:-1])) if self.returns_sums else out

    def check(self, *tensors: torch.Tensor) -> None:
        super().check(*tensors)
        assert all(z.stride(0) and z.shape[-1] % 8 == 0 for z in tensors)

    def flash_attn_func(
        self, q, k, v, softmax_scale=None, causal=False, qv=None, deterministic=False, sm_margin=0
    ):
        assert softmax_scale is None and not causal and qv is None and not sm_margin
        return self.returned(super().flash_attn_func(q, k, v, deterministic=deterministic))

    def flash_attn_varlen_func(
        self,
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        seqused_q=None,
        seqused_k=None,
        deterministic=False,
    ):
        assert seqused_q is None and seqused_k is None
        lengths = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
        attend = super().flash_attn_varlen_func
        return self.returned(attend(q, k, v, *lengths, deterministic=deterministic))


@pytest.fixture(params=[False, True], ids=["output", "output and sums"])
def flash3(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> StandIn3:
    """As if flash-attn 3 were installed and the CPU a Hopper GPU."""
    yield from installed("flash_attn_interface", StandIn3(request.param), monkeypatch)


@pytest.mark.parametrize("deterministic", [False, True])
def test_flash_attn_3_is_called_as_documented(flash3: StandIn3, deterministic: bool) -> None:
    torch.use_deterministic_algorithms(deterministic)
    try:
        for case in [*EQUAL, *PACKED[:-1]]:
            flash3.calls.clear()
            assert_equal_to_definition(case, "flash3", torch.bfloat16, 6e-2)
            holds_tokens = sum(case[0]) if isinstance(case[0], list) else case[0] and case[2] > 1
            several = isinstance(case[0], list) and len(set(zip(*case, strict=True))) > 1
            assert flash3.calls == (["varlen" if several else "rows"] if holds_tokens else [])
    finally:
        torch.use_deterministic_algorithms(False)
    assert flash3.asked == [deterministic] * len(flash3.asked) != []


def test_flash_attn_3_gets_keys_of_its_own(
    flash3: StandIn3, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pieces of a caption's queries share its keys in memory, which other kernels read in place."""
    monkeypatch.setattr(packing, "PIECE", 2)
    assert packing.Packing([6], [3]).pieces(HEADS, 1).are_equal
    assert_equal_to_definition(([6], [3]), "flash3", torch.bfloat16, 6e-2)
    assert flash3.calls == ["rows"]


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("case", [*EQUAL, *PACKED], ids=lambda case: str(case)[:40])
def test_flash_attn_is_called_as_documented(
    flash: StandIn, case: tuple, deterministic: bool
) -> None:
    torch.use_deterministic_algorithms(deterministic)
    try:
        assert_equal_to_definition(case, "flash", torch.float16, 1e-2)
    finally:
        torch.use_deterministic_algorithms(False)
    assert set(flash.asked) <= {deterministic}
    holds_tokens = sum(case[0]) if isinstance(case[0], list) else case[0] and case[2] > 1
    several = isinstance(case[0], list) and len(set(zip(*case, strict=True))) > 1
    assert flash.calls == (["varlen" if several else "rows"] if holds_tokens else [])


def test_many_packed_samples_go_in_several_calls(
    flash: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing, "MAX_ROWS", 2)
    assert_equal_to_definition(([3, 1, 0, 0, 2], [2, 2, 1, 1, 3]), "flash", torch.float16, 1e-2)
    assert flash.calls == ["varlen", "varlen"]  # the two in the middle have no query


@pytest.mark.parametrize(
    ("dtype", "width", "platform", "expected"),
    [
        (torch.bfloat16, 72, Platform(HOPPER), "torch_flash"),
        (torch.bfloat16, 36, Platform(HOPPER), None),  # flash-attn pads such heads
        (torch.bfloat16, 72, Platform((7, 5)), "torch_efficient"),
        (torch.float32, 36, Platform(HOPPER), "torch_efficient"),
        (torch.float64, 72, Platform(HOPPER), None),
    ],
)
def test_torch_stands_in_with_a_kernel_that_takes_the_heads(
    dtype: torch.dtype,
    width: int,
    platform: Platform,
    expected: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """For packed tokens, by torch's kernel for them."""
    monkeypatch.setattr(Platform, "of", lambda device, deterministic: platform)
    uncached = module.torch_varlen_kernel.__wrapped__
    kernel = None if expected is None else getattr(module, expected)
    assert uncached(Sequences(dtype, width), torch.device("meta")) is kernel


def test_gradients_of_repeated_keys_are_rounded_once() -> None:
    """Sums over the pieces of a sample are fp32 sums, rounded; adding pieces is much worse."""
    pieces = packing.Pieces((4,) * 300 + (5,), (3,) * 300 + (2,), ((3, 300), (2, 1), (4, 0)))
    z = torch.zeros(9, HEADS, WIDTH, dtype=torch.bfloat16, requires_grad=True)
    grad = torch.rand(902, HEADS, WIDTH, generator=torch.Generator().manual_seed(0)).bfloat16()
    pieces.repeat(z).backward(grad)
    wanted = torch.cat(
        [grad[:900].float().unflatten(0, (300, 3)).sum(0), grad[900:].float(), torch.zeros(4, 2, 8)]
    )
    assert torch.equal(z.grad, wanted.bfloat16())


def test_pieces_hold_all_tokens_and_few_of_them_are_small() -> None:
    for queries in [*range(1, 400), 1023, 1024, 1025, 7919, 65536]:
        for keys, processors in ((1, 132), (300, 1), (300, 132), (7919, 132)):
            cut = packing.Packing([queries, 0], [keys, 5]).pieces(16, processors).queries
            assert sum(cut) == queries
            assert len(cut) == 1 if keys >= queries else max(cut) <= 1024
            assert len(cut) == 1 or min(cut) >= packing.TILE // 2


def test_chunks_of_the_definition_add_gradients_of_keys_in_fp32(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """1,024 chunks of queries: as many additions to the gradient of each key and value."""
    tensors = [
        drawn((1, length, 1, 8), seed, torch.float32) for seed, length in enumerate((1024, 4, 4))
    ]
    weights = drawn((1, 1024, 1, 8), 3, torch.float32) + 1
    found = []
    for dtype, most in ((torch.float32, MAX_SCORES), (torch.bfloat16, 4)):
        monkeypatch.setattr(module, "MAX_SCORES", most)
        q, k, v = (z.bfloat16().to(dtype).requires_grad_() for z in tensors)
        (_explicit(q, k, v) * weights.to(dtype)).sum().backward()
        found.append((q.grad, k.grad, v.grad))
    for exact, rounded in zip(*found, strict=True):
        assert (rounded - exact).norm() < 0.01 * exact.norm()

"""All attention backends that a machine has agree, forward and backward; those it has not, by stand-ins."""

from __future__ import annotations

import importlib.machinery
import logging
import sys
import types

import pytest
import torch

from opensora_sp.config.schema import check_values
from opensora_sp.models import attention as module
from opensora_sp.models import build_model
from opensora_sp.models.attention import MAX_SCORES, _explicit, _OneKey, attention
from opensora_sp.models.stdit3 import STDiT3Config
from opensora_sp.weights import check_model_config, write_model_config

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
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def tensors(case: tuple, dtype: torch.dtype = torch.float64) -> tuple[list[torch.Tensor], tuple | None]:
    if len(case) == 3:
        rows, queries, keys = case
        shapes, lengths = [(rows, n, HEADS, WIDTH) for n in (queries, keys, keys)], None
    else:
        shapes, lengths = [(sum(one), HEADS, WIDTH) for one in (case[0], case[1], case[1])], case
    return [drawn(shape, i, dtype).requires_grad_() for i, shape in enumerate(shapes)], lengths


def by_definition(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: tuple | None) -> torch.Tensor:
    """Sample by sample, head by head."""
    if lengths is None:
        samples = list(zip(q, k, v, strict=True))
    else:
        samples = list(zip(*(z.split(n) for z, n in zip((q, k, v), (lengths[0], lengths[1], lengths[1]))), strict=True))
    out = []
    for one_q, one_k, one_v in samples:
        heads = [
            ((one_q[:, h] @ one_k[:, h].T) / WIDTH**0.5).exp() for h in range(HEADS)
        ]  # scores of drawn numbers are small
        heads = [(w / w.sum(1, keepdim=True)) @ one_v[:, h] for h, w in enumerate(heads)]
        out.append(torch.stack(heads, dim=1))
    return q * 1 if not out else torch.stack(out) if lengths is None else torch.cat(out)


def assert_equal_to_definition(
    case: tuple, backend: str, dtype: torch.dtype = torch.float64, tol: float = 1e-12
) -> None:
    ours, lengths = tensors(case, dtype)
    theirs, _ = tensors(case)
    found, wanted = attention(*ours, lengths=lengths, backend=backend), by_definition(*theirs, lengths)
    assert found.shape == ours[0].shape and found.dtype == dtype
    probe = drawn(tuple(found.shape), 9)
    (found * probe.to(dtype)).sum().backward()
    (wanted * probe).sum().backward()
    torch.testing.assert_close(found.double(), wanted, rtol=tol, atol=tol)
    for a, b in zip(ours, theirs, strict=True):
        assert a.grad is not None, "a rank without tokens has gradients of zero, not none"
        torch.testing.assert_close(
            a.grad.double(), torch.zeros_like(a).double() if b.grad is None else b.grad, rtol=tol, atol=tol
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
    monkeypatch.setattr(module, "_sdpa_rows", lambda q, k, v: calls.append(len(q)) or _explicit(q, k, v))
    assert_equal_to_definition((5, 3, 4), "sdpa")
    assert calls == [2, 2, 1]


def test_the_reference_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    softmax = module._softmax
    monkeypatch.setattr(
        module, "_softmax", lambda q, k, v: seen.append(len(q) * q.shape[1] * k.shape[1]) or softmax(q, k, v)
    )
    for bound in (7, 40, 100, MAX_SCORES):  # less than a row of scores, some queries, some rows, all
        monkeypatch.setattr(module, "MAX_SCORES", bound)
        assert_equal_to_definition((4, 5, 6), "reference")
        assert max(seen) * HEADS <= max(bound, HEADS * 6) and (len(seen) == 1) == (bound == MAX_SCORES)
        seen.clear()


def test_one_key_is_exact_and_twice_differentiable() -> None:
    (q, k, v), _ = tensors((3, 2, 1))
    assert torch.equal(_OneKey.apply(q, k, v), v.expand(q.shape))
    assert torch.autograd.gradcheck(_OneKey.apply, (q, k, v)) and torch.autograd.gradgradcheck(_OneKey.apply, (q, k, v))


class StandIn(types.ModuleType):
    """flash-attn 2.x as its documentation says, on CPU; remembers the calls."""

    def __init__(self) -> None:
        super().__init__("flash_attn")
        self.__spec__ = importlib.machinery.ModuleSpec("flash_attn", None)
        self.calls: list[str] = []

    def check(self, *tensors: torch.Tensor) -> None:
        for z in tensors:
            if z.dtype not in (torch.float16, torch.bfloat16):
                raise RuntimeError("FlashAttention only support fp16 and bf16 data type")
            assert z.stride(-1) == 1 and z.numel(), (
                "input tensor must have contiguous last dimension and hold something"
            )

    def flash_attn_func(self, q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1)):
        self.check(q, k, v)
        assert q.ndim == 4 and q.shape[0] == k.shape[0] and k.shape == v.shape and not causal and not dropout_p
        self.calls.append("rows")
        return _explicit(q, k, v)

    def flash_attn_varlen_func(
        self, q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None,
        causal=False, window_size=(-1, -1),
    ):  # fmt: skip
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
    monkeypatch.setitem(sys.modules, "flash_attn", stand_in)
    real = module._flash_kernels_obstacle
    monkeypatch.setattr(module, "_flash_kernels_obstacle", lambda _, *kind: real(torch.device("cuda"), *kind))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    module._choose.cache_clear()
    yield stand_in
    module._choose.cache_clear()


@pytest.mark.parametrize("backend", ["auto", "flash"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("case", [*EQUAL, *PACKED], ids=lambda case: str(case)[:40])
def test_flash_attn_is_called_as_documented(flash: StandIn, case: tuple, dtype: torch.dtype, backend: str) -> None:
    assert_equal_to_definition(case, backend, dtype, 6e-2 if dtype == torch.bfloat16 else 1e-2)
    holds_tokens = sum(case[0]) if isinstance(case[0], list) else case[0] and case[2] > 1
    several = isinstance(case[0], list) and len(set(zip(*case, strict=True))) > 1
    assert flash.calls == (["varlen" if several else "rows"] if holds_tokens else [])


def test_many_packed_samples_go_in_several_calls(flash: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_ROWS", 2)
    assert_equal_to_definition(([3, 1, 0, 0, 2], [2, 2, 1, 1, 3]), "flash", torch.float16, 1e-2)
    assert flash.calls == ["varlen", "varlen"]  # the two in the middle have no query


def test_torchs_own_varlen_attention(flash: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first seven arguments are those of flash-attn; on CPU it is not asked."""
    monkeypatch.setattr(module, "_torch_varlen", lambda: flash.flash_attn_varlen_func)
    for case in PACKED:
        assert_equal_to_definition(case, "sdpa", torch.bfloat16, 6e-2)
    assert flash.calls == ["varlen"] * 3
    assert_equal_to_definition(PACKED[1], "sdpa")  # float64: sample by sample
    assert flash.calls == ["varlen"] * 3


def test_flash_attn_asked_for_in_vain(caplog: pytest.LogCaptureFixture) -> None:
    module._choose.cache_clear()
    (q, k, v), _ = tensors((2, 3, 3))
    with pytest.raises(ValueError, match=r"got attention 'flash', but .* not on a GPU; expected .*; install"):
        attention(q, k, v, backend="flash")
    with pytest.raises(ValueError, match=r"got attention 'flsh'; expected one of .*; choose one"):
        build_model("STDiT3", attention="flsh")
    with caplog.at_level(logging.INFO):
        for _ in range(3):
            attention(q, k, v)
        attention(q.float(), k.float(), v.float(), backend="reference")
    assert [record.message for record in caplog.records] == [
        "attention backend: torch SDPA (the tensors are not on a GPU)",
        "attention backend: explicit softmax (asked for)",
    ]


@pytest.mark.parametrize(
    ("kind", "obstacle"),
    [
        (("cuda", torch.float64, 64), "float64"),
        (("cuda", torch.bfloat16, 36), "multiples of 16 bytes, not 36"),
        (("cuda", torch.bfloat16, 72), None),
        (("cuda", torch.float32, 36), None),
        (("cpu", torch.float64, 5), None),
    ],
)
def test_sdpa_is_not_taken_where_it_would_build_matrices(kind: tuple, obstacle: str | None, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    found = module._sdpa_obstacle(torch.device(kind[0]), *kind[1:])
    assert (found is None) == (obstacle is None) and (obstacle or "") in (found or "")


def test_cudnn_is_left_out_where_it_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    for version, taken in ((None, False), (90100, False), (91500, False), (91501, True), (92000, True)):
        monkeypatch.setattr(torch.backends.cudnn, "version", lambda version=version: version)
        names = [backend.name for backend in module._sdpa_backends()]
        assert ("CUDNN_ATTENTION" in names) == taken and "MATH" not in names


@pytest.mark.parametrize("name", ["STDiT", "STDiT2", "STDiT3"])
def test_models_hand_the_backend_on(name: str, tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = dict(input_size=(3, 4, 4)) if name == "STDiT" else {}
    options = dict(hidden_size=24, depth=1, num_heads=2, caption_channels=4, model_max_length=3, **size)
    asked = []
    real = module._attend_rows
    monkeypatch.setattr(module, "_attend_rows", lambda backend, *qkv: asked.append(backend.name) or real(backend, *qkv))
    model = build_model(name, **options, attention="reference")
    numbers = {number: torch.tensor([8.0, 16.0]) for number in model.sample_inputs}
    model(torch.randn(2, 4, 3, 4, 4), torch.tensor([10.0, 900.0]), torch.randn(2, 1, 3, 4), **numbers)
    cross = 2 if name == "STDiT3" else 1
    assert asked == ["reference"] * (2 + cross)
    write_model_config(tmp_path, name, model.config)
    check_model_config(tmp_path, name, build_model(name, **options, attention="sdpa").config)  # no property of weights


def test_configs_know_the_backend() -> None:
    assert check_values("model", dict(attention="sdpa"), STDiT3Config) == dict(attention="sdpa")


def test_chunks_of_the_definition_add_gradients_of_keys_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    """1,024 chunks of queries: as many additions to the gradient of each key and value."""
    tensors = [drawn((1, length, 1, 8), seed, torch.float32) for seed, length in enumerate((1024, 4, 4))]
    weights = drawn((1, 1024, 1, 8), 3, torch.float32) + 1
    found = []
    for dtype, most in ((torch.float32, MAX_SCORES), (torch.bfloat16, 4)):
        monkeypatch.setattr(module, "MAX_SCORES", most)
        q, k, v = (z.bfloat16().to(dtype).requires_grad_() for z in tensors)
        (_explicit(q, k, v) * weights.to(dtype)).sum().backward()
        found.append((q.grad, k.grad, v.grad))
    for exact, rounded in zip(*found, strict=True):
        assert (rounded - exact).norm() < 0.01 * exact.norm()

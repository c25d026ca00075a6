"""Full attention by a plan: transformers of diffusers on several ranks against one process."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from functools import partial

import pytest
import torch
import torch.distributed as dist
from full_attention_models import CASES, drawn, numbers
from full_attention_results import (
    assert_same,
    results_of,
    weights_like,
)
from ranks import run_ranks
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from opensora_sp.checker.recording import Lifted
from opensora_sp.parallel import (
    CommLedger,
    Cut,
    SequenceMesh,
    TokenPlan,
    parallelize,
    register_plan,
    unwrap,
)
from opensora_sp.parallel.attention_calls import DISPATCH
from opensora_sp.parallel.diffusers_plans import PLANS, STATED, plan_of_diffusers
from opensora_sp.parallel.layout import balanced_sizes
from opensora_sp.parallel.rank_groups import RankGroup

WORLD, PAIR = RankGroup(0, 3), RankGroup(0, 2)
FEW_TOKENS = ("hunyuan", "flux")  # with ranks without text


def families(names: Iterable[str], checkpointing: bool) -> None:
    mesh = SequenceMesh(dist.get_world_size())
    for name in names:
        torch.manual_seed(1)
        model, inputs = drawn(name)
        if checkpointing:
            model.enable_gradient_checkpointing()
        expected = results_of(model, inputs)
        parallelize(model, mesh)
        # The second backward pass keeps what blocks received.
        for _ in range(2 if checkpointing else 1):
            assert_same(results_of(model, inputs, mesh=mesh), expected, name)


@pytest.mark.parametrize(
    "ranks, checkpointing",
    [
        (3, True),
        pytest.param(3, False, marks=pytest.mark.slow),
        pytest.param(2, True, marks=pytest.mark.slow),
        pytest.param(5, True, marks=pytest.mark.slow),
    ],
)
def test_families_equal_one_process(ranks: int, checkpointing: bool) -> None:
    run_ranks(ranks, families, [*CASES], checkpointing)


def families_without_lifted_casts() -> None:
    """In float64 but for what the models themselves compute in float32."""
    mesh = SequenceMesh(dist.get_world_size())
    for name in CASES:
        torch.manual_seed(1)
        model, inputs = drawn(name)
        expected = results_of(model, inputs, lifts=False)
        parallelize(model, mesh)
        ours = results_of(model, inputs, mesh=mesh, lifts=False)
        assert_same(ours, expected, name, bound=1e-5)


@pytest.mark.slow
def test_families_without_lifted_casts() -> None:
    run_ranks(3, families_without_lifted_casts)


@pytest.mark.slow
def test_ranks_without_tokens_of_a_stream() -> None:
    run_ranks(8, families, FEW_TOKENS, True)


def guidance() -> None:
    """Two passes with texts of different lengths before one backward pass, which recomputes."""
    mesh = SequenceMesh(dist.get_world_size())
    model, inputs = drawn("flux")
    model.enable_gradient_checkpointing()
    short = inputs | {"encoder_hidden_states": numbers(2, 1, 6), "txt_ids": torch.zeros(1, 3)}

    def gradients(average: bool) -> list[Tensor]:
        model.zero_grad()
        with Lifted():
            outputs = [model(**given, return_dict=False)[0] for given in (inputs, short)]
            (outputs[0] * weights_like(outputs[0]) * 3 - outputs[1].cos()).sum().backward()
        grads = [parameter.grad.clone() for parameter in model.parameters()]
        for grad in grads if average else []:
            dist.all_reduce(grad)
            grad /= mesh.sp_size
        return grads

    expected = gradients(average=False)
    parallelize(model, mesh)
    for _ in range(2):
        for ours, theirs in zip(gradients(average=True), expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-10)


def test_guidance_with_captions_of_unequal_lengths() -> None:
    run_ranks(3, guidance)


def adapters() -> None:
    """LoRA on the layers of queries, keys and values, and of text alone, whole on every rank."""
    from peft import LoraConfig

    mesh = SequenceMesh(dist.get_world_size())
    for targets in (["to_q", "to_k", "to_v"], r".*attn2\.to_[kv]"):
        torch.manual_seed(2)
        model, inputs = drawn("wan")
        model.add_adapter(LoraConfig(r=2, target_modules=targets))
        torch.manual_seed(3)
        for name, parameter in model.named_parameters():
            if "lora" in name:
                parameter.data = torch.randn_like(parameter, dtype=torch.float64)
        expected = results_of(model, inputs)
        assert any("attn2.to_k.lora" in name for name in expected)
        parallelize(model, mesh)
        assert_same(results_of(model, inputs, mesh=mesh), expected, "LoRA")


def test_lora_of_queries_keys_and_values() -> None:
    run_ranks(3, adapters)


def counted(
    name: str, mesh: SequenceMesh, kind: str, *, recompute_communication: bool = False
) -> list[int]:
    """Bytes that this rank sends after the first pass: forward, in recomputation, backward."""
    model, inputs = drawn(name)
    model.enable_gradient_checkpointing()
    parallelize(model, mesh, recompute_communication=recompute_communication)
    results_of(model, inputs)
    with CommLedger() as counter:
        results_of(model, inputs)
    return [counter.bytes[kind, phase] for phase in ("forward", "recompute", "backward")]


def bytes_and_formula() -> tuple[list[list[int]], list[list[int]]]:
    """Bytes of Wan's heads and HunyuanVideo's mask, and by the formula of docs/communication.md."""
    mesh = SequenceMesh(dist.get_world_size())
    length, samples, heads, width = 45, 2, 3, 8
    tokens = balanced_sizes(length, mesh.sp_size)[mesh.sp_rank]
    units = balanced_sizes(samples * heads, mesh.sp_size)[mesh.sp_rank]
    there = (samples * heads - units) * tokens * width * 8
    back = units * (length - tokens) * width * 8
    # Two blocks, of which the attention to text sends nothing.
    forward, backward = 2 * (3 * there + back), 2 * (3 * back + there)

    tokens = sum(balanced_sizes(n, mesh.sp_size)[mesh.sp_rank] for n in (30, 7))
    sent = [
        counted("wan", mesh, "heads"),
        counted("wan", mesh, "heads", recompute_communication=True),
        counted("hunyuan", mesh, "mask"),
    ]
    mask = (mesh.sp_size - 1) * tokens * samples
    return sent, [[forward, 0, backward], [forward, forward, backward], [mask, 0, 0]]


@pytest.mark.parametrize("ranks", [2, 5])
def test_bytes_equal_the_formula(ranks: int) -> None:
    for sent, expected in run_ranks(ranks, bytes_and_formula):
        assert sent == expected


class Joint(nn.Module):
    """Attention by ``scaled_dot_product_attention``, or by hand."""

    def __init__(self, by_hand: bool = False, scale: float = 1.0) -> None:
        super().__init__()
        self.qkv, self.by_hand, self.scale = nn.Linear(4, 12), by_hand, scale

    def forward(self, hidden_states: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = self.qkv(hidden_states).unflatten(-1, (3, 2, 2)).unbind(2)
        if self.by_hand:
            return (q @ k.transpose(-1, -2) @ v).flatten(2)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        mask = None if mask is None else self.scale * mask
        out = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return out.transpose(1, 2).flatten(2)


class Blocks(nn.Module):
    def __init__(self, by_hand: bool = False) -> None:
        super().__init__()
        self.first, self.second, self.head = Joint(), Joint(by_hand, 2.0), nn.Linear(4, 4)
        self.unused = nn.Identity()

    def forward(self, hidden_states: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.head(self.second(self.first(hidden_states, mask), mask))


CUT, MASK = {"hidden_states": Cut(1, 3)}, {"mask": Cut(3, 4)}
PLAN = dict(inputs={"first": CUT}, attention=("first", "second"), gather={"head": (1,)})
WRONG = {
    "not caught": (True, {}, None, "'second', which computes no attention"),
    "not named": (False, {"attention": ("first",)}, None, "none of 1 that attend"),
    "not cut": (
        False,
        {"inputs": {"first": CUT, "unused": {"input": Cut(0)}}},
        None,
        "did not call 'unused'",
    ),
    "cut twice": (
        False,
        {"inputs": {"first": CUT, "second": CUT}},
        None,
        "got 'hidden_states' to cut a second time",
    ),
    "axes": (False, {"inputs": {"first": {"hidden_states": Cut(1, 2)}}}, None, "expected 2 axes"),
    "square mask": (False, {}, torch.zeros(1, 1, 7, 7), r"no mask of L x L is held"),
    "two masks": (
        False,
        {"inputs": {"first": CUT | MASK, "second": MASK}},
        torch.ones(1, 1, 1, 7),
        "got another mask in 'second', made of the same argument",
    ),
    "no argument": (
        False,
        {"inputs": {"first": CUT | {"masks": Cut(3)}}},
        None,
        "got 'masks' to cut where 'first' is called",
    ),
    "not gathered": (False, {"gather": {"unused": (1,)}}, None, r"called none of \['unused'\]"),
}


def refusals() -> dict[str, str]:
    mesh = SequenceMesh(dist.get_world_size())
    messages: dict[str, str] = {}
    for name, (by_hand, changes, mask, _) in WRONG.items():
        model = Blocks(by_hand)
        register_plan(Blocks, TokenPlan(**PLAN | changes))
        with pytest.raises(ValueError) as error:
            parallelize(model, mesh)
            model(torch.ones(1, 7, 4), mask)
        messages[name] = str(error.value)
        unwrap(model)
        assert not any("forward" in vars(module) for module in model.modules())
    return messages


def test_plans_that_miss_something_are_refused_in_the_first_pass() -> None:
    for messages in run_ranks(2, refusals):
        for name, (*_, expected) in WRONG.items():
            assert re.search(expected, messages[name]), messages[name]


def test_every_plan_that_diffusers_states_is_known() -> None:
    """A new class with a ``_cp_plan`` gets a case here, or a reason why it is refused."""
    import diffusers
    from diffusers.models.modeling_utils import ModelMixin

    stated: set[str] = set()
    for name in dir(diffusers):
        member = getattr(diffusers, name, None)
        if isinstance(member, type) and issubclass(member, ModelMixin) and member._cp_plan:
            stated.add(name)
    assert stated - {*PLANS, *STATED} == set()
    assert {*STATED} <= stated
    # The name that is replaced in their files.
    for name in STATED:
        assert hasattr(sys.modules[getattr(diffusers, name).__module__], DISPATCH), name


def test_older_diffusers_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("opensora_sp.parallel.diffusers_plans.version", lambda name: "0.41.3")
    model, _ = drawn("wan")
    with pytest.raises(ValueError, match="got diffusers 0.41.3; expected 0.42 or later"):
        plan_of_diffusers(model)


def test_models_without_a_plan_are_refused() -> None:
    from diffusers import AutoencoderKL

    model = AutoencoderKL(block_out_channels=(4,), norm_num_groups=2)
    with pytest.raises(ValueError, match="got a model of class AutoencoderKL; expected one of"):
        plan_of_diffusers(model)


def shards() -> None:
    """The output of a model that ends with the gathered module may stay a shard."""
    mesh = SequenceMesh(dist.get_world_size())
    model, inputs = drawn("flux")
    with Lifted():
        whole = model(**inputs, return_dict=False)[0]
        parallelize(model, mesh)
        part = model(**inputs, return_dict=False, output="shards")[0]
    sizes = balanced_sizes(whole.shape[1], mesh.sp_size)
    torch.testing.assert_close(part, whole.split(sizes, 1)[mesh.sp_rank])


def test_output_stays_a_shard() -> None:
    run_ranks(3, partial(shards))


def shared_and_grouped() -> None:
    """A module that is called twice, under checkpointing, in groups of which a rank knows one."""
    mesh = SequenceMesh("auto")
    torch.manual_seed(4)
    model = Twice().double()
    x = torch.randn(2, 7, 4, dtype=torch.float64)
    model(x).square().sum().backward()
    expected = [parameter.grad.clone() for parameter in model.parameters()]

    entry = {"unused": {"input": Cut(1, 3)}}
    plan = {"inputs": entry, "attention": ("first",), "streams": ("input",)}
    register_plan(Twice, TokenPlan(**PLAN | plan))
    parallelize(model, mesh)
    for group in (PAIR, PAIR, WORLD, WORLD):
        if mesh.rank not in group:
            continue
        with mesh.using(group):
            model.zero_grad()
            model(x).square().sum().backward()
            for parameter, gradient in zip(model.parameters(), expected, strict=True):
                dist.all_reduce(parameter.grad, group=mesh.sp_group)
                torch.testing.assert_close(parameter.grad / group.size, gradient)


class Twice(Blocks):
    """Both attentions are one module."""

    def __init__(self) -> None:
        super().__init__()
        self.second = self.first

    def forward(self, hidden_states: Tensor) -> Tensor:
        x = checkpoint(self.first, self.unused(hidden_states), use_reentrant=False)
        x = x + checkpoint(self.second, x, use_reentrant=False)
        return self.head(x)


def test_a_shared_module_in_groups_with_different_histories() -> None:
    run_ranks(3, shared_and_grouped)


class JointOutput(Blocks):
    """Text and video are one sequence, also in the output."""

    def forward(self, encoder_hidden_states: Tensor, hidden_states: Tensor) -> Tensor:
        return self.head(self.first(torch.cat([encoder_hidden_states, hidden_states], 1)))


def joint_output() -> None:
    mesh = SequenceMesh(dist.get_world_size())
    torch.manual_seed(5)
    model = JointOutput().double()
    cuts = {"": {"encoder_hidden_states": Cut(1, 3)} | CUT}
    register_plan(JointOutput, TokenPlan(**PLAN | {"inputs": cuts, "attention": ("first",)}))
    for text in (5, 1):
        inputs = numbers(2, text, 4), numbers(2, 7, 4)
        expected = model(*inputs)
        parallelize(model, mesh)
        torch.testing.assert_close(model(*inputs), expected)
        unwrap(model)


def test_a_gathered_sequence_of_two_streams_is_in_their_order() -> None:
    run_ranks(3, joint_output)

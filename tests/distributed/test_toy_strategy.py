"""A parallel strategy from outside the package: one class, registered. Engine, planner, command
line, config and docs take it from there.

Toy: tokens stay in spatial rows, and the input and output of each temporal attention switch layout.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from parity_cases import (
    DEPTH,
    FULL,
    PLAIN,
    Case,
    assert_one_process_result,
    make_inputs,
    make_model,
)
from ranks import run_ranks

from opensora_sp.cli import main
from opensora_sp.config import load_train_config
from opensora_sp.models.registry import resolve_config
from opensora_sp.parallel import Options, SequenceMesh, parallelize
from opensora_sp.parallel.batch_shape import BatchShape
from opensora_sp.parallel.collectives import exchange
from opensora_sp.parallel.options import STRATEGY_OPTIONS
from opensora_sp.parallel.strategies import (
    IN_ORDER,
    AllToAll,
    BlockLayouts,
    OneLayout,
    register_strategy,
    strategy_for,
)
from opensora_sp.parallel.strategies.strategy import AttentionFn
from opensora_sp.planner.traffic import traffic

pytestmark = pytest.mark.core
SPATIAL, TEMPORAL = "b t | s", "b s | t"


class TemporalBranch(OneLayout):
    label = option = "temporal_branch"
    condition = "for models without windows"
    moves = "input and output of temporal attention"
    resident_layout = "spatial"

    @classmethod
    def attention_layouts(cls, grid: Any) -> BlockLayouts:
        return BlockLayouts(SPATIAL, TEMPORAL)

    @classmethod
    def exchanges(cls, shape: BatchShape, options: Options, element_size: int) -> list[AllToAll]:
        token = shape.width * element_size
        return [
            AllToAll(shape.depth, SPATIAL, TEMPORAL, token),
            AllToAll(shape.depth, TEMPORAL, SPATIAL, token),
        ]

    def self_attention(
        self, local: AttentionFn, x: torch.Tensor, rows: Any, precomputed: Any, block: str
    ) -> torch.Tensor:
        if block == "spatial":
            return local(x, rows, precomputed)

        temporal = self.local_rows(rows.transposed())
        there = self.plan(rows, SPATIAL, TEMPORAL, x.device)
        back = self.plan(rows, TEMPORAL, SPATIAL, x.device)

        received = exchange(x.flatten(0, 1), there, self.member.sp_group, kind="toy")
        out = local(received.unflatten(0, (temporal.count, temporal.length)), temporal, None)
        return exchange(out.flatten(0, 1), back, self.member.sp_group, kind="toy").view(x.shape)


@pytest.fixture
def toy() -> Iterator[None]:
    """The toy, registered until the end of the test."""
    order, names = [*IN_ORDER], [*STRATEGY_OPTIONS]
    register_strategy(TemporalBranch)
    yield
    IN_ORDER[:], STRATEGY_OPTIONS[:] = order, names


class Never(OneLayout):
    label = option = "never"

    @classmethod
    def applies(cls, shape: BatchShape, options: Options, ranks: int) -> bool:
        return False


class NeverSwitch(Never):
    label, option = "never switch", "switch"


CASES = [
    PLAIN[0],
    replace(PLAIN[1], checkpoint=True),
    PLAIN[4],  # one patch per frame: all but one rank hold no temporal row
    replace(FULL, size=(3, 5, 6, 5), output="full"),
    replace(FULL, size=(2, 5, 5, 7), patch=(2, 2, 2), checkpoint=True),
]
TOY = dict(strategy="temporal_branch")


def train_on_ranks() -> list[dict[str, int]]:
    """Compares with one process; returns the bytes sent in each of CASES, by phase."""
    register_strategy(TemporalBranch)
    mesh, found = SequenceMesh(sp_size=dist.get_world_size()), []
    for case in CASES:
        counter = assert_one_process_result(case, mesh, **TOY)
        sent = dict.fromkeys(("forward", "recompute", "backward"), 0)
        for (kind, phase), count in counter.bytes.items():
            sent[phase] += count if kind == "toy" else 0
        found.append(sent)
    return found


def shape_of(case: Case) -> BatchShape:
    more = dict(depth=DEPTH, num_heads=case.heads, hidden_size=4 * case.heads)
    config = resolve_config("STDiT3", patch_size=case.patch, **more)
    return BatchShape.of(config, case.size[0], case.size[1:])


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_it_trains_as_one_process_and_sends_what_the_planner_predicts(
    num_ranks: int, toy: None
) -> None:
    counted = run_ranks(num_ranks, train_on_ranks)
    for i, case in enumerate(CASES):
        planned = traffic(
            shape_of(case),
            Options(**TOY),
            num_ranks,
            element_size=8,
            checkpointing=case.checkpoint,
            training=True,
        )

        assert any(planned.forward) == (case.size[0] % num_ranks > 0)  # whole samples stay
        for rank in range(num_ranks):
            assert counted[rank][i] == {
                phase: getattr(planned, phase)[rank] for phase in counted[rank][i]
            }, (case, rank)


def refuse_other_registrations() -> str:
    """The error of a rank, where one has registered a strategy that the other has not."""
    mesh = SequenceMesh(sp_size=2)
    model = parallelize(make_model(CASES[0]), mesh)
    inputs = make_inputs(CASES[0])
    model(**inputs)
    if mesh.sp_rank == 1:
        register_strategy(NeverSwitch)
    with pytest.raises(ValueError) as error:
        model(**inputs)
    return str(error.value)


def test_ranks_with_other_registrations_raise_the_same_error() -> None:
    errors = run_ranks(2, refuse_other_registrations)
    assert errors[0] == errors[1]
    assert re.fullmatch(
        r"got different strategies on the ranks of one sequence-parallel group: registered is "
        r"\['whole samples', .*, 'split_gather'\] on rank 0, \['never switch', .*, "
        r"'split_gather'\] on rank 1; expected the same strategies on all of them; call "
        r"register_strategy alike, in the same order, on every rank",
        errors[0],
    )


CONFIG = """
num_frames = 5
image_size = (32, 32)
sp_size = 4
vae = dict(type="PatchPoolVAE", pool=(1, 4, 4))
text_encoder = dict(type="HashedBagOfWords", width=8, max_length=6)
model = dict(
    type="STDiT3", in_channels=3, caption_channels=8, model_max_length=6, hidden_size=24, depth=2,
    num_heads=2,
)
dataset = dict(manifest="none.csv")
max_steps = 2
sequence_parallel = dict(strategy="temporal_branch")
"""


@pytest.fixture
def config(tmp_path: Path) -> str:
    (tmp_path / "toy.py").write_text(CONFIG)
    return str(tmp_path / "toy.py")


def test_config_planner_and_command_line_take_it(
    toy: None, config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert load_train_config(config).sequence_parallel.strategy == "temporal_branch"

    main(["plan", config, "--gpus", "4"])
    table = capsys.readouterr().out
    assert (
        "temporal_branch: the config sets strategy='temporal_branch', for models without" in table
    )

    main(["plan", config, "--gpus", "4", "--json"])
    (bucket,) = json.loads(capsys.readouterr().out)["buckets"]
    assert bucket["strategy"] == "temporal_branch"


def test_an_option_without_a_strategy_for_a_shape_is_an_error(toy: None) -> None:
    register_strategy(Never)
    with pytest.raises(ValueError, match="no strategy of the option 'never' applies: BatchShape"):
        strategy_for(BatchShape(1, 5, 16, 24, 2, 2), Options(strategy="never"), 4)

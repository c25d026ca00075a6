"""``sp_size`` of a training: a number, "auto", or degrees of buckets."""

from __future__ import annotations

from pathlib import Path

import pytest

from opensora_sp.config import load_train_config
from opensora_sp.config.launch_checks import check_launch
from opensora_sp.planner.run_plan import plan
from opensora_sp.planner.traffic import BYTES_OF_PEER, communicators

ROOT = Path(__file__).parents[2]
BUCKETS = ROOT / "configs" / "stdit3" / "train" / "buckets_stage1_sp8.py"
DEMO = ROOT / "configs" / "demo" / "train.py"
ON_CPU = ["optimizer.type=AdamW", "precision=fp32"]


def test_degrees_of_buckets_fit_the_groups_of_the_processes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cfg = load_train_config(BUCKETS, [*ON_CPU, "sp_size={'144p x 408': 4, '360p x 408': 7}"])
    assert cfg.sp_size == {"144p x 408": 4, "360p x 408": 7}
    check_launch(cfg, 7)

    with pytest.raises(ValueError) as refused:
        check_launch(cfg, 8)
    assert str(refused.value) == (
        "got the degrees {'360p x 408': 7} in sp_size with 8 processes, 8 on a node; expected "
        "sizes of the groups that these form, of [1, 2, 4, 8]; change the degrees or the number "
        "of processes"
    )
    with pytest.raises(ValueError, match="got the degrees {'360p x 408': 7} in sp_size with 8 "):
        plan(cfg, 8)

    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    check_launch(load_train_config(BUCKETS, [*ON_CPU, "sp_size=auto"]), 7)
    with pytest.raises(ValueError, match=r"7 processes, 3 on a node; .* of \[1, 2, 3, 6, 7\]"):
        check_launch(cfg, 7)


@pytest.mark.parametrize(
    ("config", "option", "message"),
    [
        (BUCKETS, "{'144p x 48': 4}", "got the bucket '144p x 48' in sp_size; .*did you mean"),
        (DEMO, "{'144p x 408': 4}", "without bucket_config"),
        (BUCKETS, "many", "got sp_size = 'many'; expected a number of ranks"),
        (BUCKETS, "{'144p x 408': 0}", "expected a number of ranks from 1 on, 'auto', or a map"),
    ],
)
def test_other_degrees_are_refused(config: Path, option: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_train_config(config, [f"sp_size={option}"])


def test_communicators_of_a_plan() -> None:
    """A GPU's memory for each group of several ranks that a rank is in, the largest first."""
    assert communicators(8, 8) == pytest.approx([n * BYTES_OF_PEER for n in (7, 3, 1)])
    # Peers on other nodes share one buffer.
    assert communicators(16, 8) == pytest.approx([n * BYTES_OF_PEER for n in (7, 7, 3, 1)])
    assert communicators(1, 8) == []

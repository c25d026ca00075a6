"""Batch sizes that fit into memory with steps of equal time: ``opensora-sp plan --fit``."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from opensora_sp.cli import main
from opensora_sp.cli.plan_fit import parse_memory
from opensora_sp.config import TrainConfig, dump_config, load_train_config
from opensora_sp.data.buckets import BatchSpec, Buckets, with_batch_sizes
from opensora_sp.models.recompute import EVERYTHING
from opensora_sp.parallel.rank_groups import nested_groups
from opensora_sp.planner.bucket_levels import least_ranks
from opensora_sp.planner.fit import (
    LineEstimator,
    Times,
    _Bucket,
    common_time,
    fit,
)
from opensora_sp.planner.memory import budget_of, memory_for, recomputed_share
from opensora_sp.planner.run_estimator import RunEstimator
from opensora_sp.planner.run_plan import plan
from opensora_sp.planner.traffic import BYTES_OF_PEER
from opensora_sp.training import memory_fit

SMALL = """
vae = dict(type="PatchPoolVAE", pool=(1, 4, 4))
text_encoder = dict(type="HashedBagOfWords", width=64, max_length=20)
model = dict(
    type="STDiT3", in_channels=3, caption_channels=64, model_max_length=20, hidden_size=64,
    depth=2, num_heads=4,
)
bucket_config = {
    "144p": {1: (1.0, 7), 5: ((0.5, 0.5), 7)},
    "256": {4: (0.0, None)},
}
dataset = dict(type="VariableVideoText", manifest="none.csv")
sp_size = 2
precision = "fp32"
grad_checkpoint = True
max_steps = 2
"""
SAMPLING = str(Path(__file__).parents[2] / "configs/demo/sample.py")
LEFT_OUT = ["bucket_config={'144p': {1: (1.0, None), 5: ((0.5, 0.5), 3)}}"]


@pytest.fixture
def config(tmp_path: Path) -> Path:
    (tmp_path / "small.py").write_text(SMALL)
    return tmp_path / "small.py"


# --- the choice


def test_the_common_time_is_one_that_most_buckets_can_take() -> None:
    # The third one takes 9 s for a single clip, the first at most 1 s.
    assert common_time([Times(0.1, 1), Times(2, 5), Times(9, 9), Times(2, 6)]) == 5
    # Within a tenth all can take the longest.
    assert common_time([Times(1, 10), Times(1, 9.5)]) == 10
    assert common_time([Times(1, 10), Times(1, 5)]) == 5
    assert common_time([Times(5.4, 10), Times(1, 5)]) == 5
    assert common_time([Times(5.6, 10), Times(1, 5)]) == 10


def made_of(budget: float) -> Any:
    """An estimator of a model whose needed bytes and seconds are the number of clips."""
    peak = SimpleNamespace
    return SimpleNamespace(
        latents=lambda batch: (batch.batch_size,),
        estimate=lambda latents, ranks: peak(
            memory=peak(peak=peak(needed=latents[0]), levels=[0]),
            seconds=float(latents[0]),
        ),
        seconds=lambda latents, ranks, levels: float(latents[0]),
        checkpointing="auto",
        lowest_levels=[[0]],
        budget=budget,
    )


@pytest.mark.parametrize(
    ("budget", "common", "size", "decided_by"),
    [
        (100.0, 100.0, 100, "memory"),  # 25 clips a rank
        (3.0, 100.0, 3, "memory"),  # fewer clips than ranks
        (1e9, 100.0, 100, "time"),
        (1e9, 42.0, 40, "time"),  # whole clips on each rank, within a tenth
        (1e9, 11.0, 11, "time"),  # 8 would be shorter by a quarter
        (1e9, 0.5, 1, "time"),  # one clip takes longer
        (1e9, 1e6, 200, "largest batch"),
    ],
)
def test_whole_clips_on_each_rank_are_preferred(
    budget: float, common: float, size: int, decided_by: str
) -> None:
    made = made_of(budget)
    bucket = _Bucket(made, BatchSpec(0, 1, (8, 8)), 4, 200)
    found = bucket.fitted("name", common)
    assert (found.batch.batch_size, found.decided_by) == (size, decided_by)
    assert found.deviation == pytest.approx(size / common - 1)


def test_communicators_are_part_of_what_must_fit(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of 4 GB, groups of 4 and 2 take 1.9 beside that of 8, and nothing is left for a step."""
    one_bucket = "bucket_config={'144p': {1: (1.0, None)}}"
    degrees = "sp_size={'144p x 1': 8}"
    options = ["--gpus", "8", "--largest-batch", "1", "--cfg-options", degrees, one_bucket]
    error = refused(capsys, str(config), "--fit", "4GB", *options)
    assert "got 4 GB of a device, into which not one clip fits" in error

    least = error.partition("expected at least ")[2].partition(" GB")[0]
    assert float(least) == pytest.approx(3e9 / 0.95e9 + 4 * BYTES_OF_PEER / 1e9, abs=0.3)
    main(["plan", str(config), "--fit", least, *options])
    assert "Communicators of all groups but the largest take 1.87 GB" in capsys.readouterr().out


def test_recomputed_share() -> None:
    assert recomputed_share([0, 0]) == recomputed_share([-1]) == 1
    assert recomputed_share([EVERYTHING, 0]) == 0.5
    assert recomputed_share([1]) == pytest.approx(20 / 28)


def test_memory_of_whole_clips_lies_on_a_line(config: Path) -> None:
    cfg = load_train_config(config)
    run = LineEstimator(cfg, 2, device="cpu")
    latents = run.latents(BatchSpec(12, 5, (144, 256)))
    on_line = run.memory_of(latents, 2).peak.total
    traced = RunEstimator(cfg, 2, device="cpu").memory_of(latents, 2).peak.total
    # The first trace of a process also counts tables that later ones share.
    assert on_line == pytest.approx(traced, rel=5e-3)


@pytest.mark.slow
def test_batches_fit_and_one_more_clip_a_rank_would_not(config: Path) -> None:
    cfg, memory = load_train_config(config), memory_for(100e6)
    found = fit(cfg, 4, memory, device="cpu")
    assert list(found.sizes) == ["144p x 5", "144p x 1"]

    for one in found.batches:
        size, num_frames, (height, width) = (
            one.batch.batch_size,
            one.batch.num_frames,
            one.batch.image_size,
        )
        assert size % 2 == 0

        def needed(
            clips: int, shape: tuple[int, ...] = (3, num_frames, height // 4, width // 4)
        ) -> float:
            latents = (clips, *shape)
            return RunEstimator(cfg, 4, device="cpu").memory_of(latents, 2).peak.needed

        assert one.memory.peak.needed <= budget_of(memory)
        assert needed(size) == pytest.approx(one.memory.peak.needed, rel=5e-3)
        if one.decided_by == "memory":
            assert needed(size + 2) > budget_of(memory)
    assert "memory" in {one.decided_by for one in found.batches}


@pytest.mark.slow
def test_adapters_leave_room_for_larger_batches(config: Path) -> None:
    """The weights' gradients and moments are not there; what is chosen fits."""
    memory = memory_for(40e6)
    whole = load_train_config(config, LEFT_OUT)
    adapted = load_train_config(config, [*LEFT_OUT, "load=base", "lora.rank=2", "lora.alpha=2"])
    found, before = (fit(cfg, 2, memory, device="cpu") for cfg in (adapted, whole))
    assert found.sizes.keys() == before.sizes.keys()
    assert all(found.sizes[name] >= size for name, size in before.sizes.items())
    assert found.sizes != before.sizes
    for one in found.batches:
        size, frames, (height, width) = vars(one.batch).values()
        latents = (size, 3, frames, height // 4, width // 4)
        traced = RunEstimator(adapted, 2, device="cpu").memory_of(latents, 2).peak
        assert traced.needed == pytest.approx(one.memory.peak.needed, rel=5e-3)
        assert one.memory.peak.needed <= budget_of(memory)


@pytest.mark.slow
def test_least_ranks_are_those_that_a_batch_fits_on(config: Path) -> None:
    cfg, batch = load_train_config(config, ["sp_size=1"]), BatchSpec(4, 5, (144, 256))
    run = LineEstimator(cfg, 4, device="cpu")
    latents, levels = run.latents(batch), run.lowest_levels[0]
    one, two = (run.peak(latents, ranks, levels).needed for ranks in (1, 2))

    found = []
    for needed in (1.01 * one, (one + two) / 2, 0.99 * two):
        run.memory = memory_for(needed)
        found.append(least_ranks(run, batch, (1, 2)))
    assert found == [1, 2, None]


@pytest.mark.slow
def test_a_bucket_that_fits_no_group_is_refused_before_the_first_step(
    config: Path,
) -> None:
    mesh: Any = SimpleNamespace(world_size=2, ranks_per_node=2, family=nested_groups(2, 2))
    for sp_size, asked in (("auto", "on 2 ranks"), ("{'144p x 5': 1}", "on 1 rank[^s]")):
        cfg = load_train_config(config, [f"sp_size={sp_size}"])
        run = RunEstimator(cfg, 2, device="cpu", gpus_per_node=2)
        found = memory_fit.fewest_ranks(cfg, mesh, run)
        assert set(found) == set(cfg.batches()) and set(found.values()) == {1}

        run.memory = 1e6
        with pytest.raises(ValueError, match=f"144p x 5 .* {asked}"):
            memory_fit.fewest_ranks(cfg, mesh, run)
        # A bucket without clips decides nothing.
        run.memory = 80e9
        others = set(found) - {"144p x 5"}
        assert memory_fit.fewest_ranks(cfg, mesh, run, others).keys() == others
        run.memory = 1e6
        assert memory_fit.fewest_ranks(cfg, mesh, run, set()) == {}


def test_nested_groups_of_any_world_lie_on_one_node(config: Path) -> None:
    """Seven ranks are 4 + 3; neighbours of one degree would not divide them."""
    run = RunEstimator(
        load_train_config(config, ["sp_size=auto"]), 7, device="cpu", gpus_per_node=7
    )
    assert not any(run.spans_nodes(ranks) for ranks in range(1, 8))
    run = RunEstimator(
        load_train_config(config, ["sp_size=auto"]), 16, device="cpu", gpus_per_node=8
    )
    assert [ranks for ranks in (1, 2, 4, 8, 16) if run.spans_nodes(ranks)] == [16]


# --- the command


@pytest.mark.parametrize(
    ("text", "memory"), [("80GB", 80e9), ("80", 80e9), ("1.5 GiB", 1.5 * 1024**3)]
)
def test_units_of_memory(text: str, memory: float) -> None:
    assert parse_memory(text) == memory


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as stop:
        main(["plan", *arguments])
    assert stop.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize("bound", ["80TB", "80 gb", "GB", "0", "1..2GB", "-3GB"])
def test_other_bounds_are_refused(
    config: Path, capsys: pytest.CaptureFixture[str], bound: str
) -> None:
    error = refused(capsys, str(config), f"--fit={bound}")
    assert f"got --fit {bound!r}; expected the memory of one GPU in GB" in error


def test_the_written_config_loads_and_replaces_nothing(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = config.parent / "small_fit_4GB.py"
    arguments = [str(config), "--fit", "4GB", "--gpus", "4", "--largest-batch", "8"]
    options = ["--cfg-options", "bucket_config={'144p': {1: (1.0, None)}}", "optimizer.lr=1e-3"]
    main(["plan", *arguments, *options])
    table = capsys.readouterr().out
    assert "144p x 1      8      2" in table and "largest batch" in table
    assert f"written: {out}" in table
    assert max(map(len, table.splitlines()[:-1])) <= 100

    text = out.read_text()
    assert text.startswith(f"# opensora-sp plan {config} --fit 4GB --gpus 4")
    cfg = load_train_config(out)
    assert cfg.bucket_config == {"144p": {1: (1.0, 8)}}
    assert (cfg.grad_checkpoint, cfg.optimizer.lr, cfg.sp_size) == ("auto", 1e-3, 2)

    error = refused(capsys, *arguments)
    assert f"got {out} to write, which exists; expected a new file; pass another --out" in error
    assert out.read_text() == text
    assert "got" in refused(capsys, *arguments, "--out", str(config))


def test_a_config_of_one_shape_gets_a_batch_size(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = SMALL.partition("bucket_config")[0] + SMALL.partition("}\ndataset")[2].partition("\n")[2]
    shape = 'num_frames = 2\nimage_size = (32, 32)\ndataset = dict(manifest="none.csv")\n'
    (tmp_path / "one.py").write_text(text + shape)
    out = tmp_path / "fitted.py"
    fitting = ["--fit", "4", "--largest-batch", "6", "--out", str(out)]
    main(["plan", str(tmp_path / "one.py"), *fitting])
    assert "32x32 x 2      6" in capsys.readouterr().out
    assert load_train_config(out).batch_size == 6


def test_a_sampling_config_and_a_plan_without_gpus_are_refused(
    config: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = str(tmp_path / "out.py")
    error = refused(capsys, SAMPLING, "--fit", "80GB", "--out", out)
    assert "got --fit with a sampling config" in error
    assert "got no --gpus" in refused(capsys, str(config))
    assert "without --fit" in refused(capsys, str(config), "--gpus", "2", "--out", out)


# --- batch sizes that a config leaves out


def test_batch_sizes_may_be_left_out(config: Path, tmp_path: Path) -> None:
    cfg = load_train_config(config, LEFT_OUT)
    assert Buckets.of(cfg.bucket_config or {}).without_batch_size == ["144p x 1"]
    with pytest.raises(ValueError, match="that a run chooses at its start .144p x 1.*--fit"):
        plan(cfg, 8)
    with pytest.raises(ValueError, match="batch size\\), or .*None is chosen"):
        load_train_config(config, ["bucket_config={'144p': {1: (1.0, 0)}}"])

    # The whole config loads again, also if the largest bucket is the one without a size.
    left_out = load_train_config(config, ["bucket_config={'144p': {1: (1.0, None)}}"])
    (tmp_path / "dumped.py").write_text(dump_config(left_out))
    assert load_train_config(tmp_path / "dumped.py") == left_out


def test_sizes_are_filled_in_by_name(config: Path) -> None:
    filled = with_batch_sizes({"144p": {1: (1.0, None), 5: ((0.5, 0.5), 3)}}, {"144p x 1": 9})
    assert filled == {"144p": {1: (1.0, 9), 5: ((0.5, 0.5), 3)}}
    provisional = memory_fit.provisional(load_train_config(config, LEFT_OUT), None)
    assert provisional.bucket_config == {"144p": {1: (1.0, 1), 5: ((0.5, 0.5), 3)}}


def test_a_resumed_run_takes_the_sizes_of_its_checkpoint(config: Path, tmp_path: Path) -> None:
    chosen = load_train_config(config, ["bucket_config={'144p': {1: (1.0, 9), 5: (0.5, 3)}}"])
    state = f'{{"config": {chosen.model_dump_json()}}}'
    (tmp_path / "state.json").write_text(state)
    resumed = memory_fit.recorded(load_train_config(config, LEFT_OUT), tmp_path)
    assert resumed.bucket_config == {"144p": {1: (1.0, 9), 5: ((0.5, 0.5), 3)}}

    other: TrainConfig = load_train_config(config, ["bucket_config={'256': {1: (1.0, None)}}"])
    with pytest.raises(ValueError, match="got bucket_config without the batch size of 256 x 1"):
        memory_fit.recorded(other, tmp_path)

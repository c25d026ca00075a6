"""The planner: bytes as the communication counter counts them, memory as ``LivePeak`` measures it,
warnings, advice, the command.
"""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
import torch
from ranks import run_ranks
from runs import batch_of, features_of

from opensora_sp.cli import main
from opensora_sp.config import TrainConfig, load_inference_config, load_train_config
from opensora_sp.diffusion import rank_loss, velocity_loss
from opensora_sp.memory import LivePeak
from opensora_sp.models import build_model
from opensora_sp.models.recompute import EVERYTHING
from opensora_sp.models.registry import resolve_config
from opensora_sp.models.token_groups import windows_of
from opensora_sp.parallel import CommLedger, Options, SequenceMesh, layout, parallelize
from opensora_sp.parallel.batch_shape import BatchShape
from opensora_sp.parallel.cost_model import CostModel
from opensora_sp.parallel.mesh import spans_nodes
from opensora_sp.parallel.strategies import registered_strategies, strategy_for
from opensora_sp.planner import buckets_of, plan
from opensora_sp.planner.checkpointing import budget_of, memory_for
from opensora_sp.planner.cuda_memory import WORKSPACES
from opensora_sp.planner.fit import fit
from opensora_sp.planner.memory import GradientBucket, LocalGradients, ModelSizes, Zero
from opensora_sp.planner.run_estimator import RunEstimator
from opensora_sp.planner.sharing import sharing_of
from opensora_sp.planner.trace import trace_activations
from opensora_sp.planner.traffic import output_gather, tokens_changing_rank, traffic

CONFIGS = Path(__file__).parents[2] / "configs"
SHIPPED = sorted(path for path in CONFIGS.rglob("*.py") if "_base_" not in path.parts)
# A shape takes seconds; test_buckets.py plans some.
ONE_SHAPE = [path for path in SHIPPED if "buckets" not in path.stem]

pytestmark = pytest.mark.core

# --- bytes sent

TINY = dict(
    in_channels=2,
    hidden_size=24,
    num_heads=3,
    depth=2,
    caption_channels=5,
    model_max_length=4,
    mlp_ratio=2.0,
)
FAST_LINKS = CostModel(flops=400e12, bandwidth=80e12, latency=0)
IMAGES = dict(skip_temporal=True)
WINDOWS = dict(kernel_size=(2, 2, -1), use_spatial_rope=True, num_heads=2)
# (B, T, side of the latent), options (of the model in "model"), ranks, dtype, checkpointing
STEPS = [
    ((1, 5, 6), {}, 4, torch.float32, False),
    ((3, 3, 4), {}, 2, torch.bfloat16, True),
    ((4, 2, 4), {}, 4, torch.float32, True),  # whole samples: nothing is sent
    ((1, 2, 8), {}, 4, torch.float32, True),  # fewer frames than ranks
    ((1, 2, 8), dict(recompute_communication=True), 4, torch.float32, True),
    ((1, 1, 2), {}, 4, torch.float32, False),
    ((1, 5, 6), dict(placement="branch"), 4, torch.float32, True),
    (
        (1, 5, 6),
        dict(placement="branch", recompute_communication=True),
        4,
        torch.float32,
        True,
    ),
    ((1, 5, 6), dict(strategy="ulysses"), 4, torch.float32, True),
    ((2, 4, 6), dict(strategy="ulysses"), 2, torch.float32, False),
    ((1, 5, 6), dict(strategy="split_gather"), 4, torch.float32, True),
    ((1, 64, 8), dict(overlap_chunks=3, overlap_backward=True), 4, torch.float32, True),
    # 5 x 5 patches: windows of 4, 2 and 1.
    (
        (1, 5, 10),
        dict(model=WINDOWS),
        4,
        torch.float32,
        True,
    ),
    ((1, 5, 6), dict(model=WINDOWS, placement="branch"), 2, torch.float32, False),
    ((1, 5, 6), dict(model=WINDOWS, strategy="ulysses"), 4, torch.float32, True),
    ((1, 5, 6), dict(model=WINDOWS, strategy="split_gather"), 4, torch.float32, False),
    ((1, 128, 4), dict(model=WINDOWS), 4, torch.float32, True),  # one window
    ((1, 2, 4), dict(model=WINDOWS), 4, torch.float32, True),  # and two frames
    ((1, 5, 6), dict(model=dict(full_attention=True)), 4, torch.float32, True),
    ((1, 5, 6), dict(model=IMAGES), 4, torch.float32, True),  # nothing is sent
    ((1, 1, 6), dict(model=IMAGES), 4, torch.float32, True),  # fewer frames than ranks
    ((1, 5, 6), dict(model=IMAGES, placement="branch"), 4, torch.float32, True),
    ((1, 5, 6), dict(model=IMAGES, strategy="ulysses"), 4, torch.float32, True),
    ((1, 5, 6), dict(model=IMAGES, strategy="split_gather"), 2, torch.float32, True),
]


def of_model(options: dict) -> tuple[dict, dict]:
    """Options of the model, and of sequence parallelism.

    Links are fast, so that small models, too, split heads.
    """
    parallel = {"cost_model": FAST_LINKS, **options}
    return {**TINY, **parallel.pop("model", {})}, parallel


def counted_steps() -> list[dict[str, int]]:
    """Bytes that this rank sends in each of STEPS, by phase, and in "sampling"."""
    found, meshes = [], {ranks: SequenceMesh(ranks) for ranks in (2, 4)}
    for (B, T, side), options, ranks, dtype, checkpointing in STEPS:
        config, how = of_model(options)
        model = build_model("STDiT3", **config).to(dtype)
        model.set_grad_checkpoint(checkpointing)
        parallelize(model, meshes[ranks], **how)
        x = torch.randn(B, 2, T, side, side)
        with CommLedger() as counter:
            shard = model(x, torch.rand(B), torch.randn(B, 1, 4, 5), output="shards")
            rank_loss(velocity_loss(shard, x), global_samples=B, world_size=ranks).backward()

        sent = dict.fromkeys(("forward", "recompute", "backward"), 0)
        for (kind, phase), count in counter.bytes.items():
            sent[phase] += count if kind != "check" else 0

        with torch.no_grad(), CommLedger() as counter:
            model(x, torch.rand(B), torch.randn(B, 1, 4, 5))
        of_kinds = {kind: count for (kind, _), count in counter.bytes.items() if kind != "check"}
        found.append(sent | {"sampling": sum(of_kinds.values())})

    return found


def test_bytes_are_those_that_the_counter_counts() -> None:
    counted = run_ranks(4, counted_steps)
    strategies = set()
    for i, ((B, T, side), options_of_case, ranks, dtype, checkpointing) in enumerate(STEPS):
        config, how = of_model(options_of_case)
        options = Options(**how)
        shape = BatchShape.of(resolve_config("STDiT3", **config), B, (T, side, side))
        strategy = strategy_for(shape, options, ranks)
        strategies.add(strategy)
        planned = traffic(
            shape,
            options,
            ranks,
            element_size=dtype.itemsize,
            checkpointing=checkpointing,
            training=True,
        )
        # The output has twice the channels, in fp32 or wider.
        token_bytes = 2 * 2 * 4 * max(4, dtype.itemsize)
        gathered = output_gather(shape, strategy, ranks, token_bytes)
        for rank in range(4):
            for phase, sent in counted[rank][i].items():
                wanted = getattr(planned, "forward" if phase == "sampling" else phase)[rank % ranks]
                if phase == "sampling":
                    wanted += gathered[rank % ranks]
                assert sent == wanted, (STEPS[i], strategy, rank, phase)

    assert strategies == set(registered_strategies())
    # The others exchange tokens.
    trained = [sum(one["forward"] for one in of_ranks) for of_ranks in zip(*counted, strict=True)]
    assert trained.count(0) == 2, trained


# --- memory

MEMORY_CONFIG = """
num_frames = {frames}
image_size = {size}
vae = dict(type="PatchPoolVAE", pool=(1, 4, 4))
text_encoder = dict(type="HashedBagOfWords", width=64, max_length=20)
model = dict(
    type="STDiT3", in_channels=3, caption_channels=64, model_max_length=20, pred_sigma=False,
    hidden_size={width}, depth={depth}, num_heads=4,
)
dataset = dict(manifest="none.csv")
max_steps = 2
"""
MEMORY_CASES = {
    "wide and shallow": (
        dict(frames=11, size=(64, 64), width=448, depth=2),
        ["sp_size=2", "precision=fp32", "batch_size=1"],
    ),
    "many frames, checkpointing": (
        dict(frames=128, size=(48, 48), width=128, depth=5),
        ["sp_size=2", "precision=fp32", "batch_size=1", "grad_checkpoint=True", "grad_clip=1.0"],
    ),
    "one rank a batch, bf16, ZeRO-1, two micro-batches": (
        dict(frames=3, size=(64, 64), width=256, depth=4),
        ["sp_size=1", "precision=bf16", "batch_size=2", "zero_stage=1", "micro_batches_per_step=4"],
    ),
    "deep, no checkpointing": (
        dict(frames=48, size=(48, 48), width=128, depth=8),
        ["sp_size=2", "precision=fp32", "batch_size=1"],
    ),
}


def measured_peaks(configs: list[TrainConfig]) -> list[int]:
    return [measured_peak(cfg) for cfg in configs]


def measured_peak(cfg: TrainConfig) -> int:
    """Live bytes at the peak of two training steps, run as ``training/trainer.py`` does."""
    from opensora_sp.data import Clip
    from opensora_sp.encoders import HashedBagOfWords, PatchPoolVAE
    from opensora_sp.features.sources import Encoders
    from opensora_sp.plugin import NamedShards, SequenceParallelPlugin
    from opensora_sp.plugin._colossalai import Booster
    from opensora_sp.training.checkpointing import fixed_tensors
    from opensora_sp.training.ema import ShardedEma
    from opensora_sp.training.optimizer import make_optimizer

    clip = Clip(
        video=torch.zeros(3, cfg.num_frames, *cfg.size, dtype=torch.uint8),
        text=" ".join(map(str, range(30))),
        fps=24.0,
    )
    with LivePeak() as live:
        plugin = SequenceParallelPlugin.from_config(cfg)
        booster, mesh = Booster(plugin=plugin), plugin.mesh
        model = build_model(
            **{("name" if key == "type" else key): value for key, value in cfg.model.items()}
        )
        model.set_grad_checkpoint(cfg.grad_checkpoint)
        optimizer = make_optimizer(cfg, [p for p in model.parameters() if p.requires_grad])
        fixed = fixed_tensors(model)
        boosted, optimizer, *_ = booster.boost(model, optimizer)
        ema = ShardedEma(NamedShards(model, optimizer).master_weights, cfg.ema_decay)
        source = Encoders(PatchPoolVAE((1, 4, 4)), HashedBagOfWords(64, 20), torch.device("cpu"))
        live.reset_peak()
        for step in range(2):
            for micro_batch in range((cfg.micro_batches_per_step or mesh.dp_size) // mesh.dp_size):
                features = features_of(source, [clip] * cfg.batch_size)
                batch = batch_of(cfg, model.config, features, micro_batch, range(cfg.batch_size))
                shard = boosted(batch.x_t, **batch.inputs, output="shards")
                loss = rank_loss(
                    velocity_loss(shard, batch.target), global_samples=4, world_size=mesh.world_size
                )
                booster.backward(loss, optimizer)
            optimizer.step()
            optimizer.zero_grad()
            ema.update(step, torch.tensor(True))
    assert fixed
    return live.peak


@pytest.mark.slow
def test_memory_is_predicted_within_15_percent(tmp_path: Path) -> None:
    configs = []
    for i, (values, options) in enumerate(MEMORY_CASES.values()):
        (tmp_path / f"{i}.py").write_text(MEMORY_CONFIG.format(**values))
        configs.append(load_train_config(tmp_path / f"{i}.py", options))

    measured = [max(ranks) for ranks in zip(*run_ranks(2, measured_peaks, configs))]
    lines, wrong = [], []
    for name, cfg, found in zip(MEMORY_CASES, configs, measured):
        memory = plan(cfg, 2, device="cpu").buckets[0].memory
        peak = memory.configured
        line = (
            f"{name}: measured {found / 1e6:.1f} MB, predicted {peak.total / 1e6:.1f} MB, "
            f"ratio {peak.total / found:.3f} (kept {memory.kept.total / 1e6:.1f}, "
            f"gradients {peak.gradients / 1e6:.1f}, "
            f"activations {peak.activations / 1e6:.1f}, at {peak.moment})"
        )
        lines.append(line)
        wrong += [line] if abs(peak.total / found - 1) > 0.15 else []

    print(*lines, sep="\n")
    assert not wrong, "\n".join(lines)


FITTED_CONFIG = """
vae = dict(type="PatchPoolVAE", pool=(1, 4, 4))
text_encoder = dict(type="HashedBagOfWords", width=64, max_length=20)
model = dict(
    type="STDiT3", in_channels=3, caption_channels=64, model_max_length=20, pred_sigma=False,
    hidden_size=64, depth=3, num_heads=4,
)
bucket_config = {
    "144p": {1: (1.0, None), 5: (1.0, None), 12: (1.0, None)},
    "256": {1: (1.0, None), 4: (1.0, None)},
    "240p": {3: (1.0, None)},
}
dataset = dict(type="VariableVideoText", manifest="none.csv")
sp_size = 2
precision = "fp32"
grad_checkpoint = "auto"
max_steps = 2
"""


@pytest.mark.slow
def test_the_peak_of_fitted_batches_is_predicted_within_5_percent(tmp_path: Path) -> None:
    (tmp_path / "fitted.py").write_text(FITTED_CONFIG)
    cfg = load_train_config(tmp_path / "fitted.py")
    memory = memory_for(60e6)
    batches = fit(cfg, 2, memory, device="cpu").batches
    assert len(batches) == 6 and len({one.memory.describe() for one in batches}) > 1

    of_one_shape = []
    for one in batches:
        update = {
            "batch_size": one.batch.batch_size,
            "num_frames": one.batch.num_frames,
            "image_size": one.batch.image_size,
            "grad_checkpoint": one.memory.levels,
        }
        of_one_shape.append(cfg.model_copy(update=update))

    measured = [max(ranks) for ranks in zip(*run_ranks(2, measured_peaks, of_one_shape))]
    for one, found in zip(batches, measured):
        predicted = one.memory.configured.total
        ratio = predicted / found
        print(f"{one.name} x {one.batch.batch_size}: {found / 1e6:.1f} MB, ratio {ratio:.3f}")
        assert 0.95 < ratio < 1.05, (one.name, ratio)
        assert predicted <= budget_of(memory)


# --- reports and messages

SMALL = """
num_frames = 5
image_size = (32, 32)
sp_size = 4
vae = dict(type="PatchPoolVAE", pool=(1, 4, 4))
text_encoder = dict(type="HashedBagOfWords", width=8, max_length=6)
model = dict(
    type="STDiT3", in_channels=3, caption_channels=8, model_max_length=6,
    hidden_size=24, depth=2, num_heads=2,
)
dataset = dict(manifest="none.csv")
max_steps = 2
"""


@pytest.fixture
def small(tmp_path: Path) -> str:
    (tmp_path / "small.py").write_text(SMALL)
    return str(tmp_path / "small.py")


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    main(["plan", *arguments])
    return capsys.readouterr().out


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as stop:
        main(["plan", *arguments])
    assert stop.value.code == 2
    return capsys.readouterr().err


def test_ranks_without_units_are_reported(small: str, capsys: pytest.CaptureFixture[str]) -> None:
    out = printed(capsys, small, "--gpus", "8", "--cfg-options", "sp_size=8", "num_frames=1")
    flat = " ".join(out.split())
    assert "split heads: B*T=1 frames are fewer than 8 ranks" in flat
    assert (
        "warning heads of frames (B*T*H) are 2, fewer than the 8 ranks: "
        "6 of these hold no unit and wait (rank"
    ) in flat
    assert "warning" not in printed(
        capsys, small, "--gpus", "8", "--cfg-options", "sp_size=2", "batch_size=3"
    )


@pytest.mark.parametrize("shape", [(1, 64, 1024), (3, 5, 6), (1, 7, 9), (2, 2, 30)])
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_every_unit_is_held_once_and_work_adds_up(shape: tuple[int, int, int], ranks: int) -> None:
    windows = windows_of(shape[2], 1, (4, 1))
    for more in (dict(), dict(windows=windows), dict(full=True)):
        batch = BatchShape(*shape, width=48, heads=4, depth=2, **more)
        for options in (Options(), Options(strategy="ulysses"), Options(strategy="split_gather")):
            shared = sharing_of(batch, options, ranks)
            assert sum(shared.tokens) == batch.tokens and all(
                len(sizes) == ranks for sizes in shared.units.values()
            )
            assert sum(shared.work) == pytest.approx(ranks) and shared.imbalance == pytest.approx(
                max(shared.work) - 1
            )
    assert sharing_of(BatchShape(4, 8, 16, 48, 4, 2), Options(), 4).imbalance == pytest.approx(0)


def test_tokens_that_change_rank_are_those_held_elsewhere_in_the_other_layout() -> None:
    B, T, S, ranks = 2, 5, 7, 4

    def holder(row: int, rows: int) -> int:
        return next(r for r in range(ranks) if rows * r // ranks <= row < rows * (r + 1) // ranks)

    tokens = product(range(B), range(T), range(S))
    moved = sum(holder(b * T + t, B * T) != holder(b * S + s, B * S) for b, t, s in tokens)
    assert tokens_changing_rank(BatchShape(B, T, S, 24, 3, 2), ranks) == moved


def test_advice_names_changes_that_balance_better(small: str) -> None:
    def imbalance(option: str) -> float:
        cfg = load_train_config(small, [option])
        latent_frames = cfg.num_frames  # the stand-in VAE's pool keeps them
        shape = BatchShape(1, latent_frames, 16, 24, 2, 2)
        return sharing_of(shape, Options(), cfg.sp_size).imbalance

    uneven = plan(load_train_config(small), 4).buckets[0]
    assert (
        uneven.sharing.units["spatial rows (B*T)"] == [1, 1, 1, 2]
        and uneven.sharing.imbalance > 0.1
    )
    options = [advice.split()[0] for advice in uneven.advice]
    assert "num_frames=4" in options and any(option.startswith("sp_size=") for option in options)
    for option in options:
        assert imbalance(option) <= uneven.sharing.imbalance / 2, option
    assert plan(load_train_config(small, ["num_frames=4"]), 4).buckets[0].advice == []


def test_verify_is_left_to_the_run(small: str) -> None:
    cfg = load_train_config(small, ["sequence_parallel.verify=True"])
    assert plan(cfg, 4).buckets == plan(load_train_config(small), 4).buckets


def test_memory_that_does_not_fit_is_reported(small: str) -> None:
    cfg = load_train_config(small, ["num_frames=64"])
    memory = plan(cfg, 4).buckets[0].memory
    assert memory.checkpointed.total < memory.plain.total == memory.configured.total
    between = (memory.checkpointed.total + memory.plain.total) / 2e9
    (advice,) = plan(cfg, 4, memory_gb=between).buckets[0].advice
    assert "do not fit" in advice and "grad_checkpoint=True takes" in advice
    assert plan(cfg, 4, memory_gb=1).buckets[0].advice == []
    assert "nor do more ranks" in plan(cfg, 4, memory_gb=1e-6).buckets[0].advice[-1]


def test_groups_that_span_nodes() -> None:
    assert not spans_nodes(16, 8, 8) and not spans_nodes(16, 2, 4) and not spans_nodes(4, 4, 8)
    assert spans_nodes(16, 8, 4) and spans_nodes(12, 6, 4) and spans_nodes(12, 3, 4)


def test_table_and_json_hold_the_same_numbers(
    small: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = (small, "--gpus", "8", "--gpus-per-node", "4", "--memory-gb", "80")
    table, found = printed(capsys, *arguments), json.loads(printed(capsys, *arguments, "--json"))
    (bucket,) = found["buckets"]
    assert max(map(len, table.splitlines())) <= 100
    assert (found["dp_size"], found["sp_size"], found["spans_nodes"]) == (2, 4, False)
    assert (
        "a group of 4 ranks lies on one node" in table
        and f"{bucket['tokens_changing_rank']} tokens" in table
    )
    assert (
        f"{bucket['traffic']['mean'] / 1e6:,.2f}" in table
        and f"{bucket['sharing']['imbalance']:.1%}" in table
    )
    assert f"{bucket['memory']['configured']['total'] / 1e9:.3f}" in table
    assert "As configured: nothing is recomputed." in table and "*" not in table.split("memory")[1]
    assert (
        set(bucket["compared"]) == {"switch", "ulysses", "split_gather"}
        and "with 'ulysses'" in table
    )


def test_a_gpu_s_kernels_are_listed(small: str, capsys: pytest.CaptureFixture[str]) -> None:
    table = printed(capsys, small, "--gpus", "4", "--gpu", "H200")
    assert f"kernels  on H200 with torch {torch.__version__}, " in table
    kinds = "spatial attention: ", "temporal attention: ", "cross-attention: "
    assert all(f"           {kind}" in table for kind in kinds)
    assert max(map(len, table.splitlines())) <= 100


@pytest.mark.slow
@pytest.mark.parametrize("config", ONE_SHAPE, ids=lambda path: str(path.relative_to(CONFIGS)))
def test_shipped_configs_plan(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = printed(capsys, str(config), "--gpus", "8")
    assert "tokens" in out and max(map(len, out.splitlines())) <= 100


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--gpus", "6"],
            "got sp_size 4 with 6 processes; expected an sp_size that divides the number of",
        ),
        (["--gpus", "2"], "got sp_size 4 with 2 processes"),
        (["--gpus", "0"], "got --gpus 0; expected at least 1"),
        (
            ["--gpus", "8", "--gpus-per-node", "3"],
            "got --gpus-per-node 3 with --gpus 8; expected nodes that are all",
        ),
        (["--gpus", "8", "--memory-gb", "-1"], "got --memory-gb -1; expected a positive number"),
        (
            ["--gpus", "8", "--cfg-options", "micro_batches_per_step=0"],
            "got micro_batches_per_step = 0",
        ),
        (["--gpus", "8", "--cfg-options", "num_framse=3"], "did you mean 'num_frames'?"),
    ],
)
def test_bad_input_is_refused_in_a_sentence(
    small: str, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert message in refused(capsys, small, *arguments)


# 4 blocks: 2 * 4 - 1 switches.
@pytest.mark.parametrize(("model", "sent"), [("STDiT", 7), ("STDiT2", 7)])
def test_models_of_one_block_for_both_attentions(small: str, model: str, sent: int) -> None:
    cfg = load_train_config(small)
    latents = dict(input_size=(5, 4, 4), patch_size=(1, 2, 2)) if model == "STDiT" else {}
    keep = {
        key: value for key, value in cfg.model.items() if key in ("in_channels", "caption_channels")
    }
    other = dict(type=model, hidden_size=24, depth=4, num_heads=3, **keep, **latents)
    made = plan(
        cfg.model_copy(
            update={"model": other, "sp_size": 2, "num_frames": 5, "image_size": (16, 16)}
        ),
        2,
    )
    (bucket,) = made.buckets

    assert bucket.sharing.strategy == "switch"
    # Bytes of a rank.
    a_switch = bucket.tokens_changing_rank * 24 * (2 if made.precision == "bf16" else 4) / 2
    assert bucket.traffic.mean == pytest.approx(2 * sent * a_switch)
    assert 0 < bucket.memory.checkpointed.activations <= bucket.memory.plain.activations


@pytest.mark.slow
def test_the_command_needs_no_colossalai(small: str) -> None:
    code = (
        "import sys; from opensora_sp.cli import main; main(sys.argv[1:]); "
        "assert not {'colossalai', 'diffusers', 'transformers'} & set(sys.modules)"
    )
    command = [sys.executable, "-c", code, "plan", small, "--gpus", "4"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=CONFIGS.parent)
    assert (done.returncode, done.stderr) == (0, "") and "B=1 T=5 S=16, 80 tokens" in done.stdout


def test_windows_are_traced_on_several_ranks() -> None:
    """Plans of their exchanges are real, though the model is traced on fake tensors."""
    layout.plan_exchange.cache_clear()
    config = resolve_config("STDiT3", **{**TINY, **WINDOWS})
    traced = [
        trace_activations(
            "STDiT3",
            config,
            (1, 2, 5, 10, 10),
            options=Options(),
            ranks=ranks,
            dtype=torch.float32,
            level=EVERYTHING,
            training=True,
        ).at(2)
        for ranks in (1, 4)
    ]
    assert 0 < traced[1] < traced[0]


def test_the_rank_with_most_frames_is_traced() -> None:
    """Of 5 frames on 4 ranks the last one holds two, so its peak is that of 8 frames or nearly."""
    config = resolve_config("STDiT3", **TINY)
    five, eight = (
        trace_activations(
            "STDiT3",
            config,
            (1, 2, frames, 16, 16),
            options=Options(),
            ranks=4,
            dtype=torch.float32,
            level=EVERYTHING,
            training=True,
            device="cpu",
        ).at(2)
        for frames in (5, 8)
    )
    assert 0.75 * eight < five < eight


def test_gradients_of_a_backward_pass_by_hand() -> None:
    """10, 7, 5 and 3 numbers in 16 bits on four ranks, which pad them to 12, 8, 8 and 4."""
    sizes = ModelSizes(final=(10,), pairs=((7, 5),), rest=(3,), frozen=0)
    for stage, received in ((1, 0), (2, 3)):
        # The bucket, its flat copy, and what this rank receives of it.
        bucket = GradientBucket(Zero(4, stage, 2), sizes)
        bucket.add(10)
        bucket.reduce()
        assert bucket.take_peak() == 2 * (10 + 10 + received)

    # All in fp32, beside the largest that arrives.
    local = LocalGradients(Zero(4, 1, 2, accumulates_locally=True), sizes)
    local.add(7)
    local.add(5)
    assert [local.take_peak(), local.take_peak()] == [4 * 32 + 2 * 7, 4 * 32]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_workspace_of_an_exchange_by_hand(dtype: torch.dtype) -> None:
    """8 tokens of 300 numbers are sent, 11 received, in the allocator's blocks of 512 bytes."""
    tokens = torch.empty(8, 3, 100, dtype=dtype, device="meta")
    rule = WORKSPACES[torch.ops.opensora_sp.exchange.default]
    found = rule((tokens, None, None, [3, 5], [4, 7]), None)
    assert found == {2: 13 * 512, 4: 26 * 512}[dtype.itemsize]


FRAMES = ["cond_type=i2v_head", "model.use_cond=True", "batch_size=1"]


@pytest.mark.parametrize(
    ("options", "times"), [(["batch_size=4"], (2, 1)), (FRAMES, (3, 3))], ids=["text", "frames"]
)
def test_guidance_enlarges_a_batch_of_samples(options: list[str], times: tuple[int, int]) -> None:
    for cfg_scale, copies in zip((4.0, 1.0), times, strict=True):
        scale = f"scheduler.cfg_scale={cfg_scale}"
        cfg = load_inference_config(CONFIGS / "demo/sample.py", [scale, *options])
        run = RunEstimator(cfg, 1, None, "cpu", None)
        (bucket,) = buckets_of(cfg)
        assert run.latents(bucket)[0] == copies * cfg.batch_size

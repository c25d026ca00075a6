"""The planner: bytes as the communication counter counts them, memory as ``LivePeak`` measures it,
the command.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from ranks import run_ranks
from runs import batch_of, features_of
from tiny_models import TINY

from opensora_sp.cli import main
from opensora_sp.config import TrainConfig, load_inference_config, load_train_config
from opensora_sp.diffusion import rank_loss, velocity_loss
from opensora_sp.models import build_model
from opensora_sp.models.packing import windows_of
from opensora_sp.models.recompute import EVERYTHING
from opensora_sp.models.registry import resolve_config
from opensora_sp.parallel import CommLedger, Options, SequenceMesh, layout, parallelize
from opensora_sp.parallel.batch_shape import BatchShape
from opensora_sp.parallel.cost_model import CostModel
from opensora_sp.parallel.strategies import registered_strategies, strategy_for
from opensora_sp.planner import run_plan
from opensora_sp.planner.fit import fit
from opensora_sp.planner.live_peak import WORKSPACES, LivePeak
from opensora_sp.planner.memory import (
    GradientBucket,
    LocalGradients,
    ModelSizes,
    Zero,
    budget_of,
    memory_for,
)
from opensora_sp.planner.run_estimator import RunEstimator
from opensora_sp.planner.run_plan import estimator_of, plan
from opensora_sp.planner.seconds import blocks_work
from opensora_sp.planner.trace import trace_activations
from opensora_sp.planner.traffic import output_gather, traffic

CONFIGS = Path(__file__).parents[2] / "configs"
pytestmark = pytest.mark.core

# --- bytes sent

SMALL_MODEL = dict(TINY, model_max_length=4)
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
    ((1, 5, 6), dict(strategy="ulysses"), 4, torch.float32, True),
    ((1, 5, 6), dict(strategy="split_gather"), 4, torch.float32, True),
    ((1, 64, 8), dict(overlap_chunks=3, overlap_backward=True), 4, torch.float32, True),
    # 5 x 5 patches: windows of 4, 2 and 1.
    ((1, 5, 10), dict(model=WINDOWS), 4, torch.float32, True),
    ((1, 5, 6), dict(model=WINDOWS, strategy="ulysses"), 4, torch.float32, True),
    ((1, 5, 6), dict(model=WINDOWS, strategy="split_gather"), 4, torch.float32, False),
    ((1, 128, 4), dict(model=WINDOWS), 4, torch.float32, True),  # one window
    ((1, 2, 4), dict(model=WINDOWS), 4, torch.float32, True),  # and two frames
    ((1, 5, 6), dict(model=dict(full_attention=True)), 4, torch.float32, True),
    ((1, 5, 6), dict(model=IMAGES), 4, torch.float32, True),  # nothing is sent
    ((1, 5, 6), dict(model=IMAGES, strategy="ulysses"), 4, torch.float32, True),
    ((1, 5, 6), dict(model=IMAGES, strategy="split_gather"), 2, torch.float32, True),
]


def of_model(options: dict) -> tuple[dict, dict]:
    """Options of the model, and of sequence parallelism.

    Links are fast, so that small models, too, split heads.
    """
    parallel = {"cost_model": FAST_LINKS, **options}
    return {**SMALL_MODEL, **parallel.pop("model", {})}, parallel


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
    from opensora_sp.checkpoint.zero_shards import NamedShards
    from opensora_sp.data.dataset import Clip
    from opensora_sp.encoders.standins import HashedBagOfWords, PatchPoolVAE
    from opensora_sp.features.sources import Encoders
    from opensora_sp.plugin import SequenceParallelPlugin
    from opensora_sp.plugin._colossalai import Booster
    from opensora_sp.training.checkpointing import fixed_tensors
    from opensora_sp.training.trainable import ShardedEma, make_optimizer

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
                    velocity_loss(shard, batch.noised.target),
                    global_samples=4,
                    world_size=mesh.world_size,
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
        peak = memory.peak
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
        predicted = one.memory.peak.total
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


@pytest.mark.parametrize("shape", [(1, 64, 1024), (3, 5, 6), (1, 7, 9), (2, 2, 30)])
def test_work_of_blocks_is_that_of_their_rows(shape: tuple[int, int, int]) -> None:
    """28 C^2 of a token in each block, and four products of C for each pair that attends."""
    B, T, S = shape
    products, C = 2 * 28 * 48**2 * B * T * S, 48
    windows = windows_of(S, 1, (4, 1))
    assert sum(windows.sizes) == S
    for more, pairs in (
        ({}, T * S**2 + S * T**2),
        (dict(windows=windows), T * S**2 + sum((size * T) ** 2 for size in windows.sizes)),
        (dict(full=True), 2 * (T * S) ** 2),
    ):
        batch = BatchShape(*shape, width=C, heads=4, depth=2, **more)
        assert blocks_work(batch) == 2 * (products + 4 * B * pairs * C)
    spatial = BatchShape(*shape, width=C, heads=4, depth=2, alternates=False)
    assert blocks_work(spatial) == products + 2 * 4 * B * T * S**2 * C


def test_verify_is_left_to_the_run(small: str) -> None:
    cfg = load_train_config(small, ["sequence_parallel.verify=True"])
    assert plan(cfg, 4).buckets == plan(load_train_config(small), 4).buckets


def test_memory_that_does_not_fit_is_reported(
    small: str, capsys: pytest.CaptureFixture[str]
) -> None:
    frames = ["num_frames=64", "grad_checkpoint="]
    plain, recomputed = (
        plan(load_train_config(small, [frames[0], frames[1] + str(level)]), 4).buckets[0]
        for level in (False, True)
    )
    assert plain.fits and recomputed.memory.peak.total < plain.memory.peak.total
    between = (recomputed.memory.peak.needed + plain.memory.peak.needed) / 2e9
    for level, is_too_much in ((False, True), (True, False)):
        options = ["--cfg-options", frames[0], frames[1] + str(level)]
        table = printed(capsys, small, "--gpus", "4", "--memory-gb", str(between), *options)
        assert ("too much" in table) == is_too_much


def test_a_plan_is_of_the_kernels_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """All verified; or plain torch, where the config asks for it or Triton is not installed."""
    options = ["sp_size=1", "model.depth=2", "grad_checkpoint=False", "num_frames=16"]
    config, made = CONFIGS / "stdit3/train/64x512x512_sp8.py", []
    for setting in ("auto", "torch"):
        made.append(plan(load_train_config(config, [*options, f"kernels={setting}"]), 1))
    fused, plain = (one.buckets[0].memory.peak for one in made)
    assert made[1].run.kernels_in_words == "in plain torch"
    # torch's builds for the CPU come without Triton.
    if run_plan.is_installed("triton"):
        assert made[0].run.kernels_in_words == "with Triton kernels"
        assert fused.activations < plain.activations
    else:
        assert fused.activations == plain.activations

    monkeypatch.setattr(run_plan, "is_installed", lambda name: False)
    assert estimator_of(load_train_config(config), 8).kernels_in_words == "in plain torch"


def test_a_gpu_sets_memory_and_rates_unless_the_config_has_a_cost_model(small: str) -> None:
    options = ["num_frames=64", "image_size=(512,512)", "model.hidden_size=256"]
    slow, fast = (plan(load_train_config(small, options), 4, gpu=gpu) for gpu in ("H100", "H200"))
    memory = [made.run.device_memory for made in (slow, fast)]
    assert memory == [80e9, 141e9]
    assert [made.run.options.cost_model.name for made in (slow, fast)] == ["H100", "H200"]
    assert fast.buckets[0].seconds < slow.buckets[0].seconds
    own = plan(load_train_config(small, [*options, "cost_model=H100"]), 4, gpu="H200")
    assert own.run.options.cost_model.name == "H100"
    assert own.buckets[0].seconds == slow.buckets[0].seconds
    with pytest.raises(ValueError, match="got --gpu 'A1'; expected one of"):
        plan(load_train_config(small), 4, gpu="A1")


def test_table_and_json_hold_the_same_numbers(
    small: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = (small, "--gpus", "8", "--gpus-per-node", "4", "--memory-gb", "80")
    table, found = printed(capsys, *arguments), json.loads(printed(capsys, *arguments, "--json"))
    (bucket,) = found["buckets"]
    assert max(map(len, table.splitlines())) <= 100
    assert (found["dp_size"], found["sp_size"], found["spans_nodes"]) == (2, 4, False)
    assert "a group of 4 ranks lies on one node" in table
    sent = [sum(phases) for phases in zip(*bucket["traffic"].values(), strict=True)]
    for number in (
        f"{sum(sent) / len(sent) / 1e6:,.1f}",
        f"by the busiest rank {max(sent) / 1e6:,.2f}",
        f"{bucket['memory']['peak']['total'] / 1e9:.3f}",
        f"activations {bucket['memory']['peak']['activations'] / 1e9:.3f}",
        f"{bucket['seconds']:.3g}",
        "blocks: nothing is recomputed",
        "switch: B*T=5 frames are enough for 4 ranks",
    ):
        assert number in " ".join(table.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpus", "6"], "got sp_size 4 with 6 processes; expected an sp_size that divides the"),
        (["--gpus", "2"], "got sp_size 4 with 2 processes"),
        (["--gpus", "0"], "got --gpus 0; expected a positive number"),
        (["--gpus", "8", "--gpus-per-node", "0"], "got --gpus-per-node 0; expected a positive"),
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

    assert bucket.strategy == "switch"
    # Of 5 frames of 4 patches, half of the tokens change rank in a switch, by 24 numbers each.
    a_switch = 5 * 4 / 2 * 24 * (2 if cfg.precision == "bf16" else 4) / 2
    assert bucket.traffic.mean == pytest.approx(2 * sent * a_switch)
    assert bucket.memory.peak.activations > 0


def test_windows_are_traced_on_several_ranks() -> None:
    """Plans of their exchanges are real, though the model is traced on fake tensors."""
    layout.plan_exchange.cache_clear()
    config = resolve_config("STDiT3", **{**SMALL_MODEL, **WINDOWS})
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
    config = resolve_config("STDiT3", **SMALL_MODEL)
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
        run = RunEstimator(cfg, 1, device="cpu")
        (bucket,) = cfg.batches().values()
        assert run.latents(bucket)[0] == copies * cfg.batch_size

"""The training run, top to bottom: check, launch, build, restore, step."""

from __future__ import annotations

import json
import logging
import math
import sys
import time
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import record_function
from torch.utils.data import DataLoader

from opensora_sp.checkpoint import check_encoders, newest_checkpoint
from opensora_sp.config import TrainConfig, dump_config
from opensora_sp.console import exit_interrupted
from opensora_sp.data import ClipShape, MicroBatch, ReplicaBatches, share
from opensora_sp.determinism import use_deterministic_kernels
from opensora_sp.diffusion import rank_loss
from opensora_sp.features.batch import Batch, BatchMaker
from opensora_sp.features.build import (
    TrainingSet,
    Work,
    make_plan,
    make_source,
    order_state,
    with_length,
)
from opensora_sp.features.corrupt_samples import BrokenClips
from opensora_sp.features.sharded import SharedClips
from opensora_sp.models import compile_blocks
from opensora_sp.parallel import CommLedger, closing_process_group, drain_process_group
from opensora_sp.runtime import Watchdog, backend_timeout, leave_process_group, raise_on_all_ranks

from .checkpointing import Checkpoints, TrainingState, choose_checkpoint, load_model
from .ema import ShardedEma
from .ending import command_to_resume, conclude, nothing_left, short_patience
from .freeze import freeze
from .meter import Meter
from .metrics import Reporter, draw_loss, log_to, session_of
from .preflight import check_resume, initial_weights, preflight
from .profiling import StepProfiler, Steps
from .sync_check import SyncCheck
from .validation import Validator

logger = logging.getLogger(__name__)


def train(cfg: TrainConfig, *, resume: str | None = None, profile: str | None = None) -> Path:
    """Train as the config says; returns the run's folder.

    Args:
        cfg: a checked config.
        resume: None starts anew, "auto" goes on from the newest checkpoint in ``cfg.outputs`` if there is one, a path
            from that checkpoint.
        profile: steps to write a trace of, "3" or "10-12"; see ``profiling``.

    Raises:
        ValueError: before any process group or model exists, if files, checkpoint and processes do not fit the config;
            later, on every rank, if the run cannot go on.
        SystemExit: with status 1 if another rank has failed; where the run was asked to stop before its end (see
            ``runtime.watchdog``), with 130 after Ctrl-C, else with ``cfg.stopped_exit_code`` unless that is 0.
    """
    traced = None if profile is None else Steps.parse(profile)
    with raise_on_all_ranks():
        if cfg.deterministic:
            use_deterministic_kernels()
        dataset, checkpoint = preflight(cfg, resume, traced)
    from opensora_sp.plugin import current_device, launch

    launch(cfg.seed, cfg.model_dump(mode="json"), timeout=backend_timeout(cfg.collective_timeout))
    run_dir, is_main = Path(cfg.outputs), dist.get_rank() == 0
    run_dir.mkdir(parents=True, exist_ok=True)
    log_to(run_dir, enabled=is_main)
    if is_main:
        (run_dir / "config.py").write_text(dump_config(cfg), encoding="utf-8")
    limits = dict(
        peer_timeout=cfg.peer_timeout,
        collective_timeout=cfg.collective_timeout,
        grace_time=cfg.grace_time,
    )
    with closing_process_group(), Watchdog(**limits) as watch:
        found, checkpoint = checkpoint, choose_checkpoint(run_dir, checkpoint, resume=resume)
        if checkpoint is not None and checkpoint != found:
            check_resume(cfg, checkpoint, dataset)
        idle = nothing_left(cfg, checkpoint, dataset)
        if idle is not None:
            logger.info("%s", idle)
            return run_dir

        run = Run(cfg, dataset, checkpoint, current_device())
        with closing(run.checkpoints):
            finished = run.steps(run_dir, traced, watch)

        interrupted = not finished and watch.is_interrupted
        del run
        drain_process_group()
    if interrupted:
        exit_interrupted(
            f"stopped by Ctrl-C (SIGINT) with a checkpoint, which --resume auto goes on from: {run_dir}"
        )
    if not finished and cfg.stopped_exit_code:
        sys.exit(cfg.stopped_exit_code)
    return run_dir


@dataclass(frozen=True)
class Outcome:
    """What all ranks know of one optimizer step."""

    loss: float  # mean over the step's samples
    taken: bool  # False: loss or gradient were not finite, and nothing has changed
    stop: bool  # some rank was asked to stop


@dataclass
class Since:
    """What is counted from one line of the log to the next."""

    start: float
    waited: float = 0.0  # seconds that this rank waited for the loader
    tokens: int = 0  # of all replicas
    steps: int = 0
    losses: list[float] = field(default_factory=list)  # of the steps that were taken


class Run:
    """The parts of a training run. ``__init__`` builds and restores them, ``steps`` trains."""

    def __init__(
        self, cfg: TrainConfig, dataset: TrainingSet, checkpoint: Path | None, device: torch.device
    ) -> None:
        from opensora_sp.plugin import NamedShards, SequenceParallelPlugin
        from opensora_sp.plugin._colossalai import Booster

        self.cfg, self.device = cfg, device
        plugin = SequenceParallelPlugin.from_config(cfg)
        self.mesh, self.booster = plugin.mesh, Booster(plugin=plugin)
        self.source = make_source(cfg, dataset, device)
        torch.manual_seed(cfg.seed)
        model = cfg.model_spec.build()
        check_encoders(model.config, self.source, self.source)
        freeze(model, cfg.freeze)
        model.set_grad_checkpoint(cfg.grad_checkpoint)
        if cfg.compile is not None:
            compile_blocks(model)
        optimizer = make_optimizer(cfg, [p for p in model.parameters() if p.requires_grad])
        fixed = fixed_tensors(model)
        self.model, self.optimizer, *_ = self.booster.boost(model, optimizer)
        self.module = model
        shards = NamedShards(model, self.optimizer)
        if cfg.load is not None and checkpoint is None:
            load_model(initial_weights(cfg), model, fixed, shards, convert=cfg.convert)
        self.ema = ShardedEma(shards.masters, cfg.ema_decay)
        self.tensors = TrainingState(model, fixed, shards, self.ema)
        self.checkpoints = Checkpoints(
            Path(cfg.outputs),
            keep_last=cfg.keep_last,
            keep_every=cfg.keep_every,
            in_background=cfg.async_save,
        )
        state: dict[str, Any] = {"step": 0, "micro_batches_per_step": cfg.micro_batches_per_step}
        if checkpoint is not None:
            state = self.tensors.load(checkpoint)
            logger.info("resumed from %s at step %d", checkpoint, state["step"])
        self.start: int = state["step"]
        self.skipped: int = state.get("skipped_steps", 0)
        per_step = (
            cfg.micro_batches_per_step or state["micro_batches_per_step"] or self.mesh.dp_size
        )
        self.plan = make_plan(cfg, dataset, per_step, num_samples=state.get("num_samples"))
        self.dataset, self.work = dataset, Work(cfg, dataset)
        self.cfg = cfg = with_length(cfg, self.plan)
        self.broken = BrokenClips(dataset.rows, self.mesh, cfg.dataset.max_bad_fraction)
        self.clips = SharedClips(
            self.mesh,
            model,
            dataset,
            self.plan,
            self.source,
            self.broken,
            device,
            whole=cfg.sequence_parallel.verify,
        )
        self.batches = BatchMaker(cfg, model.config, self.source, device)
        self.sync_check = SyncCheck(model, self.mesh, cfg.check_sync_every)
        self.validator = Validator(self)
        self.meter = Meter(
            model,
            device,
            precision=cfg.precision,
            sp_size=self.mesh.sp_size,
            peak_tflops=cfg.peak_tflops,
        )

    def steps(
        self, run_dir: Path, traced: Steps | None = None, watch: Watchdog | None = None
    ) -> bool:
        """Train from the restored step to ``cfg.max_steps``, with a checkpoint every ``ckpt_every`` and at the end.

        Where the watchdog of any rank was asked to stop, the step under way is the last one, and is followed by a
        checkpoint. Returns whether ``max_steps`` was reached.
        """
        cfg, is_main = self.cfg, dist.get_rank() == 0
        self._announce(run_dir)
        reporter = Reporter(
            run_dir, cfg, enabled=is_main, start=self.start, session=session_of(self)
        )
        profiler = StepProfiler(self.module, run_dir, traced)
        command, advice = command_to_resume(), None
        loader = iter(self._loader())
        ledger = CommLedger()
        self.since = Since(time.perf_counter())
        began = self.since.start
        bad, done, stopped = 0, self.start, False  # bad steps in a row
        for step in range(self.start, cfg.max_steps):
            with ledger, self.meter.timer, profiler.step(step + 1):
                outcome = self._step(step, loader, watch)
            done, stopped = step + 1, outcome.stop and step + 1 < cfg.max_steps
            bad = self._count(outcome, done, bad)
            saves = done % cfg.ckpt_every == 0 or done == cfg.max_steps or stopped
            if done % cfg.log_every == 0 or saves:
                values = self._measure(done)
                reporter.log(done, values, self.meter.peak.tflops)
                if advice is None and (
                    advice := short_patience(values["step_time"] or 0.0, cfg.grace_time)
                ):
                    logger.warning("%s", advice)
                self.since = Since(time.perf_counter())
            reporter.step(done)
            if saves:
                self.checkpoints.save(self.tensors, self.state(done))
                if is_main:
                    draw_loss(run_dir)
            if stopped:
                break
            if saves:
                self.since.start = time.perf_counter()  # a checkpoint is no part of the next step
            self.since.start += self.validator.after(done, run_dir, reporter, watch)
        self.checkpoints.wait()
        reporter.close()
        if watch is not None and stopped:
            told = "stopped after step %d of %d (%s), with a checkpoint; resume with: %s"
            logger.info(told, done, cfg.max_steps, watch.why_to_stop(), command)
        else:
            self._conclude(run_dir, ledger)
            if is_main:
                conclude(cfg, run_dir, time.perf_counter() - began)
        return not stopped

    def state(self, done: int) -> dict[str, Any]:
        """What goes into ``state.json`` after ``done`` steps: all that data order, draws and schedules depend on."""
        return {
            "step": done,
            **order_state(self.cfg, self.plan, len(self.dataset)),
            "micro_batches_per_step": self.plan.micro_batches_per_step,
            "next_micro_batch": done * self.plan.micro_batches_per_step,
            "next_lr": learning_rate(self.cfg, done),
            "skipped_steps": self.skipped,
            "config": self.cfg.model_dump(mode="json"),
        }

    def _step(self, step: int, loader: Any, watch: Watchdog | None) -> Outcome:
        """One optimizer step. A step without a finite loss and gradient uses its batches and learning rate up."""
        mean = torch.zeros((), device=self.device)  # this rank's part of the mean loss
        micro_batches = self.plan.step(step)
        samples = sum(len(one.ids) for one in micro_batches)
        cheapest = min(micro_batches, key=lambda one: one.cost).shape
        self.since.tokens += sum(
            len(one.ids) * self.work.tokens(one.shape) for one in micro_batches
        )
        for micro_batch in share(micro_batches, self.mesh.dp_rank, self.mesh.dp_size):
            batch = self._batch(micro_batch, loader, spare=cheapest)
            if micro_batch is not None:
                self.sync_check.see(step, batch.of_group)
                self.meter.count(batch)
            shard = self.model(batch.x_t, **batch.inputs, output="shards")
            with record_function("loss"):
                losses = self.batches.flow.losses(shard, batch.noised)
                if (
                    micro_batch is None
                ):  # ZeRO reduces gradients in the order in which a backward pass yields them
                    losses = losses * 0.0
                loss = rank_loss(losses, global_samples=samples, world_size=dist.get_world_size())
            with record_function("backward"):
                self.booster.backward(loss, self.optimizer)
            mean += losses.detach().sum() / samples
            del (
                loss,
                losses,
                shard,
                batch,
            )  # and what their graph holds, before the next micro-batch
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.cfg, step)
        asked_to_stop = watch is not None and watch.stop_reason is not None
        told = torch.stack([mean, mean.new_tensor(float(asked_to_stop))])
        dist.all_reduce(told)
        self.sync_check.compare(step)
        with record_function("optimizer"):
            taken = self.optimizer.step_if_finite(told[0])
        if taken:
            self.ema.update(step)
        total, stop = told.tolist()
        return Outcome(total, taken, stop > 0)

    def _count(self, outcome: Outcome, done: int, bad: int) -> int:
        """Note an outcome; returns how many steps in a row, this one among them, were left out."""
        self.since.steps += 1
        if outcome.taken:
            self.since.losses.append(outcome.loss)
            return 0
        self.skipped += 1
        if self.mesh.rank == 0:
            logger.warning(
                "step %d left out: the loss is %g, or a gradient is not finite", done, outcome.loss
            )
        if bad + 1 < self.cfg.max_bad_steps:
            return bad + 1
        self.checkpoints.wait()
        newest = newest_checkpoint(Path(self.cfg.outputs))
        raise ValueError(
            f"got no finite loss and gradient in {bad + 1} steps in a row, up to step {done} (max_bad_steps); expected "
            f"numbers; lower optimizer.lr or set grad_clip, and go on from {newest or 'the beginning'}, the last good "
            "checkpoint, with --resume auto"
        )

    def _batch(self, micro_batch: MicroBatch | None, loader: Any, *, spare: ClipShape) -> Batch:
        """The next batch of this replica; where it has no micro-batch left, something of shape ``spare``."""
        if micro_batch is None:
            return self.batches.stand_in(spare)
        before = time.perf_counter()
        with record_function("data"):
            items = next(loader)
        self.since.waited += time.perf_counter() - before
        with record_function("encode"):
            return self.batches.make(micro_batch.number, *self.clips.take(micro_batch, items))

    def _loader(self) -> DataLoader:
        sampler = ReplicaBatches(
            self.plan,
            start=self.start,
            stop=self.cfg.max_steps,
            replica=self.mesh.dp_rank,
            num_replicas=self.mesh.dp_size,
            samples_of=self.clips.samples,
        )
        return DataLoader(
            self.dataset,
            batch_sampler=sampler,  # type: ignore[arg-type]
            collate_fn=list,
            num_workers=self.cfg.num_workers,
            worker_init_fn=leave_process_group,
            generator=torch.Generator().manual_seed(
                self.cfg.seed
            ),  # so that the loader leaves the global one alone
        )

    def _measure(self, done: int) -> dict[str, float | None]:
        replaced = self.broken.tell(self.device)
        seconds, losses = time.perf_counter() - self.since.start, self.since.losses
        return {
            "loss": sum(losses) / len(losses) if losses else None,
            "grad_norm": float(self.optimizer.get_grad_norm() or 0.0),
            "lr": learning_rate(self.cfg, done - 1),
            "tokens_per_s": self.since.tokens / seconds,
            "replaced_clips": replaced,
            "skipped_steps": self.skipped,
            **self.meter.measure(
                self.since.waited,
                steps=self.since.steps,
                seconds=seconds,
                left=self.cfg.max_steps - done,
            ),
        }

    def _announce(self, run_dir: Path) -> None:
        mesh = self.mesh
        parameters = sum(p.numel() for p in self.module.parameters())
        logger.info("run folder %s", run_dir)
        logger.info(
            "dp_size %d x sp_size %d processes, %s", mesh.dp_size, mesh.sp_size, self.device.type
        )
        logger.info(
            "%s, %.1f M parameters, %s",
            type(self.module).__name__,
            parameters / 1e6,
            self.cfg.precision,
        )
        if self.plan.micro_batches_per_step % mesh.dp_size:
            logger.warning(
                "%d micro-batches per step on %d replicas: some wait while others compute their last one",
                self.plan.micro_batches_per_step,
                mesh.dp_size,
            )
        logger.info("%s", self.meter.peak)
        for line in self.plan.describe(self.start):
            logger.info("%s", line)
        if not any(self.dataset.rows.texts):
            logger.warning(
                "none of the %d clips has a caption, so the model learns nothing of text; make the manifest with "
                "opensora-sp index --captions FILE",
                len(self.dataset),
            )

    def _conclude(self, run_dir: Path, ledger: CommLedger) -> None:
        """Say, and write to ``summary.json``, how the ranks worked together and what was read. Collective."""
        broken = self.broken.found
        summary = {
            "dp_size": self.mesh.dp_size,
            "sp_size": self.mesh.sp_size,
            "switches": ledger.calls["switch", "forward"],
            "elements_sent": {
                " ".join(key): count for key, count in sorted(ledger.elements.items())
            },
            "files_read": dict(self.broken.files_read),
            "broken_clips": broken,
            "sync_check": self.sync_check.cost,
        }
        if dist.get_rank() == 0:
            text = json.dumps(summary, indent=1, ensure_ascii=False) + "\n"
            (run_dir / "summary.json").write_text(text, encoding="utf-8")
        logger.info(
            "done: %d layout switches between the ranks of this replica", summary["switches"]
        )
        if broken:
            logger.warning("%d clips could not be read and were replaced", len(broken))


def fixed_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Copies of frozen parameters and buffers; training casts the model's own down to its precision."""
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    return {
        name: tensor.clone() for name, tensor in model.state_dict().items() if name not in trained
    }


def make_optimizer(cfg: TrainConfig, parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """torch's AdamW, or ColossalAI's HybridAdam on CUDA."""
    options = cfg.optimizer.model_dump(exclude={"type"})
    if cfg.optimizer.type == "AdamW":
        return torch.optim.AdamW(parameters, **options)
    from opensora_sp.plugin.adam import hybrid_adam

    return hybrid_adam(parameters, **options)


def learning_rate(cfg: TrainConfig, step: int) -> float:
    """Linear warm-up, then constant, or a cosine down to zero at ``max_steps``. A function of the step alone."""
    warm = min(1.0, (step + 1) / (cfg.warmup_steps + 1))
    if cfg.lr_schedule == "constant":
        return cfg.optimizer.lr * warm
    progress = max(0, step - cfg.warmup_steps) / max(1, cfg.max_steps - cfg.warmup_steps)
    return cfg.optimizer.lr * warm * 0.5 * (1 + math.cos(math.pi * progress))

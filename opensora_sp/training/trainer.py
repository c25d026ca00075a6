"""The trainer: builds and restores the parts of a run, and loops over optimizer steps."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import record_function

from opensora_sp.checkpoint import NamedShards, check_encoders, fitted, load_model
from opensora_sp.common.tensors import DTYPES
from opensora_sp.config import TrainConfig
from opensora_sp.data import StepLoader
from opensora_sp.data.loader import LoadedBatch, StepBatches
from opensora_sp.device_verification import choose_attention, choose_kernels, warn_of_changes
from opensora_sp.diffusion import rank_loss, samples_of_mean
from opensora_sp.features.batch import Batch, BatchMaker, DrawConfig
from opensora_sp.features.build import (
    TrainingSet,
    Work,
    make_plan,
    make_source,
    micro_batches_of_step,
    order_state,
    with_length,
)
from opensora_sp.features.corrupt_samples import CorruptSamples
from opensora_sp.features.sharded import ShardedEncoder
from opensora_sp.models.base import ConditionedModel
from opensora_sp.models.compile import compile_blocks, reporting_compilation
from opensora_sp.parallel import CommLedger
from opensora_sp.runtime.processes import init_worker
from opensora_sp.runtime.watchdog import Watchdog

from .activations import ActivationBudget
from .batch_sizes import with_chosen_batch_sizes
from .checkpointing import Checkpoints, TrainingState, fixed_tensors
from .ema import ShardedEma
from .ending import command_to_resume, conclude, write_sampling_config
from .freeze import choose_trained
from .lora import check_base, load_base
from .meter import Meter
from .metrics import Reporter, draw_loss
from .optimizer import learning_rate, make_optimizer
from .outcomes import PendingOutcome
from .preflight import initial_weights
from .profiling import StepProfiler, Steps
from .rank_batches import (
    buckets_with_clips,
    make_rank_batches,
    schedule_state,
    warn_of_other_schedule,
)
from .step_log import StepLog
from .summary import log_setup, session_of, write_summary
from .sync_check import SyncCheck
from .validation import Validator, encoders_of_validation

logger = logging.getLogger(__name__)


class Trainer:
    """The parts of a training run. ``__init__`` builds and restores them, ``train`` is the loop.

    ``module`` is the bare model, ``model`` the one that ColossalAI's Booster returns.
    """

    def __init__(
        self, cfg: TrainConfig, dataset: TrainingSet, checkpoint: Path | None, device: torch.device
    ) -> None:
        from opensora_sp.plugin import SequenceParallelPlugin
        from opensora_sp.plugin._colossalai import Booster

        plugin = SequenceParallelPlugin.from_config(cfg)
        self.mesh, self.booster = plugin.mesh, Booster(plugin=plugin)
        self.options = plugin.sequence_parallel
        self.dataset, self.device = dataset, device
        self.source = make_source(cfg, dataset, device)
        self.validation_encoders = encoders_of_validation(cfg, self.source, device)
        # All encoders, before anything is chosen by the memory that they leave.
        encoders = _allocated(device)
        cfg = with_chosen_batch_sizes(
            cfg, dataset, checkpoint, self.mesh, device, reserved=encoders
        )

        self.module = self._build_model(cfg)
        dtype = DTYPES[cfg.precision]
        self.kernels = choose_kernels(cfg.kernels, self.module, dtype=dtype, device=device)
        choose_attention(cfg, self.module, dtype=dtype, device=device)
        if cfg.compile == "blocks":
            compile_blocks(self.module)
        # Checkpoints of adapters hold nothing else.
        fixed = fixed_tensors(self.module) if cfg.lora is None else {}
        trained = [p for p in self.module.parameters() if p.requires_grad]
        optimizer = make_optimizer(cfg, trained)
        self.model, self.optimizer, *_ = self.booster.boost(self.module, optimizer)

        state = self._restore(cfg, checkpoint, fixed)
        warn_of_changes(state.get("kernels"), self.kernels)
        self.start: int = state["step"]
        self._pending: PendingOutcome | None = None  # of the newest step, until it is settled
        self.asked_to_stop = False

        per_step = micro_batches_of_step(cfg, state, self.mesh.world_size)
        self.plan = make_plan(cfg, dataset, per_step)
        self.cfg = with_length(cfg, self.plan)
        self._build_data_path(reserved=encoders)
        self.schedule = schedule_state(self.mesh, self.options, self.rank_batches)
        warn_of_other_schedule(state, self.schedule)

        self.checkpoints = Checkpoints(
            Path(cfg.outputs),
            keep_last=cfg.keep_last,
            keep_every=cfg.keep_every,
            in_background=cfg.async_save,
        )
        self.sync_check = SyncCheck(
            self.module, self.mesh, cfg.check_sync_every, self.tensors.shards
        )
        self.validator = Validator(self)
        self.activations = ActivationBudget(
            cfg,
            self.module,
            self.mesh,
            device,
            reserved=encoders,
            buckets=buckets_with_clips(self.plan),
            options=self.options,
        )
        self.meter = Meter(
            self.module,
            device,
            precision=cfg.precision,
            mesh=self.mesh,
            peak_tflops=cfg.peak_tflops,
        )
        self.step_log = StepLog(self, skipped=state.get("skipped_steps", 0))

    def train(
        self, run_dir: Path, traced: Steps | None = None, watch: Watchdog | None = None
    ) -> bool:
        """Train up to ``cfg.max_steps``, with a checkpoint every ``ckpt_every`` and at the end.

        Outcomes of steps are read one step late (``outcomes.py``). So where the watchdog of any
        rank was asked to stop, the run ends with the current step or the next one, and with a
        checkpoint. Returns whether ``max_steps`` was reached.
        """
        log_setup(self, run_dir)
        is_main = dist.get_rank() == 0
        reporter = Reporter(
            run_dir, self.cfg, enabled=is_main, start=self.start, session=session_of(self)
        )
        with reporter.reporting_failure():
            return self._run_steps(run_dir, reporter, traced, watch)

    def _run_steps(
        self, run_dir: Path, reporter: Reporter, traced: Steps | None, watch: Watchdog | None
    ) -> bool:
        """The loop of ``train``, and the end of the run."""
        cfg, is_main = self.cfg, dist.get_rank() == 0
        profiler, counter = StepProfiler(self.module, run_dir, traced), CommLedger()
        if is_main:
            # From the start on: a run can be sampled while it trains.
            with reporter.outputs.of("sample.py"):
                write_sampling_config(cfg, run_dir, self.dataset.rows)
        # The launcher, whose command line this is, may have ended when the run stops.
        command = command_to_resume()
        steps = iter(self.loader)
        began = time.perf_counter()
        self.step_log.begin_interval(began)
        done, stopped = self.start, False

        for step, batches in enumerate(steps, self.start):
            done = step + 1
            with counter, self.meter.timer, profiler.step(done):
                queued = self._step(step, batches, watch)
            stopped = self._follow(queued)

            saves = done % cfg.ckpt_every == 0 or done == cfg.max_steps or stopped
            if done % cfg.log_every == 0 or saves:
                self.step_log.write(reporter, done)
            reporter.step(done)

            if saves:
                # While steps are skipped, checkpoints from before may be the last good ones.
                rotate = self.step_log.skipped_in_a_row == 0
                self.checkpoints.save(self.tensors, self.state(done), rotate=rotate)
                if is_main:
                    with reporter.outputs.of("loss.png"):
                        draw_loss(run_dir)
                # The time of a checkpoint is not part of the next step.
                self.step_log.interval.start = time.perf_counter()
            if stopped:
                break
            self.step_log.interval.start += self.validator.after(done, run_dir, reporter, watch)

        self.loader.close()
        self.checkpoints.wait()
        reason = watch.why_to_stop() if stopped and watch is not None else None
        reporter.end(done, reason)
        if stopped:
            message = "stopped after step %d of %d (%s), with a checkpoint; resume with: %s"
            logger.info(message, done, cfg.max_steps, reason, command)
        else:
            with reporter.outputs.of("summary.json"):
                write_summary(self, run_dir, counter)
            if is_main:
                with reporter.outputs.of("sample.py"):
                    conclude(cfg, run_dir, reporter.last["loss"], time.perf_counter() - began)
        return not stopped

    def state(self, done: int) -> dict[str, Any]:
        """The content of ``state.json`` after ``done`` steps: all that the next steps depend on."""
        return {
            "step": done,
            **order_state(self.cfg, self.plan, len(self.dataset)),
            "manifest_columns": self.dataset.fingerprint,
            "micro_batches_per_step": self.plan.micro_batches_per_step,
            "loss_weight": self.cfg.loss_weight,
            **self.schedule,
            "next_micro_batch": done * self.plan.micro_batches_per_step,
            "next_lr": learning_rate(self.cfg, done),
            "skipped_steps": self.step_log.skipped,
            "kernels": self.kernels,
            "config": self.cfg.model_dump(mode="json"),
        }

    def _build_model(self, cfg: TrainConfig) -> ConditionedModel:
        """The bare model with random weights, frozen and adapted as configured."""
        torch.manual_seed(cfg.seed)
        model = cfg.model_spec.build()
        check_encoders(model.config, self.source, self.source)

        choose_trained(model, cfg)
        return model

    def _restore(
        self, cfg: TrainConfig, checkpoint: Path | None, fixed: dict[str, torch.Tensor]
    ) -> dict[str, Any]:
        """Load weights, EMA weights and optimizer state; returns what ``state.json`` holds."""
        shards, lora = NamedShards(self.module, self.optimizer), None
        if cfg.lora is not None:
            lora = load_base(cfg, initial_weights(cfg), self.module)
        elif cfg.load is not None and checkpoint is None:
            weights = initial_weights(cfg)
            weights = fitted(weights, self.module, convert=cfg.convert, of_base=True)
            load_model(weights, self.module, shards, fixed)
        self.ema = ShardedEma(shards.master_weights, cfg.ema_decay, warmup=cfg.ema_warmup)
        self.tensors = TrainingState(self.module, fixed, shards, self.ema, lora)
        if checkpoint is None:
            return {"step": 0}
        if lora is not None:
            check_base(lora, checkpoint)

        state = self.tensors.load(checkpoint)
        logger.info("resumed from %s at step %d", checkpoint, state["step"])
        return state

    def _build_data_path(self, reserved: int) -> None:
        """Build ``loader`` (reads clips), ``encoder`` (encodes them), ``batches`` (adds noise).

        ``reserved``: bytes of the device that encoders take.
        """
        cfg = self.cfg
        self.work = Work(cfg, self.dataset, self.options)
        self.corrupt = CorruptSamples(self.dataset.rows, self.mesh, cfg.dataset.max_bad_fraction)
        self.encoder = ShardedEncoder(
            self.mesh,
            self.module,
            self.dataset,
            self.plan,
            self.source,
            self.corrupt,
            self.device,
            whole=cfg.sequence_parallel.verify,
        )
        self.draws = DrawConfig.of_training(cfg, self.module.config, self.source.channels)
        self.batches = BatchMaker(cfg, self.device)

        self.rank_batches = make_rank_batches(
            cfg, self.plan, self.encoder, self.work, start=self.start, reserved=reserved
        )
        self.loader = StepLoader(
            self.dataset,
            self.rank_batches,
            num_workers=cfg.num_workers,
            seed=cfg.seed,
            draw=self.draws.draw_micro_batch,
            device=self.device,
            worker_init_fn=init_worker,
        )

    def _step(self, step: int, batches: StepBatches, watch: Watchdog | None) -> PendingOutcome:
        """One optimizer step: forward and backward of each micro-batch, then the update."""
        self.step_log.see(step, batches.micro_batches)
        sizes = [len(one.ids) for one in batches.micro_batches]
        loss = torch.zeros((), device=self.device)
        for loaded in batches.loaded:
            group = loaded.group or self.mesh.group
            with reporting_compilation(f"step {step}"), self.mesh.using(group):
                loss += self._forward_backward(step, loaded, sizes)
        return self._update(step, loss, watch)

    def _forward_backward(self, step: int, loaded: LoadedBatch, sizes: list[int]) -> torch.Tensor:
        """Forward and backward of a micro-batch; returns this rank's part of the mean loss.

        Args:
            sizes: samples of all micro-batches of the step.
        """
        num_samples = samples_of_mean(
            self.cfg.loss_weight, micro_batch=len(loaded.micro_batch.ids), sizes=sizes
        )
        is_idle = not loaded.micro_batch.ids
        batch = self._batch(loaded)
        if not is_idle:
            self.sync_check.see(step, batch.of_group)
            self.meter.count(batch)

        self.activations.fit(batch.x_t.shape)
        shard = self.model(batch.x_t, **batch.inputs, output="shards")
        with record_function("loss"):
            losses = self.batches.flow.losses(shard, batch.noised)
            if is_idle:
                # ZeRO reduces gradients in the order in which a backward pass yields them, so idle
                # replicas run one.
                losses = losses * 0.0
            world_size = dist.get_world_size()
            loss = rank_loss(losses, global_samples=num_samples, world_size=world_size)
        with record_function("backward"):
            self.booster.backward(loss, self.optimizer)
        return losses.detach().sum() / num_samples

    def _batch(self, loaded: LoadedBatch) -> Batch:
        with record_function("encode"):
            used, features = self.encoder.encode(loaded.micro_batch, loaded.items)
            draws = loaded.draws
            if used != loaded.micro_batch:
                # The worker did not know the clips that substitute corrupt ones.
                draws = self.draws.draw_micro_batch(used, self.source.latent_size(used.shape))
            return self.batches.make(features, draws)

    def _update(self, step: int, loss: torch.Tensor, watch: Watchdog | None) -> PendingOutcome:
        """Queue the update of the weights, which the device skips unless all numbers are finite.

        A skipped step still consumes its batches and its learning rate.

        Args:
            loss: this rank's part of the step's mean loss, ``[]``.
        """
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.cfg, step)

        # One collective for the loss and for whether to stop.
        asked_to_stop = watch is not None and watch.stop_reason is not None
        sums = torch.stack([loss, torch.full_like(loss, asked_to_stop)])
        dist.all_reduce(sums)
        self.sync_check.compare(step)

        total, stop = sums.unbind()
        with record_function("optimizer"):
            taken = self.optimizer.step_if_finite(total)
        self.ema.update(step, taken)
        return PendingOutcome(step + 1, loss=total, taken=taken, stop=stop)

    def _follow(self, queued: PendingOutcome) -> bool:
        """Read the outcome of the step before, while the device computes the one that is queued.

        What comes next may need the outcome of this step at once. Returns whether it is the last
        one, because a rank was asked to stop.
        """
        self._settle()
        self._pending = queued
        if self.asked_to_stop or self._needs_outcome(queued.step):
            self._settle()
        return self.asked_to_stop and queued.step < self.cfg.max_steps

    def _needs_outcome(self, done: int) -> bool:
        """Whether a checkpoint, the log or validation follow a step, which need its outcome."""
        cfg = self.cfg
        every = [cfg.ckpt_every, cfg.log_every]
        if cfg.validation is not None:
            every.append(cfg.validation.every)
        return done == cfg.max_steps or any(done % steps == 0 for steps in every)

    def _settle(self) -> None:
        """Wait for the pending step, if there is one, and count its outcome."""
        if self._pending is not None:
            outcome, self._pending = self._pending.read(), None
            self.asked_to_stop |= outcome.stop
            self.step_log.count(outcome)


def _allocated(device: torch.device) -> int:
    """Bytes allocated on a GPU; 0 on a CPU."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0

"""The trainer: builds and restores the parts of a run, and loops over optimizer steps."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from opensora_sp.checkpoint.model_config import check_encoders
from opensora_sp.checkpoint.state_dict import fitted
from opensora_sp.checkpoint.zero_shards import NamedShards, copy_weights
from opensora_sp.common.tensors import DTYPES
from opensora_sp.config import TrainConfig
from opensora_sp.data.loader import StepLoader
from opensora_sp.data.sampler import RankBatches, ReplicaBatches
from opensora_sp.data.schedule import ScheduledBatches
from opensora_sp.device_verification import choose_attention, choose_kernels
from opensora_sp.features.batch import BatchMaker, DrawConfig
from opensora_sp.features.build import (
    GroupSeconds,
    TrainingSet,
    Work,
    make_encoders,
    make_plan,
    make_source,
    micro_batches_of_step,
    order_state,
    with_length,
)
from opensora_sp.features.corrupt_samples import CorruptSamples
from opensora_sp.features.sharded import ShardedEncoder
from opensora_sp.features.sources import DegradedClips, Encoders, Source
from opensora_sp.models.base import ConditionedModel
from opensora_sp.models.compile import compile_blocks
from opensora_sp.parallel import CommLedger
from opensora_sp.runtime.processes import init_worker
from opensora_sp.runtime.watchdog import Watchdog

from .checkpointing import Checkpoints, TrainingState, fixed_tensors
from .memory_fit import (
    ActivationBudget,
    buckets_with_clips,
    estimator_of,
    fewest_ranks,
    with_chosen_batch_sizes,
)
from .metrics import Reporter
from .profiling import StepProfiler, Steps
from .step import DelayedResults, TrainingStep
from .step_log import Meter, StepLog, known_peak
from .summary import RunSetup, conclude, log_setup, write_sampling_config, write_summary
from .sync_check import SyncCheck
from .trainable import (
    DropoutDraws,
    LoraRun,
    ShardedEma,
    check_base,
    choose_trained,
    initial_weights,
    learning_rate,
    load_base,
    load_start,
    make_optimizer,
)

logger = logging.getLogger(__name__)


class Trainer:
    """The parts of a training run. ``__init__`` builds and restores them, ``train`` is the loop.

    ``model`` is what ColossalAI's Booster returns, ``module`` the model without ZeRO's wrapper.
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

        # All encoders, before anything is chosen by the memory that they leave.
        self.source = make_source(cfg, dataset, device)
        self.encoders_of_videos = encoders_of_validation(cfg, self.source, device)
        self.reserved = _allocated(device)
        cfg = with_chosen_batch_sizes(cfg, checkpoint, self.mesh, device, reserved=self.reserved)

        self._lora: LoraRun | None = None
        self._build_boosted_model(cfg, checkpoint)
        state = self._restore(cfg, checkpoint)
        self.start: int = state["step"]
        self.skipped: int = state.get("skipped_steps", 0)

        # A resumed run keeps the number of its checkpoint, also on other numbers of ranks.
        per_step = micro_batches_of_step(cfg, state, self.mesh.world_size)
        self.plan = make_plan(cfg, dataset, per_step)
        self.cfg = with_length(cfg, self.plan)
        self._build_data_path()
        self._build_step()

    def train(
        self, run_dir: Path, traced: Steps | None = None, watch: Watchdog | None = None
    ) -> bool:
        """Train up to ``cfg.max_steps``, with a checkpoint every ``ckpt_every`` and at the end.

        Results of steps are read one step late (``step.py``). So where the watchdog of any rank was
        asked to stop, the run ends with the current step or the next one, and with a checkpoint.
        Returns whether ``max_steps`` was reached.
        """
        cfg, start, is_main = self.cfg, self.start, dist.get_rank() == 0
        log_setup(self.setup, run_dir, start)
        session = self.setup.session()
        reporter = Reporter(run_dir, cfg, enabled=is_main, start=start, session=session)
        if is_main:
            # From the start on: a run can be sampled while it trains.
            with reporter.outputs.of("sample.py"):
                write_sampling_config(cfg, run_dir, self.dataset.rows)

        began, counter = time.perf_counter(), CommLedger()
        done, stopped = self._run_steps(run_dir, reporter, counter, traced, watch)
        reporter.close()
        if stopped:
            reason = None if watch is None else watch.why_to_stop()
            message = "stopped after step %d of %d (%s), with a checkpoint; add --resume auto"
            logger.info(message, done, cfg.max_steps, reason)
            return False

        with reporter.outputs.of("summary.json"):
            write_summary(self.setup, run_dir, counter, self.corrupt)
        if is_main:
            with reporter.outputs.of("sample.py"):
                seconds = time.perf_counter() - began
                conclude(cfg, run_dir, reporter.last["loss"], seconds)
        return True

    def _run_steps(
        self,
        run_dir: Path,
        reporter: Reporter,
        counter: CommLedger,
        traced: Steps | None,
        watch: Watchdog | None,
    ) -> tuple[int, bool]:
        """Loop over steps; returns their number, and whether a rank was asked to stop before."""
        cfg, log = self.cfg, self.log
        profiler = StepProfiler(self.module, run_dir, traced)
        results = DelayedResults(log.count)
        steps = iter(self.loader)
        log.begin_interval()
        done, stopped = self.start, False

        for step, batches in enumerate(steps, self.start):
            done = step + 1
            log.see(batches.micro_batches)
            with counter, log.meter.timer, profiler.step(done):
                pending = self.step.run(step, batches, watch)
            results.add(pending)

            saves = done % cfg.ckpt_every == 0 or done == cfg.max_steps
            logs = done % cfg.log_every == 0
            validates = cfg.validation is not None and done % cfg.validation.every == 0
            if saves or logs or validates or results.asked_to_stop:
                results.settle()
            stopped = results.asked_to_stop and done < cfg.max_steps

            if saves or logs or stopped:
                # Also with a checkpoint, so that a resumed run continues its curves from there.
                log.write(reporter, done)
            reporter.step(done)
            if saves or stopped:
                self._save(done, reporter)
            if stopped:
                break
            if validates:
                assert self.validator is not None
                log.exclude(self.validator.validate(done, run_dir, reporter))

        # Workers read ahead, and a save may still be written in the background.
        self.loader.close()
        self.checkpoints.wait()
        return done, stopped

    def _save(self, done: int, reporter: Reporter) -> None:
        """Write the checkpoint and the plot. Their time is not part of the next step."""
        # While steps are skipped, checkpoints from before may be the last good ones.
        rotate = self.log.skipped_in_a_row == 0
        self.checkpoints.save(self.tensors, self.state(done), rotate=rotate)
        reporter.draw_loss()
        self.log.begin_interval()

    def state(self, done: int) -> dict[str, Any]:
        """The content of ``state.json`` after ``done`` steps. ``checkpointing.py`` adds the loss
        scale and the parameter groups. ``next_...`` are for readers of the file.
        """
        return {
            "step": done,
            **order_state(self.cfg, self.plan, len(self.dataset)),
            # Digests of the manifest of the data set, by column.
            "manifest_columns": self.dataset.fingerprint,
            "micro_batches_per_step": self.plan.micro_batches_per_step,
            "loss_weight": self.cfg.loss_weight,
            "next_micro_batch": done * self.plan.micro_batches_per_step,
            "next_lr": learning_rate(self.cfg, done),
            "skipped_steps": self.log.skipped,
            "config": self.cfg.model_dump(mode="json"),
        }

    # Building

    def _build_model(self, cfg: TrainConfig, checkpoint: Path | None) -> ConditionedModel:
        """The bare model with random weights, frozen and adapted as configured."""
        # Each rank draws the same initial weights.
        torch.manual_seed(cfg.seed)
        model = cfg.model_spec.build()
        check_encoders(model.config, self.source, self.source)

        if cfg.lora is not None:
            # Before the adapters: DoRA begins at the norms of these weights.
            self._lora = load_base(cfg, model)
        choose_trained(model, cfg)
        if self._lora is not None and checkpoint is None:
            load_start(self._lora, model)
        return model

    def _build_boosted_model(self, cfg: TrainConfig, checkpoint: Path | None) -> None:
        """Build ``module`` with its kernels, ``model`` and ``optimizer``."""
        self.module = self._build_model(cfg, checkpoint)
        dtype = DTYPES[cfg.precision]
        # Kernels are verified on this device before the model is cast and wrapped.
        choose_kernels(cfg.kernels, self.module, dtype=dtype, device=self.device)
        choose_attention(cfg, self.module, dtype=dtype, device=self.device)
        if cfg.compile == "blocks":
            compile_blocks(self.module)

        # Before the cast to the training's precision. Checkpoints of adapters hold nothing else.
        self._fixed = fixed_tensors(self.module) if cfg.lora is None else {}
        trained = [p for p in self.module.parameters() if p.requires_grad]
        optimizer = make_optimizer(cfg, trained)
        self.model, self.optimizer, *_ = self.booster.boost(self.module, optimizer)

    def _restore(self, cfg: TrainConfig, checkpoint: Path | None) -> dict[str, Any]:
        """Load weights, EMA weights and optimizer state; returns what ``state.json`` holds."""
        shards, lora = NamedShards(self.module, self.optimizer), self._lora
        if lora is None and cfg.load is not None and checkpoint is None:
            weights = initial_weights(cfg)
            weights = fitted(weights, self.module, convert=cfg.convert, allow_base=True)
            copy_weights(weights, self.module, shards, self._fixed)
        ema = ShardedEma(shards.master_weights, cfg.ema_decay, warmup=cfg.ema_warmup)
        self.tensors = TrainingState(self.module, self._fixed, shards, ema, lora)
        if checkpoint is None:
            return {"step": 0}
        if lora is not None:
            # Adapters fit no other weights than those that they were trained on.
            check_base(lora, checkpoint)

        state = self.tensors.load(checkpoint)
        logger.info("resumed from %s at step %d", checkpoint, state["step"])
        return state

    def _build_data_path(self) -> None:
        """Build ``loader`` (reads clips), ``encoder``, and ``batch_maker`` (adds noise)."""
        cfg, mesh, dataset, plan = self.cfg, self.mesh, self.dataset, self.plan
        self.work = Work(cfg, dataset, self.options)
        self.corrupt = corrupt = CorruptSamples(dataset.rows, mesh, cfg.dataset.max_bad_fraction)
        whole = cfg.sequence_parallel.verify
        self.encoder = ShardedEncoder(
            mesh, self.module, dataset, plan, self.source, corrupt, self.device, whole=whole
        )
        self.draw_config = DrawConfig.of_training(cfg, self.module.config, self.source.channels)
        self.batch_maker = BatchMaker(cfg, self.device)

        self.rank_batches = self._make_rank_batches()
        self.loader = StepLoader(
            dataset,
            self.rank_batches,
            num_workers=cfg.num_workers,
            seed=cfg.seed,
            draw=self.draw_config.draw_micro_batch,
            device=self.device,
            # Workers end with their rank, whatever signal it gets.
            worker_init_fn=init_worker,
            time_limit=cfg.dataset.time_limit,
        )

    def _make_rank_batches(self) -> RankBatches:
        """The sampler of this rank, from step ``start`` on. Collective."""
        cfg, mesh, plan = self.cfg, self.mesh, self.plan
        steps = dict[str, Any](start=self.start, stop=cfg.max_steps)
        steps["request_of"] = self.encoder.request
        if not cfg.schedules_groups:
            return ReplicaBatches(plan, **steps, replica=mesh.dp_rank, num_replicas=mesh.dp_size)

        least: dict[str, int] = {}
        # The memory of a CPU belongs to all ranks of a host, so a group has no more than a rank.
        has_own_memory = self.device.type == "cuda" or cfg.grad_checkpoint == "auto"
        if len(mesh.own) > 1 and has_own_memory:
            run = estimator_of(cfg, mesh, self.device, self.reserved, self.options)
            least = fewest_ranks(cfg, mesh, run, buckets_with_clips(plan))
        seconds = GroupSeconds(
            cfg, self.work, ranks_per_node=mesh.ranks_per_node, least_ranks=least
        )
        return ScheduledBatches(plan, **steps, rank=mesh.rank, family=mesh.family, seconds=seconds)

    def _build_step(self) -> None:
        """Build ``step``, and the observers of a run: ``validator``, ``checkpoints``, ``log``."""
        cfg, mesh, module, device = self.cfg, self.mesh, self.module, self.device
        buckets = buckets_with_clips(self.plan)
        peak_tflops = known_peak(device, cfg.precision)
        meter = Meter(module, device, mesh=mesh, peak_tflops=peak_tflops)
        self.step = TrainingStep(
            cfg,
            self.booster,
            self.model,
            self.optimizer,
            self.tensors,
            self.encoder,
            self.draw_config,
            self.batch_maker,
            ActivationBudget(cfg, module, mesh, device, self.reserved, buckets, self.options),
            meter.count,
            SyncCheck(module, mesh, cfg.check_sync_every, self.tensors.shards),
            DropoutDraws(module, cfg.seed),
        )

        self.validator = None
        if self.encoders_of_videos is not None:
            # Sampling's modules would lengthen the start of runs without validation.
            from .validation import Validator

            self.validator = Validator(
                cfg, mesh, self.model, self.tensors, self.encoders_of_videos, self.batch_maker
            )
        self.checkpoints = Checkpoints(
            Path(cfg.outputs),
            keep_last=cfg.keep_last,
            keep_every=cfg.keep_every,
            in_background=cfg.async_save,
        )

        self.log = StepLog(
            cfg, meter, self.work, self.loader, self.corrupt, self.optimizer, self.skipped
        )
        self.setup = RunSetup(cfg, mesh, self.tensors, self.dataset, self.plan)


def encoders_of_validation(
    cfg: TrainConfig, source: Source, device: torch.device
) -> Encoders | None:
    """The encoders of training, loaded where it reads a feature cache; None without validation."""
    if cfg.validation is None:
        return None
    if isinstance(source, DegradedClips):
        return source.plain
    return source if isinstance(source, Encoders) else make_encoders(cfg, device)


def _allocated(device: torch.device) -> int:
    """Bytes allocated on a GPU; 0 on a CPU."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0

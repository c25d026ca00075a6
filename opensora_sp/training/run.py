"""The training run: check, launch, train under a watchdog, and end with the right exit status."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

from opensora_sp.checkpoint.writer import on_rank_0
from opensora_sp.common.console import exit_interrupted
from opensora_sp.common.importing import check_colossalai
from opensora_sp.config import TrainConfig, dump_config
from opensora_sp.features.same_clips import agree_on_clips
from opensora_sp.parallel import closing_process_group, drain_process_group
from opensora_sp.runtime.cost_models import cost_model_of
from opensora_sp.runtime.rank_info import RANKS_OF_HOST, UNSET
from opensora_sp.runtime.rendezvous import join_rendezvous, raise_on_all_ranks
from opensora_sp.runtime.run_lock import RunLock
from opensora_sp.runtime.timeouts import backend_timeout
from opensora_sp.runtime.watchdog import Watchdog

from .checkpointing import choose_checkpoint
from .metrics import log_to
from .preflight import check_resume, compared_clips, nothing_left, preflight
from .profiling import Steps
from .trainer import Trainer

logger = logging.getLogger(__name__)

# Environment variables of a deterministic run. cuBLAS gets fixed workspaces, one per stream. With
# rings of NCCL the order follows from the ranks; trees have no reduce-scatter, and NVLS adds in the
# network switch.
DETERMINISTIC = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_ALGO": "Ring"}

TIME_LIMITS = ("peer_timeout", "collective_timeout", "grace_time")


def train(
    cfg: TrainConfig,
    *,
    resume: str | None = None,
    profile: str | None = None,
    accept_new_data: bool = False,
) -> Path:
    """Train as the config describes; returns the run's folder.

    Args:
        resume: None starts a new run, "auto" resumes from the newest good checkpoint in
            ``cfg.outputs`` if there ever was one, a path from that checkpoint. "none" starts a new
            run in a folder whose checkpoints cannot be resumed.
        accept_new_data: resume also with other clips than those that the checkpoint was written
            with.
        profile: steps to write a trace of, "3" or "10-12"; see ``profiling``.

    Raises:
        PackageError: first of all, without ColossalAI or with another version of it.
        ValueError: before any process group or model exists, if files, checkpoint and processes do
            not fit the config; later, on every rank, if another run holds the folder or the run
            cannot continue.
        SystemExit: with status 1 if another rank has failed; where the run was asked to stop before
            its end (see ``runtime.watchdog``), with 130 after Ctrl-C.
    """
    traced = None if profile is None else Steps.parse(profile)
    if resume == "none" and int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")):
        # torchrun repeats the command: the attempt before has begun anew.
        resume = "auto"
    with raise_on_all_ranks():
        check_colossalai()
        if cfg.deterministic:
            use_deterministic_kernels()
        dataset, checkpoint = preflight(cfg, resume, traced, accept_new_data=accept_new_data)
        compared = cfg.model_dump(mode="json") | cost_model_of(cfg.cost_model).as_settings()
        if cfg.schedules_groups:
            # Ranks that count another number of ranks on a node would form other groups.
            compared[RANKS_OF_HOST] = os.environ.get(RANKS_OF_HOST, UNSET)
    from opensora_sp.plugin import current_device, launch

    run_dir, store = Path(cfg.outputs), join_rendezvous(compared)
    with ExitStack() as run:
        run.enter_context(closing_process_group())
        limits = {name: getattr(cfg, name) for name in TIME_LIMITS}
        watch = run.enter_context(Watchdog(store, **limits))
        # After the watchdog has started: a rank that never joins the group is reported by it.
        launch(cfg.seed, store, timeout=backend_timeout(cfg.collective_timeout))
        run.enter_context(_locked(run_dir, cfg.collective_timeout / 2))
        _open_run_dir(cfg, run_dir)
        # Each host reads its own manifest; other clips under the same numbers would train without
        # an error.
        agree_on_clips(compared_clips(cfg, dataset))
        checked, checkpoint = checkpoint, choose_checkpoint(run_dir, checkpoint, resume=resume)
        # Checks so far were of the checkpoint that looked good without reading all of it.
        if checkpoint is not None and checkpoint != checked:
            check_resume(cfg, checkpoint, dataset, accept_new_data=accept_new_data)
        idle = nothing_left(cfg, checkpoint, dataset)
        if idle is not None:
            logger.info("%s", idle)
            return run_dir

        trainer = Trainer(cfg, dataset, checkpoint, current_device())
        # A save in the background is finished even if training fails: it is a good checkpoint.
        with closing(trainer.checkpoints):
            finished = trainer.train(run_dir, traced, watch)

        interrupted = not finished and watch.is_interrupted
        # Its tensors and groups have to go before the process group does.
        del trainer
        drain_process_group()

    if interrupted:
        exit_interrupted(
            "stopped by Ctrl-C (SIGINT) with a checkpoint, from which --resume auto resumes: "
            f"{run_dir}"
        )
    return run_dir


@contextmanager
def _locked(run_dir: Path, patience: float) -> Iterator[None]:
    """Hold the run's folder, by rank 0; its error is raised on every rank. Collective.

    Args:
        patience: seconds that rank 0 waits at most while another run holds it.
    """
    with ExitStack() as locks:
        with on_rank_0("locking the run's folder") as is_rank_0:
            if is_rank_0:
                locks.enter_context(RunLock(run_dir, patience))
        yield


def _open_run_dir(cfg: TrainConfig, run_dir: Path) -> None:
    """The run's folder, with its log and its resolved config."""
    is_main = dist.get_rank() == 0
    run_dir.mkdir(parents=True, exist_ok=True)
    log_to(run_dir, enabled=is_main)
    if is_main:
        (run_dir / "config.py").write_text(dump_config(cfg), encoding="utf-8")


def use_deterministic_kernels() -> None:
    """Select deterministic kernels for the whole process, before CUDA is used.

    On CUDA, the same step then gives the same bits again; on a CPU this has no effect.
    Kernels that add with atomics add in the order in which their blocks end, which varies.

    Attention (FlashAttention-2's dq, memory-efficient attention's split keys), ``index_add`` and
    convolutions use their deterministic variants. An operator that has none raises torch's own
    RuntimeError when it is called. cuBLAS gets a workspace per stream and NCCL a fixed algorithm,
    whatever the environment says.
    """
    os.environ.update(DETERMINISTIC)
    torch.use_deterministic_algorithms(True)

    # Filling new memory with NaN detects reads of it. It costs a write each and changes no result.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False

"""The sampling run: check the config, initialise processes, load the model, sample, write files."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from opensora_sp.checkpoint import find_weights, verify
from opensora_sp.checkpoint.adapters import (
    Adapters,
    check_adapters,
    merged,
    open_adapters,
    warn_of_other_base,
)
from opensora_sp.checkpoint.model_config import check_encoders, check_model_config
from opensora_sp.checkpoint.pretrained import fill
from opensora_sp.checkpoint.reader import open_weights, saved_config
from opensora_sp.checkpoint.state_dict import fitted
from opensora_sp.checkpoint.writer import on_rank_0
from opensora_sp.common.console import LOGGER
from opensora_sp.common.files import check_writable
from opensora_sp.common.tensors import DTYPES
from opensora_sp.config import InferenceConfig, build_component
from opensora_sp.config.launch_checks import check_launch
from opensora_sp.encoders import LATENT_ENCODERS, TEXT_ENCODERS, check_packages
from opensora_sp.models.base import ConditionedModel
from opensora_sp.models.compile import compile_blocks
from opensora_sp.parallel import (
    SequenceMesh,
    closing_process_group,
    drain_process_group,
    parallelize,
)
from opensora_sp.runtime.cost_models import cost_model_of
from opensora_sp.runtime.rendezvous import join_rendezvous, raise_on_all_ranks, start_process_group
from opensora_sp.runtime.watchdog import Watchdog

from .group_choice import Groups, choose_groups, counted, free_memory, place_encoders
from .outputs import (
    differences,
    facts_of,
    fingerprint,
    media_path,
    with_digests,
    write_batch,
)
from .pipeline import Pipeline
from .prompts import read_prompts
from .requests import Request, check_requests, requests_of

if TYPE_CHECKING:
    from opensora_sp.config import TrainConfig

logger = logging.getLogger(__name__)
REPORT_EVERY = 10.0  # seconds between lines of progress where there is no bar


def sample(cfg: InferenceConfig) -> list[Path]:
    """Sample the videos of a config; returns the files that this rank wrote.

    The ranks of an SP group share each batch of prompts, and the batches are distributed over the
    groups. Within a group, the ranks write the videos of a batch in turn.

    Raises:
        ValueError: before the model is built, if prompts, references, checkpoint and processes do
            not fit the config.
    """
    # Before a process group exists: a rank that fails keeps no other one waiting.
    with raise_on_all_ranks():
        cfg = cfg.model_copy(update={"lora": resolved_sources(cfg, cfg.lora, ema=cfg.use_ema)})
        requests, weights = preflight(cfg)
        compared = cfg.model_dump(mode="json") | cost_model_of(cfg.cost_model).as_settings()
        compared |= {"lora": found_at(cfg.lora), "weights": found_at([str(weights)])}
    store = join_rendezvous(compared)
    with closing_process_group(), Watchdog(store, grace_time=0):
        device = start_process_group(store)
        written = _sample_all(cfg, requests, weights, device)
        drain_process_group()
    logger.info("done: %s in %s", counted(len(requests), "video"), cfg.outputs)
    return written


def preflight(cfg: InferenceConfig, world_size: int | None = None) -> tuple[list[Request], Path]:
    """The checked requests and the path of the weights; the same on every rank.

    Args:
        world_size: number of processes that will sample; by default of this launch.

    Raises:
        ValueError: for prompts, references, outputs, checkpoint, adapters or processes that do not
            fit.
    """
    check_launch(cfg, world_size or int(os.environ.get("WORLD_SIZE", "1")))
    check_packages(cfg.text_encoder)

    prompts = cfg.prompts or (read_prompts(cfg.prompt_path) if cfg.prompt_path else [])
    if not prompts:
        raise ValueError(
            "got no prompts; expected at least one; pass --prompt TEXT or --prompts FILE"
        )
    requests = requests_of(cfg, prompts)
    check_requests(cfg, requests)

    check_writable(Path(cfg.outputs))
    if cfg.ckpt is None:
        raise ValueError("got no checkpoint; expected trained weights; pass --ckpt PATH")
    weights = find_weights(cfg.ckpt, ema=cfg.use_ema, allow_pickle=cfg.allow_pickle)
    if saved_config(weights) is not None:
        spec = cfg.model_spec
        check_model_config(weights, spec.model_class.__name__, spec.config, convert=cfg.convert)
    opened_adapters(cfg, cfg.lora, ema=cfg.use_ema)
    return requests, weights


def resolved_sources(
    cfg: InferenceConfig | TrainConfig, sources: Sequence[str], *, ema: bool
) -> tuple[str, ...]:
    """Sources of adapters by the folders of their files: a run may save newer ones meanwhile.

    Raises:
        ValueError: see ``opened_adapters``.
    """
    opened = opened_adapters(cfg, sources, ema=ema)
    return tuple(f"{adapters.path}:{adapters.scale!r}" for adapters in opened)


def found_at(paths: Sequence[str]) -> list[str]:
    """The ends of paths, by which ranks compare them: hosts may have a run in different places."""
    return ["/".join(Path(path).parts[-2:]) for path in paths]


def opened_adapters(
    cfg: InferenceConfig | TrainConfig, sources: Sequence[str], *, ema: bool
) -> list[Adapters]:
    """LoRA adapters ``PATH`` or ``PATH:SCALE``, checked against the config's model.

    Raises:
        ValueError: if there are none at a path, or they are of another model.
    """
    if not sources:
        return []
    # Shapes are all that is compared.
    with torch.device("meta"):
        model = cfg.model_spec.build()
    opened = []
    for source in sources:
        adapters = open_adapters(source, ema=ema)
        check_adapters(adapters, model)
        opened.append(adapters)
    return opened


def verified_digest(cfg: InferenceConfig, weights: Path) -> str:
    """SHA-256 of the weights and the config's adapters, see ``fingerprint``.

    Raises:
        ValueError: unless they are listed so in their checkpoints' manifests.
    """
    adapters = opened_adapters(cfg, cfg.lora, ema=cfg.use_ema)
    verify_parts(weights, adapters)
    return fingerprint(weights, adapters)


def verify_parts(weights: Path, adapters: Sequence[Adapters]) -> None:
    """Raise ValueError unless weights and adapters are as in their checkpoints' manifests."""
    for path in (weights, *(adapter.path for adapter in adapters)):
        if (path.parent / "COMMIT").is_file():
            verify(path.parent, part=path.name)


def build_pipeline(
    cfg: InferenceConfig,
    weights: Path,
    mesh: SequenceMesh,
    device: torch.device,
    groups: Groups | None = None,
) -> Pipeline:
    """The model with its weights, parallelized over the mesh, and the encoders.

    Args:
        groups: by whose batches some weights of the encoders wait on the host, on a GPU.
    """
    encoders = cfg
    if groups is not None and device.type == "cuda":
        encoders = place_encoders(cfg, groups, free_memory(device))
    vae = build_component(encoders.vae, LATENT_ENCODERS).to(device)
    text_encoder = build_component(encoders.text_encoder, TEXT_ENCODERS).to(device)
    adapters = opened_adapters(cfg, cfg.lora, ema=cfg.use_ema)
    model = load_model(
        cfg, weights, mesh, device, vae, text_encoder, ema=cfg.use_ema, adapters=adapters
    )
    return Pipeline(cfg, model, vae, text_encoder, device)


def load_model(
    cfg: InferenceConfig | TrainConfig,
    weights: Path,
    mesh: SequenceMesh,
    device: torch.device,
    vae: Any,
    text_encoder: Any,
    *,
    ema: bool,
    adapters: Sequence[Adapters] = (),
) -> ConditionedModel:
    """The model with its weights and without gradients, parallelized over the mesh. Collective.

    Args:
        vae, text_encoder: whose latents and features it must take.
        ema: of a file that holds both, load the EMA weights.
        adapters: checked ones, which are merged into the weights.
    """
    # Once all is checked: verification needs the planner, whose import would delay errors.
    from opensora_sp.device_verification import choose_attention, choose_kernels

    # Nothing is initialised: the checkpoint has all weights.
    with torch.device("meta"):
        model = cfg.model_spec.build()
    check_encoders(model.config, vae, text_encoder)
    opened = open_weights(weights, ema=ema, allow_pickle=cfg.allow_pickle)
    opened = fitted(opened, model, convert=cfg.convert)
    with on_rank_0("comparing the weights with the base of the adapters") as is_rank_0:
        if is_rank_0:
            warn_of_other_base(opened, adapters)
    fill(model, merged(opened, adapters))

    dtype = DTYPES[cfg.precision]
    model.requires_grad_(False).eval().to(device, dtype)
    choose_kernels(cfg.kernels, model, dtype=dtype, device=device)
    choose_attention(cfg, model, dtype=dtype, device=device)
    if cfg.compile == "blocks":
        compile_blocks(model)
    parallelize(model, mesh, cfg.parallel_options(cost_model_of(cfg.cost_model)))
    return model


def _sample_all(
    cfg: InferenceConfig, requests: list[Request], weights: Path, device: torch.device
) -> list[Path]:
    from tqdm.contrib.logging import logging_redirect_tqdm

    folder = Path(cfg.outputs)
    requests, digest = _remaining_requests(cfg, requests, weights, folder)
    if not requests:
        logger.info("nothing left to do: all videos are in %s", folder)
        return []

    cost_model = cost_model_of(cfg.cost_model)
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    per_node = _fewest_ranks_on_a_node(world_size, device)
    groups = choose_groups(
        cfg, requests, world_size, cost_model=cost_model, ranks_per_node=per_node
    )
    logger.info("%s", groups.why)
    mesh = SequenceMesh(groups.sp_size, ranks_per_node=per_node)
    batches = groups.batches[mesh.dp_rank]
    pipeline = build_pipeline(cfg, weights, mesh, device, groups)

    folder.mkdir(parents=True, exist_ok=True)
    progress = _Progress(len(batches) * cfg.loop * pipeline.process.num_sampling_steps, mesh.rank)
    written = []
    with logging_redirect_tqdm([LOGGER]), progress.bar:
        for batch in batches:
            parts = pipeline.looped(batch, on_step=progress.advance)
            written += write_batch(pipeline, batch, parts, mesh, folder, digest)
    return written


def _fewest_ranks_on_a_node(world_size: int, device: torch.device) -> int:
    """The number by which all ranks choose the same groups and links, on nodes that differ.

    Collective.
    """
    ranks_here = torch.tensor(int(os.environ.get("LOCAL_WORLD_SIZE", world_size)), device=device)
    if dist.is_initialized():
        dist.all_reduce(ranks_here, dist.ReduceOp.MIN)
    return int(ranks_here)


class _Progress:
    """Rank 0's sampling steps: a bar on a terminal, else a line of the log at times."""

    def __init__(self, total: int, rank: int) -> None:
        from tqdm import tqdm

        # With None the bar is shown in terminals only, so that log files have no carriage returns.
        options: dict[str, Any] = dict(disable=None if rank == 0 else True, dynamic_ncols=True)
        self.bar = tqdm(total=total, desc="sample", unit="step", **options)
        self.total, self.done = total, 0
        self.start = self.reported = time.monotonic()

    def advance(self, *_: Any) -> None:
        """Report one more step."""
        self.bar.update()
        self.done += 1
        now = time.monotonic()
        if self.bar.disable and now >= self.reported + REPORT_EVERY:
            self.reported = now
            left = (now - self.start) / self.done * (self.total - self.done)
            logger.info("sampling step %d of %d, %.0f s left", self.done, self.total, left)


def _remaining_requests(
    cfg: InferenceConfig, requests: list[Request], weights: Path, folder: Path
) -> tuple[list[Request], str]:
    """The requests still to be sampled, with digests of their files, and the digest of the weights.

    Collective.

    Rank 0 reads the files and broadcasts the result.

    Raises:
        ValueError: on every rank, if the weights are not those that their checkpoint's manifest
            lists.
    """
    result: list[Any] = [None]
    with on_rank_0("checking weights and videos") as is_rank_0:
        if is_rank_0:
            digest = verified_digest(cfg, weights)
            requests = remaining = with_digests(requests)

            if cfg.skip_existing:
                remaining = [
                    request for request in requests if not _exists(cfg, folder, request, digest)
                ]
                skipped = len(requests) - len(remaining)
                logger.info("%d of %d videos exist already", skipped, len(requests))
            result = [(remaining, digest)]

    if dist.is_initialized():
        dist.broadcast_object_list(result, src=0)
    return result[0]


def _exists(cfg: InferenceConfig, folder: Path, request: Request, digest: str) -> bool:
    """True if the video of this very request exists; warn if it is of another request."""
    facts = facts_of(cfg, request, digest)
    differing = differences(folder, request, facts)
    if differing:
        logger.warning(
            "%s is of another request (other %s); it is sampled again",
            media_path(folder, request, facts),
            ", ".join(differing),
        )
    return differing == []

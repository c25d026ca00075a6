"""Samples one request after another on the same ranks, which keep the model in between."""

from __future__ import annotations

import gc
import io
import logging
import math
import time
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist
from PIL import Image
from torch import Tensor

from opensora_sp.checkpoint import on_rank_0
from opensora_sp.checkpoint.adapters import parse_source
from opensora_sp.checkpoint.paths import weight_files
from opensora_sp.config import InferenceConfig
from opensora_sp.data import to_frames
from opensora_sp.parallel import SequenceMesh, closing_process_group
from opensora_sp.runtime.cost_model_file import cost_model_of
from opensora_sp.runtime.rendezvous import join_rendezvous, raise_on_all_ranks, start_process_group
from opensora_sp.runtime.watchdog import Watchdog
from opensora_sp.sampling.outputs import with_digests, write_batch
from opensora_sp.sampling.pipeline import Pipeline
from opensora_sp.sampling.process_groups import choose_groups, free_memory, place_encoders
from opensora_sp.sampling.requests import Request
from opensora_sp.sampling.run import build_pipeline, verified_digest

logger = logging.getLogger(__name__)
# Previews take at most about this part of the time, and have at most so many pixels a side.
PREVIEW_SHARE, PREVIEW_SIDE = 0.1, 320
# Keys of a config, in addition to the path of the weights, that decide which model is loaded.
LOADED = {"model", "vae", "text_encoder", "precision", "use_ema", "convert", "lora", "kernels"}
LOADED |= {"compile", "sequence_parallel", "cost_model"}
UNWRITTEN = (
    "got {} while the video was written; expected none; look at {}, free space there, or try again"
)


class RequestCancelledError(Exception):
    """A request was cancelled."""


@dataclass(frozen=True)
class Work:
    """One request, with the config and the weights that ``preflight`` has checked.

    Attributes:
        versions: of the files of weights and adapters, which a training may replace.
    """

    cfg: InferenceConfig
    request: Request
    weights: Path
    versions: str

    @classmethod
    def of(cls, cfg: InferenceConfig, request: Request, weights: Path) -> Work:
        """Raises OSError where a file has been removed meanwhile."""
        parts = [weights, *(Path(parse_source(source)[0]) for source in cfg.lora)]
        files = sum(map(weight_files, parts), list[Path]())
        versions = []
        for file in files:
            status = file.stat()
            versions.append((str(file), status.st_mtime_ns, status.st_size, status.st_ino))
        return cls(cfg, request, weights, str(versions))


def serve(pipe: Connection) -> None:
    """Sample each ``Work`` that comes through the pipe, until it is closed. Collective.

    Rank 0 answers with ``("step", done, of all, PNG or b"")`` after each step, then with ``("done",
    path of the video)``, ``("cancelled",)`` where None came meanwhile, or ``("error", text)`` where
    the video cannot be written. Ranks and model live on after each of them.
    """
    with raise_on_all_ranks():
        pass
    store = join_rendezvous()
    with closing_process_group(), Watchdog(store, grace_time=0):
        device = start_process_group(store)
        mesh = SequenceMesh(dist.get_world_size() if dist.is_initialized() else 1)
        session = Session(mesh, device, pipe)
        with suppress(EOFError):
            while True:
                work = pipe.recv()
                # None is about work that has ended meanwhile.
                if work is not None:
                    session.sample(work)


class Session:
    """The ranks' side: all of them share each video."""

    def __init__(self, mesh: SequenceMesh, device: torch.device, pipe: Connection) -> None:
        self.mesh, self.device, self.pipe = mesh, device, pipe
        self._loaded: tuple[str, Pipeline, str] | None = None

    def sample(self, work: Work) -> None:
        """Sample a video and report it; see ``serve``. Collective."""
        pipeline, digest = self._pipeline(work)
        with on_rank_0("reading the references") as is_rank_0:
            # Rank 0 writes the video and its JSON.
            batch = with_digests([work.request]) if is_rank_0 else [work.request]
        steps = _Steps(self, pipeline, work.request.size)
        answer: tuple[str, ...] = ("cancelled",)
        with suppress(RequestCancelledError):
            folder = Path(work.cfg.outputs)
            parts = pipeline.looped(batch, on_step=steps.after)

            errors = list[str]()
            # Without a folder, writing the video is the error.
            with suppress(OSError):
                folder.mkdir(parents=True, exist_ok=True)
            written = write_batch(pipeline, batch, parts, self.mesh, folder, digest, errors)
            answer = ("done", *map(str, written))
            if errors:
                answer = ("error", UNWRITTEN.format(errors[0], folder.parent))
        if self.mesh.rank == 0:
            self.pipe.send(answer)

    def _pipeline(self, work: Work) -> tuple[Pipeline, str]:
        """A pipeline, and on rank 0 the SHA-256 of its weights; loaded unless the last one fits."""
        cfg, weights, digest = work.cfg, work.weights, ""
        # Where encoders are placed by free memory, another size may need another placement.
        shape = work.request.shape if self.device.type == "cuda" else ""
        key = f"{work.versions} {shape} {cfg.model_dump_json(include=LOADED)}"
        if self._loaded is not None and self._loaded[0] == key:
            _, last, digest = self._loaded
            return Pipeline(cfg, last.model, last.vae, last.text_encoder, self.device), digest

        # Memory for two models would not be there.
        self._loaded = None
        # Modules with hooks are in cycles.
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        with on_rank_0("checking the weights") as is_rank_0:
            if is_rank_0:
                digest = verified_digest(cfg, weights)

        placed = None
        if self.device.type == "cuda":
            costs, size = cost_model_of(cfg.cost_model), self.mesh.sp_size
            groups = choose_groups(cfg, [work.request], size, cost_model=costs)
            placed = place_encoders(cfg, groups, free_memory(self.device))
        pipeline = build_pipeline(cfg, weights, self.mesh, self.device, placed=placed)
        self._loaded = (key, pipeline, digest)
        return pipeline, digest


class _Steps:
    """Reports the steps of one request, and ends it where it is cancelled."""

    def __init__(self, session: Session, pipeline: Pipeline, size: tuple[int, int]) -> None:
        self.session, self.pipeline, self.size = session, pipeline, size
        self.done, self.total = 0, pipeline.cfg.loop * pipeline.flow.num_sampling_steps
        self.next_preview = 0.0

    def after(self, number: int, t: Tensor, latents: Tensor) -> None:
        """Raise RequestCancelledError, on all ranks after the same step. Collective."""
        mesh, pipe, device = self.session.mesh, self.session.pipe, self.session.device
        self.done += 1
        is_cancelled = torch.zeros((), device=device)
        if mesh.rank == 0:
            pipe.send(("step", self.done, self.total, self.preview(latents)))
            if pipe.poll():
                is_cancelled += pipe.recv() is None
        if dist.is_initialized():
            dist.broadcast(is_cancelled, src=0)
        if is_cancelled.item():
            raise RequestCancelledError

    def preview(self, latents: Tensor) -> bytes:
        """A PNG of the middle latent frame of ``[1, c, f, h, w]``; b"" soon after the last one.

        Nor after one that failed, for example for lack of memory: the video is still finished.
        """
        # The first step has a preview at once.
        since = time.perf_counter()
        if since < self.next_preview:
            return b""
        try:
            png = self._decode(latents)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            logger.warning("the video has no further previews (%s)", reason)
            self.next_preview = math.inf
            return b""

        taken = time.perf_counter() - since
        self.next_preview = since + taken / PREVIEW_SHARE
        return png

    def _decode(self, latents: Tensor) -> bytes:
        first = latents.shape[2] // 2
        decoded = self.pipeline.vae.decode(latents[:, :, first : first + 1].float(), num_frames=1)
        height, width = self.size
        image, png = Image.fromarray(to_frames(decoded[0])[0, :height, :width]), io.BytesIO()
        image.thumbnail((PREVIEW_SIDE, PREVIEW_SIDE))
        image.save(png, "PNG")
        return png.getvalue()

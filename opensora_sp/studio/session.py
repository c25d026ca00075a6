"""Samples one request after another on the same ranks, which keep the model in between."""

from __future__ import annotations

import gc
import io
import itertools
import math
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist
from PIL import Image
from torch import Tensor

from opensora_sp.checkpoint.writer import on_rank_0
from opensora_sp.data.transforms import to_frames
from opensora_sp.parallel import SequenceMesh, closing_process_group
from opensora_sp.runtime.cost_models import cost_model_of
from opensora_sp.runtime.rendezvous import join_rendezvous, raise_on_all_ranks, start_process_group
from opensora_sp.runtime.watchdog import Watchdog
from opensora_sp.sampling.group_choice import choose_groups
from opensora_sp.sampling.outputs import with_digests, write_batch
from opensora_sp.sampling.pipeline import Pipeline
from opensora_sp.sampling.run import build_pipeline, verified_digest

from .form import Work

# Of a video, and the most pixels that they have on a side.
PREVIEWS, PREVIEW_SIDE = 10, 320
# Keys of a config, in addition to the path of the weights, that decide which model is loaded.
LOADED = {"model", "vae", "text_encoder", "precision", "use_ema", "convert", "lora", "kernels"}
LOADED |= {"compile", "sequence_parallel", "cost_model"}


class RequestCancelledError(Exception):
    """A request was cancelled."""


def serve(pipe: Connection) -> None:
    """Sample each ``Work`` that comes through the pipe, until it is closed. Collective.

    Rank 0 answers with ``("step", done, of all, PNG or b"")`` after each step, then with ``("done",
    path of the video)``, or ``("cancelled",)`` where None came meanwhile.
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
        done, folder = itertools.count(1), Path(work.cfg.outputs)
        total = work.cfg.loop * pipeline.process.num_sampling_steps

        def report(number: int, t: Tensor, latents: Tensor) -> None:
            self._end_if_cancelled()
            if self.mesh.rank == 0:
                step, png = next(done), b""
                if step % math.ceil(total / PREVIEWS) == 0:
                    png = preview(pipeline, latents, work.request.size)
                self.pipe.send(("step", step, total, png))

        answer: tuple[str, ...] = ("cancelled",)
        with suppress(RequestCancelledError):
            parts = pipeline.looped(batch, on_step=report)
            folder.mkdir(parents=True, exist_ok=True)
            written = write_batch(pipeline, batch, parts, self.mesh, folder, digest)
            answer = ("done", *map(str, written))
        if self.mesh.rank == 0:
            self.pipe.send(answer)

    def _end_if_cancelled(self) -> None:
        """Raise RequestCancelledError, on all ranks after the same step. Collective."""
        is_cancelled = torch.zeros((), device=self.device)
        if self.mesh.rank == 0 and self.pipe.poll():
            is_cancelled += self.pipe.recv() is None
        if dist.is_initialized():
            dist.broadcast(is_cancelled, src=0)
        if is_cancelled.item():
            raise RequestCancelledError

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

        costs, size = cost_model_of(cfg.cost_model), self.mesh.sp_size
        groups = choose_groups(cfg, [work.request], size, cost_model=costs)
        pipeline = build_pipeline(cfg, weights, self.mesh, self.device, groups)
        self._loaded = (key, pipeline, digest)
        return pipeline, digest


def preview(pipeline: Pipeline, latents: Tensor, size: tuple[int, int]) -> bytes:
    """A PNG of the middle latent frame of ``[1, c, f, h, w]``, for a video of (height, width)."""
    first, (height, width) = latents.shape[2] // 2, size
    decoded = pipeline.vae.decode(latents[:, :, first : first + 1].float(), num_frames=1)
    image, png = Image.fromarray(to_frames(decoded[0])[0, :height, :width]), io.BytesIO()
    image.thumbnail((PREVIEW_SIDE, PREVIEW_SIDE))
    image.save(png, "PNG")
    return png.getvalue()

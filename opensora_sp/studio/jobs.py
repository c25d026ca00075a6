"""Requests of the page, checked, and the queue that hands them to the ranks in turn."""

from __future__ import annotations

import itertools
import shutil
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from opensora_sp.checkpoint.adapters import parse_source
from opensora_sp.checkpoint.paths import weight_files
from opensora_sp.config import load_inference_config
from opensora_sp.runtime.local_ranks import LocalRanks
from opensora_sp.sampling.requests import file_name, requests_of
from opensora_sp.sampling.run import preflight, resolved_sources

from .folders import SAMPLING, Folders
from .form import FIELDS, LISTS, Job, Work, refused_field, worded


def with_references(work: Work) -> Work:
    """Copy the references next to the video, which they explain: uploads are removed."""
    folder, name, prompt = Path(work.cfg.outputs), work.request.name, work.request.prompt
    if not prompt.references:
        return work
    folder.mkdir()
    copies = []
    for number, path in enumerate(prompt.references):
        copies.append(str(shutil.copy(path, folder / f"{name}.{number}{path.suffix}")))
    prompt = replace(prompt, reference_path=";".join(copies))
    return replace(work, request=replace(work.request, prompt=prompt))


class Queue:
    """Samples one job at a time, in a thread.

    Attributes:
        jobs: those that have had no turn yet, in their order, and the one that runs.
    """

    def __init__(self, folders: Folders, ranks: LocalRanks) -> None:
        self.folders, self.ranks, self.jobs = folders, ranks, list[Job]()
        self._thread, self._numbers = ThreadPoolExecutor(1, "queue"), itertools.count()

    def submit(self, job: Job) -> None:
        """Check a job, which fails where ``check`` raises, or else waits."""
        name = f"{time.strftime('%Y%m%d-%H%M%S')}-{next(self._numbers):03d}"
        name += f"-{file_name(job.values.get('prompt') or '')}"
        try:
            job.work = with_references(self.check(job.values, name))
        except (ValueError, OSError) as error:
            job.error, job.state = worded(error), "failed"
            job.refused_field = refused_field(job.values, self.check)
        self.jobs.append(job)
        self._thread.submit(self._run, job)

    def check(self, values: Mapping[str, Any], name: str = "new") -> Work:
        """Check a request as ``opensora-sp sample`` checks its command line.

        Args:
            values: by the keys of ``FIELDS``; empty ones are taken from the run.
            name: of the folder of its video.

        Raises:
            ValueError: for paths outside of the folders, and for what the command refuses.
            OSError: where a file has been removed meanwhile.
        """
        given = {key: setting for key, setting in values.items() if setting}
        given |= {key: ";".join(given[key]) for key in LISTS if key in given}
        for key in ("ckpt", "prompt"):
            if not given.get(key, "").strip():
                raise ValueError(f"got no {FIELDS[key][0].lower()}; expected one; fill it in")
        checkpoint = self.folders.checked(given["ckpt"], executed=True)
        sources = [parse_source(source) for source in given.get("lora", ())]
        adapters = [(self.folders.checked(path, executed=True), scale) for path, scale in sources]

        siblings = (checkpoint, checkpoint.parent, *(path for path, _ in adapters))
        config = next((path / SAMPLING for path in siblings if (path / SAMPLING).is_file()), None)
        if config is None:
            raise ValueError(f"got {checkpoint} without {SAMPLING}; expected a run; choose one")
        given |= dict(ckpt=str(checkpoint), lora=[f"{path}:{scale!r}" for path, scale in adapters])
        given |= dict(prompts=[{"prompt": given.pop("prompt").strip()}], prompt_path=None)
        # The page shows one video, whatever the run's config has.
        given |= dict(num_samples=1, format="mp4", sp_size=self.ranks.nproc)
        given["outputs"] = str(self.folders.outputs / name)
        cfg = load_inference_config(self.folders.checked(config, executed=True), values=given)

        # Before any file is opened; a prompt may name some too.
        for request in requests_of(cfg):
            for path in (*request.prompt.references, *request.inputs.values()):
                self.folders.checked(path)
        cfg = cfg.model_copy(update={"lora": resolved_sources(cfg, cfg.lora, ema=cfg.use_ema)})
        requests, weights = preflight(cfg, self.ranks.nproc)

        paths = [weights, *(Path(parse_source(source)[0]) for source in cfg.lora)]
        files = sum(map(weight_files, paths), list[Path]())
        versions = [(str(file), file.stat().st_mtime_ns, file.stat().st_ino) for file in files]
        return Work(cfg, requests[0], weights, str(versions))

    def ahead_of(self, job: Job) -> int:
        """The number of living jobs that come before this one."""
        return [each for each in (*self.jobs, job) if each is job or not each.has_ended].index(job)

    def _run(self, job: Job) -> None:
        def report(done: int, total: int, preview: bytes) -> None:
            job.steps, job.preview = (done, total), preview or job.preview
            job.began = job.began or time.monotonic()

        try:
            if not job.has_ended:
                job.state = "running"
                answer = self.ranks.run(job.work, on_step=report, is_cancelled=job.cancelled.is_set)
                job.state, *paths = answer
                job.video = Path(paths[0]) if paths else None
        except Exception as error:
            job.error, job.state = str(error), "failed"
        self.jobs.remove(job)
        if job.work is not None and job.video is None:
            shutil.rmtree(job.work.cfg.outputs, ignore_errors=True)

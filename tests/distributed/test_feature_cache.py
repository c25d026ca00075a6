"""The feature cache: written by several ranks and after an interruption, read in training.

It holds what the encoders make; a cache that does not fit is refused by name. Losses of training
from one are in test_derived_runs.py.
"""

from __future__ import annotations

import contextlib
import json
import re
import runpy
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from mixed_clips import BUCKETS, write_mixed_set
from mixed_clips import TRAIN as BUCKETED
from ranks import run_ranks
from runs import ROOT, TRAIN, write_toy_set
from worlds import TRAINING, in_worlds

from opensora_sp.config import load_train_config
from opensora_sp.data.cache import CachedClip, CachedFeatures, in_fewest_bits
from opensora_sp.data.dataset import Sample, VideoTextDataset
from opensora_sp.data.loader import RequestLoader
from opensora_sp.encoders.loading import weights_digest
from opensora_sp.encoders.standins import HashedBagOfWords, PatchPoolVAE
from opensora_sp.features.cache_writer import check_reproducible
from opensora_sp.features.sources import Encoders
from opensora_sp.runtime.watchdog import Watchdog
from opensora_sp.training.preflight import preflight

STEPS = 7
KEPT = ["dataset.transform=resize_center_crop", "dataset.clip_start=middle"]


class CutError(Exception):
    """Where making a cache is interrupted."""


def made(config: Path, cache: Path, options: list[str], shards: int | None) -> int:
    """Make the cache, or so many shards of it; returns the clips that this rank has encoded."""
    from opensora_sp.features import cache_writer as module

    write, latents = module.CacheWriter._write_shard, Encoders.latents
    written, encoded = [], []

    class Timed(RequestLoader):
        def __init__(self, *args: Any, **options: Any) -> None:
            assert options["time_limit"] == 60.0
            super().__init__(*args, **options)

    def counted_write(self: Any, number: int, *args: Any) -> None:
        if len(written) == shards:
            raise CutError
        written.append(number)
        write(self, number, *args)

    def counted_latents(self: Any, items: Any) -> Any:
        encoded.extend(items)
        return latents(self, items)

    module.CLIPS_PER_SHARD, module.RequestLoader = 3, Timed
    module.CacheWriter._write_shard, Encoders.latents = counted_write, counted_latents
    try:
        arguments = ["--cfg-options", *options] if options else []
        sys.argv = ["precompute.py", str(config), "-o", str(cache), *arguments]
        runpy.run_path(str(ROOT / "scripts" / "precompute.py"), run_name="__main__")
    except CutError:
        assert shards is not None
    finally:
        module.CacheWriter._write_shard, Encoders.latents = write, latents
        module.RequestLoader = RequestLoader
    return len(encoded)


def make_interrupted(folder: Path) -> list[int | None]:
    """Two ranks are interrupted after a shard each, three resume, and one finds nothing to do."""
    mixed, cache = folder / "mixed.py", folder / "cache"
    encoded = in_worlds(made, [(2, (mixed, cache, KEPT, 1))], TRAINING)

    (folder / "first").mkdir(exist_ok=True)
    for path in cache.glob("shard-*"):
        shutil.copy2(path, folder / "first" / path.name)
    (cache / ".partial-shard-00002.safetensors").write_bytes(b"what an interruption leaves")
    assert not (cache / "index.json").exists()

    whole = (mixed, cache, KEPT, None)
    return encoded + in_worlds(made, [(3, whole), (1, whole)], TRAINING)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cached")
    manifest = write_mixed_set(folder)
    (folder / "mixed.py").write_text(
        BUCKETED.format(buckets=BUCKETS, manifest=str(manifest), steps=STEPS)
    )
    reported = run_ranks(3, make_interrupted, folder)
    (folder / "encoded.json").write_text(json.dumps(list(zip(*reported))))
    return folder


@pytest.mark.slow
def test_an_interrupted_cache_resumes_with_what_is_missing(folder: Path) -> None:
    first, second, third = json.loads((folder / "encoded.json").read_text())
    cache = CachedFeatures(str(folder / "cache"))

    # One shard of each rank, which stays as it is.
    assert len(list((folder / "first").iterdir())) == 2
    for path in (folder / "first").iterdir():
        kept = folder / "cache" / path.name
        assert kept.read_bytes() == path.read_bytes()
        assert kept.stat().st_mtime_ns == path.stat().st_mtime_ns

    # Each clip is encoded once. A finished cache is left alone.
    latents = set()
    for shape, clips in cache.latents.items():
        latents |= {(clip, shape) for clip in clips}
    assert min(first[:2]) > 0 and min(second[:3]) > 0
    assert sum(first[:2]) + sum(second[:3]) == len(latents)
    assert third[0] == 0
    broken = {(clip, Path(sample.path).name) for (clip, _), sample in cache.corrupt.items()}
    assert broken and broken <= {(3, "3.png"), (13, "13.mp4")}


def test_what_is_kept_is_what_the_encoders_make(folder: Path) -> None:
    cache = CachedFeatures(str(folder / "cache"))
    files = VideoTextDataset(str(folder / "clips.jsonl"))
    source = Encoders(PatchPoolVAE((1, 16, 16)), HashedBagOfWords(8, 12), torch.device("cpu"))
    compared = 0

    for shape in cache.sizes:
        for clip in cache.known(shape).tolist():
            kept, read = cache[Sample(clip, 5, shape)], files[Sample(clip, 0, shape)]
            if not isinstance(kept, CachedClip):
                assert clip in (3, 13) and kept.path == read.path
                continue
            made, text = source.latents([read])[0], source.text_features([read])[0]
            assert torch.equal(kept.latents, made) and kept.fps == read.fps
            assert torch.equal(kept.text, text)
            part = cache[Sample(clip, 0, shape, (1, 2))]
            assert part.text is None and torch.equal(part.latents, made[:, 1:2])
            compared += 1

    assert compared > 24 and len(cache.sizes) > 5


CACHED = ["dataset.type=CachedFeatures", "dataset.path={folder}/cache", "outputs={folder}/none"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["vae.pool=(1, 16, 8)"], r"got vae.pool \[1, 16, 8\] \(there \[1, 16, 16\]\) with the"),
        (["text_encoder.max_length=9"], r"got text_encoder.max_length 9 \(there 12\)"),
        (
            ["dataset.transform=resize_random_crop"],
            r"'resize_random_crop' \(there 'resize_center_crop'\)",
        ),
        (["dataset.clip_start=random"], r"dataset.clip_start 'random' \(there 'middle'\)"),
        (["dataset.frame_interval=2"], r"dataset.frame_interval 2 \(there 1\)"),
        (["dataset.manifest={folder}/other.jsonl"], r"got dataset.manifest text '24 of 24 cells"),
        (["bucket_config={{'144p': {{4: (1.0, 1)}}}}"], r"got bucket_config and .* lacks \d+"),
        (["max_steps=60"], r"got bucket_config and max_steps 60, for which the feature cache"),
        (["dataset.path={folder}"], r"without index.json; expected a finished feature cache; run"),
    ],
)
def test_a_cache_of_something_else_is_refused_by_name(
    folder: Path, options: list[str], message: str
) -> None:
    lines = (folder / "clips.jsonl").read_text().replace('"clip 7"', '"another caption"')
    (folder / "other.jsonl").write_text(lines)
    reported = [option.format(folder=folder) for option in [*CACHED, *KEPT, *options]]
    with pytest.raises(ValueError, match=message):
        cfg = load_train_config(folder / "mixed.py", reported)
        preflight(cfg, None)
    preflight(load_train_config(folder / "mixed.py", reported[: -len(options)]), None)


def test_what_cannot_be_kept_is_refused(folder: Path) -> None:
    for option, message in [
        ("dataset.clip_start=random", "got dataset.transform 'resize_random_crop', clip_start"),
        ("dataset.type=VideoText", "'VideoText' with bucket_config"),
        ("dataset.path=cache", "got dataset.type 'VariableVideoText' with manifest .* and path"),
    ]:
        with pytest.raises(ValueError, match=message):
            check_reproducible(load_train_config(folder / "mixed.py", [option]))

    noise = ["noise_augmentation=True", "noise_prob.gaussian_pixel=0.5"]
    noise += ["noise_strength.gaussian_pixel=0.4"]
    with pytest.raises(ValueError, match="noise_augmentation True to keep in a feature cache"):
        check_reproducible(load_train_config(folder / "mixed.py", [*KEPT, *noise]))

    with pytest.raises(ValueError, match="'CachedFeatures' to make a feature cache of"):
        check_reproducible(
            load_train_config(
                folder / "mixed.py", [*KEPT, "dataset.type=CachedFeatures", "dataset.path=x"]
            )
        )
    with pytest.raises(ValueError, match="expected a path"):
        load_train_config(folder / "mixed.py", ["dataset.type=CachedFeatures"])


def train_on_own_clips(config: Path, folders: list[Path], options: list[str]) -> str:
    """The error of a run whose ranks do not have the same clips, each in its own folder."""
    from opensora_sp.training.run import train

    there = contextlib.chdir(folders[torch.distributed.get_rank()])
    with there, pytest.raises(ValueError, match="got different clips on different") as raised:
        train(load_train_config(config, [*KEPT, *options]))
    return str(raised.value)


def train_in_pairs(config: Path, cases: list[tuple[list[Path], list[str]]]) -> list[str]:
    return in_worlds(train_on_own_clips, [(2, (config, *case)) for case in cases], TRAINING)


def test_ranks_with_different_clips_raise_the_same_error(folder: Path, tmp_path: Path) -> None:
    """Before a model is built; rank 0 or rank 1 is the one that differs."""
    lines = (folder / "clips.jsonl").read_text().splitlines()
    lines_of_folders = {
        "same": lines,
        "captions": [line.replace('"clip 7"', '"another"') for line in lines],
        "length": lines[:-1],
    }
    folders = {"cache": folder, "other cache": tmp_path}
    for name, content in lines_of_folders.items():
        folders[name] = tmp_path / name
        folders[name].mkdir()
        (folders[name] / "clips.jsonl").write_text("\n".join(content))

    shutil.copytree(folder / "cache", tmp_path / "cache")
    index = json.loads((tmp_path / "cache" / "index.json").read_text())
    index["made_of"]["vae.weights"] = "of another file"
    (tmp_path / "cache" / "index.json").write_text(json.dumps(index))

    # The options are the same on both ranks.
    outputs = f"outputs={tmp_path / 'run'}"
    cached = ["dataset.manifest=None", "dataset.type=CachedFeatures", "dataset.path=cache"]
    pairs = [("captions", "same"), ("same", "length"), ("other cache", "cache")]
    cases = []
    for pair in pairs:
        options = cached if "cache" in pair else ["dataset.manifest=clips.jsonl"]
        cases.append(([folders[name] for name in pair], [outputs, *options]))
    first, second = run_ranks(2, train_in_pairs, folder / "mixed.py", cases)

    assert first == second
    errors = dict(zip(pairs, first, strict=True))
    for pair, error in errors.items():
        assert " on rank 0 (" in error and " on rank 1 (" in error, error
        assert ("dataset.manifest text" in error) == ("same" in pair)
        assert ("dataset.manifest path" in error) == ("length" in pair)
        assert ("index of dataset.path" in error) == ("cache" in pair)
    assert re.search(r"23 of 23 cells, digest \w+ on rank 1", errors["same", "length"])


def fail_to_plan(config: Path, cache: Path) -> tuple[float, bool]:
    """The watchdog's peer_timeout, and whether an error before any encoding reaches all ranks."""
    from opensora_sp.features import cache_writer as module

    started = []

    class Recorded(Watchdog):
        def __init__(self, store: Any, **limits: Any) -> None:
            started.append(limits)
            super().__init__(store, **limits)

    def fail(*args: Any) -> None:
        raise ValueError("got no plan")

    module.Watchdog, module.make_plan = Recorded, fail
    with pytest.raises(ValueError, match="got no plan") as raised:
        module.precompute(load_train_config(config, [*KEPT, "peer_timeout=7"]), str(cache))
    return started and started[0].get("peer_timeout"), getattr(raised.value, "is_logged", False)


def test_an_error_before_anything_is_encoded_ends_all_ranks(tmp_path: Path) -> None:
    config = tmp_path / "config.py"
    config.write_text(TRAIN.format(manifest=str(write_toy_set(tmp_path, 2))) + "load = None\n")
    assert run_ranks(1, fail_to_plan, config, tmp_path / "cache") == [(7.0, True)]


def test_halving_the_bytes_loses_nothing() -> None:
    exact = torch.randn(100)
    assert in_fewest_bits(exact).dtype == torch.float32
    for dtype in (torch.bfloat16, torch.float16):
        half = torch.randn(100).to(dtype)
        assert in_fewest_bits(half.float()).dtype == dtype and torch.equal(
            in_fewest_bits(half.float()), half
        )


def test_weights_are_reported_apart_without_loading_them(tmp_path: Path) -> None:
    assert weights_digest(str(tmp_path / "nowhere")) is None
    (tmp_path / "vae").mkdir()
    (tmp_path / "vae" / "model.safetensors").write_bytes(b"weights" * 1000)
    digest = weights_digest(str(tmp_path), "vae")
    assert digest == weights_digest(str(tmp_path / "vae"))
    (tmp_path / "vae" / "README.md").write_text("no weight")
    assert digest == weights_digest(str(tmp_path / "vae"))
    (tmp_path / "vae" / "model.safetensors").write_bytes(b"weights" * 999 + b"Weights")
    assert digest != weights_digest(str(tmp_path / "vae"))

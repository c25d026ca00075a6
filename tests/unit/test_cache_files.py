"""The files of a feature cache: absent ones are noticed, and nothing outside is read."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch

from opensora_sp.data.cache import (
    MANIFEST,
    CachedClip,
    CachedFeatures,
    DamagedRecordError,
    Index,
    shard_content,
)
from opensora_sp.data.dataset import ClipShape, Sample
from opensora_sp.data.loader import StepLoader
from opensora_sp.data.manifest import Entry, write_manifest
from opensora_sp.data.sampler import MicroBatchPlan, ReplicaBatches

SHAPE, SIZE = ClipShape(4, 32, 24), (3, 4, 3)
CLIPS, SHARDS = 4, 2


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """Two shards of two clips each, one of which has a caption without tokens."""
    folder, made_of = tmp_path / "cache", {"vae.type": "none", "dataset.manifest path": "4 of 4"}
    folder.mkdir()
    torch.manual_seed(0)
    for number in range(SHARDS):
        clips = {}
        for clip in range(number, CLIPS, SHARDS):
            latents = torch.randn(2, *SIZE).to(torch.bfloat16)
            clips[clip, SHAPE] = CachedClip(latents, torch.randn(clip, 5), 24.0)
        content = shard_content(made_of, clips, {})
        (folder / f"shard-{number:06d}.safetensors").write_bytes(content)

    write_manifest(folder / MANIFEST, [Entry(Path(f"/{i}.mp4"), f"clip {i}") for i in range(CLIPS)])
    index = Index(
        made_of=made_of,
        source={"channels": 2, "width": 5, "max_length": CLIPS},
        sizes={"4x32x24": SIZE},
        shards=[path.name for path in sorted(folder.glob("shard-*"))],
    )
    (folder / "index.json").write_text(index.model_dump_json())
    return folder


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_worker_reports_damage_as_the_rank_itself_would(cache: Path, num_workers: int) -> None:
    """Without the worker's traceback; steps before it are yielded."""
    plan = MicroBatchPlan(
        num_samples=CLIPS, batch_size=1, micro_batches_per_step=1, seed=1, shape=SHAPE
    )
    steps = [plan.step(step)[0].ids[0] for step in range(CLIPS)]
    last = next(step for step, clip in enumerate(steps) if clip % SHARDS == 1)
    cached = CachedFeatures(str(cache))
    (cache / "shard-000001.safetensors").unlink()

    batches = ReplicaBatches(plan, start=0, stop=CLIPS, replica=0, num_replicas=1)
    yielded = []
    with pytest.raises(ValueError, match=r"^got the record 'latents/") as raised:
        for step in StepLoader(cached, batches, num_workers=num_workers, seed=0):
            yielded += [batch.micro_batch.ids[0] for batch in step.loaded]
    assert yielded == steps[:last]
    assert "shard-000001.safetensors" in str(raised.value)
    assert "Traceback" not in str(raised.value)


def edit_index(folder: Path, **values: object) -> None:
    index = json.loads((folder / "index.json").read_text())
    (folder / "index.json").write_text(json.dumps({**index, **values}))


@pytest.mark.parametrize("name", ["index.json", MANIFEST, "shard-000001.safetensors"])
def test_links_out_of_the_folder_are_refused(cache: Path, tmp_path: Path, name: str) -> None:
    shutil.move(cache / name, tmp_path / name)
    (cache / name).symlink_to(tmp_path / name)
    with pytest.raises(ValueError, match="which leads out of this folder; expected") as raised:
        CachedFeatures(str(cache))
    assert repr(name) in str(raised.value)


def test_links_within_the_folder_and_to_the_folder_are_followed(
    cache: Path, tmp_path: Path
) -> None:
    (cache / "shard-000001.safetensors").rename(cache / "blob")
    (cache / "shard-000001.safetensors").symlink_to("blob")
    (tmp_path / "link").symlink_to(cache)
    followed = CachedFeatures(str(tmp_path / "link"))
    assert isinstance(followed[Sample(1, 0, SHAPE)], CachedClip)


@pytest.mark.parametrize("kind", ["absent", "fifo", "folder"])
def test_a_shard_that_is_no_file_is_named_at_the_start(cache: Path, kind: str) -> None:
    path = cache / "shard-000001.safetensors"
    path.unlink()
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    with pytest.raises(ValueError, match="without 1 of its files .*shard-000001.safetensors"):
        CachedFeatures(str(cache))


@pytest.mark.parametrize(
    "values",
    [
        {"shards": 5},
        {"shards": [7]},
        {"sizes": [1]},
        {"sizes": {"4x32x24": [1]}},
        {"sizes": {"5x32x24": SIZE}},
        {"sizes": {"4x": SIZE}},
        {"sizes": {"4x32x24": [3, 4, 1 << 40]}},
        {"shards": ["../cache/shard-000000.safetensors"]},
        {"shards": ["/shard-000000.safetensors"]},
        {"shards": ["aside/shard-000000.safetensors"]},
        {"format": 2},
    ],
)
def test_an_index_of_another_structure_is_an_error_for_users(
    cache: Path, values: dict[str, object]
) -> None:
    edit_index(cache, **values)
    with pytest.raises(ValueError, match=r"with a damaged index\.json .*; expected what was"):
        CachedFeatures(str(cache))


def test_a_record_of_another_shape_than_the_index_states_is_refused(cache: Path) -> None:
    edit_index(cache, sizes={"4x32x24": [3, 4, 5]})
    with pytest.raises(DamagedRecordError, match=r"its shape is \(2, 3, 4, 3\)"):
        CachedFeatures(str(cache))[Sample(0, 0, SHAPE)]

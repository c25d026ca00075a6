"""The files of a feature cache: damage to any of them is noticed, and nothing outside is read."""

from __future__ import annotations

import json
import os
import shutil
import tracemalloc
import zlib
from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from opensora_sp.data import (
    CachedClip,
    CachedFeatures,
    ClipShape,
    Entry,
    Manifest,
    MicroBatchPlan,
    ReplicaBatches,
    Sample,
    StepLoader,
    write_manifest,
)
from opensora_sp.data.cache_files import (
    CHECKSUM,
    FORMAT,
    MANIFEST,
    MANIFEST_CHECKSUM,
    DamagedRecordError,
    Shard,
    ShardContent,
    check_seal,
    file_checksum,
    sealed,
)

SHAPE, SIZE = ClipShape(4, 32, 24), (3, 4, 3)
CLIPS, SHARDS = 4, 2


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """Two shards of two clips each, one of which has a caption without tokens."""
    folder, made_of = tmp_path / "cache", {"vae.type": "none"}
    folder.mkdir()
    torch.manual_seed(0)
    for number in range(SHARDS):
        content = ShardContent(made_of)
        for clip in range(number, CLIPS, SHARDS):
            content.latents[clip, SHAPE] = torch.randn(2, *SIZE).to(torch.bfloat16)
            content.fps[clip, SHAPE] = 24.0
            content.texts[clip] = torch.randn(clip, 5)
        (folder / f"shard-{number:06d}.safetensors").write_bytes(content.to_bytes())

    write_manifest(folder / MANIFEST, [Entry(Path(f"/{i}.mp4"), f"clip {i}") for i in range(CLIPS)])
    shards = [Shard.read(path) for path in sorted(folder.glob("shard-*"))]
    index = {
        "format": FORMAT,
        "made_of": made_of,
        "source": {"channels": 2, "width": 5, "max_length": CLIPS},
        "sizes": {"4x32x24": SIZE},
        "shards": {shard.path.name: shard.checksum for shard in shards},
        "outdated": [],
        "manifest_columns": Manifest(folder / MANIFEST).fingerprint,
        MANIFEST_CHECKSUM: file_checksum(folder / MANIFEST),
    }
    (folder / "index.json").write_text(json.dumps(sealed(index)))
    return folder


@pytest.mark.parametrize("content", [{}, {"b": {"d": 1, "c": [0.5, None]}, "a": "\u00e9"}])
def test_a_seal_is_the_checksum_of_sorted_json(content: dict[str, object]) -> None:
    seal = sealed(content)[CHECKSUM]
    assert seal == zlib.crc32(json.dumps(content, sort_keys=True).encode())
    check_seal(json.loads(json.dumps(sealed(content))))
    for other in (content, sealed(content) | {"b": 2}):
        with pytest.raises(ValueError, match="its checksum differs"):
            check_seal(other)


def test_a_checksum_is_made_of_parts_of_a_file(tmp_path: Path) -> None:
    content = b"clips" + bytes(32 << 20)
    (tmp_path / MANIFEST).write_bytes(content)
    tracemalloc.start()
    assert file_checksum(tmp_path / MANIFEST) == zlib.crc32(content)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 8 << 20


def content_of(folder: Path) -> list[object]:
    """All that training reads of a cache of one shape."""
    cache = CachedFeatures(str(folder))
    (shape,) = cache.sizes
    found: list[object] = [list(cache.rows), cache.fingerprint, cache.sizes]
    for clip in range(len(cache)):
        item = cache[Sample(clip, 0, shape)]
        assert isinstance(item, CachedClip)
        found += [item.latents.tolist(), item.text.tolist(), item.fps, cache.text_length(clip)]
    return found


def test_the_damaged_shard_and_record_are_named_and_no_other(cache: Path) -> None:
    path, cached = cache / "shard-000001.safetensors", CachedFeatures(str(cache))
    name = "latents/3/4x32x24"
    with safe_open(path, "pt") as file:
        record = file.get_tensor(name)
    found = path.read_bytes()
    # One frame of one clip.
    damaged = record.clone()
    damaged[:, 1] += 1
    path.write_bytes(found.replace(bytes_of(record), bytes_of(damaged)))

    messages = {}
    for clip, first in product(range(CLIPS), range(SIZE[0])):
        try:
            cached[Sample(clip, 0, SHAPE, (first, first + 1))]
        except DamagedRecordError as error:
            messages[clip, first] = str(error)
    assert messages.keys() == {(3, 1)}
    assert f"got the record {name!r} of {str(path)!r}" in messages[3, 1]
    assert "its checksum differs" in messages[3, 1]


def bytes_of(x: torch.Tensor) -> bytes:
    return x.view(torch.uint8).numpy().tobytes()


def test_an_exchanged_shard_is_named_at_the_start(cache: Path) -> None:
    shutil.copy2(cache / "shard-000000.safetensors", cache / "shard-000001.safetensors")
    with pytest.raises(DamagedRecordError, match=r"shard-000001.* another checksum"):
        CachedFeatures(str(cache))


def test_of_a_clip_in_several_shards_the_last_one_counts(cache: Path) -> None:
    """Of outdated ones none does; a clip that one run has encoded is not corrupt."""
    path = cache / "shard-000002.safetensors"
    content = ShardContent({"vae.type": "none"}, corrupt={(0, SHAPE): ("0.mp4", "lost")})
    content.corrupt[9, SHAPE] = "9.mp4", "lost"
    content.latents[1, SHAPE] = torch.ones(2, *SIZE)
    content.fps[1, SHAPE] = 12.0
    path.write_bytes(content.to_bytes())
    index = json.loads((cache / "index.json").read_text())
    shards = {**index["shards"], path.name: Shard.read(path).checksum}
    edit_index(cache, shards=shards, outdated=[[2, "4x32x24"]])

    cached = CachedFeatures(str(cache))
    assert cached[Sample(1, 0, SHAPE)].fps == 12.0
    assert torch.equal(cached[Sample(1, 0, SHAPE)].latents, content.latents[1, SHAPE].bfloat16())
    assert list(cached.corrupt) == [(9, SHAPE)]
    assert cached.known(SHAPE).tolist() == [0, 1, 3, 9]
    with pytest.raises(KeyError):
        cached[Sample(2, 0, SHAPE)]


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
    del index[CHECKSUM]
    (folder / "index.json").write_text(json.dumps(sealed({**index, **values})))


@pytest.mark.parametrize("kind", ["parent", "absolute", "link", "folder", "index", "clips"])
def test_files_outside_of_the_folder_are_refused(cache: Path, tmp_path: Path, kind: str) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    shards = ["shard-000000.safetensors", "shard-000001.safetensors"]
    name = {"index": "index.json", "clips": MANIFEST}.get(kind, shards[1])
    if kind in ("link", "index", "clips"):
        shutil.move(cache / name, outside / name)
        (cache / name).symlink_to(outside / name)
    else:
        shutil.copy2(cache / name, outside / name)
        (cache / "aside").symlink_to(outside)
        other = {"parent": "../outside/", "absolute": f"{outside}/", "folder": "aside/"}[kind]
        name = other + name
        edit_index(cache, shards={shards[0]: 1, name: 2})

    with pytest.raises(ValueError, match="which leads out of this folder; expected") as raised:
        CachedFeatures(str(cache))
    assert repr(name) in str(raised.value)


def test_links_within_the_folder_and_to_the_folder_are_followed(
    cache: Path, tmp_path: Path
) -> None:
    content = content_of(cache)
    (cache / "shard-000001.safetensors").rename(cache / "blob")
    (cache / "shard-000001.safetensors").symlink_to("blob")
    (tmp_path / "link").symlink_to(cache)
    assert content_of(tmp_path / "link") == content


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
        {"shards": [["shard-000000.safetensors", 1]]},
        {"sizes": [1]},
        {"sizes": {"4x32x24": [1]}},
        {"sizes": {"5x32x24": SIZE}},
        {"outdated": [1]},
        {"outdated": [[0, "4x"]]},
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

"""The files of a feature cache: damage to any of them is noticed, and nothing outside is read."""

from __future__ import annotations

import json
import os
import shutil
import tracemalloc
import zlib
from hashlib import sha256
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
from opensora_sp.data.cache import (
    CHECKSUM,
    MANIFEST,
    DamagedRecordError,
    Index,
    Shard,
    check_seal,
    file_digest,
    sealed,
    shard_content,
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
        clips = {}
        for clip in range(number, CLIPS, SHARDS):
            latents = torch.randn(2, *SIZE).to(torch.bfloat16)
            clips[clip, SHAPE] = CachedClip(latents, torch.randn(clip, 5), 24.0)
        content = shard_content(made_of, clips, {})
        (folder / f"shard-{number:06d}.safetensors").write_bytes(content)

    write_manifest(folder / MANIFEST, [Entry(Path(f"/{i}.mp4"), f"clip {i}") for i in range(CLIPS)])
    shards = [Shard.read(path) for path in sorted(folder.glob("shard-*"))]
    index = Index(
        made_of=made_of,
        source={"channels": 2, "width": 5, "max_length": CLIPS},
        sizes={"4x32x24": SIZE},
        shards={shard.path.name: shard.checksum for shard in shards},
        manifest_columns=Manifest(folder / MANIFEST).fingerprint,
        manifest_sha256=file_digest(folder / MANIFEST),
    )
    (folder / "index.json").write_text(json.dumps(sealed(index.model_dump())))
    return folder


@pytest.mark.parametrize("content", [{}, {"b": {"d": 1, "c": [0.5, None]}, "a": "\u00e9"}])
def test_a_seal_is_the_checksum_of_sorted_json(content: dict[str, object]) -> None:
    seal = sealed(content)[CHECKSUM]
    assert seal == zlib.crc32(json.dumps(content, sort_keys=True).encode())
    check_seal(json.loads(json.dumps(sealed(content))))
    for other in (content, sealed(content) | {"b": 2}):
        with pytest.raises(ValueError, match="its checksum differs"):
            check_seal(other)


def test_a_digest_is_made_of_parts_of_a_file(tmp_path: Path) -> None:
    content = b"clips" + bytes(32 << 20)
    (tmp_path / MANIFEST).write_bytes(content)
    tracemalloc.start()
    assert file_digest(tmp_path / MANIFEST) == sha256(content).hexdigest()
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
        {"sizes": {"4x": SIZE}},
        {"sizes": {"4x32x24": [3, 4, 1 << 40]}},
        {"shards": {"../cache/shard-000000.safetensors": 1}},
        {"shards": {"/shard-000000.safetensors": 1}},
        {"shards": {"aside/shard-000000.safetensors": 1}},
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

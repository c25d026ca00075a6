"""Hostile inputs: files that attack their reader, for every reader of files from others.

Each trial forks (``guarded.py``), reads one file, and reports what happened beside that. Nothing is
executed, nothing outside of the file's folder is read or written, no connection is opened, memory
stays within the budget, and an error is a sentence.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import struct
import zipfile
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

import av
import numpy as np
import pyarrow
import pytest
import torch
from damage import content
from guarded import MEMORY, Outside, Report, run_guarded
from hostile import RunsWhenUnpickled, write_torchscript
from pyarrow import parquet
from runs import ROOT
from safetensors.torch import save_file

from campaigns.case import Case, with_sample
from opensora_sp.checkpoint import from_pretrained
from opensora_sp.checkpoint.checkpoint_folder import FORMAT, _commit_text, to_json
from opensora_sp.checkpoint.model_config import write_model_config
from opensora_sp.checkpoint.reader import open_weights
from opensora_sp.config import InferenceConfig, load_inference_config, load_train_config
from opensora_sp.data.cache import CachedClip, CachedFeatures, shard_content
from opensora_sp.data.dataset import ClipShape, Sample, VideoTextDataset
from opensora_sp.data.index import index_files
from opensora_sp.data.limits import Budget, Limits
from opensora_sp.data.manifest import Manifest
from opensora_sp.data.video import count_frames, probe, read_frames, read_video
from opensora_sp.models import build_model
from opensora_sp.runtime.run_lock import Holder
from opensora_sp.sampling import read_prompts
from opensora_sp.sampling.prompts import parse_prompt
from opensora_sp.sampling.requests import check_requests, requests_of
from opensora_sp.training.checkpointing import find_checkpoint, find_good
from opensora_sp.training.metrics import read_metrics

pytestmark = pytest.mark.campaign(
    bar="nothing executed, no read or write outside, memory within budget", size=200
)

TRIALS, PARTS = 10, 2
SAMPLE = ("checkpoint 0", "image or video 0", "manifest 0", "pickled weights 0", "prompts 0")
TRAIN_CONFIG = str(ROOT / "configs" / "demo" / "train.py")
SAMPLE_CONFIG = str(ROOT / "configs" / "demo" / "sample.py")
TINY = dict(
    in_channels=2, hidden_size=12, depth=1, num_heads=2, caption_channels=4, model_max_length=4
)
SIZE = ClipShape(2, 16, 16)


@dataclass
class Attack:
    """Where files are made, what they try to reach, and the numbers that choose among them."""

    folder: Path
    outside: Outside
    random: Random

    @property
    def path_out(self) -> str:
        """One of several ways to name the file outside."""
        secret = self.outside.secret
        relative = os.path.relpath(secret, self.folder)
        return self.random.choice([str(secret), relative, f"./x/../{relative}", f"file:{secret}"])

    @property
    def poison(self) -> Any:
        """A value that no reader expects."""
        random = self.random
        numbers = [-1, 0, 1 << 30, 1 << 62, 1 << 70, 1e308, float("nan"), float("inf"), True]
        texts = ["", "\0", "\x1b[2J", "x" * 200_000, "\ud800", "__import__('os')", "%s%n", "NaN"]
        others = [None, [], {}, [[]], {"a": {}}, [1] * 100_000, self.path_out, self.outside.url]
        return random.choice(random.choice([numbers, texts, others]))


Reader = Callable[[], Any]
FAMILIES: dict[str, Callable[[Attack], Reader]] = {}


def family(name: str) -> Callable[[Callable[[Attack], Reader]], Callable[[Attack], Reader]]:
    """Register what writes hostile files of a kind and returns their reader."""

    def register(make: Callable[[Attack], Reader]) -> Callable[[Attack], Reader]:
        FAMILIES[name] = make
        return make

    return register


def cases(random: Random) -> list[Case]:
    found = []
    for name in FAMILIES:
        for part in range(PARTS):
            seeds = [random.getrandbits(32) for _ in range(TRIALS)]
            found.append(Case(f"{name} {part}", (name, seeds), trials=TRIALS))
    return with_sample(found, SAMPLE)


# What many kinds of files have in common.


def mutated(value: Any, attack: Attack, times: int = 1) -> Any:
    """A copy of JSON values with poison in some of their places."""
    value = deepcopy(value)
    for _ in range(times):
        places = list(places_of(value))
        parent, key = attack.random.choice(places)
        if isinstance(parent, dict) and attack.random.random() < 0.2:
            parent[str(attack.poison)[:100]] = parent.pop(key)
        else:
            parent[key] = attack.poison
    return value


def places_of(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every (container, key) of JSON values."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, item in list(items):
        yield value, key
        if isinstance(item, (dict, list)):
            yield from places_of(item)


def hostile_json(attack: Attack, value: Any) -> bytes:
    """Text of values that is no JSON, too much of it, or JSON of another kind."""
    text = json.dumps(mutated(value, attack, attack.random.randint(1, 3)), default=str).encode()
    broken = bytearray(json.dumps(value).encode())
    broken[attack.random.randrange(len(broken))] = attack.random.randrange(256)
    hostile = [
        b"[" * 1_000_000,
        b'{"a":' * 5000 + b"1" + b"}" * 5000,
        b"9" * 100_000,
        b"\xff\xfe" + text,
        b"\0" * 1000,
        b"null",
        b'"text"',
        b"[1, 2]",
        b'{"a": ' + b"[" * 90 + b"]" * 90 + b"}",
        b"[" + b"[]," * 400_000 + b"[]]",
    ]
    choice = attack.random.random()
    return (
        text if choice < 0.5 else bytes(broken) if choice < 0.7 else attack.random.choice(hostile)
    )


def place(attack: Attack, name: str, data: bytes) -> Path:
    """Write a file; now and then a pipe, a folder, a circle of links or a huge file instead."""
    path = attack.folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    kind = attack.random.random()
    if kind < 0.04:
        os.mkfifo(path)
    elif kind < 0.08:
        path.symlink_to(path.name)
    elif kind < 0.12:
        path.mkdir()
    elif kind < 0.16:
        path.write_bytes(data)
        os.truncate(path, 1 << 40)
    else:
        path.write_bytes(data)
    return path


# Weights and models.


@family("model config")
def model_config(attack: Attack) -> Reader:
    model = build_model("STDiT3", **TINY)
    write_model_config(attack.folder, "STDiT3", model.config)
    save_file(model.state_dict(), attack.folder / "model.safetensors")
    config = json.loads((attack.folder / "config.json").read_text())
    key = attack.random.choice([key for key, value in config.items() if type(value) is int])
    absurd = {key: attack.random.choice([1 << 40, 1 << 31]), "auto_map": {"AutoModel": "evil.A"}}
    text = json.dumps({**config, **absurd}).encode()
    if attack.random.random() < 0.4:
        text = hostile_json(attack, config)
    place(attack, "config.json", text)
    return partial(from_pretrained, attack.folder)


@family("index of shards")
def index_of_shards(attack: Attack) -> Reader:
    names = [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
    for number, name in enumerate(names):
        save_file({f"{number}": torch.ones(3)}, attack.folder / name)
    index = {"metadata": {"total_size": 24}, "weight_map": {"0": names[0], "1": names[1]}}
    if attack.random.random() < 0.4:
        index["weight_map"]["1"] = attack.path_out
    else:
        index = None if attack.random.random() < 0.05 else index
    text = hostile_json(attack, index) if attack.random.random() < 0.6 and index else to_json(index)
    place(attack, "model.safetensors.index.json", text)
    return partial(read_weights, attack.folder)


def read_weights(path: Path, **options: bool) -> None:
    weights = open_weights(path, **options)
    for stored in weights.tensors.values():
        assert stored.read().shape == stored.shape


@family("safetensors header")
def safetensors_header(attack: Attack) -> Reader:
    entry = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}
    header = {"__metadata__": {"format": "pt"}, "a": entry, "b": {**entry, "shape": [6]}}
    text = hostile_json(attack, header)
    length = attack.random.choice([len(text)] * 4 + [0, 8, 1 << 27, 1 << 63, (1 << 64) - 1])
    place(attack, "model.safetensors", struct.pack("<Q", length) + text + bytes(24))
    return partial(read_weights, attack.folder / "model.safetensors")


@family("pickled weights")
def pickled_weights(attack: Attack) -> Reader:
    name = attack.random.choice(["pytorch_model.bin", "a.pt", "model", "model.safetensors"])
    path, random = attack.folder / name, attack.random
    state = {"a": torch.ones(3), "b": torch.arange(6).view(2, 3)}
    attacks: list[Callable[[], Any]] = [
        lambda: torch.save({**state, "c": RunsWhenUnpickled(attack.outside.folder / "ran")}, path),
        lambda: path.write_bytes(pickle.dumps(RunsWhenUnpickled(attack.outside.folder / "ran"))),
        lambda: path.write_bytes(random_pickle(attack)),
        lambda: write_torchscript(path, attack.outside.folder / "written"),
        lambda: write_archive(path, attack),
        lambda: flip_bytes(state, path, random),
    ]
    random.choice(attacks)()
    os.utime(path)
    allowed = random.random() < 0.8
    return partial(read_weights, path, allow_pickle=allowed)


def flip_bytes(state: dict, path: Path, random: Random) -> None:
    torch.save(state, path)
    data = bytearray(path.read_bytes())
    for _ in range(random.randint(1, 20)):
        data[random.randrange(len(data))] = random.randrange(256)
    path.write_bytes(data)


def random_pickle(attack: Attack) -> bytes:
    """Opcodes that build much of little, call things by name, or nest deeply."""
    random = attack.random
    command = f"touch {attack.outside.folder / 'ran'}".encode()
    doubled = b"".join(b"q%ch%c\x86" % (n, n) for n in range(60))
    choices = [
        b"\x80\x02cos\nsystem\nX" + struct.pack("<I", len(command)) + command + b"\x85R.",
        b"cbuiltins\neval\n(S'1'\ntR.",
        b"\x80\x04" + b"]" * 1_000_000 + b".",
        b"\x80\x04\x8e" + struct.pack("<Q", 1 << 40) + b"abc.",
        b"\x80\x02}K\x01" + b"".join(b"q%ch%c\x86" % (n, n) for n in range(12)) + b"K\x01s.",
        b"\x80\x02" + doubled[:30] + b".",
        b"(" * 500_000 + b"t.",
        random.randbytes(random.randint(2, 3000)),
    ]
    return random.choice(choices)


def write_archive(path: Path, attack: Attack) -> None:
    """A zip archive as of torch, with members that lead out, are bombs or hold code."""
    members = {
        "a/data.pkl": pickle.dumps({"a": 1}),
        "a/version": b"3",
        f"a/{attack.path_out}": b"x",
        "a/code/__torch__.py": b"import os",
        "a/data/0": bytes(1 << 24),
        "a/byteorder": b"little",
    }
    chosen = attack.random.sample(sorted(members), attack.random.randint(1, len(members)))
    with zipfile.ZipFile(path, "w", attack.random.choice([0, zipfile.ZIP_DEFLATED])) as archive:
        for name in chosen:
            archive.writestr(name, members[name])
        if attack.random.random() < 0.5:
            archive.writestr("a/data.pkl", random_pickle(attack))


# Clips.


COLUMNS = ("path", "text", "num_frames", "height", "width", "fps", "aspect_ratio")


@family("manifest")
def manifest(attack: Attack) -> Reader:
    suffix = attack.random.choice(["csv", "jsonl", "parquet"])
    write = {"csv": hostile_csv, "jsonl": hostile_jsonl, "parquet": hostile_parquet}[suffix]
    path = place(attack, f"clips.{suffix}", write(attack))
    return partial(read_clips, path)


def read_clips(path: Path) -> None:
    rows = Manifest(path)
    assert rows.fingerprint and len(list(islice(rows, 100))) > 0


def hostile_csv(attack: Attack) -> bytes:
    random, head = attack.random, ",".join(COLUMNS)
    cells = [",".join(str(attack.poison)[:2000] for _ in COLUMNS) for _ in range(5)]
    wide = ",".join(["path", "text", *(f"c{n}" for n in range(200_000))])
    choices = [
        head + "\n" + "\n".join(cells),
        head + '\na.mp4,"' + "x" * 1_000_000,
        wide + "\n" + "a,b\n" * 2000,
        head + "\n" + "a.mp4,b," + "9" * 4300 + ",,,,\n",
        head.replace("text", "path") + "\n" + "a,b,c,d,e,f,g\n",
        "path,text\n" + "\0" * 1000,
        "path,text\r" * 100,
        "path,text\n" + "," * 200_000 + "\n",
        head + "\n" + "a,b\n" * 100_000,
    ]
    return random.choice(choices).encode(
        errors="surrogateescape" if random.random() < 0 else "replace"
    )


def hostile_jsonl(attack: Attack) -> bytes:
    row = dict(zip(COLUMNS, ["a.mp4", "a clip", 30, 48, 64, 24.0, 0.75]))
    lines = [hostile_json(attack, row)[:3_000_000] for _ in range(3)]
    wide = json.dumps({"path": "a", "text": "b", **{f"c{n}": 1 for n in range(50_000)}}).encode()
    many = wide + b"\n" + json.dumps(row).encode() + b"\n"
    many += (json.dumps({"path": "a", "text": "b"}).encode() + b"\n") * 20_000
    return attack.random.choice([b"\n".join(lines), lines[0], many])


def hostile_parquet(attack: Attack) -> bytes:
    random = attack.random
    rows = random.choice([3, 3, 30_000_000])
    table = pyarrow.table(
        {
            "path": pyarrow.DictionaryArray.from_arrays(
                pyarrow.array(np.zeros(rows, np.int32)), pyarrow.array(["a.mp4" * 20])
            ),
            "text": pyarrow.array([None] * rows, pyarrow.string()),
            "height": pyarrow.array(np.full(rows, 48)),
        }
    )
    if rows == 3 and random.random() < 0.5:
        odd = pyarrow.array([{"a": [1]}, None, {"a": []}])
        table = table.set_column(random.randrange(3), random.choice(COLUMNS[:4]), odd)
    file = io.BytesIO()
    parquet.write_table(table, file, compression="zstd")
    data = bytearray(file.getvalue())
    if rows == 3:
        for _ in range(random.randint(0, 8)):
            data[random.randrange(len(data))] = random.randrange(256)
    return bytes(data)


@family("image or video")
def image_or_video(attack: Attack) -> Reader:
    random = attack.random
    suffix = random.choice(["mp4", "avi", "mkv", "mov", "gif", "png", "jpg", "webp", "webm"])
    made = random.choice([playlist, playlist, mutated_video, mutated_video, mutated_video])
    path = place(attack, f"clip.{suffix}", made(attack, suffix))
    reader = random.choice([count_frames, probe, read_frames, partial(read_video, num_frames=1)])
    limits = Limits(seconds=10)
    if reader in (probe, read_frames):
        return partial(reader, path, limits)
    budget = Budget.of(limits.seconds, limits)
    return partial(budget.run, partial(reader, path))


def playlist(attack: Attack, suffix: str) -> bytes:
    """Text in which FFmpeg would find other files or URLs."""
    target = attack.random.choice([attack.path_out, attack.outside.url])
    sdp = "v=0\no=- 0 0 IN IP4 127.0.0.1\ns=x\nc=IN IP4 127.0.0.1\nm=video 5004 RTP/AVP 96\n"
    texts = [
        f"ffconcat version 1.0\nfile '{target}'\nduration 1\n",
        f"#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\n{target}\n#EXT-X-ENDLIST\n",
        f'#EXTM3U\n#EXT-X-MAP:URI="{target}"\n#EXTINF:1,\n{target}\n',
        f'<?xml version="1.0"?><!DOCTYPE a [<!ENTITY b SYSTEM "{target}">]><svg>&b;'
        f'<image href="{target}"/></svg>',
        f"<MPD><Period><AdaptationSet><BaseURL>{target}</BaseURL></AdaptationSet></Period></MPD>",
        sdp,
        f"[playlist]\nFile1={target}\n",
        f"push graphic-context\nfill 'url({target})'\npop graphic-context\n",
    ]
    return attack.random.choice(texts).encode()


def mutated_video(attack: Attack, suffix: str) -> bytes:
    """A small file, some bytes of which are others, most of them in its header."""
    data = bytearray(small_file(attack.folder.parent, suffix))
    random = attack.random
    for _ in range(random.choice([1, 3, 10, 40])):
        end = random.choice([64, 300, len(data)])
        first = random.randrange(min(end, len(data)))
        size = random.choice([1, 2, 4])
        data[first : first + size] = (
            random.choice([b"\xff", b"\0", b"\x7f", random.randbytes(1)]) * size
        )
    return bytes(data)


FORMATS = {
    "mp4": ("mp4", "libx264", "yuv420p"),
    "mov": ("mov", "mpeg4", "yuv420p"),
    "mkv": ("matroska", "mpeg4", "yuv420p"),
    "avi": ("avi", "rawvideo", "bgr24"),
    "webm": ("webm", "libvpx-vp9", "yuv420p"),
    "gif": ("gif", "gif", "rgb8"),
    "png": ("image2", "png", "rgb24"),
    "jpg": ("image2", "mjpeg", "yuvj420p"),
    "webp": ("image2", "libwebp", "yuv420p"),
}


def small_file(cache: Path, suffix: str) -> bytes:
    path = cache / f"whole.{suffix}"
    if not path.exists():
        container_format, codec, pixels = FORMATS[suffix]
        with av.open(str(path), "w", format=container_format) as container:
            stream = container.add_stream(codec, rate=24)
            stream.height, stream.width, stream.pix_fmt = 48, 64, pixels
            for number in range(1 if container_format == "image2" else 3):
                picture = np.full((48, 64, 3), 80 * number, np.uint8)
                container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
            container.mux(stream.encode())
    return path.read_bytes()


@family("folder of clips")
def folder_of_clips(attack: Attack) -> Reader:
    files = []
    for number in range(3):
        suffix = attack.random.choice(["mp4", "gif", "png"])
        files.append(place(attack, f"{number}.{suffix}", mutated_video(attack, suffix)))
        caption = attack.random.choice([b"\xff" * 100, b"x" * (2 << 20), b"\0", b"a cat"])
        place(attack, f"{number}.txt", caption)
    write_captions(attack.folder / "clips.csv", files)

    def read() -> None:
        index_files(files, workers=1, limits=Limits(seconds=2))
        dataset = VideoTextDataset(
            str(attack.folder / "clips.csv"), num_frames=1, image_size=(8, 8), time_limit=2
        )
        for number in range(len(files)):
            dataset[number]

    return read


def write_captions(path: Path, files: list[Path]) -> None:
    path.write_text("path,text\n" + "".join(f"{file.name},x\n" for file in files))


# Prompts and configs.


@family("prompts")
def prompts(attack: Attack) -> Reader:
    random = attack.random
    target = random.choice(
        [attack.path_out, attack.outside.url, "concat:a|b", "pipe:0", "%03d.png"]
    )
    (attack.folder / "list.mp4").write_bytes(playlist(attack, "mp4"))
    own = {"reference_path": random.choice([target, "list.mp4"]), "mask_strategy": "0"}
    in_braces = hostile_json(attack, own)[:3_000_000].decode(errors="replace")
    lines = [
        f"a cat{in_braces}",
        f"a cat{json.dumps({**own, 'reference_path': 'list.mp4'})}",
        "|0|" * 5000,
        "a cat" * 10_000,
        "x" * 100_000,
        "\0\x1b[2J",
    ]
    if random.random() < 0.5:
        head = "prompt,num_frames,seed,fps,resolution,aspect_ratio,reference_path,mask_strategy\n"
        cells = [str(attack.poison)[:500] for _ in range(5)]
        text = head + "a cat," + ",".join(cells) + f",{own['reference_path']},0\n"
        path = place(attack, "prompts.csv", text.encode(errors="replace"))
    else:
        path = place(attack, "prompts.txt", random.choice(lines).encode(errors="replace"))
    return partial(read_requests, path, load_inference_config(SAMPLE_CONFIG))


def read_requests(path: Path, cfg: InferenceConfig) -> None:
    found = read_prompts(path)
    for prompt in found[:3]:
        parse_prompt(prompt.prompt)
    check_requests(cfg, requests_of(cfg, found[:3]))


@family("options of the command line")
def cfg_options(attack: Attack) -> Reader:
    """They may hold what a web form has sent; a module of that name lies in the path."""
    load_train_config(TRAIN_CONFIG)
    (attack.folder / "evil.py").write_text(f"open({str(attack.outside.folder / 'ran')!r}, 'w')")
    random = attack.random
    call = f"__import__('os').mkdir({str(attack.outside.folder / 'ran')!r})"
    texts = [
        "vae.type=evil.VAE",
        "text_encoder.type=os.system",
        "vae={'type': 'evil.VAE'}",
        f"lr={call}",
        f"num_frames={call}",
        f"model.depth=[{call} for _ in [1]]",
        f"optimizer.type={call}",
        "model.type=evil.Model",
        "seed=" + "9" * 5000,
        "seed=" + "(" * 5000,
        "num_frames=" + "-" * 100_000 + "1",
        "image_size=" + "9**9**9**9",
        f"load={attack.path_out}",
    ]
    option = random.choice(
        [*texts, f"{random.choice(['vae', 'model', 'seed', 'fps'])}={attack.poison}"]
    )

    def read() -> None:
        import sys

        sys.path.insert(0, str(attack.folder))
        load_train_config(TRAIN_CONFIG, [option])

    return read


# What runs leave behind.


@family("feature cache")
def feature_cache(attack: Attack) -> Reader:
    folder, random = attack.folder, attack.random
    made_of = {"vae.type": "none"}
    cached = CachedClip(torch.zeros(2, 2, 4, 4), torch.zeros(1, 5), 24.0)
    name = "shard-000000.safetensors"
    (folder / name).write_bytes(shard_content(made_of, {(0, SIZE): cached, (1, SIZE): cached}, {}))
    (folder / "clips.jsonl").write_text('{"path": "/0.mp4", "text": "a"}\n' * 2)
    source = {"channels": 2, "width": 5, "max_length": 4}
    index = {
        "format": 4,
        "made_of": made_of,
        "source": source,
        "sizes": {"x".join(map(str, SIZE)): [2, 4, 4]},
        "shards": [name],
    }
    if random.random() < 0.3:
        index["shards"] = [attack.path_out]
    elif random.random() < 0.8:
        index = mutated(index, attack, random.randint(1, 3))
    if random.random() < 0.2:
        (folder / name).unlink()
        (folder / name).symlink_to(attack.outside.secret)
    text = json.dumps(index).encode()
    place(attack, "index.json", text if random.random() < 0.8 else hostile_json(attack, index))
    return partial(read_cache, folder)


def read_cache(folder: Path) -> None:
    cache = CachedFeatures(str(folder))
    for shape in cache.sizes:
        for clip in cache.known(shape)[:10].tolist():
            assert cache[Sample(clip, 0, shape)]
            cache.text_length(clip)


@family("checkpoint")
def checkpoint(attack: Attack) -> Reader:
    """Its digests are those of its files: whoever made it has computed them."""
    folder, random = attack.folder / "step_00000002", attack.random
    state = {"step": 2, "parameter_groups": [{"parameters": ["weight"]}]}
    tensors = {"weight": torch.ones(3)}
    files = {"state.json": to_json(state)}
    for part in ("model", "ema"):
        (folder / part).mkdir(parents=True)
        save_file(tensors, folder / part / "model.safetensors")
    save_file({"exp_avg/weight": torch.ones(3)}, folder / "optimizer.safetensors")
    if random.random() < 0.4:
        files["state.json"] = hostile_json(attack, state)
    (folder / "state.json").write_bytes(files["state.json"])

    entries = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            digest = sha256(path.read_bytes()).hexdigest()
            entry = {"bytes": path.stat().st_size, "sha256": digest}
            entries[str(path.relative_to(folder))] = entry
    listed: Any = {"format": FORMAT, "step": 2, "files": entries}
    if random.random() < 0.3:
        listed["files"][attack.path_out] = {"bytes": 25, "sha256": ""}
    elif random.random() < 0.7:
        listed = mutated(listed, attack, random.randint(1, 3))
    text = to_json(listed) if random.random() < 0.8 else hostile_json(attack, listed)
    place(attack, "step_00000002/manifest.json", text)
    (folder / "COMMIT").write_bytes(_commit_text(text))
    return partial(read_checkpoint, attack.folder)


def read_checkpoint(run_dir: Path) -> None:
    find_checkpoint(run_dir, "auto")
    find_good(run_dir).or_raise(run_dir)


@family("files of a run")
def files_of_a_run(attack: Attack) -> Reader:
    line = {"step": 1, "loss": 1.0, "lr": 1e-4}
    lines = [hostile_json(attack, line)[:3_000_000] for _ in range(4)]
    place(attack, "metrics.jsonl", b"\n".join(lines) + b"\n")
    holder = {"host": "a", "machine": "b", "pid": 1, "since": "now"}
    place(attack, "run.lock", hostile_json(attack, holder))

    def read() -> None:
        try:
            read_metrics(attack.folder)
        finally:
            Holder.read(attack.folder / "run.lock")

    return read


# The campaign.


# Readers whose errors are not for users as they are, or are in the words of pydantic.
CAUGHT = ("OSError", "ValueError", "IndexError", "FFmpegError")
MAY_RAISE = {
    "image or video": CAUGHT,
    "files of a run": CAUGHT,
    "prompts": ("ValueError",),
    "options of the command line": ("ValueError",),
}


def attack_with(name: str, seed: int, folder: Path, outside: Outside) -> None:
    """Write the files of a trial and read them."""
    folder.mkdir()
    read = FAMILIES[name](Attack(folder, outside, Random(seed)))
    before = listing(folder)
    report = run_guarded(read, folder, outside)
    check_report(name, report, f"{name}, seed {seed}")
    assert listing(folder) == before, f"{name}, seed {seed}: reading has changed files"


def listing(folder: Path) -> dict[str, Any]:
    """Kind, size and time of each path, and the content of small files."""
    found: dict[str, Any] = {}
    for path in sorted(folder.rglob("*")):
        status = path.lstat()
        found[str(path)] = (status.st_mode, status.st_size, status.st_mtime_ns)
    return found


def check_report(name: str, report: Report, what: str) -> None:
    assert not report.forbidden, f"{what}: forbidden, {report.forbidden[:3]} ({report.result:.300})"
    assert report.peak < MEMORY, f"{what}: {report.peak >> 20} MiB, {report.result:.300}"
    if report.result == "returned":
        return
    kinds = set(report.kinds) & set(MAY_RAISE.get(name, ("ValueError",)))
    assert kinds, f"{what}: no error for users, {report.result:.600}"
    is_sentence = "got " in report.result and "expected" in report.result
    assert is_sentence or name in MAY_RAISE, f"{what}: no sentence, {report.result:.600}"


@pytest.fixture
def outside(tmp_path: Path) -> Iterator[Outside]:
    found = Outside(tmp_path / "outside")
    yield found
    found.close()


def test_hostile_input_does_nothing(case: Case, tmp_path: Path, outside: Outside) -> None:
    name, seeds = case.arguments
    before, failures = content(outside.folder), []
    for number, seed in enumerate(seeds):
        try:
            attack_with(name, seed, tmp_path / str(number), outside)
        except AssertionError as error:
            failures.append(str(error)[:800])
    assert not failures, "\n\n".join([f"{len(failures)} of {len(seeds)}:", *failures])
    assert content(outside.folder) == before

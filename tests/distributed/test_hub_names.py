"""Names on the Hugging Face hub wherever weights are named, from a fake hub and its cache."""

from __future__ import annotations

import copy
import hashlib
import io
import json
import os
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from own_disk import make_read_only, with_own_disk
from random_weights import draw_weights
from ranks import run_ranks
from runs import SAMPLE, TRAIN, write_toy_set
from safetensors.torch import save_file

from opensora_sp.checkpoint import find_weights, from_pretrained, hub, save_pretrained
from opensora_sp.checkpoint.adapters import (
    AdapterKind,
    Base,
    adapter_files,
    name_on_disk,
    open_adapters,
)
from opensora_sp.checkpoint.hub import HubName, local_path
from opensora_sp.checkpoint.pretrained import CARD
from opensora_sp.cli import main
from opensora_sp.config import load_inference_config, load_train_config
from opensora_sp.encoders.loading import PretrainedFiles, weights_digest
from opensora_sp.integrations.diffusers import OpenSoraPipeline
from opensora_sp.models import build_model
from opensora_sp.models.lora import add_lora, lora_layers
from opensora_sp.sampling.run import preflight, resolved_sources
from opensora_sp.training.checkpointing import find_checkpoint
from opensora_sp.training.preflight import check_initial_weights

Files = Mapping[str, bytes]


def commit_of(files: Files) -> str:
    named = b"".join(name.encode() + files[name] for name in sorted(files))
    return hashlib.sha1(named).hexdigest()


class FakeHub:
    """``repositories``: for each name the files of each revision. ``fetched`` counts downloads."""

    def __init__(self, repositories: Mapping[str, Mapping[str, Files]]) -> None:
        self.repositories = repositories
        self.fetched: Counter[str] = Counter()

    def files(self, name: str, revision: str) -> Files | None:
        revisions = self.repositories.get(name, {})
        by_commit = {commit_of(files): files for files in revisions.values()}
        return revisions.get(revision) or by_commit.get(revision)

    def answer(self, path: str) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body of a GET."""
        parts = path.strip("/").split("/")
        as_json = {"Content-Type": "application/json"}
        if parts[:2] == ["api", "models"]:
            name, revision = "/".join(parts[2:4]), parts[5] if len(parts) > 5 else "main"
            if name not in self.repositories:
                return 404, {"X-Error-Code": "RepoNotFound"}, b"{}"
            files = self.files(name, revision)
            if files is None:
                return 404, {"X-Error-Code": "RevisionNotFound"}, b"{}"
            if parts[4] == "tree":
                listed = [
                    dict(type="file", path=file, size=len(content), oid="0")
                    for file, content in files.items()
                ]
                return 200, as_json, json.dumps(listed).encode()
            siblings = [{"rfilename": file} for file in files]
            about = dict(id=name, sha=commit_of(files), siblings=siblings, tags=[], private=False)
            return 200, as_json, json.dumps(about).encode()

        if len(parts) > 4 and parts[2] == "resolve":
            files = self.files("/".join(parts[:2]), parts[3]) or {}
            content = files.get("/".join(parts[4:]))
            if content is None:
                return 404, {"X-Error-Code": "EntryNotFound"}, b""
            etag = hashlib.sha256(content).hexdigest()
            return 200, {"X-Repo-Commit": commit_of(files), "ETag": f'"{etag}"'}, content
        return 200, {}, b""

    @contextmanager
    def serving(self) -> Iterator[str]:
        """The address of the server, which runs in a thread."""
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_HEAD(self) -> None:
                self._send(with_body=False)

            def do_GET(self) -> None:
                if "/resolve/" in self.path:
                    hub.fetched[self.path.rpartition("/")[2]] += 1
                self._send(with_body=True)

            def _send(self, *, with_body: bool) -> None:
                status, headers, body = hub.answer(self.path.partition("?")[0])
                self.send_response(status)
                for name, value in (headers | {"Content-Length": str(len(body))}).items():
                    self.send_header(name, value)
                self.end_headers()
                if with_body:
                    self.wfile.write(body)

            def log_message(self, *args: Any) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            server.server_close()
            thread.join()


def use_hub(address: str, cache: Path) -> None:
    """Let this process, which is a fork, take that hub and an own cache."""
    os.environ.update(
        HF_ENDPOINT=address, HF_HUB_CACHE=str(cache), HF_HUB_DISABLE_PROGRESS_BARS="1"
    )
    os.environ.pop("HF_HUB_OFFLINE", None)
    # Both are read at import.
    for name in [name for name in sys.modules if name.partition(".")[0] == "huggingface_hub"]:
        del sys.modules[name]


NAME, LORA = "somebody/stdit3", "somebody/lora"


def files_in(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def files_below(folder: Path) -> dict[str, bytes]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Configs, and two revisions of the weights of their model."""
    folder = tmp_path_factory.mktemp("hub")
    manifest = write_toy_set(folder / "clips", 3)
    (folder / "train.py").write_text(TRAIN.format(manifest=str(manifest)))
    (folder / "sample.py").write_text(SAMPLE)
    options = dict(load_inference_config(folder / "sample.py").model)
    model = build_model(options.pop("type"), **options)
    for seed, name in enumerate(("first", "second")):
        save_pretrained(draw_weights(model, seed=seed), folder / name, license="apache-2.0")
        save_adapters(model, folder / f"{name} adapters", seed)
    convert = ["convert", str(folder / "first"), str(folder / "pipe"), "--to", "diffusers"]
    main([*convert, "--config", str(folder / "sample.py")])
    return folder


def save_adapters(model: torch.nn.Module, folder: Path, seed: int) -> None:
    """Drawn adapters of a model, as a run saves them."""
    adapted = copy.deepcopy(model)
    add_lora(adapted, rank=2, alpha=4.0)
    draw_weights(adapted, seed=seed)
    parameters = adapted.named_parameters()
    trained = {name_on_disk(name): one.data for name, one in parameters if one.requires_grad}
    folder.mkdir()
    save_file(trained, folder / "adapter_model.safetensors")
    about = adapter_files(list(lora_layers(adapted)), AdapterKind(2, 4.0), Base(NAME, str(seed)))
    for name, data in about.items():
        (folder / name).write_bytes(data)


def make_hub(place: Path) -> FakeHub:
    first, second = files_in(place / "first"), files_in(place / "second")
    pickled = io.BytesIO()
    torch.save({"weight": torch.ones(2)}, pickled)
    adapters = [files_in(place / f"{one} adapters") for one in ("first", "second")]
    unsafe = {"adapter_model.bin": pickled.getvalue()}
    unsafe["adapter_config.json"] = adapters[0]["adapter_config.json"]
    both = {"pytorch_model.bin": pickled.getvalue(), "optimizer.bin": b"0", "own.py": b"import os"}
    return FakeHub(
        {
            NAME: {"main": {**first, **both}, "v2": second, "refs%2Fpr%2F1": second},
            "somebody/pickled": {"main": {"config.json": b"{}", **both}},
            LORA: {"main": {**adapters[0], **first}, "v2": adapters[1]},
            "somebody/pipe": {"v1": files_below(place / "pipe") | {"vae/run.py": b"import os"}},
            "somebody/unsafe": {"main": unsafe},
            "somebody/many": {"main": {f"readme-{i}.txt": b"" for i in range(12)}},
            "somebody/folders": {
                "main": {f"{part}/{name}": first[name] for part in ("a", "b") for name in first}
            },
        }
    )


def by_name(address: str, place: Path, cache: Path) -> list[str]:
    """What every place that names weights makes of names; two ranks at the same time."""
    use_hub(address, cache)
    first, second = (from_pretrained(place / name).state_dict() for name in ("first", "second"))

    def same(model: torch.nn.Module, wanted: dict[str, torch.Tensor]) -> bool:
        return all(torch.equal(one, wanted[name]) for name, one in model.state_dict().items())

    dist.barrier()
    found = find_weights(NAME)
    dist.barrier()
    assert same(from_pretrained(NAME), first) and not same(from_pretrained(NAME), second)
    for other in (from_pretrained(f"{NAME}@v2"), from_pretrained(NAME, revision="v2")):
        assert same(other, second)
    assert same(from_pretrained(f"{NAME}@refs/pr/1"), second)
    assert same(from_pretrained("somebody/folders/b"), first)
    assert same(from_pretrained(f"somebody/folders/a/{'model.safetensors'}"), first)

    # Training, sampling, encoders, conversion.
    check_initial_weights(load_train_config(place / "train.py", [f"load={NAME}@v2"]))
    options = [f"ckpt={NAME}@v2", "prompts=['a']", f"outputs={cache / 'out'}"]
    _, weights = preflight(load_inference_config(place / "sample.py", options))
    assert weights == find_weights(f"{NAME}@v2")
    files = PretrainedFiles(f"{NAME}@v2", "vae")
    assert files.config()["depth"] == 2
    tensors = files.tensors()
    assert tensors.keys() == second.keys()
    assert all(torch.equal(tensors[name], second[name]) for name in tensors)
    within = PretrainedFiles("somebody/folders@main", "vae", "b").tensors()
    assert all(torch.equal(within[name], first[name]) for name in within)
    assert weights_digest(f"{NAME}@v2") == weights_digest(str(find_weights(f"{NAME}@v2")))
    assert local_path(f"{NAME}@v2") == weights

    def refused(message: str, name: str, **options: bool) -> None:
        with pytest.raises(ValueError, match=message):
            find_weights(name, **options)

    there = r"readme-0.txt, .* and 4 more; name one of these as somebody/many/PATH"
    refused(rf"'somebody/many' on the hub, which holds no weights there.* there are: {there}",
            "somebody/many")  # fmt: skip
    refused("which holds no weights there.*a/README.md", "somebody/folders")
    refused("opensora-sp convert somebody/pickled pickled-safetensors", "somebody/pickled")
    pickled = find_weights("somebody/pickled", allow_pickle=True)
    assert sorted(path.name for path in pickled.iterdir()) == ["config.json", "pytorch_model.bin"]
    refused("'nobody/nothing', .*cannot be fetched from the hub.*hf download", "nobody/nothing")
    refused("'somebody/stdit3@v9', .*cannot be fetched.*--revision v9", f"{NAME}@v9")

    merge_by_name(place)
    pipelines(place)
    offline(refused)
    cfg = load_inference_config(place / "sample.py")
    assert resolved_sources(cfg, [f"{LORA}:2"], ema=True)[0].endswith(":2.0")
    return [str(path.relative_to(cache)) for path in (found, weights)]


def merge_by_name(place: Path) -> None:
    """Adapters of the hub, at a revision and with a scale."""

    def merged(weights: str, *lora: str) -> dict[str, torch.Tensor]:
        return from_pretrained(place / weights, lora=lora).state_dict()

    wanted = merged("first", f"{place}/first adapters", f"{place}/second adapters:0.5")
    found = merged("first", LORA, f"{LORA}@v2:0.5")
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)

    for source, message in (
        ("nobody/nothing", "got adapters 'nobody/nothing', .*cannot be fetched from the hub"),
        (f"{LORA}@v9:0.5", f"got adapters '{LORA}@v9', .*--revision v9"),
        (NAME, f"got adapters '{NAME}' on the hub, which holds no LoRA adapters there"),
        ("somebody/unsafe", "are pickled.*save them with peft's save_pretrained"),
    ):
        # Before anything else is read, as a command line is.
        options = [f"lora=['{source}']", "prompts=['a']", f"ckpt={place / 'first'}"]
        cfg = load_inference_config(place / "sample.py", options)
        with pytest.raises(ValueError, match=message):
            preflight(cfg.model_copy(update={"outputs": str(place / "out")}))


def pipelines(place: Path) -> None:
    """A pipeline of diffusers by its name, with adapters by theirs."""
    found = OpenSoraPipeline.from_pretrained("somebody/pipe@v1", lora=[LORA])
    wanted = from_pretrained(place / "first", lora=[f"{place}/first adapters"]).state_dict()
    for name, one in found.transformer.state_dict().items():
        assert torch.equal(one, wanted[name])
    with pytest.raises(ValueError, match=rf"got pipeline '{NAME}' .* holds no model_index.json"):
        OpenSoraPipeline.from_pretrained(NAME)
    with pytest.raises(ValueError, match="got lora .* and a transformer; expected adapters for"):
        OpenSoraPipeline.from_pretrained("somebody/pipe@v1", lora=[LORA], transformer=1)


def offline(refused) -> None:
    """With HF_HUB_OFFLINE the cache answers."""
    from huggingface_hub import constants

    constants.HF_HUB_OFFLINE = True
    hub.fetch.cache_clear()
    assert find_weights(NAME).is_dir() and find_weights(f"{NAME}@v2").is_dir()
    offline = "read as a name, not in the hub's cache, while HF_HUB_OFFLINE=1 is set"
    refused(f"not on disk .* {offline}.*hf download somebody/other", "somebody/other")
    refused("weights .pytorch_model.bin. are pickled", "somebody/pickled")
    with pytest.raises(ValueError, match=f"vae.from_pretrained 'nobody/vae', .*{offline}"):
        PretrainedFiles("nobody/vae", "vae")


def test_every_place_takes_names_and_a_node_downloads_once(place: Path, tmp_path: Path) -> None:
    served = make_hub(place)
    with served.serving() as address:
        paths = run_ranks(2, by_name, address, place, tmp_path)
    commits = [commit_of(served.repositories[NAME][one]) for one in ("main", "v2")]
    snapshots = [f"models--somebody--stdit3/snapshots/{commit}" for commit in commits]
    assert paths == [snapshots, snapshots]

    # The first and the second weights, those of both folders, which are equal, and a pipeline's;
    # none beside adapters. Pickles and code only where asked for.
    assert served.fetched["model.safetensors"] == 4 and served.fetched["pytorch_model.bin"] == 1
    assert not served.fetched["optimizer.bin"] + served.fetched["own.py"] + served.fetched["run.py"]
    assert served.fetched["adapter_model.safetensors"] == served.fetched["base.json"] == 2
    assert not served.fetched["adapter_model.bin"]


def read_only(served: FakeHub, cache: Path) -> None:
    with served.serving() as address:
        use_hub(address, cache)
        first = find_weights(NAME)
        make_read_only(cache)
        hub.fetch.cache_clear()
        assert find_weights(NAME) == first
        with pytest.raises(ValueError, match=r"fetched from the hub .*Read-only file system"):
            find_weights(f"{NAME}@v2")


def test_a_cache_that_cannot_be_written_is_read(place: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    with_own_disk(cache, 8, read_only, make_hub(place), cache)


def test_paths_are_no_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert HubName.of_missing("a/b@v1.0") == HubName("a/b", revision="v1.0")
    assert HubName.of_missing("a/b/c/d.pt") == HubName("a/b", "c/d.pt")
    assert str(HubName.parse("a/b/c@refs/pr/1")) == "a/b/c@refs/pr/1"
    for path in ("nowhere", "/a/b", "./a/b", "../a/b", "~/a", "a b/c", "a/b@"):
        assert HubName.of_missing(path) is None


def test_a_mistyped_path_is_reported_as_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever weights are named: what is missing where, the nearest names, then the hub."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "output").mkdir()
    (tmp_path / "data").mkdir()
    monkeypatch.setattr(hub, "answers", lambda: False)
    hub.fetch.cache_clear()
    encoder = partial(PretrainedFiles, key="vae")
    readers = (find_weights, open_adapters, encoder)
    there = f"which is not on disk .{tmp_path} has no 'outputs', nearest: output. and, read as a "
    there += "name, not in the hub's cache, while the hub cannot be reached; expected"
    for read in readers:
        with pytest.raises(ValueError, match=f"'outputs/typo', {there}"):
            read("outputs/typo")

    # In a folder that exists, it is not asked of the hub.
    for name in ("first", "demo", ".hidden"):
        (tmp_path / "outputs" / name).mkdir(parents=True)
    monkeypatch.setattr(hub, "answers", lambda: pytest.fail("asked the hub"))
    for path in ("outputs/fist", "./outputs/fist", str(tmp_path / "outputs" / "fist" / "step_3")):
        for read in (
            *readers,
            partial(find_checkpoint, tmp_path),
            OpenSoraPipeline.from_pretrained,
        ):
            with pytest.raises(ValueError, match=f".{tmp_path}/outputs has no 'fist', nearest: fi"):
                read(path)
    (tmp_path / "outputs" / "file").touch()
    for path in ("./outputs/file", "./outputs/file/part"):
        with pytest.raises(ValueError, match=r"not on disk \(.*/outputs/file is a file\)"):
            encoder(path)
    with pytest.raises(ValueError, match=r"has no 'weights.pt'\); expected a file, a folder, or"):
        find_weights("weights.pt")


def test_exported_weights_have_a_model_card(place: Path, tmp_path: Path) -> None:
    options = ["--base-model", "some/base", "--license", "mit"]
    main(["convert", str(place / "first"), str(tmp_path / "out"), *options])
    card = (tmp_path / "out" / CARD).read_text()
    header, body = card.removeprefix("---\n").split("\n---\n", 1)
    lines = ["license: 'mit'", "base_model: 'some/base'", "pipeline_tag: text-to-video"]
    assert all(line in header.splitlines() for line in lines)
    assert "--ckpt out" in body and 'from_pretrained("out")' in body

    model = from_pretrained(place / "first")
    save_pretrained(model, tmp_path / "x")
    unknown = (tmp_path / "x" / CARD).read_text()
    assert "license: 'unknown'" in unknown and "base_model" not in unknown

"""JSON from outside: its size and nesting are bounded, for every reader of the package."""

from __future__ import annotations

import json
import os
import re
import tracemalloc
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import opensora_sp
from opensora_sp.checkpoint import from_pretrained
from opensora_sp.checkpoint.reader import open_weights
from opensora_sp.common.files import MAX_DEPTH, parse_json, read_json
from opensora_sp.training.metrics import read_lines

DEEP = "[" * 1_000_000 + "]" * 1_000_000


@pytest.mark.parametrize("text", [DEEP, '{"a":' * 200 + "0" + "}" * 200])
def test_deep_json_is_a_sentence(text: str) -> None:
    with pytest.raises(ValueError, match=f"got here, .* expected JSON nested at most {MAX_DEPTH} "):
        parse_json(text, "here")


def test_brackets_in_strings_and_beside_each_other_are_not_deep() -> None:
    deepest = "[" * MAX_DEPTH + "]" * MAX_DEPTH
    texts = [deepest, json.dumps([[{}]] * 200), json.dumps(['[{"\\' * 200, "\\", '"[', "]" * 9])]
    for text in texts:
        assert parse_json(text, "here") == json.loads(text)
        assert parse_json(text.encode(), "here") == json.loads(text)


@pytest.mark.parametrize("text", [b'{"a": 1', b"\xff", b"", b"9" * 5000])
def test_what_is_not_json_is_a_sentence(text: bytes) -> None:
    with pytest.raises(ValueError, match="got here, which is not JSON that can be read"):
        parse_json(text, "here")


def test_reading_reserves_no_more_than_the_file_has(tmp_path: Path) -> None:
    (tmp_path / "small.json").write_text("{}")
    tracemalloc.start()
    assert read_json(tmp_path / "small.json", max_bytes=1 << 30) == {}
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 20


@pytest.mark.parametrize("kind", ["fifo", "folder", "circle"])
def test_an_index_that_is_no_file_is_a_sentence(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "model.safetensors.index.json"
    make = {"fifo": os.mkfifo, "folder": os.mkdir, "circle": lambda path: path.symlink_to(path)}
    make[kind](path)
    with pytest.raises(ValueError, match=f"got {path}, which is not an index of shards"):
        open_weights(tmp_path)


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
@pytest.mark.timeout(20)
def test_weights_that_are_a_pipe_are_a_sentence(tmp_path: Path, name: str) -> None:
    """Of a folder: a plain ``open`` would wait for ever."""
    os.mkfifo(tmp_path / name)
    with pytest.raises(ValueError, match=f"got {tmp_path / name}, which cannot be read .*a named"):
        open_weights(tmp_path, allow_pickle=True)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"depth": 1 << 40}, "got depth = 1099511627776; expected at most 64"),
        ({"model_max_length": 1 << 31}, "got model_max_length = 2147483648; expected at most"),
        ({"patch_size": [1, 1 << 20, 2]}, r"got patch_size = \[1, 1048576, 2\]; expected at most"),
        ({"mlp_ratio": 1e30}, "got mlp_ratio = 1e.30; expected at most"),
        ({"input_size": [4096, 4096, 4096]}, "got position tables of .* numbers for input_size"),
    ],
)
def test_a_config_of_absurd_sizes_builds_no_model(
    tmp_path: Path, setting: dict[str, object], message: str
) -> None:
    """Their modules and tables would fill memory before weights are compared."""
    save_file({"x": torch.zeros(1)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"_class_name": "STDiT", **setting}))
    with pytest.raises(ValueError, match=f"no model can be built: {message}"):
        from_pretrained(tmp_path)


def test_a_line_of_metrics_that_cannot_be_parsed_is_skipped(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(f'{{"step": 1}}\n{DEEP}\n{{"step": 2}}\n')
    assert [line["step"] for line in read_lines(tmp_path / "metrics.jsonl")] == [1, 2]


def test_no_module_parses_json_by_itself() -> None:
    package = Path(opensora_sp.__file__).parent
    # Values are made JSON-like by writing and reading them again.
    own = re.compile(r"json\.loads?\((?!json\.dumps)")
    found = [path.name for path in package.rglob("*.py") if own.search(path.read_text())]
    assert found == ["files.py"]

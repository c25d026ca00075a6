"""The commands of docs/sampling.md: each is parsed and checked as a run checks it before the model is built."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import pytest
from runs import ROOT, write_toy_set
from safetensors.torch import save_file

from opensora_sp import sampling
from opensora_sp.config import load_inference_config, load_train_config
from opensora_sp.console import config_arguments
from opensora_sp.models import build_model
from opensora_sp.sampling.run import preflight
from opensora_sp.training.run import preflight as preflight_training
from opensora_sp.weights import write_model_config

PAGE = (ROOT / "docs" / "sampling.md").read_text()


def blocks(language: str) -> list[str]:
    """The fenced blocks of the page that are marked so."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    return [text for marked, text in found if marked == language]


def commands(script: str) -> list[tuple[int, list[str]]]:
    """(processes, arguments) of every command of the page that starts a script."""
    lines = [line for block in blocks("") for line in block.replace("\\\n", " ").splitlines()]
    found = []
    for words in map(shlex.split, lines):
        if script in words:
            ranks = int(words[words.index("--nproc_per_node") + 1]) if words[0] == "torchrun" else 1
            found.append((ranks, words[words.index(script) + 1 :]))
    return found


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder like the project's, with the toy set and a checkpoint of the demo's model, drawn at random."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    write_toy_set(tmp_path / "data" / "toy", 9)
    for i in (0, 1):
        shutil.copy(tmp_path / f"data/toy/{i}.mp4", tmp_path / f"data/toy/0000{i}.mp4")
    (tmp_path / "prompts.csv").write_text(blocks("csv")[0])
    options = dict(load_inference_config("configs/demo/sample.py").model)
    model = build_model(options.pop("type"), **options)
    (tmp_path / "outputs" / "short").mkdir(parents=True)
    save_file(model.state_dict(), tmp_path / "outputs" / "short" / "model.safetensors")
    write_model_config(tmp_path / "outputs" / "short", "STDiT3", model.config)
    return tmp_path


def test_every_command_can_run(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checked = commands("scripts/inference.py")
    assert len(checked) == 12
    for ranks, arguments in checked:
        monkeypatch.setenv("WORLD_SIZE", str(ranks))
        requests, _ = preflight(sampling.parse(arguments))
        assert requests
    trainings = commands("scripts/train.py")
    assert len(trainings) == 2
    (place / "outputs" / "short" / "model.safetensors").unlink()
    for ranks, arguments in trainings:
        monkeypatch.setenv("WORLD_SIZE", str(ranks))
        args = config_arguments("").parse_args(arguments)
        preflight_training(load_train_config(args.config, args.cfg_options), None)

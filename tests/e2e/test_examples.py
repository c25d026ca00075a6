"""The example that each subcommand has in its help runs as it is written."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from runs import ROOT, run_forked

from opensora_sp.cli import COMMANDS
from opensora_sp.sampling import read_prompts

LAUNCHER = ["torchrun", "--nproc_per_node", "2", "-m", "opensora_sp.cli"]


def run_example(name: str, folder: Path) -> str:
    """Run the example of a command in a folder; returns what it prints."""
    words = shlex.split(COMMANDS[name].example)
    is_launched = words[0] == "torchrun"
    prefix = LAUNCHER if is_launched else ["opensora-sp"]
    assert words[: len(prefix)] == prefix and words[len(prefix)] == name

    if name == "studio":
        return served_page(arguments=words[len(prefix) :], folder=folder)
    arguments, ranks = words[len(prefix) :], 2 if is_launched else 1
    done = run_forked("-m", "opensora_sp.cli", *arguments, ranks=ranks, folder=folder)
    assert done.returncode == 0, f"{words}\n{done.stdout}{done.stderr}"
    return done.stdout


def served_page(arguments: list[str], folder: Path) -> str:
    """Start the studio, on a free port; returns its page."""
    command = [sys.executable, "-m", "opensora_sp.cli", *arguments, "--port", "0"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        try:
            address = process.stdout.readline().strip()
            return str(urllib.request.urlopen(address, timeout=60).read().decode())
        finally:
            process.terminate()


@pytest.mark.slow
def test_the_examples_run_in_their_order(tmp_path: Path) -> None:
    """In a folder that ``init`` has written; the tools last."""
    run_example("init", tmp_path)
    project = tmp_path / "project"
    (project / "data" / "clips.csv").unlink()
    # The page's example, with its bug mended.
    page = (ROOT / "docs" / "check_parallel.md").read_text()
    example = page.split("```python\n")[1].split("```")[0]
    (project / "mine.py").write_text(example.replace("# dist.all_reduce", "dist.all_reduce"))

    printed = {name: run_example(name, project) for name in COMMANDS if name not in ("init",)}
    assert "16 clips, 0 of them without a caption" in printed["index"]
    assert (project / "cache" / "first" / "index.json").is_file()
    run = project / "outputs" / "first"
    assert len(list((run / "samples").glob("*.mp4"))) == len(read_prompts(project / "prompts.txt"))

    assert "held-out loss" in printed["eval"] and "STDiT3" in printed["plan"]
    assert "equal (allowed" in printed["verify"] and "NOT" not in printed["verify"]
    assert "configs/_base_/demo_model.py" in printed["config"]
    assert (project / "weights" / "first" / "config.json").is_file()
    assert "opensora-sp studio" in printed["studio"] and "outputs/first" in printed["studio"]
    assert "checks passed" in printed["doctor"]
    assert "no difference: one process and 3 ranks" in printed["check-parallel"]

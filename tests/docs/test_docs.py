"""The documentation's commands: all are parsed, marked blocks are run (marks: ``pages.py``).

Blocks run in ``make test-docs``, a part of CI.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from pages import BLOCKS, PAGES, SHELL, Block
from ranks import free_port
from runs import BIN, ROOT, write_toy_set

from opensora_sp.cli import command_module
from opensora_sp.cli import sample as sample_command
from opensora_sp.config import load_either, load_inference_config, load_train_config

ENTRY = f"""#!{sys.executable}
from opensora_sp.cli import main

if __name__ == "__main__":
    main()
"""


def lay_out(folder: Path) -> None:
    """A folder like the project's with what the pages presuppose: clips, prompts, captions."""
    for name in ("configs", "scripts", "benchmarks", "Makefile"):
        (folder / name).symlink_to(ROOT / name)
    (folder / "bin").mkdir()
    (folder / "bin" / "opensora-sp").write_text(ENTRY)
    (folder / "bin" / "opensora-sp").chmod(0o755)
    prompts = next(
        block for block in BLOCKS if block.page == "docs/sampling.md" and block.language == "csv"
    )
    (folder / "prompts.csv").write_text(prompts.text)
    (folder / "more_prompts.txt").write_text("a blue circle moving left on a white background\n")
    captions = (
        write_toy_set(folder / "videos", 3)
        .read_text()
        .replace("\n", "\nvideos/")
        .removesuffix("videos/")
    )
    (folder / "captions.csv").write_text(captions)
    (folder / "videos" / "clips.csv").unlink()


@pytest.fixture(scope="module")
def empty_place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the blocks run."""
    folder = tmp_path_factory.mktemp("all docs")
    lay_out(folder)
    return folder


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_blocks_say_what_they_are(page: Path) -> None:
    found = [block for block in BLOCKS if block.page == str(page.relative_to(ROOT))]
    assert 2 * len(found) == len(
        re.findall(r"^ *```", page.read_text(encoding="utf-8"), re.MULTILINE)
    )
    for block in found:
        start = block.text[:60]
        assert block.language, f"a block without a language: {start!r}"
        assert block.language not in ("sh", "shell"), f"bash, so that it is checked: {start!r}"
        if block.language in ("bash", "console"):
            assert block.mark, (
                f"no '<!-- run -->' or '<!-- not run: why -->' on the line before {start!r}"
            )


def after(words: list[str], script: str) -> list[str]:
    """The arguments of a script, with a config of the demo where a page leaves it to the reader."""
    example = (
        "configs/demo/sample.py" if script.endswith("inference.py") else "configs/demo/train.py"
    )
    return [example if word == "CONFIG" else word for word in words[words.index(script) + 1 :]]


def check(words: list[str]) -> None:
    """Parse a command of ours, and load its config; others are left to bash."""
    ours = [word for word in words if re.fullmatch(r"(scripts|benchmarks)/\w+\.py", word)]
    assert all((ROOT / script).is_file() for script in ours), words

    if "scripts/train.py" in words:
        args = command_module("train").parser().parse_args(after(words, "scripts/train.py"))
        load_train_config(args.config, args.cfg_options)
    elif "scripts/inference.py" in words:
        sample_command.parse(after(words, "scripts/inference.py"))
    elif words[0] == "opensora-sp" or "opensora_sp.cli" in words:
        name = words[words.index("opensora_sp.cli") + 1] if words[0] != "opensora-sp" else words[1]
        args = command_module(name).parser().parse_args(after(words, name))
        config = getattr(args, "config", None)
        if name == "sample" and config == "toy":
            sample_command.config_of(args)
        elif config is not None:
            load_either(config, getattr(args, "cfg_options", []))
    elif words[0] == "make":
        makefile = (ROOT / "Makefile").read_text()
        assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in words[1:]), words


def test_every_command_parses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lay_out(tmp_path)
    monkeypatch.chdir(tmp_path)
    # What a command before writes.
    demo = load_inference_config("configs/demo/sample.py")
    Path("outputs/short").mkdir(parents=True)
    Path("outputs/short/curve.json").write_text(json.dumps(demo.scheduler["cache_curve"]))
    for block in SHELL:
        subprocess.run(["bash", "-n", "-c", block.script], check=True)
        for words in block.commands:
            try:
                check(words)
            except (SystemExit, ValueError, KeyError) as error:
                pytest.fail(f"{block.page}: {' '.join(words)}: {error}")


def name_of(block: Block) -> str:
    return f"{block.page}: {' '.join(block.commands[0][:3])}"


@pytest.mark.grid
@pytest.mark.parametrize("block", [b for b in SHELL if b.runs], ids=name_of)
def test_block_runs(block: Block, empty_place: Path) -> None:
    run_block(block, empty_place)


def run_block(block: Block, place: Path) -> None:
    """Blocks run in the order of the pages and in one folder, as a reader would run them."""
    environment = {
        k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    }
    environment.update(
        PATH=f"{place / 'bin'}:{BIN}:{environment['PATH']}",
        PYTHONPATH=str(ROOT),
        OMP_NUM_THREADS="1",
        PET_MASTER_PORT=str(free_port()),  # what torchrun takes for --master_port
    )
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", block.script],
        cwd=place,
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
    )

    assert done.returncode == 0, done.stderr[-3000:]
    if block.language == "console":
        assert done.stdout == block.printed

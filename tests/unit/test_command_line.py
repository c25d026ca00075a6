"""The command's help, its examples, and projects that ``init`` writes."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

import opensora_sp
from opensora_sp.cli import COMMANDS, command_module, main
from opensora_sp.cli.plan_fit import check_out
from opensora_sp.common.files import SHIPPED, or_shipped
from opensora_sp.config import load_train_config
from opensora_sp.training.preflight import preflight

USUAL_PATH = ["init", "index", "precompute", "train", "sample", "eval"]


def printed_help(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as left:
        main([*words, "--help"])
    assert left.value.code == 0
    return capsys.readouterr().out


def test_help_lists_the_usual_path_first(capsys: pytest.CaptureFixture[str]) -> None:
    listed = re.findall(r"^    ([a-z-]+)(?= |$)", printed_help(capsys), re.MULTILINE)
    assert listed[: len(USUAL_PATH)] == USUAL_PATH and listed == list(COMMANDS)


@pytest.mark.parametrize(
    ("word", "advice"), [("trrain", "did you mean 'train'?"), ("xyzzy", "take one of these")]
)
def test_the_nearest_command_is_named(
    word: str, advice: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([word, "config.py"])
    error = capsys.readouterr().err
    assert f"got the command '{word}'; expected one of init, index" in error and advice in error


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"opensora-sp {opensora_sp.__version__}\n"


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_of_a_command_ends_with_an_example_that_parses(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """``tests/e2e/test_examples.py`` runs them."""
    monkeypatch.setattr("opensora_sp.cli.exit_on_interrupt", lambda: None)
    example = COMMANDS[name].example
    assert printed_help(capsys, name).endswith(f"example:\n  {example}\n")

    words = shlex.split(example)
    arguments = words[words.index(name) :]
    assert words[: -len(arguments)] in (
        ["opensora-sp"],
        ["torchrun", "--nproc_per_node", "2", "-m", "opensora_sp.cli"],
    )
    command_module(name).parser().parse_args(arguments[1:])


def test_a_project_of_each_shipped_config_would_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copies in the project and its clips pass all checks before a model exists."""
    for config in ("configs/demo/first.py", "configs/stdit3/train/16x256x256_sp2.py"):
        folder = tmp_path / Path(config).stem
        main(["init", str(folder), "--config", config])
        monkeypatch.chdir(folder)
        cfg = load_train_config(config, ["precision=fp32"])
        monkeypatch.setenv("WORLD_SIZE", str(cfg.sp_size))
        dataset, _ = preflight(cfg, None)
        assert len(dataset) == 16 and Path("prompts.txt").read_text().count("\n") >= 3
        assert f"cli train {config} " in Path("run.sh").read_text()

        # The project's copy is read, not the package's.
        Path(config).write_text(Path(config).read_text() + "seed = 7\n")
        assert load_train_config(config).seed == 7


def test_what_is_no_project(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    new = str(tmp_path / "a")
    shipped = "configs/stdit3/train/"
    for words, message in (
        ([str(tmp_path)], "which is there already; expected a new folder; choose another name"),
        ([str(tmp_path / "file")], "which is there already"),
        ([new, "--config", f"{shipped}16x256x256_sp2_cached.py"], "which needs a feature cache"),
        ([new, "--config", f"{shipped}buckets_stage1_sp8.py"], "or clips of many sizes"),
        ([new, "--config", "x.py"], "choose one of configs/demo/first.py, "),
    ):
        with pytest.raises(SystemExit) as left:
            main(["init", *words])
        assert left.value.code == 2 and message in capsys.readouterr().err
    assert not Path(new).exists()


def test_files_of_the_package_are_found_by_their_names_in_the_repository(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    name = "configs/demo/prompts.txt"
    assert or_shipped(name) == SHIPPED / "demo" / "prompts.txt"
    for other in ("demo/prompts.txt", "configs/none.py", "configs", str(tmp_path / name)):
        assert or_shipped(other) == Path(other)

    fitted = check_out("configs/demo/train.py", None, "8GB")
    assert fitted == Path("train_fit_8GB.py")

    (tmp_path / "configs" / "demo").mkdir(parents=True)
    (tmp_path / name).touch()
    assert or_shipped(name) == Path(name)

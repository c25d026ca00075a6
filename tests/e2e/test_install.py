"""The wheel works where the repository is not: built from the sdist, in an environment of its own.

The environment sees the packages of the tests, but not the checkout.
"""

from __future__ import annotations

import os
import shutil
import site
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from ranks import free_port
from runs import ROOT

pytestmark = pytest.mark.slow

SOURCES = ("opensora_sp", "configs", "setup.py", "pyproject.toml", "README.md", "LICENSE")
TORCHRUN = """#!{python}
from torch.distributed.run import main

main()
"""


def called(*command: str | Path, folder: Path, **environment: str) -> str:
    """Run a command without the checkout on its path; returns what it prints."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [str(part) for part in command],
        cwd=folder,
        env=kept | {"OMP_NUM_THREADS": "1"} | environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an sdist, and of the wheel that is built from it."""
    folder = tmp_path_factory.mktemp("build")
    # A copy: the checkout may have lists of files from former builds.
    for name in SOURCES:
        if (ROOT / name).is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=ignored)
        else:
            shutil.copy(ROOT / name, folder / name)
    called(sys.executable, "-m", "build", "--no-isolation", folder=folder)
    return folder / "dist"


@pytest.fixture(scope="module")
def environment(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The ``bin`` of an environment with the wheel and, through a path, the tests' packages."""
    folder = tmp_path_factory.mktemp("environment")
    called(sys.executable, "-m", "venv", "--without-pip", folder, folder=folder)
    (packages,) = folder.glob("lib/python*/site-packages")
    # Unlike a folder of site-packages, it has no .pth files, so no editable installs either.
    (packages / "tests.pth").write_text("\n".join(site.getsitepackages()) + "\n")

    (wheel,) = built.glob("*.whl")
    python = folder / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--python", python)
    # The tests' packages may have the same version, which pip would take for installed.
    options = ("--quiet", "--no-deps", "--no-index", "--ignore-installed")
    called(*pip, "install", *options, wheel, folder=folder)
    torchrun = folder / "bin" / "torchrun"
    torchrun.write_text(TORCHRUN.format(python=python))
    torchrun.chmod(0o755)
    return folder / "bin"


def names(files: list[str], prefix: str) -> set[str]:
    return {name.removeprefix(prefix) for name in files if name.startswith(prefix)}


def test_wheel_and_sdist_hold_all_modules_configs_prompts_and_models(built: Path) -> None:
    (wheel,), (sdist,) = built.glob("*.whl"), built.glob("*.tar.gz")
    folder = ROOT / "opensora_sp"
    suffixes = (".py", ".css", ".js")
    wanted = {str(p.relative_to(folder)) for p in folder.rglob("*") if p.suffix in suffixes}
    wanted |= {str(p.relative_to(folder)) for p in folder.glob("shipped_models/*/*.*")}
    assert "shipped_models/toy/model.safetensors" in wanted
    for path in (ROOT / "configs").rglob("*.*"):
        if "__pycache__" not in path.parts:
            wanted.add(str(path.relative_to(ROOT)))
    assert {"configs/demo/first.py", "configs/stdit3/prompts.txt"} <= wanted

    with zipfile.ZipFile(wheel) as archive:
        assert names(archive.namelist(), "opensora_sp/") == wanted
    with tarfile.open(sdist) as archive:
        files = [member.name for member in archive if member.isfile()]
    top = files[0].partition("/")[0]
    assert names(files, f"{top}/opensora_sp/") == wanted


def test_a_project_runs_from_the_wheel(environment: Path, tmp_path: Path) -> None:
    """``init``, then its run script: two ranks train and sample."""
    command, python = environment / "opensora-sp", environment / "python"
    where = called(python, "-c", "import opensora_sp; print(opensora_sp.__file__)", folder=tmp_path)
    assert Path(where.strip()).is_relative_to(environment.parent)
    check = [sys.executable, "-m", "pip", "--python", python, "check"]
    broken = subprocess.run(check, capture_output=True, text=True).stdout.splitlines()
    # docs/install.md says which.
    assert broken and all(line.startswith("colossalai 0.5.0 ") for line in broken), broken

    called(command, "init", "project", folder=tmp_path)
    project, path = tmp_path / "project", f"{environment}:{os.environ['PATH']}"
    config = project / "configs" / "demo" / "first.py"
    config.write_text(config.read_text().replace("max_steps = 60", "max_steps = 4"))
    settings = dict(PATH=path, PET_MASTER_PORT=str(free_port()))
    printed = called(project / "run.sh", folder=tmp_path, **settings)
    run = project / "outputs" / "first"
    assert "dp_size 1 x sp_size 2" in printed and "finished: 4 of 4 steps" in printed
    assert len(list((run / "samples").glob("*.mp4"))) == 3

    prompt = "a red circle moving left on a blue background"
    called(command, "sample", "toy", "--prompt", prompt, folder=tmp_path)
    assert len(list((tmp_path / "samples").glob("*.mp4"))) == 1

    # Without a copy of it, in another folder: the config of the package, under the same name.
    config = "configs/stdit3/train/64x512x512_sp8.py"
    explained = called(command, "config", config, "--explain", folder=tmp_path)
    assert f"opensora_sp/{config}:" in explained and "opensora_sp/configs/_base_/train" in explained

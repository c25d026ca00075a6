"""The arrows between the rooms, and what an import costs and prints."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "opensora_sp"
BASE = {
    "models": {"torch", "einops"},
    "parallel": {"torch"},
}  # beside the standard library
WHEN_CALLED = {"base.py": "opensora_sp.checkpoint"}  # methods of models that read and write them


def imported(path: Path) -> set[str]:
    """Absolute names of the modules that a file imports, anywhere in it."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            package = (
                path.relative_to(PACKAGE.parent).with_suffix("").parts[: -node.level]
                if node.level
                else ()
            )
            names.add(".".join([*package, *([node.module] if node.module else [])]))
    return names


def files(room: str = "") -> list[Path]:
    found = sorted((PACKAGE / room).rglob("*.py"))
    assert found
    return found


@pytest.mark.parametrize("room", BASE)
def test_models_and_parallel_stand_alone(room: str) -> None:
    for path in files(room):
        for name in imported(path):
            top = name.split(".")[0]
            inside = name == f"opensora_sp.{room}" or name.startswith(f"opensora_sp.{room}.")
            inside |= name in ("opensora_sp.backends", "opensora_sp.transfer")  # torch only
            lazy = top == "flash_attn" or name == WHEN_CALLED.get(path.name)
            assert top in sys.stdlib_module_names or top in BASE[room] or inside or lazy, (
                path,
                name,
            )


def test_models_know_nothing_of_processes() -> None:
    for path in files("models"):
        assert not any(name.startswith("torch.distributed") for name in imported(path)), path
        text = path.read_text()
        assert "sp_size" not in text and "process_group" not in text, path


def test_colossalai_is_imported_in_the_plugin_only() -> None:
    for path in files():
        if path.relative_to(PACKAGE).parts[0] != "plugin":
            assert not any(name.split(".")[0] == "colossalai" for name in imported(path)), path


def test_nothing_imports_the_scripts_and_lower_rooms_not_the_runs() -> None:
    runs = ("opensora_sp.training", "opensora_sp.sampling", "scripts")
    for path in files():
        room = path.relative_to(PACKAGE).parts[0]
        if room in (
            "models",
            "parallel",
            "plugin",
            "runtime",
            "checkpoint",
            "diffusion",
            "encoders",
            "data",
            "config",
        ):
            assert not any(name.startswith(runs) for name in imported(path)), path


@pytest.mark.parametrize("package", ["checkpoint", "storage"])
def test_checkpoints_are_read_and_written_without_the_models(package: str) -> None:
    code = f"import sys, opensora_sp.{package}; assert 'opensora_sp.models' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_models_reach_the_disk_only_when_asked_to() -> None:
    code = (
        "import sys, opensora_sp.models\n"
        "assert not {'safetensors', 'opensora_sp.checkpoint'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("module", ["opensora_sp", "opensora_sp.training", "opensora_sp.sampling"])
def test_importing_prints_nothing_and_leaves_colossalai_alone(module: str) -> None:
    code = (
        f"import sys, {module}\n"
        "assert not {'colossalai', 'diffusers', 'transformers'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


REAL_WARNING = """
import builtins, logging, warnings
plain = builtins.__import__
def hooked(name, *args, **kwargs):
    if name == "colossalai.zero":
        warnings.warn("a real one")
    return plain(name, *args, **kwargs)
builtins.__import__ = hooked
import opensora_sp.plugin
assert logging.getLogger("bitsandbytes").level == logging.NOTSET
"""


def test_importing_the_plugin_is_quiet_about_absent_extras_only() -> None:
    done = subprocess.run([sys.executable, "-c", REAL_WARNING], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not any(
        word in done.stderr + done.stdout
        for word in ("apex", "tensornvme", "bitsandbytes", "gemm_4bit")
    )
    assert "UserWarning: a real one" in done.stderr


@pytest.mark.serial
def test_importing_the_package_costs_nothing() -> None:
    code = (
        "import time; start = time.perf_counter()\n"
        "import sys, opensora_sp; assert time.perf_counter() - start < 3\n"
        "assert not {'torch', 'numpy', 'pydantic', 'mmengine'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_importing_the_plugin_starts_no_processes() -> None:
    """With Triton, an import of bitsandbytes, which ColossalAI makes, would start compilers."""
    code = (
        "import opensora_sp.plugin, os, psutil; assert psutil.Process().children() == []\n"
        "assert 'TORCH_WARM_POOL' not in os.environ"
    )
    environment = {k: v for k, v in os.environ.items() if k != "TORCHINDUCTOR_COMPILE_THREADS"}
    subprocess.run(
        [sys.executable, "-c", code],
        check=True,
        env=environment | {"TORCHINDUCTOR_COMPILE_THREADS": "2"},
    )


def test_nothing_unpickles_or_evaluates() -> None:
    """Foreign pickles are read on request alone (test_weights.py and test_booster.py)."""
    may_load = Path("checkpoint/reader.py")
    for path in files():
        for node in ast.walk(ast.parse(path.read_text())):
            called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            assert called not in ("eval", "exec", "pickle.load", "pickle.loads"), path
            assert called != "torch.load" or path.relative_to(PACKAGE) == may_load, path

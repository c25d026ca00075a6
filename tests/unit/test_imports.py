"""The arrows between the rooms, and what an import costs and prints."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "opensora_sp"
# What each may import beside the standard library.
BASE = {"models": {"torch", "einops"}, "parallel": {"torch", "einops"}}
# Modules of the package that need torch only.
SHARED = ("common.graphs", "common.importing", "common.tensors")
WHEN_CALLED = {
    "base.py": "opensora_sp.checkpoint",  # methods of models that read and write them
    "adapted_linear.py": "peft.tuners.lora",  # a module that add_lora imports
    "quantized.py": "torchao.quantization",  # where a config asks for int8
}


def imported(path: Path) -> set[str]:
    """Absolute names of the modules that a file imports, anywhere in it."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            inside = path.relative_to(PACKAGE.parent).with_suffix("").parts
            package = inside[: -node.level] if node.level else ()
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
            inside |= name.removeprefix("opensora_sp.") in SHARED
            lazy = top in ("flash_attn", "flash_attn_interface") or name == WHEN_CALLED.get(
                path.name
            )
            lazy |= top == "triton" and path.parent.name == "triton"
            allowed = top in sys.stdlib_module_names or top in BASE[room]
            assert allowed or inside or lazy, (path, name)


def test_models_know_nothing_of_processes() -> None:
    for path in files("models"):
        assert not any(name.startswith("torch.distributed") for name in imported(path)), path
        text = path.read_text()
        assert "sp_size" not in text and "process_group" not in text, path


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run code in a fresh process."""
    return subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | environment,
        capture_output=True,
        text=True,
    )


IMPORTS = """
import os, sys, torch
child = os.fork()
if not child:
    import opensora_sp.checkpoint
    assert "opensora_sp.models" not in sys.modules
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
import opensora_sp.models
assert not {"safetensors", "opensora_sp.checkpoint"} & set(sys.modules)
import opensora_sp.training.run, opensora_sp.sampling
assert not {"colossalai", "diffusers", "transformers"} & set(sys.modules)
assert "opensora_sp.models.kernels.triton" not in sys.modules
sys.stderr.write("the plugin:")
import builtins, logging, psutil, warnings
plain = builtins.__import__
def hooked(name, *args, **kwargs):
    if name == "colossalai.zero":
        warnings.warn("a real one")
    return plain(name, *args, **kwargs)
builtins.__import__ = hooked
import opensora_sp.plugin
assert logging.getLogger("bitsandbytes").level == logging.NOTSET
assert psutil.Process().children() == [] and "TORCH_WARM_POOL" not in os.environ
"""


def test_imports_print_nothing_and_load_only_what_is_needed() -> None:
    """Checkpoints need no models, models no checkpoints, and runs no ColossalAI before launch.

    The plugin is quiet about absent extras, and starts no processes: with Triton, an import of
    bitsandbytes, which ColossalAI makes, would start compilers.
    """
    done = run_python(IMPORTS, TORCHINDUCTOR_COMPILE_THREADS="2")
    before, _, of_plugin = done.stderr.partition("the plugin:")
    assert (done.returncode, done.stdout, before) == (0, "", ""), done.stderr
    for word in ("apex", "tensornvme", "bitsandbytes", "gemm_4bit", "register_constant"):
        assert word not in of_plugin
    assert "UserWarning: a real one" in of_plugin


PACKAGE_ALONE = """
import time; start = time.process_time()
import sys, opensora_sp; assert time.process_time() - start < 1
assert not {"torch", "numpy", "pydantic", "mmengine"} & set(sys.modules)
"""


def test_importing_the_package_costs_nothing() -> None:
    done = run_python(PACKAGE_ALONE)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_nothing_unpickles_or_evaluates() -> None:
    """The one unpickler has few operations and calls nothing of others (test_pickles.py)."""
    forbidden = (
        "eval exec pickle.load pickle.loads pickle.Unpickler pickle._Unpickler torch.load "
        "torch.jit.load np.load yaml.load"
    )
    unpicklers = set()
    for path in files():
        for node in ast.walk(ast.parse(path.read_text())):
            called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            # The checker's results are of the ranks that it starts.
            is_own = path == PACKAGE / "checker/run.py" and called == "pickle.loads"
            assert is_own or called not in forbidden.split(), path

            options = {option.arg for option in node.keywords} if called else set()
            is_foreign = called.endswith(".from_pretrained")
            assert not is_foreign or "use_safetensors" in options, path

            # Weights of encoders as well: open_weights maps them.
            assert not called.endswith("load_file"), path
            # Nor names that a call by another name could hide.
            from_pickle = isinstance(node, ast.ImportFrom) and node.module in ("pickle", "_pickle")
            assert not from_pickle, path
            bases = node.bases if isinstance(node, ast.ClassDef) else []
            unpicklers |= {
                (str(path.relative_to(PACKAGE)), ast.unparse(node))
                for node in bases
                if "Unpickler" in ast.unparse(node)
            }
    assert unpicklers == {("checkpoint/pickle_file.py", "pickle._Unpickler")}

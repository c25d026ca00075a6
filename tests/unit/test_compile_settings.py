"""Where ``compile="auto"`` compiles blocks, where compiled code is kept, and the warm-up's line."""

from __future__ import annotations

import logging
import os
import tempfile
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from opensora_sp import compile_cache
from opensora_sp.device_verification import verdicts
from opensora_sp.models import build_model, compile
from opensora_sp.models.compile import compile_as_set, compiles_blocks, reporting_compilation

SMALL = dict(hidden_size=24, depth=1, num_heads=2, caption_channels=8, model_max_length=6)


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A user's empty cache folder; what is set in the environment is taken back."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name in (compile_cache.INDUCTOR, compile_cache.TRITON):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    return tmp_path


def test_blocks_are_compiled_on_cuda_where_triton_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(compile, "has_triton", lambda: True)
    monkeypatch.setenv("CC", "cc")
    compiles = partial(compiles_blocks, all_kernels_run=False)
    assert compiles("auto", "cuda") and compiles("blocks", "cpu")
    assert not compiles("auto", "cpu") and not compiles(None, "cuda")
    assert compiles_blocks("blocks", "cuda", all_kernels_run=True)

    model = build_model("STDiT3", **SMALL)
    with caplog.at_level(logging.INFO):
        compile_as_set(model, "auto", "cuda", {"gelu": "triton", "qk_norm": "triton"})
        monkeypatch.setattr(compile, "has_triton", lambda: False)
        for setting, device_type in (("auto", "cuda"), ("auto", "cpu"), (None, "cuda")):
            compile_as_set(model, setting, device_type, {"gelu": "triton", "qk_norm": "torch"})
    assert model.compile_backend is None
    assert caplog.messages == [
        "blocks run in eager mode: all Triton kernels run, which leave a compiler nothing to fuse",
        "blocks run in eager mode: Triton is not installed",
        "blocks run in eager mode: the device is cpu",
    ]


def test_without_a_c_compiler_nothing_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile, "has_triton", lambda: True)
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", "")
    assert not compiles_blocks("auto", "cuda", all_kernels_run=False)


def test_the_cache_lies_in_the_users_folder_by_versions(cache: Path) -> None:
    folder = compile_cache.use_compile_cache()
    assert folder is not None and folder.is_relative_to(cache / "opensora_sp" / "compiled")
    assert torch.__version__ in folder.name and folder.stat().st_mode & 0o077 == 0
    assert os.environ[compile_cache.INDUCTOR] == str(folder)
    # Not one for each device.
    assert os.environ[compile_cache.TRITON] == str(folder / "triton")


def test_a_folder_that_is_set_stays(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(compile_cache.INDUCTOR, str(tmp_path / "own"))
    # Kernels are compiled before blocks are.
    compile_cache.use_triton_cache()
    assert os.environ[compile_cache.TRITON] == str(tmp_path / "own" / "triton")
    assert compile_cache.use_compile_cache() == tmp_path / "own"


def test_a_folder_that_cannot_be_made_is_not_used(
    cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (cache / "opensora_sp").write_text("a file")
    assert compile_cache.use_compile_cache() is None
    assert compile_cache.INDUCTOR not in os.environ
    assert "compiled code is kept for this boot only" in caplog.text


def test_kernels_are_kept_beside_compiled_code(cache: Path) -> None:
    compile_cache.use_triton_cache()
    kept = os.environ[compile_cache.TRITON]
    compile_cache.use_compile_cache()
    assert kept == os.environ[compile_cache.TRITON]
    # Triton would load modules for another version of Python.
    assert Path(kept) == compile_cache.default_folder() / "triton"


@pytest.mark.parametrize("name", [compile_cache.TRITON, "TRITON_HOME"])
def test_a_folder_for_kernels_that_is_set_stays(
    cache: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, str(cache / "own"))
    compile_cache.use_triton_cache()
    assert os.environ.get(compile_cache.TRITON, os.environ[name]) == str(cache / "own")


def test_kernels_run_without_a_folder_that_can_be_written_to(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As in a container that is started with another user's number."""
    (cache / "opensora_sp").write_text("a file")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with caplog.at_level(logging.INFO):
        compile_cache.use_triton_cache()
    assert "Triton's kernels are kept for this process only" in caplog.text
    folder = Path(os.environ[compile_cache.TRITON])
    assert folder.parent == tmp_path and folder.stat().st_mode & 0o077 == 0


def test_a_folder_that_cannot_be_written_to_is_not_used(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(compile_cache.INDUCTOR, str(tmp_path / "set"))

    # Modes do not bind root.
    def refuse(*, dir: Path) -> None:
        raise PermissionError(f"Permission denied: {dir}")

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    assert compile_cache.use_compile_cache() is None
    assert compile_cache.INDUCTOR not in os.environ and compile_cache.TRITON not in os.environ
    assert f"for this boot only, since Permission denied: {tmp_path / 'set'}" in caplog.text


def test_folders_of_other_users_are_not_used(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Their code would be executed."""
    uid = os.getuid() + 1
    monkeypatch.setattr(os, "getuid", lambda: uid)
    assert compile_cache.cache_folder() == cache / f"opensora_sp-{uid}"
    monkeypatch.setenv(compile_cache.INDUCTOR, str(cache))
    assert compile_cache.use_compile_cache() is None
    assert compile_cache.INDUCTOR not in os.environ
    assert f"{cache} belongs to another user" in caplog.text


def test_a_user_without_a_home_folder_has_no_cache(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def nowhere() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", nowhere)
    with caplog.at_level(logging.INFO):
        assert compile_cache.use_compile_cache() is None
        verdicts.write_passed({}, ["gelu"])
    assert verdicts.read_passed({}) == set()
    assert caplog.messages == [
        "compiled code is kept for this boot only: the user has no home folder",
        "what was verified is not remembered: the user has no home folder",
    ]


def test_a_warm_up_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    double = torch.compile(lambda x: 2 * x, backend="eager")
    with caplog.at_level(logging.INFO):
        for step in range(2):
            with reporting_compilation(f"step {step}"):
                double(torch.ones(3))
    (message,) = (message for message in caplog.messages if "warm-up" in message)
    assert message.startswith("step 0: warm-up of ") and "1 graphs were compiled" in message


def graphs_loaded_and_compiled(folder: str) -> tuple[int, int]:
    """By either rank; rank 1 compiles the same after rank 0."""
    from torch._dynamo.utils import counters

    os.environ["XDG_CACHE_HOME"] = folder
    for name in (compile_cache.INDUCTOR, compile_cache.TRITON):
        os.environ.pop(name, None)
    compile_cache.use_compile_cache()
    function = torch.compile(lambda x: (x.sin() + 1) * x)
    for rank in range(2):
        if dist.get_rank() == rank:
            function(torch.ones(3))
        dist.barrier()
    of_inductor = counters["inductor"]
    return of_inductor["fxgraph_cache_hit"], of_inductor["fxgraph_cache_miss"]


@pytest.mark.slow
def test_ranks_share_compiled_code(tmp_path: Path) -> None:
    first, second = run_ranks(2, graphs_loaded_and_compiled, str(tmp_path), timeout=600)
    assert first == (0, 1) and second == (1, 0)

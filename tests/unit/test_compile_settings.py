"""``compile="blocks"`` as a setting, where compiled code is kept, and the warm-up's line."""

from __future__ import annotations

import logging
import os
import tempfile
from pathlib import Path

import pytest
import torch
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

from opensora_sp import compile_cache, device_verification
from opensora_sp.config import TrainConfig
from opensora_sp.models import build_model, compile, compile_blocks
from opensora_sp.models.compile import reporting_compilation

SMALL = dict(hidden_size=24, depth=1, num_heads=2, caption_channels=8, model_max_length=6)


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A user's empty cache folder; what is set in the environment is taken back."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name in (compile_cache.INDUCTOR, compile_cache.TRITON):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    return tmp_path


def test_blocks_are_compiled_where_asked_for_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert TrainConfig.model_fields["compile"].default is None
    monkeypatch.setattr(compile, "use_compile_cache", lambda: None)
    model = build_model("STDiT3", **SMALL)
    assert model.run_compiled is None
    compile_blocks(model)
    assert model.run_compiled.args == ("inductor",)
    assert caplog.messages == [
        "blocks are compiled with inductor; their results are not compared with eager mode"
    ]


def test_the_cache_lies_in_the_users_folder_by_versions(cache: Path) -> None:
    compile_cache.use_compile_cache()
    folder = Path(os.environ[compile_cache.INDUCTOR])
    assert folder.is_relative_to(cache / "opensora_sp" / "compiled")
    assert torch.__version__ in folder.name and folder.stat().st_mode & 0o077 == 0
    # Not one for each device.
    assert os.environ[compile_cache.TRITON] == str(folder / "triton")


def test_a_folder_that_is_set_stays(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(compile_cache.INDUCTOR, str(tmp_path / "own"))
    # Kernels are compiled before blocks are.
    compile_cache.use_triton_cache()
    assert os.environ[compile_cache.TRITON] == str(tmp_path / "own" / "triton")
    compile_cache.use_compile_cache()
    assert os.environ[compile_cache.INDUCTOR] == str(tmp_path / "own")


def test_kernels_are_kept_beside_compiled_code(cache: Path) -> None:
    compile_cache.use_triton_cache()
    kept = os.environ[compile_cache.TRITON]
    compile_cache.use_compile_cache()
    assert kept == os.environ[compile_cache.TRITON]
    # Triton would load modules for another version of Python.
    assert Path(kept) == compile_cache.default_folder() / "triton"


def test_the_temporary_folder_of_torch_is_not_taken_for_the_users(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(compile_cache.INDUCTOR, default_cache_dir())
    compile_cache.use_compile_cache()
    assert Path(os.environ[compile_cache.INDUCTOR]) == compile_cache.default_folder()


@pytest.mark.parametrize("name", [compile_cache.TRITON, "TRITON_HOME"])
def test_a_folder_for_kernels_that_is_set_stays(
    cache: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, str(cache / "own"))
    compile_cache.use_triton_cache()
    assert os.environ.get(compile_cache.TRITON, os.environ[name]) == str(cache / "own")


def assert_temporary(caplog: pytest.LogCaptureFixture, reason: str) -> None:
    """Both kinds of compiled code are kept in folders of this process, for that reason."""
    compile_cache.use_compile_cache()
    graphs, kernels = (
        Path(os.environ[name]) for name in (compile_cache.INDUCTOR, compile_cache.TRITON)
    )
    assert graphs.parent == kernels.parents[1] == Path(tempfile.gettempdir())
    assert graphs.stat().st_mode & 0o077 == 0
    message = caplog.messages[0]
    assert message.startswith("compiled code is kept for this process only: ") and reason in message


def test_a_folder_that_cannot_be_made_is_not_used(
    cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As in a container that is started with another user's number."""
    (cache / "opensora_sp").write_text("a file")
    assert_temporary(caplog, "Not a directory")


def test_kernels_run_without_a_folder_that_can_be_written_to(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(compile_cache.INDUCTOR, str(cache / "set"))

    # Modes do not bind root.
    def refuse(*, dir: Path) -> None:
        raise PermissionError(f"Permission denied: {dir}")

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    compile_cache.use_triton_cache()
    assert os.environ[compile_cache.INDUCTOR] == str(cache / "set")
    assert Path(os.environ[compile_cache.TRITON]).parents[1] == Path(tempfile.gettempdir())
    assert f"Permission denied: {cache / 'set'}" in caplog.text


def test_folders_of_other_users_are_not_used(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Their code would be executed."""
    uid = os.getuid() + 1
    monkeypatch.setattr(os, "getuid", lambda: uid)
    assert compile_cache.cache_folder() == cache / f"opensora_sp-{uid}"
    monkeypatch.setenv(compile_cache.INDUCTOR, str(cache))
    assert_temporary(caplog, f"{cache} belongs to another user")


def test_a_user_without_a_home_folder_has_no_cache(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def nowhere() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", nowhere)
    assert_temporary(caplog, "the user has no home folder")
    with caplog.at_level(logging.INFO):
        device_verification.write_passed({}, ["gelu"])
    assert device_verification.read_passed({}) == set()
    assert caplog.messages[1:] == [
        "what was verified is not remembered: the user has no home folder"
    ]


def test_a_warm_up_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    double = torch.compile(lambda x: 2 * x, backend="eager")
    with caplog.at_level(logging.INFO):
        for step in range(2):
            with reporting_compilation(f"step {step}"):
                double(torch.ones(3))
    (message,) = (message for message in caplog.messages if "warm-up" in message)
    assert message.startswith("step 0: warm-up of ") and "1 graphs were compiled" in message

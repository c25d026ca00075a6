"""A checkpoint signed by OpenSSH, as docs/security.md has it: any change is found."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from opensora_sp.checkpoint import verify
from opensora_sp.checkpoint.checkpoint_folder import CheckpointFolder, DamagedCheckpointError
from opensora_sp.checkpoint.paths import checkpoint_name
from opensora_sp.checkpoint.writer import Part, SaveJob, Saver

pytestmark = pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="no OpenSSH")


def keygen(*arguments: str | Path, stdin: Path | None = None) -> int:
    command = ["ssh-keygen", *map(str, arguments)]
    text = stdin.read_bytes() if stdin else b""
    return subprocess.run(command, input=text, capture_output=True).returncode


def save(run_dir: Path, value: float) -> Path:
    folder = CheckpointFolder(run_dir / checkpoint_name(1), {"state.json": b"{}\n"})
    parts = {"weight": Part.whole(torch.full((4,), value))}
    Saver().save(SaveJob(folder, {"model/model.safetensors": parts}))
    return folder.final


def is_signed(folder: Path, signers: Path) -> bool:
    manifest = folder / "manifest.json"
    who = ("-I", "team", "-n", "opensora_sp")
    signature = ("-s", folder / "manifest.json.sig")
    return not keygen("-Y", "verify", "-f", signers, *who, *signature, stdin=manifest)


def test_a_signature_covers_every_byte(tmp_path: Path) -> None:
    key, signers = tmp_path / "key", tmp_path / "signers"
    assert keygen("-q", "-t", "ed25519", "-N", "", "-f", key) == 0
    signers.write_text(f"team {key.with_suffix('.pub').read_text()}")
    folder, forged = save(tmp_path / "run", 1.0), save(tmp_path / "forged", 2.0)
    assert keygen("-Y", "sign", "-f", key, "-n", "opensora_sp", folder / "manifest.json") == 0

    assert is_signed(folder, signers)
    verify(folder)

    # Other weights with the signature of the old ones.
    shutil.copytree(folder, tmp_path / "weights")
    shutil.copy(forged / "model/model.safetensors", tmp_path / "weights/model/model.safetensors")
    with pytest.raises(DamagedCheckpointError, match="model.safetensors"):
        verify(tmp_path / "weights")

    # With digests of their own, too.
    shutil.copy(folder / "manifest.json.sig", forged / "manifest.json.sig")
    verify(forged)
    assert not is_signed(forged, signers)

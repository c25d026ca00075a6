"""What works without ColossalAI, and the sentence of what needs it."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from hidden import environment_without
from runs import TRAIN

from opensora_sp.common import importing as extras
from opensora_sp.common.importing import PackageError, check_colossalai

INSTALL = "pip install --no-deps colossalai==0.5.0 && pip install 'opensora-sp[colossalai-runtime]'"
# An empty manifest: it is not read.
COMMANDS = """
import sys
from opensora_sp.cli import main
model, folder = sys.argv[1:]
main(["plan", f"{folder}/train.py", "--gpus", "2"])
main(["sample", f"{model}/sample.py", "--ckpt", model, "--prompt", "a dog", "--cfg-options",
      f"outputs={folder}/out"])
import opensora_sp.features.cache_writer
assert "opensora_sp.plugin" not in sys.modules
try:
    import opensora_sp.plugin
except ImportError as error:
    sentence = str(error)
from opensora_sp.runtime.doctor import diagnosis
facts = dict.fromkeys((*diagnosis.PACKAGES, "opensora-sp", "torch", "CUDA of torch"), "")
statuses = {check.name: check.status for check in diagnosis._software(facts)}
assert statuses["ColossalAI"] == "warn"
print(sentence)
main(["train", f"{folder}/train.py"])
"""


def test_commands_work_and_training_is_refused(trained: Path, tmp_path: Path) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "train.py").write_text(TRAIN.format(manifest=str(tmp_path / "clips.csv")))
    done = subprocess.run(
        [sys.executable, "-c", COMMANDS, str(trained), str(tmp_path)],
        env=environment_without(["colossalai"], tmp_path / "site"),
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    sentence = (
        "got ColossalAI not installed; expected 0.5.0, which training and SequenceParallelPlugin "
        f"need; {INSTALL}"
    )
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr and done.stderr.endswith(f"error: {sentence}\n")
    assert done.stdout.endswith(f"{sentence}\n") and list((tmp_path / "out").glob("*.mp4"))


@pytest.mark.parametrize("version", ["0.4.9", "0.5.1", "0.5.0", "0.5.0+cu130"])
def test_other_versions_are_refused(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: version)
    if version.startswith("0.5.0"):
        check_colossalai()
        return
    with pytest.raises(PackageError, match=f"got ColossalAI {version}; expected 0.5.0") as error:
        check_colossalai()
    assert INSTALL in str(error.value) and isinstance(error.value, ImportError | ValueError)
    assert extras.COLOSSALAI == "0.5.0"

"""Sequence parallelism with torch and einops alone, and runs without ColossalAI."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from hidden import all_modules_but, environment_without
from ranks import free_port
from runs import BIN, ROOT, write_training

pytestmark = pytest.mark.slow
# The model of docs/custom_model.md, its plan, and a step that is verified.
EXAMPLE = re.findall(r"```python\n(.*?)```", (ROOT / "docs/custom_model.md").read_text(), re.S)[:3]
RANK = """
import sys
import torch.distributed as dist
store, rank, *blocks = sys.argv[1:]
dist.init_process_group("gloo", f"file://{store}", rank=int(rank), world_size=2)
for block in blocks:
    exec(block)
assert all(weight.grad is not None for weight in model.parameters())
third_party = {"numpy", "safetensors", "pydantic", "colossalai", "diffusers", "transformers"}
assert not third_party & set(sys.modules)
from opensora_sp.parallel import shutdown_process_group
shutdown_process_group()
print("verified")
"""


@pytest.mark.parametrize("is_right", [True, False])
def test_another_project_s_model_is_verified_with_torch_and_einops(
    is_right: bool, tmp_path: Path
) -> None:
    blocks = EXAMPLE
    if not is_right:
        # Frames are where patches are said to be.
        blocks = [text.replace('"blocks.1", "blocks.3"', '"blocks.1"') for text in EXAMPLE]
        blocks = [
            text.replace('"blocks.0", "blocks.2"', '"blocks.0", "blocks.3", "blocks.2"')
            for text in blocks
        ]
        assert blocks != EXAMPLE
    hidden = all_modules_but("torch", "einops")
    assert {"numpy", "safetensors", "pytest"} <= hidden and not {"torch", "einops"} & hidden
    (tmp_path / "site").mkdir()
    environment = environment_without(hidden, tmp_path / "site")
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(tmp_path / "store"), str(rank), *blocks],
            env=environment,
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for process in ranks:
        printed, errors = process.communicate(timeout=300)
        assert (process.returncode == 0) is is_right, errors
        assert (printed == "verified\n") is is_right
        assert is_right or "ValueError: got" in errors, errors


def torchrun(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """A command on two ranks without ColossalAI."""
    (folder / "site").mkdir(exist_ok=True)
    start = [BIN / "torchrun", "--nproc_per_node", "2", "--master_port", str(free_port())]
    return subprocess.run(
        [*map(str, start), "-m", "opensora_sp.cli", *command],
        env=environment_without(["colossalai"], folder / "site"),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_runs_of_two_ranks_without_colossalai(trained: Path, tmp_path: Path) -> None:
    config = str(write_training(tmp_path / "clips", 4))
    sample = (str(trained / "sample.py"), "--ckpt", str(trained), "--prompt", "a dog")
    for command in (
        ("sample", *sample, "--cfg-options", "outputs=out"),
        ("precompute", config, "-o", "cache"),
        ("verify", config),
    ):
        if command[0] == "verify":
            done = subprocess.run(
                [sys.executable, "-m", "opensora_sp.cli", *command],
                env=environment_without(["colossalai"], tmp_path / "site"),
                cwd=tmp_path,
                capture_output=True,
                text=True,
            )
        else:
            done = torchrun(tmp_path, *command)
        assert done.returncode == 0, done.stderr
    assert list((tmp_path / "out").glob("*.mp4")) and (tmp_path / "cache" / "index.json").exists()

    done = torchrun(tmp_path, "train", config)
    assert done.returncode != 0 and not (tmp_path / "outputs").exists()
    sentence = "got ColossalAI not installed; expected 0.5.0, which training and"
    printed = [line for line in done.stderr.splitlines() if line.startswith("error")]
    assert len(printed) == 1 and sentence in printed[0], done.stderr
    # torchrun prints a traceback of its own.
    assert "/opensora_sp/" not in done.stderr

"""Sequence parallelism with torch and einops alone."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from hidden import all_modules_but, environment_without
from runs import ROOT

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


def test_another_project_s_model_is_verified_with_torch_and_einops(tmp_path: Path) -> None:
    hidden = all_modules_but("torch", "einops")
    assert {"numpy", "safetensors", "pytest"} <= hidden and not {"torch", "einops"} & hidden
    (tmp_path / "site").mkdir()
    environment = environment_without(hidden, tmp_path / "site")
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(tmp_path / "store"), str(rank), *EXAMPLE],
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
        assert process.returncode == 0 and printed == "verified\n", errors

"""The page's training of a LoRA adapter on Wan: ranks, resume, and the adapter's file."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from diffusers import WanTransformer3DModel
from full_attention_models import wan, wan_pipeline
from peft import get_peft_model_state_dict
from random_weights import draw_weights
from runs import run_forked
from safetensors.torch import load_file, save_file

PAGE = Path(__file__).parents[2] / "docs" / "full_attention.md"


def write_program(folder: Path, steps: int) -> Path:
    """The page's program with a tiny Wan, in fp32."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    (program,) = [block for block in blocks if "Booster" in block]
    assert len(program.splitlines()) <= 80
    for old, new in [
        ('"Wan2.1-T2V-14B-Diffusers"', repr(str(folder.parent / "base"))),
        ('Path("clips")', f"Path({str(folder.parent / 'clips')!r})"),
        ('Path("checkpoint")', f"Path({str(folder / 'checkpoint')!r})"),
        ('"adapter"', repr(str(folder / "adapter"))),
        ("STEPS = 1000", f"STEPS = {steps}"),
        ('precision="bf16"', 'precision="fp32"'),
        ("AdamW(adapter, lr=1e-4)", "SGD(adapter, lr=0.5, momentum=0.9)"),
    ]:
        assert program.count(old) == 1, old
        program = program.replace(old, new)
    folder.mkdir(exist_ok=True)
    (folder / "train_wan.py").write_text(program)
    return folder / "train_wan.py"


def losses_of(program: Path, ranks: int) -> dict[int, float]:
    done = run_forked(program, ranks=ranks)
    assert done.returncode == 0, done.stderr[-3000:]
    return {int(n): float(loss) for n, loss in re.findall(r"step (\d+): loss (\S+)", done.stdout)}


@pytest.mark.slow
def test_the_adapter_is_the_same_on_any_number_of_ranks(tmp_path: Path) -> None:
    model, _ = wan(heads=5)
    draw_weights(model)
    model.save_pretrained(tmp_path / "base" / "transformer")
    (tmp_path / "clips").mkdir()
    for seed, frames in enumerate((3, 1)):
        torch.manual_seed(seed)
        clip = {"latents": torch.randn(4, frames, 6, 10), "text": torch.randn(5, 6)}
        save_file(clip, tmp_path / "clips" / f"{seed}.safetensors")

    expected = losses_of(write_program(tmp_path / "one", 4), 1)
    assert list(expected) == [1, 2, 3, 4] and len(set(expected.values())) == 4
    file = "pytorch_lora_weights.safetensors"
    adapter = load_file(tmp_path / "one" / "adapter" / file)
    for ranks in (2, 3):
        folder = tmp_path / str(ranks)
        losses = losses_of(write_program(folder, 2), ranks)
        # On another number of ranks.
        losses |= losses_of(write_program(folder, 4), 5 - ranks)
        assert losses == pytest.approx(expected, rel=1e-5)
        for name, tensor in load_file(folder / "adapter" / file).items():
            torch.testing.assert_close(tensor, adapter[name], rtol=1e-4, atol=1e-6)

    # Bit by bit on the same number of ranks.
    for name, parts in (("whole", [4]), ("resumed", [2, 4])):
        for steps in parts:
            losses_of(write_program(tmp_path / name, steps), 2)
    resumed = load_file(tmp_path / "resumed" / "adapter" / file)
    for name, tensor in load_file(tmp_path / "whole" / "adapter" / file).items():
        assert torch.equal(tensor, resumed[name]), name

    model.load_lora_adapter(tmp_path / "3" / "adapter", weight_name=file)
    assert any("lora" in name for name, _ in model.named_parameters())

    pipe = wan_pipeline(WanTransformer3DModel.from_pretrained(tmp_path / "base" / "transformer"))
    pipe.load_lora_weights(tmp_path / "3" / "adapter", weight_name=file)
    loaded = get_peft_model_state_dict(pipe.transformer, adapter_name="default_0")
    assert loaded.keys() == {name.removeprefix("transformer.") for name in adapter}

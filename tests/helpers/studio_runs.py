"""Files of runs that the studio shows, as a training on two ranks writes them."""

from __future__ import annotations

from pathlib import Path

from opensora_sp.training.metrics import RANKS, append_line


def write_run(folder: Path, steps: int = 3) -> Path:
    """A run that has logged some steps, and one validation, and still trains."""
    folder.mkdir(parents=True)
    (folder / "run.lock").touch()
    (folder / "config.py").write_text(f"name = {folder.name!r}\noptimizer = {{'lr': 0.1}}\n")
    session = dict(step=0, stop=steps, model="STDiT3", parameters=1, precision="fp32", dp_size=1)
    session |= dict(sp_size=2, device="cpu", peak_tflops=None)
    append_line(folder / "sessions.jsonl", session)
    for step in range(1, steps + 1):
        log_step(folder, step)
    append_line(folder / "validation.jsonl", dict(step=steps, loss=0.5, loss_by_bin=[0.4, 0.6]))
    return folder


def log_step(folder: Path, step: int, step_time: float = 0.1) -> None:
    """One more step."""
    line = dict(step=step, loss=1 / step, tokens_per_s=100.0, peak_memory_gb=1.0, eta=1.0)
    append_line(folder / "metrics.jsonl", line | {"step_time": step_time})
    waits = dict(data_wait=[0.0, 0.1], communication=[0.2, 0.3], peak_memory_gb=[1.0, 0.9])
    append_line(folder / RANKS, dict(step=step, **waits))

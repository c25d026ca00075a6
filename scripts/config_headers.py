"""Predicted memory, step time and MFU in the docstrings of the training configs.

    python scripts/config_headers.py          # rewrite the configs
    python scripts/config_headers.py --check  # fail if one is out of date

They are for 8 GPUs of each kind in ``opensora_sp.parallel.cost_model``, and those of LoRA for one
GPU with the memory in the config's name. A config with buckets has none: ``opensora-sp plan``
prints a line for each bucket.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from opensora_sp.config import TrainConfig, load_train_config
from opensora_sp.parallel.cost_model import GPUS
from opensora_sp.planner import plan

ROOT = Path(__file__).parent.parent
CONFIGS = ROOT / "configs" / "stdit3" / "train"
NUM_GPUS = 8
MARK = "Predicted with Triton kernels, without the encoders"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="change nothing")
    args = parser.parse_args()

    outdated = []
    for path in sorted(CONFIGS.glob("*.py")):
        source = path.read_text()
        updated = with_header(source, path)
        if updated != source:
            outdated.append(path.name)
        if not args.check:
            path.write_text(updated)
    if args.check and outdated:
        sys.exit(f"got old predictions in {', '.join(outdated)}; run scripts/config_headers.py")


def with_header(source: str, path: Path) -> str:
    """The config's source with predictions of today at the end of its docstring."""
    lines = predictions(path)
    if not lines:
        return source
    # As it stands in the source, where escaped line ends are two characters.
    text = source.partition('"""')[2].partition('"""')[0]
    own = text.partition(f"\n\n{MARK}")[0].rstrip()
    header = f"{own}\n\n{MARK}:\n" + "".join(f"    {line}\n" for line in lines)
    return source.replace(f'"""{text}"""', f'"""{header}"""', 1)


def predictions(path: Path) -> list[str]:
    """A line for each GPU; none for a config with buckets."""
    cfg = load_train_config(path)
    if cfg.bucket_config is not None:
        return []
    if cfg.lora is not None:
        return [one_gpu(cfg, path.stem)]

    lines = []
    for name in GPUS:
        (bucket,) = plan(cfg, NUM_GPUS, gpu=name).buckets
        assert bucket.time is not None
        lines.append(
            f"{NUM_GPUS} x {name}: {bucket.memory.configured.total / 1e9:.1f} GB, "
            f"{bucket.time.seconds:.2f} s a step, MFU {bucket.time.mfu:.0%}"
        )
    return lines


def one_gpu(cfg: TrainConfig, name: str) -> str:
    """The line of a config ``..._<GB>gb``, with the step time of a GPU that has as much."""
    found = re.search(r"_(\d+)gb$", name)
    if found is None:
        raise ValueError(
            f"got the LoRA config {name!r}; expected the memory of its GPU at the end of the name; "
            "rename it, for example to lora_24gb.py"
        )
    memory = int(found[1])
    known = next((name for name, one in GPUS.items() if one.memory // 1e9 == memory), None)
    (bucket,) = plan(cfg, 1, gpu=known, memory_gb=memory).buckets
    line = f"1 GPU of {memory} GB: {bucket.memory.configured.total / 1e9:.1f} GB"
    if bucket.time is None:
        return line
    return f"{line}, {bucket.time.seconds:.1f} s a step on {known}, MFU {bucket.time.mfu:.0%}"


if __name__ == "__main__":
    main()

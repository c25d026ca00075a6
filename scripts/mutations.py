"""Show that the fast tier of the tests catches faults that would make training silently wrong.

    python scripts/mutations.py                  all of them, minutes
    python scripts/mutations.py COMMIT clipping  mutations whose names have one of these words

Each fault is a replacement of text in a copy of the tree, in which pytest runs the tests named for
it. None of these is slow. The exit status is 1 if a fault is not caught, or if its text is no
longer there: then adapt the mutation to the code.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
COPIED = ("opensora_sp", "tests", "scripts", "configs", "benchmarks", "pyproject.toml", "README.md")
FAST = "not slow and not grid"
AT_ONCE = 2


@dataclass(frozen=True)
class Mutation:
    """A fault: ``old``, which occurs once in the file, becomes ``new``; ``tests`` must fail."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def text_in(self, tree: Path) -> str:
        """The file with the fault.

        Raises:
            ValueError: if the text to replace does not occur exactly once.
        """
        path = tree / self.file
        text = path.read_text() if path.is_file() else ""
        if text.count(self.old) != 1:
            raise ValueError(
                f"{self.name}: got {text.count(self.old)} occurrences of {self.old!r} in "
                f"{self.file}; expected one; adapt the mutation to the code"
            )
        return text.replace(self.old, self.new)


MUTATIONS = [
    Mutation(
        "a wrong adjoint of the gather",
        "opensora_sp/parallel/collectives.py",
        "parts.unflatten(0, (len(local_sizes), local_sizes[0])).sum(0)",
        "parts.unflatten(0, (len(local_sizes), local_sizes[0])).mean(0)",
        ("tests/distributed/test_sp_parity.py",),
    ),
    Mutation(
        "swapped send and receive splits",
        "opensora_sp/parallel/collectives.py",
        "dist.all_to_all_single(out, x, recv, send, group=group)\n    return",
        "dist.all_to_all_single(out, x, send, recv, group=group)\n    return",
        ("tests/distributed/test_sp_parity.py",),
    ),
    Mutation(
        "a layout cut off by one",
        "opensora_sp/parallel/layout.py",
        "return torch.bucketize(positions, stops, right=True)",
        "return torch.bucketize(positions, stops, right=False)",
        ("tests/unit/test_layout.py",),
    ),
    Mutation(
        "temporal rows with spatial positions",
        "opensora_sp/models/positions.py",
        "return position_angles(rows.frames(device), self.freqs)",
        "return position_angles(rows.patches(device), self.freqs)",
        ("tests/unit/test_golden_models.py",),
    ),
    Mutation(
        "a loss divided by the padded size",
        "opensora_sp/diffusion/loss.py",
        "count = mask.flatten(1).sum(1) * (math.prod(size) // mask[0].numel())",
        "count = torch.full((num_samples,), math.prod(size), device=tensors[0].device)",
        ("tests/unit/test_golden_rflow.py",),
    ),
    Mutation(
        "a dropped RNG key (step)",
        "opensora_sp/features/batch.py",
        "keys = [(micro_batch.number, sample) for sample in micro_batch.ids]",
        "keys = [(0, sample) for sample in micro_batch.ids]",
        ("tests/unit/test_frame_masks.py",),
    ),
    Mutation(
        "EMA from working weights",
        "opensora_sp/training/trainable.py",
        "average.lerp_(buffer, ",
        "average.lerp_(buffer.bfloat16().float(), ",
        ("tests/unit/test_ema.py",),
    ),
    Mutation(
        "clipping by the local norm",
        "opensora_sp/plugin/zero_optimizer.py",
        "        dist.all_reduce(squares)\n",
        "",
        ("tests/distributed/test_optimizer_step.py",),
    ),
    Mutation(
        "a checkpoint without COMMIT accepted",
        "opensora_sp/checkpoint/paths.py",
        "sorted(filter(is_committed, named)",
        "sorted(filter(Path.is_dir, named)",
        ("tests/distributed/test_storage.py",),
    ),
    Mutation(
        "a caption's mask ignored",
        "opensora_sp/models/base.py",
        "packed, lengths = self.y_embedder.pack(y, mask, drop)",
        "packed, lengths = self.y_embedder.pack(y, None, drop)",
        ("tests/unit/test_golden_models.py",),
    ),
    Mutation(
        "the gather's factor in nested groups",
        "opensora_sp/parallel/collectives.py",
        "parts.unflatten(0, (len(local_sizes), local_sizes[0])).sum(0)",
        "parts.unflatten(0, (len(local_sizes), local_sizes[0])).sum(0)"
        " * len(local_sizes) / dist.get_world_size()",
        ("tests/distributed/test_nested_groups.py",),
    ),
    Mutation(
        "a held-out loss of one group",
        "opensora_sp/evaluation/heldout.py",
        "dist.all_reduce(sums)",
        "self.mesh.sp_group and dist.all_reduce(sums, group=self.mesh.sp_group)",
        (
            "tests/distributed/test_validation.py"
            "::test_heldout_losses_do_not_depend_on_batch_size_and_ranks",
        ),
    ),
    Mutation(
        "null frames off by one after the first rank",
        "opensora_sp/models/conditions.py",
        "torch.isin(rows.frames(device), numbers)",
        "torch.isin(rows.frames(device) + min(rows.start, 1), numbers)",
        ("tests/distributed/test_sp_windows.py::test_output_and_every_gradient_equal_one_process",),
    ),
    Mutation(
        "an EMA averaged twice under accumulation",
        "opensora_sp/training/step.py",
        "self.tensors.ema.update(step, taken)",
        "for _ in range(min(self.cfg.accumulation_steps, 2)):\n"
        "            self.tensors.ema.update(step, taken)",
        ("tests/distributed/test_accumulation.py::test_ema_weights_are_averaged_once_a_step",),
    ),
    Mutation(
        "a kernel's entry off by one where a rank begins inside of a sample",
        "opensora_sp/models/kernels/triton/modulation_kernels.py",
        "return entry.to(tl.int64), row,",
        "return tl.maximum(entry - tl.minimum(first, 1), 0).to(tl.int64), row,",
        ("tests/unit/test_modulation_kernels.py::test_values_and_gradients",),
    ),
    Mutation(
        "a scale of LoRA that backward ignores",
        "opensora_sp/models/adapted_linear.py",
        "down = self.scaling[name] * F.linear(x, columns)",
        "down = F.linear(x, columns)\n"
        "        down = down + (self.scaling[name] - 1) * down.detach()",
        ("tests/unit/test_adapters.py::test_no_linear_layer_leaves_its_adapter_out",),
    ),
    Mutation(
        "dropout of adapters that differs between ranks",
        "opensora_sp/training/trainable.py",
        'generator(self.seed, "lora_dropout", micro_batch)',
        'generator(self.seed, "lora_dropout", micro_batch, dist.get_rank())',
        ("tests/distributed/test_lora.py::test_gradients_of_adapters_are_those_of_one_process",),
    ),
    Mutation(
        "true latents replaced after the first rank",
        "opensora_sp/features/sharded.py",
        "latents[numbers] = torch.cat([payload.latents for payload in received])",
        "latents[numbers] = torch.cat([payload.latents for payload in received])\n"
        "        if self.mesh.sp_rank:\n"
        "            channels = self.source.channels\n"
        "            latents[:, -channels:] = latents[:, :channels]",
        (
            "tests/distributed/test_sharded_features.py::test_degraded_clips_are_those_of_one_process",
        ),
    ),
    Mutation(
        "a list of cached steps that is off by one",
        "opensora_sp/diffusion/cached_steps.py",
        "not self.computed[self.step] and fits",
        "not self.computed[self.step - 1] and fits",
        ("tests/unit/test_cached_steps.py",),
    ),
    Mutation(
        "the wrong half outside of the guidance interval",
        "opensora_sp/diffusion/guidance.py",
        "argument.of_samples(range(count))",
        "argument.of_samples(range(count, 2 * count))",
        ("tests/unit/test_cached_steps.py",),
    ),
]


def copy_tree(tree: Path) -> None:
    """Copy the files that tests need, with what Python has compiled of them."""
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, tree / name)
        else:
            shutil.copy(ROOT / name, tree / name)


def first_failure(tree: Path, tests: tuple[str, ...]) -> str | None:
    """The first of these tests that fails, None if all pass."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", FAST, *tests],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    failure = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", done.stdout, re.M)
    if done.returncode not in (0, 1) or (done.returncode == 1) != bool(failure):
        raise RuntimeError(f"pytest exited with status {done.returncode}:\n{done.stdout[-3000:]}")
    return failure[1] if failure else None


def is_caught(mutation: Mutation) -> bool:
    """Plant one fault in a copy of the tree, and print which test fails."""
    with tempfile.TemporaryDirectory(prefix="mutation-") as folder:
        tree = Path(folder)
        copy_tree(tree)
        (tree / mutation.file).write_text(mutation.text_in(tree))
        failure = first_failure(tree, mutation.tests)
    print(f"{mutation.name}: {f'caught by {failure}' if failure else 'NOT CAUGHT'}", flush=True)
    return failure is not None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("words", nargs="*", help="apply the mutations whose names have one of them")
    words = parser.parse_args().words
    chosen = [m for m in MUTATIONS if not words or any(word in m.name for word in words)]
    if not chosen:
        sys.exit(f"got {words}; expected words of {[m.name for m in MUTATIONS]}; name one of these")

    # Texts that have gone are reported before the minutes that tests take.
    errors = []
    for mutation in chosen:
        try:
            mutation.text_in(ROOT)
        except ValueError as error:
            errors.append(str(error))
    if errors:
        sys.exit("\n".join(errors))

    with ThreadPoolExecutor(AT_ONCE) as pool:
        caught = list(pool.map(is_caught, chosen))
    print(f"{sum(caught)} of {len(caught)} mutations caught")
    sys.exit(0 if all(caught) else 1)


if __name__ == "__main__":
    main()

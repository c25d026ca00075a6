"""A step of training on CUDA's code path hardly ever waits: the host queues work ahead.

Whatever reads a number back from the device, or copies from pageable memory, would hold up the host
until all that is queued is computed.
"""

from collections import Counter
from pathlib import Path

import pytest
from cuda_stub import join, phase, requires_stub, run_on_stub
from mixed_clips import BUCKETS, write_mixed_set
from mixed_clips import TRAIN as TRAIN_MIXED
from runs import TRAIN, write_toy_set

from opensora_sp.config import load_train_config

pytestmark = [requires_stub, pytest.mark.slow]

# Nothing is logged or saved meanwhile.
QUIET = ["max_steps=8", "ckpt_every=100", "log_every=100", "num_workers=0"]
# Values on the stub are none: nothing could be verified.
QUIET += ["kernels=torch"]
# Steps before have allocated memory, and tables of each shape.
STEADY = (5, 6)


def on_training(config, *options):
    from opensora_sp.plugin import current_device
    from opensora_sp.training.preflight import preflight
    from opensora_sp.training.step import PendingResult, StepResult
    from opensora_sp.training.trainer import Trainer

    join(world=2)
    cfg = load_train_config(config, [*QUIET, *options])
    run = Trainer(cfg, *preflight(cfg, None, None), current_device())
    read = PendingResult.read

    def read_and_forget(self):
        read(self)
        # What the loop decides by numbers that were never computed.
        return StepResult(self.step, 1.0, taken=True, stop=False)

    PendingResult.read = read_and_forget
    name_phases(run)
    # The checkpoint's content would be garbage.
    run.checkpoints.save = lambda *args, **options: None
    Path(cfg.outputs).mkdir(parents=True)
    return run.train(Path(cfg.outputs))


def name_phases(run):
    """Phases "5 forward" and "5 backward" of step 5, and "5" from there to the next step."""
    one_step, forward, backward = run.step.run, run.model.forward, run.booster.backward
    now = ""

    def step(number, *args):
        nonlocal now
        now = str(number)
        phase(now)
        return one_step(number, *args)

    def in_phase(name, function):
        def call(*args, **kwargs):
            with phase(f"{now} {name}"):
                return function(*args, **kwargs)

        return call

    run.step.run = step
    run.model.forward = in_phase("forward", forward)
    run.booster.backward = in_phase("backward", backward)


def waits(recording, *phases):
    """Where the host waited for the device in these phases, and how often."""
    syncs = [sync for name in phases for sync in recording.in_phase(name).syncs]
    return Counter(sync.where for sync in syncs)


SETTINGS = {
    "one micro-batch": ("single", ["precision=bf16", "micro_batches_per_step=1"]),
    "inputs on the host": ("single", ["precision=bf16", "grad_checkpoint='offload'"]),
    "buckets, masks and packed text": (
        "mixed",
        ["precision=bf16", "sp_size=2", "model.patch_size=(2, 2, 2)"],
    ),
}


def write_config(kind, folder):
    folder.mkdir()
    if kind == "single":
        text = TRAIN.format(manifest=str(write_toy_set(folder / "clips", 12)))
    else:
        text = TRAIN_MIXED.format(buckets=BUCKETS, manifest=str(write_mixed_set(folder)), steps=8)
    (folder / "train.py").write_text(text + f'outputs = "{folder}/out"\n')
    return str(folder / "train.py")


@pytest.mark.parametrize("setting", SETTINGS)
def test_the_host_waits_at_most_twice_a_step(tmp_path, setting):
    kind, options = SETTINGS[setting]
    ranks = dict(WORLD_SIZE="2", RANK="0", LOCAL_RANK="0")
    ranks |= dict(MASTER_ADDR="localhost", MASTER_PORT="1")
    config = write_config(kind, tmp_path / "set")
    recording = run_on_stub(on_training, config, *options, env=ranks)
    assert recording.result is True

    for step in STEADY:
        forward, backward = f"{step} forward", f"{step} backward"
        inside = waits(recording, forward, backward)
        assert not inside, inside
        total = waits(recording, str(step), forward, backward)
        assert total.total() <= 2, total


def on_finite_check():
    import torch

    from opensora_sp.checkpoint.writer import all_finite

    shards = [torch.zeros(1000 + number, device="cuda") for number in range(300)]
    all_finite(shards)  # which loads the kernels
    phase("check")
    all_finite(shards)
    phase("end")


def test_the_finite_check_of_a_save_is_a_few_kernels_and_one_wait():
    check = run_on_stub(on_finite_check).in_phase("check")
    assert len(check.syncs) == 1, check.syncs
    # 300 tensors are in few pieces, each of two kernels.
    assert 4 <= len(check.launches) <= 20, len(check.launches)

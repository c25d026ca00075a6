"""The plugin, a training run, sampling and decoding on CUDA's code path.

The bounds are what was measured. A change may lower them, and says why where it raises one.
"""

import contextlib
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from cuda_cases import batch, build
from cuda_stub import join, phase, requires_stub, run_on_stub
from golden_vae import load, saved_pipeline
from runs import SAMPLE, TRAIN, write_toy_set

from opensora_sp.config import load_inference_config, load_train_config
from opensora_sp.encoders import HashedBagOfWords, OpenSoraVAE, PatchPoolVAE
from opensora_sp.models import build_model
from opensora_sp.parallel import SequenceMesh, parallelize
from opensora_sp.sampling.decoding import collected, decode
from opensora_sp.sampling.pipeline import Pipeline
from opensora_sp.sampling.requests import requests_of

pytestmark = requires_stub


def sent(recording, group="device"):
    """How many collectives of each kind a group carried."""
    return Counter(one.name for one in recording.collectives if one.group == group)


def on_plugin(stage, overlap):
    from opensora_sp.plugin import SequenceParallelPlugin
    from opensora_sp.plugin._colossalai import Booster

    join(world=8, rank=3)
    model = build("STDiT3", hidden_size=192, num_heads=8, checkpoint=True).float()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
    plugin = SequenceParallelPlugin(
        sp_size=4, stage=stage, precision="bf16", max_norm=1.0, overlap_communication=overlap
    )
    boosted, optimizer, *_ = Booster(plugin=plugin).boost(model, optimizer)
    inputs = batch("STDiT3", model, samples=1)

    for name in ("first ", ""):
        phase(f"{name}forward")
        loss = boosted(**inputs, output="shards").tensor.float().square().mean()
        phase(f"{name}backward")
        optimizer.backward(loss)
        phase(f"{name}step")
        optimizer.step_if_finite(loss.detach())
        phase(f"{name}end")


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("overlap", [False, True], ids=["", "overlap"])
def test_a_step_of_the_plugin(stage, overlap):
    recording = run_on_stub(on_plugin, stage, overlap)
    forward, backward, step = map(recording.in_phase, ("forward", "backward", "step"))
    assert not recording.refused

    # Gradients of all ranks are summed while (or after) the switches of the backward pass are sent.
    assert sent(forward) == {"all_to_all_single": 3}
    reduction = {1: "all_reduce", 2: "reduce_scatter_tensor"}[stage]
    assert sent(backward) == {"all_to_all_single": 3, reduction: 1}
    (reduced,) = [one for one in backward.collectives if one.name == reduction]
    assert len(reduced.ranks) == 8
    # The gradients' norm, then the updated weights of all ranks.
    assert sent(step) == {"all_reduce": 1, "all_gather_into_tensor": 1}
    assert not sent(step, "host") and not sent(backward, "host")

    assert not forward.syncs and not backward.syncs and not step.syncs
    assert len(step.launches) <= 53, len(step.launches)
    assert not [copy for copy in step.copies if copy.blocking]


def on_training(config):
    from opensora_sp.plugin import current_device
    from opensora_sp.training.preflight import preflight
    from opensora_sp.training.step import PendingResult
    from opensora_sp.training.trainer import Trainer

    join(world=2)
    options = ["precision=bf16", "max_steps=3", "ckpt_every=100", "num_workers=0", "log_every=1"]
    # Values on the stub are none: nothing could be verified.
    options += ["kernels=torch"]
    cfg = load_train_config(config, options)
    run = Trainer(cfg, *preflight(cfg, None, None), current_device())
    one_step, read = run.step.run, PendingResult.read

    def step(number, *args):
        phase(f"step {number}")
        pending = one_step(number, *args)
        phase(f"after {number}")
        return pending

    # What the loop decides by numbers that were never computed.
    PendingResult.read = lambda pending: replace(read(pending), loss=1.0, taken=True, stop=False)
    # The checkpoint's content would be garbage.
    run.step.run, run.checkpoints.save = step, lambda *args, **options: None
    Path(cfg.outputs).mkdir(parents=True)
    return run.train(Path(cfg.outputs))


def test_three_steps_of_training(tmp_path):
    manifest = write_toy_set(tmp_path / "clips", 12)
    config = tmp_path / "train.py"
    config.write_text(TRAIN.format(manifest=str(manifest)) + f'outputs = "{tmp_path}/out"\n')
    ranks = dict(WORLD_SIZE="2", RANK="0", LOCAL_RANK="0")
    ranks |= dict(MASTER_ADDR="localhost", MASTER_PORT="1")

    recording = run_on_stub(on_training, str(config), env=ranks)
    assert recording.result is True
    assert not recording.refused

    for number in range(3):
        step, after = recording.in_phase(f"step {number}"), recording.in_phase(f"after {number}")
        # Two micro-batches: the latents' exchange and the switches of both, their gradients, the
        # loss and the gradients' norm, the weights.
        assert sent(step) == {
            "all_to_all_single": 14,
            "reduce_scatter_tensor": 2,
            "all_reduce": 2,
            "all_gather_into_tensor": 1,
        }
        assert sent(step, "host") == {"all_reduce": 4}
        assert len(step.launches) <= (3454 if number == 0 else 3280), len(step.launches)
        assert not step.syncs, Counter(s.where for s in step.syncs)
        # The outcome, and the numbers of a line of the log.
        assert len(after.syncs) <= 6, Counter(s.where for s in after.syncs)


def on_sampling(folder):
    join(world=4, rank=1)
    cfg = load_inference_config(Path(folder) / "sample.py", ["precision=bf16", "num_frames=5"])
    options = dict(cfg.model)
    model = build_model(options.pop("type"), **options).requires_grad_(False).eval()
    mesh, device = SequenceMesh(4), torch.device("cuda")
    parallelize(model.to(device, torch.bfloat16), mesh)
    vae, text = PatchPoolVAE((1, 4, 4)).to(device), HashedBagOfWords(8, 12).to(device)
    pipeline = Pipeline(cfg, model, vae, text, device)

    steps = []

    def on_step():
        steps.append(len(steps) + 1)
        phase(f"after step {steps[-1]}")

    phase("sample")
    # Latents that were never computed may be refused as not finite.
    with contextlib.suppress(ValueError):
        pipeline.latents(requests_of(cfg, ["a red circle", "white", "blue"]), on_step=on_step)

    phase("decode")
    latents = torch.zeros(1, 3, *vae.latent_size(5, 28, 24), device=device)
    frames = decode(vae, [latents], num_frames=5, size=(28, 24), mesh=mesh, overlap=0)
    videos = collected(frames, 1)
    phase("end")
    return len(steps), [video.shape for video in videos]


def test_sampling_with_guidance(tmp_path):
    (tmp_path / "sample.py").write_text(SAMPLE)
    recording = run_on_stub(on_sampling, str(tmp_path))
    # Rank 0 writes the video.
    assert recording.result == (4, [(0, 0, 0, 3)])
    assert not recording.refused

    # Three prompts with and without guidance on four ranks: three switches and the output's gather.
    for number in (1, 2, 3):
        step = recording.in_phase(f"after step {number}")
        assert sent(step) == {"all_to_all_single": 4}
        assert sent(step, "host") == {"all_reduce": 1}
        assert not step.syncs

    # Frames go to the rank that writes them, on the host.
    decoded = recording.in_phase("decode")
    assert not sent(decoded)
    assert set(sent(decoded, "host")) == {"send"}


def on_decoding(folder):
    vae = OpenSoraVAE(folder, dtype="bf16").to("cuda")
    latents = torch.zeros(1, vae.channels, *vae.latent_size(20, 32, 32), device="cuda")
    phase("decode")
    video = vae.decode(latents, num_frames=20)
    phase("encode")
    vae.encode(video)
    phase("end")
    return tuple(video.shape)


def test_decoding_and_encoding_with_convolutions(tmp_path):
    about, tensors = load("pipeline/chunked")
    folder = saved_pipeline(tmp_path, about, tensors, about["cases"][0])
    recording = run_on_stub(on_decoding, str(folder))
    assert recording.result == (1, 3, 20, 32, 32)
    assert not recording.refused
    bounds = {"decode": (162, 34), "encode": (114, 34)}
    for name, bound in bounds.items():
        part = recording.in_phase(name)
        assert {conv.dtype for conv in part.convolutions} == {"bfloat16"}
        # Frames one by one in 2D, chunks in 3D.
        dims = Counter(len(conv.weight) - 2 for conv in part.convolutions)
        assert 0 < dims[2] <= bound[0] and 0 < dims[3] <= bound[1], dims
        assert not part.syncs

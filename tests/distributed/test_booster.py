"""ColossalAI's Booster contract: every method works on any (dp, sp), or refuses with a reason."""

from __future__ import annotations

import functools
import json
import os
import warnings
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from plugin_cases import GLOBAL_BATCH, make_batch, make_model
from ranks import run_ranks
from safetensors.torch import load_file
from worlds import in_worlds

from opensora_sp.diffusion import rank_loss, velocity_loss


def boosted(
    sp_size: int = 1,
    *,
    stage: int = 1,
    precision: str = "fp32",
    lr: float = 1e-3,
    scale: float = 1.0,
    **more,
):
    """A boosted model: two parameter groups, LR schedule, a frozen and an unused parameter."""
    from opensora_sp.plugin import SequenceParallelPlugin
    from opensora_sp.plugin._colossalai import Booster

    plugin = SequenceParallelPlugin(sp_size=sp_size, stage=stage, precision=precision, **more)
    booster = Booster(plugin=plugin)
    torch.manual_seed(0)  # for its buffers
    model = make_model()
    model.unused = torch.nn.Parameter(torch.arange(5.0))
    model.t_block[1].weight.requires_grad_(False)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(scale)
    parameters = list(model.parameters())
    groups = [
        dict(params=parameters[::2], weight_decay=0.1),
        dict(params=parameters[1::2], lr=lr / 2),
    ]
    optimizer = torch.optim.AdamW(groups, lr=lr)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4], gamma=0.5)
    model, optimizer, _, _, schedule = booster.boost(model, optimizer, lr_scheduler=schedule)
    return booster, model, optimizer, schedule


def backward(booster, model, optimizer, micro: dict[str, torch.Tensor]) -> torch.Tensor:
    """Returns this rank's part of each sample's loss."""
    losses = velocity_loss(model(**micro, output="shards"), -micro["x"])
    world = booster.plugin.mesh.world_size
    booster.backward(rank_loss(losses, global_samples=GLOBAL_BATCH, world_size=world), optimizer)
    return losses


def one_step(booster, model, optimizer, step: int, schedule=None) -> float:
    """A step on the global batch of this step; returns its mean loss."""
    mesh, batch = booster.plugin.mesh, make_batch(step)
    mine = slice(mesh.dp_rank, None, mesh.dp_size)
    losses = backward(booster, model, optimizer, {name: batch[name][mine] for name in batch})
    optimizer.step()
    optimizer.zero_grad()
    if schedule is not None:
        schedule.step()
    mean = losses.detach().double().sum() / GLOBAL_BATCH
    dist.all_reduce(mean)
    return mean.item()


def save_everything(root: Path, precision: str) -> None:
    booster, model, optimizer, schedule = boosted(2, stage=2, precision=precision)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # Before the first step there is no state.
        for early, shard in (("early.safetensors", False), ("early", True)):
            booster.save_optimizer(optimizer, str(root / early), shard=shard)
            booster.load_optimizer(optimizer, str(root / early))
            assert not any(optimizer.shards.states().values())
        for step in range(3):
            one_step(booster, model, optimizer, step, schedule)
        for shard in (False, True):
            for use_async in (False, True):
                name = f"{'sharded' if shard else 'whole'}{' async' if use_async else ''}"
                to = [
                    str(root / f"{name} {kind}{'' if shard else '.safetensors'}")
                    for kind in ("model", "optimizer")
                ]
                options = dict(shard=shard, use_async=use_async)
                if shard:
                    options["size_per_shard"] = 0.004  # MB: several files
                booster.save_model(model, to[0], use_safetensors=True, **options)
                booster.save_optimizer(optimizer, to[1], **options)

    booster.save_lr_scheduler(schedule, str(root / "schedule.json"))
    booster.checkpoint_io.wait()
    dist.barrier()
    losses = [one_step(booster, model, optimizer, step, schedule) for step in range(3, 6)]
    if dist.get_rank() == 0:
        (root / "losses.json").write_text(json.dumps(losses))


def load_everything(root: Path, precision: str, sp: int, kind: str) -> None:
    booster, model, optimizer, schedule = boosted(
        sp, stage=1, precision=precision, lr=0.7, scale=-2.0
    )
    one_step(booster, model, optimizer, 9)
    end = ".safetensors" if "whole" in kind else ""
    booster.load_optimizer(optimizer, str(root / f"{kind} optimizer{end}"))
    booster.load_model(model, str(root / f"{kind} model{end}"))
    booster.load_lr_scheduler(schedule, str(root / "schedule.json"))

    assert "unused" in optimizer.shards.working and not optimizer.shards.states()["unused"]
    again = root / f"again {kind} {sp}.safetensors"
    booster.save_optimizer(optimizer, str(again))
    booster.save_model(model, f"{again} model")
    dist.barrier()
    saved, whole = load_file(again), load_file(root / "whole optimizer.safetensors")
    assert saved.keys() == whole.keys() and all(
        torch.equal(saved[name], whole[name]) for name in whole
    )

    saved, whole = load_file(f"{again} model"), load_file(root / "whole model.safetensors")
    assert saved.keys() == whole.keys() and all(
        torch.equal(saved[name], whole[name]) for name in whole
    )
    assert saved["final_layer.linear.weight"].dtype == torch.float32  # the master weights

    losses = [one_step(booster, model, optimizer, step, schedule) for step in range(3, 6)]
    exact = sp == 2
    assert losses == pytest.approx(
        json.loads((root / "losses.json").read_text()), rel=0 if exact else 1e-6
    )
    dist.barrier()


def refusals(root: Path) -> None:
    booster, model, optimizer, _ = boosted(2, stage=2)
    final = model.unwrap().final_layer.linear.weight
    before = final.clone()
    with pytest.raises(ValueError, match="got no_sync at ZeRO stage 2"):
        booster.plugin.no_sync(model, optimizer)
    with pytest.raises(AssertionError, match="does not support no_sync"):
        booster.no_sync(model, optimizer)
    with pytest.raises(ValueError, match="whose name says that it is pickled"):
        booster.save_model(model, str(root / "model.pt"), use_safetensors=True)

    pickled = root / f"foreign{dist.get_rank()}.bin"
    torch.save({name: tensor + 1 for name, tensor in model.unwrap().state_dict().items()}, pickled)
    with pytest.raises(ValueError, match="which is pickled, and a pickle can run code"):
        booster.load_model(model, str(pickled))
    with pytest.raises(ValueError, match="which is no safetensors file"):
        booster.load_optimizer(optimizer, str(pickled))

    by_object = torch.optim.lr_scheduler.LambdaLR(optimizer.optim, functools.partial(float))
    by_object.state_dict = lambda: {"of": object()}
    with pytest.raises(ValueError, match="got a LambdaLR whose state is not JSON"):
        booster.save_lr_scheduler(by_object, str(root / "lambda.json"))
    index = root / "sharded model" / "model.safetensors.index.json"
    harmed = root / f"harmed{dist.get_rank()}"
    harmed.mkdir()
    content = json.loads(index.read_text())
    files = sorted(set(content["weight_map"].values()))
    for name in files:
        os.link(index.parent / name, harmed / name)
    (harmed / files[0]).unlink()
    (harmed / files[0]).write_bytes((index.parent / files[1]).read_bytes())  # a swapped shard
    for name in (index.name, "model.safetensors.index.fp16.json"):
        (harmed / name).write_text(json.dumps(content))
        with pytest.raises(ValueError, match=f"got a damaged checkpoint: .*{files[0]}"):
            booster.load_model(model, str(harmed))
        (harmed / name).unlink()

    content["weight_map"]["final_layer.linear.weight"] = "../schedule.json"
    (harmed / index.name).write_text(json.dumps(content))
    with pytest.raises(ValueError, match="expected files of the same folder"):
        booster.load_model(model, str(harmed))
    assert torch.equal(final, before)  # nothing was changed by any of it

    optimizer.param_groups.reverse()
    with pytest.raises(ValueError, match="other parameter groups in .*of "):
        booster.load_optimizer(optimizer, str(root / "whole optimizer.safetensors"))

    trusting, other, *_ = boosted(2, stage=2, allow_pickle=True)
    trusting.load_model(other, str(pickled))
    assert torch.equal(other.unwrap().final_layer.linear.weight, before + 1)


def lora(root: Path) -> None:
    """Adapters are trained, the base is not; both are saved and loaded, in several precisions."""
    from peft import LoraConfig

    from opensora_sp.plugin import SequenceParallelPlugin
    from opensora_sp.plugin._colossalai import Booster

    saved = {}
    for attempt in range(2):
        plugin = SequenceParallelPlugin(sp_size=2, stage=2, precision="fp32")
        booster = Booster(plugin=plugin)
        torch.manual_seed(0)
        bare = make_model()
        modules = dict(bare.named_modules())
        targets = [name for name in modules if name.endswith(("qkv", "attn.proj"))]
        torch.manual_seed(attempt)
        model = booster.enable_lora(
            bare, lora_config=LoraConfig(r=2, target_modules=targets, init_lora_weights=False)
        )
        trained = [p for p in model.parameters() if p.requires_grad]
        model, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
        assert len(optimizer.shards.master_weights) == len(trained) == 2 * len(targets)
        names = (root / "lora model.safetensors", root / "lora optimizer.safetensors")
        if attempt == 0:
            frozen = {name: p.clone() for name, p in bare.named_parameters() if not p.requires_grad}
            losses = [one_step(booster, model, optimizer, step) for step in range(3)]
            assert len(set(losses)) == 3 and len(frozen) > 40
            parameters = dict(bare.named_parameters())
            assert all(torch.equal(parameters[name], frozen[name]) for name in frozen)
            booster.save_model(model, str(names[0]), use_safetensors=True)
            booster.save_optimizer(optimizer, str(names[1]))
            booster.save_lora_as_pretrained(model, str(root / "adapters"), use_safetensors=True)
            dist.barrier()
            assert (root / "adapters" / "adapter_model.safetensors").is_file()
        else:
            booster.load_model(model, str(names[0]))
            booster.load_optimizer(optimizer, str(names[1]))
        saved[attempt] = [one_step(booster, model, optimizer, step) for step in range(3, 5)]
    assert saved[0] == saved[1]


def contract(root: Path) -> None:
    for precision in ("fp32", "bf16"):
        folder = root / precision
        folder.mkdir(exist_ok=True)
        in_worlds(save_everything, [(2, (folder, precision))])
        if precision == "fp32":
            # What is saved asynchronously has the same files, so one world loads it.
            worlds = [
                *product((2, 3), ("whole", "sharded")),
                (2, "whole async"),
                (3, "sharded async"),
            ]
        else:
            worlds = product((2,), ("whole", "sharded"))
        in_worlds(load_everything, [(sp, (folder, precision, sp, kind)) for sp, kind in worlds])

    in_worlds(refusals, [(2, (root / "fp32",))])
    in_worlds(lora, [(2, (root,))])


@pytest.mark.slow
def test_the_contract(tmp_path: Path) -> None:
    run_ranks(3, contract, tmp_path, timeout=900)

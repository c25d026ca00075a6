"""Models derived from STDiT3 outside of the package: the examples of the docs, in float64."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from derived_models import (
    STREET,
    WORLD,
    DerivedCase,
    with_package,
    write_derived,
    write_package,
)
from parity_cases import assert_one_process_result, make_inputs, make_model
from ranks import run_ranks
from safetensors.torch import load_file, save_file

from opensora_sp.checkpoint import from_pretrained, save_pretrained
from opensora_sp.checkpoint.reader import open_weights
from opensora_sp.checkpoint.state_dict import fitted
from opensora_sp.checkpoint.zero_shards import copy_weights
from opensora_sp.config import TrainConfig, load_train_config
from opensora_sp.config.sections import Lora
from opensora_sp.models import STDiT3
from opensora_sp.parallel import SequenceMesh
from opensora_sp.training.preflight import check_initial_weights

Inputs = dict[str, Any]
PLAIN = DerivedCase((1, 5, 7, 9))
FEW = [(PLAIN, {}), (DerivedCase((2, 3, 5, 6), mask=True, x_mask=True, checkpoint=True), {})]
ALL = [
    *FEW,
    (DerivedCase((1, 7, 5, 7), patch=(2, 2, 2), x_mask=True, output="full"), {}),
    (DerivedCase((1, 1, 4, 3), drop_path=True), {}),  # an image: no spatial row on some ranks
    # Several chunks of a block are in flight; queries and keys are distributed by heads.
    (PLAIN, dict(overlap_chunks=2)),
    (PLAIN, dict(strategy="ulysses")),
]


def compare_on_ranks(cases: list[tuple[DerivedCase, dict]]) -> None:
    mesh = SequenceMesh(dist.get_world_size())
    for model in (WORLD, STREET):
        for case, options in cases:
            assert_one_process_result(replace(case, model=model), mesh, **options)


@pytest.mark.parametrize(
    ("num_ranks", "cases"),
    [
        (3, FEW),
        pytest.param(3, ALL, marks=pytest.mark.slow),
    ],
)
def test_output_and_every_gradient_equal_one_process(
    num_ranks: int, cases: list[tuple[DerivedCase, dict]], tmp_path: Path
) -> None:
    run_ranks(num_ranks, with_package, write_package(tmp_path), compare_on_ranks, cases)


def conditions_act(folder: Path) -> None:
    for name in (WORLD, STREET):
        case = DerivedCase((2, 3, 4, 6), model=name, x_mask=True)
        model, inputs = make_model(case), make_inputs(case)
        out = model(**inputs)
        out.square().sum().backward()
        for key in model.extra_inputs:
            # All of it, of each sample and frame, has an effect.
            assert inputs[key].grad.flatten(1).ne(0).any(1).all()
            assert not torch.equal(out, model(**inputs | {key: inputs[key] + 1}))

        # A sample is not conditioned on what belongs to another.
        key = next(iter(model.extra_inputs))
        changed = inputs[key].detach().clone()
        changed[1] += 1
        other = model(**inputs | {key: changed})
        assert torch.equal(out[0], other[0]) and not torch.allclose(out[1], other[1])

        text = model.encode_text(inputs["y"])
        torch.testing.assert_close(model(**inputs | {"y": text}), out)

        with pytest.raises(ValueError, match=r"got the arguments \[\] .* extra_inputs"):
            model(**{k: v for k, v in inputs.items() if k not in model.extra_inputs})
        with pytest.raises(ValueError, match=rf"got {key} of shape \(1, .* one entry per sample"):
            model(**inputs | {key: inputs[key][:1]})

        save_pretrained(model, folder / name)
        for loaded in (
            from_pretrained(folder / name),
            from_pretrained(folder / name, model=name),
            type(model).from_pretrained(folder / name),
        ):
            assert type(loaded) is type(model) and loaded.config == model.config
            torch.testing.assert_close(loaded(**inputs), out)


def starts_from(folder: Path) -> None:
    """Weights of an STDiT3 with the new layers, which change nothing at first."""
    write_derived(folder)
    for name in (WORLD, STREET):
        case = DerivedCase((1, 3, 4, 6), model=name)
        derived, inputs = make_model(case), make_inputs(case)
        own = {one: inputs.pop(one) for one in derived.extra_inputs}
        base = make_model(replace(case, model="STDiT3"))
        path = folder / f"base of {name}"
        save_pretrained(base, path)
        options = {one: getattr(derived.config, one) for one in case.options()}
        loaded = type(derived).from_pretrained(path, **options).double()
        torch.testing.assert_close(loaded(**inputs, **own), base(**inputs))
        starts_from_images(path, loaded, inputs, own)

        settings = dataclasses.asdict(derived.config)
        cfg = load_train_config(folder / "train.py", [f"load={path}"])
        cfg = cfg.model_copy(update={"model": settings | {"type": name}})
        check_initial_weights(cfg)
        refuse_others(type(derived), path, cfg)


def starts_from_images(path: Path, derived: Any, inputs: Inputs, own: Inputs) -> None:
    """Weights without temporal blocks, which are new then beside what the class adds."""
    convert = dict(convert=["temporal_blocks"])
    images = STDiT3.from_pretrained(path, skip_temporal=True, **convert).double()
    save_pretrained(images, path / "images")
    options = dataclasses.asdict(derived.config)
    with pytest.raises(ValueError, match="or request the conversion: convert=.*temporal_blocks"):
        type(derived).from_pretrained(path / "images", **options)
    videos = type(derived).from_pretrained(path / "images", **options, **convert).double()
    torch.testing.assert_close(videos(**inputs, **own), images(**inputs))

    del images.t_block[1].bias
    save_file(images.state_dict(), path / "images" / "model.safetensors")
    with pytest.raises(ValueError, match="missing .*t_block.1.bias"):
        type(derived).from_pretrained(path / "images", **options, **convert)


def refuse_others(derived: type[STDiT3], path: Path, cfg: TrainConfig) -> None:
    """A tensor of the base that is missing or misspelt, only some of those that a class adds."""
    tensors = load_file(path / "model.safetensors")
    added = derived(cfg.model_spec.config).state_dict().keys() - tensors.keys()
    for missing, more, message in (
        ("t_block.1.bias", {}, r"\d+ differences: missing .*t_block.1.bias"),
        ("t_block.1.bias", {"t_blok.1.bias": tensors["t_block.1.bias"]}, "unexpected t_blok"),
        (None, {min(added): torch.zeros(1)}, f"missing .*of another shape {min(added)}"),
    ):
        changed = {name: one for name, one in tensors.items() if name != missing}
        save_file(changed | more, path / "model.safetensors")
        with pytest.raises(ValueError, match=message):
            check_initial_weights(cfg)
    save_file(tensors, path / "model.safetensors")

    # Sampling takes weights that were trained; adapters are for whole ones.
    model = cfg.model_spec.build()
    with pytest.raises(ValueError, match="weights of another model .* missing"):
        fitted(open_weights(path), model)
    with pytest.raises(ValueError, match="of another model .*_class_name is 'STDiT3' there"):
        check_initial_weights(cfg.model_copy(update={"lora": Lora(rank=2, alpha=2)}))

    # The boosted model of a run keeps what it has initialized.
    before = {name: one.clone() for name, one in model.state_dict().items()}
    weights = fitted(open_weights(path), model, allow_base=True)
    (note,) = weights.notes
    assert note.startswith("weights of STDiT3; initialized anew: ")
    copy_weights(weights, model, None)
    for name, one in model.state_dict().items():
        assert torch.equal(one, before[name] if name in added else tensors[name].to(one.dtype))


def test_training_starts_from_the_weights_of_an_stdit3(tmp_path: Path) -> None:
    with_package(write_package(tmp_path), starts_from, tmp_path)


def test_conditions_reach_each_sample_and_weights_round_trip(tmp_path: Path) -> None:
    with_package(write_package(tmp_path), conditions_act, tmp_path)


def one_frame_at_a_time() -> None:
    """A condition of one frame changes the modulation of that frame alone."""
    case = DerivedCase((1, 6, 4, 4))
    model, inputs = make_model(case), make_inputs(case)
    seen = []
    norm = model.spatial_blocks[0].attn.register_forward_pre_hook(
        lambda module, arguments: seen.append(arguments[0])
    )
    model(**inputs)
    changed = inputs["actions"].detach().clone()
    changed[:, 2] += 1
    model(**inputs | {"actions": changed})
    norm.remove()
    differing = (seen[0] - seen[1]).abs().flatten(1).amax(1) > 0
    assert differing.tolist() == [False, False, True, False, False, False]


def test_an_action_modulates_its_frame_alone(tmp_path: Path) -> None:
    with_package(write_package(tmp_path), one_frame_at_a_time)

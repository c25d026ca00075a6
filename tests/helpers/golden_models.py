"""Models and blocks with the weights and inputs of the reference values."""

from __future__ import annotations

import torch
from golden_values import close, close_gradient, close_sum, close_table, load, under

from opensora_sp.models import build_model, compile_blocks

CASES = [
    *("stdit_v10_video", "stdit_v12_framemask", "stdit_v12_image"),
    *("stdit2_v11_legacy_norm", "stdit2_v12_framemask"),
    *("stdit3_v12_framemask", "stdit3_v12_image_cfg", "stdit3_v12_plain"),
    *("stdit3_v13_plain", "stdit3_v13_window_cond"),
]
OF_RELEASE = {
    ("STDiT2", "v1.1.0"): dict(qk_norm_legacy=True),
    ("STDiT3", "v1.3"): dict(use_cond=True),
}


def built(about: dict, tensors: dict[str, torch.Tensor], **overrides) -> torch.nn.Module:
    """The model of a case with its weights."""
    of_release = OF_RELEASE.get((about["model"], about["upstream_release"]), {})
    model = build_model(about["model"], **{**about["constructor"], **of_release, **overrides})
    if about["model"] == "STDiT":  # its position tables are buffers: computed like those stored
        for name in ("pos_embed", "pos_embed_temporal"):
            close_table(model.get_buffer(name), tensors[f"state/{name}"], floor=1e-6)
    model.load_state_dict(under(tensors, "state/"), strict=True)
    return model


def inputs_of(tensors: dict[str, torch.Tensor]) -> dict:
    inputs: dict = under(tensors, "input/")
    if "mask_index" in inputs:
        inputs["mask_index"] = inputs["mask_index"].tolist()
    return inputs


def block_cases(file: str) -> list[tuple[dict, dict[str, torch.Tensor]]]:
    about, tensors = load("blocks", file)
    return [(case, under(tensors, f"{case['case']}/")) for case in about["cases"]]


def with_state(module: torch.nn.Module, tensors: dict[str, torch.Tensor]) -> torch.nn.Module:
    module.load_state_dict(under(tensors, "state/"), strict=True)
    return module


def check_output_and_gradients(
    name: str, *, checkpointing: bool = False, compiled: bool = False
) -> None:
    """Compare a model with the reference values of a case, in float32."""
    about, tensors = load("models", name)
    model = built(about, tensors)
    model.set_grad_checkpoint(checkpointing)
    if compiled:
        compile_blocks(model, backend="aot_eager")
    inputs = inputs_of(tensors)
    inputs["x"].requires_grad_()
    output = model(**inputs)

    assert output.dtype == torch.float32
    close(output, tensors["output"])
    loss = (output * tensors["probe"]).sum()
    close_sum(loss, tensors["loss"])
    loss.backward()
    wanted = under(tensors, "grad/")
    close_gradient(inputs["x"].grad, wanted.pop("input_x"), floor=1e-5, name="input_x")
    assert wanted

    for parameter, gradient in wanted.items():
        close_gradient(model.get_parameter(parameter).grad, gradient, name=parameter)

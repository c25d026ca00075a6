"""Checks of the arguments of ``forward``: shapes, dtypes and devices, apart from the models.

Every function raises ValueError for arguments that do not fit the configuration or each other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from .conditions import Text
from .stdit_config import SharedConfig, STDiT3Config, STDiTConfig


def check_inputs(
    config: SharedConfig,
    x: Tensor,
    timestep: Tensor,
    y: Tensor | Text,
    mask: Tensor | None,
    x_mask: Tensor | None,
    drop_caption: Tensor | None,
    drop_path: Tensor | None,
    video_mask: Tensor | None,
) -> None:
    """The arguments that all models take."""
    # Kernels and views of torch refuse some empty tensors, in other words on each device.
    if x.ndim != 5 or x.shape[1] != config.in_channels or not x.numel():
        raise ValueError(
            f"got x of shape {tuple(x.shape)}; expected [B, {config.in_channels}, frames, height, "
            "width] without zeros; pass latents of the VAE that the model was configured for "
            "(in_channels), and leave an empty batch out"
        )
    check_text(config, len(x), y, mask, drop_caption)

    samples, _, *size = x.shape
    tokens = y.tokens if isinstance(y, Text) else y
    check_tensor("y", tokens, tokens.shape, x)
    check_tensor("timestep", timestep, (samples,), x)
    check_tensor("x_mask", x_mask, (samples, size[0]), x, is_mask=True)
    check_tensor("drop_caption", drop_caption, (samples,), x, is_mask=True)
    check_tensor("drop_path", drop_path, (2 * config.depth, samples), x, is_mask=True)
    check_tensor("video_mask", video_mask, (samples, *size), x, is_mask=True)
    check_frames_of_patches(config, x_mask)


def check_tensor(
    name: str, tensor: Tensor | None, shape: Sequence[int], like: Tensor, *, is_mask: bool = False
) -> None:
    """A tensor of a shape, on the device of another one; a mask is bool, and may be on the CPU."""
    if tensor is None:
        return
    places = dict.fromkeys([str(like.device), "cpu"] if is_mask else [str(like.device)])
    fits_dtype = not is_mask or tensor.dtype == torch.bool
    if tensor.shape != torch.Size(shape) or str(tensor.device) not in places or not fits_dtype:
        raise ValueError(
            f"got {name} of shape {tuple(tensor.shape)}, {tensor.dtype} on {tensor.device}; "
            f"expected {list(shape)}, {'torch.bool' if is_mask else tensor.dtype} on "
            f"{' or '.join(places)}; pass one entry per sample, where x is"
        )


def check_frames_of_patches(config: SharedConfig, x_mask: Tensor | None) -> None:
    """Frames of one patch are all conditioning frames, or none of them is."""
    patch = config.patch_size[0]
    # Reads a mask on a GPU back, which a patch of one frame does not need.
    if x_mask is None or patch == 1:
        return

    by_patch = x_mask[:, ::patch].repeat_interleave(patch, dim=1)
    if not torch.equal(by_patch[:, : x_mask.shape[1]], x_mask):
        raise ValueError(
            f"got an x_mask that differs inside a patch of {patch} frames; expected the {patch} "
            "frames of a patch to agree; round the mask to whole patches"
        )


def check_text(
    config: SharedConfig,
    num_samples: int,
    y: Tensor | Text,
    mask: Tensor | None,
    drop_caption: Tensor | None,
) -> None:
    """Encoded text, or text features ``[B, 1, L, Cy]``."""
    if isinstance(y, Text):
        if len(y.lengths) != num_samples or mask is not None or drop_caption is not None:
            raise ValueError(
                f"got encoded text of {len(y.lengths)} captions for {num_samples} samples, or a "
                "mask or drop_caption with it; expected one caption per sample and neither; "
                "pass both to encode_text"
            )
        return

    expected = (num_samples, 1, config.caption_channels)
    if y.ndim != 4 or (y.shape[0], y.shape[1], y.shape[3]) != expected or not y.numel():
        raise ValueError(
            f"got y of shape {tuple(y.shape)}; expected [{num_samples}, 1, L, "
            f"{config.caption_channels}] without zeros; check the text encoder and "
            "caption_channels, and pass an empty caption as one token"
        )
    if y.shape[2] > config.model_max_length:
        raise ValueError(
            f"got {y.shape[2]} text tokens; expected at most model_max_length = "
            f"{config.model_max_length}; truncate the text or raise model_max_length"
        )
    if mask is not None:
        _check_text_mask(num_samples, y, mask)


def _check_text_mask(num_samples: int, y: Tensor, mask: Tensor) -> None:
    masks, *ones = mask.shape[:-1] or (0,)
    tiles = masks > 0 and num_samples % masks == 0 and ones in ([], [1, 1])
    adds = mask.is_floating_point() or mask.is_complex()
    # On the CPU, lengths are known without waiting for a device.
    is_near = mask.device.type == "cpu" or mask.device == y.device
    if not tiles or mask.shape[-1] != y.shape[2] or adds or not is_near:
        raise ValueError(
            f"got a text mask of shape {tuple(mask.shape)}, {mask.dtype} on {mask.device}; "
            f"expected [{num_samples}, {y.shape[2]}], bool or integers on cpu or {y.device}; pass "
            "one row per sample, 1 for tokens in use; of a mask that is added to scores, (mask == "
            "0)"
        )


def check_input_size(config: STDiTConfig, x: Tensor) -> None:
    """STDiT has position tables for one size of latents."""
    size = tuple(x.shape[2:])
    if size != config.input_size:
        raise ValueError(
            f"got latents of size {size}; expected the input_size {config.input_size} that this "
            "STDiT has position tables for; build it with another input_size, "
            "or take STDiT2 or STDiT3"
        )


def check_counts(samples: int, numbers: Mapping[str, Tensor | None]) -> None:
    """Numbers of the samples; fewer are tiled, as where guidance repeats the samples."""
    for name, number in numbers.items():
        if number is not None and (not len(number) or samples % len(number)):
            raise ValueError(
                f"got {name} of {len(number)} samples; expected {samples}; "
                "pass one entry per sample"
            )


def check_sample_numbers(samples: int, numbers: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
    """The numbers of the samples, all of which STDiT2 is conditioned on."""
    check_counts(samples, numbers)
    present = {name: number for name, number in numbers.items() if number is not None}
    missing = [name for name in numbers if name not in present]
    if missing:
        raise ValueError(
            f"got no {', '.join(missing)}; expected one number per sample for each of "
            f"{list(numbers)}, which STDiT2 is conditioned on; pass them"
        )
    return present


def check_conditioning_frames(
    config: STDiT3Config,
    x: Tensor,
    y: Tensor | Text,
    cond: Tensor | None,
    cond_mask: Tensor | None,
    mask_index: Sequence[int] | None,
    y_null: Tensor | Text | None,
) -> None:
    """The conditioning frames of a model with ``use_cond``."""
    passed = [cond is not None, cond_mask is not None, mask_index is not None]
    if any(passed) and not (all(passed) and config.use_cond):
        raise ValueError(
            f"got cond, cond_mask, mask_index (passed: {passed}) and use_cond {config.use_cond}; "
            "expected all, for a model with use_cond=True, or none; "
            "pass all three, or leave them out"
        )
    check_tensor("cond", cond, x.shape, x)
    check_tensor("cond_mask", cond_mask, x.shape, x)
    # Encoded text has no shape to compare.
    if isinstance(y, Tensor) and isinstance(y_null, Tensor):
        check_tensor("y_null", y_null, y.shape, x)
    elif y_null is not None:
        check_text(config, len(x), y_null, None, None)

    num_frames = -(-x.shape[2] // config.patch_size[0])
    in_range = all(0 <= frame < num_frames for frame in mask_index or ())
    has_null = y_null is not None or isinstance(y, Tensor)
    if mask_index and not (has_null and in_range):
        raise ValueError(
            f"got mask_index {list(mask_index)} and y_null "
            f"{'missing' if y_null is None else 'passed'}; expected frames of 0 to "
            f"{num_frames - 1}, and with encoded text the text that they see; correct these"
        )


def check_extra_inputs(
    inputs: Mapping[str, str], x: Tensor, passed: Mapping[str, Tensor | None]
) -> None:
    """Just the further inputs, one entry for each sample."""
    given = {name: tensor for name, tensor in passed.items() if tensor is not None}
    if given.keys() != inputs.keys():
        raise ValueError(
            f"got the arguments {sorted(given)} in addition to the model's; expected "
            f"{sorted(inputs)}, the extra_inputs of the model's class; pass these"
        )
    for name, tensor in given.items():
        check_tensor(name, tensor, (len(x), *tensor.shape[1:]), x)

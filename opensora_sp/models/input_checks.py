"""Checks of the arguments of ``forward``: shapes, dtypes and devices, apart from the models.

Every function raises ValueError for arguments that do not fit the configuration or each other.

Legend: B samples, L text tokens of a caption, N packed text tokens, C hidden width.
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
    if x.ndim != 5 or x.shape[1] != config.in_channels:
        raise ValueError(
            f"got x of shape {tuple(x.shape)}; expected [B, {config.in_channels}, frames, height, "
            "width]; pass latents of the VAE that the model was configured for (in_channels)"
        )
    check_not_empty("x", x)
    num_samples = len(x)
    check_text(config, num_samples, y, mask, drop_caption)
    check_shape("timestep", timestep, num_samples)

    check_flags("x_mask", x_mask, num_samples, x.shape[2])
    check_flags("drop_caption", drop_caption, num_samples)
    check_flags("drop_path", drop_path, 2 * config.depth, num_samples)

    check_device("timestep", timestep, x)
    check_device("y", y.tokens if isinstance(y, Text) else y, x)
    # A mask that is read on the host may be on the CPU.
    if x_mask is not None and x_mask.device.type != "cpu":
        check_device("x_mask", x_mask, x)
    check_frames_of_patches(config, x_mask)
    check_video_mask(x, video_mask)


def check_not_empty(name: str, tensor: Tensor) -> None:
    """Kernels and views of torch refuse some empty tensors, in other words on each device."""
    if tensor.numel() == 0:
        raise ValueError(
            f"got {name} of shape {tuple(tensor.shape)}; expected at least one sample, frame and "
            "text token; leave an empty batch out, and pass an empty caption as one token"
        )


def check_shape(name: str, tensor: Tensor, *shape: int) -> None:
    if tensor.shape != shape:
        raise ValueError(
            f"got {name} of shape {tuple(tensor.shape)}; expected {list(shape)}; "
            "pass one entry per sample"
        )


def check_flags(name: str, flags: Tensor | None, *shape: int) -> None:
    if flags is None:
        return
    check_shape(name, flags, *shape)
    if flags.dtype != torch.bool:
        raise ValueError(f"got {name} of {flags.dtype}; expected torch.bool; pass {name}.bool()")


def check_device(name: str, tensor: Tensor | None, x: Tensor) -> None:
    if tensor is not None and tensor.device != x.device:
        raise ValueError(
            f"got {name} on {tensor.device}; expected {x.device}, where x is; "
            f"move it with .to({str(x.device)!r})"
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


def check_video_mask(x: Tensor, mask: Tensor | None) -> None:
    if mask is None:
        return
    shape = (x.shape[0], *x.shape[2:])
    places = {"cpu": None, str(x.device): None}
    if tuple(mask.shape) != shape or mask.dtype != torch.bool or str(mask.device) not in places:
        raise ValueError(
            f"got a video_mask of shape {tuple(mask.shape)}, {mask.dtype} on {mask.device}; "
            f"expected {list(shape)}, torch.bool on {' or '.join(places)}: True where a position "
            "of a latent lies inside of its clip; pass such a mask, or None if no clip is padded"
        )


def check_clip_sizes(num_samples: int, num_sizes: int) -> None:
    """With a ``video_mask``, positions follow the pixels of each clip."""
    if num_sizes != num_samples:
        raise ValueError(
            f"got height and width of {num_sizes} samples with the video_mask of {num_samples}; "
            "expected the sizes of each, which set the positions in its clip; "
            "pass one entry per sample"
        )


def check_text(
    config: SharedConfig,
    num_samples: int,
    y: Tensor | Text,
    mask: Tensor | None,
    drop_caption: Tensor | None,
) -> None:
    """Encoded text, text features ``[B, 1, L, Cy]``, or with ``skip_y_embedder`` packed text."""
    if isinstance(y, Text):
        if len(y.lengths) != num_samples or mask is not None or drop_caption is not None:
            raise ValueError(
                f"got encoded text of {len(y.lengths)} captions for {num_samples} samples, or a "
                "mask or drop_caption with it; expected one caption per sample and neither; "
                "pass both to encode_text"
            )
        return
    if isinstance(config, STDiT3Config) and config.skip_y_embedder:
        _check_packed_text(config, num_samples, y, mask, drop_caption)
        return

    expected = (num_samples, 1, config.caption_channels)
    if y.ndim != 4 or (y.shape[0], y.shape[1], y.shape[3]) != expected:
        raise ValueError(
            f"got y of shape {tuple(y.shape)}; expected [{num_samples}, 1, L, "
            f"{config.caption_channels}]; check the text encoder and caption_channels"
        )
    check_not_empty("y", y)
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
    if not tiles or mask.shape[-1] != y.shape[2]:
        raise ValueError(
            f"got a text mask of shape {tuple(mask.shape)}; expected [{num_samples}, "
            f"{y.shape[2]}]; pass one row per sample"
        )
    if mask.is_floating_point() or mask.is_complex():
        raise ValueError(
            f"got a text mask of {mask.dtype}; expected bool or integers, 1 for tokens in use, not "
            "numbers to add to scores; pass mask.bool(), or (mask == 0) for one that is added"
        )

    # On the CPU, lengths are known without waiting for a device.
    if mask.device.type != "cpu":
        check_device("text mask", mask, y)


def _check_packed_text(
    config: STDiT3Config,
    num_samples: int,
    y: Tensor,
    lengths: Tensor | None,
    drop_caption: Tensor | None,
) -> None:
    """Projected text ``[1, N, C]`` and the lengths ``[B]`` of the captions."""
    if lengths is None or drop_caption is not None:
        raise ValueError(
            "got no mask, or drop_caption, with skip_y_embedder; expected packed text with its "
            "lengths as mask; drop captions before packing"
        )
    width = config.hidden_size
    if y.ndim != 3 or y.shape[2] != width or tuple(lengths.shape) != (num_samples,):
        raise ValueError(
            f"got y of shape {tuple(y.shape)} and lengths of shape {tuple(lengths.shape)} with "
            f"skip_y_embedder; expected [1, N, {width}] and [{num_samples}]; "
            "project the text with y_embedder and pack it"
        )


def check_packed_lengths(packed: Tensor, lengths: list[int]) -> None:
    if sum(lengths) != len(packed) or min(lengths) < 1:
        raise ValueError(
            f"got {len(packed)} packed text tokens and lengths {lengths}; expected lengths of at "
            "least 1 that sum to as many; pack the tokens in use of every sample"
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


def check_sample_numbers(numbers: dict[str, Tensor | None]) -> dict[str, Tensor]:
    """The numbers of the samples, all of which STDiT2 is conditioned on."""
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

    pairs = {"cond": (cond, x), "cond_mask": (cond_mask, x), "y_null": (y_null, y)}
    for name, (tensor, like) in pairs.items():
        # Encoded text has no shape to compare.
        if not (isinstance(tensor, Tensor) and isinstance(like, Tensor)):
            continue
        if tensor.shape != like.shape:
            raise ValueError(
                f"got {name} of shape {tuple(tensor.shape)}; expected {list(like.shape)}; "
                "give it the batch's size"
            )
    if not mask_index:
        return

    num_frames = -(-x.shape[2] // config.patch_size[0])
    in_range = all(0 <= frame < num_frames for frame in mask_index)
    has_null = y_null is not None or isinstance(y, Tensor)
    if not has_null or config.skip_y_embedder or not in_range:
        raise ValueError(
            f"got mask_index {list(mask_index)}, y_null "
            f"{'missing' if y_null is None else 'passed'} and skip_y_embedder "
            f"{config.skip_y_embedder}; expected frames of 0 to {num_frames - 1}, the text that "
            "they see as y_null, and text to be embedded; correct these"
        )

    # The shape of y_null was compared with y, unless one of them is encoded.
    if y_null is not None and (isinstance(y, Text) or isinstance(y_null, Text)):
        check_text(config, len(x), y_null, None, None)


def check_extra_inputs(
    inputs: Mapping[str, str], x: Tensor, passed: Mapping[str, Tensor | None]
) -> None:
    """Raise ValueError unless just the further inputs were passed, one entry for each sample."""
    if passed.keys() != inputs.keys():
        raise ValueError(
            f"got the arguments {sorted(passed)} in addition to the model's; expected "
            f"{sorted(inputs)}, the extra_inputs of the model's class; pass these"
        )
    for name, tensor in passed.items():
        if tensor is None or tensor.ndim == 0 or len(tensor) != len(x) or tensor.device != x.device:
            got = "None" if tensor is None else f"{tuple(tensor.shape)} on {tensor.device}"
            raise ValueError(
                f"got {name} of shape {got}; expected [{len(x)}, {inputs[name]}] on {x.device}; "
                "pass one entry per sample"
            )

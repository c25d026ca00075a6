"""The video autoencoder of Open-Sora 1.3, in chunks of frames that may share a frame.

Legend: B samples, F frames of video, c latent channels, f x h x w latent size; ``height = 8 h``,
``width = 8 w``.

    video  [B, 3, F, height, width]   chunks of 17 frames: of frames 0 to 16, then of 17 to 33,
      |                               or, with ``temporal_overlap``, of 16 to 32; each by itself:
      | SpaceTimeVAE
      v [B, c, 5, h, w]               all chunks one after the other
      | (z - mean) / std
      v
    latents [B, c, f, h, w]
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor

from opensora_sp.common.tensors import DTYPES

from .interface import chunks
from .loading import Dtype, FrozenEncoder, Positive, load_strictly, saved_config, shortly
from .space_time_vae import FrameStep, SpaceTimeVAE, tile_convolutions

TIME_FACTOR, SPATIAL_FACTOR = 4, 8
# Values of its constructors that do not set a size.
WITHOUT_SIZE = ("type", "double_z", "temporal_downsample", "micro_batch_size_2d")


class OpenSoraVAEv13(FrozenEncoder):
    """``OpenSoraVAE_V1_3``, the autoencoder of the STDiT3 that Open-Sora 1.3 released.

    Latents are posterior means; the release draws samples. Defaults are the release's: a clip as
    one chunk, without normalization.

    Args:
        from_pretrained: local folder with the weights, or a hub name. Sizes are those released,
            unless ``encoder`` and ``decoder`` of its ``config.json`` have others.
        z_channels: c.
        micro_batch_size: clips of a chunk in one call; None for all. As in the release, a clip is
            cut into chunks only if this is set.
        micro_frame_size: frames of a chunk, 1 more than a multiple of 4; None takes a clip as one.
        temporal_overlap: each chunk begins with the last frame of the one before. Decoded, this
            frame is the mean of both.
        micro_batch_size_2d: frames in one call of the layers that see single frames; None for all.
        normalization: "video" or "video_5frames" (statistics of each latent frame of a chunk of 17
            frames); None leaves latents as they are.
        use_tiled_conv3d: convolve in tiles of about ``tile_size`` positions, which needs less
            memory and changes no result.
        dtype: "fp32", "bf16" or "fp16" for the weights; latents and videos are float32.
        offload: keep the weights on the CPU between calls.

    Raises:
        ValueError: if it cannot be found, or has other tensors than this autoencoder. Options that
            do not fit each other are refused by ``planned_latent_size``.
    """

    def __init__(
        self,
        from_pretrained: str,
        z_channels: Positive = 16,
        micro_batch_size: Positive | None = None,
        micro_frame_size: Positive | None = None,
        temporal_overlap: bool = False,
        micro_batch_size_2d: Positive | None = None,
        normalization: Literal["video", "video_5frames"] | None = None,
        use_tiled_conv3d: bool = False,
        tile_size: Positive = 16,
        dtype: Dtype = "fp32",
        offload: bool = False,
    ) -> None:
        super().__init__(offload=offload)
        files = self.open_files(from_pretrained, "vae")
        folder = from_pretrained if files is None else files.folder
        # Built on the meta device, since the file has all weights.
        with torch.device("meta"):
            self.vae = build_network(saved_config(folder) or {}, z_channels, from_pretrained)
        if files is not None:
            load_strictly(self.vae, files.tensors(), files, "OpenSoraVAE_V1_3")
        for module in self.vae.modules():
            if isinstance(module, FrameStep):
                module.micro_batch_size = micro_batch_size_2d
        if use_tiled_conv3d:
            tile_convolutions(self.vae, tile_size)

        self.dtype = DTYPES[dtype]
        self.vae.to(self.dtype)
        self.channels = z_channels
        self.micro_batch_size = micro_batch_size
        # As the release reads these two options.
        self.frame_size = micro_frame_size if micro_batch_size else None
        self.temporal_overlap = temporal_overlap and self.frame_size is not None
        mean, std = STATISTICS[normalization] if normalization else ((0.0,), (1.0,))
        # Float32, whatever the weights are: [c or 1, 1 or 5].
        self.register_buffer("shift", _table(mean), persistent=False)
        self.register_buffer("std", _table(std), persistent=False)
        self.requires_grad_(False).eval()

    @property
    def scale(self) -> Tensor:
        """Standard deviations of latents, ``[1, c, 1 or 5, 1, 1]``."""
        return self.get_buffer("std")[None, :, :, None, None]

    @property
    def chunk_frames(self) -> int | None:
        """Frames of a chunk that is encoded and decoded without the others."""
        return self.frame_size if self._chunks_are_independent else None

    @property
    def chunk_latent_frames(self) -> int | None:
        return self._latent_step if self._chunks_are_independent else None

    @property
    def chunk_overlap(self) -> int:
        """Frames that a chunk shares with the one before."""
        return int(self.temporal_overlap)

    @property
    def _latent_step(self) -> int | None:
        """Latent frames of a chunk."""
        return None if self.frame_size is None else latent_frames_of(self.frame_size)

    @property
    def _chunks_are_independent(self) -> bool:
        """True if each chunk has the statistics that the whole clip has there."""
        period = self.get_buffer("std").shape[1]
        # Otherwise a chunk by itself would be normalized by statistics of other frames.
        return self._latent_step is not None and self._latent_step % period == 0

    @torch.no_grad()
    def encode(self, video: Tensor) -> Tensor:
        """``[B, 3, F, height, width]`` in [-1, 1] -> ``[B, c, f, h, w]``."""
        parts = []
        with self.on_device():
            num_frames, overlap = video.shape[2], int(self.temporal_overlap)
            for frames in chunks(num_frames, self.frame_size or num_frames, overlap):
                batches = self._batches(video[:, :, frames])
                means = [self.vae.encode(clips.to(self.device, self.dtype)) for clips in batches]
                # Chunks are joined, and statistics applied, in float32 whatever the weights are.
                parts.append(torch.cat(means).float())

        z = torch.cat(parts, dim=2)
        shift, scale = self._statistics(z.shape[2])
        return (z - shift) / scale

    @torch.no_grad()
    def decode(self, latents: Tensor, *, num_frames: int) -> Tensor:
        """``[B, c, f, h, w]`` -> ``[B, 3, num_frames, height, width]``, about within [-1, 1].

        Raises:
            ValueError: if the latents stand for another number of frames.
        """
        available = self.decoded_frames(latents.shape[2])
        if available != num_frames:
            raise ValueError(
                f"got {latents.shape[2]} latent frames to decode to {num_frames} frames; expected "
                f"latents of as many, while these decode to {available}; pass the frame count that "
                "the latents were made of, one that comes back from this autoencoder"
            )

        shift, scale = self._statistics(latents.shape[2])
        z = latents.to(self.device, torch.float32) * scale + shift
        parts = []
        with self.on_device():
            for piece in chunks(z.shape[2], self._latent_step or z.shape[2]):
                decoded = [
                    self.vae.decode(clips.to(self.dtype)).float()
                    for clips in self._batches(z[:, :, piece])
                ]
                parts.append(torch.cat(decoded))
        return _blended(parts) if self.temporal_overlap else torch.cat(parts, dim=2)

    def decoded_frames(self, latent_frames: int) -> int:
        """Frames that so many latent frames decode to."""
        pieces = chunks(latent_frames, self._latent_step or latent_frames)
        shared = len(pieces) - 1 if self.temporal_overlap else 0
        lengths = [TIME_FACTOR * (piece.stop - piece.start - 1) + 1 for piece in pieces]
        return sum(lengths) - shared

    def latent_size(self, num_frames: int, height: int, width: int) -> tuple[int, int, int]:
        """Latent size of any number of frames, also of one that ``normalization`` does not fit."""
        return self.planned_latent_size(
            num_frames,
            height,
            width,
            micro_batch_size=self.micro_batch_size,
            micro_frame_size=self.frame_size,
            temporal_overlap=self.temporal_overlap,
        )

    @classmethod
    def planned_latent_size(
        cls, num_frames: int, height: int, width: int, **options: Any
    ) -> tuple[int, int, int]:
        """``latent_size`` without weights, for the constructor's options.

        Each chunk is rounded up. Height and width are rounded down by the first of three halvings,
        and up by the others.

        Raises:
            ValueError: for options that do not fit each other, or a number of latent frames that
                the statistics of ``normalization`` do not fit.
        """
        check_options(**options)
        latent_frames = sum(latent_frames_of(n) for n in _chunk_lengths(num_frames, **options))
        if options.get("normalization") == "video_5frames":
            check_period(latent_frames)
        return latent_frames, _halved(height), _halved(width)

    @classmethod
    def planned_whole_frames(cls, num_frames: int, **options: Any) -> int:
        """Frames of a reference that are kept: whole chunks, or a single frame where none is whole.

        References are cut so by the release. Without chunks these are the most that come back.
        With them, the first frames of another chunk would come back as well.
        """
        size, overlap = _chunking(**options)
        step, shared = (TIME_FACTOR, 1) if size is None else (size - overlap, int(overlap))
        return max(1, (num_frames - shared) // step * step + shared)

    @classmethod
    def planned_decoded_frames(cls, num_frames: int, **options: Any) -> int:
        """Frames that come back of a clip: each chunk loses those beyond 1 + 4 n."""
        lengths = _chunk_lengths(num_frames, **options)
        shared = len(lengths) - 1 if _chunking(**options)[1] else 0
        return sum(TIME_FACTOR * latent_frames_of(n) - TIME_FACTOR + 1 for n in lengths) - shared

    def _batches(self, clips: Tensor) -> tuple[Tensor, ...]:
        return clips.split(self.micro_batch_size or len(clips))

    def _statistics(self, latent_frames: int) -> tuple[Tensor, Tensor]:
        """Means and standard deviations, ``[1, c, 1 or f, 1, 1]``, on the device of ``to``.

        Raises:
            ValueError: if statistics of 5 frames do not fit into so many latent frames.
        """
        shift, scale = (
            self.get_buffer(name)[None, :, :, None, None].to(self.device)
            for name in ("shift", "std")
        )
        period = shift.shape[2]
        # An image has the statistics of the first frame.
        if period == 1 or latent_frames == 1:
            return shift[:, :, :1], scale[:, :, :1]
        check_period(latent_frames)
        repeats = (1, 1, latent_frames // period, 1, 1)
        return shift.repeat(repeats), scale.repeat(repeats)


def latent_frames_of(num_frames: int) -> int:
    """Latent frames of one chunk."""
    return -(-num_frames // TIME_FACTOR)


def check_options(**options: Any) -> None:
    """Raise ValueError for options that do not fit each other."""
    size = options.get("micro_frame_size")
    smallest = TIME_FACTOR + 1 if options.get("temporal_overlap") else 1
    if size is not None and (size < smallest or size % TIME_FACTOR != 1):
        raise ValueError(
            f"got vae.micro_frame_size {size}; expected 1 more than a multiple of {TIME_FACTOR}, "
            f"at least {smallest}, so that chunks come back with all frames; write 17"
        )
    if options.get("temporal_overlap") and size is None:
        raise ValueError(
            "got vae.temporal_overlap without vae.micro_frame_size; expected chunks that overlap; "
            "set micro_frame_size=17, or leave temporal_overlap out"
        )

    normalization = options.get("normalization")
    if normalization is not None and options.get("z_channels", 16) != 16:
        raise ValueError(
            f"got vae.normalization {normalization!r} with z_channels {options['z_channels']}; "
            "expected 16 channels, of which statistics are known; set normalization=None"
        )


def check_period(latent_frames: int) -> None:
    """Raise ValueError unless statistics of 5 frames fit into so many latent frames."""
    if latent_frames != 1 and latent_frames % 5:
        raise ValueError(
            f"got {latent_frames} latent frames with vae.normalization 'video_5frames'; "
            "expected 1 or a multiple of 5; choose another frame count, or 'video'"
        )


def build_network(config: dict[str, Any], z_channels: int, source: str) -> SpaceTimeVAE:
    """The network with the sizes of a ``config.json``, by default those released.

    Raises:
        ValueError: for unknown values, or an autoencoder with other factors than 1.3's.
    """
    parts: list[dict[str, object]] = []
    for name in ("encoder", "decoder"):
        values = dict(config.get(name) or {})
        dropped = (*WITHOUT_SIZE, "out_ch" if name == "encoder" else "in_channels")
        parts.append({key: values[key] for key in values if key not in dropped})

    try:
        vae = SpaceTimeVAE(*({"z_channels": z_channels} | part for part in parts))
    except (TypeError, IndexError, ValueError) as error:
        raise ValueError(
            f"got the config.json of {source} with encoder and decoder that cannot be built "
            f"({shortly(error)}); expected the constructor values of OpenSoraVAE_V1_3; correct it"
        ) from None

    factors = vae.decoder.time_factor, 2 ** (len(vae.decoder.up) - 1)
    if factors != (TIME_FACTOR, SPATIAL_FACTOR):
        raise ValueError(
            f"got an autoencoder in {source} with {factors[0]} frames and {factors[1]} pixels to a "
            f"latent position; expected {TIME_FACTOR} and {SPATIAL_FACTOR}, as in Open-Sora 1.3; "
            "choose another vae.from_pretrained"
        )
    return vae


def _chunking(
    *,
    micro_batch_size: int | None = None,
    micro_frame_size: int | None = None,
    temporal_overlap: bool = False,
    **_: Any,
) -> tuple[int | None, bool]:
    """Frames of a chunk, None for a whole clip, and whether chunks overlap."""
    if micro_batch_size is None or micro_frame_size is None:
        return None, False
    return micro_frame_size, temporal_overlap


def _chunk_lengths(num_frames: int, **options: Any) -> list[int]:
    size, overlap = _chunking(**options)
    pieces = chunks(num_frames, size or num_frames, int(overlap))
    return [piece.stop - piece.start for piece in pieces]


def _halved(pixels: int) -> int:
    """Latent rows of so many pixels: halved three times, rounded down, then up, up."""
    return -(-(pixels // 2) // TIME_FACTOR)


def _table(values: Any) -> Tensor:
    """Statistics ``[c]`` or ``[c, 5]`` as float32 ``[c, 1 or 5]``."""
    table = torch.tensor(values, dtype=torch.float32, device="cpu")
    return table if table.ndim == 2 else table[:, None]


def _blended(parts: list[Tensor]) -> Tensor:
    """Chunks joined in time; of the frame that two of them share, the mean."""
    shared = [(part[:, :, -1:] + other[:, :, :1]) / 2 for part, other in pairwise(parts)]
    joined = [parts[0][:, :, :1]]
    for index, part in enumerate(parts):
        joined.append(part[:, :, 1:-1] if index < len(parts) - 1 else part[:, :, 1:])
        joined += shared[index : index + 1]
    return torch.cat(joined, dim=2)


# Means and standard deviations of latents, as released, of each of 16 channels: over all frames of
# videos, and for each of the 5 latent frames of a chunk.
# fmt: off
VIDEO_MEAN = (
    -0.1901695, -0.044800628, 0.020789705, 0.018653357,
    -0.011585569, 0.0010865575, 0.08378933, 0.08902134,
    0.009409455, 0.08086848, -0.07251628, 0.05052144,
    -0.020972481, -0.12230792, -0.0038623565, -0.023072388,
)
VIDEO_STD = (
    0.9490776, 0.9594118, 0.9444303, 0.91032845,
    0.95935166, 0.84303516, 0.8888125, 0.9291137,
    0.97259414, 0.8917954, 0.8630854, 0.82798916,
    0.91143, 0.7922845, 0.8991407, 0.9473514,
)
CHUNK_MEAN = (
    (-0.31038138, -0.17488302, -0.1390065, -0.11228419, -0.2143084),
    (0.089755274, -0.055954233, -0.07017383, -0.12842283, -0.059222423),
    (0.009729884, 0.022306992, 0.023845116, 0.023336032, 0.024730036),
    (0.10618276, -0.10902954, 0.060719784, 0.10005339, -0.06466035),
    (0.029384656, 0.052769065, -0.0128054805, -0.03036861, -0.09690209),
    (0.01716991, -0.007233284, 0.0011372794, -0.0029931865, -0.0026791762),
    (0.11501131, 0.087407455, 0.0757848, 0.07428467, 0.066402785),
    (0.043605775, 0.12531929, 0.05740308, 0.09716418, 0.12161173),
    (-0.003800593, 0.066950716, 0.0037457007, 0.00064624334, -0.020493738),
    (0.09442657, 0.047472052, 0.043563962, 0.05506575, 0.16380565),
    (-0.17690079, -0.13735504, -0.02259145, 0.033208176, -0.058970865),
    (0.049464937, 0.06297766, 0.0469673, 0.042452283, 0.05074439),
    (-0.052013952, -0.038366813, -0.0018303691, -0.0057245153, -0.0069338484),
    (-0.068219386, -0.13791534, -0.14595246, -0.11955552, -0.13990912),
    (-0.009703802, -0.014363708, -0.0051330593, 0.0068099457, 0.003080054),
    (-0.14393239, -0.00912384, -0.01863871, -0.005709422, 0.06205809),
)
CHUNK_STD = (
    (0.9969105, 0.9459409, 0.9167423, 0.92885023, 0.89932984),
    (1.0192935, 0.9416692, 0.9346943, 0.9353694, 0.9003037),
    (0.9833934, 0.9082298, 0.9308427, 0.9624826, 0.9349732),
    (0.97186136, 0.91052, 0.8878196, 0.86988616, 0.86309445),
    (1.0202057, 0.94473195, 0.9330361, 0.9632452, 0.92104787),
    (1.0385587, 0.8876768, 0.7368917, 0.7580699, 0.75087255),
    (1.0592127, 0.8657043, 0.82151794, 0.8476718, 0.8209494),
    (0.9920972, 0.927169, 0.89886844, 0.9289982, 0.8869122),
    (1.0359006, 0.95993954, 0.9465613, 0.9801757, 0.93422),
    (0.962186, 0.8828722, 0.87103915, 0.8808464, 0.8516325),
    (0.9560437, 0.84533536, 0.8308913, 0.825839, 0.8010841),
    (0.98799556, 0.811466, 0.75618976, 0.788991, 0.7724365),
    (0.9584462, 0.8858027, 0.89920944, 0.9229688, 0.884798),
    (0.9060379, 0.78632456, 0.73743653, 0.7614733, 0.74287385),
    (0.9648598, 0.8712865, 0.8902931, 0.8947093, 0.87098163),
    (1.0170196, 0.9330488, 0.9144401, 0.9294653, 0.88715833),
)
# fmt: on

# By the names of the release's option ``normalization``: mean and deviation, ``[c]`` or ``[c, 5]``.
STATISTICS = {"video": (VIDEO_MEAN, VIDEO_STD), "video_5frames": (CHUNK_MEAN, CHUNK_STD)}

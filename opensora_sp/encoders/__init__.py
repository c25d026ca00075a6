"""Video and text encoders, behind two small protocols; weights are loaded at construction."""

from typing import Any

from opensora_sp.common.importing import component_class

from .huggingface import ImageVAE
from .interface import LatentEncoder, independent_pieces
from .open_sora_vae import OpenSoraVAE
from .open_sora_vae_v13 import OpenSoraVAEv13
from .standins import HashedBagOfWords, PatchDCTVAE, PatchPoolVAE
from .t5 import T5TextEncoder, check_cleaning

__all__ = ["LatentEncoder", "independent_pieces"]

LATENT_ENCODERS: dict[str, Any] = {
    "PatchPoolVAE": PatchPoolVAE,
    "PatchDCTVAE": PatchDCTVAE,
    "VideoAutoencoderKL": ImageVAE,
    "OpenSoraVAE_V1_2": OpenSoraVAE,
    "OpenSoraVAE_V1_3": OpenSoraVAEv13,
}
TEXT_ENCODERS: dict[str, Any] = {"HashedBagOfWords": HashedBagOfWords, "t5": T5TextEncoder}


def check_packages(text_encoder: dict[str, Any]) -> None:
    """Raise ValueError if a config's ``text_encoder`` needs packages that are not installed.

    Its constructor would, after the weights of other encoders have been loaded.
    """
    if text_encoder["type"] == "t5" and text_encoder.get("clean_captions"):
        check_cleaning()


def planned_latent_size(
    vae: dict[str, Any], num_frames: int, height: int, width: int
) -> tuple[int, int, int]:
    """The latent size (frames, height, width) of a config's ``vae``; no weights are loaded."""
    encoder, options = _class_and_options(vae)
    if hasattr(encoder, "planned_latent_size"):
        return encoder.planned_latent_size(num_frames, height, width, **options)

    # An autoencoder without the method has no weights to load.
    return encoder(**options).latent_size(num_frames, height, width)


def planned_decoded_frames(vae: dict[str, Any], num_frames: int) -> int:
    """Frames that come back of a clip that a config's ``vae`` encodes; no weights are loaded."""
    return _planned_frames("planned_decoded_frames", vae, num_frames)


def planned_whole_frames(vae: dict[str, Any], num_frames: int) -> int:
    """The most of a reference's frames that a config's ``vae`` encodes in whole chunks."""
    return _planned_frames("planned_whole_frames", vae, num_frames)


def _planned_frames(method: str, vae: dict[str, Any], num_frames: int) -> int:
    encoder, options = _class_and_options(vae)
    planned = getattr(encoder, method, None)
    return num_frames if planned is None else planned(num_frames, **options)


def _class_and_options(vae: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    options = {name: vae[name] for name in vae if name != "type"}
    return component_class("vae", vae["type"], LATENT_ENCODERS), options

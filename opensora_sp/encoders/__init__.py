"""Video autoencoders and text encoders, behind two small protocols; weights are loaded when one is
built.
"""

from typing import Any

from opensora_sp.components import component_class

from .base import LatentEncoder, Piece, TextEncoder, independent_pieces
from .huggingface import ImageVAE, T5TextEncoder
from .open_sora_vae import OpenSoraVAE
from .standins import HashedBagOfWords, PatchPoolVAE

LATENT_ENCODERS: dict[str, Any] = {
    "PatchPoolVAE": PatchPoolVAE,
    "VideoAutoencoderKL": ImageVAE,
    "OpenSoraVAE_V1_2": OpenSoraVAE,
}
TEXT_ENCODERS: dict[str, Any] = {"HashedBagOfWords": HashedBagOfWords, "t5": T5TextEncoder}


def planned_latent_size(
    vae: dict[str, Any], num_frames: int, height: int, width: int
) -> tuple[int, int, int]:
    """The latent size (frames, height, width) of a config's ``vae``; no weights are loaded."""
    options = {key: value for key, value in vae.items() if key != "type"}
    encoder = component_class("vae", vae["type"], LATENT_ENCODERS)
    if hasattr(encoder, "planned_latent_size"):
        return encoder.planned_latent_size(num_frames, height, width, **options)

    # An autoencoder without the method has no weights to load.
    return encoder(**options).latent_size(num_frames, height, width)


__all__ = [
    "LATENT_ENCODERS",
    "TEXT_ENCODERS",
    "HashedBagOfWords",
    "ImageVAE",
    "LatentEncoder",
    "OpenSoraVAE",
    "PatchPoolVAE",
    "Piece",
    "T5TextEncoder",
    "TextEncoder",
    "independent_pieces",
    "planned_latent_size",
]

"""Video autoencoders and text encoders, behind two small protocols; weights are loaded when one is built."""

from .base import LatentEncoder, TextEncoder
from .pretrained import ImageVAE, T5TextEncoder
from .standins import HashedBagOfWords, PatchPoolVAE

LATENT_ENCODERS = {"PatchPoolVAE": PatchPoolVAE, "VideoAutoencoderKL": ImageVAE}
TEXT_ENCODERS = {"HashedBagOfWords": HashedBagOfWords, "t5": T5TextEncoder}

__all__ = [
    "LATENT_ENCODERS",
    "TEXT_ENCODERS",
    "HashedBagOfWords",
    "ImageVAE",
    "LatentEncoder",
    "PatchPoolVAE",
    "T5TextEncoder",
    "TextEncoder",
]

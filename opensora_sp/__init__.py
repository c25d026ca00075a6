"""Sequence-parallel training and sampling of STDiT video diffusion transformers."""

__version__ = "0.1.0"

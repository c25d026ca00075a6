"""Beginnings of captioning models, such as "The video shows", which Open-Sora 1.3 removes."""

from __future__ import annotations

VERBS = ("shows", "captures", "features", "depicts", "presents", "is")
PREFIXES = (
    *(f"The video {verb} " for verb in VERBS),
    "In the video, ",
    *(f"The image {verb} " for verb in (*VERBS, "portrays")),
    "In the image, ",
)


def without_prefix(caption: str) -> str:
    """The caption without a beginning such as "The video shows ", with a capital letter."""
    for prefix in PREFIXES:
        rest = caption[len(prefix) :].strip()
        if rest and caption.startswith((prefix, prefix.lower())):
            return rest[0].upper() + rest[1:]
    return caption

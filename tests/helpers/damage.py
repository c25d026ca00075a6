"""Damage to the bytes of files, at places that a seed draws."""

from __future__ import annotations

import os
from pathlib import Path
from random import Random

KINDS = ("flip", "truncate", "append", "swap", "remove", "zero")
BLOCK = 512


def damage(file: Path, kind: str, random: Random, other: Path) -> None:
    """Damage a file; its bytes change in any case.

    Args:
        kind: one of ``KINDS``.
        other: the file that changes places with it when they are swapped. If both are alike, bits
            are flipped instead.
    """
    data = file.read_bytes()
    if kind == "remove":
        file.unlink()
    elif kind == "swap" and other.read_bytes() != data:
        file.write_bytes(other.read_bytes())
        other.write_bytes(data)
    else:
        changed = data
        # A flip may undo another, and a block may be zero.
        while changed == data:
            changed = _damaged(bytearray(data), kind, random)
        file.write_bytes(changed)


def _damaged(data: bytearray, kind: str, random: Random) -> bytes:
    place = random.randrange(len(data))
    if kind == "truncate":
        return data[:place]
    if kind == "append":
        return data + random.randbytes(random.randint(1, 64))
    if kind == "zero":
        end = min(len(data), place + BLOCK)
        return data[:place] + bytes(end - place) + data[end:]

    for _ in range(random.choice((1, 1, 2, 8))):
        data[random.randrange(len(data))] ^= 1 << random.randrange(8)
    return data


def content(folder: Path) -> dict[str, bytes]:
    """Every file of a folder by its path in it; of links their target."""
    found = {}
    for path in folder.rglob("*"):
        name = str(path.relative_to(folder))
        if path.is_symlink():
            found[name] = os.readlink(path).encode()
        elif path.is_file():
            found[name] = path.read_bytes()
    return found

"""Named sizes and frame counts, against those of Open-Sora 1.2."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from opensora_sp.data.resolutions import (
    ASPECT_RATIOS,
    FRAMES,
    SIZES,
    closest_aspect,
    named_frames,
    named_size,
    num_pixels,
)

GOLDEN = Path(__file__).parents[1] / "golden" / "data"
TABLES = json.loads((GOLDEN / "resolutions_v12.json").read_text())
QUERIES = json.loads((GOLDEN / "resolution_queries_v12.json").read_text())


def test_tables_are_those_of_the_release_in_its_order() -> None:
    assert set(SIZES) == set(TABLES["sizes"])
    for name, sizes in TABLES["sizes"].items():
        assert [(key, list(size)) for key, size in SIZES[name].items()] == list(sizes.items())
        assert num_pixels(name) == TABLES["num_pixels"][name]
    assert TABLES["ratio_name_to_key"] == ASPECT_RATIOS and TABLES["num_frames_names"] == FRAMES


def test_look_ups() -> None:
    for resolution, ratio, size in QUERIES["image_size"]:
        if size == "unavailable":
            with pytest.raises(ValueError, match="expected one of .*; choose one of these"):
                named_size(resolution, ratio)
        else:
            assert named_size(resolution, ratio) == tuple(size)
    for resolution, height, width, key in QUERIES["closest_ratio"]:
        assert closest_aspect(resolution, height, width) == key
    for name, frames in QUERIES["num_frames"].items():
        assert named_frames(name) == frames
    assert named_frames(17) == 17 and named_size("512", "1.0") == (512, 512)


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ValueError, match="got resolution '250p'; expected one of"):
        named_size("250p", "1:1")
    for name in ("3s", "0", "-1", "1.5"):
        with pytest.raises(ValueError, match="expected a positive number or one of"):
            named_frames(name)

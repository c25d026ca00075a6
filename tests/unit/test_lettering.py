"""Prompts in any script: on contact sheets, in names of files, in JSON."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from opensora_sp.sampling.contact_sheet import drawable, write_contact_sheet
from opensora_sp.sampling.outputs import Output
from opensora_sp.sampling.prompts import Prompt
from opensora_sp.sampling.requests import Request, file_name


def test_a_title_that_the_font_cannot_draw_is_the_number() -> None:
    assert drawable("a 狐 and αλεπού, 🦊", "video 3") == "a and αλεπού,"
    assert drawable("狐狸", "video 3") == drawable("🦊!", "video 3") == "video 3"


def test_a_sheet_shows_the_title_above_the_frames(tmp_path: Path) -> None:
    frames = np.zeros((2, 8, 8, 3), np.uint8)
    lines = []
    for title in ("狸", "video 0", "лиса"):
        write_contact_sheet(tmp_path / "sheet.png", [(title, frames)])
        lines.append(np.asarray(Image.open(tmp_path / "sheet.png"))[:20, :, 0] < 128)
    assert np.array_equal(lines[0], lines[1]) and lines[0].any()
    assert not np.array_equal(lines[0], lines[2])


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("A red circle, left_to right!", "a-red-circle-left-to-right"),
        ("一只狐狸 在雪地", "一只狐狸-在雪地"),
        ("Лиса/αλεπού\\ثعلب", "лиса-αλεπού-ثعلب"),
        ("a 🦊\u2028\u202e\x00\x1f../b", "a-🦊-b"),
        ("e\u0301te\u0301", "été"),
        ("a\udcffb", "a-b"),
    ],
)
def test_names_of_files_keep_letters_of_all_scripts(text: str, name: str) -> None:
    assert file_name(text) == name


@pytest.mark.parametrize("text", ["狐" * 300, "🦊" * 300, "a" * 300, "कि" * 300])
def test_names_of_files_fit(text: str, tmp_path: Path) -> None:
    name = file_name(text)
    assert 40 <= len(name) <= 60 and len(name.encode()) <= 200 and text.startswith(name)
    (tmp_path / f".999-{name}-s99.1234567.json").touch()


def test_json_holds_prompts_as_they_are(tmp_path: Path) -> None:
    """And what is no character, as an escape of JSON that reads back."""
    for index, text in enumerate(("一只狐狸 ثعلب 🦊", "a\udcff")):
        request = Request(prompt=Prompt(text), num_frames=2, size=(16, 16), fps=8.0, seed=0)
        output = Output(tmp_path, request, {"format": "gif", "prompt": text}, 2)
        output.add(np.zeros((2, 16, 16, 3), np.uint8))
        path = output.finish()
        written = path.with_suffix(".json").read_bytes().decode()
        assert json.loads(written)["prompt"] == text
        assert index == 1 or (f'"{text}"' in written and path.name == "000-一只狐狸-ثعلب-🦊.gif")

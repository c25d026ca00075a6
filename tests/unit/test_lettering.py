"""Prompts in any script: on contact sheets, in names of files, in JSON."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from fontTools.fontBuilder import FontBuilder
from fontTools.pens.ttGlyphPen import TTGlyphPen
from PIL import Image, ImageDraw, features

from opensora_sp.sampling import contact_sheet
from opensora_sp.sampling.contact_sheet import drawable, font_of, write_contact_sheet
from opensora_sp.sampling.outputs import Output
from opensora_sp.sampling.prompts import Prompt
from opensora_sp.sampling.requests import Request, file_name

FOX = "狐"


@pytest.fixture
def fonts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """matplotlib's DejaVu Sans, as installed, and a font with one Chinese character, a square."""
    dejavu = contact_sheet.font_files()[0]
    path = tmp_path / "one.ttf"
    pen = TTGlyphPen(None)
    pen.moveTo((0, 0))
    for corner in ((0, 1000), (1000, 1000), (1000, 0)):
        pen.lineTo(corner)
    pen.closePath()
    font = FontBuilder(1000)
    font.setupGlyphOrder([".notdef", "fox"])
    font.setupCharacterMap({ord(FOX): "fox"})
    font.setupGlyf({".notdef": TTGlyphPen(None).glyph(), "fox": pen.glyph()})
    font.setupHorizontalMetrics({".notdef": (1000, 0), "fox": (1000, 0)})
    font.setupHorizontalHeader(ascent=1000, descent=0)
    font.setupOS2()
    font.setupPost()
    font.save(path)
    monkeypatch.setattr(contact_sheet, "font_files", lambda: [dejavu, str(path)])
    return path


def black(text: str) -> np.ndarray:
    """Which pixels of a line a text makes dark."""
    image = Image.new("RGB", (200, 24), "white")
    contact_sheet.draw_text(ImageDraw.Draw(image), (0, 3), text, size=13)
    return np.asarray(image)[..., 0] < 128


def test_a_title_is_drawn_in_the_font_with_most_of_it(fonts: Path) -> None:
    assert drawable(f"a {FOX} and 狸, 🦊", "video 3") == "a and ,"
    assert font_of(f"{FOX * 3} a") == str(fonts) and drawable(f"{FOX * 3} a", "") == FOX * 3
    square = black(FOX)
    assert square.sum() >= 12 * 12 and square[:, :13].sum() == square.sum()
    assert drawable("狸狸", "video 3") == drawable("🦊!", "video 3") == "video 3"


def test_a_sheet_of_a_prompt_that_no_font_has_shows_its_number(fonts: Path, tmp_path: Path) -> None:
    frames = np.zeros((2, 8, 8, 3), np.uint8)
    for title, shown in (("狸", "video 0"), (f"{FOX}狸", FOX), ("αλεπού", "αλεπού")):
        write_contact_sheet(tmp_path / "sheet.png", [(title, frames)])
        line = np.asarray(Image.open(tmp_path / "sheet.png"))[:20, 6:206, 0] < 128
        wanted = black(shown)[:20, :200]
        assert np.array_equal(line, wanted) and wanted.any(), title


def test_right_to_left_scripts_need_their_shaping(monkeypatch: pytest.MonkeyPatch) -> None:
    if features.check("raqm"):
        assert drawable("ثعلب fox", "video 3") == "ثعلب fox"
    monkeypatch.setattr(features, "check", lambda name: False)
    assert drawable("ثعلب fox", "video 3") == "fox"


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

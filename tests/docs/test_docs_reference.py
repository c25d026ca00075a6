"""What documentation says about the code: generated pages are complete, quotations are current.

The README says the same in both languages.
"""

from __future__ import annotations

import ast
import importlib
import re
from dataclasses import fields
from pathlib import Path

import drawings
import pytest
import reference_api
import reference_cli
import reference_config
import reference_errors
from pages import PAGES, blocks_of
from runs import ROOT

from opensora_sp.config import InferenceConfig, TrainConfig, load_train_config
from opensora_sp.models.registry import CLASSES, PRESETS
from opensora_sp.planner.run_plan import plan

DOCS = ROOT / "docs"
PACKAGE = ROOT / "opensora_sp"
MESSAGES = list(reference_errors.messages())


def table_keys(page: str) -> list[str]:
    """The first cell of every row of every table."""
    return re.findall(r"^\| `([^`]+)` \|", page, re.MULTILINE)


def section(page: str, title: str) -> str:
    """What stands under a heading, up to the next of its level or above."""
    found = re.search(
        rf"^(#+) {re.escape(title)}\n(.*?)(?=^#{{1,2}} |^### |\Z)", page, re.DOTALL | re.MULTILINE
    )
    assert found, f"no section {title!r}"
    return found[2]


def test_every_config_key_is_on_the_page() -> None:
    page = reference_config.page()
    shared = table_keys(section(page, "Training and sampling"))
    for title, cls in (("Training alone", TrainConfig), ("Sampling alone", InferenceConfig)):
        assert sorted(shared + table_keys(section(page, title))) == sorted(cls.model_fields)

    nested = dict(reference_config.nested())
    assert {"dataset", "optimizer", "sequence_parallel", "validation", "prompts"} <= set(nested)
    for key, cls in nested.items():
        assert table_keys(section(page, f"{key} = dict(...)")) == list(cls.model_fields)
    for key, known in reference_config.COMPONENTS.items():
        assert key in TrainConfig.model_fields
        for name in known:
            assert section(page, name)

    assert {f'"{name}"' for name in PRESETS} <= set(table_keys(page))
    for name, model in CLASSES.items():
        assert sorted(table_keys(section(page, name))) == sorted(
            one.name for one in fields(model.Config)
        )


def test_every_config_key_has_a_meaning() -> None:
    schemas = (TrainConfig, InferenceConfig, *dict(reference_config.nested()).values())
    for cls in schemas:
        missing = [key for key in cls.model_fields if not reference_config.meaning(cls, key)]
        assert not missing, f"describe {missing} of {cls.__name__}"


def test_bounds_and_choices_are_reported() -> None:
    table = reference_config.fields_table(
        TrainConfig, ["batch_size", "precision", "ema_decay", "dataset"]
    )
    assert "| `batch_size` | int, ≥ 1 | `1` |" in table
    assert '`"bf16"`' in table and "float, ≥ 0, < 1" in table
    assert "| `dataset` | Dataset | **required** |" in table


def test_every_argument_of_every_command_is_on_the_page() -> None:
    page, names = reference_cli.page(), []
    for name, parser in reference_cli.parsers():
        names.append(name)
        reported = section(page, name)
        for action in parser._actions:
            shown = action.option_strings or [action.dest]
            assert all(
                f"`{one}" in reported or "-h" in shown or f"`{action.metavar}" in reported
                for one in shown
            ), shown
    assert {"opensora-sp train", "opensora-sp sample", "opensora-sp plan"} <= set(names)


def test_every_public_name_is_on_the_page() -> None:
    page = reference_api.page()
    inits = [path for path in PACKAGE.rglob("*/__init__.py") if "__all__" in path.read_text()]
    packages = {".".join(path.parent.relative_to(PACKAGE).parts) for path in inits}
    modules = {path.stem for path in PACKAGE.glob("*.py") if "__all__ =" in path.read_text()}
    assert packages | modules - {"__init__"} == set(reference_api.PACKAGES)
    for package in reference_api.PACKAGES:
        names = dict(reference_api.public_names(package))
        assert set(names) == set(importlib.import_module(f"opensora_sp.{package}").__all__)
        for name, home in names.items():
            assert f"::: {home}.{name}\n" in page
            assert hasattr(importlib.import_module(home), name)


def quoted() -> list[str]:
    """The messages that the troubleshooting page quotes as ours."""
    page = (DOCS / "troubleshooting.md").read_text().partition("## From elsewhere")[0]
    return [text.replace("\\|", "|") for text in table_keys(page)]


def said_by(quote: str) -> set[str]:
    """The modules with a message that a quote, in which … stands for anything, is of."""
    pattern = ".*".join(map(re.escape, quote.split("…")))
    return {
        message.module
        for message in MESSAGES
        if re.search(pattern, re.sub(r"%[-.\d]*[a-z]", "…", message.text), re.DOTALL)
    }


def test_quoted_messages_are_those_of_the_code() -> None:
    assert len(quoted()) > 50
    gone = [quote for quote in quoted() if not said_by(quote)]
    assert not gone, f"no such message: {gone}"


@pytest.mark.parametrize("name", drawings.DRAWINGS)
def test_drawings_are_current(name: str) -> None:
    assert (DOCS / "images" / name).read_text() == drawings.DRAWINGS[name](), (
        "python scripts/docs/drawings.py"
    )


def outline(page: Path) -> dict[str, list]:
    """What two versions of a page in different languages share."""
    text = page.read_text(encoding="utf-8")
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    return {
        "headings": [len(one) for one in re.findall(r"^(#+) ", prose, re.MULTILINE)],
        "blocks": blocks_text(page),
        "links": [
            link for link in re.findall(r"\]\(([^)]+)\)", prose) if not link.startswith("README")
        ],
        "list items": re.findall(r"^\*", prose, re.MULTILINE),
        "table rows": re.findall(r"^\|", prose, re.MULTILINE),
        "code": sorted(set(re.findall(r"`([^`\n]+)`", prose))),
    }


def blocks_text(page: Path) -> list[tuple]:
    return [(block.language, block.mark, block.text) for block in blocks_of(page)]


def test_readme_says_the_same_in_both_languages() -> None:
    english, chinese = outline(ROOT / "README.md"), outline(ROOT / "README_zh.md")
    for what in english:
        assert english[what] == chinese[what], what


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_anchors_lead_somewhere(page: Path) -> None:
    """As GitHub shows them; ``make docs`` checks links to generated pages and within the site."""
    names = ("config", "open_sora", "cli", "api", "errors")
    generated = {DOCS / "reference" / f"{name}.md" for name in names}
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if "://" in link or link.startswith("mailto:"):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if target in generated:
            continue
        assert target.exists(), link
        assert not page.is_relative_to(DOCS) or target.is_relative_to(DOCS), f"{link}: not served"
        assert not anchor or anchor in anchors(target), link


def prose(page: Path) -> str:
    """A page without its fenced blocks."""
    text = page.read_text(encoding="utf-8")
    return re.sub(r"^ *```.*?^ *```$", "", text, flags=re.DOTALL | re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings."""
    headings = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\s-]", "", title).strip().lower().replace(" ", "-") for title in headings}


def test_the_table_of_lora_configs_is_that_of_the_planner() -> None:
    page = (DOCS / "lora.md").read_text()
    row = r"^\| `(configs/\S+)` \| (\d+ frames of \d+p), .* \| (\d+) GB \| (\d+\.\d) GB \|$"
    rows = re.findall(row, page, re.MULTILINE)
    configs = sorted((ROOT / "configs").rglob("lora_*.py"))
    assert sorted(ROOT / path for path, *_ in rows) == configs

    for path, clips, gpu, peak in rows:
        header = ast.get_docstring(ast.parse((ROOT / path).read_text())) or ""
        assert f"on one GPU of {gpu} GB: {clips}." in header
        (bucket,) = plan(load_train_config(ROOT / path), 1, memory_gb=float(gpu)).buckets
        assert f"{bucket.memory.peak.total / 1e9:.1f}" == peak and bucket.fits

"""What stands beside the code: versions of tools, citation, change log, issue forms."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]


def commands_of_lint() -> list[str]:
    recipe = re.search(r"^lint:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.M)
    assert recipe
    return [line.strip().removeprefix("$(BIN)/") for line in recipe[1].splitlines()]


def test_workflows_run_ci_and_publish_without_a_stored_token() -> None:
    """``make lint-workflows`` checks the rest."""
    folder = ROOT / ".github/workflows"
    flows = {path.stem: yaml.safe_load(path.read_text()) for path in folder.glob("*.yml")}
    assert {"ci", "docs", "release"} == flows.keys()
    assert {"run": ".ci/run"} in flows["ci"]["jobs"]["run"]["steps"]
    assert {"run": "make docs"} in flows["docs"]["jobs"]["build"]["steps"]

    publish = flows["release"]["jobs"]["publish"]
    assert publish["permissions"] == {"id-token": "write"} and publish["needs"] == "build"
    texts = [path.read_text() for path in folder.glob("*.yml")]
    assert not any("secrets." in text for text in texts)
    assert all(flow["permissions"] == {"contents": "read"} for flow in flows.values())

    lint = ("make lint", "make lint-workflows")
    assert set(lint) <= set((ROOT / ".ci/run").read_text().splitlines())
    assert "hadolint Dockerfile" in commands_of_lint()


def test_the_image_gets_all_that_the_package_is_built_from() -> None:
    copied = re.findall(r"^COPY (.+) \S+$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    sources = " ".join(copied).split()
    # Of which tests/e2e/test_install.py builds it.
    wanted = {"opensora_sp", "configs", "setup.py", "pyproject.toml", "README.md", "LICENSE"}
    assert set(sources) == wanted
    context = (ROOT / ".dockerignore").read_text().splitlines()
    assert {f"!{name}" for name in wanted} <= set(context) and context[0] == "*"


def test_no_test_file_imports_another() -> None:
    """What several of them need is in tests/helpers."""
    importing = re.compile(r"^\s*(?:from|import) (test_\w+)", re.M)
    found = {
        path.name: importing.findall(path.read_text()) for path in (ROOT / "tests").rglob("*.py")
    }
    assert len(found) > 100
    assert not {name: modules for name, modules in found.items() if modules}


def test_mutations_fit_the_code_and_their_tests_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    """``make test-mutations`` applies them; here only that each can be applied."""
    monkeypatch.syspath_prepend(ROOT / "scripts")
    from mutations import MUTATIONS

    assert len(MUTATIONS) == 18
    for mutation in MUTATIONS:
        assert mutation.new in mutation.text_in(ROOT)
        for test in mutation.tests:
            file, _, name = test.partition("::")
            assert f"def {name}" in (ROOT / file).read_text(), mutation.name

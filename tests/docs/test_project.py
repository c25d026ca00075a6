"""What stands beside the code: versions of tools, citation, change log, issue forms."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
TOOLS = ("ruff check", "ruff format", "codespell", "mypy")


def commands_of_lint() -> list[str]:
    recipe = re.search(r"^lint:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.M)
    assert recipe
    return [line.strip().removeprefix("$(BIN)/") for line in recipe[1].splitlines()]


def test_commits_and_ci_are_linted_by_the_same_tools_in_one_version() -> None:
    commands = commands_of_lint()
    assert all(any(command.startswith(tool) for command in commands) for tool in TOOLS)
    (repo,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert repo["repo"] == "local"  # nothing is downloaded
    hooks = repo["hooks"]
    assert all(hook["language"] == "system" for hook in hooks)
    assert all(any(hook["entry"].startswith(tool) for hook in hooks) for tool in TOOLS)
    setup = (ROOT / "setup.py").read_text()
    for tool in {tool.split()[0] for tool in TOOLS}:
        assert re.search(rf'"{tool}(\[\w+\])?==[\d.]+"', setup), f"{tool} is not pinned"


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


def test_ci_runs_every_test_but_the_grids_and_begins_with_make_test() -> None:
    makefile = (ROOT / "Makefile").read_text()
    assert "FAST := not slow and not grid\nSLOW := slow and not grid\n" in makefile
    assert "\ntest-all: test test-slow test-serial\n" in makefile
    assert '\ntest: $(VENV)/.installed\n\t$(PARALLEL) -m "$(FAST)"\n' in makefile
    assert (
        '\ntest-slow: $(VENV)/.installed\n\t$(PARALLEL) -m "$(SLOW) and not serial"\n' in makefile
    )
    assert '\ntest-serial: $(VENV)/.installed\n\t$(PYTEST) -m "$(SLOW) and serial"\n' in makefile
    tiers = re.findall(r"^tier make (.*)$", (ROOT / ".ci/run").read_text(), re.M)
    assert tiers == ["test", "test-slow", "test-serial"]


def test_mutations_fit_the_code_and_their_tests_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    """``make test-mutations`` applies them; here only that each can be applied."""
    monkeypatch.syspath_prepend(ROOT / "scripts")
    from mutations import MUTATIONS

    assert len(MUTATIONS) == 17
    for mutation in MUTATIONS:
        assert mutation.new in mutation.text_in(ROOT)
        for test in mutation.tests:
            file, _, name = test.partition("::")
            assert f"def {name}" in (ROOT / file).read_text(), mutation.name

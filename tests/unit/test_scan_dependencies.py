"""The scan for known vulnerabilities: what it accepts, and what it does without its database."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import scan_dependencies
from scan_dependencies import ACCEPTED, main, not_accepted, read_accepted


def report(**advisory: Any) -> dict[str, Any]:
    whole = {"id": "PYSEC-1", "aliases": [], "fix_versions": ["2.6.0"], **advisory}
    packages = [{"name": "torch", "version": "2.5.1", "vulns": [whole]}]
    return {"dependencies": [*packages, {"name": "local", "skip_reason": "not on PyPI"}]}


def test_an_advisory_is_accepted_by_any_of_its_identifiers() -> None:
    accepted = {"CVE-1": "torch: not called"}
    (line,) = not_accepted(report(), accepted)
    assert line == "torch 2.5.1: PYSEC-1, mended in 2.6.0"
    assert list(not_accepted(report(aliases=["GHSA-1", "CVE-1"]), accepted)) == []
    (line,) = not_accepted(report(fix_versions=[]), accepted)
    assert line.endswith("mended in no version")


def test_each_accepted_advisory_has_a_reason(tmp_path: Path) -> None:
    accepted = read_accepted(ACCEPTED)
    assert "CVE-2024-6345" in accepted and all(accepted.values())
    (tmp_path / "list").write_text("CVE-1 torch\n")
    with pytest.raises(ValueError, match="got 'CVE-1 torch' .* expected identifier, package and"):
        read_accepted(tmp_path / "list")


def test_a_new_advisory_fails_and_an_unreachable_database_is_stated(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(scan_dependencies, "scan", report)
    monkeypatch.setattr(scan_dependencies, "why_unreachable", lambda: None)
    with pytest.raises(SystemExit, match="not accepted:\ntorch 2.5.1: PYSEC-1"):
        main()

    monkeypatch.undo()
    monkeypatch.setattr(scan_dependencies, "KNOWN", "http://127.0.0.1:9/")  # nobody listens there
    main()
    assert "not scanned: the database of advisories cannot be reached" in capsys.readouterr().out

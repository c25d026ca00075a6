"""Ask for known vulnerabilities of the installed packages; fail at those that are not accepted.

make scan

Where the database of advisories cannot be reached, that is stated, and nothing is scanned.
pip-audit is installed into an environment of its own, .venv-scan, so that it is not scanned too.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.request import urlopen

ROOT = Path(__file__).parents[1]
ACCEPTED = ROOT / ".ci/accepted_advisories.txt"
SCANNER = ROOT / ".venv-scan"
# A release with advisories: an index that lists none for it is a mirror without them.
KNOWN = "https://pypi.org/pypi/torch/2.5.1/json"
TIMEOUT = 20  # seconds


def why_unreachable() -> str | None:
    """The reason why the database cannot be asked; None where it can."""
    try:
        with urlopen(KNOWN, timeout=TIMEOUT) as answer:
            listed = json.load(answer).get("vulnerabilities")
    except (OSError, HTTPException, ValueError) as error:
        return f"{KNOWN}: {error}"
    return None if listed else f"{KNOWN} lists no advisories"


def read_accepted(path: Path) -> dict[str, str]:
    """Identifier and reason of each accepted advisory.

    Raises:
        ValueError: for a line that has no reason.
    """
    accepted = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        identifier, package, *reason = line.split(maxsplit=2)
        if not reason:
            raise ValueError(f"got {line!r} in {path}; expected identifier, package and reason")
        accepted[identifier] = f"{package}: {reason[0]}"
    return accepted


def not_accepted(report: dict[str, Any], accepted: dict[str, str]) -> Iterator[str]:
    """A line for each advisory in pip-audit's report, none of whose identifiers is accepted."""
    for package in report["dependencies"]:
        for advisory in package.get("vulns", []):
            identifiers = [advisory["id"], *advisory["aliases"]]
            if not accepted.keys() & set(identifiers):
                fixed = ", ".join(advisory["fix_versions"]) or "no version"
                yield (
                    f"{package['name']} {package['version']}: {', '.join(identifiers)}, "
                    f"mended in {fixed}"
                )


def install_scanner() -> Path:
    """The program pip-audit."""
    program = SCANNER / "bin/pip-audit"
    if not program.exists():
        subprocess.run(["sh", ROOT / "scripts/make_venv.sh", SCANNER], check=True)
        pip = [SCANNER / "bin/pip", "install", "--quiet", "pip-audit"]
        subprocess.run(pip, check=True)
    return program


def scan() -> dict[str, Any]:
    """pip-audit's report on the packages of the Python that runs this."""
    command = [install_scanner(), "--path", sysconfig.get_path("purelib")]
    command += ["--format", "json", "--progress-spinner", "off"]
    found = subprocess.run(command, capture_output=True, text=True)
    try:
        return json.loads(found.stdout)
    except ValueError:
        sys.exit(f"error: pip-audit gave no report:\n{found.stderr}")


def main() -> None:
    accepted = read_accepted(ACCEPTED)
    if reason := why_unreachable():
        print(f"not scanned: the database of advisories cannot be reached ({reason})")
        return

    new = list(not_accepted(scan(), accepted))
    if new:
        sys.exit("advisories that are not accepted:\n" + "\n".join(new))
    print(f"no advisories but those that {ACCEPTED.relative_to(ROOT)} accepts")


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    main()

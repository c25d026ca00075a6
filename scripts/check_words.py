"""Fail on words that the field does not use: ``python scripts/check_words.py``, in `make lint`.

A search for the standard term must find the right file. Each pattern has the term to write instead.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path

INSTEAD = {
    r"told|(?<!\.)tells?\b": "report, log, raise, return, state",
    r"\bmeeting\b|who has come": "rendezvous, ranks that have joined",
    r"hung on|hangs? (?:on|at) |take hold of": "hooks attached to the model, hook points",
    r"sees? to it": "propagates failures",
    r"\bbeats?\b": "heartbeat",
    r"\bmasters\b": "fp32 master weights",
    r"given frames?": "conditioning frames",
    r"broken clips?": "corrupt sample",
    r"ways? to share": "parallel strategy",
    r"under way|\blands\b": "in-flight all-to-all, completion",
    r"narrow exchange": "low-precision all-to-all",
    r"dealt out|deals? out": "distributed",
    r"who wants to know": "listeners",
    r"what it takes|what it costs|how good they are": "memory footprint, overhead, accuracy",
    r"dearer|costlier": "cost grows with",
    r"training's back": "asynchronously, in the background",
    r"whom to trust": "security model",
    r"\bgoes on\b|\bgo on\b|\bwent on\b": "resumes, continues",
    r"one's own|\bown loops?\b": "custom training loop, custom model",
    r"\bseams?\b": "file-system interface",
    r"(?<!Comm)\b[Ll]edgers?\b": "communication counter",
    r"\bpromises?\b": "guarantees",
    r"gates of weight": "a plain statement of the quantity",
}
PATTERNS = [(re.compile(pattern, re.IGNORECASE), term) for pattern, term in INSTEAD.items()]

# File (or folder) and pattern of the line that may keep the word, with the reason.
EXCEPTIONS = {
    ("scripts/check_words.py", ""): "the list itself",
    ("tests/golden/", ""): "reference data",
    ("LICENSE", ""): "a legal text",
}


def allowed(file: str, line: str) -> bool:
    return any(file.startswith(prefix) and part in line for prefix, part in EXCEPTIONS)


def findings(file: str) -> list[str]:
    """``file:line: word; write ...`` for each word of a file that must not return."""
    found = []
    for number, line in enumerate(Path(file).read_text(errors="ignore").splitlines(), start=1):
        if allowed(file, line):
            continue
        for pattern, term in PATTERNS:
            found += [
                f"{file}:{number}: {match[0]!r}; write: {term}" for match in pattern.finditer(line)
            ]
    return found


def main() -> int:
    listed = subprocess.run(["git", "ls-files"], check=True, capture_output=True, text=True)
    suffixes = {".py", ".md", ".toml", ".yml", ".sh", ".html", ".js", ".css", ""}
    # Links to folders are listed as well.
    files = list(filter(os.path.isfile, listed.stdout.splitlines()))
    files = [file for file in files if Path(file).suffix in suffixes]

    found = [finding for file in files for finding in findings(file)]
    print("\n".join(found) if found else f"{len(files)} files use the field's words")
    return 1 if found else 0


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    sys.exit(main())

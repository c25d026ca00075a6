"""Run one benchmark, or list all.

python -m benchmarks                       # lists them
python -m benchmarks NAME --help           # its options
python -m benchmarks NAME --json FILE      # runs it, and writes its figures

The exit status is 1 if a benchmark with limits misses one, 2 if it cannot run here.
"""

import argparse
import ast
import json
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.processes import limit_time

FOLDER = Path(__file__).parent
HELPERS = ("__init__", "__main__", "processes")


def main(words: Sequence[str]) -> int:
    if not words or words[0] in ("-h", "--help"):
        for name, summary in summaries().items():
            print(f"{name:18} {summary}")
        return 0

    name, *options = words
    if name not in summaries():
        print(
            f"got the benchmark {name!r}; expected one of {', '.join(summaries())}; correct the "
            "name",
            file=sys.stderr,
        )
        return 2
    return run(name, options)


def summaries() -> dict[str, str]:
    """The first line of each benchmark's docstring, without importing it."""
    found = {}
    for path in sorted(FOLDER.glob("*.py")):
        if path.stem not in HELPERS:
            docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
            found[path.stem] = docstring.partition("\n")[0]
    return found


def run(name: str, options: Sequence[str]) -> int:
    benchmark: Any = import_module(f"benchmarks.{name}")
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks {name}",
        description=benchmark.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures there")
    benchmark.add_options(parser)
    args = parser.parse_args(options)

    limit_time()
    try:
        figures = benchmark.run(args)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2

    if args.json is not None:
        args.json.write_text(json.dumps(figures, indent=1) + "\n")
    return int(not figures.get("kept", True))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

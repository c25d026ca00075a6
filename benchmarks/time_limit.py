"""A time limit for every process of a benchmark: one that hangs ends with the stacks of its
threads.

``BENCHMARK_TIME_LIMIT=7200 python benchmarks/...`` sets another one, in seconds.
"""

import faulthandler
import os


def limit_time() -> None:
    """Exit with status 1 and all stacks on stderr when time is up, also while the GIL is held."""
    seconds = float(os.environ.get("BENCHMARK_TIME_LIMIT", "3600"))
    faulthandler.dump_traceback_later(seconds, exit=True)

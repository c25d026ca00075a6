"""A time limit for every process of a benchmark.

``BENCHMARK_TIME_LIMIT=7200 python -m benchmarks ...`` sets another limit, in seconds.
"""

import faulthandler
import os


def limit_time() -> None:
    """After the limit, exit with status 1 and dump all stacks, even while the GIL is held."""
    seconds = float(os.environ.get("BENCHMARK_TIME_LIMIT", "3600"))
    faulthandler.dump_traceback_later(seconds, exit=True)

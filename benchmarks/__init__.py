"""Benchmarks, all run by ``python -m benchmarks`` (``__main__.py``).

A benchmark is a module with the functions ``add_options(parser)`` and ``run(args)``. The latter
prints what people read and returns its figures as JSON values. Those with limits return whether
they were ``kept``.
"""

"""Triton kernels: each module has the functions of the one of its name in ``kernels``.

Imported only when a kernel is chosen: Triton needs not be installed without a GPU. A module with
kernels must not begin with ``from __future__ import annotations``: Triton's interpreter reads
``tl.constexpr`` from the annotations themselves.
"""

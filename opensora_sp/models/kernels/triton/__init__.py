"""Triton kernels, with the functions and signatures of ``reference``.

Imported only when a kernel is chosen: Triton needs not be installed without a GPU. A module with
kernels must not begin with ``from __future__ import annotations``: Triton's interpreter reads
``tl.constexpr`` from the annotations themselves.
"""

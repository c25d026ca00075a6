"""Fused kernels (``fused.py``), the setting that chooses them, and their verification."""

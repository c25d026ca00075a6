"""The GPUs for which tests compile Triton's kernels, by compute capability."""

CAPABILITIES = (80, 90, 100, 120)

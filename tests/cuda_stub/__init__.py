"""CUDA's code paths on any machine: run a function under a stub that records and computes nothing.

    @requires_stub
    def test_a_linear_layer_is_one_gemm():
        recording = run_on_stub(linear)
        assert len(recording.gemms) == 1

What is exact and what is meaningless under it: `docs/testing_cuda.md`.
"""

from cuda_stub.collectives import CollectiveError, join
from cuda_stub.inside import phase
from cuda_stub.recording import Recording
from cuda_stub.runner import StubError, requires_stub, run_on_stub

__all__ = [
    "CollectiveError",
    "Recording",
    "StubError",
    "join",
    "phase",
    "requires_stub",
    "run_on_stub",
]

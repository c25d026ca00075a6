"""CUDA's code paths on any machine: run a function under a stub that records and computes nothing.

    @requires_stub
    def test_a_linear_layer_is_one_gemm():
        recording = run_on_stub(linear)
        assert len(recording.gemms) == 1

What is exact and what is meaningless under it: `docs/testing_cuda.md`.
"""

from cuda_stub.collectives import Collective, CollectiveError, join
from cuda_stub.inside import phase
from cuda_stub.recording import (
    Allocation,
    Convolution,
    Copy,
    Event,
    Gemm,
    Graph,
    Launch,
    Memory,
    Memset,
    Recording,
    Sync,
)
from cuda_stub.runner import StubError, requires_stub, run_on_stub

__all__ = [
    "Allocation",
    "Collective",
    "CollectiveError",
    "Convolution",
    "Copy",
    "Event",
    "StubError",
    "Gemm",
    "Graph",
    "Launch",
    "Memory",
    "Memset",
    "Recording",
    "Sync",
    "join",
    "phase",
    "requires_stub",
    "run_on_stub",
]

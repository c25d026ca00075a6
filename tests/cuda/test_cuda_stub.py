"""The stub itself: what it records is what was called, and what it cannot do fails by name.

The functions that run under it are at the top level of this file; their names begin with `on_`.
"""

import contextlib
import ctypes

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from cuda_stub import CollectiveError, StubError, build, join, phase, requires_stub, run_on_stub
from cuda_stub.inside import Session

from opensora_sp.parallel import SequenceMesh

pytestmark = requires_stub
GIB = 2**30


def on_attention():
    q = torch.empty(4, 16, 1000, 64, device="cuda", dtype=torch.bfloat16)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
        F.scaled_dot_product_attention(q, q, q)


def test_launches_have_demangled_names_and_grids():
    (launch,) = run_on_stub(on_attention).launches
    assert "flash_fwd_kernel" in launch.name and "cutlass::bfloat16_t" in launch.name
    # Blocks of 128 queries, samples, heads.
    assert launch.grid == (8, 4, 16)
    assert launch.shared == 48 * 1024


def on_copies():
    pageable, pinned = torch.arange(1000.0), torch.arange(1000.0).pin_memory()
    assert pinned.is_pinned() and not pageable.is_pinned()

    phase("pageable")
    there = pageable.cuda()
    phase("pinned")
    also_there = pinned.cuda(non_blocking=True)
    phase("back")
    back = there.cpu(), also_there.clone().cpu()
    phase("zeros")
    there.zero_()
    zeros = torch.zeros(5_000_000, device="cuda", dtype=torch.int64)
    zeros[123].copy_(torch.tensor(7))
    return back[0], back[1], zeros[123].item()


def test_copies_move_bytes_and_are_recorded():
    recording = run_on_stub(on_copies)

    assert torch.equal(recording.result[0], torch.arange(1000.0))
    assert torch.equal(recording.result[1], torch.arange(1000.0))
    assert recording.result[2] == 7
    seen = []
    for copy in recording.copies:
        if copy.phase in ("pageable", "pinned", "back"):
            seen.append((copy.phase, copy.kind, copy.bytes, copy.pinned, copy.blocking))
    assert seen == [
        ("pageable", "H2D", 4000, False, False),
        ("pinned", "H2D", 4000, True, False),
        ("back", "D2H", 4000, False, True),
        ("back", "D2D", 4000, True, False),
        ("back", "D2H", 4000, False, True),
    ]


class Reads(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        grad.sum().item()  # a sync in autograd's thread
        return grad


def on_syncs():
    x = torch.zeros(4, device="cuda", requires_grad=True)
    phase("item")
    x.sum().item()
    phase("device")
    torch.cuda.synchronize()
    phase("event")
    event = torch.cuda.Event()
    event.record()
    event.synchronize()
    phase("backward")
    Reads.apply(x).sum().backward()
    phase("none")
    on_host = x.cpu().sum()
    phase("engine")
    on_host.backward()


def test_syncs_have_the_source_line_that_caused_them():
    recording = run_on_stub(on_syncs)
    with open(__file__) as file:
        lines = file.read().splitlines()
    number = {text.strip(): index for index, text in enumerate(lines, 1)}

    waits = [sync for sync in recording.syncs if sync.phase not in ("none", "engine")]
    found = {sync.phase: (sync.kind, sync.where) for sync in waits}
    # A copy of autograd's own, in a thread without a frame of Python.
    for copy in recording.in_phase("engine").copies:
        assert copy.where == f"test_cuda_stub.py:{number['on_host.backward()']}"
    assert recording.in_phase("engine").copies
    name = "test_cuda_stub.py"
    in_backward = number["def backward(ctx, grad):"] + 1
    assert found == {
        "item": ("stream", f"{name}:{number['x.sum().item()']}"),
        "device": ("device", f"{name}:{number['torch.cuda.synchronize()']}"),
        "event": ("event", f"{name}:{number['event.synchronize()']}"),
        "backward": ("stream", f"{name}:{in_backward}"),
    }


def on_streams():
    main, side = torch.cuda.current_stream(), torch.cuda.Stream()
    x = torch.zeros(1 << 20, device="cuda")
    side.wait_stream(main)
    with torch.cuda.stream(side):
        x + 1
    x.record_stream(side)
    del x
    # record_stream makes the allocator wait for the side stream before it gives the block away.
    phase("after")
    torch.zeros(1 << 20, device="cuda")
    main.wait_stream(side)


def test_streams_and_events():
    recording = run_on_stub(on_streams)
    assert len(recording.streams) == 2
    (side,) = recording.streams - {0}
    (add,) = [launch for launch in recording.launches if launch.stream == side]

    order = [(event.kind, event.stream) for event in recording.events]
    assert order == [
        ("record", 0),
        ("wait", side),
        ("record", side),  # the allocator's, for record_stream
        ("record", side),
        ("wait", 0),
    ]
    recorded, waited = recording.events[:2]
    assert recorded.event == waited.event
    assert "add" in add.name.lower()


def on_memory():
    x = torch.zeros(GIB // 4, device="cuda")  # 1 GiB
    phase("step")
    y = x + 1
    del y
    phase("out of memory")
    try:
        torch.empty(4 * GIB, device="cuda", dtype=torch.uint8)
    except torch.cuda.OutOfMemoryError as error:
        return str(error), torch.cuda.mem_get_info()


def test_peaks_of_the_allocator_and_running_out_of_memory():
    recording = run_on_stub(on_memory, memory=4 * GIB)

    step = recording.peak("step")
    assert (step.before, step.after, step.allocated) == (GIB, GIB, 2 * GIB)
    assert step.reserved >= step.allocated
    text, (free, total) = recording.result
    assert total == 4 * GIB and 0 < free < 4 * GIB
    assert "CUDA out of memory. Tried to allocate 4.00 GiB" in text
    assert [a.bytes for a in recording.allocations if a.kind == "oom"]


class StubLaunch(ctypes.Structure):
    """``struct stub_launch`` of the C side."""

    _fields_ = [
        ("name", ctypes.c_char_p),
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_size_t),
        ("stream", ctypes.c_void_p),
    ]


def on_grid_limits():
    launch, extents = Session.current.library.stub_launch, ctypes.c_uint * 3
    sizes = [((65_535, 65_535, 2), 0), ((1, 1, 70_000), 0), ((1, 1, 1), 232_449)]
    statuses = []
    for grid, shared in sizes:
        call = StubLaunch(b"kernel", extents(*grid), extents(128, 1, 1), shared, None)
        statuses.append(launch(ctypes.byref(call)))
    return statuses


def test_launches_beyond_the_limits_are_refused():
    recording = run_on_stub(on_grid_limits)
    assert recording.result == [0, 1, 1]
    assert [launch.grid for launch in recording.launches] == [(65_535, 65_535, 2)]
    assert [launch.grid[2] for launch in recording.refused] == [70_000, 1]


def on_unknown_calls():
    a = torch.eye(4, device="cuda")
    with contextlib.suppress(RuntimeError):
        torch.linalg.eigh(a)


def test_a_call_that_the_stub_does_not_implement_fails_by_name():
    message = r"not implemented by the stub: cusolver\w+ at test_cuda_stub.py:\d+"
    with pytest.raises(StubError, match=message):
        run_on_stub(on_unknown_calls)


def on_failures(how):
    if how == "raise":
        raise ValueError("as written in the test")
    if how == "exit":
        import os

        os._exit(3)
    while True:
        pass


@pytest.mark.parametrize(
    "how, message",
    [("raise", "ValueError: as written in the test"), ("exit", "exit code 3"), ("hang", "Timeout")],
)
def test_failures_come_back(how, message):
    with pytest.raises(StubError, match=message):
        run_on_stub(on_failures, how, timeout=2)


def test_reasons_for_skipping_are_allowed():
    allowed = (build.HERE.parents[1] / ".ci" / "allowed_skips").read_text().splitlines()
    assert {build.NO_COMPILER, build.NO_CUDA_BUILD} <= set(allowed)


# One rank of a world alone, with the rules of NCCL and gloo.


def on_collectives():
    join(world=8, rank=3)
    mesh = SequenceMesh(sp_size=4)

    a = torch.zeros(8, 6, device="cuda")
    dist.all_to_all_single(torch.empty_like(a), a, [1, 2, 3, 2], [2, 2, 2, 2], group=mesh.sp_group)
    work = dist.all_reduce(a, group=mesh.dp_group, async_op=True)
    work.wait()

    gathered = torch.zeros(16, device="cuda")
    dist.all_gather_into_tensor(gathered, torch.tensor([1.0, 2.0]).cuda())
    # Objects need a host group: their sizes are compared on the device, which computes nothing.
    on_host = [None] * 4
    dist.all_gather_object(on_host, "own", group=mesh.host_group)

    total = torch.ones(3)
    dist.all_reduce(total, group=mesh.host_group)
    norm = torch.tensor([-3.0]).cuda()
    dist.all_reduce(norm)
    assert norm.tolist() == [0.0]
    return gathered.cpu(), on_host, total, (mesh.sp_group.ranks, mesh.dp_group.ranks)


def test_collectives_are_recorded_and_return_what_equal_ranks_would():
    recording = run_on_stub(on_collectives)
    gathered, on_host, total, ranks = recording.result
    assert ranks == ((0, 1, 2, 3), (3, 7))
    assert gathered.tolist() == [1.0, 2.0] * 8
    assert on_host == ["own"] * 4
    assert total.tolist() == [4.0] * 3

    exchange, reduction, gather, *_ = recording.collectives
    assert (exchange.name, exchange.group, exchange.ranks) == (
        "all_to_all_single",
        "device",
        (0, 1, 2, 3),
    )
    assert (exchange.shapes, exchange.dtypes, exchange.bytes) == (((8, 6),), ("float32",), 192)
    assert exchange.where.startswith("test_cuda_stub.py:")
    assert (reduction.name, reduction.ranks) == ("all_reduce", (3, 7))
    assert (gather.name, len(gather.ranks)) == ("all_gather_into_tensor", 8)
    assert [c.group for c in recording.collectives[-4:]] == ["host"] * 3 + ["device"]


def test_collectives_run_on_a_stream_of_their_group_and_work_is_waited_for():
    recording = run_on_stub(on_collectives)
    first = [(event.kind, event.stream) for event in recording.events[:4]]
    own = first[1][1]
    assert own != 0
    assert first == [("record", 0), ("wait", own), ("record", own), ("wait", 0)]


def on_wrong_tensors(what):
    join(world=2)
    mesh = SequenceMesh(sp_size=2)
    on_device, on_host = torch.zeros(4, 2, device="cuda"), torch.zeros(4, 2)
    group, tensor = {
        "host tensor": (mesh.sp_group, on_host),
        "device tensor": (mesh.host_group, on_device),
        "strided": (mesh.sp_group, on_device.t()),
    }[what]
    with pytest.raises(CollectiveError) as caught:
        dist.all_reduce(tensor, group=group)
    return str(caught.value)


@pytest.mark.parametrize(
    "what, message",
    [
        ("host tensor", "got a tensor on cpu in a group for cuda"),
        ("device tensor", "got a tensor on cuda in a group for cpu"),
        ("strided", "got strides (1, 2), expected contiguous ones"),
    ],
)
def test_tensors_that_a_group_cannot_send_raise(what, message):
    assert message in run_on_stub(on_wrong_tensors, what).result

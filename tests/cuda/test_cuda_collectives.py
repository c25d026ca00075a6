"""The recording process group: one rank of a world alone, with the rules of NCCL and gloo."""

import pytest
import torch
import torch.distributed as dist
from cuda_stub import CollectiveError, join, requires_stub, run_on_stub

pytestmark = requires_stub


def on_collectives():
    from opensora_sp.parallel import SequenceMesh

    join(world=8, rank=3)
    mesh = SequenceMesh(sp_size=4)

    a = torch.zeros(8, 6, device="cuda")
    dist.all_to_all_single(torch.empty_like(a), a, [1, 2, 3, 2], [2, 2, 2, 2], group=mesh.sp_group)
    work = dist.all_reduce(a, group=mesh.dp_group, async_op=True)
    work.wait()

    gathered = torch.zeros(16, device="cuda")
    dist.all_gather_into_tensor(gathered, torch.tensor([1.0, 2.0]).cuda())
    on_device, on_host = [None] * 8, [None] * 4
    dist.all_gather_object(on_device, {"rank": 3})
    dist.all_gather_object(on_host, "own", group=mesh.host_group)

    total = torch.ones(3)
    dist.all_reduce(total, group=mesh.host_group)
    norm = torch.tensor([-3.0]).cuda()
    dist.all_reduce(norm)
    assert norm.tolist() == [0.0]
    return gathered.cpu(), on_device, on_host, total, (mesh.sp_group.ranks, mesh.dp_group.ranks)


def test_collectives_are_recorded_and_return_what_equal_ranks_would():
    recording = run_on_stub(on_collectives)
    gathered, on_device, on_host, total, ranks = recording.result
    assert ranks == ((0, 1, 2, 3), (3, 7))
    assert gathered.tolist() == [1.0, 2.0] * 8
    assert on_device == [{"rank": 3}] * 8 and on_host == ["own"] * 4
    assert total.tolist() == [4.0] * 3

    exchange, reduction, gather, *_ = recording.collectives
    assert (exchange.name, exchange.group, exchange.ranks) == (
        "all_to_all_single",
        "device",
        (0, 1, 2, 3),
    )
    assert (exchange.shapes, exchange.dtypes, exchange.bytes) == (((8, 6),), ("float32",), 192)
    assert exchange.where.startswith("test_cuda_collectives.py:")
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
    from opensora_sp.parallel import SequenceMesh

    join(world=2)
    mesh = SequenceMesh(sp_size=2)
    on_device, on_host = torch.zeros(4, 2, device="cuda"), torch.zeros(4, 2)
    group, tensor = {
        "host tensor": (mesh.sp_group, on_host),
        "device tensor": (mesh.host_group, on_device),
        "strided": (mesh.sp_group, on_device.t()),
        "strided on the host": (mesh.host_group, on_host.t()),
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
        ("strided on the host", "got strides (1, 2), expected contiguous ones"),
    ],
)
def test_tensors_that_a_group_cannot_send_raise(what, message):
    assert message in run_on_stub(on_wrong_tensors, what).result

"""Every parallel strategy as one rank of eight on CUDA's code path: what is sent, host syncs."""

import pytest
from cuda_cases import batch, build
from cuda_stub import join, phase, requires_stub, run_on_stub

pytestmark = requires_stub

EIGHT_HEADS = dict(hidden_size=192, num_heads=8)
CHUNKS = 2
SWITCHES = 3  # of two pairs of blocks
STRATEGIES = {
    "switch": {},
    "ulysses": dict(strategy="ulysses"),
    "split_gather": dict(strategy="split_gather"),
    "chunks": dict(overlap_chunks=CHUNKS),
    "overlapped backward": dict(overlap_backward=True),
    "chunks, overlapped backward": dict(overlap_chunks=CHUNKS, overlap_backward=True),
}


def of_group(group, recording):
    return [one for one in recording.collectives if one.group == group]


def step(model, inputs, name):
    phase(f"{name}forward")
    shard = model(**inputs, output="shards")
    loss = shard.tensor.float().square().mean()
    phase(f"{name}backward")
    loss.backward()
    phase(f"{name}end")
    model.zero_grad(set_to_none=True)


def on_strategy(options, rank, samples, checkpoint):
    from opensora_sp.parallel import SequenceMesh, parallelize

    join(world=8, rank=rank)
    model = build("STDiT3", checkpoint=checkpoint, **EIGHT_HEADS)
    parallelize(model, SequenceMesh(sp_size=8), **options)
    # At least two frames on each rank, which can be sent in chunks.
    inputs = batch("STDiT3", model, samples=samples, size=(17, 20, 8))
    step(model, inputs, "first ")
    step(model, inputs, "")


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("checkpoint", [False, True], ids=["plain", "checkpoint"])
def test_a_strategy_sends_device_tensors_and_waits_for_nothing(name, checkpoint):
    recording = run_on_stub(on_strategy, STRATEGIES[name], 3, 1, checkpoint)
    assert not recording.refused

    for part in (recording.in_phase("forward"), recording.in_phase("backward")):
        sent = of_group("device", part)
        assert sent and {one.name for one in sent} == {"all_to_all_single"}
        assert all(len(one.ranks) == 8 for one in sent)
        if "chunks" in name:
            assert len(sent) == SWITCHES * CHUNKS
        dtypes = {"branch fp8": "uint8"}
        assert {one.dtypes for one in sent} == {(dtypes.get(name, "bfloat16"),)}
        assert not part.syncs, part.syncs

    # The check that all ranks have the same batch: two integers on the host.
    assert [one.bytes for one in of_group("host", recording.in_phase("forward"))] == [16]
    assert not of_group("host", recording.in_phase("backward"))


def test_a_switch_sends_the_share_that_the_layouts_say():
    recording = run_on_stub(on_strategy, {}, 3, 1, False)
    forward, backward = (of_group("device", recording.in_phase(n)) for n in ("forward", "backward"))

    # The switches come back in reverse.
    # Rank 3 holds two frames of 40 patches, or five patches of 17 frames.
    assert [one.shapes for one in forward] == [((80, 192),), ((85, 192),), ((80, 192),)]
    assert [one.shapes for one in backward] == [((85, 192),), ((80, 192),), ((85, 192),)]
    assert {one.dtypes for one in forward + backward} == {("bfloat16",)}


@pytest.mark.parametrize("rank", [0, 7])
def test_ranks_at_the_ends(rank):
    recording = run_on_stub(on_strategy, {}, rank, 1, False)
    assert not recording.refused
    assert len(of_group("device", recording.in_phase("forward"))) == SWITCHES


def test_whole_samples_send_nothing():
    recording = run_on_stub(on_strategy, {}, 3, 8, False)
    for name in ("forward", "backward"):
        assert not of_group("device", recording.in_phase(name))

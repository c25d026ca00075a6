"""The average of the weights follows the fp32 master weights."""

from __future__ import annotations

import pytest
import torch

from opensora_sp.training.trainable import ShardedEma


def test_the_average_follows_the_fp32_master_weights_with_a_growing_decay() -> None:
    """Steps that bf16 cannot represent count, as the average of them must not be rounded."""
    master = torch.full((4,), 1.0)
    ema = ShardedEma({"weight": master}, decay=0.5)
    expected, taken = 1.0, torch.tensor(True)
    for step in range(20):
        master += 2.0**-12  # bf16 has 2**-8 between 1 and 2
        ema.update(step, taken)
        decay = min(0.5, (1 + step) / (10 + step))
        expected = decay * expected + (1 - decay) * master[0].item()
        assert ema.shards["weight"].dtype == torch.float32
        assert ema.shards["weight"].tolist() == pytest.approx([expected] * 4, abs=1e-6)


def test_the_average_is_a_copy() -> None:
    master = torch.ones(2)
    ema = ShardedEma({"weight": master}, decay=0.9)
    master.mul_(3)
    assert ema.shards["weight"].tolist() == [1.0, 1.0]


def test_a_skipped_step_leaves_the_average() -> None:
    master = torch.randn(5)
    ema = ShardedEma({"weight": master}, decay=0.9)
    master += 1
    before = ema.shards["weight"].clone()
    ema.update(3, torch.tensor(False))
    assert torch.equal(ema.shards["weight"], before)
    ema.update(3, torch.tensor(True))
    assert not torch.equal(ema.shards["weight"], before)


def test_shards_of_one_buffer_have_averages_in_one_buffer() -> None:
    buffer, alone = torch.arange(6.0), torch.ones(2)
    first, second = buffer.split([4, 2])
    ema = ShardedEma({"second": second, "alone": alone, "first": first}, decay=0.5)
    assert {name: shard.tolist() for name, shard in ema.shards.items()} == {
        "second": [4.0, 5.0],
        "alone": [1.0, 1.0],
        "first": [0.0, 1.0, 2.0, 3.0],
    }
    assert ema.shards["first"]._base is ema.shards["second"]._base

    buffer += 2
    ema.update(100, torch.tensor(True))
    assert ema.shards["second"].tolist() == [5.0, 6.0] and ema.shards["alone"].tolist() == [1, 1]

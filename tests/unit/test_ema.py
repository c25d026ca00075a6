"""The average of the weights follows the fp32 master weights."""

from __future__ import annotations

import pytest
import torch

from opensora_sp.training.ema import ShardedEma


def test_the_average_follows_the_fp32_master_weights_with_a_growing_decay() -> None:
    """Steps that bf16 cannot represent count, as the average of them must not be rounded."""
    master = torch.full((4,), 1.0)
    ema = ShardedEma({"weight": master}, decay=0.5)
    expected = 1.0
    for step in range(20):
        master += 2.0**-12  # bf16 has 2**-8 between 1 and 2
        ema.update(step)
        decay = min(0.5, (1 + step) / (10 + step))
        expected = decay * expected + (1 - decay) * master[0].item()
        assert ema.shards["weight"].dtype == torch.float32
        assert ema.shards["weight"].tolist() == pytest.approx([expected] * 4, abs=1e-6)


def test_the_average_is_a_copy() -> None:
    master = torch.ones(2)
    ema = ShardedEma({"weight": master}, decay=0.9)
    master.mul_(3)
    assert ema.shards["weight"].tolist() == [1.0, 1.0]

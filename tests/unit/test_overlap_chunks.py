"""``overlap_chunks="auto"``: how many chunks the cost model chooses, and what the log says."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from opensora_sp.models import build_model
from opensora_sp.models.registry import resolve_config
from opensora_sp.parallel import Options, SequenceMesh, parallelize
from opensora_sp.parallel.batch_shape import BatchShape
from opensora_sp.parallel.cost_model import CHUNK_LAUNCHES, CPU, H100, best_chunks, block_flops
from opensora_sp.parallel.engine import ATTRIBUTE
from opensora_sp.parallel.mesh import spans_nodes
from opensora_sp.parallel.strategies import strategy_for, with_chunks
from opensora_sp.parallel.strategies.heads import few_frames_costs

XL2: Any = resolve_config("STDiT3-XL/2")
IMAGES: dict[str, Any] = dict(skip_temporal=True)
# Clips, latent frames, height and width; and the ranks that share them.
SHIPPED = [((1, 64, 64, 64), 8), ((1, 15, 60, 106), 8), ((4, 16, 32, 32), 2)]


@pytest.mark.parametrize("spans_nodes", [False, True])
def test_no_other_number_of_chunks_saves_more(spans_nodes):
    link = H100.link(spans_nodes=spans_nodes)
    for megabytes in (0, 1, 5, 16, 17, 30, 80, 500, 3000, 20_000):
        sent = megabytes * 1e6

        def saved(number: int, switch: float = sent / link.bandwidth) -> float:
            return switch * (1 - 1 / number) - (number - 1) * CHUNK_LAUNCHES * H100.launch

        assert saved(best_chunks(H100, link, sent)) == max(saved(number) for number in range(1, 80))


def chosen(size: tuple[int, ...], ranks: int, *, between: bool, **options: Any) -> Options:
    shape = BatchShape.of(XL2, size[0], size[1:])  # type: ignore[arg-type]
    in_group = Options(spans_nodes=between, **options)
    return with_chunks(in_group, shape, ranks, element_size=2)


def test_a_cpu_sends_nothing_in_chunks():
    assert best_chunks(CPU, CPU.link(spans_nodes=True), 20e9) == 1


@pytest.mark.parametrize(("size", "ranks"), SHIPPED)
def test_no_chunks_inside_a_node(size, ranks):
    assert chosen(size, ranks, between=False).num_chunks == 1


def test_chunks_between_nodes_where_a_switch_takes_longer_than_their_launches():
    assert chosen((1, 128, 64, 64), 8, between=True).num_chunks == 2
    assert chosen((1, 360, 64, 64), 8, between=True).num_chunks > 2
    # Half of the tokens: launches would take longer than what is saved.
    assert chosen((1, 64, 64, 64), 8, between=True).num_chunks == 1


def test_few_frames_are_divided_by_the_link_of_the_group():
    """7 frames on 8 ranks: by heads 3.5 frames are sent in place of 2, for an eighth of the work,
    which pays inside a node alone.
    """
    text = dict(caption_channels=5, model_max_length=4)
    for between, strategy in ((False, "split heads"), (True, "switch")):
        with torch.device("meta"):
            model = build_model("STDiT3", hidden_size=1152, depth=1, num_heads=16, **text)
        mesh = SequenceMesh.imagined(8, 0)
        mesh._current = replace(mesh._current, spans_nodes=between)
        parallelize(model.bfloat16(), mesh)
        grid = model.config.grid(1, (7, 128, 128))
        assert getattr(model, ATTRIBUTE).strategy(grid).label == strategy


def test_few_frames_of_a_model_of_images_are_not_switched():
    """4 small frames on 8 ranks: whole ones need no exchange, and so cost less than heads."""
    options = Options(cost_model=H100)
    computed = block_flops(256, 1152) / H100.flops + H100.attention(16, 256, 256, 72)
    switches = options.link.seconds(2 * 7 / 8 * 1152 * 2 * 256, exchanges=2)
    for model, label, sent in ({}, "split heads", switches), (IMAGES, "switch", 0.0):
        shape = BatchShape.of(resolve_config("STDiT3-XL/2", **model), 1, (4, 32, 32))
        assert strategy_for(shape, options, 8).label == label
        assert few_frames_costs(shape, options, 8).whole == pytest.approx(computed + sent)


def test_what_the_busiest_rank_computes_and_sends_by_heads():
    """9 patches of a frame on 4 ranks: one of them holds three, and each has 4 of 16 heads."""
    options, shape = Options(cost_model=H100), BatchShape.of(XL2, 1, (1, 6, 6))
    computed = block_flops(3, 1152) / H100.flops + H100.attention(4, 9, 9, 72)
    sent = options.link.seconds(4 * 3 / 4 * 1152 * 2 * 3, exchanges=2)
    assert few_frames_costs(shape, options, 4).heads == pytest.approx(computed + sent)


def test_groups_that_span_nodes(monkeypatch):
    assert not spans_nodes(16, 8, 8) and spans_nodes(16, 8, 4) and spans_nodes(12, 3, 4)
    assert not SequenceMesh(1).spans_nodes
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    assert not SequenceMesh(1).spans_nodes

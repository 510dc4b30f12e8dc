from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from needlepoint.reference.linear import BLOCK
from needlepoint.verify.base.stage_blocks import query_blocks


@given(
    lengths=st.lists(st.integers(1, 700), min_size=1, max_size=5),
    ratio=st.sampled_from([4, 128]),
    width=st.integers(1, 5000),
    budget=st.integers(1, 1 << 24),
)
@settings(max_examples=60, deadline=None)
def test_blocks_take_every_query_once_and_in_order(
    lengths: list[int], ratio: int, width: int, budget: int
) -> None:
    blocks = list(query_blocks(tuple(lengths), ratio, width, budget))

    rows = [row for block in blocks for row in range(block.rows.start, block.rows.stop)]
    assert rows == list(range(sum(lengths)))
    expected = [(r, p) for r, length in enumerate(lengths) for p in range(length)]
    assert [(b.request, int(p)) for b in blocks for p in b.positions] == expected
    for block in blocks:
        # Chunks start where the projections' row blocks do.
        assert block.start % BLOCK == 0
        assert block.entries == lengths[block.request] // ratio
        assert torch.equal(block.visible, (block.positions + 1) // ratio)
        assert block.columns == block.stop // ratio <= block.entries


def test_a_larger_budget_makes_fewer_blocks() -> None:
    counts = [len(list(query_blocks((4096,), 4, 1024, 1 << bits))) for bits in (16, 24, 26, 30)]

    assert counts == sorted(counts, reverse=True)
    assert counts[0] == 4096 // BLOCK
    assert counts[-1] == 1

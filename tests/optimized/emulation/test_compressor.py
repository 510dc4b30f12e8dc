"""Which tokens feed an entry, and that a row does not depend on what is computed beside it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from needlepoint.optimized.emulation.compressor import BLOCK, Compressor, EntryBlock, entry_blocks
from needlepoint.optimized.protocol.interface import CompressorInputs, LayerInputs

Make = Callable[..., LayerInputs]


def compressor_of(inputs: LayerInputs, path: str) -> Compressor:
    given_tensors = inputs.index if path == "index" else inputs.main
    assert given_tensors is not None
    return Compressor(given_tensors, inputs)


@given(
    lengths=st.lists(st.integers(1, 700), min_size=1, max_size=4), ratio=st.sampled_from([4, 128])
)
def test_blocks_cover_every_entry_once(lengths: list[int], ratio: int) -> None:
    rows = []
    for block in entry_blocks(tuple(lengths), ratio):
        assert 1 <= block.count <= BLOCK
        assert block.first + block.count <= lengths[block.request] // ratio
        assert block.token == sum(lengths[: block.request])
        rows += list(range(block.rows.start, block.rows.stop))
    assert rows == list(range(sum(n // ratio for n in lengths)))


@pytest.mark.parametrize(("path", "ratio", "entries"), [("index", 4, 80), ("main", 4, 20)])
def test_rows_do_not_depend_on_the_split(
    make_inputs: Make, path: str, ratio: int, entries: int
) -> None:
    side = compressor_of(make_inputs(ratio, (entries * ratio,)), path)
    whole = side.pool(EntryBlock(0, 0, entries, 0, 0))
    for first, count in ((0, 1), (1, 1), (0, 3), (3, entries - 3), (entries - 1, 1)):
        part = side.pool(EntryBlock(0, first, count, 0, 0))
        assert np.array_equal(part, whole[first : first + count])


def test_rows_of_ratio_128_do_not_depend_on_the_split(make_inputs: Make) -> None:
    side = compressor_of(make_inputs(128, (3 * 128,)), "main")
    whole = side.pool(EntryBlock(0, 0, 3, 0, 0))
    assert np.array_equal(side.pool(EntryBlock(0, 1, 2, 0, 0)), whole[1:])


@pytest.mark.parametrize("ratio", [4, 128])
def test_requests_do_not_see_each_other(make_inputs: Make, ratio: int) -> None:
    inputs = make_inputs(ratio, (ratio + 1, 2 * ratio + 3))
    alone_tokens = slice(ratio + 1, 3 * ratio + 4)
    main = CompressorInputs(
        inputs.main.kv[alone_tokens],
        inputs.main.score[alone_tokens],
        inputs.main.ape,
        inputs.main.norm_weight,
    )
    alone = Compressor(main, replace(inputs, lengths=(2 * ratio + 3,)))
    together = compressor_of(inputs, "main").pool(EntryBlock(1, 0, 2, 1, ratio + 1))
    assert np.array_equal(alone.pool(EntryBlock(0, 0, 2, 0, 0)), together)


def changed_entries(make: Make, ratio: int, token: int, half: int | None) -> set[int]:
    """Return the entries whose pooled row changes with the kv of one token."""
    inputs = make(ratio, (4 * ratio,))
    kv = inputs.main.kv.clone()
    columns = slice(None) if half is None else slice(512 * half, 512 * half + 512)
    kv[token, columns] += 1
    block = EntryBlock(0, 0, 4, 0, 0)
    before = Compressor(inputs.main, inputs).pool(block)
    after = Compressor(replace(inputs.main, kv=kv), inputs).pool(block)
    return set(np.flatnonzero((before != after).any(axis=1)).tolist())


@pytest.mark.parametrize("token", [0, 3, 4, 7, 11, 12])
def test_ratio_4_windows_overlap(make_inputs: Make, token: int) -> None:
    window = token // 4
    assert changed_entries(make_inputs, 4, token, half=1) == {window}
    assert changed_entries(make_inputs, 4, token, half=0) == {window + 1} - {4}


@pytest.mark.parametrize("token", [0, 127, 128, 511])
def test_ratio_128_windows_do_not_overlap(make_inputs: Make, token: int) -> None:
    assert changed_entries(make_inputs, 128, token, half=None) == {token // 128}


def test_position_is_the_first_token_of_the_window(make_inputs: Make) -> None:
    inputs = make_inputs(4, (16,))
    side = compressor_of(inputs, "index")
    normed = np.ones((2, 128), np.float32)
    roped = side.rope(normed, EntryBlock(0, 2, 2, 2, 0))
    cos, sin = (inputs.rope_table[[8, 12], :, i].numpy() for i in (0, 1))
    assert np.array_equal(roped[:, :64], normed[:, :64])
    assert np.allclose(roped[:, 64::2], cos - sin, atol=1e-6)
    assert np.allclose(roped[:, 65::2], cos + sin, atol=1e-6)


def test_bf16_inputs_are_widened_exactly(make_inputs: Make) -> None:
    inputs = make_inputs(4, (12,), torch.bfloat16)
    assert inputs.index is not None
    wide = replace(inputs.index, kv=inputs.index.kv.float(), score=inputs.index.score.float())
    block = EntryBlock(0, 0, 3, 0, 0)
    assert np.array_equal(
        Compressor(inputs.index, inputs).pool(block), Compressor(wide, inputs).pool(block)
    )

"""One compressor of a layer as steps over blocks of entries: pool, norm, rope, rotate, store.

The steps are the same for the fused and the separate-steps candidate. The fused one takes a block
of entries through all of them before it turns to the next block, as a kernel keeps its row in
registers; the other takes all entries through one step before the next step starts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from needlepoint.optimized.emulation.exact32 import F32
from needlepoint.optimized.emulation.pooling import pool, scaled_ape
from needlepoint.optimized.emulation.rows import hadamard, norm, rope
from needlepoint.optimized.protocol.interface import CompressorInputs, LayerInputs

_TAPS = 16384  # slots x rows x channels that stay in the cache while they are pooled
BLOCK = 64  # entries of one block


@dataclass(frozen=True)
class EntryBlock:
    """Consecutive entries of one request.

    Attributes
    ----------
    request
        Index of the request.
    first, count
        Entries ``first .. first + count - 1``.
    row
        Row of the first entry in the concatenated key-side tensors.
    token
        Row of the request's first token in the concatenated token-side tensors.
    """

    request: int
    first: int
    count: int
    row: int
    token: int

    @property
    def rows(self) -> slice:
        """Rows of the block in the concatenated key-side tensors."""
        return slice(self.row, self.row + self.count)


def entry_blocks(lengths: tuple[int, ...], ratio: int) -> Iterator[EntryBlock]:
    """Yield the blocks of every request in order."""
    row = token = 0
    for request, length in enumerate(lengths):
        entries = length // ratio
        for first in range(0, entries, BLOCK):
            count = min(BLOCK, entries - first)
            yield EntryBlock(request, first, count, row + first, token)
        row += entries
        token += length


class Compressor:
    """Given tensors of one compressor in the form its steps read; never modified."""

    def __init__(self, given: CompressorInputs, inputs: LayerInputs) -> None:
        self.ratio = inputs.ratio
        self.d = given.norm_weight.shape[0]
        self.kv = widen(given.kv)
        self.score = widen(given.score)
        self.ape = scaled_ape(widen(given.ape))
        self.weight = widen(given.norm_weight)
        self.eps = np.float32(inputs.norm_eps)
        self.table = widen(inputs.rope_table)

    def pool(self, block: EntryBlock) -> F32:
        """Return pooled rows float32 ``[count, d]`` of a block (S1 to S3)."""
        out = np.empty((block.count, self.d), np.float32)
        slots = 8 if self.ratio == 4 else self.ratio
        width = min(self.d, _TAPS // slots)
        step = max(1, _TAPS // (slots * width))
        for column in range(0, self.d, width):
            columns = slice(column, column + width)
            for first in range(0, block.count, step):
                rows = slice(first, min(first + step, block.count))
                entries = range(block.first + rows.start, block.first + rows.stop)
                out[rows, columns] = self._pool_part(block.token, entries, columns)
        return out

    def _pool_part(self, token: int, entries: range, columns: slice) -> F32:
        start, stop = entries.start, entries.stop
        if self.ratio != 4:
            tokens = slice(token + start * self.ratio, token + stop * self.ratio)
            shape = (len(entries), self.ratio, -1)
            kv = self.kv[tokens, columns].reshape(shape).swapaxes(0, 1)
            score = self.score[tokens, columns].reshape(shape).swapaxes(0, 1)
            return pool(kv, score, self.ape[:, None, columns])
        kv = self._overlapped(self.kv, token, entries, columns)
        score = self._overlapped(self.score, token, entries, columns)
        fresh = slice(self.d + columns.start, self.d + columns.stop)
        ape = np.concatenate((self.ape[:, columns], self.ape[:, fresh]))[:, None]
        masked = None
        if start == 0:
            masked = np.zeros((8, len(entries), 1), np.bool_)
            masked[:4, 0] = True
        return pool(kv, score, ape, masked)

    def _overlapped(self, source: F32, token: int, entries: range, columns: slice) -> F32:
        """Return the 8 slots ``[8, entries, columns]``; masked slots hold zeros."""
        slots = np.zeros((8, len(entries), columns.stop - columns.start), np.float32)
        fresh = slice(self.d + columns.start, self.d + columns.stop)
        before = max(entries.start - 1, 0)  # entry 0 has no window before it
        skip = before - (entries.start - 1)
        for slot in range(4):
            first = token + slot
            slots[4 + slot] = source[
                first + 4 * entries.start : first + 4 * entries.stop : 4, fresh
            ]
            slots[slot, skip:] = source[
                first + 4 * before : first + 4 * (entries.stop - 1) : 4, columns
            ]
        return slots

    def norm(self, pooled: F32) -> F32:
        """Return normed rows ``[n, d]`` (S4)."""
        return _rows(norm(_channels(pooled), self.weight, self.eps))

    def rope(self, normed: F32, block: EntryBlock) -> F32:
        """Return rows ``[n, d]`` rotated at position entry * ratio (S5)."""
        positions = np.arange(block.first, block.first + block.count) * self.ratio
        table = self.table[positions]
        return _rows(rope(_channels(normed), _channels(table[..., 0]), _channels(table[..., 1])))

    def rotate(self, roped: F32) -> F32:
        """Return Hadamard-rotated index rows ``[n, 128]`` (S6)."""
        return _rows(hadamard(_channels(roped)))


def widen(tensor: Tensor) -> F32:
    """Return fp32 or bf16 as a NumPy float32 array, exactly."""
    array: F32 = tensor.to(torch.float32).contiguous().numpy()
    return array


def _channels(rows: F32) -> F32:
    return np.ascontiguousarray(rows.T)


def _rows(channels: F32) -> F32:
    return np.ascontiguousarray(channels.T)

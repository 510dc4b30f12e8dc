"""Index keys of layers with one key a token, emulated: LayerNorm, RoPE, Hadamard, store."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor

from needlepoint.optimized.emulation.compressor import EntryBlock, entry_blocks, widen
from needlepoint.optimized.emulation.exact32 import F32
from needlepoint.optimized.emulation.narrow import StoredRows
from needlepoint.optimized.emulation.pages import allocate, write_rows
from needlepoint.optimized.emulation.parallel import over_blocks
from needlepoint.optimized.emulation.rows import hadamard, layer_norm, rope
from needlepoint.optimized.protocol.interface import (
    INDEX,
    QUERY,
    CompressorInputs,
    LayerInputs,
    StageKey,
)

PAGE_ROWS = 64
"""Rows of a page, as serving engines of these models have them."""

DENSE_STAGES = ("normed", "roped", "rotated")


def token_stages() -> frozenset[StageKey]:
    """Return the stages of a whole layer of ratio 1."""
    index = {(INDEX, stage) for stage in (*DENSE_STAGES, "stored", "scores", "topk")}
    return frozenset(index | {(QUERY, "query"), (QUERY, "weights")})


class TokenKeySide:
    """Rows and pages of the index keys of one layer while they are computed.

    Parameters
    ----------
    given
        Projections, norm weight and bias.
    inputs
        The layer.
    layout, store
        Page layout, and the function that makes its rows from ``[128, n]``.
    """

    def __init__(
        self,
        given: CompressorInputs,
        inputs: LayerInputs,
        layout: str,
        store: Callable[[F32], StoredRows],
    ) -> None:
        self._kv, self._table = widen(given.kv), widen(inputs.rope_table)
        self._weight, self._bias = widen(given.norm_weight), widen(given.tensors()["norm_bias"])
        self._eps = np.float32(inputs.norm_eps)
        self._rope = inputs.index_rope
        self._store = store
        self._blocks = tuple(entry_blocks(inputs.lengths, inputs.ratio))
        self.paged = allocate(layout, PAGE_ROWS, inputs.lengths, inputs.seed)
        # 0xFF in every byte is NaN: a row that no block writes shows.
        self._rows: dict[str, F32] = {
            name: np.full(self._kv.shape, -1, np.int32).view(np.float32) for name in DENSE_STAGES
        }

    @property
    def dense(self) -> Mapping[str, Tensor]:
        """Rows of each stage before the store, fp32 ``[tokens, 128]``, by stage name."""
        return {name: torch.from_numpy(rows) for name, rows in self._rows.items()}

    def run_fused(self) -> None:
        """Take each block through all steps before the next block."""
        over_blocks(self._whole, self._blocks)

    run_separate = run_fused
    """No step combines rows, so there is one order of steps."""

    def _whole(self, block: EntryBlock) -> None:
        rows = block.rows
        normed = layer_norm(_channels(self._kv[rows]), self._weight, self._bias, self._eps)
        table = self._table[block.first : block.first + block.count]
        roped = rope(normed, _channels(table[..., 0]), _channels(table[..., 1]), self._rope)
        rotated = hadamard(roped)
        for name, channels in zip(DENSE_STAGES, (normed, roped, rotated), strict=True):
            self._rows[name][rows] = channels.T
        write_rows(self.paged, block.request, block.first, self._store(rotated))


def _channels(rows: F32) -> F32:
    return np.ascontiguousarray(rows.T)

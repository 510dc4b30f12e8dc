"""The key side of one path: every entry through pool, norm, rope, rotate and store."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from needlepoint.optimized.emulation.compressor import Compressor, EntryBlock, entry_blocks
from needlepoint.optimized.emulation.exact32 import F32
from needlepoint.optimized.emulation.narrow import StoredRows
from needlepoint.optimized.emulation.pages import allocate, page_rows, write_rows
from needlepoint.optimized.emulation.parallel import over_blocks
from needlepoint.optimized.protocol.interface import (
    INDEX,
    MAIN,
    QUERY,
    CompressorInputs,
    LayerInputs,
    StageKey,
)

DENSE = {MAIN: ("pooled", "normed", "roped"), INDEX: ("pooled", "normed", "roped", "rotated")}
"""What the fused path computes before the store, in order, by path."""


def key_and_query_stages(ratio: int, *, dense: bool) -> frozenset[StageKey]:
    """Return the stages of a whole layer as the fused path computes it.

    Parameters
    ----------
    ratio
        4 has an indexer, 128 none; any other ratio has no compressor.
    dense
        Whether the stages before the store are among them.
    """
    paths = {4: (MAIN, INDEX), 128: (MAIN,)}.get(ratio, ())
    out = {(path, stage) for path in paths for stage in (*(DENSE[path] if dense else ()), "stored")}
    if INDEX in paths:
        out |= {(INDEX, "scores"), (INDEX, "topk"), (QUERY, "query"), (QUERY, "weights")}
    return frozenset(out)


Step = Callable[[EntryBlock], None]


class KeySide:
    """Rows and pages of one path of one layer while they are computed."""

    def __init__(
        self,
        given: CompressorInputs,
        inputs: LayerInputs,
        layout: str,
        store: Callable[[F32], StoredRows],
        *,
        rotated: bool,
    ) -> None:
        """Allocate the stages and the pool.

        Parameters
        ----------
        given
            Projections of this path.
        inputs
            The layer.
        layout, store
            Page layout, and the function that makes its rows from ``[d, n]``.
        rotated
            Whether rows pass the Hadamard transform (index).
        """
        self.compressor = Compressor(given, inputs)
        self.blocks = tuple(entry_blocks(inputs.lengths, inputs.ratio))
        entries = [length // inputs.ratio for length in inputs.lengths]
        self.paged = allocate(layout, page_rows(inputs.ratio), entries, inputs.seed)
        self._store = store
        names = DENSE[INDEX if rotated else MAIN]
        shape = (sum(entries), self.compressor.d)
        # 0xFF in every byte is NaN: a row that no block writes shows.
        self._rows: dict[str, F32] = {
            name: np.full(shape, -1, np.int32).view(np.float32) for name in names
        }
        self._last = names[-1]

    @property
    def dense(self) -> Mapping[str, Tensor]:
        """Rows of each stage before the store, fp32 ``[entries, d]``, by stage name."""
        return {name: torch.from_numpy(rows) for name, rows in self._rows.items()}

    def steps(self) -> Sequence[Step]:
        """Return the steps of a block in order; each reads the rows that the one before wrote."""
        rotate = (self._rotate,) if "rotated" in self._rows else ()
        return (self._pool, self._norm, self._rope, *rotate, self._write)

    def run_fused(self) -> None:
        """Take each block through all steps before the next block."""

        def whole(block: EntryBlock) -> None:
            for step in self.steps():
                step(block)

        over_blocks(whole, self.blocks)

    def run_separate(self) -> None:
        """Take all blocks through each step before the next step."""
        for step in self.steps():
            over_blocks(step, self.blocks)

    def _pool(self, block: EntryBlock) -> None:
        self._rows["pooled"][block.rows] = self.compressor.pool(block)

    def _norm(self, block: EntryBlock) -> None:
        self._rows["normed"][block.rows] = self.compressor.norm(self._rows["pooled"][block.rows])

    def _rope(self, block: EntryBlock) -> None:
        normed = self._rows["normed"][block.rows]
        self._rows["roped"][block.rows] = self.compressor.rope(normed, block)

    def _rotate(self, block: EntryBlock) -> None:
        roped = self._rows["roped"][block.rows]
        self._rows["rotated"][block.rows] = self.compressor.rotate(roped)

    def _write(self, block: EntryBlock) -> None:
        channels = np.ascontiguousarray(self._rows[self._last][block.rows].T)
        write_rows(self.paged, block.request, block.first, self._store(channels))

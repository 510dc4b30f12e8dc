"""From projections to stored rows: pooled, normed, roped, rotated, stored.

Index keys and main KV share everything up to RoPE. Index keys are then rotated and stored in one
format over all 128 dims; main rows keep their trailing RoPE dims in a wider format. Rows of the
sliding window take the main path from the norm on, one per token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from needlepoint.reference.compressor import (
    CompressorState,
    compressor_inputs,
    gather_taps,
    pool,
)
from needlepoint.reference.formats import Format, decode, encode
from needlepoint.reference.indexer import rotate_index
from needlepoint.reference.norm import rms_norm
from needlepoint.reference.parallel import map_rows
from needlepoint.reference.profile import Arithmetic
from needlepoint.reference.rope import apply_rope, rope_rows
from needlepoint.reference.rounding import round_to
from needlepoint.reference.stages import CompressedRows, KeyProjections, StoredRows
from needlepoint.reference.weights import CompressorWeights


def store(rows: Tensor, fmt: Format) -> StoredRows:
    """Return float64 rows in a storage format, with what a reader gets back."""
    encoded = encode(rows, fmt)
    return StoredRows(encoded, None, decode(encoded, fmt))


@dataclass(frozen=True)
class KeySide:
    """Constants of a layer's key side.

    Attributes
    ----------
    ratio
        4 or 128 (0 when only window rows are made).
    eps
        Epsilon of the norms.
    frequencies
        fp32 ``[pairs]`` of the layer's RoPE.
    arithmetic
        Contract or profile.
    """

    ratio: int
    eps: float
    frequencies: Tensor
    arithmetic: Arithmetic

    def index_rows(
        self, given: KeyProjections, weights: CompressorWeights, state: CompressorState
    ) -> CompressedRows:
        """Return the index keys that these tokens complete and move the tokens into the state.

        Parameters
        ----------
        given
            Projections of the request's next tokens.
        weights
            Position embedding and norm.
        state
            Compressor state of the request; advanced by ``n`` tokens.
        """
        first_entry = state.next_position // self.ratio
        pooled, normed, roped = self._until_roped(given, weights, state)
        rotated = rotate_index(roped, self.arithmetic)
        stored = store(rotated, self.arithmetic.index_key)
        return CompressedRows(first_entry, pooled, normed, roped, rotated, stored)

    def main_rows(
        self, given: KeyProjections, weights: CompressorWeights, state: CompressorState
    ) -> CompressedRows:
        """Return the main rows that these tokens complete; arguments as :meth:`index_rows`."""
        first_entry = state.next_position // self.ratio
        pooled, normed, roped = self._until_roped(given, weights, state)
        return CompressedRows(first_entry, pooled, normed, roped, None, self._store_main(roped))

    def window_rows(self, projected: Tensor, norm: Tensor, rope: Tensor) -> Tensor:
        """Return the sliding-window rows of tokens as read back, float64 ``[n, d]``.

        Parameters
        ----------
        projected
            float64 ``[n, d]``.
        norm
            ``[d]``, norm weight.
        rope
            float64 ``[n, pairs, 2]`` at the tokens' positions.
        """

        def finish(x: Tensor, rope: Tensor) -> Tensor:
            return self._store_main(self._norm_and_rope(x, norm, rope)[1]).values

        return map_rows(finish, projected, rope)

    def _until_roped(
        self, given: KeyProjections, weights: CompressorWeights, state: CompressorState
    ) -> tuple[Tensor, Tensor, Tensor]:
        first_entry = state.next_position // self.ratio
        kv, score = compressor_inputs(given.kv, given.score, self.arithmetic)
        taps = gather_taps(kv, score, weights.ape, self.ratio, self.arithmetic, state)
        state.append(kv, score, weights.ape)
        pooled = round_to(pool(taps, self.arithmetic), self.arithmetic.pooled)
        # A row stands where its window begins.
        positions = torch.arange(first_entry, first_entry + len(pooled)) * self.ratio
        rope = rope_rows(self.frequencies, positions, self.arithmetic.rope_table)
        return pooled, *self._norm_and_rope(pooled, weights.norm, rope)

    def _norm_and_rope(self, x: Tensor, norm: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
        normed = round_to(rms_norm(x, norm, self.eps), self.arithmetic.normed)
        return normed, round_to(apply_rope(normed, rope), self.arithmetic.roped)

    def _store_main(self, roped: Tensor) -> StoredRows:
        nope = roped.shape[-1] - 2 * len(self.frequencies)
        leading = store(roped[..., :nope], self.arithmetic.main_nope)
        rope = round_to(roped[..., nope:], self.arithmetic.main_rope)
        return StoredRows(leading.encoded, rope, torch.cat((leading.values, rope), dim=-1))

"""The reference from scratch: the oracle by position of the reference itself."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from needlepoint.optimized.protocol.interface import INDEX, MAIN, QueryRows
from needlepoint.optimized.protocol.serving import (
    BF16_STATE,
)
from needlepoint.reference.indexer import head_weights, rotate_query
from needlepoint.reference.keyside import KeySide, store
from needlepoint.reference.profile import BF16_CONTRACT, Arithmetic, Precision
from needlepoint.reference.request import KeyState
from needlepoint.reference.rope import rope_rows
from needlepoint.reference.stages import CompressedRows, KeyProjections, QueryProjections
from needlepoint.verify.layout.decode import Bytes
from needlepoint.verify.layout.geometry import ROWS_F64
from needlepoint.verify.scenario.actions import Ints, View
from needlepoint.verify.scenario.bank import CONFIG, Bank, bank, reference_layer
from needlepoint.verify.scenario.events import MAX_TOKENS
from needlepoint.verify.scenario.expected import decoded_rows

WIDTHS = {INDEX: CONFIG.index_head_dim, MAIN: CONFIG.head_dim}


def scenario_arithmetic(state: str) -> Arithmetic:
    """Return the bf16 contract with a state of fp32 or bf16."""
    precision = Precision.BF16 if state == BF16_STATE else Precision.FP32
    return replace(BF16_CONTRACT, state=precision)


class ReferenceRows:
    """The reference from scratch, one request after another; the oracle of the reference.

    Parameters
    ----------
    tokens
        The bank.
    seed
        Of the bank.
    state
        ``"fp32"`` or ``"bf16"``; with bf16 the tokens arrive in the calls of the history.
    """

    def __init__(self, tokens: Bank, seed: int, state: str) -> None:
        self.arithmetic = scenario_arithmetic(state)
        self._bank, self._rounds = tokens, state == BF16_STATE
        layer = reference_layer(tokens.ratio, seed)
        self._side = KeySide(tokens.ratio, CONFIG.norm_eps, layer.frequencies, self.arithmetic)
        self._weights = {INDEX: layer.weights.index, MAIN: layer.weights.main}
        self._made: dict[tuple[object, ...], Bytes] = {}
        if tokens.inputs.query is not None:
            given = tokens.inputs.query
            positions = torch.arange(len(given.q)) % len(tokens.inputs.rope_table)
            both = QueryProjections(given.q.double(), given.weights.double())
            self._codes, self._query_weights = reference_queries(both, positions, self._side)

    def rows(self, path: str, view: View, first: int, stop: int) -> Bytes:
        """Return the bytes of entries ``first .. stop - 1``."""
        texts, calls = view.texts, view.calls
        if not self._rounds:
            # Where calls begin is nothing to the rows, so the line may go on as it ends: requests
            # that grow, and all that say the same, are run once.
            texts = np.concatenate((texts, np.full(MAX_TOKENS - len(texts), texts[-1])))
            calls = np.zeros_like(texts)
        key = (path, texts.tobytes(), calls.tobytes())
        if key not in self._made:
            if len(self._made) > 512:
                self._made.clear()
            self._made[key] = self._run(path, texts, calls)
        return self._made[key][first:stop]

    def _run(self, path: str, texts: Ints, calls: Ints) -> Bytes:
        state = KeyState(self._bank.ratio, WIDTHS[path], self.arithmetic)
        cuts = [*np.flatnonzero(np.diff(calls, prepend=-1)).tolist(), len(texts)]
        for start, stop in pairwise(cuts):
            fed = self._bank.tokens(path, self._bank.rows(texts[start:stop], start))
            given = KeyProjections(fed.kv.double(), fed.score.double())
            rows = key_rows(self._side, path, given, self._weights[path], state)
            state.rows.append(rows.stored.values)
        found: Bytes = state.rows.rows.clone().numpy().view(np.uint8)
        return found.reshape(state.rows.count, WIDTHS[path] * 8)

    def values(self, path: str, raw: Bytes) -> Tensor:
        """Return such bytes decoded."""
        return decoded_rows(ROWS_F64, raw)

    def query(self, rows: Tensor) -> QueryRows | None:
        """Return the stored queries of rows of the bank."""
        if self._bank.inputs.query is None:
            return None
        return QueryRows("float64", self._codes[rows], None, self._query_weights[rows], False)

    def decoded_query(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return queries and weights of rows, float64."""
        return self._codes[rows], self._query_weights[rows]


@lru_cache(maxsize=8)
def reference_expected(ratio: int, seed: int, state: str) -> ReferenceRows:
    """Return the reference's rows of a bank."""
    return ReferenceRows(bank(ratio, seed), seed, state)


def reference_queries(
    query: QueryProjections, positions: Tensor, side: KeySide
) -> tuple[Tensor, Tensor]:
    """Return stored queries and head weights at some positions, float64."""
    rope = rope_rows(side.frequencies, positions, side.arithmetic.rope_table)
    rotated = rotate_query(query.q, rope, side.arithmetic)
    codes = store(rotated, side.arithmetic.index_query).values
    return codes, head_weights(query.weights, CONFIG.index_weight_scale, side.arithmetic)


def key_rows(
    side: KeySide, path: str, given: KeyProjections, weights: object, state: KeyState
) -> CompressedRows:
    """Return the rows of a path that these tokens complete, and move them into the state."""
    make = side.index_rows if path == INDEX else side.main_rows
    return make(given, weights, state.tokens)  # type: ignore[arg-type]

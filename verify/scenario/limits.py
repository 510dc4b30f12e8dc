"""A request of a candidate in another arithmetic: within the limits of its profile's reference.

The reference runs the accepted tokens alone from scratch; rows, queries, scores and picks of the
history must lie within the limits that ``verify`` has for whole prompts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from needlepoint.optimized.protocol.interface import (
    INDEX,
    QUERY,
    CandidateInfo,
    PagedRows,
    QueryRows,
)
from needlepoint.verify.base.stage_blocks import query_blocks
from needlepoint.verify.base.stages import QUERIES, STORED, WEIGHTS
from needlepoint.verify.judge.profiles import profile_of
from needlepoint.verify.judge.sides.key_side import KeyReference, compare_key_stages, key_reference
from needlepoint.verify.judge.sides.query_reference import (
    QueryReference,
    ReferenceBlock,
    RotatedQueries,
)
from needlepoint.verify.layout.stored_rows import encoded_queries, read_stored, unfolded_weights
from needlepoint.verify.numerics.compare import compare_dense
from needlepoint.verify.numerics.compare_codes import compare_encoded
from needlepoint.verify.numerics.limits import Limits
from needlepoint.verify.numerics.row_errors import RowErrors
from needlepoint.verify.scenario.actions import View
from needlepoint.verify.scenario.bank import Bank
from needlepoint.verify.scenario.judge import Calls, Problem, Seen, judge_calls


class LimitJudge:
    """Holds requests to the reference of a profile; a state of fp32 alone.

    Parameters
    ----------
    tokens
        The bank.
    info
        The candidate: profile and key format.
    """

    def __init__(self, tokens: Bank, info: CandidateInfo) -> None:
        self._bank = tokens
        self._arithmetic = profile_of(info)
        self._limits = Limits.default()
        self._keys: dict[tuple[str, bytes], KeyReference] = {}

    def rows(self, path: str, view: View, first: int, paged: PagedRows) -> Problem | None:
        """Judge the stored rows of a request."""
        if not paged.entries[0]:
            return None
        (found,) = compare_key_stages(self._reference(path, view), {}, read_stored(paged))
        row = _first_beyond(found.accumulated, self._limits[STORED].value)
        if row is None:
            return None
        detail = f"{float(found.accumulated.ratio[row]):.4g} x limit of the same tokens alone"
        return Problem(path, STORED, (row + 1) * self._bank.ratio - 1, row, detail)

    def queries(self, view: View, start: int, found: QueryRows) -> Problem | None:
        """Judge the stored queries and weights of consecutive tokens."""
        if not len(found.weights):
            return None
        meant = self._block(view)
        rows = slice(start, start + len(found.weights))
        fmt = self._arithmetic.index_query
        query = compare_encoded(encoded_queries(found, fmt), meant.query.rows(rows), fmt)
        weights = compare_dense(
            unfolded_weights(found), meant.weights.rows(rows), self._arithmetic.weights
        )
        for stage, errors in ((QUERIES, query), (WEIGHTS, weights)):
            row = _first_beyond(errors, self._limits[stage].value)
            if row is not None:
                detail = f"{float(errors.ratio[row]):.4g} x limit of the same token alone"
                return Problem(QUERY, stage, start + row, None, detail)
        return None

    def selection(self, view: View, seen: Sequence[Seen]) -> Problem | None:
        """Judge scores and picks of everything that calls handed back."""
        calls = Calls.of(seen, self._bank.ratio)
        if calls is None:
            return None
        meant = self._block(view)
        rows, columns = calls.position, calls.entries
        return judge_calls(
            calls,
            meant.scores[rows, :columns].to(torch.float64),
            meant.bound[rows, :columns],
            self._bank.inputs.topk,
        )

    def _reference(self, path: str, view: View) -> KeyReference:
        key = (path, view.texts.tobytes())
        if key not in self._keys:
            if len(self._keys) > 64:
                self._keys.clear()
            alone = self._bank.alone(view.texts)
            self._keys[key] = key_reference(path, alone, self._arithmetic)
        return self._keys[key]

    def _block(self, view: View) -> ReferenceBlock:
        alone = self._bank.alone(view.texts)
        heads = 0 if alone.query is None else alone.query.q[0].numel()
        (block,) = query_blocks(alone.lengths, alone.ratio, heads)
        keys = self._reference(INDEX, view)
        return QueryReference(alone, self._arithmetic, keys, RotatedQueries(alone)).block(block)


def _first_beyond(errors: RowErrors, limit: float) -> int | None:
    rows = errors.failed(limit).nonzero()
    return int(rows[0]) if len(rows) else None

"""A request against the oracle: by bytes where the specification says them, else by limits.

``ByteJudge`` holds stored rows and queries to their bytes, scores and picks to bounds.
``LimitJudge`` is for a candidate in another arithmetic: the reference of its profile runs the
accepted tokens alone from scratch, and the history must lie within the limits that ``verify`` has
for whole prompts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from needlepoint.optimized.protocol.interface import (
    INDEX,
    QUERY,
    CandidateInfo,
    PagedRows,
    QueryRows,
)
from needlepoint.reference.indexer import index_scores
from needlepoint.reference.topk import select_topk, visible_entries
from needlepoint.verify.base.stage_blocks import query_blocks
from needlepoint.verify.base.stages import QUERIES, SCORES, STORED, TOPK, WEIGHTS
from needlepoint.verify.judge.profiles import profile_of
from needlepoint.verify.judge.sides.key_side import KeyReference, compare_key_stages, key_reference
from needlepoint.verify.judge.sides.query_reference import (
    QueryReference,
    ReferenceBlock,
    RotatedQueries,
    unrounded_fp32,
)
from needlepoint.verify.layout.pages import Pool, open_pool
from needlepoint.verify.layout.stored_rows import encoded_queries, read_stored, unfolded_weights
from needlepoint.verify.numerics.bounds import ScoreBound
from needlepoint.verify.numerics.compare import compare_dense
from needlepoint.verify.numerics.compare_codes import compare_encoded
from needlepoint.verify.numerics.error_bound import exact
from needlepoint.verify.numerics.limits import Limits
from needlepoint.verify.numerics.row_errors import RowErrors
from needlepoint.verify.numerics.selection import Swap, judge_picks
from needlepoint.verify.scenario.actions import View
from needlepoint.verify.scenario.bank import Bank
from needlepoint.verify.scenario.expected import Expected


@dataclass(frozen=True)
class Problem:
    """Where a request is not what its tokens alone would make it."""

    # Stage.
    path: str
    stage: str
    # Token, and entry of a stored row.
    position: int
    entry: int | None
    detail: str  # In words.


@dataclass(frozen=True)
class Seen:
    """What calls handed back for consecutive tokens of a request."""

    start: int  # Position of the first token.
    scores: Tensor | None  # ``[n, entries]``, or None.
    topk: Tensor | None  # int32 ``[n, k]``, or None.


class Judge(Protocol):
    """Holds a request to the oracle."""

    def rows(self, path: str, view: View, first: int, paged: PagedRows) -> Problem | None:
        """Judge stored rows from entry ``first`` on."""
        ...

    def queries(self, view: View, start: int, found: QueryRows) -> Problem | None:
        """Judge stored queries of consecutive tokens."""
        ...

    def selection(self, view: View, seen: Sequence[Seen]) -> Problem | None:
        """Judge scores and picks of everything that calls handed back."""
        ...


class ByteJudge:
    """Rows and queries must have the bytes of the oracle; scores and picks its bounds.

    Parameters
    ----------
    tokens
        The bank.
    expected
        The oracle.
    """

    def __init__(self, tokens: Bank, expected: Expected) -> None:
        self._bank = tokens
        self._expected = expected

    def rows(self, path: str, view: View, first: int, paged: PagedRows) -> Problem | None:
        """Judge the stored rows of a request from entry ``first`` on."""
        (stop,) = paged.entries
        if first >= stop:
            return None
        found = opened(paged).raw_rows(paged.page_table[0], stop)[first:]
        expected = self._expected.rows(path, view, first, stop)
        if np.array_equal(found, expected):
            return None
        wrong = np.flatnonzero((found != expected).any(axis=1))
        row = int(wrong[0])
        entry, ratio = first + row, self._bank.ratio
        detail = (
            f"{len(wrong)} of {stop - first} rows differ from the same tokens alone; "
            f"{int((found[row] != expected[row]).sum())} of {found.shape[1]} bytes of this one"
        )
        return Problem(path, STORED, (entry + 1) * ratio - 1, entry, detail)

    def queries(self, view: View, start: int, found: QueryRows) -> Problem | None:
        """Judge the stored queries and weights of consecutive tokens from ``start`` on."""
        count = len(found.weights)
        expected = self._expected.query(self._bank.rows(view.texts[start : start + count], start))
        if expected is None:
            return None
        for stage, candidate, theirs in (
            (QUERIES, found.codes, expected.codes),
            (QUERIES, found.scales, expected.scales),
            (WEIGHTS, found.weights, expected.weights),
        ):
            row = _first_difference(candidate, theirs)
            if row is not None:
                detail = "differs from the same token alone"
                return Problem(QUERY, stage, start + row, None, detail)
        return None

    def selection(self, view: View, seen: Sequence[Seen]) -> Problem | None:
        """Judge the scores and picks of everything that calls handed back for a request."""
        calls = Calls.of(seen, self._bank.ratio)
        if calls is None:
            return None
        rows = self._bank.rows(view.texts, 0)[calls.position]
        query, weights = self._expected.decoded_query(rows)
        raw = self._expected.rows(INDEX, view, 0, calls.entries)
        keys = self._expected.values(INDEX, raw)
        profile = self._expected.arithmetic
        expected = index_scores(query, weights, keys, calls.visible, unrounded_fp32(profile))
        bound = ScoreBound.of_keys(exact(keys), profile).of_queries(exact(query), exact(weights))
        return judge_calls(calls, expected, bound, self._bank.inputs.topk)


@dataclass(frozen=True)
class Calls:
    """Scores and picks of all calls of a request, put together."""

    # int64 ``[n]``: position of each token, and the entries that it may see.
    position: Tensor
    visible: Tensor
    # float64 ``[n, >= entries]`` or None; columns past ``entries`` only where a call had some.
    scores: Tensor | None
    topk: Tensor | None  # int32 ``[n, k]``, or None.

    @property
    def entries(self) -> int:
        """Entries that some token sees."""
        return int(self.visible.max())

    @classmethod
    def of(cls, seen: Sequence[Seen], ratio: int) -> Calls | None:
        """Put calls together; None where none handed back scores or picks."""
        held = [part for part in seen if part.topk is not None or part.scores is not None]
        if not held:
            return None
        position = torch.cat([torch.arange(part.start, part.start + _count(part)) for part in held])
        visible = visible_entries(position, ratio)
        picks = [part.topk for part in held if part.topk is not None]
        return cls(
            position,
            visible,
            _padded([part.scores for part in held], int(visible.max())),
            torch.cat(picks) if len(picks) == len(held) else None,
        )


def judge_calls(calls: Calls, expected: Tensor, bound: Tensor, k: int) -> Problem | None:
    """Judge scores and picks against reference scores ``[n, entries]`` and their bound."""
    candidate = calls.scores
    if candidate is not None:
        wrong = _wrong_scores(candidate, expected, bound, calls.visible)
        if wrong is not None:
            return Problem(INDEX, SCORES, int(calls.position[wrong[0]]), None, wrong[1])
    if calls.topk is None:
        return None
    best = select_topk(expected, k)
    if calls.topk.shape == best.shape and bool((calls.topk == best).all()):
        return None
    # A candidate that brings no scores is held to the bound of the reference's.
    judged = judge_picks(
        calls.topk,
        best,
        expected if candidate is None else candidate,
        expected,
        bound,
        calls.visible,
        k,
        own_radius=bound if candidate is None else None,
    )
    failed = judged.failed().nonzero()
    if not len(failed):
        return None
    row = int(failed[0])
    swaps = [kind.name.lower() for kind in Swap if judged.counts[row, kind]]
    detail = (
        f"{int(judged.invalid[row])} invalid picks; swaps: {', '.join(swaps) or 'none'}; "
        f"the token sees {int(calls.visible[row])} entries"
    )
    return Problem(INDEX, TOPK, int(calls.position[row]), None, detail)


def opened(paged: PagedRows) -> Pool:
    """Open the pages of a request; rows of float64 take their width from the pool."""
    wide = paged.pool.shape[1] // (8 * paged.page_size) if paged.layout == "rows-f64" else None
    return open_pool(paged.pool, paged.layout, paged.page_size, row_width=wide)


def _count(part: Seen) -> int:
    tensor = part.topk if part.topk is not None else part.scores
    return 0 if tensor is None else len(tensor)


def _padded(scores: Sequence[Tensor | None], entries: int) -> Tensor | None:
    """Return scores of calls side by side, -inf where a call had fewer entries."""
    parts = []
    for found in scores:
        if found is None:
            return None
        # Columns past the entries of the request would be of unfinished windows: kept, to be seen.
        width = max(entries, found.shape[1])
        part = torch.full((len(found), width), -torch.inf, dtype=torch.float64)
        part[:, : found.shape[1]] = found.to(torch.float64)
        parts.append(part)
    widest = max(part.shape[1] for part in parts)
    if widest > entries:
        beyond = [bool((part[:, entries:] > -torch.inf).any()) for part in parts]
        if not any(beyond):
            return torch.cat([part[:, :entries] for part in parts])
        parts = [
            torch.nn.functional.pad(part, (0, widest - part.shape[1]), value=-torch.inf)
            for part in parts
        ]
    return torch.cat(parts)


def _wrong_scores(
    candidate: Tensor, expected: Tensor, bound: Tensor, visible: Tensor
) -> tuple[int, str] | None:
    """Return the first row whose scores are out of their bound or masked wrongly, and why."""
    hidden = torch.arange(candidate.shape[1]) >= visible[:, None]
    leaks = ((candidate > -torch.inf) & hidden).any(1) | torch.isnan(candidate).any(1)
    if candidate.shape[1] > expected.shape[1]:
        row = int(leaks.nonzero()[0])
        return row, "has scores of an unfinished window"
    missing = ((candidate == -torch.inf) & ~hidden).any(1)
    gap = torch.where(hidden, 0.0, (candidate - expected).abs())
    far = (gap > bound).any(1)
    for mask, words in (
        (leaks, "has a score of an entry that it must not see, or NaN"),
        (missing, "lacks the score of an entry that it sees"),
        (far, "has a score beyond the bound of the same tokens alone"),
    ):
        rows = mask.nonzero()
        if len(rows):
            return int(rows[0]), words
    return None


def _first_difference(candidate: Tensor | None, expected: Tensor | None) -> int | None:
    """Return the first row of which bytes differ, or None."""
    if candidate is None or expected is None:
        return None if candidate is expected else 0
    if candidate.shape != expected.shape or candidate.dtype != expected.dtype:
        return 0
    a, b = (x.cpu().contiguous().view(torch.uint8).flatten(1) for x in (candidate, expected))
    rows = (a != b).any(1).nonzero()
    return int(rows[0]) if len(rows) else None


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
        expected = self._block(view)
        rows = slice(start, start + len(found.weights))
        fmt = self._arithmetic.index_query
        query = compare_encoded(encoded_queries(found, fmt), expected.query.rows(rows), fmt)
        weights = compare_dense(
            unfolded_weights(found), expected.weights.rows(rows), self._arithmetic.weights
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
        expected = self._block(view)
        rows, columns = calls.position, calls.entries
        return judge_calls(
            calls,
            expected.scores[rows, :columns].to(torch.float64),
            expected.bound[rows, :columns],
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

"""Why a needle was missed, from what the candidate stored, scored and picked.

* ``unreachable``: no entry of the needle can be picked: its window is not complete at the query, or
  its page is not mapped.
* ``upstream``: the reference misses it too, from the same hidden states: the arithmetic of the
  indexer is not what lost it.
* ``corrupted``: a stored row of the needle is off the candidate's profile.
* ``outranked``: the row is right and others were picked. ``by`` says whose doing that is: the
  ``format`` (the profile's own reference misses it), ``rounding`` (the gap is within the a-priori
  limit), or the first stage off its profile.
* ``attenuated``: all of it is picked, and less than half of the attention that the reference puts
  on it is left.

The limits are those of ``verify``: fixed before the run, never an error measured in it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor

from needlepoint.optimized.protocol.interface import (
    INDEX,
    QUERY,
    CandidateInfo,
    LayerInputs,
    Observed,
    PagedRows,
    StageKey,
)
from needlepoint.verify.base.stages import QUERIES, SCORES, STORED, TOPK, WEIGHTS
from needlepoint.verify.judge.profiles import profile_of
from needlepoint.verify.judge.sides.query_reference import QueryReference, ReferenceBlock
from needlepoint.verify.judge.sides.query_side import QueryJudge
from needlepoint.verify.layout.stored_rows import StoredRows, read_stored, replayable
from needlepoint.verify.numerics.compare_codes import compare_encoded
from needlepoint.verify.numerics.limits import Limits
from needlepoint.verify.numerics.selection import Swap
from needlepoint.verify.recall.outcomes import Outcome, needle_entries, reachable
from needlepoint.verify.recall.queries import NeedleQueries
from needlepoint.verify.schema.recall import (
    CORRUPTED,
    OUTRANKED,
    UNREACHABLE,
    UPSTREAM,
    CauseName,
)

_BLAMED: Final[tuple[StageKey, ...]] = ((QUERY, QUERIES), (QUERY, WEIGHTS), (INDEX, SCORES))


@dataclass(frozen=True)
class Cause:
    """Why one needle was missed.

    Attributes
    ----------
    cause, by
        Words of this module; ``by`` is more exact, or empty.
    page
        Page of the needle's lowest-scoring entry in the candidate's pool; None without pages.
    gap, allowed
        Reference score of the needle minus that of the entry in its place, and the a-priori limit
        of that gap; None where there is no such pair.
    """

    cause: CauseName
    by: str
    page: int | None
    gap: float | None = None
    allowed: float | None = None


@dataclass(frozen=True)
class MappedRows:
    """Rows of one request through its page table, however wrong the table is.

    Rows of an unmapped page are any rows; ``pages`` is int64 ``[entries]``, the page of each entry,
    -1 where the table names none of the pool.
    """

    rows: StoredRows
    pages: Tensor


def mapped_rows(paged: PagedRows, request: int = 0, width: int = 128) -> MappedRows:
    """Read the rows of one request.

    Unlike ``read_stored`` this refuses no page table: a wrong one is what is looked for.

    Raises
    ------
    ValueError
        If the pool is not usable.
    """
    count, size, total = paged.entries[request], paged.page_size, len(paged.pool)
    every = torch.arange(total, dtype=torch.int32)
    pool = read_stored(replace(paged, page_table=(every,), entries=(total * size,)), width)
    table = paged.page_table[request].to(torch.int64)
    entry = torch.arange(count)
    place = entry // size
    page = torch.where(place < len(table), table[place.clamp(max=max(len(table) - 1, 0))], -1)
    page = torch.where((page >= 0) & (page < total), page, -1)
    slot = page.clamp(min=0) * size + entry % size
    encoded = replace(
        pool.encoded,
        codes=pool.encoded.codes[slot],
        scales=None if pool.encoded.scales is None else pool.encoded.scales[slot],
    )
    return MappedRows(replace(pool, values=pool.values[slot], encoded=encoded), page)


class MissJudge:
    """Explains misses of one candidate in one request, by the judge's own comparison.

    ``mapped`` are its index rows by entry, None where it stores none; ``limits`` those of
    ``verify``.
    """

    def __init__(
        self,
        queries: NeedleQueries,
        info: CandidateInfo,
        outputs: Observed,
        mapped: MappedRows | None,
        limits: Limits,
    ) -> None:
        inputs, profile = queries.inputs, profile_of(info)
        keys = queries.keys.path(INDEX, profile)
        self._mapped = mapped
        self._limits = limits
        self._ratio = inputs.ratio
        self._off = torch.zeros(queries.entries, dtype=torch.bool)
        self._to_store = keys.to_store.value
        stored = None if mapped is None else mapped.rows
        if stored is not None:
            stored.require(profile.index_key)
            error = compare_encoded(stored.encoded, keys.to_store, profile.index_key)
            self._off = ~(error.ratio <= limits[STORED].value)
        reference = QueryReference(inputs, profile, keys, queries.rotated)
        judge = QueryJudge(inputs, outputs, reference, stored, limits)
        self._expected: ReferenceBlock = reference.block(queries.block)
        judge.judge(queries.block, self._expected)
        self._errors, self._picks = judge.errors, judge.picks

    def cause(self, row: int, outcome: Outcome) -> Cause:
        """Return why row ``row`` missed a needle that the reference hits."""
        entries = needle_entries(outcome.needle, self._ratio, outcome.visible)
        lowest = entries[int(self._expected.scores[row][entries].argmin())]
        page = None if self._mapped is None else int(self._mapped.pages[lowest])
        off = entries[self._off[entries]]
        if len(off):
            return Cause(CORRUPTED, self._whose(int(off[0])), page)
        if not bool(torch.isin(entries, self._expected.picks[row]).all()):
            return Cause(OUTRANKED, "format", page)
        return self._outranked(row, entries, page)

    def _outranked(self, row: int, entries: Tensor, page: int | None) -> Cause:
        picks = self._picks
        if picks is None:
            return Cause(OUTRANKED, "no picks judged", page)
        if int(picks.invalid[row]):
            return Cause(OUTRANKED, "invalid picks", page)
        swaps = picks.swaps
        lost = (swaps.row == row) & torch.isin(swaps.lost, entries)
        if not bool(lost.any()):
            return Cause(OUTRANKED, "topk", page)
        at = int(lost.nonzero()[0])
        gap, allowed = float(swaps.gap[at]), float(swaps.allowed[at])
        kind = int(swaps.kind[at])
        if kind == Swap.SELECTOR:
            by = TOPK
        elif gap <= allowed:
            by = "rounding"
        else:  # a tie too: scores that are equal and should not be
            by = self._stage_off(row)
        return Cause(OUTRANKED, by, page, gap, allowed)

    def _stage_off(self, row: int) -> str:
        """Return the first stage of a query that is off its profile."""
        for key in _BLAMED:
            errors, limit = self._errors.get(key), self._limits[key[1]].value
            if errors is not None and not bool(errors.local.ratio[row] <= limit):
                return ".".join(key)
        # Rows that took its place may be wrong even where its own is right.
        return f"{INDEX}.{STORED} of other entries" if bool(self._off.any()) else "not observed"

    def _whose(self, entry: int) -> str:
        """Return what stands in a wrong row: another entry's, if it is one."""
        if self._mapped is None:
            return ""
        row = replayable(self._mapped.rows.values[entry])
        distance = torch.linalg.vector_norm(self._to_store - row, dim=1)
        nearest = int(distance.argmin())
        near = float(distance[nearest]) < 0.5 * float(distance[entry])
        page = int(self._mapped.pages[entry])
        if near:
            return f"wrong page: page {page} holds entry {nearest} in place of {entry}"
        return f"{INDEX}.{STORED}"


def explain(
    queries: NeedleQueries,
    info: CandidateInfo,
    outputs: Observed,
    missed: Sequence[tuple[int, Outcome]],
    limits: Limits,
) -> Mapping[int, Cause]:
    """Return the cause of every miss by its row.

    Nothing of the profile's reference is computed unless a miss is the candidate's own.
    """
    mapped = None
    if missed and INDEX in outputs.stored:
        mapped = mapped_rows(outputs.stored[INDEX])
    found: dict[int, Cause] = {}
    judge: MissJudge | None = None
    for row, outcome in missed:
        cause = _without_reference(outcome, mapped, queries.inputs)
        if cause is None:
            judge = judge or MissJudge(queries, info, outputs, mapped, limits)
            cause = judge.cause(row, outcome)
        found[row] = cause
    return found


def _without_reference(
    outcome: Outcome, mapped: MappedRows | None, inputs: LayerInputs
) -> Cause | None:
    """Return a cause that needs no profile: unreachable or upstream."""
    entries = needle_entries(outcome.needle, inputs.ratio, outcome.visible)
    if not reachable(outcome.needle, inputs.ratio, outcome.visible):
        return Cause(UNREACHABLE, "window not complete", None)
    pages = None if mapped is None else mapped.pages[entries]
    if pages is not None and bool((pages < 0).any()):
        return Cause(UNREACHABLE, "page not mapped", None)
    if outcome.reference_hits[inputs.topk]:
        return None
    return Cause(UPSTREAM, "", None if pages is None else int(pages[0]))

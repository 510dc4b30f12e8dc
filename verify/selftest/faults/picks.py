"""Faults of the selection: picks that the scores do not justify, or that no scores could."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from needlepoint.optimized.emulation.select import select_topk
from needlepoint.optimized.protocol.interface import INDEX, MAIN, Observed
from needlepoint.verify.selftest.faults.fault import Case, Plant, Setting, fault
from needlepoint.verify.selftest.faults.ground import (
    Ground,
    Selector,
    picks_of,
    seen,
    selected,
)

_SELECTOR, _INVALID = "topk.selector", "topk.invalid"
_CLEAR = "index.scores"
_TIES = Setting(kind="ties")

UNWRITTEN = 0x7FFFFFF0
"""What a buffer holds that nobody has filled."""


def by_selector(select: Selector) -> Plant:
    """Select by another rule from scores that are right."""
    return lambda ground: replace(ground.observed, topk=selected(ground, ground.scores, select))


def on_picks(change: Callable[[Ground, Tensor], Tensor]) -> Plant:
    """Change the picks ``[tokens, k]`` of all requests, free to be changed in place."""
    return lambda ground: replace(ground.observed, topk=change(ground, picks_of(ground)))


def visible_of(ground: Ground) -> Tensor:
    """Return how many entries each query sees, int64 ``[tokens]``."""
    return torch.cat([seen(ground.given, r) for r in range(len(ground.given.lengths))])


def capped_ties(most: int) -> Selector:
    """Return a selection that collects at most so many entries of the score at its border."""

    def select(scores: Tensor, visible: Tensor, k: int) -> Tensor:
        picks = select_topk(scores, visible, k)
        rows, columns = picks.shape
        at = scores.gather(1, picks.clamp(min=0).long()).masked_fill(picks < 0, torch.inf)
        border = at == at.amin(1, keepdim=True)
        kept = torch.where(border & (border.cumsum(1) > most) & (picks >= 0), -1, picks)
        # What was dropped leaves a hole at the end, as a buffer that was set to -1 beforehand.
        order = (kept < 0).to(torch.int8).argsort(dim=1, stable=True)
        return kept.gather(1, order[:, :columns].expand(rows, columns))

    return select


def _without_the_best(scores: Tensor, visible: Tensor, k: int) -> Tensor:
    if not scores.shape[1]:
        return select_topk(scores, visible, k)
    best = scores.argmax(1, keepdim=True)
    # Only where there is another one to take its place.
    held = torch.where(visible[:, None] > k, -1e30, scores.gather(1, best))
    return select_topk(scores.scatter(1, best, held), visible, k)


def _lost_needle(ground: Ground, picks: Tensor) -> Tensor:
    """Lose the best entry of one query, and take the best that was left out instead."""
    at, scores = ground.token_row(ground.given.lengths[ground.longest] - 1), ground.scores
    row = scores[ground.longest][-1:].clone()
    row[0, row[0].argmax()] = -1e30
    picks[at] = select_topk(row, torch.tensor([row.shape[1]]), picks.shape[1])[0]
    return picks


def _newest(scores: Tensor, visible: Tensor, k: int) -> Tensor:
    """Pick the last k visible entries, as a selection over zeroed scores can come down to."""
    entry = torch.arange(scores.shape[1], dtype=torch.float32).expand_as(scores)
    return select_topk(entry.contiguous(), visible, k)


def _by_number(number: Callable[[Tensor], Tensor]) -> Selector:
    """Return a selection by another number than the score; what is masked stays so."""

    def select(scores: Tensor, visible: Tensor, k: int) -> Tensor:
        numbers = number(scores).masked_fill(torch.isneginf(scores), -torch.inf)
        return select_topk(numbers, visible, k)

    return select


def _by_coarse_bins(scores: Tensor, visible: Tensor, k: int) -> Tensor:
    """Select by the leading 16 bits and never refine the last bin."""
    coarse = (scores.view(torch.int32) & -0x10000).view(torch.float32)
    return select_topk(coarse, visible, k)


def _by_chunks(scores: Tensor, visible: Tensor, k: int) -> Tensor:
    """Merge the best halves of two chunks of keys as if each held half of the answer."""
    width = scores.shape[1]
    half = width // 2
    if half < k:
        return select_topk(scores, visible, k)
    first = select_topk(scores[:, :half], visible.clamp(max=half), k // 2)
    second = select_topk(scores[:, half:], (visible - half).clamp(min=0), k - k // 2)
    second = torch.where(second >= 0, second + half, -1)
    merged = torch.cat((first, second), dim=1)
    full = (visible >= half + k)[:, None]
    return torch.where(full, merged, select_topk(scores, visible, k))


def _one_less(scores: Tensor, visible: Tensor, k: int) -> Tensor:
    picks = select_topk(scores, visible, k - 1)
    return torch.cat((picks, torch.full((len(picks), 1), -1, dtype=torch.int32)), dim=1)


def _twice(scores: Tensor, visible: Tensor, k: int) -> Tensor:
    picks = select_topk(scores, visible, k)
    picks[:, 1] = torch.where(picks[:, 1] >= 0, picks[:, 0], picks[:, 1])
    return picks


def _unsigned_length(ground: Ground, picks: Tensor) -> Tensor:
    """Give rows that see nothing what an unsigned length of -1 would: the first k columns."""
    blank = visible_of(ground) == 0
    picks[blank] = torch.arange(picks.shape[1], dtype=torch.int32)
    return picks


def _garbage(ground: Ground, picks: Tensor) -> Tensor:
    picks[-1, 0] = 829362880
    return picks


def _unwritten(ground: Ground, picks: Tensor) -> Tensor:
    picks[len(picks) // 2, -2:] = UNWRITTEN
    return picks


def _absolute(ground: Ground, picks: Tensor) -> Tensor:
    """Count entries over the whole batch instead of within the request."""
    row = 0
    for request, length in enumerate(ground.given.lengths):
        part = picks[row : row + length]
        part[part >= 0] += sum(ground.counts[:request])
        row += length
    return picks


def _pool_rows(ground: Ground, picks: Tensor) -> Tensor:
    """Return rows of the pool instead of entries of the request."""
    rows = ground.observed.stored[INDEX]
    token = 0
    for request, length in enumerate(ground.given.lengths):
        part = picks[token : token + length].long()
        size, table = rows.page_size, rows.page_table[request].long()
        if len(table):
            found = table[part.clamp(min=0) // size] * size + part.clamp(min=0) % size
            picks[token : token + length] = torch.where(part >= 0, found, -1).to(torch.int32)
        token += length
    return picks


def _rows_swapped(ground: Ground, picks: Tensor) -> Tensor:
    """Exchange the picks of the two last queries of a request that see the same entries."""
    visible = visible_of(ground)
    last = ground.token_row(ground.given.lengths[ground.longest] - 1)
    at = last if visible[last] == visible[last - 1] else last - 1
    other = at - 1 if visible[at - 1] == visible[at] else at - 2
    picks[[at, other]] = picks[[other, at]]
    return picks


def _stale(ground: Ground, picks: Tensor) -> Tensor:
    """Leave in the second half of the batch what the layer before picked: other scores' picks."""
    shuffled = select_stale(ground)
    half = len(picks) // 2
    picks[half:] = shuffled[half:]
    return picks


def select_stale(ground: Ground) -> Tensor:
    """Return the picks that the scores of the query before lead to."""
    tables = []
    for request, table in enumerate(ground.scores):
        moved = table.roll(1, 0)
        entry = torch.arange(table.shape[1])
        hidden = entry >= seen(ground.given, request)[:, None]
        shown = torch.where(torch.isneginf(moved), -1e30, moved)
        tables.append(shown.masked_fill(hidden, -torch.inf))
    return selected(ground, tables)


def _alone(ground: Ground) -> Observed:
    """Hand over picks alone, of the newest entries, with nothing that could justify them."""
    picks = by_selector(_newest)(ground).topk
    stored = {MAIN: ground.observed.stored[MAIN]}
    dense = {key: rows for key, rows in ground.observed.dense.items() if key[0] == MAIN}
    return replace(ground.observed, dense=dense, stored=stored, query=None, scores=None, topk=picks)


FAULTS: tuple[Case, ...] = (
    fault("ties-capped", "A", "entries of equal score beyond a fixed number dropped",
          by_selector(capped_ties(2)), _INVALID, clear=_CLEAR, log="A04", on=_TIES, needs=120),
    fault("best-entry-lost", "A", "the best entry of every query left out",
          by_selector(_without_the_best), _SELECTOR, clear=_CLEAR, log="F06"),
    fault("needle-of-one-query-lost", "A", "the best entry of one query left out",
          on_picks(_lost_needle), _SELECTOR, clear=_CLEAR, log="A06"),
    fault("newest-entries-picked", "A", "the last k entries whatever their scores",
          by_selector(_newest), _SELECTOR, clear=_CLEAR, log="A09"),
    fault("oldest-entries-picked", "N", "the first k entries whatever their scores",
          by_selector(lambda scores, visible, k: select_topk(torch.zeros_like(scores), visible, k)),
          _SELECTOR, clear=_CLEAR, log="N04"),
    fault("lowest-entries-picked", "A", "the smallest scores picked",
          by_selector(_by_number(torch.neg)),
          _SELECTOR, clear=_CLEAR),
    fault("picked-by-magnitude", "A", "scores picked by their magnitude",
          by_selector(_by_number(torch.abs)),
          _SELECTOR, clear=_CLEAR),
    fault("coarse-bins", "A", "selection by the leading 16 bits", by_selector(_by_coarse_bins),
          _SELECTOR, clear=_CLEAR, log="G07 A06"),
    fault("chunks-merged-by-halves", "P", "half of the picks from each of two chunks of keys",
          by_selector(_by_chunks), _SELECTOR, clear=_CLEAR, log="P03 L04"),
    fault("one-pick-too-few", "B", "k - 1 picks", by_selector(_one_less), _INVALID, clear=_CLEAR,
          log="B05"),
    fault("wider-than-k", "O", "twice as many picks as the model says",
          by_selector(lambda scores, visible, k: select_topk(scores, visible, 2 * k)), _INVALID,
          clear=_CLEAR, log="O09 B06 O04"),
    fault("pick-of-an-unseen-entry", "B", "one more entry visible to the selection",
          by_selector(lambda scores, visible, k:
                      select_topk(scores, (visible + 1).clamp(max=scores.shape[1]), k)),
          _INVALID, clear=_CLEAR, log="B07 B10"),
    fault("entry-picked-twice", "B", "one entry twice", by_selector(_twice), _INVALID,
          clear=_CLEAR),
    fault("holes-first", "B", "-1 before the picks",
          by_selector(lambda scores, visible, k: select_topk(scores, visible, k).flip(1)), _INVALID,
          clear=_CLEAR),
    fault("length-read-as-unsigned", "B", "rows that see nothing pick the first k columns",
          on_picks(_unsigned_length), _INVALID, clear=_CLEAR, log="B01 B02 B03"),
    fault("minus-one-read-as-zero", "B", "-1 turned into entry 0",
          on_picks(lambda g, picks: picks.clamp(min=0)), _INVALID, clear=_CLEAR, log="B05 C03"),
    fault("pick-of-garbage", "A", "one index far outside", on_picks(_garbage), _INVALID,
          clear=_CLEAR, log="A07 C01"),
    fault("pick-buffer-unwritten", "C", "two picks that nobody wrote", on_picks(_unwritten),
          _INVALID, clear=_CLEAR, log="B08 C02"),
    fault("picks-of-the-batch", "L", "entries counted over the whole batch", on_picks(_absolute),
          _INVALID, clear=_CLEAR, log="L01 B04", requests=2),
    fault("picks-of-the-pool", "Q", "rows of the pool instead of entries", on_picks(_pool_rows),
          _INVALID, clear=_CLEAR, log="Q06"),
    fault("picks-of-the-token-before", "M", "picks one token late",
          on_picks(lambda g, picks: torch.cat((picks[:1], picks[:-1]))), _SELECTOR, clear=_CLEAR,
          log="M02 M05"),
    fault("picks-of-another-layer", "Q", "half of the batch keeps picks of other scores",
          on_picks(_stale), _SELECTOR, clear=_CLEAR, log="Q02 Q03 Q04"),
    fault("picks-all-empty", "Q", "a cleared list where a selection is due",
          on_picks(lambda g, picks: torch.full_like(picks, -1)), _INVALID, clear=_CLEAR, log="Q01"),
    fault("pick-rows-swapped", "L", "picks of two neighbouring queries exchanged",
          on_picks(_rows_swapped), _SELECTOR, clear=_CLEAR, log="L05"),
    replace(fault("picks-without-scores", "A", "the newest entries, and nothing to justify them",
                  _alone, "topk.unknown"),
            declares=("main.pooled", "main.normed", "main.roped", "main.stored", "index.topk")),
)  # fmt: skip

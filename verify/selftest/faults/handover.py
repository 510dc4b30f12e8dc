"""Faults of what is handed over: broken rules, missing stages, directions below every size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from needlepoint.optimized.protocol.interface import INDEX, MAIN, Observed, PagedRows
from needlepoint.reference.compressor import pool
from needlepoint.verify.selftest.faults.controls import higher_entry_wins
from needlepoint.verify.selftest.faults.fault import Case, Plant, Setting, fault, rerun
from needlepoint.verify.selftest.faults.ground import Ground, reader_of
from needlepoint.verify.selftest.faults.pages import moved
from needlepoint.verify.selftest.faults.picks import by_selector
from needlepoint.verify.selftest.faults.plant import paged, repooled
from needlepoint.verify.selftest.faults.scores import on_scores

_PROTOCOL = "protocol"
_TIES = Setting(kind="ties")


def _spoiled(ground: Ground) -> Observed:
    """Write to a tensor that both sides are given."""
    if ground.given.query is not None:
        ground.given.query.weights.mul_(2.0)
    return ground.observed


def _raises(ground: Ground) -> Observed:
    raise RuntimeError("no kernel for this shape")


def with_tables(change: Callable[[Ground, PagedRows], tuple[Tensor, ...]]) -> Plant:
    """Hand over index pages with other page tables."""

    def plant(ground: Ground) -> Observed:
        rows = ground.observed.stored[INDEX]
        moved = replace(rows, page_table=change(ground, rows))
        return replace(ground.observed, stored={**ground.observed.stored, INDEX: moved})

    return plant


def _shared_page(ground: Ground, rows: PagedRows) -> tuple[Tensor, ...]:
    """Map the first page of request 0 for request 1 as well."""
    tables = [table.clone() for table in rows.page_table]
    tables[1][0] = tables[0][0]
    return tuple(tables)


def _fewer_entries(ground: Ground) -> Observed:
    """Count no entry for a request of one page, as a cache that never compresses."""
    rows = ground.observed.stored[INDEX]
    counted = replace(rows, entries=(*rows.entries[:-1], 0))
    return replace(ground.observed, stored={**ground.observed.stored, INDEX: counted})


def _narrow_scores(ground: Ground) -> Observed:
    tables = [table[:, :-1] for table in ground.scores]
    return replace(ground.observed, scores=reader_of(tables))


def _per_head_picks(ground: Ground) -> Observed:
    """Hand over a pick list for every head."""
    picks = ground.observed.topk
    return (
        ground.observed
        if picks is None
        else replace(ground.observed, topk=picks[:, None].expand(-1, 4, -1).flatten(0, 1))
    )


def _float_pages(ground: Ground) -> Observed:
    rows = ground.observed.stored[INDEX]
    wrong = replace(rows, pool=rows.pool.to(torch.float32))
    return replace(ground.observed, stored={**ground.observed.stored, INDEX: wrong})


def _racing(ground: Ground, request: int, table: Tensor) -> Tensor:
    """Sum a few scores in another order: one ulp, inside every bound."""
    table[::7] = torch.where(
        torch.isneginf(table[::7]), table[::7], torch.nextafter(table[::7], torch.zeros(()))
    )
    return table


def _sound(ground: Ground) -> Observed:
    return ground.observed


def _given_back(ground: Ground) -> Observed:
    """Return rows that lie in the memory of what was given."""
    part = ground.given.main
    shape = ground.observed.dense[MAIN, "pooled"].shape
    rows = part.kv[: shape[0], : shape[1]]
    return replace(ground.observed, dense={**ground.observed.dense, (MAIN, "pooled"): rows})


FAULTS: tuple[Case, ...] = (
    fault("scores-lean", "H", "all scores 2^-19 too large, inside every bound",
          on_scores(lambda g, r, table: table * (1 + 2.0**-19)), "bias", clear="index.scores topk",
          log="G08 G07", needs=64),
    fault("pooled-leans", "H", "pooled rows 1.7e-6 too large, inside every radius",
          repooled(pooling=lambda taps: pool(taps) * (1 + 1.7e-6)), "bias", clear="index.pooled",
          log="H02 F10", needs=64),
    fault("inputs-written", "C", "writes to a tensor that it was given", _spoiled, _PROTOCOL,
          log="C05 D09"),
    fault("candidate-raises", "O", "no kernel for the shape", _raises, _PROTOCOL,
          log="O03 O04 B12 O01 O06 F09"),
    fault("page-number-past-the-pool", "B", "page numbers that the pool does not have",
          with_tables(lambda g, rows: tuple(table + len(rows.pool) for table in rows.page_table)),
          _PROTOCOL, log="B09 D08 K12"),
    fault("page-of-two-requests", "K", "one page mapped by two requests", with_tables(_shared_page),
          _PROTOCOL, log="K06", requests=2),
    fault("page-table-too-short", "B", "page tables narrower than the rows need",
          with_tables(lambda g, rows: tuple(table[:-1] for table in rows.page_table)), _PROTOCOL,
          log="B04 B09"),
    fault("entries-not-counted", "G", "a request whose finished windows are not counted",
          _fewer_entries, _PROTOCOL, log="G10 M06"),
    fault("scores-too-narrow", "P", "a score row shorter than the entries", _narrow_scores,
          _PROTOCOL, log="P05 O09"),
    fault("picks-of-every-head", "G", "one pick list a head", _per_head_picks, _PROTOCOL,
          log="G01"),
    fault("pages-of-another-dtype", "D", "pages that are not bytes", _float_pages, _PROTOCOL,
          log="D14"),
    fault("input-handed-back", "C", "rows in the memory of what was given", _given_back, _PROTOCOL),
    rerun(fault("ties-by-arrival", "N", "equal scores to whichever entry arrives first",
                by_selector(higher_entry_wins), "repeat", clear="index.scores topk",
                log="N04 B10 G07", on=_TIES, needs=120), again=_sound),
    rerun(fault("scores-race", "N", "a sum whose order changes from run to run", on_scores(_racing),
                "repeat", clear="index.scores topk", log="N02 C01 M02"), again=_sound),
    rerun(fault("stale-between-runs", "M", "one key row of the run before in a later run", _sound,
                "repeat", log="M04 K01 N01"), again=paged(moved((0, 1)))),
    fault("stage-not-returned", "O", "declares scores and hands back none",
          lambda g: replace(g.observed, scores=None), "skipped"),
)  # fmt: skip

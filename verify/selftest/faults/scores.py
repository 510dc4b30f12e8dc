"""Faults of scores: the formula, what it reads, what it masks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from needlepoint.optimized.emulation.scoring import fused_scores
from needlepoint.optimized.protocol.interface import INDEX, Observed, PagedRows
from needlepoint.verify.selftest.faults.fault import Case, Plant, fault
from needlepoint.verify.selftest.faults.ground import (
    Ground,
    ScoreKernel,
    pool_of,
    query_of,
    scored,
    seen,
    with_scores,
)
from needlepoint.verify.selftest.faults.plant import planes

_QUERY, _WEIGHTS, _SCORES = "query.query", "query.weights", "index.scores"


def by_kernel(kernel: ScoreKernel) -> Plant:
    """Score by another kernel."""

    def plant(ground: Ground) -> Observed:
        keys = ground.observed.stored[INDEX]
        return with_scores(ground, scored(ground, query_of(ground), keys, kernel))

    return plant


def by_reader(change: Callable[[Ground, PagedRows, tuple[Tensor, Tensor]], None]) -> Plant:
    """Score with keys that are read wrong from pages that are right."""

    def plant(ground: Ground) -> Observed:
        pool, rows = pool_of(ground, INDEX), ground.observed.stored[INDEX]
        change(ground, rows, planes(rows, pool))
        return with_scores(ground, scored(ground, query_of(ground), replace(rows, pool=pool)))

    return plant


def on_scores(change: Callable[[Ground, int, Tensor], Tensor], *, follow: bool = True) -> Plant:
    """Change the scores of each request; ``follow`` says whether the picks read them."""

    def plant(ground: Ground) -> Observed:
        tables = [
            change(ground, request, table.clone()) for request, table in enumerate(ground.scores)
        ]
        return with_scores(ground, tables, None if follow else ground.observed.topk)

    return plant


def _through_bf16(x: Tensor) -> Tensor:
    return x.to(torch.bfloat16).to(torch.float32)


def _no_relu(queries: Tensor, weights: Tensor, keys: Tensor, out: Tensor) -> None:
    out.copy_(torch.einsum("shd,td,sh->st", queries, keys, weights))


def _relu_after_sum(queries: Tensor, weights: Tensor, keys: Tensor, out: Tensor) -> None:
    _no_relu(queries, weights, keys, out)
    out.clamp_(min=0)


def _sigmoid(queries: Tensor, weights: Tensor, keys: Tensor, out: Tensor) -> None:
    out.copy_(torch.einsum("sht,sh->st", _dots(queries, keys).sigmoid(), weights))


def _dots(queries: Tensor, keys: Tensor) -> Tensor:
    return torch.einsum("shd,td->sht", queries, keys)


def _in_bf16(queries: Tensor, weights: Tensor, keys: Tensor, out: Tensor) -> None:
    """Round every product of a head to bf16 before it is weighted."""
    dots = _through_bf16(_dots(queries, keys)).relu()
    out.copy_(torch.einsum("sht,sh->st", dots, weights))


def _times(factor: float) -> Callable[[Ground, int, Tensor], Tensor]:
    return lambda ground, request, table: table * factor


def _no_key_scale(ground: Ground, rows: PagedRows, pages: tuple[Tensor, Tensor]) -> None:
    one = torch.tensor([1.0]).view(torch.uint8)
    pages[1][:] = one


def _late_key_scale(ground: Ground, rows: PagedRows, pages: tuple[Tensor, Tensor]) -> None:
    pages[1].copy_(pages[1].roll(1, 1))


def _stale_page(ground: Ground, rows: PagedRows, pages: tuple[Tensor, Tensor]) -> None:
    """Read through the page table of the request before."""
    one, other = (int(table[0]) for table in rows.page_table[:2])
    for plane in pages:
        plane[other] = plane[one]


def _one_row_pages(ground: Ground, rows: PagedRows, pages: tuple[Tensor, Tensor]) -> None:
    for plane in pages:
        plane.copy_(plane[:, :1].expand_as(plane).clone())


def seeing(more: int) -> Callable[[Ground, int, Tensor], Tensor]:
    """Return scores whose visibility is off by some entries."""

    def change(ground: Ground, request: int, table: Tensor) -> Tensor:
        shown = (seen(ground.given, request) + more).clamp(0, table.shape[1])[:, None]
        entry = torch.arange(table.shape[1])
        table = torch.where((entry < shown) & torch.isneginf(table), 0.0, table)
        return table.masked_fill(entry >= shown, -torch.inf)

    return change


def _acausal(ground: Ground, request: int, table: Tensor) -> Tensor:
    """Show every query what the last query of its request sees."""
    last = table[-1:].expand_as(table)
    return torch.where(torch.isneginf(table), last, table)


def _poked(value: float) -> Callable[[Ground, int, Tensor], Tensor]:
    """Return scores with another number in one visible place."""

    def change(ground: Ground, request: int, table: Tensor) -> Tensor:
        if request == ground.longest:
            table[-1, ground.entries // 2] = value
        return table

    return change


def _last_rows_lost(ground: Ground, request: int, table: Tensor) -> Tensor:
    if request == ground.longest:
        table[-2:] = torch.where(torch.isneginf(table[-2:]), table[-2:], 0.0)
    return table


def _rows_of_chunk(ground: Ground, request: int, table: Tensor) -> Tensor:
    """Mask the second half of the queries as if it were a prompt of its own."""
    half = len(table) // 2
    shown = (torch.arange(len(table)) - half + 1).clamp(min=0) // ground.given.ratio
    hidden = (torch.arange(table.shape[1]) >= shown[:, None]) & (torch.arange(len(table)) >= half)[
        :, None
    ]
    return table.masked_fill(hidden, -torch.inf)


FAULTS: tuple[Case, ...] = (
    fault("relu-missing", "G", "negative products of a head not clipped", by_kernel(_no_relu),
          _SCORES, clear="topk", log="G01 G02"),
    fault("relu-after-the-sum", "G", "the sum over heads clipped instead of its terms",
          by_kernel(_relu_after_sum), _SCORES, log="G01"),
    fault("head-weights-missing", "G", "heads summed without weights",
          by_kernel(lambda q, w, keys, out: fused_scores(q, torch.ones_like(w), keys, out)),
          _SCORES, clear="topk"),
    fault("head-missing", "O", "one head left out",
          by_kernel(lambda q, w, keys, out: fused_scores(q[:, 1:], w[:, 1:], keys, out)), _SCORES,
          log="O05"),
    fault("scores-of-one-head", "G", "picks of a single head for all",
          by_kernel(lambda q, w, keys, out: fused_scores(q[:, :1], w[:, :1], keys, out)), _SCORES,
          log="G01"),
    fault("sigmoid-for-relu", "G", "sigmoid of a head's product", by_kernel(_sigmoid), _SCORES,
          log="G05"),
    fault("dots-in-bf16", "G", "a head's product rounded to bf16", by_kernel(_in_bf16), _SCORES,
          log="G07 G08"),
    fault("score-weights-in-bf16", "G", "weights rounded to bf16 inside the score kernel",
          by_kernel(lambda q, w, keys, out: fused_scores(q, _through_bf16(w), keys, out)),
          _SCORES, log="G07"),
    fault("scores-of-half-the-dims", "O", "64 of 128 dims summed",
          by_kernel(lambda q, w, keys, out: fused_scores(q[..., :64], w, keys[:, :64], out)),
          _SCORES, log="O03 O05"),
    fault("scores-gain-0.4%", "G", "all scores 0.4 % too large", on_scores(_times(1.004)), _SCORES,
          clear="topk"),
    fault("wrong-positive-constant", "G", "all scores times 512^-0.5 / 128^-0.5",
          on_scores(_times(0.5)), _SCORES, clear="topk", log="G06"),
    fault("scores-rounded-to-bf16", "G", "scores handed over in bf16",
          on_scores(lambda g, r, table: _through_bf16(table)), _SCORES,
          log="G07"),
    fault("scores-overflow-fp16", "C", "scores through fp16",
          on_scores(lambda g, r, table:
                    (table * 2.0**17).to(torch.float16).to(torch.float32) / 2.0**17),
          _SCORES, log="C10"),
    fault("key-scale-missing", "D", "scores without the key scale", by_reader(_no_key_scale),
          _SCORES),
    fault("key-scale-of-the-neighbour", "D", "scores with the scale of the row before",
          by_reader(_late_key_scale), _SCORES),
    fault("keys-of-another-request", "L", "keys read through the page table of the request before",
          by_reader(_stale_page), _SCORES, log="L01 M04", requests=2),
    fault("keys-of-one-row-pages", "D", "row 0 of a page read for all its rows",
          by_reader(_one_row_pages), _SCORES, log="D05"),
    fault("one-entry-too-many-visible", "L", "queries see the entry after their last",
          on_scores(seeing(1)), _SCORES, log="B01"),
    fault("newest-entry-not-visible", "L", "queries do not see their newest entry",
          on_scores(seeing(-1)), _SCORES, log="J09 L04"),
    fault("queries-see-the-future", "L", "no causal mask", on_scores(_acausal), _SCORES),
    fault("chunk-without-its-past", "L", "a chunk masked as a prompt of its own",
          on_scores(_rows_of_chunk), _SCORES, log="P02 L05 I09"),
    fault("score-nan", "C", "one NaN among the scores", on_scores(_poked(float("nan"))), _SCORES,
          log="C01 C02 E03"),
    fault("score-infinite", "C", "one +inf among the scores", on_scores(_poked(float("inf"))),
          _SCORES, log="C02 E03"),
    fault("mask-not-infinite", "C", "1e30 beyond the last visible entry",
          on_scores(lambda g, r, table: table.masked_fill(torch.isneginf(table), 1e30),
                    follow=False),
          _SCORES, log="C09 P05"),
    fault("scores-all-zero", "A", "a reduction that returns zeros",
          on_scores(lambda g, r, table: torch.where(torch.isneginf(table), table, 0.0)), _SCORES,
          log="A09 E07"),
    fault("last-rows-of-zeros", "E", "the last two queries of a request get zeros",
          on_scores(_last_rows_lost), _SCORES, log="E08 J03"),
)  # fmt: skip

"""The expected rows of a request by position: those of its tokens run alone from the start.

Under the specification a row is a function of the tokens of its window and of its entry, so texts
are run once as whole prompts and every request takes its rows from there. Rows whose window is of
two texts (a fork inside it), or has tokens that a bf16 state rounded, are computed from that window
alone.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from needlepoint.optimized.candidates.emulated import EmulatedCandidate, Order
from needlepoint.optimized.emulation.compressor import Compressor, EntryBlock
from needlepoint.optimized.emulation.narrow import store_bf16, store_main_fp8
from needlepoint.optimized.emulation.query import STORES
from needlepoint.optimized.protocol.interface import INDEX, Observed, QueryRows
from needlepoint.optimized.protocol.serving import BF16_STATE
from needlepoint.reference.profile import Arithmetic, needlepoint_profile
from needlepoint.verify.layout.decode import Bytes, decode_fields
from needlepoint.verify.layout.geometry import LAYOUTS, ROWS_F64
from needlepoint.verify.layout.pages import open_pool
from needlepoint.verify.layout.stored_rows import decoded_queries, unfolded_weights
from needlepoint.verify.scenario.actions import View
from needlepoint.verify.scenario.bank import bank


class Expected(Protocol):
    """Rows and queries of requests, from scratch."""

    @property
    def arithmetic(self) -> Arithmetic:
        """The profile behind them."""
        ...

    def rows(self, path: str, view: View, first: int, stop: int) -> Bytes:
        """Return the bytes of entries ``first .. stop - 1``, without padding."""
        ...

    def values(self, path: str, raw: Bytes) -> Tensor:
        """Return such bytes decoded, float64 ``[entries, d]``."""
        ...

    def query(self, rows: Tensor) -> QueryRows | None:
        """Return the stored queries of rows of the bank; None where there are none to compare."""
        ...

    def decoded_query(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return queries and weights of rows as the score reads them, float64."""
        ...


class SpecificationRows:
    """What the specification stores, in one key format; use :func:`specification_rows`.

    Parameters
    ----------
    ratio, seed
        Of the bank.
    key_format
        ``"bf16"``, ``"fp8"`` or ``"fp4"``.
    state
        ``"fp32"`` or ``"bf16"``.
    """

    def __init__(self, ratio: int, seed: int, key_format: str, state: str) -> None:
        self._bank = bank(ratio, seed)
        self._format = key_format
        self._rounds = state == BF16_STATE
        whole = _whole_texts(ratio, seed, key_format)
        self._layouts = {path: paged.layout for path, paged in whole.stored.items()}
        self._table: dict[str, Bytes] = {}
        for path, paged in whole.stored.items():
            pool = open_pool(paged.pool, paged.layout, paged.page_size)
            tables = zip(paged.page_table, paged.entries, strict=True)
            self._table[path] = np.stack([pool.raw_rows(ids, count) for ids, count in tables])
        self._query = whole.query
        self._made: dict[tuple[object, ...], Bytes] = {}
        self.arithmetic = needlepoint_profile(key_format)
        if whole.query is not None:
            self._decoded = decoded_queries(whole.query, self.arithmetic.index_query)
            self._weights = unfolded_weights(whole.query)

    def rows(self, path: str, view: View, first: int, stop: int) -> Bytes:
        """Return the bytes of entries ``first .. stop - 1``, without padding."""
        ratio, table = self._bank.ratio, self._table[path]
        if not self._rounds and (view.texts == view.texts[0]).all():
            return table[view.texts[0], first:stop]
        entries = np.arange(first, stop)
        last = (entries + 1) * ratio - 1
        out: Bytes = table[view.texts[last], entries]
        halves = 2 if ratio == 4 else 1
        oldest = np.maximum((entries + 1 - halves) * ratio, 0)
        changes = np.concatenate(([0], np.cumsum(view.texts[1:] != view.texts[:-1])))
        mixed = changes[last] != changes[oldest]
        if self._rounds:
            mixed |= view.calls[last] > oldest
        for place in np.flatnonzero(mixed):
            entry, start = int(entries[place]), int(oldest[place])
            window = view.texts[start : last[place] + 1]
            rounded = max(0, int(view.calls[last[place]]) - start) if self._rounds else 0
            key = (path, entry, window.tobytes(), rounded)
            if key not in self._made:
                self._made[key] = self._window_row(path, entry, view, start, rounded)
            out[place] = self._made[key]
        return out

    def _window_row(self, path: str, entry: int, view: View, start: int, rounded: int) -> Bytes:
        """Compute one row from its window, the first ``rounded`` tokens of it as a bf16 state."""
        own = self._bank
        stop = (entry + 1) * own.ratio
        tokens = own.tokens(path, own.rows(view.texts[start:stop], start))
        kv, score = (
            torch.cat((x[:rounded].bfloat16().float(), x[rounded:]))
            for x in (tokens.kv, tokens.score)
        )
        given = replace(own.compressor(path), kv=kv, score=score)
        compressor = Compressor(given, own.inputs)
        block = EntryBlock(0, entry, 1, 0, -start)
        row = compressor.rope(compressor.norm(compressor.pool(block)), block)
        store = store_bf16 if self._format == "bf16" else store_main_fp8
        if path == INDEX:
            row, store = compressor.rotate(row), STORES[self._format]
        stored = store(np.ascontiguousarray(row.T))
        raw: Bytes = np.concatenate((stored.values, stored.scales), axis=1)[0]
        return raw[: self._table[path].shape[-1]]  # the last scale byte of a main row is padding

    def values(self, path: str, raw: Bytes) -> Tensor:
        """Return such bytes decoded, float64 ``[entries, d]``."""
        return decoded_rows(self._layouts[path], raw)

    def query(self, rows: Tensor) -> QueryRows | None:
        """Return the stored queries of rows of the bank."""
        if self._query is None:
            return None
        held = self._query
        return replace(
            held,
            codes=held.codes[rows],
            scales=None if held.scales is None else held.scales[rows],
            weights=held.weights[rows],
        )

    def decoded_query(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return queries and weights of rows as the score reads them, float64."""
        return self._decoded[rows], self._weights[rows]


@lru_cache(maxsize=16)
def specification_rows(ratio: int, seed: int, key_format: str, state: str) -> SpecificationRows:
    """Return what the specification stores of a bank."""
    return SpecificationRows(ratio, seed, key_format, state)


@lru_cache(maxsize=8)
def _whole_texts(ratio: int, seed: int, key_format: str) -> Observed:
    """Run every text as a whole prompt."""
    return EmulatedCandidate(key_format, Order.FUSED).run(bank(ratio, seed).inputs)


def decoded_rows(layout: str, raw: Bytes) -> Tensor:
    """Return raw rows of a layout decoded, float64 ``[entries, d]``."""
    if layout == ROWS_F64:
        return torch.from_numpy(np.ascontiguousarray(raw).view(np.float64).copy())
    fields: dict[str, Bytes] = {}
    start = 0
    for plane in LAYOUTS[layout].planes:
        for name, width in plane.fields:
            fields[name] = raw[:, start : start + width]
            start += width
    return torch.from_numpy(decode_fields(layout, fields).values)

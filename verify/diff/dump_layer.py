"""One layer of a dump: its tensors by the mapping, aligned, as a candidate would hand them back."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from needlepoint.optimized.protocol.interface import (
    INDEX,
    MAIN,
    QUERY,
    LayerInputs,
    Observed,
    PagedRows,
    QueryRows,
    StageKey,
)
from needlepoint.optimized.protocol.stages import dense_stages
from needlepoint.verify.base.stage_tensors import check_outputs
from needlepoint.verify.base.stages import INPUT, PROJECTED, SCORES, STORED, is_key_side
from needlepoint.verify.diff.align import read_alignment
from needlepoint.verify.diff.files import DumpError, DumpFiles
from needlepoint.verify.diff.mapping import Mapping, Pages, Source
from needlepoint.verify.diff.pages import checked_table, entries_of, paged_rows

_QUERY_PARTS = ("query.query.codes", "query.weights")


@dataclass(frozen=True)
class DumpLayer:
    """One layer of a dump.

    Attributes
    ----------
    given
        What both sides are given: the dump's own tensors where it has them.
    observed
        What the dump holds of the stages.
    brought
        Stages that the dump holds, common input among them.
    """

    given: LayerInputs
    observed: Observed
    brought: frozenset[StageKey]


class LayerReader:
    """Reads one layer; ``brought`` grows with every stage that is found."""

    def __init__(self, files: DumpFiles, mapping: Mapping, base: LayerInputs) -> None:
        self._files = files
        self._mapping = mapping
        self._base = base
        self._alignment = read_alignment(files, mapping)
        self._notes: list[str] = []
        self._brought: set[StageKey] = set()

    def read(self) -> DumpLayer:
        """Read, align and check everything that the mapping names for this layer.

        Raises
        ------
        DumpError
            As :meth:`Dump.read_layer`.
        """
        known = self._base.paths
        places = {str(p): pages for p, pages in self._mapping.pages.items() if p in known}
        tables = {path: self._table(path, pages) for path, pages in places.items()}
        dense = {
            (path, stage): rows
            for path in known
            for stage in dense_stages(path)
            if (rows := self._rows((path, stage))) is not None
        }
        given = self._given()
        observed = Observed(
            dense=dense,
            stored={p: self._pages(p, tables[p], pages) for p, pages in places.items()},
            query=self._query(),
            scores=self._scores(),
            topk=self._picks(tables),
            attention=self._rows((MAIN, "attention")),
        )
        self._brought |= {*dense, *((path, STORED) for path in observed.stored)}
        if observed.attention is not None:
            self._brought.add((MAIN, "attention"))
        try:
            check_outputs(given, observed)
        except ValueError as error:
            raise DumpError(f"dump {self._files.directory}: {error}") from error
        return DumpLayer(
            given, replace(observed, path_taken=self._summary()), frozenset(self._brought)
        )

    def _summary(self) -> str:
        passes, dropped = len(self._alignment.steps), self._alignment.dropped
        how = "whole requests in order"
        if self._mapping.tokens is not None:
            how = f"{passes} passes placed by position, {dropped} padding rows left out"
        ranks = f", {self._mapping.ranks} ranks joined" if self._mapping.ranks > 1 else ""
        common = {(MAIN, INPUT), *((path, PROJECTED) for path in self._base.paths)}
        if self._base.query is not None:
            common.add((QUERY, PROJECTED))
        assumed = sorted(".".join(key) for key in common - self._brought)
        notes = "".join(f"; {note}" for note in self._notes)
        return f"dump: {how}{ranks}{notes}; not in the dump, as recorded: " + (
            ", ".join([*assumed, "constants"])
        )

    def _named(self, template: str, step: int | None, rank: int) -> str:
        text = template.replace("{layer}", str(self._base.layer)).replace("{rank}", str(rank))
        return text if step is None else text.replace("{step}", str(step))

    def _parts(self, name: str) -> list[Tensor] | None:
        """Return the rows of every pass, ranks joined; None where the mapping has no such rows."""
        source = self._mapping.rows.get(name)
        if source is None or not self._has(name):
            return None
        if isinstance(source, str):
            source = Source(tensor=source)
        steps = self._mapping.steps or (None,)
        return [self._joined(name, source, step) for step in steps]

    def _has(self, name: str) -> bool:
        """Whether this layer has the path of a name: a mapping serves layers of every ratio."""
        path = name.partition(".")[0]
        if path == QUERY:
            return self._base.query is not None
        return path in self._base.paths or name == f"{MAIN}.{INPUT}"

    def _joined(self, name: str, source: Source, step: int | None) -> Tensor:
        ranks = range(self._mapping.ranks if source.shard else 1)
        parts = [self._files.tensor(self._named(source.tensor, step, rank)) for rank in ranks]
        if len({tuple(part.shape) for part in parts}) > 1:
            raise DumpError(
                f"{name}: ranks hold shapes {[list(part.shape) for part in parts]}; expected one"
            )
        if source.shard == "heads":
            return torch.cat(parts, dim=1) if len(parts) > 1 else parts[0]
        if source.shard == "sum" and len(parts) > 1:
            return torch.stack([part.to(torch.float32) for part in parts]).sum(0)
        return parts[0]

    def _token_rows(self, name: str) -> Tensor | None:
        parts = self._parts(name)
        return None if parts is None else self._alignment.tokens(parts, name)

    def _widened(self, name: str, empty: float) -> Tensor | None:
        """Return one row a token where a later pass has more columns than an earlier one."""
        parts = self._parts(name)
        if parts is None:
            return None
        if any(part.dim() != 2 for part in parts):
            raise DumpError(f"{name}: shapes {[list(p.shape) for p in parts]}, expected matrices")
        widest = max(part.shape[1] for part in parts)
        parts = [pad(part, (0, widest - part.shape[1]), value=empty) for part in parts]
        return self._alignment.tokens(parts, name)

    def _rows(self, key: StageKey) -> Tensor | None:
        name = ".".join(key)
        if not is_key_side(key):
            return self._token_rows(name)
        parts = self._parts(name)
        return None if parts is None else self._alignment.entries(parts, self._base.ratio, name)

    def _given(self) -> LayerInputs:
        """Return the common input, with what the dump has of it."""
        base = self._base
        hidden = self._token_rows("main.input")
        if hidden is not None:
            base = replace(base, hidden=_like(hidden, base.hidden, "main.input"))
            self._brought.add((MAIN, INPUT))
        for path, own in base.paths.items():
            names = (f"{path}.projected.kv", f"{path}.projected.score")
            kv, score = (self._token_rows(name) for name in names)
            if not own.score.shape[1] and kv is not None:  # nothing is pooled at ratio 1
                score = own.score
            if kv is None and score is None:
                continue
            if kv is None or score is None:
                raise DumpError(f"{names[0]} and {names[1]} go together; map both or neither")
            own = replace(
                own, kv=_like(kv, own.kv, names[0]), score=_like(score, own.score, names[1])
            )
            base = replace(base, index=own) if path == INDEX else replace(base, main=own)
            self._brought.add((path, PROJECTED))
        q, weights = (self._token_rows(f"query.projected.{part}") for part in ("q", "weights"))
        if (q is None) != (weights is None):
            raise DumpError(
                "query.projected.q and query.projected.weights go together; map both or neither"
            )
        if base.query is not None and q is not None and weights is not None:
            query = replace(
                base.query,
                q=_like(q, base.query.q, "query.projected.q"),
                weights=_like(weights, base.query.weights, "query.projected.weights"),
            )
            base = replace(base, query=query)
            self._brought.add((QUERY, PROJECTED))
        return base

    def _table(self, path: str, pages: Pages) -> Tensor:
        table = self._files.tensor(self._named(pages.table, None, 0))
        return checked_table(table, path, self._base)

    def _pages(self, path: str, table: Tensor, pages: Pages) -> PagedRows:
        pool = self._files.tensor(self._named(pages.tensor, None, 0))
        self._notes.append(f"{path} rows through the page table")
        return paged_rows(pool, table, pages, path, self._base)

    def _query(self) -> QueryRows | None:
        codes, weights = (self._token_rows(name) for name in _QUERY_PARTS)
        scales = self._token_rows("query.query.scales")
        if codes is None and weights is None:
            return None
        if codes is None or weights is None:
            raise DumpError(f"{' and '.join(_QUERY_PARTS)} go together; map both or neither")
        kind = self._mapping.format
        if kind == "bf16":
            scales = None
        elif scales is None:
            raise DumpError(f"query.query.scales: missing; {kind} queries have them")
        else:
            codes = codes.contiguous().view(torch.uint8)
            shape = codes.shape[:2] if kind == "fp8" else (*codes.shape[:2], 4)
            scales = scales if kind == "fp8" else scales.contiguous().view(torch.uint8)
            if scales.numel() != torch.Size(shape).numel():
                raise DumpError(
                    f"query.query.scales: shape {list(scales.shape)}, expected {list(shape)}"
                )
            scales = scales.reshape(shape)
        self._brought |= {(QUERY, "query"), (QUERY, "weights")}
        return QueryRows(kind, codes, scales, weights.to(torch.float32), self._mapping.scale_folded)

    def _scores(self) -> Callable[[int, int, int], Tensor] | None:
        rows = self._widened("index.scores", -math.inf)
        if rows is None:
            return None
        lengths, ratio = self._base.lengths, self._base.ratio
        if rows.dim() != 2 or rows.shape[1] < max(lengths) // ratio:
            raise DumpError(
                f"index.scores: shape {list(rows.shape)}, expected [tokens, at least "
                f"{max(lengths) // ratio} entries]"
            )
        self._brought.add((INDEX, SCORES))
        self._notes.append("scores beyond a query's visible entries are not looked at")

        def read(request: int, start: int, stop: int) -> Tensor:
            first = sum(lengths[:request])
            block = rows[first + start : first + stop, : lengths[request] // ratio]
            visible = (torch.arange(start, stop) + 1) // ratio
            # Engines leave these columns as they were.
            beyond = torch.arange(block.shape[1]) >= visible.unsqueeze(1)
            return block.to(torch.float32).masked_fill(beyond, -torch.inf)

        return read

    def _picks(self, tables: dict[str, Tensor]) -> Tensor | None:
        rows = self._widened("index.topk", -1)
        if rows is None:
            return None
        if rows.dtype.is_floating_point or rows.dim() != 2:
            raise DumpError(
                f"index.topk: {rows.dtype} {list(rows.shape)}, expected integers [n, k]"
            )
        self._brought.add((INDEX, "topk"))
        picks = rows.to(torch.int64)
        if self._mapping.picks == "entries":
            # Clamped, not wrapped: an entry that cannot exist stays one.
            bounds = torch.iinfo(torch.int32)
            return picks.clamp(bounds.min, bounds.max).to(torch.int32)
        if INDEX not in tables:
            raise DumpError('picks = "slots" needs [pages.index]: slots go back through its table')
        size = self._mapping.pages["index"].page_size
        self._notes.append("picks from slots to entries through the index page table")
        return entries_of(picks, tables[INDEX], size, self._base.lengths, self._base.ratio)


def _like(rows: Tensor, base: Tensor, what: str) -> Tensor:
    """Return rows in the recording's dtype; a bf16 number is the same number in fp32."""
    if rows.shape != base.shape:
        raise DumpError(f"{what}: shape {list(rows.shape)}, the recording has {list(base.shape)}")
    if not rows.dtype.is_floating_point:
        raise DumpError(f"{what}: dtype {rows.dtype}, expected floating point numbers")
    return rows.to(base.dtype)

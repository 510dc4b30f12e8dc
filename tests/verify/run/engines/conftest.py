"""An engine in fp32 torch: follows the switches of a profile step by step, as a kernel would."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from scipy.linalg import hadamard
from torch import Tensor

from needlepoint.optimized import narrow, pages
from needlepoint.optimized.candidates import create
from needlepoint.optimized.interface import (
    INDEX,
    MAIN,
    Candidate,
    CandidateInfo,
    CompressorInputs,
    LayerInputs,
    Observed,
    PagedRows,
    QueryRows,
    StageKey,
)
from needlepoint.reference.formats import Format, ScaleKind, decode, encode, pack_e2m1
from needlepoint.reference.profile import ApePlacement, Arithmetic, Precision
from needlepoint.reference.profile_engines import engine_profile

_MATRIX = torch.from_numpy(hadamard(128)).float() * 128**-0.5


def at(x: Tensor, precision: Precision) -> Tensor:
    return x.to(torch.bfloat16).float() if precision is Precision.BF16 else x


def rotate(x: Tensor, table: Tensor) -> Tensor:
    pairs = x[..., -64:].reshape(*x.shape[:-1], 32, 2)
    a, b, cos, sin = pairs[..., 0], pairs[..., 1], table[..., 0], table[..., 1]
    turned = torch.stack((a * cos - b * sin, a * sin + b * cos), dim=-1).flatten(-2)
    return torch.cat((x[..., :-64], turned), dim=-1)


def packed(x: Tensor, fmt: Format) -> narrow.StoredRows:
    held = encode(x, fmt)
    if fmt.scale is ScaleKind.NONE:
        values = held.codes.view(torch.uint8)
        return narrow.StoredRows(values.numpy(), np.empty((len(x), 0), dtype=np.uint8))
    assert held.scales is not None
    codes = pack_e2m1(held.codes) if fmt.element == "e2m1" else held.codes
    scales = held.scales
    if fmt.element == "e4m3" and fmt.block == 128 and scales.dtype == torch.uint8:
        scales = torch.exp2(scales.float() - 127)  # a power of two in the fp32 slot
    return narrow.StoredRows(codes.numpy(), scales.contiguous().view(torch.uint8).numpy())


@dataclass(frozen=True)
class TorchEngine:
    """A candidate that declares one profile and computes by another, usually the same."""

    engine: str
    key_format: str
    does: Arithmetic
    label: str = ""

    @property
    def info(self) -> CandidateInfo:
        name = f"test:{self.engine}-{self.key_format}{self.label}"
        return CandidateInfo(name, self.key_format, "cpu", self.engine, "torch", "0" * 64)

    def stages(self, ratio: int) -> frozenset[StageKey]:
        own = create("emulated:fused-bf16").stages(ratio)
        return own if self.does.hadamard else own - {(INDEX, "rotated")}

    def run(self, given: LayerInputs) -> Observed:
        dense: dict[StageKey, Tensor] = {}
        stored: dict[str, PagedRows] = {}
        for path, part in ((INDEX, given.index), (MAIN, given.main)):
            if part is not None:
                rows = self._rows(part, given)
                if path == MAIN or not self.does.hadamard:
                    del rows["rotated"]
                dense |= {(path, stage): row for stage, row in rows.items()}
                stored[path] = self._pages(path, list(rows.values())[-1], given)
        if given.query is None or given.index is None:
            return Observed(dense=dense, stored=stored)
        keys = decode(
            encode(dense[INDEX, "rotated" if self.does.hadamard else "roped"], self.does.index_key),
            self.does.index_key,
        ).float()
        query, values = self._query(given)
        counts = [n // 4 for n in given.lengths]

        def scores(request: int, start: int, stop: int) -> Tensor:
            first, entry = sum(given.lengths[:request]), sum(counts[:request])
            own = keys[entry : entry + counts[request]]
            rows = slice(first + start, first + stop)
            weights = at(given.query.weights[rows], self.does.query_input) * given.weight_scale  # type: ignore[union-attr]
            found = (
                torch.einsum("shd,td->sht", values[rows], own).relu() * weights[..., None]
            ).sum(1)
            seen = (torch.arange(start, stop) + 1) // 4
            return found.masked_fill(torch.arange(len(own)) >= seen[:, None], -torch.inf)

        picks = []
        for request, length in enumerate(given.lengths):
            block = torch.nn.functional.pad(
                scores(request, 0, length), (0, given.topk), value=-torch.inf
            )
            best = block.topk(given.topk, dim=1)
            picks.append(best.indices.masked_fill(best.values == -torch.inf, -1))
        return Observed(
            dense=dense,
            stored=stored,
            query=query,
            scores=scores,
            topk=torch.cat(picks).to(torch.int32),
        )

    def _rows(self, part: CompressorInputs, given: LayerInputs) -> dict[str, Tensor]:
        does, ratio, d = self.does, given.ratio, len(part.norm_weight)
        found, first = [], 0
        table = at(given.rope_table, does.rope_table)
        turns = []
        for length in given.lengths:
            count = length // ratio
            span = slice(first, first + count * ratio)
            kv, score = (at(x[span].float(), does.key_input) for x in (part.kv, part.score))
            score = score + part.ape.repeat(count, 1)
            if does.ape is ApePlacement.WRITE:
                kv, score = at(kv, does.state), at(score, does.state)
            kv, score = (x.reshape(count, ratio, -1) for x in (kv, score))
            if ratio == 4:
                before = torch.nn.functional.pad(kv[:-1, :, :d], (0, 0, 0, 0, 1, 0))
                gate = torch.nn.functional.pad(
                    score[:-1, :, :d], (0, 0, 0, 0, 1, 0), value=-torch.inf
                )
                kv, score = (
                    torch.cat((before, kv[..., d:]), 1),
                    torch.cat((gate, score[..., d:]), 1),
                )
            shares = at(score.softmax(1), does.pool_weights)
            found.append(at((at(shares * kv, does.pool_terms)).sum(1), does.pooled))
            turns.append(table[: count * ratio : ratio])
            first += length
        pooled = torch.cat(found)
        inverse = (pooled.square().mean(-1, keepdim=True) + given.norm_eps).rsqrt()
        normed = at(pooled * inverse * part.norm_weight, does.normed)
        roped = at(rotate(normed, torch.cat(turns)), does.roped)
        rotated = at(roped @ _MATRIX, does.rotated) if d == 128 else roped
        return {"pooled": pooled, "normed": normed, "roped": roped, "rotated": rotated}

    def _pages(self, path: str, row: Tensor, given: LayerInputs) -> PagedRows:
        does, counts = self.does, [n // given.ratio for n in given.lengths]
        fmt = does.index_key if path == INDEX else does.main_nope
        if path == INDEX:
            layout = {"bf16": "index-bf16", "e4m3": "index-fp8", "e2m1": "index-fp4"}[fmt.element]
            rows = packed(row, fmt)
        elif fmt.element == "bf16":
            layout, rows = "main-bf16", packed(row, fmt)
        else:
            layout, nope = "main-584", packed(row[:, :448], fmt)
            rope = row[:, 448:].to(torch.bfloat16).view(torch.uint8).numpy()
            rows = narrow.StoredRows(
                np.concatenate((nope.values, rope), 1), np.pad(nope.scales, ((0, 0), (0, 1)))
            )
        paged = pages.allocate(layout, pages.page_rows(given.ratio), counts, given.seed)
        first = 0
        for request, count in enumerate(counts):
            span = slice(first, first + count)
            pages.write_rows(
                paged, request, 0, narrow.StoredRows(rows.values[span], rows.scales[span])
            )
            first += count
        return paged

    def _query(self, given: LayerInputs) -> tuple[QueryRows, Tensor]:
        assert given.query is not None
        does, fmt = self.does.of_query, self.does.index_query
        place = torch.cat([torch.arange(n) for n in given.lengths])
        table = at(given.rope_table, does.rope_table)[place].unsqueeze(1)
        q = at(rotate(at(given.query.q, does.query_input), table), does.roped)
        q = at(q @ _MATRIX, does.rotated) if does.hadamard else q
        held = encode(q, fmt)
        weights = at(given.query.weights, does.query_input) * given.weight_scale
        values = decode(held, fmt).float()
        if fmt.scale is ScaleKind.NONE:
            return QueryRows("bf16", held.codes, None, weights, False), values
        assert held.scales is not None
        if fmt.element == "e2m1":
            codes = pack_e2m1(held.codes)
            return QueryRows("fp4", codes, held.scales, weights, False), values
        scale = held.scales[..., 0]
        scale = torch.exp2(scale.float() - 127) if scale.dtype == torch.uint8 else scale
        return QueryRows("fp8", held.codes, scale, weights * scale, True), values


@pytest.fixture(scope="session")
def engine() -> Callable[..., Candidate]:
    """Return a maker of engines; switches named by keyword are what it really does."""

    def make(name: str, key_format: str, label: str = "", **switches: object) -> Candidate:
        does = replace(engine_profile(name, key_format), **switches)  # type: ignore[arg-type]
        return TorchEngine(name, key_format, does, label)

    return make

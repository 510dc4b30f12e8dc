"""An engine in fp32 torch: follows the switches of a profile step by step, as a kernel would."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.linalg import hadamard
from torch import Tensor

from needlepoint.optimized.candidates.catalogue import create
from needlepoint.optimized.emulation import narrow, pages
from needlepoint.optimized.protocol.interface import (
    INDEX,
    MAIN,
    Candidate,
    CandidateInfo,
    CompressorInputs,
    LayerInputs,
    Observed,
    PagedRows,
    QueryRows,
    ScoreReader,
    StageKey,
)
from needlepoint.reference.formats import Format, ScaleKind, decode, encode, pack_e2m1
from needlepoint.reference.formats.names import RopeLayout
from needlepoint.reference.profile import ApePlacement, Arithmetic, Precision
from needlepoint.reference.profile_engines import engine_profile
from needlepoint.verify.inputs.load import Inputs, load_inputs

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


def in_pages(
    layout: str, rows: narrow.StoredRows, counts: Sequence[int], size: int, seed: int
) -> PagedRows:
    paged = pages.allocate(layout, size, counts, seed)
    first = 0
    for request, count in enumerate(counts):
        span = slice(first, first + count)
        pages.write_rows(paged, request, 0, narrow.StoredRows(rows.values[span], rows.scales[span]))
        first += count
    return paged


def index_pages(row: Tensor, fmt: Format, counts: Sequence[int], size: int, seed: int) -> PagedRows:
    layout = {"bf16": "index-bf16", "e4m3": "index-fp8", "e2m1": "index-fp4"}[fmt.element]
    return in_pages(layout, packed(row, fmt), counts, size, seed)


def stored_query(q: Tensor, given: LayerInputs, does: Arithmetic) -> tuple[QueryRows, Tensor]:
    assert given.query is not None
    fmt = does.index_query
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


def picked(scores: ScoreReader, given: LayerInputs) -> Tensor:
    picks = []
    for request, length in enumerate(given.lengths):
        block = scores(request, 0, length)
        block = torch.nn.functional.pad(block, (0, given.topk), value=-torch.inf)
        best = block.topk(given.topk, dim=1)
        picks.append(best.indices.masked_fill(best.values == -torch.inf, -1))
    return torch.cat(picks).to(torch.int32)


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

        return Observed(
            dense=dense,
            stored=stored,
            query=query,
            scores=scores,
            topk=picked(scores, given),
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
        size = pages.page_rows(given.ratio)
        if path == INDEX:
            return index_pages(row, fmt, counts, size, given.seed)
        if fmt.element == "bf16":
            layout, rows = "main-bf16", packed(row, fmt)
        else:
            layout, nope = "main-584", packed(row[:, :448], fmt)
            rope = row[:, 448:].to(torch.bfloat16).view(torch.uint8).numpy()
            rows = narrow.StoredRows(
                np.concatenate((nope.values, rope), 1), np.pad(nope.scales, ((0, 0), (0, 1)))
            )
        return in_pages(layout, rows, counts, size, given.seed)

    def _query(self, given: LayerInputs) -> tuple[QueryRows, Tensor]:
        assert given.query is not None
        does = self.does.of_query
        place = torch.cat([torch.arange(n) for n in given.lengths])
        table = at(given.rope_table, does.rope_table)[place].unsqueeze(1)
        q = at(rotate(at(given.query.q, does.query_input), table), does.roped)
        q = at(q @ _MATRIX, does.rotated) if does.hadamard else q
        return stored_query(q, given, self.does)


@pytest.fixture(scope="session")
def engine() -> Callable[..., Candidate]:
    """Return a maker of engines; switches named by keyword are what it really does."""

    def make(name: str, key_format: str, label: str = "", **switches: object) -> Candidate:
        does = replace(engine_profile(name, key_format), **switches)  # type: ignore[arg-type]
        return TorchEngine(name, key_format, does, label)

    return make


@dataclass(frozen=True)
class TokenEngine:
    """The same for layers of one index key a token."""

    engine: str
    key_format: str
    does: Arithmetic

    @property
    def info(self) -> CandidateInfo:
        name = f"test:{self.engine}-{self.key_format}"
        return CandidateInfo(name, self.key_format, "cpu", self.engine, "torch", "0" * 64)

    def stages(self, ratio: int) -> frozenset[StageKey]:
        own = create("emulated:fused-bf16").stages(ratio)
        meant = engine_profile(self.engine, self.key_format)
        return own if meant.hadamard else own - {(INDEX, "rotated")}

    def run(self, given: LayerInputs) -> Observed:
        assert given.index is not None
        assert given.index.norm_bias is not None
        assert given.query is not None
        does, part = self.does, given.index
        place = torch.cat([torch.arange(n) for n in given.lengths])
        table = at(given.rope_table, does.rope_table)[place]
        read = at(part.kv, does.key_input)
        normed = torch.nn.functional.layer_norm(
            read, (128,), part.norm_weight, part.norm_bias, given.norm_eps
        )
        normed = at(normed, does.normed)
        roped = at(rotate_first(normed, table, given.index_rope), does.roped)
        key = at(roped @ _MATRIX, does.rotated) if does.hadamard else roped
        q = at(given.query.q, does.query_input)
        q = at(rotate_first(q, table.unsqueeze(1), given.index_rope), does.of_query.roped)
        q = at(q @ _MATRIX, does.of_query.rotated) if does.hadamard else q
        query, values = stored_query(q, given, does)
        keys = decode(encode(key, does.index_key), does.index_key).float()
        weights = at(given.query.weights, does.query_input) * given.weight_scale

        def scores(request: int, start: int, stop: int) -> Tensor:
            first = sum(given.lengths[:request])
            own = keys[first : first + given.lengths[request]]
            rows = slice(first + start, first + stop)
            dots = torch.einsum("shd,td->sht", values[rows], own).relu()
            found = (dots * weights[rows][..., None]).sum(1)
            seen = torch.arange(start, stop) + 1
            return found.masked_fill(torch.arange(len(own)) >= seen[:, None], -torch.inf)

        dense = {(INDEX, "normed"): normed, (INDEX, "roped"): roped, (INDEX, "rotated"): key}
        if (INDEX, "rotated") not in self.stages(1):
            del dense[INDEX, "rotated"]
        return Observed(
            dense=dense,
            stored={INDEX: index_pages(key, does.index_key, given.lengths, 64, given.seed)},
            query=query,
            scores=scores,
            topk=picked(scores, given),
        )


def rotate_first(x: Tensor, table: Tensor, layout: RopeLayout) -> Tensor:
    """Rotate the first 64 dims with strides alone, not through a permutation."""
    cos, sin = table[..., 0], table[..., 1]
    out = x.clone()
    if layout is RopeLayout.LEADING_HALVES:
        one, other = (..., slice(0, 32)), (..., slice(32, 64))
    else:
        one, other = (..., slice(0, 64, 2)), (..., slice(1, 64, 2))
    out[one] = x[one] * cos - x[other] * sin
    out[other] = x[one] * sin + x[other] * cos
    return out


_TOKEN_SHAPES = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 1,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 64,
    "index_n_heads": 4,
    "index_head_dim": 128,
    "index_topk": 24,
    "rms_norm_eps": 1e-5,
}
_YARN = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096}
_TOKEN_MODELS: dict[str, dict[str, object]] = {
    "v3.2": {
        "model_type": "deepseek_v32",
        "rope_theta": 10000,
        "rope_scaling": {**_YARN, "beta_fast": 32, "beta_slow": 1},
    },
    "glm": {
        "model_type": "glm_moe_dsa",
        "indexer_types": ["full", "shared"],
        "rope_parameters": {"rope_theta": 8000000, "rope_type": "default"},
    },
}


@pytest.fixture(scope="session")
def token_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return small models of one index key a token: DeepSeek-V3.2's and GLM-5's conventions."""
    folder = tmp_path_factory.mktemp("models")
    paths = {name: folder / f"{name}.json" for name in _TOKEN_MODELS}
    for name, path in paths.items():
        path.write_text(json.dumps({**_TOKEN_SHAPES, **_TOKEN_MODELS[name]}))
    return paths


@pytest.fixture(scope="session")
def token_inputs(token_models: dict[str, Path]) -> Callable[..., Inputs]:
    """Return a loader of synthetic input for one of them."""

    def load(name: str = "v3.2", kind: str = "gaussian", layers: tuple[int, ...] = (0,)) -> Inputs:
        model = str(token_models[name])
        return load_inputs(f"synthetic:{kind}", model=model, tokens=150, layers=layers)

    return load


@pytest.fixture(scope="session")
def token_engine() -> Callable[..., Candidate]:
    """Return a maker of engines for one key a token; ``does`` names what it really computes."""

    def make(name: str, key_format: str, does: str | None = None) -> Candidate:
        return TokenEngine(name, key_format, engine_profile(does or name, key_format))

    return make

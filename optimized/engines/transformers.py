"""The ``deepseek_v4`` modules of an installed transformers as a candidate, on the CPU.

Compressor, indexer and scorer run as they are, in bf16 as the published model does. Two of their
parts are replaced by what both sides are given: the projections, because stages are judged from
them, and the rotary table. Everything behind them is theirs: overlap, pooling, norm, RoPE, scores,
selection. Nothing is downloaded and no weights are needed.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from hashlib import sha256
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from needlepoint.optimized.protocol.interface import (
    INDEX,
    MAIN,
    QUERY,
    CandidateInfo,
    CompressorInputs,
    LayerInputs,
    Observed,
    PagedRows,
    QueryRows,
    StageKey,
)

MODULE = "transformers.models.deepseek_v4.modeling_deepseek_v4"
SCORE_BYTES = 8 << 30
"""Their scorer keeps every head of every query and entry at once; beyond this we refuse."""

_KEYS = ("pooled", "normed", "roped", "stored")
_LAYER_TYPES = {4: "compressed_sparse_attention", 128: "heavily_compressed_attention"}
_PAGE_ROWS = 64


@cache
def load_modules() -> ModuleType:
    """Import transformers' DeepSeek-V4 modules.

    Raises
    ------
    ValueError
        If transformers is not installed, or has no DeepSeek-V4.
    """
    if importlib.util.find_spec("transformers") is None:
        raise ValueError(
            "candidate transformers: the package transformers is not installed; "
            "`pip install 'needlepoint[engines]'`"
        )
    version = importlib.metadata.version("transformers")
    try:
        return importlib.import_module(MODULE)
    except ImportError as error:
        raise ValueError(
            f"candidate transformers: transformers {version} has no {MODULE} ({error}); install "
            "5.24 or newer"
        ) from error


@dataclass
class _Seen:
    """What one request's modules showed."""

    dense: dict[StageKey, Tensor] = field(default_factory=dict)
    query: Tensor | None = None
    scores: Tensor | None = None
    picks: Tensor | None = None


class _Given(nn.Module):
    """Stands where a projection stood and returns what both sides are given."""

    def __init__(self, rows: Tensor) -> None:
        super().__init__()
        self.rows = rows.to(torch.bfloat16).unsqueeze(0)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the given rows whatever comes in."""
        return self.rows


class _Table(nn.Module):
    """Stands where the rotary embedding stood: the given table, in the dtype that theirs has."""

    def __init__(self, table: Tensor) -> None:
        super().__init__()
        self.table = table

    def forward(self, x: Tensor, position_ids: Tensor, layer_type: str) -> tuple[Tensor, Tensor]:
        """Return cos and sin ``[batch, n, pairs]`` at positions."""
        rows = self.table[position_ids].to(x.dtype)
        return rows[..., 0], rows[..., 1]


class TransformersCandidate:
    """The candidate ``transformers``.

    Raises
    ------
    ValueError
        If the package is missing or too old.
    """

    def __init__(self) -> None:
        self._modules: Any = load_modules()
        version = importlib.metadata.version("transformers")
        source = Path(str(self._modules.__file__)).read_bytes()
        self.info = CandidateInfo(
            name="transformers",
            format="bf16",
            device="cpu",
            profile="transformers",
            variant=f"deepseek_v4 of transformers {version}, bf16",
            source_sha256=sha256(source).hexdigest(),
        )

    def stages(self, ratio: int) -> frozenset[StageKey]:
        """Return what the modules show: everything but a rotated key, which they do not have."""
        main = {(MAIN, stage) for stage in _KEYS}
        if ratio != 4:
            return frozenset(main)
        index = {(INDEX, stage) for stage in (*_KEYS, "scores", "topk")}
        return frozenset(main | index | {(QUERY, "query"), (QUERY, "weights")})

    def run(self, inputs: LayerInputs) -> Observed:
        """Run every request through the modules in one call each.

        Raises
        ------
        ValueError
            If their scorer would need more than :data:`SCORE_BYTES`.
        """
        longest = max(inputs.lengths)
        heads = 0 if inputs.query is None else inputs.query.q.shape[1]
        needed = 4 * longest * heads * (longest // inputs.ratio)
        if needed > SCORE_BYTES:
            raise ValueError(
                f"their scorer needs {needed >> 30} GiB for {longest} tokens at once; give "
                "requests of fewer --tokens"
            )
        seen, first = [], 0
        with torch.no_grad():
            for length in inputs.lengths:
                seen.append(self._request(inputs, slice(first, first + length)))
                first += length
        return _observed(inputs, seen, needed)

    def _request(self, inputs: LayerInputs, tokens: slice) -> _Seen:
        """Run one request and keep what its modules were given and returned."""
        seen = _Seen()
        length = tokens.stop - tokens.start
        module = self._compressor(inputs, tokens)
        _watch(module, MAIN, seen)
        indexer = getattr(module, "indexer", None)
        if indexer is not None:
            _watch(indexer, INDEX, seen)
            _watch_scores(indexer, seen)
        hidden = torch.zeros(1, length, 1, dtype=torch.bfloat16)
        positions = torch.arange(length).unsqueeze(0)
        rows, _ = module(hidden, hidden, positions, None, 0)
        seen.dense[MAIN, "roped"] = rows[0, 0]
        return seen

    def _compressor(self, inputs: LayerInputs, tokens: slice) -> Any:  # noqa: ANN401
        given, query, index = inputs.main, inputs.query, inputs.index
        config = self._modules.DeepseekV4Config(
            num_hidden_layers=1,
            hidden_size=1,
            q_lora_rank=1,
            head_dim=len(given.norm_weight),
            index_head_dim=128,
            index_n_heads=1 if query is None else query.q.shape[1],
            index_topk=inputs.topk,
            rms_norm_eps=inputs.norm_eps,
            layer_types=[_LAYER_TYPES[inputs.ratio]],
            max_position_embeddings=len(inputs.rope_table),
        )
        kind = self._modules.COMPRESSOR_CLASSES[_LAYER_TYPES[inputs.ratio]]
        module = kind(config)
        _feed(module, given, inputs.rope_table, tokens)
        if index is not None and query is not None:
            _feed(module.indexer, index, inputs.rope_table, tokens)
            module.indexer.q_b_proj = _Given(query.q[tokens].flatten(1))
            module.indexer.scorer.weights_proj = _Given(query.weights[tokens])
        return module


def _feed(module: Any, given: CompressorInputs, table: Tensor, tokens: slice) -> None:  # noqa: ANN401
    """Put the given projections, constants and table into a compressor."""
    module.kv_proj = _Given(given.kv[tokens])
    module.gate_proj = _Given(given.score[tokens])
    module.position_bias.copy_(given.ape)
    module.kv_norm.weight.copy_(given.norm_weight)
    module.rotary_emb = _Table(table)


def _watch(module: Any, path: str, seen: _Seen) -> None:  # noqa: ANN401
    """Keep the pooled and normed rows: what goes into the norm and what comes out."""

    def keep(_: object, taken: tuple[Tensor, ...], returned: Tensor) -> None:
        seen.dense[path, "pooled"] = taken[0][0].clone()
        seen.dense[path, "normed"] = returned[0].clone()

    module.kv_norm.register_forward_hook(keep)


def _watch_scores(indexer: Any, seen: _Seen) -> None:  # noqa: ANN401
    """Keep queries, keys, scores and picks of an indexer."""

    def keep(_: object, taken: tuple[Tensor, ...], returned: Tensor) -> None:
        seen.query = taken[0][0].clone()
        seen.dense[INDEX, "roped"] = taken[1][0].clone()
        seen.scores = returned[0].clone()

    def keep_picks(_: object, taken: object, returned: Tensor) -> None:
        seen.picks = returned[0].clone()

    indexer.scorer.register_forward_hook(keep)
    indexer.register_forward_hook(keep_picks)


def _observed(inputs: LayerInputs, seen: list[_Seen], peak: int) -> Observed:
    counts = [length // inputs.ratio for length in inputs.lengths]
    dense: dict[StageKey, Tensor] = {}
    stored: dict[str, PagedRows] = {}
    for path, part in ((INDEX, inputs.index), (MAIN, inputs.main)):
        if part is None:
            continue
        empty = torch.empty(0, len(part.norm_weight), dtype=torch.bfloat16)
        for stage in ("pooled", "normed", "roped"):
            dense[path, stage] = torch.cat([s.dense.get((path, stage), empty) for s in seen])
        stored[path] = _pages(path, dense[path, "roped"], counts)
    path_taken = "eager, one call a request, no cache"
    if inputs.query is None:
        return Observed(dense=dense, stored=stored, path_taken=path_taken)
    queries = [s.query for s in seen if s.query is not None]
    heads = inputs.query.q.shape[1]
    # The scorer applies both constants on its own; this is their product with its weights.
    weights = inputs.query.weights.to(torch.bfloat16).float() * heads**-0.5 * 128**-0.5
    return Observed(
        dense=dense,
        stored=stored,
        query=QueryRows("bf16", torch.cat(queries), None, weights, False),
        scores=_score_reader(seen),
        topk=torch.cat([_padded(s.picks, inputs.topk) for s in seen]),
        peak_transient_bytes=peak,
        path_taken=path_taken,
    )


def _score_reader(seen: list[_Seen]) -> Callable[[int, int, int], Tensor]:
    def read(request: int, start: int, stop: int) -> Tensor:
        scores = seen[request].scores
        if scores is None:
            raise ValueError(f"request {request}: their scorer was not called")
        rows = scores[start:stop]
        # They mask after the scorer returns; the same mask here.
        visible = (torch.arange(start, stop) + 1) // 4
        return rows.masked_fill(torch.arange(rows.shape[1]) >= visible.unsqueeze(1), -torch.inf)

    return read


def _padded(picks: Tensor | None, k: int) -> Tensor:
    if picks is None:
        raise ValueError("their indexer was not called")
    padded = nn.functional.pad(picks, (0, k - picks.shape[1]), value=-1)
    return padded.to(torch.int32)


def _pages(path: str, rows: Tensor, counts: list[int]) -> PagedRows:
    """Lay bf16 rows out in pages: they keep rows in one tensor, which has no pages."""
    width = rows.shape[1]
    tables, first = [], 0
    pool = torch.zeros(
        sum(-(-n // _PAGE_ROWS) for n in counts), _PAGE_ROWS, width, dtype=rows.dtype
    )
    for part in torch.split(rows, counts):
        pages = -(-len(part) // _PAGE_ROWS)
        pool[first : first + pages].view(-1, width)[: len(part)] = part
        tables.append(torch.arange(first, first + pages, dtype=torch.int32))
        first += pages
    flat = pool.view(len(pool), -1).view(torch.uint8)
    return PagedRows(f"{path}-bf16", flat, _PAGE_ROWS, tuple(tables), tuple(counts))

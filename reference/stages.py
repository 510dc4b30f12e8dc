"""What the reference computed for a run of tokens, stage by stage."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from needlepoint.reference.formats import Encoded

StageKey = tuple[str, str]
"""(path, stage), for example ``("index", "pooled")``."""


@dataclass(frozen=True)
class KeyProjections:
    """What one compressor reads of consecutive tokens; float64 ``[n, c * d]``.

    Attributes
    ----------
    kv
        Values (``wkv``).
    score
        Pooling scores (``wgate``), position embedding not added.
    """

    kv: Tensor
    score: Tensor


@dataclass(frozen=True)
class QueryProjections:
    """What the indexer's query side reads.

    Attributes
    ----------
    q
        float64 ``[n, index_n_heads, index_head_dim]``, before RoPE.
    weights
        float64 ``[n, index_n_heads]``, constant not applied.
    """

    q: Tensor
    weights: Tensor


@dataclass(frozen=True)
class Projected:
    """The projections of consecutive tokens of one request: all that later stages need.

    Attributes
    ----------
    first_position
        Position of the first token.
    index
        Input of the indexer's compressor; None unless ratio 4 or 1 (``score`` is empty there).
    main
        Input of the main compressor; None for ratios 0 and 1.
    query
        Input of the query side; None unless ratio 4 or 1.
    latent
        float64 ``[n, q_lora_rank]``, normed query latent that both query projections read.
    window
        float64 ``[n, head_dim]``, rows of the sliding window before their norm; empty for ratio 1.
    """

    first_position: int
    index: KeyProjections | None
    main: KeyProjections | None
    query: QueryProjections | None
    latent: Tensor
    window: Tensor


@dataclass(frozen=True)
class StoredRows:
    """Rows in their storage format.

    Attributes
    ----------
    encoded
        The quantised dims: all 128 of an index key or query, the leading dims of a main row.
    rope
        float64 ``[n, rope_head_dim]``, the trailing dims of a main row, rounded; else None.
    values
        float64 ``[n, ..., d]``, what a reader gets back.
    """

    encoded: Encoded
    rope: Tensor | None
    values: Tensor


@dataclass(frozen=True)
class CompressedRows:
    """One compressor's stages for the entries that these tokens completed.

    Attributes
    ----------
    first_entry
        Entry of the first row.
    pooled, normed, roped, rotated
        float64 ``[entries, d]`` after each rounding point; ``rotated`` is None on the main path
        and equals ``roped`` when Hadamard is off.
    stored
        The rows as stored.
    """

    first_entry: int
    pooled: Tensor
    normed: Tensor
    roped: Tensor
    rotated: Tensor | None
    stored: StoredRows


@dataclass(frozen=True)
class QueryRows:
    """The index queries of these tokens.

    Attributes
    ----------
    rotated
        float64 ``[n, heads, 128]`` after RoPE and Hadamard.
    stored
        The queries as the score kernel reads them.
    weights
        float64 ``[n, heads]``, constant applied.
    """

    rotated: Tensor
    stored: StoredRows
    weights: Tensor


@dataclass(frozen=True)
class IndexStages:
    """The indexer's stages of consecutive tokens of one request; None without an indexer.

    Attributes
    ----------
    index, query, scores, topk
        As in :class:`ChunkStages`.
    """

    index: CompressedRows | None
    query: QueryRows | None
    scores: Tensor | None
    topk: Tensor | None


@dataclass(frozen=True)
class ChunkStages:
    """Every stage of consecutive tokens of one request.

    Attributes
    ----------
    projected
        Projections of the tokens.
    index, main, query
        Stages up to storage; None where the layer's ratio has no such path.
    scores
        ``[n, entries]`` of all entries of the request so far, ``-inf`` where invisible; None unless
        asked for.
    topk
        int32 ``[n, index_topk]``, ascending entries of the request, -1 padded; None unless ratio 4.
    attention
        ``[n, n_heads, head_dim]``, rotated back; None if not asked for.
    """

    projected: Projected
    index: CompressedRows | None
    main: CompressedRows | None
    query: QueryRows | None
    scores: Tensor | None
    topk: Tensor | None
    attention: Tensor | None

    def tensors(self) -> dict[StageKey, Tensor]:
        """Return every stage that is present, in order, stored rows and queries decoded."""
        p = self.projected
        found: dict[StageKey, Tensor | None] = {
            ("index", "projected"): None if p.index is None else p.index.kv,
            ("main", "projected"): None if p.main is None else p.main.kv,
            ("query", "projected"): None if p.query is None else p.query.q,
        }
        for stage in ("pooled", "normed", "roped", "rotated"):
            for path, rows in (("index", self.index), ("main", self.main)):
                found[path, stage] = None if rows is None else getattr(rows, stage)
        for path, rows in (("index", self.index), ("main", self.main)):
            found[path, "stored"] = None if rows is None else rows.stored.values
        if self.query is not None:
            found["query", "query"] = self.query.stored.values
            found["query", "weights"] = self.query.weights
        found["index", "scores"] = self.scores
        found["index", "topk"] = self.topk
        found["main", "attention"] = self.attention
        return {key: tensor for key, tensor in found.items() if tensor is not None}

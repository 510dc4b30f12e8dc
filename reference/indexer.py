"""The lightning indexer: it scores the compressed entries that a query may read.

A query has ``index_n_heads`` small vectors and as many weights. Entry ``t`` scores
``sum_h relu(q_h . k_t) * w_h``, where ``k_t`` is the indexer's own compressed key. Queries and keys
pass through the same RoPE and Hadamard rotation and the same storage format. Queries have no norm.
"""

from __future__ import annotations

import torch
from torch import Tensor

from needlepoint.reference.formats import round_to_bf16
from needlepoint.reference.formats.names import RopeLayout
from needlepoint.reference.hadamard import SCALE_EXACT, SCALE_FP32, hadamard
from needlepoint.reference.parallel import for_each_block, map_rows, sized
from needlepoint.reference.profile import Arithmetic, Precision
from needlepoint.reference.rope import apply_rope
from needlepoint.reference.rounding import round_to

_TILE_ROWS = 1024  # (query, head) pairs of one product
_TILE_KEYS = 512  # with 1024 rows: 2 MB of fp32 or 4 MB of float64, about a core's share of cache
_CARD_ROWS, _CARD_KEYS = 8192, 4096  # the same on a card: 256 MB of float64
_BYTES_A_SCORE = 32  # scores, their selection copies and masks


def rotate_index(x: Tensor, arithmetic: Arithmetic) -> Tensor:
    """Apply the Hadamard rotation to index keys or queries and round; identity when it is off.

    Parameters
    ----------
    x
        float64 ``[..., 128]`` after RoPE.
    arithmetic
        ``hadamard`` and ``rotated``. The factor is the fp32 number unless ``rotated`` is float64.
    """
    if not arithmetic.hadamard:
        return x
    exact = arithmetic.rotated is Precision.FLOAT64
    return round_to(hadamard(x, SCALE_EXACT if exact else SCALE_FP32), arithmetic.rotated)


def rotate_query(
    q: Tensor,
    rope: Tensor,
    arithmetic: Arithmetic,
    layout: RopeLayout = RopeLayout.TRAILING_PAIRS,
) -> Tensor:
    """Return queries after RoPE and Hadamard, each rounded.

    Parameters
    ----------
    q
        float64 ``[n, heads, 128]``, projected.
    rope
        float64 ``[n, pairs, 2]``, cos and sin at the queries' own positions.
    arithmetic
        ``query_input``, ``query_roped``, ``query_rotated`` and ``hadamard`` apply.
    layout
        Dims that RoPE rotates.

    Returns
    -------
    Tensor
        float64 ``[n, heads, 128]``, before the storage format.
    """
    own = arithmetic.of_query

    def rotate(q: Tensor, rope: Tensor) -> Tensor:
        read = query_inputs(q, arithmetic)
        turned = apply_rope(read, rope.unsqueeze(1), layout)
        return rotate_index(round_to(turned, own.roped), own)

    return map_rows(rotate, q, rope)


def head_weights(w: Tensor, scale: float, arithmetic: Arithmetic) -> Tensor:
    """Return ``w * scale`` rounded to ``arithmetic.weights``.

    Parameters
    ----------
    w
        float64 ``[n, heads]``, projected.
    scale
        ``ModelConfig.index_weight_scale``: ``128**-0.5 * heads**-0.5``, 2**-6.5 for 64 heads.
    arithmetic
        ``query_input`` and ``weights`` apply.
    """
    return round_to(query_inputs(w, arithmetic) * scale, arithmetic.weights)


def query_inputs(x: Tensor, arithmetic: Arithmetic) -> Tensor:
    """Return float64 projections as the query side reads them: rounded to ``query_input``."""
    bf16 = arithmetic.query_input is Precision.BF16
    return round_to(x, Precision.BF16) if bf16 else x


def score_blocks(n_queries: int, n_keys: int, budget_bytes: int) -> list[slice]:
    """Cut queries into blocks whose scores and selection fit a budget; at least one query each."""
    rows = max(1, budget_bytes // max(1, n_keys * _BYTES_A_SCORE))
    return [slice(i, min(i + rows, n_queries)) for i in range(0, n_queries, rows)]


def index_scores(
    query: Tensor,
    weights: Tensor,
    keys: Tensor,
    visible: Tensor,
    arithmetic: Arithmetic,
    compute: torch.dtype = torch.float64,
) -> Tensor:
    """Return the scores of every query against every entry it may see.

    ``dot`` rounds ``q . k``, ``weighted`` rounds ``relu(q . k) * w`` and ``head_sum`` the sum over
    heads. The work runs over tiles of :data:`_TILE_ROWS` by :data:`_TILE_KEYS`, so heads are never
    kept for all keys; tiles that nothing sees are skipped.

    Parameters
    ----------
    query
        float64 ``[S, heads, d]``, decoded from its storage format.
    weights
        float64 ``[S, heads]`` of :func:`head_weights`.
    keys
        float64 ``[T, d]``, decoded.
    visible
        Integers ``[S]``: query ``i`` sees entries ``0 .. visible[i] - 1``.
    arithmetic
        ``dot``, ``weighted`` and ``head_sum`` apply.
    compute
        ``torch.float64``, or ``torch.float32`` for long runs: products and sums are then fp32, and
        only roundings to bf16 are still made.

    Returns
    -------
    Tensor
        ``compute`` ``[S, T]``, ``-inf`` from ``visible`` on.

    Raises
    ------
    ValueError
        If shapes do not fit, ``visible`` exceeds the keys or ``compute`` is another type.
    """
    _check(query, weights, keys, visible, compute)
    count, heads, width = query.shape
    step = max(1, sized(_TILE_ROWS, _CARD_ROWS) // heads)
    tile_keys = sized(_TILE_KEYS, _CARD_KEYS)
    out = torch.full((count, len(keys)), -torch.inf, dtype=compute)
    columns = keys.to(compute).t()

    def block(index: int) -> None:
        span = slice(index * step, (index + 1) * step)
        seen = visible[span]
        rows = query[span].to(compute).reshape(-1, width)
        factors = weights[span].to(compute)
        tile = torch.empty(len(rows) * tile_keys, dtype=compute)
        for start in range(0, int(seen.max()), tile_keys):
            part = columns[:, start : start + tile_keys]
            dots = tile[: len(rows) * part.shape[1]].view(len(rows), -1)
            torch.mm(rows, part, out=dots)
            scores = _head_sum(dots.view(-1, heads, part.shape[1]), factors, arithmetic)
            entries = torch.arange(start, start + part.shape[1])
            scores.masked_fill_(entries >= seen.unsqueeze(1), -torch.inf)
            out[span, start : start + tile_keys] = scores

    for_each_block(block, -(-count // step))
    return out


def _head_sum(dots: Tensor, factors: Tensor, arithmetic: Arithmetic) -> Tensor:
    """Reduce a tile ``[queries, heads, keys]`` of ``q . k``, which it overwrites, over heads."""
    _round_in_place(dots, arithmetic.dot)
    dots.relu_()
    if _exact_in(dots.dtype, arithmetic.weighted):
        total = torch.bmm(factors.unsqueeze(1), dots).squeeze(1)
    else:
        dots.mul_(factors.unsqueeze(2))
        _round_in_place(dots, arithmetic.weighted)
        total = dots.sum(1)
    _round_in_place(total, arithmetic.head_sum)
    return total


def _exact_in(dtype: torch.dtype, precision: Precision) -> bool:
    """Whether rounding to ``precision`` changes nothing in this compute type."""
    if dtype == torch.float32:
        return precision is not Precision.BF16
    return precision is Precision.FLOAT64


def _round_in_place(x: Tensor, precision: Precision) -> None:
    if _exact_in(x.dtype, precision):
        return
    x.copy_(x.to(torch.float32) if precision is Precision.FP32 else round_to_bf16(x))


def _check(
    query: Tensor, weights: Tensor, keys: Tensor, visible: Tensor, compute: torch.dtype
) -> None:
    if compute not in (torch.float64, torch.float32):
        raise ValueError(f"index_scores: compute {compute}, expected torch.float64 or float32")
    fits = (
        query.dim() == 3
        and weights.shape == query.shape[:2]
        and keys.dim() == 2
        and keys.shape[1] == query.shape[2]
        and visible.shape == query.shape[:1]
    )
    if not fits or len(query) == 0:
        raise ValueError(
            f"index_scores: query {tuple(query.shape)}, weights {tuple(weights.shape)}, keys "
            f"{tuple(keys.shape)}, visible {tuple(visible.shape)}; expected [S, H, d] with S > 0, "
            "[S, H], [T, d], [S]"
        )
    if int(visible.max()) > len(keys) or int(visible.min()) < 0:
        raise ValueError(
            f"index_scores: visible {int(visible.min())} to {int(visible.max())}, expected 0 to "
            f"the {len(keys)} keys"
        )

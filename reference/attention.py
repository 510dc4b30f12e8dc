"""The sparse attention that reads the picked rows.

A query reads the raw rows of its sliding window and some compressed rows: the indexer's picks
(ratio 4), every complete row (ratio 128) or none (ratio 0). Key and value are the same row. Window
and compressed rows may cover the same tokens, and both are read. Each head has a
sink: a logit that takes probability away and adds no value.
"""

from __future__ import annotations

import torch
from torch import Tensor

from needlepoint.reference.parallel import for_each_block, sized
from needlepoint.reference.profile import Precision
from needlepoint.reference.rounding import round_computed

_SPAN = 64  # queries that one thread takes at a time
_QUERIES = 16  # queries whose rows are gathered together: they should stay near the cache
_CARD_QUERIES = 512  # both on a card, where the budget is the bound


def all_visible(visible: Tensor, entries: int) -> Tensor:
    """Return picks that name every visible entry: int32 ``[S, entries]``, -1 padded (ratio 128)."""
    entry = torch.arange(entries, dtype=torch.int32).expand(len(visible), entries)
    return entry.masked_fill(entry >= visible.unsqueeze(1), -1)


def sparse_attention(
    q: Tensor,
    window_kv: Tensor,
    compressed_rows: Tensor,
    picks: Tensor,
    sink: Tensor,
    *,
    window_size: int,
    precision: Precision = Precision.FLOAT64,
    compute: torch.dtype = torch.float64,
    budget_bytes: int = 256 << 20,
) -> Tensor:
    """Return the attention output of consecutive queries of one request.

    With ``l_j = q . kv_j / sqrt(d)`` and ``m = max l``, the output is
    ``sum_j round(exp(l_j - m)) kv_j / (sum_j exp(l_j - m) + exp(sink - m))``: only the factor of
    the value product is rounded, the denominator is not, and the sink is not part of the maximum
    (DeepSeek-V4 ``sparse_attn``).

    Parameters
    ----------
    q
        float64 ``[S, heads, d]``, normed and roped.
    window_kv
        float64 ``[W, d]``, raw rows of consecutive tokens; the last ``S`` are the queries' own
        tokens, and up to ``window_size - 1`` earlier ones come before them.
    compressed_rows
        float64 ``[E, d]``, decoded. Rows that no query picks may hold anything, NaN included.
    picks
        int32 ``[S, k]``, entries of each query; -1 is skipped.
    sink
        ``[heads]``.
    window_size
        Tokens of the window, the query's own included.
    precision
        ``Arithmetic.probabilities``.
    compute
        ``torch.float64`` or ``torch.float32``.
    budget_bytes
        Bound on gathered rows and logits.

    Returns
    -------
    Tensor
        ``compute`` ``[S, heads, d]``, still in the rotated frame of the query.

    Raises
    ------
    ValueError
        If shapes do not fit or a pick is below -1 or beyond the rows (naming query and pick).
    """
    _check(q, window_kv, compressed_rows, picks, sink)
    count, heads, width = q.shape
    rows = torch.zeros(len(compressed_rows) + 1, width, dtype=compute)  # the last one stays zero
    rows[:-1] = compressed_rows
    window = window_kv.to(compute)
    before = len(window_kv) - count  # rows that precede the first query's own
    k = picks.shape[1]
    bytes_a_query = (k * width + 4 * heads * (k + window_size)) * rows.element_size()
    share = budget_bytes // torch.get_num_threads()
    step = max(1, min(sized(_QUERIES, _CARD_QUERIES), share // bytes_a_query))
    span = sized(_SPAN, _CARD_QUERIES)
    out = torch.empty(q.shape, dtype=compute)

    def block(index: int) -> None:
        gathered = torch.empty(step * k, width, dtype=compute)  # reused: fresh pages cost more
        end = min((index + 1) * span, count)
        for a in range(index * span, end, step):
            b = min(a + step, end)
            first, stop = max(0, before + a - window_size + 1), before + b
            own = torch.arange(before + a, stop).unsqueeze(1)
            near = torch.arange(first, stop)
            skipped = picks[a:b] < 0
            # Skipped slots read the zero row: an unpicked row cannot leak, NaN included.
            chosen = picks[a:b].masked_fill(skipped, len(rows) - 1).flatten()
            torch.index_select(rows, 0, chosen, out=gathered[: len(chosen)])
            out[a:b] = _attend(
                q[a:b].to(compute) * width**-0.5,
                window[first:stop],
                (near > own) | (near <= own - window_size),
                gathered[: len(chosen)].view(b - a, k, width),
                skipped,
                sink,
                precision,
            )

    for_each_block(block, -(-count // span))
    return out


def _attend(
    q: Tensor,
    near_rows: Tensor,
    outside: Tensor,
    far_rows: Tensor,
    skipped: Tensor,
    sink: Tensor,
    precision: Precision,
) -> Tensor:
    """Softmax over window and picks of a block; near rows are shared, far rows are per query."""
    near = torch.matmul(q, near_rows.t()).masked_fill_(outside.unsqueeze(1), -torch.inf)
    far = torch.bmm(q, far_rows.transpose(1, 2)).masked_fill_(skipped.unsqueeze(1), -torch.inf)
    logits = torch.cat((near, far), dim=-1)
    top = logits.amax(dim=-1, keepdim=True)
    p = (logits - top).exp_()
    total = p.sum(dim=-1, keepdim=True) + (sink.to(p.dtype).view(1, -1, 1) - top).exp()
    p = round_computed(p, precision)
    split = near_rows.shape[0]
    values = torch.matmul(p[..., :split], near_rows) + torch.bmm(p[..., split:], far_rows)
    return values / total


def _check(q: Tensor, window_kv: Tensor, rows: Tensor, picks: Tensor, sink: Tensor) -> None:
    fits = (
        q.dim() == 3
        and window_kv.dim() == rows.dim() == picks.dim() == 2
        and window_kv.shape[1] == rows.shape[1] == q.shape[2]
        and len(window_kv) >= len(q) == len(picks)
        and sink.shape == q.shape[1:2]
    )
    if not fits:
        raise ValueError(
            f"sparse_attention: q {tuple(q.shape)}, window {tuple(window_kv.shape)}, rows "
            f"{tuple(rows.shape)}, picks {tuple(picks.shape)}, sink {tuple(sink.shape)}; expected "
            "[S, heads, d], [at least S, d], [E, d], [S, k], [heads]"
        )
    wrong = (picks < -1) | (picks >= len(rows))
    if bool(wrong.any()):
        query, slot = (int(i) for i in wrong.nonzero()[0])
        raise ValueError(
            f"sparse_attention: query {query} picks entry {int(picks[query, slot])}, expected -1 "
            f"or an entry below {len(rows)}"
        )

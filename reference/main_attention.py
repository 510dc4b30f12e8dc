"""The main attention of a layer: window rows, queries in blocks, output rotated back.

The output shows how much a wrong row or pick changes the result of the layer. Main queries are the
widest tensor of a layer (64 heads of 512 in v4-flash), so they are computed, used and freed in
blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from needlepoint.reference.attention import sparse_attention
from needlepoint.reference.config import ModelConfig
from needlepoint.reference.keyside import KeySide
from needlepoint.reference.linear import project
from needlepoint.reference.norm import rms_norm
from needlepoint.reference.parallel import map_rows
from needlepoint.reference.profile import Arithmetic
from needlepoint.reference.ring import PositionRing
from needlepoint.reference.rope import apply_rope, invert_rope
from needlepoint.reference.rounding import round_to
from needlepoint.reference.stages import Projected
from needlepoint.reference.weights import LayerWeights

_QUERY_COPIES = 4  # float64 queries alive at once: projected, normed, roped, output


@dataclass(frozen=True)
class MainAttention:
    """Constants of a layer's attention.

    Attributes
    ----------
    config
        Model shapes.
    weights
        ``wq_b``, ``kv_norm`` and ``attn_sink`` are read.
    key_side
        Makes window rows as it makes main rows.
    arithmetic
        ``projected``, ``normed``, ``roped`` (queries too) and ``probabilities`` apply.
    compute
        Type of the attention products.
    budget_bytes
        Bound on transient queries and gathered rows.
    """

    config: ModelConfig
    weights: LayerWeights
    key_side: KeySide
    arithmetic: Arithmetic
    compute: torch.dtype
    budget_bytes: int

    def window(self, projected: Projected, rope: Tensor, state: PositionRing) -> Tensor:
        """Return the window rows that tokens read, earlier ones first, and keep their own.

        Parameters
        ----------
        projected
            Projections of ``n`` consecutive tokens.
        rope
            float64 ``[n, pairs, 2]`` at the tokens' positions.
        state
            Rows of the request's earlier tokens.

        Returns
        -------
        Tensor
            float64 ``[up to window_size - 1 + n, head_dim]``, decoded.
        """
        start = projected.first_position
        own = self.key_side.window_rows(projected.window, self.weights.kv_norm, rope)
        earlier = state.read(max(0, start - self.config.window_size + 1), start)
        state.write(start, own)
        return torch.cat((earlier, own))

    def queries(self, latent: Tensor, rope: Tensor, first_position: int) -> Tensor:
        """Return main queries of consecutive tokens, float64 ``[n, n_heads, head_dim]``.

        Projected from the latent, divided by their root mean square (no weight), roped.

        Parameters
        ----------
        latent
            float64 ``[n, q_lora_rank]``.
        rope
            float64 ``[n, pairs, 2]``.
        first_position
            Position of the first token.
        """
        flat = project(
            latent, self.weights.wq_b, self.arithmetic.projected, first_position=first_position
        )

        def norm_and_rope(q: Tensor, rope: Tensor) -> Tensor:
            normed = round_to(rms_norm(q, None, self.config.norm_eps), self.arithmetic.normed)
            return round_to(apply_rope(normed, rope.unsqueeze(1)), self.arithmetic.roped)

        q = flat.view(-1, self.config.n_heads, self.config.head_dim)
        return map_rows(norm_and_rope, q, rope)

    def attend(
        self, projected: Projected, rope: Tensor, window: Tensor, rows: Tensor, picks: Tensor
    ) -> Tensor:
        """Return the attention output of consecutive tokens.

        Parameters
        ----------
        projected
            Projections of ``n`` consecutive tokens; the latent is read.
        rope
            float64 ``[n, pairs, 2]`` at the tokens' positions.
        window
            float64 ``[w, head_dim]`` of :meth:`window`; the last ``n`` rows are the tokens' own.
        rows
            float64 ``[entries, head_dim]``, main rows of the request, decoded.
        picks
            int32 ``[n, k]``, entries each token reads, -1 padded.

        Returns
        -------
        Tensor
            ``compute`` ``[n, n_heads, head_dim]``, RoPE undone at the tokens' positions.
        """
        count, earlier = len(picks), len(window) - len(picks)
        heads, width = self.config.n_heads, self.config.head_dim
        out = torch.empty(count, heads, width, dtype=self.compute)
        step = max(1, self.budget_bytes // (_QUERY_COPIES * 8 * heads * width))
        for a in range(0, count, step):
            b = min(a + step, count)
            first = max(0, earlier + a - self.config.window_size + 1)
            attended = sparse_attention(
                self.queries(projected.latent[a:b], rope[a:b], projected.first_position + a),
                window[first : earlier + b],
                rows,
                picks[a:b],
                self.weights.attn_sink,
                window_size=self.config.window_size,
                precision=self.arithmetic.probabilities,
                compute=self.compute,
                budget_bytes=self.budget_bytes,
            )
            out[a:b] = map_rows(_undo_rope, attended, rope[a:b])
        return out


def _undo_rope(attended: Tensor, rope: Tensor) -> Tensor:
    return invert_rope(attended.to(torch.float64), rope.unsqueeze(1)).to(attended.dtype)

"""How much the candidate's rows and picks change the output of the reference attention.

The output is reported and never counted, so that one fault does not count twice.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from needlepoint.reference.attention import all_visible, sparse_attention
from needlepoint.reference.layer import ReferenceLayer
from needlepoint.reference.rope import rope_rows
from needlepoint.verify.base.stage_blocks import Block, LastBlock
from needlepoint.verify.inputs.layer_inputs import GivenLayer
from needlepoint.verify.numerics.row_errors import RowErrors, worst_of


@dataclass(frozen=True)
class AttentionInputs:
    """Queries and window rows of one block under one profile, shared by everything compared.

    Attributes
    ----------
    q
        float64 ``[queries, heads, 512]``.
    window
        float64 ``[up to window - 1 earlier tokens and the block's own, 512]``.
    """

    q: Tensor
    window: Tensor


_QUERIES = ("projected", "normed", "roped", "rope_table")
_WINDOW = (*_QUERIES, "main_nope", "main_rope")
"""Rounding points that queries and window rows depend on."""


class AttentionReads:
    """Queries and window rows of one layer; profiles that agree on their rounding share them.

    Parameters
    ----------
    given
        The layer's projections.
    """

    def __init__(self, given: GivenLayer) -> None:
        self._given = given
        self._queries: LastBlock[Tensor] = LastBlock()
        self._windows: LastBlock[Tensor] = LastBlock()

    def of(self, reference: ReferenceLayer, block: Block) -> AttentionInputs:
        """Return queries and window rows of a block under the profile of ``reference``."""

        def points(names: tuple[str, ...]) -> tuple[object, ...]:
            return tuple(getattr(reference.arithmetic, name) for name in names)

        first = max(0, block.start - reference.config.window_size + 1)
        positions = torch.arange(first, block.stop)
        rope = rope_rows(reference.frequencies, positions, reference.arithmetic.rope_table)

        def queries() -> Tensor:
            latent = self._given.latent_rows(block.request, block.start, block.stop)
            return reference.attention.queries(latent, rope[block.start - first :], block.start)

        def window() -> Tensor:
            rows = self._given.window_rows(block.request, first, block.stop)
            return reference.key_side.window_rows(rows, reference.weights.kv_norm, rope)

        return AttentionInputs(
            self._queries.of(block, points(_QUERIES), queries),
            self._windows.of(block, points(_WINDOW), window),
        )


def attend(
    reference: ReferenceLayer,
    inputs: AttentionInputs,
    rows: Tensor,
    picks: Tensor | None,
    block: Block,
) -> Tensor:
    """Return the attention output over given rows and picks, float64 ``[queries, heads, 512]``.

    Parameters
    ----------
    reference
        The layer under the profile.
    inputs
        :func:`attention_inputs` of the block.
    rows
        float64 ``[entries, 512]`` main rows of the request. Picks that no query may make are
        dropped: the selection is judged elsewhere.
    picks
        int ``[queries, k]``, or None for every visible entry (ratio 128).
    block
        The queries.
    """
    if picks is None:
        picks = all_visible(block.visible, block.entries)
    legal = (picks >= 0) & (picks < block.visible.unsqueeze(1))
    return sparse_attention(
        inputs.q,
        inputs.window,
        rows,
        picks.to(torch.int32).masked_fill(~legal, -1),
        reference.weights.attn_sink,
        window_size=reference.config.window_size,
        precision=reference.arithmetic.probabilities,
        compute=reference.compute,
        budget_bytes=reference.budget_bytes,
    ).to(torch.float64)


def attention_errors(candidate: Tensor, reference: Tensor) -> RowErrors:
    """Return the relative error of every query's output as ``ratio``.

    Raises
    ------
    ValueError
        If the shapes differ.
    """
    if candidate.shape != reference.shape:
        raise ValueError(
            f"attention: shape {tuple(candidate.shape)}, expected {tuple(reference.shape)}"
        )
    found, expected = candidate.to(torch.float64).flatten(1), reference.flatten(1)
    norm = torch.linalg.vector_norm(expected, dim=1, keepdim=True).clamp(min=2.0**-126)
    elements = (found - expected).abs() / norm
    row = worst_of(elements, found, expected, torch.zeros_like(elements, dtype=torch.int64))
    return row.with_ratio(row.relative(2.0**-126))

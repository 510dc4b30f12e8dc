"""What changed picks do to one query: attention mass left on the needle, and the output's error.

Queries and window are the reference's. Rows are too, so that the figures are the price of the picks
alone, unless the candidate hands back main rows of its own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from needlepoint.reference.topk import select_topk
from needlepoint.verify.base.stage_blocks import Block
from needlepoint.verify.judge.sides.attention_side import AttentionInputs, attend
from needlepoint.verify.recall.outcomes import Outcome, needle_entries
from needlepoint.verify.recall.queries import NeedleQueries

PRICED = 8
"""Needles of one prompt whose attention is computed; the others have a cause and a rank."""


@dataclass(frozen=True)
class PickPrice:
    """What a candidate's picks cost one query.

    Attributes
    ----------
    mass
        Attention on the needle with the reference's picks, mean over heads.
    kept
        The same with the candidate's picks, over ``mass``; None where ``mass`` is 0.
    output_error
        Relative error of the layer's output.
    """

    mass: float
    kept: float | None
    output_error: float


class Prices:
    """Prices of one candidate's picks in one request, at most :data:`PRICED` of them.

    Parameters
    ----------
    queries
        The request.
    topk_indices
        int ``[rows, k]`` of the candidate.
    main
        float64 ``[entries, head_dim]``, main rows of the candidate; None to read the reference's.
    """

    def __init__(self, queries: NeedleQueries, topk_indices: Tensor, main: Tensor | None) -> None:
        self._queries, self._main = queries, main
        self._topk_indices = topk_indices.to(torch.int64)
        self._expected = select_topk(queries.scores, queries.inputs.topk).to(torch.int64)
        self._left = PRICED

    def of(self, row: int, outcome: Outcome) -> PickPrice | None:
        """Return the price of one row; None once enough were computed."""
        if not self._left:
            return None
        self._left -= 1
        picks, expected = self._topk_indices[row], self._expected[row]
        picks = picks[(picks >= 0) & (picks < outcome.visible)]
        expected = expected[expected >= 0]
        needle = needle_entries(outcome.needle, self._queries.inputs.ratio, outcome.visible)
        entries = torch.unique(torch.cat((picks, expected, needle)))
        marks = torch.isin(entries, needle).unsqueeze(1).double()
        reference = torch.cat((self._queries.main_rows[entries], marks), dim=1)
        read = reference
        if self._main is not None:
            read = torch.cat((self._main[entries], marks), dim=1)
        inputs = _widened(self._queries.attention_inputs(row))
        expected_out, mass = self._attend(
            row, inputs, reference, torch.searchsorted(entries, expected)
        )
        out, left = self._attend(row, inputs, read, torch.searchsorted(entries, picks))
        norm = max(float(torch.linalg.vector_norm(expected_out)), 2.0**-126)
        error = float(torch.linalg.vector_norm(out - expected_out)) / norm
        return PickPrice(mass, left / mass if mass > 0 else None, error)

    def _attend(
        self, row: int, inputs: AttentionInputs, rows: Tensor, picks: Tensor
    ) -> tuple[Tensor, float]:
        """Return the output ``[heads, d]`` and the mass on rows whose last column is 1.

        The last column is no part of any product: queries are 0 there. As a value it adds up the
        probabilities of the needle's rows.
        """
        position, count = int(self._queries.positions[row]), len(rows)
        block = Block(0, position, position + 1, slice(row, row + 1), torch.tensor([count]), count)
        layer = self._queries.reference.attention
        out = attend(layer, inputs, rows, picks.unsqueeze(0), block)[0]
        return out[:, :-1], float(out[:, -1].mean())


def _widened(inputs: AttentionInputs) -> AttentionInputs:
    """Return inputs with one more dim that is 0; attention divides by the root of the new width."""

    def extra(x: Tensor) -> Tensor:
        return torch.cat((x, torch.zeros_like(x[..., :1])), dim=-1)

    width = inputs.q.shape[-1]
    return AttentionInputs(extra(inputs.q * math.sqrt((width + 1) / width)), extra(inputs.window))

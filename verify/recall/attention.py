"""What changed picks do to one query: attention mass left on the needle, and the output's error.

Queries and window are the reference's. Rows are too, so that the figures are the price of the picks
alone, unless the candidate hands back main rows of its own. Only rows that a pick names are made.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from needlepoint.reference.attention import sparse_attention
from needlepoint.reference.compressor import Taps, pool
from needlepoint.reference.layer import ReferenceLayer
from needlepoint.reference.linear import project
from needlepoint.reference.norm import rms_norm
from needlepoint.reference.profile import Arithmetic
from needlepoint.reference.rope import rope_rows
from needlepoint.reference.rounding import round_to
from needlepoint.reference.topk import select_topk
from needlepoint.verify.recall.outcomes import Outcome, needle_entries
from needlepoint.verify.recall.rows import GivenRows

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


class PickPrices:
    """Prices of picks in one request.

    Parameters
    ----------
    given
        The request.
    arithmetic
        Contract of the reference's rows.
    own_rows
        float64 ``[entries, head_dim]``, main rows of the candidate; None to read the reference's.
    """

    def __init__(
        self, given: GivenRows, arithmetic: Arithmetic, own_rows: Tensor | None = None
    ) -> None:
        self._given, self._own_rows = given, own_rows
        self._layer = ReferenceLayer(
            given.config, given.layer, given.weights, arithmetic, compute=torch.float32
        )

    def of(self, row: int, needle: Tensor, own: Tensor, meant: Tensor) -> PickPrice:
        """Return what one query pays.

        Parameters
        ----------
        row
            Row of the query.
        needle
            int64 entries of the needle.
        own, meant
            int64 picks of the candidate and of the reference.
        """
        entries = torch.unique(torch.cat((own, meant, needle)))
        marks = torch.isin(entries, needle).unsqueeze(1).double()
        rows = torch.cat((self._main_rows(entries), marks), dim=1)
        read = rows
        if self._own_rows is not None:
            read = torch.cat((self._own_rows[entries], marks), dim=1)
        position = int(self._given.positions[row])
        meant_out, meant_mass = self._attend(position, rows, torch.searchsorted(entries, meant))
        own_out, own_mass = self._attend(position, read, torch.searchsorted(entries, own))
        norm = max(float(torch.linalg.vector_norm(meant_out)), 2.0**-126)
        error = float(torch.linalg.vector_norm(own_out - meant_out)) / norm
        kept = own_mass / meant_mass if meant_mass > 0 else None
        return PickPrice(meant_mass, kept, error)

    def _attend(self, position: int, rows: Tensor, picks: Tensor) -> tuple[Tensor, float]:
        """Return the output ``[heads, d]`` and the mass on rows whose last column is 1.

        The last column is no part of any product: queries are 0 there. As a value it adds up the
        probabilities of the needle's rows.
        """
        layer, given = self._layer, self._given
        config, arithmetic = layer.config, layer.arithmetic
        first = max(0, position - config.window_size + 1)
        near = given.hidden[first : position + 1]
        rope = rope_rows(
            layer.frequencies, torch.arange(first, position + 1), arithmetic.rope_table
        )
        projected = project(near, layer.weights.wkv, arithmetic.projected, first_position=first)
        window = layer.key_side.window_rows(projected, layer.weights.kv_norm, rope)
        down = project(near[-1:], layer.weights.wq_a, arithmetic.projected, first_position=position)
        latent = round_to(rms_norm(down, layer.weights.q_norm, config.norm_eps), arithmetic.latent)
        q = layer.attention.queries(latent, rope[-1:], position)
        width = q.shape[-1]
        out = sparse_attention(
            _extra(q * math.sqrt((width + 1) / width)),
            _extra(window),
            rows,
            picks.unsqueeze(0).to(torch.int32),
            layer.weights.attn_sink,
            window_size=config.window_size,
            precision=arithmetic.probabilities,
            compute=layer.compute,
        )[0].double()
        return out[:, :width], float(out[:, width].mean())

    def _main_rows(self, entries: Tensor) -> Tensor:
        """Return the main rows of some entries, float64 ``[n, head_dim]``."""
        layer, hidden = self._layer, self._given.hidden
        weights, arithmetic = layer.weights.main, layer.arithmetic
        if weights is None:
            raise ValueError(f"layer {self._given.layer} has no main compressor")
        slots = entries.unsqueeze(1) * 4 + torch.arange(-4, 4)  # ratio 4: the window before and own
        tokens, place = torch.unique(slots.clamp(min=0), return_inverse=True)
        width = len(weights.norm)
        columns = (slice(0, width), slice(width, None))
        parts = []
        for weight, ape in ((weights.wkv, None), (weights.wgate, weights.ape.double())):
            found = project(hidden[tokens], weight, arithmetic.projected)[place]
            if ape is not None:
                found = found + torch.cat((ape, ape))
            parts.append(torch.cat((found[:, :4, columns[0]], found[:, 4:, columns[1]]), dim=1))
        masked = (slots < 0).unsqueeze(2)
        taps = Taps(parts[0].masked_fill(masked, 0.0), parts[1].masked_fill(masked, -torch.inf))
        pooled = round_to(pool(taps), arithmetic.pooled)
        rope = rope_rows(layer.frequencies, entries * 4, arithmetic.rope_table)
        return layer.key_side.window_rows(pooled, weights.norm, rope)


class Prices:
    """Prices of picks in one request, at most :data:`PRICED` of them."""

    def __init__(
        self,
        given: GivenRows,
        contract: Arithmetic,
        picks: Tensor,
        reference: Tensor,
        main: Tensor | None,
    ) -> None:
        self._prices = PickPrices(given, contract, main)
        self._picks, self._ratio = picks.to(torch.int64), given.inputs.ratio
        self._meant = select_topk(reference, given.inputs.topk).to(torch.int64)
        self._left = PRICED

    def of(self, row: int, outcome: Outcome) -> PickPrice | None:
        """Return the price of one row; None once enough were computed."""
        if not self._left:
            return None
        self._left -= 1
        own, meant = self._picks[row], self._meant[row]
        legal = (own >= 0) & (own < outcome.visible)
        needle = needle_entries(outcome.needle, self._ratio, outcome.visible)
        return self._prices.of(row, needle, own[legal], meant[meant >= 0])


def _extra(x: Tensor) -> Tensor:
    """Return vectors with one more dim that is 0."""
    return torch.cat((x, torch.zeros_like(x[..., :1])), dim=-1)

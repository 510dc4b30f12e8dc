"""ErrorBound of the pooled row: a softmax over the slots of a window, per channel, in fp32.

With ``s_j`` the logit of slot ``j`` and ``p_j`` its weight, an error ``theta_j`` of the logarithm
of weight ``j`` moves the pooled value by ``sum p_j theta_j (kv_j - pooled)``: a common error
cancels, because every kernel normalises. What does not cancel is the rounding of the two sums. Both
parts are bounded per channel from the taps; the constants stand in ``error_model.py``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from needlepoint.reference.compressor import Taps, pool, rounds_inside
from needlepoint.reference.parallel import sized
from needlepoint.reference.profile import Arithmetic
from needlepoint.verify.numerics.error_bound import ErrorBound, rounding
from needlepoint.verify.numerics.error_model import EXP, LOGIT, QUOTIENT, RESCALES, SPAN, TINY, U

_BLOCK_ELEMENTS, _CARD_ELEMENTS = 1 << 20, 1 << 26
"""Elements of one temporary: rows are processed in blocks so that memory stays bounded."""

_SECOND_ORDER = 1.0 + 2.0**-6
"""Pays for ``(1 + U)**n`` against ``1 + n U`` and its product with the growth of the weights."""


def slot_ape(ape: Tensor, ratio: int) -> Tensor:
    """Lay the position embedding out by slot, as the taps are.

    Parameters
    ----------
    ape
        [ratio, c * d].
    ratio
        4 (two halves: overlap columns first, then fresh ones) or 128.

    Returns
    -------
    Tensor
        float64 [slots, d].
    """
    wide = ape.to(torch.float64)
    if ratio != 4:
        return wide
    half = wide.shape[-1] // 2
    return torch.cat((wide[:, :half], wide[:, half:]))


def pooled(taps: Taps, ape: Tensor, arithmetic: Arithmetic | None = None) -> ErrorBound:
    """Bound the pooled rows of given taps.

    Parameters
    ----------
    taps
        ``kv`` and ``logits`` float64 [rows, slots, d]; masked slots have logit -inf.
    ape
        [slots, d] position embedding by slot (:func:`slot_ape`). It counts on its own, because a
        logit that cancels it keeps its rounding error.
    arithmetic
        Profile; matters where the pooling itself rounds to bf16 (``pool_weights``,
        ``pool_terms``).

    Returns
    -------
    ErrorBound
        [rows, d], sound for every order of the sums and for online softmax, with logits up to
        ``2**22`` as the specification demands.

    Raises
    ------
    ValueError
        If shapes do not fit.
    """
    rows, slots, width = taps.kv.shape
    if taps.logits.shape != taps.kv.shape or tuple(ape.shape) != (slots, width):
        raise ValueError(
            f"pooled: kv {tuple(taps.kv.shape)}, logits {tuple(taps.logits.shape)}, position "
            f"embedding {tuple(ape.shape)}; expected [rows, slots, d] twice and [slots, d]"
        )
    magnitude = ape.to(torch.float64).abs()
    step = max(1, sized(_BLOCK_ELEMENTS, _CARD_ELEMENTS) // max(1, slots * width))
    if arithmetic is not None and rounds_inside(arithmetic) and rows:
        found = [
            _rounded(taps.kv[i : i + step], taps.logits[i : i + step], magnitude, arithmetic)
            for i in range(0, rows, step)
        ]
        return ErrorBound(
            torch.cat([part.value for part in found]), torch.cat([part.delta for part in found])
        )
    value = pool(taps)
    parts = [
        _radius(taps.kv[i : i + step], taps.logits[i : i + step], value[i : i + step], magnitude)
        for i in range(0, rows, step)
    ]
    return ErrorBound(value, torch.cat(parts) if parts else torch.zeros_like(value))


def _weights(logits: Tensor, ape: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return softmax weights, the growth of each and how often one may be rescaled."""
    weight = torch.softmax(logits, dim=1)
    peak = logits.amax(1, keepdim=True)
    # A masked slot has weight 0; any finite logit keeps 0 * inf out of the sums.
    logit = torch.where(torch.isinf(logits), peak, logits)
    rescales = _rescales(logit).unsqueeze(1)

    own = LOGIT.value * (logit.abs() + ape) + SPAN.value * (peak - logit)
    growth = torch.expm1(U * own + EXP.value * (1 + rescales)).mul_(weight)
    return weight, growth, rescales


def _rounded(kv: Tensor, logits: Tensor, ape: Tensor, arithmetic: Arithmetic) -> ErrorBound:
    """Bound a pooling that rounds its normalised weights, or their products, to bf16."""
    slots = kv.shape[1]
    weight, growth, rescales = _weights(logits, ape)
    total = growth.sum(1, keepdim=True)
    steps = slots + rescales + QUOTIENT.value
    moved = (growth + weight * total) / (1 - total).clamp(min=0.5) + steps * U * weight
    # Logits that fp32 cannot resolve leave any weight possible.
    moved = torch.where(total < 0.5, moved * _SECOND_ORDER + TINY, 1.0)
    moved = torch.where(torch.isinf(logits), 0.0, moved)
    held = rounding(ErrorBound(weight, moved), arithmetic.pool_weights)
    product = held.value * kv
    lost = held.delta * kv.abs() + U * product.abs() + TINY
    terms = rounding(ErrorBound(product, lost), arithmetic.pool_terms)
    reach = (terms.value.abs() + terms.delta).sum(1)
    return ErrorBound(terms.value.sum(1), terms.delta.sum(1) + slots * (U * reach + TINY))


def _radius(kv: Tensor, logits: Tensor, value: Tensor, ape: Tensor) -> Tensor:
    slots = kv.shape[1]
    weight, growth, rescales = _weights(logits, ape)
    distance = (kv - value.unsqueeze(1)).abs()
    shift = (growth * distance).sum(1)
    total = growth.sum(1)
    # The pooled value is a convex combination, so no error of the weights leaves the hull: that is
    # all there is to say where the logits are too large for fp32 to resolve.
    hull = torch.where(torch.isinf(logits), 0.0, distance).amax(1)
    resolved = total < 0.5
    rest = torch.where(resolved, 1 - total, 0.5)
    weights_part = torch.where(resolved, shift / rest, hull).minimum(hull)

    steps = slots + rescales.squeeze(1)
    terms = (weight * kv.abs()).sum(1)
    sums = U * ((steps + QUOTIENT.value) * terms + steps * value.abs())
    flushed = TINY * (kv.abs().sum(1) + slots * (1 + value.abs()))
    return (weights_part + sums / rest) * _SECOND_ORDER + flushed


def _rescales(logit: Tensor) -> Tensor:
    """Return how often an online softmax may rescale a term, [rows, d]."""
    slots = logit.shape[1]
    usual = float(min(slots - 1, int(RESCALES.value)))
    if slots - 1 <= RESCALES.value:
        return torch.full_like(logit[:, 0], usual)
    running = logit.cummax(1).values
    return (running[:, 1:] > running[:, :-1]).sum(1).to(logit.dtype).clamp_(min=usual)

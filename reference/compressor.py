"""The compressor: each window of tokens becomes one row.

Every token is projected to a value (kv) and a pooling score. A window's row is, channel by
channel, the softmax-weighted mean of its values. Ratio 128 pools the 128 tokens of the window.
Ratio 4 pools 8 slots: tokens carry two sets of columns, ``[0, d)`` for the *next* window and
``[d, 2d)`` for their own, so window ``w`` reads four tokens of window ``w - 1`` and its own four.
Window 0 has no predecessor: those slots are masked. The position embedding ``ape`` is added to the
score by a token's place in its window.

Entry ``w`` is complete at position ``(w + 1) * ratio - 1``, and with it the row exists.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from needlepoint.reference.norm import rms_norm
from needlepoint.reference.profile import ApePlacement, Arithmetic, Precision
from needlepoint.reference.ring import PositionRing
from needlepoint.reference.rounding import round_to

__all__ = [
    "CompressorState",
    "Taps",
    "compressor_inputs",
    "gather_taps",
    "pool",
    "rms_norm",
    "rounds_inside",
]


@dataclass(frozen=True)
class Taps:
    """What a window reads.

    Attributes
    ----------
    kv
        float64 ``[n, slots, d]``, slots in time order; 0 where masked.
    logits
        float64 ``[n, slots, d]``, score plus position embedding; ``-inf`` where the slot's
        absolute position is negative.
    """

    kv: Tensor
    logits: Tensor


class CompressorState:
    """The tokens of one request that later windows still need, by absolute position.

    Parameters
    ----------
    ratio
        4 or 128.
    width
        Columns of a token: ``c * d``.
    arithmetic
        ``state`` is the storage precision. With ``ape`` at ``READ`` the ring holds raw scores and
        only tokens of earlier calls pass through it (SGLang, transformers); with ``WRITE`` it
        holds scores with the embedding added and every token is read from it (official, vLLM).
    """

    def __init__(self, ratio: int, width: int, arithmetic: Arithmetic) -> None:
        slots = ratio * _halves(ratio)
        self.arithmetic = arithmetic
        self.next_position = 0
        self.kv = PositionRing(slots, width, arithmetic.state)
        self.score = PositionRing(slots, width, arithmetic.state)

    def append(self, kv: Tensor, score: Tensor, ape: Tensor) -> None:
        """Store the tokens of a call, after :func:`gather_taps` has read the older ones."""
        written = score.to(torch.float64)
        if self.arithmetic.ape is ApePlacement.WRITE:
            written = written + _place(ape, self.next_position, len(score))
        self.kv.write(self.next_position, kv.to(torch.float64))
        self.score.write(self.next_position, written)
        self.next_position += len(kv)

    def restart(self) -> None:
        """Hand the buffers to another request without clearing them, as serving engines do."""
        self.next_position = 0


def gather_taps(
    kv: Tensor,
    score: Tensor,
    ape: Tensor,
    ratio: int,
    arithmetic: Arithmetic,
    state: CompressorState | None = None,
) -> Taps:
    """Collect the slots of every window that these tokens complete.

    Parameters
    ----------
    kv, score
        ``[n, c * d]``, projections of consecutive tokens; score without position embedding.
    ape
        ``[ratio, c * d]`` fp32.
    ratio
        4 (``c = 2``) or 128 (``c = 1``).
    arithmetic
        Its ``state`` and ``ape`` fields apply.
    state
        Tokens before these; None when they start the request. It is read, not changed.

    Returns
    -------
    Taps
        Windows ``first // ratio .. (first + n) // ratio - 1``, in order; possibly none.

    Raises
    ------
    ValueError
        If shapes do not fit or the state lacks a token that a window needs.
    """
    _check(kv, score, ape, ratio)
    first = 0 if state is None else state.next_position
    first_entry, stop_entry = first // ratio, (first + len(kv)) // ratio
    halves = _halves(ratio)
    width = kv.shape[1] // halves
    if first_entry == stop_entry:
        empty = torch.empty(0, ratio * halves, width, dtype=torch.float64)
        return Taps(empty, empty.clone())

    # One line of tokens from the first slot of the first window to the last slot of the last.
    start = (first_entry + 1 - halves) * ratio
    masked = max(0, -start)
    values = [torch.zeros(masked, kv.shape[1], dtype=torch.float64)]
    logits = [torch.full((masked, kv.shape[1]), -torch.inf, dtype=torch.float64)]
    if state is not None and max(start, 0) < first:
        older = state.score.read(max(start, 0), first)
        if arithmetic.ape is ApePlacement.READ:
            older = older + _place(ape, max(start, 0), len(older))
        values.append(state.kv.read(max(start, 0), first))
        logits.append(older)
    fresh = stop_entry * ratio - first
    new_values = kv[:fresh].to(torch.float64)
    new_logits = score[:fresh].to(torch.float64) + _place(ape, first, fresh)
    if arithmetic.ape is ApePlacement.WRITE:
        new_values = round_to(new_values, arithmetic.state)
        new_logits = round_to(new_logits, arithmetic.state)
    values.append(new_values)
    logits.append(new_logits)
    return Taps(_windows(torch.cat(values), ratio), _windows(torch.cat(logits), ratio))


def pool(taps: Taps, arithmetic: Arithmetic | None = None) -> Tensor:
    """Return the pooled rows, float64 ``[n, d]``, unrounded.

    ``sum_s kv_s exp(l_s - max l) / sum_s exp(l_s - max l)`` for each channel; both sums run over
    the slots in time order.

    Parameters
    ----------
    taps
        What each window reads.
    arithmetic
        Where ``pool_weights`` or ``pool_terms`` is bf16, the weights are normalised first and
        rounded, then each product with its value.
    """
    weights = (taps.logits - taps.logits.amax(dim=1, keepdim=True)).exp()
    if arithmetic is not None and rounds_inside(arithmetic):
        shares = weights / weights.sum(dim=1, keepdim=True)
        terms = _if_bf16(shares, arithmetic.pool_weights) * taps.kv
        return _if_bf16(terms, arithmetic.pool_terms).sum(dim=1)
    total = torch.zeros(taps.kv[:, 0].shape, dtype=torch.float64)
    norm = torch.zeros_like(total)
    for slot in range(taps.kv.shape[1]):
        total += weights[:, slot] * taps.kv[:, slot]
        norm += weights[:, slot]
    return total / norm


def rounds_inside(arithmetic: Arithmetic) -> bool:
    """Return whether the pooling has a rounding point of its own, before the pooled row."""
    return Precision.BF16 in (arithmetic.pool_weights, arithmetic.pool_terms)


def _if_bf16(x: Tensor, precision: Precision) -> Tensor:
    return round_to(x, precision) if precision is Precision.BF16 else x


def compressor_inputs(kv: Tensor, score: Tensor, arithmetic: Arithmetic) -> tuple[Tensor, Tensor]:
    """Return projections as the compressor reads them, float64: rounded to ``key_input``."""
    point = arithmetic.key_input
    return _if_bf16(kv.to(torch.float64), point), _if_bf16(score.to(torch.float64), point)


def _halves(ratio: int) -> int:
    return 2 if ratio == 4 else 1


def _place(ape: Tensor, first_position: int, count: int) -> Tensor:
    places = torch.arange(first_position, first_position + count) % len(ape)
    return ape.to(torch.float64)[places]


def _windows(tokens: Tensor, ratio: int) -> Tensor:
    """Cut a line of tokens into windows ``[n, slots, d]``."""
    windows = tokens.reshape(-1, ratio, tokens.shape[1])
    if _halves(ratio) == 1:
        return windows
    width = tokens.shape[1] // 2
    return torch.cat((windows[:-1, :, :width], windows[1:, :, width:]), dim=1)


def _check(kv: Tensor, score: Tensor, ape: Tensor, ratio: int) -> None:
    if ratio not in (4, 128):
        raise ValueError(f"gather_taps: ratio {ratio}, expected 4 or 128")
    columns = kv.shape[-1]
    fits = kv.dim() == 2 and kv.shape == score.shape and tuple(ape.shape) == (ratio, columns)
    if not fits or columns % _halves(ratio) or len(kv) == 0:
        raise ValueError(
            f"gather_taps: kv {tuple(kv.shape)}, score {tuple(score.shape)}, ape "
            f"{tuple(ape.shape)}; expected [n, c * d] twice with n > 0 and [{ratio}, c * d], "
            f"c = {_halves(ratio)}"
        )

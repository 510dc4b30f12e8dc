"""Tests of a direction: errors that are within the limit and all have the same sign.

Every row gives one number ``x`` that has no preferred sign in a sound candidate. With ``lean`` what
fp32 may push one way all the same, the statistic of a direction is

    z = sum(x - lean) / sqrt(sum((x - lean)^2))

over the rows. If ``x - lean`` is as often above as below zero, the signs are fair coins and
Hoeffding's inequality gives ``P(z >= t) <= exp(-t^2 / 2)`` for any number of rows and any
distribution of sizes; no variance is estimated and no normal limit is needed. The level is in
docs/limits.md. Rows made from equal input err alike and count as one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from needlepoint.verify.numerics.directions import Z_LIMIT
from needlepoint.verify.numerics.row_errors import StageErrors
from needlepoint.verify.numerics.tally import FLIPS, Tally
from needlepoint.verify.schema.stage import BiasTest

ROWS_NEEDED = math.ceil(Z_LIMIT**2)
"""Fewer rows cannot reach the limit, however alike they are."""

_SMALLEST_NORM = 2.0**-100
"""Rows below it are made of subnormals that hardware may flush, always towards zero."""


@dataclass(frozen=True)
class _Direction:
    """One number a row that has no preferred sign, what fp32 may add to it, and the effect.

    ``sides`` are the signs that a fault can have.
    """

    test: str
    x: Tensor
    lean: Tensor
    effect: float
    sides: tuple[int, ...] = (1, -1)


def bias_tests(errors: StageErrors, limit: float) -> tuple[BiasTest, ...]:
    """Test the directions of a stage's local errors.

    Parameters
    ----------
    errors
        Row errors with their tallies.
    limit
        Limit of the stage; above 1 it loosens that of ``z`` as well.

    Returns
    -------
    tuple
        ``gain`` for unrounded numbers; ``flips``, and ``ties`` where there are any, for rounded
        ones; nothing where nothing could lean.
    """
    if math.isinf(errors.lean):
        return ()
    tally = errors.local.tally
    usable = tally[:, Tally.NORM2] > _SMALLEST_NORM**2
    tally = tally[usable]
    if not len(tally):
        return ()
    content = tally[:, Tally.CONTENT]
    content = content if bool(content.any()) else torch.arange(len(content))
    window = torch.unique(content, return_inverse=True)[1]
    return tuple(
        _tested(direction, window, Z_LIMIT * max(1.0, limit))
        for direction in _directions(tally, errors.lean)
    )


def _directions(tally: Tensor, lean: float) -> Iterator[_Direction]:
    if not bool(tally[:, Tally.STEPS].any()):
        along, norm2 = tally[:, Tally.ALONG], tally[:, Tally.NORM2]
        gain = along / norm2
        effect = float(along.sum() / norm2.sum())
        yield _Direction("gain", gain, torch.full_like(gain, lean), effect)
        return
    # [rows, classes]
    up, down, open_up, open_down = tally[:, FLIPS].reshape(len(tally), -1, 4).unbind(2)
    flips = float(up.sum() + down.sum())
    if flips:
        # Where more elements are open to one side, more flip to it: compare rates, not counts
        # (Mantel and Haenszel 1959, over the classes of nearness).
        open_up, open_down = open_up.sum(0), open_down.sum(0)
        x = 2 * (up * open_down - down * open_up) / (open_up + open_down).clamp(min=1)
        crossed = tally[:, Tally.STEPS] * lean
        yield _Direction("flips", x.sum(1), crossed, float(up.sum() - down.sum()) / flips)
    # Errors of either sign decide half of the exact ties against the rule, and no more than that.
    for side, count, flipped in (
        (1, Tally.TIES_DOWN, Tally.TIES_DOWN_FLIPPED),
        (-1, Tally.TIES_UP, Tally.TIES_UP_FLIPPED),
    ):
        ties, against = tally[:, count], tally[:, flipped]
        if bool(ties.any()):
            share = float(against.sum() / ties.sum())
            x = side * (2 * against - ties)
            yield _Direction("ties", x, torch.zeros_like(x), share, (side,))


def _tested(direction: _Direction, window: Tensor, limit: float) -> BiasTest:
    x, lean = (
        torch.zeros(int(window.max()) + 1, dtype=torch.float64).index_add_(0, window, part)
        for part in (direction.x, direction.lean)
    )
    z = max((side * _z(side * x - lean) for side in direction.sides), key=abs)
    return BiasTest.model_validate(
        {
            "test": direction.test,
            "z": z,
            "limit": limit,
            "effect": direction.effect,
            "rows": int((x != 0).sum()),
            "rows_needed": ROWS_NEEDED,
            "exceeded": abs(z) > limit,
        }
    )


def _z(x: Tensor) -> float:
    scale = float(torch.linalg.vector_norm(x))
    return max(0.0, float(x.sum()) / scale) if scale else 0.0

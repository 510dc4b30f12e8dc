"""What a comparison counts of each row besides its largest error.

A size says how far a row is off; a tally says in which direction, what the rounding of the
reference itself costs, and how wide the radius is beside the data. ``bias.py`` tests the
directions, ``degenerate.py`` the widths, ``blame.py`` splits the error.
"""

from __future__ import annotations

from enum import IntEnum

import torch
from torch import Tensor

from needlepoint.verify.numerics.error_model import U

_NEAR_TIE = 2.0**-40
"""Relative distance to a boundary within which the reference lies on it: float64 noise."""

_FLUSHED = 2.0**-100
"""Magnitude below which a direction is that of flushed subnormals, and not counted."""


class Tally(IntEnum):
    """Columns of a tally; *up* is away from zero.

    An exact tie is counted apart from flips: there the tie rule decides, or an error of either
    sign.
    """

    ALONG = 0
    """``<c - r, r>``, unrounded numbers alone."""
    NORM2 = 1
    """Squared norm of the reference before rounding."""
    TIES_DOWN = 2
    """Exact ties that the tie rule rounds down."""
    TIES_DOWN_FLIPPED = 3
    TIES_UP = 4
    TIES_UP_FLIPPED = 5
    STEPS = 6
    """Sum over elements of the most codes that a relative change of 1 crosses; 0 if unrounded."""
    FORMAT2 = 7
    """Squared norm of what the rounding of the reference costs."""
    SIZE = 8
    """Largest magnitude of the reference."""
    REACH = 9
    """Largest radius."""
    NARROWEST = 10
    """Half an ULP of the largest element in units of its radius; 0 where cells are compared."""
    CONTENT = 11
    """Equal for rows made from equal input, whatever their position; 0 where nobody set it."""
    SPREAD = 12
    """Largest minus smallest visible score."""


NEARNESS = (2.0**-8, 2.0**-5, 2.0**-2)
"""Distances to a boundary, in units of the radius, that part elements into classes."""

FLIPS = slice(len(Tally), len(Tally) + 4 * (len(NEARNESS) + 1))
"""Columns of flips up, flips down, open upwards, open downwards, for each class of nearness.

An element is open to a side if the boundary there lies within its radius, so that both codes are
admissible. Errors of either sign flip equally many of equally near elements up and down; the
classes keep data that lies on a lattice, nearer to the boundaries on one side, from looking biased.
"""

_SUMS = (slice(Tally.SIZE), FLIPS)


def no_tally(rows: int, *, flips: bool = False) -> Tensor:
    """Return the tally of rows that nothing was counted in: float64 ``[rows, columns]``.

    Only numbers that are compared by cell have the columns of :data:`FLIPS`.
    """
    return torch.zeros(rows, FLIPS.stop if flips else len(Tally), dtype=torch.float64)


def join_tallies(one: Tensor, other: Tensor) -> Tensor:
    """Return the tally of rows whose dims are split in two parts."""
    joined = torch.maximum(one, other)
    for columns in _SUMS:
        joined[:, columns] = one[:, columns] + other[:, columns]
    return joined


def plain_tally(
    found: Tensor, value: Tensor, delta: Tensor, *, fp32: bool, directed: bool = True
) -> Tensor:
    """Return the tally of numbers that are compared unrounded.

    Parameters
    ----------
    found, value, delta
        float64 ``[rows, n]`` candidate, reference and radius.
    fp32
        Whether the candidate's numbers are fp32: they cannot be nearer than half an ULP.
    directed
        Whether directions are counted, not widths alone.
    """
    tally = no_tally(len(found))
    _widths(tally, value, delta)
    if fp32:
        # Half an ULP is between U / 2 and U of a number; refuse only below the lower of the two.
        # Elements of radius 0 are copies, which need no room.
        largest = value.abs().masked_fill(delta == 0, 0.0).max(1)
        at = delta.gather(1, largest.indices.unsqueeze(1))[:, 0]
        tally[:, Tally.NARROWEST] = torch.where(at > 0, largest.values * (U / 2) / at, 0.0)
    if not directed:
        return tally
    norm2 = torch.einsum("ij,ij->i", value, value)
    along = torch.einsum("ij,ij->i", found, value) - norm2
    tally[:, Tally.ALONG] = torch.where(torch.isfinite(along), along, 0.0)
    tally[:, Tally.NORM2] = norm2
    return tally


def rounded_tally(
    found: Tensor,
    nearest: Tensor,
    needed: Tensor,
    cell: tuple[Tensor, Tensor],
    value: Tensor,
    delta: Tensor,
    bits: int,
) -> Tensor:
    """Return the directions of numbers that are compared by rounding cell.

    Parameters
    ----------
    found, nearest
        float64 ``[rows, n]`` candidate's number, and the number the reference rounds to.
    needed
        ``max(lower - value, value - upper)`` of the candidate's cell: negative inside.
    cell
        Lower and upper end of the candidate's cell.
    value, delta
        Reference and radius in the units of the cell.
    bits
        Significand bits of the element: a relative change of 1 crosses at most ``2 ** bits`` codes.
    """
    tally = no_tally(len(found), flips=True)
    tally[:, Tally.STEPS] = found.shape[1] * 2.0**bits
    # Almost every element is alone in reach of its cell and needs no second look.
    near = (needed >= -delta) & (delta > 0) & torch.isfinite(found) & (value.abs() > _FLUSHED)
    row, column = near.nonzero(as_tuple=True)
    if not len(row):
        return tally
    at = (row, column)
    positive = value[at] >= 0
    lower, upper, here = cell[0][at], cell[1][at], value[at]
    above = torch.where(positive, upper - here, here - lower)
    below = torch.where(positive, here - lower, upper - here)
    up = found[at].abs() > nearest[at].abs()
    down = found[at].abs() < nearest[at].abs()
    same = ~(up | down)
    tiny = _NEAR_TIE * here.abs()
    tie_above, tie_below = above.abs() <= tiny, below.abs() <= tiny
    # A tie below the found cell went up: by the rule if it is the reference's own, else against it.
    ties_down, ties_up = (
        (same & tie_above) | (up & tie_below),
        (same & tie_below) | (down & tie_above),
    )
    tied = ties_down | ties_up
    counted: dict[int, Tensor] = {
        Tally.TIES_DOWN: ties_down,
        Tally.TIES_DOWN_FLIPPED: ties_down & up,
        Tally.TIES_UP: ties_up,
        Tally.TIES_UP_FLIPPED: ties_up & down,
    }
    sides = (
        (up, torch.where(up, -below, above)),
        (down, torch.where(down, -above, below)),
    )
    radius = delta[at]
    for side, (flipped, distance) in enumerate(sides):
        open_to = (flipped | (same & (distance <= radius))) & ~tied
        nearness = torch.bucketize(distance / radius, torch.tensor(NEARNESS, dtype=torch.float64))
        for near_class in range(len(NEARNESS) + 1):
            here_class = open_to & (nearness == near_class)
            first = FLIPS.start + 4 * near_class + side
            counted[first], counted[first + 2] = here_class & flipped, here_class
    for column_of, mask in counted.items():
        tally[:, column_of] = torch.bincount(row[mask], minlength=len(tally)).to(torch.float64)
    return tally


def with_format(tally: Tensor, value: Tensor, delta: Tensor, rounded: Tensor) -> Tensor:
    """Return a tally of rounded numbers with norm, width, and what the rounding itself costs.

    Parameters
    ----------
    tally
        As from :func:`rounded_tally`.
    value, delta
        float64 ``[rows, n]`` reference before the rounding, and its radius.
    rounded
        What the reference rounds to.
    """
    tally[:, Tally.NORM2] = torch.einsum("ij,ij->i", value, value)
    lost = rounded - value
    tally[:, Tally.FORMAT2] = torch.einsum("ij,ij->i", lost, lost)
    _widths(tally, value, delta)
    return tally


def content_of(rows: Tensor) -> Tensor:
    """Return one number a row that equal rows share and others do not: float64 ``[rows]``.

    fp32 of a fixed projection: the sums of equal rows may differ in their last float64 bits.
    """
    wide = rows.flatten(1).to(torch.float64)
    direction = torch.cos(torch.arange(wide.shape[1], dtype=torch.float64) * 1.7 + 0.3)
    return (wide @ direction).to(torch.float32).to(torch.float64)


def _widths(tally: Tensor, value: Tensor, delta: Tensor) -> None:
    tally[:, Tally.SIZE] = torch.linalg.vector_norm(value, ord=torch.inf, dim=1)
    tally[:, Tally.REACH] = torch.linalg.vector_norm(delta, ord=torch.inf, dim=1)

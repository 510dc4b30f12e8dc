"""From row errors to statistics; a number that is not finite becomes null here."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike

from needlepoint.verify.schema.stage import Spread


def finite(value: float) -> float | None:
    """Return ``value``, or None where it is NaN or infinite."""
    return float(value) if math.isfinite(value) else None


def not_finite(rows: ArrayLike) -> int:
    """Return how many of the row errors are NaN or infinite."""
    return int((~np.isfinite(np.asarray(rows))).sum())


def spread(rows: ArrayLike) -> Spread:
    """Return maximum, mean and 99th percentile of row errors.

    NaN counts as infinite, so a row without an error can never lower a statistic; a statistic that
    is not finite is null, and so is every statistic of no rows.

    Parameters
    ----------
    rows
        [rows] float row errors, zero or positive; a tensor on the CPU or an array.
    """
    values = np.asarray(rows, dtype=np.float64).ravel()
    if not values.size:
        return Spread(max=None, mean=None, p99=None)
    values = np.where(np.isnan(values), math.inf, values)
    # The percentile is a row that exists (the ceiling rank): an interpolated one need not.
    rank = max(1, math.ceil(0.99 * values.size))
    return Spread(
        max=finite(values.max()),
        mean=finite(values.mean()),
        p99=finite(np.partition(values, rank - 1)[rank - 1]),
    )

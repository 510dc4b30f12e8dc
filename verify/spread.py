"""Row errors to statistics: the one place where a non-finite number becomes null."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from needlepoint.verify.result_stage import Spread


def finite(value: float) -> float | None:
    """Return ``value``, or None where it is NaN or infinite."""
    return float(value) if math.isfinite(value) else None


def not_finite(rows: Tensor) -> int:
    """Return how many of the row errors are NaN or infinite."""
    return int((~torch.isfinite(rows)).sum())


def spread(rows: Tensor) -> Spread:
    """Return maximum, mean and 99th percentile of row errors.

    NaN counts as infinite, so a row without an error can never lower a statistic; a statistic that
    is not finite is null, and so is every statistic of no rows.

    Parameters
    ----------
    rows
        [rows] float row errors, zero or positive.
    """
    if rows.numel() == 0:
        return Spread(max=None, mean=None, p99=None)
    values = rows.detach().to(torch.float64).flatten().nan_to_num(nan=math.inf, posinf=math.inf)
    # The percentile is a row that exists (the ceiling rank): torch.quantile would interpolate, and
    # refuses more than 2**24 rows.
    rank = max(1, math.ceil(0.99 * values.numel()))
    return Spread(
        max=finite(values.max().item()),
        mean=finite(values.mean().item()),
        p99=finite(torch.kthvalue(values, rank).values.item()),
    )

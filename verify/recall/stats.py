"""Statistics of paired recall: intervals, tests, and what a number of needles can show.

Each needle is asked of two sides, so everything is paired. Needles of one haystack share its text
and are not independent: a *cluster*. Intervals count clusters by a design effect, the variance
between clusters over the variance of independent needles, at least 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

import numpy as np
import scipy  # its parts load when first used: every command imports this module

ALPHA = 0.05
POWER = 0.8


@dataclass(frozen=True)
class Pairs:
    """Hits of both sides on the same needles.

    Attributes
    ----------
    rows
        Needles.
    hits, reference_hits
        Of the candidate and of the reference.
    lost, gained
        Needles that the reference alone hits, and that the candidate alone hits.
    """

    rows: int
    hits: int
    reference_hits: int
    lost: int
    gained: int

    @classmethod
    def of(cls, hits: Sequence[bool], reference: Sequence[bool]) -> Pairs:
        """Count pairs.

        Raises
        ------
        ValueError
            If the sides have different numbers of needles.
        """
        lost = sum(r and not h for h, r in zip(hits, reference, strict=True))
        gained = sum(h and not r for h, r in zip(hits, reference, strict=True))
        return cls(len(hits), sum(hits), sum(reference), lost, gained)


@cache
def wilson(hits: int, rows: int, effect: float = 1.0) -> tuple[float, float] | None:
    """Return the 95 % Wilson interval of a rate; None without rows.

    Parameters
    ----------
    hits, rows
        Counts.
    effect
        Design effect: the interval is that of ``rows / effect`` independent rows (Wilson 1927 with
        the effective sample size of Kish 1965).
    """
    if rows == 0:
        return None
    if effect == 1.0:
        interval = scipy.stats.binomtest(hits, rows).proportion_ci(1 - ALPHA, method="wilson")
        return float(interval.low), float(interval.high)
    z, n, p = _normal(), rows / effect, hits / rows
    centre = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    return max(0.0, centre - half), min(1.0, centre + half)


@cache
def mcnemar_p(lost: int, gained: int) -> float:
    """Return the two-sided p of the exact McNemar test; 1 when no pair is discordant."""
    if lost + gained == 0:
        return 1.0
    return float(scipy.stats.binomtest(lost, lost + gained, 0.5).pvalue)


def cluster_p(differences: Sequence[int]) -> float:
    """Return the two-sided p of the exact sign-flip test over clusters.

    Under the null hypothesis each cluster's difference is as likely with the other sign. The
    distribution of the sum is enumerated, so the p needs no normal limit; it is McNemar's where
    every cluster has one discordant pair.

    Parameters
    ----------
    differences
        Lost minus gained of each cluster.
    """
    moved = [abs(d) for d in differences if d]
    ways = np.ones(1)
    for size in moved:
        grown = np.zeros(len(ways) + 2 * size)
        grown[: len(ways)] += 0.5 * ways
        grown[2 * size :] += 0.5 * ways
        ways = grown
    sums = np.arange(len(ways)) - sum(moved)
    return float(min(1.0, ways[np.abs(sums) >= abs(sum(differences))].sum()))


def design_effect(values: Sequence[float], clusters: Sequence[int]) -> float | None:
    """Return the variance of a mean over clusters against that of independent values.

    The numerator is the ratio estimator between clusters (Rao and Scott 1992), the denominator the
    plain variance. Between 1 and the largest cluster; 1 where nothing varies.

    Parameters
    ----------
    values
        One number a needle.
    clusters
        Its cluster.

    Returns
    -------
    float or None
        None with fewer than two clusters: nothing can be said.
    """
    found = np.asarray(values, dtype=np.float64)
    names, index = np.unique(np.asarray(clusters), return_inverse=True)
    count = len(names)
    if count < 2:
        return None
    mean = found.mean()
    plain = float(((found - mean) ** 2).sum()) / len(found) ** 2
    if plain == 0.0:
        return 1.0
    sizes = np.bincount(index)
    sums = np.bincount(index, weights=found)
    between = count / (count - 1) * float(((sums - mean * sizes) ** 2).sum()) / len(found) ** 2
    return min(max(1.0, between / plain), float(sizes.max()))


def difference_interval(
    lost: int, gained: int, rows: int, effect: float = 1.0, clusters: int | None = None
) -> tuple[float, float] | None:
    """Return the 95 % score interval of ``(gained - lost) / rows`` for paired rates.

    Tango (1998): all differences that a score test does not reject. Unlike a normal interval it
    does not shrink to nothing where no pair is discordant. Counts are divided by the design effect,
    and with clusters the quantile is Student's.

    Parameters
    ----------
    lost, gained, rows
        Counts.
    effect
        Design effect of the differences.
    clusters
        Number of clusters; None for independent needles.
    """
    if rows == 0 or (clusters is not None and clusters < 2):
        return None
    z = _normal() if clusters is None else float(scipy.stats.t.ppf(1 - ALPHA / 2, clusters - 1))
    b, c, n = gained / effect, lost / effect, rows / effect

    def excess(delta: float) -> float:
        return _tango(b, c, n, delta) - z

    def below(delta: float) -> float:
        return _tango(b, c, n, delta) + z

    middle, edge = (b - c) / n, 1 - 1e-12
    low = scipy.optimize.brentq(excess, -edge, middle) if excess(-edge) > 0 else -1.0
    high = scipy.optimize.brentq(below, middle, edge) if below(edge) < 0 else 1.0
    return float(low), float(high)


@cache
def detectable_drop(rows: int, effect: float = 1.0) -> float | None:
    """Return the smallest drop that this many needles show with power 0.8 at alpha 0.05.

    The drop is one-way: the candidate loses each needle with this probability and gains none. It
    shows where the exact McNemar test rejects, which takes at least six lost needles.

    Parameters
    ----------
    rows
        Needles of both sides.
    effect
        Design effect; the needles count as ``rows / effect``.

    Returns
    -------
    float or None
        None where no drop could show.
    """
    count = int(rows / effect)
    needed = next(n for n in range(1, 64) if mcnemar_p(n, 0) < ALPHA)
    if count < needed:
        return None
    return float(
        scipy.optimize.brentq(
            lambda d: scipy.stats.binom.sf(needed - 1, count, d) - POWER, 1e-12, 1.0
        )
    )


def holm(p: Sequence[float]) -> list[float]:
    """Return p-values adjusted for their number by Holm (1979), in the given order."""
    adjusted = [0.0] * len(p)
    largest = 0.0
    for place, index in enumerate(sorted(range(len(p)), key=lambda i: p[i])):
        largest = max(largest, min(1.0, (len(p) - place) * p[index]))
        adjusted[index] = largest
    return adjusted


def conclusion(
    delta: float | None, p: float | None, by_cluster: float | None
) -> Literal["lower", "higher", "not shown"]:
    """Return what the needles show; both tests must, for clusters may be few.

    Parameters
    ----------
    delta
        Rate of the candidate minus that of the reference.
    p, by_cluster
        Of :func:`mcnemar_p` and :func:`cluster_p`.
    """
    if not delta or p is None or by_cluster is None or max(p, by_cluster) >= ALPHA:
        return "not shown"
    return "lower" if delta < 0 else "higher"


def _normal() -> float:
    return float(scipy.stats.t.ppf(1 - ALPHA / 2, math.inf))


def _tango(b: float, c: float, n: float, delta: float) -> float:
    """Return Tango's score statistic for the difference ``delta`` of ``(b - c) / n``."""
    across = 2 * n
    linear = -b - c + (2 * n - b + c) * delta
    constant = -c * delta * (1 - delta)
    q = (math.sqrt(max(0.0, linear**2 - 4 * across * constant)) - linear) / (2 * across)
    variance = n * (2 * q + delta * (1 - delta))
    distance = b - c - n * delta
    if variance <= 0.0:
        return math.copysign(math.inf, distance) if distance else 0.0
    return distance / math.sqrt(variance)

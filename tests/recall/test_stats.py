"""Statistics of paired recall against scipy, enumeration and known tables."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import minimize_scalar
from scipy.stats import binom, binomtest, norm

from needlepoint.verify.recall.stats import (
    Pairs,
    cluster_p,
    conclusion,
    design_effect,
    detectable_drop,
    difference_interval,
    holm,
    mcnemar_p,
    wilson,
)

Z = float(norm.ppf(0.975))


@pytest.mark.parametrize(
    ("hits", "rows", "low"), [(8, 8, 0.676), (30, 30, 0.886), (100, 100, 0.963), (300, 300, 0.987)]
)
def test_wilson_of_full_marks(hits: int, rows: int, low: float) -> None:
    interval = wilson(hits, rows)
    assert interval is not None
    assert interval[0] == pytest.approx(low, abs=5e-4)
    assert interval[1] == pytest.approx(1.0)


@given(st.integers(1, 500), st.data())
def test_wilson_with_an_effect_of_one_is_the_plain_one(rows: int, data: st.DataObject) -> None:
    hits = data.draw(st.integers(0, rows))
    assert wilson(hits, rows) == pytest.approx(wilson(hits, rows, 1.0 + 1e-12), abs=1e-9)


def test_wilson_counts_clustered_needles_for_less() -> None:
    plain, clustered = wilson(90, 100), wilson(90, 100, 4.0)
    assert plain is not None
    assert clustered is not None
    assert clustered[1] - clustered[0] > 1.8 * (plain[1] - plain[0])
    assert wilson(0, 0) is None


def test_mcnemar_of_known_tables() -> None:
    assert mcnemar_p(0, 0) == 1.0
    assert mcnemar_p(6, 0) == 0.03125
    assert mcnemar_p(5, 0) == 0.0625
    assert mcnemar_p(15, 5) == pytest.approx(0.04138946533203125)


@given(st.integers(0, 60), st.integers(0, 60))
def test_mcnemar_is_the_binomial_test(lost: int, gained: int) -> None:
    if lost + gained:
        wanted = binomtest(lost, lost + gained, 0.5).pvalue
        assert mcnemar_p(lost, gained) == mcnemar_p(gained, lost) == pytest.approx(wanted)


@given(st.lists(st.integers(-3, 3), max_size=9))
def test_sign_flips_are_enumerated(differences: list[int]) -> None:
    total = abs(sum(differences))
    flips = list(itertools.product((-1, 1), repeat=len(differences)))
    extreme = sum(
        abs(sum(s * d for s, d in zip(f, differences, strict=True))) >= total for f in flips
    )
    assert cluster_p(differences) == pytest.approx(extreme / len(flips))


def test_sign_flips_of_single_pairs_are_mcnemar() -> None:
    assert cluster_p([1] * 9 + [-1] * 2 + [0] * 30) == pytest.approx(mcnemar_p(9, 2))
    # Nine lost needles of one haystack are one observation.
    assert cluster_p([9]) == 1.0


def _score(lost: int, gained: int, rows: int, delta: float) -> float:
    """Return the score statistic with the nuisance parameter found by maximum likelihood."""
    b, c, n = gained, lost, rows

    def loss(q: float) -> float:
        p = q + delta
        rest = 1 - p - q
        if min(p, q) < 0 or rest < 0:
            return math.inf
        return -sum(
            count * math.log(max(share, 1e-300))
            for count, share in ((b, p), (c, q), (n - b - c, rest))
            if count
        )

    low, high = max(0.0, -delta), (1 - delta) / 2
    q = minimize_scalar(loss, bounds=(low, high), method="bounded", options={"xatol": 1e-12}).x
    return (b - c - n * delta) / math.sqrt(n * (2 * q + delta - delta**2))


@pytest.mark.parametrize(
    ("lost", "gained", "rows"), [(1, 0, 44), (6, 0, 200), (12, 2, 32), (3, 9, 120)]
)
def test_the_interval_holds_what_a_score_test_does_not_reject(
    lost: int, gained: int, rows: int
) -> None:
    interval = difference_interval(lost, gained, rows)
    assert interval is not None
    assert _score(lost, gained, rows, interval[0]) == pytest.approx(Z, abs=1e-3)
    assert _score(lost, gained, rows, interval[1]) == pytest.approx(-Z, abs=1e-3)


@pytest.mark.parametrize("rows", [1, 20, 200])
def test_no_discordant_pair_is_no_certainty(rows: int) -> None:
    interval = difference_interval(0, 0, rows)
    end = Z**2 / (rows + Z**2)
    assert interval == pytest.approx((-end, end), rel=1e-4)


def test_clusters_widen_the_interval_and_one_gives_none() -> None:
    plain = difference_interval(6, 0, 200)
    clustered = difference_interval(6, 0, 200, 2.0, 20)
    assert plain is not None
    assert clustered is not None
    assert clustered[0] < plain[0]
    assert plain[1] < 0 < clustered[1]
    assert difference_interval(6, 0, 200, 1.0, 1) is None
    assert difference_interval(0, 0, 0) is None


def test_design_effect() -> None:
    clusters = [i // 5 for i in range(100)]
    same = [float(c % 2) for c in clusters]
    apart = [float(i % 2) for i in range(100)]
    assert design_effect(same, clusters) == pytest.approx(5.0)
    assert design_effect(apart, clusters) == 1.0
    assert design_effect([1.0] * 100, clusters) == 1.0
    assert design_effect([0.0, 1.0], [0, 0]) is None
    draw = np.random.default_rng(0)
    values = list(draw.integers(0, 2, 4000).astype(float))
    found = design_effect(values, [i // 4 for i in range(4000)])
    assert found is not None
    assert found < 1.1


@pytest.mark.parametrize("rows", [6, 10, 50, 200, 800])
def test_detectable_drop_has_the_stated_power(rows: int) -> None:
    drop = detectable_drop(rows)
    assert drop is not None
    # Six lost needles are the fewest that McNemar's test rejects.
    assert binom.sf(5, rows, drop) == pytest.approx(0.8, abs=1e-6)
    assert binom.sf(5, rows, 0.99 * drop) < 0.8


def test_detectable_drop_of_too_few_needles() -> None:
    assert detectable_drop(5) is None
    assert detectable_drop(200, 2.0) == detectable_drop(100)


def test_holm_of_a_known_table() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([]) == []


@given(st.lists(st.floats(0, 1), min_size=1, max_size=12))
def test_holm_lies_between_plain_and_bonferroni(p: list[float]) -> None:
    found = holm(p)
    assert all(
        a <= b <= min(1.0, len(p) * a) + 1e-12 or b >= a for a, b in zip(p, found, strict=True)
    )
    order = sorted(range(len(p)), key=lambda i: p[i])
    assert [found[i] for i in order] == sorted(found)
    assert found[order[0]] == pytest.approx(min(1.0, len(p) * min(p)))


def test_pairs_and_conclusion() -> None:
    pairs = Pairs.of([True, False, True, False], [True, True, False, False])
    assert (pairs.rows, pairs.hits, pairs.reference_hits, pairs.lost, pairs.gained) == (
        4,
        2,
        2,
        1,
        1,
    )
    assert conclusion(-0.1, 0.001, 0.01) == "lower"
    assert conclusion(0.1, 0.001, 0.01) == "higher"
    assert conclusion(-0.1, 0.001, 0.5) == "not shown"
    assert conclusion(0.0, 1.0, 1.0) == conclusion(None, None, None) == "not shown"

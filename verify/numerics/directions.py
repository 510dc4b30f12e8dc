"""Figures of a stage besides its row errors: tests of a direction, and the range of its limit.

These are numbers of a result, so that other limits can be tried on a saved one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from needlepoint.verify.schema.stage import BiasTest

Z_LIMIT = 7.0
"""A sound direction passes it once in 4e10 times; see docs/limits.md for the whole run."""

_WORDS = {
    "gain": "signed bias test, mean gain {:+.2e}",
    "flips": "code-flip test, a balance of {:+.2f}",
    "ties": "tie test, a share of {:.2f} of the exact ties against the tie rule",
}


def bias_note(tests: Iterable[BiasTest]) -> str | None:
    """Return one line about the first direction that is no accident; None where there is none."""
    for test in tests:
        if test.exceeded:
            side = "away from" if test.z > 0 else "towards"
            what = _WORDS[test.test].format(test.effect)
            return f"{what}: rows err {side} zero, z {abs(test.z):.1f} of at most {test.limit:.3g}"
    return None


def passing_limit(
    worst: float, tests: Iterable[BiasTest], narrowest: float | None, widest: float | None
) -> float | None:
    """Return the smallest limit that a stage passes; None where no limit can be met.

    Parameters
    ----------
    worst
        Largest row error, local or accumulated.
    tests
        Directions of the stage.
    narrowest, widest
        As :func:`limit_range`.
    """
    leaning = max((abs(test.z) / Z_LIMIT for test in tests), default=0.0)
    needed = max(worst, narrowest or 0.0, leaning if leaning > 1 else 0.0)
    needed *= 1 + 2.0**-22  # rows are kept in fp32
    return needed if needed < (math.inf if widest is None else widest) else None


def limit_fault(value: float, narrowest: float | None, widest: float | None) -> str | None:
    """Return why a limit cannot judge a stage; None where it can."""
    if widest is not None and value >= widest:
        return (
            f"limit {value:.3g} is wider than the data: from {widest:.3g} on, rows of zeros would "
            "pass; give a smaller limit"
        )
    if narrowest is not None and value < narrowest:
        return (
            f"limit {value:.3g} is narrower than half an ULP: below {narrowest:.3g} not even the "
            "rounded reference passes; give a larger limit"
        )
    return None

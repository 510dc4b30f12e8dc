"""Numbers as text, for tables and running text."""

from __future__ import annotations


def number(value: float | None) -> str:
    """Return a number in at most eight characters, ``-`` for null."""
    if value is None:
        return "-"
    if value == 0:
        return "0"
    return f"{value:.3f}" if 1e-2 <= abs(value) < 1e3 else f"{value:.1e}"


def short(value: float | None) -> str:
    """Return a number for running text, without zeros that say nothing."""
    return "-" if value is None else f"{value:.4g}"

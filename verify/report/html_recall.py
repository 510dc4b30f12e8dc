"""Recall in the HTML report: the pictures of ``recall_svg``, and their figures as a table."""

from __future__ import annotations

from dataclasses import dataclass

from markupsafe import Markup

from needlepoint.verify.base.numbers import number
from needlepoint.verify.report.recall_svg import recall_pictures
from needlepoint.verify.schema.base import Interval
from needlepoint.verify.schema.recall import RecallCell, RecallResult


@dataclass(frozen=True)
class RecallView:
    """Recall of one candidate.

    Attributes
    ----------
    candidate
        Its name.
    facts
        Figures in words.
    pictures
        Heat maps and the curve by margin: SVG elements.
    cells
        What the heat maps show, one line a point: length, depth, k, near-duplicates, hits of
        rows, interval, reference hits, lost, gained, note.
    causes
        Misses by cause.
    """

    candidate: str
    facts: tuple[str, ...]
    pictures: tuple[Markup, ...]
    cells: tuple[tuple[str, ...], ...]
    causes: tuple[tuple[str, int], ...]


def recall_view(candidate: str, recall: RecallResult) -> RecallView:
    """Return what the report shows of a candidate's recall."""
    return RecallView(
        candidate,
        _facts(recall),
        # The pictures escape the names in them.
        tuple(Markup(picture) for picture in recall_pictures(recall, candidate)),
        tuple(_line(cell) for cell in recall.cells),
        tuple(recall.causes.items()),
    )


def _line(cell: RecallCell) -> tuple[str, ...]:
    return (
        f"{cell.length:,}",
        f"{100 * cell.depth:.3g} %",
        str(cell.k),
        str(cell.distractors),
        f"{cell.hits} of {cell.rows}",
        "-" if cell.ci95 is None else f"{cell.ci95[0]:.3f} to {cell.ci95[1]:.3f}",
        str(cell.reference_hits),
        str(cell.lost),
        str(cell.gained),
        "" if cell.exercised else "not exercised",
    )


def _facts(recall: RecallResult) -> tuple[str, ...]:
    facts = [
        f"{recall.hits} of {recall.rows} needles hit, rate {number(recall.rate)}"
        f"{_interval(recall.ci95)}, reference {number(recall.reference_rate)}",
        f"lost {recall.lost}, gained {recall.gained}, difference {number(recall.delta)}"
        f"{_interval(recall.delta_ci95)}",
        f"p {number(recall.mcnemar_p)}; a drop of {number(recall.detectable_drop)} would be seen",
    ]
    return tuple([recall.label, *facts] if recall.label else facts)


def _interval(interval: Interval | None) -> str:
    return "" if interval is None else f" ({interval[0]:.3f} to {interval[1]:.3f})"

"""The recall heat map of the HTML report: depth by length, with intervals."""

from __future__ import annotations

from dataclasses import dataclass

from needlepoint.verify.result_base import Interval
from needlepoint.verify.result_recall import RecallCell, RecallResult
from needlepoint.verify.summary import number


@dataclass(frozen=True)
class RecallCellView:
    """One point of the grid.

    Attributes
    ----------
    shade
        ``h0`` (none found) to ``h4`` (all found), ``free`` where nothing had to be chosen.
    text, label
        Hits and rows; the whole in words.
    """

    shade: str
    text: str
    label: str


@dataclass(frozen=True)
class RecallView:
    """Recall of one candidate.

    Attributes
    ----------
    candidate
        Its name.
    facts
        Figures in words.
    lengths
        Columns.
    grid
        Rows by depth; None where a point was not measured.
    causes
        Misses by cause.
    """

    candidate: str
    facts: tuple[str, ...]
    lengths: tuple[int, ...]
    grid: tuple[tuple[str, tuple[RecallCellView | None, ...]], ...]
    causes: tuple[tuple[str, int], ...]


def recall_view(candidate: str, recall: RecallResult) -> RecallView:
    """Return the heat map of the k and density that the top-level figures are of."""
    cells = {
        (cell.depth, cell.length): cell
        for cell in recall.cells
        if (cell.k, cell.distractors) in _shown(recall)
    }
    depths = sorted({depth for depth, _ in cells})
    lengths = sorted({length for _, length in cells})
    grid = [
        (f"{depth:.0%}", tuple(_cell(cells.get((depth, length))) for length in lengths))
        for depth in depths
    ]
    return RecallView(
        candidate, _facts(recall), tuple(lengths), tuple(grid), tuple(recall.causes.items())
    )


def _shown(recall: RecallResult) -> set[tuple[int, int]]:
    """Return the (k, distractors) of the cells to show: the default one, or the first there is."""
    pairs = [(cell.k, cell.distractors) for cell in recall.cells]
    for pair in pairs:
        if pair == (recall.k, recall.distractors):
            return {pair}
    return set(pairs[:1])


def _cell(cell: RecallCell | None) -> RecallCellView | None:
    if cell is None:
        return None
    label = f"{cell.hits} of {cell.rows} hit, reference {cell.reference_hits}"
    if cell.ci95 is not None:
        label += f", 95 % interval {cell.ci95[0]:.3f} to {cell.ci95[1]:.3f}"
    label += f", lost {cell.lost}, gained {cell.gained}"
    if not cell.exercised:
        return RecallCellView("free", f"{cell.hits}/{cell.rows}", f"{label}; nothing had to go")
    share = cell.hits / cell.rows if cell.rows else 0.0
    return RecallCellView(f"h{int(share * 4)}", f"{cell.hits}/{cell.rows}", label)


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

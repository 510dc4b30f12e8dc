"""Heat maps and curves of recall as SVG, for reports.

:func:`heat_map` and :func:`curve` return one ``<svg>`` element each, without scripts, links or
outside fonts, so that a page can hold them as they are, whatever the colour of its text;
:func:`recall_svg` stacks all of a result. Numbers stand in the picture: colour repeats them.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from needlepoint.verify.schema.recall import RecallCell, RecallMargin, RecallResult
from needlepoint.verify.schema.result import Result

_CELL_WIDTH, _CELL_HEIGHT, _LEFT, _TOP = 96, 34, 96, 52
_LIGHT = 0.42
"""Rate whose colour black and white text stand out from alike."""
_FONT = 'font-family="sans-serif" font-size="12"'


def heat_map(cells: Sequence[RecallCell], title: str) -> str:
    """Return depth by length as one SVG element: rate, hits of needles and interval in each cell.

    Parameters
    ----------
    cells
        Cells of one k and density. Cells that were not exercised are hatched grey.
    title
        Stands above, and is what a screen reader says.
    """
    lengths = sorted({cell.length for cell in cells})
    depths = sorted({cell.depth for cell in cells})
    parts = []
    for column, length in enumerate(lengths):
        x = _LEFT + (column + 0.5) * _CELL_WIDTH
        parts.append(_text(x, _TOP - 8, f"{length:,}", "middle"))
    for row, depth in enumerate(depths):
        y = _TOP + row * _CELL_HEIGHT
        parts.append(_text(_LEFT - 8, y + 21, f"{100 * depth:.3g} %", "end"))
        for column, length in enumerate(lengths):
            here = [c for c in cells if (c.length, c.depth) == (length, depth)]
            # Beside the boundary a cell has both kinds; what was exercised is what counts.
            here = [c for c in here if c.exercised] or here
            if here:
                parts.append(_cell(here[0], _LEFT + column * _CELL_WIDTH, y))
    width = _LEFT + len(lengths) * _CELL_WIDTH + 12
    return _svg(width, _TOP + len(depths) * _CELL_HEIGHT + 12, title, parts)


def curve(margins: Sequence[RecallMargin], title: str) -> str:
    """Return the hit rate by score margin as one SVG element, with its intervals."""
    shown = [m for m in margins if m.rows]
    width, height, left, top = 420, 220, 48, 36
    parts = [
        f'<rect x="{left}" y="{top}" width="{width - 60}" height="150" fill="none" stroke="#999"/>'
    ]
    if not shown:
        parts.append(_text(width / 2, 110, "nothing measured", "middle"))
        return _svg(width, height, title, parts)
    low, high = shown[0].margin, max(shown[-1].margin, shown[0].margin + 1e-9)

    def place(margin: float, rate: float) -> tuple[float, float]:
        return left + 10 + (margin - low) / (high - low) * (width - 80), top + 150 * (1 - rate)

    points = [place(m.margin, m.hits / m.rows) for m in shown]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    parts.append(f'<polyline points="{line}" fill="none" stroke="#0b6e99" stroke-width="2"/>')
    for m, (x, y) in zip(shown, points, strict=True):
        if m.ci95 is not None:
            ends = [place(m.margin, end)[1] for end in m.ci95]
            parts.append(
                f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{ends[0]:.1f}" y2="{ends[1]:.1f}"'
                ' stroke="#0b6e99"/>'
            )
        parts.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="#0b6e99">'
            f"<title>{m.hits} of {m.rows} at {m.margin:+g}</title></circle>"
        )
        parts.append(_text(x, top + 166, f"{m.margin:+g}", "middle"))
    for rate in (0.0, 0.5, 1.0):
        parts.append(_text(left - 6, place(low, rate)[1] + 4, f"{rate:g}", "end"))
    parts.append(_text(width / 2, height - 4, "score margin, in score noises", "middle"))
    return _svg(width, height, title, parts)


def recall_pictures(recall: RecallResult, name: str) -> list[str]:
    """Return every heat map and the margin curve of one candidate, one SVG element each."""
    families = dict.fromkeys((c.distractors, c.k) for c in recall.cells)
    found = [
        heat_map(
            [c for c in recall.cells if (c.distractors, c.k) == (distractors, k)],
            f"{name}: needles picked, k = {k}, {distractors} near-duplicates",
        )
        for distractors, k in families
    ]
    if any(m.rows for m in recall.margins):
        found.append(curve(recall.margins, f"{name}: hit rate by score margin"))
    return found


def recall_svg(result: Result) -> str:
    """Return all pictures of a result as one SVG document, one under the other."""
    pictures = [
        picture
        for candidate in result.candidates
        if candidate.recall is not None
        for picture in recall_pictures(candidate.recall, candidate.name)
    ]
    parts, height, width = [], 0.0, 1.0
    for picture in pictures:
        parts.append(f'<g transform="translate(0 {height:g})">{picture}</g>')
        height += float(_attribute(picture, "height")) + 16
        width = max(width, float(_attribute(picture, "width")))
    return _svg(width, max(height, 1.0), "Recall", parts, framed=False) + "\n"


def _cell(cell: RecallCell, x: float, y: float) -> str:
    rate = cell.hits / cell.rows if cell.rows else 0.0
    fill = _colour(rate) if cell.exercised else "#d8d8d8"
    reference = f", reference {cell.reference_hits}" if cell.reference_hits != cell.hits else ""
    note = "" if cell.exercised else ", not exercised"
    interval = "" if cell.ci95 is None else f", 95 % [{cell.ci95[0]:.3f}, {cell.ci95[1]:.3f}]"
    middle = x + _CELL_WIDTH / 2
    ink = "#000" if rate > _LIGHT or not cell.exercised else "#fff"
    return (
        f'<g><rect x="{x}" y="{y}" width="{_CELL_WIDTH - 2}" height="{_CELL_HEIGHT - 2}"'
        f' fill="{fill}"/><title>{cell.hits} of {cell.rows}{reference}{interval}{note}</title>'
        + _text(middle, y + 14, f"{rate:.2f}" if cell.exercised else "not exercised", "middle", ink)
        + _text(middle, y + 27, f"{cell.hits}/{cell.rows}", "middle", ink)
        + "</g>"
    )


def _colour(rate: float) -> str:
    """Return a colour from dark (0) to light (1) that prints in grey and suits every eye."""
    low, high = (59, 15, 112), (253, 231, 160)
    return "#" + "".join(f"{round(a + (b - a) * rate):02x}" for a, b in zip(low, high, strict=True))


def _text(x: float, y: float, text: str, anchor: str, fill: str = "currentColor") -> str:
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" fill="{fill}">{escape(text)}</text>'


def _svg(
    width: float, height: float, title: str, parts: Sequence[str], *, framed: bool = True
) -> str:
    head = _text(8, 18, title, "start") if framed else ""
    width = max(width, 8 + 7.0 * len(title)) if framed else width
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{height:g}" '
        f'viewBox="0 0 {width:g} {height:g}" role="img" {_FONT}>'
        f"<title>{escape(title)}</title>{head}{''.join(parts)}</svg>"
    )


def _attribute(picture: str, name: str) -> str:
    return picture.split(f'{name}="', 1)[1].split('"', 1)[0]

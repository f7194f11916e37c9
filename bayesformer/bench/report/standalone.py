"""Charts as one SVG file of their own, for documents: panels side by side over a key."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from bayesformer.bench.report.colours import colour_sheet
from bayesformer.bench.report.markup import Child, Html, tag
from bayesformer.bench.report.plot import Plot, marker
from bayesformer.bench.report.style import MARKS
from bayesformer.core.storage import write_atomically

GAP, TITLE, LINE = 18.0, 22.0, 16.0
FONT = "svg{font-family:system-ui,-apple-system,'Segoe UI',Roboto,Arial,sans-serif;font-size:11px;fill:var(--muted)}"


class Key(NamedTuple):
    """One line of a key: the meaning of a colour and a marker."""

    label: str
    style: str  # CSS class that sets --c
    shape: int | None  # marker, or None for a dashed guide


def write_svg(path: Path, width: float, height: float, content: Child) -> Path:
    """Write a standalone SVG file, `width` by `height` pixels, with the report's background, colours and fonts.

    Returns `path`.
    """
    drawn = tag(
        "svg",
        tag("style", Html(colour_sheet() + MARKS + FONT)),
        tag("rect", width=width, height=height, style="fill:var(--bg)"),
        content,
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {width:g} {height:g}",
        width=f"{width:g}",
        height=f"{height:g}",
    )
    write_atomically(path, (drawn + "\n").encode())
    return path


def write_figure(
    path: Path, panels: Sequence[tuple[str, Plot]], key: Sequence[Key], columns: int | None = None
) -> Path:
    """Write the panels, each under its title, `columns` to a row (all in one), over their key."""
    columns = columns or len(panels)
    rows = [panels[i : i + columns] for i in range(0, len(panels), columns)]
    width = max(sum(plot.width + GAP for _, plot in row) + GAP for row in rows)
    parts, top = [], 0.0
    for row in rows:
        left = GAP
        for title, plot in row:
            parts.append(tag("text", title, x=left, y=top + TITLE - 6, style="font-weight:600;fill:var(--ink)"))
            inner = plot.render(title)
            place = f'<svg x="{left:g}" y="{top + TITLE:g}" width="{plot.width:g}" height="{plot.height:g}" '
            parts.append(Html(inner.replace("<svg ", place, 1)))
            left += plot.width + GAP
        top += TITLE + max(plot.height for _, plot in row)
    legend, lines = _legend(key, width, top + LINE)
    full = top + LINE * (lines + 1)
    return write_svg(path, width, full, [parts, legend])


def _legend(key: Sequence[Key], width: float, top: float) -> tuple[list[Html], int]:
    """Entries in reading order, broken where a row is full; and how many rows there are."""
    drawn, x, y, rows = [], GAP, top, 1
    for entry in key:
        room = 26 + 6.2 * len(entry.label)
        if x + room > width - GAP and x > GAP:
            x, y, rows = GAP, y + LINE, rows + 1
        if entry.shape is None:
            mark = tag("path", class_="guide", d=f"M{x:g} {y - 4:g}h12")
        else:
            mark = tag("path", class_=f"fill {entry.style}", d=marker(x + 6, y - 4, 4, entry.shape))
        drawn += [mark, tag("text", entry.label, x=x + 17, y=y)]
        x += room
    return drawn, rows

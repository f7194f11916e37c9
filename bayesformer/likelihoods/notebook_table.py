"""How a predictive shows itself in a notebook: its first questions as a table, shaded where draws disagree."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

import torch
from torch import Tensor

ROWS = 10  # questions that are shown
CELL = "padding:.1em .8em .1em 0;text-align:right"


class NotebookTable:
    """Gives a predictive the method that notebooks ask for."""

    def notebook_columns(self) -> dict[str, Tensor]:
        """What to show of every question beside its uncertainties, (B, ...) each."""
        raise NotImplementedError

    def _repr_html_(self) -> str:
        whole: Any = self
        shape: torch.Size = whole.shape
        shown = torch.zeros(shape, dtype=torch.bool, device=whole.total.device)
        shown.view(-1)[:ROWS] = True
        few = whole.select(shown)
        columns = few.notebook_columns() | {n: getattr(few, n) for n in ("total", "aleatoric", "epistemic")}
        places = shown.nonzero().tolist()
        names = ("example", "position", *(f"axis {i}" for i in range(2, len(shape))))[: len(shape)]
        title = f"{type(self).__name__} of {shape.numel()} questions {tuple(shape)}"
        rest = f"<p>and {shape.numel() - len(places)} more</p>" if shape.numel() > len(places) else ""
        return f"<p>{escape(title)}</p>{table(names, places, columns)}{rest}"


def table(names: tuple[str, ...], places: list[list[int]], columns: Mapping[str, Tensor]) -> str:
    """An HTML table, a row per question; the column "epistemic" is shaded by its share of the total uncertainty."""
    head = "".join(f'<th style="{CELL}">{escape(name)}</th>' for name in (*names, *columns))
    rows = []
    for row, place in enumerate(places):
        cells = "".join(f'<td style="{CELL}">{number}</td>' for number in place)
        for name, column in columns.items():
            shade = _shade(columns, row) if name == "epistemic" else ""
            cells += f'<td style="{CELL}{shade}">{_number(column[row])}</td>'
        rows.append(f"<tr>{cells}</tr>")
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def _shade(columns: Mapping[str, Tensor], row: int) -> str:
    whole, own = float(columns["total"][row]), float(columns["epistemic"][row])
    share = own / whole if whole > 0 else 0.0
    return f";background:rgba(251,143,68,{min(1.0, max(0.0, share)):.3f})"


def _number(value: Tensor) -> str:
    """A number as text; a dash where there is none, beyond the length of a sequence."""
    if not value.is_floating_point():
        return str(int(value)) if int(value) >= 0 else "–"
    return "–" if bool(value.isnan()) else f"{float(value):.4g}"

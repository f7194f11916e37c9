"""The figure of attention: what each head looks at, and how sure it is of that."""

from __future__ import annotations

import math
from typing import Any

from bayesformer.bench.report.data import Report, TaskResults, floats
from bayesformer.bench.report.examples import png
from bayesformer.bench.report.markup import Html, tag
from bayesformer.bench.report.parts import figure, panel, small
from bayesformer.bench.report.wording import fixed


def attention(report: Report, task: TaskResults) -> Html | None:
    """The figure of attention maps of one test input: mean and standard deviation per layer and head."""
    panels = []
    for entry, run in task.pictured("attention").items():
        rows = [_row(seen) for seen in run["figures"]["attention"]]
        panels.append(panel(report, entry, [row for row in rows if row is not None]))
    caption = (
        "Attention of one test input: a row is a position that looks, a column one that is looked at. Left the mean "
        "weight over draws, right its standard deviation, each from 0 (black) to its largest value (white). Where the "
        "right picture is bright, the network does not know what to attend to. "
    )
    return figure("Where does it look, and how sure is it?", [panels], caption + task.seed_note("attention"), "wide")


def _row(seen: dict[str, Any]) -> Html | None:
    pictures = []
    for key, words in (("mean", "mean"), ("sd", "standard deviation")):
        try:
            pixels = [floats(row) for row in seen[key]]
            source, largest = png(pixels, low=0.0), max(v for row in pixels for v in row if math.isfinite(v))
        except (KeyError, TypeError, ValueError):  # no picture is no reason to have no report
            return None
        alt = f"{words} of the attention weights of {seen.get('name')}, at most {fixed(largest, 2)}"
        about = small(f"{words}, ≤ {fixed(largest, 2)}")
        pictures.append(tag("li", tag("img", src=source, alt=alt, title=alt), about))
    return tag("div", tag("p", str(seen.get("name"))), tag("ul", pictures, class_="maps"), class_="thumbs")

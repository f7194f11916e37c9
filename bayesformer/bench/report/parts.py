"""Parts that the tables and figures of the page share."""

from __future__ import annotations

from collections.abc import Sequence

from bayesformer.bench.report.data import Report, TaskResults
from bayesformer.bench.report.markup import Child, Html, tag
from bayesformer.bench.report.plot import marker
from bayesformer.bench.report.wording import DASH, decimals, difference_decimals, fixed, interval
from bayesformer.bench.statistics import Difference, Entry, Summary, best, means
from bayesformer.evaluate.catalogue import Metric


def entry_name(report: Report, entry: Entry) -> Html:
    """The marker of an entry, in its colour, followed by its name."""
    swatch = tag(
        "svg",
        report.shared(tag("path", class_="fill", d=marker(5, 5, 4, report.shape(entry)))),
        class_=f"swatch {report.style(entry)}",
        aria_hidden="true",
    )
    variant = small(entry.variant, "variant") if entry.variant else None
    return tag("span", swatch, tag("span", entry.method, variant), class_="entry")


def small(text: str, class_: str | None = None) -> Html:
    """Text in small print, such as the spread behind a mean."""
    return tag("small", text, class_=class_)


def link(task: TaskResults) -> Html:
    """The task's name, leading to its section."""
    return tag("a", task.name, href=f"#task-{task.index}")


def details(title: str, content: Child, class_: str | None = None) -> Html:
    """A `<details>` element: its content opens when the title is clicked."""
    return tag("details", tag("summary", title), content, class_=class_)


# ── Tables ───────────────────────────────────────────────────────────────────────────────────────────────


def table(caption: Child, head: Sequence[Child], rows: Sequence[Html], class_: str) -> Html:
    """A table that scrolls inside its own frame, its first column staying in view."""
    heads = tag("thead", tag("tr", [tag("th", h, scope="col") for h in head]))
    content = tag("table", tag("caption", caption), heads, tag("tbody", rows), class_=class_)
    return tag("div", content, class_="scroll", tabindex="0", role="region", aria_label=f"Table: {class_}")


def row(head: Child, cells: Child, class_: str | None = None) -> Html:
    """A table row with a head cell and the cells behind it."""
    return tag("tr", tag("th", head, scope="row"), cells, class_=class_)


def cell(content: Child) -> Html:
    """A table cell of numbers, which does not wrap."""
    return tag("td", content)


def heading(metric: Metric, explained: bool = False) -> Html:
    """A metric's label with an arrow to where it is better; its meaning on hovering, unless it stands beside."""
    arrow = {"higher": "↑", "lower": "↓", "none": ""}[metric.better]
    words = f"{metric.better} is better"
    sign = [" ", tag("span", arrow, role="img", aria_label=words, title=words, class_="arrow")] if arrow else None
    return tag("span", metric.label, sign, title=None if explained else metric.help or None)


def plus_minus(summary: Summary | None, digits: int, bold: bool = False) -> list[Child]:
    """mean ± sd; one seed shows no spread."""
    if summary is None:
        return [DASH]
    mean = fixed(summary.mean, digits)
    spread = small(f" ± {fixed(summary.sd, digits)}") if summary.sd is not None else None
    return [tag("strong", mean) if bold else mean, spread]


def scores(task: TaskResults, metric: Metric) -> dict[Entry, Html]:
    """The cells of one metric, the best mean in bold."""
    summaries = task.summaries(metric.name)
    digits, winners = decimals(summaries.values()), best(means(summaries), metric.better)
    return {e: cell(plus_minus(s, digits, e in winners)) for e, s in summaries.items()}


def difference_text(difference: Difference, digits: int) -> list[Child]:
    """A mean difference to the MLE with its 95 % interval."""
    digits = difference_decimals(difference, digits)
    return [fixed(difference.mean, digits, True), " ", small(interval(difference, digits), "nowrap")]


# ── Figures ──────────────────────────────────────────────────────────────────────────────────────────────


def figure(
    title: str, rows: Sequence[Sequence[Html]], caption: str, class_: str, key: Sequence[Html | None] = ()
) -> Html | None:
    """Rows of panels under a question, a key and a caption; None without a panel."""
    if not any(rows):
        return None
    return tag(
        "figure",
        tag("h3", title),
        tag("ul", key, class_="key m") if key else None,
        [tag("div", panels, class_=f"panels {class_}") for panels in rows],
        tag("figcaption", caption),
    )


def panel(report: Report, entry: Entry, content: Child, aside: str = "") -> Html:
    """One entry's part of a figure, in its colour."""
    name = tag("p", entry_name(report, entry), small(aside) if aside else None, class_="panel-name")
    return tag("div", name, content, class_=f"panel {report.style(entry)}")

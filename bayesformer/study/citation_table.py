"""Table 1 of Fan et al. (2020), Bayesian Attention Modules: stochastic attention on citation graphs.

Reads stored results of experiments/graphs.toml and runs nothing. The table is the paper's, of mean attention, with
what the paper lacks beside it: log-likelihood and calibration, and PAvPU, which needs draws. Then the paper's claims,
one by one: each is a difference of two rows, over the seeds both have.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence

from bayesformer.bench.statistics import Result, Summary, finite, summarise

GRAPHS = ("cora", "citeseer", "pubmed")
PAPER = {
    "GAT": (83.00, 72.50, 77.26),
    "no KL": (83.39, 72.91, 78.50),
    "LF": (83.24, 72.86, 78.30),
    "LC": (83.34, 73.04, 78.76),
    "WF": (83.48, 73.18, 78.50),
    "WC": (83.81, 73.52, 78.82),
}
"""mean test accuracy, %"""
SUM = "WC, sum of the KL"
ROWS = (*PAPER, SUM)
CLAIMS = [*((row, "GAT") for row in PAPER if row != "GAT"), ("LC", "LF"), ("WC", "WF"), ("WF", "LF"), ("WC", "LC")]
SCORES = {"accuracy": 100.0, "log_likelihood": 1.0, "ece": 1.0, "pavpu": 1.0}
"""metrics, and what they are multiplied by"""

Cells = Mapping[tuple[str, str], Mapping[int, Result]]
"""By row and graph, results by seed."""


def row_of(result: Result) -> str:
    """The row of the paper's table that a result belongs to, such as "WC"."""
    if result["method"] in {"map", "mle"}:
        return "GAT"
    settings = result["settings"]["method"]
    if settings["temperature"] == 0:
        return "no KL"
    name = f"{settings['family'][0].upper()}{settings['prior'][0].upper()}"
    return name if settings["temperature"] < 1 else SUM


def cells_of(results: Sequence[Result], drawn: bool) -> Cells:
    """Results of mean attention, or of draws; GAT has the former only, and stands in both."""
    found: dict[tuple[str, str], dict[int, Result]] = defaultdict(dict)
    for result in results:
        if not str(result["task"]).startswith("graph/") or result["method"] not in {"map", "mle", "attention"}:
            continue
        row, graph = row_of(result), str(result["task"]).removeprefix("graph/")
        if row == "GAT" or (result["settings"]["method"]["draws"] > 0) == drawn:
            found[row, graph][int(result["seed"])] = result
    if not found:
        raise ValueError("results must hold graph attention, as experiments/graphs.toml makes it; got none.")
    return found


def table(results: Sequence[Result]) -> str:
    """All of it in Markdown: accuracies beside the paper's, other scores, claims."""
    mean, drawn = cells_of(results, drawn=False), cells_of(results, drawn=True)
    parts = [accuracies(mean)]
    parts += [scores(cells, title) for cells, title in ((mean, "mean attention"), (drawn, "20 draws"))]
    return "\n\n".join([*parts, claims(mean)])


def accuracies(cells: Cells) -> str:
    """A table in Markdown: mean test accuracy ± standard error beside the paper's."""
    columns = [f"{graph} | paper" for graph in GRAPHS]
    lines = [f"| accuracy, % | {' | '.join(columns)} |", "|---|" + "---|" * 2 * len(GRAPHS)]
    for row in ROWS:
        paper = [f"{value:.2f}" for value in PAPER[row]] if row in PAPER else ["–"] * len(GRAPHS)
        pairs = [f"{_text(cells, row, g, 'accuracy')} | {p}" for g, p in zip(GRAPHS, paper, strict=True)]
        lines.append(f"| {row} | {' | '.join(pairs)} |")
    return "\n".join(lines)


def scores(cells: Cells, title: str) -> str:
    """A table in Markdown: mean ± standard error of every score on every graph."""
    columns = [f"{graph} {name}" for graph in GRAPHS for name in ("acc. %", "log-lik.", "ECE", "PAvPU")]
    lines = [f"| {title} | {' | '.join(columns)} |", "|---|" + "---|" * len(columns)]
    for row in ROWS:
        entries = [_text(cells, row, graph, metric) for graph in GRAPHS for metric in SCORES]
        lines.append(f"| {row} | {' | '.join(entries)} |")
    return "\n".join(lines)


def claims(cells: Cells) -> str:
    """Differences of accuracy, in points, ± standard error over common seeds, and what they say of the paper's."""
    lines = [f"| difference, points | {' | '.join(GRAPHS)} |", "|---|" + "---|" * len(GRAPHS)]
    for one, other in CLAIMS:
        found = [_claim(cells, one, other, graph) for graph in GRAPHS]
        lines.append(f"| {one} - {other} | {' | '.join(found)} |")
    return "\n".join(lines)


def _claim(cells: Cells, one: str, other: str, graph: str) -> str:
    place = GRAPHS.index(graph)
    paper = PAPER[one][place] - PAPER[other][place]
    difference = summarise(_differences(cells.get((one, graph), {}), cells.get((other, graph), {})))
    if difference is None or difference.sd is None:
        return f"– (paper {paper:+.2f})"
    error = difference.sd / math.sqrt(difference.n)
    return f"{difference.mean:+.2f} ± {error:.2f} (paper {paper:+.2f}): {verdict(difference.mean, error, paper)}"


def verdict(mean: float, error: float, paper: float) -> str:
    """Whether a claim of the paper's sign is seen: beyond two standard errors, or not."""
    if abs(mean) <= 2 * error:
        return "not seen"
    return "holds" if mean * paper > 0 else "reversed"


def _differences(one: Mapping[int, Result], other: Mapping[int, Result]) -> list[float]:
    values = [
        (finite(one[s]["metrics"]["accuracy"]), finite(other[s]["metrics"]["accuracy"])) for s in one if s in other
    ]
    return [100 * (a - b) for a, b in values if a is not None and b is not None]


def _text(cells: Cells, row: str, graph: str, metric: str) -> str:
    found = cells.get((row, graph), {}).values()
    values = [finite(r["metrics"].get(metric)) for r in found]
    summary = summarise(SCORES[metric] * v for v in values if v is not None)
    return "–" if summary is None else _mean(summary, 2 if metric == "accuracy" else 3)


def _mean(summary: Summary, digits: int) -> str:
    mean, sd, n = summary
    error = "" if sd is None else f" ± {sd / math.sqrt(n):.{digits}f}"
    return f"{mean:.{digits}f}{error}" + ("" if n >= 10 else f" ({n})")

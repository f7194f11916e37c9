"""Figures of the study, drawn from stored results: series with their bands, and digits that puzzle a method."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bayesformer.bench.report.axis import Scale
from bayesformer.bench.report.examples import png
from bayesformer.bench.report.markup import Html, tag
from bayesformer.bench.report.plot import Plot
from bayesformer.bench.report.standalone import Key, write_figure, write_svg
from bayesformer.bench.statistics import Result
from bayesformer.core.errors import unknown_name
from bayesformer.study.reproduction.study_tables import StoredStudy

SIDE, GAP, LINE, SHOWN = 64.0, 12.0, 16.0, 8


@dataclass(frozen=True)
class StudyFigure:
    """A figure of the thesis: what it shows, of which group or column, on which task."""

    caption: str
    task: str
    part: str  # of a result's data for figures
    group: str
    names: tuple[str, ...] = ()  # columns of the group; none means all
    draw: str = "bands"


FIGURES = {
    "3.1": StudyFigure("A test series of M3, inference over all weights", "toy/m3", "bands", "full network"),
    "3.2": StudyFigure(
        "Digits that concrete dropout is least and most sure of",
        "mnist", "examples", "full network", ("Concrete Dropout",), "digits",
    ),
    "3.11": StudyFigure("A test series of M3, stochastic attention", "toy/m3", "bands", "variational attention"),
    "3.12": StudyFigure(
        "Digits that Dirichlet attention with a spread from the data is least and most sure of",
        "mnist", "examples", "variational attention", ("Dirichlet DD Attention",), "digits",
    ),
    "3.13": StudyFigure(
        "Digits that Dirichlet attention is least and most sure of",
        "mnist", "examples", "variational attention", ("Dirichlet Attention",), "digits",
    ),
}  # fmt: skip
SENTENCES = {
    "3.3 and 3.4": ("full network", "Laplace"),
    "3.13 and 3.14": ("variational attention", "Dirichlet Attention"),
}
"""Tables of sentences of highest and lowest entropy, by the column they are of."""


def runs_of(stored: StoredStudy, figure: StudyFigure) -> dict[str, Any]:
    """By column the data of a figure, of the first seed; columns that have not been run are left out."""
    columns = [c for c in stored.description.on(figure.task) if c.group == figure.group]
    found = {}
    for column in columns:
        if figure.names and column.name not in figure.names:
            continue
        result: Result | None = stored.of(column, figure.task).get(0)
        if result is not None and (result.get("figures") or {}).get(figure.part):
            found[column.name] = result["figures"][figure.part]
    return found


def draw_figure(stored: StoredStudy, number: str, path: Path) -> Path:
    """Draw a figure of the thesis from stored results; an error names what is to be run where there are none."""
    if number not in FIGURES:
        raise unknown_name("figure", number, FIGURES)
    figure = FIGURES[number]
    found = runs_of(stored, figure)
    if not found:
        wanted = figure.names[0] if figure.names else figure.group
        raise ValueError(
            f"figure {number} must be drawn from results of {wanted} on {figure.task}, which do not exist yet: call "
            f"`bayesformer study reproduce --only '{figure.task}*{wanted}'`."
        )
    makers: dict[str, Callable[[Mapping[str, Any], Path], Path]] = {"bands": draw_bands, "digits": draw_digits}
    return makers[figure.draw](found, path)


def draw_bands(found: Mapping[str, Any], path: Path) -> Path:
    """One panel per column: observed values, predicted mean and 90 % band, and those of the oracle."""
    panels = []
    for name, series in found.items():
        one = series[0]
        shown = [*one["observed"], *one["oracle_low"], *one["oracle_high"]]
        y = Scale.over([*shown, *(min(max(v, 2 * min(shown)), 2 * max(shown)) for v in (*one["low"], *one["high"]))])
        plot = Plot(Scale.over(one["time"], pad=0.02), y, 250, 170, "step", clip=True)
        plot.band(one["time"], one["low"], one["high"], "soft m0")
        plot.line(one["time"], one["mean"], "stroke m0")
        plot.line(one["time"], one["oracle_low"], "ink dot")
        plot.line(one["time"], one["oracle_high"], "ink dot")
        plot.points(one["time"], one["observed"], "inkfill", radius=2)
        panels.append((name, plot))
    key = [Key("predicted mean and 90 % band; dotted: the oracle's band; dots: observed", "m0", 0)]
    return write_figure(path, panels, key, 4)


def draw_digits(found: Mapping[str, Any], path: Path) -> Path:
    """Two rows of images per column, those of highest and of lowest entropy, with class and entropy under each."""
    parts: list[Html] = []
    step = SIDE + GAP
    for i, (name, data) in enumerate(found.items()):
        top = GAP + i * 2 * (step + 2 * LINE)
        for j, (words, kind) in enumerate((("least sure", "highest"), ("most sure", "lowest"))):
            row = top + j * (step + 2 * LINE)
            parts.append(tag("text", f"{name}, {words}", x=GAP, y=row + LINE - 4, style="font-weight:600"))
            for k, example in enumerate(data[kind][:SHOWN]):
                place = {"x": GAP + k * step, "y": row + LINE, "width": SIDE, "height": SIDE}
                parts.append(tag("image", href=png(example["image"]), style="image-rendering:pixelated", **place))
                wrong = "" if example["label"] == example["predicted"] else f" ({example['label']})"
                told = f"{example['predicted']}{wrong}, {example['entropy']:.2f}"
                parts.append(tag("text", told, x=place["x"], y=row + LINE + SIDE + LINE - 4))
    return write_svg(path, GAP + SHOWN * step, GAP + len(found) * 2 * (step + 2 * LINE), parts)


def sentence_lines(stored: StoredStudy, group: str, name: str) -> list[str]:
    """Markdown: sentences of highest and lowest mean entropy; wrong tags stand behind their words."""
    result = stored.of(stored.column(group, name), "pos").get(0)
    shown = ((result or {}).get("figures") or {}).get("sentences")
    if not shown:
        return ["Not run yet."]
    lines = ["| | mean entropy, nats | sentence |", "|---|---|---|"]
    for kind in ("highest", "lowest"):
        for sentence in shown[kind][:4]:
            mean = sum(sentence["entropy"]) / max(len(sentence["entropy"]), 1)
            lines.append(f"| {kind} | {mean:.2f} | {_tagged(sentence)} |")
    return lines


def _tagged(sentence: Mapping[str, Sequence[str]]) -> str:
    words = zip(sentence["words"], sentence["tags"], sentence["predicted"], strict=True)
    said = [w if tag_ == guess else f"{w} [{guess}, not {tag_}]" for w, tag_, guess in words]
    return " ".join(said).replace("<", "").replace(">", "")

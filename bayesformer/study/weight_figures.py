"""Figures of the weight study, as SVG: marginals, quantiles, tails, correlations, predictions under priors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from bayesformer.bench.report.axis import Scale
from bayesformer.bench.report.examples import png
from bayesformer.bench.report.markup import Html, tag
from bayesformer.bench.report.plot import Plot
from bayesformer.bench.report.standalone import Key, write_figure, write_svg
from bayesformer.core.storage import write_atomically
from bayesformer.study.weight_laws import NORMAL_FROM, law_of
from bayesformer.study.weight_shapes import off_diagonal_histogram
from bayesformer.study.weight_study import WeightStudy, table

COLUMNS, WIDTH, HEIGHT = 4, 250, 175
PIXELS, GAP, TITLE, LINE = 150.0, 18.0, 22.0, 16.0


def draw_all(study: WeightStudy, folder: Path) -> list[Path]:
    """Every figure of a study, in files named after its task."""
    makers: dict[str, Callable[[WeightStudy, Path], Path]] = {
        "marginals": marginals,
        "quantiles": quantiles,
        "tails": tails,
        "correlations": correlations,
        "off_diagonal": off_diagonals,
        "prior_predictive": predictions,
    }
    stem = study.task.replace("/", "-")
    return [make(study, folder / f"{stem}-{name}.svg") for name, make in makers.items()]


CAPTIONS = {
    "marginals": "Weights of each layer, the kernel density of them, and the law that fits best by likelihood.",
    "quantiles": "Quantiles against those of a normal law with the same quartiles: straight is normal, steep ends are "
    "heavy tails.",
    "tails": "Degrees of freedom of Student's t; above the dashed line nothing tells it from a normal law.",
    "correlations": "Correlations of weights over networks, beside independent normal weights of as many networks.",
    "off_diagonal": "The same as histograms.",
    "prior_predictive": "Entropy of the predictions of networks drawn from each prior: sure networks that disagree "
    "have little each and much in the average.",
}


def write_page(studies: Sequence[WeightStudy], folder: Path) -> Path:
    """Draw stored studies, and write a page that shows tables and figures of all of them."""
    lines = [
        "# Weights of trained networks",
        "",
        "Made of the files in `results/weights` by `bayesformer study weights all --stored --figures docs/weights`; "
        "the numbers of networks are in every caption. Weights of a layer are exchangeable, so "
        "correlations of single weights say little of the posterior: they are shown to compare with the thesis.",
    ]
    for study in studies:
        lines += ["", f"## {study.task}, {study.count}", "", table(study), ""]
        for name, path in zip(CAPTIONS, draw_all(study, folder), strict=True):
            lines += [
                f"![{name} of {study.task}]({path.name})",
                "",
                f"{study.task}, {study.count}. {CAPTIONS[name]}",
                "",
            ]
    write_atomically(folder / "README.md", ("\n".join(lines).rstrip() + "\n").encode())
    return folder / "README.md"


def matrices(study: WeightStudy) -> list[str]:
    """The layers that figures show: all but biases and normalisation, which are small."""
    return [name for name in study.fits if name.endswith(("weight", "table")) and "norm" not in name]


def marginals(study: WeightStudy, path: Path) -> Path:
    """Per layer the histogram of its weights, the kernel density and the law that fits best."""
    panels = []
    for name in matrices(study):
        shape, fit = study.shapes[name], study.fits[name]
        law = law_of(fit.by_likelihood, fit.fits[fit.by_likelihood])
        fitted = law.log_prob(torch.tensor(shape.grid, dtype=torch.float64)).exp().tolist()
        x = Scale.over(shape.edges, pad=0.0, count=3)
        y = Scale.over([0.0, *shape.heights, *shape.density], pad=0.04, count=3)
        plot = Plot(x, y, WIDTH, HEIGHT, f"{len(shape.modes)} mode{'s' if len(shape.modes) > 1 else ''}", clip=True)
        plot.histogram(shape.edges, shape.heights, "soft m", closed=True)
        plot.line(shape.grid, shape.density, "stroke m0")
        plot.line(shape.grid, fitted, "stroke m1")
        panels.append((name.removeprefix("encoder."), plot))
    key = [
        Key(f"weights of {study.count} on {study.task}", "m", 1),
        Key("kernel density", "m0", 0),
        Key("best law by likelihood", "m1", 0),
    ]
    return write_figure(path, panels, key, COLUMNS)


def quantiles(study: WeightStudy, path: Path) -> Path:
    """Per layer the quantiles of its weights against those of a normal law with the same quartiles."""
    panels = []
    for name in matrices(study):
        shape = study.shapes[name]
        x = Scale.over(shape.normal_quantiles, count=3)
        y = Scale.over([*shape.quantiles, *shape.normal_quantiles], count=3)
        plot = Plot(x, y, WIDTH, HEIGHT, "normal quantile", "weights", clip=True)
        plot.line([x.low, x.high], [x.low, x.high], "guide")
        plot.points(shape.normal_quantiles, shape.quantiles, "fill m0", radius=1.6)
        panels.append((name.removeprefix("encoder."), plot))
    key = [Key(f"weights of {study.count} on {study.task}", "m0", 0), Key("a normal law", "m", None)]
    return write_figure(path, panels, key, COLUMNS)


def tails(study: WeightStudy, path: Path) -> Path:
    """Degrees of freedom of Student's t by layer, with intervals over networks."""
    names = matrices(study)
    high = 2 * NORMAL_FROM
    ends = [min(max(v, 0.5), high) for n in names for v in (study.fits[n].df, *study.fits[n].df_interval)]
    x = Scale(0.0, len(names) + 1.0, ())
    y = Scale.over([*ends, 1.0, NORMAL_FROM], log=True)
    plot = Plot(x, y, max(420, 70 * len(names)), 260, "", "degrees of freedom", clip=True)
    plot.line([x.low, x.high], [NORMAL_FROM, NORMAL_FROM], "guide")
    for i, name in enumerate(names, 1):
        fit = study.fits[name]
        low, top = (min(max(v, 0.5), high) for v in fit.df_interval)
        plot.line([i, i], [low, top], "stroke m0")
        plot.point(i, min(fit.df, high), "fill m0", radius=4)
        px, py = plot.at(i, y.low)
        plot.text(px, py - 4, name.removeprefix("encoder.").removesuffix(".weight"), "middle")
    key = [
        Key(f"Student's t on weights of {study.count}, {study.task}; 90 % over networks", "m0", 0),
        Key("as good as normal", "m", None),
    ]
    return write_figure(path, [(f"Tails of the layers of {study.task}", plot)], key)


def correlations(study: WeightStudy, path: Path) -> Path:
    """Per layer correlations of weights over networks as a picture, and those of independent normal weights."""
    parts: list[Html] = []
    names = matrices(study)
    step = PIXELS + TITLE + LINE + GAP
    for i, name in enumerate(names):
        shape, top = study.shapes[name], GAP + i * step
        caption = f"{name.removeprefix('encoder.')}, {study.count}, {len(shape.correlations)} weights"
        parts.append(tag("text", caption, x=GAP, y=top + TITLE - 6, style="font-weight:600;fill:var(--ink)"))
        for j, (words, matrix) in enumerate((("trained", shape.correlations), ("independent normal", shape.null))):
            left = GAP + j * (PIXELS + 2 * GAP)
            pixels = [[abs(value) if a != b else 0.0 for b, value in enumerate(row)] for a, row in enumerate(matrix)]
            pixels[0][0] = 1.0  # the scale: black is 0, white is 1
            stretch = {"preserveAspectRatio": "none", "style": "image-rendering:pixelated"}
            place = {"x": left, "y": top + TITLE, "width": PIXELS, "height": PIXELS}
            parts.append(tag("image", href=png(pixels, low=0.0), **place, **stretch))
            parts.append(tag("text", f"{words}: |r|, 0 to 1", x=left, y=top + TITLE + PIXELS + LINE - 3))
    return write_svg(path, 2 * (PIXELS + 2 * GAP) + 6 * GAP, GAP + len(names) * step, parts)


def off_diagonals(study: WeightStudy, path: Path) -> Path:
    """Per layer the histogram of correlations between weights, and that of independent normal weights."""
    panels = []
    for name in matrices(study):
        shape = study.shapes[name]
        if len(shape.correlations) < 3:
            continue
        edges = [-1 + i / 20 for i in range(41)]
        ours, null = (off_diagonal_histogram(matrix, edges) for matrix in (shape.correlations, shape.null))
        y = Scale.over([0.0, *ours, *null], pad=0.04, count=3)
        ratio = shape.correlation / (sum(shape.null_interval) / 2)
        plot = Plot(Scale.over([-1, 1], pad=0, count=4), y, WIDTH, HEIGHT, f"r; {ratio:.2f} times as wide", clip=True)
        plot.histogram(edges, null, "soft m", closed=True)
        plot.histogram(edges, ours, "stroke m0", closed=False)
        panels.append((name.removeprefix("encoder."), plot))
    key = [
        Key(f"correlations over {study.count} on {study.task}", "m0", 0),
        Key("independent normal weights, as many networks", "m", 1),
    ]
    return write_figure(path, panels, key, COLUMNS)


def predictions(study: WeightStudy, path: Path) -> Path:
    """The entropy of predictions of networks drawn from every prior."""
    found = study.prior_predictive
    y = Scale.over([0.0, *(min(h, 8.0) for p in found.values() for h in p.heights)], pad=0.04)
    edges: Sequence[float] = next(iter(found.values())).edges
    plot = Plot(Scale.over(edges, pad=0.0), y, 560, 280, "entropy of a prediction, nats", "density", clip=True)
    key = []
    for i, (name, drawn) in enumerate(found.items()):
        plot.histogram(drawn.edges, drawn.heights, f"stroke m{i}", closed=False)
        key.append(Key(f"{name}: mean {drawn.each:.2f}, of the average {drawn.together:.2f}", f"m{i}", i))
    first = next(iter(found.values()))
    title = f"{study.task}: {first.draws} networks from every prior, {first.inputs} training inputs"
    return write_figure(path, [(title, plot)], key)

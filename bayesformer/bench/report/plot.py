"""A chart: two scales, marks collected in order, rendered to one `<svg>`.

Marks carry CSS classes and never colours, so one figure serves light and dark pages.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from bayesformer.bench.report.axis import Scale, tick_label
from bayesformer.bench.report.markup import Html, render, short, tag

TOLERANCE, LINE_GRID, AREA_GRID = 0.15, 0.5, 1.0
"""How exact lines and the edges of areas are, in units of a chart: a screen shows one unit as one or two pixels."""
LEADING_ZERO = re.compile(r"(?<![\d.])0\.")


@dataclass
class Plot:
    """One chart of `width` × `height` units; marks are drawn in the order they are added."""

    x: Scale
    y: Scale
    width: float
    height: float
    x_label: str = ""
    y_label: str = ""
    clip: bool = False  # cut marks at the frame
    share: Callable[[Html], Html] = render  # a page's `Shared`: axes and common marks are then written once
    marks: list[Html] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.left = 8 + 5.8 * max((len(tick_label(t)) for t in self.y.ticks), default=0)
        self.top = 17.0 if self.y_label else 7.0
        self.inner_width = self.width - self.left - 8
        self.inner_height = self.height - self.top - (30 if self.x_label else 17)

    def at(self, x: float, y: float) -> tuple[float, float]:
        """Position in the plot area, from its upper left corner; NaN for a value off the scale's domain."""
        return self.x(x) * self.inner_width, (1 - self.y(y)) * self.inner_height

    def line(self, xs: Sequence[float], ys: Sequence[float], class_: str = "stroke") -> None:
        """A line through the points, broken where a value is not finite."""
        d = "".join(_polyline(run, LINE_GRID) for run in _runs(self.at(x, y) for x, y in zip(xs, ys, strict=False)))
        self._path(d, class_)

    def band(self, xs: Sequence[float], lows: Sequence[float], highs: Sequence[float], class_: str = "soft") -> None:
        """The area between two curves, broken where either is missing."""
        pairs = [(self.at(x, a), self.at(x, b)) for x, a, b in zip(xs, lows, highs, strict=False)]
        runs = _runs((*low, *high) for low, high in pairs)
        edges = [[p[:2] for p in run] + [p[2:] for p in reversed(run)] for run in runs]
        self._path("".join(_polyline(edge, AREA_GRID) + "z" for edge in edges), class_)

    def histogram(self, edges: Sequence[float], heights: Sequence[float], class_: str, closed: bool) -> None:
        """A histogram's outline: closed down to zero to be filled, open to be drawn as a line."""
        steps = [(edge, h) for i, h in enumerate(heights) for edge in edges[i : i + 2]]
        if closed and steps:
            steps = [(steps[0][0], 0.0), *steps, (steps[-1][0], 0.0)]
        self.line([x for x, _ in steps], [y for _, y in steps], class_)

    def point(self, x: float, y: float, class_: str = "fill", *, radius: float = 3, shape: int = 0) -> None:
        """One marker, its area that of a disc of `radius`."""
        px, py = self.at(x, y)
        if math.isfinite(px) and math.isfinite(py):
            self._path(marker(px, py, radius, shape), class_)

    def points(
        self, xs: Sequence[float], ys: Sequence[float], class_: str = "fill", *, radius: float | Sequence[float] = 3
    ) -> None:
        """Discs as one path, with one radius or one for each; those without a finite place are left out."""
        if isinstance(radius, Sequence):
            places = [(*self.at(x, y), r) for x, y, r in zip(xs, ys, radius, strict=False)]
            self._path("".join(marker(*p) for p in places if all(map(math.isfinite, p))), class_)
            return
        dots = [self.at(x, y) for x, y in zip(xs, ys, strict=False)]  # lines of no length with round ends
        d = "".join(f"M{short(x)} {short(y)}h0" for x, y in dots if math.isfinite(x) and math.isfinite(y))
        if d:
            self.marks.append(tag("path", class_=f"dots {class_}", stroke_width=2 * radius, d=compact(d)))

    @contextmanager
    def common(self) -> Iterator[None]:
        """Marks that are added inside are the same in other charts of the page, and written once if it shares."""
        start = len(self.marks)
        yield
        self.marks[start:] = [self.share(render(self.marks[start:]))]

    def text(self, px: float, py: float, content: str, class_: str = "") -> None:
        """Text at a position of the plot area, in units of the chart."""
        self.marks.append(tag("text", content, x=px, y=py, class_=class_ or None))

    def _path(self, d: str, class_: str) -> None:
        if d:
            self.marks.append(tag("path", class_=class_, d=d))

    def render(self, title: str) -> Html:
        """The chart as an `<svg>` with `title` as its label for screen readers."""
        area = tag(
            "svg",
            self.marks,
            x=self.left,
            y=self.top,
            width=self.inner_width,
            height=self.inner_height,
            overflow="hidden" if self.clip else "visible",
        )
        return tag(
            "svg",
            self.share(render(self._axes())),
            area,
            class_="plot",
            role="img",
            aria_label=title,
            viewBox=f"0 0 {short(self.width)} {short(self.height)}",
        )

    def _axes(self) -> list[Html]:
        left, top, width, height = self.left, self.top, self.inner_width, self.inner_height
        across = [top + (1 - self.y(tick)) * height for tick in self.y.ticks]
        down = [left + self.x(tick) * width for tick in self.x.ticks]
        grid = "".join(f"M{short(left)} {short(y)}h{short(width)}" for y in across)
        grid += "".join(f"M{short(x)} {short(top)}v{short(height)}" for x in down)
        drawn = [tag("rect", class_="frame", x=left, y=top, width=width, height=height)]
        drawn += [tag("path", class_="grid", d=grid)] if grid else []
        for tick, y in zip(self.y.ticks, across, strict=True):
            drawn.append(tag("text", tick_label(tick), class_="end", x=left - 5, y=y + 3.5))
        for tick, x in zip(self.x.ticks, down, strict=True):
            # A label in the corner leans inwards, so that it does not leave the picture.
            lean = "end" if x > self.width - 14 else "middle"
            shift = 4 if lean == "end" else 0
            drawn.append(tag("text", tick_label(tick), class_=lean, x=x + shift, y=top + height + 13))
        drawn.append(tag("path", class_="axis", d=f"M{short(left)} {short(top + height)}h{short(width)}"))
        if self.x_label:
            drawn.append(tag("text", self.x_label, class_="end", x=left + width, y=self.height - 4))
        if self.y_label:
            drawn.append(tag("text", self.y_label, x=0, y=9))
        return drawn


def _runs(points: Iterable[tuple[float, ...]]) -> list[list[tuple[float, ...]]]:
    """Splits at points with a coordinate that is not a number."""
    runs: list[list[tuple[float, ...]]] = [[]]
    for point in points:
        if all(map(math.isfinite, point)):
            runs[-1].append(point)
        elif runs[-1]:
            runs.append([])
    return [run for run in runs if run]


def thinned(points: Sequence[tuple[float, ...]], tolerance: float = TOLERANCE) -> list[tuple[float, ...]]:
    """The corners of a polyline that can be seen: the line without the others is at most `tolerance` from them.

    Douglas & Peucker (1973): keep the corner furthest from the line between the ends if it is further away than that,
    and do the same on both sides of it.
    """
    kept, spans = {0, len(points) - 1}, [(0, len(points) - 1)]
    while spans:
        first, last = spans.pop()
        (x, y), (u, v) = points[first][:2], points[last][:2]
        length = math.hypot(u - x, v - y)
        furthest, corner = tolerance, None
        for i in range(first + 1, last):
            a, b = points[i][0] - x, points[i][1] - y
            away = abs(a * (v - y) - b * (u - x)) / length if length > tolerance else math.hypot(a, b)
            if away > furthest:
                furthest, corner = away, i
        if corner is not None:
            kept.add(corner)
            spans += [(first, corner), (corner, last)]
    return [points[i] for i in sorted(kept)]


def _polyline(points: Sequence[tuple[float, ...]], grid: float) -> str:
    """A polyline with corners at multiples of `grid`, as differences: half the size of absolute coordinates."""
    # Far outside the frame only the direction matters; the bound keeps the file small and the numbers sane.
    bounded = [tuple(min(max(c, -5000.0), 5000.0) for c in point) for point in points]
    corners = [tuple(round(c / grid) * grid for c in point) for point in thinned(bounded)]
    start, *rest = corners
    steps = " ".join(
        f"{short(x - a)} {short(y - b)}" for (a, b), (x, y) in zip(corners, rest, strict=False) if (x, y) != (a, b)
    )
    d = f"M{short(start[0])} {short(start[1])}" + (f"l{steps}" if steps else "h0")
    return compact(d)


def compact(d: str) -> str:
    """Path data without characters that it can do without: 0.5 as .5, and no space before a minus sign."""
    return LEADING_ZERO.sub(".", d).replace(" -", "-")


def marker(x: float, y: float, radius: float, shape: int = 0) -> str:
    """Path data of a marker: disc, square, diamond, triangle up, triangle down, of equal area."""
    r = radius
    match shape % 5:
        case 0:
            arc = f"a{short(r)} {short(r)} 0 1 0"
            return compact(f"M{short(x - r)} {short(y)}{arc} {short(2 * r)} 0{arc} {short(-2 * r)} 0")
        case 1:
            half = r * math.sqrt(math.pi) / 2
            corners = [(-half, -half), (half, -half), (half, half), (-half, half)]
        case 2:
            half = r * math.sqrt(math.pi / 2)
            corners = [(0, -half), (half, 0), (0, half), (-half, 0)]
        case other:
            # An equilateral triangle with the disc's area has this circumradius.
            big = r * math.sqrt(4 * math.pi / (3 * math.sqrt(3)))
            flip = 1 if other == 3 else -1
            corners = [(0, -big * flip), (big * 0.866, big * 0.5 * flip), (-big * 0.866, big * 0.5 * flip)]
    return "M" + "L".join(f"{short(x + dx)} {short(y + dy)}" for dx, dy in corners) + "z"

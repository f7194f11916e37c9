"""A small plotting helper: markup as text, coloured by the page's style sheet.

A `Plot` has two scales, collects marks and renders to one `<svg>`. Marks carry CSS classes and never
colours, so one figure serves light and dark pages. Text is escaped by construction: `tag` escapes every
child that is not already `Html`.
"""

from __future__ import annotations

import base64
import html
import math
import struct
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

ENDS = {"meta": ">", "img": ">", "path": "/>", "rect": "/>"}  # elements without content

THEME = {  # name: (light, dark)
    "bg": ("#fdfcfa", "#14171a"),
    "panel": ("#f5f4f0", "#1b1f23"),
    "ink": ("#1d2125", "#e9e7e2"),
    "muted": ("#5a6169", "#a3a9b0"),
    "faint": ("#a9aeb3", "#5d646b"),
    "line": ("#e2e1dc", "#2c3136"),
    "link": ("#0a58a8", "#84b8f2"),
    "good": ("#006b4f", "#4fcba3"),
    "bad": ("#a83a10", "#f0925f"),
    "m": ("#646b73", "#a7adb4"),  # the baseline
}
PALETTE = (  # (light, dark) of the series: seven stay apart with any colour vision, which a test measures
    ("#044d8d", "#3e89fb"),
    ("#d27214", "#d98140"),
    ("#469c60", "#61f09d"),
    ("#7663ec", "#9d7ec1"),
    ("#654c04", "#e4d932"),
    ("#a01148", "#e3636f"),
    ("#03789a", "#9ae1f5"),
)

MARKS = """
.plot{display:block;width:100%;height:auto;overflow:visible}
.plot text{font-size:10px;fill:var(--muted);font-variant-numeric:tabular-nums}
.plot .end{text-anchor:end}.plot .middle{text-anchor:middle}
.plot .grid{stroke:var(--line);stroke-width:.7}
.plot .axis{stroke:var(--faint);stroke-width:1}
.plot .frame{fill:var(--panel)}
.plot .halo{stroke:var(--bg);stroke-width:3;paint-order:stroke;stroke-linejoin:round;fill:var(--ink)}
.stroke,.thin,.guide,.ink{fill:none;stroke-linejoin:round;stroke-linecap:round}
.stroke{stroke:var(--c);stroke-width:1.8}
.thin{stroke:var(--c);stroke-width:1.2}
.guide{stroke:var(--muted);stroke-width:1;stroke-dasharray:3 3}
.ink{stroke:var(--ink);stroke-width:.9}
.dash{stroke-dasharray:5 3}.dot{stroke-dasharray:1.5 3}
.fill{fill:var(--c)}
.soft{fill:var(--c);opacity:.2}
.softer{fill:var(--c);opacity:.36}
.inkfill{fill:var(--ink)}
"""


def style() -> str:
    """The style sheet of all marks: colours as variables, dark where the reader or `data-theme` asks for it.

    The classes m, m0, m1, … set --c, the colour in which marks inside are drawn.
    """
    colours = THEME | {f"m{i}": pair for i, pair in enumerate(PALETTE)}
    light, dark = ("".join(f"--{name}:{pair[i]};" for name, pair in colours.items()) for i in (0, 1))
    slots = "".join(f".{name}{{--c:var(--{name})}}" for name in ("m", *list(colours)[len(THEME) :]))
    return (
        f":root{{color-scheme:light;{light}}}\n"
        f":root[data-theme=dark]{{color-scheme:dark;{dark}}}\n"
        f"@media (prefers-color-scheme:dark){{:root:not([data-theme=light]){{color-scheme:dark;{dark}}}}}\n"
        f"{slots}{MARKS}"
    )


class Html(str):
    """Markup that is already safe to put into a page."""

    __slots__ = ()


Child: TypeAlias = "Html | str | Iterable[Child] | None"


def render(child: Child) -> Html:
    """A child as safe markup: `Html` stays, other text is escaped, None vanishes, lists are joined."""
    if child is None:
        return Html("")
    if isinstance(child, Html):
        return child
    if isinstance(child, str):
        return Html(html.escape(child))
    return Html("".join(map(render, child)))


def tag(name: str, /, *children: Child, **attributes: str | float | bool | None) -> Html:
    """An element: `tag("td", "a < b", class_="x")`.

    A trailing `_` of an attribute is dropped and an inner one becomes `-`; None and False leave it out, True
    writes its bare name.
    """
    written = []
    for key, value in attributes.items():
        attribute = key.rstrip("_").replace("_", "-")
        if value is True:
            written.append(f" {attribute}")
        elif value is not None and value is not False:
            text = value if isinstance(value, str) else short(value)
            written.append(f' {attribute}="{html.escape(text)}"')
    opening = f"<{name}{''.join(written)}"
    return Html(opening + ENDS[name] if name in ENDS else f"{opening}>{render(children)}</{name}>")


def short(value: float) -> str:
    """A coordinate with at most one decimal: more is below a pixel."""
    text = f"{value:.1f}".removesuffix(".0")
    return "0" if text == "-0" else text


def nice_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """About `count` multiples of 1, 2 or 5 times a power of ten, inside [low, high]."""
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise ValueError(f"low and high must be finite with low < high; got {low}, {high}.")
    raw = (high - low) / max(count, 1)
    power = 10.0 ** math.floor(math.log10(raw))
    step = power * min((m for m in (1, 2, 5, 10) if m * power >= raw * 0.999), default=10)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [k * step for k in range(first, last + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten in [low, high]; with fewer than two of them, 1-2-5 steps or simply the nice ticks."""
    exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for multiples in ((1,), (1, 3), (1, 2, 5)):
        candidates = [m * 10.0**e for e in exponents for m in multiples]
        ticks = [t for t in candidates if low * (1 - 1e-9) <= t <= high * (1 + 1e-9)]
        if len(ticks) >= 2:
            return ticks[:: math.ceil(len(ticks) / 5)]
    return nice_ticks(low, high, 3)


def tick_label(value: float) -> str:
    """A tick as a person writes it: 0.05, −2, 10k, 3M."""
    scaled, unit = value, ""
    for limit, divisor, name in ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if abs(value) >= limit:
            scaled, unit = value / divisor, name
            break
    return f"{0.0 if abs(scaled) < 1e-12 else scaled:.4g}{unit}".replace("-", "−")


@dataclass(frozen=True)
class Scale:
    """Maps [low, high] to [0, 1], linearly or in the logarithm, with the ticks to draw."""

    low: float
    high: float
    ticks: Sequence[float]
    log: bool = False

    @classmethod
    def over(cls, values: Iterable[float], *, log: bool = False, pad: float = 0.06, count: int = 4) -> Scale:
        """A scale that shows all finite `values` (if `log`, the positive ones), with a margin each side."""
        kept = [v for v in values if math.isfinite(v) and (v > 0 or not log)] or [1.0]
        low, high = (math.log(min(kept)), math.log(max(kept))) if log else (min(kept), max(kept))
        if high - low <= 1e-12 * max(abs(low), abs(high), 1e-300):  # one value: make room around it
            room = 0.7 if log else 0.5 * abs(low) or 0.5
            low, high = low - room, high + room
        margin = pad * (high - low)
        low, high = low - margin, high + margin
        if log:
            low, high = math.exp(low), math.exp(high)
            return cls(low, high, log_ticks(low, high), log=True)
        return cls(low, high, nice_ticks(low, high, count))

    @classmethod
    def unit(cls) -> Scale:
        """[0, 1] with ticks at the halves: probabilities."""
        return cls(0.0, 1.0, (0.0, 0.5, 1.0))

    def __call__(self, value: float) -> float:
        """Position of a value; NaN where it has none."""
        if not math.isfinite(value) or (self.log and value <= 0):
            return math.nan
        if self.log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)


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
        """A line, broken where a value is missing."""
        d = "".join(_path(run) for run in _runs(self.at(x, y) for x, y in zip(xs, ys, strict=False)))
        if d:
            self.marks.append(tag("path", class_=class_, d=d))

    def band(self, xs: Sequence[float], lows: Sequence[float], highs: Sequence[float], class_: str = "soft") -> None:
        """The area between two curves, broken where either is missing."""
        pairs = [(self.at(x, a), self.at(x, b)) for x, a, b in zip(xs, lows, highs, strict=False)]
        d = ""
        for run in _runs((*low, *high) for low, high in pairs):
            d += _path([point[:2] for point in run] + [point[2:] for point in reversed(run)]) + "z"
        if d:
            self.marks.append(tag("path", class_=class_, d=d))

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
            self.marks.append(tag("path", class_=class_, d=marker(px, py, radius, shape)))

    def text(self, px: float, py: float, content: str, class_: str = "") -> None:
        """Words at a position of the plot area."""
        self.marks.append(tag("text", content, x=px, y=py, class_=class_ or None))

    def render(self, title: str) -> Html:
        """The chart as an `<svg>` that says what it is to those who cannot see it."""
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
            tag("title", title),
            self._axes(),
            area,
            class_="plot",
            role="img",
            aria_label=title,
            viewBox=f"0 0 {short(self.width)} {short(self.height)}",
        )

    def _axes(self) -> list[Html]:
        left, top, width, height = self.left, self.top, self.inner_width, self.inner_height
        drawn = [tag("rect", class_="frame", x=left, y=top, width=width, height=height)]
        for tick in self.y.ticks:
            y = top + (1 - self.y(tick)) * height
            drawn.append(tag("path", class_="grid", d=f"M{short(left)} {short(y)}h{short(width)}"))
            drawn.append(tag("text", tick_label(tick), class_="end", x=left - 5, y=y + 3.5))
        for tick in self.x.ticks:
            x = left + self.x(tick) * width
            drawn.append(tag("path", class_="grid", d=f"M{short(x)} {short(top)}v{short(height)}"))
            # A label in the corner leans inwards, so that it does not leave the picture.
            lean = "end" if x > self.width - 14 else "middle"
            drawn.append(
                tag(
                    "text",
                    tick_label(tick),
                    class_=lean,
                    x=x + (4 if lean == "end" else 0),
                    y=top + height + 13,
                )
            )
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


def _path(points: Sequence[tuple[float, ...]]) -> str:
    """A polyline in tenths of a unit, as differences: half the size of absolute coordinates."""
    # Far outside the frame only the direction matters; the bound keeps the file small and the numbers sane.
    tenths = [tuple(round(10 * min(max(c, -5000), 5000)) for c in point) for point in points]
    start, *rest = tenths
    steps = " ".join(
        f"{short((x - a) / 10)} {short((y - b) / 10)}"
        for (a, b), (x, y) in zip(tenths, rest, strict=False)
        if (x, y) != (a, b)
    )
    d = f"M{short(start[0] / 10)} {short(start[1] / 10)}" + (f"l{steps}" if steps else "h0")
    return d.replace(" -", "-")


def marker(x: float, y: float, radius: float, shape: int = 0) -> str:
    """Path data of a marker: disc, square, diamond, triangle up, triangle down, of equal area."""
    r = radius
    match shape % 5:
        case 0:
            arc = f"a{short(r)} {short(r)} 0 1 0"
            return f"M{short(x - r)} {short(y)}{arc} {short(2 * r)} 0{arc} {short(-2 * r)} 0"
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


def png(pixels: Sequence[Sequence[float]]) -> str:
    """A grey picture as a data URI, its smallest value black and its largest white.

    A 28 × 28 digit takes about 0.5 kB this way, a tenth of what SVG rectangles take.
    """
    flat = [v for row in pixels for v in row if math.isfinite(v)]
    if not flat or len({len(row) for row in pixels}) != 1:
        raise ValueError("pixels must be rows of equal length with at least one finite value.")
    low, span = min(flat), (max(flat) - min(flat)) or 1.0

    def grey(value: float) -> int:
        return round(255 * (value - low) / span) if math.isfinite(value) else 0

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rows = b"".join(b"\0" + bytes(map(grey, row)) for row in pixels)  # filter 0 in front of every row

    header = struct.pack(">IIBBBBB", len(pixels[0]), len(pixels), 8, 0, 0, 0, 0)  # 8 bits, grey
    data = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows, 9)) + chunk(b"IEND", b"")
    return "data:image/png;base64," + base64.b64encode(b"\x89PNG\r\n\x1a\n" + data).decode()

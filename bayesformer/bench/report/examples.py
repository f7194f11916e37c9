"""The figure of single inputs: what a method is least and most sure of."""

from __future__ import annotations

import base64
import math
import struct
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from bayesformer.bench.report.data import Report, TaskResults, floats
from bayesformer.bench.report.markup import Html, tag
from bayesformer.bench.report.parts import figure, panel, small
from bayesformer.bench.report.wording import fixed
from bayesformer.bench.statistics import finite

IMAGES = 8  # most in a row


def examples(report: Report, task: TaskResults) -> Html | None:
    """The figure of test images with the highest and the lowest entropy, a panel per method."""
    panels = []
    for entry, run in task.pictured("examples").items():
        data = run["figures"]["examples"]
        rows = [
            tag("div", tag("p", words), tag("ul", pictures), class_="thumbs")
            for words, key in (("Least sure", "highest"), ("Most sure", "lowest"))
            if (pictures := [p for e in (data.get(key) or [])[:IMAGES] if (p := _picture(e))])
        ]
        if rows:
            panels.append(panel(report, entry, rows))
    caption = (
        "Test images with the highest and the lowest entropy. Under each: the predicted class and the "
        "entropy in nats; ✗ marks an error, with the true class behind it. Doubt is well placed when the "
        "images in the first row are hard for you, too. "
    )
    return figure("Which inputs puzzle it?", [panels], caption + task.seed_note("examples"), "wide")


def _picture(example: Mapping[str, Any]) -> Html | None:
    try:
        source = png([floats(row) for row in example["image"]])
    except (KeyError, TypeError, ValueError):  # no picture is no reason to have no report
        return None
    label, predicted, entropy = (example.get(k) for k in ("label", "predicted", "entropy"))
    words = f"{predicted}" if label == predicted else tag("b", f"{predicted} ✗ {label}")
    nats = fixed(finite(entropy), 2)
    alt = f"class {label}, predicted {predicted}, entropy {nats} nats"
    return tag("li", tag("img", src=source, alt=alt, title=alt), tag("span", words), small(nats))


def png(pixels: Sequence[Sequence[float]], low: float | None = None) -> str:
    """A grey picture as a data URI, `low` or its smallest value black and its largest white.

    A 28 × 28 digit takes about 0.5 kB this way, a tenth of what SVG rectangles take.
    """
    flat = [v for row in pixels for v in row if math.isfinite(v)]
    if not flat or len({len(row) for row in pixels}) != 1:
        raise ValueError("pixels must be rows of equal length with at least one finite value.")
    low = min(flat) if low is None else low
    span = (max(flat) - low) or 1.0

    def grey(value: float) -> int:
        return round(255 * (value - low) / span) if math.isfinite(value) else 0

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rows = b"".join(b"\0" + bytes(map(grey, row)) for row in pixels)  # filter 0 in front of every row
    header = struct.pack(">IIBBBBB", len(pixels[0]), len(pixels), 8, 0, 0, 0, 0)  # 8 bits, grey
    data = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows, 9)) + chunk(b"IEND", b"")
    return "data:image/png;base64," + base64.b64encode(b"\x89PNG\r\n\x1a\n" + data).decode()

"""Attention of a saved posterior on one input, as a figure: mean and spread of every map."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from bayesformer.attention import AttentionMap
from bayesformer.bench.report.examples import png
from bayesformer.bench.report.markup import Html, tag
from bayesformer.bench.report.standalone import write_svg

SIZE, GAP, TITLE, LINE = 170.0, 18.0, 20.0, 16.0
COLUMNS = (("mean", "mean"), ("sd", "standard deviation"))


def figure(maps: Sequence[AttentionMap], path: Path, example: int = 0) -> Path:
    """Write one SVG: a row per layer and head, the mean weights and their standard deviation side by side.

    Args:
        maps: of `attention_maps`; those of a graph have a weight per edge and no picture.
        path: of the file.
        example: which input of the batch.
    """
    rows = [(seen, head) for seen in maps if seen.mean.shape[-2] > 1 for head in range(seen.mean.shape[1])]
    if not rows:
        raise ValueError("maps must have rows of more than one position; those along the edges of a graph have none.")
    count = len(rows[0][0].mean)
    if not 0 <= example < count:
        raise ValueError(f"example must be in 0..{count - 1}; got {example}.")
    step = SIZE + TITLE + LINE + GAP
    parts = [_row(seen, head, example, GAP + i * step) for i, (seen, head) in enumerate(rows)]
    width, height = GAP + 2 * (SIZE + GAP), GAP + len(rows) * step
    return write_svg(path, width, height, parts)


def _row(seen: AttentionMap, head: int, example: int, top: float) -> list[Html]:
    name = seen.name if seen.mean.shape[1] == 1 else f"{seen.name}, head {head + 1}"
    parts = [tag("text", name, x=GAP, y=top + TITLE - 6, style="font-weight:600;fill:var(--ink)")]
    for i, (key, words) in enumerate(COLUMNS):
        pixels = getattr(seen, key)[example, head]
        left, largest = GAP + i * (SIZE + GAP), float(pixels.max())
        source = png(pixels.tolist(), low=0.0)
        stretch = {"preserveAspectRatio": "none", "style": "image-rendering:pixelated"}
        parts.append(tag("image", href=source, x=left, y=top + TITLE, width=SIZE, height=SIZE, **stretch))
        digits = max(2, 1 - math.floor(math.log10(largest))) if largest > 0 else 2
        below = f"{words}, 0 to {largest:.{digits}f}"
        parts.append(tag("text", below, x=left, y=top + TITLE + SIZE + LINE - 3))
    return parts

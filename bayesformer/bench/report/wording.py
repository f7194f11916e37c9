"""Numbers and verdicts as text for readers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from statistics import median

from bayesformer.bench.report.data import TaskResults
from bayesformer.bench.statistics import Difference, Standing, Summary, Verdict

DASH = "–"  # what a missing number looks like
SYMBOLS: dict[Verdict, str] = {"better": "▲", "worse": "▼", "unclear": "≈"}
FEW = "few seeds"  # stands behind a fragile verdict
SMALL = "A significant difference can still be too small to matter."


def fixed(value: float | None, digits: int, sign: bool = False) -> str:
    """A number with a true minus sign; a dash for none; never "−0.0"."""
    if value is None:
        return DASH
    text = f"{value:+.{digits}f}" if sign else f"{value:.{digits}f}"
    if not text.strip("+-0."):
        text = text.lstrip("+-")
    return text.replace("-", "−")


def decimals(summaries: Iterable[Summary | None]) -> int:
    """Decimals for a column: two digits of its typical spread, or four of its largest value."""
    kept = [s for s in summaries if s]
    largest = max((abs(s.mean) for s in kept), default=0.0)
    spreads = [s.sd for s in kept if s.sd]
    if largest == 0:
        return 2
    wanted = 1 - _exponent(median(spreads)) if spreads else 3 - _exponent(largest)
    return min(max(wanted, 3 if largest < 1e-2 else 0), 6 if largest < 1e-2 else 4)


def score_decimals(task: TaskResults) -> int:
    """The number of decimals for a task's primary metric."""
    return decimals(s.summary for s in task.standings)


def difference_decimals(difference: Difference, digits: int) -> int:
    """Decimals to print: `digits`, or more to show the first significant digit of the mean, at most 6."""
    return min(max(digits, -_exponent(abs(difference.mean))), 6) if difference.mean else digits


def _exponent(value: float) -> int:
    return math.floor(math.log10(value))


def interval(difference: Difference, digits: int) -> str:
    """The 95 % interval of a difference as text, or [n/a]."""
    if difference.low is None:
        return "[n/a]"
    return f"[{fixed(difference.low, digits, True)}, {fixed(difference.high, digits, True)}]"


def p_text(p: float) -> str:
    """A p value as text with at most three decimals."""
    return "p < 0.001" if p < 0.001 else f"p = {p:.3f}" if p < 0.1 else f"p = {p:.2f}"


def listing(items: Sequence[str], most: int = 12) -> str:
    """The items as "a, b and c"; of a long list the first `most` and how many more there are."""
    shown = list(items[:most])
    if len(items) > most:
        return ", ".join(shown) + f" and {len(items) - most} more"
    return " and ".join([", ".join(shown[:-1]), shown[-1]] if len(shown) > 1 else shown)


def count(n: int, word: str) -> str:
    """A number with its noun in singular or plural: "1 run", "2 runs"."""
    return f"{n} {word}" if n == 1 else f"{n} {word}s"


def duration(seconds: float) -> str:
    """A time in seconds, minutes or hours as text."""
    if seconds < 90:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.3g} min" if seconds < 5400 else f"{seconds / 3600:.3g} h"


def spread(tasks: Iterable[TaskResults]) -> str:
    """A sentence that explains ±, with the number of training seeds."""
    counts = sorted({len(runs) for task in tasks for runs in task.groups.values()})
    if counts[-1] == 1:
        return "One training seed: no spread can be given."
    span = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    return f"± spread is the standard deviation over {span} training seeds."


def why_untested(standing: Standing) -> str:
    """The reason why an entry has no p value, in words."""
    if standing.difference is None:
        return "no seed in common with the MLE"
    return "only one seed" if standing.difference.n < 2 else "all seeds differ by the same amount"


def few_of(fragile: int, total: int) -> str:
    """Behind a statement on `total` tasks or methods: how many of them rest on few seeds."""
    if not fragile:
        return ""
    return f" ({FEW})" if fragile == total else f" ({FEW} on {fragile})"

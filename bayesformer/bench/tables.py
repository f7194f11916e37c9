"""Results as tables in the terminal."""

from __future__ import annotations

import statistics as stats
import sys
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from bayesformer.bench.statistics import RISING, UNCONVERGED, entry_of, finite, unconverged
from bayesformer.evaluate.catalogue import describe

COLUMNS = (
    *("log_likelihood", "oracle_gap", "accuracy", "ece", "crps", "auroc/shuffled", "auroc/noise"),
    *("wasserstein", "spread_ratio/in", "spread_ratio/gap", "spread_ratio/out"),
)


def print_tables(results: Sequence[dict[str, Any]]) -> None:
    """Print one table per task: methods in the order of the primary metric, mean ± standard deviation over seeds."""
    from rich.console import Console
    from rich.table import Table

    console = Console(width=None if sys.stdout.isatty() else 160)
    by_task: dict[str, dict[str, list[dict[str, Any]]]] = defaultdict(lambda: defaultdict(list))
    for result in results:
        by_task[result["task"]][_name(result)].append(result)
    for task, methods in by_task.items():
        primary = next(iter(methods.values()))[0].get("primary", COLUMNS[0])
        shown = [c for c in COLUMNS if any(c in r["metrics"] for rs in methods.values() for r in rs)]
        table = Table(title=f"{task}: {_seeds(methods)}", title_justify="left", box=None, header_style="bold")
        table.add_column("method", no_wrap=True)
        for name in shown:
            table.add_column(describe(name).label, justify="right")
        table.add_column("train s", justify="right")
        table.add_column("predict ms", justify="right")
        quality = {method: _mean(_values(cells, primary)) for method, cells in methods.items()}
        for method in sorted(methods, key=quality.__getitem__, reverse=describe(primary).better == "higher"):
            cells = [_spread(_values(methods[method], name)) for name in shown]
            seconds = _mean(_values(methods[method], "fit_seconds", "cost"))
            milliseconds = _mean(_values(methods[method], "predict_ms", "cost"))
            mark = f" {RISING}" if unconverged(methods[method]) else ""
            table.add_row(method + mark, *cells, f"{seconds:.1f}", f"{milliseconds:.2f}")
        console.print(table)
        if any(map(unconverged, methods.values())):
            console.print(UNCONVERGED)
        console.print()


def _name(result: dict[str, Any]) -> str:
    return entry_of(result).label


def _seeds(methods: dict[str, list[dict[str, Any]]]) -> str:
    counts = {len(results) for results in methods.values()}
    return f"{'-'.join(str(c) for c in sorted(counts))} seed{'s' if max(counts) > 1 else ''}"


def _values(results: Sequence[dict[str, Any]], name: str, part: str = "metrics") -> list[float]:
    return [value for r in results if (value := finite(r[part].get(name))) is not None]


def _mean(values: Sequence[float]) -> float:
    return stats.fmean(values) if values else float("nan")


def _spread(values: Sequence[float]) -> str:
    if not values:
        return "–"
    mean = f"{_mean(values):.3f}"
    return f"{mean} ± {stats.stdev(values):.3f}" if len(values) > 1 else mean

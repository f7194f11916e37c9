"""`python -m benchmarks [name ...]`: all comparisons, or those whose name contains one of the words."""

from __future__ import annotations

import argparse
import warnings
from pathlib import Path

import torch

from benchmarks import (
    attention,
    copies,
    curvature,
    foundation,
    language,
    linearised,
    nuts_overhead,
    streamlined,
    vocabulary,
    weight_space,
)
from benchmarks.harness import WIDTH, Failure, Row, measure, report


def main() -> None:
    """Measure, print a line per ratio, write bench.json."""
    parser = argparse.ArgumentParser(prog="benchmarks", description=__doc__)
    parser.add_argument("words", nargs="*", help="only comparisons whose name contains one of these")
    parser.add_argument("--output", type=Path, default=Path("bench.json"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "The Tensor default of the field", FutureWarning)  # a peer's dependency, 24 times
    ratios: list[Row] = []
    print(f"{'name':<{WIDTH}}   ratio  [p10, p90]         budget         memory, ours / plain")
    for module in (
        foundation,
        weight_space,
        nuts_overhead,
        attention,
        curvature,
        linearised,
        streamlined,
        vocabulary,
        copies,
        language,
    ):
        for comparison in module.comparisons():
            if arguments.words and not any(word in comparison.name for word in arguments.words):
                continue
            ratios.append(measure(comparison))
            print(ratios[-1], flush=True)
            report(ratios, arguments.output)  # after every line: nothing is lost if the next one fails
    ours = [row for row in ratios if not isinstance(row, Failure) and row.budget is not None]
    print(f"{sum(row.ok for row in ours)} of {len(ours)} within budget; wrote {arguments.output}")


if __name__ == "__main__":
    main()

"""Measuring ratios on a noisy machine: interleaved rounds, shuffled order, medians."""

from __future__ import annotations

import json
import platform
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from bayesformer.bench.memory import PeakMemory


@dataclass(frozen=True)
class Comparison:
    """Work to time against a baseline: ratio = candidate seconds per unit / baseline seconds per unit."""

    name: str
    candidate: Callable[[], object]
    baseline: Callable[[], object]
    budget: float | None  # None: a peer, shown for comparison
    candidate_units: float = 1.0
    baseline_units: float = 1.0
    rounds: int = 9
    wall: bool = False
    """time on the wall instead of on the processor: for work in other processes"""


@dataclass(frozen=True)
class Ratio:
    """The outcome of a comparison."""

    name: str
    ratio: float
    low: float  # 10th percentile over rounds
    high: float  # 90th
    budget: float | None
    ok: bool
    rounds: int
    baseline_ms: float
    peak_mib: float | None  # extra memory at the peak of one call of the candidate
    baseline_mib: float | None

    def __str__(self) -> str:
        verdict = "peer" if self.budget is None else f"<= {self.budget:<5g} {'ok' if self.ok else 'OVER'}"
        memory = "" if self.peak_mib is None else f"{self.peak_mib:.0f} / {self.baseline_mib:.0f} MiB"
        spread = f"[{self.low:.3f}, {self.high:.3f}]"
        return f"{self.name:<58} {self.ratio:7.3f}  {spread:<18} {verdict:<14} {memory}"


def measure(comparison: Comparison) -> Ratio:
    """Run the rounds. Processor time leaves out what other programs took from us."""
    clock = time.perf_counter if comparison.wall else time.process_time
    sides = {"candidate": comparison.candidate, "baseline": comparison.baseline}
    if not comparison.wall:
        for work in sides.values():
            work()
    ratios, baselines = [], []
    for _ in range(comparison.rounds):
        seconds = {}
        for name in random.sample(list(sides), 2):
            start = clock()
            sides[name]()
            seconds[name] = clock() - start
        base = seconds["baseline"] / comparison.baseline_units
        baselines.append(base)
        ratios.append(seconds["candidate"] / comparison.candidate_units / base)
    ratios.sort()
    low, high = ratios[len(ratios) // 10], ratios[-1 - len(ratios) // 10]
    middle = statistics.median(ratios)
    peaks = [None, None] if comparison.wall else [_peak(work) for work in sides.values()]
    return Ratio(
        comparison.name,
        round(middle, 4),
        round(low, 4),
        round(high, 4),
        comparison.budget,
        comparison.budget is None or middle <= comparison.budget,
        comparison.rounds,
        round(statistics.median(baselines) * 1e3, 4),
        *peaks,
    )


def _peak(work: Callable[[], object]) -> float | None:
    with PeakMemory() as memory:
        work()
    return memory.mib


def report(ratios: list[Ratio], path: Path) -> None:
    """Write bench.json: the lines printed, and the machine they were measured on."""
    machine = {"python": platform.python_version(), "torch": torch.__version__, "processor": platform.machine()}
    content = {"machine": machine, "ratios": [asdict(ratio) for ratio in ratios]}
    path.write_text(json.dumps(content, indent=1) + "\n")

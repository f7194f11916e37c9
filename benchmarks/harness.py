"""Measuring ratios on a noisy machine: interleaved rounds, shuffled order, medians."""

from __future__ import annotations

import json
import platform
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeAlias

import torch

from bayesformer.bench.peak_memory import PeakMemory

WIDTH, LONGEST = 70, 160  # columns of a name, letters of a reason


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
    prepare: Callable[[], object] | None = None
    """called before anything is timed: what a user does once, such as fitting what is to predict"""
    once: bool = False
    """one call of the candidate is all: for a slow peer, without the call that warms up"""


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
        return f"{self.name:<{WIDTH}} {self.ratio:7.3f}  {spread:<18} {verdict:<14} {memory}"


@dataclass(frozen=True)
class Memory:
    """Work to run in a process of its own; `python -m module arguments` prints what it took at most, in `unit`."""

    name: str
    module: str
    arguments: tuple[str, ...]
    budget: float
    unit: str = "MiB"


@dataclass(frozen=True)
class Peak:
    """The memory of a whole process."""

    name: str
    amount: float
    budget: float
    ok: bool
    unit: str = "MiB"

    def __str__(self) -> str:
        amount = f"{self.amount:7.{0 if self.unit == 'MiB' else 2}f} {self.unit}"
        return f"{self.name:<{WIDTH}} {amount}, <= {self.budget:g} {'ok' if self.ok else 'OVER'}"


Row: TypeAlias = "Ratio | Failure | Peak"


@dataclass(frozen=True)
class Failure:
    """A peer that cannot do this."""

    name: str
    fails: str

    def __str__(self) -> str:
        return f"{self.name:<{WIDTH}} fails: {self.fails}"


def measure(comparison: Comparison | Memory) -> Row:
    """The ratio, or the memory; for a peer that raises, the reason."""
    if isinstance(comparison, Memory):
        command = [sys.executable, "-m", comparison.module, *comparison.arguments]
        amount = float(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])
        return Peak(comparison.name, amount, comparison.budget, amount <= comparison.budget, comparison.unit)
    try:
        if comparison.prepare is not None:
            comparison.prepare()
        return _measure_once(comparison) if comparison.once else _measure(comparison)
    except Exception as error:
        if comparison.budget is not None:
            raise
        reason = " ".join(str(error).split()) or "without a message"
        return Failure(comparison.name, f"{type(error).__name__}, {reason}"[:LONGEST])


def _measure_once(comparison: Comparison) -> Ratio:
    """Time and memory from one call of the candidate, between rounds of the baseline."""
    comparison.baseline()
    baselines = [_seconds(comparison.baseline, time.process_time)]
    with PeakMemory() as memory:
        seconds = _seconds(comparison.candidate, time.process_time)
    baselines.append(_seconds(comparison.baseline, time.process_time))
    base = sum(baselines) / len(baselines) / comparison.baseline_units
    ratio = round(seconds / comparison.candidate_units / base, 4)
    budget, plain = comparison.budget, _peak(comparison.baseline)
    ok = budget is None or ratio <= budget
    return Ratio(comparison.name, ratio, ratio, ratio, budget, ok, 1, round(base * 1e3, 4), memory.mib, plain)


def _seconds(work: Callable[[], object], clock: Callable[[], float]) -> float:
    start = clock()
    work()
    return clock() - start


def _measure(comparison: Comparison) -> Ratio:
    """Run the rounds. Processor time leaves out what other programs took from us."""
    clock = time.perf_counter if comparison.wall else time.process_time
    sides = {"candidate": comparison.candidate, "baseline": comparison.baseline}
    if not comparison.wall:
        for work in sides.values():
            work()
    ratios, baselines = [], []
    for _ in range(comparison.rounds):
        seconds = {name: _seconds(sides[name], clock) for name in random.sample(list(sides), 2)}
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


def report(ratios: list[Row], path: Path) -> None:
    """Write bench.json: the lines printed, and the machine they were measured on."""
    machine = {"python": platform.python_version(), "torch": torch.__version__, "processor": platform.machine()}
    content = {"machine": machine, "ratios": [asdict(ratio) for ratio in ratios]}
    path.write_text(json.dumps(content, indent=1) + "\n")

"""Statistics over training seeds: mean and spread, paired differences to the MLE, ranks.

A row of a table is an `Entry`: a method and its variant. Every number is over the seeds with a finite value;
`failed` counts the others, so that a diverged run is never averaged away in silence.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar

from bayesformer.evaluate.catalogue import Better

Result: TypeAlias = Mapping[str, Any]
Verdict: TypeAlias = Literal["baseline", "better", "worse", "unclear", "untested"]
K = TypeVar("K", bound=Hashable)

BASELINE = "mle"
LEVEL = 0.05
"""A Holm-corrected p value below this is called significant."""
FEW_SEEDS = 3
"""A verdict from fewer pairs than this is fragile: one more seed can turn it."""
RISING = "↗"
"""Stands behind the name of a method whose training had not converged."""
UNCONVERGED = f"{RISING} has not converged: the training objective still rose when training ended."


class Entry(NamedTuple):
    """One row: a method with its settings that differ from the default."""

    method: str
    variant: str = ""

    @property
    def label(self) -> str:
        """The method's name, with its variant in brackets if it has one."""
        return f"{self.method} ({self.variant})" if self.variant else self.method


class Summary(NamedTuple):
    """Mean and sample standard deviation over n seeds; one seed has no spread."""

    mean: float
    sd: float | None
    n: int


class Difference(NamedTuple):
    """Mean over n common seeds of method minus baseline; interval and p value need two pairs that differ."""

    mean: float
    low: float | None
    high: float | None
    p: float | None
    n: int


@dataclass(frozen=True)
class Standing:
    """The result of one entry on one task and one metric: rank, mean, difference to the MLE and verdict."""

    entry: Entry
    rank: int | None
    summary: Summary | None
    failed: int  # runs without a finite value
    difference: Difference | None  # to the baseline
    p: float | None  # of the difference, Holm-corrected over the entries of the table
    verdict: Verdict

    @property
    def tested(self) -> bool:
        """True if the verdict comes from a significance test."""
        return self.verdict not in ("baseline", "untested")

    @property
    def fragile(self) -> bool:
        """True if that test had fewer than `FEW_SEEDS` pairs of seeds."""
        return self.tested and self.difference is not None and self.difference.n < FEW_SEEDS


def entry_of(result: Result) -> Entry:
    """The row (method and variant) that a result belongs to."""
    return Entry(str(result["method"]), str(result.get("variant") or ""))


def unconverged(results: Iterable[Result]) -> int:
    """How many runs have a member whose training had not converged; runs that do not say are not counted."""
    return sum(False in (part(result, "fit").get("converged") or ()) for result in results)


def finite(value: object) -> float | None:
    """The value as a float, or None for anything that is not a finite number."""
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        return float(value)
    return None


def summarise(values: Iterable[object]) -> Summary | None:
    """Mean, sample standard deviation (n - 1) and n of the finite values; None if there are none."""
    kept = [v for v in map(finite, values) if v is not None]
    if not kept:
        return None
    mean = math.fsum(kept) / len(kept)
    if len(kept) < 2:
        return Summary(mean, None, 1)
    variance = math.fsum((v - mean) ** 2 for v in kept) / (len(kept) - 1)
    return Summary(mean, math.sqrt(variance), len(kept))


def paired_difference(
    values: Mapping[int, float], baseline: Mapping[int, float], confidence: float = 0.95
) -> Difference | None:
    """Student's paired t-test over the seeds both have.

        t = d̄ / (s_d / √n),    n - 1 degrees of freedom,    interval d̄ ± t_{1-α/2} s_d / √n

    Pairing removes what a seed does to both (its data, its initialisation). Fewer than two pairs, or
    differences that are all equal, carry no estimate of noise: no interval and no p value.
    """
    seeds = sorted(values.keys() & baseline.keys())
    differences = summarise(values[s] - baseline[s] for s in seeds)
    if differences is None:
        return None
    mean, sd, n = differences
    scale = max(abs(v) for s in seeds for v in (values[s], baseline[s]))
    if sd is None or sd <= 1e-12 * scale:  # equal up to rounding
        return Difference(mean, None, None, None, n)
    from scipy import stats

    error = sd / math.sqrt(n)
    half = float(stats.t.ppf((1 + confidence) / 2, n - 1)) * error
    p = 2 * float(stats.t.sf(abs(mean) / error, n - 1))
    return Difference(mean, mean - half, mean + half, p, n)


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """Holm's step-down correction (1979): with p₍₁₎ ≤ … ≤ p₍ₘ₎,

        p̃₍ᵢ₎ = max_{j ≤ i} min(1, (m - j + 1) p₍ⱼ₎).

    It bounds the chance of any false alarm without assuming independence. None is no test and does not count.
    """
    tested = sorted((p, i) for i, p in enumerate(p_values) if p is not None)
    corrected: list[float | None] = [None] * len(p_values)
    running = 0.0
    for j, (p, i) in enumerate(tested):
        running = max(running, min(1.0, (len(tested) - j) * p))
        corrected[i] = running
    return corrected


def ranks(values: Mapping[K, float | None], better: Better) -> dict[K, int | None]:
    """Competition ranks (1, 2, 2, 4) by value; None where there is no value or no better direction."""
    sign = {"higher": -1.0, "lower": 1.0, "none": 0.0}[better]
    if not sign:
        return dict.fromkeys(values)
    keys = {k: sign * v for k, v in values.items() if v is not None}
    return {k: 1 + sum(other < keys[k] for other in keys.values()) if k in keys else None for k in values}


def best(values: Mapping[K, float | None], better: Better) -> set[K]:
    """The keys that share rank 1, if they are ahead of anything."""
    order = ranks(values, better)
    winners = {k for k, rank in order.items() if rank == 1}
    return winners if any(rank and rank > 1 for rank in order.values()) else set()


def means(summaries: Mapping[K, Summary | None]) -> dict[K, float | None]:
    """The mean of every summary; None where there is no summary."""
    return {k: s.mean if s else None for k, s in summaries.items()}


def part(result: Result, key: str) -> Mapping[str, Any]:
    """A part of a result, such as its metrics; empty if it was not recorded."""
    return result.get(key) or {}


def by_seed(results: Iterable[Result], metric: str) -> dict[int, float]:
    """The finite values of a metric by seed."""
    pairs = ((int(r["seed"]), finite(part(r, "metrics").get(metric))) for r in results)
    return {seed: value for seed, value in pairs if value is not None}


def group(results: Iterable[Result]) -> dict[Entry, list[Result]]:
    """Results by entry, in order of name, each in order of seed."""
    groups: dict[Entry, list[Result]] = {}
    for result in sorted(results, key=lambda r: (entry_of(r), r["seed"])):
        groups.setdefault(entry_of(result), []).append(result)
    return groups


def baseline_of(entries: Iterable[Entry]) -> Entry | None:
    """The MLE with default settings, or else the first of its variants by name."""
    return min((e for e in entries if e.method == BASELINE), default=None)


def standings(results: Iterable[Result], metric: str, better: Better) -> list[Standing]:
    """One task's entries by rank; ties by name, those without a rank last."""
    groups = group(results)
    values = {entry: by_seed(runs, metric) for entry, runs in groups.items()}
    summaries = {entry: summarise(v.values()) for entry, v in values.items()}
    order = ranks(means(summaries), better)
    baseline = baseline_of(groups)
    differences = {
        e: paired_difference(v, values[baseline]) if baseline and e != baseline else None for e, v in values.items()
    }
    corrected = dict(zip(groups, holm([d.p if d else None for d in differences.values()]), strict=True))
    table = [
        Standing(
            entry,
            order[entry],
            summaries[entry],
            len(runs) - len(values[entry]),
            differences[entry],
            corrected[entry],
            "baseline" if entry == baseline else _verdict(differences[entry], corrected[entry], better),
        )
        for entry, runs in groups.items()
    ]
    return sorted(table, key=lambda s: (s.rank or math.inf, s.entry))


def _verdict(difference: Difference | None, p: float | None, better: Better) -> Verdict:
    if difference is None or p is None or better == "none":
        return "untested"
    if p >= LEVEL:
        return "unclear"
    return "better" if (difference.mean > 0) == (better == "higher") else "worse"

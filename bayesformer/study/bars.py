"""Do one-line calls give the posterior? Every method with nothing set, on problems whose posterior is known.

    error   RMS over the weights of (mean - exact mean) / exact sd
    ratio   median over the weights of sd / exact sd; of a diagonal family, over the best diagonal, H_ii^-½
    logits  the same ratio for the outputs at new inputs, over the exact posterior's whatever the family; of classes
            for centred logits, since softmax does not see a shift common to all
    spread  of networks: the median ratio of the standard deviation of the function to HMC's, by region of inputs
    marginal    of a diagonal family: median over the weights of sd / exact sd

A fit is right if error, ratio and logits (or spread) are within the bar and the weights of a diagonal family have at
least .3 of their exact spread; with less it is the best of its family, and wrong away from the data. What it doubts of
itself is counted beside: doubts of right fits are false alarms, doubts of wrong ones are catches. Results are stored
one by one, so that a second call runs what is missing; so are posteriors that had to be sampled.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from statistics import median
from typing import Any, Protocol

from bayesformer.core.storage import read_json, write_json
from bayesformer.laws import GaussianLaw
from bayesformer.methods import build_method
from bayesformer.study.bar_networks import NETWORKS, file_name, measure_network, truth_of_network, truths_table
from bayesformer.study.bar_problems import (
    KnownProblem,
    Truth,
    exact_truth,
    problems,
    quiet_fit,
    sampled_truth,
    spread_of_outputs,
)
from bayesformer.train.output_spread import NARROW

Row = Mapping[str, Any]
DRAWS = 100  # whose outputs are compared, if there are as many
MARK, END = "<!-- bars -->", "<!-- end of bars -->"


class Bar(Protocol):
    """What a fit must reach to count as right."""

    def holds(self, row: Row, slack: float = 1.0) -> bool:
        """Whether a row is within the bar, or within `slack` times its width."""


@dataclass(frozen=True)
class WeightBar:
    """A bar for the mean and the spread of the weights, and for the spread of logits where that is known."""

    error: float
    low: float
    high: float

    def holds(self, row: Row, slack: float = 1.0) -> bool:
        """Whether a row is within the bar, or within `slack` times its width."""
        ratios = [row["ratio"], *([row["logits"]] if row.get("logits") is not None else [])]
        low, high = 1 - slack * (1 - self.low), 1 + slack * (self.high - 1)
        return row["error"] < slack * self.error and all(low <= ratio <= high for ratio in ratios)


@dataclass(frozen=True)
class FactorBar:
    """A bar for the spread of a function: within a factor in every region of inputs."""

    factor: float

    def holds(self, row: Row, slack: float = 1.0) -> bool:
        """Whether every ratio is within the factor, or within `slack` times of it."""
        most = slack * self.factor
        return all(1 / most <= ratio <= most for ratio in row["spread"].values())


BARS: dict[str, Bar] = {
    "linear": WeightBar(0.3, 0.85, 1.15),
    "logistic": WeightBar(0.4, 0.8, 1.2),
    "softmax": WeightBar(0.4, 0.9, 1.1),
}
NETWORK_BAR = FactorBar(2.0)

RIGHT: dict[str, dict[str, Any]] = {
    "sgld": {},
    "sghmc": {},
    "sgnht": {},
    "baoab": {},
    "psgld": {},
    "laplace full": {"structure": "full"},
    "laplace kron": {"structure": "kron"},
    "laplace diag": {"structure": "diag"},
    "vi": {},
    "vi dense": {"kind": "dense"},
    "ivon": {},
    "ekf": {},
    "ekf dense": {"kind": "dense"},
}
"""Methods as they are called, with what chooses their family alone."""
DIAGONAL = {"laplace diag", "vi", "ivon", "ekf"}
WRONG: dict[str, dict[str, Any]] = {
    "sghmc 10 epochs": {"epochs": 10},
    "sghmc lr=0.01": {"lr": 1e-2, "friction": 10.0, "warm_up": 0.5, "draws": 30},
    "sgld lr=0.0002": {"lr": 2e-4, "warm_up": 0.5, "draws": 30},
}
"""Fits that cannot be right: too short, or with one step size for every problem."""
ON_NETWORKS: dict[str, dict[str, Any]] = {
    "sghmc": {},
    "baoab": {},
    "sghmc 10 epochs": {"epochs": 10},
    "sgld": {},
    "vi": {},
    "laplace sampled": {"structure": "full", "prior_precision": 1.0, "predictive": "sampled"},
}
"""Methods that are run on networks; only the first two can be right there."""


def bar_of(problem: str) -> Bar:
    """The limits of error and spread within which a fit of this problem counts as right.

    All networks share one `Bar`; other problems are looked up by the first word of their name.
    """
    return NETWORK_BAR if problem in NETWORKS else BARS[problem.split(maxsplit=1)[0]]


def measure(label: str, problem: KnownProblem, truth: Truth, seed: int) -> dict[str, Any]:
    """One fit of a method, and how far it is from the truth."""
    name = label.split(maxsplit=1)[0]
    settings = {**RIGHT.get(label, {}), **WRONG.get(label, {})}
    if name == "laplace" and problem.precision is None:
        settings["prior_precision"] = 1.0  # the prior of the chains that it is compared with
    began = time.perf_counter()
    posterior = quiet_fit(problem, build_method(name, settings), seed)
    seconds = time.perf_counter() - began
    chosen = posterior.facts.get("prior_precision")
    if problem.precision is not None and chosen:
        truth = exact_truth(problem, float(chosen[0]))
    law = posterior.law
    mean, spread = (law.mean, law.sd) if isinstance(law, GaussianLaw) else (law.mean, posterior.theta.std(0))
    exact = truth.diagonal if label in DIAGONAL and truth.diagonal is not None else truth.sd
    row: dict[str, Any] = {
        "error": float(((mean.double() - truth.mean) / truth.sd).square().mean().sqrt()),
        "ratio": float((spread.double() / exact).median()),
        "doubts": [doubt.check for doubt in posterior.doubts],
        "seconds": seconds,
    }
    if label in DIAGONAL:
        row["marginal"] = float((spread.double() / truth.sd).median())
    if truth.outputs is not None:
        draws = min(DRAWS, law.available or DRAWS)
        own = spread_of_outputs(posterior, problem.asked, draws)
        row["logits"] = float((own / truth.outputs).median())
    said = {name: posterior.facts[name] for name in ("output_spread", "weight_spread") if name in posterior.facts}
    return row | said


def run(
    names: Sequence[str], methods: Sequence[str], seeds: Iterable[int], path: Path, say: Callable[[str], None]
) -> list[dict[str, Any]]:
    """All rows of these problems, methods and seeds; those that are not in the file are run and added to it."""
    rows = read_rows(path) if path.exists() else []
    known = {_key(row) for row in rows}
    for name in [*problems(), *NETWORKS]:
        if not any(fnmatchcase(name, pattern) for pattern in names):
            continue
        wanted = [m for m in _methods_on(name) if any(fnmatchcase(m, pattern) for pattern in methods)]
        for seed in seeds:
            missing = [method for method in wanted if (name, method, seed) not in known]
            if not missing:
                continue
            fitted = _fitter(name, seed, path.parent)
            for method in missing:
                row = {"problem": name, "method": method, "seed": seed, **fitted(method)}
                rows.append(row)
                write_json(path, {"rows": rows})
                say(f"{name}, {method}, seed {seed}: {_numbers(row)}")
    return rows


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a file of results."""
    rows: list[dict[str, Any]] = read_json(path, "bars")["rows"]
    return rows


def add_rows(path: Path, others: Sequence[Path]) -> None:
    """Write the rows of other files that the file does not hold into it, so that several runs make one file."""
    rows = read_rows(path) if path.exists() else []
    for other in others:
        known = {_key(row) for row in rows}
        rows += [row for row in read_rows(other) if _key(row) not in known]
    write_json(path, {"rows": rows})


def _key(row: Row) -> tuple[str, str, int]:
    return row["problem"], row["method"], row["seed"]


def _numbers(row: Row) -> str:
    if "spread" in row:
        return "spread " + ", ".join(f"{region} {ratio:.2f}" for region, ratio in row["spread"].items())
    return f"error {row['error']:.2f}, ratio {row['ratio']:.2f}"


def _methods_on(problem: str) -> list[str]:
    """Fits that are to be caught are made on small problems only, full matrices for at most 2000 weights."""
    if problem in NETWORKS:
        return list(ON_NETWORKS) if problem.startswith("gap") else ["sghmc", "baoab"]
    matrices = {"laplace full", "vi dense", "ekf dense"} if problem == "softmax P=2570" else set()
    found = [method for method in RIGHT if method not in matrices]
    small = problem.startswith("linear N=200") or problem == "linear N=1000 k=10"
    return [*found, *WRONG] if small else found


def _fitter(name: str, seed: int, place: Path) -> Callable[[str], dict[str, Any]]:
    """What fits a method to a problem and measures it; the posterior that it is compared with is found first."""
    if name in NETWORKS:
        reference = truth_of_network(name, place)
        return lambda label: measure_network(label, ON_NETWORKS[label], NETWORKS[name], reference, seed)
    problem = problems()[name](seed)
    stored = place / f"{file_name(name)}.safetensors"
    truth = sampled_truth(problem, seed, stored) if problem.precision is None else exact_truth(problem)
    return lambda label: measure(label, problem, truth, seed)


def table(rows: Sequence[Row]) -> str:
    """One line per problem and method: medians over seeds, the range, whether the bar holds, doubts."""
    lines = [
        "| problem | method | error | sd ratio | logits | seeds | bar | doubts |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for problem in problems():
        for method in {**RIGHT, **WRONG}:
            own = [row for row in rows if (row["problem"], row["method"]) == (problem, method)]
            if own:
                lines.append(_line(problem, method, own))
    return "\n".join(lines)


def _line(problem: str, method: str, own: Sequence[Row]) -> str:
    logits = [row["logits"] for row in own if row.get("logits") is not None]
    middle = {"error": median(r["error"] for r in own), "ratio": median(r["ratio"] for r in own)}
    if logits:
        middle["logits"] = median(logits)
    shown = f"{middle['error']:.2f} | {_range([row['ratio'] for row in own])} | {_range(logits) if logits else ''}"
    return f"| {problem} | {method} | {shown} | {_end(problem, middle, own)}"


def network_table(rows: Sequence[Row]) -> str:
    """Ratios of the spread of networks inside, between and outside the data, and the distance to HMC, in Markdown."""
    lines = [
        "| problem | method | inside | between | outside | Wasserstein | seeds | bar | doubts |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for problem in NETWORKS:
        for method in ON_NETWORKS:
            own = [row for row in rows if (row["problem"], row["method"]) == (problem, method)]
            if own:
                lines.append(_network_line(problem, method, own))
    return "\n".join(lines)


def _network_line(problem: str, method: str, own: Sequence[Row]) -> str:
    regions = list(own[0]["spread"])
    spreads = {region: [row["spread"][region] for row in own] for region in regions}
    cells = [_range(spreads[region]) if region in spreads else "" for region in ("in", "gap", "out")]
    apart = " / ".join(f"{median(row['distance'][region] for row in own):.2f}" for region in regions)
    middle = {"spread": {region: median(values) for region, values in spreads.items()}}
    return f"| {problem} | {method} | {' | '.join(cells)} | {apart} | {_end(problem, middle, own)}"


def _range(values: Sequence[float]) -> str:
    return f"{median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def _end(problem: str, middle: Row, own: Sequence[Row]) -> str:
    """Seeds, whether the median and every seed hold, and how many fits doubted themselves."""
    bar = bar_of(problem)
    every = all(bar.holds(row, 1.5) for row in own)
    verdict = "yes" if bar.holds(middle) and every else "median" if bar.holds(middle) else "no"
    return f"{len(own)} | {verdict} | {sum(bool(row['doubts']) for row in own)} |"


def alarms(rows: Sequence[Row]) -> str:
    """How many right fits doubted themselves, and how many wrong ones did not."""
    lines = [
        "| fits | within the bar | doubted: false alarms | beyond 1.5 times the bar | doubted: catches |",
        "|---|---|---|---|---|",
    ]
    kinds = {"regressions and last layers": [row for row in rows if row["problem"] not in NETWORKS]}
    kinds |= {"networks": [row for row in rows if row["problem"] in NETWORKS]}
    for kind, own in {**kinds, "all": rows}.items():
        right, wrong = _right(own), _wrong(own)
        counts = [len(right), sum(map(_doubted, right)), len(wrong), sum(map(_doubted, wrong))]
        lines.append(f"| {kind} | {' | '.join(map(str, counts))} |")
    false = [row for row in _right(rows) if _doubted(row)]
    missed = [row for row in _wrong(rows) if not _doubted(row)]
    plain = [row for row in rows if bar_of(row["problem"]).holds({**row, "logits": None})]
    literal = (
        "\n\nBy errors and ratios to the family's best alone, outputs and exact spreads of single weights left aside, "
        f"{len(plain)} fits are right and {sum(map(_doubted, plain))} of them doubted, most of these of diagonal "
        "families at condition 1000 and on last layers, whose outputs or weights are off."
    )
    return "\n".join(lines) + _listed("False alarms", false) + _listed("Not caught", missed) + literal


def _listed(what: str, rows: Sequence[Row]) -> str:
    names = sorted({f"{row['method']} on {row['problem']}" for row in rows})
    return f"\n\n{what}: {'; '.join(names)}." if names else ""


def _right(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if bar_of(row["problem"]).holds(row) and not _narrow(row)]


def _wrong(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if not bar_of(row["problem"]).holds(row, 1.5) or _narrow(row)]


def _narrow(row: Row) -> bool:
    """Whether the weights of a diagonal family have so little of their exact spread that it cannot be believed."""
    return row.get("marginal", 1.0) < NARROW


def _doubted(row: Row) -> bool:
    return bool(row["doubts"])


def report(rows: Sequence[Row], place: Path) -> str:
    """All tables: regressions and last layers, networks, how their posteriors were made, alarms and catches."""
    return "\n\n".join((table(rows), network_table(rows), truths_table(place), alarms(rows)))


def write_into(page: Path, text: str) -> None:
    """Put the text between the marks of a page, in the place of what is there."""
    before, after = split_page(page)
    page.write_text(f"{before}{MARK}\n\n{text}\n\n{END}{after}")


def split_page(page: Path) -> tuple[str, str]:
    """What stands before and after the marks of a page; one without them is refused."""
    before, mark, rest = page.read_text().partition(MARK)
    _, end, after = rest.partition(END)
    if not mark or not end:
        raise ValueError(f"page must hold the lines {MARK} and {END}, between which the tables go; got {page}.")
    return before, after


__all__ = ["add_rows", "alarms", "measure", "network_table", "report", "run", "table", "truths_table", "write_into"]

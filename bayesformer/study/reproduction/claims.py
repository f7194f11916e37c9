"""What holds and what does not: claims of the papers, and the contrast of stored results that speaks to each.

A claim is a sentence, where it was made, and contrasts: differences of two columns over common seeds, signed so that
positive is what the claim says. Its effect is the mean difference with a 95 % interval by Student's paired t-test. What
has not been run says so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

from bayesformer.bench.statistics import Difference, Result, finite, paired_difference
from bayesformer.study import citation_table, cold
from bayesformer.study.reproduction.study_tables import NONE, StoredStudy, StudyTable

THESIS = "thesis of Cinquin et al. (2021)"
BAM = "Fan et al. (2020)"
STREAMLINED = "Li et al. (2025)"
POSTERIORS = "Duffield et al. (2025)"
SERIES = tuple(f"toy/m{i}" for i in range(1, 6))
ALL = (*SERIES, "pos", "mnist")
FULL, ATTENTION, STOCHASTIC, IMPROVED = "full network", "attention layer", "variational attention", "improved prior"
VI = tuple(f"{family} VI" for family in ("Gaussian", "Laplace", "Logistic", "Cauchy", "Student"))

Finding: TypeAlias = Literal["holds", "reversed", "not seen", "one seed", "not run yet"]
Elsewhere: TypeAlias = "Callable[[Mapping[str, Sequence[Result]]], list[Evidence]]"
"""From results of other experiments by name to what they say of a claim."""


class Name(NamedTuple):
    """A column by its group and name."""

    group: str
    name: str


@dataclass(frozen=True)
class Contrast:
    """Is the first column above the second in a score on a task? `sign` is -1 where less is better."""

    task: str
    metric: str
    one: Name
    other: Name
    sign: int = 1

    @property
    def label(self) -> str:
        """The task, the score and the two columns, in words."""
        names = [n.name if n.group == FULL else f"{n.name} ({n.group})" for n in (self.one, self.other)]
        return f"{self.task}, {self.metric}: {names[0]} - {names[1]}"


@dataclass(frozen=True)
class Evidence:
    """The effect that speaks for a claim, positive in its direction, and what follows."""

    label: str
    difference: Difference | None

    @property
    def verdict(self) -> Finding:
        """Whether the interval lies on the claim's side of 0, on the other, or on both."""
        found = self.difference
        if found is None:
            return "not run yet"
        if found.low is None or found.high is None:
            return "one seed" if found.n < 2 else "not seen"
        return "holds" if found.low > 0 else "reversed" if found.high < 0 else "not seen"


@dataclass(frozen=True)
class Claim:
    """A sentence of a paper and what it says of columns here."""

    text: str
    source: str
    contrasts: tuple[Contrast, ...] = ()
    elsewhere: str | None = None  # a key of `ELSEWHERE`: results of another experiment speak to it


def over(
    tasks: Sequence[str], metric: str, ones: Sequence[Name], others: Sequence[Name], sign: int = 1
) -> tuple[Contrast, ...]:
    """Contrasts of every pair on every task."""
    return tuple(Contrast(task, metric, one, other, sign) for task in tasks for one in ones for other in others)


MLE, ENSEMBLE = Name(FULL, "MLE"), Name(FULL, "Ensemble")
FULL_VI = tuple(Name(FULL, name) for name in VI)
GAUSSIAN, UNTEMPERED = FULL_VI[0], Name("untempered", "Gaussian VI")
LAPLACE, FINAL, CONCRETE = (Name(FULL, name) for name in ("Laplace", "Final Laplace", "Concrete Dropout"))
DIRICHLET, DIRICHLET_DD = (Name(STOCHASTIC, f"Dirichlet {dd}Attention") for dd in ("", "DD "))
NORMAL, NORMAL_DD = (Name(STOCHASTIC, f"Gaussian {dd}Attention") for dd in ("", "DD "))
OUTSIDERS = ("auroc/ambiguous", "auroc/fashion")
LL = "log_likelihood"

CLAIMS = (
    Claim("Variational inference over all weights is behind the MLE.", THESIS, over(ALL, LL, [MLE], FULL_VI)),
    Claim(
        "So it is by a wide margin with the evidence lower bound as it stands.",
        THESIS,
        over(ALL, LL, [MLE], [UNTEMPERED]) + over(["mnist"], "accuracy", [MLE], [UNTEMPERED]),
    ),
    Claim("Laplace's method is ahead of variational inference.", THESIS, over(ALL, LL, [LAPLACE], [GAUSSIAN])),
    Claim("Laplace's method does not improve over the MLE.", THESIS, over(ALL, LL, [MLE], [LAPLACE])),
    Claim("Laplace's method on the last layer is ahead of that on all.", THESIS, over(ALL, LL, [FINAL], [LAPLACE])),
    Claim(
        "Concrete dropout is ahead of variational inference and Laplace's method.",
        THESIS,
        over(ALL, LL, [CONCRETE], [GAUSSIAN, LAPLACE]),
    ),
    Claim(
        "An ensemble has a lower log-likelihood than one network on POS and MNIST, and a higher accuracy.",
        THESIS,
        over(["pos", "mnist"], LL, [MLE], [ENSEMBLE]) + over(["pos", "mnist"], "accuracy", [ENSEMBLE], [MLE]),
    ),
    Claim(
        "Entropy under variational inference and Laplace's method finds ambiguous sentences better than the MLE's.",
        THESIS,
        over(["pos"], "auroc/ambiguity", [*FULL_VI, LAPLACE], [MLE]),
    ),
    Claim(
        "No method is ahead of the ensemble in finding ambiguous and foreign digits.",
        THESIS,
        tuple(c for m in OUTSIDERS for c in over(["mnist"], m, [ENSEMBLE], [MLE, CONCRETE, LAPLACE, FINAL, GAUSSIAN])),
    ),
    Claim(
        "Variational inference over the attention layers alone is ahead of that over all weights.",
        THESIS,
        tuple(c for name in VI for c in over(ALL, LL, [Name(ATTENTION, name)], [Name(FULL, name)])),
    ),
    Claim(
        "Priors made of the weights of trained networks improve variational inference.",
        THESIS,
        tuple(c for name in VI for c in over(ALL, LL, [Name(IMPROVED, name)], [Name(FULL, name)])),
    ),
    Claim(
        "Dirichlet attention is far ahead of the baselines on the series.",
        THESIS,
        over(SERIES, LL, [DIRICHLET], [MLE, ENSEMBLE]),
    ),
    Claim("Dirichlet attention is ahead of Gaussian attention.", THESIS, over(ALL, LL, [DIRICHLET], [NORMAL])),
    Claim(
        "Stochastic attention finds ambiguous sentences better than the MLE.",
        THESIS,
        over(["pos"], "auroc/ambiguity", [NORMAL, NORMAL_DD, DIRICHLET, DIRICHLET_DD], [MLE]),
    ),
    Claim(
        "Spreads that depend on the data find foreign digits better than learned ones.",
        THESIS,
        tuple(
            c
            for m in OUTSIDERS
            for c in over(["mnist"], m, [NORMAL_DD], [NORMAL]) + over(["mnist"], m, [DIRICHLET_DD], [DIRICHLET])
        ),
    ),
    Claim(
        "Weibull and Lognormal attention are more robust to noise on the inputs than dropout.",
        BAM,
        tuple(
            c
            for m in ("accuracy/noisy", "pavpu/noisy")
            for c in over(
                ["mnist"],
                m,
                [
                    Name("beyond", name)
                    for law in ("Weibull", "Lognormal")
                    for name in (f"{law} Attention", f"{law} Attention, contextual")
                ],
                [Name("beyond", "Dropout")],
            )
        ),
    ),
    Claim("On citation graphs Weibull attention with a contextual prior is ahead of GAT.", BAM, elsewhere="graphs"),
    Claim(
        "Prediction without draws is as good as linearised prediction, for less.",
        STREAMLINED,
        over(ALL, LL, [Name("beyond", "Kronecker Laplace, streamlined")], [Name("beyond", "Kronecker Laplace")]),
    ),
    Claim("Gaussian posteriors are better colder than 1.", POSTERIORS, elsewhere="cold gaussian"),
    Claim("Chains are hardly better colder than 1.", POSTERIORS, elsewhere="cold chains"),
    Claim("Parallel chains are ahead of a serial one at temperature 1.", POSTERIORS, elsewhere="parallel chains"),
    Claim("Linearised prediction is ahead of sampled, for Laplace's method.", POSTERIORS, elsewhere="linearised"),
    Claim("Linearised prediction is behind sampled, for VI.", POSTERIORS, elsewhere="linearised vi"),
)


def evidence(claim: Claim, stored: StoredStudy, other: Mapping[str, Sequence[Result]]) -> list[Evidence]:
    """What stored results say of a claim; `other` are results of other experiments by name."""
    if claim.elsewhere is not None:
        return ELSEWHERE[claim.elsewhere](other)
    found = []
    for contrast in claim.contrasts:
        one, other_one = (
            stored.scores(stored.column(*name), contrast.task, contrast.metric)
            for name in (contrast.one, contrast.other)
        )
        found.append(Evidence(contrast.label, _signed(paired_difference(one, other_one), contrast.sign)))
    return found


def _graphs(other: Mapping[str, Sequence[Result]]) -> list[Evidence]:
    """Differences of accuracy, in points, on every graph that has both rows."""
    results = other.get("graphs", ())
    found = []
    for graph in citation_table.GRAPHS:
        if not results:
            found.append(Evidence(f"graph/{graph}, accuracy: WC - GAT", None))
            continue
        cells = citation_table.cells_of(results, drawn=False)
        ours, plain = (
            {s: 100 * v for s, r in cells.get((row, graph), {}).items() if (v := finite(r["metrics"]["accuracy"]))}
            for row in ("WC", "GAT")
        )
        found.append(Evidence(f"graph/{graph}, accuracy in points: WC - GAT", paired_difference(ours, plain)))
    return found


def _by_seed(results: Sequence[Result], task: str, line: str, temperature: float) -> dict[int, float]:
    """The log-likelihood of a line of the study of temperatures, by seed."""
    mine = [r for r in results if r["task"] == task and cold.line_of(r) == line]
    here = [r for r in mine if r["settings"]["method"].get("temperature") == temperature]
    return {int(r["seed"]): v for r in here if (v := finite(r["metrics"]["log_likelihood"])) is not None}


def _cold(lines: Sequence[str], sign: int = 1) -> Elsewhere:
    """What the temperature that validation data choose gains over 1."""

    def speak(other: Mapping[str, Sequence[Result]]) -> list[Evidence]:
        results, found = other.get("cold", ()), []
        for task in sorted({str(r["task"]) for r in results}) or ["imdb/cnn_lstm"]:
            for line in lines:
                best = cold.chosen_temperature([r for r in results if r["task"] == task], line)
                at_best = NONE if best is None else f"{best:g}"
                label = f"{task}, {LL}: {cold.label_of(line, results)} at T = {at_best} - at 1"
                if best is None:
                    found.append(Evidence(label, None))
                    continue
                at, one = (_by_seed(results, task, line, t) for t in (best, 1.0))
                found.append(Evidence(label, _signed(paired_difference(at, one), sign)))
        return found

    return speak


def _pairs(pairs: Sequence[tuple[str, str]]) -> Elsewhere:
    """One line above another of the study of temperatures, at temperature 1."""

    def speak(other: Mapping[str, Sequence[Result]]) -> list[Evidence]:
        results, found = other.get("cold", ()), []
        for task in sorted({str(r["task"]) for r in results}) or ["imdb/cnn_lstm"]:
            for one, two in pairs:
                first, second = (_by_seed(results, task, line, 1.0) for line in (one, two))
                label = f"{task}, {LL}: {cold.label_of(one)} - {cold.label_of(two)}, T = 1"
                found.append(Evidence(label, paired_difference(first, second)))
        return found

    return speak


def _signed(found: Difference | None, sign: int) -> Difference | None:
    if found is None or sign > 0:
        return found
    low, high = (None if end is None else -end for end in (found.high, found.low))
    return found._replace(mean=-found.mean, low=low, high=high)


ELSEWHERE: dict[str, Elsewhere] = {
    "graphs": _graphs,
    "cold gaussian": _cold(("vi", "laplace", "ggn", "ggn_linearised", "fisher", "fisher_linearised")),
    "cold chains": _cold(("serial", "parallel"), sign=-1),
    "parallel chains": _pairs([("parallel", "serial")]),
    "linearised": _pairs([("ggn_linearised", "ggn"), ("fisher_linearised", "fisher")]),
    "linearised vi": _pairs([("vi", "vi_linearised")]),
}


def claims_table(stored: StoredStudy, other: Mapping[str, Sequence[Result]]) -> StudyTable:
    """Every claim, in how many contrasts it holds, is reversed or is not seen."""
    rows = []
    for number, claim in enumerate(CLAIMS, 1):
        verdicts = [found.verdict for found in evidence(claim, stored, other)]
        words = [f"{verdicts.count(v)} {v}" for v in dict.fromkeys(verdicts)]
        rows.append((str(number), claim.text, claim.source, ", ".join(words)))
    head = ("", "claim", "source", "contrasts")
    return StudyTable("What holds and what does not", head, tuple(rows))


def evidence_table(claim: Claim, stored: StoredStudy, other: Mapping[str, Sequence[Result]]) -> StudyTable:
    """The contrasts of a claim one by one, those that have been run."""
    rows = []
    for found in evidence(claim, stored, other):
        if found.difference is None:
            continue
        mean, low, high, _, n = found.difference
        interval = NONE if low is None or high is None else f"{low:+.3f} to {high:+.3f}"
        rows.append((found.label, f"{mean:+.3f}", interval, str(n), found.verdict))
    head = ("contrast, positive as claimed", "effect", "95 % interval", "seeds", "verdict")
    return StudyTable(claim.text, head, tuple(rows), "" if rows else "Not run yet.")

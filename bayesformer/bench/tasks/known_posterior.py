"""The tasks `fidelity/*`: how far a method's posterior is from one that is known."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, Literal

from torch import Tensor, nn

from bayesformer import evaluate
from bayesformer.bench.tasks.curves import curve_of
from bayesformer.bench.tasks.protocol import Ask, Evaluation, Task, TaskData
from bayesformer.core.settings import LATER
from bayesformer.likelihoods import Likelihood
from bayesformer.reference import ReferencePosterior, ReferenceProblem, data_of, problem_of, read
from bayesformer.train.training import Training

NETWORKS = ("own", "attention")
SCORES = ("wasserstein", "mean_error", "rank_error", "total_variation", "agreement")


@dataclass(frozen=True)
class KnownPosterior(Task):
    """How far a posterior is from the true one, on a problem where that is known; priors are N(0, 1)."""

    problem: str
    """name of the reference problem"""
    version: int = 1
    """version of the problem, which its reference and every score belong to"""
    network: Literal["own", "attention"] = field(default="own", metadata=LATER)
    """the problem's network, or another one with attention, whose posterior the reference is not"""

    primary: ClassVar[str] = "wasserstein"

    def __post_init__(self) -> None:
        known = problem_of(self.problem).version
        if self.version != known:
            raise ValueError(f"version of fidelity/{self.problem} must be {known}, which there is; got {self.version}.")
        if self.network not in NETWORKS:
            raise ValueError(f"network must be one of {', '.join(NETWORKS)}; got {self.network!r}.")
        if self.network != "own":
            self._known.attentive()  # refused here where there is none

    @cached_property
    def _known(self) -> ReferenceProblem:
        return problem_of(self.problem)

    @cached_property
    def reference(self) -> ReferencePosterior:
        """The stored reference posterior; an error if it is missing or belongs to another version."""
        return read(self.problem, self._known)

    @property
    def likelihood(self) -> Likelihood:  # type: ignore[override]
        """Of the targets, with known noise."""
        return self._known.likelihood

    @property
    def description(self) -> str:
        """One line about the problem: its model, its data and how its posterior is known."""
        return f"Distance to the posterior. {self._known.description}"

    @property
    def training(self) -> Training:
        """The search for a mode that methods begin with; the library's defaults unless the problem says more."""
        return self._known.training

    def load(self) -> TaskData:
        """Training data and the inputs of every region; no validation data, since a posterior is not chosen by them."""
        data = data_of(self._known, self.reference)
        return TaskData(data.train, None, data.train, data.regions)

    def model(self) -> nn.Module:
        """The problem's model with fresh weights, or the other network that has attention."""
        return self._known.model() if self.network == "own" else self._known.attentive()

    def evaluate(self, ask: Ask, data: TaskData) -> Evaluation:
        """Scores in every region, and their means over regions; as figures ranks of function values, and the function
        itself where it is one of one variable."""
        metrics: dict[str, float] = {}
        figures: dict[str, Any] = {"ranks": {}}
        values: dict[str, tuple[Tensor, Tensor]] = {}
        for region, inputs in data.probes.items():
            ours, theirs = ask(inputs), self.reference.predictive(region, self._known)
            found = evaluate.fidelity(ours, theirs)._asdict()
            metrics |= {f"{name}/{region}": value for name, value in found.items() if value is not None}
            metrics[f"spread_error/{region}"] = _factor(found["spread_ratio"])
            values[region] = evaluate.function_values(ours), evaluate.function_values(theirs)
            shares = evaluate.rank_histogram(*values[region])
            figures["ranks"][region] = [round(share, 4) for share in shares.tolist()]
        overall = {
            name: sum(scores) / len(scores)
            for name in (*SCORES, "spread_error")
            if (scores := [metrics[f"{name}/{region}"] for region in data.probes if f"{name}/{region}" in metrics])
        }
        if curve := curve_of(data, values):
            figures["curve"] = {**curve, "reference": "exact" if self.reference.is_exact else "long HMC"}
            if self.network != "own":
                figures["curve"]["network"] = "another network, a small transformer"
        return Evaluation({**overall, **metrics}, None, None, figures)

    def inputs(self, rows: Tensor) -> Tensor:
        """Rows in the shape of the training inputs, perhaps flattened."""
        shape = next(iter(data_of(self._known, self.reference).regions.values())).shape[1:]
        if rows[0].numel() != math.prod(shape):
            raise ValueError(f"rows of {self.problem} must hold {math.prod(shape)} numbers; got {tuple(rows.shape)}.")
        return rows.reshape(-1, *shape)


def _factor(ratio: float) -> float:
    """|log ratio|: as large for half the spread as for twice; infinite for none."""
    return abs(math.log(ratio)) if ratio > 0 else math.inf

"""Networks whose posterior is known from long HMC, for `study bars`: problems that no default was chosen on.

An MLP on 1-d data with a gap and a small causal transformer, each with 100 and with 1000 examples. What HMC drew of
their outputs is made once per problem and kept beside the results, with R-hat of every function value.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bayesformer.core.seeds import generator
from bayesformer.data import Data
from bayesformer.datasets import toy
from bayesformer.evaluate import fidelity
from bayesformer.fitting import fit
from bayesformer.likelihoods import Gaussian, Likelihood
from bayesformer.methods import Hmc, Method, build_method
from bayesformer.models.transformer import Encoder
from bayesformer.reference.causal_series import NextMean
from bayesformer.reference.making import make_reference
from bayesformer.reference.problem_kind import ProblemData, ReferenceProblem
from bayesformer.reference.repeated_targets import condensed, repeated
from bayesformer.reference.stored import ReferencePosterior, data_of, path_of, read


@dataclass(frozen=True)
class UnseenGap(ReferenceProblem):
    """An MLP 1-24-1 with tanh on two clusters of unequal width, noise .3; long HMC."""

    examples: int = 100
    """training examples N, all at different inputs"""
    hidden: int = 24
    """hidden units"""
    noise: float = 0.3
    """standard deviation of the targets' noise, known"""
    draws: int = 300
    """transitions of each HMC chain that are kept"""

    @property
    def likelihood(self) -> Likelihood:
        """Gaussian with the known noise."""
        return Gaussian(scale=self.noise)

    def data(self) -> ProblemData:
        """cos(3x) - x/2 with noise, x in [-2.2, -.9] and [.6, 1.6]; asked about there, in between, and out to ±4."""
        source = generator(0, "bars", "gap", self.examples)
        place = torch.rand(self.examples, 1, generator=source)
        left = torch.arange(self.examples)[:, None] % 2 == 0
        x = torch.where(left, -2.2 + 1.3 * place, 0.6 + place)
        y = (3 * x).cos() - 0.5 * x + self.noise * torch.randn(self.examples, 1, generator=source)

        def line(low: float, high: float, count: int = 20) -> Tensor:
            return torch.linspace(low, high, count)[:, None]

        regions = {
            "in": torch.cat([line(-2.2, -0.9), line(0.6, 1.6)]),
            "gap": line(-0.7, 0.4),
            "out": torch.cat([line(-4, -2.5), line(1.9, 4)]),
        }
        return ProblemData(Data(x, y), regions)

    def model(self) -> nn.Module:
        """One hidden layer of tanh, from (B, 1) to (B, 1)."""
        return nn.Sequential(nn.Linear(1, self.hidden), nn.Tanh(), nn.Linear(self.hidden, 1))

    @property
    def sampler(self) -> Method:
        """Trajectories about twice as long as the prior is wide."""
        return Hmc(length=2.0, max_leapfrogs=2000, metric="diagonal", draws=self.draws, thin=1, warm_up=60)


@dataclass(frozen=True)
class UnseenSeries(ReferenceProblem):
    """A causal transformer of 641 weights, two heads, on a noisier toy series M3, targets repeated; long HMC."""

    examples: int = 100
    """training series that differ"""
    repeats: int = 1
    """sets of targets for each series"""
    length: int = 4
    """predicted steps of a series"""
    dim: int = 8
    """width of the transformer"""
    heads: int = 2
    """attention heads"""
    variance: float = 1.5
    """of the process's noise"""
    asked: int = 12
    """series of each region"""
    draws: int = 160
    """transitions of each HMC chain that are kept"""

    @property
    def process(self) -> toy.Series:
        """The series M3, cosines of the last value, with this noise."""
        return replace(toy.SERIES["m3"], noise=self.variance)

    @property
    def noise(self) -> float:
        """Standard deviation of the targets' noise, known."""
        return self.process.noise**0.5

    @property
    def likelihood(self) -> Likelihood:
        """Gaussian with the noise of the process."""
        return Gaussian(scale=self.noise)

    def data(self) -> ProblemData:
        """Series of M3, each with several draws of the values that follow; "out" are series three times as large."""

        def part(name: str, count: int) -> Tensor:
            made = toy.generate(self.process, count, generator(0, "bars", "series", name), self.length)
            assert isinstance(made.inputs, Tensor)
            return made.inputs

        inputs = part("train", self.examples)
        regions = {"in": part("in", self.asked), "out": 3 * part("out", self.asked)}
        plain = ProblemData(Data(inputs, torch.zeros_like(inputs)), regions)
        return repeated(plain, self.process.conditional(inputs).mean, self.noise, self.repeats)

    def condensed(self, data: ProblemData) -> tuple[ProblemData, Likelihood]:
        """The means of the targets of every series."""
        return condensed(data, self.noise, self.repeats)

    def model(self) -> nn.Module:
        """One causal block that predicts the mean of the next value."""
        return NextMean(Encoder(self.dim, 1, self.heads, mlp_ratio=2, causal=True, max_length=self.length))

    @property
    def sampler(self) -> Method:
        """Trajectories about twice as long as the prior is wide."""
        return Hmc(length=2.0, max_leapfrogs=2000, metric="diagonal", draws=self.draws, thin=1, warm_up=60)


NETWORKS: dict[str, ReferenceProblem] = {
    "gap MLP N=100": UnseenGap(100),
    "gap MLP N=1000": UnseenGap(1000, draws=200),
    "causal transformer N=100": UnseenSeries(100, 1),
    "causal transformer N=1000": UnseenSeries(100, 10, draws=120),
}


def file_name(name: str) -> str:
    """Under which a problem's reference lies beside the results."""
    return name.lower().replace(" ", "-").replace("=", "")


def truth_of_network(name: str, place: Path) -> ReferencePosterior:
    """HMC's draws of the outputs, made by long chains where they are not stored yet."""
    problem, stored = NETWORKS[name], file_name(name)
    if not path_of(stored, place).exists():
        make_reference(stored, problem, place)
    reference = read(stored, problem, place)
    data_of(problem, reference)
    return reference


def measure_network(
    label: str, settings: Mapping[str, Any], problem: ReferenceProblem, reference: ReferencePosterior, seed: int
) -> dict[str, Any]:
    """One fit of a function that builds models, and ratio of spreads and distance to HMC by region."""
    data, began = problem.data(), time.perf_counter()
    method = build_method(label.split(maxsplit=1)[0], dict(settings))
    pair = data.train.inputs, data.train.targets
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        posterior = fit(problem.model, pair, likelihood=problem.likelihood, method=method, seed=seed, progress=False)
    seconds = time.perf_counter() - began
    found = {
        region: fidelity(posterior.predict(inputs), reference.predictive(region, problem))
        for region, inputs in data.regions.items()
    }
    return {
        "spread": {region: scores.spread_ratio for region, scores in found.items()},
        "distance": {region: scores.wasserstein for region, scores in found.items()},
        "doubts": [doubt.check for doubt in posterior.doubts],
        "seconds": seconds,
    }


def truths_table(place: Path) -> str:
    """How the posteriors of the networks were made: chains, R-hat by region, and their cost."""
    lines = [
        "| problem | weights | HMC | largest R-hat | smallest ESS | gradient evaluations | minutes |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, problem in NETWORKS.items():
        if not path_of(file_name(name), place).exists():
            continue
        facts = read(file_name(name), problem, place).facts
        weights = sum(p.numel() for p in problem.model().parameters())
        rhat = " / ".join(f"{values['largest']:.3f}" for values in facts["rhat"].values())
        ess = " / ".join(f"{values['least']:.0f}" for values in facts["ess"].values())
        made = f"{facts['chains']} × {facts['draws']}"
        cost = f"{facts['diagnostics']['leapfrogs']:,} | {facts['seconds'] / 60:.0f}"
        lines.append(f"| {name} | {weights} | {made} | {rhat} | {ess} | {cost} |")
    return "\n".join(lines)

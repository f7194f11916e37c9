"""Stored reference posteriors checked again: recomputed where they are exact, else by what was kept of the chains."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from bayesformer.core.types import Draws
from bayesformer.evaluate.posterior_distance import function_values, wasserstein
from bayesformer.inference.diagnostics import split_rhat
from bayesformer.model.skeleton import Skeleton
from bayesformer.model.space import Space
from bayesformer.reference.problem_kind import ProblemData, ReferenceProblem
from bayesformer.reference.problems import PROBLEMS, problem_of
from bayesformer.reference.stored import ReferencePosterior, data_of, read

BAR = 1.02
"""R-hat that every function value of a reference is to stay below."""
EXACT = 1e-5
"""Relative difference of a recomputed closed form, in float64, that another machine may show."""
ROUNDING = 2e-3
"""Difference of recomputed float32 outputs, in standard deviations of the posterior."""


class Finding(NamedTuple):
    """One checked fact: whether it is as it must be, and the sentence to say."""

    right: bool
    sentence: str


def check(name: str, place: Path | None = None) -> list[Finding]:
    """All findings on a stored reference; one that is missing, damaged or of another version is an error."""
    problem = problem_of(name)
    reference = read(name, problem, place)
    data = data_of(problem, reference)
    if reference.is_exact:
        return [_recomputed(problem, reference, data)]
    regions = reference.regions
    return [_witnesses(problem, reference, data), *(_chains(problem, reference, region) for region in regions)]


def _recomputed(problem: ReferenceProblem, reference: ReferencePosterior, data: ProblemData) -> Finding:
    laws = problem.exact(data)
    assert laws is not None
    worst = 0.0
    for region, law in laws.items():
        scale = law.variance.sqrt()
        shift = (reference.tensors[f"mean.{region}"] - law.mean).abs() / scale
        stretch = (reference.tensors[f"variance.{region}"] / law.variance - 1).abs()
        worst = max(worst, shift.max().item(), stretch.max().item())
    return Finding(worst < EXACT, f"closed form recomputed: largest relative difference {worst:.1e}")


def _witnesses(problem: ReferenceProblem, reference: ReferencePosterior, data: ProblemData) -> Finding:
    """The stored weights give the stored outputs with the model as it is now."""
    model = problem.model().eval()
    shell = Skeleton(model, Space.of(model)).shell(gradients=False)
    worst = 0.0
    with torch.no_grad():
        for region, inputs in data.regions.items():
            stored = reference.tensors[f"witness.{region}"]
            outputs = []
            for theta in reference.tensors["witness.theta"]:
                shell.load(theta)
                outputs.append(shell(inputs).clone())
            scale = reference.traces(region).flatten(0, 1).std(0)
            worst = max(worst, ((torch.stack(outputs) - stored).abs() / scale).max().item())
    return Finding(
        worst < ROUNDING, f"outputs of {len(stored)} stored draws recomputed: largest difference {worst:.1e} sd"
    )


def _chains(problem: ReferenceProblem, reference: ReferencePosterior, region: str) -> Finding:
    traces = traces_in(problem, reference, region)
    made, again = reference.facts["rhat"][region]["largest"], split_rhat(traces).max().item()
    verdict = f"below {BAR}" if made < BAR else f"NOT below {BAR}"
    chains, draws = traces.shape[:2]
    apart = floor(traces)
    return Finding(
        made < BAR,
        f"{region}: R-hat of every function value at most {made:.4f}, {verdict}, over {chains} chains of "
        f"{reference.facts['draws']} draws ({again:.4f} over the {draws} kept); a chain is {apart:.2f} sd from the "
        "others",
    )


def traces_in(problem: ReferenceProblem, reference: ReferencePosterior, region: str) -> Tensor:
    """(chains, draws, ...): function values of the stored draws of a region."""
    stored = reference.traces(region)
    values = function_values(problem.likelihood.predictive(Draws(stored.flatten(0, 1))))
    return values.unflatten(0, stored.shape[:2])


def floor(traces: Tensor) -> float:
    """Mean Wasserstein distance of each chain to all others together: what a score cannot tell from 0."""
    chains = len(traces)
    others = [torch.cat([traces[j] for j in range(chains) if j != i]) for i in range(chains)]
    return sum(wasserstein(traces[i], others[i]).mean().item() for i in range(chains)) / chains


def state(name: str, place: Path | None = None) -> str:
    """One line on what is stored of a problem: how it was made and how far its chains agree, or why it is no use."""
    try:
        facts = read(name, problem_of(name), place).facts
    except FileNotFoundError:
        return "not stored"
    except ValueError as error:  # damaged, or of another version
        return f"not usable: {error}"
    if facts["kind"] == "exact":
        return "stored, exact"
    largest = max(values["largest"] for values in facts["rhat"].values())
    effective = min(values["least"] for values in facts["ess"].values())
    return (
        f"stored, {facts['chains']} chains of {facts['draws']} draws, R-hat at most {largest:.3f}, "
        f"effective sample size at least {effective:.0f}"
    )


def table(place: Path | None = None) -> str:
    """Markdown: every stored reference, how it was made, and R-hat and effective sample size by region."""
    lines = [
        "| reference | weights | N | made by | largest R-hat | smallest ESS | gradient evaluations |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in PROBLEMS:
        problem = problem_of(name)
        try:
            facts = read(name, problem, place).facts
        except FileNotFoundError:
            continue
        weights = sum(p.numel() for p in problem.model().parameters())
        size = f"{name} | {weights:,} | {facts['data']['train.targets'][0][0]:,}"
        if facts["kind"] == "exact":
            lines.append(f"| {size} | closed form | – | – | – |")
            continue
        rhat = " / ".join(f"{values['largest']:.3f}" for values in facts["rhat"].values())
        ess = " / ".join(f"{values['least']:,.0f}" for values in facts["ess"].values())
        made = f"{facts['method']['name']}, {facts['chains']} × {facts['draws']}"
        lines.append(f"| {size} | {made} | {rhat} | {ess} | {facts['diagnostics']['leapfrogs']:,} |")
    return "\n".join(lines)

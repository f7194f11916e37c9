"""Reference posteriors made: in closed form where there is one, else by long full-batch HMC in several chains."""

from __future__ import annotations

import platform
import shutil
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bayesformer.core.progress import Reporter, Silent
from bayesformer.core.types import Draws
from bayesformer.data import as_batches
from bayesformer.evaluate.posterior_distance import function_values
from bayesformer.inference.diagnostics import effective_sample_size, split_rhat
from bayesformer.likelihoods import Likelihood
from bayesformer.methods import Problem
from bayesformer.posterior import Posterior
from bayesformer.reference.problem_kind import ProblemData, ReferenceProblem
from bayesformer.reference.problems import problem_of
from bayesformer.reference.stored import ReferencePosterior, folder, summary_of, write
from bayesformer.version import __version__

STORED = 1000
"""Draws kept of all chains together, evenly spaced."""
WITNESSES = 8
"""Draws whose weights are kept, too: a later version of the model must give the same outputs from them."""
CHECKPOINTS = ".making"


def make(name: str, place: Path | None = None, reporter: Reporter | None = None, workers: int = 1) -> Path:
    """Compute the reference posterior of a problem and write it; returns its file.

    A sampler that was interrupted resumes from its checkpoints, which lie beside the references until it has ended.
    With several workers chains run at the same time.
    """
    return make_reference(name, problem_of(name), place or folder(), reporter, workers)


def make_reference(
    name: str, problem: ReferenceProblem, place: Path, reporter: Reporter | None = None, workers: int = 1
) -> Path:
    """Compute the reference posterior of a problem that is given and write it under `name`; returns its file."""
    data = problem.data()
    exact = problem.exact(data)
    if exact is None:
        shown = Forecast(reporter or Silent())
        tensors, facts = sampled(problem, data, place / CHECKPOINTS / name, shown, workers)
    else:
        tensors = {f"mean.{region}": law.mean for region, law in exact.items()}
        tensors |= {f"variance.{region}": law.variance for region, law in exact.items()}
        facts = {"kind": "exact"}
    if problem.stores_data:
        tensors |= data.tensors()
    facts |= {
        "problem": problem.settings,
        "regions": list(data.regions),
        "data": summary_of(data),
        "versions": {"bayesformer": __version__, "torch": torch.__version__, "python": platform.python_version()},
    }
    path = write(ReferencePosterior(name, facts, tensors), place)
    shutil.rmtree(place / CHECKPOINTS / name, ignore_errors=True)
    return path


def sampled(
    problem: ReferenceProblem, data: ProblemData, checkpoint: Path, reporter: Reporter, workers: int = 1
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Outputs under draws of a long chain, thinned, with R-hat of every function value; and how they were made."""
    small, likelihood = problem.condensed(data)
    posterior = problem.sampler.fit(
        Problem(
            model=problem.model,
            likelihood=likelihood,
            data=as_batches(small.train, "train"),
            training=problem.training,
            strategy="processes" if workers > 1 else "auto",
            workers=workers if workers > 1 else None,
            checkpoint=checkpoint,
            reporter=reporter,
        )
    )
    chains = int(posterior.facts["chains"])
    tensors, found = thinned(problem, data, posterior, chains)
    facts = {
        "kind": "hmc",
        "chains": chains,
        "draws": len(posterior.theta) // chains,
        **found,
        "seconds": round(float(posterior.facts["seconds"]), 1),
        "method": posterior.facts["method"],
        "diagnostics": posterior.facts["diagnostics"],
        "doubts": [doubt.sentence for doubt in posterior.doubts],
    }
    return tensors, facts


def thinned(
    problem: ReferenceProblem, data: ProblemData, posterior: Posterior, chains: int
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Evenly spaced draws of every chain, (chains, draws, ...), and R-hat and ESS of all of them by region."""
    kept = evenly(len(posterior.theta) // chains, STORED // chains)
    few = evenly(len(posterior.theta), WITNESSES)
    tensors = {"witness.theta": posterior.theta[few].float()}
    rhat, ess = {}, {}
    for region, inputs in data.regions.items():
        outputs = posterior.outputs(inputs)
        assert isinstance(outputs, Draws)
        traces = traces_of(outputs.values, problem.likelihood, chains)
        values = split_rhat(traces)
        rhat[region] = {"largest": values.max().item(), "median": values.median().item()}
        ess[region] = {
            n: f(effective_sample_size(traces)).item() for n, f in (("least", torch.min), ("median", torch.median))
        }
        tensors[f"rhat.{region}"] = values.float()
        tensors[f"outputs.{region}"] = outputs.values.unflatten(0, (chains, -1))[:, kept].float().clone()
        tensors[f"witness.{region}"] = outputs.values[few].float()
    return tensors, {"rhat": rhat, "ess": ess}


def traces_of(outputs: Tensor, likelihood: Likelihood, chains: int) -> Tensor:
    """(chains, draws, ...): function values of outputs (L, B, ...), chain after chain."""
    return function_values(likelihood.predictive(Draws(outputs))).unflatten(0, (chains, -1))


def evenly(count: int, most: int) -> Tensor:
    """Indices of at most `most` of `count` things, evenly spaced, the last among them."""
    step = -(-count // most)
    return torch.arange(count - 1, -1, -step).flip(0)


class Forecast:
    """Passes news on with the time that is left, by the pace of each task so far."""

    def __init__(self, reporter: Reporter) -> None:
        self.reporter = reporter
        self.began: dict[str, tuple[float, int]] = {}

    def update(self, task: str, done: int, total: int, note: str = "") -> None:
        """Add "about 3 min left" to the note, once something has been done."""
        now = time.monotonic()
        since, first = self.began.setdefault(task, (now, done))
        if first < done < total:
            left = (now - since) / (done - first) * (total - done)
            words = f"about {left / 60:.0f} min left" if left > 90 else f"about {left:.0f} s left"
            note = f"{note}, {words}" if note else words
        self.reporter.update(task, done, total, note)

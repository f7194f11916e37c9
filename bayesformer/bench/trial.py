"""One cell from its settings to its record: fit, predict, judge."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from bayesformer import evaluate
from bayesformer.attention.attention_maps import picture
from bayesformer.bench import chain_traces as traces
from bayesformer.bench.costs import cost_of
from bayesformer.bench.peak_memory import PeakMemory
from bayesformer.bench.planning import Cell
from bayesformer.bench.provenance import provenance
from bayesformer.bench.records import CHECKPOINTS, POSTERIORS
from bayesformer.bench.tasks import TASKS, Evaluation, TaskData, describe
from bayesformer.core.doubts import recorded
from bayesformer.core.effort import counting
from bayesformer.core.errors import DamagedFileError
from bayesformer.core.progress import Reporter
from bayesformer.core.settings import summary
from bayesformer.core.strategy import Strategy
from bayesformer.data import Data, as_batches
from bayesformer.methods import EVERY_METHOD, Ensemble, Method, Problem
from bayesformer.posterior import Posterior
from bayesformer.train.problem import Models
from bayesformer.train.training import Training

SHOWN = 20
"""Validation examples whose predictions are followed along a chain."""

FIT_FACTS = ("epochs", "best_epoch", "strategy", "init", "converged")
"""What a record keeps of the facts of a posterior's making."""


@dataclass(frozen=True)
class Options:
    """How cells are run: where, with how many processes, what is kept. Results do not depend on it."""

    results: Path
    workers: int = 1  # cells at once; the members of a single cell, with strategy "processes"
    strategy: Strategy = "auto"
    keep_posteriors: bool = True
    checkpoint_seconds: float = 10.0
    networks: Path | None = None  # trained networks that are not trained again
    pictures: Literal["all", "first seed", "none"] = "all"  # of which cells data for figures are kept
    deadline: float | None = None  # time.time() after which no cell is begun

    def __post_init__(self) -> None:
        if isinstance(self.workers, bool) or not isinstance(self.workers, int) or self.workers < 1:
            raise ValueError(f"workers must be a whole number of at least 1; got {self.workers!r}.")

    def pictured(self, seed: int) -> bool:
        """Whether data for figures are kept of a cell of this seed."""
        return self.pictures == "all" or (self.pictures == "first seed" and seed == 0)


def run_cell(cell: Cell, options: Options, reporter: Reporter) -> dict[str, Any]:
    """Train the cell's posterior, judge it on the task's test data and return the record of it.

    Raises OracleBeatenError if its score is above that of the true process, which only a leak can do.
    """
    task, training, method = cell.build()
    data = task.load()
    started = datetime.now(UTC)
    problem = Problem(
        model=task.model,
        likelihood=task.likelihood,
        data=as_batches(data.train, "train"),
        validation=None if data.validation is None else as_batches(data.validation, "validation"),
        training=training,
        seed=cell.seed,
        strategy=options.strategy,
        workers=options.workers if options.strategy == "processes" else None,
        checkpoint=options.results / CHECKPOINTS / cell.trained_in,
        checkpoint_seconds=options.checkpoint_seconds,
        networks=options.networks,
        reporter=reporter,
    )
    start_seconds = 0.0
    if cell.start is not None:
        problem, start_seconds = started_from_networks(problem, cell)
    resumed = problem.checkpoint is not None and problem.checkpoint.exists()
    with PeakMemory() as memory:
        with counting() as effort:
            posterior = _fit(method, problem)
        evaluation = task.evaluate(posterior.predict, data)
    validation = _validation_score(posterior, data.validation)
    _add_diagnostics(evaluation, cell, posterior, data)
    if evaluation.gap is not None:
        evaluate.check_not_above(evaluation.gap, label=str(cell))
    if options.keep_posteriors:
        made_for = {"name": cell.task, "settings": dict(cell.task_settings)}
        kept = replace(posterior, facts={**posterior.facts, "task": made_for})
        kept.save(options.results / POSTERIORS / cell.folder)
    cost = cost_of(posterior, data.test, memory.mib)
    if cell.start is not None:
        cost["start_seconds"] = round(start_seconds, 3)
    whole = not resumed and problem.networks is None and cell.start is None
    if whole and posterior.facts.get("strategy") != "processes":  # else not all gradients were counted here
        cost["gradient_epochs"] = round(effort.examples / len(data.train), 2)
    if not options.pictured(cell.seed):
        evaluation = evaluation._replace(figures={})
    cost["cell_seconds"] = round((datetime.now(UTC) - started).total_seconds(), 1)
    return _record(cell, posterior, evaluation, validation, cost, started)


def started_from_networks(problem: Problem, cell: Cell) -> tuple[Problem, float]:
    """The problem with trained networks as its models, one per chain or member, and the seconds of their training."""
    assert cell.start is not None
    settings = cell.method_settings
    asked = settings.get("chains") or settings.get("members")
    count = asked if isinstance(asked, int) else 1  # chains="auto" all begin at one network
    folder = None if problem.checkpoint is None else problem.checkpoint / "start"
    training = Training(**cell.start)
    found = Ensemble(count).fit(replace(problem, training=training, checkpoint=folder))
    models = tuple(found.module(i).train() for i in range(count))
    return replace(problem, model=Models(models)), float(found.facts["seconds"])


def _fit(method: Method, problem: Problem) -> Posterior:
    trained = isinstance(problem.model, Models)
    try:
        return getattr(method, "fit_trained", method.fit)(problem) if trained else method.fit(problem)
    except DamagedFileError as error:
        if problem.checkpoint is None or not problem.checkpoint.exists():
            raise
        advice = f"Delete the checkpoints in {problem.checkpoint} and run again: the cell is then trained anew."
        raise DamagedFileError(f"{error} {advice}") from error


def _validation_score(posterior: Posterior, validation: Data | None) -> float | None:
    """Mean log-likelihood of the predictive on validation data: what settings are chosen by; None without such data."""
    if validation is None:
        return None
    predictive = posterior.predict(validation)
    return evaluate.mean_log_likelihood(predictive, validation.targets, validation.mask)


def _add_diagnostics(evaluation: Evaluation, cell: Cell, posterior: Posterior, data: TaskData) -> None:
    """Traces of a posterior with enough draws per chain, and attention maps of one with stochastic attention."""
    if len(posterior.theta) >= traces.LEAST * posterior.facts.get("chains", len(posterior.theta)):
        shown = data.train if data.validation is None else data.validation
        few = shown.take(slice(0, SHOWN)).inputs
        evaluation.metrics.update(traces.summarise(traces.function_traces(posterior, few)))
        evaluation.figures["traces"] = traces.picture(posterior, few)
    if cell.seed == 0 and posterior.draws > 1 and posterior.has_stochastic_attention:  # of one seed: maps are large
        evaluation.figures["attention"] = picture(posterior.attention_maps(data.test.take(slice(0, 1)).inputs))


def _record(
    cell: Cell,
    posterior: Posterior,
    evaluation: Evaluation,
    validation: float | None,
    cost: dict[str, Any],
    started: datetime,
) -> dict[str, Any]:
    gap = evaluation.gap
    oracle = None
    if gap is not None:
        oracle = {"log_likelihood": evaluation.oracle, "gap": gap.mean, "gap_se": gap.standard_error}
    return {
        "task": cell.task,
        "task_description": describe(cell.task),
        "method": cell.method,
        "method_description": summary(EVERY_METHOD[cell.method]),
        "variant": cell.variant,
        "seed": cell.seed,
        "key": cell.key,
        "settings": {
            "task": dict(cell.task_settings),
            "training": dict(cell.training),
            "method": dict(cell.method_settings),
            **({} if cell.start is None else {"start": dict(cell.start)}),
        },
        "started": started.isoformat(timespec="seconds"),
        **provenance(),
        "device": str(posterior.theta.device),
        "fit": {name: posterior.facts[name] for name in FIT_FACTS if name in posterior.facts},
        "doubts": [doubt.check for doubt in posterior.doubts],
        "checks": _checks(posterior),
        "validation": validation,
        "cost": cost,
        "primary": TASKS[cell.task]().primary,
        "metrics": evaluation.metrics,
        "oracle": oracle,
        "figures": evaluation.figures,
    }


def _checks(posterior: Posterior) -> list[dict[str, Any]] | None:
    """What the checks of the fit found, with their sentences; None if nothing was checked."""
    if "doubts" not in posterior.facts and not posterior.doubts:
        return None
    found: list[dict[str, Any]] = recorded(posterior.doubts)["doubts"]
    return found

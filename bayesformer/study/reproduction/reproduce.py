"""Runs what is missing of the study, wave by wave, and says how long the rest will take.

A wave is all that may be done side by side: cells of one stage of a round. Results, choices and networks are on disk as
soon as they are there, so that a killed run goes on where it was.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from bayesformer.bench.planning import Cell
from bayesformer.bench.records import read_results
from bayesformer.bench.runner import Outcome, check_writable, run
from bayesformer.bench.tasks import TASKS
from bayesformer.bench.trial import Options
from bayesformer.core.progress import Reporter, Silent
from bayesformer.core.settings import override
from bayesformer.study.reproduction.agenda import Duty, StudyFolders, agenda
from bayesformer.study.reproduction.choices import StudyChoices, guessed, read_choices
from bayesformer.study.reproduction.description import Description
from bayesformer.study.reproduction.forecast import Forecaster, kind_of
from bayesformer.study.reproduction.study_cells import column_cells, tuning_cells
from bayesformer.study.weight_networks import train_networks
from bayesformer.study.weight_study import read, study_weights, write, write_priors

WEIGHTS_SECONDS = 90.0  # laws and figures of one task, without the networks
RESAMPLES = 20  # bootstrap samples of networks, of which priors need none


@dataclass(frozen=True)
class Ended:
    """What a call did: cells run, cells that failed with their errors, and duties that are left."""

    done: int
    failed: list[tuple[Cell, str]]
    left: int


@dataclass(frozen=True)
class Reproduction:
    """The study in its folders: what is missing of it, how long that takes, and running it."""

    description: Description
    folders: StudyFolders
    workers: int = 1
    reporter: Reporter = field(default_factory=Silent)
    say: Callable[[str], None] = print

    def choices(self) -> StudyChoices:
        """What was chosen so far; priors that a stored weight study gives are taken up."""
        found = read_choices(self.folders.choices, self.description)
        for task in self.description.tasks:
            path = self.folders.statistics(task)
            if task not in found.priors and path.exists():
                study = read(path)
                if study.facts["networks"] >= self.description.budget(task).first:
                    found.fix_priors(task, study.priors(), study.facts["networks"])
        return found

    def agenda(self, only: str | None = None) -> list[Duty]:
        """What is still to be done, in the order of the plan."""
        return agenda(self.description, self.choices(), self.folders, only)

    def check_data(self, only: str | None = None) -> None:
        """Read the data of every task that has something to do: what is missing or damaged is said before any work."""
        for task in dict.fromkeys(duty.task for duty in self.agenda(only)):
            override(TASKS[task](), self.description.budget(task).settings, task).load()

    def forecast(self, only: str | None = None) -> list[tuple[Duty, float]]:
        """Every duty with its seconds, by a few steps of each kind of cell."""
        duties, guess = self.agenda(only), guessed(self.choices(), self.description)
        cells = [self._expected(duty, guess) for duty in duties]
        forecaster = Forecaster(self.folders.networks / "times.json", self.reporter)
        forecaster.learn({kind_of(cell): cell for found in cells for cell in found})
        return [(duty, self._seconds(duty, found, forecaster)) for duty, found in zip(duties, cells, strict=True)]

    def _expected(self, duty: Duty, guess: StudyChoices) -> Sequence[Cell]:
        if duty.column is None or duty.cells is not None:
            return duty.cells or ()
        if duty.stage == "choice":
            return tuning_cells(self.description, duty.column, duty.task, guess) or ()
        return column_cells(self.description, duty.column, duty.task, guess, range(duty.number), duty.length) or ()

    @staticmethod
    def _seconds(duty: Duty, cells: Sequence[Cell], forecaster: Forecaster) -> float:
        if duty.stage == "priors":
            return WEIGHTS_SECONDS
        return sum(forecaster.seconds(cell) for cell in cells)

    def run(self, only: str | None = None, hours: float | None = None) -> Ended:
        """Do what is missing, in waves, until nothing is left, time is up, or nothing more can be begun."""
        check_writable(self.folders.results)
        self.check_data(only)
        self.choices().save()
        deadline = None if hours is None else time.time() + 3600 * hours
        watch = TimeLeft(self.forecast(only), self.workers, self.reporter)
        done, failed = 0, []
        seen: set[tuple[str, str, int]] = set()  # stages that failed are not tried twice in one call
        while deadline is None or time.time() < deadline:
            wave = self._wave([duty for duty in self.agenda(only) if _name(duty) not in seen])
            if not wave:
                break
            outcome = self._do(wave, deadline, watch)
            done += len(outcome.done)
            failed += outcome.failed
            seen |= {_name(duty) for duty in wave}
            if outcome.left:
                break
        return Ended(done, failed, len(self.agenda(only)))

    @staticmethod
    def _wave(duties: Sequence[Duty]) -> list[Duty]:
        """The first duties that are ready and may be done side by side."""
        ready = [duty for duty in duties if duty.ready]
        return list(next(iter(groupby(ready, key=lambda duty: duty.order)))[1]) if ready else []

    def _do(self, wave: Sequence[Duty], deadline: float | None, watch: TimeLeft) -> Outcome:
        stage = wave[0].stage
        if stage == "priors":
            for duty in wave:
                self._derive(duty)
            return Outcome([], [], 0)
        folder = self.folders.tuning if stage == "choice" else self.folders.results
        options = Options(
            folder,
            self.workers,
            keep_posteriors=False,
            networks=self.folders.networks,
            pictures="none" if stage == "choice" else "first seed",
            deadline=deadline,
        )
        cells = [cell for duty in wave for cell in duty.cells or ()]
        self.say(f"{wave[0].task.split('/')[0]}, round {wave[0].round}, {stage}: {len(cells)} cells")
        outcome = run(cells, options, watch, watch.ended)
        if stage == "choice":
            self._choose(wave)
        return outcome

    def _choose(self, wave: Sequence[Duty]) -> None:
        """Fix the choice of every column whose tries have all been run; tries that failed count as the worst."""
        choices = self.choices()
        stored = {(r["key"], r["seed"]): r["validation"] for r in read_results(self.folders.tuning).results}
        for duty in wave:
            assert duty.column is not None
            cells = tuning_cells(self.description, duty.column, duty.task, choices) or []
            scores = [stored.get((cell.key, cell.seed)) for cell in cells]
            failures = [(self.folders.tuning / "failed" / cell.path).exists() for cell in cells]
            ended = all(score is not None or failure for score, failure in zip(scores, failures, strict=True))
            if ended and any(score is not None for score in scores):
                chosen = choices.choose(duty.task, duty.column, scores)
                self.say(f"chosen for {duty.column.label} on {duty.task}: {_told(chosen)}")

    def _derive(self, duty: Duty) -> None:
        """Fit laws to the weights of the networks that there are, and fix them as priors of the task."""
        trained = train_networks(duty.task, duty.networks, self.folders.networks, reporter=self.reporter)
        study = study_weights(trained, resamples=RESAMPLES, reporter=self.reporter)
        path = self.folders.statistics(duty.task)
        if not path.exists():
            write(study, path)
            write_priors(study, path.with_suffix(".toml"))
        choices = self.choices()
        choices.fix_priors(duty.task, study.priors(), duty.networks)
        choices.save()
        self.say(f"priors of {duty.task} from {duty.networks} networks")


class TimeLeft:
    """A reporter that says with every cell how long the rest will take, by the forecast and how true it was so far."""

    def __init__(self, forecast: Sequence[tuple[Duty, float]], workers: int, reporter: Reporter) -> None:
        self.workers, self.reporter = workers, reporter
        self.total = sum(seconds for _, seconds in forecast)
        self.seconds = {
            (cell.key, cell.seed): seconds / len(duty.cells)
            for duty, seconds in forecast
            if duty.cells
            for cell in duty.cells
        }
        self.passed, self.began = 0.0, time.monotonic()

    def ended(self, cell: Cell) -> None:
        """Count a cell as done, with the time that was foreseen."""
        self.passed += self.seconds.get((cell.key, cell.seed), 0.0)

    @property
    def left(self) -> float:
        """Hours until everything is done, with all workers."""
        elapsed = time.monotonic() - self.began
        truth = elapsed * self.workers / self.passed if self.passed > 60 else 1.0
        return truth * max(self.total - self.passed, 0.0) / self.workers / 3600

    def update(self, task: str, done: int, total: int, note: str = "") -> None:
        """Pass the news on, with the hours that are left."""
        told = f"{note}, about {self.left:.1f} h left in all" if task == "cells" else note
        self.reporter.update(task, done, total, told)


def _name(duty: Duty) -> tuple[str, str, int]:
    return duty.task, f"{duty.stage} {duty.label}", duty.round


def _told(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in settings.items())


def plan_text(forecast: Sequence[tuple[Duty, float]], workers: int) -> str:
    """Markdown: cells and hours by round, tasks and stage, and in all."""
    rows = ["| round | tasks | stage | cells | core-hours |", "|---|---|---|---|---|"]
    groups: dict[tuple[int, int, str, str], list[tuple[Duty, float]]] = {}
    for duty, seconds in forecast:
        groups.setdefault((*duty.order[:2], duty.task.split("/")[0], duty.stage), []).append((duty, seconds))
    for (turn, _, task, stage), found in groups.items():
        number = sum(duty.number for duty, _ in found)
        rows.append(f"| {turn} | {task} | {stage} | {number} | {sum(s for _, s in found) / 3600:.2f} |")
    total = sum(seconds for _, seconds in forecast) / 3600
    rows += ["", f"{total:.1f} core-hours, {total / workers:.1f} hours with {workers} workers."]
    return "\n".join(rows)

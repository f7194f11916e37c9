"""What validation data have chosen, and the priors that networks gave: written once, then fixed.

    {"format": ..., "budgets": {...}, "priors": {TASK: {...}}, "chosen": {TASK: {COLUMN: {...}}}}

A choice holds every try with its validation score, so that a reader sees what it rests on. A file that was made with
other tries or budgets than the description has now is refused: results that rest on it would not be comparable.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bayesformer.bench.provenance import provenance
from bayesformer.core.errors import DamagedFileError
from bayesformer.core.storage import read_json, with_numbers, write_json
from bayesformer.study.reproduction.description import Column, Description

FORMAT = "choices of the study 1"
FIXED = ("extra", "draws", "settings", "tuning")
"""What of a task's budget stored results depend on; more seeds or networks only add to them."""
HEAVY = ("normal", "laplace", "logistic")
"""Laws whose log density has no mean under a Cauchy posterior."""


@dataclass
class StudyChoices:
    """The content of the file, and where it is."""

    path: Path
    priors: dict[str, dict[str, Any]] = field(default_factory=dict)
    chosen: dict[str, dict[str, Any]] = field(default_factory=dict)
    budgets: dict[str, dict[str, Any]] = field(default_factory=dict)

    def save(self) -> None:
        """Write the file with everything that is held now."""
        content = {"format": FORMAT, "budgets": self.budgets, "priors": self.priors, "chosen": self.chosen}
        write_json(self.path, content)

    def of(self, task: str, column: Column) -> Mapping[str, Any] | None:
        """The settings chosen for a column; none to choose are {}, and None means not chosen yet."""
        if not column.tries and column.like is None:
            return {}
        found = self.chosen.get(task, {}).get(column.chooser)
        return None if found is None else found["settings"]

    def choose(self, task: str, column: Column, validation: Sequence[float | None]) -> Mapping[str, Any]:
        """Keep the try with the best validation score; one that failed or diverged has None."""
        scores = [-math.inf if score is None or math.isnan(score) else score for score in validation]
        if max(scores) == -math.inf:
            raise ValueError(f"{column.label} on {task}: none of its {len(scores)} tries has a validation score.")
        best = column.tries[scores.index(max(scores))]
        self.chosen.setdefault(task, {})[column.label] = {
            "settings": dict(best),
            "tries": [dict(settings) for settings in column.tries],
            "validation": list(validation),
            "commit": provenance()["commit"],
        }
        self.save()
        return best

    def fix_priors(self, task: str, laws: Mapping[str, str], networks: int) -> None:
        """Hold the priors that a weight study gave, if there are none yet; `save` makes that last."""
        self.priors.setdefault(task, {"networks": networks, "laws": dict(laws)})

    def derived(self, task: str, heavy: bool = False) -> dict[str, str] | None:
        """The priors of a task by parameter, None before there are any; `heavy` makes every law with lighter tails than
        a Cauchy's a Cauchy of the same place and scale."""
        if task not in self.priors:
            return None
        laws = self.priors[task]["laws"]
        return {name: heavy_law(law) if heavy else law for name, law in laws.items()}


def guessed(choices: StudyChoices, description: Description) -> StudyChoices:
    """The choices, with the first try for what has not been chosen and one law per missing prior: for a forecast."""
    found = StudyChoices(
        choices.path, dict(choices.priors), {task: dict(made) for task, made in choices.chosen.items()}
    )
    for task in description.tasks:
        found.priors.setdefault(task, {"networks": 0, "laws": {"*": "normal(0, 1)"}})
        for column in description.on(task):
            if column.tries:
                found.chosen.setdefault(task, {}).setdefault(column.label, {"settings": column.tries[0]})
    return found


def heavy_law(law: str) -> str:
    """A law as settings have it, as a Cauchy if its tails are lighter: "normal(0, 0.3)" -> "cauchy(0, 0.3)"."""
    family, numbers = law.split("(", 1)
    return f"cauchy({numbers}" if family in HEAVY else law


def read_choices(path: Path, description: Description) -> StudyChoices:
    """The choices in a file, or none; refused where they were made for another description."""
    now = {budget.name: {name: asdict(budget)[name] for name in FIXED} for budget in description.budgets}
    if not path.exists():
        return StudyChoices(path, budgets=now)
    content = with_numbers(read_json(path, "choices of the study"))
    if content.get("format") != FORMAT:
        raise DamagedFileError(f"choices {path} must be of the format {FORMAT!r}; got {content.get('format')!r}.")
    for name, then in content["budgets"].items():
        for part in FIXED:
            if name in now and now[name][part] != then[part]:
                raise ValueError(
                    f"{part} of {name} must be {then[part]!r}, as the results beside {path} were made; the description "
                    f"says {now[name][part]!r}. Restore it, or give another folder with --results."
                )
    known = {column.label: column for column in description.columns}
    for task, chosen in content["chosen"].items():
        for label, choice in chosen.items():
            if label in known and [dict(settings) for settings in known[label].tries] != choice["tries"]:
                raise ValueError(
                    f"tries of {label!r} must be those that {path} chose among on {task}; the description has others. "
                    "Restore them, or give another folder with --results."
                )
    return StudyChoices(path, content["priors"], content["chosen"], {**now, **content["budgets"]})

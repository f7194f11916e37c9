"""Reference posteriors on disk: one safetensors file each, with its facts as JSON inside, under one checksum.

They are looked for in the folder named by BAYESFORMER_REFERENCES, else in `references/` of the checkout that the
package lies in, else in `references/` of the working folder.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from bayesformer.core.storage import read_checked, with_texts, write_tensors
from bayesformer.core.types import Draws, GaussianOutputs, Outputs
from bayesformer.likelihoods.predictive import Predictive
from bayesformer.reference.problem_kind import ProblemData, ReferenceProblem

FOLDER = "BAYESFORMER_REFERENCES"
CLOSE = 1e-4
"""Relative difference up to which summaries of data are the same; products of matrices differ between machines."""


@dataclass(frozen=True)
class ReferencePosterior:
    """A stored reference posterior: outputs at the inputs of every region, and how they were made."""

    name: str
    facts: dict[str, Any]
    tensors: dict[str, Tensor]

    @property
    def regions(self) -> list[str]:
        """Names of the regions of inputs, in the order of the problem."""
        return list(self.facts["regions"])

    @property
    def is_exact(self) -> bool:
        """Whether the posterior is known in closed form."""
        return self.facts["kind"] == "exact"

    def outputs(self, region: str) -> Outputs:
        """The network's outputs under the posterior: draws of all chains, (L, B, ...), or a Gaussian."""
        if self.is_exact:
            return GaussianOutputs(self.tensors[f"mean.{region}"], self.tensors[f"variance.{region}"])
        return Draws(self.traces(region).flatten(0, 1))

    def traces(self, region: str) -> Tensor:
        """(chains, draws, B, ...): the outputs chain by chain; not for an exact reference."""
        return self.tensors[f"outputs.{region}"]

    def predictive(self, region: str, problem: ReferenceProblem) -> Predictive:
        """What the posterior predicts at the inputs of a region."""
        return problem.likelihood.predictive(self.outputs(region))


def folder() -> Path:
    """The folder of reference posteriors, which may not exist yet."""
    named = os.environ.get(FOLDER)
    if named:
        return Path(named)
    checkout = Path(__file__).parents[2]
    return (checkout if (checkout / "pyproject.toml").is_file() else Path()) / "references"


def path_of(name: str, place: Path | None = None) -> Path:
    """The file of a reference posterior."""
    return (place or folder()) / f"{name}.safetensors"


def write(reference: ReferencePosterior, place: Path | None = None) -> Path:
    """Write a reference to its file, whole or not at all."""
    path = path_of(reference.name, place)
    write_tensors(path, reference.tensors, with_texts(reference.facts))
    return path


def read(name: str, problem: ReferenceProblem, place: Path | None = None) -> ReferencePosterior:
    """The stored reference of a problem; one that is missing, damaged or made for another version is an error."""
    path = path_of(name, place)
    if not path.exists():
        raise FileNotFoundError(
            f"reference {path} does not exist; make it by `bayesformer reference make {name}`, or name the folder that "
            f"holds it by {FOLDER}."
        )
    tensors, facts = read_checked(path, "reference")
    made_for, asked = facts.get("problem"), problem.settings
    if made_for != asked:
        raise ValueError(
            f"reference {path} must have been made for {_words(asked)}, which {name} is now; it was made for "
            f"{_words(made_for or {})}. Make it anew by `bayesformer reference make {name}`."
        )
    return ReferencePosterior(name, facts, tensors)


def data_of(problem: ReferenceProblem, reference: ReferencePosterior) -> ProblemData:
    """The data of the problem, seen to be those that the reference was made for."""
    if problem.stores_data:
        kept = ("train.", "region.")
        return ProblemData.of({n: t for n, t in reference.tensors.items() if n.startswith(kept)})
    data = problem.data()
    check_data(reference, data)
    return data


def summary_of(data: ProblemData) -> dict[str, list[Any]]:
    """Shape, sum and sum of squares of every tensor: enough to tell other data, and the same on every machine."""
    return {
        name: [list(t.shape), t.double().sum().item(), t.double().square().sum().item()]
        for name, t in data.tensors().items()
    }


def check_data(reference: ReferencePosterior, data: ProblemData) -> None:
    """Refuse data other than those the reference was made for."""
    for name, (shape, total, squares) in summary_of(data).items():
        stored = reference.facts["data"].get(name)
        size = math.sqrt(squares * max(1, math.prod(shape)))  # what a sum of such numbers could be
        same = (
            stored is not None
            and stored[0] == shape
            and abs(stored[1] - total) <= CLOSE * size
            and abs(stored[2] - squares) <= CLOSE * squares
        )
        if not same:
            raise ValueError(
                f"reference {reference.name} was made for other data: {name} had shape, sum and sum of squares "
                f"{stored}; now {[shape, total, squares]}. Make it anew by `bayesformer reference make "
                f"{reference.name}`."
            )


def _words(settings: dict[str, Any]) -> str:
    others = ", ".join(f"{name}={value}" for name, value in settings.items() if name != "version")
    return f"version {settings.get('version')} ({others})"

"""The prior's precision and the noise of a Laplace posterior: given, by the evidence, or by validation data."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate, pairwise, product
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from bayesformer.data import Batches
from bayesformer.laplace import Curvature, Groups, ObservationNoise, Quadratic, best_of, maximise
from bayesformer.laplace.evidence import check_curvature
from bayesformer.laplace.structures import CurvatureBlock, DenseCurvature, DiagonalCurvature, KroneckerCurvature
from bayesformer.laws import Block
from bayesformer.laws.gaussian_law import KINDS, to_tensors
from bayesformer.likelihoods import Likelihood
from bayesformer.likelihoods.predictive import Predictive
from bayesformer.model.space import Space
from bayesformer.posterior import Posterior
from bayesformer.predict.joining import NotFiniteError

EXPONENTS = (-3, 6)  # of ten: precisions that validation tries
NOISES = (0.1, 10.0, 9)  # times the scale given: from, to, how many
JUDGED = 256  # validation examples that are predicted at a time


class Choices(Protocol):
    """The settings that decide here."""

    @property
    def prior_precision(self) -> float | str:
        """A number, "marglik" or "validation"."""
        ...

    @property
    def precision(self) -> float:
        """The number, or where to start."""
        ...

    @property
    def noise(self) -> str:
        """ "given", "marglik" or "validation"."""
        ...

    @property
    def grid(self) -> int:
        """How many precisions validation tries."""
        ...


class Tuned(NamedTuple):
    """The prior's precisions and the noise that were chosen, and how well they did."""

    precisions: Tensor  # (G,), float64
    sigma: float | None = None
    """the noise, if it was chosen"""
    validation: float | None = None
    """mean log-likelihood of the validation data, if they decided"""

    def blocks(self, at: Quadratic, like: Tensor) -> list[Block]:
        """The posterior's covariance blocks at these precisions, in the dtype of `like`."""
        return [settled(block) for block in at.blocks(self.precisions.to(like), self.sigma)]

    def facts(self, at: Quadratic) -> dict[str, Any]:
        """For the posterior's facts; thousands of precisions are told by their range."""
        sigma = None if self.sigma is None else self.precisions.new_tensor(self.sigma)
        evidence = for_evidence(at).log_evidence(self.precisions, sigma)
        values = self.precisions.tolist()
        found = values if len(values) <= 1000 else {"least": min(values), "most": max(values), "count": len(values)}
        known = {"noise": self.sigma, "validation": self.validation}
        chosen = {name: value for name, value in known.items() if value is not None}
        return {"log_evidence": float(evidence), "prior_precision": found, **chosen}


def settled(block: Block) -> Block:
    """The block in the memory order of a saved one: predictions before and after are then the same bit by bit."""
    kind, parts = to_tensors(block)
    return KINDS[kind](**{name: part.contiguous() for name, part in parts.items()})


def quadratic(
    found: Curvature, mode: Tensor, likelihood: Likelihood, per: str, temperature: float, space: Space
) -> Quadratic:
    """The log joint around the mode, with a prior of mean 0."""
    check_curvature(found.structures, [", ".join(names) for names in found.names])
    scale = likelihood.noise_scale
    noise = None if scale is None else ObservationNoise(scale, found.observed)
    deviations = tuple(mode[place].double() for place in found.places)
    groups = groups_of(found, space, per)
    return Quadratic(found.structures, deviations, found.log_likelihood, groups, temperature, noise)


def groups_of(found: Curvature, space: Space, per: str) -> Groups:
    """One precision for all weights, one per parameter, or one per weight."""
    if per == "one":
        return Groups(1, tuple(0 for _ in found.places))
    if per == "weight":
        ends = list(accumulate((s.size for s in found.structures), initial=0))
        members = tuple(torch.arange(a, b, device="cpu") for a, b in pairwise(ends))
        return Groups(ends[-1], members)
    sizes = torch.tensor(space.sizes, device="cpu")
    owner = torch.arange(len(sizes), device="cpu").repeat_interleave(sizes)
    owners = [owner[place.cpu() if isinstance(place, Tensor) else place] for place in found.places]
    used = torch.cat(owners).unique()
    ranks = [torch.searchsorted(used, own) for own in owners]
    return Groups(len(used), tuple(int(r[0]) if len(r.unique()) == 1 else r for r in ranks))


def tune(choices: Choices, at: Quadratic, posterior: Callable[[Tuned], Posterior], validation: Batches | None) -> Tuned:
    """Choose what is to be chosen: by the evidence first, then by validation data around that."""
    start = at.deviations[0].new_full((at.groups.count,), choices.precision)
    tuned = _by_evidence(choices, at, start)
    if "validation" not in {choices.prior_precision, choices.noise} or validation is None:
        return tuned
    return _by_validation(choices, at, tuned, posterior, validation)


def _by_evidence(choices: Choices, at: Quadratic, start: Tensor) -> Tuned:
    precise, noisy = choices.prior_precision == "marglik", choices.noise == "marglik"
    if not precise and not noisy:
        return Tuned(start)
    clear, count = for_evidence(at), len(start) if precise else 0
    first = torch.cat([start[:count], start.new_tensor([at.noise.scale] if noisy and at.noise else [])])

    def objective(values: Tensor) -> Tensor:
        return clear.log_evidence(values[:count] if precise else start, values[count] if noisy else None)

    found, _ = maximise(objective, first)
    return Tuned(found[:count] if precise else start, float(found[count]) if noisy else None)


def _by_validation(
    choices: Choices, at: Quadratic, tuned: Tuned, posterior: Callable[[Tuned], Posterior], validation: Batches
) -> Tuned:
    """The best on a grid, judged by the predictive that will be used."""
    precisions = [tuned.precisions]
    if choices.prior_precision == "validation":
        exponents = torch.linspace(*EXPONENTS, choices.grid, dtype=torch.float64, device="cpu")
        precisions = [torch.full_like(tuned.precisions, 10 ** float(e)) for e in exponents]
    sigmas: list[float | None] = [tuned.sigma]
    if choices.noise == "validation" and at.noise is not None:
        low, high, count = NOISES
        sigmas = [
            at.noise.scale * s for s in torch.logspace(math.log10(low), math.log10(high), count, device="cpu").tolist()
        ]

    def score(candidate: Tuned) -> float:
        return mean_log_likelihood(posterior(candidate), validation)

    best = best_of([Tuned(p, s) for p, s in product(precisions, sigmas)], score)
    return best.value._replace(validation=best.score)


def mean_log_likelihood(posterior: Posterior, data: Batches) -> float:
    """The mean log-likelihood per target that counts, batch by batch; NaN where a prediction has NaN."""
    total, count = 0.0, 0
    for batch in data.in_order(JUDGED, posterior.device):
        counted = posterior.likelihood.counted(batch.targets, batch.mask)
        if counted is not None and not bool(counted.any()):
            continue
        try:
            predictive = posterior.predict(batch)
        except NotFiniteError:  # so wide that moments overflow on their way through the network
            return math.nan
        if _has_nan(predictive):
            return math.nan
        answered, targets = posterior.likelihood.pairs(predictive, batch.targets, batch.mask)
        found = answered.log_prob(targets).double()
        total, count = total + float(found.sum()), count + found.numel()
    return total / max(count, 1)


def _has_nan(predictive: Predictive) -> bool:
    return any(bool(value.isnan().any()) for value in vars(predictive).values() if isinstance(value, Tensor))


def for_evidence(at: Quadratic) -> Quadratic:
    """The curvature in float64, with dense matrices under one precision by their eigenvalues: log det is a sum."""
    members = at.groups.members
    structures = tuple(_clear(s, isinstance(m, int)) for s, m in zip(at.structures, members, strict=True))
    return replace(at, structures=structures)


def _clear(structure: CurvatureBlock, single: bool) -> CurvatureBlock:
    if single and isinstance(structure, DenseCurvature):
        # Rotating the weights leaves one precision for all of them alone.
        return DiagonalCurvature(torch.linalg.eigvalsh(structure.matrix.double()).clamp_min(0))
    if isinstance(structure, KroneckerCurvature):  # a determinant is of eigenvalues: their vectors stay as they are
        return replace(structure, out_values=structure.out_values.double(), in_values=structure.in_values.double())
    parts: dict[str, Any] = vars(structure)
    return type(structure)(**{k: v.double() if isinstance(v, Tensor) else v for k, v in parts.items()})

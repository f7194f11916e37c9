"""More data for a Laplace posterior: it becomes the prior, N(m, P⁻¹), of what comes after."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from bayesformer.data import Data, DataLike, as_data
from bayesformer.laplace import Curvature, absorb, log_evidence
from bayesformer.laplace.choosing import settled
from bayesformer.laplace.evidence import check_curvature
from bayesformer.laplace.method import Laplace
from bayesformer.laws import Block, GaussianLaw
from bayesformer.network import FlatModel, Layout, trainable
from bayesformer.posterior import Posterior
from bayesformer.train.members import run, task_of
from bayesformer.train.problem import Problem, check_problem
from bayesformer.train.training import Training


def laplace_update(
    posterior: Posterior, data: DataLike, *, training: Training | None = None, seed: int = 0
) -> Posterior:
    """The posterior after further data, with a Laplace posterior as the prior; the old one is left as it is.

    Args:
        posterior: from `Laplace` or `laplace`, or from this function.
        data: the new data alone. The old data are needed no more.
        training: how the next mode is found, the old posterior standing for the old data. None takes one Gauss-Newton
            step from the old mean, which is exact for a model that is linear in its weights.
        seed: decides the order of data in training, and labels drawn for the curvature.

    The log evidence in the facts becomes that of all data so far. Kronecker factors of old and new data are merged:
    sums add up, averages are averaged, so that one pair remains.
    """
    started = time.perf_counter()
    old, method = _check(posterior), _method_of(posterior)
    new = as_data(data, "data")
    problem = Problem(posterior.model, posterior.likelihood, new, training=training or Training(), seed=seed)
    check_problem(posterior.model, problem)
    if training is None:
        here = _curvature(posterior, method, old.mean, new, seed)
        mode = _step(posterior, old, _absorbed(posterior, old, here, method), new)
    else:
        mode = _train(posterior, old, problem)
    found = _curvature(posterior, method, mode, new, seed)
    blocks = _absorbed(posterior, old, found, method)
    evidence = _evidence(old, blocks, mode, found.log_likelihood / method.temperature)
    facts = {
        **posterior.facts,
        "num_data": posterior.facts["num_data"] + len(new),
        "log_evidence": posterior.facts["log_evidence"] + evidence,
        "log_likelihood": found.log_likelihood,
        "data": new.fingerprint(),
        "updates": posterior.facts.get("updates", 0) + 1,
        "seconds": posterior.facts["seconds"] + time.perf_counter() - started,
    }
    return replace(posterior, weights=GaussianLaw(mode, old.places, tuple(blocks)), facts=facts)


def _check(posterior: Posterior) -> GaussianLaw:
    known = posterior.facts.get("method", {}).get("name")
    if known != "laplace" or not isinstance(posterior.weights, GaussianLaw):
        raise ValueError(f"posterior must come from the laplace method to be updated; it comes from {known!r}.")
    return posterior.weights


def _method_of(posterior: Posterior) -> Laplace:
    return Laplace(**{k: v for k, v in posterior.facts["method"].items() if k != "name"})


def _curvature(posterior: Posterior, method: Laplace, mode: Tensor, data: Data, seed: int) -> Curvature:
    place = posterior.weights.places[0] if isinstance(posterior.weights, GaussianLaw) else None
    index = place if method.structure == "subnetwork" and isinstance(place, Tensor) else None
    found = method.estimate(posterior.model, mode, posterior.likelihood, data, seed, index=index)
    check_curvature(found.structures, [", ".join(names) for names in found.names])
    return found


def _absorbed(posterior: Posterior, old: GaussianLaw, found: Curvature, method: Laplace) -> list[Block]:
    counts = {"num_old": int(posterior.facts["num_data"]), "num_new": found.num_data}
    blocks = []
    for where, block, place, structure in zip(old.places, old.blocks, found.places, found.structures, strict=True):
        if not _same(where, place):
            raise ValueError(f"blocks of the new data must lie where those of the posterior do, {where}; got {place}.")
        blocks.append(settled(absorb(block, structure, 1 / method.temperature, **counts)))
    return blocks


def _same(first: slice | Tensor, second: slice | Tensor) -> bool:
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        return torch.equal(first.cpu(), second.cpu())
    return not isinstance(first, Tensor) and first == second


def _step(posterior: Posterior, old: GaussianLaw, blocks: list[Block], data: Data) -> Tensor:
    """θ = m + Σ_new ∇ log p(D_new | m)."""
    method = _method_of(posterior)
    flat = FlatModel(posterior.model)
    flat.load(old.mean)
    flat.module.eval()
    for batch in data.to(old.mean.device).chunks(256):
        posterior.likelihood.log_prob(flat(batch.inputs), batch.targets, batch.mask).sum().backward()
    mode, score = old.mean.clone(), flat.grad / method.temperature
    for place, block in zip(old.places, blocks, strict=True):
        mode[place] += block.times(score[place])
    return mode


def _train(posterior: Posterior, old: GaussianLaw, problem: Problem) -> Tensor:
    """Ascend log p(D_new | θ) - ½ (θ - m)ᵀ P (θ - m), from m; weights without spread stay."""
    layout = Layout.of(posterior.model)
    spread = layout.views(old.variance())
    names = tuple(name for name in layout.names if bool((spread[name] > 0).any()))
    task = task_of(
        problem,
        "laplace-update",
        prepare=_Prepared(old.mean, names),
        penalty=Pull(old, layout, names),
    )
    _, result = run(task, 1, problem)
    mode = old.mean.clone()
    views = layout.views(mode)
    inner = Layout(names, tuple(layout.shapes[layout.names.index(name)] for name in names))
    for name, value in inner.views(result["theta"][0]).items():
        views[name].copy_(value)
    return mode


@dataclass(frozen=True)
class _Prepared:
    """Puts the old mean into a model and freezes the weights that have no spread."""

    mean: Tensor
    names: tuple[str, ...]

    def __call__(self, model: nn.Module) -> nn.Module:
        views = Layout.of(model).views(self.mean)
        with torch.no_grad():
            for name, parameter in trainable(model).items():
                parameter.copy_(views[name])
                parameter.requires_grad_(name in self.names)
        return model


@dataclass(frozen=True)
class Pull:
    """½ (θ - m)ᵀ P (θ - m), read off a module: minus the log of the old posterior, but for its constant."""

    law: GaussianLaw
    layout: Layout
    names: tuple[str, ...]

    def __call__(self, module: nn.Module) -> Tensor:
        """() in nats, with gradients."""
        own, old = dict(module.named_parameters()), self.layout.views(self.law.mean)
        parts = [own[name] - old[name] if name in self.names else torch.zeros_like(old[name]) for name in old]
        return 0.5 * scatter(self.law, torch.cat([part.flatten() for part in parts]))


def scatter(law: GaussianLaw, deviation: Tensor) -> Tensor:
    """δᵀ P δ over all blocks."""
    terms = [deviation[p] @ b.precision_times(deviation[p]) for p, b in zip(law.places, law.blocks, strict=True)]
    return torch.stack(terms).sum()


def _evidence(old: GaussianLaw, blocks: list[Block], mode: Tensor, log_likelihood: float) -> float:
    """log p(D_new | D_old)."""
    posterior = torch.stack([block.log_det_precision() for block in blocks]).sum()
    prior = torch.stack([block.log_det_precision() for block in old.blocks]).sum()
    return float(log_evidence(log_likelihood, posterior, prior, scatter(old, mode - old.mean)))

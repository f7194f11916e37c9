"""What a prior says before any data are seen: predictions of networks drawn from it.

A prior under which every drawn network is sure of its answer, each of another one, says so of all data. Compared are
the plain prior N(0, 1), the laws that fit the weights of trained networks, the published ones where there are any, and
stochastic attention at its prior around trained weights (figure 3.14 of the thesis).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from bayesformer.attention import attention_mode, install
from bayesformer.attention.build import DEFAULTS
from bayesformer.core.seeds import stream
from bayesformer.core.types import Batch, Draws
from bayesformer.likelihoods.predictive import CategoricalPredictive, GaussianPredictive
from bayesformer.model.calling import call
from bayesformer.priors.improved import IMPROVED
from bayesformer.priors.prior import Prior, as_prior
from bayesformer.study.weight_networks import TrainedTask

PLAIN = "normal(0, 1)"
DRAWS, INPUTS, BINS = 40, 64, 40


@dataclass(frozen=True)
class PriorPredictive:
    """Entropies of predictions under one prior, in nats; of a Gaussian prediction that of its variance."""

    draws: int
    inputs: int
    edges: list[float]
    heights: list[float]  # density of the entropy of one drawn network at one input
    each: float  # mean entropy of one drawn network
    together: float  # mean entropy of the average over networks


def prior_predictives(trained: TrainedTask, derived: Mapping[str, str], seed: int = 0) -> dict[str, PriorPredictive]:
    """Histogram and means of predictive entropies, in nats, on 64 training inputs, for each prior by its name.

    The priors: N(0, 1); `derived`, which gives a prior to each parameter by its name; the published one, if there is
    one for this task; and Gaussian and Dirichlet attention around trained weights. 40 networks are drawn from each.
    """
    batch = trained.data.train.take(slice(0, INPUTS))
    model = trained.task.model().eval()
    priors: dict[str, Prior] = {f"plain, {PLAIN}": as_prior(PLAIN), "of this study": as_prior(dict(derived))}
    published = trained.name.rpartition("/")[2]
    if published in IMPROVED:
        priors["published"] = as_prior(IMPROVED[published])
    outputs = {name: _drawn(model, prior, batch, seed) for name, prior in priors.items()}
    for family in ("gaussian", "dirichlet"):
        outputs[f"{family} attention"] = _attention(trained, model, family, batch, seed)
    found = {name: _entropies(trained, out, batch) for name, out in outputs.items()}
    ends = torch.cat([each.flatten() for each, _ in found.values()])
    edges = torch.linspace(ends.min().item(), ends.max().item() + 1e-6, BINS + 1, dtype=torch.float64)
    return {name: _summary(each, together, edges) for name, (each, together) in found.items()}


@torch.no_grad()
def _drawn(model: nn.Module, prior: Prior, batch: Batch, seed: int) -> Tensor:
    """(DRAWS, B, ...): outputs of networks drawn from a prior; every prior from the same stream."""
    params = {name: value.detach() for name, value in model.named_parameters()}
    with stream(seed, "prior predictive"):
        return torch.stack([call(model, prior.sample(params), batch.inputs) for _ in range(DRAWS)])


@torch.no_grad()
def _attention(trained: TrainedTask, model: nn.Module, family: str, batch: Batch, seed: int) -> Tensor:
    """(DRAWS, B, ...): outputs of trained networks, in turn, whose attention is drawn from its prior."""
    noisy = install(copy.deepcopy(model), family, spread=DEFAULTS[family].prior_scale).eval()
    with stream(seed, "prior predictive"), attention_mode(noisy, "draw", kl=False):
        return torch.stack([call(noisy, weights, batch.inputs) for weights in _in_turn(trained)])


def _in_turn(trained: TrainedTask) -> Iterator[Mapping[str, Tensor]]:
    theta = trained.theta
    for i in range(DRAWS):
        yield trained.space.views(theta[i % len(theta)])


def _entropies(trained: TrainedTask, outputs: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """Entropies of each network (L, M) and of all together (M,), at the M positions that count."""
    predictive = trained.task.likelihood.predictive(Draws(outputs))
    if batch.mask is not None:
        predictive = predictive.select(batch.mask)
    if isinstance(predictive, CategoricalPredictive):
        each = -(predictive.log_probs.exp() * predictive.log_probs).nan_to_num(0.0).sum(-1)  # 0 log 0 is 0
        return each.double().flatten(1), predictive.total.double().flatten()
    assert isinstance(predictive, GaussianPredictive)

    def entropy(variance: Tensor) -> Tensor:
        return 0.5 * torch.log(2 * math.pi * math.e * variance.double().clamp_min(1e-30))

    return entropy(predictive.variances.flatten(1)), entropy(predictive.variance.flatten())


def _summary(each: Tensor, together: Tensor, edges: Tensor) -> PriorPredictive:
    counts = torch.histogram(each.flatten().contiguous(), edges)[0]
    heights = counts / each.numel() / (edges[1] - edges[0])
    return PriorPredictive(
        draws=len(each),
        inputs=each.shape[1],
        edges=[round(edge, 4) for edge in edges.tolist()],
        heights=[round(height, 4) for height in heights.tolist()],
        each=each.mean().item(),
        together=together.mean().item(),
    )

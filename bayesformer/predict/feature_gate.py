"""A predictive that falls back to the uniform one where the features of an input have no density.

Of every network of the posterior, φ(x) is what its last linear layer is given. A Gaussian per class over the φ of the
training data gives log p(φ); its mean over networks is s(x). The gate w(x) is the weight of "the network cannot know":

    p(y | x) = (1 - w) p_net(y | x) + w / C,     logit w = a - SLOPE (s - q_low) / (q_mid - q_low)

with q_low and q_mid the .005 and .5 quantiles of s on validation data, and a the largest value that costs validation
data at most TOLERANCE nats of log-likelihood. A tempered Bayes factor of two hypotheses, cf. Mukhoti et al. (2021) and
Charpentier et al. (2020). What the gate adds to the entropy is epistemic: aleatoric is (1 - w) times the network's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from bayesformer.data import as_batches
from bayesformer.data.forms import as_inputs
from bayesformer.laws import GaussianLaw
from bayesformer.laws.law import buffers_of
from bayesformer.likelihoods.predictive import CategoricalPredictive
from bayesformer.model.calling import apply, first_given

if TYPE_CHECKING:
    from bayesformer.posterior import Posterior

SLOPE, TOLERANCE, RIDGE = 6.0, 1e-3, 1e-4
LOW, MIDDLE = 0.005, 0.5
STARTS = tuple(-40 + 0.25 * i for i in range(185))  # values of a that are tried, -40 to 6
PASS = 512  # examples per pass


@dataclass(frozen=True)
class GatedPredictive(CategoricalPredictive):
    """Class probabilities behind a gate; `noise` is the aleatoric part, what is left is epistemic."""

    noise: Tensor | None = None  # (B,)

    @cached_property
    def aleatoric(self) -> Tensor:
        """Average entropy of the draws where the network is believed, in nats."""
        assert self.noise is not None
        return self.noise

    def select(self, mask: Tensor) -> GatedPredictive:
        """The M questions where `mask` is True, as (L, M, C)."""
        return GatedPredictive(self.log_probs[:, mask], noise=self.aleatoric[mask])


def gated_predictive(plain: CategoricalPredictive, weight: Tensor) -> GatedPredictive:
    """The mixture of every draw with the uniform law, which has this weight (B,)."""
    w = weight.to(plain.log_probs).clamp(1e-12, 1 - 1e-7)
    uniform = w.log() - math.log(plain.log_probs.shape[-1])
    mixed = torch.logaddexp(plain.log_probs + torch.log1p(-w)[..., None], uniform[..., None])
    return GatedPredictive(mixed, noise=(1 - w) * plain.aleatoric)


@dataclass(frozen=True)
class FeatureDensity:
    """A Gaussian per class over the features of one network."""

    log_share: Tensor  # (C,)
    mean: Tensor  # (C, D)
    tril: Tensor  # (C, D, D), of the covariances

    @classmethod
    def of(cls, features: Tensor, targets: Tensor) -> FeatureDensity:
        """Fitted to features (N, D) of labelled examples; classes that do not occur have no part."""
        shares, means, roots = [], [], []
        for label in targets.unique():
            mine = features[targets == label].double()
            centred = mine - mine.mean(0)
            covariance = centred.mT @ centred / len(mine)
            ridge = RIDGE * torch.eye(covariance.shape[-1], dtype=covariance.dtype, device=covariance.device)
            shares.append(math.log(len(mine) / len(targets)))
            means.append(mine.mean(0))
            roots.append(torch.linalg.cholesky(covariance + ridge))
        return cls(means[0].new_tensor(shares), torch.stack(means), torch.stack(roots))

    def log_density(self, features: Tensor) -> Tensor:
        """(N,): log Σ_c π_c N(φ; μ_c, Σ_c)."""
        law = torch.distributions.MultivariateNormal(self.mean, scale_tril=self.tril)
        return torch.logsumexp(self.log_share + law.log_prob(features.double()[:, None]), -1)


@dataclass(frozen=True)
class GatedPosterior:
    """A posterior of a classifier, its feature densities and its gate; made by `Posterior.gated`."""

    posterior: Posterior
    networks: tuple[nn.Module, ...]
    densities: tuple[FeatureDensity, ...]
    low: float
    middle: float
    start: float  # a

    def log_density(self, inputs: Any) -> Tensor:
        """(B,): the mean over networks of the log density of an input's features; low where it is unlike the data."""
        found = [d.log_density(features_of(n, inputs)) for n, d in zip(self.networks, self.densities, strict=True)]
        return torch.stack(found).mean(0)

    def weight(self, density: Tensor) -> Tensor:
        """(B,): how much of the prediction is the uniform law, 0 to 1."""
        return torch.sigmoid(self.start - SLOPE * (density - self.low) / (self.middle - self.low))

    def predict(self, inputs: Any, **options: Any) -> GatedPredictive:
        """The predictive behind the gate; options as for `Posterior.predict`."""
        parts = [
            gated_predictive(self._plain(batch, options), self.weight(self.log_density(batch)))
            for batch in as_inputs(inputs, "inputs").in_order(PASS, self.posterior.device)
        ]
        noise = torch.cat([part.aleatoric for part in parts])
        return GatedPredictive(torch.cat([part.log_probs for part in parts], 1), noise=noise)

    def _plain(self, inputs: Any, options: dict[str, Any]) -> CategoricalPredictive:
        found = self.posterior.predict(inputs, **options)
        assert isinstance(found, CategoricalPredictive)
        return found


def gated(posterior: Posterior, train: Any, validation: Any) -> GatedPosterior:
    """Fit the densities on training data and the gate on validation data."""
    networks = networks_of(posterior)
    densities = []
    for network in networks:
        features, targets = _features_and_targets(network, train, "train", posterior)
        densities.append(FeatureDensity.of(features, targets))
    blank = GatedPosterior(posterior, networks, tuple(densities), 0.0, 1.0, -math.inf)
    pairs, scores = [], []
    for batch in as_batches(validation, "validation").in_order(PASS, posterior.device):
        plain = posterior.predict(batch.inputs)
        if not isinstance(plain, CategoricalPredictive) or len(plain.shape) != 1 or batch.mask is not None:
            raise ValueError(f"gated needs a posterior that gives each example one class; got {type(plain).__name__}.")
        pairs.append((plain, batch.targets))
        scores.append(blank.log_density(batch.inputs))
    density = torch.cat(scores)
    low, middle = (float(density.quantile(level)) for level in (LOW, MIDDLE))
    plain = CategoricalPredictive(torch.cat([p.log_probs for p, _ in pairs], 1))
    targets = torch.cat([y for _, y in pairs])
    before = float(plain.log_prob(targets).mean())
    best = -math.inf
    for start in STARTS:  # the cost rises with a
        gate = GatedPosterior(posterior, networks, tuple(densities), low, middle, start)
        if float(gated_predictive(plain, gate.weight(density)).log_prob(targets).mean()) < before - TOLERANCE:
            break
        best = start
    return GatedPosterior(posterior, networks, tuple(densities), low, middle, best)


def networks_of(posterior: Posterior) -> tuple[nn.Module, ...]:
    """The networks whose features are looked at: the members of an ensemble or chain, else the mean of the law."""
    law = posterior.law
    if isinstance(law, GaussianLaw):
        return (posterior.skeleton.plain(law.mean, buffers_of(law, 0)).eval(),)
    return tuple(posterior.module(i) for i in range(len(posterior.theta)))


@contextmanager
def _watched(network: nn.Module) -> Iterator[list[Tensor]]:
    """What the linear layers of a network are given while the block runs, in the order of their calls."""
    seen: list[Tensor] = []
    hooks = [
        module.register_forward_pre_hook(lambda _, *given: seen.append(first_given(*given)), with_kwargs=True)
        for module in network.modules()
        if isinstance(module, nn.Linear)
    ]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def features_of(network: nn.Module, inputs: Any) -> Tensor:
    """(B, D): what the last linear layer of a network is given."""
    with _watched(network) as seen, torch.no_grad():
        apply(network, inputs)
    if not seen or seen[-1].dim() != 2:
        got = "none" if not seen else str(tuple(seen[-1].shape))
        raise ValueError(f"gated needs a network whose last linear layer is given one vector per example; got {got}.")
    return seen[-1]


def _features_and_targets(network: nn.Module, data: Any, name: str, posterior: Posterior) -> tuple[Tensor, Tensor]:
    parts = [
        (features_of(network, batch.inputs), batch.targets)
        for batch in as_batches(data, name).in_order(PASS, posterior.device)
    ]
    return torch.cat([f for f, _ in parts]), torch.cat([y for _, y in parts])

"""The thorough checks of a posterior against data: what a fit has no time for, and `Posterior.check` runs when asked.

Of chains: the effective number of draws of outputs on the data and far off them, and the configurational temperature
from gradients of all data. Of Gaussians: how much draws of the weights raise the negative log joint, how far draws
score below the mean, and whether linearised and sampled outputs spread alike.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from bayesformer.core.doubts import Doubt
from bayesformer.core.types import Batch, Draws, Inputs
from bayesformer.data import Batches
from bayesformer.data.inputs import map_inputs, tensors_of
from bayesformer.inference.diagnostics import effective_sample_size
from bayesformer.laws import GaussianLaw, Samples, buffers_of
from bayesformer.model.shell import Shell
from bayesformer.predict.ways import Way
from bayesformer.priors.prior import Prior
from bayesformer.priors.setting import prior_of

if TYPE_CHECKING:
    from bayesformer.posterior import Posterior

log = logging.getLogger("bayesformer")

EXAMPLES = 64  # whose outputs are looked at
FAR = 3.0  # times the inputs: off the data
WORTH, ENOUGH = 8.0, 20  # effective draws that outputs must have, and kept draws that can tell
HOT = 1.6  # configurational temperature
RISE, DRAWS = 2.0, 16  # of U under draws over that of a Gaussian, and how many draws
BELOW = 0.1  # nats per example that draws may score below the mean
APART = 2.0  # ratio of linearised and sampled standard deviations of outputs, either way
CHUNK = 256
NUMBERS = 2**24  # of the outputs of all draws, at most: fewer examples are looked at, or none
FEWEST, LOOKED_AT = 4, 512  # draws of a chain that tell anything, and outputs that are looked at


def self_check(posterior: Posterior, data: Batches) -> tuple[Doubt, ...]:
    """All doubts that the law of a posterior and these data, those it was fitted to, give reason for.

    Draws of chains and Gaussians over the weights are checked. Of networks as trained, mixtures, and networks that are
    random themselves nothing is known that could be, which a line of the log says.
    """
    law, method = posterior.law, posterior.facts.get("method", {}).get("name")
    by_chains = isinstance(law, Samples) and ("chains" in posterior.facts or method is None)
    if by_chains and not posterior.noisy_draws:
        assert isinstance(law, Samples)
        return tuple(_chain(posterior, law, data))
    if not posterior.noisy_draws and isinstance(law, GaussianLaw):
        return tuple(_gaussian(posterior, law, data))
    log.warning("check looks at draws of chains and at Gaussians over the weights; of a posterior by %s it has nothing "
                "to say", method or "this method")  # fmt: skip
    return ()


def _chain(posterior: Posterior, law: Samples, data: Batches) -> list[Doubt]:
    chains = int(posterior.facts.get("chains", 1))
    each = len(law.theta) // chains
    if each < ENOUGH:
        return []
    doubts = of_output_worth(worth_of_outputs(posterior, data.first(EXAMPLES).inputs, chains))
    temperature = _temperature(posterior, law, data)
    if temperature is not None and temperature > HOT:
        sentence = (
            f"The draws are at {temperature:.1f} times their temperature, as gradients of all data measure it: their "
            "spread is too wide. Use larger batches."
        )
        doubts.append(Doubt("temperature", sentence, temperature, HOT))
    return doubts


def worth_of_outputs(posterior: Posterior, inputs: Inputs, chains: int) -> dict[str, float]:
    """Effective numbers of draws of the outputs of chains of equal length, medians: at these inputs, and off the data.

    Off the data are the same inputs three times as far from their mean, where they are numbers; token ids have no such
    place. NaN where draws are too few or too large to tell.
    """
    found = {"worth_inside": _worth(posterior, inputs, chains)}
    if all(x.is_floating_point() for x in tensors_of(inputs)):
        far = map_inputs(inputs, lambda x: x.mean(0) + FAR * (x - x.mean(0)))
        found["worth_outside"] = _worth(posterior, far, chains)
    return found


def _worth(posterior: Posterior, inputs: Inputs, chains: int) -> float:
    draws = posterior.law.available or 0
    one = map_inputs(inputs, lambda x: x[:1])
    first = posterior.outputs(one, predictive="sampled", draws=1)
    assert isinstance(first, Draws)
    room = NUMBERS // max(1, draws * first.values.numel())
    if draws < FEWEST * chains or room == 0:
        return math.nan
    found = posterior.outputs(map_inputs(inputs, lambda x: x[:room]), predictive="sampled")
    assert isinstance(found, Draws)
    values = posterior.likelihood.identified(found.values).flatten(1)  # (L, outputs)
    worth = effective_sample_size(values.view(chains, -1, values.shape[1])[..., :LOOKED_AT])
    worth = worth[~worth.isnan()]
    return float(worth.median()) if len(worth) else math.nan


def of_output_worth(worth: Mapping[str, float]) -> list[Doubt]:
    """A doubt for every place where the outputs of chains are worth too few independent draws."""
    places = {"worth_inside": "on the data", "worth_outside": f"{FAR:.0f} times as far out as the data"}
    return [
        Doubt(
            "effective draws",
            f"The draws are worth only {worth[name]:.1f} independent ones for the outputs {where}. Give the sampler "
            "more epochs.",
            worth[name],
            WORTH,
        )
        for name, where in places.items()
        if worth.get(name, math.inf) < WORTH
    ]


def _temperature(posterior: Posterior, law: Samples, data: Batches) -> float | None:
    """Mean over draws of (θ - θ̄) · ∇U(θ) / P, over the temperature asked for; what θ̄ takes away is put back."""
    prior = prior_in(posterior.facts)
    asked = temperature_in(posterior.facts)
    moving = law.theta.std(0) > 0
    if prior is None or asked == 0 or not bool(moving.any()):
        return None
    mean, products = law.theta.mean(0), []
    for draw, theta in enumerate(law.theta):
        with posterior.at_mean.borrow() as shell:
            shell.load_buffers(buffers_of(law, draw))
            slope = _slope(posterior, shell, theta, prior, data)
            shell.load(mean)
        products.append(float(((theta - mean)[moving].double() * slope[moving].double()).sum() / int(moving.sum())))
    return sum(products) / (len(products) - 1) / asked


def _slope(posterior: Posterior, shell: Shell, theta: Tensor, prior: Prior, data: Batches) -> Tensor:
    """(P,): ∇U(θ) over all data, scaled to N examples."""
    shell.load(theta)
    views = {name: value.detach().requires_grad_() for name, value in posterior.space.views(theta.clone()).items()}
    with torch.enable_grad():
        parts = torch.autograd.grad(-prior.log_prob(views), list(views.values()))
    total = torch.cat([part.flatten() for part in parts])
    weights, readings = list(shell.weights.values()), data.readings
    for batch in data.in_order(CHUNK, theta.device):
        with torch.enable_grad():
            outputs = shell(batch.inputs)
            loss = -posterior.likelihood.log_prob(outputs, batch.targets, batch.mask).sum() / readings
            found = torch.autograd.grad(loss, weights, materialize_grads=True)
        total = total + torch.cat([g.flatten().to(total) for g in found])
    return total


def _gaussian(posterior: Posterior, law: GaussianLaw, data: Batches) -> list[Doubt]:
    rows = [law.row(draw, seed=1) for draw in range(DRAWS)]
    at_mean = _log_likelihood(posterior, law.mean, data)
    drawn = [_log_likelihood(posterior, row, data) for row in rows]
    prior, doubts = prior_in(posterior.facts), []
    if prior is not None:
        spread = sum(block.size for block in law.blocks)
        base = at_mean + _log_prior(posterior, law.mean, prior)
        rises = [base - value - _log_prior(posterior, row, prior) for value, row in zip(drawn, rows, strict=True)]
        rise = 2 * sum(rises) / (DRAWS * max(spread, 1) * temperature_in(posterior.facts))
        if not rise <= RISE:
            sentence = (
                f"Draws of the weights raise the negative log joint {rise:.3g} times as much as a Gaussian's own: this "
                f"one is far too wide for the model. {_instead(posterior)}"
            )
            doubts.append(Doubt("regime", sentence, rise, RISE))
    return doubts + _predictions(posterior, data)


def _predictions(posterior: Posterior, data: Batches) -> list[Doubt]:
    """How the predictive of draws compares with the network at the mean, and with the linearised network.

    What the linearised network loses against its mean is allowed for, up to what the exact posterior of few data may.
    """
    batch = data.first(EXAMPLES)
    linearised = _at_mean(posterior, batch) - _score(posterior, batch, "linearised")
    allowed = min(max(linearised, 0.0), _allowed(posterior, data.num_data))
    doubts = below_the_mean(posterior, batch, "sampled", allowed)
    sampled = posterior.outputs(batch.inputs, predictive="sampled")
    linear: Any = posterior.outputs(batch.inputs, predictive="linearised")
    assert isinstance(sampled, Draws)
    ratio = float((sampled.values.std(0) / linear.variance.sqrt().clamp_min(1e-30)).median())
    if not 1 / APART <= ratio <= APART:
        sentence = (
            f"Outputs under draws of the weights spread {ratio:.2g} times as much as linearised ones: at least one of "
            "the two ways of predicting is wrong here. Compare with Sghmc or Nuts."
        )
        doubts.append(Doubt("linearisation", sentence, ratio, APART))
    return doubts


def below_the_mean(posterior: Posterior, batch: Batch, way: Way, allowed: float | None = None) -> list[Doubt]:
    """A doubt where a predictive scores far below the network at the mean on examples that it was fitted to.

    On few data even the exact posterior does, by up to P/2 nats over all of them: that is allowed for, up to ½ nat per
    example.
    """
    loss = _at_mean(posterior, batch) - _score(posterior, batch, way)
    limit = BELOW + (_allowed(posterior, posterior.facts.get("num_data")) if allowed is None else allowed)
    if not loss > limit:
        return []
    what = "Draws of the weights" if way == "sampled" else f"Predictions ({way})"
    sentence = (
        f"{what} score {loss:.2f} nats per example below the network at their mean, on the training data. "
        f"{_instead(posterior)}"
    )
    return [Doubt("draws below the mean", sentence, loss, limit)]


def _allowed(posterior: Posterior, count: int | None) -> float:
    """Nats per example that the exact posterior of so many weights may lose, at most ½."""
    weights = sum(block.size for block in posterior.law.blocks)  # type: ignore[attr-defined]
    return 0.5 * min(1.0, temperature_in(posterior.facts) * weights / (count or 1))


def _at_mean(posterior: Posterior, batch: Batch) -> float:
    return _log_likelihood(posterior, posterior.law.mean, [batch]) / len(batch.targets)


def _instead(posterior: Posterior) -> str:
    """What to use where a Gaussian is too wide: the linearised network, if that is not what it predicts with."""
    if posterior.predictive == "sampled":
        return "Use predictive='linearised', a narrower posterior, or Sghmc()."
    return (
        "The Gaussian at the mode is too wide for these data: choose the prior's precision on validation data "
        "(prior_precision='validation'), or use Vi() or Sghmc()."
    )


def _score(posterior: Posterior, batch: Batch, way: Way) -> float:
    """Mean log density of the targets under a predictive."""
    predictive = posterior.predict(batch, predictive=way)  # with its targets, which language models need
    answered, targets = posterior.likelihood.pairs(predictive, batch.targets.to(posterior.device), batch.mask)
    return float(answered.log_prob(targets).double().sum()) / len(batch.targets)


def _log_likelihood(posterior: Posterior, theta: Tensor, data: Any) -> float:
    """log p(D | θ), summed in float64 and scaled to N examples."""
    total, mean = 0.0, posterior.law.mean
    batches = data.in_order(CHUNK, theta.device) if isinstance(data, Batches) else data
    with posterior.at_mean.borrow() as shell, torch.no_grad():
        shell.load(theta)
        for batch in batches:
            inputs = map_inputs(batch.inputs, lambda x: x.to(theta.device))
            values = posterior.likelihood.log_prob(shell(inputs), batch.targets.to(theta.device), batch.mask)
            total += float(values.double().sum())
        shell.load(mean)
    return total / data.readings if isinstance(data, Batches) else total


def _log_prior(posterior: Posterior, theta: Tensor, prior: Prior) -> float:
    return float(prior.log_prob(posterior.space.views(theta)).double())


def temperature_in(facts: Mapping[str, Any]) -> float:
    """The temperature that a posterior was made at, 1 where its facts do not say; a point at 0 counts as 1."""
    return float(facts.get("method", {}).get("temperature", 1.0) or 1.0)


def prior_in(facts: Mapping[str, Any]) -> Prior | None:
    """The prior that a posterior was made with, as its facts have it; None where they do not say."""
    method = facts.get("method", {})
    chosen = facts.get("prior_precision", method.get("prior_precision"))
    if isinstance(chosen, list) and len(chosen) == 1:
        chosen = chosen[0]
    if isinstance(chosen, int | float):
        return prior_of(f"normal(0, {float(chosen) ** -0.5!r})")
    if isinstance(method.get("prior_sd"), int | float):
        return prior_of(f"normal(0, {float(method['prior_sd'])!r})")
    return prior_of(method["prior"]) if method.get("prior") is not None else None

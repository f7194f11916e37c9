"""Are variances of outputs those of draws? A cheap look at a few inputs, each with draws of its own."""

from __future__ import annotations

import torch

from bayesformer.core.doubts import Doubt
from bayesformer.core.seeds import fold
from bayesformer.core.types import GaussianOutputs, Inputs
from bayesformer.data.inputs import first_tensor, map_inputs
from bayesformer.likelihoods.base import Likelihood
from bayesformer.predict.streamlined.calibrate import CHEAP, STEP
from bayesformer.predict.streamlined.output_calibration import BELIEVED
from bayesformer.predict.streamlined.streamliner import Streamliner

EXAMPLES = 16
OWN_DRAWS = 4  # per example, or as many as examples for all of them together where draws are dear


def variance_ratio(
    streamliner: Streamliner,
    inputs: Inputs,
    outputs: GaussianOutputs,
    likelihood: Likelihood,
    seed: int = 0,
) -> float:
    """Σ variance / Σ mean squared tangents over the outputs of at most 16 examples; 1 is right.

    Of outputs as the likelihood sees them: a rule without correlations between logits may have the right variance of
    each, of which a shift that all share, and no probability sees, is a part.

    `outputs` are those of a rule on these inputs. Four draws per example of its own are as good as 16 that all examples
    share: with 12 or more examples, a rule that is right stays within .6 and 1.6.
    """
    count = min(EXAMPLES, len(first_tensor(inputs)))
    alone = streamliner.law.size <= CHEAP
    passes = streamliner.passes_of(False)
    step = 1.0 if streamliner.shell.facts.staged else STEP
    tangents, draws = 0.0, OWN_DRAWS if alone else EXAMPLES
    for start in range(0, count, 1 if alone else count):
        some = map_inputs(inputs, lambda x, a=start: x[a : a + 1] if alone else x[:count])
        seen = passes.deviations(some, passes.at_mean(some), draws, fold(seed, "self-check", start), step)
        tangents += sum(float(likelihood.identified(near.double()).square().sum()) for _, near in seen) / draws
    claimed = _identified_variance(outputs, likelihood, count)
    return claimed / tangents if tangents else 1.0


def _identified_variance(outputs: GaussianOutputs, likelihood: Likelihood, count: int) -> float:
    """The sum over outputs and examples, after the likelihood's projection, which treats all outputs alike."""
    one = torch.zeros_like(outputs.diagonal[:1].double())
    one[..., 0] = 1
    share = likelihood.identified(one)[..., 0].max()
    total = share * outputs.diagonal[:count].double().sum()
    if outputs.factor is not None:
        total += likelihood.identified(outputs.factor[:count].double().mT).square().sum()
    return float(total)


def one_pass_doubt(ratio: float) -> Doubt | None:
    """Why not to believe the size of one-pass variances, unless their ratio to those of draws is as expected."""
    low, high = BELIEVED
    if low <= ratio <= high:
        return None
    return Doubt(
        "one_pass",
        f"one-pass variances are {ratio:.2g} times those of draws of the same posterior (between {low} and {high} is "
        "expected): the rule takes tokens, layers, features and outputs as independent. They may rank inputs, and "
        "their size can be fitted (one_pass.fit_scale); predictive='streamlined' has the right size for a few passes "
        "more.",
        ratio,
        low if ratio < low else high,
    )

"""The improved priors of Cinquin et al. (2021), by the names of our models' parameters.

Chosen there from the weights of many trained networks, per task, for four groups: embedding, attention, MLP and
projection. Biases belong to their layer's group and learned positions to the embedding. The tables do not speak
of LayerNorm, and their laws, centred on 0 with scales near 1e-4, would forbid a gain of 1; gains get N(1, 1)
here and shifts N(0, 1).

    convert(regressor, prior=IMPROVED["m1"])
"""

from __future__ import annotations

from bayesformer.priors.distributions import Cauchy, Distribution, LaplaceDistribution, Logistic, Normal, StudentT

ATTENTION, MLP = "encoder.blocks.*.attention.*", "encoder.blocks.*.mlp.*"


def _table(
    embedding: Distribution, blocks: dict[str, Distribution], projection: Distribution
) -> dict[str, Distribution]:
    return {
        "*norm.weight": Normal(1, 1),
        "*norm.bias": Normal(0, 1),
        **blocks,
        "projection.*": projection,
        "*": embedding,  # and learned positions, if there are any
    }


IMPROVED: dict[str, dict[str, Distribution]] = {
    "m1": _table(StudentT(13, 0, 0.03), {ATTENTION: StudentT(5, 0, 1e-4), MLP: StudentT(6, 0, 1e-4)}, Cauchy(0, 0.6)),
    "m2": _table(
        LaplaceDistribution(0, 0.035),
        {ATTENTION: StudentT(4, 0, 1e-4), MLP: StudentT(5, 0, 1.5e-4)},
        LaplaceDistribution(0, 0.01),
    ),
    "m3": _table(
        Normal(0, 0.6), {ATTENTION: Logistic(0, 0.001), MLP: StudentT(5, 0, 0.002)}, LaplaceDistribution(0, 0.1)
    ),
    "m4": _table(
        LaplaceDistribution(0, 0.3),
        {ATTENTION: StudentT(3, 0, 1e-4), MLP: StudentT(5, 0, 1.5e-4)},
        LaplaceDistribution(0, 0.01),
    ),
    "m5": _table(
        LaplaceDistribution(0, 0.1), {ATTENTION: StudentT(6, 0, 1e-4), MLP: StudentT(4, 0, 1e-4)}, StudentT(1e4, 0, 0.2)
    ),
    "pos": _table(Normal(0, 0.3), {ATTENTION: StudentT(12, 0, 1e-4), MLP: StudentT(1e4, 0, 2.5e-4)}, Normal(0, 0.3)),
    "mnist": _table(
        Normal(0, 0.02),
        {
            "encoder.blocks.0.attention.*": Normal(0, 0.02),
            "encoder.blocks.0.mlp.*": StudentT(80, 0, 0.01),
            "encoder.blocks.1.attention.*": StudentT(26, 0, 2e-4),
            "encoder.blocks.1.mlp.*": StudentT(13, 0, 2e-4),
        },
        Logistic(0, 0.1),
    ),
}
"""By task: the toys m1 to m5, part-of-speech tags, MNIST (a model of two blocks)."""

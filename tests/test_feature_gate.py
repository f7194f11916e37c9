"""The gate on feature densities: what it mixes, what it costs inside the data and what it says outside of them."""

import math

import pytest
import torch
from torch import nn

import bayesformer as bf
from bayesformer.likelihoods.predictive import CategoricalPredictive
from bayesformer.predict import feature_gate
from bayesformer.predict.feature_gate import FeatureDensity, gated_predictive


def blobs(count, seed):
    source = torch.Generator().manual_seed(seed)
    y = torch.arange(count) % 3
    centres = torch.tensor([[0.0, 3.0], [3.0, -2.0], [-3.0, -2.0]])
    return centres[y] + 0.7 * torch.randn(count, 2, generator=source), y


def fitted(members=1):
    train, validation = blobs(300, 0), blobs(600, 1)
    torch.manual_seed(0)

    def build():
        return nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 3))

    method = bf.Ensemble(members)
    training = bf.Training(epochs=20, lr=1e-2)
    posterior = bf.fit(build, train, likelihood="categorical", method=method, training=training)
    return posterior, posterior.gated(train, validation), train, validation


def test_a_gate_mixes_every_draw_with_the_uniform_law():
    plain = CategoricalPredictive(torch.randn(4, 5, 3).log_softmax(-1))
    w = torch.tensor([0.0, 0.2, 0.5, 0.9, 1.0])
    found = gated_predictive(plain, w)
    torch.testing.assert_close(found.probs, (1 - w)[:, None] * plain.probs + w[:, None] / 3)
    torch.testing.assert_close(found.aleatoric, (1 - w) * plain.aleatoric)
    torch.testing.assert_close(found.total[0], plain.total[0])
    torch.testing.assert_close(found.epistemic[0], plain.epistemic[0], atol=1e-6, rtol=1e-5)
    assert found.epistemic[-1] == pytest.approx(math.log(3), rel=1e-4)
    part = found.select(w > 0.3)
    torch.testing.assert_close(part.epistemic, found.epistemic[2:])


def test_the_density_is_that_of_a_gaussian_per_class():
    x, y = blobs(60, 0)
    density = FeatureDensity.of(x, y)
    at = torch.randn(4, 2).double()
    naive = torch.zeros(4, dtype=torch.float64)
    for label in range(3):
        mine = x[y == label].double()
        covariance = torch.cov(mine.T, correction=0) + feature_gate.RIDGE * torch.eye(2)
        law = torch.distributions.MultivariateNormal(mine.mean(0), covariance)
        naive += law.log_prob(at).exp() / 3
    torch.testing.assert_close(density.log_density(at), naive.log())


@pytest.mark.parametrize("members", [1, 3])
def test_the_gate_costs_little_inside_and_is_unsure_outside(members):
    posterior, gate, train, validation = fitted(members)
    assert len(gate.networks) == members
    plain, shut = posterior.predict(validation[0]), gate.predict(validation[0])
    lost = (plain.log_prob(validation[1]) - shut.log_prob(validation[1])).mean()
    assert lost <= feature_gate.TOLERANCE + 1e-6
    far = 40 * torch.randn(30, 2, generator=torch.Generator().manual_seed(2))
    assert gate.weight(gate.log_density(far)).median() > 0.9
    assert gate.weight(gate.log_density(train[0])).median() < 0.1
    assert gate.predict(far).epistemic.median() > posterior.predict(far).epistemic.median() + 0.3
    features = feature_gate.features_of(gate.networks[0], far)
    torch.testing.assert_close(features, gate.networks[0][1](gate.networks[0][0](far)))


def test_a_gaussian_posterior_is_gated_by_the_features_of_its_mean():
    train, validation = blobs(300, 0), blobs(600, 1)
    model = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 3)).eval()
    posterior = bf.laplace(model, train, likelihood="categorical", structure="last_layer", prior_precision=1.0)
    (network,) = posterior.gated(train, validation).networks
    torch.testing.assert_close(network(train[0]), model(train[0]))


def test_what_has_no_feature_per_example_is_refused():
    x, y = torch.randn(20, 4, 2), torch.zeros(20, 4, dtype=torch.long)
    posterior = bf.fit(
        nn.Linear(2, 3), (x, y), likelihood="categorical", method=bf.Mle(), training=bf.Training(epochs=1)
    )
    with pytest.raises(ValueError, match=r"one vector per example; got \(20, 4, 2\)"):
        posterior.gated((x, y), (x, y))

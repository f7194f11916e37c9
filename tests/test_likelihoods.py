"""Likelihoods: densities against torch.distributions, curvature against autograd, padding as if absent."""

import math

import pytest
import torch
from torch import distributions as D

from bayesformer.core.types import Draws, GaussianOutputs, symmetric_root
from bayesformer.likelihoods import (
    LINK_DRAWS,
    Bernoulli,
    Categorical,
    Gaussian,
    NextToken,
    Poisson,
    as_likelihood,
    from_json,
    to_json,
)
from tests.laws import assert_mean


def outputs_and_targets(likelihood, shape):
    if likelihood.name == "categorical":
        return torch.randn(*shape, 5, dtype=torch.float64), torch.randint(5, shape)
    if likelihood.name == "gaussian":
        width = 3 if likelihood.scale else 6
        return torch.randn(*shape, width, dtype=torch.float64), torch.randn(*shape, 3, dtype=torch.float64)
    return torch.randn(*shape, dtype=torch.float64), torch.randint(2, shape)


ALL = [Categorical(), Gaussian(), Gaussian(scale=0.7), Bernoulli(), Poisson()]


def test_categorical_equals_torch():
    f, y = outputs_and_targets(Categorical(), (4, 6))
    expected = D.Categorical(logits=f).log_prob(y).sum(1)
    torch.testing.assert_close(Categorical().log_prob(f, y), expected)


def test_gaussian_equals_torch_with_predicted_and_known_scale():
    f, y = outputs_and_targets(Gaussian(), (4, 6))
    scale = torch.nn.functional.softplus(f[..., 3:]) + 1e-3
    expected = D.Normal(f[..., :3], scale).log_prob(y).sum((1, 2))
    torch.testing.assert_close(Gaussian().log_prob(f, y), expected)
    expected = D.Normal(f[..., :3], 0.7).log_prob(y).sum((1, 2))
    torch.testing.assert_close(Gaussian(scale=0.7).log_prob(f[..., :3], y), expected)


def test_bernoulli_equals_torch():
    f, y = outputs_and_targets(Bernoulli(), (4, 6))
    expected = D.Bernoulli(logits=f).log_prob(y.double()).sum(1)
    torch.testing.assert_close(Bernoulli().log_prob(f, y), expected)


@pytest.mark.parametrize("likelihood", ALL, ids=repr)
def test_one_position_per_example(likelihood):
    f, y = outputs_and_targets(likelihood, (7,))
    assert likelihood.log_prob(f, y).shape == (7,)


@pytest.mark.parametrize("likelihood", ALL, ids=repr)
def test_padding_counts_nothing_in_value_or_gradient(likelihood):
    f, y = outputs_and_targets(likelihood, (4, 6))
    mask = torch.arange(6) < torch.tensor([6, 4, 1, 3])[:, None]
    if y.is_floating_point():
        y = y.masked_fill(~mask.unsqueeze(-1), math.nan)  # whatever stands in the padding
    f.requires_grad_()
    value = likelihood.log_prob(f, y, mask)
    alone = torch.stack(
        [likelihood.log_prob(f[i : i + 1, :n], y[i : i + 1, :n])[0] for i, n in enumerate([6, 4, 1, 3])]
    )
    torch.testing.assert_close(value, alone)
    (grad,) = torch.autograd.grad(value.sum(), f)
    assert torch.isfinite(grad).all()
    assert (grad[~mask] == 0).all()


def test_ignored_labels_are_padding():
    f, y = outputs_and_targets(Categorical(), (4, 6))
    y[:, 4:] = -100
    torch.testing.assert_close(Categorical().log_prob(f, y), Categorical().log_prob(f[:, :4], y[:, :4]))
    assert torch.equal(Categorical().counted(y), y != -100)
    assert Categorical().counted(y[:, :4]) is None


@pytest.mark.parametrize("likelihood", [Categorical(), Gaussian(scale=0.7), Bernoulli()], ids=repr)
def test_hessian_equals_autograd(likelihood):
    f, y = outputs_and_targets(likelihood, (3,))
    if likelihood.name == "bernoulli":
        f, y = f[:, None], y[:, None]
    exact = torch.stack(
        [
            torch.func.hessian(lambda g, t=t: -likelihood.log_prob(g[None], t[None])[0])(g)
            for g, t in zip(f, y, strict=True)
        ]
    )
    torch.testing.assert_close(likelihood.hessian(f), exact)


def test_hessian_with_predicted_scale_is_the_fisher_information():
    likelihood = Gaussian()
    f = torch.tensor([0.3, -0.4], dtype=torch.float64)
    mean, scale = likelihood.split(f)
    y = D.Normal(mean, scale).sample((200_000,))
    score = torch.func.vmap(torch.func.grad(lambda g, t: likelihood.log_prob(g[None], t[None])[0]), (None, 0))(f, y)
    outer = score.unsqueeze(-1) * score.unsqueeze(-2)
    assert_mean(outer.flatten(1), likelihood.hessian(f).flatten())


def test_predictive_averages_probabilities_not_logits():
    logits = torch.tensor([[[4.0, 0.0]], [[0.0, 0.0]]])  # (L=2, B=1, C=2)
    predictive = Categorical().predictive(Draws(logits))
    torch.testing.assert_close(predictive.probs, logits.softmax(-1).mean(0))
    assert not torch.allclose(predictive.probs, logits.mean(0).softmax(-1), atol=0.05)


def test_gaussian_over_outputs_has_a_closed_form_for_known_noise():
    mean, root = torch.randn(5, 2, dtype=torch.float64), torch.randn(5, 2, 2, dtype=torch.float64)
    predictive = Gaussian(scale=0.5).predictive(GaussianOutputs.of(mean, root @ root.mT))
    spread = (root @ root.mT).diagonal(dim1=-2, dim2=-1)
    torch.testing.assert_close(predictive.variance, spread + 0.25)
    torch.testing.assert_close(predictive.epistemic, spread.sum(-1))
    torch.testing.assert_close(predictive.aleatoric, torch.full((5,), 0.5, dtype=torch.float64))
    y = torch.randn(5, 2, dtype=torch.float64)
    exact = D.Normal(mean, (spread + 0.25).sqrt()).log_prob(y).sum(-1)
    torch.testing.assert_close(predictive.log_prob(y), exact)


def test_gaussian_over_logits_is_sampled_with_its_covariance():
    root = torch.randn(1, 3, 3, dtype=torch.float64)
    covariance = root @ root.mT
    outputs = GaussianOutputs.of(torch.randn(1, 3, dtype=torch.float64), covariance)
    from bayesformer.likelihoods import as_draws

    draws = as_draws(outputs)
    assert draws.shape == (LINK_DRAWS, 1, 3)
    centred = draws[:, 0] - outputs.mean[0]
    assert_mean((centred.unsqueeze(-1) * centred.unsqueeze(-2)).flatten(1), covariance[0].flatten())
    assert torch.equal(draws, as_draws(outputs))  # repeatable


def test_bernoulli_predictive_has_two_classes():
    logits = torch.randn(3, 4)
    predictive = Bernoulli().predictive(Draws(logits))
    torch.testing.assert_close(predictive.probs[..., 1], torch.sigmoid(logits).mean(0))
    torch.testing.assert_close(predictive.probs.sum(-1), torch.ones(4))


@pytest.mark.parametrize(
    "likelihood", [*ALL, Categorical(ignore_index=-1), Categorical(aligned=True), NextToken(7)], ids=repr
)
def test_json_round_trip(likelihood):
    assert from_json(to_json(likelihood)) == likelihood


@pytest.mark.parametrize(
    ("likelihood", "outputs", "targets", "text"),
    [
        (Categorical(), torch.zeros(2, 3), torch.tensor([0, 3]), r"targets must lie in 0\.\.2 .* got 3"),
        (Categorical(), torch.zeros(2, 3), torch.tensor([0, -1]), r"got -1"),
        (Categorical(), torch.zeros(2, 3), torch.zeros(2), "must be integers; got torch.float32"),
        (Categorical(), torch.zeros(2, 3), torch.ones(2, dtype=torch.bool), "got torch.bool, which looks like a mask"),
        (Categorical(), torch.zeros(2, 3), torch.full((2,), -100), "at least one label must count; all 2 equal"),
        (
            Categorical(),
            torch.zeros(2, 3),
            torch.zeros(2, 1, dtype=torch.long),
            r"must have shape \(2,\) .* got \(2, 1\)",
        ),
        (
            Gaussian(),
            torch.zeros(2, 3),
            torch.zeros(2, 1),
            "even number of outputs, means then scales; got 3",
        ),
        (Gaussian(), torch.zeros(2, 2), torch.zeros(2), r"must have shape \(2, 1\) .* got \(2,\)"),
        (
            Gaussian(scale=1.0),
            torch.zeros(2, 1),
            torch.tensor([[0.0], [math.nan]]),
            "finite where they count; got 1 NaN",
        ),
        (Bernoulli(), torch.zeros(2), torch.tensor([0, 2]), "must be 0 or 1; got 2"),
        (Poisson(), torch.zeros(2), torch.tensor([0, -2]), "must be counts 0, 1, 2, ...; got -2"),
        (Poisson(), torch.zeros(2), torch.tensor([0.5, 1]), "must be counts 0, 1, 2, ...; got 0.5"),
        (Poisson(), torch.zeros(2), torch.tensor([math.nan, 1]), "got nan"),
        (NextToken(), torch.zeros(2, 3), torch.tensor([0, 1]), r"outputs .* must be \(B, T, V\); got \(2, 3\)"),
        (NextToken(), torch.zeros(2, 4, 3), torch.tensor([[1, 2], [0, 1]]), r"must have shape \(2, 4\)"),
        (NextToken(), torch.zeros(1, 2, 3), torch.tensor([[1, 3]]), r"must lie in 0\.\.2 .* got 3"),
        (NextToken(), torch.zeros(1, 2, 3), torch.tensor([[1, -100]]), "at least one label must count"),
        (Bernoulli(), torch.zeros(2, 2), torch.tensor([0, 1]), r"must have shape \(2, 2\)"),
    ],
)
def test_misfits_are_named(likelihood, outputs, targets, text):
    with pytest.raises(ValueError, match=text):
        likelihood.check(outputs, targets)


def test_unknown_names_and_values():
    with pytest.raises(ValueError, match="unknown likelihood 'categorial'. Did you mean 'categorical'"):
        as_likelihood("categorial")
    with pytest.raises(ValueError, match="scale must be a positive finite number, or None; got -1"):
        Gaussian(scale=-1)
    with pytest.raises(ValueError, match="floor must be positive; got 0"):
        Gaussian(floor=0)
    with pytest.raises(ValueError, match=r"aligned must be True or None; got False.*use NextToken"):
        Categorical(aligned=False)
    with pytest.raises(ValueError, match=r"derives from .*Likelihood; got <class.*Did you mean Categorical\(\)"):
        as_likelihood(Categorical)


def test_masks_over_examples_and_masks_that_do_not_fit():
    f, y = outputs_and_targets(Categorical(), (3, 4))
    mask = torch.tensor([True, False, True])
    expected = Categorical().log_prob(f, y) * mask
    torch.testing.assert_close(Categorical().log_prob(f, y, mask), expected)
    assert Categorical().counted_positions(y, mask).tolist() == [4, 0, 4]
    with pytest.raises(ValueError, match=r"mask must have shape \(3, 4\) or its leading axes; got \(4,\)"):
        Categorical().log_prob(f, y, torch.ones(4, dtype=torch.bool))


@pytest.mark.parametrize("likelihood", ALL, ids=repr)
def test_no_target_that_counts_is_refused(likelihood):
    f, y = outputs_and_targets(likelihood, (4, 6))
    with pytest.raises(ValueError, match="at least one"):
        likelihood.check(f, y, torch.zeros(4, 6, dtype=torch.bool))


@pytest.mark.parametrize("likelihood", ALL, ids=repr)
def test_counted_positions_are_those_of_the_mask(likelihood):
    _, y = outputs_and_targets(likelihood, (4, 6))
    mask = torch.arange(6) < torch.tensor([6, 4, 1, 3])[:, None]
    assert likelihood.counted_positions(y).tolist() == [6] * 4
    assert likelihood.counted_positions(y, mask).tolist() == [6, 4, 1, 3]
    if likelihood.name == "categorical":
        assert likelihood.counted_positions(y.masked_fill(~mask, -100)).tolist() == [6, 4, 1, 3]


def test_narrow_integer_labels_are_labels():
    f, y = outputs_and_targets(Categorical(), (4, 6))
    for dtype in (torch.int32, torch.uint8):
        torch.testing.assert_close(Categorical().log_prob(f, y.to(dtype)), Categorical().log_prob(f, y))


def test_the_noise_is_known_to_those_who_have_it():
    assert Gaussian(0.5).noise_scale == 0.5
    assert Gaussian(0.5, floor=1e-2).with_noise_scale(0.7) == Gaussian(0.7, floor=1e-2)
    for other in (Gaussian(), Categorical(), Bernoulli(), Poisson()):
        assert other.noise_scale is None
        with pytest.raises(ValueError, match="must have a known noise scale to change it to 0.7; got"):
            other.with_noise_scale(0.7)


def test_a_symmetric_root_is_the_same_in_every_basis_of_equal_eigenvalues():
    """Eigenvectors may be turned within a space of equal eigenvalues, by rounding alone; draws must not turn."""
    torch.manual_seed(0)
    turn, _ = torch.linalg.qr(torch.randn(6, 6, dtype=torch.float64))
    values = torch.tensor([2.0, 2.0, 2.0, 0.5, 0.5, 0.0], dtype=torch.float64)
    covariance = (turn * values) @ turn.mT
    rounded = covariance + 1e-14 * torch.randn(6, 6, dtype=torch.float64)
    root, other = symmetric_root(covariance), symmetric_root((rounded + rounded.mT) / 2)
    torch.testing.assert_close(root @ root, covariance, rtol=0, atol=1e-12)
    torch.testing.assert_close(other, root, rtol=0, atol=1e-6)  # the root of the rounding in the last direction

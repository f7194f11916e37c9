"""Fits that were silently wrong say so: forms that leave curvature out, heated directions, cycles, choices."""

import pytest
import torch
from torch import nn

import bayesformer as bf


def checks(posterior):
    return {doubt.check: doubt for doubt in posterior.doubts}


def regression(count, inputs, noise=0.5, seed=0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(count, inputs, generator=g)
    return x, x @ torch.randn(inputs, 1, generator=g) + noise * torch.randn(count, 1, generator=g)


@pytest.mark.parametrize("form", [{"structure": "low_rank"}, {"structure": "subnetwork", "size": 60}])
def test_forms_that_leave_directions_out_say_so(form):
    data = regression(300, 120)
    posterior = bf.fit(
        nn.Linear(120, 1), data, likelihood=bf.Gaussian(0.5), method=bf.Laplace(prior_precision=1.0, **form)
    )
    doubt = checks(posterior)["outputs"]
    assert doubt.value > 5 if form["structure"] == "low_rank" else doubt.value < 0.9
    assert "low_rank" in doubt.sentence
    whole = bf.fit(
        nn.Linear(120, 1),
        data,
        likelihood=bf.Gaussian(0.5),
        method=bf.Laplace(prior_precision=1.0, structure="low_rank", rank=121),
    )
    assert "outputs" not in checks(whole)


@pytest.mark.parametrize("method", [bf.Psgld(), bf.Sghmc()], ids=["psgld", "sghmc"])
def test_heat_in_a_few_directions_is_not_hidden_by_the_others(method):
    """Three inputs that count and 17 that do not, with four times the noise that the likelihood says."""
    g = torch.Generator().manual_seed(1)
    x = torch.randn(300, 20, generator=g)
    x[:, 3:] *= 1e-3
    y = x @ torch.randn(20, 1, generator=g) + 2 * torch.randn(300, 1, generator=g)
    posterior = bf.fit(nn.Linear(20, 1), (x, y), likelihood=bf.Gaussian(0.5), method=method)
    design = torch.cat([x, torch.ones(300, 1)], 1).double()
    covariance = torch.linalg.inv(design.T @ design / 0.25 + torch.eye(21, dtype=torch.float64))
    exact = torch.einsum("nd,de,ne->n", design, covariance, design).sqrt()
    found = posterior.predict(x).epistemic.double().sqrt().flatten()
    assert float((found / exact).median()) > 1.15  # it is too wide
    assert "temperature" in checks(posterior)


def test_cycles_say_that_they_do_not_sample_the_posterior():
    posterior = bf.fit(nn.Linear(5, 1), regression(100, 5), likelihood=bf.Gaussian(0.5), method=bf.Sgld(cycles=2))
    assert "cycles" in checks(posterior)


def test_a_last_layer_that_predicts_far_worse_than_its_network_says_so():
    g = torch.Generator().manual_seed(0)
    x = torch.randn(300, 60, generator=g)
    y = (x @ torch.randn(60, 8, generator=g)).argmax(1)  # classes that a linear map separates
    model = nn.Linear(60, 8)
    doubts = checks(bf.fit(model, (x, y), likelihood="categorical", method=bf.Laplace("kron", prior_precision=1e-3)))
    assert doubts["draws below the mean"].value > 0.3
    assert "prior_precision='validation'" in doubts["draws below the mean"].sentence


def test_validation_that_leaves_no_width_says_so():
    g = torch.Generator().manual_seed(0)
    x = torch.randn(60, 2, generator=g)
    y = (x[:, 0] > 0).long()
    held = (x[:20].repeat(20, 1), y[:20].repeat(20))  # seen in training, and without an error: the surer the better
    posterior = bf.fit(
        nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 2)),
        (x, y),
        likelihood="categorical",
        method=bf.Laplace(prior_precision="validation"),
        validation=held,
        training=bf.Training(epochs=60, lr=0.02, patience=0),
    )
    assert posterior.facts["prior_precision"] == [pytest.approx(1e6)]
    assert "hardly any width" in checks(posterior)["prior"].sentence


def test_training_that_ends_within_its_warm_up_has_not_converged():
    g = torch.Generator().manual_seed(0)
    x = torch.randn(600, 4, generator=g)
    y = (x[:, 0] > 0).long()
    posterior = bf.fit(
        nn.Linear(4, 2), (x, y), likelihood="categorical", method=bf.Mle(), training=bf.Training(epochs=2)
    )
    assert posterior.facts["converged"] == [None]
    assert "training.warmup" in checks(posterior)["training"].sentence


def test_laplace_refuses_what_is_no_trained_module_and_settings_that_it_has_not():
    data = regression(20, 2)
    with pytest.raises(ValueError, match=r"model must be a module that is trained already; got function"):
        bf.laplace(lambda: nn.Linear(2, 1), data, likelihood=bf.Gaussian(1.0))
    with pytest.raises(ValueError, match="Did you mean 'structure'"):
        bf.laplace(nn.Linear(2, 1).eval(), data, likelihood=bf.Gaussian(1.0), structur="kron")
    with pytest.raises(ValueError, match=r"whose matrix and its factors take .* GiB"):
        bf.fit(nn.Linear(40_000, 1), (torch.randn(4, 40_000), torch.randn(4, 1)), likelihood=bf.Gaussian(1.0),
               method=bf.Laplace("full"))  # fmt: skip

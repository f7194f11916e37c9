"""One-line calls on small regressions whose posterior is known: right, or said not to be."""

import warnings

import pytest
import torch
from torch import nn

import bayesformer as bf
from bayesformer.laws import gaussian
from bayesformer.model.space import Space
from bayesformer.priors.distributions import Cauchy, Logistic, Normal, StudentT, has_heavy_tails
from bayesformer.train.output_spread import weight_spread

NOISE = 0.5


def regression(offset=0.0, count=200, size=3, seed=0):
    """Inputs that may lie far from 0, as years or ages do."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(count, size, generator=g) + offset
    return x, x.sum(1, keepdim=True) + NOISE * torch.randn(count, 1, generator=g)


def exact(x, prior_precision=1.0):
    """(P, P), float64: the precision of weights and bias."""
    rows = torch.cat([x, torch.ones(len(x), 1)], 1).double()
    return rows.T @ rows / NOISE**2 + prior_precision * torch.eye(rows.shape[1], dtype=torch.float64)


def fitted(method, data, size=3, **more):
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", bf.FidelityWarning)
        return bf.fit(nn.Linear(size, 1), data, likelihood=bf.Gaussian(NOISE), method=method, **more)


def checks(posterior):
    return {doubt.check for doubt in posterior.doubts}


def test_laplace_with_nothing_set_is_the_posterior_far_from_the_origin():
    x, y = regression(offset=10.0)
    posterior = fitted(bf.Laplace(), (x, y))
    assert posterior.facts["method"]["structure"] == "full"
    truth = exact(x, posterior.facts["prior_precision"][0]).inverse()
    torch.testing.assert_close(posterior.law.variance().double(), truth.diagonal(), rtol=2e-3, atol=0)
    assert checks(posterior) == set()


def test_laplace_chooses_its_structure_by_the_number_of_weights():
    data = regression(size=30)
    torch.manual_seed(0)
    wide = bf.laplace(nn.Sequential(nn.Linear(30, 20), nn.Linear(20, 1)).eval(), data, likelihood=bf.Gaussian(NOISE))
    assert wide.facts["method"]["structure"] == "kron"
    few = bf.laplace(nn.Linear(30, 1).eval(), data, likelihood=bf.Gaussian(NOISE))
    assert few.facts["method"]["structure"] == "full"
    more = bf.laplace_update(few, data)  # as the earlier posterior has it
    assert type(more.law.blocks[0]) is type(few.law.blocks[0])
    again = bf.fit(few.model, data, likelihood=bf.Gaussian(NOISE), method=bf.Laplace(), prior=few)
    assert again.facts["method"]["structure"] == "full"
    layers = bf.laplace(nn.Linear(30, 1).eval(), data, likelihood=bf.Gaussian(NOISE), per="layer")
    assert layers.facts["method"]["structure"] == "kron"


@pytest.mark.parametrize(
    "method", [bf.Vi(), bf.Ivon(), bf.Ekf(), bf.Laplace("diag"), bf.Laplace("kron")], ids=lambda m: type(m).__name__
)
def test_gaussians_that_leave_out_correlations_say_so_far_from_the_origin(method):
    x, y = regression(offset=10.0)
    posterior = fitted(method, (x, y))
    (doubt,) = [doubt for doubt in posterior.doubts if doubt.check == "weights"]
    assert doubt.value == posterior.facts["weight_spread"] < 0.3
    assert "Centre" in doubt.sentence
    truth = exact(x, posterior.facts.get("prior_precision", [1.0])[0]).inverse().diagonal()
    ratio = (posterior.law.variance().double() / truth).sqrt()
    least = min(ratio[:3].median(), ratio[3])
    assert doubt.value == pytest.approx(float(least), rel=0.02)
    assert f"weights of {'weight' if least < ratio[3] else 'bias'} have" in doubt.sentence


@pytest.mark.parametrize(
    "method", [bf.Vi(), bf.Ivon(), bf.Ekf(), bf.Laplace("diag"), bf.Laplace("kron")], ids=lambda m: type(m).__name__
)
def test_near_the_origin_they_do_not(method):
    assert "weights" not in checks(fitted(method, regression()))


def test_the_spread_of_weights_is_that_of_the_inverse():
    g = torch.Generator().manual_seed(0)
    root = torch.randn(7, 7, generator=g, dtype=torch.float64)
    precision = root @ root.T + torch.eye(7, dtype=torch.float64)
    space = Space.of(nn.Linear(6, 1))
    law = gaussian(torch.zeros(7, dtype=torch.float64), precision.diagonal().rsqrt())
    ratio = (1 / precision.diagonal() / precision.inverse().diagonal()).sqrt()
    name, value = weight_spread(space, law, precision)
    each = {"weight": float(ratio[:6].median()), "bias": float(ratio[6])}
    assert value == pytest.approx(min(each.values()))
    assert each[name] == min(each.values())
    exactly = gaussian(torch.zeros(7, dtype=torch.float64), precision.inverse().diagonal().sqrt())
    assert weight_spread(space, exactly, precision)[1] == pytest.approx(1)


@pytest.mark.parametrize("size", [2, 3])
def test_variational_fits_of_few_weights_are_right_and_not_doubted(size):
    for seed in range(6):
        data = regression(count=100, size=size, seed=seed)
        torch.manual_seed(0)
        model = nn.Linear(size, 1, bias=False)
        posterior = bf.fit(model, data, likelihood=bf.Gaussian(NOISE), method=bf.Vi("dense"))
        truth = (data[0].T @ data[0] / NOISE**2 + torch.eye(size)).inverse().diagonal().sqrt()
        torch.testing.assert_close(posterior.law.sd, truth, rtol=0.06, atol=0)
        assert posterior.doubts == ()


def test_which_priors_have_heavy_tails():
    assert has_heavy_tails(Cauchy(0.3, 2.0))
    assert has_heavy_tails(StudentT(2.0, 1.0, 0.1))
    for light in (Normal(1.0, 0.1), Logistic(0.0, 3.0), StudentT(30.0)):
        assert not has_heavy_tails(light)


@pytest.mark.parametrize("method", [bf.Sgnht, bf.Sgld, bf.Ekf, bf.Vi], ids=lambda m: m.__name__)
def test_a_prior_with_heavy_tails_that_decides_is_doubted(method):
    x, y = torch.ones(5, 1), torch.tensor([[3.1], [2.8], [3.3], [2.6], [3.4]])
    for prior, doubted in (("student_t(2, 0, 0.1)", True), ("normal(0, 0.1)", False)):
        torch.manual_seed(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", bf.FidelityWarning)
            model = nn.Linear(1, 1, bias=False)
            posterior = bf.fit(model, (x, y), likelihood=bf.Gaussian(12.5**0.5), method=method(prior=prior))
        assert ("prior" in checks(posterior)) == doubted


def test_a_bare_layer_with_one_inferred_parameter_can_be_asked():
    x, y = regression(count=40)
    posterior = fitted(bf.Vi(), (x, y), infer="bias")
    values = posterior.outputs(x).values
    torch.testing.assert_close(values[0] - values[1], (values[0] - values[1])[:1].expand(40, 1))
    assert fitted(bf.Hmc(draws=5, warm_up=5), (x, y), infer="bias").predict(x).mean.shape == (40, 1)


def test_linearised_laplace_on_a_network_says_that_it_knows_one_mode():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)).eval()
    whole = bf.laplace(model, regression(), likelihood=bf.Gaussian(NOISE))
    assert "regime" in checks(whole)
    last = bf.laplace(model, regression(), likelihood=bf.Gaussian(NOISE), structure="last_layer")
    assert "regime" not in checks(last)
    for part in (nn.Dropout(0.1), nn.BatchNorm1d(5)):  # a training pass of these is another function
        noisy = nn.Sequential(nn.Linear(3, 5), part, nn.Tanh(), nn.Linear(5, 1)).eval()
        last = bf.laplace(noisy, regression(), likelihood=bf.Gaussian(NOISE), structure="last_layer")
        assert "regime" not in checks(last)


def test_chains_of_a_given_network_say_that_they_see_one_mode():
    torch.manual_seed(0)
    build = lambda: nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))  # noqa: E731
    found = {}
    for kind, model in (("given", build()), ("fresh", build)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", bf.FidelityWarning)
            found[kind] = bf.fit(
                model, regression(), likelihood=bf.Gaussian(NOISE), method=bf.Sghmc(), training=bf.Training(3)
            )
    assert "starts" in checks(found["given"])
    assert "starts" not in checks(found["fresh"])


def test_members_that_all_start_from_given_weights_are_doubted():
    torch.manual_seed(0)
    build = lambda: nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))  # noqa: E731
    short, method = bf.Training(epochs=2), bf.Ensemble(2)
    for model, init, doubted in ((build(), "given", True), (build(), "fresh", False), (build, "given", False)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", bf.FidelityWarning)
            found = bf.fit(model, regression(), likelihood=bf.Gaussian(NOISE), method=method, training=short, init=init)
        assert ("starts" in checks(found)) == doubted

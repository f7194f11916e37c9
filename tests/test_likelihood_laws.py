"""Laws that every likelihood obeys: a new one is listed in KINDS and passes, or is no likelihood."""

import math
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import distributions as D
from torch.nn import functional as F

import bayesformer as bf
from bayesformer import evaluate
from bayesformer.core.types import Draws, GaussianOutputs
from bayesformer.laplace import estimate
from bayesformer.likelihoods import (
    Bernoulli,
    Categorical,
    Gaussian,
    Likelihood,
    NextToken,
    Poisson,
    from_json,
    to_json,
)
from bayesformer.likelihoods.fisher import SUPPORT
from bayesformer.likelihoods.predictive import CategoricalPredictive, PoissonPredictive
from bayesformer.likelihoods.registry import LIKELIHOODS
from tests.laws import assert_mean

F64 = torch.float64


@dataclass(frozen=True)
class Binomial(Likelihood):
    """Of one's own, with the least that it takes: everything about curvature and draws follows."""

    name: ClassVar[str] = "binomial"
    elementwise: ClassVar[bool] = True

    trials: int = 5

    def log_density(self, outputs, targets):
        return self.law(outputs).log_prob(targets.to(outputs.dtype))

    def law(self, outputs):
        return D.Binomial(self.trials, logits=outputs, validate_args=False)

    def support(self, outputs):
        return torch.arange(self.trials + 1, device=outputs.device)

    def predictive(self, outputs, link=None, draws=None, seed=0):
        logits = self.output_draws(outputs, link, draws, seed).unsqueeze(-1)
        values = torch.arange(self.trials + 1.0, device=logits.device)
        return CategoricalPredictive(self.law(logits).log_prob(values))


@dataclass(frozen=True)
class Probit(Likelihood):
    """Of one's own, yes or no with probability Φ(f): its second derivatives depend on the target."""

    name: ClassVar[str] = "probit"
    elementwise: ClassVar[bool] = True

    def log_density(self, outputs, targets):
        return torch.special.log_ndtr(torch.where(targets > 0, outputs, -outputs))

    def support(self, outputs):
        return torch.arange(2, device=outputs.device)


@dataclass(frozen=True)
class StudentT(Likelihood):
    """Of one's own, without an end of values: outputs (B, ..., 2) are location and log scale of one number."""

    name: ClassVar[str] = "student_t"

    df: float = 4.0

    def law(self, outputs):
        return D.StudentT(self.df, outputs[..., 0], outputs[..., 1].exp())

    def log_density(self, outputs, targets):
        return self.law(outputs).log_prob(targets)

    def sample(self, outputs, generator):
        shape = outputs.shape[:-1]
        normal = torch.randn(shape, generator=generator, dtype=outputs.dtype)
        chi = torch.randn(int(self.df), *shape, generator=generator, dtype=outputs.dtype).square().sum(0)
        return outputs[..., 0] + outputs[..., 1].exp() * normal * (self.df / chi).sqrt()


KINDS = {
    "categorical": (Categorical(), (3, 4), lambda f: D.Categorical(logits=f)),
    "gaussian": (Gaussian(), (3, 4), lambda f: D.Normal(f[..., :2], F.softplus(f[..., 2:]) + 1e-3)),
    "gaussian known": (Gaussian(0.7), (3, 2), lambda f: D.Normal(f, 0.7)),
    "bernoulli": (Bernoulli(), (3, 2), lambda f: D.Bernoulli(logits=f)),
    "poisson": (Poisson(), (3, 2), lambda f: D.Poisson(f.exp())),
    "binomial": (Binomial(), (3, 2), lambda f: D.Binomial(5, logits=f)),
    "probit": (Probit(), (3, 2), lambda f: D.Bernoulli(torch.special.ndtr(f))),
    "student_t": (StudentT(), (3, 2), lambda f: D.StudentT(4.0, f[..., 0], f[..., 1].exp())),
}
OWN = ("binomial", "probit", "student_t")
INFORMATION = {  # of the laws that have no closed form above
    "binomial": lambda f: torch.diag_embed(5 * torch.sigmoid(f) * torch.sigmoid(-f)),
    "probit": lambda f: torch.diag_embed(
        (-f * f).exp() / (2 * math.pi * torch.special.ndtr(f) * torch.special.ndtr(-f))
    ),
    # Lange, Little & Taylor (1989), appendix B: location (ν+1)/(ν+3) σ⁻², log scale 2ν/(ν+3).
    "student_t": lambda f: torch.diag_embed(torch.stack([5 / 7 * (-2 * f[..., 1]).exp(), 0 * f[..., 1] + 8 / 7], -1)),
}


def case(kind, dtype=F64):
    likelihood, shape, law = KINDS[kind]
    return likelihood, torch.randn(shape, dtype=dtype), law


def expected_by_autograd(likelihood, outputs, targets, weights):
    """(K, K): Σ_y weight · minus the second derivative, for one example of outputs (1, K)."""
    total = 0
    for y, w in zip(targets, weights, strict=True):
        total = total - w * torch.func.hessian(lambda f, y=y: likelihood.log_prob(f[None], y[None])[0])(outputs[0])
    return total


@pytest.mark.parametrize("kind", KINDS)
def test_log_prob_is_that_of_torch(kind):
    likelihood, f, law = case(kind)
    y = law(f).sample()
    exact = law(f).log_prob(y)
    torch.testing.assert_close(likelihood.log_prob(f, y), exact.flatten(1).sum(1) if exact.dim() > 1 else exact)


@pytest.mark.parametrize("kind", [*KINDS, "next_token"])
def test_what_is_identified_is_a_projection_that_log_prob_does_not_see(kind):
    likelihood, f = (NextToken(), torch.randn(2, 5, 4, dtype=F64)) if kind == "next_token" else case(kind)[:2]
    other = torch.randn_like(f)
    y = torch.randint(4, (2, 5)) if kind == "next_token" else KINDS[kind][2](f).sample()
    seen = likelihood.identified(f)
    torch.testing.assert_close(likelihood.log_prob(seen, y), likelihood.log_prob(f, y))
    torch.testing.assert_close(likelihood.identified(seen), seen)
    torch.testing.assert_close((likelihood.identified(other) * f).sum(), (other * seen).sum())
    torch.testing.assert_close(likelihood.hessian_times(f, f - seen), torch.zeros_like(f))


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_finite_differences(kind):
    likelihood, f, law = case(kind)
    y = law(f).sample()
    f.requires_grad_()
    assert torch.autograd.gradcheck(lambda x: likelihood.log_prob(x, y), f)


@pytest.mark.parametrize("kind", ["categorical", "bernoulli", "binomial", "probit", "poisson", "gaussian known"])
def test_the_information_is_the_expectation_written_out(kind):
    """Every value of the targets of one example with its probability; counts up to where nothing is left."""
    likelihood, f, _ = case(kind)
    f = f[:1]
    if kind == "categorical":
        targets = torch.arange(4)
    elif kind == "gaussian known":
        targets = torch.zeros(1, 2, dtype=F64)  # the second derivative does not depend on y
    else:
        values = torch.arange({"bernoulli": 2, "probit": 2, "binomial": 6, "poisson": 40}[kind])
        targets = torch.cartesian_prod(values, values)
    weights = torch.stack([likelihood.log_prob(f, y[None]).exp()[0] for y in targets])
    weights = weights if kind != "gaussian known" else torch.ones(1, dtype=F64)
    torch.testing.assert_close(weights.sum(), torch.tensor(1.0, dtype=F64))
    exact = expected_by_autograd(likelihood, f, targets, weights)
    torch.testing.assert_close(likelihood.hessian(f)[0], exact)


@pytest.mark.parametrize("kind", KINDS)
def test_the_information_is_the_mean_outer_product_of_scores(kind):
    likelihood, f, law = case(kind)
    many = f[:1].expand(100_000, -1).clone().requires_grad_()
    y = law(many.detach()).sample()
    (score,) = torch.autograd.grad(likelihood.log_prob(many, y).sum(), many)
    outer = (score.unsqueeze(-1) * score.unsqueeze(-2)).flatten(1)
    exact = INFORMATION[kind](f) if kind in OWN else likelihood.hessian(f)
    alive = outer.std(0) > 0
    assert_mean(outer[:, alive], exact[0].flatten()[alive])
    assert (exact[0].flatten()[~alive] == 0).all()


@pytest.mark.parametrize("kind", ["categorical", "gaussian known", "bernoulli", "poisson"])
def test_autograd_finds_the_closed_forms(kind):
    """The defaults of the base class, asked of likelihoods that need them not."""
    likelihood, f, _ = case(kind)
    if kind == "categorical":
        own = type("Plain", (Categorical,), {"support": lambda self, f: torch.arange(f.shape[-1])})()
        found = Likelihood.hessian(own, f)
    else:
        found = Likelihood.hessian(likelihood, f)
    torch.testing.assert_close(found, likelihood.hessian(f))
    torch.testing.assert_close(Likelihood.hessian_diagonal(likelihood, f), likelihood.hessian_diagonal(f))


def test_autograd_on_one_s_own():
    for kind in ("binomial", "probit"):
        likelihood, f, _ = case(kind)
        torch.testing.assert_close(likelihood.hessian(f), INFORMATION[kind](f))
        torch.testing.assert_close(likelihood.hessian_diagonal(f[:, 0]), INFORMATION[kind](f)[:, 0, 0])
    # StudentT draws its targets: close, and equal from call to call. -∂² log p ranges over ± a few σ⁻².
    likelihood, f, _ = case("student_t")
    found, exact = likelihood.hessian(f), INFORMATION["student_t"](f)
    assert torch.equal(found, likelihood.hessian(f))
    assert ((found - exact).abs() / exact.diagonal(dim1=-2, dim2=-1).amax(-1)[:, None, None]).max() < 0.5
    assert len(Binomial(SUPPORT).support(f)) > SUPPORT  # from here on draws, which do not matter for it
    few, many = Binomial(SUPPORT - 1).hessian(f), Binomial(SUPPORT).hessian(f)
    torch.testing.assert_close(few * SUPPORT / (SUPPORT - 1), many)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens", [False, True])
def test_roots_and_diagonals_are_those_of_the_information(kind, tokens):
    likelihood, f, _ = case(kind)
    if tokens:
        f = torch.randn(2, 3, f.shape[-1], dtype=F64)
    exact = likelihood.hessian(f)
    assert exact.shape == (*f.shape, f.shape[-1])
    root = likelihood.root(f)
    tolerance = {"atol": 1e-12, "rtol": 1e-10}
    torch.testing.assert_close(root @ root.mT, exact, **tolerance)
    torch.testing.assert_close(likelihood.hessian_diagonal(f), exact.diagonal(dim1=-2, dim2=-1), **tolerance)
    flat, columns = likelihood.positions(f), likelihood.position_roots(f)
    found = [len(list(columns(t))) for t in range(flat.shape[1])]
    assert found == [likelihood.rank(f)] * flat.shape[1]


@pytest.mark.parametrize("kind", KINDS)
def test_samples_have_the_moments_of_the_law(kind):
    likelihood, f, law = case(kind)
    drawn = likelihood.sample(f[:1].expand(40_000, -1), torch.Generator().manual_seed(3)).double()
    exact = law(f[:1])
    if kind == "categorical":
        assert_mean(F.one_hot(drawn.long(), 4), exact.probs[0])
        return
    assert_mean(drawn.reshape(len(drawn), -1), exact.mean.flatten())
    if kind != "student_t":  # four degrees of freedom have no fourth moment to test a variance with
        assert_mean((drawn - exact.mean).square().reshape(len(drawn), -1), exact.variance.flatten())
    else:
        centred = ((drawn - f[0, 0]) / f[0, 1].exp()).abs()
        assert_mean((centred < 0.7407).double()[:, None], 0.5)  # quartile of t with 4 degrees of freedom


@pytest.mark.parametrize("kind", KINDS)
def test_log_prob_of_a_sample_has_the_shape_of_the_examples(kind):
    likelihood, f, _ = case(kind)
    y = likelihood.sample(f, torch.Generator().manual_seed(0))
    likelihood.check(f, y)
    assert likelihood.log_prob(f, y).shape == (3,)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in OWN])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_becomes_float32_before_any_probability(kind, dtype):
    likelihood, f, law = case(kind, torch.float32)
    half = f.to(dtype)
    y = law(f).sample()
    for name in ("hessian", "hessian_diagonal", "root"):
        found = getattr(likelihood, name)(half)
        assert found.dtype == torch.float32, name
        torch.testing.assert_close(found, getattr(likelihood, name)(half.float()))
    assert likelihood.log_prob(half, y).dtype == torch.float32
    torch.testing.assert_close(likelihood.log_prob(half, y), likelihood.log_prob(half.float(), y))
    assert likelihood.sample(half, torch.Generator().manual_seed(0)).dtype in {torch.float32, torch.int64}
    gaussian = GaussianOutputs(half, torch.ones_like(half), torch.ones_like(half).unsqueeze(-1))
    for outputs in (Draws(half[None]), gaussian):
        assert likelihood.predictive(outputs, draws=4).total.dtype == torch.float32
    for link in likelihood.links[1:]:
        assert likelihood.predictive(gaussian, link).total.dtype == torch.float32
    double = likelihood.predictive(Draws(f.double()[None]))
    assert double.total.dtype == F64


def test_small_differences_between_draws_survive_bfloat16():
    logits = torch.tensor([[[4.0, 0.0]], [[4.125, 0.0]]]).bfloat16()
    exact = Categorical().predictive(Draws(logits.double())).epistemic
    found = Categorical().predictive(Draws(logits))
    torch.testing.assert_close(found.epistemic.double(), exact, atol=1e-7, rtol=0.02)
    torch.testing.assert_close(found.probs.sum(-1), torch.ones(1), atol=1e-6, rtol=0)


def test_poisson_predictive_is_the_mixture():
    log_rates = torch.randn(6, 4, dtype=F64)
    predictive = Poisson().predictive(Draws(log_rates))
    law = D.MixtureSameFamily(D.Categorical(torch.ones(4, 6, dtype=F64)), D.Poisson(log_rates.T.exp()))
    y = torch.randint(6, (4,))
    torch.testing.assert_close(predictive.log_prob(y), law.log_prob(y.double()))
    torch.testing.assert_close(predictive.mean, law.mean)
    torch.testing.assert_close(predictive.variance, law.variance)
    torch.testing.assert_close(predictive.total, predictive.aleatoric + predictive.epistemic)
    assert (PoissonPredictive(log_rates[:1]).epistemic == 0).all()
    kept = torch.tensor([True, False, True, True])
    torch.testing.assert_close(predictive.select(kept).log_prob(y[kept]), predictive.log_prob(y)[kept])
    torch.testing.assert_close(evaluate.log_likelihood(predictive, y, kept), predictive.log_prob(y) * kept)
    with pytest.raises(ValueError, match=r"link must be 'mc' for this likelihood; got 'probit'"):
        Poisson().predictive(GaussianOutputs(log_rates[:1], log_rates[:1].exp()), "probit")


@pytest.fixture
def registry(monkeypatch):
    monkeypatch.setattr("bayesformer.likelihoods.registry.LIKELIHOODS", known := dict(LIKELIHOODS))
    return known


def test_one_line_makes_a_likelihood_known(registry):
    with pytest.raises(ValueError, match=r"must be registered to be saved; got Binomial. Call .*register\(Binomial\)"):
        to_json(Binomial(7))
    assert bf.likelihoods.register(Binomial) is Binomial
    assert bf.likelihoods.as_likelihood("binomial") == Binomial()
    assert from_json(to_json(Binomial(7))) == Binomial(7)
    bf.likelihoods.register(Binomial)  # twice is once
    del registry["binomial"]
    with pytest.raises(
        ValueError, match=r"saved with likelihood 'binomial', which is not registered.*register\(\.\.\."
    ):
        from_json({"name": "binomial", "trials": 7})


def test_what_cannot_be_registered_or_saved(registry):
    with pytest.raises(ValueError, match="derives from bayesformer.likelihoods.Likelihood; got <class 'int'>"):
        bf.likelihoods.register(int)
    with pytest.raises(ValueError, match="got Binomial"):
        bf.likelihoods.register(Binomial())
    with pytest.raises(ValueError, match="Unnamed.name must be text.*got ''"):
        bf.likelihoods.register(type("Unnamed", (Categorical,), {}))
    with pytest.raises(ValueError, match=r"Other.name must be new; got 'poisson', the name of .*poisson.Poisson"):
        bf.likelihoods.register(type("Other", (Likelihood,), {"name": "poisson"}))
    with pytest.raises(ValueError, match="likelihood 'poisson' cannot be built with settings {'rate': 3}"):
        from_json({"name": "poisson", "rate": 3})

    @bf.likelihoods.register
    @dataclass(frozen=True)
    class Weighted(Categorical):
        name: ClassVar[str] = "weighted"
        weights: tuple[float, ...] = (1.0,)

    with pytest.raises(ValueError, match=r"fields of Weighted must be numbers.*got weights=\(1.0,\)"):
        to_json(Weighted())


def test_a_posterior_with_a_likelihood_of_one_s_own(registry, tmp_path):
    bf.likelihoods.register(Binomial)
    x = torch.randn(40, 3)
    y = Binomial().sample(x @ torch.tensor([1.0, -1.0, 0.5]), torch.Generator().manual_seed(0))[:, None]
    model = torch.nn.Linear(3, 1)
    training = bf.Training(epochs=30, lr=0.1)
    posterior = bf.fit(model, (x, y), likelihood="binomial", method="laplace", training=training)
    folder = posterior.save(tmp_path / "p")
    again = bf.Posterior.load(folder, model)
    assert again.likelihood == Binomial()
    # J Λ Jᵀ written out: what autograd gave must be the information of the binomial law.
    theta = posterior.law.mean
    w, b = theta[:3], theta[3]
    p = torch.sigmoid(x @ w + b)
    features = torch.cat([x, torch.ones(40, 1)], 1)
    h = torch.einsum("n,ni,nj->ij", 5 * p * (1 - p), features, features)
    found = estimate(_at(model, theta), "binomial", (x, y), "full", kind="ggn").structures[0].dense()
    torch.testing.assert_close(found, h, atol=1e-4, rtol=1e-4)
    for kind in ("mc", "fisher"):
        bf.laplace(_at(model, theta), (x, y), likelihood="binomial", curvature=kind, prior_precision=1.0)
    del registry["binomial"]
    with pytest.raises(ValueError, match="'binomial', which is not registered"):
        bf.Posterior.load(folder, model)


def _at(model, theta):
    torch.nn.utils.vector_to_parameters(theta, model.parameters())
    return model.eval()


@pytest.mark.parametrize("structure", ["diag", "kron", "full", "last_layer"])
def test_laplace_on_counts(structure):
    x = torch.randn(60, 3)
    y = torch.poisson((0.5 * x[:, :1] + 0.3).exp(), generator=torch.Generator().manual_seed(1))
    posterior = bf.fit(
        torch.nn.Linear(3, 1),
        (x, y),
        likelihood="poisson",
        method=bf.Laplace(structure=structure, prior_precision=1.0),
        training=bf.Training(epochs=60, lr=0.05),
    )
    predictive = posterior.predict(x)
    assert predictive.shape == (60, 1)
    assert (predictive.epistemic > 0).all()
    alone = math.log(y.mean().item())
    constant = PoissonPredictive(torch.full((1, 60, 1), alone))
    assert predictive.log_prob(y).mean() > constant.log_prob(y).mean()


def test_names_say_what_they_are():
    assert {"categorical", "gaussian", "bernoulli", "next_token", "poisson"} <= set(LIKELIHOODS)
    for name, kind in LIKELIHOODS.items():
        assert kind.name == name
    assert NextToken().next_token is None
    assert Categorical(3).next_token == NextToken(3)
    assert Categorical(aligned=True).next_token is None

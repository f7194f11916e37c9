"""Posteriors over weights end to end: exact where theory is exact, and one contract for every method."""

import functools
import math

import pytest
import torch
from torch import nn

import bayesformer as bf
from bayesformer.core.seeds import generator, stream
from bayesformer.laws import Dense, GaussianLaw, gaussian
from bayesformer.methods import METHODS, build_method
from bayesformer.models.tabular import FeatureTransformer
from bayesformer.models.transformer import Encoder
from bayesformer.priors.prior import as_prior
from tests.laws import assert_mean
from tests.nets import Mlp, blobs

SMALL = {
    "attention": {"draws": 3},
    "combined": {"settings": {"draws": 3}},
    "ensemble": {"members": 2},
    "mc_dropout": {"draws": 3},
    "mean_field": {"draws": 3},
    "concrete_dropout": {"draws": 3},
    "ivon": {"draws": 3, "lr": 0.1},
    "swag": {"draws": 3, "every": 1},
    "hmc": {"draws": 2, "chains": 2, "warm_up": 3, "max_leapfrogs": 8},
    "nuts": {"draws": 2, "chains": 2, "warm_up": 3, "max_depth": 3},
    **{name: {"draws": 3} for name in ("sgld", "psgld", "sghmc", "sgnht", "baoab", "vi", "ekf")},
}
FAST = bf.Training(epochs=4, batch_size=16, lr=0.02, warmup=5)


def tokens():
    """Two logits from three features, by attention."""
    return FeatureTransformer(Encoder(dim=8, depth=1, heads=2, max_length=4), features=3)


MODELS = {"attention": tokens, "combined": tokens}


def fit(name, model=None, data=None, training=FAST, options=None, **settings):
    method = build_method(name, {**SMALL.get(name, {}), **settings})
    model = model or MODELS.get(name, Mlp)
    return bf.fit(
        model, data or blobs(60), likelihood="categorical", method=method, training=training, **(options or {})
    )


pytestmark = pytest.mark.filterwarnings("ignore::bayesformer.FidelityWarning")  # fits are as short as can be


# --- every method ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", METHODS)
def test_every_method_gives_a_posterior_that_predicts_saves_and_repeats(name, tmp_path):
    posterior = fit(name)
    x = torch.randn(5, 3)
    probs = posterior.predict(x).probs
    torch.testing.assert_close(probs.sum(-1), torch.ones(5))
    torch.rand(7)  # nothing depends on the caller's stream
    assert torch.equal(fit(name).predict(x).probs, probs)
    loaded = bf.Posterior.load(posterior.save(tmp_path / "p"), MODELS.get(name, Mlp)())
    assert torch.equal(loaded.predict(x).probs, probs)
    assert posterior.facts["method"]["name"] == name
    assert posterior.facts["seconds"] > 0
    assert posterior.facts["strategy"] in {"looped", "batched"}


@pytest.mark.parametrize("name", METHODS)
def test_no_method_touches_the_callers_stream(name):
    torch.manual_seed(3)
    before = torch.get_rng_state()
    posterior = fit(name)
    posterior.predict(torch.ones(2, 3))
    assert torch.equal(torch.get_rng_state(), before)


GAUSSIAN = {"vi": {}, "mean_field": {}, "ivon": {}, "swag": {"rank": 0}, "ekf": {}, "laplace": {}}


@pytest.mark.parametrize("way", ["streamlined", "linearised", "sampled"])
@pytest.mark.parametrize("name", GAUSSIAN)
def test_every_gaussian_method_predicts_in_every_way(name, way, tmp_path):
    posterior, x = fit(name, **GAUSSIAN[name], predictive=way), torch.randn(5, 3)
    assert posterior.predictive == way
    probs = posterior.predict(x).probs
    torch.testing.assert_close(probs.sum(-1), torch.ones(5))
    if way != "sampled":
        assert not torch.equal(posterior.predict(x, predictive="sampled").probs, probs)
    loaded = bf.Posterior.load(posterior.save(tmp_path / "p"), Mlp())
    assert torch.equal(loaded.predict(x).probs, probs)


# --- subsets --------------------------------------------------------------------------------------------------------

SUBSETS = ["sgld", "psgld", "sghmc", "sgnht", "baoab", "vi", "swag", "ekf", "ivon", "laplace"]


@pytest.mark.parametrize("name", SUBSETS)
def test_a_subset_has_spread_there_and_exactly_none_elsewhere(name):
    extra = {"laplace": {"structure": "diag"}}
    posterior = fit(name, subset="net.3.*", **extra.get(name, {}))
    draws = posterior.sample(3)
    for key in ("net.0.weight", "net.0.bias"):
        assert (draws[key] == draws[key][0]).all()
    for key in ("net.3.weight", "net.3.bias"):
        assert (draws[key].std(0) > 0).all()
    if isinstance(posterior.law, GaussianLaw):
        sd = posterior.space.views(posterior.law.sd)
        assert not sd["net.0.weight"].any()
        assert not sd["net.0.bias"].any()
        assert (sd["net.3.weight"] > 0).all()
        assert (sd["net.3.bias"] > 0).all()
    with pytest.raises(ValueError, match=r"attn\*"):
        fit(name, subset="attn*")


@functools.cache
def crossed(name, infer=None, **settings):
    """Held-out log-likelihood per example on a task that no linear model of the inputs can do."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(240, 3, generator=g)
    y = (x[:, 0] * x[:, 1] > 0).long()
    training = bf.Training(epochs=200, batch_size=32, lr=0.02, warmup=20)
    data = bf.Data(x[:160], y[:160])
    posterior = fit(name, lambda: Mlp(hidden=16), data, training, {"infer": infer}, **settings)
    return posterior.predict(x[160:]).log_prob(y[160:]).mean().item()


CROSSED = {"sgld": {"lr": 1e-3}, "laplace": {"structure": "diag"}} | {
    name: {"draws": 20} for name in ("vi", "ekf", "ivon", "swag", "mean_field")
}


@pytest.mark.parametrize("name", [*SUBSETS, "mean_field"])
def test_the_rest_of_a_subset_is_trained(name):
    """Within .05 nats of one network with the same prior, trained as long; a random first layer is far below."""
    trained = crossed("map")
    assert trained > crossed("mle", "net.3.*") + 0.15
    assert crossed(name, subset="net.3.*", **CROSSED.get(name, {})) > trained - 0.05


def test_mean_field_on_a_subset_has_random_weights_there_only():
    posterior = fit("mean_field", subset="net.3.*", predict_local=True)
    random = posterior.skeleton.shell().module
    assert set(random.scales()) == {"net.3.weight", "net.3.bias"}
    sd = fit("mean_field", subset="net.3.*").law.sd
    assert torch.equal(sd > 0, torch.arange(50) >= 32)


def test_mean_field_as_a_gaussian_over_weights_is_the_law_it_trained():
    """The same training either way: locations and scales of the random network, 0 where weights are points."""
    random = fit("mean_field", subset="net.3.*", predict_local=True)
    gaussian_ = fit("mean_field", subset="net.3.*", predictive="linearised")
    trained = random.skeleton.shell()
    trained.load(random.theta[0])
    law, space = gaussian_.law, gaussian_.space
    sd = space.views(law.sd)
    for name, scale in trained.module.scales().items():
        torch.testing.assert_close(sd[name], scale.detach())
    assert not sd["net.0.weight"].any()
    for name, value in trained.module.point().named_parameters():
        torch.testing.assert_close(space.views(law.mean)[name], value.detach())


def test_only_a_gaussian_family_has_moments_to_carry():
    with pytest.raises(ValueError, match="'sampled' unless family is 'gaussian'; got 'streamlined' with family='lap"):
        build_method("mean_field", {"family": "laplace", "predictive": "streamlined"})


# --- chains ---------------------------------------------------------------------------------------------------------


def test_chains_are_the_same_in_every_strategy():
    """With a step size in lockstep 1e-5 apart; those of networks, which go by themselves, in processes bit for bit."""

    def run(strategy, **settings):
        return fit("sghmc", draws=2, chains=3, options={"strategy": strategy, "workers": 2}, **settings)

    looped = run("looped")
    assert looped.theta.shape[0] == 6
    assert looped.facts["chains"] == 3
    assert torch.equal(run("processes").theta, looped.theta)
    torch.testing.assert_close(run("batched", lr=0.01).theta, run("looped", lr=0.01).theta, atol=1e-5, rtol=1e-4)


def test_parallel_chains_at_temperature_zero_are_a_deep_ensemble():
    """One draw per chain and no noise: each chain is plain momentum descent from its own start."""
    cold = fit("sghmc", chains=3, draws=1, temperature=0.0, warm_up=0.0, burn_in=0.0, lr=0.1)
    assert len(cold.theta) == 3
    for member in range(3):
        with stream(0, "init", member):
            model = Mlp()
        velocity = [torch.zeros_like(p) for p in model.parameters()]
        data = blobs(60)
        for epoch in range(4):
            order = torch.randperm(60, generator=generator(0, member, epoch, "order"))
            for start in range(0, 60, 16):
                index = order[start : start + 16]
                model.zero_grad()
                loss = nn.functional.cross_entropy(model(data.inputs[index]), data.targets[index])
                weights = torch.cat([p.flatten() for p in model.parameters()])
                (loss + 0.5 * weights.square().sum() / 60).backward()  # the prior N(0, 1) over N
                with torch.no_grad():
                    for p, v in zip(model.parameters(), velocity, strict=True):
                        v.mul_(1 - 0.1 * 10.0).add_(p.grad, alpha=-0.1)
                        p.add_(v, alpha=0.1)
        expected = torch.cat([p.detach().flatten() for p in model.parameters()])
        torch.testing.assert_close(cold.theta[member], expected, atol=1e-5, rtol=1e-4)


NOISE = 0.5


def regression(count=50, seed=0, dtype=torch.float64):
    """Linear regression with known noise: data, and its precision and precision times mean without a prior."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 3, generator=g, dtype=dtype)
    y = x @ torch.tensor([[1.0], [-0.5], [0.3]], dtype=dtype) + NOISE * torch.randn(count, 1, generator=g, dtype=dtype)
    return bf.Data(x, y), x.T @ x / NOISE**2, (x.T @ y / NOISE**2)[:, 0]


def linear(dtype=torch.float64):
    return nn.Linear(3, 1, bias=False, dtype=dtype)


def fit_linear(name, data, epochs, prior=None, rate=0.03, **settings):
    training = bf.Training(epochs=epochs, batch_size=len(data), lr=rate, warmup=50, clip=1e9)
    return bf.fit(
        linear(),
        data,
        likelihood=bf.Gaussian(NOISE),
        method=build_method(name, settings),
        training=training,
        prior=prior,
    )


def stationary(name, precision, count, lr, friction=2.0):
    """The exact covariance of the discrete chain at T = 1/N with full-batch gradients, see each algorithm's `build`."""
    values, vectors = torch.linalg.eigh(precision / count)
    heat = 1 / count
    if name == "sgld":  # Welling & Teh's chain is an AR(1)
        spread = heat / (values * (1 - lr * values / 2))
    elif name == "sghmc":
        c, kappa = 1 - lr * friction, lr**2 * values
        spread = heat / values * (1 + c) / (1 + c - kappa / 2)
    else:  # BAOAB has no bias of its step size
        spread = heat / values
    return vectors @ spread.diag() @ vectors.T


@pytest.mark.parametrize("earlier", [False, True])
@pytest.mark.parametrize("name", ["sgld", "sghmc", "baoab"])
def test_chains_have_the_exact_law_of_their_discrete_dynamics(name, earlier):
    """Draws so far apart that they are independent: z-tests of the mean and of all covariances, 1 failure in 10⁶."""
    data, precision, shift = regression()
    before, prior = torch.eye(3, dtype=torch.float64), None
    if earlier:  # an earlier posterior in the place of N(0, 1), correlated
        root = torch.tensor([[0.5, 0, 0], [0.2, 0.3, 0], [-0.1, 0.1, 0.4]], dtype=torch.float64)
        first = torch.tensor([0.8, -0.2, 0.1], dtype=torch.float64)
        prior = bf.Posterior(linear(), bf.Gaussian(NOISE), gaussian(first, tril=root))
        before = torch.linalg.inv(root @ root.T)
        shift = shift + before @ first
    precision = precision + before
    lr = {"sgld": 0.1, "sghmc": 0.3, "baoab": 0.3}[name]
    settings = {"draws": 300, "warm_up": 0.1, "burn_in": 0.01, "lr": lr, "chains": 1}
    if name != "sgld":
        settings["friction"] = 2.0
    posterior = fit_linear(name, data, 10_000, prior, **settings)  # 30 steps apart: correlations below 1e-5
    mean = torch.linalg.solve(precision, shift)
    away = posterior.theta - mean
    assert_mean(posterior.theta, mean)
    products = (away.unsqueeze(-1) * away.unsqueeze(-2)).flatten(1)
    assert_mean(products, stationary(name, precision, 50, lr).flatten())


def test_a_chain_that_diverges_blames_its_own_step_size():
    data, _, _ = regression()
    with pytest.raises(bf.TrainingDivergedError, match="try a smaller lr of the method itself"):
        fit_linear("sgld", data, 20, lr=1e40, draws=5)


def test_cyclical_sampling_runs_and_keeps_its_draws():
    longer = bf.Training(epochs=20, batch_size=16, lr=0.02, warmup=5)
    assert len(fit("sghmc", draws=4, cycles=2, training=longer).theta) == 4


def test_draws_that_do_not_fit_are_refused_before_training():
    with pytest.raises(ValueError, match="draws must fit after the burn-in; got 500 draws in"):
        fit("sghmc", draws=500, training=bf.Training(epochs=10**6, batch_size=16, max_steps=100))


# --- exact posteriors -----------------------------------------------------------------------------------------------


def two_steps():
    """An earlier posterior that is exact for half of the data, the other half, and the exact posterior after both."""
    _, precision1, shift1 = regression(30, 1)
    second, precision2, shift2 = regression(40, 2)
    middle = precision1 + torch.eye(3, dtype=torch.float64)
    mean = torch.linalg.solve(middle, shift1)
    earlier = bf.Posterior(
        linear(), bf.Gaussian(NOISE), gaussian(mean, tril=torch.linalg.cholesky(torch.linalg.inv(middle)))
    )
    precision = middle + precision2
    return earlier, second, torch.linalg.solve(precision, shift1 + shift2), precision


@pytest.mark.parametrize(
    ("name", "settings", "tolerance"),
    [
        ("vi", {"kind": "dense", "log_sd": -2.0, "samples": 8}, 0.1),
        ("vi", {"samples": 8}, 0.1),
        ("ivon", {"decay": 0.995, "h0": 1.0, "lr": 1.0, "clip_radius": 0.01, "warm_up": 0.0, "samples": 4}, 0.2),
    ],
)
@pytest.mark.parametrize("earlier", [False, True])
def test_gaussian_methods_find_the_conjugate_posterior(name, settings, tolerance, earlier):
    """Means to a fraction of an sd, spreads to 5 %: what is left is the noise of the gradients in the last steps."""
    if earlier:
        prior, data, mean, precision = two_steps()
    else:
        data, precision, shift = regression()
        precision = precision + torch.eye(3, dtype=torch.float64)
        prior, mean = None, torch.linalg.solve(precision, shift)
    posterior = fit_linear(name, data, 2500, prior, **settings)
    law = posterior.law
    assert isinstance(law, GaussianLaw)
    sd = precision.diagonal().rsqrt()
    assert ((law.mean - mean).abs() < tolerance * sd).all(), (law.mean - mean) / sd
    (block,) = law.blocks
    if isinstance(block, Dense):
        found = block.tril @ block.tril.T
        expected = torch.linalg.inv(precision)
        scale = expected.diagonal().sqrt()
        assert ((found - expected).abs() < 0.08 * scale[:, None] * scale).all()
    else:
        torch.testing.assert_close(law.sd, sd, rtol=0.05, atol=0)


def test_map_after_an_earlier_posterior_is_the_mode_of_both():
    prior, data, mean, _ = two_steps()
    posterior = fit_linear("map", data, 1500, prior, rate=0.02)
    torch.testing.assert_close(posterior.theta[0], mean, atol=1e-3, rtol=1e-3)


def test_swag_after_an_earlier_posterior_stays_around_the_mode_of_both():
    """Full-batch descent comes to rest there: the mean is the mode, and its spread has gone."""
    prior, data, mean, _ = two_steps()
    posterior = fit_linear("swag", data, 2000, prior, lr=0.02, rank=2, warm_up=0.9)
    torch.testing.assert_close(posterior.law.mean, mean, atol=2e-3, rtol=2e-3)


def test_a_dense_filter_after_an_earlier_posterior_is_the_exact_posterior_after_both():
    prior, data, mean, precision = two_steps()
    law = fit_linear("ekf", data, 1, prior, kind="dense").law
    torch.testing.assert_close(law.mean, mean)
    torch.testing.assert_close(law.precision(), precision)


@pytest.mark.parametrize("kind", ["diag", "dense"])
def test_a_filter_by_scores_after_an_earlier_posterior_is_one_update_of_it(kind):
    """One batch: Λ + Σ sₙ sₙᵀ and μ + Λ⁻¹ Σ sₙ, with the scores at the earlier mean."""
    prior, data, _, _ = two_steps()
    law = prior.law
    posterior = fit_linear("ekf", data, 1, prior, kind=kind, curvature="fisher")
    residual = (data.targets - data.inputs @ law.mean[:, None]) / NOISE**2
    scores = residual * data.inputs
    before = law.precision()
    if kind == "diag":  # it knows the variances alone
        before = law.variance().reciprocal().diag()
        precision = before + scores.square().sum(0).diag()
        torch.testing.assert_close(posterior.law.sd, precision.diagonal().rsqrt())
    else:
        precision = before + scores.T @ scores
        torch.testing.assert_close(posterior.law.precision(), precision)
    torch.testing.assert_close(posterior.law.mean, law.mean + torch.linalg.solve(precision, scores.sum(0)))


def test_a_prior_must_be_a_gaussian_over_the_same_weights():
    data, _, _ = regression()
    samples = fit_linear("mle", data, 2)
    with pytest.raises(ValueError, match=r"prior must be a posterior that is a Gaussian over the weights; got .*mle"):
        fit_linear("vi", data, 2, samples)
    other = bf.Posterior(nn.Linear(4, 1), bf.Gaussian(NOISE), gaussian(torch.zeros(5), torch.ones(5)))
    with pytest.raises(ValueError, match="prior must be a posterior over the same weights as are learned now"):
        fit_linear("vi", data, 2, other)
    prior = two_steps()[0]
    for name in ("mean_field", "concrete_dropout"):
        with pytest.raises(ValueError, match="prior must be left out for"):
            fit_linear(name, data, 2, prior)


# --- settings -------------------------------------------------------------------------------------------------------


def test_wrong_settings_are_named():
    with pytest.raises(ValueError, match=r"sghmc.temperature .*got -1"):
        build_method("sghmc", {"temperature": -1.0})
    with pytest.raises(ValueError, match="sgnht needs a temperature above 0 throughout.*cycles=2"):
        build_method("sgnht", {"cycles": 2})
    with pytest.raises(ValueError, match=r"vi.kind .*got 'full'"):
        build_method("vi", {"kind": "full"})
    with pytest.raises(ValueError, match="unknown improved prior 'm9'. Did you mean"):
        build_method("mean_field", {"prior": "improved/m9"})


def test_improved_priors_fit_our_regressor():
    from bayesformer.bench.tasks import TASKS

    task = TASKS["toy/m1"]()
    method = build_method("mean_field", {"prior": "improved/m1", "draws": 2})
    data = task.load().train.subset(slice(0, 20))
    posterior = bf.fit(task.model, data, likelihood=task.likelihood, method=method, training=bf.Training(epochs=1))
    assert torch.isfinite(posterior.predict(data.inputs).mean).all()


def test_the_settings_of_ivon_are_its_papers_in_our_units():
    """λ δ is the prior's precision, λ the number of data: Shen et al. (2024), algorithm 1."""
    ess, decay = bf.Ivon(prior_sd=0.5, temperature=0.1).settings(200)
    assert ess == pytest.approx(2000)
    assert 200 * decay == pytest.approx(4.0)
    assert math.isclose(as_prior("normal(0, 0.5)").groups["*"].scale ** -2, 4.0)

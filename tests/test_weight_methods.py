"""Posteriors over weights end to end: exact where theory is exact, and one contract for every method."""

import pytest
import torch
from torch import nn

import bayesformer as bf
from bayesformer.methods import METHODS, build_method, wrap
from bayesformer.models.tabular import FeatureTransformer
from bayesformer.models.transformer import Encoder
from bayesformer.network import FlatModel
from bayesformer.train.loop import Collect
from tests.nets import Mlp, Normed, blobs

SMALL = {
    "attention": {"draws": 3},
    "combined": {"settings": {"draws": 3}},
    "ensemble": {"members": 2},
    "mc_dropout": {"draws": 3},
    "mean_field": {"draws": 3},
    "concrete_dropout": {"draws": 3},
    "ivon": {"draws": 3, "lr": 0.1},
    **{name: {"draws": 3} for name in ("sgld", "psgld", "sghmc", "sgnht", "baoab", "vi", "swag", "ekf")},
}
FAST = bf.Training(epochs=4, batch_size=16, lr=0.02, warmup=5)


def tokens():
    """Two logits from three features, by attention."""
    return FeatureTransformer(Encoder(dim=8, depth=1, heads=2, max_length=4), features=3)


MODELS = {"attention": tokens, "combined": tokens}


def fit(name, model=None, data=None, training=FAST, **settings):
    method = build_method(name, {**SMALL.get(name, {}), **settings})
    model = model or MODELS.get(name, Mlp)
    return bf.fit(model, data or blobs(60), likelihood="categorical", method=method, training=training, workers=1)


@pytest.mark.parametrize("name", METHODS)
def test_every_method_gives_a_posterior_that_predicts_saves_and_repeats(name, tmp_path):
    posterior = fit(name)
    x = torch.randn(5, 3)
    probs = posterior.predict(x).probs
    torch.testing.assert_close(probs.sum(-1), torch.ones(5))
    assert torch.equal(fit(name).predict(x).probs, probs)
    method = build_method(name, SMALL.get(name))
    loaded = bf.Posterior.load(posterior.save(tmp_path / "p"), wrap(method, MODELS.get(name, Mlp)()))
    assert torch.equal(loaded.predict(x).probs, probs)
    assert posterior.facts["method"]["name"] == name
    assert posterior.facts["seconds"] > 0


@pytest.mark.parametrize("name", ["sgld", "sghmc", "vi", "swag", "ekf", "ivon"])
def test_a_subset_leaves_the_other_weights_at_the_mode(name):
    extra = {"vi": {"warm_up": 0.5}, "swag": {"every": 1}}
    posterior = fit(name, subset="net.3.*", **extra.get(name, {}))
    draws = posterior.sample(3)
    assert (draws["net.0.weight"] == draws["net.0.weight"][0]).all()
    assert not torch.equal(draws["net.3.weight"][0], draws["net.3.weight"][1])
    with pytest.raises(ValueError, match="subset must match a trainable parameter; 'attn\\*' matches none"):
        fit(name, subset="attn*")


def test_mean_field_on_a_subset_has_random_weights_there_only():
    posterior = fit("mean_field", subset="net.3.*")
    assert posterior.model.layout.names == ("net.3.weight", "net.3.bias")


GAUSSIAN = {"vi": {}, "mean_field": {}, "ivon": {}, "swag": {"rank": 0, "every": 1}, "ekf": {}, "laplace": {}}


@pytest.mark.parametrize("way", ["streamlined", "linearised", "sampled"])
@pytest.mark.parametrize("name", GAUSSIAN)
def test_every_gaussian_method_predicts_in_every_way(name, way, tmp_path):
    settings = {**GAUSSIAN[name], "predictive": way}
    posterior, x = fit(name, **settings), torch.randn(5, 3)
    assert posterior.predictive == way
    probs = posterior.predict(x).probs
    torch.testing.assert_close(probs.sum(-1), torch.ones(5))
    if way != "sampled":
        assert not torch.equal(posterior.predict(x, predictive="sampled").probs, probs)
    method = build_method(name, {**SMALL.get(name, {}), **settings})
    loaded = bf.Posterior.load(posterior.save(tmp_path / "p"), wrap(method, Mlp()))
    assert torch.equal(loaded.predict(x).probs, probs)


def test_mean_field_as_a_gaussian_over_weights_is_the_law_it_trained():
    """The same training either way: locations and scales of the random network, 0 where weights are points."""
    random, gaussian = fit("mean_field", subset="net.3.*"), fit("mean_field", subset="net.3.*", predictive="linearised")
    trained = FlatModel(random.model)
    trained.load(random.theta[0])
    law, layout = gaussian.weights, gaussian.layout
    sd = layout.views(law.sd)
    for name, scale in trained.module.scales().items():
        torch.testing.assert_close(sd[name], scale)
    assert not sd["net.0.weight"].any()
    for name, value in trained.module.point().named_parameters():
        torch.testing.assert_close(layout.views(law.mean)[name], value)


def test_only_a_gaussian_family_has_moments_to_carry():
    with pytest.raises(ValueError, match="'sampled' unless family is 'gaussian'; got 'streamlined' with family='lap"):
        build_method("mean_field", {"family": "laplace", "predictive": "streamlined"})


def test_chains_are_the_same_in_every_strategy():
    run = lambda strategy: bf.fit(  # noqa: E731
        Mlp,
        blobs(60),
        likelihood="categorical",
        method=build_method("sghmc", {"draws": 2, "chains": 3}),
        training=FAST,
        strategy=strategy,
        workers=2,
    )
    looped = run("looped")
    assert looped.theta.shape[0] == 6
    assert looped.facts["chains"] == 3
    torch.testing.assert_close(run("batched").theta, looped.theta, atol=1e-5, rtol=1e-4)
    assert torch.equal(run("processes").theta, looped.theta)


def test_parallel_chains_at_temperature_zero_are_a_deep_ensemble():
    """One draw per chain and no noise: each chain is plain momentum descent from its own start."""
    cold = fit("sghmc", chains=3, draws=1, temperature=0.0, warm_up=0.0, burn_in=0.0, lr=0.1)
    assert len(cold.theta) == 3
    for member in range(3):
        from bayesformer.core.seeds import generator, stream

        with stream(0, "init", member):
            model = Mlp()
        optimiser = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.0)
        velocity = [torch.zeros_like(p) for p in model.parameters()]
        data = blobs(60)
        for epoch in range(4):
            order = torch.randperm(60, generator=generator(0, member, epoch, "order"))
            for start in range(0, 60, 16):
                index = order[start : start + 16]
                optimiser.zero_grad()
                loss = nn.functional.cross_entropy(model(data.inputs[index]), data.targets[index])
                weights = torch.cat([p.flatten() for p in model.parameters()])
                (loss + 0.5 * weights.square().sum() / 60).backward()  # the prior N(0, 1) over N
                with torch.no_grad():
                    for p, v in zip(model.parameters(), velocity, strict=True):
                        v.mul_(1 - 0.1 * 10.0).add_(p.grad, alpha=-0.1)
                        p.add_(v, alpha=0.1)
        expected = torch.cat([p.detach().flatten() for p in model.parameters()])
        torch.testing.assert_close(cold.theta[member], expected, atol=1e-5, rtol=1e-4)


def conjugate():
    """Linear regression with known noise: the exact posterior under N(0, 1)."""
    x = torch.randn(50, 3)
    y = x @ torch.tensor([[1.0], [-0.5], [0.3]]) + 0.5 * torch.randn(50, 1)
    precision = x.T @ x / 0.25 + torch.eye(3)
    mean = torch.linalg.solve(precision, x.T @ y / 0.25)[:, 0]
    return bf.Data(x, y), mean, precision


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("vi", {"kind": "dense", "log_sd": -2.0}),
        ("vi", {}),
        ("ivon", {"decay": 0.99, "h0": 1.0, "lr": 1.0, "clip_radius": 0.01, "warm_up": 0.0}),
    ],
)
def test_gaussian_methods_find_the_conjugate_posterior(name, settings):
    data, mean, precision = conjugate()
    training = bf.Training(epochs=700, batch_size=50, lr=0.03, warmup=100, clip=1e9)
    posterior = bf.fit(
        nn.Linear(3, 1, bias=False),
        data,
        likelihood=bf.Gaussian(0.5),
        method=build_method(name, settings),
        training=training,
        workers=1,
    )
    weights = posterior.weights
    assert isinstance(weights, GaussianLaw)
    sd = precision.diagonal().rsqrt()
    assert ((weights.mean - mean).abs() < 0.35 * sd).all()
    (block,) = weights.blocks
    if isinstance(block, Dense):
        torch.testing.assert_close(block.tril @ block.tril.T, torch.linalg.inv(precision), rtol=0.3, atol=2e-4)
    else:
        torch.testing.assert_close(weights.sd, sd, rtol=0.15, atol=0)


def test_a_chain_that_diverges_blames_its_own_step_size():
    data, _, _ = conjugate()
    training = bf.Training(epochs=20, batch_size=50, lr=0.02, warmup=5)
    method = bf.Sgld(lr=1e6, draws=5)
    with pytest.raises(bf.TrainingDivergedError, match="try a smaller lr of the method itself"):
        bf.fit(nn.Linear(3, 1, bias=False), data, likelihood=bf.Gaussian(0.5), method=method, training=training)


@pytest.mark.parametrize("name", ["sghmc", "baoab", "sgld"])
def test_chains_find_the_conjugate_posterior(name):
    data, mean, precision = conjugate()
    training = bf.Training(epochs=1200, batch_size=50, lr=0.02, warmup=50)
    settings = {"draws": 200, "warm_up": 0.2, "burn_in": 0.1, "lr": {"sgld": 0.02}.get(name, 0.1), "chains": 1}
    if name != "sgld":
        settings["friction"] = 2.0
    posterior = bf.fit(
        nn.Linear(3, 1, bias=False),
        data,
        likelihood=bf.Gaussian(0.5),
        method=build_method(name, settings),
        training=training,
        workers=1,
    )
    sd = precision.diagonal().rsqrt()
    # 200 correlated draws, at least 40 effective: the mean is known to 0.16 sd and the variance to 23 %
    assert ((posterior.theta.mean(0) - mean).abs() < 0.7 * sd).all()
    covariance = torch.linalg.inv(precision).diagonal()
    ratio = posterior.theta.var(0) / covariance
    assert ((ratio > 0.4) & (ratio < 2.3)).all(), ratio


def test_collect_spreads_draws_and_follows_cycles():
    assert Collect.spread(100, 20, 4).steps == (40, 60, 80, 100)
    assert Collect.spread(10, 0, 10).steps == tuple(range(1, 11))
    cyclical = Collect.cyclical(100, 2, 4, 0.8)
    assert cyclical.steps == (45, 50, 95, 100)
    with pytest.raises(ValueError, match="got 30 draws in 40 steps of which 20 are burn-in"):
        Collect.spread(40, 20, 30)


def test_cyclical_sampling_runs_and_keeps_its_draws():
    longer = bf.Training(epochs=20, batch_size=16, lr=0.02, warmup=5)
    assert len(fit("sghmc", draws=4, cycles=2, training=longer).theta) == 4


def test_wrong_settings_are_named():
    with pytest.raises(ValueError, match="sghmc.temperature must be a number of at least 0; got -1"):
        build_method("sghmc", {"temperature": -1.0})
    with pytest.raises(ValueError, match="sgnht needs a temperature above 0 throughout.*cycles=2"):
        build_method("sgnht", {"cycles": 2})
    with pytest.raises(ValueError, match="vi.kind must be one of 'diag', 'dense'; got 'full'"):
        build_method("vi", {"kind": "full"})
    with pytest.raises(ValueError, match="unknown improved prior 'm9'. Did you mean"):
        build_method("mean_field", {"prior": "improved/m9"})
    with pytest.raises(ValueError, match="needs a model without running averages"):
        fit("sghmc", model=Normed)


def test_improved_priors_fit_our_regressor():
    from bayesformer.bench.tasks import TASKS

    task = TASKS["toy/m1"]()
    method = build_method("mean_field", {"prior": "improved/m1", "draws": 2})
    data = task.load().train.subset(slice(0, 20))
    posterior = bf.fit(task.model, data, likelihood=task.likelihood, method=method, training=bf.Training(epochs=1))
    assert torch.isfinite(posterior.predict(data.inputs).mean).all()


def test_the_kl_is_divided_by_the_number_of_data():
    """The loss of a mean-field network is -log-likelihood/B + KL/N: checked on the first step's value."""
    from bayesformer.layers import kl_divergence
    from bayesformer.likelihoods import Categorical
    from bayesformer.methods.layers import Penalty
    from bayesformer.network import FlatLogJoint

    data = blobs(60)
    model = wrap(build_method("mean_field"), Mlp())
    flat = FlatModel(model)
    joint = FlatLogJoint(flat, Categorical(), None, 60, Penalty(0.5, 60))
    batch = data.take(slice(0, 16))
    torch.manual_seed(0)
    value, outputs, _ = joint.value_and_grad({"theta": flat.theta}, batch)
    expected = Categorical().log_prob(outputs, batch.targets).mean() - 0.5 * kl_divergence(flat.module) / 60
    torch.testing.assert_close(value, expected.detach())

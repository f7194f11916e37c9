"""The Laplace posterior end to end: exact for linear models, by brute force for others, tuned, online and saved."""

import importlib
import math

import pytest
import torch
from torch import nn
from torch.distributions import MultivariateNormal
from torch.func import jacrev

import bayesformer as bf
from bayesformer import evaluate
from bayesformer.data import as_batches
from bayesformer.laws import GaussianLaw, gaussian
from bayesformer.methods import Problem, build_method
from bayesformer.model.calling import call
from bayesformer.model.space import Space
from tests.nets import Mlp, blobs

F64 = torch.float64
FAST = bf.Training(epochs=4, batch_size=16, lr=0.02, warmup=5)


def linear_data(count=40, size=3, outputs=2, sigma=0.5):
    x = torch.randn(count, size, dtype=F64)
    return bf.Data(x, x @ torch.randn(size, outputs, dtype=F64) + sigma * torch.randn(count, outputs, dtype=F64))


def exact_linear(data, d, sigma):
    """The posterior precision of one output's weights, and the mean (outputs, size)."""
    precision = data.inputs.mT @ data.inputs / sigma**2 + d * torch.eye(data.inputs.shape[1], dtype=F64)
    return precision, torch.linalg.solve(precision, data.inputs.mT @ data.targets / sigma**2).mT


def at_mode(data, d, sigma, layers=1):
    """A linear network whose weights are the mode."""
    model = nn.Linear(data.inputs.shape[1], data.targets.shape[1], bias=False, dtype=F64)
    with torch.no_grad():
        model.weight.copy_(exact_linear(data, d, sigma)[1])
    return model.eval()


def dense(weights):
    whole = torch.zeros(weights.size, weights.size, dtype=F64)
    for place, block in zip(weights.places, weights.blocks, strict=True):
        index = torch.arange(weights.size)[place]
        whole[index[:, None], index] = block.times(torch.eye(block.size, dtype=F64))
    return whole


@pytest.mark.parametrize(
    "settings",
    [
        {"structure": "full"},
        {"structure": "block"},
        {"structure": "kron"},
        {"structure": "last_layer"},
        {"structure": "low_rank", "rank": 6},
        {"structure": "subnetwork", "size": 6},
    ],
    ids=lambda s: s["structure"],
)
def test_a_linear_model_is_exact(settings):
    """Posterior, predictive, joint predictive and evidence of Bayesian linear regression with two outputs."""
    data, d, sigma = linear_data(), 0.8, 0.5
    precision, mean = exact_linear(data, d, sigma)
    likelihood = bf.Gaussian(sigma)
    posterior = bf.laplace(at_mode(data, d, sigma), data, likelihood=likelihood, prior_precision=d, **settings)
    assert posterior.predictive == "linearised"
    torch.testing.assert_close(posterior.law.mean.view(2, 3), mean)
    covariance = torch.block_diag(*[precision.inverse()] * 2)
    torch.testing.assert_close(dense(posterior.law), covariance)
    x = torch.randn(4, 3, dtype=F64)
    found = posterior.predict(x)
    spread = (x @ precision.inverse() * x).sum(-1, keepdim=True)
    torch.testing.assert_close(found.mean, x @ mean.mT)
    torch.testing.assert_close(found.variance, (spread + sigma**2).expand(4, 2))
    torch.testing.assert_close(found.epistemic, 2 * spread.squeeze(1))
    together, joint = posterior.joint(x)
    torch.testing.assert_close(together, x @ mean.mT)
    torch.testing.assert_close(joint, torch.kron(x @ precision.inverse() @ x.mT, torch.eye(2, dtype=F64)))
    gram = data.inputs @ data.inputs.mT / d + sigma**2 * torch.eye(40, dtype=F64)
    evidence = MultivariateNormal(torch.zeros(40, dtype=F64), gram).log_prob(data.targets.mT).sum()
    assert posterior.facts["log_evidence"] == pytest.approx(evidence.item(), rel=1e-9)


def brute_force(model, data, likelihood, d, scale=1.0):
    """H and the posterior covariance from Jacobians written out."""
    space = Space.of(model)
    params = space.views(space.pack(dict(model.named_parameters())))

    def rows(x):
        found = jacrev(lambda p: call(model, p, x))(params)
        outputs = call(model, params, x)
        return outputs, torch.cat([found[n].reshape(*outputs.shape, -1) for n in space.names], -1)

    outputs, jacobian = rows(data.inputs)
    h = (jacobian.mT @ likelihood.hessian(outputs.detach()) @ jacobian).sum(0)
    return rows, h, (scale * h + d * torch.eye(space.size, dtype=F64)).inverse()


def test_a_classifier_by_brute_force():
    """Full Gauss-Newton with a temperature: covariance, linearised predictive and evidence."""
    model = Mlp(3, 4, 3).double().eval()
    data = bf.Data(torch.randn(30, 3, dtype=F64), torch.randint(3, (30,)))
    settings = {"structure": "full", "prior_precision": 1.7, "temperature": 0.5}
    posterior = bf.laplace(model, data, likelihood="categorical", **settings)
    rows, _, covariance = brute_force(model, data, bf.Categorical(), 1.7, 2.0)
    torch.testing.assert_close(dense(posterior.law), covariance)
    x = torch.randn(5, 3, dtype=F64)
    mean, jacobian = rows(x)
    outputs = posterior.outputs(x)
    torch.testing.assert_close(outputs.mean, mean.detach())
    torch.testing.assert_close(outputs.covariance, jacobian @ covariance @ jacobian.mT)
    wide = (1 + math.pi / 8 * outputs.variance).sqrt()
    torch.testing.assert_close(posterior.predict(x, link="probit").probs, (mean.detach() / wide).softmax(-1))
    fit = bf.Categorical().log_prob(model(data.inputs), data.targets).sum().item()
    theta = Space.of(model).pack(dict(model.named_parameters()))
    size = len(theta)
    log_det = -covariance.logdet() - size * math.log(1.7)
    expected = fit / 0.5 - 0.5 * (log_det + 1.7 * theta.square().sum())
    assert posterior.facts["log_evidence"] == pytest.approx(expected.item(), rel=1e-8)
    assert posterior.facts["log_likelihood"] == pytest.approx(fit, rel=1e-9)


def test_diag_is_the_diagonal_and_the_last_layer_is_the_full_one_there():
    model = Mlp(3, 4, 3).double().eval()
    data = bf.Data(torch.randn(30, 3, dtype=F64), torch.randint(3, (30,)))
    _, h, _ = brute_force(model, data, bf.Categorical(), 1.0)
    run = lambda **s: bf.laplace(model, data, likelihood="categorical", prior_precision=1.0, **s)  # noqa: E731
    variance = run(structure="diag").law.variance()
    torch.testing.assert_close(variance, 1 / (h.diagonal() + 1))
    last, subset = run(structure="last_layer"), run(structure="full", subset="net.3.*")
    torch.testing.assert_close(dense(last.law), dense(subset.law))
    torch.testing.assert_close(dense(last.law)[16:, 16:], (h[16:, 16:] + torch.eye(15, dtype=F64)).inverse())
    assert (last.law.variance()[:16] == 0).all()


def test_a_tight_prior_gives_the_network_itself():
    model, data = Mlp(3, 4, 2).double().eval(), blobs(40)
    data = bf.Data(data.inputs.double(), data.targets)
    posterior = bf.laplace(model, data, likelihood="categorical", prior_precision=1e12)
    x = torch.randn(4, 3, dtype=F64)
    for link in ("mc", "probit"):
        torch.testing.assert_close(posterior.predict(x, link=link).probs, model(x).softmax(-1), rtol=1e-4, atol=1e-5)


def test_training_uses_the_prior_it_starts_from():
    """The mode is that of Map with the same Gaussian: precision 4 is a standard deviation of 1/2. Another
    precision that is chosen has another mode, which is gone on to."""
    options = {"likelihood": "categorical", "training": FAST, "workers": 1}
    laplace = bf.fit(Mlp, blobs(60), method=bf.Laplace(prior_precision=4.0), **options)
    assert torch.equal(laplace.law.mean, bf.fit(Mlp, blobs(60), method=bf.Map("normal(0, 0.5)"), **options).theta[0])
    tuned = bf.fit(Mlp, blobs(60), method=bf.Laplace(start=4.0), **options)
    assert tuned.facts["prior_precision"] != [4.0]
    assert not torch.equal(tuned.law.mean, laplace.law.mean)
    assert max(tuned.facts["decrement"], laplace.facts["decrement"]) < 0.3


@pytest.mark.parametrize(
    ("per", "structure"), [("one", "kron"), ("layer", "kron"), ("layer", "full"), ("weight", "diag")]
)
def test_marglik_improves_the_evidence(per, structure):
    model, data = Mlp(3, 4, 2).eval(), blobs(60)
    options = {"likelihood": "categorical", "structure": structure}
    before = bf.laplace(model, data, prior_precision=1.0, **options).facts["log_evidence"]
    tuned = bf.laplace(model, data, prior_precision="marglik", per=per, **options)
    assert tuned.facts["log_evidence"] > before
    assert len(tuned.facts["prior_precision"]) == {"one": 1, "layer": 4, "weight": 26}[per]
    again = bf.laplace(model, data, prior_precision=tuned.facts["prior_precision"][0], **options)
    if per == "one":
        assert again.facts["log_evidence"] == pytest.approx(tuned.facts["log_evidence"], abs=1e-3)
        for factor in (0.7, 1.4):
            other = bf.laplace(model, data, prior_precision=factor * tuned.facts["prior_precision"][0], **options)
            assert other.facts["log_evidence"] < tuned.facts["log_evidence"]


def test_the_noise_is_found_by_the_evidence():
    """Many data of noise 0.5 with the wrong scale of 1.3: the standard error of σ is σ / √(2 n) = 0.018."""
    data = linear_data(400, 3, 1)
    posterior = bf.laplace(
        at_mode(data, 1e-6, 0.5), data, likelihood=bf.Gaussian(1.3), structure="full", noise="marglik"
    )
    assert abs(posterior.likelihood.scale - 0.5) < 5 * 0.018
    assert posterior.facts["noise"] == posterior.likelihood.scale
    precision, _ = exact_linear(data, posterior.facts["prior_precision"][0], posterior.likelihood.scale)
    torch.testing.assert_close(dense(posterior.law), precision.inverse(), rtol=1e-5, atol=1e-9)


def test_validation_takes_the_best_of_the_grid_by_the_predictive_in_use():
    model, data, held = Mlp(3, 4, 2).eval(), blobs(60), blobs(40, seed=1)
    options = {"likelihood": "categorical", "link": "probit", "validation": held, "structure": "diag"}
    found = bf.laplace(model, data, grid=4, **options)  # validation is the default where there are such data
    scores = {}
    for exponent in torch.linspace(-3, 6, 4, dtype=F64).tolist():
        one = bf.laplace(model, data, prior_precision=10**exponent, **options)
        predictive = one.predict(held.inputs, predictive="linearised", link="probit")
        scores[10**exponent] = evaluate.mean_log_likelihood(predictive, held.targets)
    assert found.facts["prior_precision"][0] == pytest.approx(max(scores, key=scores.get))
    assert found.facts["validation"] == pytest.approx(max(scores.values()), abs=1e-6)
    data = linear_data(60, 3, 1)
    both = bf.laplace(
        at_mode(data, 1.0, 0.5),
        data,
        likelihood=bf.Gaussian(0.05),
        validation=linear_data(30, 3, 1),
        noise="validation",
        prior_precision=1.0,
    )
    assert both.likelihood.scale in [pytest.approx(0.05 * s) for s in torch.logspace(-1, 1, 9).tolist()]


@pytest.mark.parametrize("structure", ["full", "kron", "low_rank", "subnetwork"])
def test_two_halves_of_linear_data_are_the_whole(structure):
    """Mean, covariance, evidence and predictive after an update are those of all data at once."""
    data, d, sigma = linear_data(50), 0.8, 0.5
    first, second = data.subset(slice(0, 20)), data.subset(slice(20, 50))
    settings = {"structure": structure, "prior_precision": d, "rank": 6, "size": 6}
    likelihood = bf.Gaussian(sigma)
    old = bf.laplace(at_mode(first, d, sigma), first, likelihood=likelihood, **settings)
    new = bf.laplace_update(old, second)
    whole = bf.laplace(at_mode(data, d, sigma), data, likelihood=likelihood, **settings)
    torch.testing.assert_close(new.law.mean, whole.law.mean)
    torch.testing.assert_close(dense(new.law), dense(whole.law))
    assert new.facts["log_evidence"] == pytest.approx(whole.facts["log_evidence"], rel=1e-8)
    assert new.facts["num_data"] == 50
    x = torch.randn(4, 3, dtype=F64)
    torch.testing.assert_close(new.predict(x).variance, whole.predict(x).variance)
    third = bf.laplace_update(bf.laplace_update(old, data.subset(slice(20, 31))), data.subset(slice(31, 50)))
    torch.testing.assert_close(dense(third.law), dense(whole.law))


def test_an_update_can_train_and_leaves_weights_without_spread_alone():
    data, d, sigma = linear_data(60, 3, 1), 0.8, 0.5
    first, second = data.subset(slice(0, 30)), data.subset(slice(30, 60))
    old = bf.laplace(
        at_mode(first, d, sigma), first, likelihood=bf.Gaussian(sigma), structure="full", prior_precision=d
    )
    training = bf.Training(epochs=400, batch_size=30, lr=0.02, warmup=50, clip=1e9)
    new = bf.laplace_update(old, second, training=training)
    precision, mean = exact_linear(data, d, sigma)
    assert ((new.law.mean - mean[0]).abs() < 0.05 * precision.inverse().diagonal().sqrt()).all()
    model = Mlp(3, 4, 2).eval()
    before = bf.laplace(model, blobs(40), likelihood="categorical", structure="last_layer", prior_precision=1.0)
    after = bf.laplace_update(before, blobs(40, seed=3), training=FAST)
    assert torch.equal(after.law.mean[:16], before.law.mean[:16])
    assert not torch.equal(after.law.mean[16:], before.law.mean[16:])
    assert (after.law.variance()[16:] < before.law.variance()[16:]).all()
    with pytest.raises(ValueError, match="posterior must come from the laplace method to be updated.* 'map'"):
        bf.laplace_update(bf.fit(Mlp(), blobs(20), likelihood="categorical", method="map", training=FAST), blobs(20))


@pytest.mark.parametrize("name", ["vi", "ivon", "swag", "ekf"])
def test_other_gaussian_methods_predict_in_any_way(name):
    settings = {"every": 1, "rank": 3} if name == "swag" else {}
    method = build_method(name, {"predictive": "linearised", "draws": 50, **settings})
    posterior = bf.fit(Mlp(), blobs(60), likelihood="categorical", method=method, training=FAST, workers=1)
    x = torch.randn(5, 3)
    assert posterior.predictive == "linearised"
    found = posterior.predict(x)
    assert found.log_probs.shape == (50, 5, 2)
    at_mean = posterior.skeleton.plain(posterior.law.mean).eval()
    torch.testing.assert_close(posterior.outputs(x).mean, at_mean(x).detach())
    sampled = posterior.outputs(x, 200, predictive="sampled")
    assert sampled.values.shape == (200, 5, 2)
    if name != "swag":  # whose low-rank part joins layers, which the one-pass rule refuses
        streamlined = posterior.outputs(x, predictive="streamlined")
        torch.testing.assert_close(streamlined.mean, posterior.outputs(x).mean, rtol=0.2, atol=0.2)


def test_a_saved_posterior_keeps_its_way(tmp_path):
    method = bf.Laplace(link="probit", structure="diag")
    posterior = bf.fit(Mlp(), blobs(60), likelihood="categorical", method=method, training=FAST)
    x = torch.randn(5, 3)
    folder = posterior.save(tmp_path / "p")
    loaded = bf.Posterior.load(folder, Mlp())
    assert (loaded.predictive, loaded.link) == ("linearised", "probit")
    assert torch.equal(loaded.predict(x).probs, posterior.predict(x).probs)


def test_per_token_outputs_and_padding():
    """A masked regressor: exact curvature, a predictive per position, finite scores."""
    from bayesformer.bench.tasks import TASKS

    task = TASKS["toy/m1"]()
    data = task.load().train.subset(slice(0, 12))
    torch.manual_seed(0)
    posterior = bf.laplace(task.model().eval(), data, likelihood=task.likelihood, draws=20)
    assert posterior.facts["curvature"] == "ggn"
    predictive = posterior.predict(data.inputs)
    assert predictive.means.shape == (20, *data.targets.shape)
    assert torch.isfinite(evaluate.log_likelihood(predictive, data.targets, data.mask)).all()
    assert (predictive.epistemic > 0).all()


def test_wrong_input_is_named():
    data, model = blobs(30), Mlp().eval()
    with pytest.raises(ValueError, match="laplace.structure must be one of 'auto', 'kron', .*; got 'krone"):
        bf.Laplace(structure="krone")
    with pytest.raises(
        ValueError,
        match="laplace.prior_precision must be a finite number .*, or one of 'auto', .*; got -1",
    ):
        bf.Laplace(prior_precision=-1.0)
    with pytest.raises(ValueError, match="laplace.prior_precision must be a finite number .*; got nan"):
        bf.Laplace(prior_precision=math.nan)
    with pytest.raises(ValueError, match="unknown link 'probbit'"):
        bf.Laplace(link="probbit")
    with pytest.raises(ValueError, match="laplace.per must be 'one' or 'layer' for structure='auto'"):
        bf.Laplace(per="weight")
    with pytest.raises(ValueError, match="laplace.per must be 'one' unless prior_precision is 'marglik'; got 'layer'"):
        bf.Laplace(per="layer", prior_precision=1.0)
    with pytest.raises(ValueError, match="laplace.prior_precision='validation' needs validation data; got none"):
        bf.laplace(model, data, likelihood="categorical", prior_precision="validation")
    with pytest.raises(ValueError, match="laplace.noise must be 'given' unless the likelihood is Gaussian"):
        bf.laplace(model, data, likelihood="categorical", noise="marglik")
    with pytest.raises(ValueError, match="link must be 'mc' for this likelihood; got 'probit'"):
        bf.laplace(model, data, likelihood=bf.Gaussian(1.0), link="probit")
    with pytest.raises(ValueError, match="targets must lie in 0..1"):
        bf.laplace(model, bf.Data(data.inputs, data.targets + 3), likelihood="categorical")
    broken = Mlp().eval()
    with torch.no_grad():
        broken.net[3].bias.fill_(math.nan)
    with pytest.raises(ValueError, match="outputs of the model on the first examples must be numbers; got NaN"):
        bf.laplace(broken, data, likelihood="categorical")
    untrained = {"likelihood": "categorical", "training": bf.Training(epochs=10**9)}  # errors come before training
    with pytest.raises(ValueError, match=r"subset='net.9\*' matches no weight"):
        bf.fit(Mlp(), data, method=bf.Laplace(subset="net.9*"), **untrained)
    frozen = Mlp()
    frozen.net[3].requires_grad_(False)
    with pytest.raises(ValueError, match=r"the layer that gives the outputs, net.3, to be inferred"):
        bf.fit(frozen, data, method=bf.Laplace(structure="last_layer"), **untrained)
    given = model.net[0].weight.detach().clone()
    posterior = bf.laplace(model, data, likelihood="categorical", prior_precision=1.0)
    with pytest.raises(ValueError, match="model must be in eval mode"):
        bf.laplace(Mlp(), data, likelihood="categorical")
    assert torch.equal(model.net[0].weight, given)
    with pytest.raises(ValueError, match="unknown predictive 'linearized'. Did you mean 'linearised'"):
        posterior.predict(data.inputs, predictive="linearized")
    with pytest.raises(ValueError, match="link must be none for outputs that are draws of the weights; got 'probit'"):
        posterior.predict(data.inputs, 3, predictive="sampled", link="probit")
    ensemble = bf.fit(Mlp(), data, likelihood="categorical", method=bf.Ensemble(2), training=FAST, workers=1)
    for way in ("linearised", "streamlined"):
        with pytest.raises(ValueError, match=f"predictive='{way}' needs a posterior that is a Gaussian.*is 2 draws"):
            ensemble.predict(data.inputs, predictive=way)
    with pytest.raises(ValueError, match="needs a posterior that is a Gaussian.*is 2 draws"):
        ensemble.joint(data.inputs)
    with pytest.raises(ValueError, match="unknown predictive 'mean'"):
        bf.Posterior(Mlp(), bf.Categorical(), gaussian(posterior.law.mean), predictive="mean")
    assert isinstance(posterior.law, GaussianLaw)


@pytest.mark.filterwarnings("ignore::bayesformer.FidelityWarning")
def test_a_precision_whose_moments_overflow_is_not_chosen_and_does_not_stop_the_search():
    """One-pass variances multiply from layer to layer: of a very wide posterior they leave the float's range."""
    torch.manual_seed(0)
    inner = [module for _ in range(9) for module in (nn.ReLU(), nn.Linear(64, 64))]
    model = nn.Sequential(nn.Linear(4, 64), *inner, nn.ReLU(), nn.Linear(64, 3)).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(3)
    data = bf.Data(torch.randn(60, 4), torch.randint(0, 3, (60,)))
    settings = {"predictive": "one_pass", "likelihood": "categorical", "progress": False}
    wide = bf.laplace(model, data, prior_precision=1e-3, **settings)  # the lowest that is tried
    with pytest.raises(ValueError, match="outputs must be finite; .* examples have NaN or infinite values"):
        wide.predict(data.inputs, batch_size=60)
    tuned = bf.laplace(model, data, validation=data, prior_precision="validation", **settings)
    assert torch.isfinite(tuned.predict(data.inputs).log_probs).all()


def test_a_full_matrix_that_does_not_fit_is_refused_before_training(monkeypatch):
    monkeypatch.setattr(importlib.import_module("bayesformer.laplace.method"), "total_memory", lambda device: 2**30)
    model = nn.Sequential(nn.Linear(4, 2000), nn.Tanh(), nn.Linear(2000, 1))

    class Alarm:
        def update(self, task, done, total, note=""):
            raise AssertionError("work began")

    problem = Problem(
        model, bf.Gaussian(1.0), as_batches((torch.zeros(8, 4), torch.zeros(8, 1)), "data"), reporter=Alarm()
    )
    with pytest.raises(ValueError, match=r"not be 'full' for 12001 weights, .* take 5.4 GiB, more than half of 1.0"):
        bf.Laplace(structure="full").fit(problem)
    with pytest.raises(AssertionError, match="work began"):
        bf.Laplace(structure="diag").fit(problem)

"""Stochastic attention with a posterior over the weights: one objective, draws of both."""

from dataclasses import replace

import pytest
import torch

import bayesformer as bf
from bayesformer.attention import attention_kl, attention_mode, families, install
from bayesformer.bench.tasks import TASKS
from bayesformer.core.seeds import stream
from bayesformer.core.types import Batch
from bayesformer.core.vectors import THETA
from bayesformer.data import Data
from bayesformer.laws import Samples
from bayesformer.methods import Problem, wrap
from bayesformer.methods.combined import WEIGHTS, Combined
from bayesformer.models.transformer import Encoder, Regressor
from bayesformer.posterior import Posterior
from bayesformer.train.loop import Training
from bayesformer.train.members import task_of

FEW = {"sghmc": {"draws": 3}, "baoab": {"draws": 3}, "swag": {"rank": 2}, "ensemble": {"members": 2}}


def regressor():
    torch.manual_seed(0)
    return Regressor(Encoder(dim=8, heads=2, causal=True))


def data(count=24):
    x = torch.randn(count, 6)
    return Data(x[..., None], x.roll(-1, 1)[..., None])


def problem(model=None):
    likelihood = TASKS["toy/m1"]().likelihood
    return Problem(model or regressor, likelihood, data(), data(8), Training(epochs=4, batch_size=12))


def test_the_objective_of_any_method_owes_the_kl_of_attention():
    model, given = install(regressor(), "weibull"), problem()
    task = task_of(replace(given, model=model), "map", prior=None)
    job, batch = task.job([0]), given.data.take(slice(0, 5))
    flat = job.model
    flat.module.train()
    joint = job.transform.update.keywords["log_joint"]
    torch.manual_seed(3)
    value, _, grads = joint.value_and_grad({THETA: flat.theta}, Batch(batch.inputs, batch.targets))
    found = grads[THETA].clone()
    torch.manual_seed(3)
    flat.grad.zero_()
    outputs = flat(batch.inputs)
    expected = (given.likelihood.log_prob(outputs, batch.targets, None) - attention_kl(flat.module)).mean()
    expected.backward()
    assert attention_kl(flat.module).abs().min() > 1e-3
    torch.testing.assert_close(value, expected.detach())
    torch.testing.assert_close(found, flat.grad)


def test_every_draw_is_of_weights_and_attention():
    model, x = install(regressor(), "weibull", spread=2.0).eval(), data(4).inputs
    theta = bf.network.Layout.of(model).pack(dict(model.named_parameters())).detach()
    rows = torch.stack([theta, theta, 1.1 * theta])
    made = Posterior(model, problem().likelihood, Samples(rows)).outputs(x, workers=1).values
    assert not torch.equal(made[0], made[1])  # the same weights, other attention
    for member, row in enumerate(rows):
        flat = bf.network.FlatModel(install(regressor(), "weibull", spread=2.0))
        flat.load(row)
        with torch.no_grad(), stream(0, "draw", member), attention_mode(flat.module.eval(), "draw"):
            torch.testing.assert_close(made[member], flat(x))
    alone = Posterior(model, problem().likelihood, Samples(rows[:1])).outputs(x, workers=1).values
    with torch.no_grad():
        torch.testing.assert_close(alone[0], model(x))  # a single network is judged by its mean attention


@pytest.mark.parametrize("weights", WEIGHTS)
def test_every_posterior_over_weights_takes_stochastic_attention(weights, tmp_path):
    method = Combined("dirichlet", {"spread": 20.0}, weights, FEW.get(weights, {}))
    posterior = method.fit(problem())
    assert families(posterior.model)
    assert posterior.facts["method"]["name"] == "combined"
    x = data(5).inputs
    drawn = posterior.predict(x, seed=1)
    posterior.save(tmp_path)
    loaded = Posterior.load(tmp_path, wrap(method, regressor()))
    torch.testing.assert_close(loaded.predict(x, seed=1).mean, drawn.mean)
    assert torch.isfinite(drawn.mean).all()


def test_a_model_is_not_changed_and_can_be_given_instead_of_a_function():
    model = regressor()
    posterior = Combined("weibull", weights="sghmc", settings={"draws": 2}).fit(problem(model))
    assert families(posterior.model)
    assert not families(model)


def test_errors_name_what_does_not_fit():
    with pytest.raises(ValueError, match=r"predictive must be 'sampled' for laplace .*got 'linearised'"):
        Combined(weights="laplace", settings={"predictive": "linearised"})
    with pytest.raises(TypeError, match="colour"):
        Combined(weights="sghmc", settings={"colour": 1})
    with pytest.raises(ValueError, match=r"weights.*'magic'"):
        Combined(weights="magic")
    with pytest.raises(ValueError, match=r"prior of weibull attention.*'symmetric'"):
        Combined("weibull", {"prior": "symmetric"})

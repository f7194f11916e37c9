"""Stochastic attention with a posterior over the weights: one objective, draws of both."""

import pytest
import torch
from torch.nn.utils import parameters_to_vector

import bayesformer as bf
from bayesformer.attention import attention_kl, attention_mode, families, install
from bayesformer.core.draws import drawing_from
from bayesformer.core.seeds import fold
from bayesformer.core.types import Batch
from bayesformer.core.vectors import THETA
from bayesformer.data import Data
from bayesformer.laws import Samples
from bayesformer.methods import Problem
from bayesformer.methods.combined import WEIGHTS, Combined
from bayesformer.models.transformer import Encoder, Regressor
from bayesformer.posterior import Posterior
from bayesformer.train.members import Stage
from bayesformer.train.prototype import Prototype
from bayesformer.train.training import Training

FEW = {"sghmc": {"draws": 3}, "baoab": {"draws": 3}, "swag": {"rank": 2, "every": 1}, "ensemble": {"members": 2}}


def regressor():
    torch.manual_seed(0)
    return Regressor(Encoder(dim=8, heads=2, causal=True))


def data(count=24):
    x = torch.randn(count, 6)
    return Data(x[..., None], x.roll(-1, 1)[..., None])


def problem(model=None):
    return Problem(model or regressor, bf.Gaussian(), data(), data(8), Training(epochs=4, batch_size=12))


def test_the_objective_of_any_method_has_the_kl_of_attention():
    """Also where attention was installed by the user, and the method knows nothing of it."""
    stage = Stage(Prototype(problem(install(regressor(), "weibull"))), "map", Training(epochs=1))
    objective = stage.job([0]).transform.update.keywords["log_joint"]
    shell, given = objective.shell, data(5)
    shell.module.train()
    batch = Batch(given.inputs, given.targets)
    torch.manual_seed(3)
    value, _, grads = objective.value_and_grad({THETA: shell.theta.clone()}, batch)
    found = grads[THETA].clone()
    torch.manual_seed(3)
    shell.grad.zero_()
    outputs = shell(batch.inputs)
    expected = (bf.Gaussian().log_prob(outputs, batch.targets, None) - attention_kl(shell.module)).mean()
    expected.backward()
    assert attention_kl(shell.module).abs().min() > 1e-3
    torch.testing.assert_close(value, expected.detach())
    torch.testing.assert_close(found, shell.grad)


def test_every_draw_is_of_weights_and_attention():
    model, x = install(regressor(), "weibull", spread=2.0).eval(), data(4).inputs
    theta = parameters_to_vector(model.parameters()).detach()
    rows = torch.stack([theta, theta, 1.1 * theta])
    made = Posterior(model, bf.Gaussian(), Samples(rows))
    values = made.outputs(x).values
    assert not torch.equal(values[0], values[1])  # the same weights, other attention
    for member, row in enumerate(rows):
        alone = install(regressor(), "weibull", spread=2.0).eval()
        torch.nn.utils.vector_to_parameters(row, alone.parameters())
        generator = torch.Generator().manual_seed(fold(0, "draw", member))
        with torch.no_grad(), drawing_from(generator), attention_mode(alone, "draw"):
            torch.testing.assert_close(values[member], alone(x))
    single = Posterior(model, bf.Gaussian(), Samples(rows[:1])).outputs(x).values
    with torch.no_grad():
        torch.testing.assert_close(single[0], model(x))  # a single network is judged by its mean attention


@pytest.mark.parametrize("weights", WEIGHTS)
def test_every_posterior_over_weights_takes_stochastic_attention(weights, tmp_path):
    method = Combined("dirichlet", {"spread": 20.0}, weights, FEW.get(weights, {}))
    posterior = method.fit(problem())
    assert posterior.facts["method"]["name"] == "combined"
    x = data(5).inputs
    maps = posterior.attention_maps(x, draws=2)
    assert all((each.sd > 0).any() for each in maps)
    drawn = posterior.predict(x, seed=1)
    loaded = Posterior.load(posterior.save(tmp_path), regressor())
    assert torch.equal(loaded.predict(x, seed=1).mean, drawn.mean)
    assert torch.isfinite(drawn.mean).all()


def test_a_model_is_not_changed_and_can_be_given_instead_of_a_function():
    model = regressor()
    before = {name: p.clone() for name, p in model.state_dict().items()}
    posterior = Combined("weibull", weights="sghmc", settings={"draws": 2}).fit(problem(model))
    assert posterior.model is model
    assert families(posterior.skeleton.shadow())
    assert not families(model)
    assert all(torch.equal(p, before[name]) for name, p in model.state_dict().items())


def test_errors_name_what_does_not_fit():
    with pytest.raises(ValueError, match=r"predictive must be 'sampled' for laplace .*got 'linearised'"):
        Combined(weights="laplace", settings={"predictive": "linearised"})
    with pytest.raises(TypeError, match="colour"):
        Combined(weights="sghmc", settings={"colour": 1})
    with pytest.raises(ValueError, match=r"weights.*'magic'"):
        Combined(weights="magic")
    with pytest.raises(ValueError, match=r"prior of weibull attention.*'symmetric'"):
        Combined("weibull", {"prior": "symmetric"})

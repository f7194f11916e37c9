"""Transforms of the `posteriors` package in a loop of ours, as they are, and ours beside them."""

import warnings

import pytest
import torch

from bayesformer.data import Data
from bayesformer.inference import baoab, sghmc, sgld
from bayesformer.likelihoods import Categorical
from bayesformer.network import FlatLogJoint, FlatModel, log_joint, trainable
from bayesformer.train.loop import Collect, Job, Training, train
from tests.nets import Mlp, blobs

with warnings.catch_warnings():  # it declares its states in a way that tensordict will change
    warnings.simplefilter("ignore", FutureWarning)
    posteriors = pytest.importorskip("posteriors")

theirs = posteriors.sgmcmc


def loop(transform, params, data: Data, epochs, inplace):
    """The protocol, no more: init, update with a batch, read the parameters."""
    state = transform.init({k: p.detach().clone() for k, p in params.items()})
    if not isinstance(state, tuple):
        state = state.clone()  # their new states share one step, which in place would move for all
    outputs = []
    for _ in range(epochs):
        for batch in data.chunks(20):
            state, output = transform.update(state, batch, inplace=inplace)
            outputs.append(output)
    return state, torch.stack(outputs)


PAIRS = {
    "sgld": (
        lambda joint, heat: theirs.sgld.build(joint, lr=0.05, temperature=heat),
        lambda joint, heat: sgld.build(joint, 0.05, heat),
    ),
    "sghmc": (
        lambda joint, heat: theirs.sghmc.build(joint, lr=0.1, alpha=0.8, sigma=1.2, temperature=heat, momenta=0.0),
        lambda joint, heat: sghmc.build(joint, 0.1, heat, friction=0.8, sigma=1.2, scheme="explicit"),
    ),
    "baoa": (
        lambda joint, heat: theirs.baoa.build(joint, lr=0.1, alpha=0.8, sigma=1.2, temperature=heat, momenta=0.0),
        lambda joint, heat: baoab.build(joint, 0.1, heat, friction=0.8, sigma=1.2),
    ),
}


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("name", PAIRS)
def test_their_transform_runs_in_our_loop_and_takes_our_path(name, inplace):
    data, model = blobs(60), Mlp()
    joint = log_joint(model, Categorical(), None, len(data))
    params = dict(sorted(trainable(model).items()))  # the order in which they draw
    paths = []
    for build in PAIRS[name]:
        torch.manual_seed(5)
        state, outputs = loop(build(joint, 1 / len(data)), params, data, epochs=4, inplace=inplace)
        assert outputs.shape == (12, 20, 2)
        assert state.step.item() == 12
        paths.append(state.params)
    for key, first in params.items():
        torch.testing.assert_close(paths[0][key], paths[1][key], rtol=1e-4, atol=1e-5)
        assert not torch.equal(paths[0][key], first)


@pytest.mark.parametrize("name", ["sgld", "sghmc"])
def test_their_transform_trains_in_the_library_loop(name):
    data = blobs(60)
    flat = FlatModel(Mlp())
    joint = FlatLogJoint(flat, Categorical(), None, len(data))
    transform = PAIRS[name][0](joint, 1 / len(data))
    training = Training(epochs=5, batch_size=20)
    start, before = flat.theta.clone(), torch.get_rng_state()
    job = Job(flat, transform, start, data, None, Categorical(), training, 0, (0,), Collect((5, 15)))
    trained = train(job)
    assert torch.equal(train(job).theta, trained.theta)  # their noise, too, comes from the seed
    assert torch.equal(torch.get_rng_state(), before)
    assert trained.draws.shape == (1, 2, len(start))
    assert torch.isfinite(trained.theta).all()
    assert not torch.equal(trained.theta[0], start)
    values = [epoch["log_joint"][0] for epoch in trained.history]
    assert values[-1] > values[0]

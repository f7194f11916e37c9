"""Transforms of the `posteriors` package in a loop of ours, as they are, and ours beside them."""

import warnings

import pytest
import torch

from bayesformer.data import Data
from bayesformer.inference import baoab, sghmc, sgld
from bayesformer.likelihoods import Categorical
from bayesformer.train.collect import Collect
from bayesformer.train.log_joint import log_joint
from bayesformer.train.loop import train
from bayesformer.train.objective import Objective
from bayesformer.train.training import Training
from tests.nets import Mlp, blobs, job_of, shell_of

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
    params = dict(sorted(model.named_parameters()))  # the order in which they draw
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


@pytest.mark.parametrize("name", PAIRS)
def test_their_transform_takes_our_path_in_the_library_loop(name):
    """The same seed, the same noise, in the same loop; the caller's stream is left alone."""
    data, model, training = blobs(60), Mlp(), Training(epochs=5, batch_size=20)
    found = []
    for build in PAIRS[name]:
        shell = shell_of(model)
        start = shell.theta.clone()
        transform = build(Objective(shell, Categorical(), len(data)), 1 / len(data))
        torch.manual_seed(len(found))
        before = torch.get_rng_state()
        found.append(train(job_of(shell, transform, shell.theta, data, training, collect=Collect((5, 15)))))
        assert torch.equal(torch.get_rng_state(), before)
    theirs, ours = found
    assert theirs.draws.shape == (1, 2, len(start))
    assert not torch.equal(theirs.theta[0], start)
    torch.testing.assert_close(theirs.draws, ours.draws, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(theirs.theta, ours.theta, rtol=1e-4, atol=1e-5)
    losses = [[epoch["log_joint"][0] for epoch in run.history] for run in found]
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)

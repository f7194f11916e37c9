"""Chains looked at in function space and in weight space."""

import pytest
import torch

import bayesformer as bf
from bayesformer.bench.chain_traces import function_traces, picture, summarise, weight_traces
from bayesformer.laws import Samples
from tests.nets import Mlp


def posterior(theta, chains):
    return bf.Posterior(Mlp(), bf.Categorical(), Samples(theta), facts={"chains": chains})


def test_chains_that_agree_and_chains_that_do_not():
    independent = torch.randn(4 * 50, 50)
    good = summarise(function_traces(posterior(independent, 4), torch.randn(6, 3)))
    assert good["rhat"] < 1.1
    assert good["ess"] > 100
    apart = 0.1 * torch.randn(4, 50, 50) + torch.randn(4, 1, 50)
    bad = summarise(function_traces(posterior(apart.flatten(0, 1), 4), torch.randn(6, 3)))
    assert bad["rhat"] > 1.5
    assert bad["ess"] < 20


def test_weight_traces_keep_chain_order():
    theta = torch.arange(2 * 5.0).view(10, 1).expand(10, 50).clone()
    seen = weight_traces(posterior(theta, 2), "net.3.bias")
    assert seen.shape == (2, 5, 2)
    assert seen[1, :, 0].tolist() == [5, 6, 7, 8, 9]


def test_wrong_questions_are_named():
    with pytest.raises(ValueError, match="at least 4 draws each; got 6 draws of 2 chains"):
        function_traces(posterior(torch.randn(6, 50), 2), torch.randn(2, 3))
    with pytest.raises(ValueError, match="unknown parameter 'net.9.bias'. Did you mean"):
        weight_traces(posterior(torch.randn(8, 50), 2), "net.9.bias")
    with pytest.raises(ValueError, match="all draws are equal"):
        summarise(torch.ones(2, 6, 3))


def test_a_picture_names_what_it_shows():
    theta = torch.randn(10, 50)
    theta[:, :3] = 1.0  # weights that do not move are not worth a picture
    shown = picture(posterior(theta, 2), torch.randn(3, 3))
    assert [trace["name"] for trace in shown[:2]] == ["output 1 of 2", "output 2 of 2"]
    for trace in shown:
        assert [len(chain) for chain in trace["chains"]] == [5, 5]
    layout = posterior(theta, 2).space
    for trace in shown[2:]:
        name, _, index = trace["name"].removesuffix("]").partition("[")
        expected = layout.views(theta)[name].flatten(1)[:, int(index)].view(2, 5)
        torch.testing.assert_close(torch.tensor(trace["chains"]), expected, rtol=1e-4, atol=1e-5)

"""Problems with repeated targets: many examples for a method, the same posterior from the means."""

from dataclasses import replace

import pytest
import torch

from bayesformer.reference.problems import problem_of

NAMES = ["gap-mlp-n1000", "causal-series-n1000"]


@pytest.mark.parametrize("name", NAMES)
def test_the_means_have_the_posterior_of_all_targets(name):
    """Log-likelihoods of all targets and of their means differ by a constant, whatever the weights."""
    problem = problem_of(name)
    data = problem.data()
    small, likelihood = problem.condensed(data)
    assert (len(data.train), len(small.train)) == (1000, 100)
    gaps = []
    for seed in range(3):
        torch.manual_seed(seed)
        model = problem.model().double().eval()
        with torch.no_grad():
            many = problem.likelihood.log_prob(model(data.train.inputs.double()), data.train.targets.double()).sum()
            few = likelihood.log_prob(model(small.train.inputs.double()), small.train.targets.double()).sum()
        gaps.append(many - few)
    torch.testing.assert_close(gaps[1:], [gaps[0]] * 2, rtol=0, atol=1e-3)  # the means are rounded to float32


@pytest.mark.parametrize("name", NAMES)
def test_data_are_the_same_in_every_call_and_regions_those_of_the_plain_problem(name):
    one, two = problem_of(name).data(), problem_of(name).data()
    assert torch.equal(one.train.targets, two.train.targets)
    plain = replace(problem_of(name.removesuffix("-n1000")), examples=100).data()
    assert list(one.regions) == list(plain.regions)
    assert torch.equal(one.train.inputs[::10], plain.train.inputs)

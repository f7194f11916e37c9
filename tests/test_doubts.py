"""Doubts: kept with a posterior, saved with it, and said once as Python warnings."""

import warnings
from dataclasses import replace

import pytest
import torch
from torch import nn

import bayesformer as bf
from bayesformer.core.doubts import Doubt, recorded, warn_of

DOUBT = Doubt("mode", "The mode was not found: train longer.", 0.7, 0.3)


def test_doubts_are_part_of_a_posterior_and_of_its_file(tmp_path):
    model, data = nn.Linear(2, 1), (torch.randn(8, 2), torch.randn(8, 1))
    posterior = bf.fit(model, data, likelihood=bf.Gaussian(1.0), method=bf.Laplace(prior_precision=1.0))
    assert posterior.doubts == ()
    doubted = replace(posterior, facts={**posterior.facts, **recorded([DOUBT])})
    assert doubted.doubts == (DOUBT,)
    assert "1 doubts" in repr(doubted)
    doubted.save(tmp_path)
    assert bf.Posterior.load(tmp_path, model).doubts == (DOUBT,)


def said(doubts):
    """As `fit` says them: the warning is to name the line that called `fit`."""
    warn_of(doubts)


def test_a_doubt_is_one_warning_of_its_own_class():
    with pytest.warns(bf.FidelityWarning, match="mode was not found") as caught:
        said([DOUBT])
    assert len(caught) == 1
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        said([])


def test_checks_on_other_data_say_so():
    model, data = nn.Linear(2, 1), (torch.randn(8, 2), torch.randn(8, 1))
    posterior = bf.fit(model, data, likelihood=bf.Gaussian(1.0), method=bf.Laplace(prior_precision=1.0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        posterior.check(data)
    with pytest.warns(UserWarning, match="fitted to, 8 examples; got 5") as caught:
        posterior.check((data[0][:5], data[1][:5]))
    assert caught[0].filename == __file__

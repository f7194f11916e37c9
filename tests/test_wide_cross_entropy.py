"""The cross-entropy of a vocabulary is torch's: values, gradients, gradients of gradients, and memory."""

import pytest
import torch
from torch.nn import functional as F

from bayesformer.likelihoods import Categorical, NextToken, categorical, wide_cross_entropy
from bayesformer.likelihoods.wide_cross_entropy import WideCrossEntropy

F64 = torch.float64


def problem(count=7, width=11):
    logits, labels = torch.randn(count, width, dtype=F64, requires_grad=True), torch.randint(width, (count,))
    labels[2] = -100
    return logits, labels, torch.randn(count, dtype=F64)


@pytest.mark.parametrize("piece", [1, 25, 2**20])
def test_values_and_gradients_are_those_of_torch(piece, monkeypatch):
    monkeypatch.setattr(wide_cross_entropy, "PIECE", piece)
    logits, labels, weights = problem()
    ours = WideCrossEntropy.apply(logits, labels, -100)
    theirs = F.cross_entropy(logits, labels, reduction="none")
    torch.testing.assert_close(ours, theirs)
    (found,) = torch.autograd.grad(ours @ weights, logits)
    (expected,) = torch.autograd.grad(theirs @ weights, logits)
    torch.testing.assert_close(found, expected)
    assert not found[2].any()


def test_it_can_be_differentiated_twice():
    logits, labels, weights = problem()
    assert torch.autograd.gradcheck(lambda x: WideCrossEntropy.apply(x, labels, -100), (logits,))
    assert torch.autograd.gradgradcheck(lambda x: WideCrossEntropy.apply(x, labels, -100) * weights, (logits,))


@pytest.mark.parametrize("likelihood", [Categorical(), NextToken()])
def test_likelihoods_use_it_for_vocabularies_and_say_the_same(likelihood, monkeypatch):
    outputs = torch.randn(3, 4, 50, requires_grad=True)
    labels = torch.randint(50, (3, 4))
    labels[0, 2] = -100
    (plain,) = torch.autograd.grad(likelihood.log_prob(outputs, labels).sum(), outputs)
    calls = []
    monkeypatch.setattr(categorical, "WIDE", 50)
    used = WideCrossEntropy.apply
    monkeypatch.setattr(WideCrossEntropy, "apply", lambda *given: (calls.append(1), used(*given))[1])
    value = likelihood.log_prob(outputs, labels)
    (found,) = torch.autograd.grad(value.sum(), outputs)
    assert calls == [1]
    torch.testing.assert_close(found, plain)
    many = torch.randn(5, 3, 4, 50)
    each = torch.stack([likelihood.log_prob(one, labels) for one in many])
    torch.testing.assert_close(torch.vmap(lambda one: likelihood.log_prob(one, labels))(many), each)
    slopes = torch.func.grad(lambda one: likelihood.log_prob(one, labels).sum())(outputs.detach())
    torch.testing.assert_close(slopes, plain)

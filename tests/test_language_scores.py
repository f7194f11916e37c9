"""Scores of language tasks against scikit-learn, SciPy and cases by hand."""

import pytest
import torch
from scipy.stats import pearsonr, spearmanr
from sklearn.metrics import matthews_corrcoef

import bayesformer as bf
from bayesformer import evaluate


def test_matthews_is_that_of_scikit_learn_and_0_for_a_constant_answer():
    log_probs = torch.randn(3, 50, 4).log_softmax(-1)
    predictive, targets = bf.CategoricalPredictive(log_probs), torch.randint(4, (50,))
    assert evaluate.matthews(predictive, targets) == pytest.approx(matthews_corrcoef(targets, predictive.labels))
    constant = bf.CategoricalPredictive(torch.tensor([[[0.9, 0.1]]]).log().expand(1, 10, 2))
    assert evaluate.matthews(constant, torch.arange(10) % 2) == 0


def test_correlations_are_those_of_scipy():
    means = torch.randn(2, 30, 1)
    predictive = bf.GaussianPredictive(means, torch.ones_like(means))
    targets = (predictive.mean + torch.randn(30, 1)).round()  # with ties
    ours, theirs = predictive.mean[:, 0].double(), targets[:, 0].double()
    assert evaluate.pearson(predictive, targets) == pytest.approx(pearsonr(ours, theirs).statistic)
    assert evaluate.spearman(predictive, targets) == pytest.approx(spearmanr(ours, theirs).statistic)


def test_answers_are_compared_as_in_squad():
    truths = [["The Eiffel Tower"], ["in 1912", "1912"], ["blue"]]
    answers = ["eiffel tower.", "the year 1912", ""]
    assert evaluate.exact_match(answers, truths) == pytest.approx(1 / 3)
    assert evaluate.token_f1(answers, truths) == pytest.approx((1 + 2 / 3 + 0) / 3)
    with pytest.raises(ValueError, match="lists of one length"):
        evaluate.token_f1(["a"], [])
    with pytest.raises(ValueError, match="number 0 is 'yes'"):
        evaluate.exact_match(["a"], ["yes"])


def test_best_spans_by_trying_all():
    g = torch.Generator().manual_seed(0)
    start, end = torch.randn(6, 12, generator=g), torch.randn(6, 12, generator=g)
    allowed = torch.rand(6, 12, generator=g) > 0.2
    firsts, lasts = evaluate.best_spans(start, end, allowed, longest=4)
    for row in range(6):
        every = {
            (i, j): float(start[row, i] + end[row, j])
            for i in range(12)
            for j in range(i, min(i + 4, 12))
            if allowed[row, i] and allowed[row, j]
        }
        assert (int(firsts[row]), int(lasts[row])) == max(every, key=every.get)

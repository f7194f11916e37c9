"""The catalogue and the two summaries: names agree, padding is out, floats only, imports stay light."""

import json
import math
import subprocess
import sys

import pytest
import torch

from bayesformer import evaluate
from bayesformer.evaluate import (
    METRICS,
    classification,
    describe,
    epistemic_share,
    mean_log_likelihood,
    regression,
)
from bayesformer.likelihoods.predictive import CategoricalPredictive, GaussianPredictive

HIGHER = {
    *("log_likelihood", "accuracy", "f1_macro", "f1_micro", "f1_weighted", "oracle_gap"),
    *("auroc", "auroc_epistemic", "aupr", "stump_accuracy", "tree_accuracy", "pavpu"),
    *("matthews", "pearson", "spearman", "exact_match", "token_f1", "agreement"),
}
LOWER = {
    *("ece", "ece_classwise", "ece_adaptive", "brier", "crps", "rmse", "coverage_error_90"),
    *("process_mse", "variance_mse", "fpr95", "fpr95_epistemic", "aurc", "aurc_epistemic"),
    *("spread_error", "rank_error", "wasserstein", "mean_error", "total_variation"),
}
INFORMATION = {"coverage_90", "epistemic_share", "rhat", "ess", "spread_ratio"}


def tokens(draws=4, padding=-100):
    """A batch of 3 x 5 tokens of 3 classes, its padded targets and its mask; the last example is empty."""
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0], [0, 0, 0, 0, 0]]).bool()
    predictive = CategoricalPredictive(torch.randn(draws, 3, 5, 3).log_softmax(-1))
    return predictive, torch.randint(3, (3, 5)).masked_fill(~mask, padding), mask


def steps():
    """Two series of 200 and 100 steps of 2 values, NaN where padded."""
    mask = torch.arange(200) < torch.tensor([[200], [100]])
    predictive = GaussianPredictive(torch.randn(4, 2, 200, 2), torch.rand(4, 2, 200, 2) + 0.1)
    return predictive, 1.5 * torch.randn(2, 200, 2).masked_fill(~mask[..., None], math.nan), mask


# catalogue


@pytest.mark.parametrize(("better", "names"), [("higher", HIGHER), ("lower", LOWER), ("none", INFORMATION)])
def test_catalogue_has_exactly_the_agreed_names_and_directions(better, names):
    assert {name for name, metric in METRICS.items() if metric.better == better} == names


def test_every_metric_explains_itself():
    assert all(metric.name == name and metric.help.endswith(".") for name, metric in METRICS.items())
    assert len({metric.label for metric in METRICS.values()}) == len(METRICS)


def test_describe_takes_a_probe():
    assert describe("auroc") is METRICS["auroc"]
    probe = describe("auroc/noise")
    assert (probe.name, probe.label, probe.better) == ("auroc/noise", "AUROC (noise)", "higher")
    assert probe.help == METRICS["auroc"].help
    assert describe("fpr95/fashion/dark").label == "FPR at 95 % TPR (fashion/dark)"


@pytest.mark.parametrize(("name", "text"), [("aurok", "'aurok'"), ("aurok/noise", "'aurok'"), ("auroc/", "'auroc/'")])
def test_describe_refuses_unknown_names(name, text):
    with pytest.raises(ValueError, match=f"unknown metric {text}. Did you mean 'auroc'"):
        describe(name)


# summaries


def test_classification_is_every_score_of_the_counted_tokens():
    predictive, targets, mask = tokens()
    scores = classification(predictive, targets, mask, bins=5)
    flat, answers = predictive.select(mask), targets[mask]
    wrong = (flat.labels != answers).double()
    assert scores == {
        "log_likelihood": pytest.approx(flat.log_prob(answers).sum().item() / 2, rel=1e-5),
        "accuracy": evaluate.accuracy(flat, answers),
        "f1_macro": evaluate.f1(flat, answers, "macro"),
        "f1_micro": evaluate.f1(flat, answers, "micro"),
        "f1_weighted": evaluate.f1(flat, answers, "weighted"),
        "ece": evaluate.ece(flat, answers, 5),
        "ece_classwise": evaluate.ece_classwise(flat, answers, 5),
        "ece_adaptive": evaluate.ece_adaptive(flat, answers, 5),
        "brier": evaluate.brier(flat, answers),
        "aurc": evaluate.aurc(flat.total, wrong),
        "pavpu": evaluate.pavpu(flat, answers),
        "epistemic_share": pytest.approx((flat.epistemic.sum() / flat.total.sum()).item(), rel=1e-5),
    }


def test_regression_is_every_score_of_the_counted_steps():
    predictive, targets, mask = steps()
    scores = regression(predictive, targets, mask)
    flat, answers = predictive.select(mask), targets[mask]
    coverage = evaluate.interval_coverage(flat, answers, 0.9)
    squared = (flat.mean - answers).square().mean(-1)
    assert scores == {
        "log_likelihood": pytest.approx(flat.log_prob(answers).sum().item() / 2, rel=1e-5),
        "crps": evaluate.crps(flat, answers),
        "rmse": evaluate.rmse(flat, answers),
        "coverage_90": coverage,
        "coverage_error_90": abs(coverage - 0.9),
        "aurc": pytest.approx(evaluate.aurc(flat.total, squared), rel=1e-5),
        "epistemic_share": pytest.approx((flat.epistemic.sum() / flat.total.sum()).item(), rel=1e-5),
    }


@pytest.mark.parametrize("case", [tokens, steps])
def test_summaries_hold_python_floats_under_known_names(case):
    scores = (classification if case is tokens else regression)(*case())
    assert {type(value) for value in scores.values()} == {float}
    assert scores.keys() <= METRICS.keys()
    json.dumps(scores, allow_nan=False)


def test_without_a_mask_everything_counts():
    predictive, targets, _ = tokens(padding=0)
    everywhere = torch.ones(3, 5).bool()
    assert classification(predictive, targets) == pytest.approx(classification(predictive, targets, everywhere))


def test_one_draw_has_no_pavpu_and_no_epistemic_part():
    scores = classification(*tokens(draws=1))
    assert "pavpu" not in scores
    assert scores["epistemic_share"] == 0.0


def test_epistemic_share_on_paper():
    """Two certain draws that disagree: all uncertainty is epistemic. Certain and agreeing: none at all."""
    disagree = CategoricalPredictive(torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]]).log())
    assert epistemic_share(disagree) == pytest.approx(1.0)
    assert epistemic_share(CategoricalPredictive(disagree.log_probs[:1])) == 0.0
    noise = GaussianPredictive(torch.tensor([0.0, 2.0]).view(2, 1, 1), torch.full((2, 1, 1), 3.0))
    assert epistemic_share(noise) == pytest.approx(1 / 4)


def test_mean_log_likelihood_leaves_out_examples_without_a_target():
    predictive = CategoricalPredictive(torch.tensor([[[0.5, 0.5], [0.25, 0.75]]]).log())
    mask = torch.tensor([True, False])
    assert mean_log_likelihood(predictive, torch.tensor([0, 0]), mask) == pytest.approx(math.log(0.5))
    assert mean_log_likelihood(predictive, torch.tensor([0, 0])) == pytest.approx(math.log(0.125) / 2)


def test_summaries_refuse_what_does_not_fit():
    predictive, targets, mask = tokens()
    with pytest.raises(ValueError, match=r"targets must lie in 0..2; got -100"):
        classification(predictive, targets)
    with pytest.raises(ValueError, match="mask must count at least one position"):
        classification(predictive, targets, mask & False)
    with pytest.raises(ValueError, match="must be a GaussianPredictive; got CategoricalPredictive"):
        regression(predictive, targets.clamp_min(0))
    gaussian, values, _ = steps()
    with pytest.raises(ValueError, match="targets must be finite; got nan"):
        regression(gaussian, values)
    with pytest.raises(ValueError, match=r"log_probs must hold at least one draw of one question"):
        epistemic_share(predictive.select(mask & False))
    with pytest.raises(ValueError, match=r"log_probs must not be NaN; got 180 of 180"):
        epistemic_share(CategoricalPredictive(predictive.log_probs * math.nan))


# the package


def test_public_names_exist_and_scikit_learn_is_not_loaded_for_them():
    code = (
        "import sys, bayesformer.evaluate as e; assert all(hasattr(e, name) for name in e.__all__); "
        "print([m for m in ('sklearn', 'scipy', 'torchmetrics') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"

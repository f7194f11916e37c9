"""Scores of classifiers and regressors that all tasks share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from bayesformer import evaluate
from bayesformer.bench.tasks.protocol import Evaluation
from bayesformer.data import Data
from bayesformer.datasets.toy import GaussianMixture
from bayesformer.likelihoods.predictive import CategoricalPredictive, GaussianPredictive, Predictive


def first_of(data: Data, count: int | None) -> Data:
    """The first examples of a set, or all of them where no count is given."""
    if count is not None and (isinstance(count, bool) or count < 1):
        raise ValueError(f"a number of examples must be at least 1; got {count!r}.")
    return data if count is None else data.subset(slice(0, count))


def classification_evaluation(predictive: Predictive, test: Data, outsiders: Mapping[str, Predictive]) -> Evaluation:
    """All scores of a classifier: on the test data, and how well its entropy detects each out-of-distribution set."""
    assert isinstance(predictive, CategoricalPredictive)
    metrics = evaluate.classification(predictive, test.targets, test.mask)
    metrics |= _detected(predictive, outsiders, len(predictive.log_probs))
    metrics |= _left_over(predictive, test.targets, outsiders)
    figures = {
        "reliability": evaluate.reliability(predictive, test.targets),
        "entropy": entropies({"test": predictive, **outsiders}),
    }
    if isinstance(test.inputs, Tensor):  # images, which can be shown
        figures["examples"] = _examples(predictive, test)
    return Evaluation(metrics, None, None, figures)


def regression_evaluation(
    predictive: Predictive, test: Data, truth: GaussianMixture | None, outsiders: Mapping[str, Predictive]
) -> Evaluation:
    """All scores of a regressor: on the test data, out of distribution, and the gap to the truth where it is known."""
    assert isinstance(predictive, GaussianPredictive)
    metrics = evaluate.regression(predictive, test.targets, test.mask)
    metrics |= _detected(predictive, outsiders, len(predictive.means))
    every = torch.ones(predictive.shape, dtype=torch.bool) if test.mask is None else test.mask
    counted = predictive.select(every)
    figures = {"coverage": evaluate.coverage_curve(counted, test.targets[every])}
    if truth is None:
        return Evaluation(metrics, None, None, figures)
    law = truth.select(every)
    metrics["process_mse"] = evaluate.process_mse(counted, law.mean, law.variance)
    metrics["variance_mse"] = evaluate.variance_mse(counted, law.variance)
    ours = evaluate.log_likelihood(predictive, test.targets, test.mask)
    oracle = (truth.log_prob(test.targets) * every).reshape(len(test), -1).sum(-1)
    gap = evaluate.oracle_gap(ours, oracle)
    metrics["oracle_gap"] = gap.mean
    return Evaluation(metrics, gap, oracle.double().mean().item(), figures)


def noise_scores(predictive: Predictive, test: Data) -> dict[str, float]:
    """What is left on inputs with noise: accuracy, log-likelihood, ECE and, of several draws, PAvPU."""
    assert isinstance(predictive, CategoricalPredictive)
    found = evaluate.classification(predictive, test.targets)
    names = ("accuracy", "log_likelihood", "ece", "pavpu")
    return {f"{name}/noisy": found[name] for name in names if name in found}


def _detected(predictive: Predictive, outsiders: Mapping[str, Predictive], draws: int) -> dict[str, float]:
    """How well uncertainty tells other inputs from test inputs: the total, and the epistemic if draws can differ."""
    metrics: dict[str, float] = {}
    for name, outsider in outsiders.items():
        found = evaluate.detection(predictive.total.flatten(), outsider.total.flatten())
        metrics |= {f"{metric}/{name}": value for metric, value in found.items()}
        if draws > 1:
            familiar, foreign = predictive.epistemic.flatten(), outsider.epistemic.flatten()
            metrics[f"auroc_epistemic/{name}"] = evaluate.auroc(familiar, foreign)
            metrics[f"fpr95_epistemic/{name}"] = evaluate.fpr_at_95_tpr(familiar, foreign)
    return metrics


def _left_over(
    predictive: CategoricalPredictive, targets: Tensor, outsiders: Mapping[str, Predictive]
) -> dict[str, float]:
    """Area under the risk-coverage curve of test inputs and outsiders together: any answer to an outsider is wrong."""
    wrong = (predictive.labels != targets).double().flatten()
    metrics = {}
    for name, outsider in outsiders.items():
        loss = torch.cat([wrong, wrong.new_ones(outsider.total.numel())])
        metrics[f"aurc/{name}"] = evaluate.aurc(torch.cat([predictive.total.flatten(), outsider.total.flatten()]), loss)
        if len(predictive.log_probs) > 1:
            spread = torch.cat([predictive.epistemic.flatten(), outsider.epistemic.flatten()])
            metrics[f"aurc_epistemic/{name}"] = evaluate.aurc(spread, loss)
    return metrics


def entropies(sets: Mapping[str, Predictive], bins: int = 30) -> dict[str, Any]:
    """Histograms of total uncertainty of several sets, from 0 to that of the uniform distribution."""
    classes = next(iter(sets.values())).probs.shape[-1]  # type: ignore[attr-defined]
    edges = torch.linspace(0, float(torch.tensor(float(classes)).log()), bins + 1)
    counts = {
        name: torch.histogram(p.total.flatten().cpu().float().clamp(0, float(edges[-1])), edges)[0].int().tolist()
        for name, p in sets.items()
    }
    return {"edges": rounded(edges), "sets": counts}


def _examples(predictive: CategoricalPredictive, test: Data, count: int = 8) -> dict[str, Any]:
    images = test.inputs
    assert isinstance(images, Tensor)
    order = predictive.total.argsort()

    def show(index: Tensor) -> list[dict[str, Any]]:
        return [
            {
                "image": rounded(images[i, 0]),
                "label": int(test.targets[i]),
                "predicted": int(predictive.labels[i]),
                "entropy": round(float(predictive.total[i]), 4),
            }
            for i in index.tolist()
        ]

    return {"highest": show(order.flip(0)[:count]), "lowest": show(order[:count])}


def rounded(values: Tensor) -> Any:
    """The values rounded to four decimals, more than a figure shows, as nested lists."""
    return torch.round(values.detach().double().cpu(), decimals=4).tolist()

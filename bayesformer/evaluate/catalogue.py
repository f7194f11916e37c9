"""The names of all scalar metrics: how a table heads them, which direction is better, what they mean."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from bayesformer.core.errors import unknown_name

Better: TypeAlias = Literal["higher", "lower", "none"]
"""Which way a metric improves; "none" is information that ranks nobody."""


@dataclass(frozen=True)
class Metric:
    """One scalar metric as a report shows it."""

    name: str
    """Key in a result."""
    label: str
    """Heading of a column, with its unit."""
    better: Better
    """Direction of improvement."""
    help: str
    """One sentence for a reader who does not know it."""


_ALL = (
    Metric(
        "log_likelihood",
        "Log-likelihood, nats",
        "higher",
        "Log of the averaged predictive probability or density of an example, mean over examples.",
    ),
    Metric("accuracy", "Accuracy", "higher", "Share of questions whose most probable class is right."),
    Metric("f1_macro", "F1 macro", "higher", "F1 of every class that occurs, averaged with equal weight."),
    Metric("f1_micro", "F1 micro", "higher", "F1 of the pooled counts; equals the accuracy."),
    Metric("f1_weighted", "F1 weighted", "higher", "F1 of every class, weighted by its number of targets."),
    Metric("matthews", "Matthews", "higher", "Correlation of the answered class with the right one, -1 to 1."),
    Metric("pearson", "Pearson", "higher", "Correlation of the predictive mean with the target, -1 to 1."),
    Metric("spearman", "Spearman", "higher", "Correlation of the ranks of predictive means and targets, -1 to 1."),
    Metric("exact_match", "Exact match", "higher", "Share of answers that equal a true one, word for word."),
    Metric("token_f1", "Token F1", "higher", "F1 of the words that an answer shares with a true one."),
    Metric("ece", "ECE", "lower", "Gap between confidence and accuracy of the top label, equal-width bins."),
    Metric("ece_classwise", "ECE classwise", "lower", "Calibration gap of every class's probability."),
    Metric("ece_adaptive", "ECE adaptive", "lower", "Calibration gap of the top label, equal-mass bins."),
    Metric("brier", "Brier", "lower", "Squared distance of the probabilities to the one-hot truth, 0 to 2."),
    Metric("crps", "CRPS", "lower", "Squared distance of the predictive CDF to the truth, in target units."),
    Metric("rmse", "RMSE", "lower", "Root mean squared error of the predictive mean, in target units."),
    Metric("coverage_90", "90 % coverage", "none", "Share of targets in the central 90 % interval: .9 is right."),
    Metric("coverage_error_90", "90 % coverage error", "lower", "Distance of the 90 % coverage from .9."),
    Metric(
        "process_mse",
        "Process MSE",
        "lower",
        "Squared distance of a model sample to a sample of the true process; perfect is twice its variance.",
    ),
    Metric("variance_mse", "Variance MSE", "lower", "Squared error of the variance against the true process."),
    Metric(
        "oracle_gap",
        "Gap to oracle, nats",
        "higher",
        "Log-likelihood above that of the true process on the same sequences; at most 0 up to noise.",
    ),
    Metric("auroc", "AUROC", "higher", "Chance that a foreign input is more uncertain than a familiar one."),
    Metric(
        "auroc_epistemic",
        "AUROC by epistemic",
        "higher",
        "The same by the epistemic part of the uncertainty alone; needs more than one draw.",
    ),
    Metric("aupr", "AUPR", "higher", "Average precision of uncertainty as a detector of foreign inputs."),
    Metric("fpr95", "FPR at 95 % TPR", "lower", "False alarms when 95 % of the foreign inputs are found."),
    Metric(
        "fpr95_epistemic", "FPR95 by epistemic", "lower", "The same by the epistemic part of the uncertainty alone."
    ),
    Metric(
        "tree_accuracy",
        "Tree accuracy",
        "higher",
        "Accuracy of the best single threshold on the uncertainty on the very examples it was fitted to; at least the "
        "share of the larger set.",
    ),
    Metric(
        "stump_accuracy",
        "Stump accuracy",
        "higher",
        "Balanced held-out accuracy of one learnt threshold on the uncertainty; chance is .5.",
    ),
    Metric(
        "aurc",
        "AURC",
        "lower",
        "Error left when only the most certain are answered, over all coverages; of a set of foreign inputs: with them "
        "among the questions, every answer to one of them wrong.",
    ),
    Metric("aurc_epistemic", "AURC by epistemic", "lower", "The same, certain by the epistemic part alone."),
    Metric("pavpu", "PAvPU", "higher", "Share of answers that are right and certain, or wrong and uncertain."),
    Metric("rhat", "R-hat", "none", "Disagreement of chains in what they predict, at its worst; 1 is agreement."),
    Metric("ess", "ESS", "none", "Independent draws that a chain's predictions are worth, in the median."),
    Metric(
        "wasserstein",
        "Distance to posterior",
        "lower",
        "Wasserstein-2 distance of function values to the reference posterior's, in standard deviations of that one.",
    ),
    Metric(
        "mean_error",
        "Error of the mean",
        "lower",
        "Distance of the mean function to the reference posterior's, in standard deviations of that one.",
    ),
    Metric(
        "spread_ratio",
        "Ratio of spreads",
        "none",
        "Epistemic standard deviation over the reference posterior's, in the median: 1 is right.",
    ),
    Metric(
        "spread_error",
        "Error of the spread",
        "lower",
        "Distance of the ratio of spreads from 1, as a factor: |log of it|.",
    ),
    Metric(
        "rank_error",
        "Error of ranks",
        "lower",
        "How far ranks of function values in the reference posterior are from uniform: 0 to .5.",
    ),
    Metric(
        "agreement",
        "Agreement",
        "higher",
        "Share of inputs whose most probable class is the reference posterior's.",
    ),
    Metric(
        "total_variation",
        "Total variation",
        "lower",
        "Distance of the predictive probabilities to the reference posterior's: 0 to 1.",
    ),
    Metric("epistemic_share", "Epistemic share", "none", "Part of the uncertainty that more data could remove."),
)

METRICS: dict[str, Metric] = {metric.name: metric for metric in _ALL}


def describe(name: str) -> Metric:
    """The metric of this name; "auroc/noise" is the AUROC of the probe "noise", labelled "AUROC (noise)"."""
    base, slash, probe = name.partition("/")
    if base not in METRICS or (slash and not probe):
        raise unknown_name("metric", name if base in METRICS else base, METRICS)
    metric = METRICS[base]
    return replace(metric, name=name, label=f"{metric.label} ({probe})") if probe else metric

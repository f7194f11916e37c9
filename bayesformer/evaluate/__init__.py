"""Scores of a predictive against targets: pure functions that never see a model.

`classification` and `regression` give every scalar at once; `METRICS` says what each is. Padding leaves
beforehand, through `predictive.select(mask)`.
"""

from bayesformer.evaluate.calibration import (
    coverage_curve,
    ece,
    ece_adaptive,
    ece_classwise,
    interval_coverage,
    reliability,
)
from bayesformer.evaluate.catalogue import METRICS, Metric, describe
from bayesformer.evaluate.detection import aupr, auroc, detection, fpr_at_95_tpr, stump_accuracy, tree_accuracy
from bayesformer.evaluate.language_scores import best_spans, exact_match, matthews, pearson, spearman, token_f1
from bayesformer.evaluate.posterior_distance import (
    Fidelity,
    agreement,
    fidelity,
    function_values,
    rank_error,
    rank_histogram,
    ranks,
    spread_ratio,
    total_variation,
    wasserstein,
)
from bayesformer.evaluate.process import Gap, check_not_above, oracle_gap, process_mse, variance_mse
from bayesformer.evaluate.scores import accuracy, brier, crps, f1, log_likelihood, mse, rmse
from bayesformer.evaluate.selective import RiskCoverage, aurc, eaurc, pavpu, risk_coverage
from bayesformer.evaluate.summary import classification, epistemic_share, mean_log_likelihood, regression

__all__ = [
    "METRICS",
    "Fidelity",
    "Gap",
    "Metric",
    "RiskCoverage",
    "accuracy",
    "agreement",
    "aupr",
    "aurc",
    "auroc",
    "best_spans",
    "brier",
    "check_not_above",
    "classification",
    "coverage_curve",
    "crps",
    "describe",
    "detection",
    "eaurc",
    "ece",
    "ece_adaptive",
    "ece_classwise",
    "epistemic_share",
    "exact_match",
    "f1",
    "fidelity",
    "fpr_at_95_tpr",
    "function_values",
    "interval_coverage",
    "log_likelihood",
    "matthews",
    "mean_log_likelihood",
    "mse",
    "oracle_gap",
    "pavpu",
    "pearson",
    "process_mse",
    "rank_error",
    "rank_histogram",
    "ranks",
    "regression",
    "reliability",
    "risk_coverage",
    "rmse",
    "spearman",
    "spread_ratio",
    "stump_accuracy",
    "token_f1",
    "total_variation",
    "tree_accuracy",
    "variance_mse",
    "wasserstein",
]

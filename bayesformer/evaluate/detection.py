"""Uncertainty as a detector: does the model know which inputs are foreign or ambiguous?

Negatives are in-distribution, positives out-of-distribution; a larger uncertainty should mean positive.
The first three scores depend on the order of the uncertainties only, ties included.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bayesformer.evaluate.checks import check_vector


def detection(in_uncertainty: Tensor, out_uncertainty: Tensor) -> dict[str, float]:
    """All four scores of one pair of sets, by their names in the catalogue."""
    check_vector("in_uncertainty", in_uncertainty, least=2)
    check_vector("out_uncertainty", out_uncertainty, least=2)
    return {
        "auroc": auroc(in_uncertainty, out_uncertainty),
        "aupr": aupr(in_uncertainty, out_uncertainty),
        "fpr95": fpr_at_95_tpr(in_uncertainty, out_uncertainty),
        "stump_accuracy": stump_accuracy(in_uncertainty, out_uncertainty),
    }


def auroc(negatives: Tensor, positives: Tensor) -> float:
    """P(u⁺ > u⁻) + ½ P(u⁺ = u⁻) of a random positive and a random negative; chance is ½."""
    from sklearn.metrics import roc_auc_score

    return float(roc_auc_score(*_labelled(negatives, positives)))


def aupr(negatives: Tensor, positives: Tensor) -> float:
    """Average precision Σ_k (R_k - R_{k-1}) P_k; chance is the share of positives, so sizes matter."""
    from sklearn.metrics import average_precision_score

    return float(average_precision_score(*_labelled(negatives, positives)))


def fpr_at_95_tpr(negatives: Tensor, positives: Tensor) -> float:
    """Share of negatives raised by the highest threshold that still finds 95 % of the positives."""
    from sklearn.metrics import roc_curve

    fpr, tpr, _ = roc_curve(*_labelled(negatives, positives), drop_intermediate=False)
    return float(fpr[(tpr >= 0.95).argmax()])


def stump_accuracy(negatives: Tensor, positives: Tensor) -> float:
    """Accuracy of one learnt threshold: a decision tree of depth 1 on the uncertainty.

    Fitted on the even positions of each set and tested on the odd ones: deterministic, and both halves hold
    both sets in proportion. The two sets weigh the same in the fit and in the accuracy whatever their sizes,
    so chance is ½. The tree learns the direction too: a detector that is always wrong scores 1, not 0.
    """
    from sklearn.metrics import balanced_accuracy_score
    from sklearn.tree import DecisionTreeClassifier

    check_vector("negatives", negatives, least=2)
    check_vector("positives", positives, least=2)
    truth, score = _labelled(negatives[::2], positives[::2])
    tree = DecisionTreeClassifier(max_depth=1, class_weight="balanced", random_state=0)
    tree.fit(score[:, None], truth)
    truth, score = _labelled(negatives[1::2], positives[1::2])
    return float(balanced_accuracy_score(truth, tree.predict(score[:, None])))


def tree_accuracy(negatives: Tensor, positives: Tensor) -> float:
    """Accuracy of the decision tree of depth 1 that fits all examples best, on these very examples.

    At least the share of the larger set, and optimistic: `stump_accuracy` is the honest one. For comparison with papers
    that report it.
    """
    from sklearn.tree import DecisionTreeClassifier

    truth, score = _labelled(negatives, positives)
    tree = DecisionTreeClassifier(max_depth=1, random_state=0).fit(score[:, None], truth)
    return float((tree.predict(score[:, None]) == truth).mean())


def _labelled(negatives: Tensor, positives: Tensor) -> tuple[Any, Any]:
    """Labels 0 and 1 and uncertainties of both sets, as scikit-learn takes them."""
    check_vector("negatives", negatives)
    check_vector("positives", positives)
    score = torch.cat([negatives.detach().double(), positives.detach().double()])
    truth = torch.arange(len(score)) >= len(negatives)
    return truth.long().numpy(), score.cpu().numpy()

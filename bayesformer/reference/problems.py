"""All reference problems by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from bayesformer.core.errors import unknown_name
from bayesformer.reference.causal_series import CausalSeries
from bayesformer.reference.digits_patches import DigitsPatches
from bayesformer.reference.gap_network import GapNetwork
from bayesformer.reference.linear_regression import LinearRegression
from bayesformer.reference.logistic_regression import LogisticRegression
from bayesformer.reference.problem_kind import ReferenceProblem
from bayesformer.reference.random_features import RandomFeatures
from bayesformer.reference.sentence_head import SentenceHead

PROBLEMS: dict[str, Callable[[], ReferenceProblem]] = {
    **{
        f"linear-n{examples}-k{condition}": partial(LinearRegression, examples, float(condition))
        for examples in (200, 1000, 5000)
        for condition in (10, 1000)
    },
    "random-features": RandomFeatures,
    "logistic": LogisticRegression,
    "gap-mlp": GapNetwork,
    "causal-series": CausalSeries,
    "digits-vit": DigitsPatches,
    "sentence-head": SentenceHead,
}


def problem_of(name: str) -> ReferenceProblem:
    """The problem of this name; an unknown one is an error that names the nearest."""
    if name not in PROBLEMS:
        raise unknown_name("reference problem", name, PROBLEMS)
    return PROBLEMS[name]()

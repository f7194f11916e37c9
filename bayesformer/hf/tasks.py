"""Which likelihood belongs to the head of a Hugging Face model."""

from __future__ import annotations

from typing import Any

from torch import nn

from bayesformer.likelihoods import Categorical, Gaussian, Likelihood, NextToken
from bayesformer.likelihoods.language import is_causal_language_model, unwrapped

CLASSES = (
    "SequenceClassification",
    "TokenClassification",
    "ImageClassification",
    "MultipleChoice",
    "QuestionAnswering",
)


def likelihood_of(model: nn.Module) -> Likelihood:
    """The likelihood whose negative log is the loss that the model itself computes, told by its class and settings.

    Regression heads (problem_type="regression", or one label) get a Gaussian of scale 1, as their squared error has:
    give `likelihood=` to choose another scale.
    """
    base: Any = unwrapped(model)
    name, config = type(base).__name__, getattr(base, "config", None)
    if is_causal_language_model(base):
        return NextToken()
    if "SequenceClassification" in name and (
        getattr(config, "problem_type", None) == "regression" or getattr(config, "num_labels", None) == 1
    ):
        return Gaussian(1.0)
    if any(kind in name for kind in CLASSES):
        return Categorical()
    raise ValueError(f"likelihood must be given for a {name}; it can be told for causal language models and {CLASSES}.")

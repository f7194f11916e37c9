"""Which likelihood belongs to the head of a Hugging Face model."""

from __future__ import annotations

from typing import Any

from torch import nn

from bayesformer.likelihoods import Bernoulli, Categorical, Gaussian, Likelihood, NextToken
from bayesformer.likelihoods.language import generates_from_labels, is_causal_language_model, unwrapped

WHOLE = ("SequenceClassification", "ImageClassification")
CLASSES = ("TokenClassification", "MultipleChoice", "QuestionAnswering", "MaskedLM")


PROBLEMS: dict[str, Likelihood] = {  # `problem_type` of classifiers of whole texts and images
    "regression": Gaussian(1.0),
    "single_label_classification": Categorical(),
    "multi_label_classification": Bernoulli(),
}


def likelihood_of(model: nn.Module) -> Likelihood:
    """The likelihood whose negative log is the loss that the model itself computes, told by its class and settings.

    Classifiers of texts and images go by `problem_type`; where that is not set, one label is regression and several are
    classes. Regression heads get a Gaussian of scale 1, as their squared error has: `likelihood=` chooses another.
    """
    base: Any = unwrapped(model)
    name, config = type(base).__name__, getattr(base, "config", None)
    if is_causal_language_model(base):
        return NextToken()
    if any(kind in name for kind in WHOLE):
        single = getattr(config, "num_labels", None) == 1
        told = getattr(config, "problem_type", None)
        return PROBLEMS[told or ("regression" if single else "single_label_classification")]
    if generates_from_labels(base) or any(kind in name for kind in CLASSES):
        return Categorical()
    raise ValueError(
        f"likelihood must be given for a {name}; it can be told for causal and encoder-decoder language models and "
        f"{(*WHOLE, *CLASSES)}."
    )

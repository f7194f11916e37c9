"""Scores of language tasks: correlations, and answers that are pieces of a text."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from bayesformer.evaluate.checks import check_classes, check_same_shape, check_values
from bayesformer.likelihoods.predictive import CategoricalPredictive, GaussianPredictive

ARTICLES = re.compile(r"\b(a|an|the)\b")
PUNCTUATION = str.maketrans("", "", string.punctuation)


def matthews(predictive: CategoricalPredictive, targets: Tensor) -> float:
    """Correlation of the most probable class with the target, -1 to 1 (Matthews 1975); 0 if either is constant."""
    from sklearn.metrics import matthews_corrcoef

    check_classes(predictive, targets)
    truth, labels = targets.long().flatten().cpu().numpy(), predictive.labels.flatten().cpu().numpy()
    return float(matthews_corrcoef(truth, labels))


def pearson(predictive: GaussianPredictive, targets: Tensor) -> float:
    """Correlation of the predictive mean with the targets, -1 to 1; NaN if either is constant."""
    check_values(predictive, targets)
    return _correlation(predictive.mean.double().flatten(), targets.double().flatten())


def spearman(predictive: GaussianPredictive, targets: Tensor) -> float:
    """Correlation of the ranks of predictive means and targets, -1 to 1; ties share their mean rank."""
    from scipy.stats import rankdata

    check_values(predictive, targets)
    ranks = [torch.from_numpy(rankdata(x.double().flatten().cpu().numpy())) for x in (predictive.mean, targets)]
    return _correlation(*ranks)


def _correlation(a: Tensor, b: Tensor) -> float:
    a, b = a - a.mean(), b - b.mean()
    return float((a * b).sum() / (a.square().sum() * b.square().sum()).sqrt())


def normalised_answer(text: str) -> str:
    """Lower case without punctuation, articles and spare spaces, as the SQuAD evaluation compares (Rajpurkar 2016)."""
    return " ".join(ARTICLES.sub(" ", text.lower().translate(PUNCTUATION)).split())


def exact_match(answers: Sequence[str], truths: Sequence[Sequence[str]]) -> float:
    """Share of answers that equal one of the true ones, both normalised."""
    _check_answers(answers, truths)
    hits = (normalised_answer(a) in map(normalised_answer, t) for a, t in zip(answers, truths, strict=True))
    return sum(hits) / len(answers)


def token_f1(answers: Sequence[str], truths: Sequence[Sequence[str]]) -> float:
    """F1 of the words that an answer shares with a true one, the best of the true ones, averaged over answers."""
    _check_answers(answers, truths)
    best = (max(_overlap(a, one) for one in t) for a, t in zip(answers, truths, strict=True))
    return sum(best) / len(answers)


def _overlap(answer: str, truth: str) -> float:
    ours, theirs = normalised_answer(answer).split(), normalised_answer(truth).split()
    if not ours or not theirs:
        return float(ours == theirs)
    shared = sum((Counter(ours) & Counter(theirs)).values())
    return 2 * shared / (len(ours) + len(theirs))


def _check_answers(answers: Sequence[str], truths: Sequence[Sequence[str]]) -> None:
    if isinstance(answers, str) or not answers or len(answers) != len(truths):
        raise ValueError(
            "answers and truths must be lists of one length, at least 1; got "
            f"{type(answers).__name__} of {len(answers)} and {len(truths)}."
        )
    wrong = next((i for i, t in enumerate(truths) if isinstance(t, str) or not len(t)), None)
    if wrong is not None:
        raise ValueError(
            f"truths must hold a list of at least one true answer each; number {wrong} is {truths[wrong]!r}."
        )


def best_spans(start: Tensor, end: Tensor, allowed: Tensor, longest: int = 30) -> tuple[Tensor, Tensor]:
    """(B,), (B,): first and last positions of the most probable answers in texts of T positions.

    Args:
        start: (B, T), log-probabilities that the answer starts at a position.
        end: (B, T), that it ends there.
        allowed: (B, T), boolean: positions of the text, not of the question or padding.
        longest: positions of an answer, at most.
    """
    check_same_shape("end", end, "start", start)
    check_same_shape("allowed", allowed, "start", start)
    joint = start.unsqueeze(2) + end.unsqueeze(1)  # (B, T, T), from first to last
    places = torch.ones(joint.shape[1:], dtype=torch.bool, device=joint.device).triu().tril(longest - 1)
    joint = joint.masked_fill(~(places & allowed.unsqueeze(2) & allowed.unsqueeze(1)), -torch.inf)
    best = joint.flatten(1).argmax(1)
    return best // joint.shape[2], best % joint.shape[2]

"""Checks that every score makes of its arguments: something to score, equal shapes, no NaN.

A NaN, or shapes that broadcast, would give a plausible but wrong score, so they are refused first, with a
`ValueError` that names the argument, the rule and the value.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bayesformer.likelihoods.predictive import (
    CategoricalPredictive,
    GaussianPredictive,
    Predictive,
    check_not_ahead,
    check_targets_shape,
)


def check_answers(predictive: Predictive, targets: Tensor) -> None:
    """Refuse predictions and targets that do not belong together, for any kind of predictive."""
    if isinstance(predictive, GaussianPredictive):
        check_values(predictive, targets)
    elif isinstance(predictive, CategoricalPredictive):
        check_classes(predictive, targets)
    else:
        check_predictive(predictive)


def check_predictive(predictive: Predictive) -> None:
    """Refuse predictions that hold no question, or NaN, for any kind of predictive."""
    if isinstance(predictive, GaussianPredictive):
        check_gaussian(predictive)
    elif isinstance(predictive, CategoricalPredictive):
        check_categorical(predictive)
    else:
        total = getattr(predictive, "total", None)
        if not isinstance(total, Tensor):
            kind = type(predictive).__name__
            raise ValueError(
                f"predictive must be one, such as a CategoricalPredictive or a GaussianPredictive; got {kind}."
            )
        if not total.numel():
            raise ValueError(f"predictive must hold at least one question; got shape {tuple(total.shape)}.")
        check_finite("predictive.total", total)


def check_classes(predictive: CategoricalPredictive, targets: Tensor) -> None:
    """Refuse anything but class probabilities (L, B, ..., C) with a class number for every question."""
    check_categorical(predictive)
    check_not_ahead(predictive)
    check_targets_shape(targets, predictive.shape)
    # Bernoulli targets arrive as floats 0.0 and 1.0, so the rule is about the value, not the dtype.
    if targets.is_floating_point() and not bool((targets == targets.round()).all()):
        wrong = targets[targets != targets.round()][0].item()
        raise ValueError(f"targets must be whole class numbers; got {wrong}.")
    classes, low, high = predictive.log_probs.shape[-1], int(targets.min()), int(targets.max())
    if low < 0 or high >= classes:
        raise ValueError(
            f"targets must lie in 0..{classes - 1}; got {low}..{high}. Drop padding first: predictive.select(mask)."
        )


def check_values(predictive: GaussianPredictive, targets: Tensor) -> None:
    """Refuse anything but Gaussians (L, B, ..., D) of positive variance with D values for every question."""
    check_gaussian(predictive)
    check_targets_shape(targets, predictive.means.shape[1:])
    check_finite("targets", targets)


def check_categorical(predictive: Predictive) -> None:
    """Raise ValueError unless `predictive` is a CategoricalPredictive whose log_probs (L, B, ..., C) have no NaN.

    -inf is allowed (probability 0). Whether probabilities add up to 1 is not checked.
    """
    if not isinstance(predictive, CategoricalPredictive):
        raise ValueError(f"predictive must be a CategoricalPredictive; got {type(predictive).__name__}.")
    _check_questions(predictive.log_probs, "predictive.log_probs")
    if predictive.log_probs.isnan().any():
        raise ValueError(f"predictive.log_probs must not be NaN; got {_count(predictive.log_probs.isnan())}.")


def check_gaussian(predictive: Predictive) -> None:
    """Refuse anything but finite Gaussians (L, B, ..., D) of positive variance."""
    if not isinstance(predictive, GaussianPredictive):
        raise ValueError(f"predictive must be a GaussianPredictive; got {type(predictive).__name__}.")
    _check_questions(predictive.means, "predictive.means")
    check_finite("predictive.means", predictive.means)
    for name in ("variances", "spreads"):
        values = getattr(predictive, name)
        if values is not None:
            check_same_shape(f"predictive.{name}", values, "predictive.means", predictive.means)
            check_finite(f"predictive.{name}", values)
    if not bool((predictive.widths > 0).all()):
        raise ValueError(f"predictive.widths must be positive; got {predictive.widths.min().item()}.")


def check_mask(mask: Tensor, shape: torch.Size) -> None:
    """Refuse a mask that is not a boolean for every question, or that counts none of them."""
    if mask.dtype != torch.bool:
        raise ValueError(f"mask must be boolean; got {mask.dtype}.")
    if mask.shape != shape:
        raise ValueError(f"mask must have shape {tuple(shape)}; got {tuple(mask.shape)}.")
    if not bool(mask.any()):
        raise ValueError(f"mask must count at least one position; got none of {mask.numel()}.")


def check_vector(name: str, values: Tensor, least: int = 1) -> None:
    """Refuse anything but `least` or more finite numbers in one dimension."""
    if values.dim() != 1:
        raise ValueError(f"{name} must have one dimension; got shape {tuple(values.shape)}.")
    if len(values) < least:
        raise ValueError(f"{name} must hold at least {least} value{'s'[: least > 1]}; got {len(values)}.")
    check_finite(name, values)


def check_same_shape(name: str, values: Tensor, other: str, reference: Tensor) -> None:
    """Refuse two tensors that would silently broadcast."""
    if values.shape != reference.shape:
        raise ValueError(f"{name} must have the shape of {other}, {tuple(reference.shape)}; got {tuple(values.shape)}.")


def check_finite(name: str, values: Tensor) -> None:
    """Refuse values that are NaN or infinite, naming the first."""
    wrong = ~values.isfinite()
    if wrong.any():
        raise ValueError(f"{name} must be finite; got {values[wrong][0].item()} ({_count(wrong)}).")


def check_fraction(name: str, value: float) -> None:
    """Refuse anything but a number strictly between 0 and 1."""
    if not 0 < value < 1:
        raise ValueError(f"{name} must lie strictly between 0 and 1; got {value}.")


def _check_questions(draws: Tensor, name: str) -> None:
    if draws.dim() < 3 or draws.numel() == 0:
        raise ValueError(
            f"{name} must hold at least one draw of one question, (L, B, ..., K); got shape {tuple(draws.shape)}."
        )


def _count(wrong: Tensor) -> str:
    return f"{int(wrong.sum())} of {wrong.numel()}"

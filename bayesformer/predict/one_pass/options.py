"""What the one-pass rule keeps and what it drops."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal, get_args, get_type_hints


@dataclass(frozen=True)
class Settings:
    """Choices of the one-pass rule. The defaults are the cheapest, those of Li et al. (2025).

    On trained transformers its variances are far too small, whatever is chosen here: a few hundredths where tokens are
    averaged (`python -m bayesformer.study.accuracy` measures it). They rank inputs, and `fit_scale` can mend the size.
    predictive="streamlined" has the right size for a few passes more.
    """

    propagate: Literal["diag", "full"] = "diag"
    """what an activation carries: the variance of every value, or the covariance over its last axis (heads apart).
    Convolutions, pooling and functions that move the last axis keep the diagonal in both"""
    layer_norm: Literal["simple", "jacobian"] = "simple"
    """normalisation: statistics taken as constants, or the full Jacobian (RMSNorm as well). With covariances the
    Jacobian matters: what all entries share is then carried, and a constant scale does not remove it"""
    activations: Literal["linear", "exact"] = "linear"
    """element-wise functions: first order at the mean, or exact Gaussian moments for ReLU (first order for others)"""
    queries_keys: Literal["deterministic", "first_order"] = "deterministic"
    """attention weights: computed from the means alone, or with the variance of the logits to first order"""
    tokens: Literal["independent", "shared"] = "independent"
    """noise of a weight at different tokens: independent (cheap), or the same draw wherever the tokens are mixed or
    averaged right after the layer, as values are by attention"""
    kronecker: Literal["exact", "factored"] = "exact"
    """precision B ⊗ A + d I as it is, or (B + √d I) ⊗ (A + √d I) as in the authors' code, which has less variance"""
    correlations: Literal["error", "drop"] = "error"
    """weights correlated across layers, or within a layer in a form without a rule (low rank): refuse, or use their
    variances and the correlations within each layer only"""

    def __post_init__(self) -> None:
        hints = get_type_hints(type(self))
        for field in fields(self):
            value, allowed = getattr(self, field.name), get_args(hints[field.name])
            if value not in allowed:
                raise ValueError(f"{field.name} must be one of {', '.join(map(repr, allowed))}; got {value!r}.")

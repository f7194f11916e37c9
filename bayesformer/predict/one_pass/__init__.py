"""Moments of Gaussian weights carried through one forward pass of the model itself: Li et al. (2025)."""

from bayesformer.predict.one_pass import (  # noqa: F401  (each registers its rules)
    arithmetic,
    attention_rules,
    convolution,
    elementwise,
    known,
    linear,
    norm,
    reduction,
    shape,
)
from bayesformer.predict.one_pass.carrier import NoRuleError, Uncertain, rule
from bayesformer.predict.one_pass.modules import module_rule
from bayesformer.predict.one_pass.options import Settings
from bayesformer.predict.one_pass.predictor import OnePass, one_pass_outputs
from bayesformer.predict.one_pass.scale_fit import ScaleFit, fit_scale, scaled_outputs
from bayesformer.predict.one_pass.sensitivity import input_sensitivity, layer_shares

__all__ = [
    "NoRuleError",
    "OnePass",
    "ScaleFit",
    "Settings",
    "Uncertain",
    "fit_scale",
    "input_sensitivity",
    "layer_shares",
    "module_rule",
    "one_pass_outputs",
    "rule",
    "scaled_outputs",
]

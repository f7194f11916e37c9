"""Mean and covariance of a network's outputs in one forward pass of the model itself."""

from bayesformer.predict.streamlined import (  # noqa: F401  (each registers its rules)
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
from bayesformer.predict.streamlined.carrier import NoRuleError, Uncertain, rule
from bayesformer.predict.streamlined.modules import module_rule
from bayesformer.predict.streamlined.options import Settings
from bayesformer.predict.streamlined.predictor import Streamlined, streamlined_outputs
from bayesformer.predict.streamlined.scale_fit import ScaleFit, fit_scale, scaled_outputs
from bayesformer.predict.streamlined.sensitivity import input_sensitivity, layer_shares

__all__ = [
    "NoRuleError",
    "ScaleFit",
    "Settings",
    "Streamlined",
    "Uncertain",
    "fit_scale",
    "input_sensitivity",
    "layer_shares",
    "module_rule",
    "rule",
    "scaled_outputs",
    "streamlined_outputs",
]

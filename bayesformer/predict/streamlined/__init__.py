"""Mean and covariance of a network's outputs for a few forward passes, right in size on trained networks.

The outputs of a network whose weights are N(θ*, Σ) have covariance M = J Σ Jᵀ to first order. What is exact and what
is approximated depends on how many outputs an example has:

    outputs x positions of an example    rule         how
    all spread is in the last layer      "closed"     closed form from its features, one forward pass
    up to 3                              "exact"      a backward pass per output
    more, at one position                "leading"    3 backward passes, the other outputs by regression on these
    more, at several positions           "draws"      4 draws of the weights give the size, calibration the pattern

One calibration (`Calibration`) on a few inputs gives the pattern of the covariance over outputs, and how far the
linearised variance is from that of draws.
"""

from bayesformer.predict.streamlined.output_calibration import Calibration
from bayesformer.predict.streamlined.rule_settings import RuleSettings
from bayesformer.predict.streamlined.streamliner import Streamliner

__all__ = ["Calibration", "RuleSettings", "Streamliner"]

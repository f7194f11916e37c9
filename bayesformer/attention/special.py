"""Draws from Gamma laws and the KL between them, for every entry of attention, from plain vector operations.

torch's own lgamma and digamma cost ten exponentials per number, its Gamma sampler and implicit gradient fifty each; so
values are computed together with their derivatives here, and a training step with Dirichlet attention takes 1.3 to 1.7
times less. In double precision the Gamma functions are torch's; in single precision they are Stirling series, good to
its last digits. `with_derivatives` makes a value differentiable whose derivatives are known.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from bayesformer.core.compat import transformed
from bayesformer.core.draws import log_uniform_like, normal_like

EULER = 0.5772156649015329
LEAST = -80.0
"""Least log α. Γ(α) draws are then 0 but for one in 10³⁰, while 1/α is still a number in single precision."""


def with_derivatives(value: Tensor, *parts: tuple[Tensor, Tensor]) -> Tensor:
    """A value with the derivatives that are given: pairs of an input and the derivative of the value in it.

    The result is value + Σ slope · (x - x), whose gradient in x is the slope. A value with fewer axes than a slope is a
    sum over the last ones. First derivatives only: asking for second ones is an error.
    """
    value = value.detach()
    if not torch.is_grad_enabled():
        return value
    for x, slope in parts:
        change = slope.detach() * (x - x.detach())
        value = value + (change.flatten(value.dim()).sum(-1) if change.dim() > value.dim() else change)
    if value.requires_grad and not transformed():
        value.register_hook(_refuse_second_derivatives)
    return value


def _refuse_second_derivatives(grad: Tensor) -> None:  # noqa: ARG001
    if torch.is_grad_enabled():
        raise RuntimeError("Dirichlet attention has first derivatives only; got a backward pass that builds a graph.")


class ShiftedGamma:
    """Γ(1 + x) = Γ(z) / p with z = x + 5 and p = (x + 1)(x + 2)(x + 3)(x + 4) = u² - 1, u = x z + 5, for x ≥ 0.

    At z ≥ 5 two terms of Stirling's series are enough; ψ and ψ′ are their derivatives, with q = p′ / p.
    """

    def __init__(self, x: Tensor) -> None:
        self.z = x + 5
        self.i = 1 / self.z
        self.j = self.i * self.i
        self.u = x * self.z + 5
        self.p = self.u * self.u - 1
        self.q = (4 * x + 10) * self.u / self.p

    def tail(self) -> Tensor:
        """log Γ(z) less (z - ½) log z - z + ½ log 2π."""
        return self.i * (1 / 12 - self.j / 360)

    def log_less_digamma(self) -> Tensor:
        """log z - ψ(1 + x), with a series that does not contain log z."""
        return self.q + 0.5 * self.i + self.j * (1 / 12 - self.j / 120)

    def trigamma(self) -> Tensor:
        """ψ′(1 + x), where Σ 1/(x + k)² = q² - p″/p and p″ = 12 u + 10."""
        series = self.i + self.j * (0.5 + self.i * (1 / 6 - self.j / 30))
        return series + self.q * self.q - (12 * self.u + 10) / self.p


def gamma_ratio(x: Tensor, r: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """log Γ(1 + rx) - log Γ(1 + x) + (1 - r) x ψ(1 + x), ψ(1 + rx) - ψ(1 + x), and ψ′(1 + x); 0, 0, ψ′(1) at x = 0.

    In the series log z drops out of the first: with z₀ = rx + 5 for z it is (z₀ - ½) log(z₀/z) - log(p₀/p) and
    differences of powers, plus (1 - r) x (1 + ψ(z) - log z), no two of which are large and nearly equal.
    """
    y = r * x
    if x.dtype == torch.float64:
        digamma = torch.digamma(1 + x)
        value = torch.lgamma(1 + y) - torch.lgamma(1 + x) + (x - y) * digamma
        return value, torch.digamma(1 + y) - digamma, torch.polygamma(1, 1 + x)
    s, s0 = ShiftedGamma(x), ShiftedGamma(y)
    log_z, below = (s0.z / s.z).log(), s.log_less_digamma()
    value = (x - y) * (1 - below) + (s0.z - 0.5) * log_z - (s0.p / s.p).log() + s0.tail() - s.tail()
    return value, log_z + below - s0.log_less_digamma(), s.trigamma()


def log_gamma_draw(log_alpha: Tensor) -> tuple[Tensor, Tensor]:
    """log X for X ~ Gamma(α, 1), and its derivative in log α at fixed noise; log α ≥ -80.

        X = G U₁^(1/α) U₂^(1/(α+1)),   G ~ Gamma(α + 2),   U uniform

    G follows its quantiles, see `log_quantile`, so that its derivative at fixed noise is the implicit one,
    dG/dα = -(∂F/∂α)/f, of Figurnov et al. (2018).
    """
    alpha = log_alpha.exp()
    log_g, slope = log_quantile(alpha, normal_like(alpha))
    inverse = 1 / (alpha + 1)
    first = log_uniform_like(alpha) * (-log_alpha).exp()
    second = log_uniform_like(alpha) * inverse
    return log_g + first + second, alpha * (slope - second * inverse) - first


def log_surrogate_draw(log_alpha: Tensor) -> Tensor:
    """log X by the approximate inverse CDF, (log U + log Γ(1 + α)) / α.

    F(x) ≈ x^α / Γ(1 + α), the first term of the CDF at 0. Good for α well below 1 only.
    """
    alpha = log_alpha.exp()
    # At tiny α rounding in log Γ(1 + α) ≈ -γα could outweigh a log U near 0, and 1/α would blow it up.
    log_gamma = torch.where(alpha < 1e-4, -EULER * alpha, torch.lgamma(1 + alpha))
    return (log_uniform_like(log_alpha) + log_gamma) * (-log_alpha).exp()


# By `python -m bayesformer.study.quantile`: p₃/x, p₄, p₅/x and p₆ as polynomials in x², lowest power first.
THIRD = -0.248844, -0.091236
FOURTH = 0.587632, 0.184193, 0.089506
FIFTH = -0.337169, -0.020590, -0.005023
SIXTH = -0.765233, 0.482208, -0.243492, -0.021988
FARTHEST = 5.5  # x is beyond it once in 10⁷ draws; further out the polynomials leave the quantiles


def log_quantile(alpha: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """log G for G ~ Gamma(α + 2, 1) at the quantile of a standard normal x, and d log G / dα = (1 - 1.5 c y_c / y) / d.

        G = d y³,   d = α + 2 - 1/3,   c = 1/√(9d)
        y = 1 + c x + c³ p₃(x) + c⁴ p₄(x) + c⁵ p₅(x) + c⁶ p₆(x)

    The first two terms of y are the map of Marsaglia & Tsang (2000), which they correct by rejection. The others have
    the form of the expansion of the quantile function of G in c, with coefficients fitted to it, which makes rejection
    unnecessary: the CDF of G errs by 10⁻⁴ at most.
    """
    x = x.clamp(-FARTHEST, FARTHEST)
    d = alpha + (2 - 1 / 3)
    h = 1 / (9 * d)  # c²
    cx, h2, t = h.sqrt() * x, h * h, x * x
    third, fifth = h * polynomial(THIRD, t), h2 * polynomial(FIFTH, t)  # over c x
    fourth, sixth = h2 * polynomial(FOURTH, t), h2 * h * polynomial(SIXTH, t)
    y = 1 + cx * (1 + third + fifth) + fourth + sixth
    c_y_c = cx * (1 + 3 * third + 5 * fifth) + 4 * fourth + 6 * sixth  # c ∂y/∂c
    return (d * y * y * y).log(), (1 - 1.5 * c_y_c / y) / d


def polynomial(coefficients: Sequence[float], t: Tensor) -> Tensor:
    """c₀ + c₁ t + c₂ t² + …, by Horner's rule, for at least two coefficients."""
    *rest, first, last = coefficients
    value = last * t + first
    for coefficient in reversed(rest):
        value = value * t + coefficient
    return value

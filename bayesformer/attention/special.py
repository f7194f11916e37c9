"""Gamma functions and Gamma draws for every entry of attention, in logarithms and from plain vector operations.

torch's own lgamma and digamma cost ten exponentials per number, its Gamma sampler and implicit gradient fifty each.
In double precision the Gamma functions are torch's; in single precision they are Stirling series, good to its last
digits.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from bayesformer.attention.fused import in_pieces
from bayesformer.attention.noise import log_uniform, normal

EULER = 0.5772156649015329
FLOOR = -80.0
"""Least log α. Γ(α) draws are then 0 but for one in 10³⁰, while 1/α is still a number in single precision."""


def gammas(x: Tensor) -> tuple[Tensor, Tensor]:
    """log Γ(1 + x) and ψ(1 + x) for 0 ≤ x < 10⁹.

    Γ(1 + x) = Γ(z) / p with z = x + 5 and p = (x + 1)(x + 2)(x + 3)(x + 4) = u² - 1, u = x z + 5. At z ≥ 5 two terms of
    Stirling's series are enough; ψ is their derivative.
    """
    if x.dtype == torch.float64:
        return torch.lgamma(1 + x), torch.digamma(1 + x)
    return _series(_Shifted(x))


def gammas_and_trigamma(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The same and ψ′(1 + x), where Σ 1/(x + k)² = (p′/p)² - p″/p."""
    if x.dtype == torch.float64:
        return torch.lgamma(1 + x), torch.digamma(1 + x), torch.polygamma(1, 1 + x)
    s = _Shifted(x)
    powers = (s.j / 6).addcmul_(s.j, s.j, value=-1 / 30).add_(s.i, alpha=0.5).add_(1).mul_(s.i)
    trigamma = powers.addcmul_(s.q, s.q, value=4).sub_((12 * s.u).add_(10).div_(s.p))
    return *_series(s), trigamma


class _Shifted:
    """z, 1/z and its square, u, p, and q with p′/p = 2q."""

    def __init__(self, x: Tensor) -> None:
        self.z = x + 5
        self.i = self.z.reciprocal()
        self.j = self.i * self.i
        self.u = (x * self.z).add_(5)
        self.p = (self.u * self.u).sub_(1)
        self.q = (x + self.z).mul_(self.u).div_(self.p)


def _series(s: _Shifted) -> tuple[Tensor, Tensor]:
    log_z = s.z.log()
    log_gamma = (log_z - 1).mul_(s.z).sub_(log_z, alpha=0.5).sub_(s.p.log()).add_(0.5 * math.log(2 * math.pi))
    log_gamma.addcmul_(s.i, s.j, value=-1 / 360).add_(s.i, alpha=1 / 12)
    digamma = log_z.sub_(s.i, alpha=0.5).sub_(s.j, alpha=1 / 12).addcmul_(s.j, s.j, value=1 / 120)
    return log_gamma, digamma.sub_(s.q, alpha=2)


def log_gamma_draw(log_alpha: Tensor) -> tuple[Tensor, Tensor]:
    """log X for X ~ Gamma(α, 1), and its derivative in log α at fixed noise.

        X = G U₁^(1/α) U₂^(1/(α+1)) U₃^(1/(α+2)),   G ~ Gamma(α + 3),   U uniform

        G = d y³,   d = α + 3 - 1/3,   c = 1/√(9d),   x ~ N(0, 1)
        y = 1 + c x - c³ (3x + x³)/12 + c⁴ (x⁴ + 4x² + 8)/15 - c⁵ (15x + 4x³ + x⁵)/32

    The first two terms of y are the map of Marsaglia & Tsang (2000), which they correct by rejection. The others
    continue the expansion of the quantile function of G in c, which makes rejection unnecessary: the CDF of G errs
    by 2·10⁻⁴ at α = 0, by 4·10⁻⁵ at α = 1. Since y follows quantiles, its derivative at fixed x is the implicit one,
    dG/dα = -(∂F/∂α)/f, of Figurnov et al. (2018).
    """
    noise = normal(log_alpha), *(log_uniform(log_alpha) for _ in range(3))
    value, slope = in_pieces(_log_gamma, log_alpha, *noise)
    return value, slope


def _log_gamma(log_alpha: Tensor, x: Tensor, *log_u: Tensor) -> tuple[Tensor, Tensor]:
    alpha = log_alpha.exp()
    value, slope = _log_quantile(alpha, x)
    slope.mul_(alpha)
    for shift, log_uniforms in enumerate(log_u):
        inverse = (alpha + shift).reciprocal_()
        boost = log_uniforms.mul_(inverse)
        value.add_(boost)
        slope.sub_(boost if shift == 0 else boost.mul_(inverse).mul_(alpha))
    return value, slope


def _log_quantile(alpha: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """log G, and d log G / dα = 9c² - 13.5 c³ (∂y/∂c) / y."""
    d = alpha + (3 - 1 / 3)
    c2, t = (9 * d).reciprocal_(), x * x
    c, c4 = c2.sqrt(), c2 * c2
    third = (t + 3).mul_(c2)  # times -c x / 12 in y
    quartic = t.add_(4).mul_(x).mul_(x)  # x⁴ + 4x²
    fifth = (quartic + 15).mul_(c4)  # times -c x / 32
    fourth = quartic.add_(8).mul_(c4)  # times 1 / 15
    y = (third / -12).sub_(fifth, alpha=1 / 32).add_(1).mul_(x).mul_(c).add_(fourth, alpha=1 / 15).add_(1)
    y_c = third.mul_(-1 / 4).sub_(fifth, alpha=5 / 32).add_(1).mul_(x).mul_(c).add_(fourth, alpha=4 / 15)  # times c
    slope = y_c.div_(y).mul_(-1.5).add_(1).mul_(c2).mul_(9)
    return y.log_().mul_(3).add_(d.log_()), slope


def log_surrogate_draw(log_alpha: Tensor) -> tuple[Tensor, Tensor]:
    """The approximate inverse CDF: log X = (log U + log Γ(α + 1)) / α, and its derivative in log α.

    F(x) ≈ x^α / Γ(α + 1), the first term of the CDF at 0. Good for α well below 1 only.
    """
    value, slope = in_pieces(_log_surrogate, log_alpha, log_uniform(log_alpha))
    return value, slope


def _log_surrogate(log_alpha: Tensor, log_u: Tensor) -> tuple[Tensor, Tensor]:
    alpha = log_alpha.exp()
    log_gamma, digamma = gammas(alpha)
    # At tiny α rounding in log Γ(1 + α) ≈ -γα could outweigh a log U near 0, and 1/α would blow it up.
    log_gamma = torch.where(alpha < 1e-4, alpha * -EULER, log_gamma)
    value = log_u.add_(log_gamma).div_(alpha)
    return value, digamma.sub_(value)

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
    return *_series(s), _trigamma(s)


def gamma_ratio(x: Tensor, r: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """log Γ(1 + rx) - log Γ(1 + x) + (1 - r) x ψ(1 + x), ψ(1 + rx) - ψ(1 + x), and ψ′(1 + x).

    In the series log z drops out of the first: with z₀ = rx + 5 for z it is (z₀ - ½) log(z₀/z) - log(p₀/p) and
    differences of powers, plus (1 - r) x (1 + ψ(z) - log z), no two of which are large and nearly equal.
    """
    rest = x - r * x
    if x.dtype == torch.float64:
        log_gamma, digamma, trigamma = gammas_and_trigamma(x)
        log_gamma0, digamma0 = gammas(r * x)
        return log_gamma0 - log_gamma + rest * digamma, digamma0 - digamma, trigamma
    s, s0 = _Shifted(x), _Shifted(x - rest)
    log_z, less_i = (s0.z / s.z).log_(), s0.i - s.i
    one_more = (s.j / 120).sub_(1 / 12).mul_(s.j).sub_(s.i, alpha=0.5).sub_(s.q, alpha=2).add_(1)
    value = (s0.z - 0.5).mul_(log_z).addcmul_(rest, one_more).sub_((s0.p / s.p).log_()).add_(less_i, alpha=1 / 12)
    value.sub_((s0.i * s0.j).sub_(s.i * s.j), alpha=1 / 360)  # exactly 0 at x = 0, as all the rest
    digamma = log_z.sub_(less_i, alpha=0.5).sub_(s0.j, alpha=1 / 12).add_(s.j, alpha=1 / 12)
    digamma.addcmul_(s0.j, s0.j, value=1 / 120).addcmul_(s.j, s.j, value=-1 / 120)
    return value, digamma.sub_(s0.q, alpha=2).add_(s.q, alpha=2), _trigamma(s)


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


def _trigamma(s: _Shifted) -> Tensor:
    powers = (s.j / 6).addcmul_(s.j, s.j, value=-1 / 30).add_(s.i, alpha=0.5).add_(1).mul_(s.i)
    return powers.addcmul_(s.q, s.q, value=4).sub_((12 * s.u).add_(10).div_(s.p))


def log_gamma_draw(log_alpha: Tensor) -> tuple[Tensor, Tensor]:
    """log X for X ~ Gamma(α, 1), and its derivative in log α at fixed noise.

        X = G U₁^(1/α) U₂^(1/(α+1)),   G ~ Gamma(α + 2),   U uniform

        G = d y³,   d = α + 2 - 1/3,   c = 1/√(9d),   x ~ N(0, 1)
        y = 1 + c x + c³ p₃(x) + c⁴ p₄(x) + c⁵ p₅(x) + c⁶ p₆(x)

    The first two terms of y are the map of Marsaglia & Tsang (2000), which they correct by rejection. The others have
    the form of the expansion of the quantile function of G in c, with coefficients fitted to it, which makes rejection
    unnecessary: the CDF of G errs by 10⁻⁴ at most. Since y follows quantiles, its derivative at fixed x is the
    implicit one, dG/dα = -(∂F/∂α)/f, of Figurnov et al. (2018).
    """
    noise = normal(log_alpha), log_uniform(log_alpha), log_uniform(log_alpha)
    value, slope = in_pieces(_log_gamma, log_alpha, *noise)
    return value, slope


def _log_gamma(log_alpha: Tensor, x: Tensor, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    alpha = log_alpha.clamp_min(FLOOR).exp_()
    value, slope = _log_quantile(alpha, x)
    boost = first.div_(alpha)
    value.add_(boost)
    inverse = (alpha + 1).reciprocal_()
    other = second.mul_(inverse)
    value.add_(other)
    return value, slope.addcmul_(other, inverse, value=-1).mul_(alpha).sub_(boost)


# By `python -m bayesformer.study.quantile`: p₃/x, p₄, p₅/x and p₆ as polynomials in x², lowest power first.
THIRD = -0.248844, -0.091236
FOURTH = 0.587632, 0.184193, 0.089506
FIFTH = -0.337169, -0.020590, -0.005023
SIXTH = -0.765233, 0.482208, -0.243492, -0.021988
FARTHEST = 5.5  # x is beyond it once in 10⁷ draws; further out the polynomials leave the quantiles


def _log_quantile(alpha: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """log G, and d log G / dα = 9c² (1 - 1.5 c (∂y/∂c) / y)."""
    d, x = alpha + (2 - 1 / 3), x.clamp(-FARTHEST, FARTHEST)
    c2, t = (9 * d).reciprocal_(), x * x
    c4, cx = c2 * c2, c2.sqrt().mul_(x)
    third, fifth = _polynomial(THIRD, t).mul_(c2), _polynomial(FIFTH, t).mul_(c4)  # times c x
    fourth, sixth = _polynomial(FOURTH, t).mul_(c4), _polynomial(SIXTH, t).mul_(c4).mul_(c2)
    y = (third + fifth).add_(1).mul_(cx).add_(fourth).add_(sixth).add_(1)
    y_c = third.mul_(3).add_(fifth, alpha=5).add_(1).mul_(cx).add_(fourth, alpha=4).add_(sixth, alpha=6)  # times c
    slope = y_c.div_(y).mul_(-1.5).add_(1).div_(d)
    return y.log_().mul_(3).add_(d.log_()), slope


def _polynomial(coefficients: tuple[float, ...], t: Tensor) -> Tensor:
    *rest, last = coefficients
    value = t * last
    for coefficient in rest[:0:-1]:
        value.add_(coefficient).mul_(t)
    return value.add_(rest[0])


def log_surrogate_draw(log_alpha: Tensor) -> tuple[Tensor, Tensor]:
    """The approximate inverse CDF: log X = (log U + log Γ(α + 1)) / α, and its derivative in log α.

    F(x) ≈ x^α / Γ(α + 1), the first term of the CDF at 0. Good for α well below 1 only.
    """
    value, slope = in_pieces(_log_surrogate, log_alpha, log_uniform(log_alpha))
    return value, slope


def _log_surrogate(log_alpha: Tensor, log_u: Tensor) -> tuple[Tensor, Tensor]:
    alpha = log_alpha.clamp_min(FLOOR).exp_()
    log_gamma, digamma = gammas(alpha)
    # At tiny α rounding in log Γ(1 + α) ≈ -γα could outweigh a log U near 0, and 1/α would blow it up.
    log_gamma = torch.where(alpha < 1e-4, alpha * -EULER, log_gamma)
    value = log_u.add_(log_gamma).div_(alpha)
    return value, digamma.sub_(value)

"""Gamma functions and Gamma draws for every entry of attention, in logarithms and from plain vector operations.

torch's own lgamma and digamma cost ten exponentials per number, its Gamma sampler and implicit gradient fifty each.
In double precision the Gamma functions are torch's; in single precision they are Stirling series, good to its last
digits.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from bayesformer.core.draws import log_uniform_like, normal_like
from bayesformer.core.vectors import transformed

EULER = 0.5772156649015329
LEAST = math.exp(-80.0)
"""Least α. Γ(α) draws are then 0 but for one in 10³⁰, while 1/α is still a number in single precision."""


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
    return *_series(s), s.trigamma()


def gamma_ratio(x: Tensor, r: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """log Γ(1 + rx) - log Γ(1 + x) + (1 - r) x ψ(1 + x), ψ(1 + rx) - ψ(1 + x), and ψ′(1 + x).

    In the series log z drops out of the first: with z₀ = rx + 5 for z it is (z₀ - ½) log(z₀/z) - log(p₀/p) and
    differences of powers, plus (1 - r) x (1 + ψ(z) - log z), no two of which are large and nearly equal.
    """
    less = r * x
    value = x - less
    if x.dtype == torch.float64:
        log_gamma, digamma, trigamma = gammas_and_trigamma(x)
        log_gamma0, digamma0 = gammas(less)
        return log_gamma0 - log_gamma + value * digamma, digamma0 - digamma, trigamma
    s, s0 = _Shifted(x), _Shifted(less)
    below, below0, tail = s.below_log(), s0.below_log(), s0.tail().sub_(s.tail())
    log_z = torch.div(s0.z, s.z, out=over(less)).log_()
    value.addcmul_(value, below, value=-1).addcmul_(s0.z.sub_(0.5), log_z).sub_(s0.p.div_(s.p).log_())
    return value.add_(tail), log_z.add_(below.sub_(below0)), s.trigamma()  # exactly 0, 0 and ψ′(1) at x = 0


class _Shifted:
    """z, 1/z and its square, u, p, and q = p′/p."""

    def __init__(self, x: Tensor) -> None:
        self.z = x + 5
        self.i = self.z.reciprocal()
        self.j = self.i * self.i
        self.u = plus_product(5.0, x, self.z)
        self.p = plus_product(-1.0, self.u, self.u)
        self.q = polynomial((10.0, 4.0), x).mul_(self.u).div_(self.p)

    def tail(self) -> Tensor:
        """log Γ(z) less (z - ½) log z - z + ½ log 2π."""
        return polynomial((1 / 12, -1 / 360), self.j).mul_(self.i)

    def below_log(self) -> Tensor:
        """log z - ψ(1 + x)."""
        return polynomial((1 / 12, -1 / 120), self.j).mul_(self.j).add_(self.i, alpha=0.5).add_(self.q)

    def trigamma(self) -> Tensor:
        """ψ′(1 + x). The last to be asked for: it writes over the others."""
        powers = polynomial((1 / 6, -1 / 30), self.j)
        powers = plus_product(0.5, powers, self.i, out=over(powers))
        last = polynomial((10.0, 12.0), self.u, out=over(self.u)).div_(self.p)
        return self.i.addcmul_(self.j, powers).addcmul_(self.q, self.q).sub_(last)


def _series(s: _Shifted) -> tuple[Tensor, Tensor]:
    log_z = s.z.log()
    log_gamma = (log_z - 1).mul_(s.z).sub_(log_z, alpha=0.5).sub_(s.p.log()).add_(0.5 * math.log(2 * math.pi))
    return log_gamma.add_(s.tail()), log_z.sub_(s.below_log())


# Memory that is new costs a pass as much again as the pass itself, so results are written over what is not needed
# any more.


def over(x: Tensor) -> Tensor | None:
    """For `out`: x, but under torch.func, which has no such thing."""
    return None if transformed() else x


def polynomial(coefficients: tuple[float, ...], t: Tensor, out: Tensor | None = None) -> Tensor:
    """c₀ + c₁ t + c₂ t² + …, one pass for each power."""
    *rest, last = coefficients
    value = torch.add(_constant(rest[-1], t.dtype, t.device), t, alpha=last, out=out)
    for coefficient in rest[-2::-1]:
        value = plus_product(coefficient, value, t, out=over(value))
    return value


def plus_product(c: float, x: Tensor, y: Tensor, out: Tensor | None = None) -> Tensor:
    """c + x y in one pass."""
    return torch.addcmul(_constant(c, x.dtype, x.device), x, y, out=out)


@cache
def _constant(value: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    with torch.inference_mode(False):  # or it could not be part of a graph later
        return torch.tensor(value, dtype=dtype, device=device)


class GammaSampler(NamedTuple):
    """A way to draw log X for X ~ Gamma(α, 1)."""

    noise: Callable[[Tensor], tuple[Tensor, ...]]
    """one set for every entry of a tensor"""
    log_x: Callable[..., tuple[Tensor, Tensor]]
    """from α and that noise, which is used up: log X and its derivative in log α at fixed noise"""


def gamma_noise(like: Tensor) -> tuple[Tensor, ...]:
    """A normal number and the logarithms of two uniform ones."""
    return normal_like(like), log_uniform_like(like), log_uniform_like(like)


def log_gamma(alpha: Tensor, x: Tensor, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """log X for X ~ Gamma(α, 1), and its derivative in log α at fixed noise.

        X = G U₁^(1/α) U₂^(1/(α+1)),   G ~ Gamma(α + 2),   U uniform

        G = d y³,   d = α + 2 - 1/3,   c = 1/√(9d),   x ~ N(0, 1)
        y = 1 + c x + c³ p₃(x) + c⁴ p₄(x) + c⁵ p₅(x) + c⁶ p₆(x)

    The first two terms of y are the map of Marsaglia & Tsang (2000), which they correct by rejection. The others have
    the form of the expansion of the quantile function of G in c, with coefficients fitted to it, which makes rejection
    unnecessary: the CDF of G errs by 10⁻⁴ at most. Since y follows quantiles, its derivative at fixed x is the
    implicit one, dG/dα = -(∂F/∂α)/f, of Figurnov et al. (2018).
    """
    value, slope = log_quantile(alpha, x)
    boost = first.div_(alpha.clamp_min(LEAST))
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


def log_quantile(alpha: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """log G, and d log G / dα = (1 - 1.5 c (∂y/∂c) / y) / d. `x` is used up."""
    d = alpha + (2 - 1 / 3)
    root = d.rsqrt()  # 3c
    h = root * root  # 9c²
    x3 = root.mul_(x.clamp_(-FARTHEST, FARTHEST))  # 3cx
    h2, t = h * h, x.mul_(x)
    third, fifth = polynomial(_over(9, THIRD), t).mul_(h), polynomial(_over(81, FIFTH), t).mul_(h2)  # times c x
    fourth, sixth = polynomial(_over(81, FOURTH), t).mul_(h2), polynomial(_over(729, SIXTH), t).mul_(h2).mul_(h)
    y_c = torch.add(third, fifth, alpha=5 / 3, out=over(h2))
    y_c = torch.addcmul(x3, x3, y_c, value=3, out=over(y_c))
    y_c.add_(fourth, alpha=12).add_(sixth, alpha=18)  # times 3c
    y = x3.addcmul_(x3, third.add_(fifth)).mul_(1 / 3).add_(1).add_(fourth).add_(sixth)
    slope = h.addcmul_(h, y_c.div_(y), value=-0.5)
    return torch.mul(y, y, out=over(t)).mul_(y).mul_(d).log_(), slope


@cache
def _over(power: int, coefficients: tuple[float, ...]) -> tuple[float, ...]:
    return tuple(each / power for each in coefficients)


def surrogate_noise(like: Tensor) -> tuple[Tensor, ...]:
    """The logarithm of a uniform number."""
    return (log_uniform_like(like),)


def log_surrogate(alpha: Tensor, log_u: Tensor) -> tuple[Tensor, Tensor]:
    """The approximate inverse CDF: log X = (log U + log Γ(α + 1)) / α, and its derivative in log α.

    F(x) ≈ x^α / Γ(α + 1), the first term of the CDF at 0. Good for α well below 1 only.
    """
    log_gamma, digamma = gammas(alpha)
    # At tiny α rounding in log Γ(1 + α) ≈ -γα could outweigh a log U near 0, and 1/α would blow it up.
    log_gamma = torch.where(alpha < 1e-4, alpha * -EULER, log_gamma)
    value = log_u.add_(log_gamma).div_(alpha.clamp_min(LEAST))
    return value, digamma.sub_(value)


IMPLICIT, SURROGATE = GammaSampler(gamma_noise, log_gamma), GammaSampler(surrogate_noise, log_surrogate)

"""Where the coefficients of the Gamma quantile in `bayesformer.attention.special` come from.

    python -m bayesformer.study.quantile

G ~ Gamma(s), s ≥ 2, follows its quantiles as G = d y³, d = s - 1/3, c = 1/√(9d), where y is a polynomial in c and in a
standard normal x. Its terms are those of the asymptotic expansion of the quantile, c^k x^j with j ≤ k of one parity.
1 + c x is the map of Marsaglia & Tsang (2000); the rest is fitted here by least squares under the law of x: log G, and
its derivative in s, which is the implicit gradient of a draw, both in units of the spread of log G.
"""

from __future__ import annotations

import numpy
from numpy.typing import NDArray
from scipy import special, stats

Numbers = NDArray[numpy.float64]
LEAST, DEGREE, SLOPES = 2.0, 6, 0.3
"""least s; highest power of c; weight of slopes"""
TERMS = [(k, j) for k in range(3, DEGREE + 1) for j in range(k % 2, k + 1, 2)]


def coefficients() -> dict[tuple[int, int], float]:
    """The fitted coefficient of c^k x^j for every (k, j) of `TERMS`."""
    shapes = LEAST + numpy.concatenate([[0.0], numpy.geomspace(1e-2, 3e3, 50)])
    x, s = numpy.meshgrid(numpy.linspace(-4.6, 5, 241), shapes)
    d, h = s - 1 / 3, 1e-4 * s
    c, slope_of_c = 1 / numpy.sqrt(9 * d), -1 / (6 * d**1.5)
    y = (_quantile(s, x) / d) ** (1 / 3)
    slope = (numpy.log(_quantile(s + h, x)) - numpy.log(_quantile(s - h, x))) / (2 * h)
    y_c = (slope - 1 / d) * y / (3 * slope_of_c)
    weight = numpy.sqrt(stats.norm.pdf(x)) * 3 / (y * c)
    of_slope = SLOPES * weight * slope_of_c * s
    rows = [numpy.stack([weight * c**k * x**j for k, j in TERMS], -1)]
    rows += [numpy.stack([of_slope * k * c ** (k - 1) * x**j for k, j in TERMS], -1)]
    wanted = [weight * (y - 1 - c * x), of_slope * (y_c - x)]
    matrix = numpy.concatenate([part.reshape(-1, len(TERMS)) for part in rows])
    found = numpy.linalg.lstsq(matrix, numpy.concatenate([part.ravel() for part in wanted]), rcond=None)[0]
    return dict(zip(TERMS, found.tolist(), strict=True))


def _quantile(s: Numbers, x: Numbers) -> Numbers:
    lower, upper = special.gammaincinv(s, special.ndtr(x)), special.gammainccinv(s, special.ndtr(-x))
    return numpy.where(x < 0, lower, upper)


def main() -> None:
    """Print a line per power of c: the coefficients of the powers of x, lowest first."""
    found = coefficients()
    for power in range(3, DEGREE + 1):
        print(f"c^{power}:", ", ".join(f"{found[k, j]:.6f} x^{j}" for k, j in TERMS if k == power))


if __name__ == "__main__":
    main()

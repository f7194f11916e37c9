"""How fast a chain may go in coordinates of the posterior's standard deviation, and for how long.

In θ = θ* + W φ with WᵀHW ≈ I the time step per EPOCH is a pure number: with m = N/n steps per epoch, h = 1/m moves a
chain by one unit of time per epoch, in which a direction of unit curvature is nearly forgotten (integrated
autocorrelation 2.5 epochs at friction 1). Steps of reshuffled batches heat the variance by about (√λ h m)³ √λ/(24 γ):
2 % at one unit of time per epoch, 15 % at two; batches drawn with replacement by λ h m/(2γ), which is 22 %. So no noise
is estimated: one epoch buys one unit of time, whatever N is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from bayesformer.train.coordinates import Coordinates

MOST_EPOCHS = 200  # of sampling, over all chains, where the regime is Gaussian
FEWEST_STEPS = 800  # of chains that are slow per step, whatever the epochs: what 200 epochs of 200 examples have
STABLE = 0.5  # time steps, in units of 1/√λmax, for momenta: BAOAB is exact there, SGHMC's variance 2 % too large
EULER = 0.1  # largest step of a Langevin chain, whose variance is 1 / (1 - h λ/2) too large
ALONG = 3.0  # how much stiffer a network's posterior is along a chain than where it starts
COOL = 0.1  # q of SGNHT: its variance is too small by about q/4


@dataclass(frozen=True)
class Pace:
    """A chain's time step and friction in coordinates, and epochs to run."""

    step: float  # h
    friction: float | None  # γ; None for chains without momenta
    epochs: int  # over all chains, as the recipe has them
    per_epoch: float  # m, steps in one epoch

    @property
    def time(self) -> float:
        """Units of time that an epoch takes a chain, h m."""
        return self.step * self.per_epoch

    def integrated(self, curvature: float = 1.0) -> float:
        """Epochs per independent draw along a direction of this curvature: 2γ/(λ h m) with momenta, 2/(λ h m) without.

        Momenta that are forgotten slowly make no draw cheaper than the time it takes to cross the posterior.
        """
        if self.friction is None:
            return 2 / (curvature * self.time)
        return max(2.5 * self.friction / curvature, 1.25 / math.sqrt(curvature)) / self.time

    def units(self, num_data: int) -> tuple[float, float | None]:
        """lr and friction of the library's transforms, which see U/N at the temperature 1/N."""
        if self.friction is None:
            return self.step * num_data, None
        return self.step * math.sqrt(num_data), self.friction / math.sqrt(num_data)


def momentum_pace(found: Coordinates, per_epoch: float, temperature: float = 1.0) -> Pace:
    """SGHMC and BAOAB: h = 1/m, at most ½/√λmax; γ = 1 in dense coordinates, .3 in others, which have slow directions.

    A posterior of temperature T < 1 is narrower by √T while the batches' heat stays: h falls with T^⅓.
    """
    if found.regime == "network":
        return _network_momenta(found, per_epoch)
    dense = found.kind == "dense"
    step = min(_cold(temperature, 1 / 3) / per_epoch, STABLE / math.sqrt(found.largest))
    return Pace(step, 1.0 if dense else 0.3, _length(100 if dense else 150, step * per_epoch, 1.0), per_epoch)


def langevin_pace(found: Coordinates, per_epoch: float, temperature: float = 1.0) -> Pace:
    """SGLD: h = ½/m, at most a tenth, both over the largest curvature."""
    if found.regime == "network":
        return _network_langevin(found, per_epoch)
    stiffest = max(found.largest, 1.0)
    step = min(0.5 * _cold(temperature, 1 / 2) / per_epoch, EULER) / stiffest
    return Pace(step, None, max(_length(150, step * per_epoch, 0.5), _floor(per_epoch)), per_epoch)


def preconditioned_pace(found: Coordinates, per_epoch: float, temperature: float = 1.0) -> Pace:
    """pSGLD: h = 1/m, at most .3/λmax, for 150 epochs."""
    if found.regime == "network":
        return _network_langevin(found, per_epoch)
    step = min(_cold(temperature, 1 / 2) / per_epoch, 0.3 / found.largest)
    return Pace(step, None, max(_length(150, step * per_epoch, 1.0), _floor(per_epoch)), per_epoch)


def thermostat_pace(found: Coordinates, per_epoch: float, temperature: float = 1.0) -> Pace:
    """SGNHT: h = ¼/m and α = .7, less where its discretisation error q/4, q = h (2α + h m/T), would exceed 2.5 %.

    The thermostat holds the mean temperature of all directions. Batches heat only those that the data determine: with
    noise ν per unit of time there and 0 in directions that only the prior determines, these end at 2α/(2α + h m ν̄) of
    the temperature. So α must be large against h m: .85 of the variance at worst here, .3 with α = .1 and h m = ½.
    """
    if found.regime == "network":
        return _network_momenta(found, per_epoch)
    alpha, noise = 0.7, per_epoch * math.sqrt(max(found.largest, 1.0)) / _cold(temperature, 1)
    least = (math.sqrt(4 * alpha**2 + 4 * noise * COOL) - 2 * alpha) / (2 * noise)  # h (2α + h noise) = COOL
    step = min(0.25 / noise, least, STABLE / math.sqrt(found.largest))
    return Pace(step, alpha, max(MOST_EPOCHS, _floor(per_epoch)), per_epoch)


def _floor(per_epoch: float) -> int:
    """Epochs of the fewest steps that a chain with a small step must have: small data lack steps, not epochs."""
    return math.ceil(FEWEST_STEPS / per_epoch)


def _length(epochs: int, time: float, usual: float) -> int:
    """More epochs where a chain is slower than usual, as few long steps per epoch make it; 200 at most."""
    return min(MOST_EPOCHS, max(epochs, math.ceil(epochs * usual / time - 1e-6)))


def _cold(temperature: float, power: float) -> float:
    """How much shorter steps are below temperature 1; at 0 there is nothing to sample and nothing to heat."""
    return min(temperature, 1.0) ** power if temperature else 1.0


def _network_momenta(found: Coordinates, per_epoch: float) -> Pace:
    """In the prior's scale: stable at three times the curvature of the start, and slow enough for the batches' heat."""
    root, friction = math.sqrt(ALONG * found.largest), 0.3
    cool = (1.2 * friction / root) ** (1 / 3) / (root * per_epoch)
    return Pace(min(STABLE / root, cool), friction, MOST_EPOCHS, per_epoch)


def _network_langevin(found: Coordinates, per_epoch: float) -> Pace:
    stiffest = ALONG * found.largest
    return Pace(min(0.3, 0.5 / per_epoch) / stiffest, None, MOST_EPOCHS, per_epoch)

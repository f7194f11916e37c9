"""Has a sampler converged, and how much is a chain worth? Pure functions of draws.

Draws are (chains, draws, ...): weights, predictions or the log joint, one quantity per trailing entry. Predictions
are the better witness: weights of a network mix slowly along symmetries that no prediction sees.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bayesformer.core.types import Params
from bayesformer.core.vectors import count, dot

AT_ONCE = 2**22  # numbers whose autocovariances are in memory together


class TraceSummary(NamedTuple):
    """What the draws say of each quantity, and how far to believe it."""

    mean: Tensor  # (...)
    sd: Tensor  # (...), over all draws
    rhat: Tensor  # (...), near 1 if the chains agree
    ess: Tensor  # (...), independent draws that would know the mean as well


def trace_summary(draws: Tensor) -> TraceSummary:
    """Mean, standard deviation, rank-normalised split R-hat and bulk effective sample size of each quantity."""
    flat = _checked(draws).flatten(0, 1)
    return TraceSummary(flat.mean(0), flat.std(0), split_rhat(draws), effective_sample_size(draws))


def split_rhat(draws: Tensor, rank_normalised: bool = True) -> Tensor:
    """Do the halves of all chains agree?  (...), for n draws in each half:

        R̂ = √(((n-1)/n W + B) / W),    W the mean variance within halves, B the variance of their means.

    Gelman et al. (2013), section 11.4. With `rank_normalised` it is the larger of R̂ of the draws and of their
    distance to the median, both after z = Φ⁻¹((rank - 3/8) / (count + 1/4)): it needs no moments, and it sees chains
    that differ in spread alone. Vehtari et al. (2021). NaN where all draws are equal.
    """
    draws = _checked(draws)
    if not rank_normalised:
        return _by_quantity(_rhat, draws)
    return _by_quantity(lambda d: torch.maximum(_rhat(_ranked(d)), _rhat(_ranked(_folded(d)))), draws)


def effective_sample_size(draws: Tensor, rank_normalised: bool = True) -> Tensor:
    """How many independent draws would know the mean as well?  (...), for S draws in all:

        ESS = S / τ,    τ = -1 + 2 Σ_k P_k,    P_k = ρ_{2k} + ρ_{2k+1}

    ρ_t are autocorrelations over the halves of all chains, so chains that disagree lower it. The sum ends at the
    first P_k ≤ 0, and P_k may not grow: Geyer's (1992) initial monotone sequence. With `rank_normalised` it is the
    bulk ESS of Vehtari et al. (2021). At most S log₁₀ S, as theirs. NaN where all draws are equal.
    """
    draws = _checked(draws)
    return _by_quantity(lambda d: _ess(_ranked(d) if rank_normalised else d), draws)


def tail_effective_sample_size(draws: Tensor) -> Tensor:
    """How many independent draws would know the 5 % and the 95 % quantile as well?  (...)

    The smaller of the effective sample sizes of the indicators x ≤ q for these two quantiles of all draws. Vehtari et
    al. (2021), section 4.3. NaN where all draws are equal.
    """
    return _by_quantity(lambda d: torch.minimum(_ess(_below(d, 0.05)), _ess(_below(d, 0.95))), _checked(draws))


def energy_information(energies: Tensor) -> Tensor:
    """(chains,): the Bayesian fraction of missing information of Hamiltonian chains, from energies (chains, draws).

        E-BFMI = Σ_t (E_t - E_{t-1})² / Σ_t (E_t - Ē)²

    Betancourt (2016). Near 1 if fresh momenta reach all energies of the target; below .3 they cannot, and tails are
    explored by a slow walk.
    """
    energies = _checked(energies)
    return energies.diff(dim=1).square().sum(1) / (energies - energies.mean(1, keepdim=True)).square().sum(1)


def chain_words(found: Mapping[str, Any]) -> str:
    """One line of what Hamiltonian chains found out about themselves: the worst over the log joint and outputs.

    `found` are numbers by name, as in `posterior.facts["diagnostics"]`; chains too short to tell anything have few.
    """

    def worst(key: str, choose: Callable[[list[float]], float]) -> float | None:
        there = [found[name] for name in (f"{key}_log_joint", f"{key}_outputs") if name in found]
        known = [value for value in there if not math.isnan(value)]
        return choose(known) if known else None

    parts = []
    rhat, bulk, tail = worst("rhat", max), worst("ess_bulk", min), worst("ess_tail", min)
    if rhat is not None:
        parts.append(f"R-hat {rhat:.3f}")
    if bulk is not None and tail is not None:
        parts.append(f"ESS {bulk:.0f} bulk, {tail:.0f} tail")
    parts.append(f"{found['divergences']} divergences")
    if "energy_information" in found:
        parts.append(f"E-BFMI {min(found['energy_information']):.2f}")
    return ", ".join(parts)


def kinetic_temperature(momenta: Params | Tensor, sigma: float = 1.0) -> Tensor:
    """mean(m²) / σ², which a sampler with momenta holds at T: () or (L,) of a state's momenta, (...) of (..., P)."""
    return _mean_product(momenta, momenta) / sigma**2


def configurational_temperature(params: Params | Tensor, gradient: Params | Tensor) -> Tensor:
    """-mean(θ ∇U), whose expectation under exp(U/T) is T: () or (L,) of parameters, (...) of (..., P).

    Integration by parts, for any point as origin: θ minus the mean of the draws gives the least noise. Average
    over many draws. A gradient may be that of a batch, if the batch was drawn after θ.
    """
    return -_mean_product(params, gradient)


def _mean_product(a: Params | Tensor, b: Params | Tensor) -> Tensor:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return (a * b).mean(-1)
    if isinstance(a, dict) and isinstance(b, dict):
        return dot(a, b) / count(a)
    kinds = f"{type(a).__name__}, {type(b).__name__}"
    raise ValueError(f"params and gradient must be both tensors or both parameters; got {kinds}.")


def _checked(draws: Tensor) -> Tensor:
    if draws.dim() < 2 or draws.shape[1] < 4:
        raise ValueError(f"draws must be (chains, draws, ...) with at least 4 draws; got shape {tuple(draws.shape)}.")
    return draws.detach().double()


def _by_quantity(statistic: Callable[[Tensor], Tensor], draws: Tensor) -> Tensor:
    """(...): a statistic of (chains, draws, Q) for all quantities, some at a time."""
    flat = draws.reshape(*draws.shape[:2], -1)
    size = max(1, AT_ONCE // (flat.shape[0] * flat.shape[1]))
    values = torch.cat([statistic(part) for part in flat.split(size, -1)])  # (Q,)
    constant = flat.amax((0, 1)) == flat.amin((0, 1))  # its variance would be rounding error, not 0
    return values.masked_fill(constant, torch.nan).view(draws.shape[2:])


def _halves(draws: Tensor) -> Tensor:
    """(2 chains, draws // 2, Q): first and last halves; an odd draw in the middle belongs to neither."""
    n = draws.shape[1] // 2
    return torch.cat([draws[:, :n], draws[:, -n:]])


def _ranked(draws: Tensor) -> Tensor:
    """Normal scores of the ranks among all draws of a quantity; ties share their mean rank."""
    from scipy.stats import rankdata

    flat = draws.flatten(0, 1)
    ranks = torch.from_numpy(rankdata(flat.cpu().numpy(), axis=0)).to(draws)
    return torch.special.ndtri((ranks - 0.375) / (len(flat) + 0.25)).view_as(draws)


def _folded(draws: Tensor) -> Tensor:
    flat = draws.flatten(0, 1)
    return (draws - flat.quantile(0.5, 0)).abs()


def _below(draws: Tensor, share: float) -> Tensor:
    """1 where a draw is at most the quantile of all draws of its quantity, else 0."""
    return (draws <= draws.flatten(0, 1).quantile(share, 0)).to(draws.dtype)


def _rhat(draws: Tensor) -> Tensor:
    halves = _halves(draws)
    n = halves.shape[1]
    within = halves.var(1).mean(0)  # (Q,)
    return (((n - 1) / n * within + halves.mean(1).var(0)) / within).sqrt()


def _ess(draws: Tensor) -> Tensor:
    halves = _halves(draws)
    chains, n, _ = halves.shape
    covariance = _autocovariance(halves).mean(0)  # (n, Q)
    within = covariance[0] * n / (n - 1)
    total = covariance[0] + halves.mean(1).var(0)
    rho = 1 - (within - covariance) / total
    rho[0] = 1
    pairs = rho[: n // 2 * 2].unflatten(0, (-1, 2)).sum(1)  # (n // 2, Q)
    kept = torch.where((pairs > 0).cumprod(0).bool(), pairs, 0).cummin(0).values
    tau = (2 * kept.sum(0) - 1).clamp_min(1 / math.log10(chains * n))
    return torch.where(total.isnan(), torch.nan, chains * n / tau)  # a NaN pair would end the sum, not show


def _autocovariance(draws: Tensor) -> Tensor:
    """(chains, n, Q): 1/n Σ_s (x_s - x̄)(x_{s+t} - x̄), by FFT."""
    n = draws.shape[1]
    spectrum = torch.fft.rfft(draws - draws.mean(1, keepdim=True), 2 * n, dim=1)
    return torch.fft.irfft(spectrum.abs().square(), 2 * n, dim=1)[:, :n] / n

"""Convergence diagnostics on chains whose truth is known."""

import math

import pytest
import torch

from bayesformer.core.vectors import THETA
from bayesformer.inference import baoab, diagnostics
from bayesformer.inference.diagnostics import (
    configurational_temperature,
    effective_sample_size,
    kinetic_temperature,
    split_rhat,
    trace_summary,
)
from tests.laws import assert_mean


def autoregressive(rho, chains=4, draws=2000, quantities=100):
    """x_t = ρ x_{t-1} + √(1-ρ²) z, started in its stationary law N(0, 1)."""
    x = torch.randn(chains, draws, quantities, dtype=torch.float64)
    for t in range(1, draws):
        x[:, t] = rho * x[:, t - 1] + math.sqrt(1 - rho**2) * x[:, t]
    return x


both = pytest.mark.parametrize("rank_normalised", [False, True])


@both
def test_rhat_of_independent_draws_is_one(rank_normalised):
    rhat = split_rhat(torch.randn(4, 500, 200), rank_normalised)
    assert rhat.shape == (200,)
    assert rhat.mean().item() == pytest.approx(1, abs=0.005)
    assert rhat.max() < 1.05


@both
def test_rhat_sees_chains_apart(rank_normalised):
    draws = torch.randn(4, 500, 20) + torch.arange(4.0).view(4, 1, 1)
    assert split_rhat(draws, rank_normalised).min() > 1.1


@both
def test_rhat_sees_a_chain_that_drifts(rank_normalised):
    # Whole chains agree; only their halves do not.
    draws = torch.randn(4, 500, 20) + torch.linspace(-2, 2, 500).view(1, -1, 1)
    assert split_rhat(draws, rank_normalised).min() > 1.1


def test_rhat_of_ranks_sees_chains_of_different_spread():
    draws = torch.randn(4, 500, 20) * torch.tensor([1.0, 1.0, 1.0, 4.0]).view(4, 1, 1)
    assert split_rhat(draws, rank_normalised=True).min() > 1.1
    assert split_rhat(draws, rank_normalised=False).max() < 1.1


def test_rhat_of_ranks_needs_no_moments():
    draws = torch.distributions.Cauchy(0.0, 1.0).sample((4, 500, 100))
    assert split_rhat(draws).max() < 1.05
    monotone = draws.sign() * draws.abs().log1p()
    torch.testing.assert_close(split_rhat(draws)[:5], split_rhat(monotone)[:5], rtol=0.01, atol=0)


def test_rhat_is_its_formula():
    draws = torch.randn(3, 11, dtype=torch.float64) + torch.arange(3).view(3, 1)
    halves = [half for chain in draws for half in (chain[:5], chain[6:])]  # the middle draw is left out
    within = sum(h.var().item() for h in halves) / 6
    between = torch.stack([h.mean() for h in halves]).var().item()
    expected = math.sqrt((4 / 5 * within + between) / within)
    assert split_rhat(draws, rank_normalised=False).item() == pytest.approx(expected)


@both
@pytest.mark.parametrize("rho", [0.0, 0.5, 0.9, -0.4])
def test_effective_sample_size_of_an_autoregression(rho, rank_normalised):
    draws = autoregressive(rho)
    ess = effective_sample_size(draws, rank_normalised)
    expected = 8000 * (1 - rho) / (1 + rho)
    assert ess.shape == (100,)
    assert ess.mean().item() == pytest.approx(expected, rel=0.06)


def test_effective_sample_size_is_at_most_the_cap():
    ess = effective_sample_size(autoregressive(-0.95))  # its closed form would be 39 times the number of draws
    assert (ess > 0).all()
    assert ess.max().item() == pytest.approx(8000 * math.log10(8000))


def slow_effective_sample_size(draws):
    """The definition, lag by lag, for one quantity of an even number of draws."""
    halves = [half - half.mean() for chain in draws for half in chain.chunk(2)]
    means = torch.stack([half.mean() for chain in draws for half in chain.chunk(2)])
    n, within = len(halves[0]), sum(half.var() for half in halves) / len(halves)
    total, tau, last, k = within * (n - 1) / n + means.var(), -1.0, math.inf, 0

    def rho(lag):
        covariance = sum((half[: n - lag] * half[lag:]).sum() / n for half in halves) / len(halves)
        return 1.0 if lag == 0 else (1 - (within - covariance) / total).item()

    while 2 * k + 1 < n and (pair := rho(2 * k) + rho(2 * k + 1)) > 0:
        last, k = min(last, pair), k + 1
        tau += 2 * last
    return len(halves) * n / max(tau, 1 / math.log10(len(halves) * n))


def test_effective_sample_size_is_its_definition():
    draws = autoregressive(0.7, chains=2, draws=30, quantities=40)  # short: pairs do not fall by themselves
    expected = torch.tensor([slow_effective_sample_size(q) for q in draws.unbind(-1)])
    torch.testing.assert_close(effective_sample_size(draws, False), expected.double(), rtol=1e-5, atol=1e-5)


def test_chains_apart_have_few_effective_draws():
    draws = torch.randn(4, 500, 20) + 3 * torch.arange(4.0).view(4, 1, 1)
    assert effective_sample_size(draws).max() < 20


def test_parts_do_not_change_the_answer(monkeypatch):
    draws = autoregressive(0.5, draws=50, quantities=7).view(4, 50, 7, 1)
    whole = trace_summary(draws)
    monkeypatch.setattr(diagnostics, "AT_ONCE", 400)
    for a, b in zip(whole, trace_summary(draws), strict=True):
        torch.testing.assert_close(a, b)


def test_summary_of_weights_and_of_predictions():
    weights = 2 + 3 * torch.randn(4, 300, 6)
    summary = trace_summary(weights)
    torch.testing.assert_close(summary.mean, weights.double().flatten(0, 1).mean(0))
    torch.testing.assert_close(summary.sd, weights.double().flatten(0, 1).std(0))
    assert summary.ess.mean().item() == pytest.approx(1200, rel=0.15)
    predictions = weights.softmax(-1).unflatten(-1, (3, 2))  # (chains, draws, B, C)
    assert all(value.shape == (3, 2) for value in trace_summary(predictions))
    assert trace_summary(predictions).rhat.max() < 1.05


def test_a_constant_or_broken_quantity_has_no_answer():
    draws = torch.randn(2, 20, 4)
    draws[..., 0], draws[0, 3, 1] = 0.1, math.nan
    for value in (split_rhat(draws), split_rhat(draws, False), effective_sample_size(draws), trace_summary(draws).ess):
        assert value.isnan().tolist() == [True, True, False, False]


def test_temperatures_of_a_sampler_at_rest_in_its_law():
    class Off:
        """U = -|θ - 5|²: λ = 2, its mode far from 0."""

        def value_and_grad(self, params, batch):
            return blank(params), torch.zeros(()), {THETA: -2 * (params[THETA] - 5)}

    def blank(params):
        return torch.zeros(params[THETA].shape[:-1])

    transform = baoab.build(Off(), lr=0.4, temperature=0.3, sigma=1.5)
    state = transform.init({THETA: torch.full((400, 50), 5.0)})
    for _ in range(150):
        state, _ = transform.update(state, None, inplace=True)
    assert_mean(kinetic_temperature(state.momenta, sigma=1.5), 0.3)
    _, _, gradient = Off().value_and_grad(state.params, None)
    assert_mean(configurational_temperature(state.params, gradient), 0.3)
    torch.testing.assert_close(
        configurational_temperature(state.params[THETA], gradient[THETA]),
        configurational_temperature(state.params, gradient),
    )
    stored = state.momenta[THETA].view(4, 100, 50)
    torch.testing.assert_close(kinetic_temperature(stored, 1.5).flatten(), kinetic_temperature(state.momenta, 1.5))
    named = {"a": torch.ones(2, 3), "b": torch.full((2,), 3.0)}
    assert kinetic_temperature(named).item() == pytest.approx((6 + 18) / 8)


def test_what_is_no_chain_is_refused():
    with pytest.raises(ValueError, match=r"at least 4 draws; got shape \(2, 3, 5\)"):
        split_rhat(torch.zeros(2, 3, 5))
    with pytest.raises(ValueError, match=r"draws must be \(chains, draws, ...\) .* got shape \(100,\)"):
        effective_sample_size(torch.zeros(100))
    with pytest.raises(ValueError, match="both tensors or both parameters; got dict, Tensor"):
        configurational_temperature({"a": torch.zeros(2)}, torch.zeros(2))

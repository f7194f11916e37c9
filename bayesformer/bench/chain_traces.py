"""Chains looked at: traces of predictions and of named weights, with R-hat and effective sample size.

Predictions are the better witness. Weights of a network wander along symmetries that no prediction sees.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bayesformer.core.types import Draws, Inputs
from bayesformer.inference.diagnostics import TraceSummary, trace_summary
from bayesformer.posterior import Posterior

LEAST = 4  # draws per chain below which halves of a chain say nothing


def function_traces(posterior: Posterior, inputs: Inputs, most: int = 200) -> Tensor:
    """(chains, draws, Q): outputs of the network on some inputs, at most Q = `most` of them."""
    outputs = posterior.outputs(inputs, strategy="looped")
    assert isinstance(outputs, Draws)
    return _by_chain(posterior, outputs.values.flatten(1), most)


def weight_traces(posterior: Posterior, name: str, most: int = 200) -> Tensor:
    """(chains, draws, Q): the entries of one parameter, at most Q = `most` of them, evenly spread over it."""
    weights = posterior.sample()
    if name not in weights:
        from bayesformer.core.errors import unknown_name

        raise unknown_name("parameter", name, weights)
    return _by_chain(posterior, weights[name].flatten(1), most)


def summarise(traces: Tensor) -> dict[str, float]:
    """The worst R-hat and the median effective sample size over all quantities that move at all."""
    moving = traces.flatten(0, 1).std(0) > 0
    if not moving.any():
        raise ValueError("traces must hold a quantity that moves; all draws are equal.")
    found: TraceSummary = trace_summary(traces[..., moving].double())
    return {"rhat": found.rhat.max().item(), "ess": found.ess.median().item()}


def picture(posterior: Posterior, inputs: Inputs, weights: int = 2, predictions: int = 2) -> list[dict[str, Any]]:
    """A few traces to draw: [{"name": ..., "chains": [[...], ...]}], predictions first, then named weights."""
    seen = function_traces(posterior, inputs, predictions)
    found = [(f"output {i + 1} of {seen.shape[-1]}", seen[..., i]) for i in range(seen.shape[-1])]
    rows = posterior.law.rows(posterior.draws)
    spread = rows.std(0)
    moving = [name for name, views in posterior.space.views(spread).items() if (views > 0).any()]
    # The first and the last of the weights that move: in most networks the embedding and the head.
    for name in (moving[:1] + moving[-1:])[:weights]:
        most = posterior.space.views(spread)[name].argmax()
        trace = _by_chain(posterior, posterior.sample()[name].flatten(1)[:, most, None], 1)
        found.append((f"{name}[{int(most)}]", trace[..., 0]))
    return [{"name": name, "chains": _rounded(trace)} for name, trace in found]


def _rounded(trace: Tensor) -> Any:
    return [[float(f"{value:.5g}") for value in chain] for chain in trace.tolist()]


def _by_chain(posterior: Posterior, rows: Tensor, most: int) -> Tensor:
    chains = posterior.facts.get("chains")
    if not chains or len(rows) % chains or len(rows) // chains < LEAST:
        held = f"{len(rows)} draws of {chains or 'no'} chains"
        raise ValueError(f"posterior must hold chains of at least {LEAST} draws each; got {held}.")
    pick = torch.linspace(0, rows.shape[1] - 1, min(most, rows.shape[1])).long()
    return rows[:, pick].unflatten(0, (chains, -1)).cpu()

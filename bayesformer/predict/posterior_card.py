"""How a posterior shows itself, in a notebook and as one line: what it is over, how it was made, what it doubts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from html import escape
from typing import TYPE_CHECKING, Any

from bayesformer.inference.diagnostics import chain_words

if TYPE_CHECKING:
    from bayesformer.posterior import Posterior

CONVERGED = {False: "no", True: "yes", None: "unknown"}


def posterior_card(posterior: Posterior) -> str:
    """A small HTML table of facts, and every doubt as a sentence."""
    facts = posterior.facts
    settled = facts.get("converged") or [None]
    lines = {
        "method": facts.get("method", {}).get("name", type(posterior.law).__name__),
        "model": type(posterior.model).__name__,
        "weights": f"{posterior.space.size:,} in {len(posterior.space.names)} parameters",
        "likelihood": repr(posterior.likelihood),
        "draws per prediction": str(posterior.draws),
        "prediction": posterior.predictive,
        "training examples": f"{facts['num_data']:,}" if "num_data" in facts else "unknown",
        "started from": facts.get("init", "unknown"),
        "converged": CONVERGED[False if False in settled else None if None in settled else True],
    }
    if posterior.tempering != 1:
        lines["temperature"] = f"{posterior.tempering:.3g}, by calibrate"
    rows = "".join(
        f'<tr><th style="text-align:left;padding-right:1em">{escape(name)}</th>'
        f'<td style="text-align:left">{escape(str(value))}</td></tr>'
        for name, value in lines.items()
    )
    doubts = "".join(f"<li>{escape(doubt.sentence)}</li>" for doubt in posterior.doubts)
    return f"<table>{rows}</table>" + (f"<p>Doubts</p><ul>{doubts}</ul>" if doubts else "")


def posterior_line(posterior: Posterior) -> str:
    """One line: method, draws, weights, likelihood, whether the fit has arrived, and how many doubts there are."""
    name = posterior.facts.get("method", {}).get("name", type(posterior.law).__name__)
    state = {False: "has not converged", True: "converged", None: "convergence unknown"}
    settled = posterior.facts.get("converged") or [None]
    verdict = state[False if False in settled else None if None in settled else True]
    found: Any = posterior.facts.get("coordinates") or posterior.facts
    decrement = found[0].get("decrement") if isinstance(found, list) else found.get("decrement")
    if decrement is not None and math.isfinite(decrement):  # steps after the training went on to the mode
        verdict = f"{decrement:.2g} standard deviations from the mode"
    if "diagnostics" in posterior.facts:  # of Hamiltonian chains, which converge in another sense than a search does
        verdict = chain_words(posterior.facts["diagnostics"])
    init = f", started from {posterior.facts['init']} weights" if "init" in posterior.facts else ""
    doubted = f", {len(posterior.doubts)} doubts (see .doubts)" if posterior.doubts else ""
    prior = _chosen_prior(posterior.facts)
    return (
        f"Posterior({name}: {posterior.draws} draws over {posterior.space.size:,} weights of "
        f"{type(posterior.model).__name__}, "
        f"{type(posterior.likelihood).__name__.lower()} likelihood, {verdict}{init}{prior}{doubted})"
    )


def _chosen_prior(facts: Mapping[str, Any]) -> str:
    """In words, that the prior is not N(0, 1) but one whose precision the fit chose, where it did."""
    asked, found = facts.get("method", {}).get("prior_precision"), facts.get("prior_precision")
    if not isinstance(asked, str) or not found:
        return ""
    shown = f"precision {found[0]:.3g}" if len(found) == 1 else f"{len(found)} precisions"
    return f", prior of {shown} chosen from the data"

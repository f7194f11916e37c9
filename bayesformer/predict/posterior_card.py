"""How a posterior shows itself in a notebook: what it is over, how it was made, and what it doubts."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

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

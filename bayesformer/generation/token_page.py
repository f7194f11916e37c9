"""A generation as a page: tokens shaded by epistemic uncertainty, with every draw's alternatives at a tap."""

from __future__ import annotations

import json
from html import escape
from typing import Any

from bayesformer.generation.result import Generation

FULL = 0.5  # nats of epistemic uncertainty that are shaded fully

STYLE = """
body{font:16px/1.6 system-ui,sans-serif;max-width:52rem;margin:2rem auto;padding:0 1rem;color:#1b1f24;background:#fff}
h1{font-size:1.3rem} .prompt{color:#57606a} .text{white-space:pre-wrap;margin:1rem 0}
button.token{font:inherit;border:0;border-bottom:2px solid transparent;border-radius:3px;padding:0;margin:0;
color:inherit;cursor:pointer;white-space:pre-wrap} button.token:hover,button.token[aria-expanded=true]{
border-bottom-color:#bc4c00}
#panel{border:1px solid #d0d7de;border-radius:6px;padding:.6rem 1rem;min-height:7rem;overflow-x:auto}
table{border-collapse:collapse;font-size:.9rem;white-space:nowrap}
td,th{padding:.15rem .7rem;text-align:left} th{font-weight:600}
td.p{padding-left:0;color:#57606a;font-variant-numeric:tabular-nums}.scale{font-size:.85rem;color:#57606a}
@media(prefers-color-scheme:dark){body{background:#0d1117;color:#e6edf3}.prompt,.scale,td.p{color:#9198a1}
#panel{border-color:#30363d}}
"""

SCRIPT = """
const data = JSON.parse(document.getElementById("data").textContent);
const panel = document.getElementById("panel");
function cell(row, text, kind) { const c = document.createElement(kind || "td"); c.textContent = text; row.append(c);
  return c; }
function show(button) {
  const token = data.sequences[button.dataset.row][button.dataset.step];
  document.querySelectorAll("button.token").forEach(b => b.setAttribute("aria-expanded", b === button));
  panel.replaceChildren();
  const head = document.createElement("p");
  head.textContent = JSON.stringify(token.text) + ": epistemic " + token.epistemic.toFixed(3) + ", aleatoric " +
    token.aleatoric.toFixed(3) + " nats, probability " + token.probability.toFixed(3);
  const table = document.createElement("table");
  token.alternatives.forEach(line => {
    const row = document.createElement("tr");
    row.className = "draw"; cell(row, line.name, "th");
    line.tokens.forEach(([text, p]) => { cell(row, JSON.stringify(text)); cell(row, p.toFixed(2)).className = "p"; });
    table.append(row);
  });
  panel.append(head, table);
}
document.querySelectorAll("button.token").forEach(b => {
  b.addEventListener("click", () => show(b)); b.addEventListener("mouseenter", () => show(b)); });
"""


def page(generation: Generation, title: str = "What the model wrote, and where it is unsure") -> str:
    """A self-contained HTML page of all sequences; hover over a token, or tap it, for the alternatives of each draw."""
    _check(generation)
    sequences = [_tokens(generation, row) for row in range(len(generation.tokens))]
    # "</" cannot end the script element from inside a JSON string, and "<!--" cannot begin a comment
    data = json.dumps({"sequences": sequences}).replace("<", "\\u003c")
    written = "".join(_sequence(generation, row) for row in range(len(sequences)))
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{STYLE}</style></head><body><h1>{escape(title)}</h1>"
        f'<p class="scale">The darker a token, the more the {generation.draws} draws of the weights disagree about it '
        f"(epistemic uncertainty; fully shaded from {FULL} nats on). Hover over a token, or tap it.</p>"
        f'{written}<div id="panel" aria-live="polite">No token chosen.</div>'
        f'<script type="application/json" id="data">{data}</script><script>{SCRIPT}</script></body></html>'
    )


def fragment(generation: Generation) -> str:
    """The sequences for a notebook, tokens shaded, numbers and the averaged alternatives as tooltips; no script."""
    if generation.pieces is None:
        return f"<pre>{escape(repr(generation))}</pre>"
    lines = []
    for row in range(len(generation.tokens)):
        tokens = _tokens(generation, row)
        spans = "".join(
            f'<span style="background:{shade(t["epistemic"])};white-space:pre-wrap" title="{escape(_tooltip(t))}">'
            f"{escape(t['text'])}</span>"
            for t in tokens
        )
        lines.append(f'<p><span style="opacity:.6">{escape(_prompt(generation, row))}</span>{spans}</p>')
    return "".join(lines)


def shade(epistemic: float) -> str:
    """A CSS colour, the more opaque the more epistemic uncertainty there is, fully so from `FULL` nats on."""
    return f"rgba(251,143,68,{min(1.0, max(0.0, epistemic) / FULL):.3f})"


def _check(generation: Generation) -> None:
    if generation.pieces is None:
        raise ValueError("a page needs the text of the tokens: give generate a tokenizer.")


def _prompt(generation: Generation, row: int) -> str:
    return "" if generation.prompts is None else generation.prompts[row]


def _sequence(generation: Generation, row: int) -> str:
    buttons = "".join(
        f'<button type="button" class="token" aria-expanded="false" data-row="{row}" data-step="{step}" '
        f'style="background:{shade(token["epistemic"])}">{_shown(token["text"])}</button>'
        + "\n"
        * token["text"].count("\n")  # a button is a box, and what is inside breaks no line outside
        for step, token in enumerate(_tokens(generation, row))
    )
    return f'<div class="text"><span class="prompt">{escape(_prompt(generation, row))}</span>{buttons}</div>'


def _shown(text: str) -> str:
    """A token as text of its button: the end of a line has a sign, so that it can be seen and tapped."""
    return escape(text.replace("\n", "↵"))


def _tokens(generation: Generation, row: int) -> list[dict[str, Any]]:
    assert generation.pieces is not None
    assert generation.names is not None
    names = generation.names

    def line(name: str, ids: Any, probs: Any) -> dict[str, Any]:
        pairs = [[names[i], round(p, 4)] for i, p in zip(ids.tolist(), probs.tolist(), strict=True)]
        return {"name": name, "tokens": pairs}

    found = []
    for step, text in enumerate(generation.pieces[row]):
        lines = [line("average", generation.averaged.ids[row, step], generation.averaged.probs[row, step])]
        lines += [
            line(f"draw {draw + 1}", generation.by_draw.ids[draw, row, step], generation.by_draw.probs[draw, row, step])
            for draw in range(generation.draws)
        ]
        numbers = {name: float(getattr(generation, name)[row, step]) for name in ("epistemic", "aleatoric")}
        probability = float(generation.log_prob[row, step].exp())
        found.append({"text": text, "probability": probability, **numbers, "alternatives": lines})
    return found


def _tooltip(token: dict[str, Any]) -> str:
    likely = ", ".join(f"{text!r} {p:.2f}" for text, p in token["alternatives"][0]["tokens"])
    return f"epistemic {token['epistemic']:.3f}, aleatoric {token['aleatoric']:.3f} nats; likely: {likely}"

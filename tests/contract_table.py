"""The whole contract, every method on every kind of model: `python -m tests.contract_table docs/compatibility.md`.

Writes what works and what is refused, with the reason, as a table; ends with an error if a promise is broken.
"""

from __future__ import annotations

import logging
import sys
import tempfile
import time
import warnings
from pathlib import Path

import torch

from bayesformer.methods import METHODS
from tests.contract import REFUSED_WAYS, check_cell
from tests.contract_zoo import KINDS

HEAD = """# Compatibility

This page is generated: `make contract` fits every method on every kind of model of `tests/contract_zoo.py` and writes
it. Do not edit it.

✓ means that all of this holds, on a small model of that kind: the fit works; so does `predict` in every way that the
posterior allows, and draws differ; a saved posterior is loaded with the plain model and gives equal predictions, bit
for bit; eight threads at once get what one thread gets; the model that was given is untouched (weights, gradients,
flags, modes, buffers, hooks, configuration), and so are torch's settings and the random states of torch, numpy and
`random`.
A number is a refusal before training, with the reason below.

"""


def run(report: Path) -> int:
    """Check all cells, write the page, and return how many cells are broken."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    marks: dict[tuple[str, str], str] = {}
    reasons: dict[str, int] = {}
    broken = 0
    for kind in KINDS:
        started = time.perf_counter()
        for method in METHODS:
            mark, reason = _cell(method, kind)
            broken += mark == "✗"
            marks[method, kind] = f"{mark}{reasons.setdefault(reason, len(reasons) + 1)}" if reason else mark
        print(f"{kind}: {time.perf_counter() - started:.1f} s", flush=True)
    report.write_text(_page(marks, reasons), encoding="utf-8")
    return broken


def _cell(method: str, kind: str) -> tuple[str, str]:
    """A mark and the reason, if there is one: a refusal that is expected, or what is broken."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            reason = check_cell(method, kind, Path(folder))
        except Exception as error:  # whatever breaks goes into the table
            print(f"BROKEN {method} on {kind}: {type(error).__name__}: {error}", flush=True)
            return "✗", f"broken: {type(error).__name__}: {str(error).splitlines()[0]}"
    return ("", reason) if reason else ("✓", "")


def _page(marks: dict[tuple[str, str], str], reasons: dict[str, int]) -> str:
    rows = [f"| kind of model | {' | '.join(METHODS)} |", f"|---{'|:-:' * len(METHODS)}|"]
    rows += [f"| {kind} | {' | '.join(marks[method, kind] for method in METHODS)} |" for kind in KINDS]
    notes = [f"{number}. {reason}" for reason, number in reasons.items()]
    ways = ["Kinds of model on which a Gaussian posterior cannot be asked in every way, and what the error says:", ""]
    ways += [f"- {kind}, {way}: {text}" for (way, kind), text in REFUSED_WAYS.items()]
    kinds = ["## Kinds of model", ""] + [f"- **{kind}**: {_about(kind)}" for kind in KINDS]
    return HEAD + "\n".join([*rows, "", *notes, "", *ways, "", *kinds, ""])


def _about(kind: str) -> str:
    return " ".join((KINDS[kind].__doc__ or "").split())


if __name__ == "__main__":
    sys.exit(1 if run(Path(sys.argv[1])) else 0)

"""Tables of the tasks on a pretrained encoder: scores, and what its uncertainty tells from test rows.

Reads stored results of experiments/glue.toml and experiments/pretrained.toml and runs nothing. Methods that could not
run stand in the table with their error, which `errors.json` beside the results keeps.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bayesformer.bench.records import FAILED
from bayesformer.bench.statistics import Result, summarise
from bayesformer.core.storage import read_json, write_json

SCORES = {
    "accuracy": "accuracy",
    "matthews": "Matthews",
    "pearson": "Pearson",
    "spearman": "Spearman",
    "exact_match": "exact match",
    "token_f1": "token F1",
    "rmse": "RMSE",
    "log_likelihood": "log-lik.",
    "ece": "ECE",
    "brier": "Brier",
    "auroc/errors": "errors, total",
    "auroc_epistemic/errors": "errors, epistemic",
}
"""columns, where a task has them"""
ERRORS = "errors.json"


def row_of(method: str, settings: Mapping[str, Any]) -> str:
    """The name of a row: the method and what tells its variants apart."""
    if method == "laplace":
        return f"Laplace, {settings['structure']}"
    if method == "attention":
        share = settings.get("temperature", 1.0)
        way = "draws" if settings["draws"] else "mean"
        return f"Weibull attention, {way}" + ("" if share == 1 else f", temperature {share:g}")
    if method == "ensemble":
        return f"ensemble of {settings['members']}"
    return {"mle": "LoRA or plain fine-tuning", "temperature_scaling": "temperature scaling"}.get(method, method)


def keep_errors(folder: Path) -> list[dict[str, str]]:
    """Errors of cells that failed, with those kept before, in a file beside the results; those that ran since are out.

    Without tracebacks, which name places of one machine.
    """
    path = folder / ERRORS
    kept = read_json(path, "errors").get("errors", []) if path.exists() else []
    found = {(e["task"], e["learned"], e["row"]): e["error"] for e in kept}
    for file in sorted((folder / FAILED).rglob("seed*.json")):
        cell = json.loads(file.read_bytes())
        key = cell["task"], cell["task_settings"].get("learned", ""), row_of(cell["method"], cell["method_settings"])
        found[key] = cell["error"]
    errors = [{"task": t, "learned": w, "row": r, "error": error} for (t, w, r), error in sorted(found.items())]
    if errors:
        write_json(path, {"errors": errors})
    return errors


def table(results: Sequence[Result], errors: Sequence[Mapping[str, str]] = ()) -> str:
    """Markdown: a table per task and kind of learned weights, and one of what lies outside."""
    groups: dict[tuple[str, str], dict[str, list[Result]]] = defaultdict(lambda: defaultdict(list))
    for result in results:
        learned = result["settings"]["task"].get("learned", "")
        groups[result["task"], learned][row_of(result["method"], result["settings"]["method"])].append(result)
    if not groups:
        raise ValueError("results must hold cells of the tasks glue/*, pos/minilm or squad; got none.")
    parts = []
    for (task, learned), rows in sorted(groups.items()):
        told = {e["row"]: e["error"] for e in errors if (e["task"], e["learned"]) == (task, learned)}
        failed = {row: error for row, error in told.items() if row not in rows}
        names = [name for name in SCORES if any(name in r["metrics"] for found in rows.values() for r in found)]
        parts.append(_table(f"{task}, {learned}", rows, {name: SCORES[name] for name in names}, failed))
        foreign = sorted(
            {k.removeprefix("auroc/") for f in rows.values() for r in f for k in r["metrics"] if k.startswith("auroc/")}
            - {"errors"}
        )
        if foreign:
            columns = {
                f"{kind}/{name}": f"{name}, {label}"
                for name in foreign
                for kind, label in (("auroc", "total"), ("auroc_epistemic", "epistemic"))
            }
            parts.append(_table(f"{task}, {learned}: AUROC of what is foreign", rows, columns, {}))
    return "\n\n".join(parts)


def _table(
    title: str, rows: Mapping[str, Sequence[Result]], columns: Mapping[str, str], failed: Mapping[str, str]
) -> str:
    most = max(len(found) for found in rows.values())
    lines = [f"| {title} | {' | '.join(columns.values())} |", "|---|" + "---|" * len(columns)]
    for row, found in rows.items():
        entries = [_entry([r["metrics"].get(name) for r in found], most) for name in columns]
        lines.append(f"| {row} | {' | '.join(entries)} |")
    for row, error in failed.items():
        lines.append(f"| {row} | could not run: {error.replace('|', '/')} |" + " |" * (len(columns) - 1))
    return "\n".join(lines)


def _entry(values: Sequence[float | None], most: int) -> str:
    found = summarise(values)
    if found is None:
        return "–"
    spread = "" if found.sd is None else f" ± {found.sd:.3f}"
    return f"{found.mean:.3f}{spread}" + ("" if found.n == most else f" ({found.n})")

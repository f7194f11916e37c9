"""Why the accuracy of a graph attention network depends on the stream of dropout noise: many runs of one baseline.

One run is a plain training loop in torch, which shares the model and the data with the tasks `graph/*` and nothing
else. Its start and its dropout noise have seeds of their own, so that runs may share either. All rules of stopping look
at the same run, so that they are compared without noise:

- `likelihood`: the epoch of the best validation log-likelihood among the first 400, the rule of results/graphs;
- `patience`: the same without that limit, stopped when 100 epochs brought no better one;
- `paper`: Veličković et al. (2018) as their program has it: stopped when for 100 epochs neither the validation loss
  nor the validation accuracy was as good as before, keeping the last epoch at which both were;
- `last`: the 400th epoch.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bayesformer.bench.provenance import provenance
from bayesformer.bench.statistics import paired_difference, summarise
from bayesformer.bench.tasks.citation_graph import CitationGraph, load_graph
from bayesformer.core.errors import unknown_name
from bayesformer.core.global_random import global_streams
from bayesformer.core.storage import read_json, write_json

LIMIT, PATIENCE, MOST = 400, 100, 1000
DECAY, RATE = 5e-4, 5e-3
RULES = ("likelihood", "patience", "paper", "last")
VARIANTS = {
    "tied": "a start and a noise of its own for every run",
    "noise 0": "starts of their own, one stream of noise for all",
    "noise 1": "starts of their own, another stream of noise for all",
    "start 0": "one start for all, noise of their own",
    "torch": "as tied, weights started as torch starts linear layers",
}


class EpochScore(NamedTuple):
    """What an epoch is judged by, and its accuracy on test nodes."""

    loss: float  # of validation nodes
    accuracy: float  # of validation nodes
    test: float


@dataclass
class Stopping:
    """The rules, followed along one run; each holds the epoch that it would keep."""

    kept: dict[str, tuple[int, EpochScore]]
    running: set[str]
    best_loss: float = math.inf
    best_accuracy: float = -math.inf
    stale: int = 0
    stale_loss: int = 0

    @classmethod
    def new(cls) -> Stopping:
        """All rules before the first epoch."""
        return cls({}, set(RULES))

    def see(self, epoch: int, score: EpochScore) -> bool:
        """Take an epoch, counted from 1, into account; False when no rule is still running."""
        lower, higher = score.loss < self.best_loss, score.accuracy >= self.best_accuracy
        if "likelihood" in self.running and (lower or not self.kept.get("likelihood")):
            self.kept["likelihood"] = epoch, score
        if "patience" in self.running and (lower or not self.kept.get("patience")):
            self.kept["patience"] = epoch, score
        if "last" in self.running:
            self.kept["last"] = epoch, score
        as_low = score.loss <= self.best_loss
        if "paper" in self.running:
            if as_low and higher:
                self.kept["paper"] = epoch, score
            self.stale = 0 if as_low or higher else self.stale + 1
        self.stale_loss = 0 if lower else self.stale_loss + 1
        self.best_loss, self.best_accuracy = min(self.best_loss, score.loss), max(self.best_accuracy, score.accuracy)
        if epoch == LIMIT:
            self.running -= {"likelihood", "last"}
        if self.stale_loss >= PATIENCE:
            self.running.discard("patience")
        if self.stale >= PATIENCE:
            self.running.discard("paper")
        return bool(self.running) and epoch < MOST


def train_gat(graph: str, start: int, noise: int, torch_start: bool = False) -> dict[str, Any]:
    """One run: by rule the epoch that is kept, its validation scores and its accuracy on test nodes."""
    task = CitationGraph(graph)
    data, every = task.load(), load_graph(graph)
    assert isinstance(data.train.inputs, dict)
    with global_streams(start):
        model = task.model()
        if torch_start:
            for module in model.modules():
                if isinstance(module, nn.Linear):
                    nn.Linear.reset_parameters(module)
    optimiser = torch.optim.Adam(model.parameters(), lr=RATE, weight_decay=DECAY)
    rules = Stopping.new()
    with global_streams(noise):
        for epoch in range(1, MOST + 1):
            model.train()
            optimiser.zero_grad()
            F.cross_entropy(_nodes(model, data.train), data.train.targets[data.train.mask]).backward()
            optimiser.step()
            if not rules.see(epoch, judged(model, data.train.inputs, every)):
                break
    return {rule: {"epoch": at, **score._asdict()} for rule, (at, score) in rules.kept.items()}


def _nodes(model: nn.Module, data: Any) -> Tensor:
    outputs: Tensor = model(**data.inputs)[data.mask]
    return outputs


def judged(model: nn.Module, inputs: Any, graph: Any) -> EpochScore:
    """The scores of a model on validation and test nodes, in evaluation mode."""
    model.eval()
    with torch.no_grad():
        outputs = model(**inputs)[0]
    right = (outputs.argmax(-1) == graph.y).double()
    loss = F.cross_entropy(outputs[graph.validation], graph.y[graph.validation]).item()
    return EpochScore(loss, right[graph.validation].mean().item(), right[graph.test].mean().item())


def seeds_of(variant: str, run: int) -> tuple[int, int]:
    """The seeds of the start and of the noise of a run."""
    if variant not in VARIANTS:
        raise unknown_name("variant", variant, VARIANTS)
    start = 10_000 if variant == "start 0" else run
    noise = {"noise 0": 20_000, "noise 1": 20_001}.get(variant, 1000 + run)
    return start, noise


def runs(graph: str, variants: Sequence[str], count: int, path: Path, say: Callable[[str], None]) -> list[Any]:
    """All runs, those that the file has not are made and added to it, one by one."""
    stored = read_json(path, "runs of the baseline")["runs"] if path.exists() else []
    have = {(r["graph"], r["variant"], r["run"]) for r in stored}
    for run in range(count):  # all variants grow together
        for variant in variants:
            if (graph, variant, run) in have:
                continue
            start, noise = seeds_of(variant, run)
            found = train_gat(graph, start, noise, variant == "torch")
            stored.append({"graph": graph, "variant": variant, "run": run, "rules": found})
            write_json(path, {"runs": stored, **provenance()})
            say(f"{graph}, {variant}, run {run}: {100 * found['likelihood']['test']:.1f} %")
    return list(stored)


def _accuracies(found: Iterable[Any], variant: str, rule: str) -> dict[int, float]:
    return {r["run"]: 100 * r["rules"][rule]["test"] for r in found if r["variant"] == variant}


def table(found: Sequence[Any]) -> str:
    """Markdown: test accuracy by variant and rule, then the differences that speak of streams, starts and rules."""
    rows = [
        f"| test accuracy, % | runs | {' | '.join(RULES)} | epoch kept, {' / '.join(RULES)} |",
        "|---" * (len(RULES) + 3) + "|",
    ]
    for variant, words in VARIANTS.items():
        mine = [r for r in found if r["variant"] == variant]
        if not mine:
            continue
        cells = [_mean(_accuracies(mine, variant, rule).values()) for rule in RULES]
        epochs = [f"{sum(r['rules'][rule]['epoch'] for r in mine) / len(mine):.0f}" for rule in RULES]
        rows.append(f"| {variant}: {words} | {len(mine)} | {' | '.join(cells)} | {' / '.join(epochs)} |")
    return "\n".join([*rows, "", *differences(found)])


def differences(found: Sequence[Any]) -> Iterator[str]:
    """Paired differences, in points: of noise streams over common starts, and of rules over the same runs."""
    yield "| difference, points | mean | 95 % interval | pairs |"
    yield "|---|---|---|---|"
    for rule in RULES:
        one, other = (_accuracies(found, f"noise {i}", rule) for i in (1, 0))
        yield from _row(f"noise 1 - noise 0, {rule}", one, other)
    for rule in RULES[1:]:
        yield from _row(f"{rule} - likelihood, tied", *(_accuracies(found, "tied", r) for r in (rule, RULES[0])))
    yield from _row("torch - tied, likelihood", *(_accuracies(found, v, RULES[0]) for v in ("torch", "tied")))


def _row(label: str, one: Mapping[int, float], other: Mapping[int, float]) -> Iterator[str]:
    difference = paired_difference(one, other)
    if difference is not None:
        mean, low, high, _, n = difference
        interval = "–" if low is None or high is None else f"{low:+.2f} to {high:+.2f}"
        yield f"| {label} | {mean:+.2f} | {interval} | {n} |"


def spread_of_tens(found: Sequence[Any], rule: str = RULES[0]) -> dict[str, float]:
    """Standard deviation over runs, and the spread of means of ten runs: beside the standard error they should have."""
    values = list(_accuracies(found, "tied", rule).values())
    tens = [values[i : i + 10] for i in range(0, len(values) - 9, 10)]
    means = summarise(sum(ten) / 10 for ten in tens)
    whole = summarise(values)
    if whole is None or whole.sd is None or means is None or means.sd is None:
        return {}
    return {"sd": whole.sd, "error of ten": whole.sd / math.sqrt(10), "spread of tens": means.sd, "tens": means.n}


def spread_text(found: Sequence[Any], rule: str = RULES[0]) -> str:
    """What `spread_of_tens` found, as a sentence."""
    numbers = spread_of_tens(found, rule)
    if not numbers:
        return "Fewer than twenty runs of `tied`: too few to tell the spread of means of ten."
    return (
        f"Runs of `tied` have a standard deviation of {numbers['sd']:.2f} points, means of ten runs should have "
        f"{numbers['error of ten']:.2f} and have {numbers['spread of tens']:.2f} ({numbers['tens']:.0f} means)."
    )


def _mean(values: Iterable[float]) -> str:
    summary = summarise(values)
    if summary is None:
        return "–"
    error = "" if summary.sd is None else f" ± {summary.sd / math.sqrt(summary.n):.2f}"
    return f"{summary.mean:.2f}{error}"


def by_graph(found: Sequence[Any]) -> dict[str, list[Any]]:
    """Runs by graph, in order of name."""
    groups: dict[str, list[Any]] = defaultdict(list)
    for run in found:
        groups[run["graph"]].append(run)
    return dict(sorted(groups.items()))

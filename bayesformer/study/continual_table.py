"""What continual learning kept and learned, as a table and as figures 5 and 6 of Duffield et al. (2024)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bayesformer.bench.report.axis import Scale
from bayesformer.bench.report.plot import Plot
from bayesformer.bench.report.standalone import Key, write_figure
from bayesformer.bench.statistics import Result, summarise

LEARNERS = ("plain", "laplace, diag", "laplace, kron", "offline")
DRAWN = ("plain", "laplace, diag", "laplace, kron")
PLACE_NAMES = {"last": "last attention layer", "all": "all layers"}

Losses = Mapping[str, Mapping[int, Mapping[int, float]]]
"""By learner and episode, test loss by book; "base" has episode -1, "alone" the loss on its own book only."""


def strengths(results: Sequence[Result], place: str) -> dict[str, float]:
    """By structure, the strength with the least validation loss on the first two books after the second.

    Of the lowest seed that has them: it chooses for all.
    """
    found: dict[tuple[int, str], dict[float, float]] = defaultdict(dict)
    for result in results:
        s, m = result["settings"], result["metrics"]
        if s["kind"] == "laplace" and s["place"] == place and s["episode"] == 1:
            found[result["seed"], s["structure"]][s["strength"]] = m["validation/0"] + m["validation/1"]
    first = min((seed for seed, _ in found), default=0)
    return {structure: min(v, key=lambda k: v[k]) for (seed, structure), v in found.items() if seed == first}


def rate(results: Sequence[Result], place: str) -> float | None:
    """The learning rate of the learners that went on to the last book."""
    rates = {
        r["settings"]["lr"]
        for r in results
        if r["settings"]["kind"] == "plain" and r["settings"]["place"] == place and r["settings"]["episode"] > 0
    }
    return min(rates) if rates else None


def losses(results: Sequence[Result], place: str) -> dict[int, dict[str, dict[int, dict[int, float]]]]:
    """By seed, learner and episode: test loss by book, with the chosen rate and strengths."""
    chosen, lr = strengths(results, place), rate(results, place)
    found: dict[int, dict[str, dict[int, dict[int, float]]]] = defaultdict(lambda: defaultdict(dict))
    for result in results:
        s = result["settings"]
        if s["place"] != place or (s["kind"] != "base" and s["lr"] != lr):
            continue
        if s["kind"] == "laplace" and s["strength"] != chosen.get(s["structure"]):
            continue
        name = f"laplace, {s['structure']}" if s["kind"] == "laplace" else s["kind"]
        tested = {int(k.removeprefix("test/")): v for k, v in result["metrics"].items() if k.startswith("test/")}
        found[int(result["seed"])][name][int(s["episode"])] = tested
    for by_learner in found.values():
        for name in ("alone", *DRAWN[1:]):  # all learn the first book alike
            if name in by_learner and 0 in by_learner.get("plain", {}):
                by_learner[name].setdefault(0, by_learner["plain"][0])
    return {seed: dict(by_learner) for seed, by_learner in found.items()}


def summary(found: Losses, learner: str, books: int) -> dict[str, float]:
    """Mean test losses at the end: of all books, how much was forgotten of the earlier ones, what each cost to learn.

    forgotten: loss of a book at the end, less that right after it was learned; mean over all books but the last.
    learned: loss of a book right after it was learned, less that of the model that learned it alone; mean over books.
    """
    episodes = found.get(learner, {})
    last = books - 1
    if last not in episodes:
        return {}
    numbers = {"end": sum(episodes[last].values()) / books}
    if all(book in episodes for book in range(books)):
        earlier = [episodes[last][book] - episodes[book][book] for book in range(last)]
        numbers["forgotten"] = sum(earlier) / last
        alone = found.get("alone", {})
        if all(book in alone for book in range(books)):
            numbers["learned"] = sum(episodes[book][book] - alone[book][book] for book in range(books)) / books
    return numbers


def table(results: Sequence[Result]) -> str:
    """Markdown: a table per place of adapters, and the losses by strength that it was chosen by."""
    parts = []
    for place, title in PLACE_NAMES.items():
        found = losses(results, place)
        if found:
            parts += [_place(results, found, place, title), _episodes(results, found, place, title)]
            parts.append(_choice(results, place))
    if not parts:
        raise ValueError("results must hold episodes of `bayesformer study continual`; got none.")
    return "\n\n".join(part for part in parts if part)


def _place(results: Sequence[Result], found: Mapping[int, Losses], place: str, title: str) -> str:
    names = next(r["settings"]["books"] for r in results if r["settings"]["place"] == place)
    short = [name.replace("_", " ") for name in names]
    head = [*short, "mean", "forgotten", "learned, against alone"]
    lines = [f"| {title}: test loss after the last book, nats per token | {' | '.join(head)} |"]
    lines.append("|---|" + "---|" * len(head))
    chosen = strengths(results, place)
    rows: dict[str, str] = {"base": "pretrained", "alone": "each book alone"}
    rows |= {name: name for name in LEARNERS}
    for learner, label in rows.items():
        entries = [_entry(found, learner, book, len(names)) for book in range(len(names))]
        every = [summary(by_learner, learner, len(names)) for by_learner in found.values()]
        if learner in {"base", "alone"}:
            every = [{"end": _own_mean(by_learner, learner, len(names))} for by_learner in found.values()]
        entries.append(_mean([numbers.get("end") for numbers in every]))
        for key in ("forgotten", "learned"):  # of those that learn one after another
            entries.append(_mean([numbers.get(key) for numbers in every]) if learner in DRAWN else "–")
        structure = learner.removeprefix("laplace, ")
        strength = f", strength {chosen[structure]:g}" if structure in chosen else ""
        lines.append(f"| {label}{strength} | {' | '.join(entries)} |")
    return "\n".join(lines)


def _episodes(results: Sequence[Result], found: Mapping[int, Losses], place: str, title: str) -> str:
    """Test losses of all books after each of them, of those that learn one after another; what was run."""
    names = next(r["settings"]["books"] for r in results if r["settings"]["place"] == place)
    short, chosen = [name.replace("_", " ") for name in names], strengths(results, place)
    lines = [f"| {title}: test loss after each book | {' | '.join(short)} |", "|---|" + "---|" * len(names)]
    mean = _over_seeds(found)
    for learner in DRAWN:
        structure = learner.removeprefix("laplace, ")
        strength = f", strength {chosen[structure]:g}" if structure in chosen else ""
        for episode, tested in sorted(mean.get(learner, {}).items()):
            entries = [f"{tested[book]:.3f}" for book in range(len(names))]
            lines.append(f"| {learner}{strength}, after {short[episode]} | {' | '.join(entries)} |")
    return "\n".join(lines) if len(lines) > 2 else ""


def _losses_of(by_learner: Losses, learner: str, book: int, books: int) -> float | None:
    """The loss on a book that a row shows: at the end, or of the model that learned this book alone."""
    episode = {"base": -1, "alone": book}.get(learner, books - 1)
    return by_learner.get(learner, {}).get(episode, {}).get(book)


def _entry(found: Mapping[int, Losses], learner: str, book: int, books: int) -> str:
    return _mean([_losses_of(by_learner, learner, book, books) for by_learner in found.values()])


def _own_mean(by_learner: Losses, learner: str, books: int) -> Any:
    values = [_losses_of(by_learner, learner, book, books) for book in range(books)]
    known = [value for value in values if value is not None]
    return sum(known) / books if len(known) == books else None


def _mean(values: Sequence[float | None]) -> str:
    found = summarise(values)
    if found is None:
        return "not run"
    return f"{found.mean:.3f}" + ("" if found.sd is None else f" ± {found.sd:.3f}")


def _choice(results: Sequence[Result], place: str) -> str:
    """Validation losses by strength: the mean of the first two books after the second."""
    found: dict[str, dict[float, float]] = defaultdict(dict)
    for result in results:
        s, m = result["settings"], result["metrics"]
        if s["kind"] == "laplace" and s["place"] == place and s["episode"] == 1 and result["seed"] == 0:
            found[s["structure"]][s["strength"]] = (m["validation/0"] + m["validation/1"]) / 2
    known = sorted({strength for values in found.values() for strength in values})
    if not known:
        return ""
    lines = [f"| validation loss of two books by strength, {PLACE_NAMES[place]} | "]
    lines[0] += f"{' | '.join(f'{s:g}' for s in known)} |"
    lines.append("|---|" + "---|" * len(known))
    for structure, values in sorted(found.items()):
        entries = [f"{values[s]:.3f}" if s in values else "not run" for s in known]
        lines.append(f"| {structure} | {' | '.join(entries)} |")
    return "\n".join(lines)


# ------------------------------------------------------------------------------------------------------ the figure


def figure(results: Sequence[Result], path: Path) -> Path:
    """A row of panels per place: test loss of every book along the episodes, and the mean above those learned alone."""
    panels = []
    for place, title in PLACE_NAMES.items():
        found = losses(results, place)
        if not found:
            continue
        names = next(r["settings"]["books"] for r in results if r["settings"]["place"] == place)
        mean = _over_seeds(found)
        panels += [(f"{name.replace('_', ' ')}, {title}", _book(mean, i, len(names))) for i, name in enumerate(names)]
        panels.append((f"books so far, above alone, {title}", _relative(mean, len(names))))
    if not panels:
        raise ValueError("results must hold episodes of `bayesformer study continual`; got none.")
    columns = next(len(r["settings"]["books"]) for r in results) + 1
    key = [Key(name, f"m{i}", i) for i, name in enumerate(DRAWN)]
    return write_figure(path, panels, [*key, Key("offline, and each book alone", "m", None)], columns)


def _over_seeds(found: Mapping[int, Losses]) -> dict[str, dict[int, dict[int, float]]]:
    """Mean losses over the seeds that have an episode."""
    values: dict[tuple[str, int, int], list[float]] = defaultdict(list)
    for by_learner in found.values():
        for learner, episodes in by_learner.items():
            for episode, tested in episodes.items():
                for book, loss in tested.items():
                    values[learner, episode, book].append(loss)
    mean: dict[str, dict[int, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
    for (learner, episode, book), losses_ in values.items():
        mean[learner][episode][book] = sum(losses_) / len(losses_)
    return mean


def _book(mean: Losses, book: int, books: int) -> Plot:
    """Test loss of a book after every episode, the pretrained model's first."""
    base = mean.get("base", {}).get(-1, {})
    lines = {name: _along(mean, name, book, base) for name in DRAWN}
    guides = [mean.get("offline", {}).get(books - 1, {}).get(book), mean.get("alone", {}).get(book, {}).get(book)]
    known = [value for line in lines.values() for value in line.values()]
    y = Scale.over([*known, *(g for g in guides if g is not None)] or [0.0, 1.0], pad=0.08)
    plot = Plot(Scale.over([0, books], pad=0.03), y, 210, 190, "books learned", "test loss, nats")
    for guide in guides:
        if guide is not None:
            plot.line([0, books], [guide, guide], "guide")
    _draw(plot, lines)
    return plot


def _along(mean: Losses, name: str, book: int, base: Mapping[int, float]) -> dict[int, float]:
    line = {0: base[book]} if book in base else {}
    return line | {e + 1: tested[book] for e, tested in sorted(mean.get(name, {}).items()) if book in tested}


def _relative(mean: Losses, books: int) -> Plot:
    """Mean over the books learned so far of the loss above that of each learned alone."""
    alone = mean.get("alone", {})
    lines: dict[str, dict[int, float]] = {}
    for name in DRAWN:
        lines[name] = {}
        for episode, tested in sorted(mean.get(name, {}).items()):
            if all(book in alone for book in range(episode + 1)):
                gaps = [tested[book] - alone[book][book] for book in range(episode + 1)]
                lines[name][episode + 1] = sum(gaps) / len(gaps)
    known = [value for line in lines.values() for value in line.values()]
    y = Scale.over([*known, 0.0], pad=0.08)
    plot = Plot(Scale.over([0, books], pad=0.03), y, 210, 190, "books learned", "nats above alone")
    plot.line([0, books], [0.0, 0.0], "guide")
    _draw(plot, lines)
    return plot


def _draw(plot: Plot, lines: Mapping[str, Mapping[int, float]]) -> None:
    for i, line in enumerate(lines.values()):
        plot.line(list(line), list(line.values()), f"stroke m{i}")
        for x, value in line.items():
            plot.point(x, value, f"fill m{i}", shape=i)

"""The report page: what it says, that it is sound HTML, and that a browser shows it on desk and phone."""

import base64
import itertools
import json
import math
import os
import re
import select
import shutil
import struct
import subprocess
import sys
import time
import zlib
from html.parser import HTMLParser

import numpy as np
import pytest
from scipy import stats

from bayesformer.bench.report import write_report
from bayesformer.bench.report.axis import Scale, log_ticks, nice_ticks, tick_label
from bayesformer.bench.report.colours import PALETTE, THEME
from bayesformer.bench.report.examples import png
from bayesformer.bench.report.markup import Shared, tag
from bayesformer.bench.report.plot import Plot, marker, thinned
from bayesformer.bench.tables import print_tables

METHODS = {"mle": 0.0, "ensemble": 1.0, "laplace": 0.35, "sghmc": 0.6}  # how much each gains


def result(task="t", method="mle", seed=0, value=-1.0, **fields):
    """The smallest result: one value of the primary metric."""
    primary = fields.get("primary", "log_likelihood")
    return {
        "task": task,
        "method": method,
        "seed": seed,
        "primary": primary,
        "metrics": {primary: value},
        **fields,
    }


def series(task, values, **fields):
    """Results of a task from {method: values by seed}."""
    return [
        result(task, method, seed, value, **fields)
        for method, by_seed in values.items()
        for seed, value in enumerate(by_seed)
    ]


def realistic(tasks=("toy/m1", "digits"), seeds=2):
    """Results like the runner's, with every figure."""
    rng = np.random.default_rng(0)
    return [_realistic(t, m, s, rng) for t in tasks for m in METHODS for s in range(seeds)]


def _realistic(task, method, seed, rng):
    gain, toy = METHODS[method], task.startswith("toy")
    level = -31.0 + 1.2 * gain + 0.3 * seed + 0.1 * rng.normal()
    scores = (
        {"crps": 0.41, "rmse": 0.77, "coverage_90": 0.85} if toy else {"accuracy": 0.9, "ece": 0.03, "auroc/noise": 0.9}
    )
    return {
        **result(task, method, seed, level if toy else level / 100),
        "metrics": {
            "log_likelihood": level if toy else level / 100,
            **{name: value + 0.01 * gain + 0.002 * rng.normal() for name, value in scores.items()},
        },
        "task_description": f"What {task} is.",
        "method_description": f"What {method} is.",
        "variant": "",
        "settings": {"task": {"length": 24}, "training": {"epochs": 20}, "method": {}},
        "commit": "abc1234",
        "dirty": False,
        "versions": {"torch": "2.13"},
        "device": "cpu",
        "started": f"2026-01-0{seed + 1}T12:00:00",
        "cost": {
            "fit_seconds": 10 * (1 + 4 * gain) * rng.uniform(0.9, 1.1),
            "predict_ms": 0.2 + gain,
            "parameters": 30_000,
            "peak_mib": None,
        },
        "oracle": {"log_likelihood": -29.0, "gap": level + 29.0, "gap_se": 0.3} if toy else None,
        "figures": _toy_figures(rng) if toy else _class_figures(rng),
    }


def _toy_figures(rng):
    levels = [0.1, 0.3, 0.5, 0.7, 0.9]
    time_, mean = np.arange(48), np.sin(np.arange(48) / 5)
    band = {"time": time_, "observed": mean + 0.2 * rng.normal(size=48), "mean": mean, "oracle_mean": mean}
    for name, width in (("", 0.5), ("aleatoric_", 0.4), ("oracle_", 0.3)):
        band |= {f"{name}low": mean - width, f"{name}high": mean + width}
    bands = [{name: values.tolist() for name, values in band.items()}] * 3
    chains = rng.normal(size=(2, 30)).tolist()
    return {
        "coverage": {"levels": levels, "coverage": [v**1.3 for v in levels]},
        "bands": bands,
        "traces": [{"name": "projection.weight[3]", "chains": chains}],
    }


def _class_figures(rng):
    confidence = np.linspace(0.2, 0.99, 12)
    edges = np.linspace(0, 2.3, 31)
    counts = {name: (1000 * np.exp(-edges[1:] * k)).astype(int).tolist() for name, k in (("test", 4), ("noise", 1))}
    grid = np.linspace(-1, 1, 28)
    blob = np.exp(-4 * (grid[:, None] ** 2 + (grid - rng.uniform(-0.5, 0.5)) ** 2)).round(3).tolist()
    image = {"image": blob, "label": 3, "predicted": 8, "entropy": 1.25}
    return {
        "reliability": {
            "confidence": confidence.tolist(),
            "accuracy": (confidence**1.2).tolist(),
            "count": list(range(1, 13)),
        },
        "entropy": {"edges": edges.tolist(), "sets": counts},
        "examples": {"highest": [image] * 8, "lowest": [{**image, "predicted": 3}] * 8},
    }


class Page(HTMLParser):
    """Reads a page strictly: every element closed in order; keeps elements, tables and text."""

    def __init__(self, text):
        super().__init__()
        self.open, self.elements, self.tables, self.text, self.titles = [], [], {}, "", []
        self.feed(text)
        self.close()
        assert not self.open, f"not closed: {self.open}"

    def handle_starttag(self, name, attributes):
        self.elements.append((name, dict(attributes)))
        assert len(dict(attributes)) == len(attributes), f"an attribute twice in {name}"
        if name not in ("meta", "img"):
            self.open.append(name)
        if name == "table":
            self.rows, self.caption = [], ""
        if name == "tr":
            self.rows.append([])
        if name in ("td", "th"):
            self.rows[-1].append("")

    def handle_startendtag(self, name, attributes):
        assert "svg" in self.open, f"<{name}/> outside svg"
        self.elements.append((name, dict(attributes)))

    def handle_endtag(self, name):
        assert self.open.pop() == name, name
        if name == "table":
            head, *body = self.rows
            self.tables[self.caption] = [dict(zip(head, row, strict=True)) for row in body]

    def handle_data(self, data):
        if self.open and self.open[-1] not in ("style", "script"):
            self.text += data
            if "caption" in self.open:
                self.caption += data
            if "td" in self.open or "th" in self.open:
                self.rows[-1][-1] += data

    def table(self, part):
        return next(rows for caption, rows in self.tables.items() if part in caption)


def page_of(results, tmp_path, **options):
    return Page(write_report(results, tmp_path / "page.html", **options).read_text())


def ranking(page, task="t"):
    """The main table of a task, rows by method; the rank stands before the name."""
    rows = page.table(f"{task}: methods ranked")
    return {re.sub(r"^[\d–]+", "", row["Method"]): row for row in rows}


# ── What it says ─────────────────────────────────────────────────────────────────────────────────────────


def test_table_shows_mean_spread_difference_and_corrected_p(tmp_path):
    mle, other, third = (-1.0, -1.3, -1.1), (-0.8, -0.9, -0.6), (-1.2, -1.1, -1.4)
    row = ranking(page_of(series("t", {"mle": mle, "other": other, "third": third}), tmp_path))["other"]
    test = stats.ttest_rel(other, mle)
    low, high = test.confidence_interval(0.95)
    smaller = test.pvalue < stats.ttest_rel(third, mle).pvalue
    signed = lambda value: f"{value:+.2f}".replace("-", "−")  # noqa: E731
    assert row["Log-likelihood, nats ↑"] == f"−0.77 ± {np.std(other, ddof=1):.2f}"
    assert row["Difference to MLE"] == f"{signed(1.1 / 3)} [{signed(low)}, {signed(high)}]"
    assert smaller
    assert row["Verdict"] == f"≈ unclear p = {2 * test.pvalue:.2f}"  # Holm: twice the smaller of two


@pytest.mark.parametrize(("metric", "order"), [("log_likelihood", ["a", "b", "mle"]), ("ece", ["mle", "b", "a"])])
def test_rank_follows_the_direction_of_the_metric(metric, order, tmp_path):
    values = {"mle": (0.1,), "a": (0.3,), "b": (0.2,)}
    page = page_of(series("t", values, primary=metric), tmp_path)
    assert [row["Method"] for row in page.table("methods ranked")] == [f"{i}{m}" for i, m in enumerate(order, 1)]
    assert f"{order[0]} ranks first" in page.text


def test_ties_share_a_rank_and_stand_by_name(tmp_path):
    page = page_of(series("t", {"mle": (1.0,), "z": (2.0,), "b": (2.0,)}), tmp_path)
    assert [row["Method"] for row in page.table("methods ranked")] == ["1b", "1z", "3mle"]
    assert "b and z share the first rank by log-likelihood" in page.text


def test_significance_is_said_in_words_and_signs(tmp_path):
    values = {"mle": (1.0, 1.1, 1.2, 0.9), "up": (2.0, 2.11, 2.19, 1.9), "down": (0.0, 0.11, 0.19, -0.1)}
    page = page_of(series("t", values), tmp_path)
    table = ranking(page)
    assert table["up"]["Verdict"].startswith("▲ better")
    assert table["down"]["Verdict"].startswith("▼ worse")
    assert "On 1 of 1 task the top-ranked method is significantly better than the MLE." in page.text
    assert (
        "2 tested comparisons of a method with the MLE: 1 significantly better ▲, 1 significantly worse ▼" in page.text
    )


def test_negative_results_are_stated(tmp_path):
    values = {"mle": (2.0, 2.11, 2.19, 1.9), "down": (0.0, 0.1, 0.2, -0.1)}
    page = page_of(series("t", values), tmp_path)
    assert "On 1 of 1 task the MLE itself ranks first." in page.text
    assert "No gain from being Bayesian was seen here" in page.text
    assert "1 of 1 others significantly worse ▼" in page.table("Best method per task")[0]["Significant?"]


def test_one_seed_shows_no_spread_and_no_test(tmp_path):
    page = page_of(series("t", {"mle": (-1.25,), "a": (-1.0,)}), tmp_path)
    row = ranking(page)["a"]
    assert row["Log-likelihood, nats ↑"] == "−1.000"
    assert row["Difference to MLE"] == "+0.250 [n/a]"
    assert row["Verdict"] == "n/a"
    assert "no spread can be given" in page.text
    assert "With one training seed nothing can be tested" in page.text
    assert "±" not in str(ranking(page))


def test_verdicts_from_two_seeds_are_marked_wherever_they_stand(tmp_path):
    values = {"mle": (1.0, 1.1), "up": (2.0, 2.101), "same": (1.0, 1.4)}
    page = page_of(series("t", values) + series("u", {m: v[::-1] for m, v in values.items()}), tmp_path)
    verdicts = {method: row["Verdict"] for method, row in ranking(page).items()}
    assert verdicts == {"up": "▲ better p < 0.001, few seeds", "same": "≈ unclear p = 0.50, few seeds", "mle": ""}
    assert page.table("Best method per task")[0]["Significant?"] == "▲ Yes, p < 0.001, few seeds"
    assert page.table("Rank of every method")[0]["t"] == "1▲ few seeds"
    assert "up ranks first by log-likelihood and is significantly better than the MLE (few seeds)." in page.text
    assert "On 2 of 2 tasks the top-ranked method is significantly better than the MLE (few seeds)." in page.text
    assert "2 unclear ≈; 4 of 4 on few seeds." in page.text
    assert "few seeds: fewer than 3 in common with the MLE" in page.text


def test_of_some_verdicts_the_fragile_are_counted(tmp_path):
    steady = {"mle": (1.0, 1.1, 1.2), "up": (2.0, 2.101, 2.199)}
    worse = {"mle": (1.0, 1.1), "down": (0.0, 0.101)}
    results = series("t", steady) + series("u", {m: v[:2] for m, v in steady.items()}) + series("v", worse)
    page = page_of(results, tmp_path)
    assert "On 2 of 3 tasks the top-ranked method is significantly better than the MLE (few seeds on 1)" in page.text
    assert "0 unclear ≈; 2 of 3 on few seeds." in page.text
    said = [row["Significant?"] for row in page.table("Best method per task")]
    assert said[0] == "▲ Yes, p < 0.001"
    assert said[2] == "No: nothing ranks above the MLE; 1 of 1 others significantly worse ▼ (few seeds)"


def test_three_seeds_are_not_few_and_one_is_no_test(tmp_path):
    for values in ({"mle": (1.0, 1.1, 1.3), "a": (2.0, 2.2, 2.1)}, {"mle": (1.0,), "a": (2.0,)}):
        assert "few seeds" not in page_of(series("t", values), tmp_path).text


def test_where_a_p_value_stands_it_says_that_significant_is_not_large(tmp_path):
    words = "A significant difference can still be too small to matter."
    page = page_of(series("t", {"mle": (1.0, 1.1, 1.3), "a": (2.0, 2.2, 2.1)}), tmp_path)
    assert page.text.count(words) == 2  # under the answers and under the ranking
    assert words not in page_of(series("t", {"mle": (1.0,), "a": (2.0,)}), tmp_path).text


def test_spread_says_over_how_many_seeds(tmp_path):
    page = page_of(series("t", {"mle": (1.0, 2.0, 3.0), "a": (1.0, 2.5)}), tmp_path)
    assert "± spread is the standard deviation over 2 to 3 training seeds." in page.text


def test_without_mle_nothing_is_compared(tmp_path):
    page = page_of(series("t", {"a": (1.0, 2.0), "b": (2.0, 4.0)}), tmp_path)
    assert "Difference to MLE" not in page.table("methods ranked")[0]
    assert "no MLE was run, so no gain can be claimed" in page.text
    assert "no task was run with both the MLE and another method" in page.text


def test_missing_values_are_dashes_and_failures_are_counted(tmp_path):
    results = series("t", {"mle": (1.0, 1.1), "a": (math.nan, 2.0), "b": (None, None)})
    results[0]["metrics"]["accuracy"] = 0.5
    page = page_of(results, tmp_path)
    table = ranking(page)
    assert list(table) == ["a1 failed run", "mle", "b2 failed runs"]
    assert table["a1 failed run"]["Log-likelihood, nats ↑"] == "2.000"
    assert table["a1 failed run"]["Difference to MLE"] == "+0.900 [n/a]"
    assert set(table["b2 failed runs"].values()) == {"–b2 failed runs", "–", "n/a"}
    assert "which flatters the mean" in page.text


def test_training_that_has_not_converged_is_marked(tmp_path, capsys):
    results = series("t", {"mle": (1.0, 1.1), "a": (2.0, 2.1), "b": (0.0, 0.1)})
    for run, converged in zip(results, ([True], [True], [True, False], [True, True], [None], None), strict=True):
        run["fit"] = {"converged": converged}
    page = page_of(results, tmp_path)
    assert list(ranking(page)) == ["a↗", "mle", "b"]  # b is too short to tell, or was stored before this was recorded
    (mark,) = [found for name, found in page.elements if name == "span" and found.get("class") == "rising"]
    assert mark["title"] == mark["aria-label"] == "has not converged in 1 of 2 runs"
    assert "↗ has not converged: the training objective still rose when training ended." in page.text
    print_tables([{**run, "cost": {}} for run in results])
    shown = capsys.readouterr().out
    assert "a ↗ " in shown
    assert shown.count("↗") == 2  # behind the name and in the legend
    assert "↗" not in page_of(results[:2], tmp_path).text


def test_settings_that_came_later_do_not_part_results_from_those_stored_before(tmp_path):
    """A result of today names settings that older ones lack; at their defaults they are the same training."""
    before = [result(seed=seed, settings={"training": {"epochs": 3}}) for seed in range(2)]
    training = {"epochs": 3, "max_steps": None, "precision": "float32"}
    today = [result(method="a", seed=seed, settings={"training": training}) for seed in range(2)]
    page = page_of([*before, *today, result(seed=2, settings={"training": training})], tmp_path)
    assert [name for name in page.tables if "methods ranked" in name] == ["t: methods ranked by log-likelihood"]
    assert "were not run with the same" not in page.text
    other = result(method="b", settings={"training": {**training, "max_steps": 5}})
    assert "not run with the same training.max_steps" in page_of([*before, *today, other], tmp_path).text


def test_of_very_many_methods_the_header_names_kinds_and_folds_the_ranks(tmp_path):
    variants = [result(task, "vi", value=i, variant=f"draws={i}") for task in ("t", "u") for i in range(30)]
    page = page_of([*variants, result("t", "mle"), result("u", "sgld")], tmp_path)
    facts = page.text.split("What the methods")[0].split("Seeds")[0]
    assert "vi (30 variants)" in facts
    assert "draws=" not in facts
    assert "sgld on t and mle on u: not asked for, or failed" in page.text.replace("\n", " ")
    folded = (tmp_path / "page.html").read_text().split("Rank of every method</summary>")
    assert len(folded) == 2
    few = page_of(series("t", {"mle": (1.0,), "a": (2.0,)}) + series("u", {"mle": (1.0,), "a": (2.0,)}), tmp_path)
    assert "Rank of every method on every task" in few.text
    assert "Rank of every method</summary>" not in (tmp_path / "page.html").read_text()


def test_method_missing_on_one_task(tmp_path):
    results = series("one", {"mle": (1.0,), "a": (2.0,)}) + series("two", {"mle": (1.0,)})
    page = page_of(results, tmp_path)
    assert "a on two: not asked for, or failed" in page.text
    assert page.table("Rank of every method")[0]["two"] == "–"
    assert "1 of 2 tasks" in page.table("Rank of every method")[0]["Mean rank"]
    assert "Only mle was run here" in page.text


def test_nothing_but_the_keys_is_enough(tmp_path):
    page = page_of([{"task": "t", "method": "m", "seed": 0}], tmp_path)
    assert "No method has a ranked score" in page.text


def test_a_metric_that_the_catalogue_does_not_know_ranks_nobody(tmp_path):
    page = page_of(series("t", {"mle": (1.0,), "a": (2.0,)}, primary="charm"), tmp_path)
    assert [row["Method"] for row in page.table("methods ranked")] == ["–a", "–mle"]


def test_oracle_gap_with_its_standard_error(tmp_path):
    oracles = [{"log_likelihood": -5.0, "gap": gap, "gap_se": error} for gap, error in ((-0.5, 0.2), (-0.7, 0.4))]
    results = [result(seed=i, value=-5.5, oracle=o) for i, o in enumerate(oracles)]
    results.append(result(method="leak", value=-4.0, oracle={"log_likelihood": -5.0, "gap": 1.0, "gap_se": 0.1}))
    table = ranking(page_of(results, tmp_path))
    assert table["mle"]["Gap to oracle, nats"] == "−0.60 ± 0.30"  # seeds share sequences: errors are averaged
    assert "check for a leak" in table["leak"]["Gap to oracle, nats"]


def test_of_cells_run_twice_the_later_counts(tmp_path):
    twice = [result(value=1.0, started="2026-01-02"), result(value=9.0, started="2026-01-01")]
    page = page_of(twice, tmp_path)
    assert ranking(page)["mle"]["Log-likelihood, nats ↑"] == "1.000"
    assert "1 earlier run replaced by a later one" in page.text


def test_runs_of_different_settings_are_never_averaged(tmp_path):
    settings = [{"training": {"epochs": n, "lr": 0.1}} for n in (5, 50)]
    page = page_of([result(value=float(i), settings=s) for i, s in enumerate(settings)], tmp_path)
    assert ranking(page, "t (epochs=5)")["mle"]["Log-likelihood, nats ↑"] == "0.00"
    assert ranking(page, "t (epochs=50)")["mle"]["Log-likelihood, nats ↑"] == "1.000"


def test_methods_trained_unequally_are_pointed_out(tmp_path):
    results = [result(method=m, value=1.0, settings={"training": {"epochs": n}}) for m, n in (("mle", 5), ("a", 50))]
    assert "Caution: the methods were not run with the same training.epochs." in page_of(results, tmp_path).text


def test_header_says_what_was_run(tmp_path):
    page = page_of(realistic(), tmp_path, title="My title", note="demo settings: short training")
    for words in (
        "My title",
        "demo settings",
        "abc1234",
        "torch 2.13",
        "2026-01-01 to 2026-01-02",
        "16 runs",
    ):
        assert words in page.text
    assert "uncommitted" not in page.text
    dirty = page_of([result(dirty=True, commit="abc")], tmp_path)
    assert "abc; 1 run with uncommitted changes" in dirty.text


def test_cost_is_set_against_the_mle(tmp_path):
    costs = {"mle": {"fit_seconds": 2.0, "parameters": 1234567}, "a": {"fit_seconds": 5.0, "peak_mib": 100.2}}
    page = page_of([result(method=m, value=1.0, cost=c) for m, c in costs.items()], tmp_path)
    row = {r["Method"]: r for r in page.table("t: cost")}
    assert row["a"]["Training, s"] == "5.0002.5 × MLE"
    assert (row["mle"]["Stored numbers"], row["a"]["Stored numbers"]) == ("1\u202f234\u202f567", "–")


def test_wrong_results_are_refused_by_name(tmp_path):
    with pytest.raises(ValueError, match="results must hold at least one result; got an empty list"):
        write_report([], tmp_path / "page.html")
    with pytest.raises(ValueError, match=r"results\[1\] must have task, method and seed; it lacks seed"):
        write_report([result(), {"task": "t", "method": "m"}], tmp_path / "page.html")
    assert not list(tmp_path.iterdir())


def test_it_replaces_the_old_page_and_leaves_nothing_else(tmp_path):
    target = tmp_path / "new" / "page.html"
    assert write_report([result()], target, title="first") == target
    write_report([result()], str(target), title="second")
    assert "second" in target.read_text()
    assert list(target.parent.iterdir()) == [target]


# ── Sound HTML ───────────────────────────────────────────────────────────────────────────────────────────


def test_page_is_sound_offline_and_accessible(tmp_path):
    page = page_of(realistic(), tmp_path)
    attributes = [a for _, a in page.elements]
    ids = [a["id"] for a in attributes if "id" in a]
    assert len(ids) == len(set(ids))
    for link in [a[key] for a in attributes for key in ("href", "src", "xlink:href", "srcset", "data") if key in a]:
        assert link.startswith("data:image/png;base64,") or link[1:] in ids
    assert not {"link", "iframe", "object", "embed", "base", "form"} & {name for name, _ in page.elements}
    levels = [int(name[1]) for name, _ in page.elements if re.fullmatch(r"h\d", name)]
    assert levels[0] == 1
    assert all(b - a <= 1 for a, b in itertools.pairwise(levels))
    assert all(a.get("scope") in ("row", "col") for name, a in page.elements if name == "th")
    assert all(a.get("alt") for name, a in page.elements if name == "img")
    plots = [a for name, a in page.elements if name == "svg" and a.get("class") == "plot"]
    assert len(plots) >= 4 * 5
    assert all(a["role"] == "img" and a["aria-label"] for a in plots)
    assert "url(" not in (tmp_path / "page.html").read_text()
    assert "@import" not in (tmp_path / "page.html").read_text()


HOSTILE = "</title></style><script>window.pwned=1</script><img src=x onerror=window.pwned=1>\"'&\ud800"


def hostile():
    """Every text of a result tries to run a script."""
    results = []
    for plain in realistic(seeds=1):
        texts = ("task", "task_description", "method_description", "variant", "commit", "device", "started")
        changed = {**plain, **dict.fromkeys(texts, HOSTILE + plain["task"])}
        changed["versions"] = {HOSTILE: HOSTILE}
        changed["settings"] = {"method": {HOSTILE: HOSTILE}}
        changed["metrics"] = {**plain["metrics"], HOSTILE: 1.0}
        if "entropy" in plain["figures"]:
            plain["figures"]["entropy"]["sets"] = {HOSTILE: [1, 2], "test": [2, 1]}
            plain["figures"]["examples"]["highest"][0]["label"] = HOSTILE
        results.append(changed)
    return results


def test_all_text_is_escaped(tmp_path):
    page = page_of(hostile(), tmp_path, title=HOSTILE, note=HOSTILE)
    assert [name for name, _ in page.elements].count("script") == 1
    assert not [a for _, a in page.elements if any(key.startswith("on") for key in a)]
    assert page.text.count("<script>window.pwned=1</script>") > 20
    policy = next(a["content"] for _, a in page.elements if a.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none'")


def test_page_of_six_tasks_stays_small(tmp_path):
    tasks = ("toy/m1", "toy/m2", "toy/m3", "digits", "mnist", "tags")
    path = write_report(realistic(tasks), tmp_path / "page.html")
    assert path.stat().st_size < 750_000


def test_broken_figures_do_not_stop_the_report(tmp_path):
    figures = {
        "reliability": {"confidence": [0.5, None], "accuracy": [math.nan, 0.2], "count": [0, 3]},
        "coverage": {"levels": [], "coverage": []},
        "entropy": {"edges": [], "sets": {}},
        "bands": [{"time": [0, 1, 2], "mean": [0.0, None, 1e9], "low": [0.0], "high": []}],
        "examples": {"highest": [{"image": [[1.0], [1.0, 2.0]]}, {"label": 1}], "lowest": None},
    }
    page = page_of([result(value=1.0, figures=figures, cost={"fit_seconds": 0.0}, oracle={})], tmp_path)
    assert "Does confidence come true?" in page.text
    assert "Which inputs puzzle it?" not in page.text


# ── Plotting ─────────────────────────────────────────────────────────────────────────────────────────────


def test_tag_escapes_text_and_attributes():
    assert tag("b", "<&", None, [tag("i", "x"), "'"], title='"<', hidden=True, class_=None) == (
        """<b title="&quot;&lt;" hidden>&lt;&amp;<i>x</i>'</b>"""
    )


@pytest.mark.parametrize(
    ("low", "high", "count", "expected"),
    [
        (0, 1, 5, [0, 0.2, 0.4, 0.6, 0.8, 1]),
        (-3.1, 7, 4, [0, 5]),
        (99.2, 99.9, 3, [99.5]),
        (0, 4e-7, 2, [0, 2e-7, 4e-7]),
    ],
)
def test_ticks_are_round_and_inside(low, high, count, expected):
    assert nice_ticks(low, high, count) == pytest.approx(expected, rel=1e-9, abs=1e-12)


def test_ticks_refuse_an_empty_range():
    with pytest.raises(ValueError, match=r"low and high must be finite with low < high; got 1, 1"):
        nice_ticks(1, 1)


@pytest.mark.parametrize(("low", "high"), [(0.02, 7), (3, 4), (1e-5, 1e9), (11, 13), (0.9, 1.1)])
def test_log_ticks_are_few_and_inside(low, high):
    ticks = log_ticks(low, high)
    assert 1 <= len(ticks) <= 6
    assert all(low <= t <= high for t in ticks)


def test_labels_are_written_as_people_do():
    labels = [tick_label(v) for v in (0.05, -2, 0.1 + 0.2, 1e-17, 12_000, 3e6, 2.5e9)]
    assert labels == ["0.05", "−2", "0.3", "0", "12k", "3M", "2.5G"]


@pytest.mark.parametrize("values", [[], [math.nan], [3.0], [0.0], [-5.0, -5.0], [1e300, -1e300]])
def test_scale_of_anything_is_a_scale(values):
    scale = Scale.over(values)
    assert scale.low < scale.high
    assert scale.ticks
    assert Scale.over(values, log=True).low > 0


def test_marks_stand_where_the_numbers_are():
    plot = Plot(Scale(0, 10, ()), Scale(0, 2, ()), 116, 124)  # an area of 100 × 100
    assert (plot.inner_width, plot.inner_height) == (100, 100)
    plot.line([0, 5, 6, math.nan, 8, 10], [0, 1, math.nan, 1, 2, 2])
    plot.band([0, 10], [0, 0], [2, 1])
    plot.histogram([0, 5, 10], [2, 1], "soft", closed=True)
    paths = re.findall(r' d="([^"]*)"', "".join(plot.marks))
    assert paths == [
        "M0 100l50-50M80 0l20 0",
        "M0 100l100 0 0-50-100-50z",
        "M0 100l0-100 50 0 0 50 50 0 0 50",
    ]


def test_thinned_lines_stay_within_the_tolerance():
    """The law of Douglas and Peucker: every corner left out is at most the tolerance from the line that stays."""
    noise = np.random.default_rng(0)
    for scale in (0.05, 0.3, 3.0):
        points = [(float(x), float(y)) for x, y in zip(range(400), np.cumsum(noise.normal(0, scale, 400)), strict=True)]
        kept = thinned(points, 0.15)
        assert (kept[0], kept[-1]) == (points[0], points[-1])
        assert set(kept) <= set(points)
        corners = [points.index(p) for p in kept]
        for first, last in itertools.pairwise(corners):
            (x, y), (u, v) = points[first], points[last]
            for a, b in points[first : last + 1]:
                assert abs((a - x) * (v - y) - (b - y) * (u - x)) <= 0.15 * math.hypot(u - x, v - y) + 1e-9
    assert thinned([(float(i), 2.0 * i) for i in range(50)]) == [(0.0, 0.0), (49.0, 98.0)]
    assert len(thinned(points, 0.0)) == len(points)
    assert thinned([(1.0, 1.0)]) == [(1.0, 1.0)]
    assert thinned([(0.0, 0.0), (5.0, 0.0), (0.0, 0.0)]) == [(0.0, 0.0), (5.0, 0.0), (0.0, 0.0)]  # there and back


def test_what_charts_share_is_written_once_and_every_reference_leads_there(tmp_path):
    text = write_report(realistic(), tmp_path / "page.html").read_text()
    names = re.findall(r' id="(d\d+)"', text)
    references = re.findall(r'<use href="#(d\d+)"/>', text)
    assert len(names) == len(set(names))
    assert set(references) == set(names)
    assert len(references) > 3 * len(names)
    assert text.index("</defs>") < text.index("<header")
    assert text.rindex(' id="d') < text.index("</defs>")


def test_shared_drawings():
    share = Shared()
    one, other = (tag("path", d=f"M0 0{'h1' * n}") for n in (20, 30))
    assert [share(one), share(other), share(one)] == [f'<use href="#d{i}"/>' for i in (0, 1, 0)]
    assert share(tag("path", d="M0 0h1")) == '<path d="M0 0h1"/>'  # as short as a reference
    assert f'<defs><g id="d0" class="plot">{one}</g><g id="d1" class="plot">{other}</g></defs>' in share.definitions()


def test_the_page_lists_what_was_skipped(tmp_path):
    page = page_of([result()], tmp_path, skipped=["result a.json is <truncated>.", "result b.json lacks cost."])
    assert "Skipped 2 stored results that cannot be read." in page.text
    assert "result a.json is <truncated>." in page.text
    assert "cannot be read" not in page_of([result()], tmp_path).text


def test_many_methods_show_one_series(tmp_path):
    band = {"time": [1, 2], "observed": [0.0, 1.0], "mean": [0.0, 1.0], "low": [-1.0, 0.0], "high": [1.0, 2.0]}
    for number, rows in ((3, 2), (12, 1)):
        results = [result(method=f"m{i}", value=1.0, figures={"bands": [band, band]}) for i in range(number)]
        text = write_report(results, tmp_path / "page.html").read_text()
        assert text.count("Predictions for series") == number * rows


@pytest.mark.parametrize("shape", range(5))
def test_markers_have_the_area_of_their_disc(shape):
    numbers = [float(n) for n in re.findall(r"-?\d+\.?\d*", marker(500, 500, 100, shape))]
    if shape == 0:
        assert numbers[:2] == [400, 500]
        assert numbers[2:4] == [100, 100]
        return
    x, y = np.array(numbers).reshape(-1, 2).T
    area = abs(np.sum(x * np.roll(y, -1) - y * np.roll(x, -1))) / 2
    assert area == pytest.approx(math.pi * 100**2, rel=2e-3)


def test_png_holds_the_pixels():
    data = base64.b64decode(png([[0.0, 1.0, 2.0], [2.0, 1.0, math.nan]]).partition(",")[2])
    chunks = dict(re.findall(rb"(IHDR|IDAT)(.*?)(?=.{8}IDAT|.{8}IEND|$)", data, re.DOTALL))
    assert struct.unpack(">II", chunks[b"IHDR"][:8]) == (3, 2)
    rows = zlib.decompressobj().decompress(chunks[b"IDAT"])
    assert rows == bytes([0, 0, 128, 255, 0, 255, 128, 0])
    with pytest.raises(ValueError, match="pixels must be rows of equal length"):
        png([[1.0], [1.0, 2.0]])


DEFICIENCIES = {  # Machado, Oliveira & Fernandes (2009), severity 1, in linear RGB
    "none": [[1, 0, 0], [0, 1, 0], [0, 0, 1]],
    "protan": [
        [0.152286, 1.052583, -0.204868],
        [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ],
    "deutan": [
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.01182, 0.04294, 0.968881],
    ],
    "tritan": [
        [1.255528, -0.076749, -0.178779],
        [-0.078411, 0.930809, 0.147602],
        [0.004733, 0.691367, 0.3039],
    ],
}
TO_XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])


def linear(colour):
    c = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    return np.where(c <= 0.04045, c / 12.92, ((c + 0.055) / 1.055) ** 2.4)


def lab(rgb):
    xyz = TO_XYZ @ rgb.clip(0, 1) / [0.9505, 1, 1.089]
    f = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def contrast(a, b):
    low, high = sorted(TO_XYZ[1] @ linear(c) + 0.05 for c in (a, b))
    return high / low


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_colours_stay_apart_with_any_colour_vision(theme):
    colours = [pair[theme] for pair in (*PALETTE, THEME["m"])]
    for matrix in DEFICIENCIES.values():
        seen = [lab(np.array(matrix) @ linear(c)) for c in colours]
        assert min(np.linalg.norm(a - b) for a, b in itertools.combinations(seen, 2)) > 10


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
@pytest.mark.parametrize("ground", ["bg", "panel"])
def test_colours_stand_out_from_the_ground(theme, ground):
    behind = THEME[ground][theme]
    assert all(contrast(pair[theme], behind) >= 3 for pair in PALETTE)
    assert all(contrast(THEME[name][theme], behind) >= 4.5 for name in ("ink", "muted", "link", "good", "bad"))


# ── In a browser ─────────────────────────────────────────────────────────────────────────────────────────

FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    "--remote-debugging-pipe",
)
LAUNCH = """
import fcntl, os, sys
ends = [fcntl.fcntl(int(end), fcntl.F_DUPFD, 10) for end in sys.argv[1:3]]  # out of the way of 3 and 4
for end, number in zip(ends, (3, 4)):
    os.dup2(end, number)
os.execv(sys.argv[3], sys.argv[3:])
"""
"""The browser wants its pipe under these two numbers."""


class Browser:
    """Chromium spoken to over its debugging pipe: messages end with a zero byte, so no library is needed.

    Only this way is a width of 390 real: a headless window is never narrower than about 500.
    """

    def __init__(self, binary, folder):
        theirs, self.write = os.pipe()
        self.read, answers = os.pipe()
        command = [sys.executable, "-c", LAUNCH, str(theirs), str(answers), binary, *FLAGS]
        command += [f"--user-data-dir={folder}", "about:blank"]
        quiet = subprocess.DEVNULL
        self.process = subprocess.Popen(command, pass_fds=(theirs, answers), stdout=quiet, stderr=quiet)
        os.close(theirs)
        os.close(answers)
        self.count, self.rest, self.session = 0, b"", {}

    def __enter__(self):
        try:
            pages = self.call("Target.getTargets")["targetInfos"]
            target = next(p["targetId"] for p in pages if p["type"] == "page")
            self.session = {"sessionId": self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]}
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        self.process.terminate()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        os.close(self.write)
        os.close(self.read)

    def call(self, method, **params):
        self.count += 1
        message = {"id": self.count, "method": method, "params": params, **self.session}
        os.write(self.write, json.dumps(message).encode() + b"\0")
        until = time.monotonic() + 20
        while True:
            answer = json.loads(self.receive(until))
            if answer.get("id") == self.count:
                assert "error" not in answer, answer
                return answer["result"]

    def receive(self, until):
        while b"\0" not in self.rest:
            ready, _, _ = select.select([self.read], [], [], max(0.0, until - time.monotonic()))
            assert ready, "the browser does not answer"
            data = os.read(self.read, 1 << 20)
            assert data, "the browser has ended"
            self.rest += data
        message, self.rest = self.rest.split(b"\0", 1)
        return message

    def js(self, expression):
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def show(self, path, width, theme):
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=900,
            deviceScaleFactor=1,
            mobile=width < 500,
        )
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": theme}])
        self.call("Page.navigate", url=path.as_uri())
        until = time.monotonic() + 20
        while self.js("document.readyState + location.protocol") != "completefile:":
            assert time.monotonic() < until, "the page does not load"
            time.sleep(0.02)

    def screenshot(self, path):
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))


def shades(picture):
    """Number of distinct bytes in a picture's rows: a blank one has a handful."""
    data = picture.read_bytes()
    parts, place = [], 8
    while place < len(data):
        (length,) = struct.unpack(">I", data[place : place + 4])
        if data[place + 4 : place + 8] == b"IDAT":
            parts.append(data[place + 8 : place + 8 + length])
        place += length + 12
    return len(set(zlib.decompress(b"".join(parts))))


def test_a_browser_shows_it_on_a_desk_and_on_a_phone(tmp_path):
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    binary = next((found for name in names if (found := shutil.which(name))), None)
    if binary is None:
        pytest.skip(f"needs a browser to look at the page; none of {', '.join(names)} is installed")
    page = write_report(realistic(), tmp_path / "page.html", note="demo")
    bad = write_report(hostile(), tmp_path / "hostile.html", title=HOSTILE)
    with Browser(binary, tmp_path / "profile") as browser:
        for width, theme in itertools.product((1280, 390), ("light", "dark")):
            browser.show(page, width, theme)
            assert browser.js("innerWidth") == width
            assert browser.js("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
            assert browser.js("getComputedStyle(document.body).backgroundColor") == css(THEME["bg"], theme)
            browser.screenshot(tmp_path / f"{width}-{theme}.png")
            assert shades(tmp_path / f"{width}-{theme}.png") > 60
        # On the phone a wide table scrolls in its own frame, its first column staying where it is.
        box = "[...document.querySelectorAll('.scroll')].find(e => e.scrollWidth > e.clientWidth + 50)"
        head = f"{box}.querySelector('tbody th').getBoundingClientRect().left"
        before = browser.js(head)
        assert browser.js(f"{box}.scrollLeft = 40, {box}.scrollLeft") == 40
        assert browser.js(head) == before
        browser.js("document.getElementById('theme').click()")  # from dark to light
        assert browser.js("getComputedStyle(document.body).backgroundColor") == css(THEME["bg"], "light")
        browser.show(bad, 390, "light")
        assert browser.js("typeof window.pwned") == "undefined"
        assert browser.js("document.documentElement.scrollWidth <= document.documentElement.clientWidth")


def css(pair, theme):
    colour = pair[theme == "dark"]
    return "rgb({}, {}, {})".format(*(int(colour[i : i + 2], 16) for i in (1, 3, 5)))

"""The tables that open the documents: who wins, by validation, and that the documents are up to date."""

from pathlib import Path

import pytest

from bayesformer import cli
from bayesformer.bench.statistics import Entry
from bayesformer.core.storage import write_json
from bayesformer.study import summary_table

ROOT = Path(__file__).parent.parent


def result(method, seed, score, validation, seconds=1.0, variant=""):
    return {
        "task": "digits",
        "method": method,
        "variant": variant,
        "seed": seed,
        "key": f"{method}{variant}",
        "primary": "log_likelihood",
        "validation": validation,
        "metrics": {"log_likelihood": score},
        "cost": {"fit_seconds": seconds, "predict_ms": 2 * seconds},
    }


def results():
    found = []
    for seed in range(3):
        found.append(result("mle", seed, -1.0 - 0.01 * seed, -1.0))
        found.append(result("ensemble", seed, -0.5, -0.8, 10.0))
        found.append(result("vi", seed, -0.6 - 0.01 * seed, -0.7, 3.0))  # what validation data prefer
    return [*found, result("sghmc", 0, -0.1, -0.1)]  # one seed of three


def test_the_winner_is_chosen_by_validation_among_those_with_all_seeds():
    row = summary_table.summary_row(results(), "digits", "laplace")
    assert row.winner == Entry("vi")
    assert row.score.mean == pytest.approx(-0.61)
    assert row.difference.mean == pytest.approx(0.4)
    assert (row.training, row.prediction) == (pytest.approx(3.0), pytest.approx(3.0))
    assert row.ensemble.mean == pytest.approx(-0.5)
    assert summary_table.summary_row([r for r in results() if r["method"] != "mle"], "digits", "laplace") is None
    alone = summary_table.summary_row([r for r in results() if r["method"] in {"mle", "sghmc"}], "digits", "laplace")
    assert alone is None
    fewer = [r for r in results() if r["method"] == "mle" or (r["method"] == "ensemble" and r["seed"] < 2)]
    assert summary_table.summary_row(fewer, "digits", "laplace") is None  # nothing has as many seeds as the MLE


def test_a_verdict_asks_for_more_than_seed_noise():
    noisy = [result("mle", s, -1.0, -1.0) for s in range(3)]
    noisy += [result("vi", s, -1.0 + v, -0.9) for s, v in enumerate((0.5, -0.4, 0.1))]
    assert summary_table.summary_row(noisy, "digits", "laplace").verdict == "within seed noise"
    clear = [result("mle", s, -1.0, -1.0) for s in range(3)]
    clear += [result("vi", s, -0.5 + 0.01 * s, -0.9) for s in range(3)]
    assert summary_table.summary_row(clear, "digits", "laplace").verdict == "better"
    best = [result("mle", s, -1.0, -1.0) for s in range(3)] + [result("vi", s, -0.5, -2.0) for s in range(3)]
    assert summary_table.summary_row(best, "digits", "laplace").verdict == "nothing was better"


def test_a_task_is_that_of_the_first_experiment_that_has_it(tmp_path):
    for folder, score in (("laplace", -0.5), ("study", -0.4)):
        for seed in range(2):
            for method in ("mle", "ensemble"):
                made = {**result(method, seed, score, -1.0), "task": "digits" if folder == "laplace" else "pos"}
                write_json(tmp_path / folder / made["task"] / f"{method}-x" / f"seed{seed}.json", made)
    rows = summary_table.summary_rows(tmp_path)
    assert [(row.task, row.experiment) for row in rows] == [("pos", "study"), ("digits", "laplace")]


def test_only_what_stands_between_markers_is_written(tmp_path, capsys):
    text = "before\n<!-- begin summary -->\nold\n<!-- end summary -->\nafter\n"
    new = summary_table.filled(text, "summary", "new")
    assert new == "before\n<!-- begin summary -->\nnew\n<!-- end summary -->\nafter\n"
    assert summary_table.filled(new, "summary", "new") == new
    with pytest.raises(ValueError, match="document must hold <!-- begin headline -->"):
        summary_table.filled(text, "headline", "new")
    page, readme = tmp_path / "results.md", tmp_path / "README.md"
    page.write_text(text)
    readme.write_text(text.replace("summary", "headline"))
    (tmp_path / "results").mkdir()
    call = ["study", "summary", f"--results={tmp_path}/results", f"--page={page}", f"--readme={readme}"]
    assert cli.main([*call, "--check"]) == 1
    assert page.read_text() == text
    assert cli.main(call) == 0
    assert cli.main([*call, "--check"]) == 0
    assert "old" not in page.read_text()


def test_the_documents_are_up_to_date_with_the_stored_results():
    stale = summary_table.write_documents(ROOT / "results", ROOT / "docs/results.md", ROOT / "README.md", check=True)
    assert stale == [], "call `bayesformer study summary`"

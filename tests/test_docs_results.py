"""Every table of docs/results.md comes out of the stored results."""

import subprocess
from pathlib import Path

import pytest

from bayesformer.bench.markdown import choice_table, comparison
from bayesformer.bench.records import read_results
from bayesformer.bench.report import write_report
from bayesformer.reference import checking
from bayesformer.study import (
    accuracy,
    citation_table,
    cold,
    fidelity_cost,
    prediction_cost,
    summary_table,
    text_page,
    trained_accuracy,
)

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "results"


def stored(name):
    found = read_results(RESULTS / name)
    assert not found.damaged
    assert not found.repeated
    return found.results


def cold_table():
    keys = {(cell.task, cell.key) for cell in cold.cells(["toy/m1", "imdb"], [0])}
    return cold.table([r for r in stored("cold") if (r["task"], r["key"]) in keys])


def tables():
    yield summary_table.summary_text(RESULTS)
    yield comparison(stored("weight_space"))
    yield choice_table(stored("weight_space"), "temperature")
    yield comparison(stored("attention_series"))
    yield citation_table.table(stored("graphs"))
    yield cold_table()
    yield prediction_cost.table(stored("laplace"))
    yield fidelity_cost.overview(stored("fidelity"))
    yield checking.table()
    yield accuracy.table(accuracy.stored_rows(RESULTS / "accuracy", list(accuracy.CASES)))
    yield trained_accuracy.table(list(trained_accuracy.stored(RESULTS / "accuracy" / trained_accuracy.STORED).values()))
    yield text_page.section(RESULTS)


def test_the_section_on_text_is_what_its_command_writes():
    page = (ROOT / "docs" / "results.md").read_text()
    assert text_page.replaced(page, text_page.section(RESULTS)) == page
    assert text_page.replaced("# A page", "text").count("text: begin") == 1


def test_every_row_of_every_documented_table_is_made_of_stored_results():
    """By numbers, without the first column: the table of attention has shorter names of its rows."""
    made = {_numbers(line) for table in tables() for line in table.splitlines()}
    made.add("digits | diabetes | friedman1 | friedman2 | friedman3 | toy/m1 | toy/m2 | toy/m3 |")  # shortened by hand
    documented = [line for line in (ROOT / "docs" / "results.md").read_text().splitlines() if line.startswith("| ")]
    assert len(documented) > 150
    assert [line for line in documented if _numbers(line) not in made] == []


def _numbers(line):
    return line.split(" | ", 1)[-1]


def test_the_defaults_before_and_after_are_stored_results():
    page = (ROOT / "docs" / "defaults.md").read_text()
    assert comparison(stored("before_after")) in page


def test_results_are_one_file_per_experiment():
    listed = subprocess.run(["git", "ls-files", "results"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a checkout")
    assert 0 < len(listed.stdout.splitlines()) < 60


def test_the_page_of_all_stored_results_is_small(tmp_path):
    path = write_report(stored("."), tmp_path / "page.html")
    assert path.stat().st_size < 2_000 * len(stored("."))  # bytes: pages grow with what is stored

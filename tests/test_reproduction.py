"""The study as a whole: what it consists of, in which order it is run, that it resumes, and what its pages say."""

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bayesformer import cli
from bayesformer.bench.planning import plan
from bayesformer.bench.records import read_results
from bayesformer.bench.statistics import Difference
from bayesformer.core.errors import DamagedFileError
from bayesformer.core.storage import read_json
from bayesformer.methods import Mle, Sghmc, Swag
from bayesformer.study.reproduction import claims, forecast, study_figures, study_page
from bayesformer.study.reproduction.agenda import StudyFolders, agenda
from bayesformer.study.reproduction.choices import StudyChoices, guessed, heavy_law, read_choices
from bayesformer.study.reproduction.description import describe_study, read_description
from bayesformer.study.reproduction.published import TASKS, published, score_of
from bayesformer.study.reproduction.reproduce import Reproduction, TimeLeft, plan_text
from bayesformer.study.reproduction.study_cells import column_cells, tuning_cells
from bayesformer.study.reproduction.study_tables import TITLES, StoredStudy, gain, thesis_table

SMALL = {"train": 40, "validation": 10, "test": 20, "dim": 4}
TINY = {
    "task": [
        {
            "name": "toy/m1",
            "seeds": 2,
            "networks": 10,
            "first": 10,
            "extra": 1,
            "draws": 2,
            "settings": SMALL,
            "tuning": {"epochs": 1, "settings": {"train": 20}},
        }
    ],
    "defaults": {"mean_field": {"local": False, "draws": "@draws"}},
    "tries": {"temperature": [{"temperature": t} for t in (1.0, 0.1, 0.01, 0.001)]},
    "group": [
        {
            "name": "full network",
            "tables": ["3.1"],
            "columns": [
                {"name": "MLE", "method": "mle"},
                {"name": "Ensemble", "method": "ensemble"},
                {"name": "Gaussian VI", "method": "mean_field", "tries": "temperature"},
                {"name": "Final Laplace", "method": "laplace", "start": "mle", "settings": {"structure": "last_layer"}},
            ],
        },
        {
            "name": "improved prior",
            "tables": ["3.9"],
            "columns": [
                {
                    "name": "Gaussian VI",
                    "method": "mean_field",
                    "tries": "temperature",
                    "settings": {"prior": "@derived"},
                }
            ],
        },
    ],
}


@pytest.fixture
def folders(tmp_path):
    return StudyFolders(tmp_path / "study", tmp_path / "weights", tmp_path / "networks")


@pytest.fixture
def short_series(monkeypatch):
    """Series whose networks train for two epochs."""
    from bayesformer.bench.tasks import ToySeries

    usual = ToySeries.training.fget
    monkeypatch.setattr(ToySeries, "training", property(lambda self: replace(usual(self), epochs=2, batch_size=20)))


def tiny():
    return describe_study(json.loads(json.dumps(TINY)))


# What it consists of


def test_every_published_number_has_a_column_and_a_score():
    description = read_description()
    groups = {table: group for group, tables in description.tables.items() for table in tables}
    assert set(groups) == {p.table for p in published()} == set(TITLES)
    labels = {column.label for column in description.columns}
    for entry in published():
        assert f"{groups[entry.table]}: {entry.method}" in labels or entry.method in {"MLE", "Ensemble"}
        if "gain" not in entry.metric:
            assert score_of(entry.dataset, entry.metric)
        assert TASKS[entry.dataset] in description.tasks


def test_every_column_makes_cells_on_every_task_and_has_four_tries_or_none(tmp_path):
    description = read_description()
    guess = guessed(StudyChoices(tmp_path / "none.json"), description)
    keys = set()
    for task in description.tasks:
        for column in description.on(task):
            cells = column_cells(description, column, task, guess, [0])
            assert cells is not None
            (cell,) = cells
            shared = column.group == "untempered"  # it may be what is chosen for the tempered one
            assert shared or (task, cell.key) not in keys  # no two other columns are one
            keys.add((task, cell.key))
            tries = tuning_cells(description, column, task, guess)
            assert len({c.key for c in tries}) == len(column.tries) in {0, 4}
            assert all(c.training["epochs"] <= 20 for c in tries)


def test_methods_get_equal_epochs_from_scratch_and_after_a_start(tmp_path):
    description = read_description()
    guess = guessed(StudyChoices(tmp_path / "none.json"), description)

    def epochs(label, task, length="equal"):
        (cell,) = column_cells(description, description.column(label), task, guess, [0], length)
        return cell.training["epochs"] + (0 if cell.start is None else cell.start["epochs"])

    for task in description.tasks:
        scratch, started = epochs("full network: Gaussian VI", task), epochs("beyond: SGHMC", task)
        assert scratch == started > epochs("full network: MLE", task)
        assert epochs("full network: Gaussian VI", task, "long") > scratch


def test_a_description_that_is_wrong_says_where():
    def wrong(change):
        content = json.loads(json.dumps(TINY))
        change(content)
        return describe_study(content)

    with pytest.raises(ValueError, match="unknown method 'mean_fild'"):
        wrong(lambda c: c["group"][0]["columns"][2].update(method="mean_fild"))
    with pytest.raises(ValueError, match=r"tries.temperature must be 4 settings, as many as every method gets; got 3"):
        wrong(lambda c: c["tries"]["temperature"].pop())
    with pytest.raises(ValueError, match="'full network: MLE' occurs twice"):
        wrong(lambda c: c["group"][0]["columns"].append({"name": "MLE", "method": "mle"}))
    with pytest.raises(ValueError, match="unknown entry of a task 'seed'"):
        wrong(lambda c: c["task"][0].update(seed=1))
    with pytest.raises(ValueError, match="unknown task of the study 'toy/m2'"):
        tiny().budget("toy/m2")


# StudyChoices


def test_the_best_try_by_validation_is_chosen_and_stays(tmp_path):
    description, column = tiny(), tiny().column("full network: Gaussian VI")
    choices = read_choices(tmp_path / "choices.json", description)
    assert choices.of("toy/m1", column) is None
    choices.choose("toy/m1", column, [-3.0, None, -1.0, float("nan")])
    again = read_choices(tmp_path / "choices.json", description)
    assert again.of("toy/m1", column) == {"temperature": 0.01}
    assert again.of("toy/m1", description.column("full network: MLE")) == {}
    with pytest.raises(ValueError, match="none of its 4 tries has a validation score"):
        choices.choose("toy/m1", column, [None] * 4)


def test_choices_made_for_another_description_are_refused(tmp_path):
    path = tmp_path / "choices.json"
    read_choices(path, tiny()).choose("toy/m1", tiny().column("full network: Gaussian VI"), [0.0] * 4)
    content = json.loads(json.dumps(TINY))
    content["task"][0]["extra"] = 7
    with pytest.raises(ValueError, match="extra of toy/m1 must be 1, as the results beside .* the description says 7"):
        read_choices(path, describe_study(content))
    content = json.loads(json.dumps(TINY))
    content["tries"]["temperature"][0]["temperature"] = 3.0
    with pytest.raises(ValueError, match="must be those that .* chose among on toy/m1"):
        read_choices(path, describe_study(content))
    content = json.loads(json.dumps(TINY))
    content["task"][0] |= {"seeds": 5, "networks": 60}  # more of the same
    assert read_choices(path, describe_study(content)).chosen
    path.write_text('{"format": "other"}')
    with pytest.raises(DamagedFileError, match="must be of the format"):
        read_choices(path, tiny())


def test_priors_are_fixed_once_and_heavy_where_the_posterior_is(tmp_path):
    choices = StudyChoices(tmp_path / "choices.json")
    choices.fix_priors("toy/m1", {"a": "normal(0, 0.3)", "b": "student_t(5, 0, 0.1)"}, 20)
    choices.fix_priors("toy/m1", {"a": "normal(0, 9)"}, 60)
    assert choices.derived("toy/m1") == {"a": "normal(0, 0.3)", "b": "student_t(5, 0, 0.1)"}
    assert choices.derived("toy/m1", heavy=True) == {"a": "cauchy(0, 0.3)", "b": "student_t(5, 0, 0.1)"}
    assert heavy_law("laplace(0.1, 2)") == "cauchy(0.1, 2)"


# Order, run and resumption


def test_networks_come_first_then_priors_choices_and_cells(folders):
    duties = agenda(tiny(), StudyChoices(folders.choices), folders)
    stages = [duty.stage for duty in duties if duty.round == 0]
    assert stages == sorted(stages, key=["networks", "priors", "choice", "cells"].index)
    assert not next(d for d in duties if d.label == "improved prior: Gaussian VI").ready  # its priors are not there
    assert [d.round for d in duties] == sorted(d.round for d in duties)
    only = agenda(tiny(), StudyChoices(folders.choices), folders, "m1 full network: MLE")
    assert {d.label for d in only} == {"full network: MLE"}
    needs = agenda(tiny(), StudyChoices(folders.choices), folders, "improved prior")
    assert {d.label for d in needs} == {"improved prior: Gaussian VI", "weights"}  # what its priors come from


def test_the_study_runs_resumes_and_writes_its_pages(folders, tmp_path, short_series, monkeypatch):
    said = []
    monkeypatch.setattr(forecast, "measure", lambda cell: forecast.CellPace(0.5, 0.0))
    study = Reproduction(tiny(), folders, say=said.append)
    first = study.run(only="full network: [ME]*")  # MLE and ensembles
    assert first.done == 4
    assert not first.failed
    text = plan_text(study.forecast(), 2)
    assert "core-hours" in text
    ended = study.run()
    assert (ended.failed, ended.left) == ([], 0)
    assert study.run().done == 0
    results = read_results(folders.results).results
    assert sorted((r["method"], r["seed"]) for r in results) == sorted(
        (method, seed) for method in ("mle", "ensemble", "mean_field", "mean_field", "laplace") for seed in (0, 1)
    )
    assert {bool(r["figures"]) for r in results if r["seed"] == 1} == {False}
    assert len(read_results(folders.tuning).results) == 8
    choices = read_json(folders.choices, "choices")
    assert set(choices["chosen"]["toy/m1"]) == {"full network: Gaussian VI", "improved prior: Gaussian VI"}
    assert any("chosen for full network: Gaussian VI on toy/m1: temperature=" in line for line in said)
    starts = {r["method"] for r in results if "start" in r["settings"]}
    assert starts == {"laplace"}
    mle = {r["seed"]: r for r in results if r["method"] == "mle"}
    assert mle[0]["fit"]["strategy"] == "kept"  # the ensemble's first network

    pages = study_page.write_pages(tiny(), folders, tmp_path / "pages")
    assert {path.name for path in pages} >= {"README.md", "claims.md", "report.html"}
    page = (tmp_path / "pages" / "README.md").read_text()
    ours = [r["metrics"]["log_likelihood"] for r in results if r["method"] == "ensemble"]
    assert f"{sum(ours) / 2:.2f} ± " in page
    assert "(-25.99)" in page  # the published value of the ensemble on M1
    assert "| toy/m1 | 5 | 5 | 2 |" in page
    stored = study_page.read_stored(tiny(), folders)
    improved, plain = (stored.column(group, "Gaussian VI") for group in ("improved prior", "full network"))
    a, b = (stored.scores(column, "toy/m1", "log_likelihood") for column in (improved, plain))
    percent = sum(100 * (a[s] - b[s]) / abs(b[s]) for s in (0, 1)) / 2
    assert gain(stored, improved, "toy/m1", "log_likelihood").mean == pytest.approx(percent)


def test_a_deadline_lets_no_cell_begin(folders, short_series, monkeypatch):
    monkeypatch.setattr(forecast, "measure", lambda cell: forecast.CellPace(0.5, 0.0))
    study = Reproduction(tiny(), folders, say=lambda text: None)
    ended = study.run(hours=1e-9)
    assert ended.done == 0
    assert ended.left > 0


def test_a_forecast_grows_with_epochs_and_data(tmp_path):
    description = tiny()
    guess = guessed(StudyChoices(tmp_path / "none.json"), description)
    column = description.column("full network: Gaussian VI")
    (cell,) = column_cells(description, column, "toy/m1", guess, [0])
    known = forecast.Forecaster()
    known.paces[forecast.kind_of(cell)] = forecast.CellPace(batch=2.0, input=0.1)
    batches = 101 * 1  # 100 epochs and an extra one, each one batch of 40
    assert known.seconds(cell) == pytest.approx(2.0 * batches + 0.1 * (10 + 20))
    measured = forecast.measure(cell)
    assert measured.batch >= 0
    assert measured.input >= 0
    assert [forecast.least_epochs(m) for m in (Sghmc(draws=30), Swag(every=4), Mle())] == [90, 12, 1]
    assert forecast.calm(Sghmc(lr=0.1, warm_up=0.0)) == Sghmc(lr=forecast.CALM, warm_up=0.0)
    assert forecast.calm(Sghmc()) == Sghmc()
    (trained,) = column_cells(description, description.column("full network: Final Laplace"), "toy/m1", guess, [0])
    assert forecast.is_trained(trained)
    assert not forecast.is_trained(cell)


def test_a_forecast_counts_a_shared_training_once(tmp_path):
    cells = plan(["toy/m1"], [{"name": "vi", "draws": [1, 2]}], [0], {"toy/m1": SMALL})
    known = forecast.Forecaster(kept=False)
    for cell in cells:
        known.paces[forecast.kind_of(cell)] = forecast.CellPace(batch=3.6, input=0.0)
    assert forecast.forecast_of(cells, known).endswith("2 cells, 0.1 core-hours.")  # 100 epochs of one batch
    (mle,) = plan(["toy/m1"], ["mle"], [0], {"toy/m1": SMALL})
    for kept, seconds in ((True, 0.0), (False, 360.0)):
        other = forecast.Forecaster(kept=kept)
        other.paces[forecast.kind_of(mle)] = forecast.CellPace(batch=3.6, input=0.0)
        assert other.seconds(mle) == pytest.approx(seconds)


def test_the_time_left_follows_what_cells_took(monkeypatch, folders):
    (duty, *_) = [d for d in agenda(tiny(), StudyChoices(folders.choices), folders) if d.cells]
    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    heard = []
    reporter = type("Heard", (), {"update": lambda self, task, done, total, note="": heard.append(note)})()
    left = TimeLeft([(duty, 200.0), (duty, 800.0)], 2, reporter)
    assert left.left == pytest.approx(1000 / 2 / 3600)
    left.seconds = {(duty.cells[0].key, duty.cells[0].seed): 200.0}
    clock[0] = 200.0  # two workers for 200 s: twice what was foreseen
    left.ended(duty.cells[0])
    assert left.left == pytest.approx(2 * 800 / 2 / 3600)
    left.update("cells", 1, 2, "toy/m1 mle seed 0")
    assert heard == ["toy/m1 mle seed 0, about 0.2 h left in all"]


# Pages


def empty(folders):
    return StoredStudy(read_description(), StudyChoices(folders.choices), [])


def test_tables_and_claims_without_results_say_so(folders):
    stored = empty(folders)
    for number in TITLES:
        table = thesis_table(stored, number)
        assert all(cell.startswith("–") for row in table.rows for cell in row[1:])
    text = claims.claims_table(stored, {}).markdown()
    assert "not run yet" in text
    assert "holds" not in text.replace("What holds", "")
    for claim in claims.CLAIMS:
        assert claims.evidence_table(claim, stored, {}).note == "Not run yet."


def test_a_verdict_is_where_the_interval_lies():
    def verdict(*values):
        return claims.Evidence("", Difference(*values)).verdict

    assert verdict(1.0, 0.5, 1.5, 0.01, 3) == "holds"
    assert verdict(-1.0, -1.5, -0.5, 0.01, 3) == "reversed"
    assert verdict(1.0, -0.5, 2.5, 0.3, 3) == "not seen"
    assert verdict(1.0, None, None, None, 1) == "one seed"
    assert claims.Evidence("", None).verdict == "not run yet"


def test_a_figure_before_its_runs_names_the_command(folders, tmp_path):
    with pytest.raises(
        ValueError, match=r"which do not exist yet: call `bayesformer study reproduce --only 'mnist\*Con"
    ):
        study_figures.draw_figure(empty(folders), "3.2", tmp_path / "x.svg")
    with pytest.raises(ValueError, match=r"unknown figure '3.3'"):
        study_figures.draw_figure(empty(folders), "3.3", tmp_path / "x.svg")


def test_digits_and_series_are_drawn(tmp_path):
    example = {"image": torch.rand(4, 4).tolist(), "label": 1, "predicted": 2, "entropy": 0.5}
    path = study_figures.draw_digits({"A": {"highest": [example], "lowest": [example]}}, tmp_path / "digits.svg")
    assert path.read_text().count("<image") == 2
    series = {
        name: [0.0, 1.0, 2.0] for name in ("time", "observed", "mean", "low", "high", "oracle_low", "oracle_high")
    }
    assert "<svg" in study_figures.draw_bands({"A": [series], "B": [series]}, tmp_path / "bands.svg").read_text()


def test_the_command_forecasts_and_refuses(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(forecast, "measure", lambda cell: forecast.CellPace(0.5, 0.0))
    common = ["study", "reproduce", f"--results={tmp_path}/study", f"--networks={tmp_path}/net", "--workers=2"]
    assert cli.main([*common, "--forecast", "--only=toy/m1 full network: Ensemble"]) == 0
    assert "core-hours" in capsys.readouterr().out
    assert not (tmp_path / "study").exists()
    assert cli.main([*common, "--hours=0"]) == 2
    assert "--hours must be above 0" in capsys.readouterr().err
    assert cli.main([*common, "--figure=3.2", f"--pages={tmp_path}"]) == 2
    assert "which do not exist yet" in capsys.readouterr().err
    monkeypatch.setenv("BAYESFORMER_DATA", str(tmp_path))
    monkeypatch.setenv("BAYESFORMER_CACHE", str(tmp_path / "cache"))
    (tmp_path / "ud_english").mkdir()
    assert cli.main([*common, "--only=pos full network: MLE"]) == 2
    assert "may be copied in part" in capsys.readouterr().err
    assert cli.main([*common, "--report-only", f"--pages={tmp_path}/pages"]) == 0
    assert (tmp_path / "pages" / "claims.md").exists()


def test_the_committed_pages_are_up_to_date_with_the_stored_results(tmp_path):
    root = Path(__file__).parent.parent
    folders = StudyFolders(root / "results/study", root / "results/weights", tmp_path)
    stored = study_page.read_stored(read_description(), folders)
    made = study_page.texts(stored, study_page.other_results(root / "results"))
    for name, text in made.items():
        assert (root / "docs/study" / name).read_text() == text, "call `bayesformer study reproduce --report-only`"

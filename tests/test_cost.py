"""The study of quality against the cost of a prediction, on made-up results."""

import json
import xml.etree.ElementTree as xml

import pytest

from bayesformer import cli
from bayesformer.bench.report.axis import without_outliers
from bayesformer.study import prediction_cost
from bayesformer.study.prediction_cost import CostEntry


def result(method, quality, ms, seed=0, task="toy/m1", gap=True, **settings):
    metrics = {"log_likelihood": quality, **({"oracle_gap": quality} if gap else {})}
    return {
        "task": task,
        "method": method,
        "seed": seed,
        "settings": {"method": settings},
        "metrics": metrics,
        "primary": "log_likelihood",
        "cost": {"predict_ms": ms},
    }


def results():
    """The MLE takes 2 ms; draws cost 2 ms each; there are two seeds, 0.2 apart in quality."""
    found = []
    for seed in (0, 1):
        for task, gap in [("toy/m1", True), ("digits", False)]:
            here = {"seed": seed, "task": task, "gap": gap}
            off = 0.2 * seed
            found.append(result("mle", -1.0 + off, 2.0, **here))
            found.append(result("ensemble", -0.5 + off, 20.0, members=10, **here))
            for draws in (100, 1, 10):  # not in order
                found.append(
                    result("laplace", -1 / draws + off, 2.0 * draws, predictive="sampled", draws=draws, **here)
                )
            found.append(result("laplace", -0.4 + off, 30.0, predictive="linearised", draws=100, **here))
            found.append(result("laplace", -0.6 + off, 6.0, predictive="streamlined", draws=100, **here))
            found.append(
                result("laplace", -0.7 + off, 5.0, predictive="linearised", structure="diag", draws=100, **here)
            )
            found.append(result("mean_field", -0.8 + off, 60.0, draws=30, **here))  # of before `predictive`
    return found


def test_entries_are_told_apart_by_family_way_and_draws():
    found = {prediction_cost.entry_of(r) for r in results()}
    assert found == {
        CostEntry("mle"),
        CostEntry("ensemble"),
        *(CostEntry("laplace", "sampled", draws) for draws in (1, 10, 100)),
        CostEntry("laplace", "linearised"),
        CostEntry("laplace", "streamlined"),
        CostEntry("laplace (structure=diag)", "linearised"),
        CostEntry("mean_field", "sampled", 30),
    }
    assert CostEntry("vi", "sampled", 1).label == "vi, sampled, 1 draw"


def test_cost_is_in_multiples_of_the_mle_and_both_are_over_seeds():
    places = prediction_cost.places([r for r in results() if r["task"] == "toy/m1"])
    assert next(iter(places)) == CostEntry("mle")
    sampled = [(e.draws, places[e].cost.mean) for e in places if e.family == "laplace" and e.way == "sampled"]
    assert sampled == [(1, 1.0), (10, 10.0), (100, 100.0)]
    ensemble = places[CostEntry("ensemble")]
    assert ensemble.cost.mean == 10.0
    assert ensemble.quality.mean == pytest.approx(-0.4)
    assert ensemble.quality.sd == pytest.approx(0.2 / 2**0.5)
    with pytest.raises(ValueError, match="results of toy/m1 must hold an MLE with its cost"):
        prediction_cost.places([r for r in results() if r["method"] != "mle" and r["task"] == "toy/m1"])


def test_quality_is_the_gap_where_there_is_an_oracle_and_else_the_primary_metric():
    tasks = prediction_cost.by_task(results())
    assert list(tasks) == ["digits", "toy/m1"]
    assert {name: prediction_cost.metric_of(found) for name, found in tasks.items()} == {
        "digits": "log_likelihood",
        "toy/m1": "oracle_gap",
    }


def test_the_figure_shows_families_with_several_draws_and_plain_methods(tmp_path):
    path = prediction_cost.figure(results(), tmp_path / "deep" / "cost.svg")
    text = path.read_text()
    xml.fromstring(text)
    for label in ("laplace, sampled", "laplace, linearised", "laplace, streamlined", "ensemble", "MLE", "digits"):
        assert text.count(f">{label}</text>") == 1, label
    assert "structure" not in text
    assert "mean_field" not in text
    assert text.count("stroke m") == 2  # one line of draws per panel
    assert text.count(">100</text>") >= 2
    with pytest.raises(ValueError, match="at least one result"):
        prediction_cost.figure([], tmp_path / "none.svg")


def test_many_panels_stand_in_rows(tmp_path):
    tasks = [f"toy/m{i}" for i in range(1, 6)]
    many = [{**r, "task": task} for r in results() if r["task"] == "toy/m1" for task in tasks]
    picture = xml.fromstring(prediction_cost.figure(many, tmp_path / "cost.svg").read_text())
    tops = [float(part.get("y")) for part in picture if part.tag.endswith("svg")]
    assert len(set(tops)) == 2
    assert tops.count(min(tops)) == prediction_cost.COLUMNS
    assert float(picture.get("height")) > max(tops) + 250


def test_the_table_has_everything():
    lines = prediction_cost.table(results()).splitlines()
    assert lines[0] == "| method | digits | toy/m1 |"
    assert len(lines) == 2 + 9
    row = next(line for line in lines if line.startswith("| laplace, sampled, 10 draws"))
    assert row.endswith("| 0.000 ± 0.141 (× 10) | 0.000 ± 0.141 (× 10) |")
    some = [r for r in results() if r["task"] == "toy/m1" or r["method"] != "ensemble"]
    assert "| ensemble | – |" in prediction_cost.table(some)


def test_a_failed_run_does_not_flatten_the_rest():
    assert without_outliers([-1.0, -1.1, -1.2, -50.0, float("nan")]) == [-1.0, -1.1, -1.2]
    assert without_outliers([]) == []


def test_the_command_reads_a_folder_and_writes_the_figure(tmp_path, capsys):
    for i, r in enumerate(results()):
        path = tmp_path / r["task"].replace("/", "-") / f"{r['method']}-{i}" / f"seed{r['seed']}.json"
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps(r))
    assert cli.main(["study", "cost", str(tmp_path)]) == 0
    assert "| ensemble |" in capsys.readouterr().out
    assert (tmp_path / "cost.svg").exists()
    assert cli.main(["study", "cost", str(tmp_path), "--output", str(tmp_path / "other.svg")]) == 0
    assert (tmp_path / "other.svg").read_text() == (tmp_path / "cost.svg").read_text()
    assert cli.main(["study", "cost", str(tmp_path / "no")]) == 2
    assert "does not exist" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["cold", "cost"])
def test_help_of_every_study(name, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["study", name, "--help"])
    assert stop.value.code == 0
    assert f"usage: bayesformer study {name}" in capsys.readouterr().out

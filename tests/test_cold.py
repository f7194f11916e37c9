"""The cold posterior study: which cells it runs, what its curves and its table say."""

import xml.etree.ElementTree as xml

import pytest

from bayesformer.methods import METHODS
from bayesformer.study import cold


def result(method, temperature, seed, score, validation, task="toy/m1", chains=1):
    settings = {"temperature": temperature, "chains": chains} if temperature else {}
    return {
        "task": task,
        "method": method,
        "seed": seed,
        "settings": {"method": settings},
        "metrics": {"log_likelihood": score},
        "validation": validation,
    }


def results():
    found = [result("mle", None, seed, -3.0, -3.0) for seed in (0, 1)]
    for temperature, score, validation in [(1.0, -5.0, -5.0), (0.1, -2.0, -2.2), (0.01, -1.9, -2.5)]:
        for seed in (0, 1):
            found.append(result("sghmc", temperature, seed, score + seed, validation))
            found.append(result("sghmc", temperature, seed, score - 1, validation, chains=5))
    return found


def test_curves_average_over_seeds_and_keep_the_lines_apart():
    serial, parallel = cold.curve(results(), "serial"), cold.curve(results(), "parallel")
    assert list(serial) == [0.01, 0.1, 1.0]
    assert serial[1.0] == (-4.5, pytest.approx(0.5**0.5))
    assert parallel[1.0] == (-6.0, 0.0)


def test_the_table_chooses_by_validation_and_shows_the_test():
    line = next(row for row in cold.table(results()).splitlines() if "one chain" in row)
    # 0.01 has the better test score, but the validation data prefer 0.1.
    assert [part.strip() for part in line.split("|")[3:7]] == ["0.1", "-1.500 ± 0.707", "-4.500 ± 0.707", "-3.000"]


def test_the_figure_is_a_picture_with_every_line(tmp_path):
    path = cold.figure(results(), tmp_path / "deep" / "cold.svg")
    text = path.read_text()
    tree = xml.fromstring(text)
    assert tree.tag.endswith("svg")
    assert "SGHMC, one chain" in text
    assert "variational" not in text
    assert text.count("stroke m1") == text.count("stroke m2") == 1
    with pytest.raises(ValueError, match="at least one result"):
        cold.figure([], tmp_path / "none.svg")


def test_every_method_has_every_temperature_and_the_same_training():
    cells = cold.cells(["toy/m1"], [0, 1], (1.0, 0.1))
    assert len({str(cell.training) for cell in cells}) == 1
    hot = [cell for cell in cells if cell.method != "mle"]
    assert {cell.method for cell in hot} <= set(METHODS)
    assert {cell.method_settings["temperature"] for cell in hot} == {1.0, 0.1}
    assert len(cells) == 2 + 2 * len({cell.key for cell in hot})


def test_no_method_chooses_its_prior_anew_at_a_temperature():
    cells = [cell for cell in cold.cells(["toy/m1", "imdb"], [0]) if cell.method != "mle"]
    assert {cell.method for cell in cells} == {"vi", "sghmc", "laplace"}
    for cell in cells:
        settings = cell.method_settings
        expected = {"prior_precision": 1.0} if cell.method == "laplace" else {"prior": "normal(0, 1)"}
        assert expected.items() <= settings.items()
        if cell.method != "laplace":
            assert settings["warm_up"] == (0.75 if cell.task == "imdb" else 0.5)


def test_the_cnn_lstm_has_the_lines_of_the_paper_and_few_trainings():
    cells = cold.cells([cold.CNN_LSTM], [0])
    made = [{"method": c.method, "settings": {"method": dict(c.method_settings)}, "task": c.task} for c in cells]
    lines = {cold.line_of(result) for result in made}
    assert lines == set(cold.METHODS) - {"laplace"} | set(cold.POINTS)
    temperatures = {c.method_settings["temperature"] for c in cells if "temperature" in c.method_settings}
    assert (min(temperatures), max(temperatures)) == (0.03, 3.0)
    laplace = {c.trained_in for c in cells if c.method == "laplace"}
    variational = {c.trained_in for c in cells if c.method == "vi"}
    assert (len(laplace), len(variational)) == (1, 5)  # one mode for 20 cells, one fit for two predictions
    serial = next(c for c in cells if c.method == "sghmc" and c.method_settings["chains"] == 1)
    parallel = next(c for c in cells if c.method == "sghmc" and c.method_settings["chains"] == 5)
    assert serial.training["epochs"] == 2 * parallel.training["epochs"]
    assert cold.label_of("parallel", made) == "SGHMC, 5 chains"
    for result in made:
        settings = result["settings"]["method"]
        assert settings.get("prior", cold.CNN_PRIOR) == cold.CNN_PRIOR


def test_the_figure_has_a_level_for_every_point(tmp_path):
    text = cold.figure([*results(), result("map", None, 0, -2.5, -2.5)], tmp_path / "cold.svg").read_text()
    assert "MLE and MAP" in text

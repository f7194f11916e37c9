"""The paper's table on graphs from stored results: rows by settings, standard errors, verdicts."""

import json
import math

import pytest

from bayesformer.cli import main
from bayesformer.study import citation_table


def result(row, graph="cora", seed=0, accuracy=0.8, draws=0):
    method = {
        "GAT": None,
        "no KL": {"family": "weibull", "prior": "fixed", "temperature": 0.0},
        "LF": {"family": "lognormal", "prior": "fixed", "temperature": 1e-3},
        "WC": {"family": "weibull", "prior": "contextual", "temperature": 1e-3},
        citation_table.SUM: {"family": "weibull", "prior": "contextual", "temperature": 1.0},
    }[row]
    settings = {} if method is None else {**method, "draws": draws}
    metrics = {"accuracy": accuracy, "log_likelihood": -0.5, "ece": 0.1}
    if draws:
        metrics["pavpu"] = 0.9
    return {
        "task": f"graph/{graph}",
        "method": "map" if method is None else "attention",
        "settings": {"method": settings},
        "seed": seed,
        "metrics": metrics,
    }


def test_rows_are_named_as_in_the_paper():
    for row in ("GAT", "no KL", "LF", "WC", citation_table.SUM):
        assert citation_table.row_of(result(row)) == row


def test_means_have_standard_errors_and_few_seeds_are_counted():
    found = [result("WC", seed=i, accuracy=0.8 + 0.01 * (i % 2)) for i in range(10)]
    found += [result("GAT", seed=i, accuracy=0.7) for i in range(3)]
    lines = citation_table.table(found).splitlines()
    error = 0.5 * math.sqrt(10 / 9) / math.sqrt(10)
    assert f"| WC | 80.50 ± {error:.2f} | 83.81 | – | 73.52 | – | 78.82 |" in lines
    assert "| GAT | 70.00 ± 0.00 (3) | 83.00 | – | 72.50 | – | 77.26 |" in lines


def test_draws_stand_apart_from_mean_attention():
    found = [result("WC", accuracy=0.8), result("WC", accuracy=0.9, draws=20), result("GAT", accuracy=0.7)]
    mean, drawn = (citation_table.cells_of(found, drawn=d) for d in (False, True))
    assert mean["WC", "cora"][0]["metrics"]["accuracy"] == 0.8
    assert drawn["WC", "cora"][0]["metrics"]["accuracy"] == 0.9
    assert mean["GAT", "cora"] == drawn["GAT", "cora"]
    assert "0.900 (1)" in citation_table.scores(drawn, "draws")


@pytest.mark.parametrize(
    ("mean", "error", "paper", "said"),
    [(1.0, 0.4, 0.5, "holds"), (-1.0, 0.4, 0.5, "reversed"), (0.7, 0.4, 0.5, "not seen"), (1.0, 0.4, -0.5, "reversed")],
)
def test_a_claim_needs_two_standard_errors(mean, error, paper, said):
    assert citation_table.verdict(mean, error, paper) == said


def test_differences_are_over_common_seeds():
    found = [result("WC", seed=i, accuracy=0.80 + 0.01 * i) for i in range(3)]
    found += [result("GAT", seed=i, accuracy=0.79 + 0.01 * i) for i in range(1, 4)]
    assert "| WC - GAT | +1.00 ± 0.00 (paper +0.81): holds | – (paper +1.02)" in citation_table.claims(
        citation_table.cells_of(found, drawn=False)
    )


def test_the_command_prints_stored_results(tmp_path, capsys):
    folder = tmp_path / "graph-cora" / "map-1"
    folder.mkdir(parents=True)
    stored = {**result("GAT"), "key": "1", "cost": {}}
    (folder / "seed0.json").write_text(json.dumps(stored))
    assert main(["study", "graphs", str(tmp_path)]) == 0
    assert "| GAT | 80.00 (1) | 83.00 |" in capsys.readouterr().out
    for others in ([], [{**result("WC"), "task": "toy/m1"}], [{**result("WC"), "method": "vi"}]):
        with pytest.raises(ValueError, match=r"experiments/graphs.toml"):
            citation_table.cells_of(others, drawn=False)

"""Distance to known posteriors against gradient evaluations, as tables and a figure."""

import math

import pytest

from bayesformer.study import fidelity_cost


def result(problem, method, seed, distance, epochs=100.0, ratio=0.5, regions=("in", "out"), variant=""):
    metrics = {"wasserstein": distance, "rank_error": 0.1, "total_variation": 0.2}
    for region in regions:
        metrics |= {f"wasserstein/{region}": distance, f"spread_ratio/{region}": ratio, f"mean_error/{region}": 2.0}
    cost = {"fit_seconds": 3.0, "gradient_epochs": epochs}
    return {
        "task": f"fidelity/{problem}",
        "method": method,
        "variant": variant,
        "seed": seed,
        "metrics": metrics,
        "cost": cost,
    }


RESULTS = [
    result("gap-mlp", "vi", 0, 4.0, regions=("in", "gap", "out")),
    result("gap-mlp", "sghmc", 0, 1.0, 500.0, 0.9, ("in", "gap", "out")),
    result("gap-mlp", "sghmc", 1, 3.0, 700.0, 1.1, ("in", "gap", "out")),
    result("linear-n200-k10", "vi", 0, 12.3),
    {"task": "toy/m1", "method": "mle", "seed": 0, "metrics": {"log_likelihood": 1.0}, "cost": {}},
]


def test_a_table_per_problem_has_the_nearest_first_and_means_over_seeds():
    lines = fidelity_cost.table(RESULTS).splitlines()
    assert lines[0].startswith("| gap-mlp | distance, sd | distance in/gap/out | spread ratio in/gap/out |")
    assert lines[2].startswith("| sghmc | 2.00 ± 1.41 | 2.00 / 2.00 / 2.00 | 1.00 / 1.00 / 1.00 | 2.00 / 2.00 / 2.00 |")
    assert lines[2].endswith("| 0.10 | 0.20 | 600 | 3.00 | 2 |")
    assert lines[3].startswith("| vi | 4.00 | ")
    assert lines[5].startswith("| linear-n200-k10 | distance, sd | distance in/out |")
    assert "toy" not in "".join(lines)


def test_the_overview_has_a_row_per_method():
    lines = fidelity_cost.overview(RESULTS).splitlines()
    assert lines[0] == "| distance, sd (spread ratio) | linear-n200-k10 |"
    assert lines[2] == "| vi | 12 (0.50 / 0.50) |"
    assert lines[6:] == ["| sghmc | 2.00 (1.00 / 1.00 / 1.00) |", "| vi | 4.00 (0.50 / 0.50 / 0.50) |"]


def test_what_was_not_counted_or_is_not_finite_has_a_dash():
    lost = result("gap-mlp", "swag", 0, math.inf)
    lost["cost"] = {"fit_seconds": 1.0}
    lines = fidelity_cost.table([*RESULTS, lost]).splitlines()
    assert lines[4].startswith("| swag | – | – / – / – |")
    assert lines[4].endswith("| – | 1.00 | 1 |")


def test_the_figure_has_a_panel_per_problem_and_a_key(tmp_path):
    drawn = fidelity_cost.figure(RESULTS, tmp_path / "a.svg").read_text()
    assert "gap-mlp" in drawn
    assert "linear-n200-k10" in drawn
    assert "sghmc" in drawn
    assert "gradient evaluations, epochs" in drawn


def test_other_results_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"results must hold a task fidelity/\*; got none"):
        fidelity_cost.table(RESULTS[-1:])
    uncounted = {**RESULTS[0], "cost": {"fit_seconds": 1.0}}
    with pytest.raises(ValueError, match="what they cost in gradient evaluations"):
        fidelity_cost.figure([uncounted], tmp_path / "b.svg")

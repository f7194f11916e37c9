"""Tables for documents: what a cell says, who is first, how a setting is chosen."""

import pytest

from bayesformer import cli
from bayesformer.bench.markdown import choice_table, choices, comparison
from bayesformer.core.storage import write_json


def result(task, method, seed, score, variant="", validation=0.0, **settings):
    return {
        "task": task,
        "method": method,
        "variant": variant,
        "seed": seed,
        "key": f"{method}{variant}",
        "primary": "log_likelihood",
        "metrics": {"log_likelihood": score, "oracle_gap": score + 1},
        "cost": {},
        "validation": validation,
        "settings": {"method": settings},
    }


def runs():
    noise = [0.0, 0.01, -0.01, 0.02, -0.02]
    found = []
    for seed, e in enumerate(noise):
        for task in ("toy/m1", "toy/m2"):
            short = task[-2:]
            found += [
                result(task, "mle", seed, -3 + e),
                result(task, "map", seed, -2 + e / 2, f"prior=improved/{short}", prior=f"improved/{short}"),
                result(task, "vi", seed, -5 - e, temperature=1.0, validation=-5.0),
            ]
    found += [
        result("toy/m1", "vi", 0, -1.0, "temperature=0.1", temperature=0.1, validation=-4.0),
        result("toy/m1", "vi", 0, -0.5, "temperature=0.01", temperature=0.01, validation=-4.5),
    ]
    return found


def test_rows_are_methods_over_all_tasks_in_order_of_their_mean():
    lines = comparison(runs()).splitlines()
    assert lines[0] == "| method | toy/m1 | toy/m2 |"
    assert lines[2] == "| map (prior=improved) | -1.000 ± 0.008 ▲ | -1.000 ± 0.008 ▲ |"
    assert lines[3] == "| mle | -2.000 ± 0.016 | -2.000 ± 0.016 |"
    assert lines[4].startswith("| vi | -4.000 ± 0.016 ▼ |")
    # Not run everywhere: last, and said to rest on one seed.
    assert lines[5] == "| vi (temperature=0.01) | 0.500 (1) | – |"


def test_where_lower_is_better_the_lowest_is_first():
    found = [result("digits", method, 0, 0.0) for method in ("mle", "map", "vi")]
    for one, distance in zip(found, (2.0, 1.0, 3.0), strict=True):
        one["metrics"] = {"wasserstein": distance}
        one["primary"] = "wasserstein"
    assert [line.split(" | ")[0] for line in comparison(found).splitlines()[2:]] == ["| map", "| mle", "| vi"]


def test_another_metric_and_an_unknown_one():
    assert "| mle | -3.000" in comparison(runs(), "log_likelihood")
    with pytest.raises(ValueError, match="unknown metric 'oracle_gab'. Did you mean"):
        comparison(runs(), "oracle_gab")


def test_a_setting_is_chosen_by_validation_on_what_all_values_share():
    # The mean of T = 1 counts only the cell that the other values were run on, and test scores do not count.
    assert choices(runs(), "temperature") == {"vi": {0.01: -4.5, 0.1: -4.0, 1.0: -5.0}}
    assert choice_table(runs(), "temperature").splitlines()[-1] == "| vi | -4.500 | **-4.000** | -5.000 |"


def test_from_the_command_line(tmp_path, capsys):
    for i, found in enumerate(runs()):
        write_json(tmp_path / str(i) / f"seed{found['seed']}.json", found)
    assert cli.main(["report", str(tmp_path), "--markdown"]) == 0
    assert capsys.readouterr().out.strip() == comparison(runs())
    assert cli.main(["report", str(tmp_path), "--choose", "temperature"]) == 0
    assert capsys.readouterr().out.strip() == choice_table(runs(), "temperature")

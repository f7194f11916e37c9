"""The command that compares one-line calls with known posteriors."""

import json

import pytest
import torch

from bayesformer import cli
from bayesformer.study import bars


def row(problem, method, seed=0, error=0.1, ratio=1.0, doubts=()):
    return {"problem": problem, "method": method, "seed": seed, "error": error, "ratio": ratio, "doubts": list(doubts)}


def test_a_run_stores_its_fits_and_makes_none_twice(tmp_path, capsys, monkeypatch):
    path = tmp_path / "bars.json"
    command = ["study", "bars", "--problems", "linear N=200 k=10", "--methods", "laplace*", "--seeds", "1"]
    assert cli.main([*command, "--output", str(path)]) == 0
    shown = capsys.readouterr().out
    assert "| linear N=200 k=10 | laplace full | 0.0" in shown
    assert "| within the bar | 3 | 0 (false alarms) |" in shown
    rows = json.loads(path.read_text())["rows"]
    assert [r["method"] for r in rows] == ["laplace full", "laplace kron", "laplace diag"]
    assert all(r["error"] < 0.3 and 0.99 < r["ratio"] < 1.01 for r in rows)
    monkeypatch.setattr(bars, "measure", None)
    assert cli.main([*command, "--output", str(path)]) == 0


def test_doubts_of_right_fits_are_false_alarms_and_those_of_wrong_ones_catches():
    name = "linear N=200 k=10"
    rows = [
        row(name, "sgld"),
        row(name, "sghmc", doubts=["mode"]),
        row(name, "psgld", ratio=0.3, doubts=["length"]),
        row(name, "sgnht", error=2.0),
    ]
    text = bars.alarms(rows)
    assert "| within the bar | 2 | 1 (false alarms) |" in text
    assert "| beyond 1.5 times the bar | 2 | 1 (catches) |" in text
    assert "Not caught: sgnht on linear N=200 k=10." in text


def test_a_bar_holds_by_the_median_and_for_every_seed():
    name = "linear N=200 k=10"
    good = [row(name, "sgld", seed) for seed in range(4)]
    assert "| 4 | yes | 0 |" in bars.table(good)
    assert "| 5 | median | 0 |" in bars.table([*good, row(name, "sgld", 4, ratio=1.3)])
    assert "| 1 | no | 0 |" in bars.table([row(name, "sgld", ratio=1.2)])


def test_the_exact_posterior_follows_the_prior():
    problem = bars.linear(50, 10, 0)
    wide, tight = bars.truth_of(problem, 0), bars.truth_of(problem, 0, 100.0)
    torch.testing.assert_close(wide.mean, problem.mean)
    assert (tight.sd < wide.sd).all()
    assert tight.mean.norm() < wide.mean.norm()
    x, y = (part.double() for part in problem.data)
    precision = x.T @ x + 100 * torch.eye(20).double()
    torch.testing.assert_close(tight.mean, torch.linalg.solve(precision, x.T @ y)[:, 0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["logistic N=100", "softmax P=650"])
def test_problems_without_a_closed_form_have_data_that_fit_their_model(name):
    problem = bars.problems()[name][1](0)
    outputs = problem.model()(problem.data[0])
    problem.likelihood.check(outputs, problem.data[1])
    assert len(problem.asked) == 50

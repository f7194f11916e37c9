"""The command that compares one-line calls with known posteriors."""

import json
from pathlib import Path

import pytest
import torch

from bayesformer import cli, fit
from bayesformer.methods import build_method
from bayesformer.reference import ReferencePosterior
from bayesformer.study import bar_networks, bar_problems, bars


def row(problem, method, seed=0, error=0.1, ratio=1.0, doubts=()):
    return {"problem": problem, "method": method, "seed": seed, "error": error, "ratio": ratio, "doubts": list(doubts)}


def network_row(method, seed=0, spread=(1.0, 1.0, 1.0), doubts=()):
    regions = dict(zip(("in", "gap", "out"), spread, strict=True))
    made = {"problem": "gap MLP N=100", "method": method, "seed": seed, "spread": regions}
    return {**made, "distance": dict.fromkeys(regions, 0.5), "doubts": list(doubts)}


def test_a_run_stores_its_fits_and_makes_none_twice(tmp_path, capsys, monkeypatch):
    path = tmp_path / "bars.json"
    command = ["study", "bars", "--problems", "linear N=200 k=10", "--methods", "laplace*", "--seeds", "1"]
    assert cli.main([*command, "--output", str(path)]) == 0
    shown = capsys.readouterr().out
    assert "| linear N=200 k=10 | laplace full | 0.0" in shown
    assert "| all | 3 | 0 | 0 | 0 |" in shown
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
    assert "| regressions and last layers | 2 | 1 | 2 | 1 |" in text
    assert "False alarms: sghmc on linear N=200 k=10." in text
    assert "Not caught: sgnht on linear N=200 k=10." in text


def test_a_bar_holds_by_the_median_and_for_every_seed():
    name = "linear N=200 k=10"
    good = [row(name, "sgld", seed) for seed in range(4)]
    assert "| 4 | yes | 0 |" in bars.table(good)
    assert "| 5 | median | 0 |" in bars.table([*good, row(name, "sgld", 4, ratio=1.3)])
    assert "| 1 | no | 0 |" in bars.table([row(name, "sgld", ratio=1.2)])


def test_the_exact_posterior_follows_the_prior():
    problem = bar_problems.linear(50, 10, 0)
    wide, tight = bar_problems.exact_truth(problem), bar_problems.exact_truth(problem, 100.0)
    torch.testing.assert_close(wide.mean, problem.mean)
    assert (tight.sd < wide.sd).all()
    assert tight.mean.norm() < wide.mean.norm()
    x, y = (part.double() for part in problem.data)
    precision = x.T @ x + 100 * torch.eye(20).double()
    torch.testing.assert_close(tight.mean, torch.linalg.solve(precision, x.T @ y)[:, 0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["logistic N=100", "softmax P=650"])
def test_problems_without_a_closed_form_have_data_that_fit_their_model(name):
    problem = bar_problems.problems()[name](0)
    outputs = problem.model()(problem.data[0])
    problem.likelihood.check(outputs, problem.data[1])
    assert len(problem.asked) == 50


def test_a_sampled_truth_is_made_once_and_near_a_closed_form(tmp_path, monkeypatch):
    problem = bar_problems.linear(60, 3, 0)
    path = tmp_path / "truth.safetensors"
    monkeypatch.setattr(bar_problems, "best_diagonal", lambda problem, draws: draws[0])
    found, exact = bar_problems.sampled_truth(problem, 0, path), bar_problems.exact_truth(problem)
    assert ((found.mean - exact.mean) / exact.sd).abs().max() < 0.15  # 2000 draws, nearly independent
    torch.testing.assert_close(found.sd, exact.sd, rtol=0.1, atol=0)
    monkeypatch.setattr(bar_problems, "quiet_fit", None)
    again = bar_problems.sampled_truth(problem, 0, path)
    assert torch.equal(again.outputs, found.outputs)


def test_the_best_diagonal_of_a_last_layer_is_that_of_its_hessian():
    """At one draw: the diagonal of second derivatives of the negative log joint, bias included."""
    problem = bar_problems.softmax(3, 0, count=40, classes=4)
    theta = 0.5 * torch.randn(16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x, y = problem.data[0].double(), problem.data[1]

    def potential(t):
        logits = x @ t[:12].view(4, 3).T + t[12:]
        return torch.nn.functional.cross_entropy(logits, y, reduction="sum") + 0.5 * t.square().sum()

    hessian = torch.autograd.functional.hessian(potential, theta)
    torch.testing.assert_close(bar_problems.best_diagonal(problem, theta[None]), hessian.diagonal().rsqrt())


def test_rows_of_several_files_are_added_once(tmp_path):
    name = "linear N=200 k=10"
    for file, rows in (("a", [row(name, "sgld", error=0.1)]), ("b", [row(name, "sgld", error=9.0), row(name, "vi")])):
        (tmp_path / file).write_text(json.dumps({"rows": rows}))
    bars.add_rows(tmp_path / "a", [tmp_path / "b"])
    rows = bars.read_rows(tmp_path / "a")
    assert [(r["method"], r["error"]) for r in rows] == [("sgld", 0.1), ("vi", 0.1)]


def test_a_network_holds_within_a_factor_of_two_in_every_region():
    good = [network_row("sghmc", seed, (0.6, 1.9, 1.0)) for seed in range(3)]
    assert "| 3 | yes | 0 |" in bars.network_table(good)
    assert "| 4 | median | 0 |" in bars.network_table([*good, network_row("sghmc", 3, (0.3, 1.0, 1.0))])
    assert "| 1 | no | 1 |" in bars.network_table([network_row("sghmc", 0, (1.0, 1.0, 2.1), ["length"])])
    text = bars.alarms([*good, network_row("sgld", 0, (1.0, 0.2, 0.1), ["regime"]), row("linear N=200 k=10", "vi")])
    assert "| networks | 3 | 0 | 1 | 1 |" in text
    assert "| all | 4 | 0 | 1 | 1 |" in text


@pytest.mark.parametrize("name", bar_networks.NETWORKS)
def test_networks_of_the_bars_have_data_that_fit_their_model(name):
    problem = bar_networks.NETWORKS[name]
    data = problem.data()
    problem.likelihood.check(problem.model()(data.train.inputs), data.train.targets)
    small, likelihood = problem.condensed(data)
    likelihood.check(problem.model()(small.train.inputs), small.train.targets)
    assert len(data.train.targets) == int(name.rpartition("=")[2])


def test_condensed_targets_have_the_same_posterior_as_all_of_them():
    problem = bar_networks.UnseenSeries(5, 4)
    data = problem.data()
    small, likelihood = problem.condensed(data)

    def log_likelihoods(given, law):
        x, y = given.train.inputs.double(), given.train.targets.double()
        return [law.log_prob(model(x), y).sum() for model in models]

    models = [problem.model().double() for _ in range(3)]
    whole, means = log_likelihoods(data, problem.likelihood), log_likelihoods(small, likelihood)
    torch.testing.assert_close(whole[0] - whole[1], means[0] - means[1])
    torch.testing.assert_close(whole[0] - whole[2], means[0] - means[2])


def test_a_network_is_measured_against_what_was_stored(tmp_path):
    """Draws of a fit compared with those of the very same fit: spreads are equal and distances 0."""
    problem = bar_networks.UnseenGap(30, hidden=3, draws=4)
    data = problem.data()
    pair, members = (data.train.inputs, data.train.targets), build_method("ensemble", {"members": 3})
    posterior = fit(problem.model, pair, likelihood=problem.likelihood, method=members, seed=2, progress=False)
    tensors = {f"outputs.{region}": posterior.outputs(x).values[None] for region, x in data.regions.items()}
    reference = ReferencePosterior("own", {"kind": "hmc", "regions": list(data.regions)}, tensors)
    found = bar_networks.measure_network("ensemble", {"members": 3}, problem, reference, 2)
    assert found["spread"] == pytest.approx(dict.fromkeys(("in", "gap", "out"), 1.0))
    assert found["distance"] == pytest.approx(dict.fromkeys(("in", "gap", "out"), 0.0), abs=1e-6)


def test_the_page_of_defaults_shows_what_is_stored():
    root = Path(__file__).parent.parent
    place = root / "results" / "bars"
    rows = bars.read_rows(place / "bars.json")
    assert bars.report(rows, place) in (root / "docs" / "defaults.md").read_text()


def test_tables_take_the_place_of_those_between_the_marks_of_a_page(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(f"before\n\n{bars.MARK}\nold\n{bars.END}\n\nafter\n")
    bars.write_into(page, "new")
    assert page.read_text() == f"before\n\n{bars.MARK}\n\nnew\n\n{bars.END}\n\nafter\n"
    page.write_text("no marks")
    with pytest.raises(ValueError, match="page must hold the lines <!-- bars --> and <!-- end of bars -->"):
        bars.write_into(page, "new")

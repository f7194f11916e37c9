"""Tables for regression: the oracle of Friedman's problems, units by training rows alone, and the tasks around them."""

import csv
import io
import math
from dataclasses import replace

import pytest
import torch
from scipy import stats
from sklearn import datasets

import bayesformer as bf
from bayesformer import cli
from bayesformer.bench import runner
from bayesformer.bench.planning import plan
from bayesformer.bench.records import read_results
from bayesformer.bench.tasks import TASKS, TabularRegression
from bayesformer.bench.trial import Options
from bayesformer.datasets import regression
from bayesformer.evaluate import check_not_above
from bayesformer.likelihoods.predictive import GaussianPredictive
from tests.laws import assert_law, assert_mean

FRIEDMAN = ["friedman1", "friedman2", "friedman3"]
SIZES = {"train": 60, "validation": 20, "test": 40}


def table(name, seed=0, **sizes):
    return regression.load(regression.PROBLEMS[name], {**SIZES, **sizes}, seed)


def fresh():
    """A seed that follows the test's own."""
    return int(torch.randint(2**31, ()))


# The law


@pytest.mark.parametrize("name", FRIEDMAN)
def test_means_are_those_of_scikit_learn_on_its_own_inputs(name):
    x, mean = getattr(datasets, f"make_{name}")(50, noise=0.0, random_state=fresh())
    torch.testing.assert_close(regression.PROBLEMS[name].mean(torch.tensor(x)), torch.tensor(mean))


@pytest.mark.parametrize("name", FRIEDMAN)
def test_inputs_are_uniform_in_the_box_of_scikit_learn(name):
    ours, _ = regression.PROBLEMS[name].rows(4_000, torch.Generator().manual_seed(fresh()))
    theirs, _ = getattr(datasets, f"make_{name}")(4_000, random_state=fresh())
    for j in range(ours.shape[1]):
        assert stats.ks_2samp(ours[:, j].numpy(), theirs[:, j]).pvalue > 1e-6 / ours.shape[1]


@pytest.mark.parametrize("name", FRIEDMAN)
def test_the_oracle_is_the_law_of_scikit_learns_draws(name):
    """Rows drawn by scikit-learn, put into the table's units: their integral transform is uniform."""
    rows = table(name)
    noise = regression.PROBLEMS[name].noise
    x, y = getattr(datasets, f"make_{name}")(20_000, noise=noise, random_state=fresh())
    inputs, targets = rows.features.standardised(torch.tensor(x)), rows.target.standardised(torch.tensor(y)[:, None])
    law = rows.conditional(inputs)
    assert_law(law.cdf(targets), "uniform")
    expected = -0.5 * math.log(2 * math.pi * math.e * (noise / rows.target.sd.item()) ** 2)
    assert_mean(law.log_prob(targets), expected)


@pytest.mark.parametrize("name", FRIEDMAN)
def test_nothing_but_the_truth_reaches_the_oracle(name):
    task = replace(TASKS[f"regression/{name}"](), test=4000)
    data = task.load()
    truth = task.table.conditional(data.test.inputs)

    def judged(shift, widen):
        answer = lambda x: GaussianPredictive(truth.means + shift, truth.variances * widen)  # noqa: E731
        return task.evaluate(answer, data._replace(probes={}))

    exact = judged(0.0, 1.0)
    assert exact.gap.mean == pytest.approx(0, abs=1e-6)
    assert exact.oracle == pytest.approx(exact.metrics["log_likelihood"], abs=1e-6)
    sd = truth.variances[0, 0].sqrt()
    for shift, widen in [(0.3 * sd, 1.0), (0.0, 1.5), (0.0, 0.7)]:
        gap = judged(shift, widen).gap
        check_not_above(gap)
        # KL of two Gaussians: what a wrong answer loses in the mean.
        lost = 0.5 * (math.log(widen) + (1 + (shift / sd) ** 2) / widen - 1)
        assert abs(gap.mean + float(lost)) < 6 * gap.standard_error


def test_data_of_the_world_have_no_oracle():
    task = TASKS["regression/diabetes"]()
    data = task.load()
    count = len(data.test)
    answer = lambda x: GaussianPredictive(torch.zeros(2, count, 1), torch.ones(2, count, 1))  # noqa: E731
    evaluation = task.evaluate(answer, data)
    assert evaluation.gap is None
    assert evaluation.oracle is None
    assert evaluation.metrics["auroc/outside"] == 0.5


# Units and parts


@pytest.mark.parametrize("name", list(regression.PROBLEMS))
def test_units_come_from_the_training_rows_alone(name):
    rows = table(name)
    for units, part in [(rows.features, rows.train.inputs), (rows.target, rows.train.targets)]:
        raw = units.restored(part)
        torch.testing.assert_close(raw.mean(0), units.mean)
        torch.testing.assert_close(raw.std(0), units.sd)
        torch.testing.assert_close(part.mean(0), torch.zeros(part.shape[1]), atol=1e-5, rtol=0)
    assert (rows.test.inputs.mean(0).abs() > 1e-3).any()


@pytest.mark.parametrize("name", list(regression.PROBLEMS))
def test_other_test_rows_change_nothing_in_training(name):
    """What would catch a mean over all rows: the training part does not know how many others there are."""
    few, many = table(name, test=10), table(name, test=200)
    assert few.train.fingerprint() == many.train.fingerprint()
    assert few.validation.fingerprint() == many.validation.fingerprint()


@pytest.mark.parametrize("name", list(regression.PROBLEMS))
def test_parts_are_disjoint_and_repeatable(name):
    first, again, other = table(name), table(name), table(name, seed=1)
    parts = [first.train, first.validation, first.test]
    assert [len(part) for part in parts] == list(SIZES.values())
    rows = [tuple(row) for part in parts for row in part.inputs.tolist()]
    assert len(set(rows)) == sum(SIZES.values())
    assert first.test.fingerprint() == again.test.fingerprint() != other.test.fingerprint()


def test_rows_of_the_diabetes_table_are_whole():
    x, y = datasets.load_diabetes(return_X_y=True, scaled=False)
    rows = table("diabetes", train=240, validation=80, test=122)
    restored = [
        torch.cat([rows.features.restored(part.inputs), rows.target.restored(part.targets)], 1)
        for part in (rows.train, rows.validation, rows.test)
    ]
    expected = torch.cat([torch.tensor(x), torch.tensor(y)[:, None]], 1)
    distance, place = torch.cdist(torch.cat(restored), expected).min(1)
    assert distance.max() < 1e-3
    assert len(place.unique()) == 442


@pytest.mark.parametrize("name", list(regression.PROBLEMS))
def test_outsiders_lie_outside_the_training_box_on_the_way_from_its_centre(name):
    rows = table(name)
    low, high = rows.train.inputs.amin(0), rows.train.inputs.amax(0)
    centre, reach = (low + high) / 2, (high - low) / 2
    out = (rows.outside(rows.test.inputs) - centre) / reach
    torch.testing.assert_close(out.abs().amax(-1), torch.full((len(out),), 2.0))
    inside = (rows.test.inputs - centre) / reach
    torch.testing.assert_close(out / out.norm(dim=-1, keepdim=True), inside / inside.norm(dim=-1, keepdim=True))


# The task


@pytest.mark.parametrize("network", ["transformer", "mlp"])
def test_a_cell_of_every_table_runs(network, tmp_path):
    settings = {"training": {"epochs": 2}, "regression/*": {"network": network, "test": 40, "dim": 8}}
    cells = plan(["regression/*"], ["mle", {"name": "ensemble", "members": 2}], [0], settings)
    outcome = runner.run(cells, Options(tmp_path, keep_posteriors=False))
    assert not outcome.failed
    for result in read_results(tmp_path).results:
        assert (result["oracle"] is None) == (result["task"] == "regression/diabetes")
        assert "auroc/outside" in result["metrics"]
        assert ("auroc_epistemic/outside" in result["metrics"]) == (result["method"] == "ensemble")
        if result["oracle"]:
            assert result["oracle"]["gap"] < 4 * result["oracle"]["gap_se"]


def test_answers_are_in_the_targets_own_units():
    task = TASKS["regression/diabetes"]()
    sd = task.table.target.sd.item()
    ours = GaussianPredictive(torch.randn(3, 5, 1), torch.rand(3, 5, 1) + 0.1)
    answer, targets = task.answer(ours), torch.randn(5, 1)
    raw = task.table.target.restored(targets)
    torch.testing.assert_close(answer.log_prob(raw), ours.log_prob(targets).double() - math.log(sd), rtol=0, atol=1e-4)


def test_predict_reads_and_answers_in_raw_units(tmp_path, capsys):
    run = ["run", "regression/friedman2", "--methods", "mle", "--results", str(tmp_path)]
    sets = ["--set=training.epochs=60", "--set=training.lr=0.02", "--set=regression/*.network=mlp"]
    assert cli.main([*run, *sets, "--quiet"]) == 0
    posterior = next((tmp_path / "posteriors").rglob("posterior.json")).parent
    x, mean = datasets.make_friedman2(200, noise=0.0, random_state=0)
    (tmp_path / "rows.csv").write_text("\n".join(",".join(map(str, row)) for row in x))
    capsys.readouterr()
    assert cli.main(["predict", str(posterior), str(tmp_path / "rows.csv")]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    predicted = torch.tensor([float(row["mean"]) for row in rows], dtype=torch.float64)
    assert torch.corrcoef(torch.stack([predicted, torch.tensor(mean)]))[0, 1] > 0.95
    assert predicted.mean().item() == pytest.approx(mean.mean(), rel=0.1)
    assert 60 < float(rows[0]["sd"]) < 400  # the noise is 125


STRUCTURES = ["kron", "diag", "full", "block", "low_rank", "subnetwork", "last_layer"]


@pytest.mark.parametrize("way", ["linearised", "streamlined", "one_pass", "sampled"])
@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("network", ["transformer", "mlp"])
@pytest.mark.filterwarnings("ignore::bayesformer.FidelityWarning")
def test_laplace_in_every_structure_and_way(network, structure, way):
    task = replace(TASKS["regression/friedman1"](), network=network, dim=8, hidden=10, train=30, test=10)
    data = task.load()
    torch.manual_seed(0)
    settings = {"structure": structure, "predictive": way, "prior_precision": 100.0, "draws": 5, "rank": 8, "size": 20}
    posterior = bf.laplace(task.model().eval(), data.train, likelihood=task.likelihood, **settings)
    refused = {"full", "low_rank", "subnetwork"} | ({"block"} if network == "transformer" else set())
    if way == "one_pass" and structure in refused:
        with pytest.raises(ValueError, match="the one-pass rule cannot use"):
            posterior.predict(data.test.inputs)
        return
    predictive = posterior.predict(data.test.inputs)
    assert torch.isfinite(predictive.log_prob(data.test.targets)).all()
    assert (predictive.epistemic > 0).any()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: TabularRegression("boston"), "unknown problem 'boston'"),
        (lambda: table("friedman1", train=1), "every part must have at least 2 rows; got .*'train': 1"),
        (lambda: table("diabetes", test=400), "the parts of diabetes must have at most 442 rows together; got"),
        (lambda: TASKS["regression/friedman2"]().inputs(torch.zeros(3, 5)), "must have 4 features; got shape \\(3, 5"),
        (lambda: regression.Units.of(torch.ones(3, 2)), "rows must vary in every column; column 0 does not."),
    ],
)
def test_errors_name_argument_rule_and_value(call, message):
    with pytest.raises(ValueError, match=message):
        call()

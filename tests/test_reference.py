"""Reference posteriors: closed forms, files, checks, and the tasks that score methods against them."""

import json
import math
import shutil
from dataclasses import dataclass, replace

import pytest
import torch

import bayesformer as bf
from bayesformer import evaluate, reference
from bayesformer.bench.planning import plan
from bayesformer.bench.runner import run
from bayesformer.bench.tasks import TASKS
from bayesformer.bench.tasks.known_posterior import KnownPosterior
from bayesformer.bench.trial import Options
from bayesformer.cli import main
from bayesformer.core.effort import counting
from bayesformer.core.errors import DamagedFileError
from bayesformer.core.storage import write_tensors
from bayesformer.core.types import Batch
from bayesformer.likelihoods.predictive import GaussianPredictive
from bayesformer.reference import making, problems, stored
from bayesformer.reference.checking import check, floor, table
from bayesformer.reference.closed_form import weight_space
from bayesformer.reference.gap_network import GapNetwork
from bayesformer.reference.linear_regression import LinearRegression
from bayesformer.reference.logistic_regression import LogisticRegression
from bayesformer.reference.random_features import CosineFeatures, RandomFeatures

EXACT = "linear-n200-k10"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv(stored.FOLDER, str(tmp_path))
    return tmp_path


class TestClosedForms:
    def test_the_linear_posterior_is_where_the_log_joint_is_flat_and_as_curved(self):
        """By the library's own log joint: its gradient is 0 at the mean, minus N times its Hessian is the precision."""
        problem = LinearRegression(50, 100.0, weights=5)
        data = problem.data()
        law = problem.posterior(data)
        joint = bf.log_joint(problem.model().double(), problem.likelihood, reference.PRIOR, 50)
        batch = Batch(data.train.inputs.double(), data.train.targets.double())

        def value(weights):
            return joint({"weight": weights[None]}, batch)[0]

        assert torch.func.grad(value)(law.mean).abs().max() < 1e-8
        precision = -50 * torch.func.hessian(value)(law.mean)
        assert torch.allclose(precision @ law.covariance, torch.eye(5).double(), atol=1e-6)

    def test_function_space_and_weight_space_agree(self):
        problem = RandomFeatures(width=40, noise=0.3)
        data, model = problem.data(), problem.model()
        law = weight_space(model.features(data.train.inputs), data.train.targets, 0.3)
        for region, by_kernel in problem.exact(data).items():
            by_weights = law.outputs(model.features(data.regions[region]))
            assert torch.allclose(by_kernel.mean, by_weights.mean, atol=1e-6)
            assert torch.allclose(by_kernel.variance, by_weights.variance, atol=1e-6)

    def test_many_features_have_the_squared_exponential_kernel(self):
        """The mean of F bounded terms: an error of a few 1/√F."""
        x, count = torch.linspace(-2, 2, 9)[:, None], 40000
        rows = CosineFeatures(count, 0.7).features(x)
        limit = torch.exp(-(x - x.T).square() / (2 * 0.7**2))
        assert (rows @ rows.T - limit).abs().max() < 6 / math.sqrt(count)

    @pytest.mark.parametrize("condition", [10.0, 1000.0])
    def test_inputs_have_the_condition_asked_for(self, condition):
        rows = LinearRegression(20000, condition, weights=6).data().train.inputs
        eigenvalues = torch.linalg.eigvalsh(rows.T @ rows / len(rows))
        assert eigenvalues[-1] / eigenvalues[0] == pytest.approx(condition, rel=0.1)
        assert eigenvalues[-1] == pytest.approx(1, rel=0.1)


@pytest.mark.parametrize("name", [n for n in problems.PROBLEMS if not problems.PROBLEMS[n]().stores_data])
def test_a_problem_is_the_same_every_time_and_its_model_fits_its_data(name):
    problem = problems.problem_of(name)
    data, again = problem.data(), problem.data()
    for key, tensor in data.tensors().items():
        assert torch.equal(tensor, again.tensors()[key])
    assert {"in", "out"} <= set(data.regions)
    problem.likelihood.check(problem.model()(data.train.inputs), data.train.targets)
    json.dumps(problem.settings)


def test_an_unknown_problem_names_the_nearest():
    with pytest.raises(ValueError, match=r"unknown reference problem 'gap-mpl'. Did you mean 'gap-mlp'"):
        problems.problem_of("gap-mpl")


class TestStored:
    def test_what_is_made_is_read(self, folder):
        path = making.make(EXACT)
        problem = problems.problem_of(EXACT)
        found = reference.read(EXACT, problem)
        assert path == folder / f"{EXACT}.safetensors"
        assert found.is_exact
        laws = problem.exact(problem.data())
        assert torch.equal(found.outputs("out").mean, laws["out"].mean)
        assert [finding.right for finding in check(EXACT)] == [True]

    def test_another_version_is_refused(self, folder, monkeypatch):
        making.make(EXACT)
        monkeypatch.setattr(LinearRegression, "version", 2)
        with pytest.raises(
            ValueError, match=r"must have been made for version 2 .* made for version 1 .* Make it anew"
        ):
            check(EXACT)

    def test_other_settings_are_refused(self, folder):
        making.make(EXACT)
        with pytest.raises(ValueError, match="noise=2.0.*noise=1.0"):
            reference.read(EXACT, replace(problems.problem_of(EXACT), noise=2.0))

    def test_other_data_are_refused(self, folder, monkeypatch):
        making.make(EXACT)
        made = LinearRegression.data
        monkeypatch.setattr(
            LinearRegression,
            "data",
            lambda self: made(self)._replace(regions={"in": torch.ones(60, 20), "out": torch.ones(60, 20)}),
        )
        with pytest.raises(ValueError, match="was made for other data: region.in had"):
            check(EXACT)

    def test_a_missing_one_says_how_to_make_it(self, folder):
        with pytest.raises(FileNotFoundError, match=f"bayesformer reference make {EXACT}"):
            check(EXACT)

    def test_a_damaged_one_is_refused(self, folder):
        path = making.make(EXACT)
        path.write_bytes(path.read_bytes()[:-7])
        with pytest.raises(DamagedFileError):
            check(EXACT)

    def test_a_wrong_one_is_found(self, folder):
        making.make(EXACT)
        found = reference.read(EXACT, problems.problem_of(EXACT))
        wrong = {**found.tensors, "variance.in": found.tensors["variance.in"] * 1.001}
        write_tensors(stored.path_of(EXACT), wrong, found.facts)
        (finding,) = check(EXACT)
        assert not finding.right
        assert "1.0e-03" in finding.sentence

    def test_without_a_name_the_checkout_is_looked_at(self, monkeypatch):
        monkeypatch.delenv(stored.FOLDER, raising=False)
        assert stored.folder().name == "references"


@dataclass(frozen=True)
class SmallLogistic(LogisticRegression):
    examples: int = 40
    weights: int = 3
    asked: int = 5

    @property
    def sampler(self):
        return bf.Nuts(chains=4, draws=60, thin=1, warm_up=60)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A small reference, made once."""
    place = tmp_path_factory.mktemp("made")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(problems.PROBLEMS, "logistic", SmallLogistic)
        return making.make("logistic", place)


class TestChains:
    @pytest.fixture(autouse=True)
    def small(self, made, folder, monkeypatch):
        monkeypatch.setitem(problems.PROBLEMS, "logistic", SmallLogistic)
        shutil.copy(made, folder)

    def test_outputs_rhat_and_cost_are_stored(self, made):
        found = reference.read("logistic", SmallLogistic())
        assert found.traces("in").shape == (4, 60, 5)
        assert found.outputs("out").values.shape == (240, 5)
        assert found.tensors["rhat.in"].shape == (5, 1)
        assert found.facts["rhat"]["in"]["largest"] == pytest.approx(found.tensors["rhat.in"].max().item())
        assert found.facts["diagnostics"]["leapfrogs"] > 4 * 120
        assert not (made.parent / ".making" / "logistic").exists()
        assert "logistic | 3 | 40 | nuts, 4 × 60 | " in table()

    def test_it_is_the_posterior_on_a_grid(self):
        """Weights on a grid of 61³ points: mean and standard deviation of every logit within 5 standard errors."""
        problem = SmallLogistic()
        data, found = problem.data(), reference.read("logistic", problem)
        line = torch.linspace(-5, 5, 61, dtype=torch.float64)
        grid = torch.cartesian_prod(line, line, line)  # (61³, 3)
        logits = grid @ data.train.inputs.double().T
        losses = torch.nn.functional.softplus(-(2 * data.train.targets - 1) * logits).sum(-1)
        chance = (-losses - grid.square().sum(-1) / 2).softmax(0)
        for region, inputs in data.regions.items():
            values = grid @ inputs.double().T
            mean = chance @ values
            sd = (chance @ (values - mean).square()).sqrt()
            draws = found.outputs(region).values.double()
            error = 5 / math.sqrt(min(240, found.facts["ess"][region]["least"]))
            assert ((draws.mean(0) - mean) / sd).abs().max() < error
            assert (draws.std(0) / sd - 1).abs().max() < error

    def test_a_model_that_changed_is_found(self, monkeypatch):
        assert check("logistic")[0].right
        model = SmallLogistic.model
        monkeypatch.setattr(SmallLogistic, "model", lambda self: torch.nn.Sequential(model(self), torch.nn.Softplus()))
        first = check("logistic")[0]
        assert not first.right
        assert first.sentence.startswith("outputs of 8 stored draws recomputed")

    def test_chains_that_disagree_are_found(self):
        found = reference.read("logistic", SmallLogistic())
        findings = {f.sentence[:3]: f.right for f in check("logistic")}
        facts = json.loads(json.dumps(found.facts))
        facts["rhat"]["in"]["largest"] = 1.034
        write_tensors(stored.path_of("logistic"), found.tensors, facts)
        again = check("logistic")[1]
        assert not again.right
        assert "at most 1.0340, NOT below 1.02, over 4 chains of 60 draws" in again.sentence
        assert set(findings) == {"out", "in:"}


def test_a_chain_that_stands_apart_raises_the_floor():
    together = torch.randn(4, 500, 3, generator=torch.Generator().manual_seed(0))
    apart = together + torch.tensor([0.0, 0.0, 0.0, 2.0])[:, None, None]
    assert floor(together) < 3 / math.sqrt(500)
    assert floor(apart) > 0.5


def test_thinning_is_even_and_keeps_the_last():
    assert making.evenly(10, 5).tolist() == [1, 3, 5, 7, 9]
    assert making.evenly(10, 4).tolist() == [0, 3, 6, 9]
    assert making.evenly(3, 8).tolist() == [0, 1, 2]


def test_a_forecast_follows_the_pace(monkeypatch):
    notes, clock = [], iter([0.0, 10.0, 100.0])
    monkeypatch.setattr(making.time, "monotonic", lambda: next(clock))

    class Notes:
        def update(self, task, done, total, note=""):
            notes.append(note)

    forecast = making.Forecast(Notes())
    for done in (0, 2, 10):
        forecast.update("chain", done, 20, "log joint -1")
    assert notes == ["log joint -1", "log joint -1, about 90 s left", "log joint -1, about 2 min left"]


class TestTask:
    def test_the_reference_itself_is_at_no_distance(self, folder):
        making.make(EXACT)
        task = KnownPosterior(EXACT)
        data = task.load()
        at = {id(inputs): region for region, inputs in data.probes.items()}

        def ask(inputs, shift=0.0, factor=1.0):
            law = task.reference.predictive(at[id(inputs)], problems.problem_of(EXACT))
            spread = law.spreads.sqrt()
            return GaussianPredictive(law.means + shift * spread, law.variances, law.spreads * factor**2)

        same = task.evaluate(ask, data).metrics
        assert same["wasserstein"] == 0
        assert same["total_variation"] == 0
        assert same["spread_ratio/out"] == 1
        moved = task.evaluate(lambda inputs: ask(inputs, 3.0, 0.5), data).metrics
        assert moved["mean_error"] == pytest.approx(3, rel=0.01)
        assert moved["wasserstein/in"] == pytest.approx(math.hypot(3, 0.5), rel=0.01)
        assert moved["spread_ratio/in"] == pytest.approx(0.5)
        assert moved["spread_error"] == pytest.approx(math.log(2))

    def test_every_metric_is_in_the_catalogue(self, folder):
        making.make(EXACT)
        task = KnownPosterior(EXACT)
        data = task.load()
        problem = problems.problem_of(EXACT)
        point = bf.fit(problem.model, data.train, likelihood=problem.likelihood, training=bf.Training(epochs=1))
        for name in task.evaluate(point.predict, data).metrics:
            evaluate.describe(name)

    def test_a_version_that_there_is_not_is_refused(self):
        with pytest.raises(ValueError, match="version of fidelity/gap-mlp must be 1, which there is; got 7"):
            plan(["fidelity/gap-mlp"], ["mle"], [0], {"fidelity/gap-mlp": {"version": 7}})

    def test_every_problem_is_a_task(self):
        assert {f"fidelity/{name}" for name in problems.PROBLEMS} <= set(TASKS)

    def test_a_run_records_distance_and_cost(self, folder, tmp_path, capsys):
        making.make(EXACT)
        settings = {"training": {"epochs": 7}}
        cells = plan([f"fidelity/{EXACT}"], ["map"], [0], settings)
        outcome = run(cells, Options(tmp_path / "runs", keep_posteriors=False))
        result = json.loads(outcome.done[0].read_text())
        assert result["primary"] == "wasserstein"
        assert result["metrics"]["wasserstein"] > 1
        assert result["validation"] is None
        assert result["cost"]["gradient_epochs"] >= 7
        assert main(["study", "fidelity", str(tmp_path / "runs")]) == 0
        shown = capsys.readouterr().out
        assert f"| {EXACT} | distance, sd |" in shown
        assert "| map | " in shown
        assert (tmp_path / "runs" / "fidelity.svg").exists()


class TestEffort:
    def fit(self, method, **how):
        data = GapNetwork(examples=20, hidden=3).data().train
        with counting() as effort:
            bf.fit(
                GapNetwork(hidden=3).model,
                data,
                likelihood=bf.likelihoods.Gaussian(scale=0.1),
                method=method,
                training=bf.Training(epochs=3, batch_size=7),
                **how,
            )
        return effort.examples

    def test_every_gradient_of_every_member_is_counted(self):
        assert self.fit("mle") == 3 * 20
        assert self.fit(bf.Ensemble(members=2), strategy="looped") == 2 * 3 * 20

    def test_members_in_lockstep_count_as_in_a_loop(self):
        trial = 2 * 2  # one step of two members on two examples, before it is decided
        assert self.fit(bf.Ensemble(members=6), strategy="batched") == 6 * 3 * 20 + trial

    def test_products_with_curvature_count_as_two_gradients(self):
        data = GapNetwork(examples=20, hidden=3).data().train
        products = bf.curvature_products(
            GapNetwork(hidden=3).model().eval(), data, likelihood=bf.likelihoods.Gaussian(scale=0.1)
        )
        with counting() as effort:
            products.ggn(torch.ones(products.size))
            products.hessian(torch.ones(products.size))
            products.gradient()
        assert effort.examples == 20 * (2 + 2 + 1)

    def test_counters_are_nested_and_end_with_their_block(self):
        with counting() as outer:
            assert self.fit("mle") == 60
        self.fit("mle")
        assert outer.examples == 60


def test_the_command_lists_and_checks(folder, capsys):
    assert main(["reference", "make", EXACT, "--quiet"]) == 0
    assert main(["reference", "list"]) == 0
    shown = capsys.readouterr().out
    assert "stored, exact" in shown
    assert "not stored" in shown
    assert main(["reference", "check"]) == 0
    assert capsys.readouterr().out.startswith(f"ok   {EXACT}: closed form recomputed")
    assert main(["reference", "check", "gap-mlp"]) == 2
    assert "bayesformer reference make gap-mlp" in capsys.readouterr().err

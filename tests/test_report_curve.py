"""The picture that opens the page: bands of a function of one variable beside those of its known posterior."""

from dataclasses import replace

import pytest
import torch

from bayesformer.attention.multi_head import MultiHeadAttention
from bayesformer.bench.planning import plan
from bayesformer.bench.tasks.curves import DOTS, curve_of
from bayesformer.bench.tasks.known_posterior import KnownPosterior
from bayesformer.bench.tasks.protocol import TaskData
from bayesformer.data import Data
from tests.test_report import page_of, result


def asked(examples=7):
    """Regions out of order on the line, and values whose mean and spread are known at every input."""
    x = torch.linspace(-1, 1, examples)[:, None]
    train = Data(x, x.square())
    probes = {"in": torch.tensor([[0.0], [1.0]]), "out": torch.tensor([[3.0], [-2.0]])}
    signs = torch.tensor([-1.0, 1.0])[:, None, None]
    values = {name: (p + 0.5 * signs * p, 2 * p + signs) for name, p in probes.items()}
    return TaskData(train, None, train, probes), values


def test_a_curve_is_sorted_and_two_standard_deviations_wide():
    curve = curve_of(*asked())
    assert curve["x"] == [-2.0, 0.0, 1.0, 3.0]
    assert curve["mean"] == curve["x"]
    assert curve["low"] == [-4.0, 0.0, 0.0, 0.0]  # sd is .5 |x|
    assert curve["high"] == [0.0, 0.0, 2.0, 6.0]
    assert curve["reference_mean"] == [-4.0, 0.0, 2.0, 6.0]
    assert [b - a for a, b in zip(curve["reference_low"], curve["reference_high"], strict=True)] == [4.0] * 4
    assert len(curve["observed_x"]) == 7
    many = curve_of(*asked(1000))
    assert len(many["observed_y"]) == DOTS
    assert (many["observed_x"][0], many["observed_x"][-1]) == (-1.0, 1.0)


def test_only_functions_of_one_variable_have_a_curve():
    data, values = asked()
    wide = Data(data.train.inputs.expand(-1, 2), data.train.targets)
    classes = Data(data.train.inputs, torch.zeros(7, dtype=torch.long))
    for train in (wide, classes):
        assert curve_of(data._replace(train=train), values) is None


def test_the_known_posterior_of_the_curve_is_its_own_band():
    task = KnownPosterior("random-features")
    data = task.load()
    regions = iter(data.probes)
    found = task.evaluate(lambda _: task.reference.predictive(next(regions), task._known), data)
    curve = found.figures["curve"]
    assert curve["reference"] == "exact"
    assert curve["low"] == pytest.approx(curve["reference_low"])
    assert found.metrics["wasserstein"] == pytest.approx(0, abs=1e-6)
    assert curve["x"] == sorted(curve["x"])


def run(method, task="fidelity/a", distance=0.5, **more):
    figures = {"curve": {**curve_of(*asked()), "reference": "long HMC"}}
    return result(task, method, 0, distance, primary="wasserstein", figures=figures, **more)


def test_the_page_opens_with_the_curve_nearest_method_first(tmp_path):
    page = page_of([run("vi", distance=1.8), run("sghmc", distance=0.344), result("t", "mle")], tmp_path)
    text = page.text
    assert text.index("Where there are no dots") < text.index("Did it help?")
    assert text.index("long HMC, the right answer") < text.index("distance to posterior 0.34")
    assert text.index("distance to posterior 0.34") < text.index("distance to posterior 1.80")
    assert text.count("What does each method say where there are no data?") == 1


def test_further_curves_stand_in_their_sections_and_pages_without_one_open_as_before(tmp_path):
    page = page_of([run("vi"), run("vi", "fidelity/b")], tmp_path)
    assert page.text.count("What does each method say where there are no data?") == 2
    assert page.text.count("Where there are no dots") == 1
    assert "Where there are no dots" not in page_of([result()], tmp_path).text
    broken = run("vi")
    broken["figures"]["curve"] = {"x": "no", "low": None}
    assert "right answer" not in page_of([broken], tmp_path).text


def test_a_panel_says_what_its_fit_cost_and_whether_its_network_is_another(tmp_path):
    own, other = run("sghmc", cost={"fit_seconds": 24.0}), run("attention", distance=1.3, cost={"fit_seconds": 9.0})
    other["figures"]["curve"] = {**other["figures"]["curve"], "network": "another network, a small transformer"}
    text = page_of([own, other], tmp_path).text
    assert "distance to posterior 0.50; fitted in 24 s" in text
    assert "distance to posterior 1.30; fitted in 9 s; another network, a small transformer" in text
    assert text.count("another network") == 1


def test_a_known_posterior_can_be_shown_beside_a_network_with_attention():
    task = KnownPosterior("gap-mlp", network="attention")
    data, model = task.load(), task.model()
    assert any(isinstance(module, MultiHeadAttention) for module in model.modules())
    assert not any(isinstance(module, MultiHeadAttention) for module in KnownPosterior("gap-mlp").model().modules())
    assert model(data.train.inputs).shape == data.train.targets.shape
    regions = iter(data.probes)
    found = task.evaluate(lambda _: task.reference.predictive(next(regions), task._known), data)
    assert found.figures["curve"]["network"] == "another network, a small transformer"
    with pytest.raises(ValueError, match="network must be 'own' on this problem"):
        KnownPosterior("logistic", network="attention")
    with pytest.raises(ValueError, match="network must be one of own, attention; got 'deep'"):
        KnownPosterior("gap-mlp", network="deep")


def test_the_network_is_part_of_a_key_only_where_it_is_another():
    """Results that were stored before there was a choice count as those of the problem's own network."""
    (cell,) = plan(["fidelity/gap-mlp"], ["map"], [0])
    before = {name: value for name, value in cell.task_settings.items() if name != "network"}
    assert replace(cell, task_settings=before).key == cell.key
    (other,) = plan(["fidelity/gap-mlp"], ["map"], [0], {"fidelity/gap-mlp": {"network": "attention"}})
    assert other.key != cell.key


def test_results_from_before_the_choice_of_a_network_are_of_one_task_with_later_ones(tmp_path):
    old = result("fidelity/gap-mlp", "vi", 0, settings={"task": {"problem": "gap-mlp", "version": 1}})
    new = result("fidelity/gap-mlp", "vi", 1, settings={"task": {"problem": "gap-mlp", "version": 1, "network": "own"}})
    page = page_of([old, new], tmp_path)
    assert [name for name in page.tables if "methods ranked" in name] == [
        "fidelity/gap-mlp: methods ranked by log-likelihood"
    ]

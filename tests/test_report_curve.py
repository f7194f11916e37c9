"""The picture that opens the page: bands of a function of one variable beside those of its known posterior."""

import pytest
import torch

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

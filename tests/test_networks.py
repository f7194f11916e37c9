"""Trained networks are kept: MLE, ensemble and weight study share them, and nothing else is mistaken for one."""

from dataclasses import replace

import pytest
import torch

from bayesformer.bench import runner
from bayesformer.bench.planning import plan
from bayesformer.bench.records import read_results
from bayesformer.bench.tasks import ToySeries
from bayesformer.bench.trial import Options
from bayesformer.core.errors import DamagedFileError
from bayesformer.data import as_batches
from bayesformer.methods import Ensemble, Map, MCDropout, Mle, Problem
from bayesformer.study.weight_networks import train_networks

SIZE = {"train": 40, "validation": 10, "test": 20, "dim": 8}


def problem(folder, **changes):
    task = ToySeries("m1", **SIZE)
    data = task.load()
    made = Problem(
        model=task.model,
        likelihood=task.likelihood,
        data=as_batches(data.train, "train"),
        validation=as_batches(data.validation, "validation"),
        training=replace(task.training, epochs=2, batch_size=10),
        networks=folder,
    )
    return replace(made, **changes)


def test_a_network_is_trained_once_for_all_methods_that_need_it(tmp_path):
    alone = Mle().fit(problem(None))
    ensemble = Ensemble(3).fit(problem(tmp_path))
    assert len(list(tmp_path.iterdir())) == 3
    assert torch.equal(ensemble.theta[:1], alone.theta)  # the first member is the MLE of the same seed
    again, larger = Mle().fit(problem(tmp_path)), Ensemble(4).fit(problem(tmp_path))
    assert again.facts["strategy"] == "kept"
    assert again.facts["epochs"] == [2]
    assert again.facts["seconds"] > 0
    assert torch.equal(again.theta, alone.theta)
    assert torch.equal(larger.theta[:3], ensemble.theta)
    assert len(list(tmp_path.iterdir())) == 4
    x = problem(None).data.first(3).inputs
    assert torch.equal(again.predict(x).mean, alone.predict(x).mean)


def test_members_in_lockstep_are_kept_one_by_one(tmp_path):
    ensemble = Ensemble(3).fit(problem(tmp_path, strategy="batched"))
    kept = Ensemble(2).fit(problem(tmp_path))
    assert kept.facts["strategy"] == "kept"
    assert torch.equal(kept.theta, ensemble.theta[:2])
    assert sum(Ensemble(3).fit(problem(tmp_path)).facts["epochs"]) == 6


@pytest.mark.parametrize(
    "changes",
    [
        {"seed": 1},
        {"training": replace(ToySeries("m1").training, epochs=3, batch_size=10)},
        {"validation": None},
        {"model": ToySeries("m1", **{**SIZE, "dim": 4}).model},
        {"data": as_batches(ToySeries("m2", **SIZE).load().train, "train")},
    ],
    ids=["seed", "training", "validation", "model", "data"],
)
def test_what_decides_a_network_tells_it_from_others(tmp_path, changes):
    Mle().fit(problem(tmp_path))
    other = Mle().fit(problem(tmp_path, **changes))
    assert other.facts["strategy"] == "looped"
    assert torch.equal(other.theta, Mle().fit(problem(None, **changes)).theta)
    assert len(list(tmp_path.iterdir())) == 2


def test_a_start_and_a_prior_tell_networks_apart(tmp_path):
    torch.manual_seed(0)
    task = ToySeries("m1", **SIZE)
    first, second = task.model(), task.model()
    found = [Mle().fit(problem(tmp_path, model=model)) for model in (first, second)]
    assert [posterior.facts["strategy"] for posterior in found] == ["looped", "looped"]
    assert Map().fit(problem(tmp_path, model=first)).facts["strategy"] == "looped"
    assert Mle().fit(problem(tmp_path, model=first)).facts["strategy"] == "kept"
    with pytest.raises(ValueError, match="mc_dropout needs a model with dropout"):
        MCDropout(rate=None).fit(problem(tmp_path))


def test_a_damaged_file_is_named(tmp_path):
    Mle().fit(problem(tmp_path))
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(DamagedFileError, match=r"network .* Delete it to train this network again"):
        Mle().fit(problem(tmp_path))


def test_the_weight_study_and_the_runner_share_networks(tmp_path):
    settings, training = {**SIZE}, {"epochs": 1}
    study = train_networks("toy/m1", 12, tmp_path / "networks", settings, training)
    assert study.theta.shape[0] == 12
    assert len(study.posteriors) == 2
    weight = study.layers()["projection.weight"]
    assert weight.shape == (12, 2, 8)
    assert torch.equal(study.posteriors[1].space.views(study.theta[10])["projection.weight"], weight[10])
    cells = plan(
        ["toy/m1"], ["mle", {"name": "ensemble", "members": 2}], [0, 1], {"training": training, "toy/m1": SIZE}
    )
    outcome = runner.run(cells, Options(tmp_path / "runs", networks=tmp_path / "networks", keep_posteriors=False))
    assert not outcome.failed
    assert {result["fit"]["strategy"] for result in read_results(tmp_path / "runs").results} == {"kept"}
    assert study.facts()["networks"] == 12
    with pytest.raises(ValueError, match="networks must be a whole number of at least 2; got 1"):
        train_networks("toy/m1", 1, tmp_path)


def test_methods_start_from_the_networks_of_their_seed(tmp_path):
    networks = tmp_path / "networks"
    train_networks("toy/m1", 2, networks, SIZE, {"epochs": 2})
    before = sorted(path.name for path in networks.iterdir())
    methods = [
        {"name": "sgld", "start": "mle", "lr": 1e-12, "temperature": 0.0, "warm_up": 0.0, "chains": 2, "draws": 1}
        | {"training": {"epochs": 1}},
        {"name": "laplace", "start": "mle", "prior_precision": 1e9, "predictive": "sampled", "draws": 2},
        "ensemble",
    ]
    settings = {"training": {"epochs": 2}, "toy/m1": SIZE, "ensemble": {"members": 2}}
    cells = plan(["toy/m1"], methods, [0], settings)
    outcome = runner.run(cells, Options(tmp_path / "runs", networks=networks))
    assert not outcome.failed
    found = {result["method"]: result for result in read_results(tmp_path / "runs").results}
    assert [path.name for path in sorted(networks.iterdir()) if path.is_file()] == [n for n in before if "." in n]
    level = found["ensemble"]["metrics"]["log_likelihood"]
    assert found["sgld"]["metrics"]["log_likelihood"] == pytest.approx(level, abs=1e-4)  # it has not moved
    assert found["sgld"]["settings"]["start"]["epochs"] == 2
    assert "start=mle, epochs=1" in found["sgld"]["variant"]
    assert found["sgld"]["cost"]["start_seconds"] > 0
    assert found["laplace"]["fit"]["epochs"] == [0]  # a Laplace approximation needs no further training
    mle = Mle().fit(problem(networks, training=replace(ToySeries("m1").training, epochs=2)))
    assert found["laplace"]["cost"]["start_seconds"] == pytest.approx(mle.facts["seconds"], abs=1e-3)
    plain = plan(["toy/m1"], ["sgld"], [0], settings)[0]
    assert plain.start is None
    assert cells[0].key != plan(["toy/m1"], [{**methods[0], "start": None}], [0], settings)[0].key
    with pytest.raises(ValueError, match="start of sgld must be 'mle', or left out; got 'map'"):
        plan(["toy/m1"], [{"name": "sgld", "start": "map"}], [0], settings)
    with pytest.raises(ValueError, match="unknown setting of training 'epoch'"):
        plan(["toy/m1"], [{"name": "sgld", "start": "mle", "training": {"epoch": 1}}], [0], settings)
    assert plan(["toy/m1"], [{"name": "laplace", "start": 2.0}], [0], settings)[0].method_settings["start"] == 2.0

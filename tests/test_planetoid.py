"""Citation graphs: what is in the file is what comes out, damage is named, and nodes outside a mask do not count."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.sparse import csr_matrix

from bayesformer.bench.tasks import TASKS
from bayesformer.bench.tasks.citation_graph import load_graph
from bayesformer.core.errors import DamagedFileError
from bayesformer.datasets import graphs, planetoid
from bayesformer.datasets.places import CACHE, FOLDER
from bayesformer.likelihoods import Categorical
from bayesformer.methods import Problem, build_method

N, F, C = 12, 5, 3
PARTS = [0, 1, 2], [3, 4], [5, 6, 7, 8]  # nodes of train, validation, test


def arrays(seed=0):
    source = np.random.default_rng(seed)
    words = (source.random((N, F)) < 0.5).astype(np.float32)
    words[11] = 0
    x = csr_matrix(words)
    y = source.integers(0, C, N).astype(np.int8)
    y[:C], y[11] = np.arange(C), -1
    pairs = np.array([[0, 1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 4, 5, 6, 7, 8, 9]], dtype=np.int32)
    masks = {name: np.isin(np.arange(N), part) for name, part in zip(planetoid.MASKS, PARTS, strict=True)}
    return {
        "x_data": x.data,
        "x_indices": x.indices.astype(np.int16),
        "x_indptr": x.indptr,
        "x_shape": np.array([N, F]),
        "y": y,
        "edge_index": np.concatenate([pairs, pairs[::-1]], 1),
        **masks,
    }


def write(folder, **changes):
    (folder / "planetoid").mkdir(exist_ok=True)
    kept = {name: value for name, value in {**arrays(), **changes}.items() if value is not None}
    np.savez(folder / "planetoid" / "cora.npz", **kept)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    write(tmp_path)
    monkeypatch.setenv(FOLDER, str(tmp_path))
    monkeypatch.setenv(CACHE, str(tmp_path / "cache"))
    load_graph.cache_clear()
    yield tmp_path
    load_graph.cache_clear()


def test_the_graph_is_that_of_the_file(folder):
    stored, graph = arrays(), planetoid.load("cora", normalise=False)
    dense = csr_matrix((stored["x_data"], stored["x_indices"], stored["x_indptr"]), shape=(N, F)).toarray()
    assert torch.equal(graph.x, torch.from_numpy(dense))
    assert graph.edge_index.tolist() == stored["edge_index"].tolist()
    assert graph.y.tolist() == stored["y"].tolist()
    assert [int(m.sum()) for m in (graph.train, graph.validation, graph.test)] == [3, 2, 4]
    rows = planetoid.load("cora").x.sum(1)
    torch.testing.assert_close(rows, (graph.x.sum(1) > 0).float())  # a node without features stays at 0


def test_errors_name_the_file_and_what_is_wrong(folder, monkeypatch):
    with pytest.raises(ValueError, match="unknown citation graph 'core'. Did you mean 'cora'"):
        planetoid.load("core")
    with pytest.raises(FileNotFoundError, match=r"pubmed.npz does not exist; BAYESFORMER_DATA must name the folder"):
        planetoid.load("pubmed")
    for told, changes in {
        "masks must be disjoint": {"val_mask": arrays()["train_mask"]},
        "nodes with a class only": {"test_mask": np.arange(N) == 11},
        "KeyError": {"y": None},
        r"numbers in 0..11": {"edge_index": np.array([[0], [12]])},
        "one entry for each of 12 nodes": {"y": np.zeros(3, np.int8)},
        "Object arrays cannot be loaded": {"y": np.array([None] * N)},
    }.items():
        write(folder, **changes)
        with pytest.raises(DamagedFileError, match=rf"cora.npz cannot be read: .*{told}"):
            planetoid.load("cora")
    (folder / "planetoid" / "cora.npz").write_bytes(b"PK\x03\x04 no more")
    with pytest.raises(DamagedFileError, match=r"cora.npz cannot be read"):
        planetoid.load("cora")
    monkeypatch.delenv(FOLDER)
    with pytest.raises(FileNotFoundError, match=r"must name the folder that holds planetoid/cora.npz; it is not set"):
        planetoid.load("cora")


def test_a_graph_of_pytorch_geometric_by_its_names():
    class Geometric:
        x, edge_index, y = torch.randn(4, 2), torch.tensor([[0], [1]]), torch.zeros(4).long()
        train_mask, val_mask, test_mask = torch.eye(4)[:3].bool()

    graph = graphs.from_geometric(Geometric())
    assert torch.equal(graph.test, Geometric.test_mask)
    Geometric.val_mask = None
    with pytest.raises(ValueError, match="graph must have the tensors .*; it lacks val_mask"):
        graphs.from_geometric(Geometric())


def test_labels_outside_the_mask_do_not_count(folder):
    graph = planetoid.load("cora")
    data, model = graph.part(graph.train), TASKS["graph/cora"]().model().eval()
    outputs = model(**data.inputs)
    other = graph.y.where(graph.train, (graph.y + 1) % C)
    likelihood = Categorical()
    ours = likelihood.log_prob(outputs, data.targets, data.mask)
    assert torch.equal(ours, likelihood.log_prob(outputs, other[None], data.mask))
    each = outputs.log_softmax(-1)[0, graph.train].gather(1, graph.y[graph.train, None]).sum()
    torch.testing.assert_close(ours, each[None])


@pytest.mark.parametrize("method", ["map", "attention"])
def test_a_task_trains_by_the_common_loop_and_judges_test_nodes(folder, method):
    task = replace(TASKS["graph/cora"](), heads=2, width=2)
    data = task.load()
    settings = {"draws": 3, "early_stopping": True, "keep_dropout": False, "weight_prior": "normal(0, 3)"}
    chosen = build_method(method, settings if method == "attention" else {})
    posterior = chosen.fit(
        Problem(task.model, task.likelihood, data.train, data.validation, replace(task.training, epochs=2))
    )
    found = task.evaluate(posterior.predict, data)
    predictive = posterior.predict(data.test.inputs).select(data.test.mask)
    expected = predictive.log_prob(data.test.targets[data.test.mask]).double().mean().item()
    assert found.metrics["log_likelihood"] == pytest.approx(expected, abs=1e-5)
    assert ("pavpu" in found.metrics) == (method == "attention")
    assert posterior.predict(task.inputs(torch.rand(N, F))).probs.shape == (1, N, C)
    with pytest.raises(ValueError, match=r"rows must be features of all nodes, \(12, 5\); got \(2, 5\)"):
        task.inputs(torch.rand(2, F))


def test_draws_of_zero_are_mean_attention_and_dropout_may_stay_off(folder):
    task = replace(TASKS["graph/cora"](), heads=2, width=2)
    data = task.load()

    def fit(**settings):
        method = build_method("attention", {"spread": 1.0, **settings})
        return method.fit(Problem(task.model, task.likelihood, data.train, training=replace(task.training, epochs=1)))

    x = data.test.inputs
    point, alike = fit(draws=0), fit(draws=2, keep_dropout=False, family="lognormal", spread=1e-9)
    with torch.no_grad():
        torch.testing.assert_close(point.predict(x).probs, point.module()(**x).softmax(-1))
    # Without dropout, and with attention that hardly varies, two draws agree; with dropout they could not.
    torch.testing.assert_close(*alike.predict(x).log_probs)
    first, second = fit(draws=2, family="lognormal", spread=1e-9).predict(x).log_probs
    assert not torch.allclose(first, second, atol=1e-3)

"""Graphs of PyTorch Geometric as examples, one row each: equal to its own merged batches, for every way of reading."""

import pytest
import torch
from torch import nn
from torch.utils.data import WeightedRandomSampler

import bayesformer as bf
from bayesformer.data import GraphModel, as_batches
from bayesformer.data.graph_rows import collate_graphs

geometric = pytest.importorskip("torch_geometric")
from torch_geometric.data import Batch, Data  # noqa: E402
from torch_geometric.loader import DataLoader  # noqa: E402
from torch_geometric.nn import GCNConv, GINEConv, global_add_pool, global_mean_pool  # noqa: E402

F, C, COUNT = 3, 2, 20
SHORT = bf.Training(epochs=3, batch_size=8)
ignored = pytest.mark.filterwarnings("ignore::bayesformer.FidelityWarning")


def graphs(count=COUNT, features=0, seed=0):
    """Random graphs of 2 to 6 nodes, one of them without edges, of two classes."""
    source = torch.Generator("cpu").manual_seed(seed)
    found = []
    for number in range(count):
        n = 2 + number % 5
        edges = torch.randint(n, (2, 0 if number == 1 else 2 * n), generator=source)
        x = torch.randn(n, F, generator=source) + number % 2
        extra = {"edge_attr": torch.randn(edges.shape[1], features, generator=source)} if features else {}
        found.append(Data(x=x, edge_index=edges, y=torch.tensor([number % 2]), **extra))
    return found


class Convolved(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.head = GCNConv(F, 4), nn.Linear(4, C)

    def forward(self, x, edge_index, batch):
        return self.head(global_mean_pool(self.conv(x, edge_index).tanh(), batch))


class WithEdges(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = GINEConv(nn.Linear(F, C), edge_dim=2)

    def forward(self, x, edge_index, batch, edge_attr):
        return global_add_pool(self.conv(x, edge_index, edge_attr), batch)


def made(kind=Convolved):
    torch.manual_seed(0)
    return kind()


def fit(data, method, **more):
    model, options = GraphModel(made()), {"likelihood": "categorical", "training": SHORT, "progress": False}
    return bf.fit(model, data, method=method, **options, **more)


@pytest.mark.parametrize(("kind", "features"), [(Convolved, 0), (WithEdges, 2)])
def test_outputs_are_those_of_the_merged_graphs(kind, features):
    some, net = graphs(features=features), made(kind).eval()
    rows = collate_graphs(some)
    labels = rows.pop("labels")
    merged = Batch.from_data_list(some)
    further = {"edge_attr": merged.edge_attr} if features else {}
    torch.testing.assert_close(GraphModel(net)(**rows), net(merged.x, merged.edge_index, batch=merged.batch, **further))
    assert torch.equal(labels, merged.y)


def test_a_graph_is_an_example_in_every_form():
    some = graphs()
    forms = (some, DataLoader(some, batch_size=7), DataLoader(some, batch_size=7, shuffle=True))
    for data in forms:
        batches = as_batches(data)
        assert batches.num_data == COUNT
        assert torch.cat([batch.targets for batch in batches.in_order(6)]).tolist() == [g.y.item() for g in some]


@ignored
@pytest.mark.parametrize("method", [bf.Mle(), bf.Ensemble(2), bf.Vi(epochs=3), bf.Sghmc(draws=4, epochs=4)], ids=repr)
def test_methods_fit_and_predict_graphs(method):
    some = graphs()
    posterior = fit(some, method)
    found = posterior.predict(some, batch_size=6)
    assert found.probs.shape[-2:] == (COUNT, C)
    torch.testing.assert_close(found.probs, posterior.predict(DataLoader(some, batch_size=5)).probs)
    assert posterior.facts["num_data"] == COUNT


@pytest.mark.parametrize("structure", ["full", "diag", "kron", "last_layer"])
def test_laplace_of_graphs_is_that_of_graphs_one_by_one(structure):
    """Curvature is a sum over graphs: batches of one graph, which have no padding, give the same."""
    some, options = graphs(), {"likelihood": "categorical", "structure": structure, "prior_precision": 1.0}
    found = bf.laplace(GraphModel(made()).double().eval(), doubled(some), **options)
    single = DataLoader(doubled(some), batch_size=1)
    alone = bf.laplace(GraphModel(made()).double().eval(), single, **options)
    if structure != "kron":  # whose average over positions depends on how many a batch has
        torch.testing.assert_close(found.law.variance(), alone.law.variance(), rtol=1e-5, atol=1e-8)
    assert found.facts["log_likelihood"] == pytest.approx(alone.facts["log_likelihood"])
    assert found.predict(doubled(some)).probs.shape[-2:] == (COUNT, C)


def doubled(some):
    return [Data(x=g.x.double(), edge_index=g.edge_index, y=g.y) for g in some]


def test_what_is_no_target_of_a_graph_or_no_graph_is_named():
    nodes = [Data(x=torch.ones(3, F), edge_index=torch.zeros(2, 1).long(), y=torch.zeros(3).long())]
    with pytest.raises(
        ValueError, match="y of the graphs of data must have one row, the target of the whole graph; got 3"
    ):
        as_batches(nodes).first(1)
    with pytest.raises(ValueError, match="graphs of data must have tensors x and edge_index"):
        as_batches([Data(edge_index=torch.zeros(2, 1).long(), num_nodes=2)]).first(1)
    drawn = DataLoader(graphs(), batch_size=4, sampler=WeightedRandomSampler(torch.ones(COUNT), COUNT))
    with pytest.raises(ValueError, match="cannot be cut into examples. Give its dataset"):
        as_batches(drawn)

"""Attention along edges is dense attention under the mask of the graph: same draws, same KL, same gradients."""

import pytest
import torch

import bayesformer as bf
from bayesformer.attention import Edges, GaussianLogits, GraphAttention, Learned, RowNetwork, attention_mode
from bayesformer.attention.edges import CompressedRows
from bayesformer.attention.score_functions import Gat
from bayesformer.core import draws
from bayesformer.core.draws import drawing_from, normal_like
from bayesformer.core.types import Draw
from bayesformer.datasets.graphs import Graph, compressed_rows
from bayesformer.models import GraphAttentionNetwork
from tests.attention_zoo import FAMILIES, STOCHASTIC, B, H, d

N = 6
# A hub, a node that sees itself alone, one seen by nobody, an isolated one (5), a self-loop (3).
EDGES = torch.tensor([[0, 1, 2, 3, 4, 0, 3, 1, 2], [1, 0, 1, 1, 1, 2, 3, 4, 0]])
ON_GRAPHS = {name: make for name, make in FAMILIES.items() if "position" not in name and "rows" not in name}


def edges():
    return Edges.of(EDGES, N)


def mask_of(edges):
    mask = torch.zeros(edges.nodes, edges.nodes, dtype=torch.bool)
    mask[edges.target, edges.source] = True
    return mask[None, None]


@pytest.fixture
def same_noise(monkeypatch):
    """Noise of an edge is that of its entry in the dense table."""
    e, tables = edges(), []
    drawn, asked = draws.draw, {"dense": 0, "edges": 0}

    def draw(like, make, fill):
        kind = "edges" if like.shape[-2] == 1 else "dense"
        place = asked[kind]
        asked[kind] += 1
        if place == len(tables):
            tables.append(drawn(like.new_empty(*like.shape[:-2], N, N), make, fill))
        table = tables[place]
        return (table[..., e.target, e.source].unsqueeze(-2) if kind == "edges" else table).clone()

    monkeypatch.setattr(draws, "draw", draw)


def both(name, training, dtype=torch.float64):
    """(logits, keys) and Draw of both forms, of one family object and one score."""
    family, e = FAMILIES[name]().to(dtype).train(training), edges()
    q, k = (torch.randn(B, H, N, d, dtype=dtype, requires_grad=True) for _ in range(2))
    score = Gat(H, d).to(dtype)
    given = (k,) if getattr(family, "wants_keys", False) else ()
    dense = family(score(q, k), mask_of(e), *given)
    along = family(score.along(q, k, e), e, *given)
    leaves = [q, k, *(p for p in [*family.parameters(), *score.parameters()] if p.requires_grad)]
    return dense, along, leaves


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("name", ON_GRAPHS)
def test_edges_are_dense_attention_under_the_mask_of_the_graph(name, training, same_noise):
    dense, along, leaves = both(name, training)
    e = edges()
    assert along.weights.shape == (B, H, 1, len(e.source))
    torch.testing.assert_close(along.weights.squeeze(-2), dense.weights[..., e.target, e.source])
    torch.testing.assert_close(along.kl, dense.kl)
    probe = torch.randn(B, H, N, N, dtype=torch.float64)

    def gradients(draw: Draw, weigh):
        total = (draw.weights * weigh).sum() + draw.kl.sum()
        return torch.autograd.grad(total, leaves, allow_unused=True)

    of_edges = gradients(along, probe[..., e.target, e.source].unsqueeze(-2))
    for ours, theirs in zip(of_edges, gradients(dense, probe), strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("name", ON_GRAPHS)
def test_a_layer_is_the_dense_product(name, same_noise):
    layer, e = GraphAttention(3, d, H, FAMILIES[name]()).double(), edges()
    x = torch.randn(1, N, 3, dtype=torch.float64)
    seen = []
    layer.family.register_forward_hook(lambda module, given, draw: seen.append(draw.kl))
    out = layer(x, e)
    (kl,) = seen
    h = layer.project(x).unflatten(-1, (H, d)).transpose(1, 2)
    given = (h,) if getattr(layer.family, "wants_keys", False) else ()
    dense = layer.family(layer.score(h, h), mask_of(e), *given)
    torch.testing.assert_close(out, (dense.weights @ h).transpose(1, 2).flatten(-2))
    torch.testing.assert_close(kl, dense.kl)


@pytest.mark.parametrize("piece", [1, 7, 1 << 17])
def test_collecting_some_edges_at_a_time_is_the_plain_sum(piece, monkeypatch):
    monkeypatch.setattr("bayesformer.attention.edges.PIECE", piece)
    e = edges()
    weights = torch.rand(B, H, len(e.source), dtype=torch.float64, requires_grad=True)
    values = torch.randn(B, H, N, d, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(e.collect, (weights, values))
    assert torch.autograd.gradgradcheck(e.collect, (weights, values))
    torch.testing.assert_close(e.collect(weights, values), e.collect_at_once(weights, values))
    grads = torch.randn(3, B, H, N, d, dtype=torch.float64)
    together = torch.autograd.grad(e.collect(weights, values), values, grads, is_grads_batched=True)[0]
    for grad, found in zip(grads, together, strict=True):
        (alone,) = torch.autograd.grad(e.collect(weights, values), values, grad)
        torch.testing.assert_close(found, alone)
    mapped = torch.vmap(e.collect)(weights, values)
    torch.testing.assert_close(mapped, e.collect(weights, values))


@pytest.mark.parametrize("sparse", [0.0, 1.0], ids=["dense product", "bags"])
def test_compressed_rows_are_the_features(sparse, monkeypatch):
    monkeypatch.setattr("bayesformer.attention.edges.SPARSE", sparse)
    x = torch.randn(N, 5, dtype=torch.float64) * (torch.rand(N, 5) < 0.4)
    x[2] = 0  # a node without a word
    graph = Graph(x, EDGES, torch.zeros(N).long(), *torch.ones(3, N, dtype=torch.bool))
    network = GraphAttentionNetwork(5, 3).double().eval()
    inputs = graph.part(graph.train, compressed=True).inputs
    plain, rows = network(x[None], EDGES[None]), network(**inputs)
    torch.testing.assert_close(rows, plain)
    weight = network.layers[0].project.weight
    (one,), (other,) = (torch.autograd.grad(out.square().sum(), weight) for out in (plain, rows))
    torch.testing.assert_close(one, other)
    entries, all_entries = inputs["x"].requires_grad_(), x[None].clone().requires_grad_()
    (by_rows,) = torch.autograd.grad(network(**inputs).square().sum(), entries)
    (by_x,) = torch.autograd.grad(network(all_entries, EDGES[None]).square().sum(), all_entries)
    torch.testing.assert_close(by_rows[0], by_x[0][x != 0])


@pytest.mark.parametrize("hops", [1, 2, 3])
def test_nodes_out_of_sight_may_be_left_out(hops):
    """A chain and a few chords: outputs at the nodes asked for are those on the whole graph."""
    number, mask = 40, torch.zeros(40, dtype=torch.bool)
    mask[[3, 4, 20]] = True
    pairs = torch.tensor([[*range(number - 1), 3, 39, 30], [*range(1, number), 11, 21, 2]])
    edge_index = torch.cat([pairs, pairs[:, ::3].flip(0)], 1)
    graph = Graph(torch.randn(number, 5).double(), edge_index, torch.arange(number) % 3, mask, mask, mask)
    network = GraphAttentionNetwork(5, 3, depth=hops).double().eval()
    few, whole = graph.part(mask, hops=hops), graph.part(mask)
    assert graph.part(mask, compressed=True, hops=hops).inputs["starts"].shape == (1, few.mask.numel() + 1)
    assert few.mask.sum() == 3 < few.mask.numel() < number
    torch.testing.assert_close(network(**few.inputs)[few.mask], network(**whole.inputs)[whole.mask])
    assert torch.equal(few.targets[few.mask], whole.targets[whole.mask])
    with pytest.raises(ValueError, match="hops must be at least 1; got 0"):
        graph.part(mask, hops=0)
    if hops == 1:
        return
    fewer = graph.part(mask, hops=hops - 1)  # one too few is seen
    assert not torch.allclose(network(**fewer.inputs)[fewer.mask], network(**whole.inputs)[whole.mask])


def test_the_numbers_of_an_edge_stand_together_from_the_scores_to_the_weights():
    """Else every gather is a copy and a slow walk: right, and several times slower."""
    e, h = edges(), torch.randn(1, H, N, d)
    logits = Gat(H, d).along(h, h, e)
    for x in (logits, e.softmax(logits), GaussianLogits()(logits, e).weights, normal_like(logits)):
        assert x.shape == (1, H, 1, len(e.source))
        assert x.stride()[1] == 1
        assert x.stride()[3] == H


def test_dropout_of_compressed_rows_is_dropout_of_the_features():
    x = (torch.rand(N, 50) < 0.3).double()
    rows = {k: v[0] for k, v in compressed_rows(x).items()}
    drop, means = torch.nn.Dropout(0.6), []
    for _ in range(4000):
        kept = CompressedRows(drop(rows["x"]), rows["columns"], rows["starts"]).times(
            torch.eye(50, dtype=torch.float64)
        )
        means.append(kept.sum(1))
    mean, var = torch.stack(means).mean(0), torch.stack(means).var(0)
    words = x.sum(1)  # each is 2.5 with probability .4: mean 1, variance 1.5
    assert ((mean - words).abs() < 5 * (1.5 * words / 4000).sqrt()).all()
    torch.testing.assert_close(var, 1.5 * words, rtol=0.2, atol=0)


@pytest.mark.parametrize("scale", [1.0, 30.0, 1e4], ids=["narrow", "wide", "very wide"])
def test_softmax_along_edges_is_that_of_dense_rows_however_wide_the_logits(scale):
    e = edges()
    logits = scale * torch.randn(B, H, 1, len(e.source), dtype=torch.float64)
    logits[..., 0] += scale * 1e3  # in one row only: others must not underflow
    dense = torch.full((B, H, N, N), -torch.inf, dtype=torch.float64)
    dense[..., e.target, e.source] = logits[..., 0, :]
    logs = dense.log_softmax(-1)[..., e.target, e.source].unsqueeze(-2)
    torch.testing.assert_close(e.log_softmax(logits), logs)
    torch.testing.assert_close(e.softmax(logits), logs.exp())
    single = e.softmax(logits.float())
    torch.testing.assert_close(e.sum(single), (torch.arange(N) != 5).float().expand(B, H, 1, N))


@pytest.mark.parametrize("apart", [20.0, 29.0, 31.0, 50.0, 59.0, 300.0])
def test_gradients_of_rows_far_below_others_are_those_of_dense_rows(apart):
    """In single precision: the sum of a row may be e⁻³⁰, and its square must not underflow."""
    e = edges()
    logits = torch.zeros(1, 1, 1, len(e.source))
    logits[..., e.target == 1] = apart  # the hub
    logits = (logits + 0.1 * torch.randn_like(logits)).requires_grad_()
    upstream = torch.randn_like(logits)
    (found,) = torch.autograd.grad((e.softmax(logits) * upstream).sum(), logits)
    exact = logits.detach().double().requires_grad_()
    dense = torch.full((N, N), -torch.inf, dtype=torch.float64).index_put((e.target, e.source), exact[0, 0, 0])
    rows = dense.softmax(-1)[e.target, e.source]
    (expected,) = torch.autograd.grad((rows * upstream[0, 0, 0]).sum(), exact)
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(e.log_softmax(logits).exp().double(), rows.view(logits.shape), rtol=1e-4, atol=1e-6)


def test_rows_sum_to_one_and_an_isolated_node_gets_the_bias():
    e = edges()
    weights = e.softmax(torch.randn(B, H, 1, len(e.source)))
    torch.testing.assert_close(e.sum(weights), (torch.arange(N) != 5).float().expand(B, H, 1, N))
    layer = GraphAttention(3, d, H, GaussianLogits())
    with torch.no_grad():
        layer.bias.normal_()
    out = layer(torch.randn(1, N, 3), e)
    assert torch.equal(out[0, 5], layer.bias)
    assert torch.autograd.gradcheck(e.log_softmax, torch.randn(2, 9).double().requires_grad_())


def test_self_loops_are_there_exactly_once():
    e = Edges.of(EDGES, N, self_loops=True)
    loops = e.target[e.source == e.target]
    assert sorted(loops.tolist()) == list(range(N))
    assert len(e.source) == EDGES.shape[1] - 1 + N


@pytest.mark.parametrize("name", ON_GRAPHS)
def test_nodes_and_edges_have_no_order(name):
    """A graph told in another order gives the same answer in that order; the mean mode, where there is no noise."""
    model = GraphAttentionNetwork(3, 4, d, H, out_heads=H, family=FAMILIES[name]).double().eval()
    x, order = torch.randn(N, 3).double(), torch.randperm(N)
    place = torch.empty_like(order)
    place[order] = torch.arange(N)
    shuffled = place[EDGES][:, torch.randperm(EDGES.shape[1])]
    torch.testing.assert_close(model(x[order], shuffled), model(x, EDGES)[order])


@pytest.mark.parametrize("name", [name for name in STOCHASTIC if name in ON_GRAPHS])
def test_the_kl_has_no_order(name):
    family, e, order = STOCHASTIC[name]().double(), edges(), torch.randperm(EDGES.shape[1])
    other = Edges(e.source[order], e.target[order], N)
    logits, keys = torch.randn(B, H, 1, len(order)).double(), torch.randn(B, H, N, d).double()
    torch.testing.assert_close(family(logits, e, keys).kl, family(logits[..., order], other, keys).kl)


@pytest.mark.parametrize("name", [name for name in STOCHASTIC if name in ON_GRAPHS])
def test_twenty_thousand_nodes_cost_their_edges(name):
    """Dense weights of this graph would be 2 heads of 4·10⁸ numbers, more than a test may have."""
    nodes = 20_000
    index = torch.randint(nodes, (2, 30_000))
    model = GraphAttentionNetwork(4, d, d, H, out_heads=H, family=FAMILIES[name])
    largest = 0

    class Watch(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            result = func(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor):
                largest = max(largest, result.numel())
            return result

    with Watch():
        out = model(torch.randn(nodes, 4), index)
        kl = bf.attention.attention_kl(model)
    (out.square().mean() + kl.sum() / nodes).backward()
    assert out.shape == (nodes, d)
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)
    assert largest <= (nodes + 30_000) * H * 16  # an entry of a row may have 16 hidden numbers of a network


@pytest.mark.parametrize("family", bf.attention.FAMILIES)
def test_draws_made_together_are_the_draws_made_alone(family):
    model = bf.attention.install(GraphAttentionNetwork(3, 2, d, H, out_heads=H, dropout=0.0), family)
    x = torch.randn(1, N, 3)
    seeds = [torch.Generator().manual_seed(seed) for seed in (0, 1)]
    with torch.no_grad(), attention_mode(model, "draw", 2), drawing_from(seeds):
        together = model(x, EDGES[None])
    assert together.shape == (2, 1, N, 2)
    for seed, row in enumerate(together):
        with torch.no_grad(), attention_mode(model, "draw"), torch.random.fork_rng():
            torch.manual_seed(seed)
            torch.testing.assert_close(row, model(x, EDGES[None]))


@pytest.mark.parametrize("family", bf.attention.FAMILIES)
def test_installing_keeps_the_weights_and_mean_attention(family):
    model, x = GraphAttentionNetwork(3, 2).eval(), torch.randn(N, 3)
    before, names = model(x, EDGES), set(model.state_dict())
    bf.attention.install(model, family)
    assert len(bf.attention.families(model)) == 2
    torch.testing.assert_close(model(x, EDGES), before)
    assert model.layers[0].family.dropout.p == 0.6
    bf.attention.uninstall(model)
    assert torch.equal(model(x, EDGES), before)
    assert set(model.state_dict()) == names
    assert model.layers[0].family.dropout.p == 0.6


def test_a_graph_object_is_taken_as_it_is():
    class Graph:
        x, edge_index = torch.randn(N, 3), EDGES

    model = GraphAttentionNetwork(3, 2).eval()
    assert torch.equal(model(Graph()), model(Graph.x, Graph.edge_index))
    with pytest.raises(ValueError, match="x must come with edge_index, or be a graph that has both; got Tensor alone"):
        model(Graph.x)


def test_pytorch_geometric_data_is_taken():
    geometric = pytest.importorskip("torch_geometric.data")
    model, x = GraphAttentionNetwork(3, 2).eval(), torch.randn(N, 3)
    assert torch.equal(model(geometric.Data(x=x, edge_index=EDGES)), model(x, EDGES))


def test_errors_name_the_argument_the_rule_and_the_value():
    model = GraphAttentionNetwork(3, 2)
    x = torch.randn(N, 3)
    with pytest.raises(ValueError, match=r"edge_index must lie in 0..5 for 6 nodes; got 0..6"):
        model(x, torch.tensor([[0], [6]]))
    with pytest.raises(ValueError, match=r"edge_index must have shape \(2, E\); got \(3, 1\)"):
        model(x, torch.zeros(3, 1).long())
    with pytest.raises(ValueError, match=r"edge_index must hold whole numbers; got torch.float32"):
        model(x, torch.zeros(2, 1))
    with pytest.raises(ValueError, match=r"x must have 3 features per node; got \(6, 4\)"):
        model(torch.randn(N, 4), EDGES)
    with pytest.raises(ValueError, match=r"must be one graph.* got \(2, 6, 3\) and \(2, 2, 9\)"):
        model(torch.stack([x, x]), torch.stack([EDGES, EDGES]))
    for spread in (Learned(0.1, H, length=8), RowNetwork(0.1, 8)):
        with pytest.raises(ValueError, match="length must be None on a graph.* got 8"):
            GraphAttention(3, d, H, GaussianLogits(spread))(x[None], edges())

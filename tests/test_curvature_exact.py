"""Every exact structure against the definition, on every kind of model."""

import sys

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import bayesformer as bf
from bayesformer.data import Data
from bayesformer.jacobians import columns
from bayesformer.laplace import estimate
from bayesformer.laplace import low_rank_curvature as low_rank
from bayesformer.laplace.dense_curvature import largest_variance
from bayesformer.likelihoods import Bernoulli, Categorical, Gaussian, Likelihood
from bayesformer.model.calling import apply
from bayesformer.model.space import Space
from tests.curvature_zoo import MODELS, POOLED, assembled, build, empirical, ggn
from tests.laws import assert_mean
from tests.nets import Mlp


def close(found, expected, name=""):
    # Llama's RMSNorm works in float32 whatever the weights are: batches of other sizes round differently.
    rtol = 1e-4 if name == "llama" else 1e-8
    torch.testing.assert_close(found, expected, rtol=rtol, atol=rtol / 100 * expected.abs().max().item() + 1e-30)


@pytest.mark.parametrize("name", MODELS)
def test_gauss_newton_equals_its_definition(name):
    model, likelihood, data = build(name)
    exact, space = ggn(model, likelihood, data), Space.of(model)
    diagonal = estimate(model, likelihood, data, "diag", kind="ggn", batch_size=3)
    close(assembled(diagonal, space.size).diagonal(), exact.diagonal(), name)
    full = estimate(model, likelihood, data, "full", kind="ggn", batch_size=3)
    assert full.places == (slice(0, space.size),)
    assert full.names == (space.names,)
    close(full.structures[0].dense(), exact, name)


@pytest.mark.parametrize("name", MODELS)
def test_empirical_fisher_equals_its_definition(name):
    """Each example's gradient is summed over its tokens before it is squared."""
    model, likelihood, data = build(name)
    exact = empirical(model, likelihood, data)
    diagonal = estimate(model, likelihood, data, "diag", kind="fisher", batch_size=3)
    close(assembled(diagonal, len(exact)).diagonal(), exact.diagonal(), name)
    full = estimate(model, likelihood, data, "full", kind="fisher", batch_size=3)
    close(full.structures[0].dense(), exact, name)


@pytest.mark.parametrize("name", ["vit", "layer", "tagger"])
def test_blocks_are_blocks_of_the_full_matrix(name):
    model, likelihood, data = build(name)
    exact = ggn(model, likelihood, data)
    blocks = estimate(model, likelihood, data, "block", kind="ggn", batch_size=3)
    sizes = dict(zip(Space.of(model).names, Space.of(model).sizes, strict=True))
    assert sum(blocks.names, ()) == Space.of(model).names
    assert any(len(names) == 2 for names in blocks.names)
    for place, names, structure in zip(blocks.places, blocks.names, blocks.structures, strict=True):
        assert structure.size == sum(sizes[name] for name in names)
        close(structure.dense(), exact[place, place])


@pytest.mark.parametrize("way", ["gram", "krylov"])
@pytest.mark.parametrize("rank", [3, 1000])
@pytest.mark.parametrize("name", ["vit", "regressor"])
def test_low_rank_holds_the_top_eigenpairs(name, rank, way, monkeypatch):
    if way == "krylov":
        monkeypatch.setattr(low_rank, "ROWS", 0)
        monkeypatch.setattr(low_rank, "TOLERANCE", 1e-13)
        monkeypatch.setattr(low_rank, "PASSES", 40)
    model, likelihood, data = build(name)
    exact = ggn(model, likelihood, data)
    values, vectors = torch.linalg.eigh(exact)
    found = estimate(model, likelihood, data, "low_rank", kind="ggn", rank=rank, batch_size=3).structures[0]
    top = min(rank, len(found.values))
    gram = found.vectors.mT @ found.vectors
    torch.testing.assert_close(gram, torch.eye(len(gram), dtype=gram.dtype), atol=1e-8, rtol=0)
    close(found.values[:top], values.flip(0)[:top])
    kept = vectors[:, -rank:] * values[-rank:]
    close(found.dense(), kept @ vectors[:, -rank:].mT)


def test_krylov_without_room_for_all_directions(monkeypatch):
    """More rows than fit: the eigenvalues asked for come out to the tolerance, from a few passes."""
    monkeypatch.setattr(low_rank, "ROWS", 0)
    torch.manual_seed(0)
    model = Mlp(6, 12, 3).double().eval()
    data = Data(torch.randn(80, 6).double() * torch.logspace(0, -2, 6), torch.randint(3, (80,)))
    exact = torch.linalg.eigvalsh(estimate(model, "categorical", data, "full").structures[0].matrix).flip(0)
    found = estimate(model, "categorical", data, "low_rank", rank=4).structures[0]
    torch.testing.assert_close(found.values, exact[:4], rtol=1e-3, atol=0)
    assert (found.values <= exact[:4] * (1 + 1e-9)).all()  # Ritz values never exceed the truth


@pytest.mark.parametrize("name", ["mlp", "classifier", "tagger"])
def test_subnetwork_is_a_part_of_the_full_matrix(name):
    model, likelihood, data = build(name)
    exact = ggn(model, likelihood, data)
    found = estimate(model, likelihood, data, "subnetwork", kind="ggn", size=25, batch_size=3)
    (index,), (structure,) = found.places, found.structures
    diagonal = exact.diagonal()
    assert len(index) == 25
    assert (index.diff() > 0).all()
    assert diagonal[index].max() <= diagonal[[i for i in range(len(exact)) if i not in index.tolist()]].min() + 1e-12
    close(structure.dense(), exact[index][:, index])
    chosen = torch.tensor([0, 3, len(exact) - 1])
    given = estimate(model, likelihood, data, "subnetwork", kind="ggn", index=chosen, batch_size=3)
    close(given.structures[0].dense(), exact[chosen][:, chosen])
    everything = estimate(model, likelihood, data, "subnetwork", kind="ggn", size=10**6, batch_size=3)
    close(everything.structures[0].dense(), exact)


def test_largest_variance_is_smallest_curvature():
    model, likelihood, data = build("mlp")
    diagonal = estimate(model, likelihood, data, "diag")
    whole = torch.cat([s.values for s in diagonal.structures])
    index = largest_variance(list(zip(diagonal.places, diagonal.structures, strict=True)), 5)
    assert set(index.tolist()) == set(whole.argsort()[:5].tolist())


@pytest.mark.parametrize("name", ["mlp", "bernoulli", "vit", "layer", "hf_vit"])
def test_last_layer_in_closed_form_equals_the_general_way(name):
    model, likelihood, data = build(name)
    exact, space = ggn(model, likelihood, data), Space.of(model)
    last = {"layer": "head.", "hf_vit": "classifier.", "vit": "projection."}.get(name, "net.3.")
    full = estimate(model, likelihood, data, "full", kind="ggn", subset="last_layer", batch_size=3)
    assert full.names == ((f"{last}weight", f"{last}bias"),)
    place = full.places[0]
    assert place.stop == space.size
    close(full.structures[0].dense(), exact[place, place])
    diagonal = estimate(model, likelihood, data, "diag", kind="ggn", subset=f"{last}*", batch_size=3)
    close(torch.cat([s.values for s in diagonal.structures]), exact.diagonal()[place])
    whole = estimate(model, likelihood, data, "kron", kind="ggn", batch_size=3)
    closed = estimate(model, likelihood, data, "kron", kind="ggn", subset=f"{last}*", batch_size=3)
    for structure, general in zip(closed.structures, whole.structures[-2:], strict=True):
        close(structure.dense(), general.dense())


def test_last_layer_runs_no_backward_pass(monkeypatch):
    model, likelihood, data = build("vit")
    estimate(model, likelihood, data, "diag", subset="last_layer")
    monkeypatch.setattr(sys.modules["bayesformer.laplace.passes"], "backpropagate", None)
    for structure in ("diag", "kron", "full"):
        estimate(model, likelihood, data, structure, subset="last_layer")
    with pytest.raises(TypeError):
        estimate(model, likelihood, data, "diag", subset="encoder.norm.*")


def test_an_ignored_label_of_a_pooled_classifier_counts_nothing():
    model, likelihood, data = build("vit")
    ignored = Data(data.inputs, data.targets.index_fill(0, torch.tensor([1]), -100))
    rest = Data(data.inputs[[0, 2, 3]], data.targets[[0, 2, 3]])
    for options in ({}, {"subset": "last_layer"}):
        for structure in ("diag", "full"):
            found = estimate(model, likelihood, ignored, structure, **options)
            expected = estimate(model, likelihood, rest, structure, **options)
            assert found.log_likelihood == pytest.approx(expected.log_likelihood)
            for a, b in zip(found.structures, expected.structures, strict=True):
                close(a.dense(), b.dense())


class Turned(nn.Module):
    """A square weight used as it is, and transposed: the two uses add up, but not position by position."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4, dtype=torch.float64))

    def forward(self, x):
        return F.linear(torch.tanh(x @ self.weight), self.weight).mean(1)


@pytest.mark.parametrize("kind", ["ggn", "fisher"])
def test_a_weight_used_both_ways(kind):
    torch.manual_seed(0)
    model = Turned().eval()
    data = Data(torch.randn(5, 3, 4, dtype=torch.float64), torch.randint(4, (5,)))
    exact = (ggn if kind == "ggn" else empirical)(model, Categorical(), data)
    found = estimate(model, Categorical(), data, "diag", kind=kind, batch_size=3)
    close(assembled(found, 16).diagonal(), exact.diagonal())


class Slices(nn.Module):
    """Rows of one matrix in two layers, some of them in both; a table whose padding row never moves."""

    def __init__(self, first, second):
        super().__init__()
        self.first, self.second = first, second
        self.rows, self.table = nn.Parameter(torch.randn(6, 4)), nn.Embedding(5, 4, padding_idx=2)

    def forward(self, ids):
        x = self.table(ids)
        y = torch.tanh(F.linear(x, self.rows[self.first])) * F.linear(x, self.rows[self.second])
        return y.sum(1)


def test_columns_of_a_parameter():
    class Columns(nn.Module):
        def __init__(self):
            super().__init__()
            self.wide = nn.Parameter(torch.randn(2, 7))

        def forward(self, x):
            return torch.tanh(F.linear(x, self.wide[:, 2:5])).sum(1)

    model = Columns().double().eval()
    data = Data(torch.randn(4, 2, 3).double(), torch.randn(4, 2).double())
    exact = ggn(model, Gaussian(scale=0.5), data)
    for structure in ("diag", "full", "kron"):
        found = assembled(estimate(model, Gaussian(scale=0.5), data, structure, batch_size=3), 14)
        close(found, exact.diagonal().diag() if structure == "diag" else exact)


@pytest.mark.parametrize("second", [slice(3, 6), slice(2, 5), slice(0, 3)])
def test_slices_of_a_parameter_apart_and_overlapping(second):
    model = Slices(slice(0, 3), second).double().eval()
    nn.init.normal_(model.table.weight)  # the padding row too: at 0 nothing would flow through it
    data = Data(torch.tensor([[0, 2, 1], [1, 1, 3], [2, 4, 0]]), torch.randn(3, 3).double())
    exact = ggn(model, Gaussian(scale=0.5), data)
    for structure in ("diag", "full", "kron"):
        found = estimate(model, Gaussian(scale=0.5), data, structure, batch_size=2)
        assert found.general == ()
        if structure == "full":
            close(found.structures[0].dense(), exact)
        if structure == "diag":
            close(assembled(found, len(exact)).diagonal(), exact.diagonal())
        if structure == "kron":  # overlapping rows are no single product: their exact block
            blocks = [place for place, names in zip(found.places, found.names, strict=True) if names == ("rows",)]
            if second == slice(2, 5):
                close(assembled(found, len(exact))[:24, :24], exact[:24, :24])
            else:
                sizes = {3: [12, 12], 0: [12, 12]}[second.start]
                assert [place.stop - place.start for place in blocks] == sizes


def test_a_subset_by_pattern():
    model, likelihood, data = build("layer")
    exact, space = ggn(model, likelihood, data), Space.of(model)
    found = estimate(model, likelihood, data, "full", subset=["*norm*", "head.bias"])
    names = [name for name in space.names if "norm" in name or name == "head.bias"]
    assert found.names == (tuple(names),)
    index = found.places[0]
    close(found.structures[0].dense(), exact[index][:, index])
    assert all(p.requires_grad for p in model.parameters())
    assert all(p.grad is None for p in model.parameters())


def test_frozen_parameters_have_no_place():
    model, likelihood, data = build("vit")
    model.encoder.requires_grad_(False)
    exact = ggn(model, likelihood, data)
    found = estimate(model, likelihood, data, "full")
    assert len(exact) == found.structures[0].size == Space.of(model).size
    close(found.structures[0].dense(), exact)
    assert not any(p.requires_grad for p in model.encoder.parameters())


@pytest.mark.parametrize("likelihood", [Categorical(), Gaussian(0.7), Gaussian(), Bernoulli()])
@pytest.mark.parametrize("shape", [(3, 4), (3, 2, 4)])
def test_columns_are_a_root_of_the_information(likelihood, shape):
    outputs = torch.randn(shape, dtype=torch.float64)
    found = torch.stack(list(columns.exact(likelihood, outputs, None)))
    assert len(found) == columns.count("ggn", likelihood, outputs)
    positions = outputs[0].numel() // 4
    for n in range(3):
        blocks = likelihood.hessian(outputs[n : n + 1]).reshape(positions, 4, 4)
        root = found[:, n].flatten(1)
        torch.testing.assert_close(root.mT @ root, torch.block_diag(*blocks), atol=1e-12, rtol=1e-10)


def test_columns_of_a_class_that_is_certain():
    outputs = torch.tensor([[800.0, 0.0, -800.0], [0.0, 0.0, 800.0]], dtype=torch.float64)
    found = torch.stack(list(columns.exact(Categorical(), outputs, None)))
    assert torch.isfinite(found).all()
    assert found.abs().max() < 1e-12


def test_a_likelihood_of_ones_own_uses_its_hessian():
    class Other(Likelihood):
        def hessian(self, outputs):
            root = outputs.unsqueeze(-1) * torch.tensor([[1.0, 2.0, 3.0], [0.5, -1.0, 0.0]], dtype=torch.float64).mT
            return root @ root.mT

    outputs = torch.randn(2, 3, dtype=torch.float64)
    found = torch.stack(list(columns.exact(Other(), outputs, None)), -1)
    torch.testing.assert_close(found @ found.mT, Other().hessian(outputs), atol=1e-12, rtol=1e-10)
    with pytest.raises(ValueError, match="Other must define sample.*which kind='mc'"):
        list(columns.sampled(Other(), outputs, None, 1, 0))


@pytest.mark.parametrize("name", ["mlp", "bernoulli", "vit", "regressor"])
def test_sampled_fisher_has_the_gauss_newton_matrix_as_its_mean(name):
    model, likelihood, data = build(name)
    exact = ggn(model, likelihood, data)
    draws = torch.stack([
        torch.cat([s.values for s in estimate(model, likelihood, data, "diag", kind="mc", seed=i).structures])
        for i in range(40)
    ])  # fmt: skip
    moved = exact.diagonal() > 1e-10 * exact.diagonal().max()
    # Squared gradients are heavy-tailed and 40 are few for a z-test of each: their mean over weights is tame.
    assert_mean((draws[:, moved] / exact.diagonal()[moved]).mean(1, keepdim=True), 1.0)
    many = estimate(model, likelihood, data, "diag", kind="mc", samples=200, seed=1)
    relative = torch.cat([s.values for s in many.structures])[moved] / exact.diagonal()[moved]
    spread = draws[:, moved].std(0) / exact.diagonal()[moved] / 200**0.5
    assert ((relative - 1).abs() < 7 * spread).all()  # 6 standard errors, and the standard error's own


def test_a_draw_follows_the_predictive():
    source = torch.Generator().manual_seed(0)
    logits = torch.tensor([0.3, -0.5, 1.0]).expand(20_000, 3)
    labels = torch.nn.functional.one_hot(Categorical().sample(logits, source), 3)
    assert_mean(labels, logits[0].softmax(-1))
    assert_mean(Bernoulli().sample(logits, source), torch.sigmoid(logits[0]))
    outputs = torch.tensor([0.3, -0.5]).expand(20_000, 2)
    values = Gaussian().sample(outputs, source)
    mean, scale = Gaussian().split(outputs[:1])
    assert_mean(values, mean[0])
    assert_mean((values - mean).square(), scale[0].square())


@pytest.mark.parametrize("name", POOLED)
@pytest.mark.parametrize("structure", ["diag", "kron"])
def test_minibatches_do_not_matter(name, structure):
    model, likelihood, data = build(name)
    one, some = (estimate(model, likelihood, data, structure, batch_size=size) for size in (1, 3))
    assert one.log_likelihood == pytest.approx(some.log_likelihood, rel=1e-9 if name != "llama" else 1e-5)
    assert one.num_data == some.num_data == len(data)
    size = Space.of(model).size
    close(assembled(one, size), assembled(some, size), name)


def test_facts():
    model, likelihood, data = build("regressor")
    found = estimate(model, likelihood, data, "diag")
    outputs = apply(model, data.inputs)
    assert found.kind == "ggn"
    assert found.outputs == 2
    assert found.general == ()
    fit = likelihood.log_prob(outputs, data.targets, data.mask).sum().item()
    for kind in ("mc", "ggn", "fisher"):
        assert estimate(model, likelihood, data, "diag", kind=kind, batch_size=2).log_likelihood == pytest.approx(fit)
    assert estimate(*build("vit"), "diag").kind == "ggn"
    assert estimate(*build("convolution"), "diag").general == ("odd",)


def test_progress_is_told():
    calls = []

    class Heard:
        def update(self, task, done, total, note=""):
            calls.append((task, done, total))

    estimate(*build("mlp"), "diag", batch_size=3, reporter=Heard())
    assert calls == [("curvature", 3, 4), ("curvature", 4, 4)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"structure": "krom"}, "unknown structure 'krom'. Did you mean 'kron'?"),
        ({"kind": "gn"}, "unknown kind 'gn'. Did you mean 'ggn'?"),
        ({"samples": 0}, "samples must be at least 1; got 0"),
        ({"rank": 0}, "rank must be at least 1; got 0"),
        ({"batch_size": -2}, "batch_size must be at least 1; got -2"),
        ({"subset": "net.1*"}, r"subset='net.1\*' matches no weight"),
        ({"subset": ["net.0.weights"]}, "Nearest names: net.0.weight"),
        ({"general": ["other"]}, "unknown inferred parameter 'other'"),
    ],
)
def test_wrong_settings_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        estimate(*build("mlp"), **options)


def test_wrong_targets_are_named_before_any_work():
    model, likelihood, data = build("vit")
    with pytest.raises(ValueError, match="targets must lie in 0..2"):
        estimate(model, likelihood, (data.inputs, data.targets + 3))


@pytest.mark.parametrize("structure", ["full", "kron", "diag"])
def test_one_logit_per_example_needs_no_axis_of_its_own(structure):
    """Outputs and targets (B,) have the curvature of (B, 1), and say the same of new inputs."""
    source = torch.Generator().manual_seed(0)
    x, y = torch.randn(30, 3, generator=source), (torch.rand(30, generator=source) < 0.5).float()
    wide = torch.nn.Linear(3, 1)
    narrow = torch.nn.Sequential(wide, torch.nn.Flatten(0))
    settings = {"structure": structure, "prior_precision": 1.0}
    found = [
        bf.laplace(model.eval(), data, likelihood="bernoulli", **settings)
        for model, data in ((wide, (x, y[:, None])), (narrow, (x, y)))
    ]
    probs = [posterior.predict(x[:4], link="probit").probs.reshape(4, 2) for posterior in found]
    assert torch.allclose(*probs, atol=1e-6)

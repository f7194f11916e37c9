"""Kronecker factors against their definition by hooks, one example and one column at a time; where they are exact."""

from functools import partial

import pytest
import torch
from torch import nn

from bayesformer.data import Data
from bayesformer.laplace import estimate
from bayesformer.laplace import kronecker_curvature as kron
from bayesformer.laplace.factors import DenseFactor, DiagonalFactor, SketchFactor
from bayesformer.laplace.structures import DiagonalCurvature, KroneckerCurvature
from bayesformer.likelihoods import Categorical, Gaussian
from bayesformer.model.calling import apply
from bayesformer.model.space import Space
from tests.curvature_zoo import MODELS, N, T, assembled, build, ggn
from tests.test_curvature_exact import close


def parts(curvature):
    """Structures by parameter name; each has one."""
    assert len(set(curvature.names)) == len(curvature.names)
    return {name: structure for (name,), structure in zip(curvature.names, curvature.structures, strict=True)}


def factors(model, likelihood, data, approximation, valid):
    """A and B of every module with a matrix, by hooks. `valid` (N, T) marks inputs that are no padding."""
    modules = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear) or type(m).__name__ == "Conv1D"}
    sums, counts = {}, dict.fromkeys(modules, 0)
    for n in range(len(data)):
        batch, seen = data.take(slice(n, n + 1)), {}

        def note(_, x, y, name, seen=seen):
            seen[name] = x[0], y

        hooks = [m.register_forward_hook(partial(note, name=name)) for name, m in modules.items()]
        outputs = apply(model, batch.inputs)
        for hook in hooks:
            hook.remove()
        columns = roots(likelihood, outputs, batch)
        for name, (x, y) in seen.items():
            a = x.detach().reshape(-1, x.shape[-1])
            rows = a[valid[n]] if len(a) == T else a
            reduce = approximation == "reduce" and "key" not in name  # gradients in keys cancel over positions
            rows = rows.mean(0, keepdim=True) if reduce else rows
            A = rows.T @ rows
            B = 0
            for column in columns:
                (g,) = torch.autograd.grad(outputs, y, column, retain_graph=True)
                g = g.reshape(-1, g.shape[-1])
                g = g.sum(0, keepdim=True) if reduce else g
                B = B + g.T @ g
            old = sums.get(name, (0, 0))
            sums[name], counts[name] = (old[0] + A, old[1] + B), counts[name] + len(rows)
    return {name: (A / counts[name], B) for name, (A, B) in sums.items()}


def roots(likelihood, outputs, batch):
    """Columns of the symmetric root of the information: another root than the code's."""
    blocks = likelihood.hessian(outputs.detach())[0]
    blocks = blocks.reshape(-1, *blocks.shape[-2:])
    kept = likelihood.counted(batch.targets, batch.mask)
    if kept is not None:
        blocks = blocks * kept[0].double().reshape(-1, 1, 1)
    values, vectors = torch.linalg.eigh(torch.block_diag(*blocks))
    root = (vectors * values.clamp_min(0).sqrt()) @ vectors.mT
    return [column.view(outputs.shape) for column in root.T]


@pytest.mark.parametrize("approximation", ["expand", "reduce"])
@pytest.mark.parametrize("name", ["vit", "classifier", "tagger", "regressor", "bert"])
def test_factors_equal_their_definition(name, approximation):
    model, likelihood, data = build(name)
    valid = torch.ones(N, T, dtype=torch.bool)
    if isinstance(data.inputs, dict):
        valid = data.inputs["attention_mask"].bool()
    elif data.mask is not None:
        valid = data.mask
    found = parts(estimate(model, likelihood, data, "kron", kind="ggn", approximation=approximation, batch_size=3))
    checked = 0
    for module, (A, B) in factors(model, likelihood, data, approximation, valid).items():
        structure = found.get(f"{module}.weight")
        if module == "lm_head":  # tied to the embedding
            continue
        turned = type(model.get_submodule(module)).__name__ == "Conv1D"
        assert isinstance(structure, KroneckerCurvature)
        expected = torch.kron(A, B) if turned else torch.kron(B, A)
        close(structure.dense(), expected)
        checked += 1
    assert checked >= 4


def test_factors_of_a_transposed_weight():
    model, likelihood, data = build("gpt2")
    valid = data.inputs["attention_mask"].bool()
    found = estimate(model, likelihood, data, "kron", kind="ggn", batch_size=3)
    structures = parts(found)
    for module, (A, B) in factors(model, likelihood, data, "expand", valid).items():
        if module != "lm_head":  # tied to the embedding
            close(structures[f"{module}.weight"].dense(), torch.kron(A, B))
    # Query, key and value are packed side by side: with reduce, the columns of the key are a block of their own.
    A, B = factors(model, likelihood, data, "expand", valid)["transformer.h.0.attn.c_attn"]
    reduced = estimate(model, likelihood, data, "kron", kind="ggn", approximation="reduce", batch_size=3)
    names = [name[0] for name in reduced.names]
    first = names.index("transformer.h.0.attn.c_attn.weight")
    assert names[first : first + 3] == [names[first]] * 3
    start = next(p for p, n in zip(found.places, found.names, strict=True) if n[0] == names[first]).start
    columns = torch.arange(4 * 12).view(4, 12)[:, 4:8].flatten()
    assert torch.equal(reduced.places[first + 1] - start, columns)
    close(reduced.structures[first + 1].dense(), torch.kron(A, B[4:8, 4:8]))


def test_keys_of_a_packed_weight_are_expanded():
    model, likelihood, data = build("layer")
    names = "layer.self_attn.in_proj_weight"
    reduce, expand = (
        estimate(model, likelihood, data, "kron", subset=names, approximation=a) for a in (None, "expand")
    )
    assert [place.stop - place.start for place in reduce.places] == [16, 16, 16]
    close(reduce.structures[1].dense(), expand.structures[0].dense()[16:32, 16:32])
    assert expand.structures[0].size == 48


@pytest.mark.parametrize("name", MODELS)
def test_vectors_have_their_exact_block_and_every_weight_a_place(name):
    model, likelihood, data = build(name)
    exact = ggn(model, likelihood, data)
    found = estimate(model, likelihood, data, "kron", kind="ggn", batch_size=3)
    starts = [place.start for place in found.places]
    stops = [place.stop for place in found.places]
    assert starts == [0, *stops[:-1]]
    assert stops[-1] == len(exact)
    scale = exact.abs().max()
    for place, structure in zip(found.places, found.structures, strict=True):
        assert structure.size == place.stop - place.start
        if not isinstance(structure, KroneckerCurvature):
            close(structure.dense() / scale + 1, exact[place, place] / scale + 1, name)


@pytest.mark.parametrize("approximation", ["expand", "reduce"])
def test_one_example_at_one_position_is_exact(approximation):
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double().eval()
    data = Data(torch.randn(1, 3).double(), torch.randn(1, 1).double())
    exact = ggn(model, Gaussian(scale=0.3), data)
    found = estimate(model, Gaussian(scale=0.3), data, "kron", approximation=approximation)
    for place, structure in zip(found.places, found.structures, strict=True):
        close(structure.dense(), exact[place, place])


class Deep(nn.Module):
    """Two linear layers at every position, then perhaps the mean over positions."""

    def __init__(self, pooled):
        super().__init__()
        self.pooled, self.one, self.two = pooled, nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x):
        x = self.two(self.one(x))
        return x.mean(1) if self.pooled else x


@pytest.mark.parametrize("pooled", [False, True])
def test_expand_is_exact_for_a_loss_per_token_and_reduce_for_pooling(pooled):
    model = Deep(pooled).double().eval()
    data = Data(torch.randn(6, 5, 3).double(), torch.randn(6, 2).double() if pooled else torch.randn(6, 5, 2).double())
    exact = ggn(model, Gaussian(scale=0.5), data)
    errors = {}
    for approximation in (None, "expand", "reduce"):
        found = estimate(model, Gaussian(scale=0.5), data, "kron", kind="ggn", approximation=approximation)
        place, structure = found.places[0], found.structures[0]
        errors[approximation] = ((structure.dense() - exact[place, place]).norm() / exact[place, place].norm()).item()
    right, wrong = ("reduce", "expand") if pooled else ("expand", "reduce")
    assert errors[right] < 1e-12
    assert errors[None] < 1e-12  # the default is the right one
    assert errors[wrong] > 0.3


def test_one_position_makes_both_equal():
    model, likelihood, data = build("mlp")
    expand, reduce = (estimate(model, likelihood, data, "kron", approximation=a) for a in ("expand", "reduce"))
    for a, b in zip(expand.structures, reduce.structures, strict=True):
        close(a.dense(), b.dense())


@pytest.mark.parametrize("approximation", ["expand", "reduce"])
@pytest.mark.parametrize("name", ["tagger", "classifier", "layer", "bert", "gpt2"])
@pytest.mark.parametrize("kind", ["ggn", "fisher"])
def test_more_padding_changes_nothing(name, kind, approximation):
    model, likelihood, data = build(name)
    size = Space.of(model).size
    cut = {k: v[:, :4] for k, v in data.inputs.items()}  # learned positions of the tiny models end at 6
    labels = data.targets if data.targets.dim() == 1 else data.targets[:, :4]
    inputs = {k: torch.cat([v, torch.zeros_like(v[:, :2])], 1) for k, v in cut.items()}
    targets = labels if labels.dim() == 1 else torch.cat([labels, torch.full((N, 2), -100)], 1)
    for structure in ("diag", "kron"):
        options = {"kind": kind, "approximation": approximation, "batch_size": 3}
        short = estimate(model, likelihood, Data(cut, labels), structure, **options)
        long = estimate(model, likelihood, Data(inputs, targets), structure, **options)
        assert long.log_likelihood == pytest.approx(short.log_likelihood)
        close(assembled(long, size), assembled(short, size))


def test_padding_by_the_mask_of_the_data():
    model, likelihood, data = build("regressor")
    size = Space.of(model).size
    x, y, mask = (torch.cat([t, torch.zeros_like(t[:, :2])], 1) for t in (data.inputs, data.targets, data.mask))
    for structure in ("diag", "kron"):
        short = estimate(model, likelihood, data, structure, kind="ggn")
        long = estimate(model, likelihood, Data(x, y, mask), structure, kind="ggn")
        close(assembled(long, size), assembled(short, size))


def test_an_embedding_is_frequencies_times_a_factor():
    model, likelihood, data = build("tagger")
    found = parts(estimate(model, likelihood, data, "kron", kind="ggn", batch_size=3))["embedding.weight"]
    ids = data.inputs["input_ids"][data.inputs["attention_mask"].bool()]
    frequencies = ids.bincount(minlength=7).double() / len(ids)
    torch.testing.assert_close(found.out_values, frequencies)
    assert found.out_vectors is None
    exact = ggn(model, likelihood, data)[:28, :28]
    # One token per example: then the sum over its own rows is what the exact diagonal blocks add up to.
    one = Data({k: v[:, :1] for k, v in data.inputs.items()}, data.targets[:, :1])
    exact = ggn(model, likelihood, one)[:28, :28].view(7, 4, 7, 4)
    total = sum(exact[v, :, v] for v in range(7))
    single = parts(estimate(model, likelihood, one, "kron", kind="ggn"))["embedding.weight"]
    close((single.in_vectors * single.in_values) @ single.in_vectors.mT, total)


def test_sampled_factors_are_unbiased():
    model, likelihood, data = build("vit")
    exact = assembled(estimate(model, likelihood, data, "kron", kind="ggn"), Space.of(model).size).diagonal()
    many = assembled(estimate(model, likelihood, data, "kron", kind="mc", samples=600), len(exact)).diagonal()
    # Sums of squares over 600 draws of 4 examples: a relative error of about √(2 / 600) / √4 for the whole.
    assert (many.sum() / exact.sum() - 1).abs() < 6 * (2 / 600) ** 0.5


def test_big_vectors_are_diagonal_and_exact(monkeypatch):
    monkeypatch.setattr(kron, "SMALL", 3)
    model, likelihood, data = build("classifier")
    exact = ggn(model, likelihood, data)
    found = estimate(model, likelihood, data, "kron", batch_size=3)
    names = [n for n, s in zip(found.names, found.structures, strict=True) if isinstance(s, DiagonalCurvature)]
    assert ("encoder.positions.table",) in names
    for place, structure in zip(found.places, found.structures, strict=True):
        if isinstance(structure, DiagonalCurvature):
            close(structure.values + 1, exact.diagonal()[place] + 1)


@pytest.mark.parametrize("large", ["low_rank", "diagonal"])
def test_a_long_factor_is_never_square(large, monkeypatch):
    """A head with more outputs than LARGE, against the same with a dense factor."""
    model = nn.Sequential(nn.Embedding(50, 6), nn.Linear(6, 300)).double().eval()
    data = Data(torch.randint(50, (4, 3)), torch.randint(300, (4, 3)))
    dense = parts(estimate(model, Categorical(), data, "kron", kind="mc", samples=2))["1.weight"]
    monkeypatch.setattr(kron, "LARGE", 100)
    found = parts(estimate(model, Categorical(), data, "kron", kind="mc", samples=2, large=large, rank=30))["1.weight"]
    if large == "low_rank":  # 24 draws: rank 24 at most, so nothing is lost
        assert found.out_vectors.shape == (300, 30)
        close(found.dense(), dense.dense())
    else:
        assert found.out_vectors is None
        close(found.out_values, (dense.out_vectors.square() @ dense.out_values))


def test_a_vocabulary_of_a_language_model():
    """K = 49 152 and D = 576: no object of K by K, which alone would take 9 GiB."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(100, 576), nn.Linear(576, 49_152, bias=False)).eval()
    model[0].requires_grad_(False)
    data = Data(torch.randint(100, (2, 4)), torch.randint(49_152, (2, 4)))
    found = estimate(model, Categorical(), data, "kron", batch_size=1, rank=12)
    structure = found.structures[0]
    assert found.kind == "mc"
    assert structure.shape == (49_152, 576)
    assert structure.out_vectors.shape == (49_152, 12)
    # The scores p - e_y of 8 tokens span 8 directions, and have a length of 1 but for the small p.
    assert structure.out_values.sum() == pytest.approx(8, rel=1e-3)
    assert (structure.out_values[8:] < 1e-4).all()


@pytest.mark.parametrize(("size", "rank", "rows"), [(40, 8, 20), (40, 8, 500), (12, 20, 30)])
def test_a_sketch_holds_the_top_of_the_sum(size, rank, rows):
    x = torch.randn(rows, size, dtype=torch.float64) * torch.logspace(0, -4, size, dtype=torch.float64)
    sketch, dense = SketchFactor(size, x, rank), DenseFactor(size, x)
    for chunk in x.split(7):
        sketch.add(chunk)
        dense.add(chunk)
    values, vectors = sketch.pairs(0.5)
    exact, _ = dense.pairs(0.5)
    kept = min(rank, size)
    assert vectors.shape == (size, kept)
    torch.testing.assert_close(vectors.mT @ vectors, torch.eye(kept, dtype=torch.float64), atol=1e-9, rtol=0)
    torch.testing.assert_close(values[: kept // 2], exact.flip(0)[: kept // 2], rtol=1e-3, atol=0)
    assert (values <= exact.flip(0)[:kept] * (1 + 1e-9) + 1e-12).all()  # never more than the truth


def test_factors_of_nothing():
    for factor in (
        SketchFactor(9, torch.zeros(1), 3),
        DenseFactor(9, torch.zeros(1)),
        DiagonalFactor(9, torch.zeros(1)),
    ):
        values, _ = factor.pairs(1.0)
        assert (values == 0).all()

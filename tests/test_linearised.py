"""The linearised predictive against J Σ Jᵀ with the Jacobian written out, for every form of Σ and kind of layer."""

import pytest
import torch
from torch import nn
from torch.func import functional_call, jacrev

import bayesformer as bf
from bayesformer.laplace.structures import (
    DenseCurvature,
    DiagonalCurvature,
    KroneckerCurvature,
    LowRankCurvature,
)
from bayesformer.laws import Dense, GaussianLaw, Samples, gaussian
from bayesformer.model.calling import call
from bayesformer.model.space import Space
from bayesformer.models.transformer import Encoder, Regressor, SequenceClassifier, Tagger
from bayesformer.models.vit import VisionTransformer
from bayesformer.predict import linearised
from bayesformer.predict.covariance_roots import CovarianceRoots
from bayesformer.predict.linearised import Linearised, linearised_outputs
from tests.nets import Mlp, Normed, Tied

F64 = torch.float64
D = torch.tensor(0.7, dtype=F64)


def positive(size):
    root = torch.randn(size, size, dtype=F64)
    return root @ root.mT


def mean_of(model):
    return Space.of(model).pack(dict(model.named_parameters()))


def brute_force(model, inputs):
    """(B, outputs, P): the Jacobian of every example, by reverse mode over the whole batch."""
    space = Space.of(model)
    params = space.views(mean_of(model))
    found = jacrev(lambda p: call(model, p, inputs))(params)
    outputs = call(model, params, inputs)
    rows = torch.cat([found[n].reshape(outputs.numel(), -1) for n in space.names], 1)
    return outputs.detach(), rows.view(len(outputs), -1, space.size)


def covariance_of(weights):
    """(P, P) from draws of white noise: the definition of each law, column by column."""
    if isinstance(weights, GaussianLaw):
        whole = torch.zeros(weights.size, weights.size, dtype=F64)
        for place, block in zip(weights.places, weights.blocks, strict=True):
            index = torch.arange(weights.size)[place]
            whole[index[:, None], index] = block.times(torch.eye(block.size, dtype=F64))
        return whole
    whole = torch.zeros(weights.size, weights.size, dtype=F64)
    if weights.sd is not None:
        whole += weights.sd.square().diag()
    if weights.factor is not None:
        whole += weights.factor.mT @ weights.factor
    if weights.tril is not None:
        whole += weights.tril @ weights.tril.mT
    return whole


def check(model, inputs, weights, **options):
    """Mean, covariance per position and joint covariance are the definitions."""
    model = model.double().eval()
    mean, rows = brute_force(model, inputs)
    cov = covariance_of(weights)
    found = Linearised(model, Space.of(model), weights)(inputs, **options)
    torch.testing.assert_close(found.mean, mean)
    width = mean.shape[-1] if mean.dim() > 1 else 1
    grouped = rows.unflatten(1, (-1, width))
    expected = (grouped @ cov @ grouped.mT).view(*mean.shape, *([width] if mean.dim() > 1 else []))
    got = found.covariance if mean.dim() > 1 else found.variance
    torch.testing.assert_close(got, expected, rtol=1e-7, atol=1e-9 * float(expected.abs().max()))
    assert not found.mean.requires_grad
    assert not found.diagonal.requires_grad
    together, joint = Linearised(model, Space.of(model), weights).joint(inputs)
    torch.testing.assert_close(together, mean)
    flat = rows.flatten(0, 1)
    torch.testing.assert_close(joint, flat @ cov @ flat.mT, rtol=1e-7, atol=1e-9 * float(expected.abs().max()))


def models():
    torch.manual_seed(0)
    encoder = lambda **options: Encoder(dim=4, depth=1, heads=2, mlp_ratio=2, max_length=6, **options)  # noqa: E731
    return {
        "mlp": (Mlp(3, 5, 4), torch.randn(5, 3, dtype=F64)),
        "vit": (VisionTransformer(4, 2, 1, 3, dim=4, depth=1, heads=2), torch.randn(4, 1, 4, 4, dtype=F64)),
        "regressor": (Regressor(encoder(causal=True)), torch.randn(3, 5, 1, dtype=F64)),
        "tagger": (Tagger(encoder(positions="learned"), 7, 3), torch.randint(7, (3, 5))),
        "classifier": (SequenceClassifier(encoder(), 7, 3), torch.randint(7, (4, 6))),
        "tied": (Tied(), torch.randint(5, (4, 3))),
        "convolution": (
            nn.Sequential(nn.Conv2d(2, 3, 2), nn.GELU(), nn.Flatten(), nn.Linear(12, 2)),
            torch.randn(3, 2, 3, 3, dtype=F64),
        ),
        "batch norm": (Normed(), torch.randn(4, 3, dtype=F64)),
        "one number": (nn.Sequential(nn.Linear(3, 1), nn.Flatten(0)), torch.randn(4, 3, dtype=F64)),
    }


@pytest.mark.parametrize("name", models())
def test_a_diagonal_law_on_every_kind_of_model(name):
    model, inputs = models()[name]
    size = Space.of(model).size
    sd = torch.rand(size, dtype=F64)
    check(model, inputs, gaussian(mean_of(model.double()), sd))


@pytest.mark.parametrize("parts", ["factor", "sd and factor", "tril"])
def test_other_laws_of_gaussian_weights(parts):
    model, inputs = models()["mlp"]
    mean = mean_of(model.double())
    sd = torch.rand(len(mean), dtype=F64) if "sd" in parts else None
    factor = torch.randn(3, len(mean), dtype=F64) if "factor" in parts else None
    tril = torch.randn(len(mean), len(mean), dtype=F64).tril() if "tril" in parts else None
    check(model, inputs, gaussian(mean, sd, factor, tril))


def blocks(model, kind):
    """One block per parameter: Kronecker for matrices and tables, `kind` for the others."""
    space, places, found, start = Space.of(model), [], [], 0
    for shape, size in zip(space.shapes, space.sizes, strict=True):
        rows = shape[0]
        columns = size // rows
        if kind == "kronecker":
            structure = KroneckerCurvature.of(positive(rows), positive(columns))
        elif kind == "diagonal factors":
            structure = KroneckerCurvature.of(torch.rand(rows, dtype=F64), positive(columns))
        elif kind == "low-rank factors":
            full = KroneckerCurvature.of(positive(rows), positive(columns))
            structure = KroneckerCurvature(
                full.out_values[1:], full.in_values, full.out_vectors[:, 1:], full.in_vectors
            )
        elif kind == "low-rank inputs":
            full = KroneckerCurvature.of(positive(rows), positive(columns))
            kept = slice(1 if columns > 1 else 0, None)
            structure = KroneckerCurvature(
                full.out_values, full.in_values[kept], full.out_vectors, full.in_vectors[:, kept]
            )
        elif kind == "dense":
            structure = DenseCurvature(positive(size))
        elif kind == "low rank":
            values, vectors = torch.linalg.eigh(positive(size))
            structure = LowRankCurvature(vectors[:, size // 2 :], values[size // 2 :])
        else:
            structure = DiagonalCurvature(torch.rand(size, dtype=F64))
        places.append(slice(start, start + size))
        found.append(structure.posterior(D))
        start += size
    return GaussianLaw(mean_of(model), tuple(places), tuple(found))


@pytest.mark.parametrize(
    "kind", ["kronecker", "diagonal factors", "low-rank factors", "low-rank inputs", "dense", "low rank", "diagonal"]
)
@pytest.mark.parametrize("name", ["vit", "tagger"])
def test_blocks_on_transformers(name, kind):
    model, inputs = models()[name]
    check(model, inputs, blocks(model.double(), kind))


def test_triangular_products_leave_out_zeros_only():
    tril, rows = torch.randn(300, 300, dtype=F64).tril(), torch.randn(3, 2, 300, dtype=F64).transpose(0, 1)

    torch.testing.assert_close(Dense(tril).times_root(rows), rows @ tril)


def test_a_convolution_and_a_transposed_weight():
    model, inputs = models()["convolution"]
    check(model, inputs, blocks(model.double(), "kronecker"))

    class Turned(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.bias = nn.Parameter(torch.randn(3, 2)), nn.Parameter(torch.randn(2))

        def forward(self, x):
            return torch.tanh(torch.addmm(self.bias, x, self.weight))

    for kind in ("kronecker", "diagonal", "dense", "low-rank factors"):
        model = Turned().double()
        check(model, torch.randn(4, 3, dtype=F64), blocks(model, kind))


def test_a_block_over_scattered_weights_of_several_layers():
    model, inputs = models()["mlp"]
    mean = mean_of(model.double())
    place = torch.randperm(len(mean))[:12]
    check(model, inputs, GaussianLaw(mean, (place,), (DenseCurvature(positive(12)).posterior(D),)))
    size = Space.of(model).sizes[0] + 3  # a stretch that ends within the second parameter
    check(model, inputs, GaussianLaw(mean, (slice(0, size),), (DenseCurvature(positive(size)).posterior(D),)))


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("kind", ["kronecker", "dense"])
def test_blocks_of_the_parts_of_a_packed_weight_need_no_rows_of_the_whole(kind, turned, monkeypatch):
    """Queries and keys side by side in one weight: each block meets the slopes of its own outputs."""

    class Packed(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn((3, 4) if turned else (4, 3)))

        def forward(self, x):
            both = x @ self.weight if turned else nn.functional.linear(x, self.weight)
            queries, keys = both.chunk(2, -1)
            return torch.tanh(queries * keys).sum(-2)

    def refuse(*_):
        raise AssertionError("rows of the whole weight")

    model = Packed().double()
    numbers = torch.arange(12).view(model.weight.shape)
    places = tuple(part.flatten() for part in numbers.chunk(2, 1 if turned else 0))
    shapes = (3, 2) if turned else (2, 3)
    curvatures = [
        DenseCurvature(positive(6)) if kind == "dense" else KroneckerCurvature.of(*(positive(n) for n in shapes))
        for _ in places
    ]
    law = GaussianLaw(mean_of(model), places, tuple(curvature.posterior(D) for curvature in curvatures))
    monkeypatch.setattr(CovarianceRoots, "_of_several", refuse)
    check(model, torch.randn(5, 4, 3, dtype=F64), law)


def last_layer(model, kind, names=("net.3.weight", "net.3.bias")):
    """A law of the last layer only, in one block or one per parameter."""
    space, start, places, found = Space.of(model), 0, {}, []
    for name, size in zip(space.names, space.sizes, strict=True):
        places[name] = slice(start, start + size)
        start += size
    whole = slice(places[names[0]].start, places[names[-1]].stop)
    count = whole.stop - whole.start
    if kind == "dense":
        return GaussianLaw(mean_of(model), (whole,), (DenseCurvature(positive(count)).posterior(D),))
    if kind == "low rank":
        values, vectors = torch.linalg.eigh(positive(count))
        block = LowRankCurvature(vectors[:, 5:], values[5:]).posterior(torch.rand(count, dtype=F64) + 0.1)
        return GaussianLaw(mean_of(model), (whole,), (block,))
    every = blocks(model, kind)
    kept = [i for i, name in enumerate(space.names) if name in names]
    found = tuple(every.blocks[i] for i in kept)
    return GaussianLaw(every.mean, tuple(every.places[i] for i in kept), found)


@pytest.mark.parametrize(
    "kind", ["kronecker", "diagonal factors", "low-rank factors", "low-rank inputs", "diagonal", "dense", "low rank"]
)
def test_the_last_layer_in_closed_form(kind, monkeypatch):
    """No backward pass is made, except by the joint covariance."""
    model, inputs = models()["mlp"]
    model = model.double().eval()
    weights = last_layer(model, kind)
    check(model, inputs, weights)

    def refuse(*_):
        raise AssertionError("a backward pass")

    monkeypatch.setattr(linearised, "backpropagate", refuse)
    found = Linearised(model, Space.of(model), weights)
    first, again = found(inputs), found(inputs)  # the second time by a plain forward pass
    torch.testing.assert_close(again.covariance, first.covariance)
    torch.testing.assert_close(again.mean, first.mean)
    monkeypatch.setattr(found, "capture", refuse)
    found(inputs)


def test_the_last_layer_per_token():
    model, inputs = models()["tagger"]
    model = model.double()
    for kind in ("kronecker", "diagonal", "low-rank factors"):
        check(model, inputs, last_layer(model, kind, ("projection.weight", "projection.bias")))


@pytest.mark.parametrize("kind", ["kronecker", "diagonal"])
@pytest.mark.parametrize("subset", [None, ("net.3.weight", "net.3.bias"), ("net.0.weight",)])
def test_more_outputs_than_features_go_through_the_last_layer(kind, subset, monkeypatch):
    monkeypatch.setattr(linearised, "COLUMNS", 2)
    monkeypatch.setattr(linearised, "ROOTS", 300)
    model, inputs = Mlp(3, 4, 9), torch.randn(5, 3, dtype=F64)
    model = model.double().eval()
    weights = blocks(model, kind) if subset is None else last_layer(model, kind, subset)
    check(model, inputs, weights)
    found = Linearised(model, Space.of(model), weights)(inputs)
    if kind == "diagonal":
        assert found.factor is None or found.factor.shape[-1] <= 4  # never as wide as the outputs
    frozen = Mlp(3, 4, 9).double().eval()  # the last layer may be frozen
    frozen.net[3].requires_grad_(False)
    check(frozen, inputs, blocks(frozen, kind))


def test_a_factor_that_does_not_fit_keeps_its_variances(monkeypatch):
    monkeypatch.setattr(linearised, "COLUMNS", 2)
    model, inputs = Mlp(3, 4, 9).double().eval(), torch.randn(5, 3, dtype=F64)
    weights = last_layer(model, "kronecker", ("net.0.weight",))
    exact = Linearised(model, Space.of(model), weights)(inputs)
    monkeypatch.setattr(linearised, "FACTOR", 5 * 9 * 2)
    cut = Linearised(model, Space.of(model), weights)(inputs)
    assert exact.factor.shape[-1] == 4
    assert cut.factor.shape[-1] == 2
    torch.testing.assert_close(cut.variance, exact.variance)


def test_batches_and_columns_in_pieces_change_nothing(monkeypatch):
    model, inputs = models()["regressor"]
    model = model.double().eval()
    weights = blocks(model, "kronecker")
    whole = linearised_outputs(model, Space.of(model), weights, inputs)
    monkeypatch.setattr(linearised, "COLUMNS", 4)
    monkeypatch.setattr("bayesformer.core.slices.CACHED", 64)
    pieces = linearised_outputs(model, Space.of(model), weights, inputs, batch_size=2)
    torch.testing.assert_close(pieces.covariance, whole.covariance)


def test_a_batch_whose_slopes_do_not_fit_is_cut(monkeypatch):
    model, inputs = models()["tagger"]
    weights = gaussian(mean_of(model.double().eval()), torch.rand(Space.of(model).size, dtype=F64))
    whole = linearised_outputs(model, Space.of(model), weights, inputs)
    seen = []
    monkeypatch.setattr(linearised, "SLOPES", 2000)
    inner = linearised.backpropagate
    monkeypatch.setattr(linearised, "backpropagate", lambda *a, **k: seen.append(len(a[1])) or inner(*a, **k))
    cut = linearised_outputs(model, Space.of(model), weights, inputs)
    assert set(seen) == {1}
    torch.testing.assert_close(cut.covariance, whole.covariance)


def test_the_variance_is_that_of_sampling_for_small_spreads():
    """Linear in the weights up to O(sd²): draws of the real network, and a tolerance from their number."""
    model, inputs = models()["vit"]
    model = model.double().eval()
    weights = gaussian(mean_of(model), torch.full((Space.of(model).size,), 1e-4, dtype=F64))
    posterior = bf.Posterior(model, bf.Categorical(), weights)
    draws = posterior.outputs(inputs, 4000).values
    exact = posterior.outputs(inputs, predictive="linearised").variance
    # The variance of n Gaussian draws has relative standard error sqrt(2 / n) = 2.2 %.
    assert ((draws.var(0) / exact - 1).abs() < 5 * (2 / 4000) ** 0.5).all()


def test_a_large_vocabulary_stays_small():
    """K = 49,152 over the last layer: diagonal variances; K by K would be 9.7 GB, and 58 GB with its Jacobian."""
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 49_152)).eval()
    weights = gaussian(mean_of(model), torch.cat([torch.zeros(144), torch.full((49_152 * 17,), 0.1)]))
    posterior = bf.Posterior(model, bf.Categorical(), weights, predictive="linearised", link="probit")
    x = torch.randn(4, 8)
    found = posterior.outputs(x)
    features = model[:2](x)
    expected = 0.01 * (features.square().sum(-1, keepdim=True) + 1)
    torch.testing.assert_close(found.variance, expected.expand(4, 49_152), rtol=1e-4, atol=0)
    torch.testing.assert_close(posterior.predict(x).probs.sum(-1), torch.ones(4))
    below = torch.zeros(Space.of(model).size)
    below[:144] = 0.1
    found = bf.Posterior(model, bf.Categorical(), gaussian(mean_of(model), below)).outputs(x, predictive="linearised")
    assert found.factor.shape == (4, 49_152, 16)
    jacobian = jacrev(lambda p: functional_call(model[0], p, (x[:1],)))(dict(model[0].named_parameters()))
    rows = torch.cat([jacobian["weight"].reshape(16, -1), jacobian["bias"].reshape(16, -1)], 1)
    slopes = model[2].weight[:5] * (1 - features[0].square())
    torch.testing.assert_close(found.variance[0, :5], 0.01 * (slopes @ rows).square().sum(-1).detach())


def test_weights_without_spread_are_a_point():
    model, inputs = models()["mlp"]
    model = model.double().eval()
    check(model, inputs, gaussian(mean_of(model), torch.zeros(Space.of(model).size, dtype=F64)))


def test_wrong_input_is_named():
    model, inputs = models()["mlp"]
    model = model.double()
    space, mean = Space.of(model), mean_of(model)
    law = gaussian(mean, torch.ones_like(mean))
    with pytest.raises(ValueError, match="model must be in eval mode"):
        linearised_outputs(model.train(), space, law, inputs)
    model.eval()
    with pytest.raises(ValueError, match="weights must follow a Gaussian to be linearised; got Samples"):
        linearised_outputs(model, space, Samples(mean[None]), inputs)
    block = DiagonalCurvature(torch.ones(4, dtype=F64)).posterior(D)
    with pytest.raises(ValueError, match="places must be as many as a block has weights, 4; got 3"):
        linearised_outputs(model, space, GaussianLaw(mean, (slice(0, 3),), (block,)), inputs)

"""Noise on outputs against noise on weights: local reparameterisation and Flipout."""

from functools import partial

import pytest
import torch
from scipy import stats
from torch import nn
from torch.func import functional_call, jacrev, vmap

from bayesformer.layers import convert
from bayesformer.layers.local import LOCAL, affine, is_table, replaced
from tests.laws import assert_law, assert_mean

DRAWS = 4000


def conv1d(inputs, outputs):
    pytest.importorskip("transformers")
    from transformers.pytorch_utils import Conv1D

    return Conv1D(outputs, inputs)


LAYERS = {
    "linear": (lambda: nn.Linear(4, 3), (2, 4)),
    "linear without bias": (lambda: nn.Linear(4, 3, bias=False), (2, 4)),
    "positions": (lambda: nn.Linear(4, 2), (2, 3, 4)),
    "hugging face": (lambda: conv1d(4, 3), (2, 4)),
    "conv1d": (lambda: nn.Conv1d(2, 3, 3, padding=1), (2, 2, 5)),
    "conv2d": (lambda: nn.Conv2d(2, 4, 3, stride=2, padding=1, groups=2, padding_mode="circular"), (2, 2, 5, 5)),
    "conv3d": (lambda: nn.Conv3d(1, 2, 2, bias=False), (2, 1, 3, 3, 3)),
}


def layer(name, family, **options):
    """A layer with clearly different scales, and an input."""
    build, shape = LAYERS[name]
    prior = "cauchy(0, 1)" if family == "cauchy" else "normal(0, 1)"
    model = convert(build().double(), family, prior, rho=-1.0, **options)
    with torch.no_grad():
        for raw in model.rho:
            raw.add_(torch.randn_like(raw))
    return model, torch.randn(shape, dtype=torch.float64)


def weights_jacobian(model, x):
    """(outputs, weights): every layer here is linear in its weights."""

    def run(flat):
        return functional_call(model.model, model.space.views(flat), (x,))

    return jacrev(run)(model.space.pack(dict(model.model.named_parameters()))).flatten(0, -2)


def scales(model):
    """(P,): the scales of all weights in the order of the space."""
    return model.space.pack(model.scales())


def draw(model, x, count=DRAWS):
    """(count, outputs): as many forward passes at once, each with noise of its own."""
    with torch.no_grad():
        return vmap(lambda _: model(x).flatten(), randomness="different")(torch.zeros(count))


@pytest.mark.parametrize("local", [True, False])
@pytest.mark.parametrize("name", LAYERS)
def test_gaussian_outputs_have_the_mean_and_variance_of_gaussian_weights(name, local):
    model, x = layer(name, "gaussian", local=local)
    draws = draw(model, x)
    mean = model.model(x).flatten().detach()
    variance = weights_jacobian(model, x).square() @ scales(model).square()
    assert_mean(draws, mean)
    assert_mean((draws - mean).square(), variance)
    assert_law((draws[:, 0] - mean[0]) / variance[0].sqrt(), stats.norm.cdf)


@pytest.mark.parametrize("local", [True, False])
@pytest.mark.parametrize("name", LAYERS)
def test_cauchy_outputs_have_the_law_of_cauchy_weights(name, local):
    model, x = layer(name, "cauchy", local=local)
    draws = draw(model, x)
    mean = model.model(x).flatten().detach()
    scale = weights_jacobian(model, x).abs() @ scales(model)
    for i in range(0, len(mean), max(1, len(mean) // 4)):
        assert_law((draws[:, i] - mean[i]) / scale[i], stats.cauchy.cdf)
    # median and interquartile range, from the binomial law of the counts below the exact quartiles
    for quartile in (0.25, 0.5, 0.75):
        assert_mean((draws < mean + scale * stats.cauchy.ppf(quartile)).double(), torch.full_like(mean, quartile))


@pytest.mark.parametrize("family", ["gaussian", "cauchy"])
def test_local_noise_is_apart_for_examples_and_positions_and_shared_for_weight_draws(family):
    model, _ = layer("positions", family)
    x = torch.ones(2, 3, 4, dtype=torch.float64)
    with torch.no_grad():
        apart = model(x).flatten(0, 1)  # (6, 2), every row the same input
        model.local = False
        shared = model(x).flatten(0, 1)
    assert len(apart.unique(dim=0)) == 6
    torch.testing.assert_close(shared, shared[:1].expand(6, 2))
    model.local = True
    if family == "gaussian":
        draws = draw(model, x).unflatten(1, (6, 2))[..., 0]
        centred = draws - draws.mean(0)
        assert_mean(centred[:, :1] * centred[:, 1:], 0.0)


@pytest.mark.parametrize("family", LOCAL)
def test_an_input_of_zeros_has_finite_gradients(family):
    name = {"GaussianWeights": "gaussian", "CauchyWeights": "cauchy"}[family.__name__]
    model, _ = layer("linear without bias", name)
    x = torch.zeros(2, 4, dtype=torch.float64, requires_grad=True)
    out = model(x)
    assert out.abs().max() < 1e-100
    grads = torch.autograd.grad(out.sum(), [x, model.rho[0], model.model.weight])
    assert all(torch.isfinite(grad).all() for grad in grads)


def test_local_gradients_equal_finite_differences_under_one_seed():
    model, x = layer("linear", "gaussian")

    def value(rho, weight):
        torch.manual_seed(5)
        return functional_call(model, {"rho.0": rho, "model.weight": weight}, (x,))

    leaves = (model.rho[0].detach().requires_grad_(), model.model.weight.detach().requires_grad_())
    assert torch.autograd.gradcheck(value, leaves)


# Rows of embeddings


def test_lower_precision_on_demand():
    model, x = layer("linear", "gaussian")
    model, x = model.float(), x.float()
    with torch.autocast("cpu", torch.bfloat16):
        out = model(x)
    assert out.dtype == torch.bfloat16
    out.sum().backward()
    assert all(torch.isfinite(raw.grad).all() for raw in model.rho)


IDS = torch.tensor([[1, 2, 2], [0, 1, 4]])


def table(family, **options):
    prior = "cauchy(0, 1)" if family == "cauchy" else "normal(0, 1)"
    model = convert(nn.Embedding(5, 3, padding_idx=0).double(), family, prior, rho=-1.0, **options)
    with torch.no_grad():
        for raw in model.rho:
            raw.add_(torch.randn_like(raw))
    return model


def test_rows_of_a_gaussian_embedding_have_their_law_at_every_place():
    model = table("gaussian")
    draws = draw(model, IDS)
    mean, scale = (t.detach()[IDS].flatten() for t in (model.model.weight, model.scales()["weight"]))
    assert_mean(draws, mean)
    assert_mean((draws - mean).square(), scale.square())
    for column in ((draws - mean) / scale).T[::4]:
        assert_law(column, stats.norm.cdf)
    centred = (draws - mean).unflatten(1, (6, 3))
    assert_mean(centred[:, 1] * centred[:, 2], 0.0)  # the same word twice: apart
    assert_mean(centred[:, 1, 0] * centred[:, 1, 1], 0.0)


def test_rows_of_a_cauchy_embedding_have_their_law_at_every_place():
    model = table("cauchy")
    draws = draw(model, IDS)
    mean, scale = (t.detach()[IDS].flatten() for t in (model.model.weight, model.scales()["weight"]))
    for column in ((draws - mean) / scale).T[::4]:
        assert_law(column, stats.cauchy.cdf)
    for quartile in (0.25, 0.5, 0.75):
        assert_mean((draws < mean + scale * stats.cauchy.ppf(quartile)).double(), torch.full_like(mean, quartile))
    same = draws.unflatten(1, (6, 3))
    assert (same[:, 1] != same[:, 2]).all()


@pytest.mark.parametrize("family", ["gaussian", "cauchy"])
def test_rows_give_gradients_to_their_words_and_none_to_padding(family):
    model = table(family)
    model(IDS).square().sum().backward()
    for value in (model.model.weight.grad, model.rho[0].grad):
        assert (value[[1, 2, 4]] != 0).all()
        assert (value[[0, 3]] == 0).all()
    torch.manual_seed(1)
    (ours,) = torch.autograd.grad(model(IDS).sum(), model.model.weight)
    counts = torch.tensor([0, 2, 2, 0, 1], dtype=torch.float64)
    torch.testing.assert_close(ours, counts[:, None].expand(5, 3))


@pytest.mark.parametrize("family", ["gaussian", "cauchy", "laplace", "logistic", "student_t"])
def test_words_share_a_draw_where_weights_are_drawn(family):
    for options in ({"local": False}, {"local": False, "flipout": True}):
        out = table(family, **options)(IDS)
        assert torch.equal(out[0, 1], out[0, 2])
    if family in ("laplace", "logistic", "student_t"):
        out = table(family, local=True)(IDS)
        assert torch.equal(out[0, 1], out[0, 2])


def test_an_embedding_that_does_more_than_look_up_is_drawn_as_weights():
    class Scaled(nn.Embedding):
        def forward(self, input):
            return 2 * super().forward(input)

    patched = nn.Embedding(5, 3)
    patched.forward = partial(nn.Embedding.forward, patched)
    others = [
        Scaled(5, 3),
        patched,
        nn.Embedding(5, 3, max_norm=1.0),
        nn.Embedding(5, 3, sparse=True),
        nn.Embedding(5, 3, scale_grad_by_freq=True),
        nn.EmbeddingBag(5, 3),
    ]
    assert is_table(nn.Embedding(5, 3, padding_idx=1))
    assert not any(is_table(module) for module in others)
    assert convert(others[0], rho=0.0)._layers == []
    out = convert(others[0], rho=0.0)(IDS)
    assert torch.equal(out[0, 1], out[0, 2])


FLIPOUT = ["gaussian", "cauchy", "laplace", "logistic", "student_t"]
STANDARD = {
    "gaussian": stats.norm,
    "cauchy": stats.cauchy,
    "laplace": stats.laplace,
    "logistic": stats.logistic,
    "student_t": stats.t(5),
}


@pytest.mark.parametrize("family", FLIPOUT)
def test_flipout_keeps_the_law_of_one_weight(family):
    prior = "cauchy(0, 1)" if family == "cauchy" else "normal(0, 1)"
    model = convert(nn.Linear(3, 2, bias=False).double(), family, prior, local=False, flipout=True, rho=0.0, df=5.0)
    x = torch.eye(3, dtype=torch.float64)  # each output is one weight
    draws = (draw(model, x) - model.model(x).flatten().detach()) / model.scales()["weight"].mT.flatten().detach()
    for column in draws.T:
        # ν starts within a hundredth of its setting, far below what this test can see
        assert_law(column, STANDARD[family].cdf)


@pytest.mark.parametrize("name", LAYERS)
def test_flipout_keeps_the_joint_law_of_one_example(name):
    """Mean and full covariance of all outputs of an example: its positions share their weights."""
    model, x = layer(name, "laplace", flipout=True)
    mean = model.model(x).detach()
    draws = draw(model, x).unflatten(1, mean.shape)[:, 0].flatten(1)
    first, jacobian = mean[0].flatten(), weights_jacobian(model, x).unflatten(0, mean.shape)[0].flatten(0, -2)
    covariance = (jacobian * (2 * scales(model).square())) @ jacobian.T  # a Laplace has variance 2 s²
    centred = draws - first
    assert_mean(draws, first)
    products = torch.einsum("li,lj->lij", centred, centred).flatten(1)
    structural = covariance.flatten().abs() > 1e-12  # outputs without a common weight; zero up to rounding
    assert_mean(products[:, structural], covariance.flatten()[structural])


@pytest.mark.parametrize("name", LAYERS)
def test_flipout_decorrelates_examples(name):
    model, x = layer(name, "laplace", flipout=True)
    x = x[:1].expand(2, *x.shape[1:])
    variance = weights_jacobian(model, x).square() @ (2 * scales(model).square())
    one, two = (draw(model, x) - model.model(x).flatten().detach()).chunk(2, 1)
    assert_mean(one * two, torch.zeros(one.shape[1]))
    model.flipout = False
    one, two = (draw(model, x) - model.model(x).flatten().detach()).chunk(2, 1)
    assert_mean(one * two, variance.chunk(2)[0])


def test_flipout_flips_inputs_as_well_as_outputs():
    """Given ΔW, two examples of one input share E[d²] = Σ x² ΔW² only: E[d₁² d₂²] = 2 Σ x⁴ s⁴ + (Σ x² s²)²."""
    model, x = layer("linear without bias", "gaussian", local=False, flipout=True)
    x = x[:1].expand(2, 4)
    one, two = (draw(model, x, 40_000) - model.model(x).flatten().detach()).square().chunk(2, 1)
    terms = x[0].square() * model.scales()["weight"].detach().square()  # (outputs, inputs)
    assert_mean(one * two, 2 * terms.square().sum(1) + terms.sum(1).square())


def test_local_takes_precedence_over_flipout_where_it_exists():
    model, x = layer("linear", "gaussian", local=True, flipout=True)
    torch.manual_seed(0)
    both = model(x)
    model.flipout = False
    torch.manual_seed(0)
    assert torch.equal(both, model(x))


def test_an_unbatched_input_flips_features_too():
    for name in ("linear", "conv2d"):
        model, x = layer(name, "laplace", flipout=True)
        draws = draw(model, x[0], 2000)
        assert_mean(draws, model.model(x[0]).flatten().detach())


def test_affine_knows_its_layers_and_no_others():
    class Doubling(nn.Linear):
        def forward(self, input):
            return 2 * super().forward(input)

    assert all(affine(build()) is not None for build, _ in LAYERS.values())
    patched = nn.Linear(2, 2)
    patched.forward = partial(nn.Linear.forward, patched)
    others = [Doubling(2, 2), nn.LayerNorm(2), nn.Embedding(2, 2), nn.ConvTranspose2d(1, 1, 2), patched]
    assert all(affine(module) is None for module in others)


def test_a_replaced_forward_comes_back_even_after_an_error():
    module = nn.Linear(2, 2)

    def stop(x):
        raise RuntimeError("stop")

    with replaced([(module, lambda x: x)]):
        assert module(torch.ones(2)).tolist() == [1, 1]
    with pytest.raises(RuntimeError, match="stop"), replaced([(module, stop)]):
        module(torch.ones(2))
    assert "forward" not in vars(module)

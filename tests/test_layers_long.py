"""Draws and KLs in pieces against the plain formulas: values, gradients, and every order of going backward."""

import copy
from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, vmap

from bayesformer.core import vectors as functional
from bayesformer.layers import FAMILIES, convert, kl_divergence, long
from bayesformer.network import FlatModel
from bayesformer.priors import distributions as laws

MIXED = {"embed.weight": laws.Laplace(0.1, 0.4), "*.bias": laws.StudentT(3, 0, 0.5), "*": laws.Normal(-0.1, 0.7)}
CLOSED = {"embed.weight": laws.Normal(0.2, 0.5), "*": laws.Normal(0, 1)}
IDS = torch.tensor([[1, 2, 2, 0], [4, 1, 0, 0]])


class Text(nn.Module):
    """An embedding, a layer that is called, one whose weight is taken past its forward, and one that is not used."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(6, 5, padding_idx=0)
        self.inner, self.head, self.idle = nn.Linear(5, 7), nn.Linear(7, 3, bias=False), nn.Linear(2, 3)
        self.norm = nn.LayerNorm(5)

    def forward(self, ids):
        return torch.tanh(self.inner(self.norm(self.embed(ids)))) @ self.head.weight.mT


@pytest.fixture
def in_pieces(monkeypatch):
    """A context in which even these small vectors are long: pieces of 16, some parameters of several pieces."""

    @contextmanager
    def context():
        with monkeypatch.context() as patch:
            patch.setattr(functional, "PIECE", 16)
            yield

    return context


def text(family="gaussian", prior=None, **options):
    torch.manual_seed(0)
    prior = prior or ("cauchy(0, 1)" if family == "cauchy" else CLOSED)
    model = convert(Text().double(), family, prior, rho=-1.0, **options)
    with torch.no_grad():
        model.rho.add_(torch.randn_like(model.rho))
        model.model.embed.weight.add_(0.3)
    return model


def outputs_and_gradients(model, loss, seed=1):
    """Loss and its gradient in every parameter, None as zeros."""
    torch.manual_seed(seed)
    value = loss(model)
    grads = torch.autograd.grad(value, list(model.parameters()), allow_unused=True, materialize_grads=True)
    return value.detach(), grads


def assert_equal(one, two):
    torch.testing.assert_close(one[0], two[0])
    for a, b in zip(one[1], two[1], strict=True):
        assert not a.is_sparse
        torch.testing.assert_close(a, b)


def fit(model):
    return model(IDS).square().mean()


def elbo(model):
    return model(IDS).square().mean() + 0.3 * kl_divergence(model)


@pytest.mark.filterwarnings("ignore:the KL of a Cauchy:UserWarning")
@pytest.mark.parametrize("prior", [MIXED, CLOSED, "logistic(0.1, 0.4)", "laplace(0, 0.3)"], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_kl_and_its_gradient_are_those_of_the_plain_formula(family, prior, in_pieces):
    model = text(family, prior)
    plain = outputs_and_gradients(model, kl_divergence)
    with torch.no_grad():
        torch.manual_seed(1)
        quiet = kl_divergence(copy.deepcopy(model))
    for context in (torch.enable_grad, torch.no_grad):
        model = text(family, prior)  # without the noise of the pass before
        with in_pieces(), context():
            assert long.in_pieces(model.rho)
            torch.manual_seed(1)
            torch.testing.assert_close(kl_divergence(model), quiet)
    with in_pieces():
        assert_equal(outputs_and_gradients(text(family, prior), kl_divergence), plain)


def test_the_gaussian_kl_in_pieces_against_its_definition(in_pieces):
    model = text()
    q, total = model.posterior(), 0.0
    for run in model.runs:
        s2, d = q.scale[run.start : run.stop].square(), q.loc[run.start : run.stop] - run.prior.loc
        s02 = torch.tensor(run.prior.scale**2, dtype=torch.float64)
        total = total + 0.5 * ((s2 + d * d) / s02 + s02.log() - s2.log() - 1).sum()
    expected = torch.autograd.grad(total, list(model.parameters()))
    with in_pieces():
        assert_equal(outputs_and_gradients(model, kl_divergence), (total.detach(), expected))


@pytest.mark.parametrize("prior", [CLOSED, MIXED], ids=["closed", "open"])
@pytest.mark.parametrize("loss", [fit, elbo])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_draw_of_weights_is_that_of_the_plain_formula(family, loss, prior, in_pieces):
    prior = laws.Cauchy(0, 1) if family == "cauchy" else prior
    plain = outputs_and_gradients(text(family, prior, local=False), loss)
    with in_pieces():
        assert_equal(outputs_and_gradients(text(family, prior, local=False), loss), plain)


@pytest.mark.parametrize("options", [{}, {"local": False, "flipout": True}], ids=["local", "flipout"])
@pytest.mark.parametrize("prior", [CLOSED, MIXED], ids=["closed", "open"])
@pytest.mark.parametrize("loss", [fit, elbo])
@pytest.mark.parametrize("family", ["gaussian", "cauchy"])
def test_a_local_draw_is_that_of_the_plain_formula(family, loss, prior, options, in_pieces):
    prior = laws.Cauchy(0, 1) if family == "cauchy" else prior
    plain = outputs_and_gradients(text(family, prior, **options), loss)
    with in_pieces():
        assert_equal(outputs_and_gradients(text(family, prior, **options), loss), plain)


@pytest.mark.parametrize("local", [True, False])
def test_likelihood_and_kl_may_go_backward_in_any_order_and_often(local, in_pieces):
    expected = outputs_and_gradients(text(local=local), elbo)[1]

    def gradients(steps):
        model = text(local=local)
        torch.manual_seed(1)
        parts = {"fit": model(IDS).square().mean(), "kl": 0.3 * kl_divergence(model)}
        steps(parts)
        return [p.grad for p in model.parameters()]

    def twice(parts):
        (parts["fit"] + parts["kl"]).backward(retain_graph=True)
        (parts["fit"] + parts["kl"]).backward()

    orders = {
        "together": lambda parts: (parts["fit"] + parts["kl"]).backward(),
        "kl first": lambda parts: (parts["kl"].backward(), parts["fit"].backward()),
        "kl last": lambda parts: (parts["fit"].backward(), parts["kl"].backward()),
        "twice": twice,
    }
    for name, steps in orders.items():
        with in_pieces():
            found = gradients(steps)
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a / (2 if name == "twice" else 1), b, msg=name)


def test_two_kls_of_one_pass_add_up(in_pieces):
    expected = outputs_and_gradients(text(), lambda m: fit(m) + 0.3 * kl_divergence(m) + kl_divergence(m).square())
    with in_pieces():
        found = outputs_and_gradients(text(), lambda m: fit(m) + 0.3 * kl_divergence(m) + kl_divergence(m).square())
    assert_equal(found, expected)


def test_gradients_go_into_the_flat_vector_and_sparse_ones_never_leave(in_pieces):
    model = text()
    torch.manual_seed(1)
    elbo(model).backward()
    expected = torch.cat([p.grad.reshape(-1) for p in model.parameters()])
    with in_pieces():
        flat = FlatModel(text())
        torch.manual_seed(1)
        elbo(flat.module).backward()
        torch.testing.assert_close(flat.grad, expected)
        alone = text()
        fit(alone).backward()  # no KL, no gradient yet
        assert not alone.model.embed.weight.grad.is_sparse
        assert (alone.model.embed.weight.grad[[0, 3, 5]] == 0).all()  # padding, and words that do not occur
        assert (alone.model.embed.weight.grad[[1, 2, 4]] != 0).all()


def test_a_kl_after_other_weights_were_loaded_is_of_these(in_pieces):
    model, other = text(), text()
    with torch.no_grad():
        other.rho.mul_(2)
        other.model.embed.weight.mul_(2)
    expected = outputs_and_gradients(other, kl_divergence)
    with in_pieces():
        model(IDS)
        model.rho.data, model.model.embed.weight.data = other.rho.data, other.model.embed.weight.data
        assert_equal(outputs_and_gradients(model, kl_divergence), expected)
        model(IDS)
        model.load_state_dict(text().state_dict())
        in_place = outputs_and_gradients(model, kl_divergence)
    assert_equal(in_place, outputs_and_gradients(text(), kl_divergence))


def test_a_change_between_forward_and_backward_raises(in_pieces):
    with in_pieces():
        model = text(local=False)
        loss = fit(model)
        with torch.no_grad():
            model.rho.add_(1)
        with pytest.raises(RuntimeError, match="changed in place between a forward pass and its backward pass"):
            loss.backward()


@pytest.mark.parametrize("loss", [kl_divergence, fit])
@pytest.mark.parametrize("local", [True, False])
def test_gradients_of_gradients_raise_and_are_not_wrong(local, loss, in_pieces):
    with in_pieces():
        model = text(local=local)
        with pytest.raises(RuntimeError, match="has first derivatives only under torch.autograd"):
            torch.autograd.grad(loss(model), model.rho, create_graph=True)


@pytest.mark.parametrize("local", [True, False])
def test_transforms_take_the_plain_formulas(local, in_pieces):
    model = text(local=local)
    many = {name: p.detach() + torch.randn(3, *p.shape) for name, p in model.named_parameters()}

    def value(params):
        return functional_call(model, params, (IDS,)).square().mean() + kl_divergence(model, params)

    results = []
    for context in (in_pieces, torch.enable_grad):
        torch.manual_seed(5)
        with context():
            results.append(vmap(grad(value), randomness="different")(many))
    assert all(torch.equal(results[0][name], results[1][name]) for name in many)
    lent = {name: value[0].requires_grad_() for name, value in many.items()}
    gradients = []
    for context in (in_pieces, torch.enable_grad):  # lent without a transform: in pieces
        torch.manual_seed(5)
        with context():
            gradients.append(torch.autograd.grad(value(lent), list(lent.values()), materialize_grads=True))
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("local", [True, False])
def test_quiet_passes_leave_nothing_for_a_kl_with_gradients(local, context, in_pieces):
    model = text(local=local)
    expected = outputs_and_gradients(model, kl_divergence)
    with in_pieces():
        with context():
            assert torch.isfinite(model(IDS)).all()
            torch.testing.assert_close(kl_divergence(model), expected[0])
            model(IDS)
        assert_equal(outputs_and_gradients(model, kl_divergence), expected)


def test_the_stream_of_normals_does_not_depend_on_pieces(in_pieces):
    rho = torch.zeros(112)  # a generator of normals works in blocks of 16
    torch.manual_seed(3)
    whole = long.noise(FAMILIES["gaussian"], [rho])
    torch.manual_seed(3)
    with in_pieces():
        assert torch.equal(long.noise(FAMILIES["gaussian"], [rho]), whole)

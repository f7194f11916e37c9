"""Curvature products against dense matrices by autograd, conjugate gradients and power iteration against LAPACK."""

import pytest
import torch
from torch import nn
from torch.func import functional_call, hessian, jacrev

import bayesformer as bf
from bayesformer.data import as_batches
from bayesformer.model.space import Space
from tests.nets import Mlp


class Attending(nn.Module):
    """One layer of torch's own encoder over a sequence, classes at every position."""

    def __init__(self):
        super().__init__()
        self.inner = nn.TransformerEncoderLayer(4, 2, 6, dropout=0.1, batch_first=True)
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.inner(x))


def case(kind):
    """(model, data, likelihood) in float64, 7 examples in batches of 3 of different sizes."""
    source = torch.Generator("cpu").manual_seed(3)
    torch.manual_seed(1)
    x = torch.randn(7, 3, dtype=torch.float64, generator=source)
    labels = torch.randint(3, (7,), generator=source)
    if kind == "classes":
        return Mlp(3, 4, 3, dropout=0.2).double(), (x, labels), bf.Categorical()
    if kind == "numbers":
        return Mlp(3, 4, 1).double(), (x, torch.randn(7, 1, dtype=torch.float64, generator=source)), bf.Gaussian(0.3)
    if kind == "counts":
        return Mlp(3, 4, 1).double(), (x, torch.randint(5, (7, 1), generator=source)), bf.Poisson()
    x = torch.randn(7, 5, 4, dtype=torch.float64, generator=source)
    labels = torch.randint(3, (7, 5), generator=source)
    labels[2, 3:] = -100
    mask = torch.rand(7, 5, generator=source) < 0.7
    return Attending().double(), (x, labels, mask), bf.Categorical(aligned=True)


class Dense:
    """The same matrices written down, by reverse and forward differentiation of the whole data at once."""

    def __init__(self, model, data, likelihood):
        self.model, self.space = model.eval(), Space.of(model)
        self.batch, self.likelihood = as_batches(data, "data").first(99), likelihood
        self.theta = self.space.pack(dict(model.named_parameters()))

    def outputs(self, theta):
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            return functional_call(self.model, self.space.views(theta), (self.batch.inputs,))

    def log_prob(self, theta):
        return self.likelihood.log_prob(self.outputs(theta), self.batch.targets, self.batch.mask)

    def jacobian(self):
        return jacrev(self.outputs)(self.theta)

    def fisher(self):
        rows = jacrev(self.log_prob)(self.theta)
        return rows.mT @ rows

    def hessian(self):
        """By torch.autograd: torch.func's own differs from finite differences in the gains of a LayerNorm."""
        return torch.autograd.functional.hessian(lambda t: -self.log_prob(t).sum(), self.theta)

    def ggn(self):
        """The Hessian in the outputs by autograd: it equals the information of these likelihoods at any target."""
        f, jacobian = self.outputs(self.theta).detach(), self.jacobian().flatten(0, -2)

        def log_prob(flat):
            return -self.likelihood.log_prob(flat.view(f.shape), self.batch.targets, self.batch.mask).sum()

        return jacobian.mT @ hessian(log_prob)(f.flatten()) @ jacobian


@pytest.mark.parametrize("kind", ["classes", "numbers", "counts", "tokens"])
def test_products_are_those_of_the_dense_matrices(kind):
    model, data, likelihood = case(kind)
    dense = Dense(model, data, likelihood)
    products = bf.curvature_products(model, data, likelihood=likelihood, batch_size=3)
    v = torch.randn(products.size, dtype=torch.float64, generator=torch.Generator("cpu").manual_seed(0))
    torch.testing.assert_close(products.fisher(v), dense.fisher() @ v)
    torch.testing.assert_close(products.hessian(v), dense.hessian() @ v)
    torch.testing.assert_close(products.ggn(v), dense.ggn() @ v)
    torch.testing.assert_close(products.gradient(), jacrev(lambda t: dense.log_prob(t).sum())(dense.theta))
    linear = dense.outputs(dense.theta) + dense.jacobian() @ v
    torch.testing.assert_close(products.linearised(data[0], v), linear)


def test_gauss_newton_with_a_heteroscedastic_gaussian_is_positive():
    x, y = torch.randn(6, 3), torch.randn(6, 1)
    products = bf.curvature_products(Mlp(3, 4, 2), (x, y), likelihood=bf.Gaussian(None), batch_size=4)
    columns = torch.stack([products.ggn(e) for e in torch.eye(products.size)])
    torch.testing.assert_close(columns, columns.mT, rtol=1e-4, atol=1e-4)
    assert torch.linalg.eigvalsh(columns.double()).min() > -1e-3


def test_of_a_posterior_they_are_at_its_mean():
    x, y = torch.randn(20, 3), torch.randint(2, (20,))
    model = Mlp()
    posterior = bf.fit(model, (x, y), likelihood="categorical", method="map", training=bf.Training(epochs=2))
    products = bf.curvature_products(posterior, (x, y))
    assert torch.equal(products.theta, posterior.law.mean)
    moved = bf.curvature_products(model, (x, y), likelihood="categorical").at(posterior.law.mean)
    v = torch.ones(products.size)
    torch.testing.assert_close(products.ggn(v), moved.ggn(v))
    before = [p.detach().clone() for p in model.parameters()]
    products.at(torch.zeros(products.size)).hessian(v)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert all(p.grad is None for p in model.parameters())


def test_frozen_weights_are_not_differentiated_in():
    x, y = torch.randn(8, 3), torch.randint(2, (8,))
    model = Mlp()
    part = bf.curvature_products(model, (x, y), likelihood="categorical", infer="net.3.*")
    whole = bf.curvature_products(model, (x, y), likelihood="categorical")
    v = torch.zeros(whole.size)
    v[-part.size :] = torch.randn(part.size)
    torch.testing.assert_close(part.ggn(v[-part.size :]), whole.ggn(v)[-part.size :])


def test_errors_of_products():
    x, y = torch.randn(8, 3), torch.randint(2, (8,))
    products = bf.curvature_products(Mlp(), (x, y), likelihood="categorical")
    with pytest.raises(ValueError, match=r"v must be a vector of 50 numbers, one per weight; got \(3,\)"):
        products.ggn(torch.zeros(3))
    with pytest.raises(ValueError, match="likelihood must be given for a model"):
        bf.curvature_products(Mlp(), (x, y))
    posterior = bf.fit(Mlp(), (x, y), likelihood="categorical", training=bf.Training(epochs=1))
    with pytest.raises(ValueError, match="must be left out for a posterior"):
        bf.curvature_products(posterior, (x, y), likelihood="categorical")


def spectrum(values, seed=0):
    """A symmetric matrix with these eigenvalues."""
    source = torch.Generator("cpu").manual_seed(seed)
    basis, _ = torch.linalg.qr(torch.randn(len(values), len(values), dtype=torch.float64, generator=source))
    return basis @ torch.diag(torch.as_tensor(values, dtype=torch.float64)) @ basis.mT


def test_conjugate_gradients_solve_in_as_many_steps_as_there_are_eigenvalues():
    matrix = spectrum([1.0, 1, 1, 7, 7, 1000, 1000, 1000])
    b = torch.arange(1.0, 9, dtype=torch.float64)
    found = bf.conjugate_gradients(lambda v: matrix @ v, b, tolerance=1e-10)
    assert found.converged
    assert found.iterations == 3  # distinct eigenvalues
    torch.testing.assert_close(found.x, torch.linalg.solve(matrix, b))
    preconditioned = bf.conjugate_gradients(
        lambda v: matrix @ v, b, tolerance=1e-10, precondition=lambda v: torch.linalg.solve(matrix, v)
    )
    assert preconditioned.iterations == 1
    torch.testing.assert_close(preconditioned.x, found.x)
    warm = bf.conjugate_gradients(lambda v: matrix @ v, b, start=found.x)
    assert warm.iterations == 0
    assert warm.converged


def test_conjugate_gradients_stop_at_curvature_that_is_not_positive():
    matrix = torch.diag(torch.tensor([1.0, -1]))
    found = bf.conjugate_gradients(lambda v: matrix @ v, torch.tensor([0.1, 1]))
    assert not found.positive
    assert not found.converged
    short = bf.conjugate_gradients(lambda v: spectrum([1.0, 5, 80, 900]).float() @ v, torch.ones(4), iterations=2)
    assert short.iterations == 2
    assert short.positive
    assert not short.converged
    zero = bf.conjugate_gradients(lambda v: v, torch.zeros(3))
    assert zero.converged
    assert torch.equal(zero.x, torch.zeros(3))


def test_power_iteration_finds_the_largest_eigenvalue():
    matrix = spectrum([0.0, 1, 2, 5, 40, 100])
    found = bf.power_iteration(lambda v: matrix @ v, matrix[0], iterations=100, tolerance=1e-8)
    assert found.converged
    assert found.value == pytest.approx(100)
    torch.testing.assert_close(matrix @ found.vector, 100 * found.vector)
    rough = bf.power_iteration(lambda v: matrix @ v, matrix[0], tolerance=0.1)
    assert rough.iterations < found.iterations
    assert 90 <= rough.value <= 100
    assert bf.power_iteration(lambda v: matrix @ v, matrix[0], start=3 * found.vector).iterations == 1
    assert bf.power_iteration(torch.zeros_like, matrix[0]).value == 0


def test_power_iteration_with_gauss_newton_products_of_a_network():
    model, data, likelihood = case("tokens")
    products = bf.curvature_products(model, data, likelihood=likelihood)
    found = bf.power_iteration(products.ggn, products.theta, iterations=200, tolerance=1e-4)
    assert found.value == pytest.approx(float(torch.linalg.eigvalsh(Dense(model, data, likelihood).ggn())[-1]), 1e-4)

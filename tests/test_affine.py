"""Affine coordinates: the same algorithm on the transformed problem, and results that come back in θ."""

import pytest
import torch

from bayesformer.core.draws import drawing_from
from bayesformer.core.types import Batch
from bayesformer.core.vectors import THETA
from bayesformer.inference import baoab, optimise, sghmc, sgld, vi_dense, vi_diag
from bayesformer.inference.affine import affine
from bayesformer.laws import Dense, Deviations, Diagonal, GaussianLaw, Kronecker, LowRank, Samples, gaussian
from bayesformer.likelihoods import Categorical
from bayesformer.model.skeleton import Skeleton
from bayesformer.model.space import Space
from bayesformer.train.objective import Objective
from tests.nets import Mlp

P = 6
EMPTY = Batch(torch.zeros(1), torch.zeros(1))
make = {"dtype": torch.float64}


def quadratic(precision, mean):
    """U(θ) = -½ (θ - m)ᵀ Λ (θ - m), for one member or several in rows."""

    def joint(params, batch):
        away = params[THETA] - mean
        return -0.5 * ((away @ precision) * away).sum(-1), torch.zeros(())

    class WithGradient:
        def __call__(self, params, batch):
            return joint(params, batch)

        def value_and_grad(self, params, batch):
            return *joint(params, batch), {THETA: -(params[THETA] - mean) @ precision}

    return WithGradient()


def problem():
    root = torch.randn(P, P, **make)
    return root @ root.T + 0.5 * torch.eye(P, **make), torch.randn(P, **make)


def roots():
    """(root as given, the same as a matrix (P, Q)) of every kind."""
    scale = torch.rand(P, **make) + 0.2
    tril = torch.randn(P, P, **make).tril() + 2 * torch.eye(P, **make)
    block = Deviations(scale, torch.randn(2, P, **make))
    out, inner = torch.rand(2, **make) + 0.5, torch.rand(3, **make) + 0.5
    turn = torch.linalg.qr(torch.randn(3, 3, **make)).Q
    return {
        "diagonal": (scale, scale.diag()),
        "triangular": (tril, tril),
        "dense block": (Dense(tril), tril),
        "block with more noise than weights": (block, torch.cat([scale.diag(), block.factor.T], 1)),
        "kronecker block": (kron := Kronecker(out, inner, torch.tensor(0.3, **make), None, turn), matrix_of(kron)),
    }


def matrix_of(block):
    return block.colour(torch.eye(block.size, **make)).T


KINDS = ["diagonal", "triangular", "dense block", "block with more noise than weights", "kronecker block"]


@pytest.mark.parametrize("rows", [(), (3,)])
@pytest.mark.parametrize("kind", KINDS)
def test_value_and_gradient_are_those_of_the_composed_function(kind, rows):
    (precision, mean), center = problem(), torch.randn(P, **make)
    given, matrix = roots()[kind]
    found = affine(quadratic(precision, mean), center, given)
    assert found.size == matrix.shape[1]
    phi = torch.randn(*rows, matrix.shape[1], **make).requires_grad_()
    away = center + phi @ matrix.T - mean
    expected = -0.5 * ((away @ precision) * away).sum(-1)
    (slope,) = torch.autograd.grad(expected.sum(), phi)
    value, _, grads = found.value_and_grad({THETA: phi.detach()}, EMPTY)
    torch.testing.assert_close(value, expected.detach())
    torch.testing.assert_close(found({THETA: phi.detach()}, EMPTY)[0], expected.detach())
    torch.testing.assert_close(grads[THETA], slope)
    torch.testing.assert_close(found.to_theta(found.origin(*rows)), center.expand(*rows, P))


ALGORITHMS = {
    "sgld": lambda joint: sgld.build(joint, 0.05, 0.1),
    "sghmc": lambda joint: sghmc.build(joint, 0.05, 0.1, 2.0),
    "baoab": lambda joint: baoab.build(joint, 0.05, 0.1, 2.0),
    "vi diagonal": lambda joint: vi_diag.build(joint, 0.1, optimise.Adam(0.05)),
    "vi dense": lambda joint: vi_dense.build(joint, 0.1, optimise.Adam(0.05)),
    "adam": lambda joint: optimise.build(joint, optimise.Adam(0.05), 1.0),
}


@pytest.mark.parametrize("rows", [(), (3,)])
@pytest.mark.parametrize("kind", ["diagonal", "triangular"])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_takes_the_path_of_the_transformed_problem(name, kind, rows):
    """Against the quadratic that is written in φ by hand: Λ' = Rᵀ Λ R around R⁻¹ (m - c)."""
    (precision, mean), center = problem(), torch.randn(P, **make)
    given, matrix = roots()[kind]
    by_hand = quadratic(matrix.T @ precision @ matrix, torch.linalg.solve(matrix, mean - center))
    paths = []
    for joint in (affine(quadratic(precision, mean), center, given), by_hand):
        transform = ALGORITHMS[name](joint)
        state = transform.init({THETA: torch.zeros(*rows, P, **make)})
        generators = [torch.Generator().manual_seed(row) for row in range(*rows or (1,))]
        with drawing_from(generators):
            for _ in range(20):
                state, _ = transform.update(state, EMPTY, inplace=True)
        paths.append(state.params[THETA])
    torch.testing.assert_close(paths[0], paths[1], atol=1e-10, rtol=1e-8)
    assert paths[0].abs().min() > 0


def test_langevin_steps_are_preconditioned_ones():
    """θ ← θ + η R Rᵀ ∇U + √(2 T η) R z."""
    (precision, mean), center = problem(), torch.randn(P, **make)
    tril = roots()["triangular"][1]
    found = affine(quadratic(precision, mean), center, tril)
    transform = sgld.build(found, 0.03, 0.2)
    phi = torch.randn(P, **make)
    with drawing_from(torch.Generator().manual_seed(1)):
        state, _ = transform.update(transform.init({THETA: phi}), EMPTY)
    noise = torch.empty(P, **make).normal_(generator=torch.Generator().manual_seed(1))
    theta = center + tril @ phi
    expected = theta + 0.03 * tril @ tril.T @ precision @ (mean - theta) + (2 * 0.2 * 0.03) ** 0.5 * tril @ noise
    torch.testing.assert_close(found.to_theta(state.params[THETA]), expected)


def laws():
    """A Gaussian over φ of every kind, with its covariance."""
    sd, factor = torch.rand(P, **make) + 0.3, torch.randn(2, P, **make)
    tril = torch.randn(P, P, **make).tril() + 2 * torch.eye(P, **make)
    columns, values = torch.randn(P, 2, **make), torch.tensor([3.0, 0.5], **make)
    kron = Kronecker(torch.tensor([1.0, 2.0], **make), torch.tensor([0.5, 0.1, 3.0], **make), torch.tensor(0.7, **make))
    yield gaussian(torch.randn(P, **make), sd)
    yield gaussian(torch.randn(P, **make), sd, factor)
    yield gaussian(torch.randn(P, **make), tril=tril)
    everywhere = (slice(0, P),)
    yield GaussianLaw(torch.randn(P, **make), everywhere, (LowRank.of(1 / sd.square(), columns, values),))
    yield GaussianLaw(torch.randn(P, **make), everywhere, (kron,))
    places = (torch.tensor([4, 0]), slice(1, 3))
    blocks = (Dense(tril[:2, :2].contiguous()), Diagonal(sd[:2].square()))
    yield GaussianLaw(torch.randn(P, **make), places, blocks, {"count": torch.ones(1)})


def covariance_of(law):
    whole = torch.zeros(law.size, law.size, **make)
    for place, block in zip(law.places, law.blocks, strict=True):
        index = torch.arange(law.size)[place]
        whole[index[:, None], index] = block.times(torch.eye(block.size, **make))
    return whole


@pytest.mark.parametrize("kind", ["diagonal", "triangular"])
@pytest.mark.parametrize("number", range(6))
def test_gaussians_come_back_exactly(number, kind):
    """Mean c + R m, covariance R S Rᵀ; buffers stay."""
    center, (given, matrix) = torch.randn(P, **make), roots()[kind]
    law = list(laws())[number]
    found = affine(quadratic(*problem()), center, given).to_theta(law)
    torch.testing.assert_close(found.mean, center + matrix @ law.mean)
    torch.testing.assert_close(covariance_of(found), matrix @ covariance_of(law) @ matrix.T)
    assert found.buffers == law.buffers
    if kind == "diagonal" and number != 4:
        assert [type(block) for block in found.blocks] == [type(block) for block in law.blocks]


def test_a_block_with_more_noise_than_weights_gives_its_covariance_back():
    given, matrix = roots()["block with more noise than weights"]
    law = gaussian(torch.zeros(P + 2, **make), torch.ones(P + 2, **make))
    found = affine(quadratic(*problem()), torch.zeros(P, **make), given).to_theta(law)
    torch.testing.assert_close(covariance_of(found), matrix @ matrix.T)
    torch.testing.assert_close(covariance_of(found), given.times(torch.eye(P, **make)))


def test_variational_inference_in_white_coordinates_is_exact_at_once():
    """With R the Cholesky factor of T Λ⁻¹ the optimum in φ is N(0, I): a diagonal family finds a full covariance."""
    (precision, mean), heat = problem(), 0.1
    tril = torch.linalg.cholesky(heat * torch.linalg.inv(precision))
    found = affine(quadratic(precision, mean), mean, tril)
    transform = vi_diag.build(found, heat, optimise.Adam(0.1), log_sd=0.0)
    state = transform.init({THETA: found.origin()})
    state, _ = transform.update(state, EMPTY)  # the gradient is 0 for every draw: nothing moves
    law = found.to_theta(vi_diag.law(state))
    torch.testing.assert_close(law.mean, mean, atol=1e-7, rtol=1e-6)
    torch.testing.assert_close(covariance_of(law), heat * torch.linalg.inv(precision), atol=1e-6, rtol=1e-5)


def test_samples_come_back_row_by_row():
    center, (given, matrix) = torch.randn(P, **make), roots()["triangular"]
    phi = torch.randn(4, P, **make)
    found = affine(quadratic(*problem()), center, given).to_theta(Samples(phi, {"a": torch.ones(4)}))
    torch.testing.assert_close(found.theta, center + phi @ matrix.T)
    assert found.buffers["a"].shape == (4,)


def test_it_runs_on_the_objective_of_a_network():
    model = Mlp().double()
    shell = Skeleton(model, Space.of(model)).shell()
    objective = Objective(shell, Categorical(), 6)
    center, scale = shell.theta.clone(), torch.rand(len(shell.theta), **make) + 0.5
    found = affine(objective, center, scale)
    batch = Batch(torch.randn(6, 3, **make), torch.arange(6) % 2)
    phi = 0.1 * torch.randn_like(center)
    value, outputs, grads = found.value_and_grad({THETA: phi}, batch)
    expected = objective.value_and_grad({THETA: center + scale * phi}, batch)
    torch.testing.assert_close(value, expected[0])
    torch.testing.assert_close(outputs, expected[1])
    torch.testing.assert_close(grads[THETA], scale * expected[2][THETA])


def test_wrong_roots_are_named():
    joint = quadratic(*problem())
    with pytest.raises(ValueError, match=r"root must be a scale per weight \(6,\).* got \(5,\)"):
        affine(joint, torch.zeros(P), torch.ones(5))
    with pytest.raises(ValueError, match=r"got \(6, 6\), not lower triangular"):
        affine(joint, torch.zeros(P), torch.ones(P, P))
    with pytest.raises(ValueError, match="root must be positive where it is a scale per weight; got 0.0"):
        affine(joint, torch.zeros(P), torch.zeros(P))

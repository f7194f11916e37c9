"""Every form of a covariance and of a curvature against the dense matrix it stands for."""

import pytest
import torch

from bayesformer.laplace.structures import (
    DenseCurvature,
    DiagonalCurvature,
    KroneckerCurvature,
    LowRankCurvature,
)
from bayesformer.laws import Eigenbasis, GaussianLaw, from_tensors

PRIOR, SCALE = torch.tensor(0.7, dtype=torch.float64), 1.3


def positive(size):
    root = torch.randn(size, size, dtype=torch.float64)
    return root @ root.mT


def structures():
    torch.manual_seed(0)
    out, into = positive(3), positive(4)
    full = KroneckerCurvature.of(out, into)
    values, vectors = torch.linalg.eigh(positive(12))
    return {
        "diagonal": DiagonalCurvature(torch.rand(12, dtype=torch.float64)),
        "dense": DenseCurvature(positive(12)),
        "low rank": LowRankCurvature(vectors[:, 8:], values[8:]),
        "kronecker": full,
        "kronecker, diagonal out": KroneckerCurvature.of(out.diagonal(), into),
        "kronecker, diagonal in": KroneckerCurvature.of(out, into.diagonal()),
        "kronecker, low rank out": KroneckerCurvature(
            full.out_values[1:], full.in_values, full.out_vectors[:, 1:], full.in_vectors
        ),
        "kronecker, low rank both": KroneckerCurvature(
            full.out_values[1:], full.in_values[2:], full.out_vectors[:, 1:], full.in_vectors[:, 2:]
        ),
    }


@pytest.mark.parametrize("name", structures())
def test_a_structure_and_its_posterior_are_the_dense_matrices(name):
    structure = structures()[name]
    matrix, eye = structure.dense(), torch.eye(12, dtype=torch.float64)
    torch.testing.assert_close(structure.diagonal(), matrix.diagonal())
    precision = SCALE * matrix + PRIOR * eye
    covariance = precision.inverse()
    block = structure.posterior(PRIOR, SCALE)
    assert block.size == structure.size == 12
    torch.testing.assert_close(block.times(eye), covariance)
    torch.testing.assert_close(block.diagonal(), covariance.diagonal())
    root = block.colour(eye)
    torch.testing.assert_close(root.mT @ root, covariance)
    torch.testing.assert_close(structure.log_det(PRIOR, SCALE), precision.logdet())


@pytest.mark.parametrize("name", structures())
def test_the_log_determinant_has_the_right_slope_in_the_prior(name):
    structure = structures()[name]
    prior = PRIOR.clone().requires_grad_()
    structure.log_det(prior, SCALE).backward()
    trace = structure.posterior(PRIOR, SCALE).diagonal().sum()
    torch.testing.assert_close(prior.grad, trace)


@pytest.mark.parametrize("name", ["diagonal", "dense", "low rank"])
def test_a_prior_per_weight(name):
    structure, priors = structures()[name], torch.linspace(0.1, 2, 12, dtype=torch.float64)
    precision = SCALE * structure.dense() + priors.diag()
    eye = torch.eye(12, dtype=torch.float64)
    torch.testing.assert_close(structure.posterior(priors, SCALE).times(eye), precision.inverse())
    torch.testing.assert_close(structure.log_det(priors, SCALE), precision.logdet())


def test_a_kronecker_block_refuses_a_prior_per_weight():
    with pytest.raises(ValueError, match="one number per parameter; got 12"):
        structures()["kronecker"].posterior(torch.ones(12))


def test_rows_have_the_blocks_covariance_and_weights_outside_none():
    forms = structures()
    blocks = (forms["kronecker, low rank both"].posterior(PRIOR), forms["dense"].posterior(PRIOR))
    places = (slice(0, 12), torch.arange(25, 13, -1))
    law = GaussianLaw(torch.arange(30.0, dtype=torch.float64), places, blocks)
    rows = law.rows(4000, seed=3) - law.mean
    torch.testing.assert_close(law.variance()[places[1]], blocks[1].diagonal())
    covariance = rows.mT @ rows / len(rows)
    expected = torch.zeros(30, 30, dtype=torch.float64)
    expected[:12, :12] = blocks[0].times(torch.eye(12, dtype=torch.float64))
    expected[places[1][:, None], places[1]] = blocks[1].times(torch.eye(12, dtype=torch.float64))
    # The standard error of an entry is at most sqrt(2 v_i v_j / n).
    spread = expected.diagonal().sqrt()
    assert ((covariance - expected).abs() <= 5 * (2 / 4000) ** 0.5 * torch.outer(spread, spread)).all()
    assert torch.equal(law.rows(2, seed=3), law.rows(4, seed=3)[:2])


def test_a_saved_law_is_the_same_law():
    forms = structures()
    blocks = tuple(forms[name].posterior(PRIOR) for name in forms)
    places = (*(slice(12 * i, 12 * i + 12) for i in range(7)), torch.arange(84, 96))
    law = GaussianLaw(torch.randn(96, dtype=torch.float64), places, blocks)
    assert torch.equal(from_tensors(law.tensors()).rows(3, seed=1), law.rows(3, seed=1))


@pytest.mark.parametrize("bases", ["both", "in", "out"])
def test_a_variance_per_pair_of_eigenvectors_is_the_dense_matrix(bases):
    torch.manual_seed(1)
    eye = torch.eye(12, dtype=torch.float64)
    out = torch.linalg.qr(torch.randn(3, 3, dtype=torch.float64)).Q if bases != "in" else None
    into = torch.linalg.qr(torch.randn(4, 4, dtype=torch.float64)).Q if bases != "out" else None
    block = Eigenbasis(torch.rand(3, 4, dtype=torch.float64) + 0.1, out, into)
    factors = [eye[:n, :n] if q is None else q for n, q in ((3, out), (4, into))]
    basis = torch.kron(*(q.contiguous() for q in factors))
    precision = basis @ block.precisions.flatten().diag() @ basis.mT
    covariance = precision.inverse()
    assert block.size == 12
    assert block.complete
    torch.testing.assert_close(block.times(eye), covariance)
    torch.testing.assert_close(block.precision_times(eye), precision)
    torch.testing.assert_close(block.diagonal(), covariance.diagonal())
    torch.testing.assert_close(block.log_det_precision(), precision.logdet())
    coloured = block.colour(eye)  # rows are the columns of the root Q D^-½
    torch.testing.assert_close(coloured.mT @ coloured, covariance)
    torch.testing.assert_close(block.times_root(eye), coloured.mT)
    torch.testing.assert_close(coloured, (basis * block.precisions.flatten().rsqrt()).mT)
    law = GaussianLaw(torch.randn(12, dtype=torch.float64), (slice(0, 12),), (block,))
    assert torch.equal(from_tensors(law.tensors()).rows(3, seed=1), law.rows(3, seed=1))

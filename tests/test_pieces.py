"""Long vectors worked on piece by piece: the same numbers as in one go."""

import pytest
import torch

from bayesformer.core import vectors as functional
from bayesformer.core.types import Batch
from bayesformer.core.vectors import THETA, pieces
from bayesformer.inference import baoab, ivon, optimise, sghmc, sgld, vi_diag
from bayesformer.likelihoods import Categorical
from bayesformer.priors.prior import as_prior
from bayesformer.train.objective import Objective
from bayesformer.train.vector_prior import NamedPrior
from tests.nets import Mlp, shell_of

ALGORITHMS = {
    "vi": lambda joint: vi_diag.build(joint, 0.01, clip=1.0),
    "vi, plain gradient": lambda joint: vi_diag.build(joint, 0.01, stl=False),
    "ivon": lambda joint: ivon.build(joint, 0.1, 100.0, weight_decay=0.01, clip_radius=0.1),
    "sghmc": lambda joint: sghmc.build(joint, 0.01, 0.01, 5.0),
    "baoab": lambda joint: baoab.build(joint, 0.01, 0.01, 5.0),
    "sgld": lambda joint: sgld.build(joint, 0.01, 0.01),
    "adam": lambda joint: optimise.build(joint, clip=0.1),
}


def run(build, steps=3, inplace=True):
    torch.manual_seed(0)
    flat = shell_of(Mlp(hidden=37).double())
    assert flat.space.size == 224
    batch = Batch(torch.randn(6, 3, dtype=torch.float64), torch.tensor([0, 1, 1, 0, 0, 1]))
    joint = Objective(flat, Categorical(), 6, NamedPrior(as_prior("student_t(4, 0, 1)"), flat.space))
    transform = build(joint)
    state = transform.init({THETA: flat.theta})
    torch.manual_seed(1)
    for _ in range(steps):
        state, _ = transform.update(state, batch, inplace=inplace)
    return state.params[THETA].clone(), state.log_joint.clone()


@pytest.mark.parametrize("name", ALGORITHMS)
def test_pieces_change_nothing(name, monkeypatch):
    # Noise comes in blocks of 16 numbers, so that pieces of a multiple of 16 draw the same stream.
    whole = run(ALGORITHMS[name])
    monkeypatch.setattr(functional, "PIECE", 64)
    for part, expected in zip(run(ALGORITHMS[name]), whole, strict=True):
        torch.testing.assert_close(part, expected, rtol=1e-10, atol=1e-12)
    for part, expected in zip(run(ALGORITHMS[name], inplace=False), whole, strict=True):
        torch.testing.assert_close(part, expected, rtol=1e-10, atol=1e-12)


def test_pieces_cover_a_vector_once(monkeypatch):
    monkeypatch.setattr(functional, "PIECE", 64)
    a, b = torch.zeros(150), torch.arange(150.0)
    sizes = []
    for x, y in pieces(a, b):
        x.add_(y)
        sizes.append(len(x))
    assert sizes == [64, 64, 22]
    assert torch.equal(a, b)
    assert len(list(pieces(torch.zeros(3, 150)))) == 1

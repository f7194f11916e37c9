"""An earlier Gaussian posterior as the prior of a Laplace fit: exact on linear models, refused where nothing fits."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import bayesformer as bf
from bayesformer.laplace.absorb import absorb
from bayesformer.laplace.combining import combine
from bayesformer.laplace.estimate import Curvature, estimate
from bayesformer.laplace.structures import (
    DenseCurvature,
    DiagonalCurvature,
    KroneckerCurvature,
    LowRankCurvature,
)
from bayesformer.laws import Dense, Deviations, Diagonal, GaussianLaw, Kronecker, LowRank
from tests.nets import Mlp, blobs

F64 = torch.float64
FAST = bf.Training(epochs=4, batch_size=16, lr=0.02, warmup=5)
SIGMA, D = 0.5, 0.8


def positive(size):
    root = torch.randn(size, size, dtype=F64)
    return root @ root.mT + 0.1 * torch.eye(size, dtype=F64)


def earlier_blocks(size=12):
    """Every form of block over 12 weights, or 3 x 4."""
    values, vectors = torch.linalg.eigh(positive(size))
    factors = KroneckerCurvature.of(positive(3), positive(4))
    return {
        "diagonal": Diagonal(torch.rand(size, dtype=F64) + 0.1),
        "equal": Diagonal(torch.full((size,), 0.7, dtype=F64)),
        "dense": Dense(torch.linalg.cholesky(positive(size))),
        "low rank": LowRank.of(torch.rand(size, dtype=F64) + 0.1, vectors[:, 9:], values[9:]),
        "deviations": Deviations(torch.rand(size, dtype=F64) + 0.1, torch.randn(3, size, dtype=F64)),
        "kronecker": Kronecker(
            factors.out_values,
            factors.in_values,
            torch.tensor(0.7, dtype=F64),
            factors.out_vectors,
            factors.in_vectors,
        ),
    }


def new_curvatures(size=12):
    values, vectors = torch.linalg.eigh(positive(size))
    return {
        "diagonal": DiagonalCurvature(torch.rand(size, dtype=F64)),
        "dense": DenseCurvature(positive(size)),
        "low rank": LowRankCurvature(vectors[:, 8:], values[8:]),
        "kronecker": KroneckerCurvature.of(positive(3), positive(4)),
    }


EXACT = [
    *[("diagonal", new) for new in ("diagonal", "dense", "low rank")],
    *[("equal", new) for new in ("diagonal", "dense", "low rank", "kronecker")],
    *[("dense", new) for new in ("diagonal", "dense", "low rank", "kronecker")],
    *[("low rank", new) for new in ("diagonal", "low rank")],
    ("deviations", "diagonal"),
]


@pytest.mark.parametrize(("old", "new"), EXACT)
def test_precisions_add_up_exactly_in_every_form(old, new):
    block, structure, eye = earlier_blocks()[old], new_curvatures()[new], torch.eye(12, dtype=F64)
    found = absorb(block, structure, 1.5, num_old=3, num_new=5)
    expected = (block.times(eye).inverse() + 1.5 * structure.dense()).inverse()
    torch.testing.assert_close(found.times(eye), expected)


@pytest.mark.parametrize(
    ("old", "new"),
    [("diagonal", "kronecker"), ("kronecker", "diagonal"), ("low rank", "dense"), ("deviations", "low rank")],
)
def test_forms_without_a_sum_are_refused(old, new):
    with pytest.raises(ValueError, match="structure must have a form that can be added to the old block"):
        absorb(earlier_blocks()[old], new_curvatures()[new], num_old=1, num_new=1)


def curvature(places, structures):
    names = tuple(("w",) for _ in places)
    return Curvature(tuple(places), names, tuple(structures), -1.0, 10, 10, 1, "ggn")


def precision(law):
    """(P, P), 0 where there is no spread."""
    whole = torch.zeros(law.size, law.size, dtype=F64)
    for place, block in zip(law.places, law.blocks, strict=True):
        index = torch.arange(law.size)[place]
        eye = torch.eye(block.size, dtype=law.mean.dtype)
        whole[index[:, None], index] = block.precision_times(eye).double()
    return whole


def test_blocks_that_are_cut_differently_are_combined():
    """A diagonal law is cut as needed, dense ones are filled, weights without news keep their block."""
    mean = torch.randn(20, dtype=F64)
    dense, diagonal = Dense(torch.linalg.cholesky(positive(6))), Diagonal(torch.rand(10, dtype=F64) + 0.1)
    old = GaussianLaw(mean, (slice(0, 6), slice(8, 18)), (dense, diagonal))  # 6, 7, 18, 19 have no spread
    inner, outer, last = positive(3), positive(4), torch.rand(4, dtype=F64)
    pieces = [slice(2, 5), slice(6, 8), torch.tensor([9, 11, 12, 14]), slice(16, 20)]
    structures = [DenseCurvature(inner), DenseCurvature(positive(2)), DenseCurvature(outer), DiagonalCurvature(last)]
    found = combine(old, curvature(pieces, structures), 2.0, 5)
    expected = precision(old)
    expected[2:5, 2:5] += 2 * inner
    index = pieces[2]
    expected[index[:, None], index] += 2 * outer
    expected[16, 16] += 2 * last[0]
    expected[17, 17] += 2 * last[1]
    torch.testing.assert_close(precision(found), expected)
    assert torch.equal(found.mean, mean)


def test_one_dense_curvature_over_several_blocks():
    blocks = earlier_blocks()
    mean = torch.zeros(24, dtype=F64)
    old = GaussianLaw(mean, (slice(0, 12), slice(12, 24)), (blocks["kronecker"], blocks["diagonal"]))
    new = positive(24)
    found = combine(old, curvature([slice(0, 24)], [DenseCurvature(new)]), 1.0, 5)
    torch.testing.assert_close(precision(found), precision(old) + new)
    assert len(found.blocks) == 1


def linear_data(count=50, size=3, outputs=2):
    x = torch.randn(count, size, dtype=F64)
    return bf.Data(x, x @ torch.randn(size, outputs, dtype=F64) + SIGMA * torch.randn(count, outputs, dtype=F64))


def exact_linear(data):
    whole = data.inputs.mT @ data.inputs / SIGMA**2 + D * torch.eye(data.inputs.shape[1], dtype=F64)
    return whole, torch.linalg.solve(whole, data.inputs.mT @ data.targets / SIGMA**2).mT


LONG = bf.Training(epochs=500, batch_size=50, lr=0.02, warmup=50, clip=1e9, schedule="cosine")


def at_mode(data):
    model = nn.Linear(3, 2, bias=False, dtype=F64)
    with torch.no_grad():
        model.weight.copy_(exact_linear(data)[1])
    return model.eval()


def test_fit_with_a_prior_is_the_update_with_training():
    """And both are the posterior of all data, for a linear model."""
    data = linear_data()
    first, second = data.subset(slice(0, 20)), data.subset(slice(20, 50))
    likelihood, method = bf.Gaussian(SIGMA), bf.Laplace(structure="full", prior_precision=D)
    old = bf.laplace(at_mode(first), first, likelihood=likelihood, structure="full", prior_precision=D)
    updated = bf.laplace_update(old, second, training=LONG)
    fitted = bf.fit(old.model, second, likelihood=likelihood, method=method, prior=old, training=LONG)
    assert torch.equal(updated.law.mean, fitted.law.mean)
    assert torch.equal(updated.law.variance(), fitted.law.variance())
    whole, mean = exact_linear(data)
    covariance = torch.block_diag(*[whole.inverse()] * 2)
    torch.testing.assert_close(fitted.law.blocks[0].times(torch.eye(6, dtype=F64)), covariance)
    assert ((fitted.law.mean.view(2, 3) - mean).abs() < 0.05 * whole.inverse().diagonal().sqrt()).all()
    assert fitted.facts["num_data"] == 50
    assert fitted.facts["updates"] == 1
    everything = bf.laplace(at_mode(data), data, likelihood=likelihood, structure="full", prior_precision=D)
    assert fitted.facts["log_evidence"] == pytest.approx(everything.facts["log_evidence"], abs=0.05)


def test_a_short_training_ends_at_the_mode_under_an_earlier_posterior():
    data = linear_data()
    first, second = data.subset(slice(0, 20)), data.subset(slice(20, 50))
    likelihood, method = bf.Gaussian(SIGMA), bf.Laplace(structure="full", prior_precision=D)
    old = bf.laplace(at_mode(first), first, likelihood=likelihood, structure="full", prior_precision=D)
    fitted = bf.fit(old.model, second, likelihood=likelihood, method=method, prior=old, training=FAST)
    torch.testing.assert_close(fitted.law.mean.view(2, 3), exact_linear(data)[1])
    assert fitted.facts["decrement"] < 1e-6
    assert fitted.doubts == ()


def test_an_update_by_one_step_says_how_far_it_is_from_the_mode():
    model, options = Mlp().eval(), {"likelihood": "categorical", "structure": "full", "prior_precision": 1e-3}
    with pytest.warns(bf.FidelityWarning, match="The mode was not found"):
        old = bf.laplace(model, blobs(40), **options)
    updated = bf.laplace_update(old, blobs(40, seed=3))
    assert updated.facts["decrement"] > 0.3
    assert "mode" in [doubt.check for doubt in updated.doubts]


def wider(law):
    """The law of the same form with standard deviations of about 1: short fits hardly leave any for data to reduce."""
    (block,), size = law.blocks, 1 / law.sd.mean()
    if isinstance(block, Diagonal):
        block = Diagonal(block.variance * size**2)
    elif isinstance(block, Dense):
        block = Dense(block.tril * size)
    else:
        block = Deviations(block.sd * size + 0.1, block.factor * size)
    return replace(law, blocks=(block,))


@pytest.mark.parametrize("name", ["vi", "ivon", "ekf", "swag"])
def test_any_gaussian_posterior_can_be_the_prior(name):
    settings = {"swag": {"every": 1, "rank": 3}}.get(name, {})
    method = bf.methods.build_method(name, settings)
    options = {"likelihood": "categorical", "training": FAST}
    old = bf.fit(Mlp(), blobs(40), method=method, **options)
    old = replace(old, law=wider(old.law))
    laplace = bf.Laplace(structure="diag", curvature="ggn")
    new = bf.fit(old.model, blobs(40, seed=3), method=laplace, prior=old, **options)
    trained = new.skeleton.plain(new.law.mean).eval()
    found = estimate(trained, "categorical", blobs(40, seed=3), "diag", kind="ggn")
    gained = torch.cat([structure.values for structure in found.structures]).double()
    torch.testing.assert_close(precision(new.law), precision(old.law) + gained.diag(), rtol=1e-3, atol=1e-3)
    assert gained.max() > 0.1
    assert new.facts["num_data"] == 80
    again = bf.laplace_update(old, blobs(40, seed=3), method=laplace, training=FAST)
    assert torch.equal(new.law.mean, again.law.mean)
    assert torch.isfinite(new.predict(blobs(5).inputs).probs).all()


def test_single_weights_without_spread_stay_where_they_are():
    settings = {"likelihood": "categorical", "structure": "subnetwork", "size": 7, "prior_precision": 1.0}
    old = bf.laplace(Mlp().eval(), blobs(40), **settings)
    new = bf.laplace_update(old, blobs(40, seed=3), training=FAST)
    spread = old.law.variance() > 0
    assert int(spread.sum()) == 7
    assert torch.equal(new.law.mean[~spread], old.law.mean[~spread])
    assert (new.law.mean[spread] != old.law.mean[spread]).all()
    assert torch.equal(new.law.variance() > 0, spread)


def test_priors_that_do_not_fit_are_refused_with_the_reason():
    options = {"likelihood": "categorical", "training": FAST}
    old = bf.laplace(Mlp().eval(), blobs(40), likelihood="categorical", structure="low_rank", prior_precision=1.0)
    with pytest.raises(ValueError, match="a LowRank block of .* and a Kronecker curvature of .* have no sum"):
        bf.fit(old.model, blobs(40), method=bf.Laplace(structure="kron"), prior=old, **options)
    ensemble = bf.fit(Mlp(), blobs(20), method=bf.Ensemble(2), **options)
    with pytest.raises(ValueError, match="prior must be a posterior that is a Gaussian over the weights"):
        bf.fit(ensemble.model, blobs(40), method=bf.Laplace(), prior=ensemble, **options)
    with pytest.raises(ValueError, match=r"it comes from 'ensemble'. Give method=Laplace"):
        bf.laplace_update(ensemble, blobs(40))
    with pytest.raises(ValueError, match="laplace.noise must be 'given' where an earlier posterior is the prior"):
        bf.fit(
            nn.Linear(3, 1),
            bf.Data(torch.randn(9, 3), torch.randn(9, 1)),
            likelihood=bf.Gaussian(1.0),
            method=bf.Laplace(noise="marglik"),
            prior=old,
        )

"""Data that are read at random (augmentation): sums over all data average over readings, and it is said."""

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

import bayesformer as bf
from bayesformer.data import as_batches
from bayesformer.data.realisations import Realisations, averaged
from bayesformer.jacobians.products import CurvatureProducts
from bayesformer.laplace.estimate import estimate
from bayesformer.laplace.structures import KroneckerCurvature
from bayesformer.likelihoods import as_likelihood
from bayesformer.methods import Problem
from bayesformer.model.skeleton import Skeleton
from bayesformer.model.space import Space
from bayesformer.train.full_batch import FullBatch
from bayesformer.train.prototype import Prototype
from bayesformer.train.recipe import vector_prior
from tests.nets import Mlp

ignored = pytest.mark.filterwarnings("ignore::bayesformer.FidelityWarning")
MEAN, SPREAD, N = 1.0, 2.0, 20  # of targets that are drawn anew in every reading
CLOSE = {"rtol": 1e-4, "atol": 1e-4}
QUICK = bf.Training(epochs=3, batch_size=10)
SURE = (bf.Map(), bf.Laplace(structure="full", prior_precision=1.0), bf.Ekf(kind="dense"), bf.Vi(epochs=100))


class Targets(Dataset):
    """Targets of mean 1 and standard deviation 2; with noise 1 the posterior's mode is N / (N + 1)."""

    def __len__(self):
        return N

    def __getitem__(self, index):
        return torch.zeros(1), MEAN + SPREAD * torch.randn(1)


class Shaken(Dataset):
    """Inputs with noise of their own in every reading, and classes."""

    def __len__(self):
        return 11

    def __getitem__(self, index):
        return torch.arange(3.0) * (index - 5) / 5 + torch.randn(3), index % 2


class Constant(nn.Module):
    """One number for every input."""

    def __init__(self):
        super().__init__()
        self.b = nn.Parameter(torch.zeros(()))

    def forward(self, x):
        return self.b + 0 * x


def fit(method, data=None, **options):
    return bf.fit(Constant(), data or Targets(), likelihood=bf.Gaussian(1.0), method=method, training=QUICK, **options)


@ignored
@pytest.mark.parametrize("method", SURE, ids=lambda method: type(method).__name__)
@pytest.mark.parametrize("seed", [0, 1])
def test_the_mode_is_that_of_many_readings(method, seed):
    posterior = fit(method, seed=seed)
    expected, sd = N / (N + 1), (N + 1) ** -0.5
    mean = posterior.theta.mean() if isinstance(method, bf.Map) else posterior.law.mean
    # one reading is off by 2 posterior standard deviations, 64 by a quarter
    assert abs(float(mean) - expected) < 3 * sd * SPREAD / 64**0.5
    assert [doubt.check for doubt in posterior.doubts] == ["random data"]


@ignored
def test_the_decrement_is_the_error_that_readings_leave():
    found = fit(bf.Map()).facts["decrement"]
    exact = SPREAD * N**0.5 / 8 * (N + 1) ** -0.5  # standard error of the gradient times the posterior's sd
    assert found == pytest.approx(exact, rel=4 / (2 * 64) ** 0.5)  # four standard errors of a standard deviation


def test_networks_as_trained_are_not_doubted_for_random_data_and_fixed_data_neither():
    for method in (bf.Mle(), bf.Ensemble(2)):  # of a short training, and of members that start alike
        assert {doubt.check for doubt in fit(method).doubts} <= {"training", "starts"}
    still = list(zip(torch.zeros(N, 1), torch.ones(N, 1), strict=True))
    assert fit(bf.Map(), still).doubts == ()
    batches = as_batches(still, "data")
    assert averaged(batches) is batches


@pytest.mark.parametrize("method", [bf.Nuts(), bf.Hmc()], ids=["nuts", "hmc"])
def test_hamiltonian_chains_refuse_a_log_joint_that_changes(method):
    with pytest.raises(ValueError, match="needs a log joint that stays the same; reading data draws random numbers"):
        fit(method)


def random_data(count=5):
    data = as_batches(Shaken(), "data")
    data.first(1)
    assert data.is_random
    return Realisations(data, count)


def test_readings_differ_and_repeat():
    data = random_data(3)
    once, again = (torch.cat([batch.inputs for batch in data.in_order(4)]) for _ in range(2))
    assert torch.equal(once, again)
    parts = once.view(3, 11, 3)
    assert not torch.equal(parts[0], parts[1])
    assert not torch.equal(parts[1], parts[2])
    alone = torch.cat([batch.inputs for batch in data.data.in_order(6)])
    assert torch.equal(parts[0], alone)
    assert [len(b.targets) for b in data.epoch(11, seed=0, epoch=0)] == [11]
    assert (data.steps(11), data.fingerprint(), data.rows, data.num_data) == (1, data.data.fingerprint(), 33, 11)


@pytest.mark.parametrize("structure", ["diag", "full", "kron", "low_rank"])
def test_the_curvature_of_readings_is_the_mean_of_theirs(structure):
    data, model = random_data(), Mlp(hidden=2).eval()
    how = {"structure": structure, "rank": 16}
    found = estimate(model, "categorical", data, **how)
    each = [estimate(model, "categorical", data.realisation(r), **how) for r in range(data.realisations)]
    assert (found.num_data, found.observed) == (11, 11)
    total = sum(curvature.log_likelihood for curvature in each) / 5
    assert found.log_likelihood == pytest.approx(total)
    for number, block in enumerate(found.structures):
        own = [curvature.structures[number] for curvature in each]
        if isinstance(block, KroneckerCurvature):  # the trace of B, a sum; A is an average
            mean = sum(float(one.out_values.sum()) for one in own) / 5
            assert float(block.out_values.sum()) == pytest.approx(mean, rel=1e-4)
            continue
        torch.testing.assert_close(block.dense(), torch.stack([one.dense() for one in own]).mean(0), **CLOSE)


def test_products_and_gradients_of_readings_are_means_of_theirs():
    data, model = random_data(), Mlp(hidden=2).eval()
    shell = Skeleton(model, Space.of(model)).shell()
    likelihood = as_likelihood("categorical")
    v = torch.randn(shell.space.size, generator=torch.Generator("cpu").manual_seed(0))
    found = CurvatureProducts(shell, likelihood, data, 4).ggn(v)
    each = [CurvatureProducts(shell, likelihood, data.realisation(r), 4).ggn(v) for r in range(5)]
    torch.testing.assert_close(found, torch.stack(each).mean(0))
    prototype = Prototype(Problem(model, likelihood, data.data))
    batch = FullBatch(prototype, prototype.skeleton, prototype.start(0), vector_prior(prototype, None))
    theta = prototype.start(0).theta
    value, slope = batch.slope(theta)
    assert batch.data.readings == 64
    assert value == pytest.approx(batch.potential(theta))
    torch.testing.assert_close(slope, batch.slopes(theta).mean(0), **CLOSE)

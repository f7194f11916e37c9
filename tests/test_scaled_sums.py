"""Where a pass over the data does not give N examples, what is summed over it stands for N all the same."""

import logging

import pytest
import torch
from torch import nn
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

import bayesformer as bf
from bayesformer.data import as_batches
from bayesformer.predict.self_check import _log_likelihood, _slope
from bayesformer.priors.setting import prior_of

ROWS, NUM_DATA = 30, 100
SOURCE = torch.Generator("cpu").manual_seed(3)
X = torch.randn(ROWS, 2, generator=SOURCE, dtype=torch.float64)
Y = X @ torch.tensor([[1.0], [-0.5]], dtype=torch.float64) + torch.randn(ROWS, 1, generator=SOURCE, dtype=torch.float64)
TRAINING = bf.Training(epochs=20, batch_size=10)
SURE = (
    bf.Map(),
    bf.Laplace(structure="full", prior_precision=1.0),
    bf.Laplace(structure="kron", subset="*", prior_precision=1.0),
    bf.Ekf(kind="dense"),
    bf.Vi(kind="dense", epochs=60),
)
CHAINS = (bf.Sghmc, bf.Sgld, bf.Baoab, bf.Psgld)
ignored = pytest.mark.filterwarnings("ignore::bayesformer.FidelityWarning")


class Rows(IterableDataset):
    """Thirty examples, read in order as often as one likes."""

    def __iter__(self):
        return iter(zip(X, Y, strict=True))


def linear():
    torch.manual_seed(0)
    return nn.Linear(2, 1, bias=False).double()


def fit(method, data, likelihood=None, **more):
    known = likelihood or bf.Gaussian(1.0)
    return bf.fit(linear(), data, likelihood=known, method=method, training=TRAINING, progress=False, **more)


def exact(num_data, x=X, y=Y):
    """Mean (2,) and covariance (2, 2) of Bayesian linear regression, every row counted `num_data` / rows times."""
    scale = num_data / len(x)
    precision = scale * x.mT @ x + torch.eye(2, dtype=x.dtype)
    return torch.linalg.solve(precision, scale * x.mT @ y).flatten(), torch.linalg.inv(precision)


@ignored
@pytest.mark.parametrize("method", SURE, ids=lambda m: f"{type(m).__name__}-{getattr(m, 'structure', '')}")
@pytest.mark.parametrize("num_data", [NUM_DATA, ROWS])
def test_every_method_has_the_posterior_of_num_data_examples(method, num_data):
    posterior = fit(method, bf.Stream(Rows(), num_data=num_data))
    mean, covariance = exact(num_data)
    found = posterior.theta.mean(0) if isinstance(method, bf.Map) else posterior.law.mean
    sd = covariance.diagonal().sqrt()
    assert float(((found - mean) / sd).abs().max()) < 0.15
    if not isinstance(method, bf.Map):
        assert float((posterior.law.variance().sqrt() / sd - 1).abs().max()) < 0.1


def test_full_batch_chains_sample_the_posterior_of_num_data_examples():
    posterior = fit(bf.Hmc(chains=2, draws=150), bf.Stream(Rows(), num_data=NUM_DATA))
    mean, covariance = exact(NUM_DATA)
    theta, sd = posterior.law.theta, covariance.diagonal().sqrt()
    assert float(((theta.mean(0) - mean) / sd).abs().max()) < 0.3
    assert float((theta.std(0) / sd - 1).abs().max()) < 0.25


@ignored
def test_the_evidence_is_that_of_num_data_examples():
    """Each of 30 rows three times over is what a stream of 30 rows for 90 examples stands for."""
    method = bf.Laplace(structure="full", prior_precision=1.0)
    found = fit(method, bf.Stream(Rows(), num_data=3 * ROWS))
    expected = fit(method, (X.repeat(3, 1), Y.repeat(3, 1)))
    assert found.facts["log_evidence"] == pytest.approx(expected.facts["log_evidence"], rel=1e-6)
    assert found.facts["num_data"] == 3 * ROWS
    torch.testing.assert_close(found.law.variance(), expected.law.variance())


def drawn(kind, times):
    data = TensorDataset(X, Y)
    if kind == "weighted":
        sampler = WeightedRandomSampler(torch.ones(ROWS), times * ROWS)
    else:
        own = torch.Generator("cpu").manual_seed(1) if kind == "own generator" else None
        sampler = RandomSampler(data, replacement=True, num_samples=times * ROWS, generator=own)
    return DataLoader(data, batch_size=100, sampler=sampler)


@ignored
@pytest.mark.parametrize("kind", ["random", "weighted", "own generator"])
@pytest.mark.parametrize("method", [SURE[1], SURE[3]], ids=["laplace", "ekf"])
def test_a_sampler_that_draws_many_times_leaves_n_as_it_is(kind, method):
    posterior = fit(method, drawn(kind, 20))  # 600 rows
    mean, covariance = exact(ROWS)
    sd = covariance.diagonal().sqrt()
    assert float(((posterior.law.mean - mean) / sd).abs().max()) < 4 / 20**0.5  # what 20 draws of each row leave
    assert float((posterior.law.variance().sqrt() / sd - 1).abs().max()) < 0.15
    assert posterior.facts["num_data"] == ROWS


def test_the_sampler_of_a_drawn_loader_says_how_many_rows_it_gives():
    whole = as_batches(drawn("random", 3))
    assert (whole.num_data, whole.rows, whole.readings) == (ROWS, 90, 3.0)
    half = DataLoader(
        TensorDataset(X, Y), batch_size=4, sampler=WeightedRandomSampler(torch.ones(ROWS), 10), drop_last=True
    )
    assert (as_batches(half).rows, sum(len(b.targets) for b in as_batches(half).in_order(4))) == (8, 8)


def test_rows_of_a_stream_are_counted_once_and_an_iterator_is_not_used_up():
    counted = []

    class Watched(Rows):
        def __iter__(self):
            counted.append(1)
            return super().__iter__()

    stream = as_batches(bf.Stream(Watched(), num_data=NUM_DATA))
    assert (stream.rows, stream.readings) == (ROWS, ROWS / NUM_DATA)
    opened = len(counted)
    assert (stream.rows, len(counted)) == (ROWS, opened)
    once = as_batches(bf.Stream(iter(Rows()), num_data=NUM_DATA))
    assert once.rows == NUM_DATA
    assert sum(len(batch.targets) for batch in once.in_order(7)) == ROWS
    assert once.rows == ROWS


def test_the_check_of_a_posterior_scales_to_num_data():
    posterior = fit(bf.Laplace(structure="full", prior_precision=1.0), (X, Y))
    theta, prior = posterior.law.mean, prior_of("normal(0, 1)")
    three, one = (as_batches(bf.Stream(Rows(), num_data=n)) for n in (3 * ROWS, ROWS))
    both = [_log_likelihood(posterior, theta, data) for data in (three, one)]
    assert both[0] == pytest.approx(3 * both[1])
    with posterior.at_mean.borrow() as shell:
        slopes = [_slope(posterior, shell, theta, prior, data) - theta for data in (three, one)]
    torch.testing.assert_close(slopes[0], 3 * slopes[1], atol=1e-6, rtol=1e-6)


@ignored
@pytest.mark.parametrize("method", CHAINS, ids=lambda method: method.__name__)
def test_chains_on_a_stream_that_ends_early_keep_their_draws(method, caplog):
    with caplog.at_level(logging.WARNING, "bayesformer"):
        posterior = fit(method(chains=2, draws=6), bf.Stream(Rows(), num_data=NUM_DATA))
    assert len(posterior.law.theta) == 12
    assert sum("ended after 30 examples; num_data is 100" in line for line in caplog.messages) == 1


@pytest.mark.parametrize("method", [bf.Mle(), bf.Map(), bf.Ensemble(2), bf.Sghmc(), bf.Laplace(), bf.Vi()])
def test_an_iterator_is_refused_before_any_work(method):
    read = []

    def rows():
        for pair in Rows():
            read.append(1)
            yield pair

    with pytest.raises(ValueError, match=r"must be readable \d+ times.*got an iterator, generator"):
        fit(method, bf.Stream(rows(), num_data=ROWS))
    assert len(read) < 10


def test_an_iterator_will_do_for_one_pass_and_a_function_for_many():
    short = bf.Training(epochs=1, batch_size=10)
    options = {"likelihood": bf.Gaussian(1.0), "method": bf.Mle(), "progress": False}
    bf.fit(linear(), bf.Stream(iter(Rows()), num_data=ROWS), training=short, **options)
    steps = bf.Training(epochs=9, max_steps=3, batch_size=10)
    bf.fit(linear(), bf.Stream(iter(Rows()), num_data=ROWS), training=steps, **options)
    opened = fit(bf.Mle(), bf.Stream(lambda: (pair for pair in Rows()), num_data=ROWS))
    assert torch.equal(opened.theta, fit(bf.Mle(), bf.Stream(Rows(), num_data=ROWS)).theta)
    with pytest.raises(ValueError, match="examples must be an iterable or a function that opens one; got int"):
        bf.Stream(3, num_data=ROWS)


def test_a_sampler_of_some_indices_has_so_many_examples():
    dataset = TensorDataset(torch.randn(20, 2), torch.randn(20, 1))
    some = list(range(3, 15))
    for sampler in (some, SubsetRandomSampler(some)):
        assert as_batches(DataLoader(dataset, batch_size=4, sampler=sampler)).num_data == 12
    weighted = WeightedRandomSampler(torch.ones(20), 7)
    assert as_batches(DataLoader(dataset, batch_size=4, sampler=weighted)).num_data == 20

"""Laplace from data in any form, read batch by batch, in bounded memory and from many threads."""

import threading

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

import bayesformer as bf
from bayesformer.core.strategy import largest_tensor
from bayesformer.laws import Dense, GaussianLaw, Kronecker
from bayesformer.model.space import Space
from tests.nets import Mlp, blobs

X, Y = blobs(90).inputs, blobs(90).targets


class Items(Dataset):
    """One example at a time; counts how many were read."""

    def __init__(self):
        self.read = 0

    def __len__(self):
        return len(X)

    def __getitem__(self, i):
        self.read += 1
        return X[i], Y[i]


class Endless(IterableDataset):
    """A stream that can be read as often as one likes."""

    def __iter__(self):
        return iter(zip(X, Y, strict=True))


def forms():
    return {
        "dataset": Items(),
        "loader": DataLoader(Items(), batch_size=7),
        "stream": bf.Stream(Endless(), num_data=len(X)),
    }


@pytest.mark.parametrize("structure", ["diag", "kron", "full", "low_rank", "subnetwork", "last_layer"])
@pytest.mark.parametrize("form", forms())
def test_data_in_any_form_give_the_posterior_of_tensors(form, structure):
    """Curvature is a sum over the data: equal up to the order of the sum."""
    model = Mlp(3, 4, 2).double().eval()
    data, options = forms()[form], {"likelihood": "categorical", "structure": structure, "size": 9}

    class Double(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model

        def forward(self, x):
            return self.inner(x.double())

    found = bf.laplace(Double().eval(), data, **options)
    expected = bf.laplace(Double().eval(), (X, Y), **options)
    torch.testing.assert_close(found.law.variance(), expected.law.variance())
    assert found.facts["log_evidence"] == pytest.approx(expected.facts["log_evidence"])
    assert found.facts["num_data"] == 90


def test_the_noise_counts_the_targets_that_a_stream_gives():
    class Pairs(Dataset):
        def __len__(self):
            return 40

        def __getitem__(self, i):
            return X[i], X[i, :1] + 0.3 * X[i, 1:2]

    model, options = nn.Linear(3, 1).eval(), {"likelihood": bf.Gaussian(1.3), "noise": "marglik", "structure": "full"}
    found = bf.laplace(model, Pairs(), **options)
    pairs = [Pairs()[i] for i in range(40)]
    expected = bf.laplace(model, tuple(torch.stack(part) for part in zip(*pairs, strict=True)), **options)
    assert found.facts["noise"] == pytest.approx(expected.facts["noise"], rel=1e-4)


def test_validation_in_any_form_chooses_the_same_precision():
    model, options = Mlp(3, 4, 2).eval(), {"likelihood": "categorical", "link": "probit", "grid": 4}
    found = [bf.laplace(model, (X[:60], Y[:60]), validation=held, **options) for held in (Items(), (X, Y))]
    assert found[0].facts["prior_precision"] == found[1].facts["prior_precision"]
    assert found[0].facts["validation"] == pytest.approx(found[1].facts["validation"], abs=1e-6)


def test_a_wrong_target_in_a_stream_is_an_error_that_names_it():
    class Wrong(Items):
        def __getitem__(self, i):
            return X[i], Y[i] + (5 if i == 80 else 0)

    with pytest.raises(ValueError, match=r"targets must lie in 0\.\.1"):
        bf.laplace(Mlp(3, 4, 2).eval(), Wrong(), likelihood="categorical")


def test_data_are_read_once_for_each_pass_and_not_kept():
    data = Items()
    bf.laplace(Mlp(3, 4, 2).eval(), data, likelihood="categorical", structure="diag", prior_precision=1.0)
    assert data.read < 2 * 90 + 100  # curvature and gradient, and a few examples for checks and the fingerprint


def wide_posterior(kind, classes=12, features=40):
    """A posterior over a last layer of 12 x 41 weights."""
    model = nn.Sequential(nn.Linear(3, features), nn.Tanh(), nn.Linear(features, classes)).eval()
    space = Space.of(model)
    theta = space.pack(dict(model.named_parameters()))
    weight, bias = space.slices["2.weight"], space.slices["2.bias"]
    if kind == "dense":
        size = bias.stop - weight.start
        law = GaussianLaw(theta, (slice(weight.start, bias.stop),), (Dense(0.1 * torch.eye(size)),))
    else:
        a, b = torch.linalg.qr(torch.randn(features, features))[0], torch.linalg.qr(torch.randn(classes, classes))[0]
        matrix = Kronecker(torch.ones(classes), torch.ones(features), torch.tensor(1.0), b, a)
        law = GaussianLaw(theta, (weight, bias), (matrix, Dense(0.1 * torch.eye(classes))))
    return bf.Posterior(model, bf.Categorical(), law, predictive="linearised")


@pytest.mark.parametrize("kind", ["dense", "kronecker"])
def test_many_rows_take_the_memory_of_their_result(kind):
    """No tensor is larger than the factor (N, K, K) that is returned; a dense block had (N, K, p)."""
    posterior, rows, classes = wide_posterior(kind), 3000, 12
    x = torch.randn(rows, 3)
    few = posterior.outputs(x[:64])
    assert largest_tensor(lambda: posterior.outputs(x)) <= rows * classes * classes
    found = posterior.outputs(x)
    assert found.factor.shape == (rows, classes, classes)
    torch.testing.assert_close(found.covariance[:64], few.covariance)


def test_the_curvature_of_many_rows_is_taken_in_bounded_memory():
    """Rows times features squared would be 3000 · 41² numbers; p² are needed, and Jacobians of 64 examples."""
    posterior, x = wide_posterior("dense"), torch.randn(3000, 3)
    data = (x, torch.randint(12, (3000,)))
    largest = largest_tensor(
        lambda: bf.laplace(posterior.model, data, likelihood="categorical", structure="last_layer", prior_precision=1.0)
    )
    assert largest <= max(12 * 41, 64 * 12) * 12 * 41


@pytest.mark.parametrize("way", ["linearised", "streamlined"])
@pytest.mark.parametrize("structure", ["kron", "last_layer"])
def test_eight_threads_get_the_numbers_that_one_gets(way, structure):
    data = bf.Data(torch.randn(40, 6, 4), torch.randint(3, (40,)))
    layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
    model = nn.Sequential(layer, nn.Flatten(), nn.Linear(24, 3)).eval()
    settings = {"structure": structure, "prior_precision": 20.0, "predictive": way, "link": "probit"}
    posterior = bf.laplace(model, data, likelihood="categorical", **settings)
    inputs = [torch.randn(5 + i % 3, 6, 4) for i in range(8)]
    alone = [posterior.predict(x).probs for x in inputs]
    joint = [posterior.joint(x)[1] for x in inputs]
    wrong, barrier = [], threading.Barrier(8)

    def ask(i):
        barrier.wait()
        for _ in range(4):
            if not torch.equal(posterior.predict(inputs[i]).probs, alone[i]):
                wrong.append(("predict", i))
            if not torch.equal(posterior.joint(inputs[i])[1], joint[i]):
                wrong.append(("joint", i))

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_two_fits_at_once_are_those_of_one():
    model, found = Mlp(3, 4, 2).eval(), {}

    def run(i):
        found[i] = bf.laplace(model, (X, Y), likelihood="categorical", structure="kron", prior_precision=float(i + 1))

    threads = [threading.Thread(target=run, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i in range(4):
        alone = bf.laplace(model, (X, Y), likelihood="categorical", structure="kron", prior_precision=float(i + 1))
        assert torch.equal(found[i].law.variance(), alone.law.variance())
    assert all(p.requires_grad and p.grad is None for p in model.parameters())


@pytest.mark.parametrize("way", ["linearised", "streamlined"])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_the_callers_gradient_mode_changes_nothing(way, mode):
    posterior = bf.laplace(Mlp(3, 4, 2).eval(), (X, Y), likelihood="categorical", link="probit", prior_precision=1.0)
    expected = posterior.predict(X, predictive=way).probs
    with mode():
        assert torch.equal(posterior.predict(X.clone(), predictive=way).probs, expected)
        known = {"predictive": way, "link": "probit", "examples": posterior.examples}
        new = bf.Posterior(posterior.model, posterior.likelihood, posterior.law, **known)
        assert torch.equal(new.predict(X.clone()).probs, expected)
        joint = new.joint(X[:3].clone())[1]
    torch.testing.assert_close(joint, posterior.joint(X[:3])[1])
    assert torch.equal(new.predict(X).probs, expected)

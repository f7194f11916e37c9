"""A saved posterior comes back bit for bit, or not at all."""

import json

import pytest
import torch
from torch import nn

import bayesformer as bf
from bayesformer.laws import Samples, gaussian
from tests.laws import assert_mean
from tests.nets import Mlp, Normed, blobs

FAST = bf.Training(epochs=2, batch_size=16, lr=0.02, warmup=5)


@pytest.fixture
def posterior():
    return bf.fit(Mlp, blobs(60), likelihood="categorical", method=bf.Ensemble(3), training=FAST)


def test_round_trip_is_bit_identical(posterior, tmp_path):
    loaded = bf.Posterior.load(posterior.save(tmp_path / "p"), Mlp())
    assert torch.equal(loaded.theta, posterior.theta)
    assert loaded.likelihood == posterior.likelihood
    assert loaded.facts == posterior.facts
    x = torch.randn(7, 3)
    assert torch.equal(loaded.outputs(x, strategy="looped").values, posterior.outputs(x, strategy="looped").values)


def test_noise_and_running_averages_are_saved(tmp_path):
    dropout = bf.fit(Mlp, blobs(60), likelihood="categorical", method=bf.MCDropout(0.3, draws=4), training=FAST)
    model = Mlp()  # its own rate is 0: the file knows better
    loaded = bf.Posterior.load(dropout.save(tmp_path / "d"), model)
    assert model.net[2].p == 0
    x = torch.randn(7, 3)
    assert torch.equal(loaded.outputs(x).values, dropout.outputs(x).values)
    assert loaded.draws == 4
    normed = bf.fit(Normed, blobs(60), likelihood="categorical", training=FAST)
    loaded = bf.Posterior.load(normed.save(tmp_path / "n"), Normed())
    assert torch.equal(loaded.outputs(x).values, normed.outputs(x).values)


def test_nothing_is_pickled(posterior, tmp_path):
    folder = posterior.save(tmp_path / "p")
    assert sorted(p.name for p in folder.iterdir()) == ["posterior.json", "posterior.safetensors"]
    facts = json.loads((folder / "posterior.json").read_text())
    assert facts["facts"]["method"] == {"name": "ensemble", "members": 3, "init": "fresh"}
    assert facts["facts"]["num_data"] == 60


@pytest.mark.parametrize("keep", [0, 5, 200, -1])
def test_truncated_files_are_refused(posterior, tmp_path, keep):
    folder = posterior.save(tmp_path / "p")
    path = folder / "posterior.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(bf.DamagedFileError, match=r"posterior\.safetensors"):
        bf.Posterior.load(folder, Mlp())


def test_altered_files_are_refused(posterior, tmp_path):
    folder = posterior.save(tmp_path / "p")
    path = folder / "posterior.safetensors"
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)
    with pytest.raises(bf.DamagedFileError, match="was altered: its checksum differs"):
        bf.Posterior.load(folder, Mlp())
    (folder / "posterior.json").write_text('{"format": 1, ')
    with pytest.raises(bf.DamagedFileError, match="not valid JSON"):
        bf.Posterior.load(folder, Mlp())
    (folder / "posterior.json").write_text('{"format": 99}')
    with pytest.raises(bf.DamagedFileError, match="must have format 1; got 99"):
        bf.Posterior.load(folder, Mlp())
    (folder / "posterior.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"posterior .*posterior.json does not exist"):
        bf.Posterior.load(folder, Mlp())


def test_another_models_posterior_is_refused(posterior, tmp_path):
    folder = posterior.save(tmp_path / "p")
    with pytest.raises(bf.DamagedFileError, match=r"parameter 'net.0.weight' is \(8, 3\) in the file and \(9, 3\)"):
        bf.Posterior.load(folder, Mlp(hidden=9))
    with pytest.raises(bf.DamagedFileError, match=r"'net.0.weight' is \(8, 3\) in the file and absent in the model"):
        bf.Posterior.load(folder, nn.Linear(3, 2))


def test_other_frozen_weights_are_refused(tmp_path):
    model = Mlp()
    model.net[0].requires_grad_(False)
    posterior = bf.fit(model, blobs(60), likelihood="categorical", training=FAST)
    folder = posterior.save(tmp_path / "p")
    assert torch.equal(bf.Posterior.load(folder, model).theta, posterior.theta)
    with torch.no_grad():
        model.net[0].weight[0, 0] += 1
    with pytest.raises(bf.DamagedFileError, match="the frozen weights differ"):
        bf.Posterior.load(folder, model)


def test_sample_gives_named_weights(posterior):
    weights = posterior.sample()
    assert weights["net.0.weight"].shape == (3, 8, 3)
    assert torch.equal(weights["net.3.bias"][1], posterior.module(1).net[3].bias)
    assert posterior.sample(2)["net.3.bias"].shape == (2, 2)


def test_outputs_can_be_differentiated_later(posterior):
    values = posterior.outputs(torch.randn(4, 3)).values
    scale = torch.ones((), requires_grad=True)
    (values * scale).sum().backward()
    assert scale.grad is not None


def test_wrong_questions_are_named(posterior):
    with pytest.raises(ValueError, match="draws must be between 1 and 3, the draws it has; got 4"):
        posterior.predict(torch.randn(2, 3), draws=4)
    with pytest.raises(ValueError, match="inputs must be finite; got 1 NaN"):
        posterior.predict(torch.tensor([[0.0, 1.0, float("nan")]]))
    with pytest.raises(ValueError, match="at least one example"):
        posterior.predict(torch.zeros(0, 3))
    with pytest.raises(ValueError, match="weights must have 50 numbers per draw for this model; got 7"):
        bf.Posterior(Mlp(), bf.Categorical(), Samples(torch.zeros(2, 7)))


def gaussian_weights(size, kind):
    mean, sd = torch.randn(size, dtype=torch.float64), torch.rand(size, dtype=torch.float64)
    factor = torch.randn(2, size, dtype=torch.float64)
    tril = torch.randn(size, size, dtype=torch.float64).tril()
    if kind == "diagonal":
        return gaussian(mean, sd), sd.square().diag()
    if kind == "low rank":
        return gaussian(mean, sd, factor), sd.square().diag() + factor.T @ factor
    return gaussian(mean, tril=tril), tril @ tril.T


@pytest.mark.parametrize("kind", ["diagonal", "low rank", "dense"])
def test_gaussian_weights_have_their_covariance(kind):
    weights, covariance = gaussian_weights(4, kind)
    draws = weights.rows(4000)
    assert_mean(draws, weights.mean)
    centred = draws - weights.mean
    assert_mean((centred.unsqueeze(-1) * centred.unsqueeze(-2)).flatten(1), covariance.flatten())


@pytest.mark.parametrize("kind", ["diagonal", "low rank", "dense"])
def test_gaussian_posteriors_are_saved_and_repeatable(kind, tmp_path):
    model = nn.Linear(3, 2).double()
    posterior = bf.Posterior(model, bf.Categorical(), gaussian_weights(8, kind)[0], default_draws=5)
    loaded = bf.Posterior.load(posterior.save(tmp_path / "p"), model)
    x = torch.randn(4, 3, dtype=torch.float64)
    first = posterior.outputs(x).values
    assert first.shape == (5, 4, 2)
    assert torch.equal(loaded.outputs(x).values, first)
    assert torch.equal(posterior.outputs(x, 3, strategy="looped").values, first[:3])
    assert not torch.equal(posterior.outputs(x, seed=1).values, first)


class Drifting(nn.Module):
    """Every pass in training mode moves its buffer."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.register_buffer("shift", torch.zeros(()))

    def forward(self, x):
        if self.training:
            self.shift += 1
        return self.layer(x) + self.shift


def test_a_draw_starts_from_the_saved_buffers_whatever_the_draw_before_did():
    model, x = Drifting(), torch.randn(4, 3)
    theta = torch.cat([p.detach().flatten() for p in model.parameters()])
    weights = Samples(theta[None], {"shift": torch.zeros(1)})
    found = bf.Posterior(model, bf.Categorical(), weights, noisy_draws=3).outputs(x, strategy="looped", batch_size=4)
    torch.testing.assert_close(found.values, (model.layer(x) + 1).detach().expand(3, -1, -1))

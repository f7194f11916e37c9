"""Models with checkpointed segments: refused before training where derivatives would be wrong or missing."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import bayesformer as bf
from bayesformer.train import loop

pytestmark = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # of torch's checkpoints
NEED_CURVATURE = (bf.Laplace(), bf.Laplace(structure="last_layer"), bf.Vi(kind="kron"), bf.Vi(), bf.Ivon(), bf.Ekf())


class Checkpointed(nn.Module):
    """Three layers, of which the first or the second is a segment; `reentrant` None has none."""

    def __init__(self, reentrant, segment="middle"):
        super().__init__()
        torch.manual_seed(1)
        self.first, self.middle, self.last = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 2)
        self.reentrant, self.segment = reentrant, segment

    def forward(self, x):
        for name in ("first", "middle"):
            layer = getattr(self, name)
            if name == self.segment and self.reentrant is not None:
                x = checkpoint(layer, x, use_reentrant=self.reentrant).tanh()
            else:
                x = layer(x).tanh()
        return self.last(x)


@pytest.fixture
def data():
    g = torch.Generator("cpu").manual_seed(0)
    x = torch.randn(45, 4, generator=g)
    return x, (x[:, 0] * x[:, 1] > 0).long()


def fit(method, model, data):
    return bf.fit(model, data, likelihood="categorical", method=method, training=bf.Training(epochs=2))


@pytest.fixture
def untrained(monkeypatch):
    """Training is a failure."""

    def never(*args, **kwargs):
        pytest.fail("training began")

    monkeypatch.setattr(loop, "_begin", never)


@pytest.mark.parametrize("segment", ["first", "middle"])
@pytest.mark.parametrize("method", NEED_CURVATURE, ids=repr)
def test_curvature_of_reentrant_segments_is_refused_before_training(segment, method, data, untrained):
    with pytest.raises(ValueError, match="must call torch.utils.checkpoint.checkpoint with use_reentrant=False; got"):
        fit(method, Checkpointed(True, segment), data)


def test_a_mode_is_trained_through_reentrant_segments_without_newton_steps(data):
    found = fit(bf.Map(), Checkpointed(True), data)
    assert "decrement" not in found.facts
    plain = fit(bf.Mle(), Checkpointed(None), data)
    torch.testing.assert_close(fit(bf.Mle(), Checkpointed(True), data).theta, plain.theta)


@pytest.mark.filterwarnings("ignore::bayesformer.FidelityWarning")
def test_curvature_goes_through_other_segments(data):
    found, plain = (fit(bf.Laplace(structure="full"), Checkpointed(kind), data).law for kind in (False, None))
    torch.testing.assert_close(found.mean, plain.mean)
    torch.testing.assert_close(found.sd, plain.sd)


@pytest.mark.parametrize("settings", [{}, {"local": False}, {"local": False, "flipout": True}], ids=str)
@pytest.mark.parametrize("reentrant", [True, False])
def test_random_weights_refuse_any_segment(settings, reentrant, data, untrained):
    message = "model must not use gradient checkpointing"
    with pytest.raises(ValueError, match=message):
        fit(bf.MeanField(**settings), Checkpointed(reentrant), data)
    with pytest.raises(ValueError, match=message):
        bf.convert(Checkpointed(reentrant), **settings).train()(data[0])
    bf.convert(Checkpointed(None), **settings).train()(data[0])

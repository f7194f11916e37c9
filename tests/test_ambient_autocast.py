"""A caller's torch.autocast does not reach fits and predictions: their numbers are those without it."""

import inspect

import pytest
import torch
from torch import nn

import bayesformer as bf
from bayesformer.core.ambient_autocast import without_autocast

TRAINING = bf.Training(epochs=3, batch_size=20)
X = torch.randn(60, 4, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] > 0).long()


class Watching(nn.Module):
    """A small classifier that fails if its pass would be in half precision."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))

    def forward(self, x):
        """(B, 2)."""
        assert not torch.is_autocast_enabled("cpu")
        return self.layers(x)


def _autocast():
    return torch.autocast("cpu", dtype=torch.bfloat16)


def _fit(method):
    torch.manual_seed(0)
    return bf.fit(Watching(), (X, Y), likelihood="categorical", method=method, training=TRAINING)


@pytest.mark.filterwarnings("ignore::bayesformer.FidelityWarning")
@pytest.mark.parametrize("method", ["mle", "laplace", "ivon", "ekf", "mean_field"])
def test_fit_and_predict_are_the_same_inside_autocast(method):
    plain = _fit(method)
    with _autocast():
        found = _fit(method)
        inside = found.predict(X)
        assert torch.is_autocast_enabled("cpu")
    assert torch.equal(found.theta, plain.theta)
    torch.testing.assert_close(inside.probs, plain.predict(X).probs, rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore::bayesformer.FidelityWarning")
def test_every_way_of_asking_is_outside_autocast():
    asked = {
        "predict": lambda p: [p.predict(X, predictive=way) for way in ("sampled", "linearised", "streamlined")],
        "outputs": lambda p: p.outputs(X),
        "predict_batches": lambda p: list(p.predict_batches(X)),
        "joint": lambda p: p.joint(X[:3]),
        "layer_shares": lambda p: p.layer_shares(X),
        "input_sensitivity": lambda p: p.input_sensitivity(X),
        "calibrated": lambda p: p.calibrated(X),
        "calibrate": lambda p: p.calibrate((X, Y)),
        "conformal": lambda p: p.conformal((X, Y)),
        "check": lambda p: p.check((X, Y)),
        "gated": lambda p: p.gated((X, Y), (X, Y)),
    }
    posterior = _fit("laplace")
    with _autocast():
        for ask in asked.values():
            ask(posterior)
        bf.laplace(posterior.module().eval(), (X, Y), likelihood="categorical")
    marked = {name for name, f in inspect.getmembers(bf.Posterior, inspect.isfunction) if hasattr(f, "__wrapped__")}
    assert marked >= set(asked) | {"generate", "sample_answers", "attention_maps"}


def test_between_the_steps_of_a_generator_the_caller_has_his_autocast():
    @without_autocast
    def steps():
        yield torch.is_autocast_enabled("cpu")
        yield torch.is_autocast_enabled("cpu")

    with _autocast():
        for inside in steps():
            assert not inside
            assert torch.is_autocast_enabled("cpu")


@pytest.mark.filterwarnings("ignore::bayesformer.FidelityWarning")
@pytest.mark.parametrize("method", [bf.Hmc(chains=1, draws=2, warm_up=5, max_leapfrogs=5), bf.Vi(epochs=2), bf.Map()])
def test_a_default_precision_of_torch_changes_nothing(method):
    model = Watching()

    def fit():
        return bf.fit(model, (X, Y), likelihood="categorical", method=method, training=TRAINING).theta

    plain = fit()
    torch.set_default_dtype(torch.float64)
    try:
        assert torch.equal(fit(), plain)
    finally:
        torch.set_default_dtype(torch.float32)

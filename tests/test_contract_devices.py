"""Every method fits and predicts without a single tensor or generator of the library that does not name its device."""

import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from bayesformer.laplace.method import STRUCTURES
from bayesformer.layers.families import FAMILIES
from bayesformer.likelihoods import as_likelihood
from bayesformer.methods import METHODS, Problem, build_method
from bayesformer.posterior import Posterior
from tests import device_watch
from tests.contract import REFUSED, TRAINING, ask, fit, plain_model, ways_of
from tests.contract_zoo import build
from tests.device_watch import UnnamedDeviceError, watching_devices

pytestmark = pytest.mark.filterwarnings("ignore::bayesformer.FidelityWarning")  # fits are as short as can be

KINDS = ("all_weights", "batch_norm", "lora", "bfloat16_weights")


@pytest.mark.parametrize(
    ("method", "kind"), [(method, kind) for kind in KINDS for method in METHODS if (method, kind) not in REFUSED]
)
def test_every_factory_names_its_device(method, kind, monkeypatch, tmp_path, caplog):
    pytest.importorskip("peft")
    caplog.set_level(logging.ERROR)
    example = build(kind)
    plain = plain_model(kind, example)
    with watching_devices(monkeypatch):
        posterior = fit(method, example)
        for way in ways_of(posterior, kind):
            ask(posterior, example.inputs, way)
        posterior.save(tmp_path)
        ask(Posterior.load(tmp_path, plain), example.inputs, ways_of(posterior, kind)[0])


VARIANTS = [
    *(("laplace", {"structure": name}) for name in STRUCTURES),
    *(("laplace", {"structure": "diag", "curvature": name}) for name in ("ggn", "mc", "fisher")),
    ("laplace", {"structure": "diag", "prior_precision": "marglik", "per": "layer"}),
    *(("vi", {"kind": kind}) for kind in ("dense", "diag")),
    ("ekf", {"kind": "dense", "transition_sd": 0.1}),
    *(
        ("mean_field", {"family": family, "local": False, "flipout": True, "prior": "cauchy(0, 1)"})
        for family in FAMILIES
    ),
    ("mean_field", {"predictive": "linearised"}),
    *(("attention", {"family": family}) for family in ("gaussian", "dirichlet", "weibull", "lognormal")),
    ("attention", {"family": "dirichlet", "data_dependent": True}),
    ("attention", {"family": "weibull", "prior": "contextual"}),
    ("sghmc", {"cycles": 1, "draws": 1}),
    ("vi", {"subset": "projection*"}),
    ("swag", {"rank": 0, "every": 1}),
]
"""settings that take another way through the library"""


@pytest.mark.parametrize(("method", "settings"), VARIANTS)
def test_variants_name_their_devices(method, settings, monkeypatch):
    example = build("all_weights")
    few = {} if method == "swag" else {"draws": 2}
    problem = Problem(
        example.model, as_likelihood(example.likelihood), example.data, training=replace(TRAINING, epochs=4, lr=1e-3)
    )
    chosen = build_method(method, {**few, **settings})
    with watching_devices(monkeypatch):
        posterior = chosen.fit(problem)
        for way in ways_of(posterior):
            ask(posterior, example.inputs, way)


def test_a_factory_of_the_library_is_found(monkeypatch, tmp_path):
    """The same line is an error in a file of the library and none in a user's."""
    inside, outside = f"{device_watch.HOME}/made_up.py", str(tmp_path / "model.py")
    for text in ("torch.zeros(3)", "torch.rand(2)", "torch.Generator()", "torch.arange(3, dtype=torch.float32)",
                 "torch.distributions.Normal(0.0, 1.0)", "torch.as_tensor([1.0])"):  # fmt: skip
        with watching_devices(monkeypatch):
            exec(compile(text, outside, "eval"), {"torch": torch})
            with pytest.raises(UnnamedDeviceError, match="without a device in bayesformer/made_up.py:<module>"):
                exec(compile(text, inside, "eval"), {"torch": torch})
    for text in ("torch.zeros(3, device='cpu')", "torch.zeros_like(x)", "x.new_zeros(3)", "torch.Generator(x.device)",
                 "x.to(torch.float64)", "torch.as_tensor(x)", "nn.Linear(2, 3)", "torch.normal(x, 1.0)"):  # fmt: skip
        with watching_devices(monkeypatch):
            exec(compile(text, inside, "eval"), {"torch": torch, "nn": nn, "x": torch.ones(2)})


def test_exceptions_are_few():
    assert len(device_watch.ALLOWED) <= 5
    assert all((Path(device_watch.HOME) / place.partition(":")[0]).exists() for place in device_watch.ALLOWED)

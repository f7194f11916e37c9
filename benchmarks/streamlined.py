"""Streamlined prediction, in units of a plain forward pass of the same model on the same inputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import nn

from bayesformer.bench.tasks import TASKS
from bayesformer.core.types import Inputs
from bayesformer.laws import gaussian
from bayesformer.model.calling import apply
from bayesformer.model.space import Space
from bayesformer.models import Encoder, Tagger, VisionTransformer
from bayesformer.posterior import Posterior
from bayesformer.predict.one_pass import OnePass, one_pass_outputs
from benchmarks.harness import Comparison


def comparisons() -> Iterator[Comparison]:
    """All comparisons of this file: every weight is uncertain."""
    task = TASKS["digits"]()
    images = task.load().test.inputs
    assert isinstance(images, torch.Tensor)
    yield from rules()
    yield against_forward("vit", _model(task.model), images[:64], 4.0, rounds=25)
    yield against_draws("vit", task.model, images[:64])
    yield against_forward(
        "gpt2-small, 2 x 32", _model(_gpt2), {"input_ids": torch.arange(64).view(2, 32)}, 5.0, rounds=3
    )


def rules() -> Iterator[Comparison]:
    """Streamlined prediction by each of its rules, calibrated before: at most 8 passes at one position, 6 at all.

    Where a layer is wide, per-example products of slopes and inputs leave the cache, and 14 are allowed.
    """
    for label, tokens, dim, depth, classes, budget in (
        ("3 outputs, 25 tokens", 25, 40, 2, 3, 8.0),
        ("10 outputs, 25 tokens, 8 blocks", 25, 40, 8, 10, 8.0),
        ("1000 outputs, 25 tokens", 25, 80, 2, 1000, 8.0),
        ("10 outputs, 256 tokens", 256, 40, 2, 10, 8.0),
        ("10 outputs, 64 tokens, width 192", 64, 192, 4, 10, 14.0),
    ):
        side = 2 * math.isqrt(tokens)
        model = _model(partial(VisionTransformer, side, 2, 1, classes, dim=dim, depth=depth, heads=2, mlp_ratio=2))
        yield by_rule(label, model, torch.randn(64, 1, side, side, generator=_source()), budget)
    tokens = torch.randint(200, (64, 25), generator=_source())
    yield by_rule("all of 25 tokens", _model(lambda: Tagger(Encoder(40, 2, 2), 200, 50)), tokens, 6.0)


def by_rule(label: str, model: nn.Module, inputs: torch.Tensor, budget: float) -> Comparison:
    """One prediction of 64 inputs by a posterior that is calibrated already."""
    posterior = Posterior(model, TASKS["digits"]().likelihood, _posterior(model, 1e-3)).calibrated(inputs)
    return Comparison(
        f"streamlined, {label}",
        lambda: posterior.outputs(inputs, predictive="streamlined"),
        _plain(model, inputs),
        budget,
        rounds=25,
    )


def _source() -> torch.Generator:
    return torch.Generator("cpu").manual_seed(0)


def against_forward(label: str, model: nn.Module, inputs: Inputs, budget: float, rounds: int) -> Comparison:
    """The diagonal pass with everything prepared, as for many batches."""
    predictor = OnePass(model, Space.of(model), _posterior(model))

    def ours() -> None:
        with torch.no_grad():
            predictor(inputs)

    return Comparison(f"streamlined diagonal, {label}", ours, _plain(model, inputs), budget, rounds=rounds)


def against_draws(label: str, build: Callable[[], nn.Module], inputs: Inputs) -> Comparison:
    """The diagonal pass, preparation included, over 50 draws of the same posterior: a tenth at most."""
    model = _model(build)
    weights, space = _posterior(model), Space.of(model)
    posterior = Posterior(model, TASKS["digits"]().likelihood, weights)
    return Comparison(
        f"streamlined diagonal over 50 draws, {label}",
        lambda: one_pass_outputs(model, space, weights, [inputs]),
        lambda: posterior.outputs(inputs, 50, strategy="looped"),
        0.1,
        rounds=7,
    )


def _plain(model: nn.Module, inputs: Inputs) -> Callable[[], None]:
    def run() -> None:
        with torch.inference_mode():
            apply(model, inputs)

    return run


def _model(build: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return build().eval()


def _gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config())


def _posterior(model: nn.Module, sd: float = 0.02) -> gaussian:
    theta = Space.of(model).pack(dict(model.named_parameters()))
    return gaussian(theta, torch.full_like(theta, sd))

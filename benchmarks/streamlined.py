"""Streamlined prediction, in units of a plain forward pass of the same model on the same inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import nn

from bayesformer.bench.tasks import TASKS
from bayesformer.core.types import Inputs
from bayesformer.laws import gaussian
from bayesformer.model.calling import apply
from bayesformer.model.space import Space
from bayesformer.posterior import Posterior
from bayesformer.predict.one_pass import OnePass, one_pass_outputs
from benchmarks.harness import Comparison


def comparisons() -> Iterator[Comparison]:
    """All comparisons of this file: every weight is uncertain."""
    task = TASKS["digits"]()
    images = task.load().test.inputs
    assert isinstance(images, torch.Tensor)
    yield against_forward("vit", _model(task.model), images[:64], 4.0, rounds=25)
    yield against_draws("vit", task.model, images[:64])
    yield against_forward(
        "gpt2-small, 2 x 32", _model(_gpt2), {"input_ids": torch.arange(64).view(2, 32)}, 5.0, rounds=3
    )


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
        lambda: posterior.outputs(inputs, 50, workers=1, strategy="looped"),
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


def _posterior(model: nn.Module) -> gaussian:
    theta = Space.of(model).pack(dict(model.named_parameters()))
    return gaussian(theta, torch.full_like(theta, 0.02))

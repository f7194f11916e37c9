"""What every method promises on every kind of model, checked on one fit per cell of the table methods × kinds.

`METHODS` is the library's own list: a new method is in the table without a line here. Settings make the fits small;
a method that is not in `SETTINGS` runs with its defaults.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn

import bayesformer as bf
from bayesformer.data.inputs import leaves, map_inputs
from bayesformer.laws import GaussianLaw
from bayesformer.likelihoods import as_likelihood
from bayesformer.methods import Problem, build_method
from bayesformer.model.space import Space
from bayesformer.posterior import Posterior
from bayesformer.predict.one_pass import Settings
from bayesformer.predict.ways import WAYS
from tests.contract_zoo import Example, build

DRAWS, THREADS = 3, 8
TRAINING = bf.Training(batch_size=4, lr=1e-2, warmup=1)
SETTINGS: dict[str, dict[str, Any]] = {
    "ensemble": {"members": DRAWS},
    "combined": {"settings": {"draws": 1, "chains": 2}},
    "swag": {"draws": DRAWS, "rank": 2, "every": 1},
    "sgld": {"draws": 1, "chains": 2},
    "psgld": {"draws": 1, "chains": 2},
    "sghmc": {"draws": 1, "chains": 2},
    "sgnht": {"draws": 1, "chains": 2},
    "baoab": {"draws": 1, "chains": 2},
    "vi": {"draws": DRAWS, "epochs": 2},
    "ivon": {"draws": DRAWS, "epochs": 2},
    "hmc": {"draws": 1, "chains": 2, "thin": 1, "warm_up": 2, "max_leapfrogs": 4},
    "nuts": {"draws": 1, "chains": 2, "thin": 1, "warm_up": 2, "max_depth": 2},
    "tfb": {"draws": DRAWS, "anchors": 4, "samples": 2, "iterations": 3},
} | {
    name: {"draws": DRAWS}
    for name in ("mc_dropout", "mean_field", "concrete_dropout", "attention", "ekf", "laplace", "blob")
}

CERTAIN = ("mle", "map")
"""methods with one draw"""
NO_ATTENTION = "must have softmax attention that can be replaced"
NO_LINEAR = "must have a linear layer whose weight is learned"
NO_DROPOUT = "needs a model with dropout"
MOVING = "needs a log joint that stays the same; training passes of this model change buffers"
REFUSED: dict[tuple[str, str], str] = {
    **{(method, kind): NO_ATTENTION for method in ("attention", "combined") for kind in ("convolutions", "lstm")},
    **{(method, kind): NO_ATTENTION for method in ("attention", "combined") for kind in ("geometric", "no_dropout")},
    ("mc_dropout", "no_dropout"): NO_DROPOUT,
    **{(method, kind): MOVING for method in ("hmc", "nuts") for kind in ("batch_norm", "own_buffers")},
    **{(method, "own_noise"): "needs a model that is deterministic in evaluation mode" for method in ("hmc", "nuts")},
    **{("concrete_dropout", kind): NO_LINEAR for kind in ("geometric", "only_biases")},
}
"""Cells that are refused before training, with what the error says."""

NO_RULE = "no rule says how variance passes through it"
REFUSED_WAYS: dict[tuple[str, str], str] = {
    **{
        ("one_pass", kind): NO_RULE
        for kind in ("parametrised", "lstm", "geometric", "graph_attention", "swin", "t5", "dora")
    },
    ("one_pass", "bfloat16_base"): "the model casts to half precision by itself",
}
"""Ways of predicting that a kind of model does not allow, with what the error says."""


class Alarm:
    """A reporter that does not let training begin."""

    def update(self, task: str, done: int, total: int, note: str = "") -> None:
        raise AssertionError(f"training began ({task}) before the refusal")


@dataclass(frozen=True)
class Answer:
    """The numbers of a predictive, to be compared bit for bit."""

    tensors: tuple[torch.Tensor, ...]

    @classmethod
    def of(cls, predictive: Any) -> Answer:
        values = [getattr(predictive, field.name) for field in fields(predictive)]
        return cls(tuple(v for v in values if isinstance(v, torch.Tensor)))

    def __eq__(self, other: object) -> bool:
        assert isinstance(other, Answer)
        pairs = zip(self.tensors, other.tensors, strict=True)
        return all(torch.equal(a, b) for a, b in pairs)

    __hash__ = None  # type: ignore[assignment]

    @property
    def varies(self) -> bool:
        """Whether draws differ; one draw does not."""
        return any(bool((t[0] != t[-1]).any()) for t in self.tensors if t.dim() > 1)

    @property
    def finite(self) -> bool:
        return bool(self.tensors) and not any(bool(t.isnan().any()) for t in self.tensors)


def fit(method: str, example: Example, seed: int = 0, **more: Any) -> Posterior:
    return bf.fit(
        example.model,
        example.data,
        likelihood=example.likelihood,
        method=build_method(method, SETTINGS.get(method)),
        infer=example.infer,
        training=replace(TRAINING, epochs=example.epochs),
        seed=seed,
        progress=False,
        **more,
    )


def ways_of(posterior: Posterior, kind: str = "") -> list[str]:
    """The ways in which a posterior can be asked: all of a Gaussian, draws of anything else."""
    ways = WAYS if isinstance(posterior.law, GaussianLaw) else ("sampled",)
    return [way for way in ways if (way, kind) not in REFUSED_WAYS]


def ask(posterior: Posterior, inputs: Any, way: str, seed: int = 0) -> Answer:
    settings = Settings(correlations="drop") if way == "one_pass" else None
    return Answer.of(posterior.predict(inputs, predictive=way, seed=seed, settings=settings, full=True))


def questions(example: Example) -> list[tuple[Any, int]]:
    """Two different questions: all of the inputs, and the first of them with another seed."""
    return [(example.inputs, 0), (map_inputs(example.inputs, lambda x: x[:1]), 1)]


def check_cell(method: str, kind: str, folder: Path) -> str:
    """All promises of one cell; returns the reason if the cell is refused as `REFUSED` says, else nothing."""
    refusal = REFUSED.get((method, kind))
    if refusal is not None:
        return check_refusal(method, kind, refusal)
    example = build(kind)
    with unchanged(example.model, (example.data, example.inputs)):
        posterior = fit(method, example)
        ways, asked = ways_of(posterior, kind), questions(example)
        alone = {way: [ask(posterior, x, way, seed) for x, seed in asked] for way in ways}
        posterior.save(folder)
    for way, answers in alone.items():
        assert all(answer.finite for answer in answers), f"{way}: NaN, or nothing"
    assert method in CERTAIN or alone["sampled"][0].varies, "all draws are equal"
    check_trained(posterior, example)
    check_refused_ways(posterior, example, kind)
    check_loaded(kind, folder, example, alone)
    check_threads(posterior, asked, alone)
    return ""


def check_trained(posterior: Posterior, example: Example) -> None:
    """Training has moved the weights, most of them: an output does not depend on all weights of every model."""
    own = dict(example.model.named_parameters(remove_duplicate=False))
    own |= {f"model.{name}": p for name, p in own.items() if f"model.{name}" not in own}  # as random networks name them
    found = posterior.space.views(posterior.theta[0])
    moved = [not torch.equal(value, own[name].to(value)) for name, value in found.items() if name in own]
    assert sum(moved) > len(moved) / 2, f"training moved {sum(moved)} of {len(moved)} weights"


def check_refusal(method: str, kind: str, expected: str) -> str:
    """The cell is refused before training, in the words expected, and the model is left as it was."""
    example = build(kind)
    problem = Problem(
        example.model,
        as_likelihood(example.likelihood),
        example.data,
        training=replace(TRAINING, epochs=example.epochs),
        infer=example.infer,
        reporter=Alarm(),
    )
    with unchanged(example.model), pytest.raises(ValueError, match=expected) as refusal:
        build_method(method, SETTINGS.get(method)).fit(problem)
    return str(refusal.value)


def check_refused_ways(posterior: Posterior, example: Example, kind: str) -> None:
    """Ways that the kind does not allow are errors in the words expected."""
    if not isinstance(posterior.law, GaussianLaw):
        return
    for way in WAYS:
        expected = REFUSED_WAYS.get((way, kind))
        if expected is not None:
            with pytest.raises((ValueError, NotImplementedError), match=expected):
                ask(posterior, example.inputs, way)


def plain_model(kind: str, example: Example, seed: int = 1) -> nn.Module:
    """The model built anew: other inferred weights and buffers, the same frozen weights."""
    other = build(kind, seed).model
    inferred, own = set(Space.of(other, example.infer).names), dict(example.model.named_parameters())
    with torch.no_grad():
        for name, parameter in other.named_parameters():
            if name not in inferred:
                parameter.copy_(own[name])
    return other


def check_loaded(kind: str, folder: Path, example: Example, alone: dict[str, list[Answer]]) -> None:
    """A file and the plain model give the same answers, bit for bit; the plain model is left as it was."""
    model = plain_model(kind, example)
    with unchanged(model):
        loaded = Posterior.load(folder, model)
        for way, answers in alone.items():
            for (x, seed), before in zip(questions(example), answers, strict=True):
                assert ask(loaded, x, way, seed) == before, f"{way}: the loaded posterior answers differently"


def check_threads(posterior: Posterior, asked: list[tuple[Any, int]], alone: dict[str, list[Answer]]) -> None:
    """Eight threads at once, every way: each gets what one thread alone gets."""
    start = threading.Barrier(THREADS)

    def many(thread: int) -> list[str]:
        start.wait(60)
        wrong = []
        for way, answers in alone.items():
            number = thread % len(asked)
            x, seed = asked[number]
            if ask(posterior, x, way, seed) != answers[number]:
                wrong.append(way)
        return wrong

    with ThreadPoolExecutor(THREADS) as executor:
        wrong = [way for found in executor.map(many, range(THREADS)) for way in found]
    assert not wrong, f"threads: {len(wrong)} of {THREADS * len(alone)} answers differ from those of one: {set(wrong)}"


@contextmanager
def unchanged(model: nn.Module, data: Any = ()) -> Iterator[None]:
    """Fails if the model, data, the process's settings or the caller's random states are not as before afterwards."""
    for number, parameter in enumerate(model.parameters()):
        if number % 2 == 0 and parameter.requires_grad:
            parameter.grad = torch.full_like(parameter, 0.5)
    before, state, values = facts_of_model(model), facts_of_process(), facts_of_data(data)
    yield
    _compare(before, facts_of_model(model), "the model's")
    _compare(values, facts_of_data(data), "the data's")
    _compare(state, facts_of_process(), "the process's")


def _compare(before: dict[str, Any], after: dict[str, Any], whose: str) -> None:
    changed = [name for name in {**before, **after} if not _same(before.get(name), after.get(name))]
    assert not changed, f"changed: {whose} {', '.join(changed[:5])}"


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    return type(a) is type(b) and a == b


HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_state_dict_hooks")


def facts_of_model(model: nn.Module) -> dict[str, Any]:
    """Weights, gradients, flags, buffers, hooks, attributes and configuration, by name."""
    facts: dict[str, Any] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        grad = None if p.grad is None else p.grad.clone()
        facts |= {f"weight {name}": p.detach().clone(), f"gradient {name}": grad, f"flag {name}": p.requires_grad}
        facts[f"identity {name}"] = (id(p), p.data_ptr())
    for name, buffer in model.named_buffers(remove_duplicate=False):
        facts |= {f"buffer {name}": buffer.clone(), f"identity {name}": (id(buffer), buffer.data_ptr())}
    for name, module in model.named_modules():
        facts |= {f"mode {name}": module.training, f"class {name}": type(module), f"parts {name}": sorted(vars(module))}
        facts |= {f"{hooks} {name}": list(getattr(module, hooks)) for hooks in HOOKS}
        config = getattr(module, "config", None)
        if hasattr(config, "to_json_string"):
            facts[f"config {name}"] = (config.to_json_string(), config._attn_implementation)
    return facts


def facts_of_data(data: Any) -> dict[str, Any]:
    """Copies of all tensors in the data."""
    return {f"tensor {i}": x.clone() for i, x in enumerate(leaves(data)) if isinstance(x, torch.Tensor)}


def facts_of_process() -> dict[str, Any]:
    """The random states of torch, numpy and `random`, and torch's settings in this thread."""
    return {
        "torch stream": torch.get_rng_state(),
        "numpy stream": [str(part) for part in numpy.random.get_state()],  # noqa: NPY002
        "python stream": random.getstate(),
        "gradient mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "default dtype": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "fast path": torch.backends.mha.get_fastpath_enabled(),
        "attention kernels": [
            getattr(torch.backends.cuda, f"{kernel}_sdp_enabled")() for kernel in ("flash", "mem_efficient", "math")
        ],
    }


def held_while(gate: Any, hold: Callable[[], Answer], other: Callable[[], Answer]) -> tuple:
    """Answers of a prediction that is held inside the model's forward, and of one that must finish meanwhile."""
    found: dict[str, Any] = {}

    def run(name: str, question: Callable[[], Answer]) -> None:
        try:
            found[name] = question()
        except BaseException as error:
            found[name] = error

    held = threading.Thread(target=run, args=("held", hold), name="held", daemon=True)
    free = threading.Thread(target=run, args=("free", other), name="free", daemon=True)
    held.start()
    assert gate.inside.wait(60), f"the prediction never came to the gate: {found}"
    try:
        free.start()
        free.join(60)
        assert not free.is_alive(), "a prediction waits for another one that is inside the model"
        assert "held" not in found
    finally:
        gate.release.set()
    held.join(60)
    for answer in found.values():
        if isinstance(answer, BaseException):
            raise answer
    return found["held"], found["free"]

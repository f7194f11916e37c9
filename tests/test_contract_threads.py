"""A posterior is a value: predictions do not wait for each other, and fits in threads are fits alone."""

import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

import bayesformer as bf
from bayesformer.methods import METHODS, build_method
from tests.contract import SETTINGS, TRAINING, ask, facts_of_process, fit, held_while, ways_of
from tests.contract_zoo import Attends, Example, Gate, numbers, sequences, whole

pytestmark = pytest.mark.filterwarnings("ignore::bayesformer.FidelityWarning")  # fits are as short as can be


class Gated(Attends):
    """Attention behind a gate at which a thread can be held."""

    def __init__(self):
        super().__init__()
        self.gate = Gate()

    def forward(self, x):
        return super().forward(self.gate(x))


@pytest.mark.parametrize("method", METHODS)
def test_a_prediction_that_is_held_inside_the_model_stops_no_other(method, caplog):
    caplog.set_level(logging.ERROR)
    model = Gated()
    example = sequences(model)
    posterior, x = fit(method, example), example.inputs
    for way in ways_of(posterior):
        posterior = replace(posterior)  # nothing is known yet, so that the first trial passes are held as well
        model.gate.inside.clear()
        model.gate.release.clear()
        held, free = held_while(
            model.gate,
            lambda p=posterior, way=way: ask(p, x, way, 1),
            lambda p=posterior, way=way: ask(p, x[:2], way, 2),
        )
        assert held == ask(posterior, x, way, 1)
        assert free == ask(posterior, x[:2], way, 2)


def built():
    """A new network with dropout: what a user gives as a function that builds models."""
    return Attends()


@pytest.mark.parametrize("method", METHODS)
def test_fits_in_threads_are_fits_alone(method):
    x, y = numbers(8, 5, 4), whole(3, 8)

    def run(seed):
        chosen = build_method(method, SETTINGS.get(method))
        training = replace(TRAINING, epochs=2)
        posterior = bf.fit(
            built, (x, y), likelihood="categorical", method=chosen, training=training, seed=seed, progress=False
        )
        return posterior.law.tensors(), ask(posterior, x[:3], "sampled")

    alone, before = [run(seed) for seed in (0, 1)], facts_of_process()
    start = threading.Barrier(4)

    def together(seed):
        start.wait(60)
        return run(seed)

    with ThreadPoolExecutor(4) as executor:
        found = list(executor.map(together, (0, 1, 0, 1)))
    for (law, answer), (expected, same) in zip(found, alone * 2, strict=True):
        assert all(torch.equal(law[name], expected[name]) for name in {**law, **expected})
        assert answer == same
    after = facts_of_process()
    assert torch.equal(before.pop("torch stream"), after.pop("torch stream"))
    assert before == after


def test_predictions_and_fits_of_a_model_of_transformers_at_once():
    pytest.importorskip("transformers")
    from tests.contract_zoo import build

    example: Example = build("bert")
    posterior = fit("vi", example)
    expected = ask(posterior, example.inputs, "sampled")
    law = posterior.law.tensors()

    def predicting(_):
        return ask(posterior, example.inputs, "sampled") == expected

    def fitting(_):
        found = fit("vi", example).law.tensors()
        return all(torch.equal(found[name], law[name]) for name in law)

    with ThreadPoolExecutor(8) as executor:
        jobs = [executor.submit(work, i) for i in range(4) for work in (predicting, fitting)]
        assert all(job.result(60) for job in jobs)

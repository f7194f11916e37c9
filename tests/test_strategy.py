"""Looped, batched or in processes: decided by sizes, recorded, and the same numbers whichever it is."""

import pytest
import torch
from torch import nn

import bayesformer as bf
from bayesformer.core import strategy
from bayesformer.core.strategy import all_tensors, choose, decide, largest_tensor, run_as
from bayesformer.core.workers import Workers
from bayesformer.data import as_batches
from bayesformer.likelihoods import Categorical
from bayesformer.models.transformer import Encoder, SequenceClassifier
from bayesformer.models.vit import VisionTransformer
from bayesformer.train.members import Stage
from bayesformer.train.problem import Problem
from bayesformer.train.prototype import Prototype
from tests.nets import Mlp, blobs

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
FAST = bf.Training(epochs=2, batch_size=16, lr=0.02, warmup=5)


def never():
    raise AssertionError("this was not to be asked")


def of_sizes(members=10, weights=1000, largest=100, device=CPU, workers=1, veto=lambda: None):
    return choose(members, weights, lambda: largest, device, workers, veto)


def test_many_small_members_go_together_on_a_cpu():
    assert of_sizes() == "batched"
    assert of_sizes(members=strategy.FEWEST) == "batched"
    assert of_sizes(members=strategy.FEWEST - 1) == "looped"
    assert of_sizes(weights=strategy.WEIGHTS // 10) == "batched"
    assert of_sizes(weights=strategy.WEIGHTS // 10 + 1) == "looped"
    assert of_sizes(members=400, weights=strategy.WEIGHTS // 10) == "batched"  # in chunks of ten
    assert of_sizes(largest=strategy.LARGEST) == "batched"
    assert of_sizes(largest=strategy.LARGEST + 1) == "looped"
    assert of_sizes(veto=lambda: "an LSTM") == "looped"


def test_workers_are_used_when_asked_for_and_only_then():
    assert of_sizes(workers=2) == "processes"
    assert of_sizes(workers=2, weights=10**9, largest=10**9) == "processes"
    assert of_sizes(workers=2, members=1) == "looped"
    assert of_sizes(workers=1, weights=10**9) == "looped"


def test_what_does_not_decide_is_not_asked():
    assert choose(1, 1, never, CPU, 1, never) == "looped"
    assert choose(10, 1, never, CPU, 2, never) == "processes"
    assert choose(10, 10**9, never, CPU, 1, never) == "looped"
    assert choose(2, 1, never, CPU, 1, never) == "looped"
    assert choose(2, 0, never, CPU, 1, lambda: None) == "batched"  # draws that share their weights


def test_on_an_accelerator_what_fits_goes_together(monkeypatch):
    monkeypatch.setattr(strategy, "memory_of", lambda device: 16 * 2**30)
    assert of_sizes(device=GPU, weights=20_000_000, largest=10_000) == "batched"
    assert of_sizes(device=GPU, weights=20_000_000, largest=10_000, workers=2) == "batched"
    assert of_sizes(device=GPU, weights=135_000_000, largest=10_000) == "looped"
    assert of_sizes(device=GPU, weights=1000, largest=100_000_000) == "looped"
    assert of_sizes(device=GPU, members=2, weights=100_000_000, largest=10_000) == "batched"
    monkeypatch.setattr(strategy, "memory_of", lambda device: None)
    assert of_sizes(device=GPU, weights=10**12) == "batched"
    assert strategy.memory_of(torch.device("cpu")) is None


def test_the_largest_tensor_of_a_pass():
    net = nn.Sequential(nn.Linear(3, 40), nn.ReLU(), nn.Linear(40, 2))
    assert largest_tensor(lambda: net(torch.zeros(7, 3))) == 7 * 40
    assert largest_tensor(lambda: None) == 0
    assert all_tensors(lambda: net(torch.zeros(7, 3))) == 7 * (3 + 40 + 40 + 2)


def task(model, inputs):
    data = as_batches((inputs, torch.zeros(len(inputs), dtype=torch.long)), "data")
    problem = Problem(model, Categorical(), data, training=bf.Training(batch_size=len(inputs)))
    return Stage(Prototype(problem), "x", problem.training)


def text_model(dim, depth, vocabulary):
    return lambda: SequenceClassifier(Encoder(dim, depth, heads=2), vocabulary, 2)


@pytest.mark.parametrize(
    ("model", "inputs", "expected"),
    [
        (lambda: Mlp(10, 50), torch.zeros(64, 10), "batched"),
        (text_model(16, 1, 50), torch.zeros(50, 20, dtype=torch.long), "batched"),
        (text_model(16, 1, 50), torch.zeros(200, 40, dtype=torch.long), "looped"),  # 8000 tokens
        (lambda: VisionTransformer(8, 2, 1, 10), torch.zeros(16, 1, 8, 8), "batched"),
        (lambda: VisionTransformer(8, 2, 1, 10), torch.zeros(128, 1, 8, 8), "looped"),  # 2048 tokens of width 32
        (text_model(384, 6, 30522), torch.zeros(2, 8, dtype=torch.long), "looped"),  # as MiniLM
    ],
)
def test_what_is_chosen_for_models_of_known_speed(model, inputs, expected):
    given = task(model, inputs)
    made = choose(10, given.weights, given.largest, given.device, 1, given.why_not_batched)
    assert made == expected
    assert made == choose(10, given.weights, given.largest, given.device, 1, given.why_not_batched)


def test_asking_changes_neither_the_model_nor_the_random_state():
    model = Mlp(dropout=0.5)
    given, state = task(model, torch.zeros(8, 3)), torch.get_rng_state()
    before = [p.clone() for p in model.parameters()]
    choose(10, given.weights, given.largest, given.device, 1, given.why_not_batched)
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def fit(members=5, **options):
    return bf.fit(Mlp, blobs(60), likelihood="categorical", method=bf.Ensemble(members), training=FAST, **options)


def test_the_strategy_is_recorded_with_the_posterior(tmp_path):
    chosen = fit()
    assert chosen.facts["strategy"] == "batched"
    assert fit(members=2).facts["strategy"] == "looped"
    looped = fit(strategy="looped")
    assert looped.facts["strategy"] == "looped"
    torch.testing.assert_close(chosen.theta, looped.theta, atol=1e-5, rtol=1e-4)
    looped.save(tmp_path)
    assert bf.Posterior.load(tmp_path, Mlp()).facts["strategy"] == "looped"
    assert torch.equal(fit().theta, chosen.theta)


def test_two_workers_run_processes_with_the_numbers_of_the_loop():
    offset = 1.0

    class Local(Mlp):  # of no module that a worker could import
        def forward(self, x):
            return super().forward(x + offset)

    run = lambda **options: bf.fit(  # noqa: E731
        Local, blobs(60), likelihood="categorical", method=bf.Ensemble(3), training=FAST, **options
    )
    with pytest.raises(ValueError, match="workers must be a whole number of at least 1; got 0"):
        run(workers=0)
    made = run(workers=2)
    assert made.facts["strategy"] == "processes"
    assert torch.equal(made.theta, run(strategy="looped").theta)


def test_processes_equal_the_loop_of_one_thread_whatever_the_parent_has():
    x = torch.randn(48, 1, 8, 8)
    y = torch.randint(3, (48,))

    def run(threads, **options):
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            build = lambda: VisionTransformer(8, 2, 1, 3)  # noqa: E731
            method, training = bf.Ensemble(2), bf.Training(epochs=2, batch_size=16)
            return bf.fit(build, (x, y), likelihood="categorical", method=method, training=training, **options)
        finally:
            torch.set_num_threads(before)

    looped = run(1, strategy="looped")
    for threads in (1, 2):
        made = run(threads, workers=2)
        assert made.facts["strategy"] == "processes"
        assert torch.equal(made.theta, looped.theta)


class Square:
    """Work of one number, in any strategy."""

    device, weights = CPU, 10**9

    def single(self, member, reporter):
        return torch.tensor([member**2], dtype=torch.bfloat16)

    def batched(self, members, reporter):
        return torch.tensor([m**2 for m in members], dtype=torch.bfloat16)

    def largest(self):
        return 1

    def why_not_batched(self):
        return "it is not worth it"

    def shared(self):
        return {}


def test_results_come_in_the_order_of_members():
    with Workers(2) as pool:
        for options in [{}, {"workers": pool}, {"strategy": "processes", "workers": pool}]:
            chosen = decide(Square(), [3, 1, 2], **options)
            assert chosen == ("processes" if options else "looped")
            results = run_as(Square(), [3, 1, 2], chosen, options.get("workers"))
            assert torch.equal(torch.cat(results), torch.tensor([9, 1, 4], dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="'batched' is not possible here: it is not worth it. Use 'looped'"):
        decide(Square(), [1, 2], "batched")
    with pytest.raises(ValueError, match="unknown strategy 'fast'"):
        decide(Square(), [1], "fast")
    with pytest.raises(ValueError, match="members must hold at least one member"):
        decide(Square(), [])

"""The loop: reproducible, resumable to the bit, loud when it diverges."""

import gc
import math
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset

import bayesformer as bf
from bayesformer.core.errors import DamagedFileError, TrainingDivergedError
from bayesformer.core.seeds import fold, generator
from bayesformer.core.vectors import THETA
from bayesformer.data import as_batches
from bayesformer.data.streams import Stream
from bayesformer.inference import optimise
from bayesformer.likelihoods import Categorical
from bayesformer.methods import build_method
from bayesformer.model.randomness import pass_noise
from bayesformer.train import checkpoint as checkpoints
from bayesformer.train.collect import Collect
from bayesformer.train.convergence import has_converged, parts_of
from bayesformer.train.loop import score, train
from bayesformer.train.members import Stage
from bayesformer.train.problem import Problem
from bayesformer.train.prototype import Prototype
from bayesformer.train.training import Training
from tests.nets import Mlp, Normed, blobs

SHORT = Training(epochs=6, batch_size=16, lr=0.02, warmup=5)


def stage(training=SHORT, seed=0, validation=True, model=None, data=None, **options):
    """The stage that maximum likelihood is, on a model with dropout unless another is given."""
    torch.manual_seed(5)
    held_out = blobs(40, seed=1) if validation else None
    problem = Problem(
        model=(model or dropping)(),
        likelihood=Categorical(),
        data=blobs(60) if data is None else data,
        validation=held_out,
        training=training,
        seed=seed,
    )
    prototype = Prototype(problem)
    return Stage(prototype, "mle", training, validation=prototype.validation, **options)


def dropping():
    return Mlp(dropout=0.2)


def job(training=SHORT, member=0, **options):
    return stage(training, **options).job([member])


def same(first, second):
    """Whether two results are equal bit for bit, but for the time they took."""
    assert torch.equal(first.theta, second.theta)
    assert first.history == second.history
    assert torch.equal(first.best_score, second.best_score)
    assert torch.equal(first.best_epoch, second.best_epoch)
    assert (first.epochs, first.steps, first.converged) == (second.epochs, second.steps, second.converged)
    for name, value in first.buffers.items():
        assert torch.equal(value, second.buffers[name]), name
    if first.draws is not None:
        assert torch.equal(first.draws, second.draws)
    for key, value in checkpoints.pack_state(first.state).items():
        assert torch.equal(value, checkpoints.pack_state(second.state)[key]), key


# --- what it computes -----------------------------------------------------------------------------------------------


def test_equal_seeds_give_equal_runs_and_others_do_not():
    first = train(job())
    same(train(job()), first)
    assert not torch.equal(first.theta, train(job(seed=1)).theta)
    assert not torch.equal(first.theta, train(job(member=1)).theta)


def test_training_does_not_touch_the_callers_random_stream():
    prepared = job()
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    train(prepared)
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_the_loop_equals_a_hand_written_one(dropout):
    """Adam with warm-up and clipping, the order of (seed, member, epoch), dropout from a generator of the same."""
    prepared = job(validation=False, model=lambda: Mlp(dropout=dropout))
    torch.manual_seed(5)
    model = Mlp(dropout=dropout).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    data, step = blobs(60), 0
    for epoch in range(6):
        order = torch.randperm(60, generator=generator(0, 0, epoch, "order"))
        noise = torch.Generator().manual_seed(fold(0, 0, epoch, "noise"))
        for start in range(0, 60, 16):
            step += 1
            for group in optimizer.param_groups:
                group["lr"] = 0.02 * min(step / 5, math.sqrt(5 / step))
            index = order[start : start + 16]
            optimizer.zero_grad()
            with pass_noise(noise):
                loss = torch.nn.functional.cross_entropy(model(data.inputs[index]), data.targets[index])
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    expected = torch.cat([p.detach().flatten() for p in model.parameters()])
    torch.testing.assert_close(train(prepared).theta[0], expected, atol=1e-5, rtol=1e-4)


def test_the_best_epoch_on_validation_data_is_kept():
    prepared = job(Training(epochs=30, batch_size=16, lr=0.5, warmup=1, patience=0))
    trained = train(prepared)
    scores = [epoch["validation"][0] for epoch in trained.history]
    assert len(scores) == 30
    assert trained.best_epoch.item() == max(range(30), key=scores.__getitem__) < 29
    again = score(prepared.shell, Categorical(), trained.theta[0], prepared.validation)
    assert again.item() == pytest.approx(max(scores), abs=1e-6)


def test_scores_are_those_of_the_network_without_dropout():
    prepared, held_out = job(model=dropping), blobs(40, seed=1)
    theta = torch.randn_like(prepared.theta)
    model = dropping().eval()
    torch.nn.utils.vector_to_parameters(theta, model.parameters())
    expected = -torch.nn.functional.cross_entropy(model(held_out.inputs), held_out.targets)
    found = score(prepared.shell, Categorical(), theta, prepared.validation)
    torch.testing.assert_close(found, expected.detach().double()[None], atol=1e-6, rtol=1e-6)


def test_a_rate_for_all_dropout_does_not_reach_scores():
    """Fused attention does not know the mode of its module: a rate given to a pass would drop in evaluation, too."""

    class Attends(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.head = torch.nn.Linear(3, 4), torch.nn.Linear(4, 2)

        def forward(self, x):
            q = self.q(x)[:, None, None]
            keys = torch.cat([q, -q, 2 * q], 2)
            rate = 0.1 if self.training else 0.0
            return self.head(torch.nn.functional.scaled_dot_product_attention(q, keys, keys, dropout_p=rate)[:, 0, 0])

    torch.manual_seed(0)
    model, held_out = Attends(), blobs(40, seed=1)
    posterior = bf.fit(
        model, blobs(60), likelihood="categorical", method=bf.MCDropout(0.5), training=SHORT, validation=held_out
    )
    assert posterior.dropout_rate == 0.5
    prototype = Prototype(Problem(model, Categorical(), blobs(60), held_out, SHORT), dropout_rate=0.5)
    trained = train(Stage(prototype, "mc_dropout", SHORT, validation=prototype.validation).job([0]))
    torch.nn.utils.vector_to_parameters(trained.theta[0], model.parameters())
    expected = -torch.nn.functional.cross_entropy(model.eval()(held_out.inputs), held_out.targets).item()
    assert trained.best_score.item() == pytest.approx(expected, abs=1e-6)


def test_patience_stops_early():
    trained = train(job(Training(epochs=200, batch_size=16, lr=0.5, warmup=1, patience=3)))
    assert len(trained.history) == trained.best_epoch.item() + 4 < 200
    assert trained.converged == [True]


def test_without_validation_the_last_weights_are_kept():
    prepared = job(validation=False)
    trained = train(prepared)
    assert torch.equal(trained.theta[0], prepared.shell.theta)
    assert trained.best_epoch.item() == 5


@pytest.mark.parametrize(("max_steps", "epochs"), [(10, 3), (8, 2), (1, 1), (1000, 6)])
def test_steps_in_all_may_end_inside_an_epoch(max_steps, epochs):
    whole = train(replace(job(validation=False), collect=Collect(tuple(range(1, 25)))))
    part = train(job(replace(SHORT, max_steps=max_steps), validation=False))
    made = min(max_steps, 24)  # 60 examples by 16: four steps per epoch
    assert (part.steps, part.epochs) == (made, epochs)
    assert torch.equal(part.theta[0], whole.draws[0, made - 1])


def test_looks_every_so_many_steps_keep_the_best_of_what_was_seen():
    training = replace(SHORT, evaluate_every=3, max_steps=20, lr=0.3, patience=0)
    other = job(replace(training, evaluate_every=None))
    every = train(replace(other, collect=Collect(tuple(range(1, 21))))).draws[0]
    looks = [*range(3, 20, 3), 20]  # the end is looked at in any case
    scores = [score(other.shell, Categorical(), every[step - 1], other.validation).item() for step in looks]
    trained = train(job(training))
    assert trained.best_score.item() == pytest.approx(max(scores), abs=1e-12)
    assert torch.equal(trained.theta[0], every[looks[scores.index(max(scores))] - 1])
    assert [epoch["validation"][0] for epoch in trained.history] == pytest.approx(
        [scores[looks.index(step)] for step in (3, 6, 12, 15, 20)], abs=1e-12
    )


def test_one_look_at_the_end_if_none_was_due_before():
    trained = train(job(replace(SHORT, evaluate_every=1000, max_steps=6)))
    assert torch.isfinite(trained.best_score).all()
    assert torch.equal(trained.theta[0], trained.state.params[THETA])


def test_patience_counts_looks():
    trained = train(job(Training(epochs=200, batch_size=16, lr=0.5, warmup=1, patience=3, evaluate_every=2)))
    assert trained.steps % 2 == 0
    assert trained.epochs - trained.best_epoch.item() <= 3  # three looks are six steps, not three epochs


def test_members_in_lockstep_are_those_trained_alone():
    """Adam amplifies last bits: 1e-5 after 24 steps."""
    prepared = stage(model=Mlp)
    together = train(prepared.job([0, 1, 2]))
    for member in range(3):
        alone = train(stage(model=Mlp).job([member]))
        torch.testing.assert_close(together.theta[member], alone.theta[0], atol=1e-5, rtol=1e-4)
        assert together.best_epoch[member] == alone.best_epoch[0]


# --- checkpoints ----------------------------------------------------------------------------------------------------


class Stop(Exception):
    pass


def interrupted(prepared, path, at_step):
    """Train with a checkpoint after every step, and die in the middle of step `at_step`."""
    steps, update = [0], prepared.transform.update

    def dying(state, batch, inplace=False):
        steps[0] += 1
        if steps[0] > at_step:
            state.params[THETA].fill_(torch.nan)  # half a step was made
            raise Stop
        return update(state, batch, inplace=inplace)

    broken = replace(prepared, transform=prepared.transform._replace(update=dying))
    with pytest.raises(Stop):
        train(broken, path, every_seconds=0)


class Augmented(Dataset):
    """Random every time it is read, from torch's global stream."""

    def __init__(self, noise=0.5):
        self.data, self.noise = blobs(60), noise

    def __len__(self):
        return 60

    def __getitem__(self, index):
        return self.data.inputs[index] + self.noise * torch.randn(3), self.data.targets[index]


class Flow(IterableDataset):
    def __iter__(self):
        data = blobs(60)
        yield from zip(data.inputs, data.targets, strict=True)


RESUMED = {
    "tensors": {},
    "running averages": {"model": Normed},
    "augmented": {"data": Augmented()},
    "no validation": {"validation": False},
    "looks": {"training": replace(SHORT, evaluate_every=3, patience=0)},
    "stream": {"data": Stream(Flow(), num_data=60)},
}


@pytest.mark.parametrize("kind", RESUMED)
def test_killed_at_any_step_it_ends_with_the_same_bits(kind, tmp_path):
    make = lambda: replace(job(**RESUMED[kind]), collect=Collect((2, 5, 11, 23)))  # noqa: E731
    whole, path = train(make()), tmp_path / "c.safetensors"
    assert whole.steps == 24
    for number, at_step in enumerate(random.Random(3).sample(range(1, 24), 4)):
        path = tmp_path / f"{number}.safetensors"
        interrupted(make(), path, at_step)
        if kind == "stream" and at_step < 4:
            assert not path.exists()  # the first epoch had no end yet
        else:
            done = checkpoints.read_checked(path, "checkpoint")[1]["total"]
            assert done == (at_step // 4 * 4 if kind == "stream" else at_step)
        resumed = train(make(), path, every_seconds=0)
        same(resumed, whole)
    stamp = path.stat().st_mtime_ns
    same(train(make(), path), whole)  # a finished one returns at once
    assert path.stat().st_mtime_ns == stamp


def test_patience_is_not_renewed_by_a_resumption(tmp_path):
    make = lambda: job(Training(epochs=200, batch_size=16, lr=0.5, warmup=1, patience=5))  # noqa: E731
    whole = train(make())
    late = whole.steps - 6  # the best look was before
    interrupted(make(), tmp_path / "c", late)
    same(train(make(), tmp_path / "c"), whole)


def test_killed_twice_in_lockstep(tmp_path):
    make = lambda: stage(model=Mlp).job([0, 1])  # noqa: E731
    whole = train(make())
    interrupted(make(), tmp_path / "c", 6)
    interrupted(make(), tmp_path / "c", 5)  # five more
    assert checkpoints.read_checked(tmp_path / "c", "checkpoint")[1]["total"] == 11
    same(train(make(), tmp_path / "c"), whole)


def test_augmented_examples_differ_between_epochs_and_between_members():
    seen = {}
    for member in (0, 1):
        for epoch in (0, 1):
            batches = as_batches(Augmented()).epoch(60, seed=0, epoch=epoch, member=member)
            batch = next(iter(batches))
            seen[member, epoch] = batch.inputs[torch.argsort(batch.inputs.sum(1))]
    assert all(not torch.equal(seen[0, 0], seen[key]) for key in [(0, 1), (1, 0), (1, 1)])


def test_checkpoints_come_every_so_many_seconds_inside_an_epoch(tmp_path, monkeypatch):
    written, clock = [], [0.0]
    real = checkpoints._write
    monkeypatch.setattr(checkpoints, "_write", lambda run, *rest: (written.append(run.total), real(run, *rest)))
    monkeypatch.setattr(checkpoints.time, "monotonic", lambda: clock[0])
    prepared = job(replace(SHORT, epochs=2))
    update = prepared.transform.update

    def slowly(state, batch, inplace=False):
        clock[0] += 4.0
        return update(state, batch, inplace=inplace)

    train(replace(prepared, transform=prepared.transform._replace(update=slowly)), tmp_path / "c", every_seconds=10.0)
    assert written == [3, 6, 8]  # 12 and 24 seconds, and the end


def test_seconds_add_up_over_resumptions(tmp_path):
    interrupted(job(), tmp_path / "c", 10)
    before = checkpoints.read_checked(tmp_path / "c", "checkpoint")[1]["seconds"]
    assert before > 0
    assert train(job(), tmp_path / "c").seconds > before


def test_a_checkpoint_of_another_run_is_refused(tmp_path):
    path = tmp_path / "c.safetensors"
    train(job(), path, every_seconds=0)
    others = [
        job(seed=3),
        job(data=blobs(60, seed=9)),
        job(validation=False),
        job(replace(SHORT, lr=0.01)),
        job(member=1),
        job(model=lambda: Mlp(hidden=9)),
        replace(job(), identity={"method": "another"}),
        replace(job(), collect=Collect((3,))),
    ]
    for other in others:
        with pytest.raises(DamagedFileError, match="belongs to another run"):
            train(other, path)
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(DamagedFileError, match="truncated or altered.*Delete it to begin this member again"):
        train(job(), path)


def test_every_flipped_bit_of_a_checkpoint_is_noticed_or_harmless(tmp_path):
    path = tmp_path / "c.safetensors"
    interrupted(job(), path, 10)
    good, whole, source = path.read_bytes(), train(job()), random.Random(0)
    header = int.from_bytes(good[:8], "little")
    places = [source.randrange(8 + header) for _ in range(60)] + [source.randrange(len(good)) for _ in range(60)]
    refused = []
    for place in places:
        bad = bytearray(good)
        bad[place] ^= 1 << source.randrange(8)
        path.write_bytes(bad)
        try:
            found = train(job(), path)
        except DamagedFileError as error:
            refused.append(str(error))
        else:
            assert torch.equal(found.theta, whole.theta)
    assert len(refused) >= 110
    assert all("Delete it to begin" in text or "belongs to another run" in text for text in refused)


def test_killed_by_a_signal_it_ends_with_the_same_result(tmp_path):
    program = (
        "import torch; torch.set_num_threads(1)\n"
        "from pathlib import Path\n"
        "from tests.test_train import slow_job\n"
        "from bayesformer.train.loop import train\n"
        f"trained = train(slow_job(), Path({str(tmp_path / 'c.safetensors')!r}), every_seconds=0)\n"
        f"torch.save(trained.theta, {str(tmp_path / 'theta.pt')!r})\n"
    )
    root, killed = Path(__file__).parent.parent, 0
    while True:
        process = subprocess.Popen([sys.executable, "-c", program], cwd=root)
        while not (tmp_path / "c.safetensors").exists() and process.poll() is None:
            time.sleep(0.01)
        time.sleep(0.2 * random.random())
        if killed < 2 and process.poll() is None:
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
            killed += 1
            continue
        assert process.wait() == 0
        break
    assert killed == 2
    assert torch.equal(torch.load(tmp_path / "theta.pt", weights_only=True), train(slow_job()).theta)


def slow_job():
    return job(Training(epochs=300, batch_size=8, lr=0.02, warmup=5, patience=0))


# --- strategies on resume -------------------------------------------------------------------------------------------


def fit(folder=None, members=5, **options):
    options = {"likelihood": "categorical", "training": SHORT, "validation": blobs(30, seed=1), **options}
    return bf.fit(Mlp, blobs(60), method=bf.Ensemble(members), checkpoint=folder, **options)


def test_a_run_is_resumed_as_it_was_begun(tmp_path):
    """Five small members would run in lockstep; begun one by one, they go on one by one."""
    assert fit().facts["strategy"] == "batched"
    begun = fit(tmp_path / "a", strategy="looped")
    (tmp_path / "a" / "ensemble-3-3.safetensors").unlink()
    resumed = fit(tmp_path / "a")
    assert resumed.facts["strategy"] == "looped"
    assert torch.equal(resumed.theta, begun.theta)
    together = fit(tmp_path / "b")
    assert [path.name for path in (tmp_path / "b").glob("*.safetensors")] == ["ensemble-0-4.safetensors"]
    (tmp_path / "b" / "ensemble-0-4.safetensors").unlink()
    again = fit(tmp_path / "b", workers=2)  # which alone would choose processes
    assert again.facts["strategy"] == "batched"
    assert torch.equal(again.theta, together.theta)


def test_workers_and_a_loop_may_take_turns(tmp_path):
    begun = fit(tmp_path, members=3, strategy="looped")
    (tmp_path / "ensemble-1-1.safetensors").unlink()
    (tmp_path / "ensemble-2-2.safetensors").unlink()
    resumed = fit(tmp_path, members=3, workers=2)
    assert resumed.facts["strategy"] == "processes"
    assert torch.equal(resumed.theta, begun.theta)
    (tmp_path / "ensemble-2-2.safetensors").unlink()
    assert torch.equal(fit(tmp_path, members=3).theta, begun.theta)


def test_another_strategy_is_refused_on_resume(tmp_path):
    fit(tmp_path, strategy="looped")
    with pytest.raises(
        ValueError, match="strategy must be 'auto' or 'looped' to go on with the checkpoint in .* got 'ba"
    ):
        fit(tmp_path, strategy="batched")
    (tmp_path / "ensemble.strategy.json").write_text('{"strategy": 3}')
    with pytest.raises(DamagedFileError, match=r"ensemble.strategy.json must name a strategy; got 3. Delete it"):
        fit(tmp_path)


# --- divergence -----------------------------------------------------------------------------------------------------


class Poisoned:
    """A log joint that turns NaN at one step, and a gradient that does at another."""

    def __init__(self, value_at=10**9, gradient_at=10**9):
        self.count, self.value_at, self.gradient_at = 0, value_at, gradient_at

    def value_and_grad(self, params, batch):
        self.count += 1
        value = torch.tensor(math.nan if self.count >= self.value_at else -1.0)
        slope = torch.zeros_like(params[THETA])
        if self.count >= self.gradient_at:
            slope[3] = math.nan
        return value, torch.zeros(()), {THETA: slope}


def poisoned(**at):
    return replace(job(validation=False, model=Mlp), transform=optimise.build(Poisoned(**at)))


def test_a_diverging_run_stops_with_step_value_and_advice():
    with pytest.raises(
        TrainingDivergedError, match=r"became nan at step 10 \(epoch 3, member 0\).*smaller training.lr \(now 0.02\)"
    ):
        train(poisoned(value_at=10))


def test_a_diverged_last_step_is_an_error():
    """Its log joint was still finite: only the weights tell."""
    with pytest.raises(TrainingDivergedError, match=r"weights became NaN or infinite at step 24 \(epoch 6, member 0\)"):
        train(poisoned(gradient_at=24))
    train(poisoned(gradient_at=25))


def test_of_members_in_lockstep_the_diverged_one_is_named():
    prepared = stage(model=Mlp, validation=False).job([4, 7])
    update = prepared.transform.update

    def spoiled(state, batch, inplace=False):
        state, aux = update(state, batch, inplace=inplace)
        state.params[THETA][1, 0] = torch.inf
        return state, aux

    with pytest.raises(TrainingDivergedError, match="member 7"):
        train(replace(prepared, transform=prepared.transform._replace(update=spoiled)))


# --- whether it has come to rest ------------------------------------------------------------------------------------


def history(values):
    return [{"log_joint": [value]} for value in values]


@pytest.mark.parametrize(
    ("name", "curve", "verdict"),
    [
        ("saturated", lambda t: -math.exp(-t / 5), True),
        ("still rising in a line", lambda t: t / 100, False),
        ("slowly saturating", lambda t: -math.exp(-t / 80), False),
        ("falling", lambda t: -t / 100, True),
        ("constant", lambda t: -1.0, True),
        ("logarithmic", lambda t: math.log(t + 1), False),
    ],
)
def test_the_verdict_on_smooth_curves(name, curve, verdict):
    assert has_converged(history([curve(t) for t in range(100)]), 100, 0, stopped=False) is verdict


def test_scatter_alone_is_rest_and_a_trend_above_it_is_not():
    """Noise of sd 1 around a level: at most two standard errors by chance, 2 % of runs; with a trend of 3 sd never."""
    source = random.Random(1)
    noisy = [[source.gauss(0, 1) for _ in range(100)] for _ in range(200)]
    for first in (-50.0, 0.0):  # after a long rise, and where there was none
        assert sum(has_converged(history([first, *values]), 100, 0, False) for values in noisy) >= 185
    rising = [[value + 0.3 * t for t, value in enumerate(values)] for values in noisy]
    assert not any(has_converged(history(values), 100, 0, False) for values in rising)


@pytest.mark.parametrize("epochs", [3, 5, 9])
def test_few_epochs_that_all_rise_have_not_converged_and_chance_rarely_looks_so(epochs):
    """An epoch's mean has little noise. Three values in order by chance: one in six."""
    for bend in (0.5, 1.0, 1.5):
        assert has_converged(history([t**bend for t in range(epochs)]), 100, 0, False) is False
    source = random.Random(2)
    noisy = [history([source.gauss(0, 1) for _ in range(epochs)]) for _ in range(300)]
    assert sum(has_converged(rows, 100, 0, False) for rows in noisy) >= 300 * (5 / 6 - 3 * 0.022)


@pytest.mark.parametrize("members", [1, 3])
@pytest.mark.parametrize("count", [50, 55, 60, 110])
def test_a_small_last_batch_does_not_hide_that_training_goes_on(count, members):
    """Two epochs' means over batches of 50 and 5 would differ by the noise of 5 examples, far more than they rise."""
    torch.manual_seed(0)
    x = torch.randn(count, 3)
    data = (x, 3 * x.sum(1, keepdim=True) + 10 + 0.5 * torch.randn(count, 1))
    method = bf.Ensemble(members)
    posterior = bf.fit(nn.Linear(3, 1), data, likelihood=bf.Gaussian(0.5), method=method, init="fresh", progress=False)
    assert "training" in {doubt.check for doubt in posterior.doubts}


def test_one_or_two_epochs_are_judged_by_their_parts():
    steps = torch.arange(60.0)
    rising, level = steps + torch.randn(60), torch.exp(-steps / 3)
    for values, verdict in [(rising, False), (-level, True)]:
        columns = torch.stack([values, values], 1)
        for epochs in (1, 2):
            rows = [{"log_joint": [0.0, 0.0], "parts": parts_of(part)} for part in columns.tensor_split(epochs)]
            assert [has_converged(rows, 100, member, False) for member in (0, 1)] == [verdict, verdict]
    assert parts_of(columns[:7]) == columns[:7].T.tolist()
    assert [len(row) for row in parts_of(columns)] == [20, 20]


def test_fewer_than_twenty_steps_cannot_be_told_and_stopped_ones_are_at_rest():
    rows = [{"log_joint": [-1.0], "parts": parts_of(torch.randn(9, 1))}] * 2
    assert has_converged(rows, 100, 0, stopped=False) is None
    assert has_converged(history([1.0, 2.0, 2.0, 2.0]), 19, 0, stopped=False) is None
    assert has_converged(history([-1.0] * 2), 100, 0, stopped=True) is True
    rows = [{"log_joint": [-math.exp(-t / 5), t / 100]} for t in range(100)]
    assert [has_converged(rows, 100, member, False) for member in (0, 1)] == [True, False]


# --- settings -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"epochs": 0}, "training.epochs must be a whole number, at least 1; got 0."),
        ({"epochs": 2.5}, "training.epochs must be a whole number, at least 1; got 2.5."),
        ({"epochs": True}, "training.epochs must be a whole number, at least 1; got True."),
        ({"epochs": "a"}, "training.epochs must be a whole number, at least 1; got 'a'."),
        ({"epochs": None}, "training.epochs must be a whole number, at least 1; got None."),
        ({"batch_size": 0}, "training.batch_size must be a whole number, at least 1; got 0."),
        ({"batch_size": -1}, "training.batch_size must be a whole number, at least 1; got -1."),
        ({"warmup": 0}, "training.warmup must be a whole number, at least 1; got 0."),
        ({"patience": -1}, "training.patience must be a whole number, at least 0; got -1."),
        ({"max_steps": 0}, "training.max_steps must be a whole number, at least 1; got 0."),
        ({"evaluate_every": 1.0}, "training.evaluate_every must be a whole number, at least 1; got 1.0."),
        ({"lr": 0.0}, "training.lr must be positive and finite; got 0.0."),
        ({"lr": math.nan}, "training.lr must be positive and finite; got nan."),
        ({"lr": "0.1"}, "training.lr must be positive and finite; got '0.1'."),
        ({"lr": True}, "training.lr must be positive and finite; got True."),
        ({"weight_decay": -1e-3}, "training.weight_decay must be at least 0; got -0.001."),
        ({"clip": 0}, "training.clip must be positive; inf never clips; got 0."),
        ({"clip": math.nan}, "training.clip must be positive; inf never clips; got nan."),
        ({"schedule": "linear"}, "training.schedule must be one of 'warmup', 'cosine', 'constant'; got 'linear'."),
        ({"precision": "fp16"}, "training.precision must be one of 'float32', 'bf16'; got 'fp16'."),
        ({"buffers": "own"}, "training.buffers must be one of 'moving', 'fixed'; got 'own'."),
    ],
)
def test_settings_are_checked(settings, text):
    with pytest.raises(ValueError) as caught:  # noqa: PT011 (the whole text is compared)
        Training(**settings)
    assert str(caught.value) == text


def test_a_cosine_rises_to_the_rate_and_falls_to_nothing():
    training = Training(epochs=10, batch_size=50, lr=0.2, warmup=20, schedule="cosine")
    rate = training.rate(training.steps(10))
    steps = torch.tensor([1.0, 10.0, 20.0, 60.0, 100.0, 130.0], dtype=torch.float64)
    expected = torch.tensor([0.01, 0.1, 0.2, 0.1, 0.0, 0.0], dtype=torch.float64)
    torch.testing.assert_close(rate(steps), expected, atol=1e-12, rtol=1e-9)


def test_collect_spreads_draws_and_follows_cycles():
    assert Collect.spread(100, 20, 4).steps == (40, 60, 80, 100)
    assert Collect.spread(10, 0, 10).steps == tuple(range(1, 11))
    assert Collect.cyclical(100, 2, 4, 0.8).steps == (45, 50, 95, 100)
    with pytest.raises(ValueError, match="got 30 draws in 40 steps of which 20 are burn-in"):
        Collect.spread(40, 20, 30)


@pytest.mark.parametrize("method", ["mle", "vi", "laplace"])
def test_a_fit_leaves_nothing_of_its_training_in_memory(method):
    """Gradient, moments and trial shells go when `fit` returns, not when garbage is collected."""
    model = nn.Sequential(nn.Linear(7, 11), nn.Tanh(), nn.Linear(11, 3))
    size = sum(p.numel() for p in model.parameters())
    x, y = torch.randn(16, 7), torch.arange(16) % 3
    run = partial(bf.fit, model, (x, y), likelihood="categorical", method=build_method(method), progress=False)
    run()  # torch's first optimiser imports modules, and what they raise and catch keeps the frames of their caller
    gc.collect()
    gc.disable()
    try:
        posterior = run()
        vectors = [t for t in gc.get_objects() if type(t) is torch.Tensor and t.numel() == size]
    finally:
        gc.enable()
    law = list(posterior.law.tensors().values())
    assert len(vectors) <= sum(t.numel() == size for t in law) + 1  # the mean may be seen through a view

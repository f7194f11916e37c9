"""The loop: reproducible, resumable to the bit, loud when it diverges."""

import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bayesformer.core.errors import DamagedFileError, TrainingDivergedError
from bayesformer.core.vectors import THETA
from bayesformer.inference import optimise
from bayesformer.likelihoods import Categorical
from bayesformer.network import FlatLogJoint, FlatModel
from bayesformer.train.loop import Job, Training, score, train
from tests.nets import Mlp, Normed, blobs


def job(training=None, seed=0, member=0, validation=True, model=None, data=None):
    torch.manual_seed(5)
    flat = FlatModel(model() if model else Mlp(dropout=0.2))
    training = training or Training(epochs=6, batch_size=16, lr=0.02, warmup=5)
    data = data or blobs(60)
    joint = FlatLogJoint(flat, Categorical(), None, len(data))
    transform = optimise.build(joint, training.adam(len(data)), training.clip)
    held_out = blobs(40, seed=1) if validation else None
    return Job(flat, transform, flat.theta, data, held_out, Categorical(), training, seed, (member,))


def test_equal_seeds_give_equal_runs_and_others_do_not():
    first, second = train(job()), train(job())
    assert torch.equal(first.theta, second.theta)
    assert first.history == second.history
    assert not torch.equal(first.theta, train(job(seed=1)).theta)
    assert not torch.equal(first.theta, train(job(member=1)).theta)


def test_training_does_not_touch_the_callers_random_stream():
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    prepared = job()
    torch.manual_seed(0)
    train(prepared)
    assert torch.equal(torch.rand(3), expected)


def test_the_loop_equals_a_hand_written_one():
    prepared = job(validation=False, model=Mlp)
    torch.manual_seed(5)
    model = Mlp()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    data, step = prepared.data, 0
    from bayesformer.core.seeds import generator

    for epoch in range(6):
        order = torch.randperm(60, generator=generator(0, 0, epoch, "order"))
        for start in range(0, 60, 16):
            step += 1
            for group in optimizer.param_groups:
                group["lr"] = 0.02 * min(step / 5, math.sqrt(5 / step))
            index = order[start : start + 16]
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(data.inputs[index]), data.targets[index]).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    expected = torch.cat([p.detach().flatten() for p in model.parameters()])
    torch.testing.assert_close(train(prepared).theta[0], expected, atol=1e-5, rtol=1e-4)


def test_the_best_epoch_on_validation_data_is_kept():
    prepared = job(Training(epochs=30, batch_size=16, lr=0.5, warmup=1, patience=0))
    trained = train(prepared)
    scores = [epoch["validation"][0] for epoch in trained.history]
    assert len(scores) == 30
    assert trained.best_epoch.item() == max(range(30), key=scores.__getitem__)
    again = score(prepared.model, Categorical(), trained.theta[0], prepared.validation)
    assert again.item() == pytest.approx(max(scores), abs=1e-6)


def test_patience_stops_early():
    trained = train(job(Training(epochs=200, batch_size=16, lr=0.5, warmup=1, patience=3)))
    assert len(trained.history) == trained.best_epoch.item() + 4 < 200


def test_without_validation_the_last_weights_are_kept():
    prepared = job(validation=False)
    trained = train(prepared)
    assert torch.equal(trained.theta[0], prepared.model.theta)
    assert trained.best_epoch.item() == 5


def test_a_checkpoint_continues_to_the_same_result(tmp_path):
    whole = train(job())
    path = tmp_path / "c.safetensors"
    stopped = job()
    seen = []

    class Stop(Exception):
        pass

    class Reporter:
        def update(self, task, done, total, note=""):
            seen.append(done)
            if done == 4:
                raise Stop

    with pytest.raises(Stop):
        train(stopped, path, every_seconds=0, reporter=Reporter())
    resumed = train(job(), path, every_seconds=0)
    assert torch.equal(resumed.theta, whole.theta)
    assert resumed.history == whole.history
    assert torch.equal(train(job(), path).theta, whole.theta)  # a finished one returns at once


def test_running_averages_are_kept_and_resumed(tmp_path):
    make = lambda: job(model=Normed, training=Training(epochs=4, batch_size=16, lr=0.02, warmup=5))  # noqa: E731
    whole = train(make())
    assert set(whole.buffers) == {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}
    short = replace(make())
    path = tmp_path / "c.safetensors"

    class Stop(Exception):
        pass

    class Reporter:
        def update(self, task, done, total, note=""):
            if done == 2:
                raise Stop

    with pytest.raises(Stop):
        train(short, path, every_seconds=0, reporter=Reporter())
    resumed = train(make(), path)
    assert torch.equal(resumed.buffers["norm.running_mean"], whole.buffers["norm.running_mean"])
    assert torch.equal(resumed.theta, whole.theta)


def test_a_checkpoint_of_another_run_is_refused(tmp_path):
    path = tmp_path / "c.safetensors"
    train(job(), path, every_seconds=0)
    with pytest.raises(DamagedFileError, match="belongs to another run"):
        train(job(seed=3), path)
    with pytest.raises(DamagedFileError, match="belongs to another run"):
        train(job(data=blobs(60, seed=9)), path)
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(DamagedFileError, match="truncated or altered"):
        train(job(), path)


@pytest.mark.parametrize("seconds", [1.2, 2.2])
def test_killed_at_any_moment_it_ends_with_the_same_result(tmp_path, seconds):
    program = (
        "import torch; torch.set_num_threads(1)\n"
        "from pathlib import Path\n"
        "from tests.test_train import slow_job\n"
        "from bayesformer.train.loop import train\n"
        f"trained = train(slow_job(), Path({str(tmp_path / 'c.safetensors')!r}), every_seconds=0)\n"
        f"torch.save(trained.theta, {str(tmp_path / 'theta.pt')!r})\n"
    )
    root = Path(__file__).parent.parent
    killed = 0
    while True:
        process = subprocess.Popen([sys.executable, "-c", program], cwd=root)
        wait_for(tmp_path / "c.safetensors", process)
        time.sleep(0.15 * seconds)
        if killed < 2 and process.poll() is None:
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
            killed += 1
            continue
        assert process.wait() == 0
        break
    assert killed == 2
    assert torch.equal(torch.load(tmp_path / "theta.pt", weights_only=True), train(slow_job()).theta)


def wait_for(path, process):
    while not path.exists() and process.poll() is None:
        time.sleep(0.01)


def slow_job():
    return job(Training(epochs=400, batch_size=8, lr=0.02, warmup=5, patience=0))


def test_a_diverging_run_stops_with_step_value_and_advice():
    data = blobs(60)
    prepared = job(validation=False, model=Mlp, data=data)
    poison = prepared.model

    class Breaks:
        """The log joint turns NaN at the tenth step."""

        count = 0

        def value_and_grad(self, params, batch):
            self.count += 1
            value = torch.tensor(math.nan if self.count >= 10 else -1.0)
            return value, torch.zeros(()), {THETA: torch.zeros_like(params[THETA])}

    broken = replace(prepared, transform=optimise.build(Breaks()), model=poison)
    with pytest.raises(
        TrainingDivergedError, match=r"became nan at step 10 \(epoch 3, member 0\).*smaller training.lr"
    ):
        train(broken)


def test_settings_are_checked():
    with pytest.raises(ValueError, match="training.epochs must be positive; got 0"):
        Training(epochs=0)
    with pytest.raises(ValueError, match="training.schedule must be 'warmup', 'cosine' or 'constant'; got 'linear'"):
        Training(schedule="linear")
    with pytest.raises(ValueError, match="training.patience must be at least 0; got -1"):
        Training(patience=-1)


def test_a_cosine_rises_to_the_rate_and_falls_to_nothing():
    training = Training(epochs=10, batch_size=50, lr=0.2, warmup=20, schedule="cosine")
    rate = training.rate(num_data=480)  # 10 steps per epoch, the last batch a short one: 100 steps
    steps = torch.tensor([1.0, 10.0, 20.0, 60.0, 100.0, 130.0], dtype=torch.float64)
    expected = torch.tensor([0.01, 0.1, 0.2, 0.1, 0.0, 0.0], dtype=torch.float64)
    torch.testing.assert_close(rate(steps), expected, atol=1e-12, rtol=1e-9)

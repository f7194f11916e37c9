"""Many threads ask at once: each gets the numbers that it would get alone."""

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch

from bayesformer.core.pool import Pool
from bayesformer.model.skeleton import Skeleton
from bayesformer.model.space import Space
from tests.shell_zoo import Net, batch_norm, encoder, encoder_later_layers

THREADS, PASSES = 8, 40


def transformer():
    pytest.importorskip("transformers")
    pytest.importorskip("peft")
    from tests.shell_transformers import bert

    return bert()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@pytest.mark.parametrize("make", [transformer, encoder, encoder_later_layers])
def test_eight_threads_get_what_one_gets(make, mode):
    case = make()
    case.model.eval()
    pool = Pool(partial(Skeleton(case.model, Space.of(case.model, case.infer)).shell, gradients=False))
    with pool.borrow() as shell:
        thetas = shell.theta + 0.1 * torch.randn(THREADS, len(shell.theta))

    def ask(row):
        with mode(), pool.borrow() as shell:
            shell.load(row)
            return shell(case.inputs).detach().clone()

    alone = [ask(row) for row in thetas]
    start = threading.Barrier(THREADS)

    def many(row):
        start.wait()
        return [ask(row) for _ in range(PASSES)]

    with ThreadPoolExecutor(THREADS) as executor:
        answers = list(executor.map(many, thetas))
    wrong = sum(not torch.equal(out, alone[i]) for i, outs in enumerate(answers) for out in outs)
    assert wrong == 0


def test_training_in_threads_is_training_alone():
    case = batch_norm()
    skeleton = Skeleton(case.model, Space.of(case.model))
    batches = torch.randn(THREADS, 20, 6, 3)

    def train(data):
        shell = skeleton.shell()
        shell.module.train()
        for x in data:
            shell.grad.zero_()
            shell(x).square().mean().backward()
            shell.theta.sub_(shell.grad, alpha=0.05)
        return torch.cat([shell.theta, shell.buffers["1.running_mean"]])

    alone = [train(data) for data in batches]
    with ThreadPoolExecutor(THREADS) as executor:
        together = list(executor.map(train, batches))
    assert all(torch.equal(a, b) for a, b in zip(alone, together, strict=True))


def test_a_shell_held_by_one_thread_does_not_stop_another():
    pool = Pool(Skeleton(model := Net(), Space.of(model)).shell)
    inside, done = threading.Event(), threading.Event()

    def hold():
        with pool.borrow():
            inside.set()
            assert done.wait(20)

    holder = threading.Thread(target=hold)
    holder.start()
    assert inside.wait(20)
    with pool.borrow() as shell:
        shell(torch.randn(2, 3))
    done.set()
    holder.join()


def test_a_pool_keeps_what_comes_back_and_drops_the_failed():
    made = []
    skeleton = Skeleton(model := Net(), Space.of(model))
    pool = Pool(lambda: made.append(skeleton.shell()) or made[-1])
    with pool.borrow() as one, pool.borrow() as two:
        assert one is not two
    with pool.borrow() as again:
        assert again in (one, two)
    assert len(made) == 2

    def fail():
        with pool.borrow(), pool.borrow():
            raise KeyError("x")

    with pytest.raises(KeyError):
        fail()
    with pool.borrow() as fresh:
        assert fresh not in (one, two)

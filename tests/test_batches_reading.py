"""When examples are read (late, and once), and that random data are repeatable and leave the caller's streams."""

import random
import threading
import time

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from bayesformer.core.global_random import get_states
from bayesformer.data import Stream, as_batches, as_inputs
from tests.data_forms import Iterated, N, Pairs, Table, X, Y


def epoch(batches, size=4, seed=7, number=2, **options):
    return list(batches.epoch(size, seed=seed, epoch=number, **options))


def inputs(batches, *args, **options):
    return torch.cat([batch.inputs for batch in epoch(batches, *args, **options)])


class Augmented(Pairs):
    """Examples with noise from one of the global random streams."""

    def __init__(self, kind="torch", only=None):
        super().__init__()
        self.kind, self.only = kind, only

    def __getitem__(self, i):
        x, y = super().__getitem__(i)
        if self.only is not None and i != self.only:
            return x, y
        noise = {"torch": lambda: torch.rand(2), "numpy": np.random.rand, "random": random.random}
        return x + noise[self.kind](), y


def test_fifty_steps_of_a_stream_do_not_reach_its_later_items():
    class Long(IterableDataset):
        def __iter__(self):
            for number in range(10_000):
                yield X[number % N], Y[number % N]
            raise RuntimeError("read too far")

    for data in (Stream(Long(), num_data=10**9), Stream(DataLoader(Long(), batch_size=8), num_data=10**9)):
        batches = as_batches(data)
        batches.first(2)
        found = batches.epoch(8, seed=0, epoch=0, join_single=True)
        assert sum(len(next(found).targets) for _ in range(50)) == 400
    with pytest.raises(RuntimeError, match="read too far"):
        list(as_batches(Stream(Long(), num_data=10**9)).epoch(8, seed=0, epoch=0))


def test_no_example_is_read_before_its_batch():
    seen = []

    def source():
        for number in range(N):
            seen.append(number)
            yield X[number], Y[number]

    found = as_batches(Stream(source(), num_data=N)).epoch(4, seed=0, epoch=0)
    assert seen == []
    next(found)
    assert seen == [0, 1, 2, 3]


@pytest.mark.parametrize("replacement", [False, True])
def test_a_dataset_is_read_once_per_epoch_and_never_held(replacement):
    data = Pairs()
    batches = as_batches(data)
    assert data.reads.sum() == 0
    found = batches.epoch(4, seed=0, epoch=0, replacement=replacement)
    assert data.reads.sum() == 0
    next(found)
    assert data.reads.sum() == 4
    list(found)
    assert data.reads.sum() == N
    if not replacement:
        assert data.reads.tolist() == [1] * N
    list(batches.in_order(3))
    assert data.reads.sum() == 2 * N


def test_fingerprint_and_first_read_a_few_examples_only():
    data = Pairs(torch.zeros(1000, 2), torch.zeros(1000))
    batches = as_batches(data)
    batches.fingerprint()
    batches.first(3)
    assert data.reads.sum() == 7


@pytest.mark.parametrize("kind", ["torch", "numpy", "random"])
class TestAugmentation:
    def test_is_random_over_epochs_members_and_seeds_and_repeatable(self, kind):
        runs = [inputs(as_batches(Augmented(kind)), seed=s, number=e, member=m) for s, e, m in _runs()]
        noise = [torch.stack([x[0] % 2 for x in sorted(run, key=lambda x: float(x[0]))]) for run in runs]
        assert all(not torch.equal(a, b) for i, a in enumerate(noise) for b in noise[:i])
        batches = as_batches(Augmented(kind))
        for (s, e, m), run in zip(_runs(), runs, strict=True):
            random.seed(m)
            torch.manual_seed(m)
            assert torch.equal(inputs(batches, seed=s, number=e, member=m), run)

    def test_is_exact_on_resume_and_for_another_batch_size(self, kind):
        whole = epoch(as_batches(Augmented(kind)))
        for start in range(3):
            rest = epoch(as_batches(Augmented(kind)), start=start)
            assert all(torch.equal(a.inputs, b.inputs) for a, b in zip(rest, whole[start:], strict=True))
        assert torch.equal(inputs(as_batches(Augmented(kind)), 5), torch.cat([batch.inputs for batch in whole]))

    def test_is_the_same_in_worker_processes(self, kind):
        alone = inputs(as_batches(DataLoader(Augmented(kind), batch_size=4)), start=1)
        together = inputs(as_batches(DataLoader(Augmented(kind), batch_size=4, num_workers=1)), start=1)
        assert torch.equal(alone, together)

    def test_that_touches_one_example_only_is_found(self, kind):
        runs = [inputs(as_batches(Augmented(kind, only=6)), start=s) for s in (0, 0, 1)]
        assert torch.equal(runs[0], runs[1])
        assert torch.equal(runs[0][4:], runs[2])
        assert not torch.equal(inputs(as_batches(Augmented(kind, only=6)), number=3).sum(), runs[0].sum())

    def test_leaves_the_callers_streams_alone(self, kind):
        before = get_states()
        batches = as_batches(Augmented(kind))
        epoch(batches)
        list(batches.in_order(4))
        batches.first(2)
        batches.fingerprint()
        assert before.same(get_states())

    def test_of_evaluation_is_fixed(self, kind):
        first, again = ([b.inputs for b in as_batches(Augmented(kind)).in_order(size)] for size in (4, 3))
        assert torch.equal(torch.cat(first), torch.cat(again))
        assert as_batches(Augmented(kind)).fingerprint() == as_batches(Augmented(kind)).fingerprint()


def _runs():
    return [(0, 0, 0), (0, 1, 0), (0, 0, 1), (1, 0, 0)]


def test_a_deterministic_dataset_is_not_read_twice_and_a_random_one_only_in_the_batch_that_shows_it():
    data = Augmented()
    batches = as_batches(data)
    epoch(batches)
    assert data.reads.sum() == N + 4
    epoch(batches, number=3)
    assert data.reads.sum() == 2 * N + 4


def test_the_callers_streams_come_back_after_an_error():
    class Broken(Dataset):
        def __len__(self):
            return 3

        def __getitem__(self, i):
            torch.rand(1)
            raise OSError("no such image")

    before = get_states()
    with pytest.raises(OSError, match="no such image"):
        epoch(as_batches(Broken()))
    assert before.same(get_states())


def test_a_random_collator_is_repeatable():
    def masked(examples):
        return torch.stack([x for x, _ in examples]) * torch.randint(2, (len(examples), 2)), torch.zeros(len(examples))

    runs = [inputs(as_batches(Pairs(), collate=masked), number=e, start=s) for e, s in [(0, 0), (0, 0), (0, 1), (1, 0)]]
    assert torch.equal(runs[0], runs[1])
    assert torch.equal(runs[0][4:], runs[2])
    assert not torch.equal(runs[0], runs[3])


def test_a_random_table_is_repeatable():
    class Jittered(Table):
        def __getitem__(self, index):
            columns = super().__getitem__(index)
            return {**columns, "x": [np.array(x) + np.random.rand() for x in columns["x"]]}  # noqa: NPY002

    data = Jittered(x=X.tolist(), labels=Y.tolist())
    found = [
        torch.cat([b.inputs["x"] for b in epoch(as_batches(data), number=e, start=s)]) for e, s in [(0, 0), (0, 1)]
    ]
    assert torch.equal(found[0][4:], found[1])


def test_a_random_stream_is_repeatable_and_leaves_the_callers_streams_alone():
    class Shuffled(Iterated):
        def __iter__(self):
            for i in torch.randperm(N):
                yield self.x[i] + np.random.rand(), self.y[i]  # noqa: NPY002

    before = get_states()
    batches = as_batches(Stream(Shuffled(), num_data=N))
    first = inputs(batches, number=0)
    batches.first(3)
    torch.rand(1)
    assert torch.equal(inputs(batches, number=0), first)
    assert torch.equal(inputs(batches, number=0, start=2), first[8:])
    assert not torch.equal(inputs(batches, number=1), first)
    torch.set_rng_state(before.torch)
    assert before.same(get_states())


def test_threads_do_not_see_each_others_seeds():
    class Slow(Augmented):
        def __getitem__(self, i):
            time.sleep(1e-3)  # lets another thread in between seeding and drawing
            return super().__getitem__(i)

    alone = [inputs(as_batches(Slow("numpy")), number=e) for e in range(8)]
    found = {}

    def read(number):
        found[number] = inputs(as_batches(Slow("numpy")), number=number)

    threads = [threading.Thread(target=read, args=(e,)) for e in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(found[e], alone[e]) for e in range(8))


def test_an_iterator_is_read_on_by_the_next_epoch_and_its_end_is_an_error():
    batches = as_batches(Stream(iter(list(zip(X, Y, strict=True))), num_data=6))
    batches.first(3)
    assert torch.equal(inputs(batches, number=0), X[:6])
    assert torch.equal(inputs(batches, number=1), X[6:])
    with pytest.raises(ValueError, match="data gave no example in epoch 2: it can be read once only, or is empty"):
        epoch(batches, number=2)


def test_a_stream_that_cannot_start_again_loses_nothing_to_first():
    handle = iter(zip(X, Y, strict=True))

    class OverAHandle(IterableDataset):  # every __iter__ is a new object over one position
        def __iter__(self):
            return map(tuple, handle)

    for data in (Stream(OverAHandle(), num_data=N),):
        batches = as_batches(data)
        assert torch.equal(batches.first(2).inputs, X[:2])
        assert torch.equal(batches.first(4).inputs, X[:4])
        assert torch.equal(inputs(batches), X)


def test_a_generator_that_begins_with_equal_rows_loses_none_of_them():
    rows = [torch.zeros(2)] * 5 + [torch.tensor([float(i), 1.0]) for i in range(15)]
    found = as_inputs((row for row in rows), "inputs")
    found.first(2)
    assert torch.equal(torch.cat(list(found.in_order(4))), torch.stack(rows))


def test_a_loader_over_a_generator_loses_nothing_to_first():
    handle = iter(list(zip(X, Y, strict=True)))

    class OverAHandle(IterableDataset):
        def __iter__(self):
            return handle

    batches = as_batches(DataLoader(OverAHandle(), batch_size=4), num_data=N)
    assert torch.equal(batches.first(2).inputs, X[:2])
    assert torch.equal(inputs(batches), X)


def test_epochs_of_a_stream_are_announced_to_it():
    class Listening(Iterated):
        def set_epoch(self, number):
            self.number = number

    data = Listening()
    epoch(as_batches(Stream(data, num_data=N)), number=5)
    assert data.number == 5

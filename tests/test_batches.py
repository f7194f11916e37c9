"""Every form of data gives the same batches: order, N, resuming at every batch, fingerprints."""

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

from bayesformer.core.seeds import generator
from bayesformer.data import Batches, Data, InMemory, Stream, as_batches
from tests.data_forms import INDEXED, LOADERS, STREAMS, Iterated, N, Pairs, X, Y, rows
from tests.laws import assert_mean

EVERY = {**INDEXED, **LOADERS}


def epoch(batches, size=4, seed=7, number=2, **options):
    return [rows(batch) for batch in batches.epoch(size, seed=seed, epoch=number, **options)]


@pytest.mark.parametrize("form", EVERY)
def test_order_is_the_permutation_of_seed_member_and_epoch(form):
    batches = as_batches(EVERY[form]())
    assert isinstance(batches, Batches)
    assert (batches.num_data, batches.require_num_data(), batches.resumable) == (N, N, "exact")
    for member, number in [(0, 0), (3, 5)]:
        found = epoch(batches, member=member, number=number)
        assert [len(part) for part in found] == [4, 4, 3]
        assert batches.steps(4) == 3
        expected = torch.randperm(N, generator=generator(7, member, number, "order"))
        assert torch.equal(torch.cat(found), expected)


@pytest.mark.parametrize("form", [*EVERY, *STREAMS])
def test_resumes_at_every_batch(form):
    make = {**EVERY, **STREAMS}[form]
    whole = epoch(as_batches(make()))
    for start in range(len(whole) + 1):
        rest = epoch(as_batches(make()), start=start)
        assert len(rest) == len(whole) - start
        assert all(torch.equal(a, b) for a, b in zip(rest, whole[start:], strict=True))


def test_skipped_batches_are_not_read():
    data = Pairs()
    epoch(as_batches(data), start=2)
    assert data.reads.sum() == 3


@pytest.mark.parametrize("form", [*EVERY, *STREAMS])
def test_in_order_and_first(form):
    make = {**EVERY, **STREAMS}[form]
    batches = as_batches(make())
    assert torch.equal(rows(batches.first(3)), torch.arange(3))
    assert torch.equal(rows(batches.first(2)), torch.arange(2))
    assert torch.equal(torch.cat([rows(b) for b in batches.in_order(4)]), torch.arange(N))  # peeked ones come again
    assert len(as_batches(make()).first(100).targets) <= N


@pytest.mark.parametrize("form", STREAMS)
def test_a_stream_keeps_its_own_order(form):
    batches = as_batches(STREAMS[form]())
    assert (batches.num_data, batches.resumable, batches.steps(4)) == (N, "epoch", 3)
    found = epoch(batches)
    assert [len(part) for part in found] == [4, 4, 3]
    assert torch.equal(torch.cat(found), torch.arange(N))


@pytest.mark.parametrize("form", [*EVERY, "Stream"])
def test_fingerprint_tells_data_apart(form):
    make = {**EVERY, **STREAMS}[form]
    mark = as_batches(make()).fingerprint()
    assert as_batches(make()).fingerprint() == mark
    assert as_batches(make(X[:-1], Y[:-1])).fingerprint() != mark
    if form != "Stream":  # read once perhaps, so a stream is known by type and N only
        changed = X.clone()
        changed[0] += 1e-3
        assert as_batches(make(changed, Y)).fingerprint() != mark
        assert as_batches(make(X, (Y + 1) % 3)).fingerprint() != mark


def test_fingerprint_of_tensors_sees_every_value_and_flag():
    x, y = torch.randn(6, 3), torch.arange(6)
    marks = {InMemory(Data({"x": x, "use_cache": flag}, y)).fingerprint() for flag in (False, True)}
    changed = x.clone()
    changed[3, 2] += 1e-6
    marks |= {as_batches({"x": part, "labels": y}).fingerprint() for part in (x, changed)}
    assert len(marks) == 4


@pytest.mark.parametrize("form", EVERY)
def test_with_replacement_counts_are_multinomial(form):
    batches = as_batches(EVERY[form]())
    epochs = 60 if form not in {"pair"} else 3000
    drawn = [torch.cat(epoch(batches, number=e, replacement=True)) for e in range(epochs)]
    assert {len(part) for part in drawn} == {N}
    counts = torch.stack([torch.bincount(part, minlength=N) for part in drawn]).double()  # (epochs, N)
    assert_mean(counts, 1.0)
    if form == "pair":  # N draws of probability 1/N: variance 1 - 1/N, covariance -1/N
        assert_mean((counts - 1) ** 2, 1 - 1 / N)
        assert_mean((counts[:, 0] - 1) * (counts[:, 1] - 1), -1 / N)
    again = torch.cat(epoch(batches, number=0, replacement=True, start=1))
    assert torch.equal(again, drawn[0][4:])


@pytest.mark.parametrize("form", ["pair", "Dataset", "Stream"])
@pytest.mark.parametrize(("size", "plain", "joined"), [(5, [5, 5, 1], [5, 6]), (10, [10, 1], [11]), (11, [11], [11])])
def test_a_single_last_example_can_join_the_batch_before(form, size, plain, joined):
    make = {**EVERY, **STREAMS}[form]
    assert [len(part) for part in epoch(as_batches(make()), size)] == plain
    batches = as_batches(make())
    found = epoch(batches, size, join_single=True)
    assert [len(part) for part in found] == joined
    assert batches.steps(size, join_single=True) == len(joined)
    assert torch.equal(torch.cat(found).sort().values, torch.arange(N))
    assert len(epoch(as_batches(make()), 1, join_single=True)) == N


def test_members_in_lockstep_see_what_they_see_alone():
    batches = as_batches((X, Y))
    assert isinstance(batches, InMemory)
    together = list(batches.lockstep(4, seed=7, epoch=2, members=(1, 4), start=1))
    alone = [epoch(batches, member=m, start=1) for m in (1, 4)]
    for number, batch in enumerate(together):
        assert torch.equal(rows(batch), torch.stack([member[number] for member in alone]))
    assert as_batches(Pairs()).tensors is None


@pytest.mark.parametrize("form", [*EVERY, *STREAMS])
def test_batches_are_moved_and_data_are_not(form):
    data = {**EVERY, **STREAMS}[form]()
    batch = next(as_batches(data).epoch(4, seed=0, epoch=0, device="meta"))
    inputs = batch.inputs["x"] if isinstance(batch.inputs, dict) else batch.inputs
    assert inputs.device.type == batch.targets.device.type == "meta"
    assert X.device.type == "cpu"


def test_tensors_are_not_copied():
    array = np.zeros((5, 2), dtype=np.float32)
    batches = as_batches((array, np.zeros(5)))
    array[0] = 3.0
    assert batches.first(1).inputs[0, 0] == 3.0
    frozen = np.ones(5)
    frozen.flags.writeable = False
    assert as_batches((array, frozen)).first(5).targets.sum() == 5


def test_a_loader_keeps_its_batch_size_collate_and_last_batch():
    def doubled(examples):
        return torch.stack([x for x, _ in examples]) * 2, torch.stack([y for _, y in examples])

    loader = DataLoader(Pairs(), batch_size=3, shuffle=True, drop_last=True, collate_fn=doubled)
    batches = as_batches(loader)
    assert (batches.batch_size, batches.steps(50), batches.num_data) == (3, 3, N)
    found = list(batches.epoch(50, seed=7, epoch=2))
    assert [len(batch.targets) for batch in found] == [3, 3, 3]
    order = torch.randperm(N, generator=generator(7, 0, 2, "order"))[:9]
    assert torch.equal(torch.cat([batch.inputs for batch in found]), X[order] * 2)
    assert sum(len(batch.targets) for batch in batches.in_order(50)) == N  # evaluation sees the last ones, too


def test_a_loader_with_worker_processes_gives_the_same_batches():
    alone = epoch(as_batches(DataLoader(Pairs(), batch_size=4)), start=1)
    before = torch.get_rng_state()
    loader = DataLoader(Pairs(), batch_size=4, num_workers=1, persistent_workers=True)
    with_worker = epoch(as_batches(loader), start=1)
    assert all(torch.equal(a, b) for a, b in zip(alone, with_worker, strict=True))
    assert torch.equal(before, torch.get_rng_state())


def test_a_loader_with_a_sampler_of_its_own_is_iterated_as_it_is():
    weights = torch.zeros(N)
    weights[4] = 1.0
    batches = as_batches(DataLoader(Pairs(), batch_size=4, sampler=WeightedRandomSampler(weights, 8)))
    assert (batches.num_data, batches.resumable, batches.steps(50)) == (N, "epoch", 2)
    assert [part.tolist() for part in epoch(batches)] == [[4] * 4] * 2


def test_a_loader_of_a_random_sampler_is_repeatable_and_leaves_the_callers_stream():
    def found(number):
        sampler = WeightedRandomSampler(torch.ones(N), N)
        return torch.cat(epoch(as_batches(DataLoader(Pairs(), batch_size=4, sampler=sampler)), number=number))

    before = torch.get_rng_state()
    first = found(0)
    torch.manual_seed(99)
    assert torch.equal(found(0), first)
    assert not torch.equal(found(1), first)
    torch.set_rng_state(before)
    found(0)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_dataset_of_whole_batches_needs_its_number_of_examples():
    whole = [(X[:6], Y[:6]), (X[6:], Y[6:])]
    batches = as_batches(DataLoader(whole, batch_size=None))
    assert batches.num_data is None
    with pytest.raises(ValueError, match="must say how many examples"):
        batches.require_num_data()
    batches = as_batches(Stream(DataLoader(whole, batch_size=None), num_data=N))
    assert batches.require_num_data() == N
    assert [len(part) for part in epoch(batches)] == [6, 5]


def test_a_stream_that_goes_on_ends_its_epoch_at_n():
    class Forever(Iterated):
        def __iter__(self):
            while True:
                yield from super().__iter__()

    assert [len(part) for part in epoch(as_batches(Stream(Forever(), num_data=6)))] == [4, 2]
    loader = DataLoader(Forever(), batch_size=4)
    assert [len(part) for part in epoch(as_batches(loader, num_data=8))] == [4, 4]
    assert as_batches(loader).num_data is None


def test_three_tensors_of_a_dataset_are_two_inputs_and_labels():
    mask = torch.ones(N, 2, dtype=torch.int64)
    for form in (TensorDataset(X, mask, Y), DataLoader(TensorDataset(X, mask, Y), batch_size=4)):
        batch = as_batches(form).first(4)
        assert torch.equal(batch.inputs[0], X[:4])
        assert torch.equal(batch.inputs[1], mask[:4])
        assert torch.equal(batch.targets, Y[:4])
        assert batch.mask is None

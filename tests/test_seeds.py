import torch

from bayesformer.core.global_random import seed_torch
from bayesformer.core.seeds import fold, stream


def test_a_stream_is_the_global_one_from_its_own_seed_and_is_put_back():
    torch.manual_seed(7)
    before = torch.get_rng_state()
    with stream(3, "draw", 5):
        found = torch.rand(4)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(fold(3, "draw", 5))
    assert torch.equal(found, torch.rand(4))


def test_seeding_is_that_of_torch(monkeypatch):
    torch.manual_seed(11)
    expected = torch.rand(3)
    seed_torch(11)
    assert torch.equal(torch.rand(3), expected)
    told = []
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch, "manual_seed", told.append)
    seed_torch(12)
    assert told == [12]  # which seeds accelerators as well


def test_names_tell_streams_apart():
    assert len({fold(0), fold(1), fold(0, "a"), fold(0, "b"), fold(0, "a", 1), fold(0, "a", 2)}) == 6

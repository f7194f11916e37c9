"""Data as people have it, and what is refused."""

import math

import pytest
import torch
from torch.utils.data import Dataset, TensorDataset

from bayesformer.data import Data, as_data


def test_every_form_gives_the_same_data():
    x, y = torch.randn(6, 3), torch.arange(6) % 2

    class Items(Dataset):
        def __len__(self):
            return 6

        def __getitem__(self, i):
            return {"input_ids": x[i], "labels": y[i]}

    for form in [(x, y), TensorDataset(x, y), Data(x, y)]:
        data = as_data(form)
        assert torch.equal(data.inputs, x)
        assert torch.equal(data.targets, y)
    for form in [{"input_ids": x, "labels": y}, Items(), ({"input_ids": x}, y)]:
        data = as_data(form)
        assert torch.equal(data.inputs["input_ids"], x)
        assert torch.equal(data.targets, y)


def test_take_subset_and_chunks():
    x, mask = torch.arange(10.0).view(5, 2), torch.ones(5, 2, dtype=torch.bool)
    data = Data((x, -x), x, mask)
    batch = data.take(torch.tensor([3, 0]))
    assert torch.equal(batch.inputs[1], -x[[3, 0]])
    assert [len(chunk.targets) for chunk in data.chunks(2)] == [2, 2, 1]
    assert len(data.subset(slice(0, 3))) == 3
    rows = data.take(torch.tensor([[0, 1], [2, 3]]))
    assert rows.targets.shape == (2, 2, 2)


def test_fingerprint_sees_every_value():
    x, y = torch.randn(6, 3), torch.arange(6)
    assert Data(x, y).fingerprint() == Data(x.clone(), y).fingerprint()
    changed = x.clone()
    changed[5, 2] += 1e-6
    assert Data(changed, y).fingerprint() != Data(x, y).fingerprint()
    assert Data(x, y, torch.ones(6, dtype=torch.bool)).fingerprint() != Data(x, y).fingerprint()


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (
            lambda: as_data((torch.zeros(0, 3), torch.zeros(0))),
            "inputs must have at least one example; got none",
        ),
        (lambda: as_data((torch.zeros(4, 3), torch.zeros(3))), "got 3 targets, 4 inputs"),
        (
            lambda: as_data((torch.tensor([[math.nan, 1.0]]), torch.zeros(1))),
            "inputs must be finite; got 1 NaN",
        ),
        (lambda: as_data(((torch.zeros(4), torch.zeros(3)), torch.zeros(4))), r"same length; got \[3, 4\]"),
        (lambda: as_data({"x": torch.zeros(3)}), "must have a key labels, targets, label or label_ids; got x"),
        (lambda: as_data([1, 2]), "examples of data must be pairs .* got Tensor"),
        (lambda: as_data(3), "data must be Data, a pair .* got int"),
        (
            lambda: as_data(("text", torch.zeros(1))),
            "must be a tensor, or a tuple or dict of tensors; got str",
        ),
        (lambda: Data(torch.zeros(2), torch.zeros(2), torch.zeros(2)), "mask must be boolean"),
        (
            lambda: Data(torch.zeros(2), torch.zeros(2), torch.zeros(2, dtype=torch.bool)),
            "keep at least one target",
        ),
        (lambda: as_data(TensorDataset(torch.zeros(0, 1), torch.zeros(0))), "at least one example; got none"),
    ],
)
def test_bad_data_is_named(make, text):
    with pytest.raises(ValueError, match=text):
        make()

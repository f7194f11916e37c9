"""Inputs for prediction: the forms of training without labels, read in order and in bounded memory."""

import re

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

from bayesformer.data import Data, Stream, as_batches, as_inputs
from tests.data_forms import INDEXED, LOADERS, STREAMS, Iterated, N, Pairs, Table, X, Y

LABELLED = {**INDEXED, **LOADERS, **STREAMS}
LABELLED.pop("pair")  # a tuple is what the model is called with
LABELLED.pop("numpy")


def joined(parts):
    parts = [part["x"] if isinstance(part, dict) else part for part in parts]
    return torch.cat(parts)


@pytest.mark.parametrize("form", LABELLED)
def test_labels_are_left_out_and_order_is_kept(form):
    inputs = as_inputs(LABELLED[form]())
    assert inputs.num_data == N
    first = inputs.first(3)
    assert torch.equal(first["x"] if isinstance(first, dict) else first, X[:3])
    parts = list(inputs.in_order(4))
    assert [len(part["x"] if isinstance(part, dict) else part) for part in parts] == [4, 4, 3]
    assert torch.equal(joined(parts), X)
    if "of a generator" not in form and form != "Stream of dicts":
        assert torch.equal(joined(inputs.in_order(4)), X)  # once for each draw


def test_what_a_model_is_called_with_stays_as_it_is():
    for form in [X, X.numpy(), {"x": X, "use_cache": False}, Data(X, Y), TensorDataset(X), as_batches((X, Y))]:
        assert torch.equal(joined(as_inputs(form).in_order(4)), X)
    a, b = next(as_inputs((X, -X)).in_order(4))
    assert torch.equal(b, -a)
    assert torch.equal(next(as_inputs(({"x": X}, Y)).in_order(4))["x"], X[:4])
    assert next(as_inputs({"x": X, "use_cache": False, "labels": Y}).in_order(4)).keys() == {"x", "use_cache"}


def test_batches_are_views_until_they_are_moved():
    inputs = as_inputs(X)
    assert next(inputs.in_order(4)).data_ptr() == X.data_ptr()
    assert next(inputs.in_order(4, device="meta")).device.type == "meta"


def test_examples_without_labels():
    class Alone(Dataset):
        def __len__(self):
            return N

        def __getitem__(self, i):
            return X[i]

    class Single(Alone):
        def __getitem__(self, i):
            return (X[i],)

    rows = [{"x": x} for x in X]
    for form in (Alone(), Single(), rows, Table(x=X.tolist()), DataLoader(Alone(), batch_size=3), Stream(iter(X))):
        assert torch.equal(joined(as_inputs(form).in_order(4)), X)


def test_ragged_inputs_are_padded():
    (part,) = as_inputs([{"input_ids": [1]}, {"input_ids": [1, 2]}]).in_order(4)
    assert part["attention_mask"].tolist() == [[1, 0], [1, 1]]


def test_a_million_rows_are_never_held():
    class Many(Iterated):
        def __iter__(self):
            for number in range(1_000_000):
                if number == 9:
                    raise RuntimeError("read too far")
                yield X[0]

    parts = as_inputs(Many()).in_order(4)
    assert [len(next(parts)) for _ in range(2)] == [4, 4]
    data = Pairs()
    parts = as_inputs(data).in_order(4)
    assert data.reads.sum() == 0
    next(parts)
    assert data.reads.tolist() == [1] * 4 + [0] * (N - 4)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: as_inputs(3), "inputs must be Data, a pair (inputs, targets)"),
        (lambda: as_inputs("x"), "got str"),
        (lambda: as_inputs(("text",)), "inputs must be a tensor, or a tuple or dict of tensors; got ['str']"),
        (lambda: as_inputs(torch.tensor([float("inf")])), "inputs must be finite; got 1 NaN or infinite values"),
        (lambda: as_inputs(torch.zeros(0, 3)), "inputs must have at least one example; got none"),
        (lambda: as_inputs({"labels": Y}), "inputs must be a tensor, or a tuple or dict of tensors"),
    ],
)
def test_mistakes_are_named(make, text):
    with pytest.raises(ValueError, match=re.escape(text)):
        make()

"""What counts as inputs, targets, mask and flag in every form; ragged examples, tables, and what is refused."""

import math
import re

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from bayesformer.core.types import Batch
from bayesformer.data import Data, Stream, as_batches, as_data
from tests.data_forms import INDEXED, LOADERS, N, Pairs, Table, X, Y

RAGGED = [{"input_ids": [5] * length, "labels": length % 2} for length in (3, 1, 4, 1, 5)]


def only(data, size=50, **options):
    """The one batch of small data, in order."""
    (batch,) = as_batches(data, **options).in_order(size)
    return batch


class Items(Dataset):
    def __init__(self, make, count=6):
        self.make, self.count = make, count

    def __len__(self):
        return self.count

    def __getitem__(self, i):
        return self.make(i)


class TestInputsAndTargets:
    def test_a_boolean_third_entry_is_a_mask(self):
        mask = Y > 0
        for form in [(X, Y, mask), (X.numpy(), Y.numpy(), mask.numpy()), Data(X, Y, mask), Batch(X, Y, mask)]:
            batch = only(form)
            assert torch.equal(batch.mask, mask)
            assert torch.equal(batch.targets, Y)
        assert only((X, Y, None)).mask is None

    def test_masks_of_examples_are_said_by_batch(self):
        batch = only(Items(lambda i: Batch(X[i], Y[i], Y[i] > 0)))
        assert torch.equal(batch.mask, Y[:6] > 0)
        assert only(Items(lambda i: Batch(X[i], Y[i]))).mask is None

    def test_examples_of_many_entries_end_with_the_target(self):
        batch = only(Items(lambda i: (X[i], -X[i], i, 2.5)))
        assert [part.tolist() for part in batch.inputs[1:]] == [(-X[:6]).tolist(), list(range(6))]
        assert torch.equal(batch.targets, torch.full((6,), 2.5))
        nested = only(Items(lambda i: ((X[i], {"a": i}), i)))
        assert torch.equal(nested.inputs[1]["a"], torch.arange(6))

    def test_examples_may_hold_arrays_numbers_and_lists(self):
        make = {
            "array": lambda i: (X[i].numpy(), Y[i].numpy()),
            "numpy scalar": lambda i: (X[i].numpy(), np.int64(Y[i])),
            "list": lambda i: (X[i].tolist(), int(Y[i])),
        }
        for form in make.values():
            batch = only(Items(form))
            assert torch.equal(batch.inputs, X[:6])
            assert torch.equal(batch.targets, Y[:6])

    def test_targets_may_be_booleans(self):
        for make in (lambda i: (X[i], i > 2), lambda i: {"x": X[i], "labels": i > 2}):
            assert only(Items(make)).targets.tolist() == [False] * 3 + [True] * 3

    @pytest.mark.parametrize("form", ["tensors", "items", "list", "loader"])
    def test_flags_reach_the_model_unchanged_with_every_batch(self, form):
        flags = {"use_cache": False, "return_dict": True, "kind": "text", "past": None, "scale": torch.tensor(2.0)}
        if form == "tensors":
            data = {"x": X, "labels": Y, **flags}
        else:
            flags.pop("scale")
            examples = [{"x": X[i], "labels": int(Y[i]), **flags} for i in range(N)]

            def collate(part):
                return {"x": torch.stack([e["x"] for e in part]), "labels": X[: len(part)], **flags}

            data = {
                "items": Items(lambda i: examples[i], N),
                "list": examples,
                "loader": DataLoader(examples, batch_size=4, collate_fn=collate),
            }[form]
        for batch in as_batches(data).epoch(4, seed=0, epoch=0, device="cpu"):
            assert {key: batch.inputs[key] for key in flags} == flags
            assert batch.inputs["x"].shape == (len(batch.targets), 2)

    def test_members_in_lockstep_take_flags_too(self):
        batch = Data({"x": X, "use_cache": False}, Y).take(torch.tensor([[0, 1], [2, 3]]))
        assert batch.inputs["x"].shape == (2, 2, 2)
        assert batch.inputs["use_cache"] is False


class TestRagged:
    def test_tokens_are_padded_to_the_longest_of_their_batch(self):
        first, second, third = as_batches(RAGGED).in_order(2)
        assert first.inputs["input_ids"].tolist() == [[5, 5, 5], [5, 0, 0]]
        assert first.inputs["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
        assert first.targets.tolist() == [1, 1]
        assert second.inputs["input_ids"].shape == (2, 4)
        assert third.inputs["attention_mask"].tolist() == [[1] * 5]  # the same inputs in every batch

    def test_labels_of_positions_are_padded_with_the_ignored_label(self):
        examples = [{"input_ids": [1] * n, "token_type_ids": [1] * n, "labels": list(range(n))} for n in (2, 3)]
        batch = only(examples)
        assert batch.targets.tolist() == [[0, 1, -100], [0, 1, 2]]
        assert batch.inputs["token_type_ids"].tolist() == [[1, 1, 0], [1, 1, 1]]

    def test_real_labels_of_positions_are_masked(self):
        batch = only([{"input_ids": [1] * n, "labels": [0.5] * n} for n in (2, 3)])
        assert batch.targets.tolist() == [[0.5, 0.5, 0], [0.5, 0.5, 0.5]]
        assert batch.mask.tolist() == [[True, True, False], [True] * 3]

    def test_an_attention_mask_that_is_given_is_padded_with_zero(self):
        batch = only([{"input_ids": [4] * n, "attention_mask": [1] * n, "labels": 0} for n in (1, 2)])
        assert batch.inputs["attention_mask"].tolist() == [[1, 0], [1, 1]]

    def test_equal_lengths_need_no_mask(self):
        assert set(only([{"input_ids": [1, 2], "labels": 0}] * 3).inputs) == {"input_ids"}

    def test_features_are_padded_like_tokens(self):
        batch = only(Items(lambda i: {"inputs_embeds": torch.ones(i + 1, 2), "labels": i}, 3))
        assert batch.inputs["inputs_embeds"].shape == (3, 3, 2)
        assert batch.inputs["attention_mask"].tolist() == [[1, 0, 0], [1, 1, 0], [1, 1, 1]]

    @pytest.mark.parametrize("side", ["left", "right"])
    def test_a_tokenizer_pads_by_itself(self, side):
        tokenizer = _tokenizer(side)
        examples = [{**tokenizer(text), "labels": [7] * count} for text, count in [("a b", 2), ("a b c", 3)]]
        for form in (examples, Table(**{key: [e[key] for e in examples] for key in examples[0]})):
            batch = only(form, tokenizer=tokenizer)
            padded = {"left": [[9, 1, 2], [1, 2, 3]], "right": [[1, 2, 9], [1, 2, 3]]}
            assert batch.inputs["input_ids"].tolist() == padded[side]
            assert batch.targets.tolist()[0] == {"left": [-100, 7, 7], "right": [7, 7, -100]}[side]

    def test_a_collator_of_transformers_is_taken_as_it_is(self):
        from transformers import DataCollatorWithPadding

        tokenizer = _tokenizer("right")
        examples = [{**tokenizer(text), "label": 1} for text in ("a", "a b")]
        batch = only(examples, collate=DataCollatorWithPadding(tokenizer))
        assert batch.inputs["input_ids"].tolist() == [[1, 9], [1, 2]]
        assert batch.targets.tolist() == [1, 1]


class TestTables:
    def test_text_is_left_out_and_flags_are_numbers(self):
        table = Table(input_ids=[[1], [2, 3]], text=["a", "b c"], seen=[True, False], label=[0, 1])
        batch = only(table)
        assert set(batch.inputs) == {"input_ids", "attention_mask", "seen"}
        assert batch.inputs["seen"].tolist() == [True, False]
        assert batch.targets.tolist() == [0, 1]

    def test_columns_the_model_does_not_take_are_left_out(self):
        table = Table(input_ids=[[1], [2]], idx=[0, 1], labels=[0, 1])
        assert set(only(table, keys=["input_ids", "attention_mask"]).inputs) == {"input_ids"}

    def test_a_collator_gets_a_list_of_examples(self):
        seen = []

        def collate(examples):
            seen.extend(examples)
            return {"x": torch.tensor([len(e["text"]) for e in examples]), "labels": torch.zeros(len(examples))}

        batch = only(Table(text=["a", "bcd"], label=[0, 1]), collate=collate)
        assert batch.inputs["x"].tolist() == [1, 3]
        assert seen[1] == {"text": "bcd", "label": 1}

    def test_a_table_in_the_torch_format_gives_tensors(self):
        class Formatted(Table):
            def __getitem__(self, index):
                rows = super().__getitem__(index)
                return {"input_ids": [torch.tensor(r) for r in rows["input_ids"]], "label": torch.tensor(rows["label"])}

        batch = only(Formatted(input_ids=[[1], [2, 3]], label=[0, 1]))
        assert batch.inputs["input_ids"].tolist() == [[1, 0], [2, 3]]

    def test_a_table_in_the_numpy_format_gives_arrays(self):
        class Formatted(Table):
            def __getitem__(self, index):
                rows = super().__getitem__(index)
                ragged = np.empty(len(index), dtype=object)
                ragged[:] = [np.array(row) for row in rows["input_ids"]]
                return {"input_ids": ragged, "text": np.array(rows["text"]), "label": np.array(rows["label"])}

        batch = only(Formatted(input_ids=[[1], [2, 3]], text=["a", "bc"], label=[0, 1]))
        assert batch.inputs["input_ids"].tolist() == [[1, 0], [2, 3]]
        assert set(batch.inputs) == {"input_ids", "attention_mask"}

    def test_a_streamed_table_leaves_text_out(self):
        class Streaming(IterableDataset):
            column_names = ("input_ids", "text", "idx", "label")

            def __iter__(self):
                for i in range(3):
                    yield {"input_ids": [i] * (i + 1), "text": "a" * i, "idx": i, "label": i}

        batch = only(Stream(Streaming(), num_data=3), keys=["input_ids"])
        assert batch.inputs["input_ids"].tolist() == [[0, 0, 0], [1, 1, 0], [2, 2, 2]]
        assert set(batch.inputs) == {"input_ids", "attention_mask"}

    def test_columns_of_a_tokenizer(self):
        batch = only({**_tokenizer("right")(["a", "a b"]), "labels": [0, 1]})
        assert batch.inputs["attention_mask"].tolist() == [[1, 0], [1, 1]]


def test_batches_of_unequal_shapes_are_not_held_in_memory():
    loader = DataLoader(RAGGED, batch_size=2, collate_fn=lambda part: (torch.ones(len(part), len(part)), torch.ones(2)))
    with pytest.raises(ValueError, match="got 2 targets, 1 inputs"):
        as_data(loader)
    loader = DataLoader(RAGGED[:4], batch_size=3, collate_fn=lambda p: (torch.ones(len(p), len(p)), torch.ones(len(p))))
    with pytest.raises(ValueError, match=r"batches of one shape to be held in memory; got \[\(3,\), \(\)\]"):
        as_data(loader)


@pytest.mark.parametrize("form", [*INDEXED, *LOADERS])
def test_all_in_memory_is_the_same_data(form):
    data = as_data({**INDEXED, **LOADERS}[form]())
    inputs = data.inputs["x"] if isinstance(data.inputs, dict) else data.inputs
    assert torch.equal(inputs, X)
    assert torch.equal(data.targets, Y)


class Unsized(IterableDataset):
    def __iter__(self):
        yield from zip(X, Y, strict=True)


MISTAKES = {
    "labels for a mask": (
        lambda: only((X, X.long(), Y)),
        "data must be a pair (inputs, targets), or (inputs, targets, mask) with a boolean mask; got 3 entries "
        "(torch.float32, torch.int64, torch.int64). Several inputs are a tuple or dict of their own: "
        "((ids, attention_mask), labels)",
    ),
    "four entries": (lambda: only((X, X, X, Y)), "got 4 entries"),
    "one entry": (lambda: only((X,)), "got 1 entries"),
    "a mask of examples": (
        lambda: only(Items(lambda i: (X[i], Y[i], True))),
        "examples of data end with a boolean entry, which may be a mask or a label",
    ),
    "a stream without N": (
        lambda: as_batches(Unsized(), "data").require_num_data(),
        "data must say how many examples it has, since the prior is weighed against their number: a stream has no "
        "length. Give bf.Stream(data, num_data=...).",
    ),
    "N of a stream": (
        lambda: Stream(Unsized(), num_data=0),
        "num_data must be the number of examples, at least 1",
    ),
    "another N": (
        lambda: as_batches(Pairs(), num_data=5),
        "must be the number of examples of data, 11; got 5",
    ),
    "a stream with replacement": (
        lambda: as_batches(Stream(Unsized(), num_data=N)).epoch(4, seed=0, epoch=0, replacement=True),
        "data cannot be drawn with replacement, since it is read in its own order",
    ),
    "an empty stream": (
        lambda: as_batches(Stream(iter(()), num_data=1)).first(1),
        "data must have at least one example",
    ),
    "an empty list": (lambda: as_batches([]), "data must have at least one example; got none"),
    "an empty dataset": (lambda: as_batches(Items(None, 0), "validation"), "validation must have at least one example"),
    "a bare tensor": (lambda: as_batches(X), "data must be Data, a pair (inputs, targets)"),
    "text": (lambda: as_batches("train.csv"), "bf.Stream(iterable, num_data=...); got str"),
    "no labels": (
        lambda: only(Items(lambda i: {"x": X[i]})),
        "data must have a key labels, targets, label or label_ids; got x",
    ),
    "examples without a target": (
        lambda: only([X[0], X[1]]),
        "examples of data must be pairs (inputs, target)",
    ),
    "splits": (
        lambda: only({"train": Table(x=[1], label=[0]), "test": Table(x=[1], label=[0])}),
        "data must be one dataset; got several: train, test. Give data['train'].",
    ),
    "NaN in a dataset": (
        lambda: only(Items(lambda i: (torch.tensor([math.nan]), 0))),
        "inputs of data must be finite; got 6 NaN or infinite values",
    ),
    "unequal inputs": (
        lambda: only(DataLoader(Pairs(), batch_size=50, collate_fn=lambda part: (X[:4], X[:3], Y[:4]))),
        "inputs of data must all have the same length; got [3, 4]",
    ),
    "targets of a loader": (
        lambda: only(DataLoader(Pairs(), batch_size=50, collate_fn=lambda part: (X, Y[:2]))),
        "got 2 targets, 11 inputs",
    ),
    "list targets": (lambda: only((X, Y.tolist())), "targets must be a tensor with one row per example; got tuple"),
    "array mask": (lambda: Data(X, Y, "all"), "mask must be a boolean tensor; got str"),
    "objects": (
        lambda: only(Items(lambda i: (object(), 0))),
        "an example of data must be a tensor, an array, a number or a list of numbers; got object.",
    ),
    "text arrays": (lambda: only((np.array(["a", "b"]), Y[:2])), "arrays must hold numbers; got an array of dtype <U1"),
    "ragged pairs": (
        lambda: only(Items(lambda i: (torch.ones(i + 1), 0))),
        "an example of data must have the shape of all others; got [(1,), (2,)",
    ),
    "ragged unknown keys": (
        lambda: only(Items(lambda i: {"signal": torch.ones(i + 1), "labels": 0})),
        "'signal' of data must have one shape, since an attention mask for padding can be made from input_ids, "
        "inputs_embeds, input_values only; got [(1,), (2,)",
    ),
    "ragged in two dimensions": (
        lambda: only([{"input_ids": torch.ones(2, n), "labels": 0} for n in (1, 2)]),
        "sequences can be padded if they differ in length only; got shapes [(2, 1), (2, 2)]",
    ),
    "other keys": (
        lambda: only([{"x": 1, "labels": 0}, {"y": 1, "labels": 0}]),
        "the first of a batch has ['x', 'labels'], number 1 of it ['y', 'labels']",
    ),
    "other lengths": (
        lambda: only([((1.0,), 0), ((1.0, 2.0), 0)]),
        "must have the same number of entries as all",
    ),
    "flags that differ": (
        lambda: only([{"x": 1, "flag": flag, "labels": 0} for flag in (True, False)]),
        "'flag' of data is a flag or text, which must be the same in all examples of a batch; got True and others",
    ),
    "text only": (
        lambda: only(Table(text=["a", "b"], label=[0, 1])),
        "data must have a column of numbers besides its labels; got text, label. Tokenise text first",
    ),
    "columns of other lengths": (
        lambda: only({"x": [1, 2], "labels": [0]}),
        "columns of data must all have the same length; got {'x': 2, 'labels': 1}",
    ),
    "batch size": (lambda: list(as_batches((X, Y)).in_order(0)), "batch_size must be positive; got 0"),
    "a boolean tensor dataset": (lambda: only(TensorDataset(X, X, Y > 0)), "may be a mask or a label"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_named(mistake):
    make, text = MISTAKES[mistake]
    with pytest.raises(ValueError, match=re.escape(text)):
        make()


def _tokenizer(side):
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(WordLevel({"a": 1, "b": 2, "c": 3, "[PAD]": 9}, unk_token="[PAD]"))
    words.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]", padding_side=side)

"""Reviews as numbers: the vocabulary is the training part's, the end of a review is kept, damage is named."""

import json
import lzma

import pytest
import torch

from bayesformer.bench.tasks import TASKS
from bayesformer.bench.tasks.movie_reviews import front_padded
from bayesformer.core.errors import DamagedFileError
from bayesformer.core.settings import override
from bayesformer.datasets import imdb
from bayesformer.datasets.places import CACHE, FOLDER


def write(folder, part, rows):
    (folder / "imdb").mkdir(exist_ok=True)
    text = "".join(json.dumps({"text": text, "label": label}) + "\n" for text, label in rows)
    (folder / "imdb" / f"{part}.jsonl.xz").write_bytes(lzma.compress(text.encode()))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    train = [(f"It's GOOD,<br />really {'very ' * i}good {i}!", i % 2) for i in range(12)]
    write(tmp_path, "train", train)
    write(tmp_path, "test", [("a never seen thing, it's good", 1), ("bad", 0)])
    monkeypatch.setenv(FOLDER, str(tmp_path))
    monkeypatch.setenv(CACHE, str(tmp_path / "cache"))
    return tmp_path


def test_words_and_numbers(folder):
    reviews = imdb.load(train=8, validation=4, test=2, words=10, length=5)
    # Frequencies decide, ties go by the alphabet; words of the test part alone are unknown.
    assert reviews.vocabulary[:4] == ("<pad>", "<unknown>", "very", "good")
    assert set(reviews.vocabulary) == {"<pad>", "<unknown>", "very", "good", "it's", "really"}
    words = {word: i for i, word in enumerate(reviews.vocabulary)}
    rows = {tuple(row) for row in reviews.test.inputs["input_ids"].tolist()}
    unknown = imdb.UNKNOWN
    assert rows == {(unknown, unknown, unknown, words["it's"], words["good"]), (unknown, 0, 0, 0, 0)}
    assert len(reviews.train) == 8
    assert len(reviews.validation) == 4
    ids, mask = reviews.train.inputs["input_ids"], reviews.train.inputs["attention_mask"]
    assert torch.equal(mask, (ids != imdb.PADDING).long())
    again = imdb.load(train=8, validation=4, test=2, words=10, length=5)
    assert torch.equal(again.train.inputs["input_ids"], ids)


def test_train_and_validation_are_disjoint(folder):
    reviews = imdb.load(train=8, validation=4, test=2, words=10, length=40)
    rows = [tuple(row) for part in (reviews.train, reviews.validation) for row in part.inputs["input_ids"].tolist()]
    assert len(set(rows)) == 12


def test_padding_does_not_change_the_answer():
    task = TASKS["imdb"]()
    model = task.model().eval()
    short = task.inputs(torch.tensor([[5.0, 6.0, 7.0]]))
    padded = task.inputs(torch.tensor([[5.0, 6.0, 7.0, 0.0, 0.0]]))
    torch.testing.assert_close(model(**short), model(**padded))
    with pytest.raises(ValueError, match="at most 128 token numbers; got"):
        task.inputs(torch.zeros(1, 200))


def test_what_is_missing_or_damaged_is_named(folder, monkeypatch):
    with pytest.raises(ValueError, match="at most 12 and test at most 2; got 12 \\+ 1 and 2"):
        imdb.load(train=12, validation=1, test=2, words=10, length=5)
    path = folder / "imdb" / "test.jsonl.xz"
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])
    with pytest.raises(DamagedFileError, match="cannot be read"):
        imdb.read("test")
    path.unlink()
    with pytest.raises(FileNotFoundError, match="does not exist"):
        imdb.read("test")
    monkeypatch.delenv(FOLDER)
    with pytest.raises(FileNotFoundError, match="BAYESFORMER_DATA must name"):
        imdb.read("train")


def test_reviews_for_recurrent_networks_are_padded_in_front(folder):
    front_padded.cache_clear()
    reviews = imdb.load(train=8, validation=4, test=2, words=10, length=40, padding="start")
    usual = imdb.load(train=8, validation=4, test=2, words=10, length=40)
    for ours, theirs in zip(reviews[:3], usual[:3], strict=True):
        for row, other in zip(ours.inputs["input_ids"], theirs.inputs["input_ids"], strict=True):
            count = int((other != imdb.PADDING).sum())
            assert row[40 - count :].tolist() == other[:count].tolist()
            assert not row[: 40 - count].any()
    task = override(
        TASKS["imdb/cnn_lstm"](), {"train": 8, "validation": 4, "test": 2, "words": 10, "length": 40}, "task"
    )
    data = task.load()
    assert torch.equal(data.train.inputs, reviews.train.inputs["input_ids"])
    assert task.model()(data.test.inputs).shape == (2, 2)
    with pytest.raises(ValueError, match=r"rows of 40 token numbers; got \(1, 9\)"):
        task.inputs(torch.zeros(1, 9))

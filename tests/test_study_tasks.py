"""The tasks pos and mnist: scores of sentences, of padding and of outsiders, on small data made here."""

import math

import pytest
import torch

from bayesformer import evaluate
from bayesformer.bench.tasks import MnistVit, PosTagging, mnist_vit, pos_tagging
from bayesformer.core.storage import write_tensors
from bayesformer.data import Data
from bayesformer.datasets import ambiguous_mnist, mnist, treebank
from bayesformer.evaluate.catalogue import describe
from bayesformer.likelihoods.predictive import CategoricalPredictive
from bayesformer.study import ambiguous_digits

TAGS = len(treebank.TAGS)


@pytest.fixture
def tagged(monkeypatch):
    """Five sentences of one to five of the words "a" to "e", tagged by their letter."""
    numbers = {letter: len(treebank.SPECIAL) + i for i, letter in enumerate("abcde")}
    data = treebank.encode([[("abcde"[i], treebank.TAGS[i]) for i in range(n)] for n in (1, 2, 3, 4, 5)], numbers, 12)
    found = treebank.Tagged(data, data, data, (*treebank.SPECIAL, *"abcde"), numbers)
    monkeypatch.setattr(pos_tagging, "sentences", lambda length: found)
    return found


def probabilities(inputs, right=0.9, draws=2):
    """Says tag i of word i with probability `right`, the others alike; another tag of the word "c"."""
    ids = inputs["input_ids"]
    said = torch.where(ids >= len(treebank.SPECIAL), ids - len(treebank.SPECIAL), TAGS - 1)
    said = torch.where(said == 2, 7, said)
    probs = torch.full((*ids.shape, TAGS), (1 - right) / (TAGS - 1)).scatter(-1, said[..., None], right)
    return CategoricalPredictive(probs.log().expand(draws, *probs.shape))


def test_words_are_scored_and_padding_beside_them(tagged):
    task = PosTagging(length=12)
    evaluation = task.evaluate(probabilities, task.load())
    metrics = evaluation.metrics
    assert metrics["accuracy"] == pytest.approx(12 / 15)  # of 15 words the three "c" are wrong
    assert metrics["accuracy/padded"] == pytest.approx((12 + 45) / 60)  # and 45 paddings are right
    wrong = math.log(0.1 / (TAGS - 1))
    assert metrics["log_likelihood"] == pytest.approx((12 * math.log(0.9) + 3 * wrong) / 5, rel=1e-5)
    assert metrics["brier/padded"] == pytest.approx(metrics["brier"] / 4, rel=1e-4)
    for name in metrics:
        describe(name)
    shown = evaluation.figures["sentences"]
    assert len(shown["highest"]) == 5
    assert all(len(s["words"]) == len(s["tags"]) == len(s["entropy"]) for s in shown["lowest"])


def test_the_tagger_takes_the_sentences_of_the_task(tagged):
    task = PosTagging(length=12)
    outputs = task.model()(**task.inputs(task.load().probes["ambiguity"]))
    assert outputs.shape == (30, 12, TAGS)
    with pytest.raises(ValueError, match=r"rows of at most 12 numbers; got \(1, 13\)"):
        task.inputs(torch.zeros(1, 13))
    with pytest.raises(ValueError, match="length must be at least 11, as the sentences of the corpus are; got 6"):
        PosTagging(length=6)


def test_the_uncertainty_of_a_sentence_is_that_of_its_words():
    mask = torch.tensor([[True, True, False], [True, False, False]])
    mean, most = pos_tagging.sentence_scores(torch.tensor([[1.0, 3.0, 9.0], [2.0, 9.0, 9.0]]), mask)
    assert mean.tolist() == [2.0, 2.0]
    assert most.tolist() == [3.0, 2.0]


def test_ambiguous_sentences_are_found_by_entropy():
    probs = torch.tensor([0.99, 0.5, 0.9, 0.6])  # of the first of two classes, one word per sentence
    log_probs = torch.stack([probs, 1 - probs], -1).log()[None, :, None]  # (1, 4, 1, 2)
    mask, ambiguous = torch.ones(4, 1, dtype=torch.bool), torch.tensor([False, True, False, True])
    found = pos_tagging.ambiguity(CategoricalPredictive(log_probs), mask, ambiguous)
    assert found["auroc/ambiguity"] == found["auroc/ambiguity_max"] == found["tree_accuracy/ambiguity"] == 1.0
    assert "auroc_epistemic/ambiguity" not in found  # one draw has none
    lower = pos_tagging.ambiguity(CategoricalPredictive(log_probs), mask, ~ambiguous)
    assert lower["auroc/ambiguity"] == 0.0


def test_tree_accuracy_is_that_of_the_best_threshold():
    negatives, positives = torch.tensor([0.0, 1.0, 2.0]), torch.tensor([1.5, 3.0, 4.0, 5.0, 6.0])
    assert evaluate.tree_accuracy(negatives, positives) == pytest.approx(7 / 8)
    assert evaluate.tree_accuracy(torch.zeros(3), torch.zeros(5)) == pytest.approx(5 / 8)  # nothing told apart


@pytest.fixture
def digits(monkeypatch, tmp_path):
    """Twenty noisy images, clothing and ambiguous digits."""
    images, labels = torch.randn(20, 1, 28, 28), torch.arange(20) % 10
    parts = [Data(images[s], labels[s]) for s in (slice(0, 10), slice(10, 14), slice(14, 20))]
    found = mnist.Standardised(*parts, 0.13, 0.31)
    monkeypatch.setattr(mnist_vit, "digits", lambda validation: found)
    monkeypatch.setattr(mnist, "clothing", lambda mean, std: torch.randn(5, 1, 28, 28))
    monkeypatch.setenv("BAYESFORMER_DATA", str(tmp_path))
    facts = {"format": ambiguous_mnist.FORMAT}
    for part in ambiguous_mnist.PARTS:
        pixels = torch.full((4, 28, 28), 51, dtype=torch.uint8)
        write_tensors(tmp_path / ambiguous_mnist.file_of(part), {"images": pixels}, facts)
    return found


def test_outsiders_count_as_questions_without_an_answer(digits):
    task = MnistVit(validation=4)
    data = task.load()
    torch.testing.assert_close(data.probes["ambiguous"], torch.full((4, 1, 28, 28), (0.2 - 0.13) / 0.31))
    model = task.model().eval()

    def ask(x):
        with torch.no_grad():
            return CategoricalPredictive(torch.stack([model(x), model(0.5 * x)]).log_softmax(-1))

    metrics = task.evaluate(ask, data).metrics
    inside, outside = ask(data.test.inputs), ask(data.probes["fashion"])
    questions = [(u.item(), float(w)) for u, w in zip(inside.total, inside.labels != data.test.targets, strict=True)]
    questions = sorted(questions + [(u.item(), 1.0) for u in outside.total])
    losses = [loss for _, loss in questions]
    naive = sum(sum(losses[:k]) / k for k in range(1, len(losses) + 1)) / len(losses)
    assert metrics["aurc/fashion"] == pytest.approx(naive)
    assert {"fpr95_epistemic/ambiguous", "auroc/ambiguous", "auroc_epistemic/fashion", "aurc_epistemic/fashion"} <= set(
        metrics
    )
    for name in metrics:
        describe(name)
    raw = torch.full((2, 784), 255.0)
    torch.testing.assert_close(task.inputs(raw), torch.full((2, 1, 28, 28), (1 - 0.13) / 0.31))
    with pytest.raises(ValueError, match="an image must have 784 pixels"):
        task.inputs(torch.zeros(2, 64))
    assert len(MnistVit(validation=4, train=3).load().train) == 3


def test_entropies_of_chosen_mixtures_are_spread_out():
    recipe = ambiguous_digits.Recipe(images=400)
    entropy = torch.cat([0.05 + 0.1 * torch.rand(5000), 0.15 + 1.4 * torch.rand(3000)])
    chosen = ambiguous_digits.evened(entropy, recipe)
    assert len(chosen.unique()) == len(chosen)  # none twice
    assert abs(len(chosen) - 400) <= 25  # every bin is rounded
    below = (entropy[chosen] < 0.15).float().mean()
    # Three bins of fifty hold 5/8 of all mixtures; to the power .2 each has (1540/65)^.2 = 1.9 times a bin above.
    assert 0.06 < below < 0.2
    few = ambiguous_digits.evened(entropy[:30], recipe)
    assert len(few) == 30  # what there is


def test_mixtures_lie_between_the_digits_they_are_made_of():
    codes = torch.eye(3, ambiguous_digits.CODE)
    found = ambiguous_digits.mixtures(codes, torch.Generator().manual_seed(0))
    for _ in range(3):
        mixed = next(found)
        torch.testing.assert_close(mixed.sum(-1), torch.ones(len(mixed)))
        assert bool((mixed >= 0).all())


def test_a_set_is_made_of_what_the_ensemble_finds_ambiguous(tmp_path, monkeypatch):
    recipe = ambiguous_digits.Recipe(
        images=20, kept=60, autoencoder_epochs=1, networks=2, network_epochs=1, most_information=1.0
    )
    images, labels = torch.rand(60, 28, 28), torch.arange(60) % 10
    monkeypatch.setattr(ambiguous_digits, "read", lambda part, source: (images, labels))
    monkeypatch.setattr(ambiguous_digits, "CHUNK", 128)
    monkeypatch.setattr(ambiguous_digits, "HIGH", 2.4)  # untrained networks are unsure of everything
    facts = ambiguous_digits.make(tmp_path, recipe)
    assert facts["entropy"]["least"] >= 0.05
    assert sum(facts["entropy"]["counts"]) == facts["images"]
    assert "images of 60 mixtures" in ambiguous_digits.told(facts)
    monkeypatch.setenv("BAYESFORMER_DATA", str(tmp_path))
    train, test = (ambiguous_mnist.load(part, 0.0, 1.0) for part in ("train", "test"))
    assert train.shape[1:] == (1, 28, 28)
    assert len(train) + len(test) == facts["images"]
    again = ambiguous_digits.make(tmp_path / "again", recipe)
    assert again == facts  # seeded
    with pytest.raises(ValueError, match=r"unknown part 'tests'"):
        ambiguous_mnist.load("tests", 0.0, 1.0)


def test_noise_on_digits_is_the_same_for_all_and_is_scored(digits):
    task = MnistVit(validation=4, noisy=3, noise=0.5)
    data = task.load()
    shown = data.test.subset(slice(0, 3))
    torch.testing.assert_close(task.with_noise(shown), task.with_noise(shown))
    asked = []

    def ask(x):
        asked.append(x)
        probs = torch.full((2, len(x), 10), 0.1)
        return CategoricalPredictive(probs.log())

    metrics = task.evaluate(ask, data).metrics
    torch.testing.assert_close(asked[-1], task.with_noise(shown))
    assert metrics["accuracy/noisy"] == pytest.approx((shown.targets == 0).float().mean().item())
    assert {"pavpu/noisy", "ece/noisy"} <= set(metrics)
    assert describe("pavpu/noisy").label == "PAvPU (noisy)"
    assert "accuracy/noisy" not in MnistVit(validation=4, noisy=0).evaluate(ask, data).metrics


def test_parts_of_the_data_are_the_first_of_them(digits, tagged):
    task = MnistVit(validation=4, train=3, test=2, validated=1)
    data = task.load()
    assert (len(data.train), len(data.validation), len(data.test)) == (3, 1, 2)
    assert {len(images) for images in data.probes.values()} == {2}
    sentences = PosTagging(length=12, train=2, test=1).load()
    assert (len(sentences.train), len(sentences.test)) == (2, 1)
    with pytest.raises(ValueError, match="a number of examples must be at least 1; got 0"):
        PosTagging(length=12, train=0).load()

"""Tasks on a pretrained encoder, with a tiny random one in its place and data of a few rows."""

import hashlib
import json
import lzma
import string
import tomllib
from pathlib import Path

import pytest
import torch

from bayesformer.bench.planning import plan
from bayesformer.bench.records import read_results
from bayesformer.bench.runner import run
from bayesformer.bench.tasks import pretrained_encoder
from bayesformer.bench.tasks.glue_sentences import GlueScores, GlueSentences, errors_found
from bayesformer.bench.tasks.pretrained_tagging import PretrainedTagging, encode_tagged
from bayesformer.bench.tasks.squad_answers import SquadAnswers, encoded_parts
from bayesformer.bench.trial import Options
from bayesformer.datasets import places, squad, treebank
from bayesformer.fitting import fit
from bayesformer.likelihoods.predictive import CategoricalPredictive
from bayesformer.methods import EVERY_METHOD, Blob, TemperatureScaling, build_method
from bayesformer.study import sentence_table, trainer_path
from bayesformer.train.training import Training

WORDS = "the a cat dog sat ran on mat who what good bad . ?".split()  # noqa: SIM905
SHORT = Training(epochs=2, batch_size=8, lr=1e-2, patience=0)


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    """A folder as transformers reads it, with a BERT of 2 layers and a tokenizer of a few words and all letters."""
    from transformers import BertConfig, BertModel, BertTokenizerFast

    folder = tmp_path_factory.mktemp("encoder")
    letters = [*string.ascii_lowercase, *string.digits]
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS, *letters, *(f"##{c}" for c in letters)]
    (folder / "vocab.txt").write_text("\n".join(dict.fromkeys(words)))
    BertTokenizerFast(vocab=str(folder / "vocab.txt")).save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    BertModel(BertConfig(vocab_size=len(set(words)), **sizes)).save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def small_world(encoder, tmp_path, monkeypatch):
    """The tiny encoder in the place of the packaged one, and a data folder with a few rows of everything."""
    monkeypatch.setattr(pretrained_encoder, "minilm_folder", lambda: encoder)
    folder = tmp_path / "data"
    monkeypatch.setenv(places.FOLDER, str(folder))
    _write(folder)
    for cached in (pretrained_encoder.encoder_tokenizer, squad.articles, encoded_parts):
        cached.cache_clear()
    yield
    for cached in (pretrained_encoder.encoder_tokenizer, squad.articles, encoded_parts):
        cached.cache_clear()


def _write(folder):
    def put(name, text):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(lzma.compress(text.encode()))

    pick = lambda i: " ".join(WORDS[(i * k) % 12] for k in (3, 5, 7))  # noqa: E731
    for part in ("train", "dev"):
        pairs = [(pick(i), pick(i + 1)) for i in range(60)]
        put(f"glue/RTE/{part}.tsv.xz", _table("sentence1 sentence2 label", [(*p, "entailment") for p in pairs]))
        put(f"glue/MRPC/{part}.tsv.xz", _table("label sentence1 sentence2", [(i % 2, *p) for i, p in enumerate(pairs)]))
        put(f"glue/CoLA/{part}.tsv.xz", _table("label sentence", [(i % 2, pick(i)) for i in range(60)]))
        put(f"glue/SST-2/{part}.tsv.xz", _table("sentence label", [(pick(i), i % 2) for i in range(60)]))
        put(
            f"glue/STS-B/{part}.tsv.xz", _table("score sentence1 sentence2", [(i % 6, *p) for i, p in enumerate(pairs)])
        )
    review = json.dumps({"text": "a good cat", "label": 1})
    for part in ("train", "test"):
        put(f"imdb/{part}.jsonl.xz", f"{review}\n" * 12)
    asked = {"question": "who sat ?", "answers": [{"text": "the cat", "answer_start": 0}]}
    article = {"title": "t", "paragraphs": [{"context": "the cat sat on the mat .", "qas": [asked] * 4}]}
    put("squad/dev-v1.1.json.xz", json.dumps({"data": [article] * 48}))


def _table(columns, rows):
    return "\n".join("\t".join(map(str, row)) for row in [columns.split(), *rows]) + "\n"


def small(problem="cola", **settings):
    return GlueSentences(problem, **{"train": 16, "validation": 12, "test": 10, "others": 4, "length": 12, **settings})


def test_token_types_are_those_of_the_tokenizer():
    texts = [("the cat", "a dog ran"), ("good",)]
    expected = pretrained_encoder.encoder_tokenizer()(texts[0][0], texts[0][1])
    found = pretrained_encoder.encoder_inputs(pretrained_encoder.token_numbers(texts, 32))
    for name in ("input_ids", "token_type_ids", "attention_mask"):
        assert found[name][0].tolist() == expected[name]
    assert found["attention_mask"][1].sum() == 3
    assert found["token_type_ids"][1].sum() == 0


@pytest.mark.parametrize("learned", ["lora", "full"])
def test_sentences_are_classified_and_foreign_rows_are_judged(learned):
    task = small(learned=learned)
    data = task.load()
    posterior = fit(task.model, data.train, likelihood=task.likelihood, training=SHORT, validation=data.validation)
    found = task.evaluate(posterior.predict, data)
    assert set(data.probes) == {"rte", "mrpc", "sst2", "imdb"}
    assert {"accuracy", "matthews", "ece", "brier", "auroc/imdb", "auroc/rte"} <= found.metrics.keys()
    trained = {name for name in posterior.space.names if "lora" not in name}
    assert (len(trained) == 2) == (learned == "lora")  # the head alone, beside the adapters


@pytest.mark.parametrize("learned", ["lora", "full"])
def test_models_are_in_training_mode_so_that_stochastic_attention_is_learned(learned):
    task = small(learned=learned)
    data = task.load()
    assert all(module.training for module in task.model().modules())
    given = {"likelihood": task.likelihood, "training": SHORT}
    noisy = build_method("attention", {"spread": 2.0, "draws": 0})
    plain, drawn = (fit(task.model, data.train, method=method, **given) for method in (None, noisy))
    names = [name for name in plain.space.names if "classifier" in name]
    both = [p.sample(1) for p in (plain, drawn)]
    found = {name: next(v for k, v in both[1].items() if k.endswith(name)) for name in names}
    assert any(not torch.allclose(both[0][name], found[name], atol=1e-3) for name in names)


def test_parts_of_a_glue_task_are_disjoint_and_the_same_every_time():
    first, again = small().load(), small().load()
    assert torch.equal(first.train.inputs["input_ids"], again.train.inputs["input_ids"])
    assert not torch.equal(small(data_seed=1).load().train.targets, first.train.targets)


def test_errors_are_found_by_uncertainty_in_the_order_it_says():
    log_probs = torch.tensor([[[0.9, 0.1], [0.6, 0.4], [0.2, 0.8]]]).log()
    predictive = CategoricalPredictive(log_probs)
    assert errors_found(predictive, torch.tensor([0, 1, 1])) == {"auroc/errors": 1.0}
    assert errors_found(predictive, torch.tensor([0, 0, 1])) == {}


def test_similarity_is_a_regression_with_correlations():
    task = GlueScores(train=16, validation=8, test=10, length=12)
    data = task.load()
    assert float(data.train.targets.abs().max()) <= 2.5 / 1.5 + 1e-6
    posterior = fit(task.model, data.train, likelihood=task.likelihood, training=SHORT)
    assert {"pearson", "spearman", "rmse", "crps"} <= task.evaluate(posterior.predict, data).metrics.keys()


def test_words_of_several_tokens_are_tagged_once():
    found = encode_tagged([[("the", "DET"), ("cats", "NOUN"), (".", "PUNCT")]], 12)
    tokens = pretrained_encoder.encoder_tokenizer().convert_ids_to_tokens(found.inputs["input_ids"][0])
    counted = [
        (token, treebank.TAGS[tag]) for token, tag, c in zip(tokens, found.targets[0], found.mask[0], strict=True) if c
    ]
    assert [tag for _, tag in counted] == ["DET", "NOUN", "PUNCT"]
    assert not any(token.startswith("##") for token, _ in counted)


def test_tagging_counts_words_only(tmp_path, monkeypatch):
    lines = "the\tthe\tDET\tDT\ncat\tcat\tNOUN\tNN\nran\trun\tVERB\tVBD\n"
    files = []
    for part in ("train", "dev", "test"):
        text = "\n".join([lines] * 12)
        path = tmp_path / "data" / "ud_english" / f"v1.2-{part}.tsv.xz"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(lzma.compress(text.encode()))
        files.append(
            treebank.UD_ENGLISH.files[0].__class__(
                f"ud_english/v1.2-{part}.tsv.xz", hashlib.sha256(text.encode()).hexdigest(), ()
            )
        )
    source = treebank.DataSource("ud_english", "t", "l", tuple(files))
    monkeypatch.setattr(treebank.read_forms, "__defaults__", (source,))
    task = PretrainedTagging(train=8, validation=4, test=6, length=8)
    data = task.load()
    assert int(data.train.mask.sum()) == 8 * 3
    posterior = fit(task.model, data.train, likelihood=task.likelihood, training=SHORT)
    assert "f1_macro" in task.evaluate(posterior.predict, data).metrics


def test_questions_are_answered_by_pieces_of_their_text():
    task = SquadAnswers(train=8, validation=4, test=6, length=24)
    data = task.load()
    assert data.train.targets.shape == (8, 2)
    posterior = fit(
        task.model, data.train, likelihood=task.likelihood, training=Training(epochs=30, batch_size=8, lr=1e-2)
    )
    metrics = task.evaluate(posterior.predict, data).metrics
    assert metrics["exact_match"] == 1.0  # every question is the same one


def test_a_trainers_run_gives_three_posteriors(tmp_path):
    task = small("mrpc", others=0)
    settings = trainer_path.TrainerRun(epochs=6, batch=4)
    results = trainer_path.study(tmp_path, task, settings, [0], say=lambda _: None)
    assert {result["method"] for result in results} == set(trainer_path.WAYS)
    stored = trainer_path.study(tmp_path, task, settings, [0], say=lambda _: pytest.fail("all is stored"))
    assert len(trainer_path.table(stored).splitlines()) == 5


def test_temperature_scaling_never_worsens_the_validation_likelihood_and_keeps_the_answers():
    task = small()
    data = task.load()
    given = {"likelihood": task.likelihood, "training": SHORT, "validation": data.validation}
    plain, scaled = (fit(task.model, data.train, method=method, **given) for method in (None, TemperatureScaling()))
    ours, theirs = (p.predict(data.validation.inputs) for p in (scaled, plain))
    assert ours.log_prob(data.validation.targets).mean() >= theirs.log_prob(data.validation.targets).mean() - 1e-6
    assert torch.equal(ours.labels, theirs.labels)
    with pytest.raises(ValueError, match="temperature_scaling needs validation data"):
        fit(task.model, data.train, likelihood=task.likelihood, method=TemperatureScaling())


def test_experiments_may_name_methods_for_adapters(tmp_path):
    assert isinstance(build_method("blob", {"draws": 2}), Blob)
    settings = {
        "training": {"epochs": 1, "batch_size": 8},
        "glue/cola": {"train": 16, "validation": 12, "test": 8, "others": 0},
    }
    cells = plan(["glue/cola"], [{"name": "blob", "draws": 2}, "temperature_scaling"], [0], settings)
    assert {cell.method for cell in cells} <= EVERY_METHOD.keys()
    outcome = run(cells, Options(tmp_path / "r", keep_posteriors=False))
    assert len(outcome.done) == 2
    assert not outcome.failed


@pytest.mark.parametrize("file", ["glue", "pretrained"])
def test_every_method_of_the_experiments_runs(tmp_path, file):
    """On the tiny encoder, with as few rows and epochs as each of them bears."""
    config = tomllib.loads((Path(__file__).parent.parent / "experiments" / f"{file}.toml").read_text())
    rows = {"train": 32, "validation": 12, "test": 8}
    settings = {"training": {"epochs": 6, "batch_size": 8}, "glue/cola": {**rows, "others": 4}, "glue/stsb": rows}
    methods = [{**entry, "epochs": 2} if "epochs" in entry else entry for entry in config["methods"]]
    task = {"glue": "glue/cola", "pretrained": "glue/stsb"}[file]
    cells = plan([task], methods, [0], settings)
    outcome = run(cells, Options(tmp_path / "r", keep_posteriors=False, networks=tmp_path / "n"))
    assert [(str(cell), error) for cell, error in outcome.failed] == []
    results = read_results(tmp_path / "r").results
    table = sentence_table.table(results)
    assert len({sentence_table.row_of(r["method"], r["settings"]["method"]) for r in results}) == len(cells)
    assert "Weibull attention, mean" in table


def test_a_method_that_cannot_run_stands_in_the_table_with_its_error(tmp_path):
    settings = {
        "training": {"epochs": 1, "batch_size": 8},
        "glue/cola": {"train": 16, "validation": 12, "test": 8, "others": 0, "learned": "full"},
    }
    cells = plan(["glue/cola"], ["mle", {"name": "blob", "draws": 2}], [0], settings)
    outcome = run(cells, Options(tmp_path, keep_posteriors=False))
    assert [cell.method for cell, _ in outcome.failed] == ["blob"]
    errors = sentence_table.keep_errors(tmp_path)
    table = sentence_table.table(read_results(tmp_path).results, errors)
    assert "| blob | could not run: ValueError" in table
    assert str(tmp_path) not in (tmp_path / sentence_table.ERRORS).read_text()
    assert sentence_table.keep_errors(tmp_path) == errors  # and stay when the folder of failures is gone

"""Hugging Face: the five tasks through `fit`, text with a tokenizer, and posteriors out of a Trainer's run."""

import peft
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import nn
from torch.utils.data import DataLoader
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertForMaskedLM,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    BertForTokenClassification,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
)

import bayesformer as bf
from bayesformer import cli, evaluate
from bayesformer.generation.terminal import SHADES, shade_of
from bayesformer.laws import GaussianLaw, Samples
from bayesformer.likelihoods import AlignedToken

WORDS = [
    "[PAD]",
    "[UNK]",
    "[CLS]",
    "[SEP]",
    "the",
    "cat",
    "sat",
    "on",
    "a",
    "mat",
    "dog",
    "ran",
    "far",
    "away",
    "who",
    "where",
    "red",
    "blue",
    "house",
    "tree",
]
SIZES = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
SHORT = bf.Training(epochs=2, batch_size=4, lr=1e-2)


def tokenizer():
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    inner.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]"
    )


def bert(kind, **settings):
    torch.manual_seed(0)
    return kind(BertConfig(vocab_size=len(WORDS), **SIZES, **settings))


SENTENCES = [
    "the cat sat on the mat",
    "a dog ran",
    "the red house",
    "far away",
    "who ran away",
    "the blue tree sat far",
]


def rows():
    return [{"text": text, "label": i % 2, "score": float(i)} for i, text in enumerate(SENTENCES)]


def test_sequence_classification_from_text():
    data = bf.hf.encode(rows(), tokenizer())
    model = bert(BertForSequenceClassification, num_labels=2)
    posterior = bf.fit(model, data, likelihood=bf.hf.likelihood_of(model), method=bf.Ensemble(2), training=SHORT)
    prediction = posterior.predict([{k: v for k, v in row.items() if k != "labels"} for row in data])
    assert prediction.probs.shape == (6, 2)
    labels = torch.tensor([row["labels"] for row in data])
    assert -1 <= evaluate.matthews(prediction, labels) <= 1


def test_regression_from_text():
    data = bf.hf.encode(rows(), tokenizer(), label="score")
    model = bert(BertForSequenceClassification, num_labels=1, problem_type="regression")
    posterior = bf.fit(model, data, likelihood=bf.hf.likelihood_of(model), training=SHORT)
    prediction = posterior.predict([{k: v for k, v in row.items() if k != "labels"} for row in data])
    assert prediction.mean.shape == (6, 1)
    ids = torch.tensor([data[0]["input_ids"]])
    own = model.eval()(input_ids=ids, labels=torch.tensor([0.5])).loss  # the squared error
    loss = bf.loss(model, {"input_ids": ids}, torch.tensor([0.5]), likelihood=bf.Gaussian(1.0), num_data=1)
    torch.testing.assert_close(loss, own / 2 + 0.5 * torch.tensor(2 * torch.pi).log())
    assert -1 <= evaluate.spearman(prediction, torch.arange(6.0)[:, None]) <= 1


def test_token_classification():
    data = bf.hf.encode(SENTENCES, tokenizer(), label=None)
    for row in data:
        row["labels"] = [-100, *[token % 3 for token in row["input_ids"][1:-1]], -100]
    model = bert(BertForTokenClassification, num_labels=3)
    posterior = bf.fit(model, data, likelihood=bf.hf.likelihood_of(model), training=SHORT)
    assert posterior.predict([{k: v for k, v in row.items() if k != "labels"} for row in data]).probs.shape == (6, 8, 3)


def test_causal_language_modelling_from_text():
    data = bf.hf.encode(SENTENCES, tokenizer(), label=None)
    for row in data:
        row["labels"] = list(row["input_ids"])
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=len(WORDS), n_embd=16, n_layer=1, n_head=2))
    posterior = bf.fit(model, data, likelihood=bf.hf.likelihood_of(model), training=SHORT)
    found = posterior.generate("the cat", draws=1, max_new_tokens=3, tokenizer=tokenizer())
    assert isinstance(found.text[0], str)


QUESTIONS = [
    ("who sat", "the cat sat on a mat", [("the cat", 0), ("cat", 4)]),
    ("where", "the dog ran far away", [("far away", 12)]),
    ("who", "a red house", [("red house", 2)]),
    ("who", "cat " * 40 + "tree", [("tree", 160)]),  # cut off
]


def test_extractive_question_answering():
    encoded = bf.hf.encode_questions(QUESTIONS, tokenizer(), max_length=16)
    assert encoded.data["labels"].shape == (3, 2)
    exact = torch.full((1, 3, 2, 16), -9.0).scatter(-1, encoded.data["labels"][None, ..., None], 9.0)
    perfect = bf.CategoricalPredictive(exact.log_softmax(-1))
    assert encoded.answers(perfect) == ["the cat", "far away", "red house"]
    assert evaluate.exact_match(encoded.answers(perfect), encoded.truths) == 1
    model = bert(BertForQuestionAnswering)
    training = bf.Training(epochs=60, batch_size=3, lr=1e-2)
    posterior = bf.fit(
        model, encoded.data, likelihood=bf.hf.likelihood_of(model), method=bf.Ensemble(2), training=training
    )
    prediction = posterior.predict(encoded.inputs)
    assert prediction.probs.shape == (3, 2, 16)
    assert evaluate.token_f1(encoded.answers(prediction), encoded.truths) == 1  # three questions are soon learned
    with posterior.shells.borrow() as shell:
        shell.load(shell.space.pack({n: dict(model.named_parameters())[n].detach() for n in shell.space.names}))
        shell.module.eval()
        value = bf.Categorical().log_prob(shell(encoded.inputs), encoded.data["labels"])
    model.eval()
    own = model(
        **encoded.inputs, start_positions=encoded.data["labels"][:, 0], end_positions=encoded.data["labels"][:, 1]
    )
    torch.testing.assert_close(-value.mean() / 2, own.loss)


def trainer(tmp_path, callbacks=(), epochs=6, **checkpoints):
    model = bert(BertForSequenceClassification, num_labels=2)
    settings = TrainingArguments(
        str(tmp_path), num_train_epochs=epochs, per_device_train_batch_size=2, learning_rate=1e-3, report_to=[],
        lr_scheduler_type="constant", use_cpu=True, disable_tqdm=True, logging_strategy="no",
        dataloader_pin_memory=False, seed=0, **({"save_strategy": "no"} | checkpoints),
    )  # fmt: skip
    data = [{**row, "note": "a column that the model does not take"} for row in bf.hf.encode(rows(), tokenizer())]
    from transformers import DataCollatorWithPadding

    class Collator(DataCollatorWithPadding):
        def __call__(self, features):
            return super().__call__([{k: v for k, v in f.items() if k != "note"} for f in features])

    return Trainer(model, settings, train_dataset=data, data_collator=Collator(tokenizer()), callbacks=list(callbacks))


@pytest.mark.filterwarnings("ignore")
def test_a_trainer_collects_a_posterior(tmp_path):
    swag, snapshots = bf.hf.Collect(snapshots=5, rank=3), bf.hf.Collect("snapshots", snapshots=5)
    run = trainer(tmp_path, [swag, snapshots])
    run.train()
    gaussian, kept = swag.posterior(), snapshots.posterior()
    assert isinstance(gaussian.law, GaussianLaw)
    assert isinstance(kept.law, Samples)
    assert len(kept.theta) == len(swag.steps) >= 5
    torch.testing.assert_close(gaussian.law.mean, kept.theta.mean(0), atol=1e-6, rtol=1e-5)
    batch = {k: v for k, v in run.data_collator(run.train_dataset[:3]).items() if k != "labels"}
    assert kept.predict(batch).epistemic.max() > 0
    kept.save(tmp_path / "p")
    assert torch.equal(bf.Posterior.load(tmp_path / "p", run.model).predict(batch).probs, kept.predict(batch).probs)


@pytest.mark.filterwarnings("ignore")
def test_a_resumed_trainer_has_the_snapshots_from_before(tmp_path):
    def run(folder, checkpoint=None, **settings):
        own = bf.hf.Collect(snapshots=20, rank=3, **settings), bf.hf.Collect("snapshots", snapshots=20, **settings)
        trainer(tmp_path / folder, own, epochs=14, save_strategy="steps", save_steps=6).train(checkpoint)
        return own

    def laws(callbacks):
        swag, snapshots = (callback.posterior() for callback in callbacks)
        assert swag.facts["taken_at"] == snapshots.facts["taken_at"]
        return swag.law.row(0, 1), snapshots.theta

    whole = laws(run("run"))
    assert len(whole[1]) == 21  # about 20: one at each of the last 21 of 42 steps
    for step in (30, 42):
        resumed = run("run", str(tmp_path / "run" / f"checkpoint-{step}"))
        for one, other in zip(whole, laws(resumed), strict=True):
            assert torch.equal(one, other)
        assert not resumed[0].posterior().doubts
    elsewhere = run("other", str(tmp_path / "run" / "checkpoint-30"))[1].posterior()
    assert len(elsewhere.theta) == 12
    (doubt,) = elsewhere.doubts
    assert "without the 9 snapshots that had been taken before it" in doubt.sentence
    for callback in run("run", str(tmp_path / "run" / "checkpoint-42"), start=0.4):  # of other snapshots
        with pytest.raises(ValueError, match="at least 2 snapshots"):
            callback.posterior()


@pytest.mark.filterwarnings("ignore")
def test_laplace_after_a_trainer(tmp_path):
    run = trainer(tmp_path)
    run.train()
    run.model.train()
    posterior = bf.hf.laplace_after(run, structure="last_layer", prior_precision=1.0)
    assert run.model.training
    assert all(module.training for module in run.model.modules())
    batch = {k: v for k, v in run.data_collator(run.train_dataset[:3]).items() if k != "labels"}
    assert posterior.predict(batch).epistemic.max() > 0


def arguments(tmp_path):
    return TrainingArguments(
        str(tmp_path), num_train_epochs=4, per_device_train_batch_size=2, learning_rate=1e-3, report_to=[],
        save_strategy="no", lr_scheduler_type="constant", use_cpu=True, disable_tqdm=True, logging_strategy="no",
        dataloader_pin_memory=False, seed=0,
    )  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("told", ["multi_label_classification", None], ids=["set", "by its loss"])
def test_a_trainer_with_several_labels_per_text_collects_independent_ones(told, tmp_path):
    model = bert(BertForSequenceClassification, num_labels=3, problem_type=told)
    ids = torch.arange(24).reshape(6, 4) % len(WORDS)
    data = [{"input_ids": row, "labels": torch.tensor([1.0, 1.0, 0.0])} for row in ids]
    collect = bf.hf.Collect(snapshots=3)
    Trainer(model, arguments(tmp_path), train_dataset=data, callbacks=[collect]).train()
    posterior = collect.posterior()
    assert posterior.likelihood == bf.Bernoulli()
    assert posterior.predict({"input_ids": ids}).probs[:, :2, 1].min() > 0.5  # two of three are likely at once


@pytest.mark.filterwarnings("ignore")
def test_laplace_after_a_trainer_on_questions_takes_the_names_of_its_loss(tmp_path):
    model = bert(BertForQuestionAnswering)
    ids = torch.arange(36).reshape(6, 6) % len(WORDS)
    names = ("start_positions", "end_positions")
    spans = torch.tensor([[1, 2], [0, 0], [3, 5], [2, 2], [9, 9], [1, 4]])  # the fifth was cut off: it does not count
    data = [{"input_ids": row, **dict(zip(names, span, strict=True))} for row, span in zip(ids, spans, strict=True)]
    run = Trainer(model, arguments(tmp_path), train_dataset=data)
    run.train()
    labelled = {"input_ids": ids, "labels": spans.masked_fill(spans > 5, -100)}
    settings = {"structure": "last_layer", "prior_precision": 1.0}
    expected = bf.laplace(model.eval(), labelled, likelihood="categorical", **settings)
    found = bf.hf.laplace_after(run, **settings)
    torch.testing.assert_close(found.predict({"input_ids": ids}).probs, expected.predict({"input_ids": ids}).probs)


def test_likelihoods_by_the_models_own_losses():
    assert bf.hf.likelihood_of(bert(BertForSequenceClassification, num_labels=1)) == bf.Gaussian(1.0)
    several = bert(BertForSequenceClassification, num_labels=2, problem_type="regression")
    assert bf.hf.likelihood_of(several) == bf.Gaussian(1.0)
    multi = bert(BertForSequenceClassification, num_labels=2, problem_type="multi_label_classification")
    assert bf.hf.likelihood_of(multi) == bf.Bernoulli()
    assert bf.hf.likelihood_of(bert(BertForMaskedLM)) == bf.Categorical()
    assert bf.hf.likelihood_of(bart()) == bf.Categorical()


def bart():
    torch.manual_seed(0)
    sides = {f"{side}_{what}": n for side in ("encoder", "decoder") for what, n in BART.items()}
    ends = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2}
    config = BartConfig(vocab_size=len(WORDS), d_model=16, **sides, **ends, forced_eos_token_id=None, dropout=0.0)
    return BartForConditionalGeneration(config).eval()


BART = {"layers": 1, "attention_heads": 2, "ffn_dim": 16}


def test_predictions_of_an_encoder_decoder_model_in_every_form_of_data():
    g = torch.Generator().manual_seed(1)
    data = {name: torch.randint(3, len(WORDS), (6, 5), generator=g) for name in ("input_ids", "labels")}
    model = bart()
    posterior = bf.fit(model, data, likelihood=bf.hf.likelihood_of(model), method=bf.Ensemble(2), training=SHORT)
    whole = posterior.predict(data, full=True)
    expected, reduced = whole.probs, posterior.predict(data)  # logits at t are of the label at t
    assert posterior.likelihood == AlignedToken()
    torch.testing.assert_close(reduced.target_log_prob.float(), whole.log_prob(data["labels"]))
    for name in ("total", "aleatoric", "epistemic"):
        torch.testing.assert_close(getattr(reduced, name).float(), getattr(whole, name), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(reduced.top_probs.float(), expected.topk(5).values)
    assert not hasattr(reduced, "probs")
    listed = [{name: value[row] for name, value in data.items()} for row in range(6)]
    for form in (listed, DataLoader(listed, batch_size=4), bf.Data({"input_ids": data["input_ids"]}, data["labels"])):
        torch.testing.assert_close(posterior.predict(form, full=True).probs, expected)
    own = torch.stack([posterior.module(k)(**data).logits.softmax(-1) for k in range(2)]).mean(0)
    torch.testing.assert_close(expected, own.detach())
    for unlabelled in ({"input_ids": data["input_ids"]}, [{"input_ids": row} for row in data["input_ids"]]):
        with pytest.raises(ValueError, match="must have decoder_input_ids where there are no labels"):
            posterior.predict(unlabelled)


def test_wrong_use_is_refused(tmp_path):
    with pytest.raises(ValueError, match="Did you mean 'swag'"):
        bf.hf.Collect("swgg")
    with pytest.raises(ValueError, match="at least 2; got 1"):
        bf.hf.Collect(snapshots=1)
    with pytest.raises(ValueError, match="at least 2 snapshots; training took 0"):
        bf.hf.Collect().posterior()
    with pytest.raises(ValueError, match="column 'text'; number 0"):
        bf.hf.encode([{"sentence": "a"}], tokenizer())
    with pytest.raises(ValueError, match="column 'label'; number 0"):
        bf.hf.encode([{"text": "a"}], tokenizer())
    with pytest.raises(ValueError, match="at least one answer within max_length=16"):
        bf.hf.encode_questions(QUESTIONS[3:], tokenizer(), max_length=16)
    with pytest.raises(ValueError, match="fast one"):
        bf.hf.encode_questions(QUESTIONS, object())
    with pytest.raises(ValueError, match="likelihood must be given for a Linear"):
        bf.hf.likelihood_of(torch.nn.Linear(1, 1))


def test_the_command_streams_and_writes_a_page(tmp_path, capsys):
    data = bf.hf.encode(SENTENCES, tokenizer(), label=None)
    for row in data:
        row["labels"] = list(row["input_ids"])
    torch.manual_seed(0)
    ends = {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=len(WORDS), n_embd=16, n_layer=1, n_head=2, **ends)).eval()
    model.save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    posterior = bf.fit(model, data, likelihood=bf.NextToken(), method=bf.Ensemble(2), training=SHORT)
    posterior.save(tmp_path / "posterior")
    page = tmp_path / "page.html"
    call = ["generate", str(tmp_path / "model"), "the cat", "--posterior", str(tmp_path / "posterior"), "--draws", "2"]
    assert cli.main([*call, "--max-new-tokens", "4", "--html", str(page)]) == 0
    printed = capsys.readouterr().out
    expected = posterior.generate("the cat", draws=2, max_new_tokens=4, tokenizer=tokenizer())
    assert expected.text[0].split() == printed.split("\n\n")[0].split()
    assert "2 draws: " in printed
    assert 'class="token"' in page.read_text()
    assert cli.main([*call[:2], "", *call[3:]]) == 2
    assert "must not be empty" in capsys.readouterr().err


def test_shades_follow_the_epistemic_uncertainty():
    assert shade_of(0.0) == SHADES[0]
    assert shade_of(0.3) == SHADES[3]
    assert shade_of(9.0) == SHADES[-1]


def test_adapters_on_a_loaded_model_train_with_its_dropout():
    """from_pretrained leaves a model in evaluation mode, and PEFT's wrapper comes in training mode."""
    found = []
    for training in (True, False):
        model = bert(BertForSequenceClassification, num_labels=2).train(training)
        adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["query"], task_type="SEQ_CLS"))
        torch.manual_seed(1)
        for weight in adapted.parameters():
            if weight.requires_grad:
                nn.init.normal_(weight, 0, 0.1)
        posterior = bf.fit(adapted, bf.hf.encode(rows(), tokenizer()), likelihood="categorical", training=SHORT)
        found.append(posterior.theta)
    assert torch.equal(*found)

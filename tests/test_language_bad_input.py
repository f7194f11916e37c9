"""What users of language models and adapters get wrong, and what they are told."""

import subprocess
import sys

import peft
import pytest
import torch
from transformers import (
    BertConfig,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    GPT2Config,
    GPT2ForSequenceClassification,
)

import bayesformer as bf
from bayesformer import cli
from bayesformer.predict.tempering import with_temperature
from tests.test_adapter_files import SIZES, adapted, base, batch, data, fitted
from tests.test_generation import PAD, VOCABULARY, Letters, gpt2, llama, lora, posterior, prompts

SHORT = bf.Training(epochs=1)


def text(ids=None, labels=None):
    ids = prompts(8) if ids is None else ids
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids if labels is None else labels}


def fit(model, given):
    return bf.fit(model, given, likelihood=bf.NextToken(), method="mle", training=SHORT)


def test_tokens_of_another_tokenizer():
    beyond = prompts(8)
    beyond[5, 2] = VOCABULARY  # not among the examples that the model is tried on
    match = (
        rf"must lie in 0\.\.{VOCABULARY - 1}, the model's embeddings; got .*{VOCABULARY}\. Does the tokenizer belong"
    )
    for ask in (lambda: fit(llama(), text(beyond)), lambda: posterior(llama()).predict({"input_ids": beyond})):
        with pytest.raises(ValueError, match=match):
            ask()
    with pytest.raises(ValueError, match=match):
        posterior(lora(llama())).predict(text(beyond))
    with pytest.raises(ValueError, match="validation data must lie"):
        bf.fit(llama(), text(), likelihood=bf.NextToken(), method="mle", training=SHORT, validation=text(beyond))


def test_labels_that_are_no_tokens():
    match = rf"must lie in 0\.\.{VOCABULARY - 1} \(the model has {VOCABULARY} outputs\)"
    wrong = prompts(8) + VOCABULARY
    with pytest.raises(ValueError, match=match):
        fit(llama(), text(labels=wrong))
    with pytest.raises(ValueError, match=match):
        posterior(llama()).predict(text(labels=wrong))
    with pytest.raises(ValueError, match=r"must lie in 0\.\.1"):
        bf.fit(adapted(), {**data(), "labels": data()["labels"] + 5}, likelihood="categorical", training=SHORT)


def test_more_tokens_than_the_model_has_positions():
    ids = prompts(2, 41)
    match = r"must have at most 40 tokens each, the positions that the model has; got 41.*max_length=40"
    for ask in (lambda: fit(gpt2(), text(ids)), lambda: posterior(gpt2()).predict({"input_ids": ids})):
        with pytest.raises(ValueError, match=match):
            ask()
    with pytest.raises(ValueError, match="must fit into the model's 40 positions"):
        posterior(gpt2(), 2).generate({"input_ids": ids}, draws=2)
    config = BertConfig(vocab_size=40, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
    config.max_position_embeddings = 6
    with pytest.raises(ValueError, match="must have at most 6 tokens each"):
        bf.fit(
            BertForSequenceClassification(config),
            {"input_ids": torch.randint(40, (4, 7)), "labels": torch.tensor([0, 1, 0, 1])},
            likelihood="categorical",
            training=SHORT,
        )


@pytest.mark.parametrize("method", ["mle", "ensemble", "laplace", "blob", "tfb", "swag", "sghmc"])
def test_merged_adapters_have_no_gradient(method):
    model = lora(llama())
    model.merge_adapter()
    with pytest.raises(ValueError, match=r"must not have merged adapters.*Call unmerge_adapter\(\) first"):
        bf.fit(model, text(), likelihood=bf.NextToken(), method=method, training=SHORT)


def test_a_base_of_another_shape_than_the_saved_adapter(tmp_path):
    fitted(bf.Ensemble(2)).save(tmp_path)
    sizes = {"hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    wider = BertForSequenceClassification(BertConfig(vocab_size=40, num_labels=2, **sizes))
    ranked = peft.get_peft_model(base(), peft.LoraConfig(r=4, target_modules=["query", "value"], task_type="SEQ_CLS"))
    for model, match in (
        (wider, r"another base model: .*size mismatch for .*lora_A"),
        (base(labels=3), r"another base model: .*size mismatch for .*classifier"),
        (llama(), "Target modules .* not found"),
        (ranked, r"is \(2, 32\) in the file and \(4, 32\) in the model"),
        (base(seed=5), "the frozen weights differ"),
    ):
        with pytest.raises(bf.DamagedFileError, match=match) as raised:
            bf.Posterior.load(tmp_path, model)
        assert "\n" not in str(raised.value)
    merged = adapted()
    merged.merge_adapter()
    with pytest.raises(bf.DamagedFileError, match="unmerge_adapter"):
        bf.Posterior.load(tmp_path, merged)


def test_prompts_that_cannot_be_continued():
    chain = posterior(llama(), 2)
    ids = prompts(2)
    padded_right = torch.cat([ids, torch.full((2, 2), PAD)], 1)
    for inputs, options, match in (
        ({"input_ids": padded_right}, {}, "number 0 ends with the pad token.*padding_side='left'"),
        ([], {"tokenizer": Letters()}, "got list that is empty"),
        (ids, {}, "inputs must be text, a list of texts, or a mapping with input_ids.*got Tensor"),
        ("hello", {"tokenizer": 5}, "tokenizer must be given where inputs are text; got int"),
        ({"input_ids": ids}, {"num_beams": 4}, "num_beams must be 1, for generate has no beams; got 4"),
        ({"input_ids": ids}, {"seed": "a"}, "seed must be a whole number; got 'a'"),
        ({"input_ids": ids}, {"do_sample": "yes"}, "do_sample must be True or False"),
        ({"input_ids": ids}, {"temperature": "hot"}, "temperature must be a number; got 'hot'"),
        ({"input_ids": ids}, {"top_p": None}, "top_p must be a number; got None"),
        ({"input_ids": ids}, {"stop": 1.5}, "stop must be texts or token numbers; got 1.5"),
        ({"input_ids": ids}, {"stop": [3, True]}, "stop must be texts or token numbers; got True"),
        ({"input_ids": ids}, {"stop": VOCABULARY}, rf"stop must be tokens of the model, 0\.\.{VOCABULARY - 1}; got 61"),
    ):
        with pytest.raises(ValueError, match=match):
            chain.generate(inputs, **{"draws": 2, "max_new_tokens": 2, **options})


def test_too_few_data_to_calibrate():
    found = fitted(bf.Ensemble(2))
    few = {name: value[:5] for name, value in data().items()}
    with pytest.raises(ValueError, match=r"at least 19 examples for level=0\.95; got 5"):
        found.conformal(few, level=0.95)
    with pytest.raises(ValueError, match="at least 10 targets to choose a temperature by; got 5"):
        found.calibrate(few)


def test_text_without_a_tokenizer():
    with pytest.raises(ValueError, match="tokenizer must be that of the model; got NoneType"):
        bf.hf.encode(["a text"], None)


def test_the_command_says_that_there_is_no_such_model_or_posterior(tmp_path, capsys):
    fitted(bf.Ensemble(2)).save(tmp_path)
    for model in (str(tmp_path / "nothing"), "no-such-model"):
        assert cli.main(["generate", model, "--posterior", str(tmp_path), "hello"]) == 2
        assert f"model must be a folder of transformers; {model} does not exist" in capsys.readouterr().err
    assert cli.main(["generate", "no-such-model", "--posterior", str(tmp_path / "none"), "hello"]) == 2
    assert "none/posterior.json does not exist" in capsys.readouterr().err  # noticed before the model is read


def test_text_in_place_of_tokens():
    found = fitted(bf.Ensemble(2))
    for given in (["hello"], "hello"):
        with pytest.raises(ValueError, match="Tokenise text first"):
            found.predict(given)


def test_disabled_adapters_have_no_weights_to_infer():
    model = adapted()
    model.base_model.disable_adapter_layers()
    model.requires_grad_(False)
    with pytest.raises(ValueError, match=r"adapters are disabled: call enable_adapter_layers\(\)"):
        bf.fit(model, data(), likelihood="categorical", training=SHORT)


def test_a_cast_of_the_right_base_is_told_by_its_precision(tmp_path):
    fitted(bf.Ensemble(2)).save(tmp_path)
    with pytest.raises(bf.DamagedFileError, match=r"differ: they are torch\.bfloat16, and torch\.float32 in the file"):
        bf.Posterior.load(tmp_path, base().bfloat16())


def test_a_decoder_that_classifies_needs_its_padding_token():
    model = GPT2ForSequenceClassification(GPT2Config(vocab_size=40, n_embd=16, n_layer=1, n_head=2, num_labels=2))
    model.config.pad_token_id = None
    with pytest.raises(ValueError, match=r"Set model\.config\.pad_token_id = tokenizer\.pad_token_id"):
        bf.fit(model, data(), likelihood="categorical", training=SHORT)


@pytest.mark.filterwarnings("ignore::bayesformer.core.doubts.FidelityWarning")
def test_whole_numbers_are_values_of_a_regression():
    model, whole = base(labels=1), {**data(), "labels": torch.arange(24)}
    predictives = []
    for labels in (whole["labels"], whole["labels"].float(), whole["labels"].float()[:, None]):
        given = {**whole, "labels": labels}
        posterior = bf.fit(model, given, likelihood=bf.Gaussian(scale=1.0), method=bf.Mle(), training=SHORT)
        predictives.append(posterior.predict(batch()))
        assert posterior.calibrate(given).tempering > 0
    assert torch.equal(predictives[0].mean, predictives[1].mean)
    assert torch.equal(predictives[0].mean, predictives[2].mean)
    values = torch.arange(5.0)
    assert torch.equal(predictives[0].log_prob(values), predictives[0].log_prob(values[:, None]))
    assert torch.equal(predictives[0].cdf(values), predictives[0].cdf(values[:, None]))
    with pytest.raises(ValueError, match=r"must have shape \(5, 1\); got \(4,\)"):
        predictives[0].log_prob(values[:4])
    with pytest.raises(ValueError, match=r"needs at least two outputs, .*; the model has one"):
        bf.fit(model, whole, likelihood="categorical", training=SHORT)


def spans(first, last):
    inputs = {name: value for name, value in data().items() if name != "labels"}
    return {**inputs, "start_positions": torch.full((24,), first), "end_positions": torch.full((24,), last)}


def test_answers_by_the_columns_of_transformers():
    torch.manual_seed(0)
    model = BertForQuestionAnswering(BertConfig(vocab_size=40, **SIZES))
    columns = spans(1, 3)
    labels = {**batch_of(columns), "labels": torch.tensor([[1, 3]]).expand(24, 2)}
    rows = [{name: value[i] for name, value in columns.items()} for i in range(24)]
    expected = bf.fit(model, labels, likelihood="categorical", method="mle", training=SHORT)
    for given in (columns, rows):
        found = bf.fit(model, given, likelihood="categorical", method="mle", training=SHORT)
        assert torch.equal(found.theta, expected.theta)
        assert torch.equal(found.predict(given).probs, expected.predict(batch_of(columns)).probs)
    with pytest.raises(ValueError, match=r"must lie in 0\.\.5 .* or equal ignore_index=-100; got 6"):
        bf.fit(model, spans(1, 6), likelihood="categorical", training=SHORT)


def batch_of(columns):
    return {name: columns[name] for name in ("input_ids", "attention_mask")}


def test_a_temperature_at_the_end_of_its_search_is_doubted():
    found = fitted(bf.Ensemble(2))
    wrong = {**data(), "labels": 1 - found.predict(data()).probs.argmax(-1)}
    with pytest.warns(bf.FidelityWarning, match=r"at the bound 100\.0 of its search"):
        calibrated = found.calibrate(wrong)
    assert [doubt.check for doubt in calibrated.doubts if doubt.check == "calibrate"] == ["calibrate"]
    later = with_temperature(calibrated.facts, 2.0, {"before": -2.0, "after": -1.0})
    assert [entry["check"] for entry in later["doubts"]] == [doubt.check for doubt in found.doubts]


PROGRAM = """
import sys
for name in ("transformers", "peft"): sys.modules[name] = None
import bayesformer as bf, torch
from bayesformer import cli
from bayesformer.predict.tempering import with_temperature
def told(ask):
    try: ask()
    except (ImportError, ValueError) as error: print(error)
told(lambda: bf.hf)
told(lambda: bf.Posterior.load(sys.argv[1], torch.nn.Linear(2, 2)))
cli.main(["generate", "model", "--posterior", sys.argv[1], "hello"])
"""


def test_a_missing_extra_is_named(tmp_path):
    """Without transformers and PEFT every door that needs them says what to install."""
    fitted(bf.Ensemble(2)).save(tmp_path)
    run = subprocess.run([sys.executable, "-c", PROGRAM, str(tmp_path)], capture_output=True, text=True, check=True)
    assert run.stdout.count("pip install 'bayesformer[hf]'") == 2
    assert run.stderr.count("pip install 'bayesformer[hf]'") == 1

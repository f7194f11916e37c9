"""What users of language models and adapters get wrong, and what they are told."""

import subprocess
import sys

import peft
import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification

import bayesformer as bf
from bayesformer import cli
from tests.test_adapter_files import adapted, base, data, fitted
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


def test_the_command_says_that_there_is_no_such_model(tmp_path, capsys):
    assert cli.main(["generate", str(tmp_path / "nothing"), "--posterior", str(tmp_path), "hello"]) == 2
    assert "does not exist" in capsys.readouterr().err


PROGRAM = """
import sys
for name in ("transformers", "peft"): sys.modules[name] = None
import bayesformer as bf, torch
from bayesformer import cli
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

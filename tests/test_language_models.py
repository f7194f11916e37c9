"""Language models: labels shifted as transformers shifts them, and decoders fed as their own forward feeds them."""

import logging

import pytest
import torch
from torch import nn

import bayesformer as bf
from bayesformer import evaluate
from bayesformer.core.types import Batch, Draws
from bayesformer.laplace import estimate
from bayesformer.likelihoods import AlignedToken, Categorical, NextToken
from bayesformer.likelihoods.language import decoder_inputs, is_causal_language_model, resolve, unwrapped
from bayesformer.methods import Problem
from bayesformer.train.prototype import Prototype
from tests.curvature_zoo import ggn

transformers = pytest.importorskip("transformers")

V, T = 17, 7
SMALL = {"vocab_size": V, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def gpt2():
    config = transformers.GPT2Config(n_embd=8, n_layer=2, n_head=2, n_positions=16, **SMALL)
    return transformers.GPT2LMHeadModel(config).eval()


def llama():
    config = transformers.LlamaConfig(
        hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, **SMALL
    )
    return transformers.LlamaForCausalLM(config).eval()


def bart(kind="BartForConditionalGeneration", **more):
    config = transformers.BartConfig(
        d_model=8,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=8,
        decoder_ffn_dim=8,
        max_position_embeddings=32,
        decoder_start_token_id=2,
        **SMALL,
        **more,
    )
    return getattr(transformers, kind)(config).eval()


def t5():
    config = transformers.T5Config(
        vocab_size=V, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, decoder_start_token_id=0
    )
    return transformers.T5ForConditionalGeneration(config).eval()


def mbart():
    config = transformers.MBartConfig(
        d_model=8,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=8,
        decoder_ffn_dim=8,
        max_position_embeddings=32,
        **SMALL,
    )
    return transformers.MBartForConditionalGeneration(config).eval()


def whisper():
    config = transformers.WhisperConfig(
        d_model=8,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=8,
        decoder_ffn_dim=8,
        num_mel_bins=4,
        max_source_positions=10,
        max_target_positions=16,
        decoder_start_token_id=3,
        **SMALL,
    )
    return transformers.WhisperForConditionalGeneration(config).eval()


def two_berts():
    small = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    encoder = transformers.BertConfig(vocab_size=V, **small)
    decoder = transformers.BertConfig(vocab_size=V, is_decoder=True, add_cross_attention=True, **small)
    config = transformers.EncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)
    config.pad_token_id, config.decoder_start_token_id = 0, 1
    return transformers.EncoderDecoderModel(config=config).eval()


def ids(count=3, length=T):
    return torch.randint(3, V, (count, length))


def some_labels(count=3, length=5):
    labels = ids(count, length)
    labels[0, 3:] = -100
    return labels


def batch_of(tokens, labels=None, **more):
    return Batch({"input_ids": tokens, **more}, tokens if labels is None else labels)


@pytest.mark.parametrize("build", [gpt2, llama])
def test_the_loss_is_that_of_transformers(build):
    model, tokens = build(), ids()
    labels = tokens.clone()
    labels[0, :3], labels[1, 5:] = -100, -100
    with torch.no_grad():
        theirs = model(input_ids=tokens, labels=labels)
    likelihood = NextToken()
    ours = -likelihood.log_prob(theirs.logits, labels).sum() / likelihood.counted_positions(labels).sum()
    torch.testing.assert_close(ours, theirs.loss, rtol=1e-6, atol=1e-6)
    masked = tokens.masked_fill(labels == -100, 5)  # a mask says the same as labels that are ignored
    torch.testing.assert_close(
        likelihood.log_prob(theirs.logits, masked, labels != -100), likelihood.log_prob(theirs.logits, labels)
    )


def test_a_sequence_is_the_sum_of_its_steps():
    logits, labels = torch.randn(2, 4, V, dtype=torch.float64), ids(2, 4)
    steps = sum(logits[:, t].log_softmax(-1)[range(2), labels[:, t + 1]] for t in range(3))
    torch.testing.assert_close(NextToken().log_prob(logits, labels), steps)
    assert NextToken().counted(labels).tolist() == [[False, True, True, True]] * 2
    assert NextToken().counted_positions(labels).tolist() == [3, 3]
    mask = torch.tensor([[True, True, False, True], [False, False, False, True]])
    assert NextToken().counted(labels, mask).tolist() == [[False, True, False, True], [False, False, False, True]]
    moved, counted = NextToken().align(labels, mask)
    assert counted.tolist() == [[True, False, True, False], [False, False, True, False]]
    assert moved[0].tolist() == [labels[0, 1], -100, labels[0, 3], -100]


def test_log_prob_of_many_members_at_once():
    logits, labels = torch.randn(5, 2, 4, V), ids(2, 4)
    one = torch.stack([NextToken().log_prob(row, labels) for row in logits])
    torch.testing.assert_close(torch.vmap(lambda f: NextToken().log_prob(f, labels))(logits), one)


def test_samples_are_labels_of_the_next_position():
    logits = torch.full((4, 3, V), -1e4)
    for t in range(3):
        logits[:, t, t + 5] = 0.0  # position t is certain of the token t + 5
    drawn = NextToken().sample(logits, torch.Generator().manual_seed(0))
    assert drawn.tolist() == [[-100, 5, 6]] * 4
    torch.testing.assert_close(NextToken().log_prob(logits, drawn), torch.zeros(4))


def test_the_predictive_keeps_the_positions_of_the_logits():
    draws, labels = torch.randn(6, 2, 4, V), ids(2, 4)
    predictive = NextToken().predictive(Draws(draws))
    torch.testing.assert_close(predictive.probs, draws.softmax(-1).mean(0))  # the last row is about what comes next
    rows, answers = NextToken().pairs(predictive, labels)
    assert answers.tolist() == labels[:, 1:].flatten().tolist()
    exact = draws.softmax(-1).mean(0)[:, :-1].gather(-1, labels[:, 1:, None]).log().squeeze(-1)
    torch.testing.assert_close(rows.log_prob(answers), exact.flatten())
    torch.testing.assert_close(evaluate.log_likelihood(predictive, labels), exact.sum(1))
    labels[0, 2:] = -100
    counted = NextToken().counted(labels)
    torch.testing.assert_close(
        evaluate.log_likelihood(predictive, labels, counted), torch.stack([exact[0, 0], exact[1].sum()])
    )
    scores = evaluate.classification(predictive, labels, counted)
    rows, answers = NextToken().pairs(predictive, labels)
    assert scores["accuracy"] == evaluate.accuracy(rows, answers)
    assert evaluate.mean_log_likelihood(predictive, labels, counted) == pytest.approx(scores["log_likelihood"])


def test_next_tokens_are_never_compared_with_the_tokens_they_follow():
    predictive, labels = NextToken().predictive(Draws(torch.randn(6, 2, 4, V))), ids(2, 4)
    match = r"targets 1 position later.*likelihood\.pairs"
    with pytest.raises(ValueError, match=match):
        predictive.log_prob(labels)
    for score in (evaluate.accuracy, evaluate.brier, evaluate.ece):
        with pytest.raises(ValueError, match=match):
            score(predictive, labels)
    with pytest.raises(ValueError, match=r"must be \(B, T, V\); got \(2, 17\)"):
        NextToken().predictive(Draws(torch.randn(6, 2, V)))


@pytest.mark.parametrize("kind", ["ggn", "mc", "fisher"])
def test_curvature_is_that_of_shifted_labels(kind):
    model = gpt2().double()
    model.requires_grad_(False)
    model.transformer.ln_f.requires_grad_(True)
    tokens = ids(4, 5)
    labels = tokens.clone()
    labels[0, 3:], labels[2, :2] = -100, -100
    moved = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
    made = [
        estimate(model, likelihood, ({"input_ids": tokens}, targets), "full", kind=kind, samples=2, seed=3)
        for likelihood, targets in [(NextToken(), labels), (Categorical(aligned=True), moved)]
    ]
    first, second = (curvature.structures[0].dense() for curvature in made)
    assert made[0].log_likelihood == pytest.approx(made[1].log_likelihood, rel=1e-9)
    assert first.abs().max() > 0
    torch.testing.assert_close(first, second, rtol=1e-8, atol=1e-10)
    if kind == "ggn":
        data = bf.Data({"input_ids": tokens}, moved)
        torch.testing.assert_close(first, ggn(model, Categorical(), data), rtol=1e-6, atol=1e-8)


def test_laplace_chooses_its_prior_on_labels_that_are_ignored():
    model, tokens = gpt2(), ids(6)
    labels = tokens.clone()
    labels[:, 4:] = -100
    data = ({"input_ids": tokens}, labels)
    settings = {"structure": "diag", "subset": "*ln_f*", "prior_precision": "validation", "grid": 3, "draws": 5}
    posterior = bf.laplace(model, data, likelihood=NextToken(), validation=data, **settings)
    predictive = posterior.predict({"input_ids": tokens}, full=True)
    counted = NextToken().counted(labels)
    assert counted.sum(-1).tolist() == [3] * 6
    expected = evaluate.mean_log_likelihood(predictive, labels, counted) / 3  # per token that counts
    assert posterior.facts["validation"] == pytest.approx(expected, rel=1e-5)


def test_learning_next_tokens_is_not_learning_to_copy():
    """Sequences that count upwards: after training the next token is known, and the current one is not the answer."""
    start = torch.randint(0, V, (64, 1))
    tokens = (start + torch.arange(T)) % V
    likelihood = resolve("categorical", gpt2(), batch_of(tokens))
    data = ({"input_ids": tokens}, tokens)
    posterior = bf.fit(gpt2(), data, likelihood=likelihood, training=bf.Training(epochs=60, lr=0.02, batch_size=32))
    predictive = posterior.predict({"input_ids": tokens}, full=True)
    rows, answers = likelihood.pairs(predictive, tokens)
    assert evaluate.accuracy(rows, answers) > 0.9
    assert (predictive.labels == tokens).float().mean() < 0.2


# Which likelihood.


@pytest.mark.parametrize("build", [gpt2, llama])
@pytest.mark.parametrize("given", ["categorical", Categorical(), Categorical(-1)])
def test_labels_that_are_the_inputs_make_it_next_token(build, given, caplog):
    tokens = ids()
    labels = tokens.clone()
    labels[0, 3:] = -1 if given == Categorical(-1) else -100
    with caplog.at_level(logging.INFO, "bayesformer"):
        found = resolve(given, build(), batch_of(tokens, labels))
    assert found == NextToken(-1 if given == Categorical(-1) else -100)
    assert len(caplog.records) == 1
    assert "labels equal input_ids" in caplog.text
    assert "NextToken()" in caplog.text


@pytest.mark.parametrize("likelihood", ["categorical", NextToken()])
def test_labels_of_padding_that_count_are_told(likelihood, caplog):
    tokens = ids()
    mask = torch.ones_like(tokens)
    mask[0, 4:], mask[1, :2] = 0, 0

    def fit(labels):
        caplog.clear()
        data = {"input_ids": tokens, "attention_mask": mask, "labels": labels}
        bf.fit(gpt2(), data, likelihood=likelihood, training=bf.Training(max_steps=1))
        return caplog.text

    said = fit(tokens)
    assert "labels count where attention_mask is 0; -100 would leave them out" in said
    ignored = tokens.masked_fill(mask == 0, -100)
    assert "1 labels are the first token after padding, predicted from a pad" in fit(ignored)
    ignored[1, 2] = -100
    assert "padding" not in fit(ignored)


@pytest.mark.parametrize("inputs", [lambda x: x, lambda x: (x,), lambda x: {"input_ids": x}])
def test_tokens_are_found_in_any_form_of_inputs(inputs):
    tokens = ids()
    assert resolve("categorical", gpt2(), Batch(inputs(tokens), tokens)) == NextToken()


def test_other_labels_must_be_explained(caplog):
    tokens = ids()
    other = (tokens + 1) % V
    for batch in (batch_of(tokens, other), Batch({"inputs_embeds": torch.randn(3, T, 8)}, tokens)):
        with pytest.raises(ValueError, match=r"GPT2LMHeadModel.*NextToken\(\).*or Categorical\(aligned=True\)"):
            resolve("categorical", gpt2(), batch)
    for chosen, kept in ((NextToken(), NextToken()), (Categorical(aligned=True), AlignedToken(aligned=True))):
        assert resolve(chosen, gpt2(), batch_of(tokens, other)) == kept
        assert resolve(chosen, gpt2(), batch_of(tokens)) == kept
    assert not caplog.records


def test_wrapped_models_are_looked_through():
    peft = pytest.importorskip("peft")
    tokens = ids()
    config = peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True)
    for kind in (None, "CAUSAL_LM"):
        config.task_type = kind
        wrapped = peft.get_peft_model(gpt2(), config)
        assert isinstance(unwrapped(wrapped), transformers.GPT2LMHeadModel)
        assert resolve("categorical", wrapped, batch_of(tokens)) == NextToken()
    for wrapper in (nn.DataParallel, torch.compile):
        assert resolve("categorical", wrapper(gpt2()), batch_of(tokens)) == NextToken()
    with pytest.raises(ValueError, match="GPT2LMHeadModel"):
        resolve("categorical", wrapped, batch_of(tokens, (tokens + 1) % V))

    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = gpt2()

        def forward(self, x):
            return self.inner(x).logits

    assert resolve("categorical", Own(), Batch(tokens, tokens)) == NextToken()
    assert resolve("categorical", Own(), Batch(tokens, (tokens + 1) % V)) == Categorical()


def test_other_models_keep_what_they_were_given():
    tokens = ids()
    config = transformers.GPT2Config(n_embd=8, n_layer=1, n_head=2, n_positions=16, num_labels=V, **SMALL)
    for model in (
        transformers.GPT2ForTokenClassification(config),
        transformers.GPT2ForSequenceClassification(config),
        nn.Embedding(V, V),
    ):
        assert not is_causal_language_model(model)
        assert resolve("categorical", model, batch_of(tokens)) == Categorical()
    assert resolve("categorical", gpt2(), Batch({"input_ids": tokens}, torch.tensor([0, 1, 0]))) == Categorical()
    assert resolve("gaussian", gpt2(), batch_of(tokens)) == bf.Gaussian()
    assert resolve("categorical", t5(), batch_of(tokens)) == AlignedToken()  # the same, reduced in prediction
    with pytest.raises(ValueError, match=r"must be Categorical\(\) for an encoder-decoder.*T5.*got NextToken"):
        resolve(NextToken(), t5(), batch_of(tokens))


# What a decoder is fed.

FED = {
    "bart": (bart, "input_ids"),
    "mbart": (mbart, "input_ids"),
    "t5": (t5, "input_ids"),
    "two berts": (two_berts, "input_ids"),
    "whisper": (whisper, "input_features"),
}


@pytest.mark.parametrize("name", FED)
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_decoders_are_fed_what_their_own_forward_feeds_them(name):
    build, key = FED[name]
    model = build()
    x = ids(3, 9) if key == "input_ids" else torch.randn(3, 4, 20)
    inputs = {key: x} if key != "input_ids" else {key: x, "attention_mask": torch.ones_like(x)}
    labels = some_labels()
    with torch.no_grad():
        theirs = model(**inputs, labels=labels)
        made = decoder_inputs(model, inputs, labels)
        ours = model(**made).logits
        other = model(**{**made, "decoder_input_ids": made["decoder_input_ids"].flip(1)}).logits
    assert "decoder_input_ids" not in inputs
    assert torch.equal(ours, theirs.logits)
    assert not torch.equal(other, theirs.logits)
    loss = -Categorical().log_prob(ours, labels).sum() / Categorical().counted_positions(labels).sum()
    torch.testing.assert_close(loss, theirs.loss, rtol=1e-5, atol=1e-6)
    again = decoder_inputs(model, inputs, labels.masked_fill(labels == -100, -1))  # another ignore_index
    assert torch.equal(again["decoder_input_ids"], made["decoder_input_ids"])


@pytest.mark.parametrize("name", FED)
def test_without_labels_decoder_inputs_are_asked_for(name):
    build, key = FED[name]
    inputs = {key: ids()}
    with pytest.raises(ValueError, match=rf"must have decoder_input_ids where there are no labels.*got {key}"):
        decoder_inputs(build(), inputs)
    given = {**inputs, "decoder_input_ids": ids()}
    assert decoder_inputs(build(), given) is given
    assert decoder_inputs(build(), given, some_labels()) is given


def test_inputs_that_need_nothing_come_back_as_they_are():
    tokens = ids()
    kinds = ("ForSequenceClassification", "ForQuestionAnswering", "Model", "ForCausalLM")
    for model in (gpt2(), nn.Linear(2, 2), *(bart(f"Bart{kind}") for kind in kinds)):
        assert decoder_inputs(model, tokens, tokens) is tokens
        assert decoder_inputs(model, tokens) is tokens


def test_decoder_inputs_of_wrapped_models_and_plain_tensors():
    peft = pytest.importorskip("peft")
    tokens, labels = ids(), some_labels()
    config = peft.LoraConfig(r=2, target_modules=["q"], task_type="SEQ_2_SEQ_LM")
    made = decoder_inputs(peft.get_peft_model(t5(), config), tokens, labels)
    assert torch.equal(made["input_ids"], tokens)
    assert made["decoder_input_ids"].tolist()[0] == [0, *labels[0, :3].tolist(), 0]
    with pytest.raises(ValueError, match="must be a dict by keyword; got a tuple of 2"):
        decoder_inputs(t5(), (tokens, tokens), labels)
    with pytest.raises(ValueError, match=r"must be token numbers \(B, T\).*got torch.int64 \(3,\)"):
        decoder_inputs(t5(), tokens, labels[:, 0])


@pytest.mark.parametrize("form", ["list", "table", "stream"])
def test_ragged_rows_are_padded_with_the_padding_token_of_the_model(form):
    """A decoder that classifies reads its answer at the last token that is no padding token of its own."""
    config = transformers.LlamaConfig(
        vocab_size=V,
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        pad_token_id=5,
        num_labels=3,
    )
    model = transformers.LlamaForSequenceClassification(config).eval()
    rows = [{"input_ids": list(range(6, 9 + j)), "attention_mask": [1] * (3 + j), "labels": j % 3} for j in range(4)]
    asked = [{k: row[k] for k in ("input_ids", "attention_mask")} for row in rows]
    forms = {
        "list": (rows, asked),
        "table": ({k: [r[k] for r in rows] for k in rows[0]}, {k: [r[k] for r in asked] for k in asked[0]}),
        "stream": (bf.Stream(rows, num_data=4), bf.Stream(asked, num_data=4)),
    }
    data, inputs = forms[form]
    posterior = bf.fit(model, data, likelihood="categorical", training=bf.Training(epochs=2), progress=False)
    trained_on = Prototype(Problem(model, Categorical(), data)).data.first(4).inputs["input_ids"]
    assert int((trained_on == 5).sum()) == 6  # what the three shorter rows lack
    member = posterior.module(0)
    alone = [member(input_ids=torch.tensor([row["input_ids"]])).logits.softmax(-1)[0] for row in rows]
    torch.testing.assert_close(posterior.predict(inputs).probs, torch.stack(alone), atol=1e-6, rtol=1e-5)

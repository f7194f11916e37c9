"""Generation: token by token the model's own without spread, an explicit loop over predictions with it."""

import math
import shutil
from dataclasses import replace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import bayesformer as bf
from bayesformer.generation.answer_scores import rouge_l
from bayesformer.generation.token_page import fragment, page
from bayesformer.generation.writing import nucleus
from bayesformer.laws import GaussianLaw, Samples
from bayesformer.laws.diagonal import Diagonal
from tests.test_report import Browser

VOCABULARY, PAD, END = 61, 0, 1


def llama(**settings):
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
    ends = {"pad_token_id": PAD, "bos_token_id": 2, "eos_token_id": END}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, **sizes, **ends, **settings)).eval()


def gpt2():
    torch.manual_seed(0)
    ends = {"pad_token_id": PAD, "bos_token_id": 2, "eos_token_id": END}
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=40, **ends)
    ).eval()


def lora(model, layers=None, targets=("q_proj", "v_proj")):
    torch.manual_seed(1)
    return get_peft_model(model, LoraConfig(r=4, target_modules=list(targets), layers_to_transform=layers)).eval()


def posterior(model, draws=4, sd=0.3, infer=None):
    """Draws of the inferred weights around those of the model."""
    space = bf.Posterior(model, bf.NextToken(), _blank(model)).space if infer is None else infer
    mean = space.pack({name: dict(model.named_parameters())[name].detach() for name in space.names})
    g = torch.Generator().manual_seed(2)
    rows = mean + sd * torch.randn(draws, space.size, generator=g)
    return bf.Posterior(model, bf.NextToken(), Samples(rows, {}))


def _blank(model):
    size = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return Samples(torch.zeros(1, size), {})


def prompts(rows=2, length=6):
    g = torch.Generator().manual_seed(3)
    return torch.randint(3, VOCABULARY, (rows, length), generator=g)


def padded():
    ids = prompts(3, 7)
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    mask[2, :2] = 0
    return {"input_ids": ids.masked_fill(mask == 0, PAD), "attention_mask": mask}


MODELS = {"llama": llama, "gpt2": gpt2, "lora": lambda: lora(llama())}


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_without_spread_it_is_the_models_own_generate(make):
    model, batch = make(), padded()
    point = posterior(model, draws=1, sd=0.0)
    found = point.generate(batch, draws=1, max_new_tokens=9)
    own = model.generate(**batch, max_new_tokens=9, do_sample=False)
    assert torch.equal(found.sequences, own)
    assert torch.equal(found.epistemic, torch.zeros_like(found.epistemic))
    assert torch.equal(posterior(model, draws=4, sd=0.0).generate(batch, draws=4, max_new_tokens=9).sequences, own)


def test_one_draw_with_a_seed_samples_what_generate_samples():
    model, batch = llama(), padded()
    found = posterior(model, 1, 0.0).generate(
        batch, draws=1, max_new_tokens=8, do_sample=True, temperature=1.3, top_p=0.8, seed=11
    )
    torch.manual_seed(11)
    own = model.generate(**batch, max_new_tokens=8, do_sample=True, temperature=1.3, top_p=0.8, top_k=0)
    assert torch.equal(found.sequences[:, : own.shape[1]], own)


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_with_spread_it_is_a_loop_over_predict(make):
    chain = posterior(make(), draws=3)
    ids = prompts()
    found = chain.generate({"input_ids": ids}, draws=3, max_new_tokens=5)
    so_far = ids
    for step in range(found.tokens.shape[1]):
        predictive = chain.predict({"input_ids": so_far}, draws=3, full=True)
        last = predictive.log_mean[:, -1]
        on = found.counted[:, step]
        assert torch.equal(found.tokens[on, step], last.argmax(-1)[on])
        torch.testing.assert_close(
            found.epistemic[on, step].float(), predictive.epistemic[on, -1], atol=1e-5, rtol=1e-3
        )
        torch.testing.assert_close(found.total[on, step].float(), predictive.total[on, -1], atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(found.log_prob[on, step].float(), last.amax(-1)[on], atol=1e-5, rtol=1e-4)
        so_far = torch.cat([so_far, found.tokens[:, step : step + 1]], 1)
    assert (found.epistemic[found.counted] > 1e-4).all()  # the draws do disagree


def test_the_cache_changes_nothing_and_a_batch_is_each_prompt_alone():
    chain, batch = posterior(llama(), draws=3), padded()
    found = chain.generate(batch, draws=3, max_new_tokens=6)
    without = chain.generate(batch, draws=3, max_new_tokens=6, cached=False)
    assert torch.equal(found.sequences, without.sequences)
    torch.testing.assert_close(found.epistemic, without.epistemic, atol=1e-6, rtol=1e-4)
    for row, mask in enumerate(batch["attention_mask"]):
        alone = chain.generate({"input_ids": batch["input_ids"][row : row + 1, mask.bool()]}, draws=3, max_new_tokens=6)
        length = alone.tokens.shape[1]
        assert torch.equal(found.tokens[row, :length], alone.tokens[0])
        torch.testing.assert_close(found.epistemic[row, :length], alone.epistemic[0], atol=1e-5, rtol=1e-3)


@pytest.mark.parametrize("layers", [None, [1, 2], [2]])
def test_adapter_draws_in_one_batch_are_separate_models(layers):
    chain, batch = posterior(lora(llama(), layers), draws=4), padded()
    found = chain.generate(batch, draws=4, max_new_tokens=6)
    log_probs = torch.stack([chain.module(draw)(**batch).logits[:, -1].log_softmax(-1) for draw in range(4)])
    values, ids = log_probs.topk(5, -1)
    assert torch.equal(found.by_draw.ids[:, :, 0], ids)
    torch.testing.assert_close(found.by_draw.probs[:, :, 0], values.exp(), atol=1e-6, rtol=1e-4)


def test_adapter_draws_share_one_pass_and_the_trunk_below_them():
    """Three blocks, adapters in the last: the first two see B rows, the third L · B."""
    chain = posterior(lora(llama(), [2]), draws=4)
    rows = []
    model = chain.model.get_base_model().model
    kind = type(model.layers[0])
    plain = kind.forward

    def watched(self, hidden_states, *args, **kwargs):
        rows.append(len(hidden_states))
        return plain(self, hidden_states, *args, **kwargs)

    kind.forward = watched
    try:
        chain.generate({"input_ids": prompts(1)}, draws=4, max_new_tokens=2)
    finally:
        kind.forward = plain
    assert rows[-6:] == [1, 1, 4, 1, 1, 4]


def test_a_draw_is_held_for_the_whole_sequence():
    """Two draws that each insist on a token of their own: redrawn per token, the top choice of draw 0 would change."""
    model = llama()
    chain = posterior(model, draws=2, sd=0.0)
    rows = chain.theta.clone()
    head = chain.space.slices["lm_head.weight"]
    g = torch.Generator().manual_seed(5)
    rows[:, head] += torch.randn(2, rows[:, head].shape[1], generator=g)
    held = bf.Posterior(model, bf.NextToken(), Samples(rows, {}))
    found = held.generate({"input_ids": prompts(1)}, draws=2, max_new_tokens=6, stop=None)
    for draw in range(2):
        alone = held.module(draw)
        logits = alone(found.sequences[:, :-1]).logits[:, -found.tokens.shape[1] :]
        assert torch.equal(found.by_draw.ids[draw, 0, :, 0], logits[0].argmax(-1))
    assert not torch.equal(found.by_draw.ids[0], found.by_draw.ids[1])


def test_a_gaussian_over_weights_draws_them_once_per_call():
    model = lora(llama())
    chain = posterior(model, 1, 0.0)
    law = GaussianLaw(
        chain.theta[0], (slice(0, chain.space.size),), (Diagonal(torch.full((chain.space.size,), 0.04)),), {}
    )
    gaussian = bf.Posterior(model, bf.NextToken(), law)
    first = gaussian.generate({"input_ids": prompts()}, draws=3, max_new_tokens=4, seed=1)
    again = gaussian.generate({"input_ids": prompts()}, draws=3, max_new_tokens=4, seed=1)
    other = gaussian.generate({"input_ids": prompts()}, draws=3, max_new_tokens=4, seed=2)
    assert torch.equal(first.epistemic, again.epistemic)
    assert not torch.equal(first.epistemic, other.epistemic)


def test_dropout_noise_of_a_token_stays_with_its_cache_entry():
    """With MC dropout the draws differ, equal seeds agree, and the global stream is untouched."""
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, pad_token_id=PAD))
    ids = prompts(8)
    training = bf.Training(epochs=1, max_steps=1)
    dropout = bf.fit(
        model, {"input_ids": ids, "labels": ids}, likelihood=bf.NextToken(), method=bf.MCDropout(), training=training
    )
    before = torch.get_rng_state()
    first = dropout.generate({"input_ids": ids[:2]}, draws=4, max_new_tokens=5)
    again = dropout.generate({"input_ids": ids[:2]}, draws=4, max_new_tokens=5)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(first.epistemic, again.epistemic)
    assert (first.epistemic[first.counted] > 0).all()


def test_stops_and_counts():
    chain = posterior(llama(), draws=2)
    free = chain.generate({"input_ids": prompts(3)}, draws=2, max_new_tokens=8)
    token = int(free.tokens[0, 2])
    found = chain.generate({"input_ids": prompts(3)}, draws=2, max_new_tokens=8, stop=token)
    first = free.tokens[0].tolist().index(token)
    assert found.lengths[0] == first + 1
    assert (found.tokens[0, first + 1 :] == PAD).all()
    assert (found.total[0, first + 1 :] == 0).all()
    torch.testing.assert_close(found.mean("total")[0], free.total[0, : first + 1].mean())
    torch.testing.assert_close(found.sum("log_prob"), found.log_prob.sum(1))
    with pytest.raises(ValueError, match="Did you mean 'epistemic'"):
        found.sum("epistemc")


def test_nucleus_keeps_the_smallest_set():
    scores = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    assert nucleus(scores, 0.7).isfinite().tolist() == [[True, True, False, False]]
    assert nucleus(scores, 0.01).isfinite().tolist() == [[True, False, False, False]]
    assert nucleus(scores, 1.0) is scores


def test_a_bfloat16_base_with_float32_adapters():
    model = lora(llama().to(torch.bfloat16))
    chain = posterior(model, draws=3, sd=0.5)
    found = chain.generate({"input_ids": prompts()}, draws=3, max_new_tokens=4)
    looped = chain.predict({"input_ids": prompts()}, draws=3, full=True).log_probs[:, :, -1]
    torch.testing.assert_close(found.by_draw.probs[:, :, 0, 0], looped.amax(-1).exp(), atol=2e-2, rtol=2e-2)
    assert found.total.dtype == torch.float64


class Letters:
    """A tokenizer of single letters."""

    def __init__(self, size=VOCABULARY):
        self.size = size

    def __len__(self):
        return self.size

    def __call__(self, text):
        return {"input_ids": [3 + ord(c) % (VOCABULARY - 3) for c in text if c != "~"]}

    def decode(self, tokens, skip_special_tokens=False):
        kept = [t for t in tokens if t > 2 or not skip_special_tokens]
        return "".join("<&>"[t] if t < 3 else chr(97 + t % 26) for t in kept)


def test_text_with_a_tokenizer_and_a_page(tmp_path):
    chain = posterior(lora(llama()), draws=2)
    seen = []
    found = chain.generate(
        ["hello", "hi"],
        draws=2,
        max_new_tokens=5,
        tokenizer=Letters(),
        on_step=lambda step, on: seen.append(step.tokens),
    )
    assert len(seen) == found.tokens.shape[1]
    assert len(found.text) == 2
    assert "".join(found.pieces[0]) == Letters().decode(found.tokens[0][found.counted[0]].tolist())
    written = page(found)
    assert written.count('class="token"') == int(found.counted.sum())
    assert "draw 2" in written
    assert "<script>" in written
    assert 'title="epistemic' in fragment(found)
    assert found._repr_html_() == fragment(found)
    hostile = chain.generate("hi", draws=2, max_new_tokens=5, tokenizer=Letters(), stop="zzzz")
    assert "</script><" not in page(hostile).split('id="data">')[1].split("</script>")[0]
    stopped = chain.generate("hi", draws=2, max_new_tokens=5, tokenizer=Letters(), stop=[hostile.text[0][:2]])
    assert stopped.lengths[0] == 2


def test_sampled_answers():
    chain = posterior(lora(llama()), draws=2)
    found = chain.sample_answers(["hello", "hi"], answers=3, draws=2, max_new_tokens=4, tokenizer=Letters(), seed=3)
    assert [len(answers) for answers in found.text] == [3, 3]
    expected = -found.generation.log_prob.sum(1).view(2, 3).mean(1)
    torch.testing.assert_close(found.predictive_entropy, expected)
    assert (found.lexical_similarity >= 0).all()
    assert (found.self_certainty > 0).all()
    greedy = chain.sample_answers(["hello"], answers=2, draws=2, max_new_tokens=4, tokenizer=Letters(), do_sample=False)
    assert greedy.lexical_similarity.item() == 1


def test_rouge_l_by_hand():
    assert rouge_l(["the", "cat", "sat"], ["the", "cat", "ran"]) == pytest.approx(2 / 3)
    assert rouge_l([], []) == 1
    assert rouge_l([1], []) == 0
    assert rouge_l([1, 2, 3], [3, 2, 1]) == pytest.approx(1 / 3)


def test_wrong_prompts_are_refused_before_anything_is_computed():
    chain = posterior(gpt2(), draws=2)
    ids = prompts()
    right = torch.ones_like(ids)
    right[0, -2:] = 0
    for inputs, options, match in (
        ({"input_ids": ids, "attention_mask": right}, {}, "padded on the left"),
        ({"input_ids": ids[:, :0]}, {}, "at least one token"),
        ({"input_ids": ids, "attention_mask": right[:1]}, {}, "shape of input_ids"),
        ({"input_ids": ids + VOCABULARY}, {}, "Does the tokenizer belong to this model"),
        ({"input_ids": ids.float()}, {}, "whole numbers"),
        ({"input_ids": ids}, {"max_new_tokens": 0}, "max_new_tokens must be a whole number"),
        ({"input_ids": ids}, {"max_new_tokens": 100}, "40 positions; got a prompt of 6 tokens"),
        ({"input_ids": ids}, {"temperature": 0.0}, "temperature must be positive"),
        ({"input_ids": ids}, {"top_p": 1.5}, "top_p must lie above 0"),
        ({"input_ids": ids}, {"draws": 3}, "between 1 and 2"),
        ({"input_ids": ids}, {"stop": "end"}, "tokenizer must be given where stop is text"),
        ("hello", {}, "tokenizer must be given where inputs are text"),
        ("", {"tokenizer": Letters()}, "must not be empty"),
        ("~", {"tokenizer": Letters()}, "at least one token"),
        ("hello", {"tokenizer": Letters(999)}, "it has 999 tokens, the model 61"),
        (5, {}, "inputs must be text"),
    ):
        with pytest.raises(ValueError, match=match):
            chain.generate(inputs, **{"draws": 2, **options})


def test_other_models_are_refused():
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"vocab_size": 20, "d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2}
    for model, match in ((T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0)), "encoder-decoder"),):
        with pytest.raises(ValueError, match=match):
            posterior(model, 1).generate({"input_ids": torch.ones(1, 2).long()}, draws=1)


class Bigrams(nn.Module):
    """A model of one's own, without a cache: logits of the next token from the last."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, VOCABULARY)

    def forward(self, ids):
        return self.table(ids)


def test_a_model_of_ones_own_that_has_no_cache():
    torch.manual_seed(0)
    chain = posterior(Bigrams(), draws=2, sd=0.1)
    found = chain.generate({"input_ids": prompts(1)}, draws=2, max_new_tokens=3)
    mean = torch.stack([chain.module(d)(prompts(1))[:, -1].softmax(-1) for d in range(2)]).mean(0)
    assert found.tokens[0, 0] == mean.argmax()
    assert math.isclose(found.log_prob[0, 0].exp().item(), mean.max().item(), rel_tol=1e-5)


def with_line_end(found):
    """The same with a second token that ends a line."""
    return replace(found, pieces=tuple((first, "\n", *rest) for first, _, *rest in found.pieces))


def test_a_token_that_ends_a_line_ends_it_on_the_page():
    found = posterior(lora(llama()), draws=2).generate("hello", draws=2, max_new_tokens=3, tokenizer=Letters())
    assert ">↵</button>\n<button" in page(with_line_end(found))


def test_a_tap_on_a_token_shows_the_alternatives_of_two_draws(tmp_path):
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    binary = next((found for name in names if (found := shutil.which(name))), None)
    if binary is None:
        pytest.skip(f"needs a browser to tap on the page; none of {', '.join(names)} is installed")
    found = posterior(lora(llama()), draws=2).generate("hello", draws=2, max_new_tokens=5, tokenizer=Letters())
    path = tmp_path / "page.html"
    path.write_text(page(found), encoding="utf-8")
    with Browser(binary, tmp_path / "profile") as browser:
        browser.show(path, 390, "light")
        assert browser.js("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
        browser.js("document.querySelectorAll('button.token')[1].click()")
        for draw in range(2):
            row = browser.js(f"document.querySelectorAll('#panel tr.draw')[{draw + 1}].innerText")
            best = found.names[int(found.by_draw.ids[draw, 0, 1, 0])]
            assert row.startswith(f"draw {draw + 1}")
            assert f'"{best}"' in row
        assert browser.js("document.querySelectorAll('button.token')[1].getAttribute('aria-expanded')") == "true"
        browser.screenshot(tmp_path / "page.png")
        path.write_text(page(with_line_end(found)), encoding="utf-8")
        browser.show(path, 390, "light")
        tops = [browser.js(f"document.querySelectorAll('button.token')[{i}].offsetTop") for i in range(3)]
        assert tops[0] == tops[1] < tops[2]


def test_settings_of_the_models_own_generate_that_are_not_used_are_told(caplog):
    held, ids = posterior(llama()), prompts()
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    held.generate(given, max_new_tokens=1)
    assert not caplog.records
    held.model.generation_config.repetition_penalty = 5.0
    held.generate(given, max_new_tokens=1)
    assert "generation settings of the model that are not used: repetition_penalty=5.0" in caplog.text

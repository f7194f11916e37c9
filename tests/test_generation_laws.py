"""Generation by adapters: cache, padding, held draws, PEFT's mixed batches, end tokens, and a bfloat16 base."""

from itertools import pairwise

import pytest
import torch

import bayesformer as bf
from bayesformer.generation import decoders
from bayesformer.laws import Diagonal, GaussianLaw
from tests.test_generation import END, PAD, VOCABULARY, Letters, llama, lora, padded, posterior, prompts


def gaussian_over(model, variance=0.05):
    theta = posterior(model, 1, 0.0).theta[0]
    law = GaussianLaw(theta, (slice(0, len(theta)),), (Diagonal(torch.full_like(theta, variance)),), {})
    return bf.Posterior(model, bf.NextToken(), law)


@pytest.mark.parametrize("layers", [None, [2]])
def test_adapters_with_a_cache_are_adapters_without(layers):
    chain, batch = posterior(lora(llama(), layers), draws=3), padded()
    found = chain.generate(batch, draws=3, max_new_tokens=6)
    without = chain.generate(batch, draws=3, max_new_tokens=6, cached=False)
    assert torch.equal(found.sequences, without.sequences)
    torch.testing.assert_close(found.epistemic, without.epistemic, atol=1e-6, rtol=1e-4)
    assert found.epistemic.max() > 1e-4


@pytest.mark.parametrize("layers", [None, [2]])
def test_adapters_in_a_batch_of_unequal_prompts_are_each_prompt_alone(layers):
    chain, batch = posterior(lora(llama(), layers), draws=3), padded()
    found = chain.generate(batch, draws=3, max_new_tokens=6)
    for row, mask in enumerate(batch["attention_mask"]):
        alone = chain.generate({"input_ids": batch["input_ids"][row : row + 1, mask.bool()]}, draws=3, max_new_tokens=6)
        length = alone.tokens.shape[1]
        assert torch.equal(found.tokens[row, :length], alone.tokens[0])
        torch.testing.assert_close(found.epistemic[row, :length], alone.epistemic[0], atol=1e-5, rtol=1e-3)


def test_draws_of_a_gaussian_over_adapters_are_held():
    """Every token's alternatives are those of the module of its draw: drawn anew per token, they would not be."""
    gaussian = gaussian_over(lora(llama()), 0.3)
    found = gaussian.generate({"input_ids": prompts(1)}, draws=3, max_new_tokens=5, seed=7)
    new = found.tokens.shape[1]
    for draw in range(3):
        logits = gaussian.module(draw, seed=7)(found.sequences[:, :-1]).logits[:, -new:].detach()
        values = logits.softmax(-1).topk(5, -1).values
        torch.testing.assert_close(found.by_draw.probs[draw], values, atol=1e-5, rtol=1e-3)
    assert not torch.allclose(found.by_draw.probs[0], found.by_draw.probs[1], atol=1e-3)


def test_mixed_batches_of_peft_write_the_same_text():
    """PEFT's own way: a registered adapter per draw, a name per row, and probabilities averaged by hand."""
    chain, ids = posterior(lora(llama()), draws=3), prompts(2)
    found = chain.generate({"input_ids": ids}, draws=3, max_new_tokens=4)
    peer = lora(llama())
    for draw in range(3):
        peer.add_adapter(f"draw{draw}", peer.peft_config["default"])
        with torch.no_grad():
            for name, value in chain.sample().items():
                peer.get_parameter(name.replace(".default", f".draw{draw}")).copy_(value[draw])
    names, so_far = [f"draw{draw}" for draw in range(3) for _ in range(2)], ids
    for step in range(found.tokens.shape[1]):
        with torch.no_grad():
            logits = peer.eval()(input_ids=so_far.repeat(3, 1), adapter_names=names).logits[:, -1]
        probs = logits.view(3, 2, -1).softmax(-1).mean(0)
        on = found.counted[:, step]
        assert torch.equal(found.tokens[on, step], probs.argmax(-1)[on])
        torch.testing.assert_close(found.log_prob[on, step].exp().float(), probs.amax(-1)[on], atol=1e-6, rtol=1e-4)
        so_far = torch.cat([so_far, found.tokens[:, step : step + 1]], 1)


def test_noise_of_a_token_is_drawn_when_it_is_read_and_then_kept(monkeypatch):
    """With dropout on, keys of earlier tokens stay bit for bit what they were, in the cache of every draw."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "pad_token_id": PAD}
    model = GPT2LMHeadModel(GPT2Config(**sizes, eos_token_id=END, bos_token_id=2))
    point = posterior(model, 1, 0.0)
    noisy = bf.Posterior(model, bf.NextToken(), point.law, noisy_draws=3, dropout_rate=0.3)
    kept, read = {}, decoders.CachedModule.read

    def watched(self, ids, mask, positions):
        logits = read(self, ids, mask, positions)
        keys = self.past.layers[1].keys.clone()
        kept.setdefault(id(self), []).append(keys)
        return logits

    monkeypatch.setattr(decoders.CachedModule, "read", watched)
    noisy.generate({"input_ids": prompts(1)}, draws=3, max_new_tokens=4)
    caches = [states for states in kept.values() if len(states) > 1]
    assert len(caches) == 3
    for states in caches:
        for before, after in pairwise(states):
            assert torch.equal(after[:, :, : before.shape[2]], before)
    assert not torch.equal(caches[0][0], caches[1][0])  # each draw has noise of its own


def test_end_tokens_are_those_of_the_models_settings():
    """One or several end tokens, as transformers' generate has them; what follows is the pad token."""
    model, batch = llama(), padded()
    free = model.generate(**batch, max_new_tokens=8, do_sample=False)
    ends = [int(free[0, 9]), int(free[1, 10])]
    model.generation_config.eos_token_id = ends
    own = model.generate(**batch, max_new_tokens=8, do_sample=False)
    found = posterior(model, 2, 0.0).generate(batch, draws=2, max_new_tokens=8)
    assert torch.equal(found.sequences, own)
    assert found.lengths.min() < 8
    stopped = posterior(llama(), 2, 0.0).generate(batch, draws=2, max_new_tokens=8, stop=ends)
    assert torch.equal(stopped.sequences[:2], own[:2, : stopped.sequences.shape[1]])  # its own end token counts, too


def test_it_ends_where_all_sequences_have_ended():
    model, ids = llama(), prompts(1)
    free = posterior(model, 2, 0.0).generate({"input_ids": ids}, draws=2, max_new_tokens=6)
    text = Letters().decode(free.tokens[0, :2].tolist())
    found = posterior(model, 2, 0.0).generate(
        {"input_ids": ids}, draws=2, max_new_tokens=6, tokenizer=Letters(), stop=text
    )
    assert found.tokens.shape == (1, 2)


SHORT = bf.Training(epochs=2, batch_size=4, lr=1e-2, warmup=1)
METHODS = {
    "ensemble": bf.Ensemble(2),
    "blob": bf.Blob(draws=2),
    "tfb": bf.Tfb(draws=2, anchors=4, samples=2, iterations=3),
    "swag": bf.Swag(draws=2, rank=2, trajectory="adamw", members=2, warm_up=0.0),
    "laplace": bf.Laplace(draws=2, predictive="sampled", prior_precision=100.0),
    "vi": bf.Vi(draws=2, epochs=2),
    "ivon": bf.Ivon(draws=2, epochs=2),
    "mle": bf.Mle(),
}


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.filterwarnings("ignore::bayesformer.FidelityWarning")
def test_a_bfloat16_base_works_throughout(name, tmp_path):
    """Fit, predict, save, load and write, with the frozen base in half precision and adapters in float32."""
    model = lora(llama().to(torch.bfloat16))
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16, torch.float32}
    ids = prompts(8)
    data = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
    found = bf.fit(model, data, likelihood=bf.NextToken(), method=METHODS[name], training=SHORT)
    assert found.law.mean.dtype == torch.float32
    predictive = found.predict(data)
    assert predictive.target_log_prob.isfinite().all()
    assert name == "mle" or predictive.epistemic.max() > 0
    found.save(tmp_path)
    loaded = bf.Posterior.load(tmp_path, llama().to(torch.bfloat16))
    torch.testing.assert_close(loaded.predict(data).total, predictive.total, atol=1e-6, rtol=0)
    draws = 1 if name == "mle" else 2
    text = found.generate({"input_ids": ids[:2]}, draws=draws, max_new_tokens=3)
    again = loaded.generate({"input_ids": ids[:2]}, draws=draws, max_new_tokens=3)
    assert torch.equal(text.tokens, again.tokens)


def peaked():
    """A model that prefers some tokens, as trained ones do."""
    model = llama()
    with torch.no_grad():
        model.lm_head.weight.mul_(20)
    return model


def test_a_bfloat16_base_writes_what_a_float32_base_writes_but_for_near_ties():
    """The same adapters on both: greedy tokens agree as long as the best is ahead by more than rounding."""
    exact, rounded = (posterior(lora(peaked().to(dtype)), draws=3) for dtype in (torch.float32, torch.bfloat16))
    rounded = bf.Posterior(rounded.model, bf.NextToken(), exact.law)
    ids = prompts(4)
    ours, theirs = (one.generate({"input_ids": ids}, draws=3, max_new_tokens=5) for one in (rounded, exact))
    compared = 0
    for row in range(4):
        for step in range(min(ours.tokens.shape[1], theirs.tokens.shape[1])):
            best = theirs.averaged.probs[row, step]
            if best[0] < best[1] * 1.05:
                break  # a near-tie: what follows may differ
            assert ours.tokens[row, step] == theirs.tokens[row, step]
            torch.testing.assert_close(ours.total[row, step], theirs.total[row, step], atol=0.05, rtol=0)
            compared += 1
    assert compared >= 4

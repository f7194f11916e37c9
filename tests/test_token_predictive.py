"""Predictions of language models are reduced as they come: against the full ones, and in little memory."""

import peft
import pytest
import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import bayesformer as bf
from bayesformer import evaluate
from bayesformer.laws import Diagonal, GaussianLaw, Samples
from bayesformer.model.space import Space
from bayesformer.predict import token_reduction

V, T, B = 40, 6, 5


def llama(vocabulary=V, hidden=8):
    config = transformers.LlamaConfig(
        vocab_size=vocabulary, hidden_size=hidden, intermediate_size=12, num_hidden_layers=2, num_attention_heads=2
    )
    model = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        model.lm_head.weight.mul_(100)  # probabilities from nearly 0 to nearly 1, as trained models have them
    return model


def lora(model):
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    return peft.get_peft_model(model, config).eval()


def posterior_over(model, draws=4, sd=0.5, **more):
    space = Space.of(model)
    mean = space.pack(dict(model.named_parameters()))
    return bf.Posterior(model, bf.NextToken(), Samples(mean + sd * torch.randn(draws, len(mean)), {}), **more)


def some(count=B, length=T):
    ids = torch.randint(3, V, (count, length))
    labels = ids.clone()
    labels[0, 3:], labels[1, 0] = -100, -100
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


ROUNDED = 1e-4  # logits are about 100, and their last digits depend on the size of the batch and on the machine

ROOTS = 2e-3  # a root of a singular covariance has the root of its rounding


def check_equal(reduced, whole, labels, atol=ROUNDED):
    """A reduced predictive against the full one."""
    for name in ("total", "aleatoric", "epistemic"):
        torch.testing.assert_close(getattr(reduced, name).float(), getattr(whole, name), rtol=0, atol=atol)
    best = whole.probs.topk(reduced.top_probs.shape[-1], dim=-1)
    torch.testing.assert_close(reduced.top_probs.float(), best.values, rtol=0, atol=atol)
    assert torch.equal(reduced.labels, whole.labels)
    ours, answers = bf.NextToken().pairs(reduced, labels)
    theirs, _ = bf.NextToken().pairs(whole, labels)
    torch.testing.assert_close(ours.log_prob(answers).float(), theirs.log_prob(answers), rtol=0, atol=atol)


@pytest.mark.parametrize("kind", ["adapters", "all weights", "tempered", "dropout", "small rounds"])
def test_it_is_the_full_predictive_reduced(kind, monkeypatch):
    model = lora(llama()) if kind != "all weights" else llama()
    posterior = posterior_over(model, tempering=1.7 if kind == "tempered" else 1.0)
    if kind == "dropout":
        config = transformers.GPT2Config(vocab_size=V, n_embd=8, n_layer=1, n_head=2, n_positions=16)
        noisy = transformers.GPT2LMHeadModel(config)
        theta = Space.of(noisy).pack(dict(noisy.named_parameters())).detach()
        posterior = bf.Posterior(noisy, bf.NextToken(), Samples(theta[None], {}), noisy_draws=5, dropout_rate=0.3)
    if kind == "small rounds":
        monkeypatch.setattr(token_reduction, "HELD_NUMBERS", 2 * T * V)
        monkeypatch.setattr(token_reduction, "ROW_NUMBERS", 4 * V)
    data = some()
    reduced = posterior.predict(data, seed=3, batch_size=2, top=3)
    whole = posterior.predict(data, seed=3, batch_size=2, full=True)
    assert isinstance(reduced, bf.TokenPredictive)
    assert isinstance(whole, bf.CategoricalPredictive)
    assert reduced.top_tokens.shape == (B, T, 3)
    assert float(whole.epistemic.max()) > 1e-5
    check_equal(reduced, whole, data["labels"])


@pytest.mark.parametrize("way", ["linearised", "streamlined"])
def test_gaussian_outputs_are_reduced_too(way):
    model = lora(llama())
    mean = Space.of(model).pack(dict(model.named_parameters())).detach()
    law = GaussianLaw(mean, (slice(0, len(mean)),), (Diagonal(torch.full_like(mean, 0.01)),), {})
    posterior, data = bf.Posterior(model, bf.NextToken(), law, tempering=1.3), some()
    reduced = posterior.predict(data, draws=3, predictive=way, batch_size=2)
    check_equal(reduced, posterior.predict(data, draws=3, predictive=way, full=True), data["labels"], ROOTS)


def test_gaussian_outputs_may_be_drawn_in_groups(monkeypatch):
    """With many draws, in small batches and groups, it is what all draws at once say, within their noise."""
    model = lora(llama())
    mean = Space.of(model).pack(dict(model.named_parameters())).detach()
    law = GaussianLaw(mean, (slice(0, len(mean)),), (Diagonal(torch.full_like(mean, 0.2)),), {})
    posterior, data = bf.Posterior(model, bf.NextToken(), law, predictive="linearised"), some()
    whole = posterior.predict(data, draws=3000, full=True)
    monkeypatch.setattr(token_reduction, "HELD_NUMBERS", 50 * T * V)
    reduced = posterior.predict(data, draws=3000, batch_size=2)
    assert float(whole.epistemic.min()) > 1e-3
    torch.testing.assert_close(reduced.epistemic.float(), whole.epistemic, rtol=0.2, atol=0)
    torch.testing.assert_close(reduced.total.float(), whole.total, rtol=0, atol=0.15)
    closed = posterior.predict(data, link="probit", batch_size=2)
    check_equal(closed, posterior.predict(data, link="probit", full=True), data["labels"], ROOTS)


def test_one_draw_has_no_epistemic_uncertainty_at_all():
    found = posterior_over(llama(), draws=1).predict(some())
    assert torch.equal(found.epistemic, torch.zeros(B, T, dtype=torch.float64))
    assert torch.equal(found.total, found.aleatoric)


def test_labels_come_with_any_form_of_data_and_may_be_missing():
    posterior, data = posterior_over(llama()), some()
    found = posterior.predict(data)
    counted = bf.NextToken().kept(data["labels"])[:, 1:]
    assert torch.equal(found.counted[:, :-1], counted)
    assert not found.counted[:, -1].any()
    assert not found.target_log_prob[~found.counted].any()
    inputs = {name: value for name, value in data.items() if name != "labels"}
    pair = bf.Data(inputs, data["labels"])
    rows = [{name: value[row] for name, value in data.items()} for row in range(B)]
    for form in (pair, (inputs, data["labels"]), rows, torch.utils.data.DataLoader(rows, batch_size=2)):
        torch.testing.assert_close(posterior.predict(form).target_log_prob, found.target_log_prob, rtol=0, atol=ROUNDED)
    without = posterior.predict(inputs)
    assert without.targets is None
    torch.testing.assert_close(without.total, found.total, rtol=0, atol=ROUNDED)
    with pytest.raises(ValueError, match="give them to predict as 'labels'"):
        bf.NextToken().pairs(without, data["labels"])[0].log_prob(data["labels"][:, 1:][counted])


def test_the_sum_of_log_probabilities_is_the_log_likelihood():
    posterior, data = posterior_over(llama(), draws=1), some()
    found = posterior.predict(data)
    exact = bf.NextToken().log_prob(posterior.module()(input_ids=data["input_ids"]).logits, data["labels"])
    torch.testing.assert_close(found.target_log_prob.sum(1).float(), exact.detach())
    whole = evaluate.log_likelihood(found, data["labels"], bf.NextToken().counted(data["labels"]))
    torch.testing.assert_close(whole, found.target_log_prob.sum(1))


def test_parts_of_unequal_lengths_are_joined():
    posterior = posterior_over(llama())
    rows = [{"input_ids": torch.randint(3, V, (n,))} for n in (3, 6, 6, 2)]
    data = [{**row, "labels": row["input_ids"]} for row in rows]
    whole = posterior.predict(data, batch_size=2)
    assert whole.total.shape == (4, 6)
    parts = list(posterior.predict_batches(data, batch_size=2))
    assert sum(len(part.total) for part in parts) == 4
    alone = posterior.predict({"input_ids": rows[0]["input_ids"][None], "labels": rows[0]["input_ids"][None]})
    torch.testing.assert_close(whole.total[0, :3], alone.total[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(whole.target_log_prob[0].sum(), alone.target_log_prob.sum(), rtol=1e-4, atol=1e-5)


def test_what_a_reduced_predictive_cannot_say_it_says():
    posterior, data = posterior_over(llama()), some()
    found = posterior.predict(data)
    with pytest.raises(AttributeError, match=r"has no probs: .* full=True"):
        _ = found.probs
    with pytest.raises(AttributeError, match="no attribute 'colour'"):
        _ = found.colour
    with pytest.raises(ValueError, match="position later"):
        found.log_prob(data["labels"])
    other = data["labels"].clone()
    other[2, 2] = 1 + (other[2, 2] % (V - 1))
    rows, answers = bf.NextToken().pairs(found, other)
    with pytest.raises(ValueError, match=r"must be the labels that were given to predict.*full=True"):
        rows.log_prob(answers)
    with pytest.raises(ValueError, match="predictive must be a CategoricalPredictive; got TokenPredictive"):
        evaluate.accuracy(rows, answers)
    for wrong in (0, True, 2.5):
        with pytest.raises(ValueError, match="top must be a whole number, at least 1"):
            posterior.predict(data, top=wrong)
    with pytest.raises(ValueError, match="full must be True or False; got 'yes'"):
        posterior.predict(data, full="yes")
    with pytest.raises(ValueError, match=rf"labels must lie in 0\.\.{V - 1}.*got {V}"):
        posterior.predict({**data, "labels": torch.full((B, T), V)})
    with pytest.raises(ValueError, match=r"labels must have shape \(5, 6\); got \(5, 3\)"):
        posterior.predict({**data, "labels": data["labels"][:, :3]})


def test_other_likelihoods_are_always_full():
    model = torch.nn.Linear(3, 4)
    posterior = bf.Posterior(model, bf.Categorical(), Samples(torch.randn(2, 16), {}))
    x = torch.randn(5, 3)
    assert torch.equal(posterior.predict(x).probs, posterior.predict(x, full=True).probs)


class Held(TorchDispatchMode):
    """The largest tensor that was made in a computation, in bytes."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        for x in tree_leaves(found):
            if isinstance(x, torch.Tensor):
                self.largest = max(self.largest, x.untyped_storage().nbytes())
        return found


def test_the_vocabulary_under_all_draws_is_never_in_memory(monkeypatch):
    """Nothing is larger than a pass, although all draws of all examples are 50 times that."""
    vocabulary, examples, draws = 2000, 100, 10
    model = lora(llama(vocabulary))
    posterior = posterior_over(model, draws)
    monkeypatch.setattr(token_reduction, "HELD_NUMBERS", 2 * T * vocabulary)
    ids = torch.randint(vocabulary, (examples, T))
    with Held() as held:
        found = posterior.predict({"input_ids": ids, "labels": ids}, batch_size=2)
    assert found.total.shape == (examples, T)
    everything = draws * examples * T * vocabulary * 4
    assert held.largest <= everything / 25  # one pass: 2 of 100 examples
    with Held() as held:
        posterior.predict({"input_ids": ids}, batch_size=2, full=True)
    assert held.largest >= everything


def test_scores_that_need_probabilities_get_them():
    model = lora(llama())
    posterior, data = posterior_over(model, draws=3), some(8)
    calibrated = posterior.calibrate(data)
    assert calibrated.tempering > 0
    sets = posterior.conformal(data, level=0.8)
    assert sets.sets({"input_ids": data["input_ids"]}).shape == (8, T, V)
    answers = sets.risk(limit=0.5).answers({"input_ids": data["input_ids"]})
    assert answers.labels.shape == (8, T)

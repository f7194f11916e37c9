"""What every posterior over low-rank adapters must keep to, whatever the method: members, merging, freezing, limits."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import BertConfig, BertForSequenceClassification

import bayesformer as bf
from bayesformer.laws import Diagonal, GaussianLaw, Samples
from bayesformer.model.space import Space
from bayesformer.train.problem import Problem
from bayesformer.train.prototype import Prototype

SIZES = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
SHORT = bf.Training(epochs=2, batch_size=20, lr=1e-2, warmup=1)
METHODS = {
    "mle": bf.Mle(),
    "ensemble": bf.Ensemble(2),
    "penalised": bf.Ensemble(2, adapter_penalty=0.1),
    "blob": bf.Blob(draws=3),
    "tfb": bf.Tfb(draws=3, anchors=20, iterations=4),
    "swag": bf.Swag(draws=3, rank=2, trajectory="adamw", members=2, warm_up=0.0),
    "laplace": bf.Laplace(draws=3, predictive="sampled", prior_precision=100.0),
}


def bert(trained=True):
    torch.manual_seed(0)
    model = BertForSequenceClassification(BertConfig(vocab_size=40, num_labels=2, **SIZES))
    config = LoraConfig(r=2, target_modules=["query", "value"], task_type="SEQ_CLS", init_lora_weights=not trained)
    return get_peft_model(model, config).eval()


def reviews(n=40):
    g = torch.Generator().manual_seed(1)
    ids = torch.randint(40, (n, 6), generator=g)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": (ids[:, 0] > 20).long()}


def batch(n=8):
    return {name: value for name, value in reviews(n).items() if name != "labels"}


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.filterwarnings("ignore::bayesformer.FidelityWarning")
def test_the_base_has_no_gradient_and_does_not_change(name):
    model = bert(trained=False)
    frozen = {n: p.clone() for n, p in model.named_parameters() if not p.requires_grad}
    posterior = bf.fit(model, reviews(), likelihood="categorical", method=METHODS[name], training=SHORT)
    posterior.predict(batch())
    assert frozen
    for n, p in model.named_parameters():
        assert p.grad is None, n
        assert n not in frozen or torch.equal(p, frozen[n]), n
    assert not set(posterior.space.names) & set(frozen)
    drawn = dict(posterior.module(draw=1 if name != "mle" else 0).named_parameters())
    assert all(torch.equal(drawn[n], p) for n, p in frozen.items())


@pytest.mark.parametrize("name", ["ensemble", "blob", "tfb"])
def test_merging_and_unmerging_a_draw_leaves_its_outputs(name):
    model = bert(trained=False)
    posterior = bf.fit(model, reviews(), likelihood="categorical", method=METHODS[name], training=SHORT)
    draw = posterior.module(draw=1)
    before = draw(**batch()).logits
    assert not torch.allclose(before, model(**batch()).logits, atol=1e-3)  # it is not the base alone
    draw.merge_adapter()
    torch.testing.assert_close(draw(**batch()).logits, before, atol=1e-5, rtol=1e-4)
    draw.unmerge_adapter()
    torch.testing.assert_close(draw(**batch()).logits, before, atol=1e-5, rtol=1e-4)


def test_merged_adapters_are_refused_for_they_have_no_gradient():
    model = bert()
    model.merge_adapter()
    with pytest.raises(ValueError, match="merge"):
        bf.fit(model, reviews(), likelihood="categorical", method=bf.Blob(), training=SHORT)
    with pytest.raises(ValueError, match="merge"):
        bf.tfb(model, reviews(), likelihood="categorical")


def members(*thetas):
    return bf.Posterior(bert(), bf.Categorical(), Samples(torch.stack(thetas), {}))


def test_equal_members_have_no_mutual_information_and_others_never_less_than_none():
    theta = Space.of(bert()).pack(dict(bert().named_parameters())).detach()
    same = members(theta, theta, theta).predict(batch())
    assert same.epistemic.abs().max() < 1e-6
    for seed in range(5):
        g = torch.Generator().manual_seed(seed)
        apart = members(*(theta + 0.3 * torch.randn(len(theta), generator=g) for _ in range(3))).predict(batch())
        assert (apart.epistemic >= 0).all()
        assert apart.epistemic.max() > 1e-6
        torch.testing.assert_close(apart.total, apart.aleatoric + apart.epistemic, atol=1e-6, rtol=0)


def test_tfb_without_noise_is_the_network_itself():
    """The rotation B' = U d, A' = VᵀA changes no output; columns of B' have the singular values as norms."""
    model = bert()
    plain = bf.tfb(model, reviews(), likelihood="categorical", largest=1e-8, iterations=1, samples=2, anchors=10)
    assert plain.facts["sigma"] <= 1e-8
    with torch.no_grad():
        expected = model(**batch()).logits.softmax(-1)
    torch.testing.assert_close(plain.predict(batch(), draws=3).probs, expected, atol=1e-5, rtol=1e-4)
    means = plain.space.views(plain.law.mean)
    for name, b in means.items():
        if "lora_B" in name:
            singular = torch.linalg.svdvals(model.get_parameter(name).detach())
            torch.testing.assert_close(b.norm(dim=0), singular, atol=1e-5, rtol=1e-4)


def test_tfb_finds_the_border_of_a_rise_that_is_known(monkeypatch):
    """With a rise of σ the search brackets the tolerance from below, to the width of its last interval."""
    from bayesformer.methods import lora

    model = bert()
    monkeypatch.setattr(lora, "_own_answers", lambda plain, inputs: ([], 1.0))
    monkeypatch.setattr(lora, "_loss", lambda posterior, *_: 1.0 + _sigma_of(posterior))
    method = bf.Tfb(tolerance=0.1, largest=1.0, iterations=20)
    prototype = Prototype(Problem(model, bf.Categorical(), bf.Data(batch(), reviews(8)["labels"])))
    found = method.around(prototype, prototype.start(0), {}).facts["sigma"]
    assert 0.1 * (1 - 1e-4) <= found <= 0.1


def _sigma_of(posterior):
    """σ read back from the law: sd of A' times the norm of its column of B'."""
    means, variance = posterior.space.views(posterior.law.mean), posterior.space.views(posterior.law.variance())
    name = next(n for n in means if "lora_A" in n)
    norms = means[name.replace("lora_A", "lora_B")].norm(dim=0)
    return float(variance[name][:, 0].sqrt()[0] * (norms[0] + 1e-6))


def test_a_gaussian_over_adapters_draws_what_its_members_would_be():
    """Draws exported one by one and predicted as members are the Gaussian's own prediction."""
    model = bert()
    theta = Space.of(model).pack(dict(model.named_parameters())).detach()
    law = GaussianLaw(theta, (slice(0, len(theta)),), (Diagonal(torch.full_like(theta, 0.01)),), {})
    gaussian = bf.Posterior(model, bf.Categorical(), law)
    same = members(*law.rows(4, seed=3))
    torch.testing.assert_close(
        gaussian.predict(batch(), draws=4, seed=3).probs, same.predict(batch()).probs, atol=1e-5, rtol=1e-4
    )


def test_tfb_tries_its_noise_where_more_draws_come_in_smaller_parts(monkeypatch):
    """A language model's vocabulary under ten draws is read by parts of the anchors; under one draw at once."""
    from bayesformer.methods import lora
    from bayesformer.predict import by_draws

    found = bf.tfb(bert(), reviews(), likelihood="categorical", largest=0.5, iterations=2, samples=4, anchors=10)
    inputs, answers = batch(), torch.arange(len(batch()["input_ids"])) % 2
    whole = lora._loss(found, inputs, answers, 4)
    monkeypatch.setattr(by_draws, "ROUND_NUMBERS", 2 * 4 * 3)  # three examples under four draws
    monkeypatch.setattr(by_draws, "pass_numbers", lambda _: 1)  # one example per pass
    assert lora._loss(found, inputs, answers, 4) == pytest.approx(whole, rel=1e-5)

"""Stochastic attention in other people's models: masks, mean mode, formulas, KL, and back again bit for bit."""

import copy
import math
import pickle

import pytest
import torch
from torch import nn

import bayesformer as bf
from bayesformer.attention import (
    AttentionFamily,
    Contextual,
    GaussianLogits,
    Learned,
    Softmax,
    Weibull,
    attention_mode,
    families,
    install,
    uninstall,
)
from bayesformer.core.draws import log_uniform_like
from bayesformer.layers import kl_divergence
from bayesformer.models.transformer import Encoder, Regressor
from tests.attention_models import MODELS, B, D, T, V, bert_config, gpt2_config, llama_config, padding, vit
from tests.attention_zoo import STOCHASTIC

transformers = pytest.importorskip("transformers")
EULER = 0.5772156649015329


def installed(entry, family):
    torch.manual_seed(0)
    return install(entry.build(), family).train()


@pytest.mark.parametrize("family", STOCHASTIC)
@pytest.mark.parametrize("name", [name for name, entry in MODELS.items() if entry.causal])
def test_no_output_has_a_gradient_in_the_future(name, family):
    entry = MODELS[name]
    model = installed(entry, STOCHASTIC[family]())
    x = torch.randn(B, T, D, requires_grad=True)
    for mode in ("draw", "mean"):
        with attention_mode(model, mode):
            outputs = entry.run(model, x, torch.ones(B, T, dtype=torch.long))
        for t in range(T - 1):
            (grad,) = torch.autograd.grad(outputs[:, t].square().sum(), x, retain_graph=True)
            assert (grad[:, t + 1 :] == 0).all()
            assert (grad[:, : t + 1] != 0).any()


@pytest.mark.parametrize("family", STOCHASTIC)
@pytest.mark.parametrize("name", MODELS)
def test_padding_has_no_say_in_outputs_or_kl(name, family):
    """The gradient of valid outputs, and of the KL of an example, is exactly 0 in what is padding."""
    entry, mask = MODELS[name], padding()
    model = installed(entry, STOCHASTIC[family]())
    x = torch.randn(B, T, D, requires_grad=True)
    outputs = entry.run(model, x, mask)
    (grad,) = torch.autograd.grad(outputs[mask == 1].square().sum(), x, retain_graph=True)
    assert (grad[mask == 0] == 0).all()
    assert (grad[mask == 1] != 0).any()
    kl = bf.kl_divergence(model)
    assert kl.shape == (B,)
    assert torch.isfinite(kl).all()
    if kl.requires_grad:
        (grad,) = torch.autograd.grad(kl.sum(), x, allow_unused=True)
        assert grad is None or (grad[mask == 0] == 0).all()


@pytest.mark.parametrize("name", [name for name, entry in MODELS.items() if entry.two])
def test_padded_queries_of_cross_attention_cost_nothing(name):
    """And a pass without padding after one with it has all its queries."""
    entry, mask = MODELS[name], padding()
    model = installed(entry, Weibull(3.0, 0.5, 0.7))
    x = torch.randn(B, T, D)

    def costs(mask):
        crossed = []

        def see(family, given, draw):
            if family.forward_pass.is_cross:
                crossed.append(draw.kl)

        handles = [family.register_forward_hook(see) for family in families(model)]
        entry.run(model, x, mask)
        for handle in handles:
            handle.remove()
        assert crossed
        return torch.stack(crossed).sum(0)

    whole, padded = costs(torch.ones_like(mask)), costs(mask)
    entries = mask.sum(1).square() / mask.shape[1] ** 2  # queries by keys that are left
    assert (entries[0], entries[1] < 1) == (1, True)
    torch.testing.assert_close(padded[:1], whole[:1], rtol=0.2, atol=0)
    torch.testing.assert_close(padded[1:], whole[1:] * entries[1:], rtol=0.35, atol=0)
    torch.testing.assert_close(costs(torch.ones_like(mask)), whole, rtol=0.2, atol=0)


@pytest.mark.parametrize("name", [name for name, entry in MODELS.items() if not entry.two])
def test_a_padded_example_costs_what_it_costs_alone(name):
    entry, mask = MODELS[name], padding()
    model = installed(entry, Weibull(3.0, 0.5, 0.7))
    x = torch.randn(B, T, D)
    entry.run(model, x, mask)
    first = families(model)[0].forward_pass.kl_terms[0]  # of the first layer, which sees no draws
    entry.run(model, x[1:, :3], mask[1:, :3])
    torch.testing.assert_close(families(model)[0].forward_pass.kl_terms[0], first[1:], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("right", [True, False], ids=["right", "left"])
@pytest.mark.parametrize("name", MODELS)
def test_mean_mode_is_the_attention_of_the_model(name, right):
    entry, mask = MODELS[name], padding(right)
    if name == "torch causal" and not right:
        pytest.skip("a query without keys is not a number in torch, and so is everything after it")
    torch.manual_seed(0)
    model, x = entry.build().eval(), torch.randn(B, T, D)
    if hasattr(model, "set_attn_implementation"):
        model.set_attn_implementation("eager")
    expected = entry.run(model, x, mask)
    install(model, "weibull", prior="contextual")
    for context in (torch.enable_grad, torch.no_grad):  # without gradients torch's encoder has a fast path
        with context():
            outputs = entry.run(model, x, mask)
        torch.testing.assert_close(outputs[mask == 1], expected[mask == 1], rtol=1e-5, atol=1e-5)
        with context(), attention_mode(model, "draw"):
            assert not torch.allclose(entry.run(model, x, mask)[mask == 1], outputs[mask == 1], 0.0, 1e-6)


def test_vit():
    model, x = vit().eval(), torch.randn(B, 1, 4, 4)
    expected = model(x).last_hidden_state
    install(model, Weibull())
    torch.testing.assert_close(model(x).last_hidden_state, expected, rtol=1e-5, atol=1e-5)
    model.train()(x)
    assert bf.kl_divergence(model).shape == (B,)


@pytest.mark.parametrize("name", MODELS)
def test_uninstall_gives_back_the_very_same_model(name):
    entry, mask = MODELS[name], padding()
    model, x = entry.build().eval(), torch.randn(B, T, D)
    before = entry.run(model, x, mask)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    kinds = [(key, type(module), sorted(vars(module))) for key, module in model.named_modules()]
    configs = [module.config._attn_implementation for module in model.modules() if hasattr(module, "config")]
    install(model, "weibull", prior="contextual")
    assert set(state) < set(model.state_dict())
    assert len(families(model)) == len({id(f.contextual.inner.weight) for f in families(model)})
    entry.run(model.train(), x, mask)
    uninstall(model.eval())
    assert torch.equal(entry.run(model, x, mask), before)
    assert list(model.state_dict()) == list(state)
    assert all(torch.equal(model.state_dict()[key], value) for key, value in state.items())
    assert [(key, type(module), sorted(vars(module))) for key, module in model.named_modules()] == kinds
    assert [m.config._attn_implementation for m in model.modules() if hasattr(m, "config")] == configs
    for module in model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
        assert not module._forward_hooks_always_called


def test_own_models_go_there_and_back():
    model, x = Regressor(Encoder(dim=8, heads=2, depth=2, family=lambda: Softmax(0.1))).eval(), torch.randn(B, T, 1)
    before, state = model(x), set(model.state_dict())
    assert install(model, GaussianLogits()) is model
    assert torch.equal(model(x), before)
    uninstall(model)
    assert torch.equal(model(x), before)
    assert set(model.state_dict()) == state
    assert all(block.attention.family.dropout.p == 0.1 for block in model.encoder.blocks)
    assert isinstance(model.encoder.blocks[0].attention.family, Softmax)


def test_weibull_attention_in_bert_is_the_formula():
    """One layer, by hand, with the same noise: outputs of attention, and the KL entry by entry."""
    k, alpha, beta = 3.0, 0.5, 0.7
    torch.manual_seed(0)
    model = install(
        transformers.BertModel(bert_config(num_hidden_layers=1), add_pooling_layer=False), Weibull(k, alpha, beta)
    )
    own = model.encoder.layer[0].attention.self
    seen = []
    own.register_forward_hook(lambda module, args, out: seen.append((args[0], out[0])))
    ids, mask = torch.randint(1, V, (B, T)), padding()
    torch.manual_seed(1)
    model.train()(ids, attention_mask=mask)
    kl = bf.kl_divergence(model)

    ((x, found),) = seen
    q, key, v = (part(x).view(B, T, 2, 4).transpose(1, 2) for part in (own.query, own.key, own.value))
    phi = q @ key.transpose(2, 3) / math.sqrt(4)
    torch.manual_seed(1)
    noise = (-log_uniform_like(phi)).log()
    s = (phi + noise / k).exp() * mask[:, None, None, :]
    expected = (s / s.sum(-1, keepdim=True) @ v).transpose(1, 2).reshape(B, T, D)
    valid = mask == 1
    torch.testing.assert_close(found[valid], expected[valid], rtol=1e-5, atol=1e-6)

    cost = torch.zeros(B)
    for b, h, i, j in torch.cartesian_prod(*map(torch.arange, (B, 2, T, T))).tolist():
        if mask[b, i] and mask[b, j]:
            log_lambda = phi[b, h, i, j] - math.lgamma(1 + 1 / k)
            cost[b] += alpha * (EULER / k - log_lambda - math.log(beta)) + math.lgamma(alpha)
            cost[b] += beta * phi[b, h, i, j].exp() + math.log(k) - EULER - 1
    torch.testing.assert_close(kl, cost, rtol=1e-4, atol=1e-4)


def test_the_kl_of_a_model_is_the_sum_over_its_layers():
    model, seen = installed(MODELS["gpt2"], Weibull()), []
    for family in families(model):
        family.register_forward_hook(lambda module, args, draw: seen.append(draw.kl))
    for _ in range(2):  # a new pass starts anew
        seen.clear()
        model(torch.randint(V, (B, T)))
        assert len(seen) == 2
        torch.testing.assert_close(bf.kl_divergence(model), seen[0] + seen[1])
    model.eval()(torch.randint(V, (B, T)))
    assert torch.equal(bf.kl_divergence(model), torch.zeros(B))
    with torch.no_grad(), attention_mode(model, "draw"):
        model(torch.randint(V, (B, T)))
    assert (bf.kl_divergence(model) > 0).all()


def test_the_kl_of_shared_layers_is_that_of_every_call():
    config = transformers.AlbertConfig(
        vocab_size=V, embedding_size=4, hidden_size=D, num_hidden_layers=3, num_attention_heads=2, intermediate_size=12
    )
    model = install(transformers.AlbertForSequenceClassification(config), Weibull()).train()
    (family,) = families(model)
    for call in (model, model.forward, model.forward, model):  # PEFT may call `forward`, which passes hooks by
        call(torch.randint(V, (B, T)))
        assert len(family.forward_pass.kl_terms) == 3
        torch.testing.assert_close(bf.kl_divergence(model), sum(family.forward_pass.kl_terms))


def test_random_weights_and_attention_share_one_bound():
    model = bf.convert(Regressor(Encoder(dim=8, heads=2, family=Weibull)), "gaussian")
    model(torch.randn(B, T, 1))
    own = bf.attention.attention_kl(model)
    with pytest.raises(ValueError, match="num_data must be given for a model with random weights and stochastic"):
        bf.kl_divergence(model)
    with pytest.raises(ValueError, match="num_data must be the number of training examples, at least 1; got 0"):
        bf.kl_divergence(model, num_data=0)
    few, many = kl_divergence(model, num_data=10), kl_divergence(model, num_data=10**9)
    assert few.shape == (B,)
    torch.testing.assert_close(many, own, rtol=1e-4, atol=1e-4)
    plain = bf.convert(nn.Linear(3, 2), "gaussian")
    plain(torch.randn(2, 3))
    torch.testing.assert_close(kl_divergence(plain, num_data=10), kl_divergence(plain) / 10)


def test_grouped_heads_have_a_prior_of_their_keys():
    """Llama with two heads and one key head: α is that of the shared keys, and its width that of a head."""
    torch.manual_seed(0)
    model = install(transformers.LlamaModel(llama_config()), "weibull", prior="contextual", hidden=3).train()
    shapes = {tuple(f.contextual.inner.weight.shape) for f in families(model)}
    assert shapes == {(3, 4)}
    given = []
    families(model)[0].register_forward_pre_hook(lambda module, args: given.append(args))
    model(torch.randint(V, (B, T)))
    ((logits, mask, keys),) = given
    assert logits.shape == (B, 2, T, T)
    assert keys.shape == (B, 2, T, 4)
    assert torch.equal(keys[:, 0], keys[:, 1])
    assert torch.equal(mask[0, 0], torch.ones(T, T, dtype=torch.bool).tril())
    bf.kl_divergence(model).sum().backward()
    assert all(f.contextual.inner.weight.grad.abs().sum() > 0 for f in families(model))


def test_each_group_of_heads_has_its_own_keys():
    config = llama_config(hidden_size=16, num_attention_heads=4, num_key_value_heads=2)
    model, ids = transformers.LlamaModel(config).eval(), torch.randint(V, (B, T))
    expected = model(ids).last_hidden_state
    torch.testing.assert_close(install(model)(ids).last_hidden_state, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["bert", "torch"])
def test_families_are_saved_with_the_model(name):
    entry, mask, x = MODELS[name], padding(), torch.randn(B, T, D)
    model = installed(entry, Weibull(contextual=Contextual(1, 3)))
    assert families(model)[0].contextual.inner.weight.shape == (3, 4)  # the width of the heads, whatever was given
    torch.manual_seed(5)
    other = install(entry.build(), Weibull(contextual=Contextual(1, 3))).train()
    other.load_state_dict(model.state_dict())
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), other]
    found = []
    for one in [model, *copies]:
        torch.manual_seed(2)
        found.append((entry.run(one, x, mask), bf.kl_divergence(one)))
    for outputs, kl in found[1:]:
        assert torch.equal(outputs, found[0][0])
        assert torch.equal(kl, found[0][1])
    before = families(copies[0])[0].contextual.inner.weight.clone()
    nn.init.zeros_(families(model)[0].contextual.inner.weight)
    assert torch.equal(families(copies[0])[0].contextual.inner.weight, before)
    uninstall(copies[0])


def test_some_layers_by_name():
    model = transformers.GPT2Model(gpt2_config())
    ids = torch.randint(V, (B, T))
    expected = model.eval()(ids).last_hidden_state
    install(model, Weibull(), "h.1.*")
    torch.testing.assert_close(model(ids).last_hidden_state, expected, rtol=1e-5, atol=1e-5)
    assert len(families(model)) == 1
    assert hasattr(model.h[1].attn, "attention_family")
    model.train()(ids)
    assert (bf.kl_divergence(model) > 0).all()
    uninstall(model)
    with pytest.raises(ValueError, match="attention module in names"):
        install(model, Weibull(), "encoder.*")


def test_a_template_is_copied_for_each_layer():
    template = GaussianLogits(Learned(0.3, 2))
    model = installed(MODELS["bert"], template)
    mine = [f.spread.rho for f in families(model)]
    assert len({id(rho) for rho in [*mine, template.spread.rho]}) == 3
    with pytest.raises(ValueError, match="heads of a learned spread must be 1 or those of the model; got 3, and the"):
        install(MODELS["bert"].build(), GaussianLogits(Learned(0.3, 3)))


class Unknown(nn.MultiheadAttention):
    pass


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: install(nn.Linear(2, 2)), "or MultiHeadAttention of bayesformer; Linear has none"),
        (lambda: install(Unknown(4, 2)), "MultiHeadAttention of bayesformer; Unknown has none"),
        (lambda: uninstall(nn.Linear(2, 2)), "stochastic attention that was installed; Linear has none"),
        (
            lambda: install(install(MODELS["bert"].build())),
            "must not have stochastic attention installed; BertModel has",
        ),
        (lambda: install(MODELS["bert"].build(), Weibull(dropout=0.1)), "dropout must be left out.*; got 0.1"),
        (
            lambda: install(MODELS["bert"].build(), Weibull(), k=3.0),
            "settings must be left out unless family is a name; got k",
        ),
        (lambda: install(nn.MultiheadAttention(4, 2, add_zero_attn=True)), "add_zero_attn must be False .*; got True"),
    ],
)
def test_errors_name_argument_rule_and_value(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_what_would_pass_families_by_is_an_error():
    model, ids = installed(MODELS["bert"], Weibull()), torch.randint(V, (B, T))
    model.set_attn_implementation("eager")
    with pytest.raises(
        RuntimeError, match="must stay 'bayesformer' while stochastic attention is installed; got 'eager'"
    ):
        model(ids)


SIZES = {"hidden_size": D, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 12}


def test_a_mask_must_be_registered_with_the_function():
    """The trap the library is there to avoid: without a mask function the future is seen, and nobody says so."""
    from transformers import AttentionMaskInterface

    model, x = installed(MODELS["gpt2"], Weibull()), torch.randn(B, T, D, requires_grad=True)
    table = AttentionMaskInterface._global_mapping
    saved = table.pop("bayesformer")
    hooks = model._forward_pre_hooks.copy()
    model._forward_pre_hooks.clear()  # a pass registers the name anew
    try:
        (grad,) = torch.autograd.grad(model(inputs_embeds=x).last_hidden_state[:, 0].sum(), x)
        assert (grad[:, 1:] != 0).any()
    finally:
        table["bayesformer"] = saved
        model._forward_pre_hooks.update(hooks)


class Leaky(AttentionFamily):
    """Forgets the mask."""

    def draw(self, logits, mask, keys):
        return Weibull().draw(logits, torch.ones_like(mask), keys)


def test_a_family_that_forgets_the_mask_is_caught():
    entry = MODELS["llama"]
    x = torch.randn(B, T, D, requires_grad=True)
    outputs = entry.run(installed(entry, Leaky()), x, torch.ones(B, T, dtype=torch.long))
    (grad,) = torch.autograd.grad(outputs[:, 0].sum(), x)
    assert (grad[:, 1:] != 0).any()

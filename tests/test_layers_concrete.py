"""Concrete dropout: the relaxed mask, its mean and gradient, its regulariser, and where the sites are."""

import copy
import math

import numpy as np
import pytest
import torch
from scipy import special
from torch import nn
from torch.func import functional_call, grad, vmap

from bayesformer.attention import Softmax
from bayesformer.layers import ConcreteSite, convert, convert_concrete, kl_divergence
from bayesformer.model.calling import apply
from bayesformer.model.randomness import find_randomness
from bayesformer.model.skeleton import Skeleton
from bayesformer.model.space import Space
from bayesformer.model.starting import draw_anew
from bayesformer.models import Encoder, Regressor
from tests.laws import assert_law, assert_mean
from tests.nets import Mlp


def hugging_face(name):
    """A small model of transformers with its inputs."""
    transformers = pytest.importorskip("transformers")
    ids = torch.randint(2, 30, (4, 9))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    small = {"vocab_size": 30, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    if name == "bert":
        config = transformers.BertConfig(**small, intermediate_size=32, num_labels=3, max_position_embeddings=16)
        return transformers.BertForSequenceClassification(config).eval(), inputs
    config = transformers.GPT2Config(vocab_size=30, n_positions=16, n_embd=16, n_layer=2, n_head=2)  # tied embeddings
    return transformers.GPT2LMHeadModel(config).eval(), inputs


def draws(model, inputs):
    """Whether a pass draws random numbers in the mode the model is in."""
    with torch.no_grad():
        return find_randomness(model, lambda: apply(model, inputs)).kind != "none"


def mask_moment(p, power, t=0.1):
    """E[((1 - z) / (1 - p))^power], by the midpoint rule in u."""
    u = (np.arange(1_000_000) + 0.5) / 1_000_000
    kept = special.expit(-(special.logit(p) + special.logit(u)) / t)
    return ((kept / (1 - p)) ** power).mean()


def sites(model):
    return {name: m for name, m in model.named_modules() if isinstance(m, ConcreteSite)}


@pytest.mark.parametrize("p", [0.1, 0.3, 0.5, 0.8])
def test_mask_is_the_relaxed_coin(p):
    ones = torch.ones(100_000, dtype=torch.float64)
    warm = ConcreteSite(p, temperature=0.8)  # at 0.1 many are 1 to all digits
    kept = (warm(ones).detach() * (1 - p)).clamp_max(1)
    # 1 - z < c exactly when logit(1 - u) < t logit c + logit p
    assert_law(kept, lambda c: special.expit(0.8 * special.logit(c) + special.logit(p)))
    masks = ConcreteSite(p)(ones).detach()
    assert_mean((masks * (1 - p) < 0.5).double(), p)
    assert_mean(masks, mask_moment(p, 1))
    assert_mean(masks.square(), mask_moment(p, 2))
    if p <= 0.5:
        assert abs(mask_moment(p, 1) - 1) < 0.002
    assert mask_moment(0.5, 1) == pytest.approx(1, abs=1e-12)


def test_a_cold_mask_is_ordinary_dropout():
    masks = ConcreteSite(0.3, temperature=1e-5)(torch.ones(50_000)).detach()
    assert_mean(masks, 1.0)
    on = masks > 0.5
    assert_mean(on.float(), 0.7)
    assert ((masks - 1 / 0.7).abs() < 1e-3)[on].float().mean() > 0.999
    assert (masks[~on] < 1e-3).float().mean() > 0.999


def test_no_rate_is_the_identity_and_so_is_eval_mode():
    drop, x = ConcreteSite(0.3), torch.randn(4, 5)
    assert not torch.equal(drop(x), x)
    assert torch.equal(drop.eval()(x), x)
    drop.train().logit.data.fill_(-math.inf)
    assert torch.equal(drop(x), x)
    drop.logit.data.fill_(-30.0)
    torch.testing.assert_close(drop(x), x)


@pytest.mark.parametrize("p", [0.1, 0.4])
def test_gradient_in_the_rate_is_unbiased(p):
    drop = ConcreteSite(p).double()
    logits = drop.logit.detach().expand(200_000, 1)
    x = torch.ones(1, dtype=torch.float64)

    def value(logit):
        return functional_call(drop, {"logit": logit}, (x,)).square().sum()

    grads = vmap(grad(value), randomness="different")(logits)
    h = 1e-3
    up, down = (special.expit(special.logit(p) + sign * h) for sign in (1, -1))
    assert_mean(grads[:, 0], (mask_moment(up, 2) - mask_moment(down, 2)) / (2 * h))


def test_regulariser_by_hand():
    layer = nn.Linear(2, 3, bias=False)
    layer.weight.data = torch.tensor([[1.0, 2.0], [0.0, -1.0], [3.0, 0.0]])  # squares sum to 15
    model = convert_concrete(layer, rate=0.2, lengthscale=0.5)
    entropy = -0.2 * math.log(0.2) - 0.8 * math.log(0.8)
    # the paper's form, l² (1 - p)/2 ‖M‖² - K H(p), with M = W / (1 - p)
    paper = 0.25 * 0.8 / 2 * (15 / 0.8**2) - 2 * entropy
    assert kl_divergence(model).item() == pytest.approx(paper, rel=1e-6)
    assert kl_divergence(model).item() == pytest.approx(0.25 * 15 / (2 * 0.8) - 2 * entropy, rel=1e-6)


def test_regulariser_is_a_kl_to_its_prior_up_to_a_constant():
    """q(w_k) = p N(0, s²) + (1 - p) N(m_k, s²) against N(0, 1/l²), by quadrature, s small: the derivative in p."""
    s, scale, m = 0.02, 1.0, 0.7  # one input, one output, M = m

    def kl(p):
        x = np.linspace(-1, 2, 600_001)
        q = p * np.exp(-0.5 * (x / s) ** 2) + (1 - p) * np.exp(-0.5 * ((x - m) / s) ** 2)
        q /= s * math.sqrt(2 * math.pi)
        safe = np.maximum(q, 1e-300)
        log_prior = -0.5 * (x / scale) ** 2 - math.log(scale * math.sqrt(2 * math.pi))
        return (q * (np.log(safe) - log_prior)).sum() * (x[1] - x[0])

    def ours(p):
        drop = ConcreteSite(p).double()
        drop.logit.data.fill_(special.logit(p))  # not through float32
        return drop.regulariser(torch.tensor([[m * (1 - p)]], dtype=torch.float64), 1).item()  # W = M (1 - p)

    for p, q in [(0.1, 0.3), (0.3, 0.6)]:
        assert ours(q) - ours(p) == pytest.approx(kl(q) - kl(p), rel=1e-5)


def test_regulariser_gradcheck():
    model = convert_concrete(nn.Linear(4, 3).double())
    leaves = tuple(p.detach().requires_grad_() for p in (model.concrete.logit, model.weight))

    def value(logit, weight):
        return kl_divergence(model, {"concrete.logit": logit, "weight": weight})

    assert torch.autograd.gradcheck(value, leaves)
    assert value(*leaves).shape == ()


def test_rates_start_in_their_range():
    rates = torch.cat([ConcreteSite((0.1, 0.5)).rate.detach() for _ in range(2000)])
    assert_law((rates - 0.1) / 0.4, "uniform")
    assert ConcreteSite(0.25).rate.item() == pytest.approx(0.25)
    assert repr(ConcreteSite(0.25)) == "ConcreteSite(rate=0.25, temperature=0.1)"


# Sites


def test_our_model_has_a_site_before_every_linear_layer_and_on_attention():
    model = Regressor(Encoder(dim=8, depth=2, heads=2))
    before, x = copy.deepcopy(model.state_dict()), torch.randn(3, 5, 1)
    concrete = convert_concrete(model)
    attention = [f"encoder.blocks.{i}.attention" for i in range(2)]
    linear = [n for n, m in model.named_modules() if isinstance(m, nn.Linear)]
    assert set(sites(concrete)) == {f"{n}.concrete" for n in linear} | {f"{n}.family.dropout" for n in attention}
    assert not sites(model)
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert type(concrete) is Regressor
    assert torch.equal(concrete.eval()(x), model.eval()(x))
    assert draws(concrete.train(), x)


@pytest.mark.parametrize("name", ["regressor", "encoder layer", "bert", "gpt2"])
def test_every_site_acts_and_owes(name):
    if name == "regressor":
        model, x = Regressor(Encoder(dim=8, heads=2)), torch.randn(3, 5, 1)
    elif name == "encoder layer":
        model, x = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), torch.randn(3, 5, 8)
    else:
        model, x = hugging_face(name)
    concrete = convert_concrete(model.eval(), rate=0.3)
    assert torch.equal(apply(concrete, x), apply(model, x))  # eval mode
    for path, site in sites(concrete).items():
        site.train()
        assert draws(concrete, x), path
        site.eval()
    kl = kl_divergence(concrete)
    grads = torch.autograd.grad(kl, [site.logit for site in sites(concrete).values()])
    assert all(g != 0 for g in grads)
    naive = 0.0
    for module in model.modules():
        if isinstance(module, nn.MultiheadAttention):
            naive += owed(module.in_proj_weight, 24)
        elif isinstance(module, Softmax):
            naive += owed(torch.zeros(1), 5)  # entropy only, five keys
        elif type(module).__name__ == "Conv1D":
            naive += owed(module.weight, module.weight.shape[0])
        elif isinstance(module, nn.Linear) and "NonDynamically" not in type(module).__name__:
            naive += owed(module.weight, module.in_features)
    assert kl.item() == pytest.approx(naive, rel=1e-5, abs=1e-4)


def owed(weight, width, p=0.3):
    entropy = -p * math.log(p) - (1 - p) * math.log(1 - p)
    return weight.square().sum().item() / (2 * (1 - p)) - width * entropy


def test_unpacked_projections_owe_too():
    model = convert_concrete(nn.MultiheadAttention(4, 1, kdim=3, vdim=5), rate=0.3).train()
    parts = [model.q_proj_weight, model.k_proj_weight, model.v_proj_weight]
    assert kl_divergence(model).item() == pytest.approx(sum(owed(w, w.shape[1]) for w in parts), abs=1e-4)
    q, k, v = torch.randn(2, 1, 4), torch.randn(3, 1, 3), torch.randn(3, 1, 5)
    torch.manual_seed(0)
    positional = model(q, k, v)[0]
    torch.manual_seed(0)
    assert torch.equal(positional, model(query=q, key=k, value=v)[0])
    assert not torch.equal(positional, model(q, k, v)[0])


def test_hidden_keys_stay_hidden():
    family = convert_concrete(Regressor(Encoder(dim=4, causal=True))).encoder.blocks[0].attention.family
    mask = torch.ones(1, 1, 6, 6, dtype=torch.bool).tril()
    weights = family(torch.randn(2, 1, 6, 6), mask).weights
    assert (weights[~mask.expand_as(weights)] == 0).all()


def test_names_and_attention_choose_sites():
    model = Regressor(Encoder(dim=4))
    chosen = sites(convert_concrete(model, names="*.attention.*", attention=False))
    assert set(chosen) == {f"encoder.blocks.0.attention.{n}.concrete" for n in ("query", "key", "value", "out")}
    assert all(p.dtype is torch.float64 for p in convert_concrete(model.double()).parameters())


def test_copies_shells_and_fresh_starts():
    model = convert_concrete(Mlp())
    shell, x = Skeleton(model, Space.of(model)).shell(), torch.randn(4, 3)
    values = []
    for module in (shell.module, copy.deepcopy(model), model):
        module.train()
        torch.manual_seed(1)
        (module(x).sum() + kl_divergence(module)).backward()
        values.append(torch.stack([site.logit.grad for site in sites(module).values()]))
    torch.testing.assert_close(values[0], values[1])
    torch.testing.assert_close(values[0], values[2])
    rates = {name: site.logit.clone() for name, site in sites(shell.module).items()}
    draw_anew(shell, frozenset(shell.space.names))
    assert all(not torch.equal(rates[name], site.logit) for name, site in sites(shell.module).items())


def test_vmap_over_its_parameters():
    model, x = convert_concrete(Mlp()).train(), torch.randn(4, 3)
    many = {name: torch.randn(3, *p.shape) for name, p in model.named_parameters()}
    torch.manual_seed(2)
    outputs, kl = vmap(lambda p: (functional_call(model, p, (x,)), kl_divergence(model, p)), randomness="same")(many)
    for row in range(3):
        torch.manual_seed(2)
        one = {name: value[row] for name, value in many.items()}
        torch.testing.assert_close(outputs[row], functional_call(model, one, (x,)), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(kl[row], kl_divergence(model, one))


def test_variational_weights_and_concrete_sites_owe_together():
    model = nn.ModuleList([convert(Mlp()), convert_concrete(Mlp())])
    torch.testing.assert_close(kl_divergence(model), kl_divergence(model[0]) + kl_divergence(model[1]))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: ConcreteSite(0.0), "rate must lie strictly between 0 and 1, .*; got 0.0"),
        (lambda: ConcreteSite((0.5, 0.1)), r"or be a range of such; got \(0.5, 0.1\)"),
        (lambda: ConcreteSite(0.1, temperature=0.0), "temperature must be positive; got 0.0"),
        (lambda: ConcreteSite(0.1, lengthscale=-1.0), "lengthscale must be positive; got -1.0"),
        (
            lambda: convert_concrete(nn.LayerNorm(3)),
            "must have a linear layer whose weight is learned, .*; LayerNorm has none",
        ),
        (lambda: convert_concrete(Mlp(), names="nat.0"), "'nat.0'. Did you mean 'net.0'"),
    ],
)
def test_errors_name_argument_rule_and_value(build, message):
    with pytest.raises(ValueError, match=message):
        build()


def test_only_layers_whose_weight_is_learned_have_a_site_and_a_regulariser():
    model = Mlp()
    model.net[0].weight.requires_grad_(False)
    dropped = convert_concrete(model, rate=0.5, lengthscale=0.1)
    assert list(sites(dropped)) == ["net.3.concrete"]
    linear = dropped.net[3]
    expected = 0.5 * 0.1**2 * 2 * linear.weight.square().sum() - linear.in_features * math.log(2)
    torch.testing.assert_close(kl_divergence(dropped), expected)
    (kl_divergence(dropped) + dropped.train()(torch.randn(4, 3)).sum()).backward()
    assert dropped.net[0].weight.grad is None


@pytest.mark.parametrize("training", [True, False])
def test_a_padded_encoder_drops_without_nested_tensors(training):
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2)
    x, padding = torch.randn(3, 5, 8), torch.zeros(3, 5, dtype=torch.bool)
    padding[0, 3:] = True
    dropped = convert_concrete(model, rate=0.3).train(training)
    with torch.no_grad():
        outputs = dropped(x, src_key_padding_mask=padding)
    plain = model.eval()(x, src_key_padding_mask=padding).detach()  # with gradients: no nested tensors there either
    assert model.use_nested_tensor  # the model given is left as it is
    if training:
        assert not torch.equal(outputs, dropped(x, src_key_padding_mask=padding))
    else:
        torch.testing.assert_close(outputs[~padding], plain[~padding])

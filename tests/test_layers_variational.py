"""Converting models and back, forward passes under draws, the KL, and life inside torch.func and the flat loop."""

import copy
import math
import pickle
import warnings

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.nn.functional import softplus

from bayesformer.attention import AttentionFamily, attention_kl, masked_softmax
from bayesformer.dropout import set_dropout
from bayesformer.layers import FAMILIES, Variational, convert, kl_divergence, revert
from bayesformer.layers.families import Gaussian as GaussianFamily
from bayesformer.layers.families import StudentT, sampled_kl
from bayesformer.likelihoods import Gaussian
from bayesformer.models import Encoder, Regressor, Tagger, VisionTransformer
from bayesformer.network import FlatModel, Layout, apply, is_stochastic, reinitialise, trainable
from bayesformer.priors import distributions as laws
from tests.laws import assert_mean
from tests.nets import Keyword, Mlp, Normed, Positional, Tied
from tests.test_network import hugging_face

PRIOR = {"cauchy": "cauchy(0, 1)"}


def regressor():
    return Regressor(Encoder(dim=8, depth=2, heads=2, causal=True))


MODELS = {
    "regressor": lambda: (regressor(), torch.randn(3, 5, 1)),
    "tagger": lambda: (Tagger(Encoder(dim=8, positions="learned", max_length=6), 11, 4), torch.randint(11, (3, 6))),
    "vit": lambda: (VisionTransformer(8, 4, 1, 3, dim=8), torch.randn(2, 1, 8, 8)),
    "encoder layer": lambda: (
        nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True),
        torch.randn(3, 5, 8),
    ),
    "convolution": lambda: (nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(72, 2)), torch.randn(3, 1, 8, 8)),
    "lstm": lambda: (nn.LSTM(3, 4), torch.randn(5, 2, 3)),
    "tied": lambda: (Tied(), torch.randint(5, (3, 4))),
    "averages": lambda: (Normed().eval(), torch.randn(4, 3)),
    "keyword": lambda: (Keyword(), {"input_ids": torch.randint(7, (3, 4)), "attention_mask": torch.ones(3, 4)}),
    "positional": lambda: (Positional(), (torch.randn(3, 2), torch.randn(3, 4))),
    "bert": lambda: _inputs(hugging_face("bert")),
    "gpt2": lambda: _inputs(hugging_face("gpt2")),
}


def _inputs(case):
    model, batch = case
    return model, batch.inputs


def converted(model, family="gaussian", **options):
    return convert(model, family, options.pop("prior", PRIOR.get(family, "normal(0, 1)")), **options)


@pytest.mark.parametrize("name", MODELS)
def test_converting_and_converting_back_changes_no_bit(name):
    model, x = MODELS[name]()
    before, expected = copy.deepcopy(model.state_dict()), apply(model, x)
    variational = converted(model)
    apply(variational, x)
    plain = revert(variational)
    assert type(plain) is type(model)
    assert torch.equal(apply(plain, x), expected)
    assert list(plain.state_dict()) == list(before)
    for state in (plain.state_dict(), model.state_dict()):
        assert all(torch.equal(state[key], value) for key, value in before.items())
    variational.mean_mode = True
    assert torch.equal(apply(variational, x), expected)
    assert [name for name, _ in plain.named_parameters()] == [name for name, _ in model.named_parameters()]


@pytest.mark.parametrize("options", [{"local": False}, {"local": True}, {"local": False, "flipout": True}])
@pytest.mark.parametrize("name", MODELS)
def test_no_scale_is_exactly_the_point_model(name, options):
    model, x = MODELS[name]()
    variational = converted(model, rho=-math.inf, **options)
    expected, outputs = apply(model, x), apply(variational, x)
    if name == "gpt2":  # the Conv1D of Hugging Face adds its bias in another order
        torch.testing.assert_close(outputs, expected, atol=1e-6, rtol=0)
    else:
        assert torch.equal(outputs, expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_shrinks_to_the_point_model(family):
    model, x = MODELS["regressor"]()
    expected = model(x)
    assert torch.equal(converted(model, family, rho=-math.inf)(x), expected)
    gaps = [(converted(model, family, rho=rho)(x) - expected).abs().median().item() for rho in (-20, -4)]
    assert 0 < gaps[0] < 1e-4 < gaps[1]


@pytest.mark.parametrize("local", [True, False])
@pytest.mark.parametrize("mode", ["train", "eval", "no grad"])
@pytest.mark.parametrize("name", ["regressor", "encoder layer", "gpt2"])
def test_every_parameter_is_random_however_it_is_used(name, mode, local):
    """The fast path of nn.TransformerEncoderLayer and packed attention take weights past the module's forward."""
    model, x = MODELS[name]()
    model.train(mode == "train")
    set_dropout(model, 0.0)
    assert torch.equal(apply(model, x), apply(model, x))
    for parameter in trainable(model):
        if "key.bias" in parameter:  # adds the same to all of a query's logits
            continue
        variational = converted(model, names=parameter, rho=0.0, local=local).train(mode == "train")
        with torch.set_grad_enabled(mode != "no grad"):
            assert not torch.equal(apply(variational, x), apply(variational, x)), parameter


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", ["regressor", "encoder layer", "tied", "gpt2"])
def test_a_forward_pass_is_the_plain_model_at_one_draw(name, family):
    model, x = MODELS[name]()
    model = model.double()  # where weights lie in memory decides the last bits of a product
    x = x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x
    variational = converted(model, family, rho=-3.0, local=False)
    torch.manual_seed(4)
    outputs = apply(variational, x)
    torch.manual_seed(4)
    weights = {key: value[0] for key, value in variational.sample().items()}
    args, kwargs = ((), dict(x)) if isinstance(x, dict) else ((x,), {})
    expected = functional_call(model, weights, args, kwargs)
    torch.testing.assert_close(outputs, getattr(expected, "logits", expected), rtol=1e-9, atol=1e-9)


def test_naive_twin_under_one_seed():
    model = Mlp()
    variational = converted(model, rho=-2.0, local=False)
    torch.manual_seed(1)
    drawn = variational(torch.ones(2, 3))
    torch.manual_seed(1)
    noise, start, twin = torch.randn(variational.layout.size), 0, copy.deepcopy(model)
    for p in twin.parameters():
        part = slice(start, start := start + p.numel())
        p.data += (softplus(variational.rho[part]) * noise[part]).view_as(p)
    torch.testing.assert_close(drawn, twin(torch.ones(2, 3)))
    assert torch.equal(drawn[0], drawn[1])


def test_sample_has_the_law_of_the_posterior():
    variational = converted(nn.Linear(3, 2).double(), rho=0.5)
    draws, scales = variational.sample(20_000), variational.scales()
    for name, p in variational.model.named_parameters():
        assert draws[name].shape == (20_000, *p.shape)
        assert_mean(draws[name], p.detach())
        assert_mean((draws[name] - p.detach()).square(), scales[name].detach().square())


def test_scales_start_where_they_are_told_to():
    variational = converted(regressor(), rho=-7.0)
    assert_mean(variational.rho.detach(), -7.0)
    assert_mean((variational.rho.detach() + 7).square(), 0.01**2)
    student = converted(regressor(), "student_t", df=9.0)
    assert_mean(student.raw_df.detach(), math.log(math.expm1(7.0)))


def test_only_the_named_weights_are_random():
    model, x = MODELS["regressor"]()
    variational = converted(model, names=["*attention.*", "projection.bias"], rho=0.0)
    assert set(variational.scales()) == {n for n in trainable(model) if ".attention." in n or n == "projection.bias"}
    assert len(variational.rho) == sum(p.numel() for p in variational.sample().values())
    names = {"rho", *(f"model.{name}" for name in trainable(model))}
    assert {name for name, _ in variational.named_parameters()} == names
    variational(x).sum().backward()
    assert all(p.grad is not None for p in variational.parameters())


def test_frozen_weights_stay_points():
    model = Mlp()
    model.net[0].requires_grad_(False)
    assert list(converted(model).scales()) == ["net.3.weight", "net.3.bias"]
    with pytest.raises(ValueError, match=r"unknown trainable parameter in names: 'net.0.weight'"):
        converted(model, names="net.0.weight")


def test_tied_weights_are_one_draw_and_owe_once():
    model, x = MODELS["tied"]()
    variational = converted(model, rho=0.0)  # local would draw the head apart from the embedding
    assert list(variational.scales()) == ["embed.weight"]
    torch.manual_seed(2)
    outputs = variational(x)
    torch.manual_seed(2)
    weight = variational.sample()["embed.weight"][0]
    torch.testing.assert_close(outputs, 2 * torch.tanh(weight[x]) @ weight.T)
    torch.testing.assert_close(kl_divergence(variational), naive_kl(variational, laws.Normal(0, 1)))


def test_a_tied_bias_is_no_part_of_a_local_draw():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].bias = model[0].bias
    variational = converted(model, rho=0.0)
    assert [name for _, name, _ in variational._layers] == []
    plain = converted(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), rho=0.0)
    assert [name for _, name, _ in plain._layers] == ["0.weight", "1.weight"]


def test_the_kl_of_attention_passes_through():
    class Noisy(AttentionFamily):
        def draw(self, logits, mask, keys):
            return masked_softmax(logits, mask), torch.full((len(logits),), 2.0)

    variational = converted(Regressor(Encoder(8, depth=3, family=Noisy)), local=False)
    variational(torch.randn(4, 5, 1))
    assert attention_kl(variational).tolist() == [6.0] * 4


# The KL


def naive_kl(variational, *priors):
    """Closed Gaussian KL, weight by weight, in the order of the parameters."""
    total = 0.0
    given = iter(priors * len(variational.layout.names) if len(priors) == 1 else priors)
    scales = variational.scales()
    for name, p in variational.model.named_parameters():
        prior = next(given)
        s2, s02 = scales[name].square(), prior.scale**2
        total = total + 0.5 * ((s2 + (p - prior.loc).square()) / s02 + math.log(s02) - s2.log() - 1).sum()
    return total


def test_kl_is_the_sum_over_groups():
    model = Mlp()
    prior = {"net.0.*": laws.Normal(0, 0.3), "*.bias": laws.Normal(1, 2), "*": "normal(0, 1)"}
    variational = converted(model, prior=prior, rho=-1.0)
    first, last = laws.Normal(0, 0.3), [laws.Normal(0, 1), laws.Normal(1, 2)]
    expected = naive_kl(variational, first, first, *last)
    torch.testing.assert_close(kl_divergence(variational), expected)
    assert [run.prior for run in variational.runs] == [first, *last]  # neighbours with one law are one stretch
    ours = torch.autograd.grad(kl_divergence(variational), list(variational.parameters()))
    theirs = torch.autograd.grad(expected, list(variational.parameters()))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)


def test_kl_is_zero_at_the_prior():
    model = nn.Linear(4, 3)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    variational = converted(model.double(), prior="normal(0, 0.5)", rho=math.log(math.expm1(0.5)))
    variational.rho.data.fill_(math.log(math.expm1(0.5)))
    assert kl_divergence(variational).item() == pytest.approx(0, abs=1e-14)


@pytest.mark.parametrize("local", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_an_open_kl_comes_from_the_draw_of_the_last_forward_pass(family, local):
    model, x = MODELS["regressor"]()
    prior = laws.StudentT(4, 0, 0.5)
    variational = converted(model, family, prior=prior, rho=-2.0, local=local)
    torch.manual_seed(6)
    variational(x)
    value = kl_divergence(variational)
    torch.manual_seed(6)
    posterior = variational.posterior()
    torch.testing.assert_close(value, sampled_kl(posterior, prior, posterior.noise()).sum())
    assert torch.equal(value, kl_divergence(variational))
    variational(x)
    assert not torch.equal(value, kl_divergence(variational))
    grads = torch.autograd.grad(kl_divergence(variational), list(variational.parameters()))
    assert all((grad != 0).any() for grad in grads)


def test_draws_made_without_gradients_are_not_used_where_gradients_are_wanted():
    variational = converted(Mlp(), "student_t", prior="laplace(0, 1)")
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            variational(torch.randn(2, 3))
            quiet = kl_divergence(variational)
            assert torch.equal(quiet, kl_divergence(variational))
        assert not torch.equal(quiet, kl_divergence(variational))
        (direct,) = torch.autograd.grad(kl_divergence(variational), variational.raw_df, retain_graph=True)
        q = variational.posterior()
        noise = variational._kept.noise
        assert noise.requires_grad
        (expected,) = torch.autograd.grad(sampled_kl(q, laws.Laplace(0, 1), noise).sum(), variational.raw_df)
        torch.testing.assert_close(direct, expected)


def test_kl_of_a_part_of_a_larger_model():
    inner = [converted(Mlp()), converted(Mlp(), "laplace")]
    whole = nn.ModuleDict({"a": inner[0], "b": inner[1], "c": nn.Linear(2, 2)})
    torch.testing.assert_close(kl_divergence(whole), inner[0].kl() + inner[1].kl())


def test_the_gradient_of_the_elbo_vanishes_at_an_exact_posterior():
    """Linear regression with orthogonal inputs: the exact posterior factorises, so it is the optimum."""
    n, noise, prior = 6, 0.5, 0.8
    x = torch.linalg.qr(torch.randn(n, 3, dtype=torch.float64))[0] * torch.tensor([1.0, 2.0, 3.0])
    y = torch.randn(n, 1, dtype=torch.float64)
    precision = x.square().sum(0) / noise**2 + 1 / prior**2
    model = nn.Linear(3, 1, bias=False).double()
    model.weight.data = ((x.T @ y).squeeze(1) / noise**2 / precision)[None]
    for options in ({"local": False}, {"local": True}, {"local": False, "flipout": True}):
        variational = convert(model, "gaussian", laws.Normal(0, prior), **options)
        variational.rho.data = torch.log(torch.expm1(precision.rsqrt()))

        def elbo(params, variational=variational):
            residual = y - functional_call(variational, params, (x,))
            fit = laws.Normal(0, noise).log_prob(residual).sum()
            return fit - kl_divergence(variational, params)

        at = {name: p.detach().expand(4000, *p.shape) for name, p in variational.named_parameters()}
        grads = vmap(grad(elbo), randomness="different")(at)
        for value in grads.values():
            assert_mean(value.flatten(1), 0.0)
        closer = {**at, "rho": at["rho"] + 0.3}
        assert (vmap(grad(elbo), randomness="different")(closer)["rho"].mean(0) < 0).all()


# torch.func, copies, and the flat loop


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")  # no batching rule for the Gamma
@pytest.mark.parametrize("local", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_vmap_over_its_parameters_equals_a_loop(family, local):
    variational = converted(Mlp(), family, prior="student_t(3, 0, 1)", local=local)
    x = torch.randn(4, 3)
    names = [name for name, _ in variational.named_parameters()]
    many = {name: torch.randn(3, *p.shape) for name, p in variational.named_parameters()}

    def run(params):
        return functional_call(variational, params, (x,)), kl_divergence(variational, params)

    if family == "student_t":  # draws cannot be matched: rejection sampling
        outputs, kl = vmap(run, randomness="different")(many)
        assert outputs.shape == (3, 4, 2)
        assert kl.shape == (3,)
        grads = vmap(grad(lambda p: run(p)[0].sum() + run(p)[1]), randomness="different")(many)
        assert all(torch.isfinite(grads[name]).all() for name in names)
        return
    torch.manual_seed(3)
    outputs, kl = vmap(run, randomness="same")(many)
    for row in range(3):
        torch.manual_seed(3)
        one, owed = run({name: value[row] for name, value in many.items()})
        torch.testing.assert_close(outputs[row], one, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(kl[row], owed, rtol=1e-5, atol=1e-5)
    own = kl_divergence(variational)  # not that of parameters it was only lent
    torch.testing.assert_close(own, variational.kl())
    assert not torch.isclose(own, kl).any()


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
@pytest.mark.parametrize("family", ["gaussian", "student_t"])
def test_a_draw_lent_to_other_parameters_is_not_kept(family):
    variational = converted(Mlp(), family, prior="laplace(0, 1)" if family == "student_t" else "logistic(0, 1)")
    lent = {name: p.detach().expand(3, *p.shape) for name, p in variational.named_parameters()}
    x = torch.randn(4, 3)
    vmap(lambda params: functional_call(variational, params, (x,)), randomness="different")(lent)
    assert kl_divergence(variational).shape == ()
    copy.deepcopy(variational)(x)


def test_the_models_given_and_taken_back_are_apart():
    model, x = MODELS["regressor"]()
    expected = model(x)
    variational = converted(model)
    plain = revert(variational)
    with torch.no_grad():
        for p in variational.parameters():
            p.add_(1.0)
    assert torch.equal(model(x), expected)
    assert torch.equal(plain(x), expected)


def test_copies_and_state_dicts_draw_alike_and_independently():
    model, x = MODELS["gpt2"]()
    variational = converted(model, "student_t", prior="laplace(0, 1)", rho=-2.0)
    apply(variational, x)
    kl_divergence(variational)
    other = converted(hugging_face("gpt2")[0], "student_t", prior="laplace(0, 1)")
    other.load_state_dict(variational.state_dict())
    for twin in (copy.deepcopy(variational), pickle.loads(pickle.dumps(variational)), other):
        outputs = []
        for one in (variational, twin):
            torch.manual_seed(8)
            outputs.append((apply(one, x), kl_divergence(one)))
        assert all(torch.equal(a, b) for a, b in zip(*outputs, strict=True))
        with torch.no_grad():
            for p in twin.parameters():
                p.zero_()
        torch.manual_seed(8)
        assert torch.equal(apply(variational, x), outputs[0][0])
        assert not torch.equal(apply(twin, x), outputs[0][0])


@pytest.mark.parametrize("family", FAMILIES)
def test_flat_weights_give_the_same_gradient(family):
    model, x = MODELS["regressor"]()
    variational = converted(model, family, prior="student_t(4, 0, 1)", rho=-3.0)
    flat, y = FlatModel(variational), torch.randn(3, 5, 1)
    assert flat.layout.size == sum(p.numel() for p in variational.parameters())
    values = []
    for network, module in ((flat, flat.module), (lambda x: apply(variational, x), variational)):
        torch.manual_seed(9)
        value = Gaussian().log_prob(network(x), y).mean() - kl_divergence(module) / 100
        value.backward()
        values.append(value.detach())
    assert torch.equal(*values)
    named = {name: p.grad for name, p in variational.named_parameters()}
    torch.testing.assert_close(flat.grad, Layout.of(variational).pack(named))


def test_training_finds_the_scale_of_a_posterior():
    """The same regression, learned by the library's road of one flat vector."""
    x = torch.linalg.qr(torch.randn(8, 2))[0] * torch.tensor([1.0, 3.0])
    y = x @ torch.tensor([[1.0], [-1.0]])
    flat = FlatModel(convert(nn.Linear(2, 1, bias=False), prior="normal(0, 1)", rho=-3.0))
    optimiser = torch.optim.Adam([theta := flat.theta], lr=0.03)
    for step in range(600):
        flat.grad.zero_()
        fit = laws.Normal(0, 0.5).log_prob(y - flat(x)).sum()
        (kl_divergence(flat.module) - fit).backward()
        theta.grad = flat.grad
        optimiser.param_groups[0]["lr"] = 0.03 / (1 + step / 100)
        optimiser.step()
    precision = x.square().sum(0) / 0.25 + 1
    torch.testing.assert_close(flat.module.scales()["weight"][0].detach(), precision.rsqrt(), rtol=0.15, atol=0)
    exact = (x.T @ y).squeeze() / 0.25 / precision
    torch.testing.assert_close(flat.module.point().weight[0].detach(), exact, rtol=0.15, atol=0)


def test_it_is_stochastic_and_can_be_reinitialised():
    variational = converted(Mlp(), rho=-2.0)
    assert is_stochastic(variational, torch.randn(4, 3))
    before = {name: p.clone() for name, p in variational.named_parameters()}
    reinitialise(variational)
    assert all(not torch.equal(before[name], p) for name, p in variational.named_parameters())
    assert_mean(variational.rho.detach(), -2.0)


def test_running_averages_are_the_models_own():
    variational = converted(Normed(), rho=-2.0).train()
    before = variational.model.norm.running_mean.clone()
    variational(torch.randn(8, 3) + 1)
    assert not torch.equal(before, variational.model.norm.running_mean)


def test_an_error_inside_leaves_the_model_as_it_was():
    variational = converted(Mlp(), rho=0.0)
    expected = variational.point()(torch.ones(2, 3))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        variational(torch.ones(2, 5))
    variational.mean_mode = True
    assert torch.equal(variational(torch.ones(2, 3)), expected)
    assert all(isinstance(p, nn.Parameter) for p in variational.model.parameters())


# Errors


def test_a_cauchy_with_a_light_prior_is_warned_about():
    with pytest.warns(UserWarning, match=r"KL of a Cauchy posterior to Normal\(loc=0.0, scale=1.0\) is infinite"):
        convert(Mlp(), "cauchy", "normal(0, 1)")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        convert(Mlp(), "cauchy", "student_t(1, 0, 1)")


ERRORS = pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: convert(Mlp(), "gausian"), "unknown variational family 'gausian'. Did you mean 'gaussian'"),
        (lambda: convert(Mlp(), names="net.9.*"), "unknown trainable parameter in names: 'net.9.*'"),
        (lambda: convert(Mlp(), names=[]), "names must hold at least one pattern; got none"),
        (lambda: convert(Mlp(), prior="flat"), "needs a proper prior; 'net.0.weight' has a flat one"),
        (lambda: convert(Mlp(), prior={"a.*": "normal(0, 1)", "*": "normal(0, 1)"}), "prior pattern 'a.*' must match"),
        (lambda: convert(Mlp(), prior={"net.0.*": "normal(0, 1)"}), "none of .* matches 'net.3.weight'"),
        (lambda: convert(Mlp(), "student_t", df=2.0), "df must be greater than 2, .*; got 2.0"),
        (lambda: convert(convert(Mlp())), "model must not be variational already"),
        (lambda: convert(nn.ReLU()), "at least one parameter with requires_grad=True"),
        (lambda: revert(Mlp()), "revert needs a Variational model; got Mlp"),
        (
            lambda: kl_divergence(Mlp()),
            "must have variational weights, concrete dropout or stochastic attention; Mlp has none",
        ),
    ],
)


def test_gradient_checkpointing_is_refused():
    model, _ = MODELS["gpt2"]()
    model.gradient_checkpointing_enable()
    with pytest.raises(ValueError, match="must not use gradient checkpointing"):
        convert(model)


@ERRORS
def test_errors_name_argument_rule_and_value(build, message):
    with pytest.raises(ValueError, match=message):
        build()


@pytest.mark.parametrize("local", [True, False])
def test_scales_of_weights_in_half_precision_are_float32(local):
    model = convert(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).bfloat16(), local=local, rho=-2.0)
    assert (model.rho.dtype, model.model[0].weight.dtype) == (torch.float32, torch.bfloat16)
    x = torch.randn(5, 3, dtype=torch.bfloat16)
    first, second = model(x), model(x)
    assert first.dtype == torch.bfloat16
    assert not torch.equal(first, second)
    (first.float().sum() + model.kl()).backward()
    assert model.rho.grad.dtype == torch.float32
    assert model.rho.grad.abs().min() > 0


def test_a_prior_may_speak_of_weights_that_stay_points():
    prior = {"net.0.*": laws.Normal(0, 1), "net.3.*": laws.Laplace(0, 1)}
    assert [run.prior for run in convert(Mlp(), prior=prior, names="net.3.*").runs] == [laws.Laplace(0, 1)]
    only = {"net.3.*": laws.Laplace(0, 1)}
    assert [run.prior for run in convert(Mlp(), prior=only, names="net.3.*").runs] == [laws.Laplace(0, 1)]


def test_posterior_is_of_the_family_asked_for():
    assert type(convert(Mlp()).posterior()) is GaussianFamily
    assert type(Variational(Mlp(), "student_t").posterior()) is StudentT

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
from bayesformer.layers import FAMILIES, Variational, convert, kl_divergence, revert
from bayesformer.layers.families import GaussianWeights, StudentTWeights
from bayesformer.likelihoods import Gaussian
from bayesformer.model.calling import apply
from bayesformer.model.skeleton import Skeleton, shadow
from bayesformer.model.space import Space
from bayesformer.model.starting import draw_anew
from bayesformer.models import Encoder, Regressor, Tagger, VisionTransformer
from bayesformer.priors import distributions as laws
from tests import shell_transformers, shell_zoo
from tests.laws import assert_mean
from tests.nets import Keyword, Mlp, Normed, Positional, Tied

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
    "bert": lambda: hugging_face("bert"),
    "gpt2": lambda: hugging_face("gpt2"),
}


def hugging_face(name):
    pytest.importorskip("transformers")
    case = getattr(shell_transformers, name)()
    return case.model.eval(), case.inputs


def flat(raws):
    return torch.cat([raw.detach().flatten() for raw in raws])


def trainable(model):
    return Space.of(model).names


def shell_of(model):
    shell = Skeleton(model, Space.of(model)).shell()
    shell.module.train(model.training)
    return shell


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
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    assert torch.equal(apply(model, x), apply(model, x))
    for parameter in trainable(model):
        if "key.bias" in parameter:  # adds the same to all of a query's logits
            continue
        variational = converted(model, subset=parameter, rho=0.0, local=local).train(mode == "train")
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
    twin = copy.deepcopy(model)
    for p, raw in zip(twin.parameters(), variational.rho, strict=True):
        p.data += softplus(raw.detach()) * torch.randn(p.shape)
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
    rho = flat(variational.rho)
    assert_mean(rho, -7.0)
    assert_mean((rho + 7).square(), 0.01**2)
    student = converted(regressor(), "student_t", df=9.0)
    assert_mean(flat(student.raw_df), math.log(math.expm1(7.0)))


def test_only_the_named_weights_are_random():
    model, x = MODELS["regressor"]()
    variational = converted(model, subset=["*attention.*", "projection.bias"], rho=0.0)
    assert set(variational.scales()) == {n for n in trainable(model) if ".attention." in n or n == "projection.bias"}
    assert [raw.shape for raw in variational.rho] == [p.shape[1:] for p in variational.sample().values()]
    names = {*(f"rho.{i}" for i in range(len(variational.rho))), *(f"model.{name}" for name in trainable(model))}
    assert {name for name, _ in variational.named_parameters()} == names
    variational(x).sum().backward()
    assert all(p.grad is not None for p in variational.parameters())


def test_frozen_weights_stay_points():
    model = Mlp()
    model.net[0].requires_grad_(False)
    assert list(converted(model).scales()) == ["net.3.weight", "net.3.bias"]
    with pytest.raises(ValueError, match=r"subset='net.0.weight' matches no weight"):
        converted(model, subset="net.0.weight")


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
    given = iter(priors * len(variational.space.names) if len(priors) == 1 else priors)
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
    ours = torch.autograd.grad(kl_divergence(variational), list(variational.parameters()))
    theirs = torch.autograd.grad(expected, list(variational.parameters()))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)


def test_kl_is_zero_at_the_prior():
    model = nn.Linear(4, 3)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    variational = converted(model.double(), prior="normal(0, 0.5)", rho=math.log(math.expm1(0.5)))
    for raw in variational.rho:
        raw.data.fill_(math.log(math.expm1(0.5)))
    assert kl_divergence(variational).item() == pytest.approx(0, abs=1e-14)


@pytest.mark.parametrize("family", FAMILIES)
def test_an_open_kl_is_unbiased_and_needs_no_pass_before(family):
    """Against the closed form of the same pair written as another law: a Student-t prior of many degrees of freedom."""
    prior = laws.StudentT(1e6, 0, 1.0)  # the standard normal, for which closed forms are known
    variational = converted(nn.Linear(3, 2).double(), family, prior=prior, rho=-1.0)
    if family == "cauchy":  # whose KL to a normal is infinite
        return
    values = torch.stack([kl_divergence(variational).detach() for _ in range(3000)])
    exact = converted(variational.model, family, prior="normal(0, 1)")
    exact.load_state_dict(variational.state_dict())
    assert_mean(values, kl_divergence(exact).detach())
    grads = torch.autograd.grad(kl_divergence(variational), list(variational.parameters()))
    assert all((grad != 0).any() for grad in grads)


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
        variational.rho[0].data = torch.log(torch.expm1(precision.rsqrt()))[None]

        def elbo(params, variational=variational):
            residual = y - functional_call(variational, params, (x,))
            fit = laws.Normal(0, noise).log_prob(residual).sum()
            return fit - kl_divergence(variational, params)

        at = {name: p.detach().expand(4000, *p.shape) for name, p in variational.named_parameters()}
        grads = vmap(grad(elbo), randomness="different")(at)
        for value in grads.values():
            assert_mean(value.flatten(1), 0.0)
        wider = {**at, "rho.0": at["rho.0"] + 0.3}
        assert (vmap(grad(elbo), randomness="different")(wider)["rho.0"].mean(0) < 0).all()


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
    assert not torch.isclose(kl_divergence(variational), kl).any()  # not that of parameters it was only lent


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
def test_a_shell_gives_the_same_gradient(family):
    model, x = MODELS["regressor"]()
    variational = converted(model, family, prior="student_t(4, 0, 1)", rho=-3.0)
    shell, y = shell_of(variational), torch.randn(3, 5, 1)
    assert shell.space.size == sum(p.numel() for p in variational.parameters())
    values = []
    for module in (shell.module, variational):
        torch.manual_seed(9)
        value = Gaussian().log_prob(apply(module, x), y).mean() - kl_divergence(module) / 100
        value.backward()
        values.append(value.detach())
    assert torch.equal(*values)
    named = {name: p.grad for name, p in variational.named_parameters()}
    torch.testing.assert_close(shell.grad, shell.space.pack(named))


def test_training_finds_the_scale_of_a_posterior():
    """The same regression, learned by the library's road of one flat vector."""
    x = torch.linalg.qr(torch.randn(8, 2))[0] * torch.tensor([1.0, 3.0])
    y = x @ torch.tensor([[1.0], [-1.0]])
    shell = shell_of(convert(nn.Linear(2, 1, bias=False), prior="normal(0, 1)", rho=-3.0))
    optimiser = torch.optim.Adam([theta := shell.theta], lr=0.03)
    for step in range(600):
        shell.grad.zero_()
        fit = laws.Normal(0, 0.5).log_prob(y - shell(x)).sum()
        (kl_divergence(shell.module) - fit).backward()
        theta.grad = shell.grad
        optimiser.param_groups[0]["lr"] = 0.03 / (1 + step / 100)
        optimiser.step()
    precision = x.square().sum(0) / 0.25 + 1
    torch.testing.assert_close(shell.module.scales()["weight"][0].detach(), precision.rsqrt(), rtol=0.15, atol=0)
    exact = (x.T @ y).squeeze() / 0.25 / precision
    torch.testing.assert_close(shell.module.point().weight[0].detach(), exact, rtol=0.15, atol=0)


def test_it_can_be_drawn_anew():
    shell = shell_of(converted(Mlp(), rho=-2.0))
    before = shell.theta.clone()
    draw_anew(shell, frozenset(shell.space.names))
    assert (shell.theta != before).all()
    assert_mean(flat(shell.module.rho), -2.0)


# In the place of a user's model


KINDS = ["plain", "frozen_base", "only_biases", "double", "weight_norm", "lstm", "gru", "batch_norm", "counting"]
KINDS += ["tied", "tied_by_memory", "scalar", "multihead", "encoder", "channels_last"]
OTHERS = ["bert", "gpt2", "t5", "vit", "lora", "half_base_with_adapter"]


def zoo(name):
    module = shell_zoo if name in KINDS else shell_transformers
    if module is shell_transformers:
        pytest.importorskip("transformers")
        pytest.importorskip("peft")
    return getattr(module, name)()


@pytest.mark.parametrize("local", [True, False])
@pytest.mark.parametrize("name", [*KINDS, *OTHERS])
def test_every_learned_weight_is_random_on_a_shadow_and_nothing_is_written(name, local):
    case = zoo(name)
    model, learned = case.model, Space.of(case.model, case.infer)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    variational = Variational(shadow(model, learned.names), local=local, rho=-1.0, copy_model=False)
    assert variational.space.names == learned.names
    shell = shell_of(variational.train())
    torch.manual_seed(0)
    value = apply(shell.module, case.inputs).float().square().mean() + kl_divergence(shell.module) / 100
    value.backward()
    views = shell.space.views(shell.grad)
    assert all((views[f"rho.{i}"] != 0).any() for i in range(len(learned.names)))
    shell.module.eval()
    with torch.no_grad():
        assert not torch.equal(apply(shell.module, case.inputs), apply(shell.module, case.inputs))
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key]), key


@pytest.mark.parametrize("name", ["lstm", "gru"])
def test_recurrent_layers_use_the_drawn_weights(name):
    case = zoo(name)
    variational = converted(case.model.double().eval(), rho=-1.0)
    x = case.inputs.double()
    torch.manual_seed(3)
    outputs = apply(variational, x)
    torch.manual_seed(3)
    twin = copy.deepcopy(case.model)
    with torch.no_grad():
        for key, value in variational.sample().items():
            twin.get_parameter(key).copy_(value[0])
    torch.testing.assert_close(outputs, apply(twin, x))
    variational.mean_mode = True
    assert torch.equal(apply(variational, x), apply(case.model, x))


def test_the_mode_of_the_model_is_kept():
    assert not converted(Mlp().eval()).training
    assert converted(Mlp().train()).training


# Noise of training and of prediction


def test_evaluation_draws_weights_and_training_draws_outputs():
    model = converted(nn.Linear(3, 2), rho=0.0)
    x = torch.ones(5, 3)
    assert len(model.train()(x).unique(dim=0)) == 5
    assert len(model.eval()(x).unique(dim=0)) == 1
    laplace = converted(nn.Linear(3, 2), "laplace", flipout=True, rho=0.0)
    assert len(laplace.train()(x).unique(dim=0)) > 1
    assert len(laplace.eval()(x).unique(dim=0)) == 1


def test_a_cauchy_with_a_light_prior_is_warned_about():
    with pytest.warns(UserWarning, match=r"KL of CauchyWeights to Normal\(loc=0.0, scale=1.0\) is infinite"):
        convert(Mlp(), "cauchy", "normal(0, 1)")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        convert(Mlp(), "cauchy", "student_t(1, 0, 1)")


ERRORS = pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: convert(Mlp(), "gausian"), "unknown variational family 'gausian'. Did you mean 'gaussian'"),
        (lambda: convert(Mlp(), subset="net.9.*"), "subset='net.9.\\*' matches no weight"),
        (lambda: convert(Mlp(), subset=[]), "subset must name at least one pattern; got an empty list"),
        (lambda: convert(Mlp(), prior="flat"), "needs a proper prior; 'net.0.weight' has a flat one"),
        (lambda: convert(Mlp(), prior={"a.*": "normal(0, 1)", "*": "normal(0, 1)"}), "prior pattern 'a.*' must match"),
        (lambda: convert(Mlp(), prior={"net.0.*": "normal(0, 1)"}), "none of .* matches 'net.3.weight'"),
        (lambda: convert(Mlp(), "student_t", df=2.0), "df must be greater than 2, .*; got 2.0"),
        (lambda: convert(convert(Mlp())), "model must not be variational already"),
        (lambda: convert(nn.Embedding(5, 2, sparse=True)), "'weight' belongs to an Embedding with sparse=True"),
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
    assert (model.rho[0].dtype, model.model[0].weight.dtype) == (torch.float32, torch.bfloat16)
    x = torch.randn(5, 3, dtype=torch.bfloat16)
    first, second = model(x), model(x)
    assert first.dtype == torch.bfloat16
    assert not torch.equal(first, second)
    (first.float().sum() + model.kl()).backward()
    assert all(raw.grad.dtype == torch.float32 and raw.grad.abs().min() > 0 for raw in model.rho)


def test_a_prior_may_speak_of_weights_that_stay_points():
    prior = {"net.0.*": laws.Normal(0, 1), "net.3.*": laws.LaplaceDistribution(0, 1)}
    assert set(convert(Mlp(), prior=prior, subset="net.3.*").priors.values()) == {laws.LaplaceDistribution(0, 1)}
    only = {"net.3.*": laws.LaplaceDistribution(0, 1)}
    assert set(convert(Mlp(), prior=only, subset="net.3.*").priors.values()) == {laws.LaplaceDistribution(0, 1)}


def test_laws_are_of_the_family_asked_for():
    assert {type(q) for q in convert(Mlp()).laws().values()} == {GaussianWeights}
    assert {type(q) for q in Variational(Mlp(), "student_t").laws().values()} == {StudentTWeights}

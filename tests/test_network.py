"""Any module as a function of its weights: values, gradients, and what must stay as it was."""

import copy

import pytest
import torch
from torch import nn

from bayesformer.core.types import Batch
from bayesformer.core.vectors import THETA, value_and_grad
from bayesformer.likelihoods import Categorical
from bayesformer.network import (
    FlatLogJoint,
    FlatModel,
    Layout,
    apply,
    call,
    is_stochastic,
    log_joint,
    reinitialise,
    stochastic_mode,
    trainable,
)
from bayesformer.priors.prior import as_prior
from tests.nets import Keyword, Mlp, Normed, Positional, Tied


def case(name):
    """(model, batch) of every kind of module and input."""
    if name == "plain":
        return Mlp(), Batch(torch.randn(6, 3), torch.randint(2, (6,)))
    if name == "positional":
        return Positional(), Batch((torch.randn(6, 2), torch.randn(6, 4)), torch.randint(3, (6,)))
    if name == "keyword":
        inputs = {"input_ids": torch.randint(7, (6, 5)), "attention_mask": torch.ones(6, 5)}
        return Keyword(), Batch(inputs, torch.randint(3, (6,)))
    if name == "tied":
        return Tied(), Batch(torch.randint(5, (6, 4)), torch.randint(5, (6, 4)))
    if name == "frozen":
        model = Mlp()
        model.net[0].requires_grad_(False)
        return model, Batch(torch.randn(6, 3), torch.randint(2, (6,)))
    return hugging_face(name)


def hugging_face(name):
    transformers = pytest.importorskip("transformers")
    ids = torch.randint(2, 30, (4, 9))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    small = {"vocab_size": 30, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    if name == "bert":
        config = transformers.BertConfig(**small, intermediate_size=32, num_labels=3, max_position_embeddings=16)
        return transformers.BertForSequenceClassification(config).eval(), Batch(inputs, torch.randint(3, (4,)))
    config = transformers.GPT2Config(vocab_size=30, n_positions=16, n_embd=16, n_layer=2, n_head=2)  # tied embeddings
    return transformers.GPT2LMHeadModel(config).eval(), Batch(inputs, ids)


CASES = ["plain", "positional", "keyword", "tied", "frozen", "bert", "gpt2"]


@pytest.mark.parametrize("name", CASES)
def test_log_joint_is_mean_log_likelihood_plus_prior_over_n(name):
    model, batch = case(name)
    params = {k: p.detach() for k, p in trainable(model).items()}
    value, outputs = log_joint(model, Categorical(), as_prior("normal(0, 0.5)"), 40)(params, batch)
    logits = apply(model, batch.inputs)
    losses = nn.functional.cross_entropy(logits.flatten(0, -2), batch.targets.flatten(), reduction="none")
    mean = -losses.view(len(batch.targets), -1).sum(1).mean()
    prior = sum(torch.distributions.Normal(0, 0.5).log_prob(p).sum() for p in params.values())
    torch.testing.assert_close(value, mean + prior / 40)
    torch.testing.assert_close(outputs, logits)


@pytest.mark.parametrize("name", CASES)
def test_flat_gradient_equals_torch_func(name):
    model, batch = case(name)
    flat = FlatModel(model)
    joint = FlatLogJoint(flat, Categorical(), as_prior("normal(0, 0.5)"), 40)
    theta = flat.theta + 0.1 * torch.randn_like(flat.theta)
    value, outputs, grads = joint.value_and_grad({THETA: theta}, batch)
    naive = value_and_grad(log_joint(flat.module, Categorical(), as_prior("normal(0, 0.5)"), 40))
    value2, outputs2, grads2 = naive(flat.layout.views(theta), batch)
    torch.testing.assert_close(value, value2)
    torch.testing.assert_close(outputs, outputs2)
    torch.testing.assert_close(grads[THETA], flat.layout.pack(grads2), atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("name", CASES)
def test_batched_gradient_equals_the_loop(name):
    model, batch = case(name)
    flat = FlatModel(model)
    joint = FlatLogJoint(flat, Categorical(), as_prior("normal(0, 0.5)"), 40)
    theta = flat.theta + 0.1 * torch.randn(3, len(flat.theta))
    order = torch.stack([torch.randperm(len(batch.targets)) for _ in range(3)])
    inputs = batch.inputs
    if name in {"bert", "gpt2"}:  # Hugging Face looks into a padding mask, which vmap cannot
        inputs = {"input_ids": inputs["input_ids"]}
    pick = (
        (lambda i: {k: v[i] for k, v in inputs.items()})
        if isinstance(inputs, dict)
        else ((lambda i: tuple(v[i] for v in inputs)) if isinstance(inputs, tuple) else (lambda i: inputs[i]))
    )
    together = joint.value_and_grad({THETA: theta}, Batch(pick(order), batch.targets[order]))
    for row in range(3):
        own = Batch(pick(order[row]), batch.targets[order[row]])
        value, outputs, grads = joint.value_and_grad({THETA: theta[row]}, own)
        torch.testing.assert_close(together[0][row], value)
        torch.testing.assert_close(together[1][row], outputs, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(together[2][THETA][row], grads[THETA], atol=1e-5, rtol=1e-3)


def test_gradient_equals_finite_differences():
    model, batch = Mlp().double(), Batch(torch.randn(6, 3, dtype=torch.float64), torch.randint(2, (6,)))
    flat = FlatModel(model)
    joint = FlatLogJoint(flat, Categorical(), as_prior("student_t(3, 0, 1)"), 11)
    theta = flat.theta.clone()
    _, _, grads = joint.value_and_grad({THETA: theta}, batch)
    grad, h = grads[THETA].clone(), 1e-6
    for i in range(0, len(theta), 5):
        step = torch.zeros_like(theta)
        step[i] = h
        difference = (joint({THETA: theta + step}, batch)[0] - joint({THETA: theta - step}, batch)[0]) / (2 * h)
        assert difference.item() == pytest.approx(grad[i].item(), abs=1e-8)


def test_the_users_model_is_never_changed():
    model, batch = case("plain")
    before = copy.deepcopy(model.state_dict())
    flat = FlatModel(model)
    flat.load(torch.randn_like(flat.theta))
    FlatLogJoint(flat, Categorical(), None, 6).value_and_grad({THETA: flat.theta}, batch)
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_tied_weights_appear_once_and_frozen_never():
    assert Layout.of(Tied()).names == ("embed.weight",)
    model, _ = case("frozen")
    assert Layout.of(model).names == ("net.3.weight", "net.3.bias")
    flat = FlatModel(model)
    flat.load(torch.zeros_like(flat.theta))
    assert torch.equal(flat.module.net[0].weight, model.net[0].weight)
    assert (flat.module.net[3].weight == 0).all()


def test_a_subset_of_names_leaves_the_rest():
    model, batch = case("plain")
    value, _ = log_joint(model, Categorical(), None, 6)({"net.3.bias": torch.zeros(2)}, batch)
    expected = call(model, {"net.3.bias": torch.zeros(2)}, batch.inputs)
    torch.testing.assert_close(value, Categorical().log_prob(expected, batch.targets).mean())


def test_views_and_pack_are_inverse():
    layout = Layout.of(Mlp())
    flat = torch.randn(layout.size)
    assert torch.equal(layout.pack(layout.views(flat)), flat)
    matrix = torch.randn(4, layout.size)
    assert torch.equal(layout.views(matrix)["net.0.weight"][2], layout.views(matrix[2])["net.0.weight"])


def test_scalar_parameters_are_weights_too():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale, self.linear = nn.Parameter(torch.tensor(2.0)), nn.Linear(3, 2)

        def forward(self, x):
            return self.scale * self.linear(x)

    flat, x = FlatModel(Scaled()), torch.randn(4, 3)
    before = flat(x)
    flat.layout.views(flat.theta)["scale"].mul_(3)
    torch.testing.assert_close(flat(x), 3 * before)


def test_stochastic_mode_drops_but_keeps_running_averages():
    model = nn.Sequential(Normed(), nn.Dropout(0.5))
    stochastic_mode(model)
    before = model[0].norm.running_mean.clone()
    x = torch.randn(8, 3)
    assert is_stochastic(model, x)
    model(x)
    assert torch.equal(before, model[0].norm.running_mean)
    model.eval()
    assert not is_stochastic(model, x)


def test_is_stochastic_leaves_the_random_stream_alone():
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    is_stochastic(Mlp(dropout=0.5).train(), torch.randn(2, 3, generator=torch.Generator().manual_seed(0)))
    torch.manual_seed(3)
    assert torch.equal(torch.rand(4), expected)


def test_reinitialise_changes_every_weight_or_says_why_not():
    model = nn.TransformerEncoderLayer(8, 2, 16)
    before = {k: v.clone() for k, v in model.named_parameters() if "weight" in k and "norm" not in k}
    reinitialise(model)
    assert all(not torch.equal(v, dict(model.named_parameters())[k]) for k, v in before.items())

    class Bare(nn.Module):
        def __init__(self):
            super().__init__()
            self.position = nn.Parameter(torch.zeros(3))

    with pytest.raises(ValueError, match=r"inner \(Bare\) has parameters but no reset_parameters"):
        reinitialise(nn.ModuleDict({"inner": Bare()}))


def test_wrong_models_are_named():
    with pytest.raises(ValueError, match="at least one parameter with requires_grad=True"):
        Layout.of(nn.ReLU())
    mixed = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double())
    with pytest.raises(ValueError, match="share one dtype and device; got .*float32.*float64"):
        Layout.of(mixed)
    with pytest.raises(ValueError, match=r"got dict with keys \['states'\]"):
        apply(_Odd(), torch.zeros(2, 3))
    with pytest.raises(ValueError, match="num_data must be the number of training examples, at least 1; got 0"):
        log_joint(Mlp(), Categorical(), None, 0)


class _Odd(nn.Module):
    def forward(self, x):
        return {"states": x}

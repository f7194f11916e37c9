"""Where members start: at what is given, at new weights, or partly at new ones; and what must never be written."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

import bayesformer as bf
from bayesformer.methods import Problem
from bayesformer.model.calling import apply
from bayesformer.posterior import Posterior
from bayesformer.train.prototype import Prototype
from tests.contract import SETTINGS, TRAINING, ask, facts_of_model, fit, unchanged
from tests.contract_zoo import KINDS, Attends, Example, build, numbers, sequences, whole

SHORT = replace(TRAINING, epochs=2)


def prototype(example, **more):
    from bayesformer.likelihoods import as_likelihood

    return Prototype(
        Problem(example.model, as_likelihood(example.likelihood), example.data, infer=example.infer, **more)
    )


def outputs_at(made, start, inputs):
    shell = made.skeleton.shell(gradients=False)
    shell.load(start.theta)
    shell.load_buffers(start.buffers)
    shell.module.eval()
    with torch.no_grad():
        return apply(shell.module, inputs)


def weights_at(made, start):
    return made.space.views(start.theta)


def test_lora_members_start_at_the_base_and_differ_in_a():
    pytest.importorskip("peft")
    example = build("lora")
    made = prototype(example)
    example.model.eval()
    with torch.no_grad():
        base = apply(example.model, example.inputs)
    first, second, again = made.start(0), made.start(1), made.start(1)
    for start in (first, second):
        torch.testing.assert_close(outputs_at(made, start, example.inputs), base, rtol=0, atol=1e-6)
    assert torch.equal(second.theta, again.theta)
    for name, weight in weights_at(made, first).items():
        other = weights_at(made, second)[name]
        if "lora_A" in name:
            assert not torch.equal(weight, other), name
            assert 0.3 < other.std() / weight.std() < 3
        else:
            assert torch.equal(weight, other), name


@pytest.mark.parametrize("method", ["ensemble", "sghmc"])
def test_members_of_lora_end_in_different_subspaces(method):
    pytest.importorskip("peft")
    example = build("lora")
    posterior = fit(method, example)
    rows = posterior.space.views(posterior.theta)
    a = next(value for name, value in rows.items() if "lora_A" in name)
    distance = (a[0] - a[1]).norm() / a[0].norm()
    assert distance > 0.5


def test_trained_adapters_stay_where_they_are():
    pytest.importorskip("peft")
    example = build("lora")
    with torch.no_grad():
        for name, p in example.model.named_parameters():
            if "lora_B" in name:
                p.normal_(0, 0.1)
    made = prototype(example)
    assert torch.equal(made.start(0).theta, made.start(1).theta)


FRESH = ("all_weights", "frozen_base", "only_biases", "tied_weights", "batch_norm", "encoder_stack", "parametrised",
         "convolutions", "lstm", "graph_attention", "geometric", "bert", "gpt2", "t5", "vit", "swin", "whisper", "lora",
         "lora_bfloat16", "bfloat16_weights", "float64")  # fmt: skip


@pytest.mark.parametrize("kind", FRESH)
def test_fresh_weights_are_new_and_frozen_neighbours_are_not_written(kind):
    pytest.importorskip("torch_geometric")
    pytest.importorskip("peft")
    example = build(kind)
    before = facts_of_model(example.model)
    made = prototype(example, init="fresh")
    first, second, again = made.start(0), made.start(1), made.start(1)
    given = made.skeleton.shell(gradients=False).theta
    assert torch.equal(second.theta, again.theta)
    views = zip(*(made.space.views(theta).items() for theta in (given, first.theta, second.theta)), strict=True)
    for (name, old), (_, one), (_, two) in views:
        assert one.isfinite().all(), name
        constant = not old.any() or name.endswith("weight.original")  # LoRA's B, Swin's positions; see orthogonal below
        if old.dim() > 1 and old.numel() > 8 and not constant:
            assert not torch.equal(old, one), f"{name} was kept"
            assert not torch.equal(one, two), f"{name} is the same in both members"
    for name, value in facts_of_model(example.model).items():
        old = before[name]
        assert torch.equal(old, value) if isinstance(old, torch.Tensor) else old == value, name


@pytest.mark.parametrize(
    ("kind", "head"),
    [("bert", "classifier*"), ("frozen_base", "head.weight"), ("gpt2", "lm_head*"), ("vit", "classifier*")],
)
def test_only_the_head_is_drawn_anew(kind, head):
    example = build(kind)
    made = prototype(example, init="head", head=head)
    chosen = made.space.select(head).names
    given = made.space.views(made.skeleton.shell(gradients=False).theta)
    for member in (0, 1):
        for name, weight in weights_at(made, made.start(member)).items():
            if name not in chosen or weight.dim() > 1:
                assert torch.equal(weight, given[name]) != (name in chosen), name


def test_fresh_weights_have_the_law_of_their_module():
    """Linear layers are uniform within ±1/√fan_in, LayerNorm is at 1 and 0, BERT is normal with sd .02."""
    layer = nn.Linear(64, 500)
    with torch.no_grad():
        layer.weight.fill_(7.0)
    made = prototype(Example(layer, (numbers(4, 64), whole(3, 4)), None), init="fresh")
    drawn = weights_at(made, made.start(0))["weight"]
    assert drawn.abs().max() <= 1 / 8
    assert drawn.abs().max() > 0.9 / 8
    pytest.importorskip("transformers")
    made = prototype(build("bert"), init="fresh")
    weights = weights_at(made, made.start(0))
    wide = torch.cat([w.flatten() for n, w in weights.items() if w.dim() == 2 and "LayerNorm" not in n])
    assert 0.015 < wide.std() < 0.025
    assert all((w == 1).all() for n, w in weights.items() if n.endswith("LayerNorm.weight"))


@pytest.mark.parametrize("infer", ["attention.in_proj_weight", "attention.in_proj_bias", "attention*weight"])
def test_children_that_a_module_initialises_are_not_written_if_they_are_frozen(infer):
    """nn.MultiheadAttention sets the bias of its output projection."""
    model = Attends()
    nn.init.ones_(model.attention.out_proj.bias)
    before = facts_of_model(model)
    versions = {name: p._version for name, p in model.named_parameters()}
    made = prototype(sequences(model, infer=infer), init="fresh")
    assert not torch.equal(made.start(0).theta, made.skeleton.shell().theta) or infer.endswith("bias")
    assert torch.equal(before["weight attention.out_proj.bias"], model.attention.out_proj.bias)
    assert versions == {name: p._version for name, p in model.named_parameters()}


def test_fresh_originals_of_a_parametrisation_are_those_of_a_fresh_weight():
    model = Attends()
    parametrizations.weight_norm(model.embed)
    parametrizations.orthogonal(model.head)
    made = prototype(sequences(model), init="fresh")
    start = made.start(0)
    shell = made.skeleton.shell()
    shell.load(start.theta)
    shell.load_buffers(start.buffers)
    weight = shell.module.embed.weight
    torch.testing.assert_close(
        shell.weights["embed.parametrizations.weight.original0"], weight.norm(dim=1, keepdim=True)
    )
    assert weight.abs().max() <= 0.5  # uniform within ±1/√4
    base = "head.parametrizations.weight.0.base"  # torch keeps the orthogonal matrix in a buffer, and moves around it
    assert not torch.equal(start.buffers[base], made.start(1).buffers[base])
    rows = shell.module.head.weight
    torch.testing.assert_close(rows @ rows.mT, torch.eye(3), atol=1e-5, rtol=0)


def test_a_module_that_cannot_start_afresh_is_named():
    class Bare(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3))

        def forward(self, x):
            return x[:, :3] * self.scale

    with pytest.raises(ValueError, match="model cannot be re-initialised: the model .Bare. has parameters but no"):
        bf.fit(Bare(), (numbers(8, 4), whole(3, 8)), likelihood="categorical", training=SHORT, init="fresh")


class RandomBase(nn.Module):
    """A frozen base that is drawn at random when it is built, as in random features."""

    def __init__(self):
        super().__init__()
        self.base, self.head = Attends(), nn.Linear(3, 3)
        self.base.requires_grad_(False)
        parametrizations.weight_norm(self.head)

    def forward(self, x):
        return self.head(torch.tanh(self.base(x)))


@pytest.mark.parametrize(
    "method", ["mle", "ensemble", "sghmc", "vi", "laplace", "mean_field", "mc_dropout", "attention"]
)
def test_a_builder_with_frozen_random_weights_can_be_loaded_with_a_new_build(method, tmp_path):
    x, y = numbers(8, 5, 4), whole(3, 8)
    chosen = bf.methods.build_method(method, SETTINGS.get(method))
    posterior = bf.fit(RandomBase, (x, y), likelihood="categorical", method=chosen, training=SHORT, progress=False)
    assert posterior.facts["init"] == "built"
    before = ask(posterior, x[:3], "sampled")
    posterior.save(tmp_path)
    other = RandomBase()
    with unchanged(other):
        assert ask(Posterior.load(tmp_path, other), x[:3], "sampled") == before


def test_members_of_a_builder_have_new_weights_and_one_frozen_base():
    made = prototype(Example(RandomBase, (numbers(8, 5, 4), whole(3, 8)), None))
    one, two = made.start(0), made.start(1)
    assert not torch.equal(one.theta, two.theta)
    x = numbers(2, 5, 4)
    frozen = made.model.base(x) if not made.model.base.training else made.model.base.eval()(x)
    shell = made.skeleton.shell()
    torch.testing.assert_close(shell.module.eval().base(x), frozen)


@pytest.mark.parametrize("way", ["sampled", "linearised", "streamlined"])
def test_a_base_that_changes_after_the_fit_is_noticed(way):
    example = build("frozen_base")
    posterior = fit("vi", example)
    ask(posterior, example.inputs, way)
    with torch.no_grad():
        example.model.embed.weight.add_(1.0)
    with pytest.raises(ValueError, match="model must not be changed after the fit: embed.weight was"):
        ask(posterior, example.inputs, way)


def test_inferred_weights_may_change_after_the_fit():
    example = build("frozen_base")
    posterior = fit("vi", example)
    before = ask(posterior, example.inputs, "sampled")
    with torch.no_grad():
        example.model.head.weight.add_(1.0)
    assert ask(posterior, example.inputs, "sampled") == before


def test_batches_of_one_with_batch_norm():
    example = build("batch_norm")
    posterior = bf.fit(example.model, example.data, likelihood="categorical", training=SHORT, progress=False)
    assert posterior.law.buffers["norm.running_mean"].abs().max() > 0
    with pytest.raises(ValueError, match=r"batch_size must be at least 2.*BatchNorm"):
        bf.fit(example.model, example.data, likelihood="categorical", training=replace(SHORT, batch_size=1))
    frozen = build("batch_norm_frozen")
    bf.fit(frozen.model, frozen.data, likelihood="categorical", training=replace(SHORT, batch_size=1), progress=False)


def test_combined_takes_every_method_for_the_weights():
    example = sequences(Attends())
    for weights in ("laplace", "sghmc", "baoab", "vi", "ivon", "swag", "mean_field", "ensemble"):
        few = SETTINGS[weights]
        method = bf.Combined(weights=weights, settings=few)
        posterior = bf.fit(
            example.model, example.data, likelihood="categorical", method=method, training=SHORT, progress=False
        )
        answer = ask(posterior, example.inputs, "sampled")
        assert answer.finite
        assert answer.varies, weights


def test_every_kind_is_listed_once():
    assert len(KINDS) == len(set(KINDS))

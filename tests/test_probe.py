"""The first pass is watched: foreign tensors, unused weights, changed buffers; nothing is left behind."""

import random

import numpy as np
import pytest
import torch
from torch import nn

from bayesformer.model.probe import probe
from bayesformer.model.skeleton import Skeleton, shadow
from bayesformer.model.space import Space
from tests.shell_zoo import Net, batch_norm, renormalised_embedding

REGISTRY = {}


class Registered(Net):
    """Reaches its first layer, or a buffer, through a table outside of itself."""

    def __init__(self, what):
        super().__init__()
        self.what = what
        self.register_buffer("shift", torch.ones(3))
        REGISTRY[what] = self

    def forward(self, x):
        other = REGISTRY[self.what]
        if self.what == "looks":
            return super().forward(x.to(other.first.weight.dtype).view(-1, other.first.weight.shape[1]))
        if self.what == "buffer":
            return super().forward(x) + other.shift
        return self.second(torch.tanh(other.first(x)))


def shell_of(model, infer=None, gradients=True):
    return Skeleton(model, Space.of(model, infer)).shell(gradients)


@pytest.mark.parametrize("infer", ["first*", "second*"])  # inferred and frozen: touched either way
def test_a_registry_outside_the_model_is_named(infer):
    shell = shell_of(Registered("weight"), infer)
    with pytest.raises(ValueError, match="a pass used first.weight, first.bias of the model that was given"):
        probe(shell, torch.randn(2, 3), training=False)
    found = probe(shell, torch.randn(2, 3), training=False, strict=False)
    assert set(found.touched) == {"first.weight", "first.bias"}


def test_a_buffer_of_the_users_model_is_named():
    with pytest.raises(ValueError, match="a pass used shift of the model"):
        probe(shell_of(Registered("buffer")), torch.randn(2, 3), training=True)


def test_the_users_model_is_known_behind_a_shadow():
    changed = shadow(Registered("weight"), "second*")
    with pytest.raises(ValueError, match=r"a pass used first.weight, first.bias"):
        probe(shell_of(changed), torch.randn(2, 3), training=False)


def test_to_look_at_dtype_and_shape_is_no_use():
    assert probe(shell_of(Registered("looks")), torch.randn(2, 3), training=False).touched == ()


def test_a_view_of_an_inferred_weight_is_known_by_its_memory():
    model = Net()
    model.hidden = staticmethod(VIEWS.get)  # a function that closes over nothing
    VIEWS["w"] = model.first.weight.data[0]
    model.second.register_forward_hook(lambda m, a, y: y + VIEWS["w"].sum())
    with pytest.raises(ValueError, match=r"a pass used first.weight"):
        probe(shell_of(model), torch.randn(2, 3), training=False)


VIEWS = {}


@pytest.mark.parametrize("gradients", [True, False])
def test_unused_weights_are_named_and_told_by_the_facts(gradients):
    model = Net()
    model.pooler = nn.Linear(3, 3)
    shell = shell_of(model, gradients=gradients)
    found = probe(shell, torch.randn(2, 3), training=True)
    assert found.unused == ("pooler.weight", "pooler.bias")
    assert shell.facts.unused == found.unused
    assert "unused: pooler.weight, pooler.bias" in repr(shell)
    assert all(w.requires_grad is gradients for w in shell.weights.values())


def test_merged_adapters_are_unused():
    peft = pytest.importorskip("peft")
    from tests.shell_transformers import lora

    case = lora()
    assert isinstance(case.model, peft.PeftModel)
    case.model.merge_adapter()
    found = probe(shell_of(case.model, "*lora*"), case.inputs, training=False)
    assert found.unused == Space.of(case.model, "*lora*").names


def test_checkpointed_weights_count_as_used():
    pytest.importorskip("peft")
    from tests.shell_transformers import _bert, _ids

    for reentrant in (True, False):
        model = _bert()
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        assert probe(shell_of(model), _ids(), training=True).unused == ()


def test_buffers_changed_by_a_training_pass_are_named_and_put_back():
    case = batch_norm()
    shell = shell_of(case.model)
    before = {name: tensor.clone() for name, tensor in shell.buffers.items()}
    found = probe(shell, case.inputs, training=True)
    assert found.buffers_changed == ("1.running_mean", "1.running_var", "1.num_batches_tracked")
    assert all(torch.equal(before[name], tensor) for name, tensor in shell.buffers.items())
    assert probe(shell, case.inputs, training=False).buffers_changed == ()


class Noisy(Net):
    def forward(self, x):
        noise = torch.rand(1) + random.random() + np.random.rand()  # noqa: NPY002
        return nn.functional.dropout(super().forward(x) + noise, 0.5)


def test_a_probe_leaves_weights_modes_gradients_and_random_states():
    shell = shell_of(Noisy())
    shell.module.first.eval()
    theta, modes = shell.theta.clone(), [m.training for m in shell.module.modules()]
    state = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002
    probe(shell, torch.randn(2, 3, generator=torch.Generator().manual_seed(0)), training=True)
    assert torch.equal(state[0], torch.get_rng_state())
    assert state[1:] == (random.getstate(), np.random.get_state()[1].tolist())  # noqa: NPY002
    assert torch.equal(theta, shell.theta)
    assert [m.training for m in shell.module.modules()] == modes
    assert shell.grad.abs().max() == 0
    shell.verify()


class Writing(Net):
    def forward(self, x):
        with torch.no_grad():
            self.first.bias.add_(1)
        return super().forward(x)


def test_a_pass_that_writes_into_a_weight_is_named():
    with pytest.raises(ValueError, match="must not write into its weights in forward; a pass changed first.bias"):
        probe(shell_of(Writing()), torch.randn(2, 3), training=False)
    model = Writing()
    with pytest.raises(ValueError, match="a pass changed first.bias"):
        probe(shell_of(model, "second*"), torch.randn(2, 3), training=False)


def test_an_embedding_with_a_largest_norm_has_a_copy():
    case = renormalised_embedding()
    before = case.model[0].weight.detach().clone()
    assert probe(shell_of(case.model, "1.*"), case.inputs, training=False).written == ()
    assert torch.equal(before, case.model[0].weight)


def test_a_failing_pass_also_puts_everything_back():
    case = batch_norm()
    shell = shell_of(case.model)
    before = shell.buffers["1.running_mean"].clone()
    shell.module[3].register_forward_hook(lambda m, a, y: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        probe(shell, case.inputs, training=True)
    assert torch.equal(before, shell.buffers["1.running_mean"])
    assert shell.module.training == case.model.training

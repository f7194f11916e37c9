"""The private names of torch and transformers that attention needs do what their docstrings say."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from bayesformer.core.compat import (
    NoFastPath,
    attention_name,
    has_attention_name,
    in_backward,
    is_batched_gradient,
    remove_forward_hooks,
    set_attention_name,
)


def test_a_backward_pass_is_known_also_where_a_checkpoint_runs_forward_again():
    seen = []

    def forward(x):
        seen.append(in_backward())
        return x.square()

    x = torch.ones(2, requires_grad=True)
    checkpoint(forward, x, use_reentrant=False).sum().backward()
    assert seen == [False, True]
    assert not in_backward()


def first(module, args, kwargs):
    return None


def second(module, args, outputs):
    return None


def test_hooks_are_removed_from_a_copy_and_others_stay():
    module = nn.Linear(2, 2)
    module.register_forward_pre_hook(first, with_kwargs=True)
    module.register_forward_hook(second, always_call=True)
    kept = []
    module.register_forward_hook(lambda module, args, outputs: kept.append(1))
    copied = copy.deepcopy(module)
    remove_forward_hooks(copied, (first, second))
    copied(torch.ones(1, 2))
    assert kept == [1]
    assert len(copied._forward_hooks) == 1
    assert not copied._forward_pre_hooks
    assert not copied._forward_pre_hooks_with_kwargs
    assert not copied._forward_hooks_always_called
    assert len(module._forward_hooks) == 2


class Called(nn.MultiheadAttention):
    """Counts its calls."""

    calls = 0

    def forward(self, query, key, value, **options):
        self.calls += 1
        return query, None


class SlowCalled(NoFastPath, Called):
    """The same without the fast path."""


def test_an_encoder_layer_calls_its_attention_without_the_fast_path():
    layer, x = nn.TransformerEncoderLayer(8, 2, 12, batch_first=True).eval(), torch.randn(2, 3, 8)
    for kind, calls in [(Called, 0), (SlowCalled, 1)]:
        layer.self_attn.__class__ = kind
        with torch.no_grad():
            layer(x)
        assert layer.self_attn.calls == calls


def test_the_name_of_an_attention_function_is_set_in_one_config_alone():
    transformers = pytest.importorskip("transformers")
    config = transformers.CLIPConfig()
    before = attention_name(config.text_config)
    set_attention_name(config, "ours")
    assert attention_name(config) == config._attn_implementation == "ours"
    assert attention_name(config.text_config) == before != "ours"
    assert has_attention_name(config)
    assert not has_attention_name(object())


def test_gradients_that_come_several_at_a_time_are_known():
    seen = []

    class Watch(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            seen.append(is_batched_gradient(grad))
            return grad

    x = torch.ones(3, requires_grad=True)
    torch.autograd.grad(Watch.apply(x), x, torch.eye(3), is_grads_batched=True)
    torch.autograd.grad(Watch.apply(x).sum(), x)
    assert seen == [True, False]

"""Draws that share a base: one pass over an expanded batch gives what separate models give."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import BertConfig, BertForSequenceClassification, ViTConfig, ViTForImageClassification

import bayesformer as bf
from bayesformer.laws import Samples
from bayesformer.model.space import Space
from bayesformer.predict.member_layers import MemberLinear, SharedBase, find_shared_base
from bayesformer.predict.sampled import tokens_of

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}


def bert(layers=None, targets=("query", "value")):
    torch.manual_seed(0)
    model = BertForSequenceClassification(BertConfig(vocab_size=300, num_labels=3, **SIZES))
    config = LoraConfig(r=2, target_modules=list(targets), layers_to_transform=layers, task_type="SEQ_CLS")
    return get_peft_model(model, config).eval()


def vit():
    torch.manual_seed(0)
    model = ViTForImageClassification(ViTConfig(image_size=8, patch_size=4, num_channels=1, num_labels=3, **SIZES))
    return get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "v_proj"])).eval()


def chain(model, likelihood="categorical", draws=4):
    space = Space.of(model)
    mean = space.pack({name: dict(model.named_parameters())[name].detach() for name in space.names})
    rows = mean + 0.3 * torch.randn(draws, space.size, generator=torch.Generator().manual_seed(1))
    return bf.Posterior(model, bf.Categorical() if likelihood == "categorical" else likelihood, Samples(rows, {}))


def text(rows=3, length=7):
    g = torch.Generator().manual_seed(2)
    ids = torch.randint(300, (rows, length), generator=g)
    mask = torch.ones_like(ids)
    mask[0, 5:] = 0
    return {"input_ids": ids, "attention_mask": mask}


@pytest.mark.parametrize("layers", [None, [1, 2], [2]])
def test_adapters_and_head_in_one_pass_are_separate_models(layers):
    posterior, batch = chain(bert(layers)), text()
    together = posterior.outputs(batch).values
    alone = torch.stack([posterior.module(draw)(**batch).logits for draw in range(4)])
    assert posterior.known["shared base"] is not None
    torch.testing.assert_close(together, alone.detach(), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(posterior.outputs(batch, strategy="looped").values, together, atol=1e-5, rtol=1e-4)


def test_mixed_batches_of_peft_are_a_second_oracle():
    """PEFT's own way: one registered adapter per draw, one adapter name per row."""
    model = bert(targets=("query", "value"))
    posterior, batch = chain(model, draws=3), text(2)
    rows = posterior.outputs(batch).values
    torch.manual_seed(5)
    peer = bert()
    for draw in range(3):
        peer.add_adapter(f"draw{draw}", peer.peft_config["default"])
        with torch.no_grad():
            for name, value in posterior.sample().items():
                peer.get_parameter(name.replace(".default", f".draw{draw}")).copy_(value[draw])
    names = [f"draw{draw}" for draw in range(3) for _ in range(2)]
    repeated = {name: value.repeat(3, 1) for name, value in batch.items()}
    with torch.no_grad():
        mixed = peer.eval()(**repeated, adapter_names=names).logits.view_as(rows)
    torch.testing.assert_close(rows, mixed, atol=1e-5, rtol=1e-4)


def test_pictures_too():
    posterior = chain(vit())
    x = {"pixel_values": torch.randn(2, 1, 8, 8)}
    together = posterior.outputs(x).values
    alone = torch.stack([posterior.module(draw)(**x).logits for draw in range(4)])
    torch.testing.assert_close(together, alone.detach(), atol=1e-5, rtol=1e-4)


def test_the_trunk_below_the_adapters_runs_once():
    posterior, seen = chain(bert([2])), []
    kind = type(posterior.model.get_base_model().bert.encoder.layer[0])
    plain = kind.forward

    def watched(self, hidden, *args, **kwargs):
        seen.append(len(hidden))
        return plain(self, hidden, *args, **kwargs)

    posterior.outputs(text())  # trials are made
    kind.forward = watched
    try:
        posterior.outputs(text())
    finally:
        kind.forward = plain
    assert seen[-3:] == [3, 3, 12]


def test_how_many_draws_go_through_one_pass():
    assert SharedBase((), (), 0.0).draws_per_pass(64) == 8
    assert SharedBase((), (), 0.0).draws_per_pass(4096) == 1
    assert SharedBase((), (), 0.5).draws_per_pass(4096) == 8
    assert tokens_of(text()) == 21
    assert tokens_of(torch.zeros(5, 4, 7)) == 20


def test_where_there_is_no_shared_base():
    whole = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    posterior = chain(whole)
    with posterior.shells.borrow() as shell:
        assert find_shared_base(shell, posterior.theta) is None  # all weights differ
        assert find_shared_base(shell, posterior.theta[:1].expand(2, -1)) is None  # none does
        rows = posterior.theta[:1].repeat(2, 1)
        rows[1, :2] += 1
        found = find_shared_base(shell, rows)  # a part of one layer's weights
        assert found is None or found.paths == ("0",)
    norm = nn.Sequential(nn.Linear(3, 40), nn.LayerNorm(40), nn.Linear(40, 2))
    norm[0].requires_grad_(False)
    norm[2].requires_grad_(False)
    other = chain(norm)
    with other.shells.borrow() as shell:
        assert find_shared_base(shell, other.theta) is None  # a norm is no linear layer
    torch.testing.assert_close(
        other.outputs(torch.ones(2, 3)).values,
        torch.stack([other.module(d)(torch.ones(2, 3)).detach() for d in range(4)]),
    )


def test_member_linear_is_each_layer_alone():
    layers = [nn.Linear(5, 3) for _ in range(4)]
    weight, bias = torch.stack([x.weight for x in layers]), torch.stack([x.bias for x in layers])
    x = torch.randn(8, 6, 5)  # two examples of six tokens for each of four draws
    expected = torch.cat([layer(part) for layer, part in zip(layers, x.split(2), strict=True)])
    torch.testing.assert_close(MemberLinear(weight, bias)(x), expected)
    bare = torch.einsum("mbti,moi->mbto", x.view(4, 2, 6, 5), weight).flatten(0, 1)
    torch.testing.assert_close(MemberLinear(weight, None)(x), bare)
    parts = zip(x.split(2), bias, strict=True)
    shared = torch.cat([nn.functional.linear(part, layers[0].weight, b) for part, b in parts])
    torch.testing.assert_close(MemberLinear(layers[0].weight, bias)(x), shared)
    torch.testing.assert_close(MemberLinear(layers[0].weight, layers[0].bias)(x), layers[0](x))

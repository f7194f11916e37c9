"""Families that draw under torch.func: gradients, vmap over weights, and the KL inside the mapped function."""

import pytest
import torch
from torch.func import functional_call, grad, grad_and_value, vmap

from bayesformer.attention import attention_kl, families
from bayesformer.models.transformer import Encoder, Regressor
from tests.attention_zoo import STOCHASTIC, H


def network(name):
    torch.manual_seed(0)
    model = Regressor(Encoder(dim=4 * H, heads=H, causal=True, family=STOCHASTIC[name])).double().train()
    assert families(model)
    return model, {k: p.detach() for k, p in model.named_parameters()}, torch.randn(3, 5, 1, dtype=torch.float64)


def loss_of(model, x):
    def loss(params):
        out = functional_call(model, params, (x,))
        return out.square().mean() + attention_kl(model).mean()

    return loss


@pytest.mark.parametrize("name", STOCHASTIC)
def test_func_grad_is_the_ordinary_gradient(name):
    model, params, x = network(name)
    torch.manual_seed(1)
    found, value = grad_and_value(loss_of(model, x))(params)
    torch.manual_seed(1)
    loss = model(x).square().mean() + attention_kl(model).mean()
    loss.backward()
    torch.testing.assert_close(value, loss.detach())
    for key, parameter in model.named_parameters():
        expected = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        torch.testing.assert_close(found[key], expected, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("name", STOCHASTIC)
def test_vmap_draws_anew_for_every_set_of_weights(name):
    model, params, x = network(name)
    many = {k: torch.stack([p, p, 1.1 * p]) for k, p in params.items()}

    def run(weights):
        return functional_call(model, weights, (x,)), attention_kl(model)

    outputs, kl = vmap(run, randomness="different")(many)
    assert not torch.equal(outputs[0], outputs[1])
    for i in range(3):  # of one layer, the KL depends on the logits, not on the draw
        _, alone = run({k: p[i] for k, p in many.items()})
        torch.testing.assert_close(kl[i], alone)
    slopes = vmap(grad(loss_of(model, x)), randomness="different")(many)
    assert all(torch.isfinite(s).all() for s in slopes.values())
    assert not torch.equal(slopes["projection.weight"][0], slopes["projection.weight"][1])

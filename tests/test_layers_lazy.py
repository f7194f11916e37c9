"""Weights drawn on use: random wherever they are used, one draw per pass, and none for a look at their shape."""

import pytest
import torch
from torch import nn
from torch.func import vmap
from torch.nn import functional as F

from bayesformer.core import draws
from bayesformer.layers import convert
from bayesformer.layers.lazy import Lazy
from tests.laws import assert_mean


class PassedBy(nn.Module):
    """Calls one layer, and takes another's weight in one of many ways."""

    def __init__(self, use):
        super().__init__()
        self.called, self.taken, self.use = nn.Linear(3, 3), nn.Linear(3, 3, bias=False), use

    def forward(self, x):
        return self.use(self.called(x), self.taken)


USES = {
    "function": lambda x, layer: F.linear(x, layer.weight),
    "operator": lambda x, layer: x @ layer.weight.mT,
    "reflected": lambda x, layer: 1.0 + layer.weight + 0 * x,
    "method": lambda x, layer: x.matmul(layer.weight.t()),
    "index": lambda x, layer: x * layer.weight[0],
    "loop": lambda x, layer: torch.stack([x @ row for row in layer.weight], -1),
    "list": lambda x, layer: torch.cat([layer.weight, layer.weight]) + 0 * x.sum(),
    "parameters": lambda x, layer: sum(p.sum() for p in layer.parameters()) + 0 * x,
    "state": lambda x, layer: layer.state_dict()["weight"] + 0 * x,
    "data": lambda x, layer: layer.weight.data + 0 * x,
    "number": lambda x, layer: x * 0 + layer.weight[0, 0].item(),
    "as it is": lambda x, layer: layer.weight,
}


@pytest.mark.parametrize("gradients", [True, False])
@pytest.mark.parametrize("use", USES)
def test_a_weight_taken_past_its_layer_is_random(use, gradients):
    model = convert(PassedBy(USES[use]), names="taken.weight", rho=0.0)
    assert [name for _, name, _ in model._layers] == ["taken.weight"]
    x = torch.ones(1, 3)
    with torch.set_grad_enabled(gradients):
        one, two = (model(x) + 0 for _ in range(2))
    point = model.point()(x)
    assert not torch.equal(one, two)
    assert one.shape == point.shape
    if gradients and use not in ("state", "data", "number"):
        assert (torch.autograd.grad(one.sum(), model.rho)[0] != 0).any()


def test_it_has_the_law_of_the_weight():
    model = convert(PassedBy(USES["as it is"]).double(), rho=0.3)
    x = torch.ones(1, 3, dtype=torch.float64)
    with torch.no_grad():
        draws = vmap(lambda _: model(x) + 0, randomness="different")(torch.zeros(4000))
    loc, scale = model.model.taken.weight.detach(), model.scales()["taken.weight"].detach()
    assert_mean(draws, loc)
    assert_mean((draws - loc).square(), scale.square())


def test_all_uses_in_a_pass_see_one_draw():
    model = convert(PassedBy(lambda x, layer: F.linear(x, layer.weight) - x @ layer.weight.mT), rho=0.0)
    assert model(torch.ones(1, 3)).abs().max() < 1e-6


def test_it_is_drawn_at_the_first_operation_and_not_before():
    weight, count = nn.Parameter(torch.randn(3, 4)), []

    def draw():
        count.append(1)
        return weight + 1

    lazy = Lazy(weight, draw)
    module = nn.Linear(4, 3)
    module._parameters["weight"] = lazy
    seen = next(module.parameters())
    assert (seen.dtype, seen.device, seen.shape, seen.ndim) == (weight.dtype, weight.device, weight.shape, 2)
    assert seen.requires_grad
    assert seen.is_floating_point()
    assert (seen.size(0), seen.dim()) == (3, 2)
    assert not count
    x = torch.randn(2, 4)
    torch.testing.assert_close(module(x), F.linear(x, weight + 1, module.bias))
    lazy.sum().backward()
    assert torch.equal(weight.grad, torch.ones(3, 4))
    assert len(count) == 1


def test_what_gets_past_the_function_hook_is_drawn_too():
    lazy = Lazy(torch.zeros(3), lambda: torch.ones(3))
    with torch._C.DisableTorchFunctionSubclass():
        assert torch.equal(torch.add(lazy, 1), torch.full((3,), 2.0))


@pytest.mark.parametrize("drawn", [True, False])
def test_layers_that_draw_outputs_draw_no_weights(drawn, monkeypatch):
    """Not one number of the noise is spent on the weights of such layers."""
    shapes = []
    draw = draws.draw
    monkeypatch.setattr(draws, "draw", lambda like, *how: shapes.append(like.shape) or draw(like, *how))
    model = convert(nn.Sequential(nn.Embedding(50, 4), nn.Linear(4, 2), nn.LayerNorm(2)), local=not drawn)
    model(torch.tensor([3, 7, 7]))
    rows = [(3, 4), (3, 2), (2,), (2,)]
    assert shapes == ([(model.layout.size,)] if drawn else [torch.Size(shape) for shape in rows])

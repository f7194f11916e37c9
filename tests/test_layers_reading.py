"""Weights that a model takes past their layer's forward are random too, with one draw per pass."""

import pytest
import torch
from torch import nn
from torch.func import vmap
from torch.nn import functional as F

from bayesformer.layers import convert
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
    model = convert(PassedBy(USES[use]), subset="taken.weight", rho=0.0)
    assert [name for _, name, _ in model._layers] == ["taken.weight"]
    x = torch.ones(1, 3)
    with torch.set_grad_enabled(gradients):
        one, two = (model(x) + 0 for _ in range(2))
    point = model.point()(x)
    assert not torch.equal(one, two)
    assert one.shape == point.shape
    if gradients and use not in ("state", "data", "number"):
        assert (torch.autograd.grad(one.sum(), model.rho[0])[0] != 0).any()


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

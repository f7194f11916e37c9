"""The penalty on low-rank adapters: its value, its gradient in training, and what it does."""

import peft
import pytest
import torch
from torch import nn

import bayesformer as bf
from bayesformer.core.types import Batch
from bayesformer.core.vectors import THETA
from bayesformer.likelihoods import Gaussian
from bayesformer.model.skeleton import Skeleton, shadow
from bayesformer.model.space import Space
from bayesformer.train.adapter_penalty import AdapterPenalty
from bayesformer.train.objective import Objective

F64 = torch.float64


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 5), nn.Linear(5, 2)

    def forward(self, x):
        return self.second(self.first(x).tanh())


def adapted(**more):
    config = peft.LoraConfig(r=2, lora_alpha=6, target_modules=["first", "second"], init_lora_weights=False, **more)
    return peft.get_peft_model(Two().double(), config)


def products(model):
    """B A of both layers, spelled out."""
    layers = [model.base_model.model.first, model.base_model.model.second]
    return [layer.lora_B["default"].weight @ layer.lora_A["default"].weight for layer in layers]


def test_it_is_the_squared_norm_of_what_the_adapters_add_without_their_scale():
    model = adapted()
    found = AdapterPenalty(0.3)(None, model, None)
    torch.testing.assert_close(found, 0.3 * sum(p.square().sum() for p in products(model)))


def test_the_objective_has_its_gradient():
    """Against finite differences of the value, and against the objective without it."""
    model = adapted()
    space, (x, y) = Space.of(model), (torch.randn(6, 4, dtype=F64), torch.randn(6, 2, dtype=F64))
    theta, batch = space.pack(dict(model.named_parameters())).detach(), Batch(x, y)
    shell = Skeleton(shadow(model, space.names), space).shell()

    def objective(terms):
        return Objective(shell, Gaussian(0.5), 6, terms=terms)

    with_it, plain = objective((AdapterPenalty(0.7),)), objective(())
    value, _, grads = with_it.value_and_grad({THETA: theta.clone()}, batch)
    gradient = grads[THETA].clone()
    own = with_it.named["adapter_penalty"]
    _, _, others = plain.value_and_grad({THETA: theta.clone()}, batch)
    penalty = 0.7 * sum(p.square().sum() for p in products(model))
    torch.testing.assert_close(own, penalty.detach())
    exact = torch.autograd.grad(penalty, [dict(model.named_parameters())[name] for name in space.names])
    packed = torch.cat([g.flatten() for g in exact])
    torch.testing.assert_close(others[THETA] - gradient, packed)
    place, step = 3, 1e-6
    moved = theta.clone()
    moved[place] += step
    ahead = with_it.value_and_grad({THETA: moved}, batch)[0]
    torch.testing.assert_close((ahead - value) / step, gradient[place], rtol=1e-4, atol=1e-4)


def fitted(penalty, **more):
    torch.manual_seed(0)
    model = adapted()
    data = (torch.randn(40, 4, dtype=F64), torch.randn(40, 2, dtype=F64))
    method = bf.Ensemble(2, adapter_penalty=penalty)
    training = bf.Training(epochs=30, batch_size=20, lr=0.02, warmup=1)
    return bf.fit(model, data, likelihood=bf.Gaussian(0.5), method=method, training=training, **more)


def size(posterior):
    return float(sum(p.detach().square().sum() for draw in range(2) for p in products(posterior.module(draw))))


def test_members_with_it_add_less_to_the_base():
    plain, small, large = (size(fitted(penalty)) for penalty in (0.0, 0.1, 10.0))
    assert large < 0.1 * plain
    assert large < small < plain


def test_a_checkpoint_of_another_penalty_is_not_resumed(tmp_path):
    first = fitted(0.0, checkpoint=tmp_path)
    assert size(fitted(0.0, checkpoint=tmp_path)) == size(first)
    with pytest.raises(bf.DamagedFileError, match="belongs to another run"):
        fitted(10.0, checkpoint=tmp_path)


def test_models_without_adapters_and_bad_numbers_are_refused():
    data = (torch.randn(8, 4), torch.randn(8, 2))
    with pytest.raises(ValueError, match=r"adapter_penalty must be 0 for a model without LoRA adapters.*got 1.0"):
        bf.fit(Two(), data, likelihood=bf.Gaussian(1.0), method=bf.Ensemble(2, adapter_penalty=1.0))
    with pytest.raises(ValueError, match="ensemble.adapter_penalty must be a number of at least 0; got -1"):
        bf.Ensemble(2, adapter_penalty=-1.0)

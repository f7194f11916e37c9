"""Weights in half precision or of several dtypes: staged, or float32 where a head allows it."""

import pytest
import torch
from torch import nn

from bayesformer.model.calling import apply
from bayesformer.model.skeleton import Skeleton
from bayesformer.model.space import Space
from tests.shell_checks import assert_same, record
from tests.shell_zoo import Attended, Encoder, Net, Shared, _padded


def shell_of(model, infer=None, **options):
    return Skeleton(model, Space.of(model, infer)).shell(**options)


def test_a_head_in_half_precision_computes_in_float32():
    model, x = Net().bfloat16(), torch.randn(5, 3).bfloat16()
    before = record(model)
    shell = shell_of(model, "second*")
    output = shell(x)
    assert output.dtype == torch.float32
    assert shell.facts.staged == 0
    torch.testing.assert_close(output, model(x).float(), rtol=0.02, atol=0.02)
    small = shell.theta * 1e-5  # far below half a step of bfloat16
    shell.load(shell.theta + small)
    assert not torch.equal(shell(x), output)
    output.sum().backward()
    assert_same(before, record(model))
    assert shell.skeleton.plain(shell.theta).second.weight.dtype == torch.bfloat16


def test_weights_before_frozen_ones_are_staged():
    model, x = Net().bfloat16(), torch.randn(5, 3).bfloat16()
    shell = shell_of(model, "first*")
    assert shell.facts.staged == 16
    assert "16 staged" in repr(shell)
    assert shell.theta.dtype == torch.float32
    assert shell.module.first.weight.dtype == torch.bfloat16
    assert torch.equal(shell(x), model(x))
    theta = torch.randn(16)
    shell.load(theta)
    assert torch.equal(shell.module.first.weight.reshape(-1), theta[:12].bfloat16())
    shell.theta.add_(1)
    shell.load(shell.theta)  # its own vector: still cast
    assert torch.equal(shell.module.first.bias, (theta[12:] + 1).bfloat16())


def test_gradients_of_staged_weights_add_up_in_float32():
    model = Net().bfloat16()
    shell = shell_of(model, "first*")
    batches = [torch.randn(5, 3).bfloat16() for _ in range(3)]
    total = torch.zeros(16)
    for x in batches:
        shell(x).float().square().sum().backward()
        grads = torch.autograd.grad(model(x).float().square().sum(), list(model.first.parameters()))
        total += torch.cat([g.reshape(-1).float() for g in grads])
        assert all(p.grad is None for p in shell.module.first.parameters())
    torch.testing.assert_close(shell.grad, total, rtol=0, atol=0)
    shell.verify()


def test_two_dtypes_are_one_vector_in_the_wider():
    model = Net()
    model.second.double()
    model.first.register_forward_hook(lambda m, a, y: y.double())
    shell = shell_of(model)
    x = torch.randn(5, 3)
    assert shell.theta.dtype == torch.float64
    assert shell.facts.staged == 16
    assert torch.equal(shell(x), model(x))
    shell(x).sum().backward()
    grads = torch.autograd.grad(model(x).sum(), list(model.parameters()))
    torch.testing.assert_close(shell.grad, torch.cat([g.reshape(-1).double() for g in grads]))


@pytest.mark.parametrize(
    ("model", "inputs", "infer", "staged"),
    [
        (Net, (5, 3), None, 0),  # every module is a leaf of its own: all in float32
        (Shared, None, "head*", 28),  # tied to an embedding whose output goes through frozen layers
        (Attended, (2, 5, 8), None, 288),  # attention reads out_proj without calling it; the head is float32
    ],
)
def test_which_modules_are_float32(model, inputs, infer, staged):
    model = model().bfloat16()
    x = torch.randint(7, (3, 5)) if inputs is None else torch.randn(inputs).bfloat16()
    shell = shell_of(model, infer)
    assert shell.facts.staged == staged
    torch.testing.assert_close(shell(x).float(), model(x).float(), rtol=0.05, atol=0.05)


def test_an_encoder_in_half_precision_runs_in_every_mode():
    model = Encoder().bfloat16().eval()
    inputs = _padded()
    inputs["x"] = inputs["x"].bfloat16()
    for infer in ("head*", "encoder.layers.1*", "*"):
        shell = shell_of(model, infer)
        with torch.no_grad():
            fast = shell(inputs)
        slow = shell(inputs)
        torch.testing.assert_close(fast, slow, rtol=0.05, atol=0.05)
        slow.sum().backward()
        assert shell.grad.abs().sum() > 0


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["llama", "llama_tied", "bert", "t5", "vit", "gpt2"])
@pytest.mark.parametrize("infer", ["head", "all"])
def test_transformers_in_half_precision(name, infer):
    pytest.importorskip("transformers")
    pytest.importorskip("peft")
    from tests.shell_transformers import CASES

    case = CASES[name]()
    model = case.model.bfloat16().eval()
    inputs = {
        k: v.bfloat16() if v.__class__ is torch.Tensor and v.is_floating_point() else v for k, v in case.inputs.items()
    }
    heads = {"bert": "classifier*", "vit": "classifier*"}
    shell = shell_of(model, heads.get(name, "lm_head*") if infer == "head" else None)
    output = shell(inputs)
    torch.testing.assert_close(output.float(), apply(model, inputs).float(), rtol=0.1, atol=0.1)
    output.float().square().sum().backward()
    assert shell.grad.abs().sum() > 0


def test_spread_of_a_head_is_kept():
    """Variance of outputs under sd = 1e-3 |w|: as of a float32 model; rounded weights would lose most of it."""
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2)).bfloat16()
    x = torch.randn(4, 8).bfloat16()
    shell = shell_of(model, "2.*", gradients=False)
    mode = shell.theta.clone()
    noise = torch.randn(200, mode.numel()) * 1e-3 * mode.abs()
    outputs = []
    for row in noise:
        shell.load(mode + row)
        outputs.append(shell(x).detach())
    hidden = torch.tanh(model[0](x)).float()
    hidden = torch.cat([hidden, torch.ones(4, 1)], 1)
    scale = torch.cat([model[2].weight.float(), model[2].bias.float()[:, None]], 1).abs() * 1e-3
    exact = hidden.square() @ scale.square().T
    ratio = torch.stack(outputs).var(0) / exact
    assert (ratio - 1).abs().max() < 0.6  # 200 draws: sd of a variance is .1 of it

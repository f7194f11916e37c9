"""What must hold for every model in a shell, and a record of everything a user could notice about a model."""

import torch
from torch import Tensor, nn

from bayesformer.model.admission import unwrap
from bayesformer.model.calling import apply
from bayesformer.model.skeleton import Skeleton
from bayesformer.model.space import Space


def record(model):
    """Tensors, gradients, flags, plain attributes, hooks and the configuration of a model."""
    tensors = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    simple = {
        (path, key): (value.clone() if isinstance(value, Tensor) else value)
        for path, module in model.named_modules()
        for key, value in vars(module).items()
        if isinstance(value, Tensor | int | float | str | bool)
    }
    config = getattr(model, "config", None)
    return {
        "values": {name: t.detach().clone() for name, t in tensors.items()},
        "objects": {name: id(t) for name, t in tensors.items()},
        "grads": {name: t.grad for name, t in tensors.items()},
        "flags": {name: t.requires_grad for name, t in tensors.items()},
        "simple": simple,
        "hooks": {path: _hooks(module) for path, module in model.named_modules()},
        "config": config.to_dict() if hasattr(config, "to_dict") else None,
    }


def _hooks(module):
    tables = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return [list(map(id, table.values())) for table in tables]


def assert_same(before, after):
    for part in ("objects", "flags", "hooks", "config"):
        assert before[part] == after[part], part
    for name, value in before["values"].items():
        assert torch.equal(value, after["values"][name]), name
    for name, grad in before["grads"].items():
        assert after["grads"][name] is grad, f"gradient of {name}"
    assert before["simple"].keys() == after["simple"].keys()
    for key, value in before["simple"].items():
        same = torch.equal(value, after["simple"][key]) if isinstance(value, Tensor) else value == after["simple"][key]
        assert same, key


def close(a, b, exact):
    if exact:
        assert torch.equal(a, b), (a - b).abs().max()
    else:
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def reference(case, space):
    """Output and gradient of the user's own model, without filling its .grad; Parameters on one memory are one."""
    model = unwrap(case.model)
    named = dict(model.named_parameters(remove_duplicate=False))
    groups = [list({id(named[n]): named[n] for n in (name, *also)}.values()) for name, also in others(space)]
    weights = [weight for group in groups for weight in group]
    flags = [weight.requires_grad for weight in weights]
    for weight in weights:
        weight.requires_grad_(True)
    output = apply(model, case.inputs)
    grads = iter(torch.autograd.grad(output.double().sin().sum(), weights, allow_unused=True))
    for weight, flag in zip(weights, flags, strict=True):
        weight.requires_grad_(flag)
    total = {}
    for name, group in zip(space.names, groups, strict=True):
        found = [next(grads) for _ in group]
        total[name] = sum((g for g in found if g is not None), torch.zeros_like(group[0], dtype=space.dtype))
    return output.detach(), space.pack(total)


def others(space):
    return zip(space.names, space.aliases, strict=True)


def check(case):
    """The contract of a shell on one case; returns the shell."""
    model = unwrap(case.model).eval()
    space = Space.of(case.model, case.infer)
    output, gradient = reference(case, space)
    before = record(model)
    skeleton = Skeleton(case.model, space)
    shell = skeleton.shell()
    shell.verify()
    mine = shell(case.inputs)
    close(mine.detach(), output, case.exact)
    mine.double().sin().sum().backward()
    torch.testing.assert_close(shell.grad, gradient, rtol=1e-5, atol=1e-6)
    shell.verify()
    _answers_to_theta(case, skeleton, shell, output)
    _trains(case, shell)
    assert_same(before, record(model))
    assert skeleton.changed() is None
    return shell


def _answers_to_theta(case, skeleton, shell, output):
    theta = shell.theta + 0.1 * torch.randn_like(shell.theta)
    shell.load(theta)
    with torch.no_grad():
        mine = shell(case.inputs)
        assert not torch.allclose(mine, output), "the shell does not answer to theta"
        alone = skeleton.plain(theta)
        close(apply(alone, case.inputs), mine, case.exact)


def _trains(case, shell):
    """Some steps as an optimiser would make them."""
    shell.module.train()
    for _ in range(2):
        shell.grad.zero_()
        shell(case.inputs).double().square().mean().backward()
        assert shell.grad.abs().sum() > 0
        shell.theta.sub_(shell.grad, alpha=0.01)
        shell.load(shell.theta)
    shell.module.eval()


def small_net():
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))

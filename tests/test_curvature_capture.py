"""Every use of a parameter is seen, example by example, on every kind of model; or it is said that it is not."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from bayesformer.core.compat import transformed
from bayesformer.jacobians import batched_backward
from bayesformer.jacobians.capture import Capture, backpropagate, mismatches
from bayesformer.jacobians.use_recorder import UseRecorder
from bayesformer.laplace.estimate import estimate
from bayesformer.laws import gaussian
from bayesformer.likelihoods import Categorical
from bayesformer.model.calling import apply
from bayesformer.model.space import Space
from bayesformer.predict.linearised import linearised_outputs
from tests.curvature_zoo import MODELS, build, inferred


def summed(run, sites, gradients):
    """{name: (S, B, *shape)}: the sites of each parameter added up."""
    total = {}
    for site, g in zip(sites, gradients, strict=True):
        values = site.per_example(g)
        assert values.shape[2:] == run.parameters[site.name].shape
        total[site.name] = total[site.name] + values if site.name in total else values
    return total


def check(model, inputs, run=None):
    """The gradients of every example alone, against autograd."""
    run = run or Capture(model)
    outputs, sites = run(inputs)
    columns = torch.randn(2, *outputs.shape, dtype=outputs.dtype)
    total = summed(run, sites, backpropagate(sites, outputs, columns))
    for n in range(len(outputs)):
        only = torch.zeros_like(columns[1])
        only[n] = columns[1, n]
        exact = torch.autograd.grad(outputs, list(run.parameters.values()), only, retain_graph=True, allow_unused=True)
        scale = max(g.abs().max() for g in exact if g is not None)
        for (name, p), g in zip(run.parameters.items(), exact, strict=True):
            found = total[name][1, n] if name in total else torch.zeros_like(p)
            torch.testing.assert_close(found, torch.zeros_like(p) if g is None else g, rtol=1e-9, atol=1e-12 * scale)
    return run, sites


@pytest.mark.parametrize("name", MODELS)
def test_sites_add_up_to_each_example_s_gradient(name):
    model, _, data = build(name)
    run, sites = check(model, data.inputs)
    expected = {"odd": "torch.functional.einsum"} if name == "convolution" else {}
    assert run.general == expected
    plain = apply(model, data.inputs)
    torch.testing.assert_close(run(data.inputs)[0], plain, rtol=1e-12, atol=1e-12)
    assert all(p.requires_grad and p.grad is None for p in inferred(model).values())
    assert {site.name for site in sites} <= set(inferred(model))


@pytest.mark.parametrize("name", MODELS)
def test_columns_together_equal_columns_in_turn(name):
    model, _, data = build(name)
    outputs, found = Capture(model)(data.inputs)
    own = [site for site in found if site.edge is not None]
    columns = torch.randn(3, *outputs.shape, dtype=outputs.dtype)
    together = backpropagate(own, outputs, columns)
    for k, column in enumerate(columns):
        for g, alone in zip(together, backpropagate(own, outputs, column.unsqueeze(0)), strict=True):
            torch.testing.assert_close(g[k], alone[0], rtol=1e-9, atol=1e-12)


class Doubled(torch.autograd.Function):
    """Has no batching rule, and its backward pass leaves torch."""

    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, gradient):
        return torch.from_numpy(2 * gradient.numpy())


def test_a_backward_pass_that_cannot_be_batched_goes_in_turn():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)

        def forward(self, x):
            return self.last(Doubled.apply(self.first(x)).tanh())

    check(Net().double().eval(), torch.randn(5, 3, dtype=torch.float64))


def test_kinds_of_sites():
    model, _, data = build("gpt2")
    sites = Capture(model)(data.inputs)[1]
    tied = [site.kind for site in sites if site.name == "transformer.wte.weight"]
    assert tied == ["embedding", "linear"]
    packed = next(site for site in sites if site.name == "transformer.h.0.attn.c_attn.weight")
    assert packed.turned
    assert packed.inputs.shape == (4, 5, 4)
    assert not packed.inputs.requires_grad


@pytest.mark.parametrize("length", [2, 3, 4])
def test_a_batch_axis_that_is_not_first(length):
    """As many positions as examples, in the first look or later: the axis is found all the same."""

    class Second(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.head = nn.TransformerEncoderLayer(4, 2, 6), nn.Linear(4, 3)

        def forward(self, x):
            return self.head(self.layer(x.transpose(0, 1))).transpose(0, 1)

    model = Second().double().eval()
    run, sites = check(model, torch.randn(4, length, 4, dtype=torch.float64))
    assert run.general == {}
    assert next(s for s in sites if s.name == "layer.linear1.weight").inputs.shape == (4, length, 4)


def test_small_gains_do_not_cost_digits():
    class Norms(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two, self.three = nn.LayerNorm(3), nn.RMSNorm(3, eps=1e-6), nn.LayerNorm(3, bias=False)

        def forward(self, x):
            return self.three(self.two(self.one(x)))

    model, x = Norms().double().eval(), torch.randn(3, 2, 3, dtype=torch.float64)
    for gains in ([1.0, 0.7, -1.2], [1.0, 0.0, 1e-12]):
        with torch.no_grad():
            for norm in (model.one, model.two, model.three):
                norm.weight.copy_(torch.tensor(gains, dtype=torch.float64))
            model.one.bias.copy_(torch.tensor([0.3, -0.1, 0.2]))
        check(model, x)


@pytest.mark.parametrize("names", [None, ["0.bias", "1.weight"], ["0.weight", "2.weight"]])
def test_each_norm_has_its_own_normalised_inputs(names):
    """Over one axis or two; moments of one that is followed in part, or not at all, are not taken for another's."""
    model = nn.Sequential(nn.LayerNorm((2, 3)), nn.RMSNorm(3, eps=1e-6), nn.LayerNorm(3)).double().eval()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn_like(p))
    run, _ = check(model, torch.randn(4, 2, 3, dtype=torch.float64), Capture(model, Space.of(model).select(names)))
    assert run.general == {}


def test_norms_in_mixed_precision():
    model, x = nn.LayerNorm(3).eval(), torch.randn(4, 2, 3)
    with torch.autocast("cpu", torch.bfloat16):
        _, sites = Capture(model)(x.bfloat16())
    expected = F.layer_norm(x.bfloat16().float(), (3,))
    torch.testing.assert_close(
        next(s for s in sites if s.name == "weight").inputs.float(), expected, rtol=0.01, atol=0.01
    )


class Bare(nn.Module):
    """One parameter, used as `use` says."""

    def __init__(self, use, *shape):
        super().__init__()
        self.use, self.p, self.head = use, nn.Parameter(torch.randn(shape)), nn.Linear(3, 2)

    def forward(self, x):  # x (B, 4, 3)
        return self.head(self.use(x, self.p)).sum(1)


USES = {
    "add": (lambda x, p: x + p, (3,)),
    "add on the left": (lambda x, p: p + x, (4, 1)),
    "subtract": (lambda x, p: x - p, (1, 4, 3)),
    "subtract from": (lambda x, p: p - x, (3,)),
    "in place": (lambda x, p: x.clone().add_(p), (3,)),
    "changed in place afterwards": (lambda x, p: (x + p).mul_(2).tanh_(), (3,)),
    "scalar": (lambda x, p: p * x, ()),
    "product": (lambda x, p: x * p, (4, 1)),
    "matrix": (lambda x, p: x @ p, (3, 3)),
    "transposed": (lambda x, p: x @ p.T, (3, 3)),
    "rows": (lambda x, p: F.linear(x, p[2:5]), (6, 3)),
    "columns": (lambda x, p: F.linear(x, p[:, 1:4]), (3, 5)),
    "chunks": (lambda x, p: x * p.chunk(2)[0] + p.chunk(2)[1], (6,)),
    "overlapping slices": (lambda x, p: F.linear(x, p[:3]) + F.linear(x, p[2:5]), (5, 3)),
    "class token": (lambda x, p: torch.cat([p.expand(len(x), -1, -1), x], 1), (1, 1, 3)),
    "repeated": (lambda x, p: torch.cat([p.repeat(len(x), 1, 1), x], 1), (1, 2, 3)),
    "positions looked up": (lambda x, p: x + F.embedding(torch.arange(4).unsqueeze(0), p), (6, 3)),
    "positions with a constant": (lambda x, p: x + (p + torch.ones(4, 3).double()), (4, 3)),
    "in two places": (lambda x, p: torch.tanh(x + p) * p, (3,)),
    "flattened": (lambda x, p: F.linear(x.reshape(-1, 3), p).view_as(x), (3, 3)),
    "with scale": (lambda x, p: torch.addmm(p[0], x.reshape(-1, 3), p[1:]).view_as(x), (4, 3)),
}
SLOW = {
    "function of it": (lambda x, p: x * p.exp(), (3,), "torch.Tensor.exp"),
    "with itself": (lambda x, p: x + p * p, (3,), "torch.Tensor.mul"),
    "scaled sum": (lambda x, p: torch.add(x, p, alpha=2), (3,), "torch.add"),
    "normalised": (lambda x, p: F.linear(x, F.normalize(p)), (3, 3), "torch.nn.functional.normalize"),
    "along the batch": (lambda x, p: x.flatten(0, 1).T.mm(p[: 4 * len(x)]).sum() + x, (64, 2), "torch.Tensor.mm"),
}


@pytest.mark.parametrize("use", USES)
def test_bare_parameters(use):
    run, sites = check(Bare(*[USES[use][0], *USES[use][1]]).double().eval(), torch.randn(5, 4, 3).double())
    assert run.general == {}
    assert all(site.kind != "general" for site in sites)


@pytest.mark.parametrize("use", SLOW)
def test_a_use_without_a_rule_goes_the_slow_way(use):
    function, shape, name = SLOW[use]
    run, sites = check(Bare(function, *shape).double().eval(), torch.randn(5, 4, 3).double())
    assert run.general == {"p": name}
    assert [site.kind for site in sites if site.name == "p"] == ["general"]
    assert sites[-1].reason == name


def test_the_slow_way_equals_the_fast_one():
    model, _, data = build("layer")
    names = ["layer.linear1.weight", "layer.norm1.bias"]
    run, sites = check(model, data.inputs, Capture(model, general=names))
    assert run.general == dict.fromkeys(names, "asked for")
    assert [site.name for site in sites if site.kind == "general"] == [n for n in run.parameters if n in names]


def test_a_site_that_is_missed_is_found_by_the_probe(monkeypatch):
    """A rule that overlooks a use, or mistakes the batch axis, must not pass."""
    from bayesformer.jacobians import use_rules

    model, _, data = build("layer")
    monkeypatch.setitem(use_rules.RULES, F.layer_norm, lambda *_, **__: True)
    run, _ = check(model, data.inputs)
    norms = {name for name in run.parameters if "norm" in name}
    assert run.general == dict.fromkeys(norms, "no use of it was seen")


def test_a_mistaken_axis_is_found():
    model, _, data = build("mlp")
    outputs, sites = Capture(model)(data.inputs[:3])
    parameters = inferred(model)
    assert mismatches(parameters, outputs, sites) == {}
    wrong = [site for site in sites if site.kind != "linear"]
    assert set(mismatches(parameters, outputs, wrong)) == {"net.0.weight", "net.3.weight"}

    class Mixed(nn.Module):  # examples meet: its rows are flattened the other way
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, x):
            return self.layer(x.transpose(0, 1).reshape(-1, 3)).view(x.shape[1], len(x), 2).transpose(0, 1)

    run, _ = check(Mixed().double().eval(), torch.randn(4, 6, 3).double())
    assert run.general["layer.weight"] == "its uses do not keep examples apart along one axis"


class Experts(nn.Module):
    """Examples go to one of two layers by the sign of their first number."""

    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(3, 2), nn.Linear(3, 2)

    def forward(self, x):
        out, chosen = x.new_zeros(len(x), 2), x[:, 0] > 0
        out[chosen] = self.left(x[chosen])
        out[~chosen] = self.right(x[~chosen])
        return out


def test_use_that_depends_on_the_data_is_an_error():
    x = torch.randn(6, 3).double()
    x[:, 0] = torch.tensor([1.0, 1.0, 1.0, 1.0, -1.0, 1.0])
    model = Experts().double().eval()
    with pytest.raises(
        ValueError, match=r"parameter 'left.weight' is used by torch.nn.functional.linear in another way"
    ):
        Capture(model)(x)
    check(model, x, Capture(model, general=list(inferred(model))))


def test_use_that_depends_on_the_data_is_followed_by_backward_passes_from_there_on():
    x = torch.randn(6, 3).double()
    x[:, 0] = torch.tensor([1.0, 1.0, 1.0, 1.0, -1.0, 1.0])
    model, likelihood, y = Experts().double().eval(), Categorical(), torch.tensor([0, 1, 1, 0, 1, 0])
    space, names = Space.of(model), list(inferred(model))
    found = estimate(model, likelihood, (x, y), "full", batch_size=6)
    exact = estimate(model, likelihood, (x, y), "full", batch_size=6, general=names)
    assert set(found.general) >= {"left.weight", "right.weight"}
    torch.testing.assert_close(found.structures[0].dense(), exact.structures[0].dense())
    law = gaussian(space.pack(dict(model.named_parameters())), torch.full((space.size,), 0.5).double())
    whole = linearised_outputs(model, space, law, x)
    alone = [linearised_outputs(model, space, law, x[n : n + 1]) for n in range(6)]
    torch.testing.assert_close(whole.covariance, torch.cat([one.covariance for one in alone]))


class Detached(nn.Module):
    """A layer whose weight is also used without the batch, divided by its own norm, of which nothing flows back."""

    def __init__(self):
        super().__init__()
        self.layer, self.gain = nn.Linear(4, 2, bias=False), nn.Parameter(torch.tensor([1.5, 0.5]))

    def forward(self, x):
        norm = self.layer(torch.eye(4, dtype=x.dtype)).norm(dim=0)  # as PEFT computes the norms of DoRA
        return self.layer(x) * (self.gain / norm.detach())


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 8])
def test_a_use_that_is_detached_is_no_use(count):
    run, sites = check(Detached().double().eval(), torch.randn(count, 4).double())
    assert run.general == {"gain": "torch.Tensor.div"}
    assert [site.name for site in sites] == ["layer.weight", "gain"]
    check(run.model, torch.randn(7, 4).double(), run)  # 4 rows of the identity are no batch of 7


def test_only_some_parameters():
    model, _, data = build("vit")
    for p in (model.projection.bias,):
        p.requires_grad_(False)
    run = Capture(model, Space.of(model).select(["encoder.norm.weight", "projection.weight"]))
    outputs, sites = run(data.inputs)
    assert [site.name for site in sites] == ["encoder.norm.weight", "projection.weight"]
    # Nothing below the first followed layer is in the graph.
    names, todo = set(), [outputs.grad_fn]
    while todo:
        node = todo.pop()
        names.add(type(node).__name__)
        todo += [n for n, _ in node.next_functions if n is not None]
    assert "SoftmaxBackward0" not in names
    assert not model.projection.bias.requires_grad
    assert all(p.requires_grad for n, p in model.named_parameters() if n != "projection.bias")


def test_a_failing_forward_pass_leaves_the_model_as_it_was():
    model, _, data = build("vit")
    run = Capture(model, Space.of(model).select(["projection.weight"]))
    with pytest.raises(ValueError, match="images must have shape"):
        run(data.inputs[:, :, :2])
    assert all(p.requires_grad for p in model.parameters())


def test_random_streams_are_left_alone():
    model, _, data = build("vit")
    before = torch.get_rng_state()
    Capture(model)(data.inputs)
    assert torch.equal(before, torch.get_rng_state())


def test_encoder_fast_path_is_not_taken():
    layer = nn.TransformerEncoderLayer(4, 2, 6, batch_first=True)
    model = nn.TransformerEncoder(layer, 2).double().eval()
    run, sites = check(
        model,
        torch.randn(3, 5, 4).double(),
        Capture(model, Space.of(model).select(["layers.1.self_attn.in_proj_weight"])),
    )
    assert len(sites) == 1
    assert run.general == {}


def test_what_is_found_does_not_depend_on_how_many_examples_come_first():
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, x):
            return self.layer(x.transpose(0, 1).reshape(-1, 3)).view(x.shape[1], len(x), 2).transpose(0, 1)

    model, x = Mixed().double().eval(), torch.randn(4, 6, 3).double()
    first, _ = check(model, x[:1])
    assert "layer.weight" in first.general
    assert check(model, x)[0].general == first.general
    check(model, x, first)


def test_a_model_that_takes_one_example_only_is_probed_on_one():
    class Lone(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, x):
            if len(x) != 1:
                raise ValueError("one graph at a time")
            return self.layer(x)

    run, sites = check(Lone().double().eval(), torch.randn(1, 6, 3).double())
    assert run.probed == 1
    assert len(sites) == 2


def test_errors():
    model = build("vit")[0]
    with pytest.raises(
        ValueError, match="subset='projection.wight' matches no weight. Nearest names: projection.weight"
    ):
        Capture(model, Space.of(model).select(["projection.wight"]))
    model.encoder.blocks[0].train()
    with pytest.raises(ValueError, match=r"eval mode.*got a model whose encoder.blocks.0 module is training"):
        Capture(model)
    model.train()
    with pytest.raises(ValueError, match="got a model whose root module is training"):
        Capture(model)

    class Blind(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, x):
            return self.layer(x).detach()

    with pytest.raises(ValueError, match="do not depend on layer.weight, layer.bias"):
        Capture(Blind().eval())(torch.randn(2, 3))
    with pytest.raises(ValueError, match=r"one entry per example in front; got \(4, 3\) for 2 examples"):
        Capture(nn.Sequential(nn.Linear(3, 3), nn.Flatten(0, 1)).eval())(torch.randn(2, 2, 3))


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_gelu_sends_columns_back_together_as_one_by_one(approximate):
    x = torch.randn(4, 7, dtype=torch.float64, requires_grad=True)
    columns = torch.randn(3, 4, 7, dtype=torch.float64)

    out = batched_backward.gelu(x, approximate)

    def back(column):
        return torch.autograd.grad(out, x, column, retain_graph=True)[0]

    for column, found in zip(columns, torch.vmap(back)(columns), strict=True):
        (expected,) = torch.autograd.grad(F.gelu(x, approximate=approximate), x, column)
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(back(column), expected)
    assert torch.equal(batched_backward.gelu(x, approximate), F.gelu(x, approximate=approximate))
    assert batched_backward.gelu(x.detach()).grad_fn is None


@pytest.mark.parametrize("keys", ["rows", "turned", "shared"])
def test_matmul_sends_columns_back_together_as_one_by_one(keys):
    """Heads seen through a transpose, keys through two; and keys that all examples share, which is left to torch."""
    a, b = (torch.randn(2, 4, 3, 5, dtype=torch.float64, requires_grad=True) for _ in range(2))
    left = a.transpose(1, 2)
    turned = b.transpose(1, 2).mT
    right = {"rows": turned.contiguous(), "turned": turned, "shared": b[:1, 0].mT}
    columns = torch.randn(3, 2, 3, 4, right[keys].shape[-1], dtype=torch.float64)

    out = batched_backward.matmul(left, right[keys])

    def back(column):
        return torch.autograd.grad(out, [a, b], column, retain_graph=True)

    for column, *found in zip(columns, *torch.vmap(back)(columns), strict=True):
        expected = torch.autograd.grad(left @ right[keys], [a, b], column, retain_graph=True)
        torch.testing.assert_close(tuple(found), expected)
        torch.testing.assert_close(back(column), expected)
    assert torch.equal(out, left @ right[keys])


@pytest.mark.parametrize("followed", ["query", "value", "all"])
@pytest.mark.parametrize("mask", ["none", "causal", "padding"])
def test_attention_sends_columns_back_together_as_one_by_one(followed, mask):
    inputs = [torch.randn(2, 3, 4, 5, dtype=torch.float64) for _ in range(3)]
    chosen = inputs if followed == "all" else inputs[:1] if followed == "query" else inputs[2:]
    for x in chosen:
        x.requires_grad_()
    padding = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]], dtype=torch.bool)[:, None, None]
    options = {"is_causal": mask == "causal", "attn_mask": padding if mask == "padding" else None}
    columns = torch.randn(3, 2, 3, 4, 5, dtype=torch.float64)
    out = batched_backward.scaled_dot_product_attention(*inputs, **options)

    def back(column):
        return torch.autograd.grad(out, chosen, column, retain_graph=True)

    plain = F.scaled_dot_product_attention(*inputs, **options)
    assert torch.equal(out, plain)
    for column, *found in zip(columns, *torch.vmap(back)(columns), strict=True):
        expected = torch.autograd.grad(plain, chosen, column, retain_graph=True)
        torch.testing.assert_close(tuple(found), expected)
        torch.testing.assert_close(back(column), expected)


def test_matmul_leaves_mixed_precision_to_torch():
    a, b = (torch.randn(2, 3, 3, requires_grad=True) for _ in range(2))
    with torch.autocast("cpu", torch.bfloat16):
        out = batched_backward.matmul(a, b)
    assert out.dtype == torch.bfloat16
    out.float().sum().backward()
    assert a.grad.dtype == torch.float32


class Unseen(torch.autograd.Function):
    """A product with a matrix that no function mode hears of."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x @ w.mT

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        return grad @ w, grad.mT @ x


class Half(nn.Module):
    """Uses its weight twice, once where it is seen."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3).double()

    def forward(self, x):
        return self.layer(x) + Unseen.apply(x, self.layer.weight)


def test_uses_that_do_not_add_up_are_found_by_the_probe():
    model, x = Half().eval(), torch.randn(4, 3).double()
    run, _ = check(model, x)
    assert run.general == {"layer.weight": "its uses that were seen do not add up to its gradient"}


def test_several_columns_keep_the_graph_until_the_last(monkeypatch):
    run = Capture(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double().eval())
    x, columns = torch.randn(5, 3).double(), torch.randn(2, 5, 2).double()
    outputs, sites = run(x)
    expected = backpropagate(sites, outputs, columns)
    monkeypatch.setattr("bayesformer.jacobians.sites._together", lambda *_: (_ for _ in ()).throw(RuntimeError))
    for ours, other in zip(backpropagate(sites, outputs, columns, keep=False), expected, strict=True):
        torch.testing.assert_close(ours, other)
    for ours, other in zip(backpropagate(sites, outputs, columns[:1], keep=False), expected, strict=True):
        torch.testing.assert_close(ours, other[:1])
    with pytest.raises(RuntimeError, match="second time"):
        backpropagate(sites, outputs, columns[:1])


def test_faster_functions_take_what_those_they_stand_in_for_take():
    a, b = torch.randn(3, 4, 5, requires_grad=True), torch.randn(3, 5, 2, requires_grad=True)
    for call in (
        lambda: torch.matmul(input=a, other=b),
        lambda: a.matmul(other=b),
        lambda: a @ b,
        lambda: torch.matmul(a.detach(), b.detach(), out=torch.empty(3, 4, 2)),
        lambda: F.gelu(input=a, approximate="tanh"),
    ):
        with UseRecorder([], 3, {}):
            found = call()
        torch.testing.assert_close(found, call())


class _Refusing(torch.autograd.Function):
    """The identity, whose backward pass refuses batched gradients with an error of the kind it is given."""

    @staticmethod
    def forward(ctx, x, kind):
        ctx.kind = kind
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        if transformed():
            raise ctx.kind("no batched backward pass")
        return grad, None


class Refusing(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.layers, self.kind = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)), kind

    def forward(self, x):
        return self.layers[2](_Refusing.apply(self.layers[:2](x), self.kind))


def test_columns_go_back_one_by_one_where_they_must_but_not_after_running_out_of_memory(caplog):
    torch.manual_seed(0)
    model, data = Refusing(RuntimeError).eval(), (torch.randn(6, 3), torch.arange(6) % 3)
    with caplog.at_level("DEBUG", "bayesformer"):
        found = estimate(model, "categorical", data, "diag")
    assert "columns go back one after another: no batched backward pass" in caplog.text
    expected = estimate(model.layers, "categorical", data, "diag")
    for one, other in zip(found.structures, expected.structures, strict=True):
        torch.testing.assert_close(one.values, other.values)
    model.kind = torch.OutOfMemoryError
    with pytest.raises(torch.OutOfMemoryError, match="no batched backward pass"):
        estimate(model, "categorical", data, "diag")

"""What people bring: models that a shell must stand in for, each as a function returning (model, inputs)."""

import collections
import functools
import threading
import types
import weakref
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, prune


@dataclass
class Case:
    """A model, its inputs, which weights are inferred, and how exact the shell must be."""

    model: nn.Module
    inputs: Any
    infer: Any = None
    exact: bool = True
    unused: tuple = ()


class Net(nn.Module):
    def __init__(self, width=4, outputs=3):
        super().__init__()
        self.first = nn.Linear(3, width)
        self.second = nn.Linear(width, outputs)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


def x(n=5, d=3):
    return torch.randn(n, d)


def plain():
    return Case(Net(), x())


def subset_of_trainable():
    return Case(Net(), x(), "second*")


def frozen_base():
    model = Net()
    model.first.requires_grad_(False)
    return Case(model, x())


def only_biases():
    return Case(Net(), x(), "*.bias")


def double():
    return Case(Net().double(), x().double())


def hook_closure():
    model = Net()

    def scale(module, args, output):
        return output * model.first.weight.sum()

    model.second.register_forward_hook(scale)
    return Case(model, x())


def hook_default_argument():
    model = Net()
    model.second.register_forward_hook(lambda m, a, y, net=model: y + net.first.bias.sum())
    return Case(model, x())


def pre_hook_partial():
    model = Net()
    model.first.register_forward_pre_hook(functools.partial(_scaled_by, model.second))
    return Case(model, x())


def _scaled_by(other, module, args):
    return (args[0] * other.bias.sum(),)


def patched_forward_closure():
    model = Net()
    before = model.forward
    model.forward = lambda x: before(x) * model.second.weight.mean()
    return Case(model, x())


def patched_forward_method():
    model = Net()
    model.forward = types.MethodType(lambda self, x: self.second(self.first(x)), model)
    return Case(model, x())


def recursive_closure():
    model = Net()

    def power(x, n):
        return model.first(x) if n == 0 else power(x, n - 1) * model.second.bias.sum()

    model.power = power
    model.forward = lambda x: model.power(x, 2)
    return Case(model, x(), unused=("second.weight",))


def backward_hook():
    model = Net()
    model.second.register_full_backward_hook(lambda m, gi, go: (gi[0] * 2 + model.first.bias.sum(),))
    return Case(model, x())


def gradient_mask():
    model = Net()
    mask = (torch.rand(4, 3) > 0.5).float()
    model.first.weight.register_hook(lambda g: g * mask)
    return Case(model, x())


class Holder(Net):
    def __init__(self):
        super().__init__()
        self.listed = [nn.Linear(3, 3)]
        self.table = {"a": collections.deque([self.second])}
        self.pair = collections.namedtuple("Pair", "left right")(self.first, self)
        self.me = [self]

    def forward(self, x):
        hidden = torch.tanh(self.pair.left(self.listed[0](x)))
        return self.me[0].table["a"][0](hidden)


def containers():
    return Case(Holder(), x())


class Weak(Net):
    def __init__(self):
        super().__init__()
        self.link = weakref.ref(self.first)
        self.__dict__["proxy"] = weakref.proxy(self.second)
        self.dead = weakref.ref(nn.Linear(1, 1))

    def forward(self, x):
        assert self.dead() is None
        return self.proxy(torch.tanh(self.link()(x)))


def weak_references():
    return Case(Weak(), x())


class Stubborn(Net):
    def __deepcopy__(self, memo):
        return self

    def __getstate__(self):
        raise TypeError("not to be pickled")


def own_deepcopy():
    return Case(Stubborn(), x())


class Slotted(Net):
    __slots__ = ("gain",)

    def __init__(self):
        super().__init__()
        self.gain = 2.0

    def forward(self, x):
        return self.gain * super().forward(x)


def slots():
    return Case(Slotted(), x())


def unpicklable_leaves():
    model = Net()
    model.lock, model.local, model.stream = threading.Lock(), threading.local(), (n for n in range(3))
    model.event, model.marker = threading.Event(), object()
    return Case(model, x())


@torch.no_grad()
def _grown(model):
    for p in model.parameters():
        p.add_(0.1 * torch.randn_like(p))
    return model


def old_weight_norm():
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = Net()
        nn.utils.weight_norm(model.first)
        model(x())  # leaves a non-leaf tensor behind
    return Case(model, x())


def old_spectral_norm():
    model = Net()
    nn.utils.spectral_norm(model.first)
    model(x())
    return Case(model, x())


def pruned():
    model = Net()
    prune.random_unstructured(model.first, "weight", 0.5)
    model(x())
    return Case(model, x())


def weight_norm():
    model = Net()
    parametrizations.weight_norm(model.first)
    return Case(model, x())


def spectral_norm():
    model = Net()
    parametrizations.spectral_norm(model.first)
    return Case(model, x())


def orthogonal():
    model = Net()
    parametrizations.orthogonal(model.second)
    return Case(model, x())


class Recurrent(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.rnn = kind(3, 4, num_layers=2, batch_first=True)
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.rnn(x)[0])


def lstm():
    return Case(Recurrent(nn.LSTM), torch.randn(2, 6, 3))


def gru():
    return Case(Recurrent(nn.GRU), torch.randn(2, 6, 3), "rnn.*l1", exact=False)


def batch_norm():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))
    for _ in range(3):
        model(torch.randn(8, 3))
    return Case(model, x())


class Counting(Net):
    """A buffer of a million numbers, a plain tensor and a Python number that every pass changes."""

    def __init__(self):
        super().__init__()
        self.register_buffer("big", torch.zeros(1_000_001), persistent=False)
        self.seen, self.calls = torch.zeros(1), 0

    def forward(self, x):
        self.big += 1
        self.seen += 1
        self.calls += 1
        return super().forward(x)


def counting():
    return Case(Counting(), x())


class Shared(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.layer = nn.Linear(4, 4)
        self.again = self.layer
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        return self.head(self.again(torch.tanh(self.layer(self.embed(ids)))))


def tied():
    return Case(Shared(), torch.randint(7, (3, 5)))


def tied_by_alias():
    return Case(Shared(), torch.randint(7, (3, 5)), "head*")


def tied_by_memory():
    model = Shared()
    model.head.weight = nn.Parameter(model.embed.weight.data)
    return Case(model, torch.randint(7, (3, 5)))


class Scalar(Net):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.loose = [nn.Parameter(torch.ones(3))]  # not registered: frozen

    def forward(self, x):
        return self.scale * super().forward(x) + self.loose[0]


def scalar():
    return Case(Scalar(), x(), exact=False)


class Windowed(Net):
    def __init__(self):
        super().__init__()
        self.look = self.first.weight.data[1:3].t()

    def forward(self, x):
        return super().forward(x) + self.look.sum()


def data_window():
    return Case(Windowed(), x())


def parameter_attributes():
    model = Net()
    model.first.weight.gain = 3.0
    model.forward = types.MethodType(lambda self, x: Net.forward(self, x) * self.first.weight.gain, model)
    return Case(model, x())


def renormalised_embedding():
    model = nn.Sequential(nn.Embedding(7, 4, max_norm=0.1), nn.Linear(4, 2))
    return Case(model, torch.randint(7, (3, 5)), "1.*", exact=False)


class Attended(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, 2)

    def forward(self, x):
        return self.head(self.attention(x, x, x, need_weights=False)[0])


def multihead():
    return Case(Attended(), torch.randn(2, 5, 8))


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(8, 2)

    def forward(self, x, padding):
        return self.head(self.encoder(x, src_key_padding_mask=padding)[:, 0])


def _padded():
    padding = torch.zeros(3, 5, dtype=torch.bool)
    padding[1, 3:] = True
    return {"x": torch.randn(3, 5, 8), "padding": padding}


def encoder():
    return Case(Encoder(), _padded(), exact=False)


def encoder_later_layers():
    return Case(Encoder(), _padded(), ["encoder.layers.1*", "head*"], exact=False)


def compiled():
    model = Net()
    return Case(torch.compile(model, backend="eager"), x())


def module_compiled():
    model = Net()
    model.compile(backend="eager")
    return Case(model, x())


def symbolic():
    return Case(torch.fx.symbolic_trace(Net()), x())


def quantised_body():
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    model[0].register_buffer("codes", torch.randint(-8, 8, (4, 3), dtype=torch.int8))
    model[0].forward = types.MethodType(lambda self, x: x @ (self.codes.float() / 8).T, model[0])
    return Case(model, x(), "1.*")


def function_registry():
    """A function of the module's own class, by name in a dict."""
    model = Net()
    model.steps = {"first": model.first.forward, "act": F.gelu}
    model.forward = types.MethodType(lambda self, x: self.second(self.steps["act"](self.steps["first"](x))), model)
    return Case(model, x())


def tensors_of_everyone():
    """An optimiser and data among the attributes."""
    model = Net()
    model.optimiser = torch.optim.Adam(model.parameters())
    model.data = torch.randn(50, 3)
    return Case(model, x())


def dynamic_int8():
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
        model[0] = torch.ao.quantization.quantize_dynamic(model[:1], {nn.Linear})[0]
    return Case(model, x(), "2.*")


def random_generator():
    """A generator of the model's own: every shell has a copy that starts where the user's stands."""
    model = Net()
    model.source = torch.Generator().manual_seed(3)
    model.forward = types.MethodType(
        lambda self, x: Net.forward(self, x + 0 * torch.rand(1, generator=self.source)), model
    )
    return Case(model, x())


def sync_batch_norm():
    model = nn.SyncBatchNorm.convert_sync_batchnorm(batch_norm().model)
    return Case(model, x())


class Convolved(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(1))
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.body(x).flatten(1))


def channels_last():
    return Case(Convolved().to(memory_format=torch.channels_last), torch.randn(2, 1, 6, 6), exact=False)


def graph():
    """A graph network of torch-geometric: inspectors, templates and functions among its attributes."""
    from torch_geometric.nn import GCNConv

    return Case(GCNConv(3, 2), (x(6), torch.randint(6, (2, 12))))


def data_parallel():
    return Case(nn.DataParallel(Net()), x())


CASES = {
    make.__name__: make
    for make in (
        plain, subset_of_trainable, frozen_base, only_biases, double, hook_closure, hook_default_argument,
        pre_hook_partial, patched_forward_closure, patched_forward_method, recursive_closure, backward_hook,
        gradient_mask, containers, weak_references, own_deepcopy, slots, unpicklable_leaves, old_weight_norm,
        old_spectral_norm, pruned, weight_norm, spectral_norm, orthogonal, lstm, gru, batch_norm, counting, tied,
        tied_by_alias, tied_by_memory, scalar, data_window, parameter_attributes, renormalised_embedding, multihead,
        encoder, encoder_later_layers, compiled, module_compiled, symbolic, quantised_body, function_registry,
        tensors_of_everyone, dynamic_int8, random_generator, sync_batch_norm, channels_last, graph, data_parallel,
    )
}  # fmt: skip

"""Draws of a pass: by a generator of its own, thread by thread, and what needs the global streams."""

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from bayesformer.attention import install
from bayesformer.core.draws import dropout_mask, normal_like
from bayesformer.core.seeds import stream
from bayesformer.model.kernels import plain_scaled_dot_product_attention
from bayesformer.model.randomness import Randomness, find_randomness, pass_noise, plain_attention
from bayesformer.models import Encoder
from tests.laws import assert_law, assert_mean

X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))


def source(seed=0):
    return torch.Generator().manual_seed(seed)


def global_states():
    kind, keys, *rest = numpy.random.get_state()  # noqa: NPY002
    return torch.get_rng_state().tolist(), (kind, keys.tolist(), *rest), random.getstate()


@contextmanager
def nothing_global_moves():
    before = global_states()
    yield
    assert global_states() == before


class Calls(nn.Module):
    """A linear layer and then a function, with the modules that it needs."""

    def __init__(self, function, *modules):
        super().__init__()
        self.linear, self.function, self.parts = nn.Linear(4, 4), function, nn.ModuleList(modules)

    def forward(self, x):
        return self.function(self.linear(x), *self.parts)


def of_itself(h, m):
    return m(h, h, h, need_weights=False)[0]


OWN_GENERATOR = torch.Generator()
OWN = {
    "F.dropout": (lambda h: F.dropout(h, 0.3),),
    "in place": (lambda h: F.dropout(h + 0, 0.3, inplace=True),),
    "torch.dropout": (lambda h: torch.dropout(h, 0.3, train=True),),
    "nn.Dropout": (lambda h, m: m(h), nn.Dropout(0.3)),
    "dropout1d": (lambda h: F.dropout1d(h[None], 0.3),),
    "dropout2d": (lambda h: F.dropout2d(h[None, :, :, None], 0.3, inplace=True),),
    "dropout3d": (lambda h: F.dropout3d(h[None, :, :, None, None], 0.3),),
    "alpha": (lambda h, m: m(h), nn.AlphaDropout(0.3)),
    "feature alpha": (lambda h, m: m(h), nn.FeatureAlphaDropout(0.3)),
    "sdpa": (lambda h: F.scaled_dot_product_attention(h[None], h[None], h[None], dropout_p=0.3),),
    "multi-head": (lambda h, m: m(h, h, h)[0], nn.MultiheadAttention(4, 2, dropout=0.3)),
    "multi-head, fused": (of_itself, nn.MultiheadAttention(4, 2, dropout=0.3)),
    "multi-head, biases": (of_itself, nn.MultiheadAttention(4, 2, 0.3, add_bias_kv=True, add_zero_attn=True)),
    "encoder layer": (lambda h, m: m(h[None]), nn.TransformerEncoderLayer(4, 2, 8, 0.3, batch_first=True)),
    "lstm": (lambda h, m: m(h)[0], nn.LSTM(4, 4, 2, dropout=0.3)),
    "gru, packed": (lambda h, m: m(nn.utils.rnn.pack_sequence([h, h[:3]]))[0].data, nn.GRU(4, 4, 2, dropout=0.3)),
    "rnn": (lambda h, m: m(h)[0], nn.RNN(4, 4, 3, dropout=0.3)),
    "rand": (lambda h: h * torch.rand(4) + torch.randn(6, 4) + torch.randint(3, (6, 4)),),
    "randperm": (lambda h: h[torch.randperm(6)],),
    "like": (lambda h: h * torch.rand_like(h) + torch.randn_like(h) + torch.randint_like(h, 1, high=9),),
    "bernoulli": (lambda h: h * torch.bernoulli(torch.full_like(h, 0.5)) + torch.full_like(h, 0.5).bernoulli(),),
    "multinomial": (lambda h: h[torch.multinomial(torch.ones(6), 5)] + torch.ones(5, 4).multinomial(4),),
    "normal": (lambda h: h + torch.normal(h.detach(), 1.0) + torch.poisson(h.detach().exp()),),
    "filled": (lambda h: h + torch.empty(4).normal_() + torch.empty(4).exponential_() + torch.empty(4).uniform_(),),
    "filled 2": (lambda h: h + torch.empty(4).cauchy_() + torch.empty(4).log_normal_() + torch.empty(4).random_(9),),
    "filled 3": (lambda h: h + torch.empty(4).geometric_(0.4) + torch.empty(4).bernoulli_(0.5),),
    "gumbel": (F.gumbel_softmax,),
    "rrelu": (lambda h: F.rrelu(h, training=True),),
    "initial": (lambda h: h + nn.init.trunc_normal_(torch.empty(4)),),
    "gamma": (lambda h: torch.distributions.Gamma(h.exp(), 1.0).rsample(),),
    "dirichlet": (lambda h: torch.distributions.Dirichlet(h.exp()).rsample(),),
    "student": (lambda h: torch.distributions.StudentT(3.0, h).rsample(),),
    "binomial": (lambda h: h * torch.distributions.Binomial(5, torch.full((6, 4), 0.4)).sample(),),
    "no gradient": (lambda h: torch.no_grad()(F.dropout)(h, 0.3) + h,),
}
NONE = {
    "nothing": (lambda h: h,),
    "off": (lambda h, m: m(h), nn.Dropout(0.0)),
    "evaluation": (lambda h: F.dropout(h, 0.3, training=False) + F.rrelu(h) + F.alpha_dropout(h, 0.3),),
    "sdpa": (lambda h: F.scaled_dot_product_attention(h[None], h[None], h[None]),),
    "lstm": (lambda h, m: m(h)[0], nn.LSTM(4, 4)),
    "checkpointed": (lambda h: checkpoint(torch.tanh, h, use_reentrant=False),),
}
TORCH = {
    f"checkpointed, reentrant {again}": (
        lambda h, again=again: checkpoint(lambda y: F.dropout(y, 0.3), h, use_reentrant=again),
    )
    for again in (False, True)
}
PYTHON = {
    "numpy": (lambda h: h * numpy.random.rand(),),  # noqa: NPY002
    "random": (lambda h: F.dropout(h * random.random(), 0.3),),
}


def passed(model, randomness, seed):
    model.zero_grad()
    with randomness.passing(source(seed)):
        out = model(X)
        out.square().sum().backward()
    return out.detach(), model.linear.weight.grad.clone()


@pytest.mark.parametrize("name", OWN)
def test_every_random_function_takes_the_generator(name):
    model = Calls(*OWN[name])
    with nothing_global_moves():
        found = find_randomness(model, lambda: model(X), backward=True)
        assert (found.kind, found.unrepeatable) == ("own", "")
        assert found.functions
        first, again, other = (passed(model, found, seed) for seed in (0, 0, 1))
        with torch.inference_mode():
            found = find_randomness(model, lambda: model(X))
            assert found.kind == "own"
            with found.passing(source()):
                guess = model(X)
    torch.testing.assert_close(first, again, rtol=0, atol=0)
    assert not torch.equal(first[0], other[0])
    torch.testing.assert_close(guess, first[0])


@pytest.mark.parametrize("name", NONE)
def test_what_draws_nothing_needs_no_mode(name):
    model = Calls(*NONE[name])
    with nothing_global_moves():
        found = find_randomness(model, lambda: model(X), backward=True)
        assert found == Randomness()
        assert found.kind == "none"
        with found.passing(source()):
            assert not torch.overrides.has_torch_function((X,))


@pytest.mark.parametrize("name", [*TORCH, *PYTHON])
def test_what_needs_a_global_stream_is_found_and_repeats(name):
    model = Calls(*{**TORCH, **PYTHON}[name])
    with nothing_global_moves():
        found = find_randomness(model, lambda: model(X), backward=True)
        assert found.kind == "global"
        assert "backward pass draws again" in found.torch_stream if name in TORCH else not found.torch_stream
        assert name in found.python_streams if name in PYTHON else not found.python_streams
        first, again, other = (passed(model, found, seed) for seed in (0, 0, 1))
    torch.testing.assert_close(first, again, rtol=0, atol=0)
    assert not torch.equal(first[0], other[0])


def test_a_generator_of_the_models_own_is_reported():
    model = Calls(lambda h: h + torch.rand(4, generator=OWN_GENERATOR))
    assert "generator of its own (rand)" in find_randomness(model, lambda: model(X)).unrepeatable


def test_the_trial_leaves_buffers_gradients_and_modes():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)).train()
    flat = torch.ones(sum(p.numel() for p in model.parameters()))
    views = flat.split([p.numel() for p in model.parameters()])
    for p, view in zip(model.parameters(), views, strict=True):
        p.grad = view.view_as(p)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    assert find_randomness(model, lambda: model(X), backward=True).kind == "own"
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())
    assert (flat == 1).all()
    for p, view in zip(model.parameters(), views, strict=True):
        assert p.grad.data_ptr() == view.data_ptr()
    with pytest.raises(ValueError, match="call must return a tensor with a gradient"):
        find_randomness(model, lambda: X, backward=True)


def test_functions_draw_what_the_generator_gives():
    with pass_noise(source(3)):
        found = torch.randn(5), torch.rand(2, 3), torch.empty(4).normal_(2.0, 3.0), torch.randint(7, (3,))
    mine = source(3)
    expected = (
        torch.randn(5, generator=mine),
        torch.rand(2, 3, generator=mine),
        torch.empty(4).normal_(2.0, 3.0, generator=mine),
        torch.randint(7, (3,), generator=mine),
    )
    assert all(map(torch.equal, found, expected))


# Laws.


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("rate", [0.1, 0.6])
def test_dropout_has_the_law_of_dropout(rate, dtype):
    x = torch.ones(40_000, dtype=dtype, requires_grad=True)
    with pass_noise(source(int(torch.randint(2**31, ())))):
        out = F.dropout(x, rate)
    kept = torch.ones((), dtype=dtype) / (1 - rate)
    assert out.detach().unique().tolist() == [0, kept.item()]
    assert_mean((out.detach() == 0).double(), rate)
    (grad,) = torch.autograd.grad(out.sum(), x)
    assert torch.equal(grad, out.detach())


def test_all_is_dropped_or_nothing():
    with pass_noise(source()):
        assert (F.dropout(X, 1.0) == 0).all()
        assert torch.equal(F.dropout(X, 0.0), X)
        with pytest.raises(ValueError, match="dropout probability has to be between 0 and 1"):
            F.dropout(X, 1.5)


def test_channels_are_dropped_whole():
    with pass_noise(source()):
        out = F.dropout2d(torch.ones(40, 500, 2, 3), 0.25)
    assert torch.equal(out.amin((2, 3)), out.amax((2, 3)))
    assert_mean((out[:, :, 0, 0] == 0).double().flatten(), 0.25)


def test_alpha_dropout_keeps_mean_and_variance():
    with pass_noise(source(int(torch.randint(2**31, ())))):
        out = F.alpha_dropout(torch.randn(100_000), 0.3, training=True)
    assert_mean(out, 0.0)
    assert_mean(out.square(), 1.0)


def test_other_draws_have_their_laws():
    with pass_noise(source(int(torch.randint(2**31, ())))):
        gamma = torch.distributions.Gamma(torch.full((20_000,), 2.0), 1.0).rsample()
        gumbel = F.gumbel_softmax(torch.zeros(20_000, 2))[:, 0]
    assert_law(gamma, lambda x: 1 - (1 + x) * numpy.exp(-x))
    assert_law(gumbel, "uniform")  # the sigmoid of a difference of two Gumbel numbers


def test_attention_drops_weights():
    q, k, v = torch.randn(3, 2, 2, 5, 4, requires_grad=True)
    with pass_noise(source(7)):
        out = F.scaled_dot_product_attention(q, k, v, dropout_p=0.4, is_causal=True)
    weights = (q @ k.mT / 2).masked_fill(~torch.ones(5, 5, dtype=torch.bool).tril(), -torch.inf).softmax(-1)
    explicit = (weights * dropout_mask(weights, 0.4, source(7))) @ v
    torch.testing.assert_close(out, explicit)
    torch.testing.assert_close(torch.autograd.grad(out.sum(), q), torch.autograd.grad(explicit.sum(), q))
    many = [t.detach().expand(20_000, *t.shape)[:, 0, 0] for t in (q, k, v)]
    with pass_noise(source(8)):
        draws = F.scaled_dot_product_attention(*many, dropout_p=0.4)
    assert_mean(draws, F.scaled_dot_product_attention(*(t[0] for t in many)))


# Attention in plain operations.

MASKS = {
    "none": {},
    "causal": {"is_causal": True},
    "causal and rectangular": {"is_causal": True, "keys": 7},
    "boolean": {"attn_mask": torch.rand(2, 1, 5, 5, generator=source()) < 0.6},
    "a query without keys": {"attn_mask": torch.ones(5, 5, dtype=torch.bool).tril(-1)},
    "added": {"attn_mask": torch.randn(2, 1, 5, 5, generator=source())},
    "added, without keys": {"attn_mask": torch.zeros(5, 5).masked_fill(torch.ones(5, 5).tril(-1) == 0, -torch.inf)},
    "scale": {"scale": 0.2},
    "groups": {"enable_gqa": True, "groups": 2},
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", MASKS)
def test_plain_attention_is_attention(name, dtype):
    options = dict(MASKS[name])
    keys, groups = options.pop("keys", 5), options.pop("groups", 4)
    q = torch.randn(2, 4, 5, 6, dtype=dtype, requires_grad=True)
    k, v = torch.randn(2, 2, groups, keys, 6, dtype=dtype).requires_grad_()
    if "attn_mask" in options and options["attn_mask"].dtype != torch.bool:
        options["attn_mask"] = options["attn_mask"].to(dtype)
    expected = F.scaled_dot_product_attention(q, k, v, **options)
    with plain_attention():
        found = F.scaled_dot_product_attention(q, k, v, **options)
    tolerance = {"rtol": 1e-9, "atol": 1e-12} if dtype == torch.float64 else {"rtol": 0.05, "atol": 0.05}
    torch.testing.assert_close(found, expected, **tolerance)
    (ours,), (theirs,) = (torch.autograd.grad(out.square().sum(), q) for out in (found, expected))
    torch.testing.assert_close(ours, theirs, **tolerance)
    assert ours.isfinite().all()


def test_a_mask_and_causal_exclude_each_other():
    with pytest.raises(ValueError, match="attn_mask must be None with is_causal=True"):
        plain_scaled_dot_product_attention(X, X, X, torch.ones(6, 6, dtype=torch.bool), is_causal=True)


@pytest.mark.filterwarnings("error:There is a performance drop")
@pytest.mark.parametrize("build", ["sdpa", "encoder"])
def test_plain_attention_can_be_vmapped(build):
    def make():
        if build == "encoder":
            return nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True)
        return Calls(lambda h: F.scaled_dot_product_attention(h, h, h, is_causal=True))

    models, x = [make().train() for _ in range(3)], torch.randn(2, 6, 4)
    params, _ = torch.func.stack_module_state(models)
    with plain_attention():
        found = torch.vmap(lambda p: torch.func.functional_call(models[0], p, (x,)))(params)
    torch.testing.assert_close(found, torch.stack([model(x) for model in models]))


# Threads.


def networks():
    transformers = pytest.importorskip("transformers")
    small = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    bert = transformers.BertModel(transformers.BertConfig(vocab_size=30, **small))
    ids = torch.randint(2, 30, (3, 9))
    encoder = nn.TransformerEncoderLayer(4, 2, 8, 0.3, batch_first=True)
    return {
        "bert": (bert.train(), lambda m: m(input_ids=ids).last_hidden_state),
        "encoder": (encoder.train(), lambda m: m(X[None])),
        "lstm": (nn.LSTM(4, 4, 2, dropout=0.3), lambda m: m(X)[0]),
        "weibull": (install(Encoder(dim=4, heads=2), "weibull").train(), lambda m: m(X[None])),
    }


@contextmanager
def disturbance():
    """Another thread that draws from torch's global stream all the time."""
    stop = threading.Event()

    def draw():
        while not stop.is_set():
            torch.rand(3)
            time.sleep(0)

    thread = threading.Thread(target=draw)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


@pytest.mark.parametrize("kind", ["bert", "encoder", "lstm", "weibull"])
def test_eight_threads_get_what_one_gets(kind):
    model, call = networks()[kind]

    def run(seed):
        with found.passing(source(seed)):
            out = call(model)
        return out, *torch.autograd.grad(out.square().sum(), list(model.parameters()), allow_unused=True)

    found = find_randomness(model, lambda: call(model), backward=True)
    assert found.kind == "own"
    alone = [run(seed) for seed in range(20)]
    with disturbance():
        assert find_randomness(model, lambda: call(model), backward=True) == found
        with ThreadPoolExecutor(8) as pool:
            together = list(pool.map(lambda _: [run(seed) for seed in range(20)], range(8)))
    for passes in together:
        torch.testing.assert_close(passes, alone, rtol=0, atol=0)


def test_threads_take_turns_with_the_global_streams():
    model = Calls(*PYTHON["random"])
    found = find_randomness(model, lambda: model(X))

    def run(seed):
        with found.passing(source(seed)):
            time.sleep(0.001)
            return model(X)

    alone = [run(seed) for seed in range(10)]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda _: [run(seed) for seed in range(10)], range(8)))
    assert all(torch.equal(a, b) for passes in together for a, b in zip(passes, alone, strict=True))


def test_a_pass_that_waits_holds_up_nobody():
    entered, go = threading.Event(), threading.Event()

    def wait(h):
        if threading.current_thread() is held:
            entered.set()
            go.wait(20)
        return F.dropout(h, 0.5)

    model, outputs = Calls(wait), {}

    def run(name):
        found = find_randomness(model, lambda: model(X))
        with found.passing(source()):
            outputs[name] = model(X)

    held = threading.Thread(target=run, args=("held",))
    held.start()
    assert entered.wait(20)
    run("free")
    assert list(outputs) == ["free"]
    go.set()
    held.join()
    assert torch.equal(outputs["held"], outputs["free"])


def test_models_built_in_threads_are_those_built_alone():
    def build(seed):
        with stream(seed, "init", 0):
            first = nn.Linear(50, 50).weight.detach()
            time.sleep(0.001)
            return first + torch.randn(50, 50) + random.random() + numpy.random.rand()  # noqa: NPY002

    with nothing_global_moves():
        alone = [build(seed) for seed in range(8)]
        with pass_noise(source()):
            assert torch.equal(build(3), alone[3])
        with ThreadPoolExecutor(8) as pool:
            assert all(map(torch.equal, pool.map(build, range(8)), alone))


# Segments that are computed again.


@pytest.mark.parametrize("again", [False, True])
def test_checkpointed_gradients_are_those_of_the_masks_that_were_drawn(again):
    transformers = pytest.importorskip("transformers")
    small = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    model = transformers.BertModel(transformers.BertConfig(vocab_size=30, **small)).train()
    ids = torch.randint(2, 30, (3, 9))

    def gradients(randomness):
        model.zero_grad()
        with randomness.passing(source(5)):
            model(input_ids=ids).last_hidden_state.square().sum().backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    def find():
        return find_randomness(model, lambda: model(input_ids=ids).last_hidden_state, backward=True)

    assert find().kind == "own"
    expected = gradients(Randomness(torch_stream="asked for"))
    model.gradient_checkpointing_enable({"use_reentrant": again})
    with nothing_global_moves():
        found = find()
        assert found.kind == "global"
        torch.testing.assert_close(gradients(found), expected)
    model.gradient_checkpointing_disable()
    own = gradients(Randomness(functions=("dropout",)))
    model.gradient_checkpointing_enable({"use_reentrant": again})
    wrong = gradients(Randomness(functions=("dropout",)))  # what the trial protects from
    assert max(float((a - b).abs().max()) for a, b in zip(wrong, own, strict=True)) > 0.1


# One generator per row.


def test_rows_are_drawn_by_their_own_generators():
    like = torch.empty(3, 4)
    with pass_noise([source(i) for i in range(3)]):
        rows = normal_like(like)
        with pytest.raises(RuntimeError, match=r"3 draws cannot be made in one pass: the model calls dropout"):
            F.dropout(X, 0.5)
        with pytest.raises(RuntimeError, match=r"3 generators the leading axis must be theirs; got .*\(2, 4\)"):
            normal_like(like[:2])
    for i, row in enumerate(rows):
        with pass_noise(source(i)):
            assert torch.equal(normal_like(like[0]), row)
    with (
        pytest.raises(ValueError, match=r"dropout_rate cannot be 0.3 here, it must be None: it is checkpointed"),
        Randomness(torch_stream="it is checkpointed").passing(source(), 0.3),
    ):
        pass
    several = Randomness(torch_stream="it is checkpointed").passing([source(0), source(1)])
    with pytest.raises(RuntimeError, match="2 draws cannot be made in one pass: it is checkpointed"), several:
        pass

"""Random functions of torch, as a user's model calls them, with the generator of the running thread's context.

`PassMode` is a TorchFunctionMode, which torch keeps per thread: it sees every function of torch that is called from
Python and gives those that draw random numbers the generator that `bayesformer/core/draws.py` holds. A function that
draws inside torch's own code (an LSTM's dropout, F.gumbel_softmax) runs under a TorchDispatchMode, which sees each
elementary operation; that is complete but much slower, so it is used for those functions alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from bayesformer.core import draws
from bayesformer.core.compat import DIRICHLET, GAMMA, ElementaryMode, defaults
from bayesformer.model.kernels import plain_scaled_dot_product_attention
from bayesformer.model.multihead import multi_head_attention_forward

Function: TypeAlias = Callable[..., Any]
Rule: TypeAlias = Callable[["PassMode", Function, tuple[Any, ...], dict[str, Any]], Any]


class PassMode(TorchFunctionMode):
    """Gives random functions the generator in force; with `plain`, computes attention in plain operations.

    Args:
        plain: whether scaled dot-product attention is computed by products and a softmax even without dropout.
    """

    def __init__(self, plain: bool = False) -> None:
        super().__init__()
        self.plain = plain
        self.called = set[str]()
        """names of the random functions that the model called"""
        self._elsewhere: dict[torch.device, torch.Generator] = {}

    def __torch_function__(
        self, func: Function, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """The function itself, or its rule."""
        rule = RULES.get(func)
        if rule is None:
            return func(*args, **kwargs) if kwargs else func(*args)
        return rule(self, func, args, kwargs or {})

    def generator(self, name: str, device: torch.device) -> torch.Generator | None:
        """The generator in force, or another one for a device on which that cannot draw; None for torch's stream."""
        self.called.add(name)
        generators = draws.source().generators
        if not generators:
            return None
        if len(generators) > 1:
            raise RuntimeError(
                f"{len(generators)} draws cannot be made in one pass: the model calls {name}, which does not know them."
            )
        one = generators[0]
        if one.device.type == device.type:
            return one
        if device not in self._elsewhere:
            seed = int(torch.empty((), dtype=torch.int64, device=one.device).random_(generator=one))
            self._elsewhere[device] = torch.Generator(device).manual_seed(seed)
        return self._elsewhere[device]


class _Inside(ElementaryMode):
    """Gives every elementary random operation the generator of a PassMode."""

    def __init__(self, outer: PassMode, name: str) -> None:
        super().__init__()
        self.outer, self.name = outer, name

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        parts = in_parts(self, func, args, kwargs)
        if parts is not NotImplemented:
            return parts
        if draws_numbers(func):
            given = bound(func, args, kwargs)
            if in_training(func, given) and given.get("generator") is None:
                with_generator = taking_generator(func)
                if with_generator is not None:
                    return with_generator(self.outer.generator(self.name, device_of(args, given)), given)
        return func(*args, **(kwargs or {}))


def taking_generator(func: Any) -> Callable[[torch.Generator | None, dict[str, Any]], Any] | None:
    """`(generator, arguments) -> result` of an elementary random operation; None if it cannot be given a generator."""
    if func is torch.ops.aten.native_dropout.default:
        return _native_dropout
    packet = func.overloadpacket
    variant = packet.generator if "generator" in packet.overloads() else func
    names = defaults(variant)
    if "generator" not in names:
        return None
    return lambda generator, given: variant(**{k: v for k, v in given.items() if k in names} | {"generator": generator})


def in_parts(mode: ElementaryMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
    """The result of a composite operation, its parts seen by the mode; NotImplemented for an elementary one.

    Only tensors that were made in inference mode let composite operations (alpha dropout, attention) come as a whole.
    """
    with mode:
        return func.decompose(*args, **(kwargs or {}))


def draws_numbers(func: Any) -> bool:
    """Whether an elementary operation is a random one."""
    return torch.Tag.nondeterministic_seeded in func.tags


def bound(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> dict[str, Any]:
    """The arguments of an elementary operation by their names, defaults included."""
    named = defaults(func)
    return {**named, **dict(zip(named, args, strict=False)), **(kwargs or {})}


def in_training(func: Any, given: dict[str, Any]) -> bool:
    """Whether a random operation draws with these arguments: its rate is above 0 and it is not told to predict."""
    name = func.overloadpacket.__name__
    if name.startswith("_scaled_dot_product") and not given.get("dropout_p"):
        return False
    if name == "native_dropout" and given["p"] == 0:
        return False
    return given.get("train", given.get("training")) is not False


def _native_dropout(generator: torch.Generator | None, given: dict[str, Any]) -> tuple[Tensor, Tensor]:
    mask = draws.dropout_mask(given["input"], given["p"], generator)
    return given["input"] * mask, mask != 0


def device_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device:
    """On which device a random function draws."""
    if kwargs.get("device") is not None:
        return torch.device(kwargs["device"])
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            return value.device
    return torch.get_default_device()


def _name(func: Function) -> str:
    return getattr(func, "__name__", str(func))


def _with_generator(mode: PassMode, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """For functions that take a generator; one that the model gives itself stays."""
    if kwargs.get("generator") is not None:
        return func(*args, **kwargs)
    return func(*args, **{**kwargs, "generator": mode.generator(_name(func), device_of(args, kwargs))})


LIKE: dict[Function, Function] = {
    torch.rand_like: torch.rand,
    torch.randn_like: torch.randn,
    torch.randint_like: torch.randint,
}


def _like(mode: PassMode, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """By the shape alone: under vmap `rand_like` with a generator gives all members the same numbers."""
    given = {name: value for name, value in kwargs.items() if value is not None and name != "memory_format"}
    like, *rest = (*args, *(given.pop(name) for name in ("input", "low", "high") if name in given))
    return _with_generator(mode, LIKE[func], (*rest, like.shape), {"dtype": like.dtype, "device": like.device, **given})


def _dropout(mode: PassMode, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """F.dropout and torch.dropout, by masks of our own."""
    x, rate, training, inplace = _dropout_arguments(func, *args, **kwargs)
    if not training:
        return func(*args, **kwargs)
    rate = draws.dropout_rate(rate)
    if not 0 < rate <= 1:
        return func(x, rate, training, inplace) if func is F.dropout else func(x, rate, training)
    mask = draws.dropout_mask(x, rate, mode.generator(_name(func), x.device))
    return x.mul_(mask) if inplace else x * mask


def _channel_dropout(mode: PassMode, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Dropout of whole channels and alpha dropout, in torch's own arithmetic."""
    x, rate, training, inplace = _dropout_arguments(func, *args, **kwargs)
    if not training:
        return func(*args, **kwargs)
    made = _run_inside(mode, OUT_OF_PLACE.get(func, func), (x, draws.dropout_rate(rate), training), {})
    return x.copy_(made) if inplace else made


def _dropout_arguments(
    func: Function,
    input: Tensor,
    p: float = 0.5,
    training: bool | None = None,
    inplace: bool = False,
    train: bool | None = None,
) -> tuple[Tensor, float, bool, bool]:
    chosen = train if training is None else training
    if chosen is None:
        chosen = func not in (F.alpha_dropout, F.feature_alpha_dropout)  # their defaults
    return input, p, chosen, inplace or func in INPLACE


def _attention(mode: PassMode, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """F.scaled_dot_product_attention: torch's own where nothing is dropped."""
    return _attend(mode, func, *args, **kwargs)


def _attend(
    mode: PassMode,
    func: Function,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options: Any,
) -> Tensor:
    rate = draws.dropout_rate(dropout_p)
    if query.is_nested or (rate == 0 and not mode.plain):
        return func(query, key, value, attn_mask, rate, is_causal, **options)
    drop = _dropper(mode, _name(func), rate)
    return plain_scaled_dot_product_attention(query, key, value, attn_mask, drop, is_causal, **options)[0]


def _multi_head(mode: PassMode, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """F.multi_head_attention_forward, whose inner functions a mode does not see."""
    given = {**dict(zip(MULTI_HEAD, args, strict=False)), **kwargs}
    rate = draws.dropout_rate(given["dropout_p"]) if given.get("training", True) else 0.0
    if rate == 0 and not mode.plain:
        return func(**{**given, "dropout_p": 0.0})
    if given["add_zero_attn"] or any(given.get(name) is not None for name in ("bias_k", "static_k", "static_v")):
        return _run_inside(mode, func, (), {**given, "dropout_p": rate})
    drop = _dropper(mode, _name(func), rate)

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        return plain_scaled_dot_product_attention(q, k, v, mask, drop)

    return multi_head_attention_forward(**given, attend=attend)


MULTI_HEAD = (
    "query",
    "key",
    "value",
    "embed_dim_to_check",
    "num_heads",
    "in_proj_weight",
    "in_proj_bias",
    "bias_k",
    "bias_v",
    "add_zero_attn",
    "dropout_p",
    "out_proj_weight",
    "out_proj_bias",
)
"""The positional arguments of F.multi_head_attention_forward."""


def _dropper(mode: PassMode, name: str, rate: float) -> Callable[[Tensor], Tensor] | None:
    if rate == 0:
        return None
    return lambda weights: draws.dropout(weights, rate, mode.generator(name, weights.device))


def _recurrent(mode: PassMode, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """LSTM, GRU and RNN: dropout between their layers is the last but three or two of their arguments."""
    # padded: (input, hx, weights, biases, layers, dropout, train, bidirectional, batch_first); packed without the last
    packed = isinstance(args[1], Tensor) and isinstance(args[3], list | tuple)
    at = 6 if packed else 5
    if len(args) <= at + 1 or not args[at + 1] or args[at - 1] < 2:
        return func(*args, **kwargs)
    given = (*args[:at], draws.dropout_rate(args[at]), *args[at + 1 :])
    return _run_inside(mode, func, given, kwargs) if given[at] else func(*given, **kwargs)


def _opaque(mode: PassMode, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A function that draws inside."""
    return _run_inside(mode, func, args, kwargs)


def _run_inside(mode: PassMode, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if torch.is_inference_mode_enabled():  # in which a dispatch mode does not see the dropout of an LSTM
        with torch.inference_mode(False), torch.no_grad():
            return _run_inside(mode, func, args, kwargs)
    with _Inside(mode, _name(func)):
        return func(*args, **kwargs)


OUT_OF_PLACE: dict[Function, Function] = {
    torch.alpha_dropout_: torch.alpha_dropout,
    torch.feature_dropout_: torch.feature_dropout,
    torch.feature_alpha_dropout_: torch.feature_alpha_dropout,
}
INPLACE = (torch.dropout_, *OUT_OF_PLACE)
FUNCTIONAL = (F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout)
TAKE_GENERATOR: tuple[Function, ...] = (
    torch.rand,
    torch.randn,
    torch.randint,
    torch.randperm,
    torch.bernoulli,
    torch.multinomial,
    torch.normal,
    torch.poisson,
    torch.binomial,
    GAMMA,
    DIRICHLET,
    Tensor.bernoulli,
    Tensor.multinomial,
    Tensor.normal_,
    Tensor.uniform_,
    Tensor.bernoulli_,
    Tensor.exponential_,
    Tensor.random_,
    Tensor.cauchy_,
    Tensor.log_normal_,
    Tensor.geometric_,
)
INIT = (
    nn.init.uniform_,
    nn.init.normal_,
    nn.init.trunc_normal_,
    nn.init.xavier_uniform_,
    nn.init.xavier_normal_,
    nn.init.kaiming_uniform_,
    nn.init.kaiming_normal_,
    nn.init.orthogonal_,
    nn.init.sparse_,
)
RULES: dict[Function, Rule] = {
    **dict.fromkeys(TAKE_GENERATOR, _with_generator),
    **dict.fromkeys(LIKE, _like),
    **dict.fromkeys((F.dropout, torch.dropout, torch.dropout_), _dropout),
    **dict.fromkeys((*FUNCTIONAL, *OUT_OF_PLACE, *OUT_OF_PLACE.values()), _channel_dropout),
    **dict.fromkeys((torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu), _recurrent),
    **dict.fromkeys((F.gumbel_softmax, F.rrelu, F.rrelu_, torch.rrelu, torch.rrelu_), _opaque),
    **dict.fromkeys((F.fractional_max_pool2d, F.fractional_max_pool3d, *INIT), _opaque),
    F.scaled_dot_product_attention: _attention,
    F.multi_head_attention_forward: _multi_head,
}
"""What to do in the place of a function; all others run as they are."""

"""Stochastic attention in Hugging Face models, through the attention interface of transformers.

A model of transformers looks up its attention function by the name in its config. `register` puts one of ours there;
each attention module holds a family of its own, and the function asks that.
"""

from __future__ import annotations

import inspect
import threading
from typing import Any

from torch import Tensor, nn

from bayesformer.attention.attend import attend, split
from bayesformer.attention.family import Family

NAME = "bayesformer"
FAMILY, ITSELF = "attention_family", "_attends_itself"  # attributes of an attention module while it has a family
INTERFACE, WHOLE = "ALL_ATTENTION_FUNCTIONS", "base_model_prefix"  # names by which code and whole models are known
HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head")
WIDTHS = ("head_dim", "attention_head_size", "key_value_proj_dim", "qk_head_dim")
ELSEWHERE = ("key_value_states", "encoder_hidden_states")  # what cross-attention attends to, as arguments are called
REFUSED = ("softcap", "s_aux", "sinks")  # they change the softmax itself


def register() -> None:
    """Make the name known to transformers."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import eager_mask

    AttentionInterface.register(NAME, attention_forward)
    # Under a name without a mask function masks are dropped without a word, and the future is seen.
    AttentionMaskInterface.register(NAME, eager_mask)


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    position_bias: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """(B, T, H, d) and the weights (B, H, T, S), as the interface wants them.

    A module without a family of its own, in a model whose other modules have one, keeps softmax attention.
    """
    for name in REFUSED:
        if kwargs.get(name) is not None:
            raise ValueError(f"{name} must be left out with stochastic attention; {type(module).__name__} uses it.")
    family: Family | None = getattr(module, FAMILY, None)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    valid = _queries(module, attention_mask, query, key)
    rate = dropout if module.training else 0.0
    out, weights = attend(family, query, key, value, attention_mask, scale, position_bias, valid, rate)
    return out.transpose(-3, -2).contiguous(), weights


class _Latest(threading.local):
    """Which queries of the latest self-attention are no padding."""

    queries: Tensor | None = None


_latest = _Latest()


def _queries(module: nn.Module, mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    """(B, 1, T, 1): queries that are no padding, if that can be told.

    Self-attention sees it in its mask. The mask of cross-attention is about keys; its queries are those of the
    self-attention before it in the same block.
    """
    itself = vars(module).get(ITSELF)
    if itself is not False:
        _latest.queries = _valid(mask, query, key) if itself else None
        return _latest.queries
    known = _latest.queries
    fits = known is not None and known.shape[0] == query.shape[0] and known.shape[2] == query.shape[2]
    return known if fits else None


def _valid(mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    """(B, 1, T, 1): queries that are no padding. In self-attention, padding is what no query may see.

    Only where queries and keys are the same positions: with a cache, keys may be positions to come.
    """
    length = query.shape[-2]
    if mask is None or length != key.shape[-2]:
        return None
    allowed, _ = split(mask, key.mT)
    return allowed.any(-2).unsqueeze(-1)


def uses_interface(kind: type[nn.Module]) -> bool:
    """Whether modules of a class look their attention function up in the interface.

    Whole models speak of it too, to say which functions there are.
    """
    if hasattr(kind, WHOLE):
        return False
    functions = (f for base in kind.__mro__ for f in vars(base).values() if inspect.isfunction(f))
    return any(INTERFACE in inspect.unwrap(function).__code__.co_names for function in functions)


def sites(model: nn.Module) -> dict[str, nn.Module]:
    """Attention modules of transformers, by name."""
    return {name: m for name, m in model.named_modules() if uses_interface(type(m)) and _config(m) is not None}


def size(site: nn.Module) -> tuple[int, int]:
    """Heads of the queries, and width of a head."""
    config = _config(site)
    heads = _first(site, HEADS) or _first(config, HEADS)
    width = _first(site, WIDTHS)
    if heads is None or width is None:
        missing, tried = ("heads", HEADS) if heads is None else ("head width", WIDTHS)
        raise ValueError(
            f"attention must say its {missing} as one of {', '.join(tried)}; {type(site).__name__} has none of them."
        )
    return heads, width


def holders(model: nn.Module) -> list[nn.Module]:
    """Modules with a config of transformers that hold attention of the interface, or are it."""
    found = [module for module in model.modules() if _config(module) is not None]
    return [module for module in found if any(uses_interface(type(inner)) for inner in module.modules())]


def is_whole(module: nn.Module) -> bool:
    """Whether it is a model of transformers, which makes masks, and not one of its layers."""
    return _config(module) is not None and hasattr(type(module), WHOLE)


def implementation(module: nn.Module) -> str | None:
    """The name of the attention function in its config."""
    name: str | None = _config(module)._attn_implementation_internal
    return name


def switch(module: nn.Module, name: str | None) -> None:
    """Set that name. Past the setter, which would go on to the configs of other parts."""
    _config(module)._attn_implementation_internal = name


def detach(module: nn.Module) -> None:
    """Take away the family of an attention module, if it has one."""
    if hasattr(module, FAMILY):
        delattr(module, FAMILY)
    vars(module).pop(ITSELF, None)


def call_begins(site: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Before an attention module runs: whether it attends to itself, and whether its family will be asked at all."""
    if implementation(site) != NAME:
        raise RuntimeError(
            f"config._attn_implementation must stay {NAME!r} while stochastic attention is installed; got "
            f"{implementation(site)!r}. Call uninstall before you change it."
        )
    names = _parameters(type(site))
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    setattr(site, ITSELF, all(given.get(name) is None for name in ELSEWHERE))


def _parameters(kind: type[nn.Module]) -> tuple[str, ...]:
    return tuple(inspect.signature(kind.forward).parameters)[1:]  # without self


def _config(module: nn.Module | None) -> Any:
    """The config a module holds itself; wrappers may pass on that of what they wrap."""
    config = None if module is None else vars(module).get("config")
    return config if hasattr(config, "_attn_implementation_internal") else None


def _first(owner: Any, names: tuple[str, ...]) -> int | None:
    return next((getattr(owner, name) for name in names if isinstance(getattr(owner, name, None), int)), None)

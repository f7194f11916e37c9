"""Stochastic attention in Hugging Face models, through the attention interface of transformers.

A model of transformers looks up its attention function by the name in its config. `register` puts one of ours there;
each attention module holds a family of its own, and the function asks that. All state of a pass is in the families'
`ForwardPass`, which belongs to one model.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from bayesformer.attention.attend import attend, split
from bayesformer.attention.family import AttentionFamily
from bayesformer.attention.forward_pass import ForwardPass
from bayesformer.core.compat import attention_name, has_attention_name, set_attention_name

NAME = "bayesformer"
FAMILY = "attention_family"  # attribute of an attention module while it has a family
INTERFACE, WHOLE = "ALL_ATTENTION_FUNCTIONS", "base_model_prefix"  # names by which code and whole models are known
HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head")
WIDTHS = ("head_dim", "attention_head_size", "key_value_proj_dim", "qk_head_dim", "head_size")
ELSEWHERE = ("key_value_states", "encoder_hidden_states")  # what cross-attention attends to, as arguments are called
CHANGES_SOFTMAX = ("softcap", "s_aux", "sinks")  # arguments of an attention function that change the softmax itself
SHUT = -100.0  # what Swin adds to the logits between parts of an image that only the shift has made neighbours


def register() -> None:
    """Make our attention function, and a function that makes its masks, known to transformers by name."""
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
    for name in CHANGES_SOFTMAX:
        if kwargs.get(name) is not None:
            raise ValueError(f"{name} must be left out with stochastic attention; {type(module).__name__} uses it.")
    family: AttentionFamily | None = getattr(module, FAMILY, None)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    valid = None if family is None else _valid_queries(family.forward_pass, attention_mask, query, key)
    rate = dropout if module.training else 0.0
    out, weights = attend(family, query, key, value, attention_mask, scale, position_bias, valid, rate)
    return out.transpose(-3, -2).contiguous(), weights


def _valid_queries(running: ForwardPass, mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    """(B, 1, T, 1): queries that are no padding, if that can be told.

    Self-attention sees it in its mask. The mask of cross-attention is about keys; its queries are those of the
    self-attention before it in the same block.
    """
    if not running.is_cross:
        running.valid_queries = _seen_by_any(mask, query, key)
        return running.valid_queries
    known = running.valid_queries
    fits = known is not None and known.shape[0] == query.shape[0] and known.shape[2] == query.shape[2]
    return known if fits else None


def _seen_by_any(mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
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
    return any(INTERFACE in inspect.unwrap(function).__code__.co_names for function in functions_of(kind))


def functions_of(kind: type[nn.Module]) -> list[Any]:
    """The functions that a class and its bases define."""
    return [f for base in kind.__mro__ for f in vars(base).values() if inspect.isfunction(f)]


def sites(model: nn.Module) -> dict[str, nn.Module]:
    """The attention modules of transformers that use its interface, by name."""
    return {name: m for name, m in model.named_modules() if uses_interface(type(m)) and _config(m) is not None}


def size(site: nn.Module) -> tuple[int, int]:
    """The number of heads of the queries, and the width of a head."""
    config = _config(site)
    heads = _first(site, HEADS) or _first(config, HEADS)
    width = _first(site, WIDTHS) or _first(config, WIDTHS)
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
    """The name of the attention function in the config of a module."""
    return attention_name(_config(module))


def switch(module: nn.Module, name: str | None) -> None:
    """Set the name of the attention function in the config of a module, and in no other config."""
    set_attention_name(_config(module), name)


def detach(module: nn.Module) -> None:
    """Take away the family of an attention module, if it has one."""
    if hasattr(module, FAMILY):
        delattr(module, FAMILY)


def count_examples(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
    """B of a call of a model of transformers, by its main input or embeddings; None where it has neither."""
    given = _arguments(model, args, kwargs)
    names = (getattr(model, "main_input_name", "input_ids"), "input_ids", "inputs_embeds")
    tensors = [given[str(name)] for name in names if isinstance(given.get(str(name)), Tensor)]
    return next((len(tensor) for tensor in tensors if tensor.dim()), None)


def before_attention(
    site: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Before an attention module runs: see that its family will be asked, and whether it attends to itself.

    Returns the arguments, with a mask of 0 and -100 as one that hides for good.
    """
    if implementation(site) != NAME:
        raise RuntimeError(
            f"config._attn_implementation must stay {NAME!r} while stochastic attention is installed; got "
            f"{implementation(site)!r}. Call uninstall before you change it."
        )
    given = _arguments(site, args, kwargs)
    family: AttentionFamily = getattr(site, FAMILY)
    family.forward_pass.is_cross = any(given.get(name) is not None for name in ELSEWHERE)
    named = zip(_names(site), args, strict=False)
    hidden = [_hide_for_good(x) if name == "attention_mask" else x for name, x in named]
    return (*hidden, *args[len(hidden) :]), {
        name: _hide_for_good(x) if name == "attention_mask" else x for name, x in kwargs.items()
    }


def _hide_for_good(mask: Any) -> Any:
    """A mask (W, T, T) that holds 0 and -100 only, as of shifted windows, with the lowest number in place of -100.

    e⁻¹⁰⁰ is no weight, but a law would draw it and a KL count it.
    """
    if not isinstance(mask, Tensor) or mask.dim() != 3 or not mask.is_floating_point():
        return mask
    shut = mask == SHUT
    if not bool(shut.any()) or not bool((shut | (mask == 0)).all()):
        return mask
    return mask.masked_fill(shut, torch.finfo(mask.dtype).min)


def _arguments(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name, positional ones included."""
    return {**dict(zip(_names(module), args, strict=False)), **kwargs}


def _names(module: nn.Module) -> tuple[str, ...]:
    """The names of the arguments of a module's forward."""
    return tuple(inspect.signature(type(module).forward).parameters)[1:]  # without self


def _config(module: nn.Module | None) -> Any:
    """The config a module holds itself; wrappers may pass on that of what they wrap."""
    config = None if module is None else vars(module).get("config")
    return config if has_attention_name(config) else None


def _first(owner: Any, names: tuple[str, ...]) -> int | None:
    return next((getattr(owner, name) for name in names if isinstance(getattr(owner, name, None), int)), None)

"""One call gives a model stochastic attention, and one takes it away again.

    install(model, Weibull(k=10))
    loss = -log_likelihood(model(x), y).mean() + kl_divergence(model).mean()
    uninstall(model)

Every attention module gets a family of its own, as a part of the module: its parameters are trained, moved and saved
with the model. The model's own weights keep their names and values.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, TypeAlias

import torch
from torch import nn

from bayesformer.attention import hf
from bayesformer.attention.build import build_family
from bayesformer.attention.contextual import Contextual
from bayesformer.attention.core import Attention, Softmax
from bayesformer.attention.family import Family, families
from bayesformer.attention.graph import GraphAttention
from bayesformer.attention.spread import Learned
from bayesformer.attention.stochastic_multihead import StochasticMultihead
from bayesformer.core.errors import unknown_name

BuildFamily: TypeAlias = Callable[[int, int], Family]
BEFORE = "_before_install"
"""Attribute of a module that was changed: what it takes to change it back. On modules, so that it outlives copies."""


def install(
    model: nn.Module, family: str | Family | BuildFamily = "weibull", names: str = "*", **settings: Any
) -> nn.Module:
    """Make a model's softmax attention stochastic, in place; `uninstall` undoes it. Returns the model.

    Takes models of transformers that use its attention interface, `nn.MultiheadAttention` and what is built of it,
    and `Attention` and `GraphAttention` of this library, at any depth. In evaluation mode the model is what it was.
    With PEFT, install after `get_peft_model`, which freezes the parameters it finds; or before it, and name what a
    family learns in `modules_to_save` ("contextual", "spread"), so that the adapter trains and saves it.

    Args:
        model: has attention in it.
        family: a template, copied for each attention module: networks in it start afresh, a contextual prior at the
            width of the module's heads. Or a name, with `settings` as for `build_family`; or a function of
            (heads, head width). Dropout stays the model's own.
        names: pattern of the names of the attention modules.
        settings: of a family given by name.
    """
    build = _builder(family, settings)
    if any(BEFORE in vars(module) for module in model.modules()):
        raise ValueError(
            f"model must not have stochastic attention installed; {type(model).__name__} has. Call uninstall first."
        )
    chosen = _chosen(model, names)
    made = [_made(build, site) for site in chosen]  # all errors come before the first change
    for site, own in zip(chosen, made, strict=True):
        _attach(site, own)
    if any(hf.uses_interface(type(site)) for site in chosen):
        _switch(model)
    for encoder in model.modules():
        if isinstance(encoder, nn.TransformerEncoder) and any(isinstance(m, StochasticMultihead) for m in chosen):
            setattr(encoder, BEFORE, encoder.use_nested_tensor)
            encoder.use_nested_tensor = False  # packed rows go with the fast path only
    model.register_forward_pre_hook(_pass_begins)
    model.register_forward_hook(_pass_ends, always_call=True)
    return model


def uninstall(model: nn.Module) -> nn.Module:
    """Take away what `install` gave a model, in place: outputs, names of weights and config are as before."""
    changed = [module for module in model.modules() if BEFORE in vars(module)]
    if not changed:
        raise ValueError(
            f"model must have stochastic attention that was installed; {type(model).__name__} has none. "
            "What a model was built with is a part of it."
        )
    for module in changed:
        _restore(module, vars(module).pop(BEFORE))
    for module in model.modules():
        _remove_hooks(module)
    return model


def _chosen(model: nn.Module, names: str) -> list[nn.Module]:
    found = {name: m for name, m in model.named_modules() if _is_softmax(m)} | hf.sites(model)
    chosen = [module for name, module in found.items() if fnmatchcase(name, names)]
    if chosen:
        return chosen
    if found:
        raise unknown_name("attention module in names:", names, found)
    raise ValueError(
        "model must have softmax attention that can be replaced: a model of transformers that uses its attention "
        f"interface, nn.MultiheadAttention, or Attention of bayesformer; {type(model).__name__} has none."
    )


def _is_softmax(module: nn.Module) -> bool:
    if isinstance(module, Attention | GraphAttention):
        return isinstance(module.family, Softmax)
    return type(module) is nn.MultiheadAttention  # a subclass may do anything


def _made(build: BuildFamily, site: nn.Module) -> Family:
    """The family of an attention module, where and of the kind its weights are."""
    if isinstance(site, nn.MultiheadAttention):
        if site.bias_k is not None or site.add_zero_attn:
            option = "add_bias_kv" if site.bias_k is not None else "add_zero_attn"
            raise ValueError(f"{option} must be False in nn.MultiheadAttention with stochastic attention; got True.")
        made = build(site.num_heads, site.head_dim)
    elif isinstance(site, Attention | GraphAttention):
        made = build(site.heads, site.width)
    else:
        made = build(*hf.size(site))
    if made.dropout.p:
        raise ValueError(f"dropout must be left out: it stays the model's own; got {made.dropout.p}.")
    own = next((p for p in site.parameters() if p.is_floating_point()), torch.empty(0, device="cpu"))
    return made.to(own.device, own.dtype).train(site.training)


def _attach(site: nn.Module, family: Family) -> None:
    if isinstance(site, Attention | GraphAttention):
        family.dropout = site.family.dropout  # type: ignore[assignment]
        site.family = family
        setattr(site, BEFORE, None)
        return
    site.add_module(hf.FAMILY, family)
    if isinstance(site, nn.MultiheadAttention):
        _become(site, StochasticMultihead)
        setattr(site, BEFORE, None)
    else:
        site.register_forward_pre_hook(hf.call_begins, with_kwargs=True)


def _switch(model: nn.Module) -> None:
    """Let the configs of a model of transformers name our attention function."""
    hf.register()
    holders = hf.holders(model)
    for module in holders:  # before any of them is switched: they share configs
        setattr(module, BEFORE, hf.implementation(module))
    for module in holders:
        hf.switch(module, hf.NAME)
        if hf.is_whole(module) and module is not model:
            module.register_forward_pre_hook(_part_begins)
            module.register_forward_hook(_part_ends, always_call=True)


def _restore(module: nn.Module, before: Any) -> None:
    if isinstance(module, Attention | GraphAttention):
        softmax = Softmax().train(module.family.training)
        softmax.dropout = module.family.dropout  # type: ignore[assignment]
        module.family = softmax
    elif isinstance(module, nn.TransformerEncoder):
        module.use_nested_tensor = before
    elif isinstance(module, StochasticMultihead):
        del module.attention_family
        _become(module, nn.MultiheadAttention)
    else:
        hf.switch(module, before)
        hf.detach(module)


def _become(module: nn.Module, kind: type[nn.Module]) -> None:
    module.__class__ = kind


def _remove_hooks(module: nn.Module) -> None:
    ours = (_pass_begins, _pass_ends, _part_begins, _part_ends, hf.call_begins)
    flags = (module._forward_pre_hooks_with_kwargs, module._forward_hooks_with_kwargs)
    for hooks in (module._forward_pre_hooks, module._forward_hooks):
        for key in [key for key, hook in hooks.items() if hook in ours]:
            del hooks[key]
            for flag in (*flags, module._forward_hooks_always_called):  # keys are unique among all hooks
                flag.pop(key, None)


# A pass of the whole model: a module that is called several times in it (shared layers) owes for every call.


def _pass_begins(model: nn.Module, inputs: Any) -> None:  # noqa: ARG001
    if hf.is_whole(model):
        hf.register()  # a model may have come to another process as a pickle
    _begin(families(model))
    for family in families(model):
        family.depth = 1  # whatever it is: a pass that was interrupted had no end


def _pass_ends(model: nn.Module, inputs: Any, outputs: Any) -> None:  # noqa: ARG001
    for family in families(model):
        family.depth = 0


def _part_begins(part: nn.Module, inputs: Any) -> None:  # noqa: ARG001
    # A model of transformers within the whole: PEFT calls the `forward` of what it wraps, past the hooks of the whole.
    hf.register()
    _begin(family for family in families(part) if family.depth == 0)
    for family in families(part):
        family.depth += 1


def _part_ends(part: nn.Module, inputs: Any, outputs: Any) -> None:  # noqa: ARG001
    for family in families(part):
        family.depth -= 1


def _begin(those: Iterable[Family]) -> None:
    for family in those:
        family.owed, family.wants_gradient = [], torch.is_grad_enabled()


def _builder(family: str | Family | BuildFamily, settings: Mapping[str, Any]) -> BuildFamily:
    if isinstance(family, str):
        return _Named(family, settings)
    if settings:
        raise ValueError(f"settings must be left out unless family is a name; got {', '.join(settings)}.")
    return _Template(family) if isinstance(family, Family) else family


@dataclass(frozen=True)
class _Named:
    name: str
    settings: Mapping[str, Any]

    def __call__(self, heads: int, width: int) -> Family:
        return build_family(self.name, heads, width, **self.settings)


@dataclass(frozen=True)
class _Template:
    family: Family

    def __call__(self, heads: int, width: int) -> Family:
        """A copy whose parts fit, and whose networks start afresh."""
        made = copy.deepcopy(self.family)
        for name, part in self.family.named_children():
            if isinstance(part, Contextual):
                setattr(made, name, Contextual(width, part.inner.out_features))
        for part in made.modules():
            if isinstance(part, Learned) and len(part.rho) not in {1, heads}:
                raise ValueError(
                    f"heads of a learned spread must be 1 or those of the model; got {len(part.rho)}, "
                    f"and the model has {heads}."
                )
            if callable(reset := getattr(part, "reset_parameters", None)):
                reset()
        return made

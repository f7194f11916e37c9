"""One call gives a model stochastic attention, and one takes it away again.

    install(model, Weibull(k=10))
    loss = bayesformer.loss(model, x, y, likelihood="categorical", num_data=N)
    uninstall(model)

Every attention module gets a family of its own, as a part of the module: its parameters are trained, moved and saved
with the model. The model's own weights keep their names and values.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, TypeAlias

from torch import nn

from bayesformer.attention import hf
from bayesformer.attention.build import build_family
from bayesformer.attention.contextual import Contextual
from bayesformer.attention.family import AttentionFamily, families
from bayesformer.attention.forward_pass import ForwardPass
from bayesformer.attention.graph_attention import GraphAttention
from bayesformer.attention.multi_head import MultiHeadAttention, Softmax
from bayesformer.attention.softmax_check import check_plain_softmax
from bayesformer.attention.spread import Learned
from bayesformer.attention.stochastic_multihead import StochasticMultihead
from bayesformer.core.compat import remove_forward_hooks
from bayesformer.core.errors import unknown_name

BuildFamily: TypeAlias = Callable[[int, int], AttentionFamily]
BEFORE = "_before_install"
"""Attribute of a module that was changed: what it takes to change it back. On modules, so that it outlives copies."""
PASS = "_forward_pass"
"""Attribute of a module whose calls are forward passes: the `ForwardPass` of its families."""


def install(
    model: nn.Module, family: str | AttentionFamily | BuildFamily = "weibull", names: str = "*", **settings: Any
) -> nn.Module:
    """Make a model's softmax attention stochastic, in place; `uninstall` undoes it. Returns the model.

    Takes models of transformers that use its attention interface, `nn.MultiheadAttention` and what is built of it,
    and `MultiHeadAttention` and `GraphAttention` of this library, at any depth. In evaluation mode the model is what
    it was. Attention that caps logits or has sinks is refused: it is not a softmax of its logits.
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
    refuse_installed(model)
    found = attention_modules(model)
    chosen = {name: site for name, site in found.items() if fnmatchcase(name, names)}
    if not chosen:
        raise unknown_name("attention module in names:", names, found)
    made = {name: _made(build, site, name) for name, site in chosen.items()}  # all errors come before any change
    return attach(model, chosen, made)


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
        vars(module).pop(PASS, None)
        remove_forward_hooks(module, (_begin_pass, _end_pass, hf.before_attention))
    for left in families(model):
        left.forward_pass = ForwardPass()
    return model


def refuse_installed(model: nn.Module) -> None:
    """Raise ValueError if `install` has given this model stochastic attention already."""
    if any(BEFORE in vars(module) for module in model.modules()):
        raise ValueError(
            f"model must not have stochastic attention installed; {type(model).__name__} has. Call uninstall first."
        )


def attention_modules(model: nn.Module) -> dict[str, nn.Module]:
    """The modules of a model whose softmax attention can become stochastic, by name; an error if there are none."""
    found = {name: m for name, m in model.named_modules() if _is_softmax(m)} | hf.sites(model)
    if not found:
        raise ValueError(
            "model must have softmax attention that can be replaced: a model of transformers that uses its attention "
            "interface, nn.MultiheadAttention, or MultiHeadAttention of bayesformer; "
            f"{type(model).__name__} has none."
        )
    return found


def attach(model: nn.Module, sites: Mapping[str, nn.Module], made: Mapping[str, AttentionFamily]) -> nn.Module:
    """Give attention modules of a model these families, by name, and let the model's calls be forward passes."""
    for name, site in sites.items():
        _attach(site, made[name])
    if any(hf.uses_interface(type(site)) for site in sites.values()):
        _switch(model)
    for encoder in model.modules():
        if isinstance(encoder, nn.TransformerEncoder) and any(
            isinstance(m, StochasticMultihead) for m in encoder.modules()
        ):
            setattr(encoder, BEFORE, encoder.use_nested_tensor)
            encoder.use_nested_tensor = False  # packed rows go with the fast path only
    running = ForwardPass()
    for family in families(model):
        family.forward_pass = running
    # PEFT calls the `forward` of a model of transformers past its hooks, so that models within it begin a pass, too.
    for module in {model, *(m for m in model.modules() if hf.is_whole(m))}:
        setattr(module, PASS, running)
        module.register_forward_pre_hook(_begin_pass, with_kwargs=True)
        module.register_forward_hook(_end_pass, always_call=True)
    return model


def prepared(family: AttentionFamily, site: nn.Module) -> AttentionFamily:
    """A family on the device and in the dtype and mode of an attention module."""
    own = next((p for p in site.parameters() if p.is_floating_point()), None)
    if own is not None:
        family.to(own.device, own.dtype)
    return family.train(site.training)


def check_site(site: nn.Module, name: str) -> tuple[int, int]:
    """Heads and head width of an attention module; an error if it does something that no family can do."""
    if isinstance(site, nn.MultiheadAttention):
        if site.bias_k is not None or site.add_zero_attn:
            option = "add_bias_kv" if site.bias_k is not None else "add_zero_attn"
            raise ValueError(f"{option} must be False in nn.MultiheadAttention with stochastic attention; got True.")
        return site.num_heads, site.head_dim
    if isinstance(site, MultiHeadAttention | GraphAttention):
        return site.heads, site.width
    check_plain_softmax(site, name)
    return hf.size(site)


def _is_softmax(module: nn.Module) -> bool:
    if isinstance(module, MultiHeadAttention | GraphAttention):
        return isinstance(module.family, Softmax)
    return type(module) is nn.MultiheadAttention  # a subclass may do anything


def _made(build: BuildFamily, site: nn.Module, name: str) -> AttentionFamily:
    """The family for an attention module, on the device and in the dtype of the module's weights."""
    own = next((p for p in site.parameters() if p.is_floating_point()), None)
    with nullcontext() if own is None else own.device:
        made = build(*check_site(site, name))
    if made.dropout.p:
        raise ValueError(f"dropout must be left out: it stays the model's own; got {made.dropout.p}.")
    if isinstance(site, MultiHeadAttention | GraphAttention):
        made.dropout = site.family.dropout  # type: ignore[assignment]
    return prepared(made, site)


def _attach(site: nn.Module, family: AttentionFamily) -> None:
    if isinstance(site, MultiHeadAttention | GraphAttention):
        site.family = family
        setattr(site, BEFORE, None)
        return
    site.add_module(hf.FAMILY, family)
    if isinstance(site, nn.MultiheadAttention):
        _become(site, StochasticMultihead)
        setattr(site, BEFORE, None)
    else:
        site.register_forward_pre_hook(hf.before_attention, with_kwargs=True)


def _switch(model: nn.Module) -> None:
    """Let the configs of a model of transformers name our attention function."""
    hf.register()
    holders = hf.holders(model)
    for module in holders:  # before any of them is switched: they share configs
        setattr(module, BEFORE, hf.implementation(module))
    for module in holders:
        hf.switch(module, hf.NAME)


def _restore(module: nn.Module, before: Any) -> None:
    if isinstance(module, MultiHeadAttention | GraphAttention):
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


def _begin_pass(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Before a model runs: its families start a new record, unless the model is a part of one that runs already."""
    running: ForwardPass = vars(model)[PASS]
    running.begin(id(model))
    if hf.is_whole(model):
        hf.register()  # the model may have come to this process as a pickle
        if running.examples is None:
            running.examples = hf.count_examples(model, args, kwargs)


def _end_pass(model: nn.Module, inputs: Any, outputs: Any) -> None:  # noqa: ARG001
    """After a model has run, or has failed."""
    running: ForwardPass = vars(model)[PASS]
    running.end(id(model))


def _builder(family: str | AttentionFamily | BuildFamily, settings: Mapping[str, Any]) -> BuildFamily:
    if isinstance(family, str):
        return _ByName(family, settings)
    if settings:
        raise ValueError(f"settings must be left out unless family is a name; got {', '.join(settings)}.")
    return _Template(family) if isinstance(family, AttentionFamily) else family


@dataclass(frozen=True)
class _ByName:
    name: str
    settings: Mapping[str, Any]

    def __call__(self, heads: int, width: int) -> AttentionFamily:
        return build_family(self.name, heads, width, **self.settings)


@dataclass(frozen=True)
class _Template:
    family: AttentionFamily

    def __call__(self, heads: int, width: int) -> AttentionFamily:
        """A copy whose parts fit, and whose networks start afresh."""
        made = copy.deepcopy(self.family)
        for name, part in self.family.named_children():
            if isinstance(part, Contextual):
                setattr(made, name, Contextual(width, part.hidden, None if part.heads is None else heads))
        for part in made.modules():
            if isinstance(part, Learned) and len(part.rho) not in {1, heads}:
                raise ValueError(
                    f"heads of a learned spread must be 1 or those of the model; got {len(part.rho)}, "
                    f"and the model has {heads}."
                )
            if callable(reset := getattr(part, "reset_parameters", None)):
                reset()
        return made

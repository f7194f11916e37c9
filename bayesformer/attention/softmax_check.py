"""Whether an attention module of transformers has nothing but a softmax of its logits, asked before the first pass.

The attention function gets what else a module does as keyword arguments. Which ones, and with which values, stands in
the source of the module's forward: `softcap=self.attn_logit_softcapping`.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from typing import Any

from torch import nn

from bayesformer.attention.hf import CHANGES_SOFTMAX, INTERFACE, functions_of

# Arguments of attention functions that a softmax with a mask honours, or that are for fused kernels only.
UNDERSTOOD = frozenset(
    {
        "module",
        "query",
        "key",
        "value",
        "attention_mask",
        "scaling",
        "dropout",
        "position_bias",
        "position_ids",
        "output_attentions",
        "is_causal",  # carried by the mask
        "sliding_window",  # carried by the mask
        "deterministic",
    }
)


def check_plain_softmax(site: nn.Module, name: str) -> None:
    """Raise ValueError if the attention module changes the softmax itself, or does something that cannot be told.

    Caps of the logits and sinks change the softmax. An argument that is None, as a config may turn it off, is fine.
    """
    for argument, value in _arguments(type(site)):
        if argument in UNDERSTOOD or _is_none(site, value):
            continue
        why = "which changes the softmax itself" if argument in CHANGES_SOFTMAX else "which it does not know"
        raise ValueError(
            f"attention must be a softmax of its logits to become stochastic; {name or 'the model'} "
            f"({type(site).__name__}) uses {argument}, {why}. Leave such modules out with names=, a pattern."
        )


def _arguments(kind: type[nn.Module]) -> Iterator[tuple[str, ast.expr | None]]:
    """Keyword arguments that a class gives its attention function, with the expression of each; None if unreadable."""
    for function in functions_of(kind):
        code = inspect.unwrap(function)
        if INTERFACE not in code.__code__.co_names:
            continue
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(code)))
        except (OSError, SyntaxError):  # made at run time: only the constants of its code are left
            yield from ((name, None) for name in CHANGES_SOFTMAX if name in _constants(code.__code__.co_consts))
            continue
        names = _interface_names(tree)
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names:
                yield from ((keyword.arg, keyword.value) for keyword in node.keywords if keyword.arg is not None)


def _interface_names(tree: ast.AST) -> set[str]:
    """The variables that hold the attention function: whatever the table of functions is looked up into."""
    names = set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            mentions = any(isinstance(part, ast.Name) and part.id == INTERFACE for part in ast.walk(node.value))
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {target.id for target in targets if mentions and isinstance(target, ast.Name)}
    return names


def _constants(values: tuple[Any, ...]) -> set[str]:
    """All strings among constants and tuples of constants."""
    inner = [v for value in values if isinstance(value, tuple) for v in value]
    return {value for value in (*values, *inner) if isinstance(value, str)}


def _is_none(site: nn.Module, value: ast.expr | None) -> bool:
    """Whether an expression is None for this module: the constant, or an attribute `self.x` that is None."""
    if isinstance(value, ast.Constant):
        return value.value is None
    if isinstance(value, ast.Attribute) and isinstance(value.value, ast.Name) and value.value.id == "self":
        return getattr(site, value.attr, value) is None
    return False

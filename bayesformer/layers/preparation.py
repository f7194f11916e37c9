"""What a method changes in a model before it is trained: recorded in files, so that loading can do it again.

A preparation acts on a private tree of the model (`model.shell.shadow`), never on the user's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bayesformer.attention import install
from bayesformer.core.errors import unknown_name
from bayesformer.core.seeds import stream
from bayesformer.layers.blob_linear import add_blob
from bayesformer.layers.concrete import add_concrete_sites
from bayesformer.layers.variational import Variational
from bayesformer.model.skeleton import shadow
from bayesformer.priors.setting import PriorSetting, prior_of

STEPS = "attention_steps"
"""Buffer that counts training steps: buffers are part of a checkpoint, so annealing resumes where it was."""


@dataclass(frozen=True)
class Preparation:
    """Changes of a model, in order: pairs of a kind (a key of `KINDS`) and its settings, which JSON can hold."""

    changes: tuple[tuple[str, Mapping[str, Any]], ...] = ()

    def __call__(self, model: nn.Module) -> nn.Module:
        """The model changed in place, or a wrapper around it."""
        for kind, settings in self.changes:
            if kind not in KINDS:
                raise unknown_name("preparation", kind, KINDS)
            model = KINDS[kind](model, **settings)
        return model

    def then(self, kind: str, **settings: Any) -> Preparation:
        """The same changes and one more."""
        return Preparation((*self.changes, (kind, settings)))

    def to_json(self) -> list[list[Any]]:
        """As lists and dicts, for a file."""
        return [[kind, dict(settings)] for kind, settings in self.changes]

    @classmethod
    def from_json(cls, saved: list[list[Any]]) -> Preparation:
        """The preparation that `to_json` wrote down."""
        return cls(tuple((kind, settings) for kind, settings in saved))


def _attention(model: nn.Module, family: str, names: str = "*", **settings: Any) -> nn.Module:
    install(model, family, names, **settings)
    model.register_buffer(STEPS, torch.zeros((), device=next(model.parameters()).device), persistent=False)
    return model


def _variational(model: nn.Module, prior: PriorSetting, **settings: Any) -> nn.Module:
    return Variational(model, prior=prior_of(prior), copy_model=False, **settings)


KINDS: dict[str, Callable[..., nn.Module]] = {
    "attention": _attention,
    "variational": _variational,
    "concrete_dropout": add_concrete_sites,
    "blob": add_blob,
}


def prepared_tree(
    model: nn.Module, infer: Sequence[str], preparation: Preparation, frozen: Mapping[str, Tensor] | None = None
) -> nn.Module:
    """A private tree of a model with everything that its passes need; what is drawn at random here is not used.

    `frozen` are weights that no model holds, by name: they are put in before the model is prepared.
    """
    tree = shadow(model, tuple(infer))
    with torch.no_grad():
        for name, value in (frozen or {}).items():
            tree.get_parameter(name).data = value
    with stream(0, "preparation"):
        return preparation(tree)

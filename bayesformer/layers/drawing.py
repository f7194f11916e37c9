"""What the modules of a model see during one forward pass under random weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from torch import Tensor, nn
from torch.nn import functional as F

from bayesformer.layers import local
from bayesformer.layers.families import Family
from bayesformer.layers.lazy import Lazy


@dataclass(frozen=True)
class Drawing:
    """The law of every weight by name, and noise where it has been drawn already."""

    law: Callable[..., Family]
    parameters: Mapping[str, tuple[Tensor, ...]]
    """its arguments, each in the shape of the weight, the location first"""
    noise: Mapping[str, Tensor] | None = None
    sparse: bool = False
    """whether tables of embeddings can take sparse gradients"""

    def weight(self, name: str) -> Lazy:
        """A weight that is drawn when something is computed from it."""
        return Lazy(self.parameters[name][0], partial(self._draw, name))

    def forward(
        self, module: nn.Module, weight: str, bias: str | None, rule: local.Forward
    ) -> Callable[[Tensor], Tensor] | None:
        """A forward that draws the module's outputs; None for a module that cannot, or no longer can."""
        apply = local.affine(module)
        if apply is not None:
            return partial(self._outputs, rule, apply, weight, module._parameters["bias"] if bias is None else bias)
        if local.is_table(module) and rule is not local.flipout:
            return partial(self._rows, module, weight)
        return None

    def _outputs(
        self, rule: local.Forward, apply: local.Affine, weight: str, bias: str | Tensor | None, x: Tensor
    ) -> Tensor:
        loc, noise = self._given(bias, rule) if isinstance(bias, str) else (bias, None)
        mean, weight_noise = self._given(weight, rule)
        return rule(apply, local.Noise(mean, loc, weight_noise, noise), x)

    def _given(self, name: str, rule: local.Forward) -> tuple[Tensor, Tensor]:
        """Location and scale, or for Flipout deviation."""
        q = self.law(*self.parameters[name])
        if rule is not local.flipout:
            return q.loc, q.scale
        assert self.noise is not None
        return q.loc, q.scale * self.noise[name]

    def _rows(self, module: nn.Embedding, weight: str, ids: Tensor) -> Tensor:
        """Rows of an embedding, drawn anew at every place where they occur."""
        rows = [F.embedding(ids, table, module.padding_idx, sparse=self.sparse) for table in self.parameters[weight]]
        return self.law(*rows).rsample()

    def _draw(self, name: str) -> Tensor:
        q = self.law(*self.parameters[name])
        return q.rsample() if self.noise is None else q.loc + q.scale * self.noise[name]

"""A tensor that carries the moments of a Gaussian through ordinary torch functions.

`Uncertain` stands in for a tensor inside a model's own forward. Every torch function that meets one is looked up in
`RULES`, and the rule computes mean and spread of the result. Rules work on plain tensors, so nothing here recurses.

Letters as in Li et al. (2025): m mean, s variances, S covariance over the last axis.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor

from bayesformer.core.compat import empty_wrapper
from bayesformer.predict.one_pass.options import Settings

Rule: TypeAlias = Callable[..., Any]
LazySpread: TypeAlias = Tensor | Callable[[], Tensor]
R = TypeVar("R", bound=Rule)

RULES: dict[Any, Rule] = {}
"""The rule of every torch function that may meet an `Uncertain`."""


def rule(*functions: Any) -> Callable[[R], R]:
    """Register a rule for torch functions: it is called in their place, with the same arguments.

    A rule reads `x.m` and `x.v` of its uncertain arguments and returns `x.like(mean, spread)`.
    """

    def register(found: R) -> R:
        RULES.update(dict.fromkeys(functions, found))
        return found

    return register


class NoRuleError(NotImplementedError):
    """A model calls a function through which no rule carries variance."""


@dataclass
class PassContext:
    """What the uncertain tensors of one predictor share: its settings, and squares of weights that do not change."""

    settings: Settings
    fixed: dict[int, Tensor] = field(default_factory=dict)
    """weights without spread, by identity"""
    squares: dict[int, Tensor] = field(default_factory=dict)

    def square(self, w: Tensor) -> Tensor:
        """W², remembered for the model's own weights."""
        if id(w) not in self.fixed:
            return w * w
        if id(w) not in self.squares:
            with torch.inference_mode(False):  # kept for passes that may need a gradient
                self.squares[id(w)] = (w * w).detach()
        return self.squares[id(w)]


class Uncertain(Tensor):
    """A Gaussian tensor: its mean, and variances or covariances over the last axis.

    The spread may be given as a function, called when it is first needed: queries and keys often never need theirs.
    """

    m: Tensor
    """mean"""
    context: PassContext
    origin: Any
    """the affine map this is the output of, where that is known (`linear.Affine`)"""
    structure: Any
    """how a weight matrix is correlated, where it is (`weight_covariance.WeightCovariance`)"""
    turned: bool
    """whether the structure is that of the transposed matrix"""
    gate: Any
    """for an element-wise function of an affine map: that map and the slope"""
    scores: bool
    """whether this is a product of two uncertain tensors, as attention logits are"""
    _v: LazySpread

    @staticmethod
    def __new__(cls: type[Uncertain], m: Tensor, v: LazySpread, context: PassContext) -> Uncertain:
        """Without storage of its own: a kernel that got hold of it could only fail, never drop the spread."""
        found: Uncertain = empty_wrapper(cls, m)
        found.m, found._v, found.context = m, v, context
        found.origin = found.structure = found.gate = None
        found.turned = found.scores = False
        return found

    def __init__(self, m: Tensor, v: LazySpread, context: PassContext) -> None:
        pass

    @property
    def settings(self) -> Settings:
        """The settings of the pass that this tensor belongs to."""
        return self.context.settings

    @property
    def v(self) -> Tensor:
        """The spread: variances like the mean, or covariances with one axis more."""
        if not isinstance(self._v, Tensor):
            self._v = self._v()
        return self._v

    @property
    def s(self) -> Tensor:
        """Variances, in the shape of the mean."""
        return self.v.diagonal(dim1=-2, dim2=-1) if self.full else self.v

    @property
    def S(self) -> Tensor:
        """Covariances over the last axis, (..., d, d)."""
        return self.v if self.full else torch.diag_embed(self.v)

    @property
    def full(self) -> bool:
        """Whether covariances are carried."""
        return self.v.dim() > self.m.dim()

    @property
    def known(self) -> bool:
        """Whether the spread was computed."""
        return isinstance(self._v, Tensor)

    def like(self, m: Tensor, v: LazySpread) -> Uncertain:
        """Another tensor of the same pass."""
        return Uncertain(m, v, self.context)

    def become(self, other: Uncertain) -> Uncertain:
        """Take over the moments of another, as in-place functions do."""
        self.m, self._v = other.m, other._v
        self.origin = self.structure = self.gate = None
        self.scores = other.scores
        for kept in ("flip", "second"):  # what was computed from the old moments
            self.__dict__.pop(kept, None)
        return self

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = RULES.get(func)
        if found is None:
            raise NoRuleError(_no_rule(func))
        return found(*args, **kwargs) if kwargs else found(*args)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise NoRuleError(_no_rule(func))

    # What is asked most, without the way through torch.
    shape = property(lambda self: self.m.shape)
    dtype = property(lambda self: self.m.dtype)
    device = property(lambda self: self.m.device)
    ndim = property(lambda self: self.m.dim())
    requires_grad = property(lambda self: self.m.requires_grad)
    is_cuda = property(lambda self: self.m.is_cuda)
    is_sparse = property(lambda self: self.m.is_sparse)
    is_nested = property(lambda self: self.m.is_nested)
    is_quantized = property(lambda self: self.m.is_quantized)
    layout = property(lambda self: self.m.layout)
    T = property(lambda self: self.t())
    mT = property(lambda self: self.transpose(-2, -1))

    def size(self, dim: int | None = None) -> Any:
        """The shape of the mean, or its length along one axis."""
        return self.m.shape if dim is None else self.m.shape[dim]

    def dim(self) -> int:
        """The number of axes that the mean has."""
        return self.m.dim()

    def numel(self) -> int:
        """How many numbers the mean has."""
        return self.m.numel()

    def __len__(self) -> int:
        return len(self.m)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Uncertain(mean={self.m}, spread={self._v if self.known else 'not yet computed'})"


def mean_of(x: Any) -> Any:
    """The mean of an uncertain tensor; anything else as it is."""
    return x.m if isinstance(x, Uncertain) else x


def first_uncertain(*values: Any) -> Uncertain:
    """The one whose pass the result belongs to."""
    return next(x for x in values if isinstance(x, Uncertain))


def then(x: Uncertain, function: Callable[[Tensor], Tensor]) -> LazySpread:
    """A function of the spread: at once where it is known, else when it is needed."""
    if isinstance(x._v, Tensor):
        return function(x._v)
    return lambda: function(x.v)


def times_(fresh: Tensor, factor: Tensor) -> Tensor:
    """A product into memory that nobody else holds, where no gradient is wanted: tensors of a pass fill the cache."""
    return fresh * factor if torch.is_grad_enabled() else fresh.mul_(factor)


def name_of(func: Any) -> str:
    """A torch function as one would import it."""
    name = getattr(func, "__qualname__", None) or getattr(func, "__name__", None) or str(func)
    module = getattr(func, "__module__", None) or ""
    owner = getattr(getattr(func, "__objclass__", None), "__name__", "")
    if owner:
        return f"torch.Tensor.{getattr(func, '__name__', name)}"
    name = str(name).removeprefix("_VariableFunctionsClass.")  # what torch.lstm and its like are defined in
    return f"{module}.{name}" if module else name


def _no_rule(func: Any) -> str:
    return (
        f"the model calls {name_of(func)} on an uncertain tensor, and no rule says how variance passes through it. "
        "Use predictive='streamlined', which needs no rules. Or add one: decorate a function of the same arguments "
        "with @rule(<that function>) from bayesformer.predict.one_pass, or treat the module that calls it as one with "
        "@module_rule(<its class>)."
    )

"""What a likelihood is: log p(y | outputs) of a network's outputs, and everything that follows from it.

A likelihood of one's own is a frozen dataclass that derives from `Likelihood` and gives a name, `log_density`,
`predictive`, `sample` and, for good messages, `check`. The Fisher information in the outputs, its diagonal and its root
then follow by autograd (`fisher.py`) and may be given in closed form where one is known. `poisson.py` is an example,
explained in CONTRIBUTING.md.

Outputs are (B, ..., K): B examples, any number of axes of positions (tokens, time steps), K numbers per position.
One example may have many positions; its log-likelihood is their sum, so that one example is one datum wherever the
library divides by N. Positions that do not count add nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from bayesformer.core.types import Outputs
from bayesformer.likelihoods.fisher import expected_hessian, expected_second_derivative
from bayesformer.likelihoods.links import Link
from bayesformer.likelihoods.output_draws import as_draws, closed_form, promote
from bayesformer.likelihoods.predictive import Predictive

P = TypeVar("P", bound=Predictive)


class Likelihood:
    """log p(y | outputs) and what follows from it; subclasses are frozen dataclasses whose fields are the settings."""

    name: ClassVar[str] = ""
    """what users write, `likelihood="poisson"`, and what a saved posterior says"""
    elementwise: ClassVar[bool] = False
    """whether every number among the outputs has a target to itself, in the same shape (a logit, a log rate); otherwise
    the last axis of the outputs holds the K numbers of one position"""
    target_dims: ClassVar[int] = 0
    """axes at the end of the targets that belong to one position: 0 for labels, 1 for vectors"""
    ahead: ClassVar[int] = 0
    """how many positions after an output its target stands; 1 for next tokens"""
    reduces: ClassVar[bool] = False
    """whether predictions are reduced to a `TokenPredictive` unless all probabilities are asked for: where the outputs
    of a position are a vocabulary"""
    links: ClassVar[tuple[Link, ...]] = ("mc",)
    """ways from a Gaussian over outputs to a predictive, see `bayesformer.likelihoods.links`"""

    # What a likelihood of one's own gives.

    def log_density(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """(B, ...): log p(y | outputs) of every position; outputs are float32 or float64, padding holds zeros."""
        raise NotImplementedError(f"{type(self).__name__} must define log_density(outputs, targets) or log_prob.")

    def predictive(
        self, outputs: Outputs, link: Link | None = None, draws: int | None = None, seed: int = 0
    ) -> Predictive:
        """The predictive distribution over targets, in float32 or float64.

        From a Gaussian over outputs by `link` (see `likelihoods.links`; None is the likelihood's own way), with
        `draws` of the outputs from the stream of `seed` where it has no closed form. Draws need no link.
        """
        raise NotImplementedError(f"{type(self).__name__} must define predictive(outputs, link, draws, seed).")

    def sample(self, outputs: Tensor, generator: torch.Generator) -> Tensor:
        """Targets drawn from p(y | outputs) with a CPU generator, so the same on every device.

        By default from the values of `support`, for targets that are single numbers.
        """
        values = self.support(outputs)
        if values is None:
            raise ValueError(
                f"likelihood {type(self).__name__} must define sample(outputs, generator) to draw targets, which "
                "kind='mc' and Fisher information by autograd need; it does not. Use kind='fisher'."
            )
        shape = self.target_shape(outputs)
        log_probs = [self.log_density(promote(outputs), value.expand(shape)) for value in values]
        probs = torch.stack(log_probs, -1).softmax(-1).flatten(0, -2).cpu()
        drawn = torch.multinomial(probs, 1, generator=generator).to(outputs.device)
        return values.to(outputs.device)[drawn.view(shape)]

    def check(self, outputs: Tensor, targets: Tensor, mask: Tensor | None = None) -> None:
        """Raise ValueError unless these outputs and the targets of a data set fit this likelihood.

        Called once before training. By default shapes are compared, and at least one position must count.
        """
        self.check_shapes(outputs, targets)
        if not bool(self.kept(targets, mask).any()):
            raise ValueError(f"at least one of the targets must count; got {targets.numel()} of which none does.")

    # What follows, and may be given in closed form.

    def log_prob(self, outputs: Tensor, targets: Tensor, mask: Tensor | None = None) -> Tensor:
        """(B,): log-likelihood of each example, summed over its counted positions."""
        outputs = promote(outputs)
        self.check_shapes(outputs, targets)
        if mask is None:
            return sum_positions(self.log_density(outputs, targets))
        kept = self.kept(targets, mask)
        # A NaN in padding would survive multiplication by 0, in the gradient too.
        blank = targets.masked_fill(~kept.view(*kept.shape, *[1] * self.target_dims), 0)
        return sum_positions(self.log_density(outputs, blank).masked_fill(~kept, 0))

    def support(self, outputs: Tensor) -> Tensor | None:  # noqa: ARG002
        """(S,): all values that a single target can take, or None where they are not few."""
        return None

    def identified(self, outputs: Tensor) -> Tensor:
        """(B, ..., K): the outputs without what log p(y | outputs) does not depend on, by an orthogonal projection.

        Spreads of outputs are compared after it, since what it takes away changes no prediction.
        """
        return outputs

    def hessian(self, outputs: Tensor) -> Tensor:
        """(B, ..., K, K): expected second derivative of -log p in the K outputs (the Fisher information)."""
        if self.elementwise:
            return diagonal_matrix(self.hessian_diagonal(outputs))
        return expected_hessian(self, promote(outputs))

    def hessian_diagonal(self, outputs: Tensor) -> Tensor:
        """(B, ..., K): the diagonal of `hessian`; for elementwise likelihoods all of it."""
        if self.elementwise:
            return expected_second_derivative(self, promote(outputs))
        return self.hessian(outputs).diagonal(dim1=-2, dim2=-1)

    def hessian_times(self, outputs: Tensor, vectors: Tensor) -> Tensor:
        """(B, ..., K): Λ u of every position, for vectors u in the shape of the outputs."""
        if self.elementwise:
            return self.hessian_diagonal(outputs) * vectors
        return (self.hessian(outputs) @ vectors.unsqueeze(-1)).squeeze(-1)

    def position_roots(self, outputs: Tensor) -> Callable[[int], Iterator[Tensor]]:
        """From a position t among T, see `positions`, to the columns (B, K) of a root S of its information, S Sᵀ = Λ.

        Columns come one at a time: for a vocabulary nothing is K by K.
        """
        flat = self.positions(outputs)
        if self.elementwise:
            scale = self.hessian_diagonal(outputs).clamp_min(0).sqrt().reshape(flat.shape)
            return lambda t: diagonal_columns(scale[:, t])
        matrix = self.hessian(outputs).reshape(*flat.shape, flat.shape[-1])
        return lambda t: symmetric_columns(matrix[:, t])

    def root(self, outputs: Tensor) -> Tensor:
        """(B, ..., K, R): a root of the information, root rootᵀ = hessian."""
        if self.elementwise:
            return diagonal_matrix(self.hessian_diagonal(outputs).clamp_min(0).sqrt())
        columns = self.position_roots(outputs)
        found = [torch.stack(list(columns(t)), -1) for t in range(self.positions(outputs).shape[1])]
        return torch.stack(found, 1).reshape(*outputs.shape, self.rank(outputs))

    def rank(self, outputs: Tensor) -> int:
        """R, the columns of a root per position."""
        return self.positions(outputs).shape[-1]

    # Which targets count, and which output answers which target.

    def kept(self, targets: Tensor, mask: Tensor | None = None) -> Tensor:
        """Boolean, in the shape of the target positions: whether each of the targets counts."""
        shape = targets.shape[: targets.dim() - self.target_dims]
        return torch.ones(shape, dtype=torch.bool, device=targets.device) if mask is None else expand_mask(mask, shape)

    def counted(self, targets: Tensor, mask: Tensor | None = None) -> Tensor | None:
        """Which targets count, as a mask for `bayesformer.evaluate` with these targets; None where all do."""
        kept = self.kept(targets, mask)
        return None if bool(kept.all()) else kept

    def counted_positions(self, targets: Tensor, mask: Tensor | None = None) -> Tensor:
        """(B,), int64: how many positions of each example count, by which a loss per token divides."""
        kept = self.kept(targets, mask)
        return kept.reshape(len(kept), -1).sum(1)

    def align(self, targets: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """The targets, shifted so that entry t belongs to the output at t, and a boolean mask of those that count.

        The mask is None if all do. Nothing is shifted here; `NextToken` shifts by one position.
        """
        return targets, self.counted(targets, mask)

    def pairs(self, predictive: P, targets: Tensor, mask: Tensor | None = None) -> tuple[P, Tensor]:
        """The M predictions that have a target that counts, and these targets, (M, ...): ready for any score."""
        answers, counted = self.align(targets, mask)
        if counted is None:
            counted = torch.ones(predictive.shape, dtype=torch.bool, device=targets.device)
        return predictive.select(counted), answers[counted]

    # Shapes.

    def target_shape(self, outputs: Tensor) -> torch.Size:
        """The shape of targets that fits these outputs."""
        return outputs.shape if self.elementwise else outputs.shape[:-1]

    def positions(self, outputs: Tensor) -> Tensor:
        """(B, T, K): outputs with one axis for all positions of an example; T = 1 for outputs (B, K)."""
        width = 1 if self.elementwise or outputs.dim() == 1 else outputs.shape[-1]
        return outputs.reshape(len(outputs), -1, width)

    def per_token(self, outputs: Tensor) -> bool:
        """Whether an example has output vectors at many positions, (B, T, ..., K)."""
        return outputs.dim() > 2 and not self.elementwise

    def check_shapes(self, outputs: Tensor, targets: Tensor) -> None:
        """Raise ValueError unless targets have the shape that these outputs ask for."""
        predicted = self.target_shape(outputs)
        if predicted != targets.shape:
            raise ValueError(
                f"targets of a {self.name or type(self).__name__} likelihood must have shape {tuple(predicted)} for "
                f"these model outputs; got {tuple(targets.shape)}."
            )

    # What some likelihoods have.

    @property
    def noise_scale(self) -> float | None:
        """Standard deviation of the observation noise where it is one known number, else None."""
        return None

    def with_noise_scale(self, scale: float) -> Likelihood:
        """The same likelihood with another known noise."""
        raise ValueError(f"likelihood must have a known noise scale to change it to {scale}; got {self}.")

    @property
    def next_token(self) -> Likelihood | None:
        """What to use instead if the targets turn out to be the inputs of a causal language model; None to stay."""
        return None

    def output_draws(
        self, outputs: Outputs, link: Link | None = None, draws: int | None = None, seed: int = 0
    ) -> Tensor:
        """(L, B, ..., K): draws of the outputs in float32 or float64, after a check that the link is "mc" or None."""
        closed_form(outputs, link, ("mc",))
        return as_draws(outputs, draws, seed)

    def settings(self) -> dict[str, Any]:
        """The fields of the dataclass by name, for a file."""
        return {f.name: getattr(self, f.name) for f in fields(self)} if is_dataclass(self) else {}


def sum_positions(values: Tensor) -> Tensor:
    """(B,): values (B, ...) summed over the positions of each example."""
    return values.flatten(1).sum(1) if values.dim() > 1 else values


def expand_mask(mask: Tensor, shape: torch.Size) -> Tensor:
    """A mask over leading axes as one over all positions."""
    if mask.shape == shape:
        return mask
    if mask.dim() > len(shape) or mask.shape != shape[: mask.dim()]:
        raise ValueError(f"mask must have shape {tuple(shape)} or its leading axes; got {tuple(mask.shape)}.")
    return mask.view(*mask.shape, *[1] * (len(shape) - mask.dim())).expand(shape)


def diagonal_matrix(values: Tensor) -> Tensor:
    """(B, ..., K, K) with values (B, ..., K) on the diagonal; (B,) counts as (B, 1)."""
    return torch.diag_embed(values if values.dim() > 1 else values.unsqueeze(-1))


def diagonal_columns(scale: Tensor) -> Iterator[Tensor]:
    """The K columns (B, K) of diag(scale)."""
    for k in range(scale.shape[-1]):
        column = torch.zeros_like(scale)
        column[..., k] = scale[..., k]
        yield column


def symmetric_columns(matrix: Tensor) -> Iterator[Tensor]:
    """Columns (B, K) of a root of positive semidefinite (B, K, K); eigenvalues below 0 are rounding or Monte Carlo."""
    values, vectors = torch.linalg.eigh(matrix)
    yield from (vectors * values.clamp_min(0).sqrt().unsqueeze(-2)).unbind(-1)

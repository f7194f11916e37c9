"""The last layer in closed form: outputs f = W φ + b have Jacobian I ⊗ φᵀ, so no backward pass is needed.

For a Gaussian over W (K, D) and features φ (..., D), the covariance of the K outputs is, by the form of the block,

    diagonal     V_kk = Σ_i σ²_ki φ_i²
    Kronecker    Q_B diag_k( Σ_j (q_jᵀφ)² / D_kj ) Q_Bᵀ
    dense        φᵀ Σ_kl φ
    low rank     the prior's diagonal less what k columns take away

A bias is a weight whose one feature is 1. Nothing is K by K unless Q_B or the dense block already is. Q_B and a root of
a bias's covariance have at most K columns, but there is a copy of them for every input: where these would be too many,
those of least spread become part of the diagonal, so that variances stay exact.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from bayesformer.core.types import GaussianOutputs
from bayesformer.jacobians.sites import ElementSite, LinearSite, Site
from bayesformer.laws import Block, Dense, Diagonal, KroneckerBasis, LowRank

SQUARE = 512  # outputs up to which K by K matrices are formed where they are needed to be exact


@dataclass
class HeadCovariance:
    """A covariance over K outputs under construction: diagonal + Σ added addedᵀ - Σ removed removedᵀ."""

    diagonal: Tensor  # (..., K)
    rank: int  # columns that may be added by a block over more than `SQUARE` outputs
    added: list[Tensor] = field(default_factory=list)  # each (..., K, r)
    removed: list[Tensor] = field(default_factory=list)

    def outputs(self, mean: Tensor) -> GaussianOutputs:
        """The Gaussian, with a factor of at most K columns up to `SQUARE` outputs.

        Beyond, what is removed keeps its diagonal only: variances stay exact.
        """
        outputs = mean.shape[-1]
        if outputs <= SQUARE and (self.removed or sum(root.shape[-1] for root in self.added) > outputs):
            return self._square(mean)
        kept = self.diagonal
        for root in self.removed:
            kept = (kept - root.square().sum(-1)).clamp_min(0)  # below 0 only by rounding
        return GaussianOutputs(mean, kept, self._factor())

    def _square(self, mean: Tensor) -> GaussianOutputs:
        """By the K by K covariance: the factor of every input is then no larger than that, however many blocks."""
        whole = torch.diag_embed(self.diagonal)
        for root in self.added:
            whole = whole + root @ root.mT
        if self.removed:
            taken = torch.cat(self.removed, -1)
            return GaussianOutputs.of(mean, whole - taken @ taken.mT)
        factor, failed = torch.linalg.cholesky_ex(whole)
        if failed.any():  # singular: the slower root
            return GaussianOutputs.of(mean, whole)
        return GaussianOutputs(mean, torch.zeros_like(mean), factor)

    def _factor(self) -> Tensor | None:
        if len(self.added) < 2:
            return self.added[0] if self.added else None  # and no copy of what may be large
        return torch.cat(self.added, -1)


def add_block(parts: HeadCovariance, block: Block, features: Sequence[Tensor]) -> None:
    """Add what a block says of the outputs: over one W (K, D) row by row, or several after each other.

    `features` are the (..., D) of each.
    """
    outputs = parts.diagonal.shape[-1]
    if isinstance(block, Diagonal):
        parts.diagonal = parts.diagonal + _variances(block.variance, features, outputs)
    elif isinstance(block, KroneckerBasis) and len(features) == 1:
        _add_kronecker(parts, block, features[0])
    elif isinstance(block, Dense) and outputs == block.size > max(SQUARE, parts.rank):
        _add_bias(parts, block, features[0])
    elif isinstance(block, Dense):
        parts.added.append(contract(block.tril, features, outputs))
    elif isinstance(block, LowRank):
        parts.diagonal = parts.diagonal + _variances(block.prior.reciprocal(), features, outputs)
        columns = block.vectors * (block.values / (1 + block.values)).sqrt() * block.prior.rsqrt().unsqueeze(-1)
        parts.removed.append(contract(columns, features, outputs))
    else:
        raise ValueError(
            f"block must have a form known here, over one weight if Kronecker; got {type(block).__name__}."
        )


def block_variance(block: Block, features: Sequence[Tensor], outputs: int) -> Tensor:
    """(..., K): the variances alone of what a block says of the outputs; nothing is K by K."""
    if isinstance(block, KroneckerBasis) and len(features) == 1:
        spread, rest = _kronecker_spread(block, features[0])
        if block.out_vectors is None:
            return spread
        squares = block.out_squares
        assert squares is not None
        found = spread @ squares.mT
        if squares.shape[0] == squares.shape[1]:
            return found
        return found + rest * (1 - squares.sum(-1)).clamp_min(0)
    parts = HeadCovariance(features[0].new_zeros(*features[0].shape[:-1], outputs), 1)
    add_block(parts, block, features)
    found = parts.diagonal
    for root in parts.added:
        found = found + root.square().sum(-1)
    for root in parts.removed:
        found = found - root.square().sum(-1)
    return found.clamp_min(0)


def _kronecker_spread(block: KroneckerBasis, features: Tensor) -> tuple[Tensor, Tensor]:
    """Σ_j (q_jᵀφ)² / D_kj for every output vector k (..., k), and |φ|² / d for outputs outside them (..., 1)."""
    rotated = features if block.in_vectors is None else features @ block.in_vectors
    spread = rotated.square() @ block.precisions.reciprocal().mT
    if block.in_vectors is not None and block.in_vectors.shape[0] != block.in_vectors.shape[1]:
        rest = features.square().sum(-1, keepdim=True) - rotated.square().sum(-1, keepdim=True)
        spread = spread + rest.clamp_min(0) / block.prior  # features outside the vectors see the prior
    return spread, features.square().sum(-1, keepdim=True) / block.prior


def _variances(variance: Tensor, features: Sequence[Tensor], outputs: int) -> Tensor:
    """(..., K): Σ_i σ²_ki φ_i²."""
    own = variance.split([outputs * f.shape[-1] for f in features])
    found = [f.square() @ v.view(outputs, -1).mT for f, v in zip(features, own, strict=True)]
    return sum(found[1:], found[0])


def contract(columns: Tensor, features: Sequence[Tensor], outputs: int) -> Tensor:
    """(..., K, r): Σ_i φ_i columns[(k, i), :]."""
    found = []
    for f, own in zip(features, columns.split([outputs * f.shape[-1] for f in features]), strict=True):
        table = own.view(outputs, f.shape[-1], -1).transpose(0, 1).flatten(1)  # (D, K · r)
        found.append((f @ table).unflatten(-1, (outputs, -1)))
    return sum(found[1:], found[0])


def _add_bias(parts: HeadCovariance, block: Dense, feature: Tensor) -> None:
    """φ² Σ for one feature φ (..., 1): the longest axes of Σ as columns, of the others the variances."""
    kept, rest = block.axes[:, : parts.rank], block.axes[:, parts.rank :]
    parts.diagonal = parts.diagonal + feature.square() * rest.norm(dim=-1).square()
    parts.added.append(feature.unsqueeze(-1) * kept)


def _add_kronecker(parts: HeadCovariance, block: KroneckerBasis, features: Tensor) -> None:
    spread, size = _kronecker_spread(block, features)  # (..., k), (..., 1)
    if block.out_vectors is None:
        parts.diagonal = parts.diagonal + spread
        return
    vectors, squares, outputs = block.out_vectors, block.out_squares, len(block.out_vectors)
    assert squares is not None
    if outputs > SQUARE and vectors.shape[1] > parts.rank:
        kept = spread.flatten(0, -2).mean(0).argsort(descending=True)[: parts.rank]
        parts.diagonal = parts.diagonal + spread.index_fill(-1, kept, 0) @ squares.mT
        spread_kept, vectors_kept = spread[..., kept], vectors[:, kept]
    else:
        spread_kept, vectors_kept = spread, vectors
    parts.added.append(vectors_kept * spread_kept.sqrt().unsqueeze(-2))
    if vectors.shape[1] != outputs:
        # c (I - U Uᵀ) for the outputs outside the vectors, which see the prior: c = |φ|² / d.
        if outputs > SQUARE:
            parts.diagonal = parts.diagonal + size * (1 - squares.sum(-1)).clamp_min(0)
        else:
            parts.diagonal = parts.diagonal + size
            parts.removed.append(vectors * size.sqrt().unsqueeze(-2))


def features_of(outputs: Tensor, sites: Sequence[Site]) -> dict[str, Tensor]:
    """For each parameter whose only use gives the outputs, its features in their shape, (B, ..., D)."""
    uses, found = Counter(site.name for site in sites), {}
    for site in sites:
        if not is_output_of(site, outputs) or uses[site.name] > 1 or site.part.index is not None or outputs.dim() == 1:
            continue
        if isinstance(site, LinearSite) and not site.turned:
            found[site.name] = site.inputs.reshape(*outputs.shape[:-1], -1)
        elif isinstance(site, ElementSite) and site.inputs is None and site.part.shape == outputs.shape[-1:]:
            found[site.name] = torch.full_like(outputs[..., :1].detach(), site.sign, dtype=site.output.dtype)
    return found


def is_output_of(site: Site, outputs: Tensor) -> bool:
    """Whether the result of this site is the model's outputs, with nothing between them."""
    edge = site.edge
    return edge is not None and edge.node is outputs.grad_fn and edge.output_nr == outputs.output_nr

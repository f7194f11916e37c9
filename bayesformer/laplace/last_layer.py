"""The Gauss-Newton matrix of a last linear layer in closed form: from its inputs φ, without a backward pass.

With outputs f = W φ + b and Fisher information Λ in f, H of (W, b) is Σ_n Λ_n ⊗ φ̃_n φ̃_nᵀ, φ̃ = φ or (φ, 1).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from bayesformer.core.types import Inputs
from bayesformer.jacobians.capture import Capture
from bayesformer.jacobians.sites import ElementSite, LinearSite, Site
from bayesformer.laplace.passes import Look, Piece, Sweep
from bayesformer.laplace.structures import CurvatureBlock, DenseCurvature, DiagonalCurvature, KroneckerCurvature

WIDE = 2000  # outputs beyond which Λ, K by K, is never formed


def names_of(model: nn.Module, inputs: Inputs) -> list[str]:
    """The parameters of the last linear layer: the one that gives the outputs, or else the last one used."""
    outputs, sites = Capture(model)(inputs)
    found = [site for site in sites if _gives(site, outputs)]
    if not found:
        matrices = [site for site in sites if isinstance(site, LinearSite)]
        if not matrices:
            raise ValueError("names='last_layer' needs a model with a linear layer that is trainable; got none.")
        found = [site for site in sites if site.edge is matrices[-1].edge]
    return list(dict.fromkeys(site.name for site in found))


def _gives(site: Site, outputs: Tensor) -> bool:
    return site.edge is not None and site.edge.node is outputs.grad_fn and site.edge.output_nr == outputs.output_nr


def applies(sites: list[Site], outputs: Tensor, structure: str) -> bool:
    """Whether everything followed is one last layer on (B, K) outputs, and its closed form is known."""
    matrices = [site for site in sites if isinstance(site, LinearSite)]
    shifts = [site for site in sites if isinstance(site, ElementSite) and site.inputs is None]
    one = len(matrices) == 1 and len(shifts) <= 1 and len(sites) == len(matrices) + len(shifts)
    if not one or outputs.dim() != 2 or not all(_gives(site, outputs) for site in sites):
        return False
    whole = all(site.part.index is None for site in sites)
    narrow = structure == "diag" or outputs.shape[1] <= WIDE
    return whole and not matrices[0].turned and narrow and structure in {"diag", "kron", "full"}


def fit(sweep: Sweep, structure: str) -> list[Piece]:
    """The blocks, as the general estimators would give them."""
    return {"diag": _diagonal, "kron": _kronecker, "full": _full}[structure](sweep)


def _parts(look: Look) -> tuple[str, str | None, Tensor]:
    """The weight's name, the bias's, and φ (B, in)."""
    weight = next(site for site in look.sites if isinstance(site, LinearSite))
    bias = next((site.name for site in look.sites if isinstance(site, ElementSite)), None)
    return weight.name, bias, weight.inputs.squeeze(1)


def _diagonal(sweep: Sweep) -> list[Piece]:
    totals: dict[str, Tensor] = {name: sweep.zeros(sweep.size(name)) for name in sweep.names}

    def add(look: Look) -> None:
        weight, bias, features = _parts(look)
        curvature, kept = sweep.likelihood.hessian_diagonal(look.outputs.detach()), _kept(sweep, look)
        if kept is not None:
            curvature = curvature * kept
        totals[weight] += (curvature.mT @ features.square()).flatten()
        if bias is not None:
            totals[bias] += curvature.sum(0)

    sweep.each(add)
    return [Piece((name,), sweep.place([name]), DiagonalCurvature(total)) for name, total in totals.items()]


def _information(sweep: Sweep, look: Look) -> Tensor:
    """Λ (B, K, K), 0 for an example that does not count."""
    information = sweep.likelihood.hessian(look.outputs.detach())
    kept = _kept(sweep, look)
    return information if kept is None else information * kept.unsqueeze(2) * kept.unsqueeze(1)


def _kept(sweep: Sweep, look: Look) -> Tensor | None:
    """(B, 1), or (B, K) where outputs are masked one by one."""
    _, counted = sweep.likelihood.align(look.batch.targets, look.batch.mask)
    return None if counted is None else counted.reshape(len(counted), -1)


def _kronecker(sweep: Sweep) -> list[Piece]:
    weight, bias, outputs, inputs = _sizes(sweep)
    outer, inner = sweep.zeros(outputs, outputs), sweep.zeros(inputs, inputs)

    def add(look: Look) -> None:
        features = _parts(look)[2]
        outer.add_(_information(sweep, look).sum(0))
        inner.addmm_(features.mT, features)

    sweep.each(add)
    found: dict[str, CurvatureBlock] = {weight: KroneckerCurvature.of(outer, inner / len(sweep.data))}
    if bias is not None:
        found[bias] = DenseCurvature(outer)
    return [Piece((name,), sweep.place([name]), found[name]) for name in sweep.names]


def _full(sweep: Sweep) -> list[Piece]:
    weight, bias, outputs, inputs = _sizes(sweep)
    count = inputs + (bias is not None)
    total = sweep.zeros(outputs * outputs, count * count)

    def add(look: Look) -> None:
        features = _parts(look)[2]
        if bias is not None:
            features = torch.cat([features, features.new_ones(len(features), 1)], 1)
        products = (features.unsqueeze(2) * features.unsqueeze(1)).flatten(1)
        total.addmm_(_information(sweep, look).flatten(1).mT, products)

    sweep.each(add)
    # (K, K, F, F) -> (K F, K F), then the bias column of each output after all of W, as the flat vector has it.
    matrix = total.view(outputs, outputs, count, count).permute(0, 2, 1, 3).reshape(outputs * count, -1)
    order = _order(sweep, weight, bias, outputs, count).to(matrix.device)
    return [Piece(tuple(sweep.names), sweep.place(sweep.names), DenseCurvature(matrix[order][:, order]))]


def _sizes(sweep: Sweep) -> tuple[str, str | None, int, int]:
    """The names of weight and bias; K and the number of features."""
    weight = next(name for name in sweep.names if sweep.capture.parameters[name].dim() == 2)
    outputs, inputs = sweep.capture.parameters[weight].shape
    return weight, next((name for name in sweep.names if name != weight), None), outputs, inputs


def _order(sweep: Sweep, weight: str, bias: str | None, outputs: int, count: int) -> Tensor:
    grid = torch.arange(outputs * count).view(outputs, count)
    if bias is None:
        return grid.flatten()
    parts = {weight: grid[:, :-1].flatten(), bias: grid[:, -1]}
    return torch.cat([parts[name] for name in sweep.names])

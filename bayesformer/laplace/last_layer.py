"""The Gauss-Newton matrix of a last linear layer in closed form: from its inputs φ, without a backward pass.

With outputs f = W φ + b and Fisher information Λ in f, H of (W, b) is Σ_n Λ_n ⊗ φ̃_n φ̃_nᵀ, φ̃ = φ or (φ, 1).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from bayesformer.core.slices import cache_sized_slices
from bayesformer.core.types import Inputs
from bayesformer.jacobians.capture import Capture
from bayesformer.jacobians.sites import ElementSite, LinearSite, Site
from bayesformer.laplace.passes import BatchPass, CurvaturePiece, Sweep
from bayesformer.laplace.structures import CurvatureBlock, DenseCurvature, DiagonalCurvature, KroneckerCurvature
from bayesformer.model.calling import apply
from bayesformer.model.space import Space

PRODUCTS = 2**22  # numbers of products of features held at a time, 16 MiB in float32
WIDE = 2000  # outputs beyond which Λ, K by K, is never formed


def space_of(module: nn.Module, space: Space, inputs: Inputs) -> Space:
    """The inferred weights of the layer that gives the outputs, from a pass of a few examples.

    That is the layer whose result the module returns, or else the module without children through which alone the
    outputs depend on weights, such as a head whose logits are scaled, averaged or cast afterwards. An adapter beside a
    frozen layer is neither, and a layer that is frozen is refused.
    """
    outputs, sites = Capture(module, space)(inputs)
    found = [site for site in sites if _gives(site, outputs)]
    if any(isinstance(site, LinearSite) for site in found):
        return space.select([site.name for site in found])
    path = _only_way(module, inputs)
    if path is None:
        raise ValueError(
            "'last_layer' needs a model whose outputs depend on its weights through one last layer; this one has none. "
            "Choose the weights by their names instead, for example "
            f"structure='kron' and subset={space.names[-1]!r}."
        )
    own = {id(p) for p in module.get_submodule(path).parameters()}
    names = [name for name in space.names if id(module.get_parameter(name)) in own]
    if not names:
        raise ValueError(
            f"'last_layer' needs the layer that gives the outputs, {path}, to be inferred; none of its weights is. "
            "Take them in by infer=, or choose among those that are inferred, for example "
            f"structure='kron' and subset={space.names[-1]!r}."
        )
    return space.select(names)


def _only_way(module: nn.Module, inputs: Inputs) -> str | None:
    """The path of the last module without children through which alone the outputs depend on the weights, if any.

    Its result is replaced by a constant in a second pass; no weight may have a gradient then.
    """
    last = _last_called(module, inputs)
    if last is None:
        return None
    path, own = last

    def constant(_: nn.Module, __: Any, result: Any) -> Any:
        return result.detach().requires_grad_() if isinstance(result, Tensor) else result

    hook = own.register_forward_hook(constant)
    weights = [p for p in module.parameters() if p.is_floating_point()]
    before = [p.requires_grad for p in weights]
    try:
        for p in weights:
            p.requires_grad_(True)
        with torch.inference_mode(False), torch.enable_grad():
            outputs = apply(module, inputs)
            if not outputs.requires_grad:
                return None
            found = torch.autograd.grad(outputs.sum(), weights, allow_unused=True)
    finally:
        hook.remove()
        for p, flag in zip(weights, before, strict=True):
            p.requires_grad_(flag)
    return path if all(g is None for g in found) else None


def _is_layer(path: str, module: nn.Module) -> bool:
    """Whether a module has weights and no modules inside it, but for parametrisations of those weights."""
    inner = [name for name, _ in module.named_children() if name != "parametrizations"]
    return not inner and "parametrizations" not in path.split(".") and next(module.parameters(), None) is not None


def _last_called(module: nn.Module, inputs: Inputs) -> tuple[str, nn.Module] | None:
    """The last module of a pass that has weights of its own and no children."""
    called: list[tuple[str, nn.Module]] = []
    hooks = [
        own.register_forward_hook(lambda own, _, __, path=path: called.append((path, own)))
        for path, own in module.named_modules()
        if path and _is_layer(path, own)
    ]
    try:
        with torch.no_grad():
            apply(module, inputs)
    finally:
        for hook in hooks:
            hook.remove()
    return called[-1] if called else None


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


def fit(sweep: Sweep, structure: str, weighted: bool = False) -> list[CurvaturePiece]:
    """The blocks, as the general estimators would give them."""
    if structure == "kron":
        return _kronecker(sweep, weighted)
    return {"diag": _diagonal, "full": _full}[structure](sweep)


def _parts(step: BatchPass) -> tuple[str, str | None, Tensor]:
    """The weight's name, the bias's, and φ (B, in)."""
    weight = next(site for site in step.sites if isinstance(site, LinearSite))
    bias = next((site.name for site in step.sites if isinstance(site, ElementSite)), None)
    return weight.name, bias, weight.inputs.squeeze(1)


def _diagonal(sweep: Sweep) -> list[CurvaturePiece]:
    totals: dict[str, Tensor] = {name: sweep.zeros(sweep.size(name)) for name in sweep.names}

    def add(step: BatchPass) -> None:
        weight, bias, features = _parts(step)
        curvature, kept = sweep.likelihood.hessian_diagonal(step.values), _kept(sweep, step)
        if kept is not None:
            curvature = curvature * kept
        totals[weight] += (curvature.mT @ features.square()).flatten()
        if bias is not None:
            totals[bias] += curvature.sum(0)

    sweep.each(add)
    return [CurvaturePiece((name,), sweep.place([name]), DiagonalCurvature(total)) for name, total in totals.items()]


def _information(sweep: Sweep, step: BatchPass) -> Tensor:
    """Λ (B, K, K), 0 for an example that does not count."""
    information = sweep.likelihood.hessian(step.values)
    kept = _kept(sweep, step)
    return information if kept is None else information * kept.unsqueeze(2) * kept.unsqueeze(1)


def _kept(sweep: Sweep, step: BatchPass) -> Tensor | None:
    """(B, 1), or (B, K) where outputs are masked one by one."""
    _, counted = sweep.likelihood.align(step.batch.targets, step.batch.mask)
    return None if counted is None else counted.reshape(len(counted), -1)


def _kronecker(sweep: Sweep, weighted: bool) -> list[CurvaturePiece]:
    """Σ_n Λ_n ⊗ the mean of φ φᵀ, each example counted once or by the trace of its Λ."""
    weight, bias, outputs, inputs = _sizes(sweep)
    outer, inner, total = sweep.zeros(outputs, outputs), sweep.zeros(inputs, inputs), sweep.zeros(1)

    def add(step: BatchPass) -> None:
        features, information = _parts(step)[2], _information(sweep, step)
        outer.add_(information.sum(0))
        weights = information.diagonal(dim1=1, dim2=2).sum(1) if weighted else torch.ones_like(features[:, 0])  # (B,)
        total.add_(weights.sum())
        inner.addmm_((weights.unsqueeze(1) * features).mT, features)

    sweep.each(add)
    floor = torch.finfo(total.dtype).tiny
    found: dict[str, CurvatureBlock] = {weight: KroneckerCurvature.of(outer, inner / total.clamp_min(floor))}
    if bias is not None:
        found[bias] = DenseCurvature(outer)
    return [CurvaturePiece((name,), sweep.place([name]), found[name]) for name in sweep.names]


def _full(sweep: Sweep) -> list[CurvaturePiece]:
    weight, bias, outputs, inputs = _sizes(sweep)
    count = inputs + (bias is not None)
    total = sweep.zeros(outputs * outputs, count * count)

    def add(step: BatchPass) -> None:
        features = _parts(step)[2]
        if bias is not None:
            features = torch.cat([features, features.new_ones(len(features), 1)], 1)
        information = _information(sweep, step).flatten(1)
        for some in cache_sized_slices(len(features), count * count, PRODUCTS):
            products = (features[some].unsqueeze(2) * features[some].unsqueeze(1)).flatten(1)
            total.addmm_(information[some].mT, products)

    sweep.each(add)
    # (K, K, F, F) -> (K F, K F), then the bias column of each output after all of W, as the flat vector has it.
    matrix = total.view(outputs, outputs, count, count).permute(0, 2, 1, 3).reshape(outputs * count, -1)
    order = _order(sweep, weight, bias, outputs, count).to(matrix.device)
    return [CurvaturePiece(tuple(sweep.names), sweep.place(sweep.names), DenseCurvature(matrix[order][:, order]))]


def _sizes(sweep: Sweep) -> tuple[str, str | None, int, int]:
    """The names of weight and bias; K and the number of features."""
    weight = next(name for name in sweep.names if sweep.capture.parameters[name].dim() == 2)
    outputs, inputs = sweep.capture.parameters[weight].shape
    return weight, next((name for name in sweep.names if name != weight), None), outputs, inputs


def _order(sweep: Sweep, weight: str, bias: str | None, outputs: int, count: int) -> Tensor:
    grid = torch.arange(outputs * count, device="cpu").view(outputs, count)
    if bias is None:
        return grid.flatten()
    parts = {weight: grid[:, :-1].flatten(), bias: grid[:, -1]}
    return torch.cat([parts[name] for name in sweep.names])

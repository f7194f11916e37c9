"""Outputs of the network made linear in its weights: f(x; θ) ≈ f(x; θ*) + J(x) (θ - θ*).

With θ ~ N(θ*, Σ) the outputs are Gaussian with mean f(x; θ*) and covariance J Σ Jᵀ. J is never formed: backward
passes give the slopes at every layer, and each layer's share of the covariance follows from them, its inputs and its
block of Σ. What the last layer adds has a closed form; where it alone is random there is no backward pass.

Where outputs are many (a vocabulary), everything below the last layer W (K, D) acts through its D features: there is
one backward pass per feature instead of one per output, none of them through W, and with W = Q R a factor Q (...) over
outputs. Nothing is K by K.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from bayesformer.core.types import GaussianOutputs, Inputs
from bayesformer.data.inputs import first_tensor, map_inputs
from bayesformer.jacobians.capture import Capture, Site, backpropagate
from bayesformer.jacobians.columns import at_position, one_hot
from bayesformer.laws import Kronecker, Law
from bayesformer.network import Layout, apply
from bayesformer.predict.covariance_roots import Spread, gram
from bayesformer.predict.head import Parts, add_block, features_of

COLUMNS = 32  # outputs differentiated in one batched backward pass: more leave the cache
WIDEST = 2048  # outputs per position up to which their covariance is formed
ROOTS = 2**27  # numbers of Jacobian roots kept while all columns of a basis are collected
FACTOR = 2**27  # numbers in a factor over outputs, 512 MiB in float32; beyond, its rank is cut


class Final(NamedTuple):
    """The linear layer that gives the outputs, with more of them than features: W = Q R."""

    module: nn.Linear
    names: frozenset[str]  # of its parameters
    basis: Tensor  # (K, D), Q
    inner: Tensor  # (D, D), R


class Linearised:
    """A model in eval mode that holds the mean of a Gaussian over its weights; call it on inputs."""

    def __init__(self, model: nn.Module, layout: Layout, weights: Law) -> None:
        self.spread = Spread(layout, weights)
        self.model, self.capture = model, Capture(model, self.spread.names)
        self._final: Final | None = None
        self._looked = False  # for it
        self._last: nn.Linear | None = None  # known to be all that is random

    def __call__(self, inputs: Inputs, batch_size: int = 64) -> GaussianOutputs:
        """Mean and covariance of the outputs of every example, position by position."""
        examples = len(first_tensor(inputs))
        if not self.spread.names:
            return _joined([self._certain(chunk) for chunk in _chunks(inputs, batch_size)])
        return _joined([self._batch(chunk, examples) for chunk in _chunks(inputs, batch_size)])

    def joint(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """Mean (B, ..., K), and the covariance of all outputs of all examples together, flattened."""
        if not self.spread.names:
            mean = self._certain(inputs).mean
            return mean, mean.new_zeros(mean.numel(), mean.numel())
        outputs, sites = self.capture(inputs)
        covariance = outputs.new_zeros(outputs.numel(), outputs.numel())
        slopes = backpropagate(sites, outputs, one_hot(outputs, 0, outputs[0].numel()))
        for _, root in self.spread.roots(sites, slopes, joint=True):
            flat = root.detach().flatten(0, 1)
            covariance += flat @ flat.mT
        return outputs.detach(), covariance

    def _certain(self, inputs: Inputs) -> GaussianOutputs:
        """Weights without any spread: a point."""
        with torch.no_grad():
            mean = apply(self.model, inputs)
        return GaussianOutputs(mean, torch.zeros_like(mean))

    def _batch(self, inputs: Inputs, examples: int) -> GaussianOutputs:
        if self._last is not None and (found := self._plainly(inputs, self._last, examples)) is not None:
            return found
        outputs, sites, features = self._captured(inputs)
        mean, head = outputs.detach(), self._head(features_of(outputs, sites))
        rank = max(1, FACTOR // (examples * mean[0].numel()))
        if len(head) == len(self.spread.pieces) and not self.spread.factor:
            self._last = self._module_of(self.spread.names)
            return self._closed(mean, head, rank).outputs(mean)
        width = 1 if mean.dim() == 1 else mean.shape[-1]
        if width > COLUMNS and not self._looked:
            self._look_for_final(inputs)
            return self._batch(inputs, examples)  # this time with its features
        if self._final is not None and features is not None and self._is_below(self._final, head):
            below = sum(piece.block.size for number, piece in enumerate(self.spread.pieces) if number not in head)
            few = max(1, ROOTS // (self._final.basis.shape[1] * below))
            if len(mean) > few:
                return _joined([self._batch(chunk, examples) for chunk in _chunks(inputs, few)])
            return self._wide(mean, features, sites, head, self._final, rank)
        if width > WIDEST:
            raise ValueError(
                f"outputs must be at most {WIDEST} per position, unless the model ends in a linear layer that is "
                f"narrower and not tied to another; got {width}. Use predictive='sampled'."
            )
        return _gaussian(mean, self._covariance(outputs, sites, width))

    def _captured(self, inputs: Inputs) -> tuple[Tensor, list[Site], Tensor | None]:
        """Outputs, sites, and the features (B, ..., D) that enter the final layer, if there is one that gave them."""
        if self._final is None:
            return *self.capture(inputs), None
        seen: list[tuple[Tensor, Tensor]] = []
        hook = self._final.module.register_forward_hook(lambda _, given, out: seen.append((given[0], out)))
        try:
            outputs, sites = self.capture(inputs)
        finally:
            hook.remove()
        features, out = seen[-1]  # the first call may have looked at a few examples before
        return outputs, sites, features if out is outputs and features.requires_grad else None

    def _look_for_final(self, inputs: Inputs) -> None:
        self._looked = True
        last = last_linear(self.model, map_inputs(inputs, lambda x: x[:1]))
        if last is not None and last.in_features < last.out_features:
            own = {id(p) for p in last.parameters()}
            names = frozenset(name for name, p in self.model.named_parameters() if id(p) in own)
            self._final = Final(last, names, *torch.linalg.qr(last.weight.detach()))

    def _is_below(self, final: Final, head: dict[int, list[Tensor]]) -> bool:
        """Whether all that is random acts through the features, but for what the head has in closed form.

        A weight of the last layer that is also an embedding does not: it moves outputs that no feature can move.
        """
        rest = [piece.names for number, piece in enumerate(self.spread.pieces) if number not in head]
        return final.names.isdisjoint(self.spread.factor) and all(final.names.isdisjoint(names) for names in rest)

    def _covariance(self, outputs: Tensor, sites: list[Site], width: int) -> Tensor:
        """(B, S, K, K) for S positions with K outputs each."""
        positions = outputs[0].numel() // width
        covariance = outputs.new_zeros(len(outputs), positions, width, width)
        at_once = max(1, COLUMNS // width)
        for start in range(0, positions, at_once):
            stop = min(start + at_once, positions)
            slopes = backpropagate(sites, outputs, one_hot(outputs, start * width, stop * width))
            with torch.no_grad():
                for some, root in self.spread.roots(sites, slopes):
                    covariance[some, start:stop].add_(gram(root, width))
        return covariance

    def _plainly(self, inputs: Inputs, last: nn.Linear, examples: int) -> GaussianOutputs | None:
        """The last layer alone, from a plain forward pass; None should its outputs not be the model's this time."""
        seen: list[tuple[Tensor, Tensor]] = []
        hook = last.register_forward_hook(lambda _, given, out: seen.append((given[0], out)))
        try:
            with torch.no_grad():
                mean = apply(self.model, inputs)
        finally:
            hook.remove()
        if len(seen) != 1 or seen[0][1] is not mean:
            return None
        names = {id(p): name for name, p in self.model.named_parameters()}
        features = {names[id(last.weight)]: seen[0][0], names.get(id(last.bias), ""): torch.ones_like(mean[..., :1])}
        rank = max(1, FACTOR // (examples * mean[0].numel()))
        return self._closed(mean, self._head(features), rank).outputs(mean)

    def _module_of(self, names: tuple[str, ...]) -> nn.Linear | None:
        """The linear module that has exactly these parameters among its own."""
        for path, module in self.model.named_modules():
            own = {f"{path}.{name}" if path else name for name, _ in module.named_parameters(recurse=False)}
            if type(module).forward is nn.Linear.forward and isinstance(module, nn.Linear) and set(names) <= own:
                return module
        return None

    def _head(self, features: dict[str, Tensor]) -> dict[int, list[Tensor]]:
        """Pieces of Σ that lie in the last layer: their numbers, and the features they meet."""
        found = {}
        for number, piece in enumerate(self.spread.pieces):
            fits = len(piece.names) == 1 or not isinstance(piece.block, Kronecker)
            if piece.whole and fits and all(name in features for name in piece.names):
                found[number] = [features[name] for name in piece.names]
        return found

    def _closed(self, mean: Tensor, head: dict[int, list[Tensor]], rank: int) -> Parts:
        parts = Parts(torch.zeros_like(mean), rank)
        for number, features in head.items():
            add_block(parts, self.spread.pieces[number].block, features)
        return parts

    def _wide(
        self,
        mean: Tensor,
        features: Tensor,
        sites: list[Site],
        head: dict[int, list[Tensor]],
        final: Final,
        rank: int,
    ) -> GaussianOutputs:
        """diagonal + factor factorᵀ: the last layer in closed form, the others through its features."""
        size, positions = features.shape[-1], features[0].numel() // features.shape[-1]
        below = [site for site in sites if site.name not in final.names]
        inner = final.inner.new_zeros(len(mean), positions, size, size)
        for position in range(positions):
            inner[:, position] = final.inner @ self._inner(features, below, position) @ final.inner.mT
        parts = self._closed(mean, head, rank)
        factor, left = _through(final.basis, inner, min(rank, size))
        parts.diagonal = parts.diagonal + left.view(mean.shape)
        parts.added.append(factor.view(*mean.shape, -1))
        return parts.outputs(mean)

    def _inner(self, features: Tensor, sites: list[Site], position: int) -> Tensor:
        """(B, D, D): the covariance of the features at one position."""
        roots: list[list[Tensor]] = []
        size = features.shape[-1]
        for vectors in torch.eye(size, dtype=features.dtype, device=features.device).split(COLUMNS):
            slopes = backpropagate(sites, features, at_position(features, position, vectors))
            found = self.spread.roots(sites, slopes, joint=True)
            roots.append([root.detach() for _, root in found])
        total = features.new_zeros(len(features), size, size)
        for rows in zip(*roots, strict=True):
            root = torch.cat(rows, 1)
            total += root @ root.mT
        return total


def last_linear(model: nn.Module, inputs: Inputs) -> nn.Linear | None:
    """The linear module whose output the model returns as it is, if there is one."""
    seen: list[tuple[nn.Linear, Any]] = []
    hooks = [
        module.register_forward_hook(lambda own, _, out: seen.append((own, out)))
        for module in model.modules()
        if isinstance(module, nn.Linear)
    ]
    try:
        with torch.no_grad():
            outputs = apply(model, inputs)
    finally:
        for hook in hooks:
            hook.remove()
    return next((module for module, out in seen if out is outputs), None)


def _through(basis: Tensor, inner: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Factor (B, S, K, rank) and what is left on the diagonal, (B, S, K), of Q inner Qᵀ; exact on its diagonal."""
    values, vectors = torch.linalg.eigh(inner)
    root = vectors * values.clamp_min(0).sqrt().unsqueeze(-2)
    root = root.flip(-1)  # largest first
    factor = basis @ root[..., :rank]
    left = basis.new_zeros(*inner.shape[:2], len(basis))
    if rank < root.shape[-1]:
        for row, rest in zip(left.view(-1, len(basis)), root[..., rank:].flatten(0, 1), strict=True):
            row.copy_((basis @ rest).square().sum(-1))  # one at a time: (K, D) numbers each
    return factor, left


def _joined(parts: list[GaussianOutputs]) -> GaussianOutputs:
    if len(parts) == 1:
        return parts[0]  # and no copy of what may be large
    factors = [part.factor for part in parts if part.factor is not None]
    return GaussianOutputs(
        torch.cat([part.mean for part in parts]),
        torch.cat([part.diagonal for part in parts]),
        torch.cat(factors) if factors else None,
    )


def _gaussian(mean: Tensor, covariance: Tensor) -> GaussianOutputs:
    """From (B, S, K, K) in the shape of the outputs."""
    width = covariance.shape[-1]
    if width == 1:
        return GaussianOutputs(mean, covariance.view(mean.shape))
    covariance = covariance.view(*mean.shape, width)
    factor, failed = torch.linalg.cholesky_ex(covariance)
    if failed.any():  # singular: the slower root
        return GaussianOutputs.of(mean, covariance)
    return GaussianOutputs(mean, torch.zeros_like(mean), factor)


def _chunks(inputs: Inputs, size: int) -> Iterator[Inputs]:
    for start in range(0, len(first_tensor(inputs)), size):
        yield map_inputs(inputs, lambda x, a=start: x[a : a + size])


def linearised_outputs(
    model: nn.Module, layout: Layout, weights: Law, inputs: Inputs, batch_size: int = 64
) -> GaussianOutputs:
    """Mean and covariance of the outputs of every example; `model` holds the mean of the weights, in eval mode."""
    return Linearised(model, layout, weights)(inputs, batch_size)

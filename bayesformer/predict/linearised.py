"""Outputs of the network made linear in its weights: f(x; θ) ≈ f(x; θ*) + J(x) (θ - θ*).

With θ ~ N(θ*, Σ) the outputs are Gaussian with mean f(x; θ*) and covariance J Σ Jᵀ. J is never formed: backward
passes give the slopes at every layer, and each layer's share of the covariance follows from them, its inputs and its
block of Σ. There are four ways to it, and one batch takes the first that fits:

    no weight has spread                             a forward pass; the covariance is 0
    only the last layer has spread                   a forward pass; closed form from its features (`head`)
    more outputs than features enter the last layer  a backward pass per feature; the rest through the last layer
    otherwise                                        a backward pass per output

In the third, everything below the last layer W (K, D) acts through its D features: none of the backward passes goes
through W, and with W = Q R the covariance has a factor Q (...) over outputs. Nothing is K by K.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from bayesformer.core.types import GaussianOutputs, Inputs, symmetric_root
from bayesformer.data.inputs import first_tensor, map_inputs
from bayesformer.jacobians.capture import Capture, Site, backpropagate
from bayesformer.jacobians.columns import at_position, one_hot
from bayesformer.jacobians.sites import slope_numbers
from bayesformer.laws import KroneckerBasis, Law
from bayesformer.model.calling import apply, note_calls
from bayesformer.model.space import Space
from bayesformer.predict.covariance_roots import CovarianceRoots, gram
from bayesformer.predict.head import HeadCovariance, add_block, features_of
from bayesformer.predict.joining import join_outputs

COLUMNS = 32  # outputs differentiated in one batched backward pass: more leave the cache
WIDEST = 2048  # outputs per position up to which their covariance is formed
ROOTS = 2**27  # numbers of Jacobian roots kept while all columns of a basis are collected
FACTOR = 2**27  # numbers in a factor over outputs, 512 MiB in float32; beyond, its rank is cut
SLOPES = 2**27  # numbers of slopes at all layers that one backward pass may give, 512 MiB in float32
IN_TURN = 4  # columns that go back one after another on a CPU: a batched pass pays for more of them only
NEAR = 2**24  # numbers of slopes that one such pass gives: more leave the cache
UNKNOWN = 4096  # examples that a stream of unknown length is taken to have


class FinalLayer(NamedTuple):
    """The linear layer that gives the outputs, with more of them than features: W = Q R."""

    module: nn.Linear
    names: frozenset[str]  # of its parameters
    basis: Tensor  # (K, D), Q
    inner: Tensor  # (D, D), R


@dataclass
class Found:
    """What the first batches have shown of a model; it belongs to one `Linearised`, hence to one thread."""

    outputs: int | None = None
    """of an example, by the first examples; it decides how columns go back, not what they are"""
    slopes: int = 0
    """numbers of slopes at all layers that an example has for one column"""
    last: nn.Linear | None = None
    """the layer that gives the outputs, where it alone has spread"""
    searched: bool = False
    """whether the final layer was looked for"""
    final: FinalLayer | None = None
    """it, where it has more outputs than features"""


class BatchSites(NamedTuple):
    """A batch after its forward pass."""

    outputs: Tensor  # (B, ..., K), with their graph
    mean: Tensor  # the same without it, in the precision of the weights' vector
    sites: list[Site]
    features: Tensor | None  # (B, ..., D), what entered the final layer, where that is known to have given the outputs


class Linearised:
    """A module in eval mode that holds the mean of a Gaussian over its weights. One thread may use it at a time."""

    def __init__(self, module: nn.Module, space: Space, law: Law) -> None:
        self.roots = CovarianceRoots(space, law)
        self.module, self.space = module, space
        self.capture = Capture(module, space.select(self.roots.names)) if self.roots.names else None
        self.found = Found()

    def over(self, batches: Iterable[Inputs], num_data: int | None = None) -> GaussianOutputs:
        """Mean and covariance of the outputs of every example, position by position; batches are read one by one.

        `num_data` is the number of all examples, where it is known: beside the result, of that length, only what one
        batch takes is in memory.
        """
        parts = (part for batch in batches for part in self.pieces(batch, num_data or UNKNOWN))
        with torch.inference_mode(False), torch.no_grad():
            return join_outputs(parts, num_data)

    def __call__(self, inputs: Inputs, batch_size: int = 64) -> GaussianOutputs:
        """Mean and covariance of the outputs of inputs that are held as tensors."""
        return self.over(_chunks(inputs, batch_size), len(first_tensor(inputs)))

    def joint(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """Mean (B, ..., K), and the covariance of all outputs of all examples together, flattened."""
        with torch.inference_mode(False), torch.no_grad():
            return self._joint(inputs)

    def _joint(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        if self.capture is None:
            mean = self._without_spread(inputs).mean
            return mean, mean.new_zeros(mean.numel(), mean.numel())
        self.capture.columns = None  # an earlier batch may have had few
        outputs, sites = self.capture.adapting(inputs)
        mean = outputs.detach().to(self.space.dtype)
        covariance = mean.new_zeros(mean.numel(), mean.numel())
        slopes = backpropagate(sites, outputs, one_hot(outputs, 0, outputs[0].numel()))
        for _, root in self.roots(sites, slopes, joint=True):
            flat = root.detach().flatten(0, 1)
            covariance += flat @ flat.mT
        return mean, covariance

    # One batch.

    def pieces(self, inputs: Inputs, examples: int) -> Iterator[GaussianOutputs]:
        """A batch in as many pieces as its slopes need to fit in memory; `examples` is how many there are in all."""
        if self.capture is None:
            yield self._without_spread(inputs)
            return
        if (found := self._last_layer_only(inputs, examples)) is not None:
            yield found
        else:
            for piece in self.near(inputs):
                yield from self._backward(piece, examples)

    def _backward(self, inputs: Inputs, examples: int) -> Iterator[GaussianOutputs]:
        """By backward passes from the features of the last layer, or from the outputs, once it is known which."""
        batch = self.captured(inputs)
        head, mean = self.head_blocks(features_of(batch.outputs, batch.sites)), batch.mean
        if len(head) == len(self.roots.blocks) and not self.roots.factor:
            yield self._by_head(inputs, batch, head, examples)
            return
        few = _few_enough(batch)
        if few < len(mean):
            for piece in _chunks(inputs, few):
                yield from self._backward(piece, examples)
            return
        width = 1 if mean.dim() == 1 else mean.shape[-1]
        if width > COLUMNS and not self.found.searched:
            self._search_final(inputs)
            yield from self._backward(inputs, examples)  # this time with its features
        elif (final := self.found.final) is not None and batch.features is not None and self._acts_below(final, head):
            yield from self._from_features(inputs, batch, head, final, examples)
        elif width > WIDEST:
            raise ValueError(
                f"outputs must be at most {WIDEST} per position, unless the model ends in a linear layer that is "
                f"narrower and not tied to another; got {width}. Use predictive='sampled'."
            )
        else:
            yield _gaussian(mean, self._covariance(batch, width))

    def _without_spread(self, inputs: Inputs) -> GaussianOutputs:
        """The outputs at the mean of the weights, with covariance 0."""
        with torch.no_grad():
            mean = apply(self.module, inputs).to(self.space.dtype)
        return GaussianOutputs(mean, torch.zeros_like(mean))

    def captured(self, inputs: Inputs, columns: int | None = None) -> BatchSites:
        """A batch after its forward pass, from which as many columns will go back; as many as outputs by default."""
        assert self.capture is not None
        if columns is None:
            columns = self._outputs(inputs)
        self.capture.columns = 1 if self.in_turn(columns) else columns
        if self.found.final is None:
            outputs, sites = self.capture.adapting(inputs)
            return BatchSites(outputs, outputs.detach().to(self.space.dtype), sites, None)
        seen: list[tuple[Tensor, Tensor]] = []
        hook = note_calls(self.found.final.module, seen)
        try:
            outputs, sites = self.capture.adapting(inputs)
        finally:
            hook.remove()
        features, out = seen[-1] if seen else (None, None)
        known = features is not None and out is outputs and features.requires_grad
        return BatchSites(outputs, outputs.detach().to(self.space.dtype), sites, features if known else None)

    def _outputs(self, inputs: Inputs) -> int:
        """How many outputs an example has, by the trial that is made on the first examples in any case."""
        assert self.capture is not None
        if self.found.outputs is None:
            outputs, sites = self.capture.probe(inputs)
            self.found.outputs = outputs[0].numel()
            self.found.slopes = slope_numbers(sites) // len(outputs)
        return self.found.outputs

    def near(self, inputs: Inputs, columns: int | None = None) -> Iterator[Inputs]:
        """A batch in pieces of so few examples that the slopes of their columns stay near, where they go in turn."""
        columns = columns or self._outputs(inputs)
        if not self.in_turn(columns):
            return iter([inputs])
        self._outputs(inputs)
        return _chunks(inputs, max(1, NEAR // max(1, columns * self.found.slopes)))

    def in_turn(self, columns: int) -> bool:
        """Whether so many columns go back one after another."""
        return columns <= IN_TURN and self.roots.device.type == "cpu"

    # Only the last layer has spread.

    def _by_head(
        self, inputs: Inputs, batch: BatchSites, head: dict[int, list[Tensor]], examples: int
    ) -> GaussianOutputs:
        """The closed form, by the plain forward pass that later batches take: the first must not differ from them."""
        self.found.last = self._module_of(self.roots.names)
        found = self._last_layer_only(inputs, examples)
        if found is not None:
            return found
        self.found.last = None
        return self.closed_form(batch.mean, head, factor_rank(batch.mean, examples)).outputs(batch.mean)

    def _last_layer_only(self, inputs: Inputs, examples: int) -> GaussianOutputs | None:
        """From a plain forward pass, once the last layer is known; None should its outputs not be the model's."""
        last = self.found.last
        if last is None:
            return None
        seen: list[tuple[Tensor, Tensor]] = []
        hook = note_calls(last, seen)
        try:
            with torch.no_grad():
                outputs = apply(self.module, inputs)
        finally:
            hook.remove()
        if len(seen) != 1 or seen[0][1] is not outputs:
            return None
        mean, names = outputs.to(self.space.dtype), self._names_by_identity()
        features = {names[id(last.weight)]: seen[0][0].to(mean), names.get(id(last.bias), ""): _ones(mean)}
        return self.closed_form(mean, self.head_blocks(features), factor_rank(mean, examples)).outputs(mean)

    def _names_by_identity(self) -> dict[int, str]:
        return {id(p): name for name, p in self.module.named_parameters()}

    def _module_of(self, names: tuple[str, ...]) -> nn.Linear | None:
        """The linear module that has exactly these parameters among its own, hooks of its own left out."""
        known = self._names_by_identity()
        for module in self.module.modules():
            if isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward:
                own = {known[id(p)] for p in module.parameters(recurse=False)}
                if set(names) <= own:
                    return module
        return None

    def head_blocks(self, features: dict[str, Tensor]) -> dict[int, list[Tensor]]:
        """Blocks of Σ that lie in the last layer: their numbers, and the features they meet."""
        found = {}
        for number, placed in enumerate(self.roots.blocks):
            fits = len(placed.names) == 1 or not isinstance(placed.block, KroneckerBasis)
            if placed.whole and fits and all(name in features for name in placed.names):
                found[number] = [features[name] for name in placed.names]
        return found

    def closed_form(self, mean: Tensor, head: dict[int, list[Tensor]], rank: int) -> HeadCovariance:
        """The covariance of the outputs due to blocks of the last layer, from the features they meet."""
        found = HeadCovariance(torch.zeros_like(mean), rank)
        for number, features in head.items():
            add_block(found, self.roots.blocks[number].block, features)
        return found

    # More outputs than features enter the last layer.

    def _search_final(self, inputs: Inputs) -> None:
        self.found.searched = True
        last = last_linear(self.module, map_inputs(inputs, lambda x: x[:1]))
        if last is not None and last.in_features < last.out_features:
            known = self._names_by_identity()
            names = frozenset(known[id(p)] for p in last.parameters())
            basis, inner = torch.linalg.qr(last.weight.detach().to(self.space.dtype))
            self.found.final = FinalLayer(last, names, basis, inner)

    def _acts_below(self, final: FinalLayer, head: dict[int, list[Tensor]]) -> bool:
        """Whether all that is random acts through the features, but for what the head has in closed form.

        A weight of the last layer that is also an embedding does not: it moves outputs that no feature can move.
        """
        rest = [placed.names for number, placed in enumerate(self.roots.blocks) if number not in head]
        return final.names.isdisjoint(self.roots.factor) and all(final.names.isdisjoint(names) for names in rest)

    def _from_features(
        self, inputs: Inputs, batch: BatchSites, head: dict[int, list[Tensor]], final: FinalLayer, examples: int
    ) -> Iterator[GaussianOutputs]:
        """The same in pieces of so few examples that the roots of all features fit in memory."""
        below = sum(placed.block.size for number, placed in enumerate(self.roots.blocks) if number not in head)
        few = max(1, ROOTS // max(1, final.basis.shape[1] * below))
        if len(batch.mean) > few:
            for piece in _chunks(inputs, few):
                yield from self._backward(piece, examples)
        else:
            yield self._through_final(batch, head, final, factor_rank(batch.mean, examples))

    def _through_final(
        self, batch: BatchSites, head: dict[int, list[Tensor]], final: FinalLayer, rank: int
    ) -> GaussianOutputs:
        """diagonal + factor factorᵀ: the last layer in closed form, the others through its features."""
        mean, features = batch.mean, batch.features
        assert features is not None
        size, positions = features.shape[-1], features[0].numel() // features.shape[-1]
        below = [site for site in batch.sites if site.name not in final.names]
        inner = final.inner.new_zeros(len(mean), positions, size, size)
        for position in range(positions):
            inner[:, position] = final.inner @ self._feature_covariance(features, below, position) @ final.inner.mT
        found = self.closed_form(mean, head, rank)
        factor, left = _through(final.basis, inner, min(rank, size))
        found.diagonal = found.diagonal + left.view(mean.shape)
        found.added.append(factor.view(*mean.shape, -1))
        return found.outputs(mean)

    def _feature_covariance(self, features: Tensor, sites: list[Site], position: int) -> Tensor:
        """(B, D, D): the covariance of the features at one position."""
        roots: list[list[Tensor]] = []
        size = features.shape[-1]
        for vectors in torch.eye(size, dtype=features.dtype, device=features.device).split(COLUMNS):
            slopes = backpropagate(sites, features, at_position(features, position, vectors))
            roots.append([root.detach() for _, root in self.roots(sites, slopes, joint=True)])
        total = torch.zeros(len(features), size, size, dtype=self.space.dtype, device=features.device)
        for rows in zip(*roots, strict=True):
            root = torch.cat(rows, 1)
            total += root @ root.mT
        return total

    # Otherwise.

    def _covariance(self, batch: BatchSites, width: int) -> Tensor:
        """(B, S, K, K) for S positions with K outputs each, by a backward pass per output."""
        positions = batch.mean[0].numel() // width
        covariance = batch.mean.new_zeros(len(batch.mean), positions, width, width)
        at_once = max(1, COLUMNS // width)
        for start in range(0, positions, at_once):
            stop = min(start + at_once, positions)
            columns = one_hot(batch.outputs, start * width, stop * width)
            together = self.capture is None or self.capture.columns != 1
            slopes = backpropagate(batch.sites, batch.outputs, columns, together=together)
            with torch.no_grad():
                for some, root in self.roots(batch.sites, slopes):
                    covariance[some, start:stop].add_(gram(root, width))
        return covariance


def last_linear(module: nn.Module, inputs: Inputs) -> nn.Linear | None:
    """The linear module whose output the model returns as it is, if there is one."""
    seen: list[tuple[nn.Linear, Any]] = []
    hooks = [
        own.register_forward_hook(lambda own, _, out: seen.append((own, out)))
        for own in module.modules()
        if isinstance(own, nn.Linear)
    ]
    try:
        with torch.no_grad():
            outputs = apply(module, inputs)
    finally:
        for hook in hooks:
            hook.remove()
    return next((own for own, out in seen if out is outputs), None)


def _few_enough(batch: BatchSites) -> int:
    """How many examples of a batch have slopes at all layers that fit in memory, for one backward pass; at least 1."""
    columns = min(COLUMNS, batch.mean[0].numel())
    return max(1, SLOPES * len(batch.mean) // max(1, columns * slope_numbers(batch.sites)))


def factor_rank(mean: Tensor, examples: int) -> int:
    """Columns of a factor over outputs for which those of all examples fit in memory."""
    return max(1, FACTOR // (examples * mean[0].numel()))


def _ones(mean: Tensor) -> Tensor:
    """(B, ..., 1): the feature that a bias meets."""
    return torch.ones_like(mean[..., :1])


def _through(basis: Tensor, inner: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Factor (B, S, K, rank) and what is left on the diagonal, (B, S, K), of Q inner Qᵀ; exact on its diagonal."""
    left = basis.new_zeros(*inner.shape[:2], len(basis))
    if rank >= inner.shape[-1]:
        return basis @ symmetric_root(inner), left
    values, vectors = torch.linalg.eigh(inner)
    signs = vectors.sum(-2, keepdim=True).sign()  # the same eigenvectors in every batch
    root = vectors * signs * values.clamp_min(0).sqrt().unsqueeze(-2)
    root = root.flip(-1)  # largest first
    for row, rest in zip(left.view(-1, len(basis)), root[..., rank:].flatten(0, 1), strict=True):
        row.copy_((basis @ rest).square().sum(-1))  # one at a time: (K, D) numbers each
    return basis @ root[..., :rank], left


def _gaussian(mean: Tensor, covariance: Tensor) -> GaussianOutputs:
    """From a covariance (B, S, K, K) in the shape of the outputs."""
    width = covariance.shape[-1]
    if width == 1:
        return GaussianOutputs(mean, covariance.view(mean.shape))
    covariance = covariance.view(*mean.shape, width)
    factor, failed = torch.linalg.cholesky_ex(covariance)
    singular = failed > 0
    if singular.any():  # the slower root for these alone: the others are as in any other batch
        factor[singular] = symmetric_root(covariance[singular])
    return GaussianOutputs(mean, torch.zeros_like(mean), factor)


def _chunks(inputs: Inputs, size: int) -> Iterator[Inputs]:
    for start in range(0, len(first_tensor(inputs)), size):
        yield map_inputs(inputs, lambda x, a=start: x[a : a + size])


def linearised_outputs(
    module: nn.Module, space: Space, law: Law, inputs: Inputs, batch_size: int = 64
) -> GaussianOutputs:
    """Mean and covariance of the outputs of every example; `module` holds the mean of the weights, in eval mode."""
    return Linearised(module, space, law)(inputs, batch_size)

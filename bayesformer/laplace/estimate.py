"""Curvature of the log-likelihood over data: Gauss-Newton or Fisher, in the structure asked for.

    curvature = estimate(model, likelihood, data, structure="kron")

One pass over the data in minibatches (`low_rank`: a few; `subnetwork`: two). All are sums over the data, so the
result does not depend on the minibatches, but for the draws of kind="mc".
"""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from torch import Tensor, nn

from bayesformer.core.errors import unknown_name
from bayesformer.core.progress import Reporter, Silent
from bayesformer.data import Data, DataLike, as_data
from bayesformer.data.inputs import map_inputs
from bayesformer.jacobians import columns
from bayesformer.jacobians.capture import Capture
from bayesformer.laplace import dense_curvature as dense
from bayesformer.laplace import diagonal_curvature as diagonal
from bayesformer.laplace import kronecker_curvature as kron
from bayesformer.laplace import last_layer
from bayesformer.laplace import low_rank_curvature as low_rank
from bayesformer.laplace.passes import Piece, Sweep
from bayesformer.laplace.structures import CurvatureBlock
from bayesformer.likelihoods import Likelihood, as_likelihood
from bayesformer.network import device_of, trainable

Form = Literal["diag", "kron", "full", "block", "low_rank", "subnetwork"]
Kind = Literal["ggn", "mc", "fisher"]
OUTPUTS = 2**24  # numbers a minibatch puts out by default, 64 MiB in float32: a few copies are made of them


@dataclass(frozen=True)
class Curvature:
    """H, the curvature of the negative log-likelihood summed over data, block by block.

    `places` are where each block's weights lie in the flat vector of `network.Layout.of(model)`; weights in no
    block were not followed.
    """

    places: tuple[slice | Tensor, ...]
    names: tuple[tuple[str, ...], ...]
    structures: tuple[CurvatureBlock, ...]
    log_likelihood: float
    """summed over the data, at the model's weights"""
    num_data: int
    outputs: int
    """numbers the model gives per example or position"""
    kind: Kind
    general: tuple[str, ...] = ()
    """parameters that had to be followed the slow way, a backward pass per example"""


def estimate(
    model: nn.Module,
    likelihood: Likelihood | str,
    data: DataLike,
    structure: Form = "kron",
    *,
    kind: Kind | None = None,
    names: str | Sequence[str] | None = None,
    batch_size: int | None = None,
    samples: int = 1,
    seed: int = 0,
    approximation: kron.Approximation | None = None,
    large: kron.Large = "low_rank",
    rank: int = 64,
    size: int = 100,
    index: Tensor | None = None,
    general: Sequence[str] = (),
    reporter: Reporter | None = None,
) -> Curvature:
    """The curvature of a model's weights at their present values. The model must be in eval mode.

    Args:
        model: any module; it is not changed.
        likelihood: of the targets given its outputs, (B, K) or (B, T, K).
        data: padding is left out by the mask, by `ignore_index`, and by an `attention_mask` among keyword inputs.
        structure: "diag"; "kron", Kronecker factors per matrix; "full", one dense matrix; "block", a dense matrix
            per module; "low_rank", the top `rank` eigenpairs; "subnetwork", a dense matrix over the `size` weights
            of largest diagonal variance, or over those at `index`.
        kind: "ggn", the exact Gauss-Newton matrix, at K - 1 (classes) or K backward passes per position of the
            outputs; "mc", its Monte Carlo estimate with targets drawn from the model, at `samples` passes;
            "fisher", the empirical Fisher matrix of the true targets, at one. By default "ggn" for (B, K)
            and "mc" for (B, T, K), where the exact one takes T times as many passes.
        names: parameters to follow: names or patterns ("*attention*"), or "last_layer"; by default all trainable.
        batch_size: examples at a time; by default 64 (256 on a GPU), or fewer if their outputs are a vocabulary each.
        samples: draws per example of kind="mc".
        seed: of those draws.
        approximation: how Kronecker factors treat weights shared by positions: "expand" or "reduce"; by default
            expand for (B, T, K) and reduce for (B, K).
        large: how a Kronecker factor longer than 4096 is kept: "low_rank" by its top `rank` eigenpairs, "diagonal".
        rank: eigenpairs of "low_rank", and of large Kronecker factors.
        size: weights of a subnetwork.
        index: their places in the flat vector, in order.
        general: parameters to follow by a backward pass per example, whatever is known of their use.
        reporter: told of progress.
    """
    data, likelihood = as_data(data), as_likelihood(likelihood)
    _check(structure, kind, samples, batch_size, rank)
    first = map_inputs(data.take(slice(0, 3)).inputs, lambda x: x.to(device_of(model)))
    chosen = last_layer.names_of(model, first) if names == "last_layer" else _matching(model, names)
    capture = Capture(model, chosen, general)
    outputs, sites = capture.probe(first)
    _check_targets(likelihood, outputs, data)
    if kind is None:
        kind = "mc" if likelihood.per_token(outputs) else "ggn"
    if batch_size is None:
        most = 64 if device_of(model).type == "cpu" else 256
        batch_size = max(1, min(most, OUTPUTS // outputs[0].numel()))
    capture.columns = columns.count(kind, likelihood, outputs, samples)
    sweep = Sweep(capture, likelihood, data, kind, batch_size, samples, seed, reporter or Silent())
    if kind == "ggn" and last_layer.applies(sites, outputs, structure):
        pieces = last_layer.fit(sweep, structure)
    else:
        pieces = _fit(sweep, structure, approximation, large, rank, size, index)
    return Curvature(
        places=tuple(piece.place for piece in pieces),
        names=tuple(piece.names for piece in pieces),
        structures=tuple(piece.structure for piece in pieces),
        log_likelihood=sweep.log_likelihood,
        num_data=len(data),
        outputs=outputs.shape[-1] if outputs.dim() > 1 else 1,
        kind=kind,
        general=tuple(capture.general),
    )


def _fit(
    sweep: Sweep,
    structure: Form,
    approximation: kron.Approximation | None,
    large: kron.Large,
    rank: int,
    size: int,
    index: Tensor | None,
) -> list[Piece]:
    if structure == "diag":
        return diagonal.fit(sweep)
    if structure == "kron":
        return kron.fit(sweep, approximation, large, rank)
    if structure == "low_rank":
        return low_rank.fit(sweep, rank)
    if structure == "subnetwork":
        if index is None:
            index = dense.largest_variance(diagonal.fit(sweep), size)
        return dense.subnetwork(sweep, index)
    return dense.full(sweep) if structure == "full" else dense.blocks(sweep)


def _matching(model: nn.Module, names: str | Sequence[str] | None) -> list[str] | None:
    if names is None:
        return None
    known = list(trainable(model))
    patterns = [names] if isinstance(names, str) else list(names)
    for pattern in patterns:
        if not fnmatch.filter(known, pattern):
            raise unknown_name("trainable parameter or pattern", pattern, known)
    return [name for name in known if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)]


def _check(structure: str, kind: str | None, samples: int, batch_size: int | None, rank: int) -> None:
    if structure not in get_args(Form):
        raise unknown_name("structure", structure, get_args(Form))
    if kind is not None and kind not in columns.KINDS:
        raise unknown_name("kind", kind, columns.KINDS)
    for name, value in {"samples": samples, "batch_size": batch_size or 1, "rank": rank}.items():
        if value < 1:
            raise ValueError(f"{name} must be at least 1; got {value}.")


def _check_targets(likelihood: Likelihood, outputs: Tensor, data: Data) -> None:
    """All targets against outputs of the first example: a wrong one is an error now, not after an hour."""
    mask = None if data.mask is None else data.mask.to(outputs.device)
    full = outputs.detach()[:1].expand(len(data), *outputs.shape[1:])
    likelihood.check(full, data.targets.to(outputs.device), mask)

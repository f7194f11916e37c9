"""Curvature of the log-likelihood over data: Gauss-Newton or Fisher, in the structure asked for.

    curvature = estimate(model, likelihood, data, structure="kron")

One pass over the data in minibatches (`low_rank`: a few; `subnetwork`: two). All are sums over the data, so the
result does not depend on the minibatches, but for the draws of kind="mc".
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

from torch import Tensor, nn

from bayesformer.core.errors import unknown_name
from bayesformer.core.progress import Reporter, Silent
from bayesformer.data import Batches, as_batches
from bayesformer.data.inputs import inputs_to
from bayesformer.jacobians import columns
from bayesformer.jacobians.capture import Capture, UseChangedError
from bayesformer.jacobians.sites import Site, slope_numbers
from bayesformer.laplace import dense_curvature as dense
from bayesformer.laplace import diagonal_curvature as diagonal
from bayesformer.laplace import kronecker_curvature as kron
from bayesformer.laplace import last_layer
from bayesformer.laplace import low_rank_curvature as low_rank
from bayesformer.laplace.passes import COLUMNS, CurvaturePiece, Sweep
from bayesformer.laplace.structures import CurvatureBlock
from bayesformer.likelihoods import Likelihood, as_likelihood
from bayesformer.likelihoods.language import batches_for
from bayesformer.likelihoods.target_rows import check_rows
from bayesformer.model.modes import check_eval
from bayesformer.model.skeleton import Skeleton
from bayesformer.model.space import Choice, Space

log = logging.getLogger("bayesformer")

Form = Literal["diag", "kron", "full", "block", "low_rank", "subnetwork"]
Kind = Literal["ggn", "mc", "fisher"]
OUTPUTS = 2**24  # numbers a minibatch puts out by default, 64 MiB in float32: a few copies are made of them
SLOPES = 2**27  # numbers of slopes at all layers that its backward passes give by default, 512 MiB in float32
PROBE = 3  # examples of the first pass


@dataclass(frozen=True)
class Curvature:
    """H, the curvature of the negative log-likelihood summed over data, block by block.

    `places` are where each block's weights lie in the vector θ of the inferred weights (`Space.of(model)`); weights in
    no block were not followed.
    """

    places: tuple[slice | Tensor, ...]
    names: tuple[tuple[str, ...], ...]
    structures: tuple[CurvatureBlock, ...]
    log_likelihood: float
    """summed over the data, at the model's weights"""
    num_data: int
    """examples that the sum stands for: N, or those that were read if N is not known"""
    observed: int
    """numbers among their targets that count"""
    outputs: int
    """numbers the model gives per example or position"""
    kind: Kind
    general: tuple[str, ...] = ()
    """parameters that had to be followed by a backward pass per example"""
    lost: tuple[tuple[str, float], ...] = ()
    """parameters whose Kronecker factors were cut, with the share of a factor's trace that this left out"""


def estimate(
    model: nn.Module,
    likelihood: Likelihood | str,
    data: Any,
    structure: Form = "kron",
    *,
    kind: Kind | None = None,
    subset: Choice = None,
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
    space: Space | None = None,
    weighted: bool = False,
    widest: int | None = None,
) -> Curvature:
    """The curvature of a model's weights at their present values.

    Args:
        model: any module in eval mode; it is not changed.
        likelihood: of the targets given its outputs, (B, K) or (B, T, K).
        data: in any form that `fit` takes, read once for each pass. Padding is left out by the mask, by `ignore_index`,
            and by an `attention_mask` among keyword inputs.
        structure: "diag"; "kron", Kronecker factors per matrix; "full", one dense matrix; "block", a dense matrix
            per module; "low_rank", the top `rank` eigenpairs; "subnetwork", a dense matrix over the `size` weights
            of largest diagonal variance, or over those at `index`.
        kind: "ggn", the exact Gauss-Newton matrix, at K - 1 (classes) or K backward passes per position of the
            outputs; "mc", its Monte Carlo estimate with targets drawn from the model, at `samples` passes;
            "fisher", the empirical Fisher matrix of the true targets, at one. By default "ggn", but
            "mc" for (B, T, K) or K above 100 where the exact one would take long.
        subset: which of the inferred weights to follow: patterns ("*attention*") or a predicate, as for `Space.select`,
            or "last_layer", the layer that gives the outputs; by default all.
        batch_size: examples at a time; by default 64 (256 on a GPU), or fewer if their outputs are a vocabulary each or
            what is computed from them would not fit in half a gigabyte.
        samples: draws per example of kind="mc".
        seed: of those draws.
        approximation: how Kronecker factors treat weights shared by positions: "expand" or "reduce"; by default
            expand for (B, T, K) and reduce for (B, K).
        large: how a Kronecker factor longer than `widest` is kept: "low_rank" by its top `rank` eigenpairs, "diagonal".
        rank: eigenpairs of "low_rank", and of large Kronecker factors.
        size: weights of a subnetwork.
        index: their places in θ, in order.
        general: parameters to follow by a backward pass per example, whatever is known of their use.
        reporter: told of progress.
        space: the inferred weights, where `model` is the module of a shell that nobody else uses; it is then run as it
            is. By default those that require a gradient, and a shell is made.
        weighted: count the inputs in Kronecker factors by the squared gradients beside them.
        widest: length up to which a Kronecker factor is kept whole; 4096 by default.
    """
    likelihood = as_likelihood(likelihood)
    data = batches_for(model, as_batches(data, "data"), likelihood)
    _check(structure, kind, samples, batch_size, rank)
    if space is None:
        check_eval(model, "dropout and running averages would make curvature random")
        space = Space.of(model)
        model = Skeleton(model, space).shell(gradients=False).module
    first = inputs_to(data.first(PROBE).inputs, model.get_parameter(space.names[0]).device)
    chosen = last_layer.space_of(model, space, first) if subset == "last_layer" else space.select(subset)
    while True:
        capture = Capture(model, chosen, general)
        outputs, sites = capture.probe(first)
        if kind is None:
            passed = chosen.size if subset == "last_layer" else sum(p.numel() for p in model.parameters())
            kind = columns.default_kind(likelihood, outputs, passed, data.num_data or len(outputs))
        sweep = _sweep(
            capture, outputs, sites, space, likelihood, data, kind, batch_size, samples, seed, reporter or Silent()
        )
        closed = sweep.kind == "ggn" and last_layer.applies(sites, outputs, structure)
        width = outputs.shape[-1] if outputs.dim() > 1 else 1
        del outputs, sites  # with their graph
        try:
            if closed:
                return _curvature(sweep, last_layer.fit(sweep, structure, weighted), width)
            found = _fit(sweep, structure, approximation, large, rank, size, index, weighted, widest)
            return _curvature(sweep, found, width)
        except UseChangedError as error:  # from the beginning: what was summed before may be wrong as well
            log.info("curvature begins again: %s", error)
            general = [*general, *error.functions]


def _sweep(
    capture: Capture,
    outputs: Tensor,
    sites: list[Site],
    space: Space,
    likelihood: Likelihood,
    data: Batches,
    kind: Kind,
    batch_size: int | None,
    samples: int,
    seed: int,
    reporter: Reporter,
) -> Sweep:
    """The passes over the data; the size of minibatches that was not given follows from the probed outputs."""
    values = outputs.detach().to(capture.dtype)
    _check_targets(likelihood, values, data)
    capture.columns = columns.count(kind, likelihood, values, samples)
    if batch_size is None:
        most = 64 if values.device.type == "cpu" else 256
        slopes = min(COLUMNS, capture.columns) * slope_numbers(sites) // len(values)
        batch_size = max(1, min(most, OUTPUTS // values[0].numel(), SLOPES // max(1, slopes)))
    return Sweep(capture, space, likelihood, data, kind, batch_size, samples, seed, reporter)


def _curvature(sweep: Sweep, pieces: list[CurvaturePiece], width: int) -> Curvature:
    readings = sweep.data.readings
    pieces = [piece for piece in pieces if piece.structure.size]  # without parameters of no numbers
    blocks = (piece.structure for piece in pieces)
    return Curvature(
        places=tuple(piece.place for piece in pieces),
        names=tuple(piece.names for piece in pieces),
        structures=tuple(block if readings == 1 else block.scaled(1 / readings) for block in blocks),
        log_likelihood=sweep.log_likelihood / readings,
        num_data=round(sweep.num_data / readings),
        observed=round(sweep.observed / readings),
        outputs=width,
        kind=cast(Kind, sweep.kind),
        general=tuple(sweep.capture.general),
        lost=tuple((piece.names[0], piece.lost) for piece in pieces if piece.lost > 0),
    )


def _fit(
    sweep: Sweep,
    structure: Form,
    approximation: kron.Approximation | None,
    large: kron.Large,
    rank: int,
    size: int,
    index: Tensor | None,
    weighted: bool,
    widest: int | None,
) -> list[CurvaturePiece]:
    if structure == "diag":
        return diagonal.fit(sweep)
    if structure == "kron":
        return kron.fit(sweep, approximation, large, rank, weighted, widest)
    if structure == "low_rank":
        return low_rank.fit(sweep, rank)
    if structure == "subnetwork":
        if index is None:
            index = dense.largest_variance(diagonal.fit(sweep), size)
        return dense.subnetwork(sweep, index)
    return dense.full(sweep) if structure == "full" else dense.blocks(sweep)


def _check(structure: str, kind: str | None, samples: int, batch_size: int | None, rank: int) -> None:
    if structure not in get_args(Form):
        raise unknown_name("structure", structure, get_args(Form))
    if kind is not None and kind not in columns.KINDS:
        raise unknown_name("kind", kind, columns.KINDS)
    counts = {"samples": samples, "batch_size": 1 if batch_size is None else batch_size, "rank": rank}
    for name, value in counts.items():
        if value < 1:
            raise ValueError(f"{name} must be at least 1; got {value}.")


def _check_targets(likelihood: Likelihood, outputs: Tensor, data: Batches) -> None:
    """All targets at hand against outputs of the first example: a wrong one is an error now, not after an hour."""
    whole = data.tensors
    if whole is None:
        return  # each minibatch is checked when it is read
    mask = None if whole.mask is None else whole.mask.to(outputs.device)
    full = outputs[:1].expand(len(whole), *outputs.shape[1:])
    check_rows(likelihood, full, whole.targets.to(outputs.device), mask)

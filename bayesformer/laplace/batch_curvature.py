"""The Gauss-Newton matrix of one batch at any weights, for algorithms that add up curvature as they read: filters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from bayesformer.core.draws import uniform_like
from bayesformer.core.types import Batch, Params
from bayesformer.core.vectors import THETA
from bayesformer.data.batches import Batches
from bayesformer.jacobians import columns
from bayesformer.jacobians.capture import Capture
from bayesformer.laplace import dense_curvature, diagonal_curvature
from bayesformer.laplace.passes import BatchPass, Sweep
from bayesformer.likelihoods import Likelihood
from bayesformer.model.shell import Shell

SEEDS = 2**53  # whole numbers below it are floats of double precision


class BatchSweep(Sweep):
    """A sweep over one batch alone, `current`."""

    current: Batch

    def each(self, work: Callable[[BatchPass], None]) -> None:
        """`work` on the batch, without the sums over data that a whole sweep keeps."""
        with torch.inference_mode(False), torch.no_grad():
            self._one(self.current, 0, work)


class BatchCurvature:
    """Called with weights and a batch: minus the mean Hessian of the log-likelihood, by Gauss-Newton.

    "full" gives (P, P), "diag" {"theta": (P,)}, as `ekf_dense` and `ekf_diag` ask for. Exact in the outputs for (B, K),
    and for outputs at every position (B, T, K) where that is affordable; otherwise from targets that the model draws,
    one per position, which is right on average (Martens 2020, section 9.2). Unlike the squared scores of the true
    targets (the empirical Fisher matrix) it does not depend on how well the targets are fitted.

    Args:
        shell: whose weights are loaded and whose module is run, in evaluation mode.
        likelihood: of the targets given the outputs.
        data: what the batches are taken from.
        structure: the whole matrix, or its diagonal.
    """

    def __init__(self, shell: Shell, likelihood: Likelihood, data: Batches, structure: Literal["diag", "full"]) -> None:
        self.shell, self.likelihood, self.data, self.structure = shell, likelihood, data, structure
        self.sweep: BatchSweep | None = None  # after the first batch

    def __call__(self, params: Params, batch: Batch) -> Params | Tensor:
        """(P, P) or {"theta": (P,)}: the mean over the examples of the batch."""
        self.shell.load(params[THETA])
        sweep = self.sweep = self.sweep or self._begin(batch)
        sweep.current = batch
        if sweep.kind == "mc":
            sweep.seed = int(uniform_like(torch.empty((), dtype=torch.float64, device=self.shell.theta.device)) * SEEDS)
        count = len(batch.targets)
        if self.structure == "full":
            (piece,) = dense_curvature.full(sweep)
            return piece.structure.dense() / count
        found = params[THETA].new_zeros(params[THETA].shape)
        for piece in diagonal_curvature.fit(sweep):
            found[piece.place] = piece.structure.diagonal() / count
        return {THETA: found}

    def _begin(self, batch: Batch) -> BatchSweep:
        """Look once at how the model uses its weights, on the first examples of the first batch."""
        capture = Capture(self.shell.module, self.shell.space)
        outputs, _ = capture.probe(batch.inputs)
        values = outputs.detach().to(capture.dtype)
        weights = sum(parameter.numel() for parameter in self.shell.module.parameters())
        kind = columns.default_kind(self.likelihood, values, weights, self.data.num_data or len(values))
        capture.columns = columns.count(kind, self.likelihood, values)
        return BatchSweep(capture, self.shell.space, self.likelihood, self.data, kind, len(batch.targets))

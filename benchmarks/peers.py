"""Steps of the peer libraries on the same workloads, where they are installed and can take the model."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call

from bayesformer.core.types import Batch
from bayesformer.model.calling import select_output, split_inputs
from benchmarks.workloads import Workload

Steps = Callable[[], None]


def peers(work: Workload) -> Iterator[tuple[str, Steps]]:
    """Name and steps of every peer that is there."""
    if importlib.util.find_spec("posteriors"):
        yield "posteriors.vi.diag", _posteriors(work, _vi)
        yield "posteriors.sgmcmc.sghmc", _posteriors(work, _sghmc)
    if importlib.util.find_spec("bayesian_torch"):
        yield "bayesian-torch reparameterisation", _bayesian_torch(work)


def _posteriors(work: Workload, build: Callable[..., Any]) -> Steps:
    model = work.model()
    params = dict(model.named_parameters())

    def log_posterior(values: dict[str, Tensor], batch: Batch) -> tuple[Tensor, Tensor]:
        args, kwargs = split_inputs(batch.inputs)
        outputs = select_output(functional_call(model, values, args, kwargs))
        fit = work.likelihood.log_prob(outputs, batch.targets, batch.mask).mean()
        prior = sum(-0.5 * value.square().sum() for value in values.values())
        return fit + prior / work.num_data, outputs

    transform = build(log_posterior, work.num_data)
    state = [transform.init(params)]

    def run() -> None:
        for _ in range(work.steps):
            state[0], _ = transform.update(state[0], work.batch, inplace=True)

    return run


def _vi(log_posterior: Callable[..., Any], num_data: int) -> Any:
    import posteriors
    import torchopt

    return posteriors.vi.diag.build(log_posterior, torchopt.adam(lr=1e-3), temperature=1 / num_data, init_log_sds=-5.0)


def _sghmc(log_posterior: Callable[..., Any], num_data: int) -> Any:
    import posteriors

    return posteriors.sgmcmc.sghmc.build(log_posterior, lr=1e-2, alpha=10.0, temperature=1 / num_data)


def _bayesian_torch(work: Workload) -> Steps:
    from bayesian_torch.models.dnn_to_bnn import dnn_to_bnn, get_kl_loss

    model = work.model()
    prior = {
        "prior_mu": 0.0,
        "prior_sigma": 1.0,
        "posterior_mu_init": 0.0,
        "posterior_rho_init": -5.0,
        "type": "Reparameterization",
        "moped_enable": False,
    }
    dnn_to_bnn(model, prior)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    args, kwargs = split_inputs(work.batch.inputs)

    def run() -> None:
        for _ in range(work.steps):
            optimizer.zero_grad()
            outputs = select_output(model(*args, **kwargs))
            fit = work.likelihood.log_prob(outputs, work.batch.targets, work.batch.mask).mean()
            (get_kl_loss(model) / work.num_data - fit).backward()
            optimizer.step()

    return run

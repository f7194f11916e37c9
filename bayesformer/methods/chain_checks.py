"""What Hamiltonian chains say of themselves: numbers for a posterior's facts, and doubts where they are bad."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bayesformer.core.doubts import Doubt
from bayesformer.core.types import Draws, Inputs
from bayesformer.data.inputs import map_inputs
from bayesformer.inference.diagnostics import (
    effective_sample_size,
    energy_information,
    split_rhat,
    tail_effective_sample_size,
)
from bayesformer.posterior import Posterior

RHAT = 1.01  # Vehtari et al. (2021)
RHAT_NOISE = 3.0  # the largest R-hat - 1 of some hundred quantities by chance, times the ESS of half a chain
ESS = 100.0  # independent draws in all
MISSING_ENERGY = 0.3  # E-BFMI
SATURATED = 0.01  # share of trajectories that were cut
LEAST = 4  # draws per chain below which nothing can be told
EXAMPLES, OUTPUTS, LARGEST = 32, 200, 2**26  # training inputs, quantities and numbers that outputs are checked at


@dataclass(frozen=True)
class ChainRecord:
    """The transitions of all chains after the warm-up, each (C, S)."""

    log_joint: Tensor
    acceptance: Tensor
    leapfrogs: Tensor
    divergent: Tensor
    energy: Tensor
    cut: Tensor  # 1 where a trajectory was as long as it may be
    all_leapfrogs: int  # with those of the warm-up
    step_sizes: list[float]

    @classmethod
    def of(cls, histories: Sequence[Sequence[dict[str, list[float]]]], warm_up: int, longest: int) -> ChainRecord:
        """From what the training loop noted of every transition; `longest` leapfrogs are a trajectory that was cut."""

        def column(name: str) -> Tensor:
            rows = [[entry[name][0] for entry in history[warm_up:]] for history in histories]
            return torch.tensor(rows, dtype=torch.float64, device="cpu")

        leapfrogs = column("leapfrogs")
        return cls(
            column("log_joint"),
            column("acceptance"),
            leapfrogs,
            column("divergent"),
            column("energy"),
            (leapfrogs >= longest).double(),
            int(sum(entry["leapfrogs"][0] for history in histories for entry in history)),
            [history[-1]["step_size"][0] for history in histories],
        )


def output_traces(posterior: Posterior, inputs: Inputs, chains: int) -> Tensor | None:
    """(C, S, Q): outputs on some training inputs under all draws; None where a single example has too many."""
    one = posterior.outputs(map_inputs(inputs, lambda x: x[:1]), draws=1)
    assert isinstance(one, Draws)
    each = one.values[0].numel() * posterior.draws
    if each > LARGEST:
        return None
    count = max(1, min(EXAMPLES, LARGEST // each))
    found = posterior.outputs(map_inputs(inputs, lambda x: x[:count]))
    assert isinstance(found, Draws)
    values = found.values.flatten(1).unflatten(0, (chains, -1))
    step = -(-values.shape[-1] // OUTPUTS)
    return values[..., ::step]


def examine(record: ChainRecord, outputs: Tensor | None) -> tuple[dict[str, Any], list[Doubt]]:
    """Numbers by name, for a posterior's facts, and what they give reason to doubt."""
    chains, length = record.energy.shape
    found: dict[str, Any] = {
        "transitions": length,
        "leapfrogs": record.all_leapfrogs,
        "acceptance": record.acceptance.mean().item(),
        "step_size": record.step_sizes,
        "divergences": int(record.divergent.sum()),
        "cut_trajectories": record.cut.mean().item(),
    }
    doubts = _trajectories(found, chains * length)
    if length < LEAST:
        return found, doubts
    found["energy_information"] = energy_information(record.energy).tolist()
    doubts += _energy(found["energy_information"])
    for name, traces in (("log_joint", record.log_joint.unsqueeze(-1)), ("outputs", outputs)):
        if traces is None or traces.shape[1] < LEAST:
            continue
        found |= {f"{key}_{name}": value for key, value in _convergence(traces).items()}
        doubts += _agreement(found, name, max(RHAT, 1 + RHAT_NOISE / _size_of_a_half(traces)))
    return found, doubts


def _convergence(traces: Tensor) -> dict[str, float]:
    """The worst R-hat and effective sample sizes over the quantities that move."""
    rhat, bulk, tail = split_rhat(traces), effective_sample_size(traces), tail_effective_sample_size(traces)
    return {"rhat": _worst(rhat, True), "ess_bulk": _worst(bulk, False), "ess_tail": _worst(tail, False)}


def _size_of_a_half(traces: Tensor) -> float:
    """The effective sample size of half a chain by itself, whatever the others do: the median over quantities.

    The smaller of those of the draws and of their distances to the median, which R-hat looks at as well.
    """
    half = traces.shape[1] // 2
    if half < LEAST:
        return 1.0
    alone = torch.cat([traces[:, :half], traces[:, -half:]]).double()  # (2 C, S / 2, Q)
    sizes = []
    for values in (alone, (alone - alone.flatten(0, 1).median(0).values).abs()):
        centred = values - values.mean(1, keepdim=True)
        sizes.append(effective_sample_size(centred, rank_normalised=False).nanmedian().item() / len(alone))
    return max(1.0, min(sizes))


def _worst(values: Tensor, largest: bool) -> float:
    known = values[~values.isnan()]
    return math.nan if not len(known) else (known.max() if largest else known.min()).item()


def _trajectories(found: dict[str, Any], transitions: int) -> list[Doubt]:
    doubts, diverged = [], found["divergences"]
    if diverged:
        doubts.append(
            Doubt(
                "divergences",
                f"{diverged} of {transitions} trajectories diverged: the posterior has places too narrow for the step "
                "size, and the draws avoid them. Raise target (towards 0.99), use precision='float64' or a prior with "
                "less room.",
                diverged,
                0,
            )
        )
    if found["cut_trajectories"] > SATURATED:
        doubts.append(
            Doubt(
                "trajectory length",
                f"{found['cut_trajectories']:.0%} of the trajectories reached the largest length allowed: draws are "
                "correlated more than they need be. Raise max_depth (NUTS) or max_leapfrogs (HMC), or use "
                "metric='dense' or a longer warm_up.",
                found["cut_trajectories"],
                SATURATED,
            )
        )
    return doubts


def _energy(information: list[float]) -> list[Doubt]:
    lowest = min(information)
    if not lowest < MISSING_ENERGY:
        return []
    return [
        Doubt(
            "energy",
            f"the chains' energy moves slowly (E-BFMI {lowest:.2f}, below {MISSING_ENERGY}): tails of the posterior "
            "may be missing. Use a longer warm_up and more draws, or another parametrisation or prior.",
            lowest,
            MISSING_ENERGY,
        )
    ]


def _agreement(found: dict[str, Any], name: str, limit: float) -> list[Doubt]:
    """Chains that differ by more than chance lets them, or that are worth too few draws."""
    what = "the log joint" if name == "log_joint" else "outputs on training inputs"
    rhat, size = found[f"rhat_{name}"], min(found[f"ess_bulk_{name}"], found[f"ess_tail_{name}"])
    if rhat > limit:
        sentence = (
            f"chains disagree about {what} (R-hat {rhat:.3f}, above {limit:.3f}): they have not reached the same "
            "posterior. Use a longer warm_up and more draws."
        )
        return [Doubt("chains disagree", sentence, rhat, limit)]
    if size < ESS:
        sentence = (
            f"the chains are worth {size:.0f} independent draws of {what}, below {ESS:.0f}: means and spreads are "
            "known roughly. Take more transitions (draws, thin), or a longer warm_up."
        )
        return [Doubt("chain length", sentence, size, ESS)]
    return []

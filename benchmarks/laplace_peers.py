"""Laplace in other libraries, on the same models and data, where they are installed: their curvature and predictive.

They may be slow. What takes long is done once on a share of the data, in smaller minibatches; the row's name says so
and the time is per example. That favours them: a Jacobian of a whole minibatch costs the square of its size.

laplace-torch has Kronecker factors for linear layers alone and fails on a whole transformer; rows with "linear layers"
have everything else frozen. Its ASDL backend is fast and wrong here: it takes every token for an example (see
`tests/test_laplace_peers_limits.py`). The published package of streamlined prediction, suq 0.1.0, has no row: its
wheel leaves out its subpackage `suq.utils`, so that it cannot be imported.
"""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.data import DataLoader, TensorDataset

from bayesformer.data import Data
from bayesformer.likelihoods import Categorical, Gaussian, Likelihood
from benchmarks.harness import Comparison
from tests.curvature_zoo import inferred

Build = Callable[[], nn.Module]
BACKENDS = {"ggn": ("CurvlinopsGGN", "AsdlGGN"), "mc": ("CurvlinopsGGN",), "fisher": ("CurvlinopsEF", "AsdlEF")}
NOTHING = torch.tensor([])


@dataclass(frozen=True)
class Problem:
    """A model with data, and the plain work that is the unit: an epoch or a forward pass."""

    label: str
    build: Build
    likelihood: Likelihood
    data: Data
    batch_size: int
    plain: Callable[[], object]

    def tensors(self, count: int) -> tuple[Tensor, Tensor]:
        """The first inputs and targets."""
        assert isinstance(self.data.inputs, Tensor)
        return self.data.inputs[:count], self.data.targets[:count]


@dataclass
class Held:
    """What was fitted and is to predict."""

    fitted: Any = field(default=None)


def fits(problem: Problem, structure: str, kind: str, share: dict[str, int]) -> Iterator[Comparison]:
    """Curvature of one structure and kind by every peer that has it; `share` are examples where not all are used."""
    if importlib.util.find_spec("laplace"):
        for backend in BACKENDS[kind]:
            run = f"laplace-torch {backend}"
            for linear in [False, True] if structure == "kron" else [False]:
                if backend.startswith("Asdl") and linear is False and structure == "kron":
                    continue  # fails as the other backend does
                yield _row(problem, run, structure, kind, share.get(run), linear)
    if importlib.util.find_spec("posteriors") and structure == "diag" and kind != "mc":
        yield _row(problem, "posteriors", structure, kind, share.get("posteriors"), False)


def _row(problem: Problem, peer: str, structure: str, kind: str, share: int | None, linear: bool) -> Comparison:
    count, total = share or len(problem.data), len(problem.data)
    name = f"{peer} {structure} {kind}, {problem.label}, epochs" + " (wrong values)" * ("Asdl" in peer)
    name += ", linear layers" * linear + f", {count} of {total} examples" * (count < total)

    def run() -> None:
        model = _only_linear(problem.build()) if linear else problem.build()
        if peer == "posteriors":
            _posteriors_fit(problem, model.eval(), kind, count)
        else:
            _laplace_fit(problem, model.eval(), "all", structure, peer.split()[1], count, stochastic=kind == "mc")

    units = {"candidate_units": count, "baseline_units": total}
    return Comparison(name, run, problem.plain, None, rounds=3, once=count < total, prepare=_quiet, **units)


def predictions(problem: Problem, share: int) -> Iterator[Comparison]:
    """Linearised outputs of `share` inputs by every peer, in units of a forward pass per input."""
    total = len(problem.data)
    if importlib.util.find_spec("laplace"):
        for subset, structure, linear in (
            ("all", "diag", False),
            ("all", "kron", True),
            ("last_layer", "diag", False),
            ("last_layer", "kron", False),
        ):
            what = "last layer" if subset == "last_layer" else "linear layers" if linear else "all weights"
            name = f"laplace-torch, {what}, {structure}, {problem.label}"
            yield _prediction(problem, name, _laplace_predict(problem, subset, structure, linear), share, total)
    if importlib.util.find_spec("posteriors"):
        name = f"posteriors, all weights, diag, {problem.label}"
        yield _prediction(problem, name, _posteriors_predict(problem), share, total)


Predictor = tuple[Callable[[], object], Callable[[int], object]]
"""What to do first, and the outputs of the first inputs."""


def _prediction(problem: Problem, name: str, predictor: Predictor, share: int, total: int) -> Comparison:
    prepare, predict = predictor
    long = "last layer" not in name
    count = share if long else total
    name = f"linearised by {name}" + f", {count} of {total} inputs" * (count < total)
    units = {"candidate_units": count, "baseline_units": total}
    return Comparison(name, lambda: predict(count), problem.plain, None, rounds=9, once=long, prepare=prepare, **units)


def _laplace_predict(problem: Problem, subset: str, structure: str, linear: bool) -> Predictor:
    held = Held()

    def prepare() -> None:
        _quiet()
        model = _only_linear(problem.build()) if linear else problem.build()
        few = 64 if subset == "last_layer" or structure == "kron" else 4  # only its shape matters for what follows
        held.fitted = _laplace_fit(problem, model.eval(), subset, structure, "CurvlinopsGGN", few)

    return prepare, lambda count: held.fitted._glm_predictive_distribution(problem.tensors(count)[0])


def _laplace_fit(
    problem: Problem, model: nn.Module, subset: str, structure: str, backend: str, count: int, stochastic: bool = False
) -> Any:
    import laplace
    import laplace.curvature

    regression = problem.likelihood.name == Gaussian.name
    options: dict[str, Any] = {"sigma_noise": problem.likelihood.noise_scale} if regression else {}
    options |= {"backend_kwargs": {"stochastic": True}} if stochastic else {}
    found = laplace.Laplace(
        model,
        "classification" if problem.likelihood.name == Categorical.name else "regression",
        subset_of_weights=subset,
        hessian_structure=structure,
        backend=getattr(laplace.curvature, backend),
        **options,
    )
    found.fit(DataLoader(TensorDataset(*problem.tensors(count)), batch_size=problem.batch_size))
    return found


def _posteriors_fit(problem: Problem, model: nn.Module, kind: str, count: int) -> Any:
    import posteriors

    params, log_prob = inferred(model), problem.likelihood.log_prob
    x, y = problem.tensors(count)

    def forward(values: dict[str, Tensor], batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return functional_call(model, values, (batch[0],)), NOTHING

    def per_example(values: dict[str, Tensor], batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return log_prob(forward(values, batch)[0], batch[1]), NOTHING

    if kind == "fisher":
        transform = posteriors.laplace.diag_fisher.build(per_example, per_sample=True)
    else:
        transform = posteriors.laplace.diag_ggn.build(forward, lambda f, batch: log_prob(f, batch[1]).sum())
    state = transform.init(params)
    for batch in zip(x.split(problem.batch_size), y.split(problem.batch_size), strict=True):
        state, _ = transform.update(state, batch)
    return state


def _posteriors_predict(problem: Problem) -> Predictor:
    def predict(count: int) -> object:
        import posteriors

        model = problem.build().eval()
        params = inferred(model)
        return posteriors.linearized_forward_diag(
            lambda values, batch: (functional_call(model, values, (batch,)), NOTHING),
            params,
            problem.tensors(count)[0],
            {name: torch.full_like(p, 0.01) for name, p in params.items()},
        )

    return _quiet, predict


def _only_linear(model: nn.Module) -> nn.Module:
    """Everything frozen but the weights and biases of linear layers."""
    model.requires_grad_(False)
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.requires_grad_(True)
    return model


def _quiet() -> None:
    """Import them now, and hide their warnings: they use what torch is about to drop."""
    warnings.filterwarnings("ignore")
    for package in ("laplace", "posteriors"):
        if importlib.util.find_spec(package):
            importlib.import_module(package)

"""Laplace's method: train a network, then put a Gaussian around it whose precision is the curvature plus the prior."""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from bayesformer import curvature as curvatures
from bayesformer import links
from bayesformer.curvature import Curvature, last_layer
from bayesformer.curvature.estimate import OUTPUTS
from bayesformer.dataset import Data, DataLike, as_data, map_inputs
from bayesformer.likelihoods import Likelihood, as_likelihood
from bayesformer.links import Link
from bayesformer.methods.laplace_tuning import Tuned, quadratic, tune
from bayesformer.methods.members import prior_of
from bayesformer.methods.points import fit_members
from bayesformer.methods.problem import Problem, check_problem
from bayesformer.methods.ranges import above, check_ranges, either, one_of, whole
from bayesformer.network import FlatModel, Layout, apply, device_of, trainable
from bayesformer.posterior import WAYS, Posterior, Way
from bayesformer.progress import Reporter, bars
from bayesformer.types import GaussianOutputs
from bayesformer.weights import BlockGaussian

STRUCTURES = ("kron", "diag", "full", "block", "low_rank", "subnetwork", "last_layer")
NAMED = ("auto", "marglik", "validation")  # ways to choose the prior's precision
SMALL = 2000  # weights up to which the last layer has one dense block


@dataclass(frozen=True)
class Laplace:
    """Laplace approximation: a Gaussian around one trained network, from the curvature of its loss."""

    structure: Literal["kron", "diag", "full", "block", "low_rank", "subnetwork", "last_layer"] = "kron"
    """form of the curvature: Kronecker factors per matrix, one number per weight, one dense matrix, a dense matrix per
    module, the top eigenpairs, a dense matrix over few weights, or the last layer alone (dense if small, else kron)"""
    curvature: Literal["auto", "ggn", "mc", "fisher"] = "auto"
    """exact Gauss-Newton, Monte Carlo with labels from the model, or the empirical Fisher of the true labels; auto is
    ggn for one output vector per example and mc for one per token"""
    subset: str = "*"
    """name pattern of the weights to infer, or last_layer; the others stay at the mode"""
    prior_precision: float | Literal["auto", "marglik", "validation"] = "auto"
    """precision of the Gaussian prior: a number; or chosen by the evidence (marglik), which asks for a network that
    does not interpolate its data, or by the validation log-likelihood of the predictive that will be used; auto is
    validation where there are such data and one precision is to be chosen"""
    start: float = 1.0
    """precision of the prior in the training objective, and where the choice starts; a number above takes its place"""
    per: Literal["one", "layer", "weight"] = "one"
    """how many precisions are chosen: one for all, one per parameter, one per weight (not for kron)"""
    noise: Literal["given", "marglik", "validation"] = "given"
    """scale of a Gaussian likelihood with known scale: as given, or chosen too"""
    temperature: float = 1.0
    """below 1 the data count for more and the posterior is colder"""
    predictive: Way = "linearised"
    """linearised: Gaussian outputs of the network made linear in its weights; sampled: draws of the weights, which
    often underfit; streamlined: moments carried through one forward pass"""
    link: Link | None = None
    """from Gaussian logits to probabilities: mc, probit, bridge or bridge_norm; none is mc"""
    draws: int = 100
    """draws per prediction: of the outputs, or of the weights if sampled"""
    samples: int = 1
    """labels drawn per example where the curvature is mc"""
    rank: int = 64
    """eigenpairs of low_rank and of very large Kronecker factors"""
    size: int = 200
    """weights of a subnetwork: those of largest variance"""
    grid: int = 10
    """precisions from 1e-3 to 1e6 that validation tries"""

    AFTER_TRAINING: ClassVar = (
        "structure", "curvature", "subset", "per", "noise", "temperature", "predictive", "link", "draws", "samples",
        "rank", "size", "grid",
    )  # fmt: skip

    def __post_init__(self) -> None:
        check_ranges(
            self,
            prior_precision=either(above(0, finite=True), one_of(NAMED)),
            start=above(0, finite=True),
            per=one_of(("one", "layer", "weight")),
            noise=one_of(("given", "marglik", "validation")),
            temperature=above(0),
            structure=one_of(STRUCTURES),
            curvature=one_of(("auto", "ggn", "mc", "fisher")),
            predictive=one_of(WAYS),
            draws=whole(1),
            samples=whole(1),
            rank=whole(1),
            size=whole(1),
            grid=whole(2),
        )
        links.check_link(self.link)
        if self.per != "one" and self.prior_precision not in {"auto", "marglik"}:
            raise ValueError(f"laplace.per must be 'one' unless prior_precision is 'marglik'; got {self.per!r}.")
        if self.per == "weight" and self.structure in {"kron", "last_layer"}:
            raise ValueError(
                f"laplace.per must be 'one' or 'layer' for structure={self.structure!r}, whose factors take one "
                "precision each; got 'weight'."
            )

    @property
    def precision(self) -> float:
        """The prior's precision in the training objective."""
        return float(self.start if isinstance(self.prior_precision, str) else self.prior_precision)

    def fit(self, problem: Problem) -> Posterior:
        """Train to the mode, then fit the Gaussian."""
        self.check(problem.likelihood, problem.validation)
        prior = prior_of(f"normal(0, {self.precision**-0.5!r})")
        mode = fit_members("laplace", self, problem, 1, prior=prior)
        _check_buffers(mode.weights.buffers)
        given = problem.likelihood, problem.data, problem.validation
        return self.around(mode.model, mode.theta[0], *given, mode.facts, problem.reporter)

    def resolved(self, validation: Data | None) -> Laplace:
        """With "auto" decided."""
        if self.prior_precision != "auto":
            return self
        return replace(self, prior_precision="marglik" if validation is None or self.per != "one" else "validation")

    def check(self, likelihood: Likelihood, validation: Data | None) -> None:
        """Refuse what would only fail after training."""
        if validation is None and "validation" in {self.prior_precision, self.noise}:
            which = "prior_precision" if self.prior_precision == "validation" else "noise"
            raise ValueError(f"laplace.{which}='validation' needs validation data; got none.")
        if self.noise != "given" and getattr(likelihood, "scale", None) is None:
            raise ValueError(
                "laplace.noise must be 'given' unless the likelihood is Gaussian with a known scale; got "
                f"{self.noise!r} with {likelihood}."
            )
        if self.predictive != "sampled":
            likelihood.predictive(GaussianOutputs(torch.zeros(1, 2), torch.zeros(1, 2)), self.link, 1)

    def around(
        self,
        model: nn.Module,
        mode: Tensor,
        likelihood: Likelihood,
        data: Data,
        validation: Data | None,
        facts: Mapping[str, Any],
        reporter: Reporter | None = None,
    ) -> Posterior:
        """The posterior around a mode (P,) of the model's trainable weights."""
        started = time.perf_counter()
        found = self.estimate(model, mode, likelihood, data, int(facts.get("seed", 0)), reporter)
        at = quadratic(found, mode, likelihood, data, self.per, self.temperature, Layout.of(model))

        def posterior(tuned: Tuned) -> Posterior:
            known = likelihood if tuned.sigma is None else replace(likelihood, scale=tuned.sigma)  # type: ignore[type-var]
            law = BlockGaussian(mode, found.places, tuple(tuned.blocks(at, mode)))
            ways: dict[str, Any] = {"predictive": self.predictive, "link": self.link}
            return Posterior(model, known, law, default_draws=self.draws, **ways)

        tuned = tune(self.resolved(validation), at, posterior, validation)
        seconds = float(facts.get("seconds", 0.0)) + time.perf_counter() - started
        made = tuned.facts(at) | {"curvature": found.kind, "log_likelihood": found.log_likelihood, "seconds": seconds}
        return replace(posterior(tuned), facts={**facts, **made})

    def estimate(
        self,
        model: nn.Module,
        mode: Tensor,
        likelihood: Likelihood,
        data: Data,
        seed: int = 0,
        reporter: Reporter | None = None,
        index: Tensor | None = None,
    ) -> Curvature:
        """The curvature at the mode; `index` are the weights of a subnetwork that is chosen already."""
        flat = FlatModel(model)
        flat.load(mode)
        network = flat.module.eval()
        network.zero_grad(set_to_none=True)
        _check_outputs(network, data)
        names = None if self.subset == "*" else self.subset
        form = self.structure
        if form == "last_layer":
            names, form = "last_layer", self._last_layer(network, data)
        return curvatures.estimate(
            network,
            likelihood,
            data,
            form,
            kind=None if self.curvature == "auto" else self.curvature,
            names=names,
            samples=self.samples,
            seed=seed,
            rank=self.rank,
            size=self.size,
            index=index,
            reporter=reporter,
        )

    @staticmethod
    def _last_layer(model: nn.Module, data: Data) -> Literal["full", "kron"]:
        few = data.take(slice(0, 3)).inputs
        device = device_of(model)
        names = last_layer.names_of(model, map_inputs(few, lambda x: x.to(device)))
        weights = sum(p.numel() for name, p in trainable(model).items() if name in names)
        return "full" if weights <= SMALL else "kron"


def laplace(
    model: nn.Module,
    data: DataLike,
    *,
    likelihood: Likelihood | str,
    validation: DataLike | None = None,
    seed: int = 0,
    progress: bool | None = None,
    **settings: Any,
) -> Posterior:
    """The Laplace posterior around a model that is trained already; the model is left as it is.

        posterior = bayesformer.laplace(model, (x, y), likelihood="categorical", structure="last_layer")

    Args:
        model: in eval mode, at a mode of its loss; best trained with weight decay, which the prior should resemble.
        data: the training data.
        likelihood: "categorical", "gaussian", "bernoulli", or an object from `bayesformer.likelihoods`.
        validation: data to choose the prior's precision on, for prior_precision="validation".
        seed: of labels drawn for the curvature.
        progress: show progress bars; by default on a terminal.
        settings: of `Laplace`: structure, subset, prior_precision, predictive, link and the others.
    """
    if model.training:
        raise ValueError(
            "model must be in eval mode, for its dropout would make the curvature random; got one that is training. "
            "Call model.eval() first."
        )
    method, known = Laplace(**settings), as_likelihood(likelihood)
    own, train = copy.deepcopy(model), as_data(data, "data")
    held = None if validation is None else as_data(validation, "validation")
    method.check(known, held)
    check_problem(own, Problem(own, known, train, held))
    _check_buffers(dict(own.named_buffers()))
    facts = {
        "method": {"name": "laplace", **asdict(method)},
        "seed": seed,
        "num_data": len(train),
        "data": train.fingerprint(),
        "epochs": [0],
        "best_epoch": [0],
        "seconds": 0.0,
    }
    mode = Layout.of(own).pack(dict(own.named_parameters()))
    with bars(progress) as reporter:
        return method.around(own, mode, known, train, held, facts, reporter)


def _check_outputs(model: nn.Module, data: Data) -> None:
    """One forward pass over the data: a NaN would only show as a matrix without eigenvalues, much later."""
    bad, data = 0, data.to(device_of(model))
    with torch.inference_mode():
        size = apply(model, data.take(slice(0, 1)).inputs).numel()
        for batch in data.chunks(max(1, min(256, OUTPUTS // size))):
            bad += int((~torch.isfinite(apply(model, batch.inputs))).flatten(1).any(1).sum())
    if bad:
        raise ValueError(f"model's outputs must be finite on the data; {bad} of {len(data)} examples have NaN or inf.")


def _check_buffers(buffers: Mapping[str, Tensor]) -> None:
    averages = [name for name in buffers if "running" in name]
    if averages:
        raise ValueError(
            f"laplace needs a model without running averages, which a posterior over weights does not hold; "
            f"this one has {averages[0]!r}. Use LayerNorm."
        )

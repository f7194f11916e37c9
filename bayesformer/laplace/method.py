"""Laplace's method: train a network, then put a Gaussian around it whose precision is the curvature plus the prior."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, Literal

from torch import Tensor, nn

from bayesformer.core.ambient_autocast import without_autocast
from bayesformer.core.doubts import recorded, warn_of, with_doubts
from bayesformer.core.errors import unknown_name
from bayesformer.core.memory import total_memory
from bayesformer.core.progress import bars
from bayesformer.core.rules import above, check_ranges, either, one_of, whole
from bayesformer.core.seeds import generator
from bayesformer.core.settings import LATER
from bayesformer.data import Batches, as_batches
from bayesformer.laplace import last_layer
from bayesformer.laplace.choosing import Tuned, quadratic, tune
from bayesformer.laplace.earlier import posterior_after, trained_mode
from bayesformer.laplace.estimate import Curvature, estimate
from bayesformer.laplace.mode_search import FoundMode, inferred, mode_doubts, nearest_mode, normal, output_numbers
from bayesformer.laplace.predictive_doubts import of_choice, of_predictions
from bayesformer.laws import GaussianLaw
from bayesformer.likelihoods import Likelihood, as_likelihood, links
from bayesformer.likelihoods.links import Link
from bayesformer.model.modes import check_eval
from bayesformer.model.space import Choice
from bayesformer.posterior import Posterior
from bayesformer.predict.one_pass.refusals import refuse_attention
from bayesformer.predict.ways import WAYS, Way
from bayesformer.train.coordinates import at_joint_mode
from bayesformer.train.members import facts_of
from bayesformer.train.newton import FEW
from bayesformer.train.problem import Problem, settings_of
from bayesformer.train.prototype import Prototype, Start
from bayesformer.train.recipe import find_modes, posterior_of
from bayesformer.train.rounding import rounding_facts

STRUCTURES = ("auto", "kron", "diag", "full", "block", "low_rank", "subnetwork", "last_layer")
NAMED = ("auto", "marglik", "validation")  # ways to choose the prior's precision
MATRICES = 5  # of P by P numbers in float64 that a full curvature has in memory: itself, its eigenvectors, factors
LONG = 4000  # weights above which its eigenvectors take minutes, which is said
SMALL = 2000  # weights up to which the last layer has one dense block


def refuse_matrix(size: int, prototype: Prototype) -> None:
    """An error where a matrix over all weights, and its factors, would not fit in half of the memory."""
    there = total_memory(prototype.skeleton.device)
    takes = MATRICES * size * size * 8
    if takes > there / 2:
        raise ValueError(
            f"laplace.structure must not be 'full' for {size} weights, whose matrix and its factors take "
            f"{takes / 2**30:.1f} GiB, more than half of {there / 2**30:.1f} GiB. Use 'kron', 'diag' or 'low_rank', or "
            "a smaller subset."
        )
    if size > LONG:
        log.warning("laplace.structure='full' decomposes a matrix over %d weights, which takes minutes; 'kron' seconds",
                    size)  # fmt: skip


log = logging.getLogger("bayesformer")


@dataclass(frozen=True)
class Laplace:
    """Laplace approximation: a Gaussian around one trained network, from the curvature of its loss."""

    structure: Literal["auto", "kron", "diag", "full", "block", "low_rank", "subnetwork", "last_layer"] = "auto"
    """form of the curvature: Kronecker factors per matrix, one number per weight, one dense matrix, a dense matrix per
    module, the top eigenpairs, a dense matrix over few weights, or the last layer alone (dense if small, else kron);
    auto is full for at most 500 weights, else kron"""
    curvature: Literal["auto", "ggn", "mc", "fisher"] = "auto"
    """exact Gauss-Newton, Monte Carlo with labels from the model, or the empirical Fisher of the true labels; auto is
    ggn, but mc where that would take long: for outputs per token or more than 100 classes of large models and data"""
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
    often underfit; streamlined: nearly the linearised outputs, with the spread of draws, for a few forward passes;
    one_pass: moments carried through one forward pass, far too small on trained transformers"""
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
    widest: int = field(default=4096, metadata=LATER)
    """Kronecker factors longer than this are kept by their top `rank` eigenpairs, which is cheaper for wide inputs of
    LoRA adapters; what share of a factor this leaves out is in the posterior's facts ("cut")"""

    AFTER_TRAINING: ClassVar = (
        "structure", "curvature", "subset", "per", "noise", "temperature", "predictive", "link", "draws", "samples",
        "rank", "size", "grid", "widest",
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
            widest=whole(1),
        )
        links.check_link(self.link)
        if self.structure == "last_layer" and self.subset not in {"*", "last_layer"}:
            raise ValueError(
                f"laplace.subset must be '*' for structure='last_layer', which chooses the weights itself; got "
                f"{self.subset!r}. For others use subset with structure='full', 'kron' or 'diag'."
            )
        if self.per != "one" and self.prior_precision not in {"auto", "marglik"}:
            raise ValueError(f"laplace.per must be 'one' unless prior_precision is 'marglik'; got {self.per!r}.")
        if self.per == "weight" and self.structure in {"auto", "kron", "last_layer"}:
            raise ValueError(
                f"laplace.per must be 'one' or 'layer' for structure={self.structure!r}, whose factors take one "
                "precision each; got 'weight'."
            )

    @property
    def precision(self) -> float:
        """The prior's precision in the training objective."""
        return float(self.start if isinstance(self.prior_precision, str) else self.prior_precision)

    def fit(self, problem: Problem) -> Posterior:
        """Train to the mode, then fit the Gaussian; an earlier posterior takes the place of the prior."""
        self.check(problem.likelihood, problem.validation)
        if problem.prior is not None and self.noise != "given":
            raise ValueError(
                f"laplace.noise must be 'given' where an earlier posterior is the prior; got {self.noise!r}."
            )
        prototype = Prototype(problem)
        return self.structured(prototype)._fit(problem, prototype)

    def _fit(self, problem: Problem, prototype: Prototype) -> Posterior:
        self.check_model(prototype)
        if problem.prior is not None:
            mode, stage = trained_mode(self, prototype)
            facts = facts_of("laplace", self, prototype, stage)
            return posterior_after(self, prototype, mode, problem.seed, facts)
        modes = find_modes(prototype, "laplace", normal(self.precision), 1.0)
        assert modes.stage is not None
        facts = facts_of("laplace", self, prototype, modes.stage)
        prior = normal(self.precision * self.temperature)
        modes = at_joint_mode(prototype, modes, inferred(self, prototype).names, prior)
        found = nearest_mode(self, prototype, modes.start(0), prior)
        return self.posterior_at(prototype, found, facts, move=True)

    def fit_trained(self, problem: Problem) -> Posterior:
        """The Gaussian around a model that is trained already, which stays where it is."""
        self.check(problem.likelihood, problem.validation)
        prototype = Prototype(problem)
        chosen = self.structured(prototype)
        chosen.check_model(prototype)
        facts = {
            "method": {"name": "laplace", **settings_of(chosen)},
            "seed": problem.seed,
            "num_data": problem.num_data,
            "data": problem.data.fingerprint(),
            "epochs": [0],
            "best_epoch": [0],
            "seconds": 0.0,
            "init": "given",
        }
        return chosen.posterior_around_mode(prototype, prototype.start(0), facts)

    def structured(self, prototype: Prototype) -> Laplace:
        """The same method with structure="auto" decided: by the number of weights, or as an earlier posterior."""
        if self.structure != "auto":
            return self
        if prototype.problem.prior is not None:
            earlier = prototype.problem.prior.facts.get("method", {}).get("structure", "kron")
            return replace(self, structure=earlier if earlier in STRUCTURES[1:] else "kron")
        small = self.per == "one" and inferred(self, prototype).size <= FEW
        return replace(self, structure="full" if small else "kron")

    def resolved(self, validation: Batches | None) -> Laplace:
        """The same method with prior_precision="auto" decided: by validation data where there are any."""
        if self.prior_precision != "auto":
            return self
        return replace(self, prior_precision="marglik" if validation is None or self.per != "one" else "validation")

    def check(self, likelihood: Likelihood, validation: Batches | None) -> None:
        """Refuse what would only fail after training."""
        if validation is None and "validation" in {self.prior_precision, self.noise}:
            which = "prior_precision" if self.prior_precision == "validation" else "noise"
            raise ValueError(f"laplace.{which}='validation' needs validation data; got none.")
        if self.noise != "given" and likelihood.noise_scale is None:
            raise ValueError(
                "laplace.noise must be 'given' unless the likelihood is Gaussian with a known scale; got "
                f"{self.noise!r} with {likelihood}."
            )
        if self.predictive != "sampled":
            links.check_link(self.link, likelihood.links)

    def check_model(self, prototype: Prototype) -> None:
        """Refuse a model without curvature, such weights or such a layer, or with attention it cannot predict with."""
        prototype.refuse_reentrant("laplace")
        if "last_layer" in (self.subset, self.structure):
            module = prototype.skeleton.shell(gradients=False).module.eval()
            last_layer.space_of(module, prototype.space, prototype.trial_batch.inputs)
        else:
            size = prototype.space.select(self.subset).size
            if self.structure == "full":
                refuse_matrix(size, prototype)
        if self.predictive == "one_pass":
            refuse_attention(prototype.prepared)

    def posterior_around_mode(self, prototype: Prototype, mode: Start, facts: Mapping[str, Any]) -> Posterior:
        """The posterior around the prototype's weights as they are, with how far they are from a mode."""
        return self.posterior_at(prototype, FoundMode(mode, None), facts)

    def posterior_at(
        self, prototype: Prototype, around: FoundMode, facts: Mapping[str, Any], move: bool = False
    ) -> Posterior:
        """The posterior around a mode; with `move` around that under the prior that is chosen, where it is cheap.

        A prior chosen on validation data was judged with the weights as they are, and leaves them there.
        """
        started, likelihood, seed = time.perf_counter(), prototype.likelihood, int(facts.get("seed", 0))
        mode = around.start
        found = self.estimate(prototype, mode, seed)
        at = quadratic(found, mode.theta, likelihood, self.per, self.temperature, prototype.space)
        buffers = {name: value[None] for name, value in mode.buffers.items()}

        def posterior(tuned: Tuned) -> Posterior:
            known = likelihood if tuned.sigma is None else likelihood.with_noise_scale(tuned.sigma)
            law = GaussianLaw(mode.theta, found.places, tuple(tuned.blocks(at, mode.theta)), buffers)
            ways: dict[str, Any] = {"predictive": self.predictive, "link": self.link, "default_draws": self.draws}
            return replace(posterior_of(prototype, law, {}, **ways), likelihood=known)

        resolved = self.resolved(prototype.validation)
        tuned = tune(resolved, at, posterior, prototype.validation)
        move = move and resolved.prior_precision != "validation" and self.per == "one"
        precision = self.precision * self.temperature
        chosen = float(tuned.precisions[0]) / float(at.scale(tuned.sigma))
        if move and around.decrement is not None and not math.isclose(chosen, precision):
            precision = chosen
            around = nearest_mode(self, prototype, mode, normal(precision))
            mode = around.start
            found = self.estimate(prototype, mode, seed, _index(found))
            at = quadratic(found, mode.theta, likelihood, self.per, self.temperature, prototype.space)
        seconds = float(facts.get("seconds", 0.0)) + time.perf_counter() - started
        made = tuned.facts(at) | {"curvature": found.kind, "log_likelihood": found.log_likelihood, "seconds": seconds}
        if found.lost:
            made["cut"] = {"factors": len(found.lost), "largest_share_lost": max(share for _, share in found.lost)}
        result = posterior(tuned)
        assert isinstance(result.law, GaussianLaw)
        made |= rounding_facts(prototype.skeleton, result.law)
        doubts, numbers = mode_doubts(self, prototype, result.law, around, normal(precision))
        if self.per == "one":
            about = output_numbers(self, prototype, result.law, mode, normal(chosen), 1 / float(at.scale(tuned.sigma)))
            doubts, numbers = doubts + about[0], numbers | about[1]
        whole = {**facts, **made, **numbers}
        doubts += of_choice(resolved, tuned) + of_predictions(replace(result, facts=whole), prototype)
        return replace(result, facts=with_doubts(whole | recorded(doubts), result.doubts))

    def estimate(self, prototype: Prototype, mode: Start, seed: int = 0, index: Tensor | None = None) -> Curvature:
        """The curvature at the mode; `index` are the weights of a subnetwork that is chosen already."""
        shell = prototype.skeleton.shell(gradients=False)
        shell.load(mode.theta)
        shell.load_buffers(mode.buffers)
        module = shell.module.eval()
        subset: Choice = None if self.subset == "*" else self.subset
        form = self.structured(prototype).structure
        assert form != "auto"
        if form == "last_layer":
            chosen = last_layer.space_of(module, prototype.space, prototype.trial_batch.inputs)
            subset, form = chosen.names, "full" if chosen.size <= SMALL else "kron"
        with prototype.evaluation_randomness.passing(generator(seed, "curvature", device=shell.theta.device)):
            return estimate(
                module,
                prototype.likelihood,
                prototype.whole,
                form,
                kind=None if self.curvature == "auto" else self.curvature,
                subset=subset,
                samples=self.samples,
                seed=seed,
                rank=self.rank,
                widest=self.widest,
                size=self.size,
                index=index,
                reporter=prototype.problem.reporter,
                space=prototype.space,
            )


def _index(found: Curvature) -> Tensor | None:
    """The weights of a subnetwork, which stay those that were chosen."""
    place = found.places[0]
    return place if len(found.places) == 1 and isinstance(place, Tensor) else None


@without_autocast
def laplace(
    model: nn.Module,
    data: Any,
    *,
    likelihood: Likelihood | str,
    validation: Any = None,
    infer: Choice = None,
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
        infer: which weights are inferred, as for `fit`; by default those that require a gradient.
        seed: of labels drawn for the curvature.
        progress: show progress bars; by default on a terminal.
        settings: of `Laplace`: structure, subset, prior_precision, predictive, link and the others.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(
            f"model must be a module that is trained already; got {type(model).__name__}. bf.fit(model, data, "
            "method=Laplace()) trains one that a function builds."
        )
    check_eval(model, "dropout and running averages would make curvature random")
    names = [setting.name for setting in fields(Laplace)]
    for name in settings:
        if name not in names:
            raise unknown_name("setting of laplace", name, names)
    method, known = Laplace(**settings), as_likelihood(likelihood)
    with bars(progress) as reporter:
        held = None if validation is None else as_batches(validation, "validation")
        problem = Problem(model, known, as_batches(data, "data"), held, seed=seed, infer=infer, reporter=reporter)
        posterior = method.fit_trained(problem)
    warn_of(posterior.doubts)
    return posterior

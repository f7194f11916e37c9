"""Continual learning: books one after another, each posterior the prior of the next (Duffield et al. 2024, 5.2).

A language model learns books by low-rank adapters, and forgets the first while it learns the others. Compared are

    plain     every book from where the last one ended, nothing kept
    laplace   a Gaussian around what was learned is the prior of the next book (online Laplace, EWC with one penalty)
    alone     every book from the pretrained model
    offline   all books at once, which no online learner can

The curvature of a book is counted `strength` times: at 1 the prior is the Bayesian one, which is too weak to hold
anything here; it is chosen on validation text of the first two books, after the second. Adapters are on query, key and
output of the last attention layer (place "last", as in the paper; the layers below are computed once) or on query and
value of all layers ("all"). A cell is one episode of one learner. The figure is the paper's 5 and 6.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bayesformer.bench.records import POSTERIORS
from bayesformer.core.global_random import global_streams
from bayesformer.core.seeds import fold
from bayesformer.data import Batches, as_batches
from bayesformer.datasets.books import Book
from bayesformer.fitting import fit
from bayesformer.laplace.earlier import posterior_after, trained_mode
from bayesformer.laplace.method import Laplace
from bayesformer.laplace.mode_search import FoundMode
from bayesformer.laws import Diagonal, GaussianLaw
from bayesformer.likelihoods import NextToken
from bayesformer.posterior import Posterior
from bayesformer.study.cached_trunk import TopLayers, trunk_states
from bayesformer.study.cell_log import CellLog, StudyCell
from bayesformer.train.problem import Problem
from bayesformer.train.prototype import Prototype, Start
from bayesformer.train.training import Training

TASK = "continual/books"
BOOKS = ("infantry_drill_regulations", "kim", "american_adventures", "house_of_mirth")
STRENGTHS = (1.0, 30.0, 300.0, 3000.0)
PLACES = ("last", "all")
STRUCTURES = ("diag", "kron")
RATES = {"last": (2e-3, 1e-2), "all": (2e-3,)}
"""learning rates to choose from, by validation text of the first two books, each learned alone"""


@dataclass(frozen=True)
class Sizes:
    """How much is read, learned and judged; the same for every learner."""

    length: int = 64
    """tokens per sequence"""
    steps: int = 60
    """steps per book"""
    batch: int = 4
    """sequences per step"""
    curved: int = 32
    """training sequences from which the curvature is estimated"""
    validation: int = 8
    """sequences per book to choose the strength by"""
    test: int = 16
    """sequences per book to judge by"""

    @property
    def counts(self) -> tuple[int, int, int]:
        """Sequences of a book: to learn once each, to choose by, to judge by."""
        return self.steps * self.batch, self.validation, self.test


@dataclass(frozen=True)
class Learner:
    """A way to learn one book after another."""

    kind: str
    """base, plain, alone, offline or laplace"""
    place: str
    """which layers have adapters: last or all"""
    lr: float = 0.0
    structure: str = ""
    """of the curvature, for laplace"""
    strength: float = 0.0
    """how often the curvature counts, for laplace"""

    @property
    def name(self) -> str:
        """A short name for the rows of tables."""
        return f"laplace, {self.structure}" if self.kind == "laplace" else self.kind


@dataclass(frozen=True)
class Shelf:
    """The books in order and the pretrained model, with what both places of adapters need of them."""

    model: Any
    """a causal language model of the Llama architecture"""
    books: Sequence[Book]
    names: Sequence[str] = BOOKS
    sizes: Sizes = field(default_factory=Sizes)
    kept: dict[tuple[str, int, str], Tensor] = field(default_factory=dict, compare=False, repr=False)

    @cached_property
    def top(self) -> int:
        """The number of the last decoder layer."""
        return len(self.model.model.layers) - 1

    def adapted(self, place: str, seed: int) -> nn.Module:
        """The model with new adapters, which change nothing yet: B is 0."""
        from peft import LoraConfig, get_peft_model

        with global_streams(fold(seed, "adapters")):
            if place == "last":
                chosen = LoraConfig(r=8, lora_alpha=32, target_modules=["q_proj", "k_proj", "o_proj"])
                return get_peft_model(TopLayers.of(self.model, self.top), chosen)
            chosen = LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
            return get_peft_model(deepcopy(self.model), chosen)  # which changes the model it is given

    def inputs(self, place: str, book: int, part: str) -> Any:
        """What the adapted model is given for a part of a book: token numbers, or states below its last layer."""
        ids = getattr(self.books[book], part)
        if place == "all":
            return {"input_ids": ids}
        key = place, book, part
        if key not in self.kept:
            self.kept[key] = trunk_states(self.model, ids, self.top)
        return self.kept[key]

    def data(self, place: str, books: Sequence[int], count: int | None = None) -> Batches:
        """Training data of some books together, the first `count` sequences of each."""
        parts = [self.inputs(place, book, "train") for book in books]
        labels = torch.cat([self.books[book].train[:count] for book in books])
        if place == "all":
            return as_batches({"input_ids": labels, "labels": labels}, "books")
        return as_batches((torch.cat([part[:count] for part in parts]), labels), "books")

    def losses(self, posterior: Posterior | None, place: str) -> dict[str, float]:
        """Mean negative log-likelihood of a token in the validation and test text of every book, at the mean."""
        found = {}
        for part in ("validation", "test"):
            for book in range(len(self.books)):
                ids = getattr(self.books[book], part)
                if posterior is None:
                    value = token_loss(self.adapted(place, 0).eval(), self.inputs(place, book, part), ids)
                else:
                    with posterior.at_mean.borrow() as shell:
                        value = token_loss(shell.module, self.inputs(place, book, part), ids)
                found[f"{part}/{book}"] = value
        return found


def token_loss(module: nn.Module, inputs: Any, ids: Tensor, batch: int = 8) -> float:
    """Mean negative log-likelihood of all tokens but the first of each sequence (N, T)."""
    total = 0.0
    with torch.no_grad():
        for start in range(0, len(ids), batch):
            rows = slice(start, start + batch)
            found = module(inputs[rows]) if isinstance(inputs, Tensor) else module(input_ids=inputs["input_ids"][rows])
            logits = found if isinstance(found, Tensor) else found.logits
            flat = logits[:, :-1].float().flatten(0, 1)
            total += float(F.cross_entropy(flat, ids[rows, 1:].flatten(), reduction="sum"))
    return total / (ids.shape[0] * (ids.shape[1] - 1))


# ---------------------------------------------------------------------------------------------------- one episode


def training_of(learner: Learner, sizes: Sizes) -> Training:
    """A constant rate and one pass over the book; momentum starts anew with every book.

    Gradients are not clipped: that of a strong prior would leave nothing of the likelihood's.
    """
    return Training(epochs=1, batch_size=sizes.batch, lr=learner.lr, schedule="constant", patience=0, clip=math.inf)


def learn(shelf: Shelf, learner: Learner, episode: int, seed: int, before: Posterior | None) -> Posterior:
    """The posterior after an episode, given that after the one before."""
    if learner.kind == "laplace":
        return _hold(shelf, learner, episode, seed, before)
    books = list(range(len(shelf.books))) if learner.kind == "offline" else [episode]
    model = shelf.adapted(learner.place, seed) if before is None else before.module().train()
    return fit(
        model,
        shelf.data(learner.place, books),
        likelihood=NextToken(),
        training=training_of(learner, shelf.sizes),
        seed=fold(seed, "episode", episode),
        progress=False,
    )


def _hold(shelf: Shelf, learner: Learner, episode: int, seed: int, before: Posterior | None) -> Posterior:
    """An episode of online Laplace; `before` is the plainly learned first book in the first episode.

    The first book is learned without a prior, by all learners alike, and a weak one, N(θ, 1), then takes its curvature.
    """
    assert before is not None
    sizes = shelf.sizes
    curved = min(sizes.curved, sizes.steps * sizes.batch)
    method = Laplace(
        structure=learner.structure,  # type: ignore[arg-type]
        curvature="mc",
        prior_precision=1.0,
        predictive="sampled",
        # sequences learned, over those whose curvature is taken, times the strength: how often each of these counts
        temperature=curved / (sizes.steps * sizes.batch * learner.strength),
    )
    prior = _wide(before) if episode == 0 else before
    model = shelf.adapted(learner.place, seed)
    problem = Problem(
        model,
        NextToken(),
        shelf.data(learner.place, [episode]),
        training=training_of(learner, sizes),
        seed=fold(seed, "episode", episode),
        prior=prior,
    )
    given = FoundMode(Start(prior.law.mean.clone(), {}), None)
    mode = given if episode == 0 else trained_mode(method, Prototype(problem))[0]
    few = replace(problem, data=shelf.data(learner.place, [episode], curved))
    facts = {"method": {"name": "laplace", **asdict(method)}, "seed": problem.seed}
    return posterior_after(method, Prototype(few), mode, problem.seed, facts)


def _wide(plain: Posterior) -> Posterior:
    """N(θ, 1) around weights that were found without a prior."""
    theta = plain.theta[0]
    law = GaussianLaw(theta, (slice(0, len(theta)),), (Diagonal(torch.ones_like(theta)),), {})
    return replace(plain, law=law, facts={**plain.facts, "num_data": 0})


# ---------------------------------------------------------------------------------------------------- all of them


@dataclass(frozen=True)
class Course:
    """The study: learners, what is stored, and where."""

    shelf: Callable[[], Shelf]
    folder: Path
    books: Sequence[str] = BOOKS
    sizes: Sizes = field(default_factory=Sizes)
    say: Callable[[str], None] = print

    @cached_property
    def log(self) -> CellLog:
        """The cells that are stored so far."""
        return CellLog(self.folder / "continual.jsonl")

    @cached_property
    def opened(self) -> Shelf:
        """The shelf, read when the first cell is missing."""
        return self.shelf()

    def cell(self, learner: Learner, episode: int, seed: int) -> StudyCell:
        """The cell of an episode of a learner."""
        settings = {**asdict(learner), "episode": episode, "books": list(self.books), **asdict(self.sizes)}
        return StudyCell(TASK, learner.kind, seed, settings)

    def stored(self, learner: Learner, episode: int, seed: int) -> dict[str, Any] | None:
        """The result of an episode, if it is there."""
        cell = self.cell(learner, episode, seed)
        return self.log.read().get((cell.key, seed))

    def run(self, learner: Learner, episode: int, seed: int) -> dict[str, Any]:
        """The result of an episode, done now unless it is stored."""
        known = self.stored(learner, episode, seed)
        if known is not None:
            return known
        started = time.perf_counter()
        posterior = None if learner.kind == "base" else self.posterior(learner, episode, seed)
        metrics = self.opened.losses(posterior, learner.place)
        cost = {"seconds": round(time.perf_counter() - started, 1)}
        tested = ", ".join(f"{metrics[f'test/{book}']:.3f}" for book in range(len(self.books)))
        self.say(f"{learner} after book {episode}, seed {seed}: {tested} ({cost['seconds']:.0f} s)")
        return self.log.add(self.cell(learner, episode, seed), metrics, cost)

    def posterior(self, learner: Learner, episode: int, seed: int) -> Posterior:
        """The posterior after an episode: the saved one, or made from the episode before."""
        folder = self.folder / POSTERIORS / f"{self.cell(learner, episode, seed).key}-seed{seed}"
        if (folder / "posterior.json").exists():
            return Posterior.load(folder, self.opened.adapted(learner.place, seed))
        found = learn(self.opened, learner, episode, seed, self._before(learner, episode, seed))
        found.save(folder)
        return found

    def _before(self, learner: Learner, episode: int, seed: int) -> Posterior | None:
        if learner.kind == "laplace":
            if episode == 0:
                return self.posterior(Learner("plain", learner.place, learner.lr), 0, seed)
            return self.posterior(learner, episode - 1, seed)
        if learner.kind != "plain" or episode == 0:
            return None
        return self.posterior(learner, episode - 1, seed)

    def rate(self, place: str, rates: Sequence[float], seed: int) -> float:
        """The learning rate with the least validation loss on the first two books, each learned alone."""
        if len(rates) == 1:
            return rates[0]
        found = {}
        for rate in rates:
            cells = [self.run(Learner(kind, place, rate), i, seed) for i, kind in enumerate(("plain", "alone"))]
            found[rate] = sum(cell["metrics"][f"validation/{book}"] for book, cell in enumerate(cells))
        return min(found, key=lambda rate: found[rate])

    def strength(self, place: str, structure: str, rate: float, strengths: Sequence[float], seed: int) -> float:
        """The strength with the least validation loss on the first two books after the second, of one seed."""
        found = {}
        for strength in strengths:
            metrics = self.run(Learner("laplace", place, rate, structure, strength), 1, seed)["metrics"]
            found[strength] = metrics["validation/0"] + metrics["validation/1"]
        return min(found, key=lambda strength: found[strength])

    def learners(self, place: str, rate: float, chosen: dict[str, float]) -> Iterator[tuple[Learner, list[int]]]:
        """Every learner of a place and the episodes of it that are shown."""
        last = len(self.books) - 1
        yield Learner("base", place), [-1]
        yield Learner("plain", place, rate), list(range(last + 1))
        for structure, strength in chosen.items():
            yield Learner("laplace", place, rate, structure, strength), list(range(last + 1))
        yield Learner("alone", place, rate), list(range(1, last + 1))  # the first book is plain's
        yield Learner("offline", place, rate), [last]

    def all(self, places: Sequence[str], seeds: Sequence[int], strengths: Sequence[float] = STRENGTHS) -> None:
        """Do what is missing: the first seed chooses the strengths, for all seeds."""
        for seed in seeds:
            for place in places:
                rate = self.rate(place, RATES[place], seeds[0])
                chosen = {s: self.strength(place, s, rate, strengths, seeds[0]) for s in STRUCTURES}
                self.say(f"{place}: rate {rate:g}, strengths {chosen}")
                for learner, episodes in self.learners(place, rate, chosen):
                    for episode in episodes:
                        self.run(learner, episode, seed)


def open_shelf(books: Sequence[str] = BOOKS, sizes: Sizes | None = None) -> Shelf:
    """SmolLM2 in bfloat16 and the books, from the packages and the data folder."""
    from bayesformer.datasets.books import load_book
    from bayesformer.datasets.packaged_models import smollm2

    known = sizes or Sizes()
    model, tokenizer = smollm2(torch.bfloat16)
    return Shelf(model, [load_book(name, tokenizer, known.length, known.counts) for name in books], books, known)

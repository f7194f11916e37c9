"""Does a language model know what it does not know? (Duffield et al. 2024, 5.3 and appendix F)

SmolLM2 learns English science text, by adapters on all layers (place "lora") or in its whole last attention layer
(place "last", as in the paper; the layers below are computed once). Then it is asked to go on with 100 scientific
statements, and with prompts that are foreign to it. Compared are

    base       the pretrained model
    tuned      one network, trained by Adam
    ensemble   eight of them
    parallel   the last state of eight SGHMC chains
    serial     eight states of one SGHMC chain

all networks with the same number of steps, the long chain with 2.5 times as many. A cell is one network, chain or
evaluation; scores of all prompts are stored, so that intervals can be made of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bayesformer.bench.records import POSTERIORS
from bayesformer.core.global_random import global_streams
from bayesformer.core.seeds import fold
from bayesformer.data import as_batches
from bayesformer.fitting import fit
from bayesformer.likelihoods import NextToken
from bayesformer.methods import Mle, Sghmc
from bayesformer.posterior import Posterior
from bayesformer.study.cached_trunk import TopLayers, trunk_states
from bayesformer.study.cell_log import CellLog, StudyCell
from bayesformer.study.continual import token_loss
from bayesformer.study.prompt_scores import Logits, score_prompts
from bayesformer.train.training import Training

TASK = "unknown/prompts"
PLACES = ("lora", "last")
WAYS = ("base", "tuned", "ensemble", "parallel", "serial")
RATES = {"lora": 2e-3, "last": 5e-4}
"""of Adam"""
STEPS_OF_CHAINS = {"lora": (1e-2, 3e-3), "last": (3e-3, 1e-3)}
"""step sizes of SGHMC to choose from, by the validation loss of the first chain; friction forgets a tenth per step"""
TUNED_SEEDS = 3


@dataclass(frozen=True)
class ScienceSizes:
    """How much is learned, by how many members."""

    length: int = 64
    """tokens per sequence"""
    train: int = 160
    """sequences to learn"""
    validation: int = 40
    """sequences to choose by"""
    batch: int = 4
    epochs: int = 2
    """of a network; half of them are the search for the mode where a chain follows"""
    serial_epochs: int = 5
    """of the one long chain, the search of the mode included"""
    members: int = 8


@dataclass(frozen=True)
class Questions:
    """Prompts by set as token numbers, the first tokens of the missing words, and text to learn."""

    prompts: dict[str, list[list[int]]]
    answers: dict[str, list[int]]
    train: Tensor
    validation: Tensor


@dataclass(frozen=True)
class Pupil:
    """The pretrained model and how it is made ready for a place."""

    model: Any
    questions: Questions
    kept: dict[str, Tensor] = field(default_factory=dict, compare=False, repr=False)

    @cached_property
    def top(self) -> int:
        """The number of the last decoder layer."""
        return len(self.model.model.layers) - 1

    @cached_property
    def last_layer(self) -> TopLayers:
        """The last layer and the head in float32, copies: half precision would round small steps of its weights."""
        return deepcopy(TopLayers.of(self.model, self.top)).float()

    def ready(self, place: str, seed: int) -> nn.Module:
        """The model whose learned weights require gradients: new adapters, or the whole last attention layer."""
        if place == "last":
            found = self.last_layer.fresh()
            for name, weight in found.named_parameters():
                weight.requires_grad_("self_attn" in name)
            return found
        from peft import LoraConfig, get_peft_model

        chosen = LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
        with global_streams(fold(seed, "adapters")):
            return get_peft_model(deepcopy(self.model), chosen)

    def given(self, place: str, ids: Tensor) -> Tensor:
        """Token numbers, or the states below the last layer."""
        return ids if place == "lora" else trunk_states(self.model, ids, self.top).float()

    def text(self, place: str, part: str) -> Tensor:
        """A part of the text as token numbers or as states below the last layer, computed once and kept."""
        key = f"{place} {part}"
        if key not in self.kept:
            self.kept[key] = self.given(place, getattr(self.questions, part))
        return self.kept[key]


def logits_of(module: nn.Module) -> Logits:
    """A model as a function from token numbers or states to logits."""

    def logits(given: Tensor) -> Tensor:
        found = module(given) if given.is_floating_point() else module(input_ids=given)
        return found if isinstance(found, Tensor) else found.logits

    return logits


@dataclass(frozen=True)
class Examination:
    """The study: networks, chains and evaluations, stored or made when they are missing."""

    open_pupil: Callable[[], Pupil]
    folder: Path
    sizes: ScienceSizes = field(default_factory=ScienceSizes)
    say: Callable[[str], None] = print

    @cached_property
    def log(self) -> CellLog:
        """The cells that are stored so far."""
        return CellLog(self.folder / "unknown.jsonl")

    @cached_property
    def pupil(self) -> Pupil:
        """The model and the prompts, read when the first cell is missing."""
        return self.open_pupil()

    # ------------------------------------------------------------------------------------- networks and chains

    def run_cell(self, place: str, way: str, lr: float, member: int) -> StudyCell:
        """The cell of one training of a way."""
        return StudyCell(TASK, way, member, {"place": place, "lr": lr, "part": "training", **asdict(self.sizes)})

    def trained(self, place: str, way: str, lr: float, member: int) -> Posterior:
        """One network, one state of a chain, or several states of one; the saved one if it is there."""
        cell = self.run_cell(place, way, lr, member)
        folder = self.folder / POSTERIORS / f"{cell.key}-seed{member}"
        if (folder / "posterior.json").exists():
            return Posterior.load(folder, self.pupil.ready(place, member))
        started, sizes, model = time.perf_counter(), self.sizes, self.pupil.ready(place, member)
        given, ids = self.pupil.text(place, "train"), self.pupil.questions.train
        inputs = given if given.is_floating_point() else {"input_ids": given}
        method, epochs = self._method(way, lr)
        posterior = fit(
            model,
            as_batches((inputs, ids), "science text"),
            likelihood=NextToken(),
            method=method,
            training=Training(epochs=epochs, batch_size=sizes.batch, lr=RATES[place], schedule="constant", patience=0),
            seed=member,
            progress=False,
        )
        posterior.save(folder)
        metrics = {"validation": self._validation(place, posterior)}
        cost = {"seconds": round(time.perf_counter() - started, 1)}
        self.log.add(cell, metrics, cost)
        told = f"validation loss {metrics['validation']:.3f} ({cost['seconds']:.0f} s)"
        self.say(f"{place} {way} {lr:g} member {member}: {told}")
        return posterior

    def _method(self, way: str, lr: float) -> tuple[Any, int]:
        if way == "tuned":
            return Mle(), self.sizes.epochs
        chain = {"chains": 1, "lr": lr, "friction": 0.1 / lr, "burn_in": 0.0}
        if way == "parallel":
            return Sghmc(draws=1, warm_up=0.5, **chain), self.sizes.epochs  # type: ignore[arg-type]
        share = self.sizes.epochs / 2 / self.sizes.serial_epochs
        return Sghmc(draws=self.sizes.members, warm_up=share, **chain), self.sizes.serial_epochs  # type: ignore[arg-type]

    def _validation(self, place: str, posterior: Posterior) -> float:
        """Mean loss of a token of the validation text, under the first member."""
        shell = posterior.skeleton.shell(gradients=False)
        shell.load(posterior.theta[0])
        given, ids = self.pupil.text(place, "validation"), self.pupil.questions.validation
        inputs = given if given.is_floating_point() else {"input_ids": given}
        return token_loss(shell.module.eval(), inputs, ids)

    def validation_of(self, place: str, way: str, lr: float, member: int) -> float:
        """The stored validation loss of a training, which is done if it is missing."""
        cell = self.run_cell(place, way, lr, member)
        if (cell.key, member) not in self.log.read():
            self.trained(place, way, lr, member)
        return float(self.log.read()[cell.key, member]["metrics"]["validation"])

    def step_size(self, place: str) -> float:
        """The step size of SGHMC with the least validation loss, of the first parallel chain."""
        found = {lr: self.validation_of(place, "parallel", lr, 0) for lr in STEPS_OF_CHAINS[place]}
        return min(found, key=lambda lr: found[lr])

    # ------------------------------------------------------------------------------------------- evaluations

    def members(self, place: str, way: str, seed: int) -> Iterator[Posterior]:
        """Posteriors whose draws together are the members of a way."""
        count = self.sizes.members
        if way in {"tuned", "ensemble"}:
            for member in [seed] if way == "tuned" else range(count):
                yield self.trained(place, "tuned", RATES[place], member)
        elif way == "parallel":
            lr = self.step_size(place)
            for member in range(count):
                yield self.trained(place, "parallel", lr, member)
        else:
            yield self.trained(place, "serial", self.step_size(place), seed)

    def evaluate(self, place: str, way: str, seed: int = 0) -> dict[str, Any]:
        """Scores of all prompts under a way's members, stored or made now."""
        cell = StudyCell(TASK, way, seed, {"place": place, "part": "evaluation", **asdict(self.sizes)})
        known = self.log.read().get((cell.key, seed))
        if known is not None:
            return known
        started = time.perf_counter()
        thetas: list[Tensor] = []
        shell = None
        for posterior in () if way == "base" else self.members(place, way, seed):
            shell = shell or posterior.skeleton.shell(gradients=False)
            thetas += list(posterior.theta)
        if shell is None:
            models = [logits_of(self.pupil.ready(place, 0).eval())]
        else:
            module = logits_of(shell.module.eval())
            models = [_loaded(shell, theta, module) for theta in thetas]
        counts = sorted({k for k in (1, 2, 3, 4, 6, 8, len(models)) if k <= len(models)})
        figures: dict[str, Any] = {"counts": counts}
        for name, prompts in self.pupil.questions.prompts.items():
            answers = self.pupil.questions.answers.get(name)
            found = score_prompts(prompts, answers, lambda ids: self.pupil.given(place, ids), models, counts)
            figures[name] = {str(scores.members): scores.as_lists() for scores in found}
            figures[name]["tokens"] = [len(prompt) for prompt in prompts]
        metrics = {"members": float(len(models))}
        for name in self.pupil.questions.answers:
            metrics[f"loss/{name}"] = -sum(figures[name][str(len(models))]["log_prob"]) / len(figures[name]["tokens"])
        cost = {"seconds": round(time.perf_counter() - started, 1)}
        self.say(f"{place} {way} seed {seed}: {metrics} ({cost['seconds']:.0f} s)")
        return self.log.add(cell, metrics, cost, figures)

    def all(self, places: Sequence[str], ways: Sequence[str] = WAYS) -> None:
        """Do every evaluation that is missing."""
        for place in places:
            for way in ways:
                for seed in range(TUNED_SEEDS if way == "tuned" else 1):
                    self.evaluate(place, way, seed)


def _loaded(shell: Any, theta: Tensor, module: Logits) -> Logits:
    """The shell's model with these weights, loaded when it is called."""

    def logits(given: Tensor) -> Tensor:
        shell.load(theta)
        return module(given)

    return logits


def open_questions(sizes: ScienceSizes | None = None) -> Pupil:
    """SmolLM2 in bfloat16, the prompts and the science text, from the packages and the data folder."""
    from bayesformer.datasets import statements
    from bayesformer.datasets.books import windows
    from bayesformer.datasets.packaged_models import smollm2

    known = sizes or ScienceSizes()
    model, tokenizer = smollm2(torch.bfloat16)
    encode = lambda text: tokenizer(text)["input_ids"]  # noqa: E731
    text = torch.tensor(encode(statements.science_text()))
    cut = int(0.85 * len(text))
    sets = statements.prompt_sets(tokenizer)
    known_statements = statements.statements()
    answers = {
        "english": [encode(" " + s.word)[0] for s in known_statements],
        "samoan": [encode(" " + s.samoan_word)[0] for s in known_statements],
    }
    return Pupil(
        model,
        Questions(
            {name: [encode(prompt) for prompt in prompts] for name, prompts in sets.items()},
            answers,
            windows(text[:cut], known.length, known.train),
            windows(text[cut:], known.length, known.validation),
        ),
    )

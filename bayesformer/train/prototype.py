"""A model made ready for a method: prepared, walked once, tried on a few examples before any training."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from bayesformer.attention import family_weights
from bayesformer.core.seeds import generator, stream
from bayesformer.core.strategy import all_tensors
from bayesformer.core.types import Batch, Inputs, Params
from bayesformer.data.batches import Batches
from bayesformer.data.in_memory import batch_to
from bayesformer.data.inputs import first_tensor, map_inputs
from bayesformer.data.realisations import averaged
from bayesformer.layers.preparation import Preparation
from bayesformer.likelihoods.language import batches_for, check_tokens, resolve, warn_of_padding
from bayesformer.likelihoods.target_rows import check_rows
from bayesformer.model.adapters import adapters_of, virtual_tokens
from bayesformer.model.admission import check_names
from bayesformer.model.checkpoint_watch import CheckpointWatch
from bayesformer.model.modes import held_modules, noisy_modules, set_training
from bayesformer.model.probe import Probe, probe_training
from bayesformer.model.randomness import Randomness, find_randomness, pass_noise
from bayesformer.model.shell import Shell
from bayesformer.model.skeleton import Skeleton, shadow
from bayesformer.model.space import Space
from bayesformer.model.starting import draw_anew, redraw_untrained_adapters
from bayesformer.train.problem import Models, Problem

PRODUCT_EXAMPLES = 256  # per pass of a product with the curvature, at most
PRODUCT_NUMBERS = 2**23  # of all tensors of such a forward pass, 32 MiB in float32
GRADIENT_NUMBERS = 2**26  # the same of a gradient of all data, which keeps no more than they are
TRIAL_EXAMPLES = 2  # examples that a model is tried on
SOME_INPUTS = 32  # kept with a Gaussian posterior, for its calibration
log = logging.getLogger("bayesformer")


@dataclass(frozen=True)
class Start:
    """Where a member starts: its weights and its buffers."""

    theta: Tensor  # (P,)
    buffers: Params


class Prototype:
    """The model of a problem as a method trains it.

    Building one does everything that can go wrong before training: it chooses the weights, prepares the model, runs it
    on two examples, and sees that outputs, likelihood and targets fit together.
    """

    def __init__(
        self,
        problem: Problem,
        preparation: Preparation | None = None,
        dropout_rate: float | None = None,
        evaluation: bool = False,
    ) -> None:
        self.problem, self.evaluation = problem, evaluation
        own = () if preparation is None else preparation.changes
        self.preparation = Preparation((*problem.preparation.changes, *own))
        self.dropout_rate = dropout_rate
        with stream(problem.seed, "init", 0):
            self.model = problem.model if isinstance(problem.model, nn.Module) else problem.model()
            self.chosen = Space.of(self.model, problem.infer)
            _refuse_merged(self.model, self.chosen)
            self.prepared = self.preparation(shadow(self.model, self.chosen.names))
        self.space = Space.of(self.prepared)
        self.skeleton = Skeleton(self.prepared, self.space)
        self.data = batches_for(self.model, problem.data, problem.likelihood)
        self.validation = None
        if problem.validation is not None:
            self.validation = batches_for(self.model, problem.validation, problem.likelihood)
        self.likelihood = resolve(problem.likelihood, self.model, self.trial_batch)
        self._check(self.data, "train")
        if self.validation is not None:
            self._check(self.validation, "validation")

    @cached_property
    def whole(self) -> Batches:
        """The data for sums over all of them; random ones are averaged over several readings."""
        return averaged(self.data)

    @cached_property
    def trial_batch(self) -> Batch:
        """The first examples, on which the model is tried, on the device of the weights."""
        return batch_to(self.data.first(TRIAL_EXAMPLES), self.skeleton.device)

    @cached_property
    def example_numbers(self) -> int:
        """Numbers in all tensors that a forward pass makes of one example: how many examples a pass should take."""
        shell, batch = self.skeleton.shell(gradients=False), self.trial_batch
        return all_tensors(lambda: self.trial(shell, batch)) // len(batch.targets)

    @property
    def product_examples(self) -> int:
        """Examples per pass of a product with the curvature, which keeps a few times the tensors of a forward pass."""
        return self._examples_for(PRODUCT_NUMBERS)

    @property
    def gradient_examples(self) -> int:
        """Examples per pass of a gradient of all data."""
        return self._examples_for(GRADIENT_NUMBERS)

    def _examples_for(self, numbers: int) -> int:
        return max(1, min(PRODUCT_EXAMPLES, numbers // max(1, self.example_numbers)))

    @cached_property
    def some_inputs(self) -> Inputs:
        """Inputs of a few examples from all over the data where they can be read by index, else of the first."""
        whole = self.data.tensors
        if whole is None:
            return self.data.first(SOME_INPUTS).inputs
        count = len(first_tensor(whole.inputs))
        places = torch.linspace(0, count - 1, min(SOME_INPUTS, count), dtype=torch.float32, device="cpu")
        index = places.round().to(torch.int64)
        return map_inputs(whole.inputs, lambda x: x[index.to(x.device)])

    @cached_property
    def probed(self) -> Probe:
        """What a training pass does: weights it leaves out, buffers it changes."""
        shell = self.skeleton.shell()
        found = probe_training(shell, self.trial_batch.inputs)
        by_kl = family_weights(self.prepared)  # the KL of attention may depend on them
        unused = [name for name in found.unused if name not in by_kl]
        if unused:
            names = ", ".join(unused[:5]) + (" ..." if len(unused) > 5 else "")
            log.warning("outputs do not depend on %d inferred weights: %s", len(unused), names)
        return found

    @cached_property
    def held(self) -> tuple[str, ...]:
        """Modules that stay in evaluation mode while the others train: all of them, if `evaluation` was asked for."""
        if self.evaluation:
            return tuple(name for name, _ in self.prepared.named_modules())
        return self.held_by_default

    @cached_property
    def held_by_default(self) -> tuple[str, ...]:
        """Modules that stay in evaluation mode as the model was given and the training settings say."""
        fixed = self.problem.training.buffers == "fixed"
        return held_modules(self.prepared, self.space, self.probed.buffers_changed, fixed)

    @cached_property
    def noisy_held(self) -> tuple[str, ...]:
        """Modules that stay in evaluation mode in noisy prediction."""
        return noisy_modules(self.held, self.probed.buffers_changed)

    @property
    def moves_buffers(self) -> bool:
        """Whether training changes buffers (running averages), so that each member has its own."""
        return any(name.rpartition(".")[0] not in self.held for name in self.probed.buffers_changed)

    @cached_property
    def randomness(self) -> Randomness:
        """How a training pass with its backward pass draws random numbers."""
        shell = self.skeleton.shell()
        set_training(shell.module, self.held)
        return find_randomness(shell.module, lambda: shell(self.trial_batch.inputs), True, self.dropout_rate)

    @cached_property
    def noisy_in_training(self) -> bool:
        """Whether a pass in training mode would draw random numbers, as dropout does, where `held` lets it not."""
        shell = self.skeleton.shell()
        set_training(shell.module, self.held_by_default)
        return find_randomness(shell.module, lambda: shell(self.trial_batch.inputs)).kind != "none"

    def check_single(self) -> None:
        """Refuse batches of one example for a model that normalises by its batch, before anything is trained."""
        one, shell = batch_to(self.data.first(1), self.skeleton.device), self.skeleton.shell()
        set_training(shell.module, self.held)
        try:
            with torch.no_grad(), self.randomness.passing(generator(0, "single", device=self.skeleton.device)):
                shell(one.inputs)
        except ValueError as error:
            raise ValueError(
                "training.batch_size must be at least 2 for this model, whose training passes need several examples as "
                f"BatchNorm does ({error}); got 1. Or hold its averages with training.buffers='fixed'."
            ) from error

    @cached_property
    def is_reentrant(self) -> bool:
        """Whether a pass in evaluation mode has segments with re-entrant checkpointing, which have no curvature."""
        shell, watch = self.skeleton.shell(gradients=False), CheckpointWatch()
        shell.module.eval()
        with watch:
            self.trial(shell, self.trial_batch)
        return "reentrant" in watch.kinds

    def refuse_reentrant(self, name: str) -> None:
        """For methods that need curvature: refuse what torch.autograd.grad cannot go through, before training."""
        if self.is_reentrant:
            raise ValueError(
                f"{name} needs derivatives of the outputs in evaluation mode, which re-entrant checkpointing does not "
                "have; model must call torch.utils.checkpoint.checkpoint with use_reentrant=False; got True."
            )

    @cached_property
    def evaluation_randomness(self) -> Randomness:
        """How a pass in evaluation mode draws random numbers, as a small number of models do."""
        shell = self.skeleton.shell(gradients=False)
        shell.module.eval()
        with torch.no_grad():
            return find_randomness(shell.module, lambda: shell(self.trial_batch.inputs))

    def start(self, member: int) -> Start:
        """Where a member starts, as the problem's `init` says.

        A function that builds models gives every member new weights; its frozen weights are those of the first.
        """
        problem, given = self.problem, isinstance(self.problem.model, nn.Module)
        if member == 0 and not given and problem.init == "given":
            return self._values(self.skeleton.shell(gradients=False))
        with stream(problem.seed, "init", member):
            skeleton = self.skeleton
            if not given or self.preparation.changes:
                model = self.model if given else built(problem.model, member)
                prepared = self.preparation(shadow(model, self.chosen.names))
                skeleton = Skeleton(prepared, self.space)
            shell = skeleton.shell(gradients=False)
            if problem.init != "given":
                names = self.space.names if problem.init == "fresh" else self.space.select(problem.head, "head").names
                draw_anew(shell, frozenset(names))
            elif given and member > 0:
                redraw_untrained_adapters(shell)
        return self._values(shell)

    @staticmethod
    def _values(shell: Shell) -> Start:
        return Start(shell.theta, {name: value.clone() for name, value in shell.buffers.items()})

    @cached_property
    def own_frozen(self) -> Params:
        """Frozen weights that a building function draws at random: a file must hold them, since no model will."""
        if isinstance(self.problem.model, nn.Module):
            return {}
        frozen = {name: p for name, p in self.model.named_parameters() if name not in self.chosen.names}
        if not frozen:
            return {}
        with stream(self.problem.seed, "init", 1):
            other = dict(self.problem.model().named_parameters())
        return {name: p.detach() for name, p in frozen.items() if not torch.equal(p, other[name])}

    def trial(self, shell: Shell, batch: Batch) -> Tensor:
        """Outputs of a pass in evaluation mode; if it draws random numbers, the caller's streams are left alone."""
        shell.module.eval()
        source = generator(self.problem.seed, "trial", device=self.skeleton.device)
        with torch.no_grad(), stream(self.problem.seed, "trial"), pass_noise(source):
            return shell(batch.inputs)

    def _check(self, data: Batches, label: str) -> None:
        """Run the model on two examples, in evaluation mode, and hold its outputs against all targets at hand."""
        batch = batch_to(data.first(TRIAL_EXAMPLES), self.skeleton.device)
        check_names(self.model, batch.inputs, f"{label} data")
        check_tokens(self.model, batch.inputs if data.tensors is None else data.tensors.inputs, f"{label} data")
        try:
            outputs = self.trial(self.skeleton.shell(gradients=False), batch)
        except ValueError as error:
            if "padding token" not in str(error):
                raise
            raise ValueError(
                "model must know its padding token, by which it finds the last token of every example; its config has "
                f"none ({error}). Set model.config.pad_token_id = tokenizer.pad_token_id, or to the eos_token_id."
            ) from error
        if bool(outputs.isnan().any()):
            raise ValueError(
                f"{label} data: outputs of the model on the first examples must be numbers; got NaN. Look for NaN in "
                "the weights of the model and in its inputs."
            )
        if len(outputs) != len(batch.targets):
            raise ValueError(f"model must return one output per example; got {len(outputs)} for {len(batch.targets)}.")
        whole = data.tensors
        targets, mask = (batch.targets, batch.mask) if whole is None else (whole.targets, whole.mask)
        warn_of_padding(self.likelihood, batch.inputs if whole is None else whole.inputs, targets, mask, label)
        # The labels of all examples against outputs of the first: only the number of classes matters.
        full = outputs[:1].expand(len(targets), *outputs.shape[1:])
        try:
            kept = None if mask is None else mask.to(outputs.device)
            check_rows(self.likelihood, full, targets.to(outputs.device), kept)
        except ValueError as error:
            raise ValueError(f"{label} data: {error}{self._virtual_note(outputs, targets)}") from error

    def _virtual_note(self, outputs: Tensor, targets: Tensor) -> str:
        """A sentence about outputs at the virtual tokens of prompt tuning, which labels have no entries for."""
        count = virtual_tokens(self.model)
        if not count or targets.dim() != 2 or outputs.shape[1] - targets.shape[1] != count:
            return ""
        return (
            f" The model's outputs begin with those of its {count} virtual tokens: put {count} labels of -100 in front "
            "of every example's, as PEFT does for its own loss."
        )


def built(factory: Any, member: int) -> nn.Module:
    """The model that a function builds for a member; one of `Models` has its own for each."""
    return factory.of(member) if isinstance(factory, Models) else factory()


def _refuse_merged(model: nn.Module, chosen: Space) -> None:
    """Merged adapters are part of the base: their own weights have no gradient."""
    if any(merged for _, merged, _ in adapters_of(model)) and any("lora_" in name for name in chosen.names):
        raise ValueError(
            "model must not have merged adapters, whose weights have no gradient. Call unmerge_adapter() first."
        )

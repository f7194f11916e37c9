"""A posterior out of a Hugging Face Trainer's run, so that a training script stays as it is."""

from __future__ import annotations

import inspect
from typing import Any, Literal

import torch
from torch import Tensor, nn

from bayesformer.core.doubts import Doubt, warn_of, with_doubts
from bayesformer.core.errors import unknown_name
from bayesformer.core.types import Batch, Params, Transform
from bayesformer.core.vectors import THETA, blank
from bayesformer.data.forms import as_batches
from bayesformer.data.labels import SPAN
from bayesformer.hf.collected import checkpoint_folders, read_collected, write_collected
from bayesformer.hf.tasks import likelihood_of
from bayesformer.inference import swag
from bayesformer.laplace.method import laplace
from bayesformer.laws import Law, Samples
from bayesformer.likelihoods import Likelihood, as_likelihood
from bayesformer.likelihoods.language import unwrapped
from bayesformer.model.admission import unwrap
from bayesformer.model.space import Space
from bayesformer.posterior import Posterior

try:
    from transformers import TrainerCallback
except ImportError as error:  # pragma: no cover
    raise ImportError("bayesformer.hf needs transformers: pip install 'bayesformer[hf]'.") from error

IGNORED = -100
WAYS_TO_COLLECT = ("swag", "snapshots")
MOMENTS, COUNTS = ("params", "variance", "deviations"), ("snapshots", "step")  # what the state of swag remembers


class TrainerCollect(TrainerCallback):
    """A Trainer callback that watches the weights, and makes a posterior of where they went.

        collect = bf.hf.Collect(method="swag")
        Trainer(model, args, train_dataset=..., callbacks=[collect]).train()
        posterior = collect.posterior()

    Snapshots are taken evenly over the end of training; the learning rate there should not have fallen to 0, or they
    are all alike. The Trainer and the model are not changed. What was collected is part of every checkpoint that the
    Trainer saves in its output_dir, so that a run that is resumed there has the snapshots from before.

    Args:
        method: "swag", a Gaussian by the mean, variance and last deviations of the snapshots (Maddox et al. 2019), or
            "snapshots", the snapshots themselves.
        snapshots: how many are taken, about.
        start: share of the training steps before the first.
        rank: deviations kept for the low-rank part of swag.
        scale: factor of swag's covariance.
        likelihood: as for `bf.fit`; by default that of the model's own loss.
    """

    def __init__(
        self,
        method: Literal["swag", "snapshots"] = "swag",
        *,
        snapshots: int = 20,
        start: float = 0.5,
        rank: int = 20,
        scale: float = 0.5,
        likelihood: Likelihood | str | None = None,
    ) -> None:
        if method not in WAYS_TO_COLLECT:
            raise unknown_name("method", method, WAYS_TO_COLLECT)
        if isinstance(snapshots, bool) or not isinstance(snapshots, int) or snapshots < 2:
            raise ValueError(f"snapshots must be a whole number, at least 2; got {snapshots!r}.")
        if not 0 <= start < 1:
            raise ValueError(f"start must be at least 0 and below 1; got {start}.")
        self.method, self.snapshots, self.start = method, snapshots, start
        self.rank, self.scale = rank, scale
        self.likelihood = None if likelihood is None else as_likelihood(likelihood)
        self.model: nn.Module | None = None
        self.space: Space | None = None
        self.watch = swag.build(_given_weights(), 0, 1, rank)
        self._begin()

    def _begin(self) -> None:
        self.rows: list[Tensor] = []  # snapshots, for method="snapshots"
        self.state: Any = None  # of swag
        self.steps: list[int] = []  # at which snapshots were taken
        self.lost = 0  # snapshots of a resumed run whose checkpoint does not have them

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:  # noqa: ARG002
        """Remember which weights are trained, and read what a run that is resumed had collected."""
        self.model = unwrap(model)
        self.space = Space.of(self.model)
        if self.likelihood is None:
            likelihood_of(self.model)  # a head that is unknown is refused before training
        self._begin()
        if state.global_step:
            self._resume(args, state)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Take a snapshot when one is due."""
        if self._is_due(state.global_step, state.max_steps):
            self._take(state.global_step)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Put what was collected so far into the checkpoint."""
        if self.steps and state.is_world_process_zero:
            folder = checkpoint_folders(args, state.global_step)[-1]
            facts = {"steps": self.steps, "lost": self.lost}
            write_collected(folder / self._file, self._tensors(), self._theta(), facts)

    def _is_due(self, step: int, last: int) -> bool:
        first = int(self.start * last)
        every = max(1, (last - first) // self.snapshots)
        return step > first and (step - first) % every == 0

    @property
    def _file(self) -> str:
        """Named by the settings that snapshots depend on: a run may have several callbacks."""
        return f"bayesformer-{self.method}-{self.snapshots}-{self.start}-{self.rank}.safetensors"

    def _theta(self) -> Tensor:
        assert self.model is not None
        assert self.space is not None
        own = dict(self.model.named_parameters(remove_duplicate=False))
        return self.space.pack({name: own[name].detach() for name in self.space.names})

    def _take(self, step: int) -> None:
        theta = self._theta()
        self.steps.append(step)
        if self.method == "snapshots":
            self.rows.append(theta.clone())
            return
        if self.state is None:
            self.state = self.watch.init({THETA: theta.clone()})
        self.state, _ = self.watch.update(self.state, theta, inplace=True)

    def _tensors(self) -> dict[str, Tensor]:
        """What was collected: the snapshots (L, P), or the moments of swag."""
        if self.method == "snapshots":
            return {"rows": torch.stack(self.rows)}
        counts = {name: getattr(self.state, name) for name in COUNTS}
        return {**counts, **{name: getattr(self.state, name)[THETA] for name in MOMENTS}}

    def _resume(self, args: Any, state: Any) -> None:
        """Go on from what the checkpoint holds; say how many snapshots are lost where it holds none."""
        theta = self._theta()
        found = (read_collected(folder / self._file, theta) for folder in checkpoint_folders(args, state.global_step))
        tensors, facts = next((one for one in found if one is not None), (None, {}))
        if tensors is None:
            self.lost = sum(self._is_due(step, state.max_steps) for step in range(1, state.global_step + 1))
            warn_of(self._doubts())
            return
        self.steps, self.lost = list(facts["steps"]), facts["lost"]
        if self.method == "snapshots":
            self.rows = list(tensors["rows"])
            return
        moments = {name: {THETA: tensors[name]} for name in MOMENTS}
        counts = {name: tensors[name].cpu() for name in COUNTS}
        self.state = self.watch.init({THETA: theta})._replace(**moments, **counts)

    def _doubts(self) -> list[Doubt]:
        if not self.lost:
            return []
        words = (
            f"training was resumed from a checkpoint without the {self.lost} snapshots that had been taken before it; "
            "they are not part of the posterior. They are found in checkpoints of the Trainer's own output_dir that "
            "were saved with this callback and its settings."
        )
        return [Doubt("snapshots", words, self.lost, 0)]

    def posterior(self) -> Posterior:
        """The posterior of the snapshots taken, over the weights of the trained model."""
        if len(self.steps) < 2:
            raise ValueError(f"posterior needs at least 2 snapshots; training took {len(self.steps)}. Train longer.")
        assert self.model is not None
        assert self.space is not None
        likelihood = self.likelihood or likelihood_of(self.model)  # its loss has settled problem_type by now
        law: Law = Samples(torch.stack(self.rows), {}) if self.rows else swag.law(self.state, self.scale)
        settings = {"snapshots": self.snapshots, "start": self.start, "rank": self.rank, "scale": self.scale}
        facts = {"method": {"name": f"collect/{self.method}", **settings}, "steps": [self.steps[-1]]}
        facts = with_doubts({**facts, "taken_at": self.steps}, self._doubts())
        return Posterior(self.model, likelihood, law, self.space, facts=facts)


def _given_weights() -> Transform:
    """A transform whose next weights are what it is given as a batch: for watching an optimiser of others."""
    from bayesformer.inference.optimise import OptimiseState

    def init(params: Params) -> Any:
        return OptimiseState({k: p.clone() for k, p in params.items()}, None, blank(params))  # type: ignore[arg-type]

    def update(state: Any, batch: Batch, inplace: bool = False) -> Any:  # noqa: ARG001
        return state._replace(params={THETA: batch}), None

    return Transform(init, update)


def laplace_after(trainer: Any, *, likelihood: Likelihood | str | None = None, **settings: Any) -> Posterior:
    """The Laplace posterior around the model that a Trainer has trained, from its own data set and collator.

    Args:
        trainer: after `train()`; its model is left as it is.
        likelihood: as for `bf.fit`; by default that of the model's own loss.
        settings: of `bf.laplace`: structure, subset, prior_precision, predictive and the others.
    """
    if getattr(trainer, "train_dataset", None) is None:
        raise ValueError("trainer must have a train_dataset, from which the curvature is computed; it has none.")
    model: nn.Module = unwrap(trainer.model)
    known = likelihood_of(model) if likelihood is None else as_likelihood(likelihood)
    data = as_batches(trainer.train_dataset, "train_dataset", collate=_Collator(model, trainer.data_collator))
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        return laplace(model, data, likelihood=known, **settings)
    finally:
        for module, training in modes.items():
            module.training = training


class _Collator:
    """A Trainer's collator on the columns that the model takes, as the Trainer itself drops the others."""

    def __init__(self, model: nn.Module, collate: Any) -> None:
        taken = inspect.signature(unwrapped(model).forward).parameters
        self.names, self.collate = {*taken, "labels", "label", "label_ids"}, collate

    def __call__(self, rows: list[dict[str, Any]]) -> Any:
        batch = dict(self.collate([{k: v for k, v in row.items() if k in self.names} for row in rows]))
        if "labels" not in batch and all(name in batch for name in SPAN):
            ends = torch.stack([batch.pop(name).reshape(-1) for name in SPAN], 1).clamp_min(0)  # (B, 2)
            length = batch["input_ids"].shape[1]
            batch["labels"] = ends.masked_fill(ends >= length, IGNORED)  # an answer that was cut off, as in its loss
        return batch

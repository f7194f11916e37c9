"""How weights are trained, whatever the method."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Literal

from bayesformer.core.settings import LATER
from bayesformer.inference import schedules
from bayesformer.inference.optimise import Adam
from bayesformer.inference.schedules import Schedule


@dataclass(frozen=True)
class Training:
    """How weights are trained, whatever the method."""

    epochs: int = 100
    """passes over the training data, at most"""
    batch_size: int = 50
    """examples per step"""
    lr: float = 3e-3
    """learning rate: its peak with warm-up, its value when constant"""
    schedule: Literal["warmup", "cosine", "constant"] = "warmup"
    """after a linear warm-up the inverse square root of the step, or a cosine down to 0; or a constant rate"""
    warmup: int = 100
    """steps of warm-up"""
    weight_decay: float = 0.0
    """decoupled weight decay (AdamW); 0 is Adam. A prior is not weight decay: use Map for that"""
    clip: float = 1.0
    """largest gradient norm; inf never clips"""
    patience: int = 15
    """validation evaluations, one per epoch or `evaluate_every`, without a better score before stopping; 0: never"""
    max_steps: int | None = field(default=None, metadata=LATER)
    """steps in all, at most; training stops there even inside an epoch"""
    evaluate_every: int | None = field(default=None, metadata=LATER)
    """steps between validation evaluations; none evaluates after every epoch"""
    precision: Literal["float32", "bf16"] = field(default="float32", metadata=LATER)
    """bf16 runs forward passes under autocast; weights, gradients and probabilities stay float32"""
    buffers: Literal["moving", "fixed"] = field(default="moving", metadata=LATER)
    """running averages and other buffers: moved by training as the model does it, or held as they were given"""

    def __post_init__(self) -> None:
        counts = ("epochs", "batch_size", "warmup", "patience", "max_steps", "evaluate_every")
        for name in counts:
            value, least = getattr(self, name), 0 if name == "patience" else 1
            if value is None and name in {"max_steps", "evaluate_every"}:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"training.{name} must be a whole number, at least {least}; got {value!r}.")
        for name, rule, holds in (
            ("lr", "positive and finite", lambda x: 0 < x < math.inf),
            ("weight_decay", "at least 0", lambda x: 0 <= x < math.inf),
            ("clip", "positive; inf never clips", lambda x: x > 0),
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not holds(value):
                raise ValueError(f"training.{name} must be {rule}; got {value!r}.")
        for name, choices in (
            ("schedule", ("warmup", "cosine", "constant")),
            ("precision", ("float32", "bf16")),
            ("buffers", ("moving", "fixed")),
        ):
            if getattr(self, name) not in choices:
                options = ", ".join(map(repr, choices))
                raise ValueError(f"training.{name} must be one of {options}; got {getattr(self, name)!r}.")

    def steps(self, per_epoch: int) -> int:
        """Steps of a whole training, given those of one epoch."""
        total = self.epochs * per_epoch
        return total if self.max_steps is None else min(total, self.max_steps)

    def evened(self, num_data: int) -> Training:
        """The same number of batches per epoch, as equal in size as can be.

        A last batch of few examples would give each of them the weight of many, and its noise heats a chain.
        """
        batches = steps_per_epoch(num_data, self.batch_size)
        return replace(self, batch_size=steps_per_epoch(num_data, batches))

    def adam(self, steps: int) -> Adam:
        """The optimiser these settings describe, for this many steps in all."""
        return Adam(self.rate(steps), weight_decay=self.weight_decay)

    def rate(self, steps: int) -> Schedule:
        """The learning rate as a function of the step."""
        if self.schedule == "constant":
            return schedules.constant(self.lr)
        if self.schedule == "cosine":
            return schedules.warmup_cosine(self.lr, self.warmup, steps)
        return schedules.warmup_inverse_sqrt(self.lr, self.warmup)


def steps_per_epoch(examples: int, batch_size: int) -> int:
    """Batches in one pass, the last perhaps smaller."""
    return -(-examples // batch_size)

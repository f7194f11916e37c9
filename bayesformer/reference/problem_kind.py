"""What a reference problem is: data, a model and a likelihood with a posterior that can be known, and inputs to ask."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import asdict
from typing import Any, ClassVar, NamedTuple

from torch import Tensor, nn

from bayesformer.core.settings import summary
from bayesformer.core.types import GaussianOutputs
from bayesformer.data import Data
from bayesformer.likelihoods import Likelihood
from bayesformer.methods import Method, Nuts
from bayesformer.train.training import Training

PRIOR = "normal(0, 1)"
"""The prior of every weight of every reference problem, which is the default of the methods, too."""


class ProblemData(NamedTuple):
    """Training data, and inputs by region at which posteriors are compared."""

    train: Data  # inputs are one tensor
    regions: dict[str, Tensor]  # "in", like the training data; "gap", between them; "out", away from them

    def tensors(self) -> dict[str, Tensor]:
        """All of it by name, as it is stored and compared."""
        inputs, targets = self.train.inputs, self.train.targets
        assert isinstance(inputs, Tensor)
        return {"train.inputs": inputs, "train.targets": targets} | {
            f"region.{name}": values for name, values in self.regions.items()
        }

    @classmethod
    def of(cls, tensors: dict[str, Tensor]) -> ProblemData:
        """The data again, from what `tensors` gives."""
        regions = {n.removeprefix("region."): t for n, t in tensors.items() if n.startswith("region.")}
        return cls(Data(tensors["train.inputs"], tensors["train.targets"]), regions)


class ReferenceProblem(ABC):
    """A model with independent N(0, 1) priors on all weights and data it is to be fitted to.

    Subclasses are frozen dataclasses of their settings. `version` grows when data, model or regions change: a reference
    posterior, and a score against it, belong to one version.
    """

    version: ClassVar[int] = 1
    stores_data: ClassVar[bool] = False
    """whether data are kept with the reference, since they cannot be made anew from the settings alone"""

    @property
    def description(self) -> str:
        """One line about the problem, shown by `bayesformer reference list`."""
        return summary(type(self))

    @property
    def settings(self) -> dict[str, Any]:
        """Every setting by name, and the version."""
        return {**asdict(self), "version": self.version}  # type: ignore[call-overload]

    @property
    @abstractmethod
    def likelihood(self) -> Likelihood:
        """Of the targets given the model's outputs; its noise is known."""

    @abstractmethod
    def data(self) -> ProblemData:
        """The same data in every call, from seeds of their own."""

    @abstractmethod
    def model(self) -> nn.Module:
        """A new model with freshly drawn weights."""

    def attentive(self) -> nn.Module:
        """Another network, with attention, for the same data: for methods that need one. Its posterior is not known."""
        raise ValueError(f"network must be 'own' on this problem ({self.description}), which has no other.")

    @property
    def sampler(self) -> Method:
        """The chains that make the reference, where there is no closed form."""
        return Nuts(draws=500, thin=1, warm_up=300)

    @property
    def training(self) -> Training:
        """How methods train on it unless told otherwise: the library's defaults."""
        return Training()

    def condensed(self, data: ProblemData) -> tuple[ProblemData, Likelihood]:
        """Data and likelihood with the very same posterior that cost less, from which a sampled reference is made."""
        return data, self.likelihood

    def exact(self, data: ProblemData) -> dict[str, GaussianOutputs] | None:
        """The posterior of the outputs by region where it is known in closed form, else None."""
        del data
        return None

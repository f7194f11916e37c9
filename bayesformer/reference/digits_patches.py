"""A small vision transformer on a few handwritten digits."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from bayesformer.core.seeds import generator
from bayesformer.data import Data
from bayesformer.datasets import digits
from bayesformer.likelihoods import Categorical, Likelihood
from bayesformer.methods import Hmc, Method
from bayesformer.models.vit import VisionTransformer
from bayesformer.reference.problem_kind import ProblemData, ReferenceProblem
from bayesformer.train.training import Training


@dataclass(frozen=True)
class DigitsPatches(ReferenceProblem):
    """A vision transformer of 1690 weights on 50 of the 8x8 digits; long HMC."""

    examples: int = 50
    """training images"""
    dim: int = 12
    """width of the transformer"""
    heads: int = 2
    """attention heads"""
    mlp_ratio: int = 2
    """hidden width of the MLP over that of the transformer"""
    patch: int = 4
    """side of a patch, in pixels"""
    asked: int = 30
    """images of each region"""

    @property
    def likelihood(self) -> Likelihood:
        """Categorical over the ten digits."""
        return Categorical()

    def data(self) -> ProblemData:
        """The first training digits; "out" are test digits whose patches were shuffled."""
        found = digits.load()
        images = found.test.inputs
        assert isinstance(images, Tensor)
        source = generator(0, "reference digits", "shuffled")
        outside = digits.shuffled_patches(images[self.asked : 2 * self.asked], self.patch, source)
        train = found.train.take(slice(0, self.examples))
        return ProblemData(Data(train.inputs, train.targets), {"in": images[: self.asked], "out": outside})

    def model(self) -> nn.Module:
        """One block over the patches of an image."""
        return VisionTransformer(
            8, self.patch, 1, 10, dim=self.dim, depth=1, heads=self.heads, mlp_ratio=self.mlp_ratio
        )

    @property
    def training(self) -> Training:
        """The learning rate of the task `digits`, falling to 0."""
        return Training(lr=1e-2, schedule="cosine")

    @property
    def sampler(self) -> Method:
        """Trajectories about as long as the prior is wide, which the stiffest directions cut into many steps."""
        return Hmc(length=2.0, metric="diagonal", draws=400, thin=1, warm_up=80, target=0.7)

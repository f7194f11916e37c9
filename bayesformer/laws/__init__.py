"""Laws over the vector of inferred weights: draws that were made, and Gaussians of blocks to draw from."""

from bayesformer.laws.block import Block
from bayesformer.laws.dense import Dense
from bayesformer.laws.deviations import Deviations
from bayesformer.laws.diagonal import Diagonal
from bayesformer.laws.gaussian_law import GaussianLaw, gaussian
from bayesformer.laws.kronecker import Eigenbasis, Factors, Kronecker, KroneckerBasis
from bayesformer.laws.law import Law, buffers_of, telling_rows
from bayesformer.laws.location_scale import LocationScaleLaw
from bayesformer.laws.low_rank import LowRank
from bayesformer.laws.mixture import MixtureLaw, from_tensors
from bayesformer.laws.samples import Samples

__all__ = [
    "Block",
    "Dense",
    "Deviations",
    "Diagonal",
    "Eigenbasis",
    "Factors",
    "GaussianLaw",
    "Kronecker",
    "KroneckerBasis",
    "Law",
    "LocationScaleLaw",
    "LowRank",
    "MixtureLaw",
    "Samples",
    "buffers_of",
    "from_tensors",
    "gaussian",
    "telling_rows",
]

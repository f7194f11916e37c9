"""Attention and the laws its weights may follow."""

from bayesformer.attention.build import FAMILIES, build_family
from bayesformer.attention.contextual import Contextual
from bayesformer.attention.core import Attention, Linear, Softmax, masked_softmax
from bayesformer.attention.describe import describe_families, install_described
from bayesformer.attention.dirichlet import Dirichlet
from bayesformer.attention.edges import Edges
from bayesformer.attention.family import Family, attention_kl, attention_mode, families
from bayesformer.attention.gaussian_logits import Gaussian
from bayesformer.attention.graph import GraphAttention
from bayesformer.attention.install import install, uninstall
from bayesformer.attention.lognormal import Lognormal
from bayesformer.attention.maps import AttentionMap, MapRecorder, attention_maps
from bayesformer.attention.score_functions import Additive, Gat, ScaledDot
from bayesformer.attention.spread import DataDependent, Learned, RowNetwork
from bayesformer.attention.weibull import Weibull

__all__ = [
    "FAMILIES",
    "Additive",
    "Attention",
    "AttentionMap",
    "Contextual",
    "DataDependent",
    "Dirichlet",
    "Edges",
    "Family",
    "Gat",
    "Gaussian",
    "GraphAttention",
    "Learned",
    "Linear",
    "Lognormal",
    "MapRecorder",
    "RowNetwork",
    "ScaledDot",
    "Softmax",
    "Weibull",
    "attention_kl",
    "attention_maps",
    "attention_mode",
    "build_family",
    "families",
    "install",
    "masked_softmax",
    "uninstall",
]

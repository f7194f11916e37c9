"""Attention and the laws its weights may follow."""

from bayesformer.attention.attention_maps import AttentionMap, MapRecorder, attention_maps
from bayesformer.attention.build import FAMILIES, build_family
from bayesformer.attention.contextual import Contextual
from bayesformer.attention.describe import describe_families, install_described, register_family
from bayesformer.attention.dirichlet import Dirichlet
from bayesformer.attention.edges import Edges
from bayesformer.attention.family import AttentionFamily, attention_kl, attention_mode, families, family_weights
from bayesformer.attention.gaussian_logits import GaussianLogits
from bayesformer.attention.graph_attention import GraphAttention
from bayesformer.attention.install import install, uninstall
from bayesformer.attention.lognormal import Lognormal
from bayesformer.attention.multi_head import Linear, MultiHeadAttention, Softmax, masked_softmax
from bayesformer.attention.score_functions import Additive, Gat, ScaledDot
from bayesformer.attention.spread import DataDependent, Learned, RowNetwork
from bayesformer.attention.weibull import Weibull

# Names of version 0.1.
Attention, Family, Gaussian = MultiHeadAttention, AttentionFamily, GaussianLogits

__all__ = [
    "FAMILIES",
    "Additive",
    "Attention",
    "AttentionFamily",
    "AttentionMap",
    "Contextual",
    "DataDependent",
    "Dirichlet",
    "Edges",
    "Family",
    "Gat",
    "Gaussian",
    "GaussianLogits",
    "GraphAttention",
    "Learned",
    "Linear",
    "Lognormal",
    "MapRecorder",
    "MultiHeadAttention",
    "RowNetwork",
    "ScaledDot",
    "Softmax",
    "Weibull",
    "attention_kl",
    "attention_maps",
    "attention_mode",
    "build_family",
    "describe_families",
    "families",
    "family_weights",
    "install",
    "install_described",
    "masked_softmax",
    "register_family",
    "uninstall",
]

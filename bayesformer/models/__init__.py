"""Readable reference models. Any other `nn.Module` will do as well."""

from bayesformer.models.cnn_lstm import CnnLstm
from bayesformer.models.gat import GraphAttentionNetwork
from bayesformer.models.tabular import FeatureTransformer, MlpRegressor
from bayesformer.models.transformer import Encoder, Regressor, SequenceClassifier, Tagger
from bayesformer.models.vit import VisionTransformer

__all__ = [
    "CnnLstm",
    "Encoder",
    "FeatureTransformer",
    "GraphAttentionNetwork",
    "MlpRegressor",
    "Regressor",
    "SequenceClassifier",
    "Tagger",
    "VisionTransformer",
]

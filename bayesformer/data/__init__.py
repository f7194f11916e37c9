"""Data as batches, whatever form they come in: `as_batches` for training, `as_inputs` for prediction."""

from bayesformer.data.batches import Batches
from bayesformer.data.forms import Collate, DataLike, as_batches, as_data, as_inputs
from bayesformer.data.graph_rows import GraphModel
from bayesformer.data.in_memory import Data, InMemory
from bayesformer.data.indexed import Indexed
from bayesformer.data.streams import Stream, Streamed
from bayesformer.data.unlabelled import InputBatches

__all__ = [
    "Batches",
    "Collate",
    "Data",
    "DataLike",
    "GraphModel",
    "InMemory",
    "Indexed",
    "InputBatches",
    "Stream",
    "Streamed",
    "as_batches",
    "as_data",
    "as_inputs",
]

"""Names that moved to `bayesformer.data`, under the address they had before."""

from bayesformer.data.forms import DataLike, as_data
from bayesformer.data.in_memory import Data
from bayesformer.data.inputs import check_inputs, first_tensor, map_inputs, tensors_of
from bayesformer.data.labels import LABEL_KEYS

__all__ = ["LABEL_KEYS", "Data", "DataLike", "as_data", "check_inputs", "first_tensor", "map_inputs", "tensors_of"]

"""Citation graphs Cora, Citeseer and Pubmed, with the split of Yang, Cohen & Salakhutdinov (2016).

The files `planetoid/<name>.npz` are those of a data folder (`places`). They hold plain arrays: the features in
compressed rows (`x_data`, `x_indices`, `x_indptr`, `x_shape`), `y`, `edge_index` (2, E) in both directions, and
`train_mask`, `val_mask`, `test_mask`. A class of -1 is none: such a node is in no mask.
"""

from __future__ import annotations

import zipfile
from typing import Any

import numpy as np
import torch
from scipy.sparse import csr_matrix
from torch import Tensor

from bayesformer.core.errors import DamagedFileError, unknown_name
from bayesformer.datasets.graphs import Graph
from bayesformer.datasets.places import locate

GRAPHS = ("cora", "citeseer", "pubmed")
MASKS = ("train_mask", "val_mask", "test_mask")


def load(name: str, normalise: bool = True) -> Graph:
    """A graph by name.

    Args:
        name: one of `GRAPHS`.
        normalise: whether the features of a node are divided by their sum, as Veličković et al. (2018) do.
    """
    if name not in GRAPHS:
        raise unknown_name("citation graph", name, GRAPHS)
    path = locate(f"planetoid/{name}.npz", "graph")
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as stored:
            return _graph({key: stored[key] for key in stored.files}, normalise)
    except (zipfile.BadZipFile, OSError, EOFError, KeyError, IndexError, ValueError) as error:
        raise DamagedFileError(f"graph {path} cannot be read: {type(error).__name__}: {error}.") from error


def _graph(stored: dict[str, Any], normalise: bool) -> Graph:
    x = _features(stored, normalise)
    y, edge_index = (torch.from_numpy(stored[key].astype(np.int64)) for key in ("y", "edge_index"))
    masks = [torch.from_numpy(stored[key].astype(bool)) for key in MASKS]
    nodes = len(x)
    if edge_index.dim() != 2 or len(edge_index) != 2 or int(edge_index.min()) < 0 or int(edge_index.max()) >= nodes:
        raise ValueError(f"edge_index must be (2, E) numbers in 0..{nodes - 1}")
    if any(part.shape != (nodes,) for part in (y, *masks)):
        raise ValueError(f"y and masks must have one entry for each of {nodes} nodes")
    counted = torch.stack(masks).int().sum(0)
    if int(counted.max()) > 1 or bool((y[counted > 0] < 0).any()):
        raise ValueError("masks must be disjoint and hold nodes with a class only")
    return Graph(x, edge_index, y, *masks)


def _features(stored: dict[str, Any], normalise: bool) -> Tensor:
    rows: Any = stored["x_data"], stored["x_indices"].astype(np.int64), stored["x_indptr"]
    shape: Any = tuple(stored["x_shape"])
    x = torch.from_numpy(csr_matrix(rows, shape=shape).toarray()).float()
    # A node without a word stays at 0.
    return x / x.sum(1, keepdim=True).clamp_min(torch.finfo(x.dtype).tiny) if normalise else x

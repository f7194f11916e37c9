"""Predictions of a saved posterior for the rows of a data file."""

from __future__ import annotations

import csv
import itertools
import zipfile
import zlib
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import Tensor

from bayesformer.bench.tasks import TASKS, Task
from bayesformer.core.errors import DamagedFileError
from bayesformer.core.settings import override
from bayesformer.core.storage import read_json, read_tensors, with_numbers
from bayesformer.likelihoods.predictive import CategoricalPredictive, Predictive
from bayesformer.posterior import Posterior
from bayesformer.predict.saving import FACTS

KEY = "inputs"


def load_posterior(folder: Path) -> tuple[Task, Posterior]:
    """The posterior that a run saved in `folder`, with the task it was trained on."""
    saved = read_json(folder / FACTS, "posterior")
    made_for = saved.get("facts", {}).get("task")
    if made_for is None:
        raise DamagedFileError(
            f"posterior {folder} does not say which task it was made for; load it in Python with "
            "Posterior.load(folder, model)."
        )
    task = override(TASKS[made_for["name"]](), with_numbers(made_for["settings"]), made_for["name"])
    return task, Posterior.load(folder, task.model())


def read_rows(path: Path) -> Tensor:
    """Finite float32 rows, (N, ...), from .csv (a first row without a number is a header), .npy, .npz, .safetensors."""
    if not path.exists():
        raise FileNotFoundError(f"data file {path} does not exist.")
    if not path.is_file():
        raise ValueError(f"data file {path} must be a file; it is a folder or a device.")
    if path.suffix == ".csv":
        rows = _read_csv(path)
    elif path.suffix in {".npy", ".npz"}:
        rows = _read_numpy(path)
    elif path.suffix == ".safetensors":
        rows = _entry(read_tensors(path, "data file"), path)
    else:
        raise ValueError(f"data file must end in .csv, .npy, .npz or .safetensors; got {path.name!r}.")
    if rows.dim() < 2 or len(rows) == 0:
        raise ValueError(f"data file {path} must hold rows of numbers; got shape {tuple(rows.shape)}.")
    numbers = rows.float()
    if bool((wrong := ~numbers.isfinite()).any()):
        first = int(wrong.flatten(1).any(1).nonzero()[0])
        value = float(rows[first][wrong[first]].flatten()[0])
        raise ValueError(f"data file {path}, row {first + 1} must hold finite numbers of float32; got {value:g}.")
    return numbers


def write_predictions(predictive: Predictive, file: TextIO) -> None:
    """Write a predictive as CSV, one line per example, or per example and position."""
    writer = csv.writer(file)
    positions = list(itertools.product(*(range(n) for n in predictive.shape)))
    names = ["example", "position"][: len(predictive.shape)]
    columns: dict[str, Tensor] = {}
    if isinstance(predictive, CategoricalPredictive):
        columns["label"] = predictive.labels
        columns |= {f"p{c}": predictive.probs[..., c] for c in range(predictive.probs.shape[-1])}
    else:
        mean: Tensor = predictive.mean  # type: ignore[attr-defined]
        sd: Tensor = predictive.variance.sqrt()  # type: ignore[attr-defined]
        for d in range(mean.shape[-1]):
            suffix = "" if mean.shape[-1] == 1 else str(d)
            columns |= {f"mean{suffix}": mean[..., d], f"sd{suffix}": sd[..., d]}
    columns |= {name: getattr(predictive, name) for name in ("total", "aleatoric", "epistemic")}
    writer.writerow([*names, *columns])
    for position in positions:
        writer.writerow([*position, *(_number(column[position]) for column in columns.values())])


def _number(value: Tensor) -> str:
    return str(int(value)) if not value.is_floating_point() else f"{float(value):.6g}"


def check_predictions(predictive: Predictive, rows: Tensor) -> None:
    """Refuse predictions that are not finite, naming the first row of the data file that leads to one."""
    value = predictive.probs if isinstance(predictive, CategoricalPredictive) else predictive.total
    wrong = ~value.isfinite()
    if not bool(wrong.any()):
        return
    first = int(wrong.flatten(1).any(1).nonzero()[0]) if wrong.dim() > 1 else int(wrong.nonzero()[0])
    size = float(rows[first].abs().max()) if first < len(rows) else float(rows.abs().max())
    raise ValueError(
        f"the prediction of row {first + 1} is not a finite number: the row holds values of up to {size:g}, "
        "too large for the network."
    )


def _read_csv(path: Path) -> Tensor:
    """Rows of numbers, (N, F); a first row without any number is a header and left out."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:  # with or without a byte order mark
            lines = [(reader.line_num, line) for reader in [csv.reader(file)] for line in reader if line]
    except (UnicodeDecodeError, csv.Error) as error:
        raise DamagedFileError(f"data file {path} is not text in UTF-8: {error}.") from error
    if lines and not any(map(_is_number, lines[0][1])):
        del lines[0]
    widths = {len(line) for _, line in lines}
    if len(widths) > 1:
        raise ValueError(f"data file {path} must have rows of one length; got {sorted(widths)}.")
    for number, line in lines:
        for entry in line:
            if not _is_number(entry):
                raise ValueError(f"data file {path}, line {number}: {entry!r} must be a number.")
    return torch.tensor([[float(entry) for entry in line] for _, line in lines], dtype=torch.float64)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _read_numpy(path: Path) -> Tensor:
    import numpy as np

    try:
        with path.open("rb") as file:
            loaded: Any = np.load(file, allow_pickle=False)
            array = loaded if isinstance(loaded, np.ndarray) else _entry(loaded, path)
    except (zipfile.BadZipFile, zlib.error, ValueError, OSError, EOFError, KeyError) as error:
        raise DamagedFileError(f"data file {path} cannot be read: {error}.") from error
    if array.dtype.kind not in "biuf":
        raise ValueError(f"data file {path} must hold numbers; got an array of {array.dtype}.")
    return torch.as_tensor(array)


def _entry(entries: Any, path: Path) -> Any:
    names = list(entries.keys())
    if KEY in names:
        return entries[KEY]
    if len(names) == 1:
        return entries[names[0]]
    raise ValueError(f"data file {path} must have an entry {KEY!r}; got {names}.")

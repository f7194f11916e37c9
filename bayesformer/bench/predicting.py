"""A saved posterior on a data file."""

from __future__ import annotations

import csv
import itertools
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import Tensor

from bayesformer.bench.tasks import TASKS, Task
from bayesformer.errors import DamagedFileError
from bayesformer.methods import build_method, wrap
from bayesformer.posterior import FACTS, Posterior
from bayesformer.predictive import CategoricalPredictive, Predictive
from bayesformer.settings import override
from bayesformer.storage import read_json, read_tensors, with_numbers

KEY = "inputs"


def load_posterior(folder: Path) -> tuple[Task, Posterior]:
    """A posterior that the runner kept, with the task it was made for."""
    saved = read_json(folder / FACTS, "posterior")
    made_for = saved.get("facts", {}).get("task")
    if made_for is None:
        raise DamagedFileError(
            f"posterior {folder} does not say which task it was made for; load it in Python with "
            "Posterior.load(folder, model)."
        )
    task = override(TASKS[made_for["name"]](), with_numbers(made_for["settings"]), made_for["name"])
    settings = with_numbers(saved["facts"]["method"])
    method = build_method(settings.pop("name"), settings)
    return task, Posterior.load(folder, wrap(method, task.model()))


def read_rows(path: Path) -> Tensor:
    """A float tensor from .csv (rows of numbers, a header is skipped), .npy, .npz or .safetensors."""
    if not path.exists():
        raise FileNotFoundError(f"data file {path} does not exist.")
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
    return rows.float()


def write_predictions(predictive: Predictive, file: TextIO) -> None:
    """CSV: one line per example, or per example and position."""
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


def _read_csv(path: Path) -> Tensor:
    with path.open(newline="") as file:
        lines = [line for line in csv.reader(file) if line]
    start = 0 if lines and _is_number(lines[0][0]) else 1
    widths = {len(line) for line in lines[start:]}
    if len(widths) > 1:
        raise ValueError(f"data file {path} must have rows of one length; got {sorted(widths)}.")
    for number, line in enumerate(lines[start:], start + 1):
        for entry in line:
            if not _is_number(entry):
                raise ValueError(f"data file {path}, line {number}: {entry!r} must be a number.")
    return torch.tensor([[float(entry) for entry in line] for line in lines[start:]])


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _read_numpy(path: Path) -> Tensor:
    import numpy as np

    try:
        loaded: Any = np.load(path, allow_pickle=False)
    except (ValueError, OSError, EOFError) as error:
        raise DamagedFileError(f"data file {path} cannot be read: {error}.") from error
    return torch.as_tensor(loaded if path.suffix == ".npy" else _entry(loaded, path))


def _entry(entries: Any, path: Path) -> Any:
    names = list(entries.keys())
    if KEY in names:
        return entries[KEY]
    if len(names) == 1:
        return entries[names[0]]
    raise ValueError(f"data file {path} must have an entry {KEY!r}; got {names}.")

"""The weight study: the weights of trained networks, layer by layer, as statistics, a table and priors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, get_type_hints

from bayesformer.bench.provenance import provenance
from bayesformer.core.errors import DamagedFileError
from bayesformer.core.progress import Reporter, Silent
from bayesformer.core.storage import read_json, with_numbers, write_atomically, write_json
from bayesformer.methods import METHODS
from bayesformer.priors.distributions import Distribution
from bayesformer.priors.setting import PriorSetting
from bayesformer.study.prior_draws import PriorPredictive, prior_predictives
from bayesformer.study.weight_laws import LayerFit, fit_layer
from bayesformer.study.weight_networks import TrainedTask
from bayesformer.study.weight_shapes import LayerShape, shape_of

FORMAT = "weight study 1"


@dataclass(frozen=True)
class WeightStudy:
    """Everything that is kept of a study; the weights themselves stay with the networks."""

    facts: dict[str, Any]
    fits: dict[str, LayerFit]
    shapes: dict[str, LayerShape]
    prior_predictive: dict[str, PriorPredictive]

    @property
    def task(self) -> str:
        """The name of the task that the networks were trained on."""
        return str(self.facts["task"])

    @property
    def count(self) -> str:
        """How many networks, as captions say it."""
        return f"{self.facts['networks']} networks"

    def priors(self) -> dict[str, str]:
        """By parameter the law that fits its weights best, as settings have it."""
        return {name: law_text(fit.law()) for name, fit in self.fits.items()}


def study_weights(
    trained: TrainedTask, resamples: int = 100, seed: int = 0, reporter: Reporter | None = None
) -> WeightStudy:
    """Fit and describe every layer of the networks, and draw from the priors that follow."""
    reporter, layers = reporter or Silent(), trained.layers()
    fits, shapes = {}, {}
    for i, (name, weights) in enumerate(layers.items()):
        fits[name], shapes[name] = fit_layer(weights, resamples, seed), shape_of(weights, seed)
        reporter.update("layers", i + 1, len(layers), name)
    study = WeightStudy(trained.facts() | provenance(), fits, shapes, {})
    study.prior_predictive.update(prior_predictives(trained, study.priors(), seed))
    return study


def law_text(law: Distribution) -> str:
    """A law as settings have it: "student_t(5, 0, 0.1)"."""
    family = {"LaplaceDistribution": "laplace", "StudentT": "student_t"}.get(type(law).__name__)
    numbers = ", ".join(f"{getattr(law, part.name):g}" for part in fields(law))  # type: ignore[arg-type]
    return f"{family or type(law).__name__.lower()}({numbers})"


def table(study: WeightStudy) -> str:
    """Markdown: per layer the best law by both criteria with the share of resamples that agree, and its tails."""
    rows = [
        f"Weights of {study.count} trained on {study.task}. Best law by likelihood and by squared error to the "
        "histogram, each with the share of bootstrap samples of networks that agree; degrees of freedom of Student's t "
        "with a 90 % interval; modes of the density; correlation of weights over networks, root mean square, and what "
        "independent weights have.",
        "",
        "| layer | weights | by likelihood | by squared error | degrees of freedom | modes | correlation (if none) |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, fit in study.fits.items():
        shape, (low, high) = study.shapes[name], fit.df_interval
        best = f"{law_text(fit.law())}, {fit.support['likelihood'][fit.by_likelihood]:.0%}"
        error = f"{fit.by_squared_error}, {fit.support['squared_error'][fit.by_squared_error]:.0%}"
        null = "–".join(f"{level:.2f}" for level in shape.null_interval)
        df = f"{fit.df:.3g} ({low:.3g}–{high:.3g})"
        rows.append(
            f"| {name} | {fit.weights} | {best} | {error} | {df} | {len(shape.modes)} "
            f"| {shape.correlation:.2f} ({null}) |"
        )
    return "\n".join(rows)


def write(study: WeightStudy, path: Path) -> Path:
    """Write the statistics as one line of JSON."""
    record: dict[str, Any] = {"format": FORMAT, "facts": study.facts}
    for part in ("fits", "shapes", "prior_predictive"):
        record[part] = {name: asdict(entry) for name, entry in getattr(study, part).items()}
    write_json(path, record)
    return path


def read(path: Path) -> WeightStudy:
    """The statistics of a file that `write` made."""
    record = with_numbers(read_json(path, "weight study"))
    if record.get("format") != FORMAT:
        raise DamagedFileError(f"weight study {path} must be of the format {FORMAT!r}; got {record.get('format')!r}.")
    pairs = ("df_interval", "scale_interval", "null_interval")

    def parts(kind: Any, name: str) -> dict[str, Any]:
        found = record[name].items()
        return {key: kind(**{k: tuple(v) if k in pairs else v for k, v in entry.items()}) for key, entry in found}

    return WeightStudy(
        record["facts"],
        parts(LayerFit, "fits"),
        parts(LayerShape, "shapes"),
        parts(PriorPredictive, "prior_predictive"),
    )


def stored(folder: Path, task: str) -> list[WeightStudy]:
    """The stored studies of a task, or of all tasks, in order of name."""
    pattern = "*.json" if task == "all" else f"{task.replace('/', '-')}.json"
    paths = sorted(folder.glob(pattern))
    if not paths:
        raise FileNotFoundError(
            f"weight study of {task} must have been made before it is drawn; {folder}/ has none: call "
            f"`bayesformer study weights {'TASK' if task == 'all' else task}`."
        )
    return [read(path) for path in paths]


def write_priors(study: WeightStudy, path: Path, methods: Sequence[str] | None = None) -> Path:
    """Write the priors as a configuration of `bayesformer run`, a table for every method that takes a prior."""
    named = methods or [name for name, kind in METHODS.items() if get_type_hints(kind).get("prior") == PriorSetting]
    lines = [
        f"# Laws that fit the weights of {study.count} trained on {study.task} best, by likelihood.",
        f"# bayesformer run {study.task} --methods vi --config {path.name}",
    ]
    priors = study.priors()
    for method in named:
        lines += ["", f"[{method}.prior]", *(f'"{name}" = "{law}"' for name, law in priors.items())]
    write_atomically(path, ("\n".join(lines) + "\n").encode())
    return path

"""Posteriors on disk: tensors in safetensors, everything else in JSON, both under one checksum. No pickle."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from bayesformer import likelihoods
from bayesformer.attention import describe_families, install_described
from bayesformer.core.errors import DamagedFileError
from bayesformer.core.seeds import stream
from bayesformer.core.storage import checksum, read_json, read_tensors, write_json, write_tensors
from bayesformer.laws import from_tensors
from bayesformer.layers.preparation import Preparation
from bayesformer.model.admission import unwrap
from bayesformer.model.skeleton import shadow
from bayesformer.model.space import Space
from bayesformer.version import __version__

if TYPE_CHECKING:
    from bayesformer.posterior import Posterior

FORMAT = 2
TENSORS, FACTS = "posterior.safetensors", "posterior.json"
PLAIN = ("noisy_draws", "dropout_rate", "default_draws", "predictive", "link")


def save(posterior: Posterior, folder: Path) -> Path:
    """Write both files; the JSON comes last, so that a folder without it is a save that did not finish."""
    tensors = {**posterior.law.tensors(), **{f"frozen.{name}": p for name, p in posterior.frozen.items()}}
    write_tensors(folder / TENSORS, tensors, {"format": FORMAT})
    facts = {
        "format": FORMAT,
        "version": __version__,
        "likelihood": likelihoods.to_json(posterior.likelihood),
        "space": posterior.space.to_json(),
        "infer": list(posterior.infer),
        "preparation": posterior.preparation.to_json(),
        "attention": describe_families(posterior.model),
        "held": list(posterior.held),
        **{name: getattr(posterior, name) for name in PLAIN},
        "base": frozen_fingerprint(posterior.model, posterior.infer, posterior.frozen),
        "facts": dict(posterior.facts),
    }
    write_json(folder / FACTS, {**facts, "checksum": _sum(tensors, facts)})
    return folder


def load(folder: Path, model: nn.Module) -> dict[str, Any]:
    """The fields of the posterior in a folder, for this model."""
    saved = read_json(folder / FACTS, "posterior")
    form, made_by = saved.get("format"), saved.get("version", "an unknown version")
    if form == 1:
        return _first_format(folder, saved, model)
    if form != FORMAT:
        raise DamagedFileError(f"posterior {folder} must have format {FORMAT}; got {form!r}, made by {made_by}.")
    tensors = read_tensors(folder / TENSORS, "posterior")
    if saved.pop("checksum", None) != _sum(tensors, saved):
        raise DamagedFileError(f"posterior {folder} was altered: its checksum differs.")
    frozen = {k.removeprefix("frozen."): v for k, v in tensors.items() if k.startswith("frozen.")}
    base = _with_attention(unwrap(model), saved["attention"], folder)
    preparation, space = Preparation.from_json(saved["preparation"]), Space.from_json(saved["space"])
    infer = tuple(saved["infer"])
    _check_fits(folder, base, space, infer, preparation)
    if saved["base"] != frozen_fingerprint(model, infer, frozen):
        raise DamagedFileError(f"posterior {folder} belongs to another model: the frozen weights differ.")
    device = dict(base.named_parameters())[infer[0]].device
    law = from_tensors({k: v.to(device) for k, v in tensors.items() if not k.startswith("frozen.")})
    return {
        "model": base,
        "likelihood": likelihoods.from_json(saved["likelihood"]),
        "law": law,
        "space": space,
        "infer": infer,
        "preparation": preparation,
        "held": tuple(saved["held"]),
        **{name: saved[name] for name in PLAIN},
        "facts": saved["facts"],
        "frozen": {name: p.to(device) for name, p in frozen.items()},
    }


def frozen_fingerprint(model: nn.Module, infer: tuple[str, ...], replaced: Mapping[str, Tensor]) -> str:
    """A hash of the weights that are not inferred: draws for one base model are wrong on another."""
    inferred, own = set(infer), dict(unwrap(model).named_parameters())
    families = set(describe_families(model))
    return checksum(
        {
            name: replaced.get(name, p)
            for name, p in own.items()
            if name not in inferred and not any(name.startswith(f"{site}.") and "family" in name for site in families)
        }
    )


def _sum(tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> str:
    return checksum(tensors, json.dumps(facts, sort_keys=True, default=str))


def _with_attention(model: nn.Module, saved: Mapping[str, Any], folder: Path) -> nn.Module:
    """The model if its stochastic attention is that of the file; a private tree with it if the model has none."""
    own = describe_families(model)
    if own == saved:
        return model
    if own:
        raise DamagedFileError(
            f"posterior {folder} belongs to another model: it has stochastic attention {saved or 'nowhere'} in the "
            f"file and {own} in the model."
        )
    with stream(0, "preparation"):
        return install_described(shadow(model), saved)


def _check_fits(folder: Path, model: nn.Module, space: Space, infer: tuple[str, ...], preparation: Preparation) -> None:
    names = dict(model.named_parameters(remove_duplicate=False))
    missing = next((name for name in infer if name not in names), None)
    if missing is not None:
        raise DamagedFileError(f"posterior {folder} belongs to another model: it infers {missing!r}, which is absent.")
    try:
        with stream(0, "preparation"):
            here = Space.of(preparation(shadow(model, infer)))
    except (ValueError, AttributeError) as error:
        raise DamagedFileError(f"posterior {folder} belongs to another model: {error}") from error
    if here != space:
        raise DamagedFileError(f"posterior {folder} belongs to another model: {_difference(space, here)}.")


def _difference(there: Space, here: Space) -> str:
    theirs, ours = dict(zip(there.names, there.shapes, strict=True)), dict(zip(here.names, here.shapes, strict=True))
    for name in [*theirs, *ours]:
        if theirs.get(name) != ours.get(name):
            shapes = theirs.get(name, "absent"), ours.get(name, "absent")
            return f"parameter {name!r} is {shapes[0]} in the file and {shapes[1]} in the model"
    return "its parameters are in another order or precision"


def _first_format(folder: Path, saved: dict[str, Any], model: nn.Module) -> dict[str, Any]:
    """A posterior of version 0.1.0: weights over all trainable parameters of a model that needs no preparation."""
    tensors = read_tensors(folder / TENSORS, "posterior")
    if checksum(tensors) != saved.get("checksum"):
        raise DamagedFileError(f"posterior {folder / TENSORS} was altered: its checksum differs.")
    space = Space.of(model)
    if saved["names"] != list(space.names) or saved["shapes"] != [list(shape) for shape in space.shapes]:
        raise DamagedFileError(
            f"posterior {folder} was made by version {saved.get('version', '0.1.0')} for another model, or for one that "
            "its method wrapped (mean_field, concrete_dropout, attention): load it with that version, or fit again."
        )
    frozen = {name: p for name, p in model.named_parameters() if not p.requires_grad}
    if saved["frozen"] != checksum(frozen):
        raise DamagedFileError(f"posterior {folder} belongs to another model: the frozen weights differ.")
    rate = saved["facts"].get("method", {}).get("rate") if saved["noisy_draws"] else None
    return {
        "model": model,
        "likelihood": likelihoods.from_json(saved["likelihood"]),
        "law": from_tensors({name: tensor.to(space_device(model)) for name, tensor in tensors.items()}),
        "space": space,
        "noisy_draws": saved["noisy_draws"],
        "dropout_rate": rate,
        "default_draws": saved["default_draws"],
        "predictive": saved.get("predictive", "sampled"),
        "link": saved.get("link"),
        "facts": saved["facts"],
    }


def space_device(model: nn.Module) -> Any:
    """The device of a model's first parameter."""
    return next(model.parameters()).device

"""Posteriors on disk: tensors in safetensors, everything else in JSON, both under one checksum. No pickle."""

from __future__ import annotations

import json
from collections.abc import Mapping, Set
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from bayesformer import likelihoods
from bayesformer.attention import describe_families, family_weights, install_described
from bayesformer.core.errors import DamagedFileError
from bayesformer.core.seeds import stream
from bayesformer.core.storage import checksum, plain, read_json, read_tensors, write_json, write_tensors
from bayesformer.laws import from_tensors
from bayesformer.layers.preparation import Preparation, prepared_tree
from bayesformer.model.adapters import adapters_of, unwrapped_names, used_weights
from bayesformer.model.admission import unwrap
from bayesformer.model.skeleton import Skeleton, shadow
from bayesformer.model.space import Space
from bayesformer.predict.configuration import configuration_of, first_difference
from bayesformer.predict.streamlined.output_calibration import Calibration
from bayesformer.version import __version__

if TYPE_CHECKING:
    from bayesformer.posterior import Posterior

FORMAT = 2
CALIBRATION = "calibration"  # of streamlined prediction, where there is one
TENSORS, FACTS = "posterior.safetensors", "posterior.json"
PLAIN = ("noisy_draws", "dropout_rate", "default_draws", "predictive", "link")


def save(posterior: Posterior, folder: Path, calibration: Calibration | None = None) -> Path:
    """Write both files; the JSON comes last, so that a folder without it is a save that did not finish."""
    model, infer = unwrap(posterior.model), posterior.infer
    learned = {*infer}
    frozen = {name: p.detach() for name, p in family_weights(model).items() if name not in learned}
    frozen |= posterior.frozen
    tensors = {**posterior.law.tensors(), **{f"frozen.{name}": p for name, p in frozen.items()}}
    if calibration is not None:
        tensors |= {f"{CALIBRATION}.{name}": t for name, t in calibration.tensors().items()}
    facts = {
        "format": FORMAT,
        "version": __version__,
        "likelihood": likelihoods.to_json(posterior.likelihood),
        "space": posterior.space.to_json(),
        "infer": list(infer),
        "adapters": adapters_of(model),
        "preparation": posterior.preparation.to_json(),
        "attention": describe_families(model),
        "prepared_attention": describe_families(prepared_tree(model, infer, posterior.preparation)),
        "held": list(posterior.held),
        **{name: getattr(posterior, name) for name in (*PLAIN, "tempering")},
        "configuration": configuration_of(model, bool(posterior.noisy_draws)),
        "base": base_fingerprint(model, {*learned, *frozen}),
        "base_dtypes": base_dtypes(model, {*learned, *frozen}),
        "facts": plain(posterior.facts),
    }
    if calibration is not None:
        facts[CALIBRATION] = calibration.facts()
    write_tensors(folder / TENSORS, tensors, {"format": FORMAT})
    write_json(folder / FACTS, {**facts, "checksum": _sum(tensors, facts)})
    return folder


def load(folder: Path, model: nn.Module) -> dict[str, Any]:
    """The fields of the posterior in a folder, for this model."""
    saved = read_json(folder / FACTS, "posterior")
    form, made_by = saved.get("format"), saved.get("version", "an unknown version")
    if form == 1:
        try:
            return _first_format(folder, saved, model)
        except (KeyError, TypeError, AttributeError) as error:  # such files have no checksum of their facts
            raise DamagedFileError(f"posterior {folder} was altered: its facts are not whole ({error!r}).") from error
    if form != FORMAT:
        raise DamagedFileError(f"posterior {folder} must have format {FORMAT}; got {form!r}, made by {made_by}.")
    tensors = read_tensors(folder / TENSORS, "posterior")
    if saved.pop("checksum", None) != _sum(tensors, saved):
        raise DamagedFileError(f"posterior {folder} was altered: its checksum differs.")
    frozen, apart = _under(tensors, "frozen"), _under(tensors, CALIBRATION)
    preparation, space = Preparation.from_json(saved["preparation"]), Space.from_json(saved["space"])
    adapters = adapters_of(model)
    if saved.get("adapters", adapters) != adapters:
        raise DamagedFileError(
            f"posterior {folder} belongs to a model whose adapters are {saved['adapters']} (active, merged, disabled); "
            f"those of this one are {adapters}. Call set_adapter, unmerge_adapter or enable_adapter_layers first."
        )
    infer = tuple(saved["infer"])
    base = _with_attention(unwrap(model), saved["attention"], infer, folder)
    device = device_of_model(base)
    frozen = {name: p.to(device) for name, p in frozen.items()}
    prepared = _fitting(folder, base, space, infer, preparation, frozen, saved["prepared_attention"])
    configured = configuration_of(base, bool(saved["noisy_draws"]))
    difference = first_difference(saved.get("configuration", {}), configured)  # earlier files have none
    if difference is not None:
        raise DamagedFileError(f"posterior {folder} belongs to another model: {difference}.")
    if not _is_base(base, {*infer, *frozen}, saved["base"]):
        here, there = base_dtypes(base, {*infer, *frozen}), saved.get("base_dtypes")  # earlier files have none
        cast = "" if there in (None, here) else f": they are {', '.join(here)}, and {', '.join(there)} in the file"
        raise DamagedFileError(f"posterior {folder} belongs to another model: the frozen weights differ{cast}.")
    device = dict(base.named_parameters(remove_duplicate=False))[infer[0]].device
    own = {k: v for k, v in tensors.items() if k.partition(".")[0] not in {"frozen", CALIBRATION}}
    law = from_tensors({k: v.to(device) for k, v in own.items()})
    calibration = Calibration.load(saved[CALIBRATION], apart).to(law.mean) if CALIBRATION in saved else None
    return {
        "model": base,
        "likelihood": likelihoods.from_json(saved["likelihood"]),
        "law": law,
        "space": space,
        "infer": infer,
        "preparation": preparation,
        "held": tuple(saved["held"]),
        **{name: saved[name] for name in PLAIN},
        "tempering": saved.get("tempering", 1.0),
        "facts": saved["facts"],
        "frozen": frozen,
        "calibration": None if calibration is None else (law, calibration),
        "walked": (origin_of(base, space, infer, preparation, frozen), Skeleton(prepared, space)),
    }


def origin_of(
    model: nn.Module, space: Space, infer: tuple[str, ...], preparation: Preparation, frozen: Mapping[str, Tensor]
) -> tuple[Any, ...]:
    """What the skeleton of a posterior is made of: it is made anew where this is another."""
    return id(model), space, infer, repr(preparation), tuple(frozen)


def _under(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The tensors whose names begin with a prefix and a dot, without it."""
    return {name.removeprefix(f"{prefix}."): t for name, t in tensors.items() if name.startswith(f"{prefix}.")}


def base_fingerprint(model: nn.Module, in_file: Set[str]) -> str:
    """A hash of the weights that passes use and a file does not hold: draws for one base are wrong on another.

    A weight counts by the name it has without adapters around its layer, since those that are not active may be any.
    """
    left = {name: p for name, p in used_weights(model).items() if name not in in_file}
    names = unwrapped_names(model, left)
    return checksum({names[name]: p for name, p in left.items()})


def base_dtypes(model: nn.Module, in_file: Set[str]) -> list[str]:
    """The precisions of these weights, in order: a cast model is another one, and an error can say so."""
    return sorted({str(p.dtype) for name, p in used_weights(model).items() if name not in in_file})


def _is_base(model: nn.Module, in_file: Set[str], fingerprint: str) -> bool:
    """Whether the weights outside a file are those it was made for.

    Earlier files took names as PEFT gives them, and the first of these counted what no pass uses, too.
    """
    if fingerprint == base_fingerprint(model, in_file):
        return True
    earlier = used_weights(model), dict(model.named_parameters())
    return any(fingerprint == checksum({n: p for n, p in ws.items() if n not in in_file}) for ws in earlier)


def _sum(tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> str:
    return checksum(tensors, json.dumps(facts, sort_keys=True))


def _with_attention(model: nn.Module, saved: Mapping[str, Any], infer: tuple[str, ...], folder: Path) -> nn.Module:
    """The model if its stochastic attention is that of the file; a private tree with it if the model has none."""
    own = describe_families(model)
    if own == saved:
        return model
    if own:
        raise DamagedFileError(
            f"posterior {folder} belongs to another model: it has stochastic attention {saved or 'nowhere'} in the "
            f"file and {own} in the model."
        )
    names = [name for name, p in model.named_parameters(remove_duplicate=False) if p.is_floating_point()]
    try:
        with stream(0, "preparation"):
            return install_described(shadow(model, [name for name in names if name in infer] or names[:1]), saved)
    except ValueError as error:
        raise DamagedFileError(f"posterior {folder} belongs to another model: {error}") from error


def _fitting(
    folder: Path,
    model: nn.Module,
    space: Space,
    infer: tuple[str, ...],
    preparation: Preparation,
    frozen: Mapping[str, Tensor],
    attention: Mapping[str, Any],
) -> nn.Module:
    """The prepared model, if it has the weights and the stochastic attention of the file; else an error."""
    names = dict(model.named_parameters(remove_duplicate=False))
    missing = next((name for name in infer if name not in names), None)
    if missing is not None:
        raise DamagedFileError(f"posterior {folder} belongs to another model: it infers {missing!r}, which is absent.")
    try:
        prepared = prepared_tree(model, infer, preparation, frozen)
        here = Space.of(prepared)
    except (ValueError, AttributeError) as error:
        raise DamagedFileError(f"posterior {folder} belongs to another model: {error}") from error
    if here != space:
        raise DamagedFileError(f"posterior {folder} belongs to another model: {_difference(space, here)}.")
    own = describe_families(prepared)
    if own != attention:
        raise DamagedFileError(
            f"posterior {folder} belongs to another model: its method gives it stochastic attention "
            f"{attention or 'nowhere'} in the file and {own or 'nowhere'} here."
        )
    return prepared


def _difference(there: Space, here: Space) -> str:
    theirs, ours = dict(zip(there.names, there.shapes, strict=True)), dict(zip(here.names, here.shapes, strict=True))
    for name in [*theirs, *ours]:
        if theirs.get(name) != ours.get(name):
            shapes = theirs.get(name, "absent"), ours.get(name, "absent")
            return f"parameter {name!r} is {shapes[0]} in the file and {shapes[1]} in the model"
    return "its parameters are in another order or precision"


def _first_format(folder: Path, saved: dict[str, Any], model: nn.Module) -> dict[str, Any]:
    """A posterior of version 0.1.0: weights over all trainable parameters of a model that needs no preparation."""
    made_by = f"was made by version {saved.get('bayesformer', '0.1.0')}"
    tensors = read_tensors(folder / TENSORS, "posterior")
    if checksum(tensors) != saved.get("checksum"):
        raise DamagedFileError(f"posterior {folder / TENSORS} was altered: its checksum differs.")
    space = Space.of(model)
    if saved["names"] != list(space.names) or saved["shapes"] != [list(shape) for shape in space.shapes]:
        raise DamagedFileError(
            f"posterior {folder} {made_by} for another model, or for one that "
            "its method wrapped (mean_field, concrete_dropout, attention): load it with that version, or fit again."
        )
    method = saved["facts"].get("method", {}).get("name")
    if method in ("attention", "combined") and not describe_families(model):
        raise DamagedFileError(
            f"posterior {folder} {made_by} with stochastic attention, which "
            "files of that version do not describe: install it in the model as it was, or fit again."
        )
    frozen = {name: p for name, p in model.named_parameters() if not p.requires_grad}
    if saved["frozen"] != checksum(frozen):
        raise DamagedFileError(f"posterior {folder} belongs to another model: the frozen weights differ.")
    rate = saved["facts"].get("method", {}).get("rate") if saved["noisy_draws"] else None
    own = set(saved.get("dropout", ())) if saved["noisy_draws"] and rate is None else set()
    if len(own) > 1:
        raise DamagedFileError(f"posterior {folder} {made_by} with dropout rates {sorted(own)}: set them in the model.")
    rate = next(iter(own), rate)
    return {
        "model": model,
        "likelihood": likelihoods.from_json(saved["likelihood"]),
        "law": from_tensors({name: tensor.to(device_of_model(model)) for name, tensor in tensors.items()}),
        "space": space,
        "noisy_draws": saved["noisy_draws"],
        "dropout_rate": rate,
        "default_draws": saved["default_draws"],
        "predictive": saved.get("predictive", "sampled"),
        "link": saved.get("link"),
        "facts": saved["facts"],
    }


def device_of_model(model: nn.Module) -> torch.device:
    """The device of a model's first parameter, on which its law is put."""
    return next(model.parameters()).device

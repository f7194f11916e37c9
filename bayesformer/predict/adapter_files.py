"""A posterior over LoRA adapters beside PEFT's own files, so that PEFT loads its mean and servers load its draws.

`adapter_config.json` and `adapter_model.safetensors` are PEFT's; `posterior.json` and `posterior.safetensors` are ours,
hold the whole, and are ignored by PEFT.
"""

from __future__ import annotations

import logging
from copy import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from bayesformer.core.errors import DamagedFileError
from bayesformer.core.seeds import stream
from bayesformer.core.storage import read_json, write_tensors
from bayesformer.model.adapters import active_adapters, adapters_of, is_adapted
from bayesformer.model.skeleton import shadow

if TYPE_CHECKING:
    from bayesformer.posterior import Posterior

logger = logging.getLogger("bayesformer")

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
OWN = "posterior.json"


def adapter_to_write(model: nn.Module) -> str | None:
    """The adapter that PEFT's files can stand for the model by: its only active one, in force and not merged."""
    active = active_adapters(model)
    if not is_adapted(model) or len(active) != 1:
        return None
    return active[0] if adapters_of(model) in ([], [[active, False, False]]) else None


def write_mean(posterior: Posterior, folder: Path) -> None:
    """PEFT's two files with the mean of a posterior over one adapter; no such files, and a line of the log, of several.

    Of a model that is changed for the posterior (random weights, stochastic attention) there is no such mean: the
    configuration alone is written, so that the posterior can be loaded on the plain base. Files of an earlier save
    would be of another posterior and are taken away.
    """
    if (folder / OWN).exists():
        for name in (CONFIG, WEIGHTS):
            (folder / name).unlink(missing_ok=True)
    if not is_adapted(posterior.model):
        return
    adapter = adapter_to_write(posterior.model)
    if adapter is not None and posterior.preparation.changes:
        _write_config(posterior.model, adapter, folder)
        return
    if adapter is not None:
        write_adapter(posterior, posterior.law.mean, folder)
        return
    logger.warning(
        "PEFT's own files hold one active adapter, and the adapters here are %s (active, merged, disabled): the "
        "posterior is saved without them and loads on a PEFT model with these adapters.",
        adapters_of(posterior.model),
    )


def write_adapter(posterior: Posterior, theta: Tensor, folder: Path) -> None:
    """PEFT's two files with the weights θ (P,) of the active adapter, in PEFT's own names."""
    from peft import get_peft_model_state_dict

    with posterior.shells.borrow() as shell:
        shell.load(theta)
        model: Any = shell.module
        (name,) = active_adapters(model)
        weights = get_peft_model_state_dict(model, adapter_name=name)
        folder.mkdir(parents=True, exist_ok=True)
        write_tensors(
            folder / WEIGHTS, {key: value.detach().clone() for key, value in weights.items()}, {"format": "pt"}
        )
        _write_config(model, name, folder)


def _write_config(model: Any, name: str, folder: Path) -> None:
    """PEFT's configuration of an adapter, with inference_mode on, as PEFT itself saves it."""
    config = copy(model.peft_config[name])
    config.inference_mode = True
    folder.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(str(folder))


def check_exportable(posterior: Posterior, folder: Path) -> None:
    """Refuse posteriors that are not over adapters, and folders that hold draws already."""
    if not is_adapted(posterior.model):
        raise ValueError(
            f"export_adapters needs a posterior over adapters of a PEFT model; got {type(posterior.model).__name__}."
        )
    if adapter_to_write(posterior.model) is None:
        raise ValueError(
            "export_adapters needs a model with one active adapter, neither merged nor disabled, since a file of PEFT "
            f"holds one; got {adapters_of(posterior.model)} (active, merged, disabled)."
        )
    if posterior.noisy_draws or posterior.preparation.changes:
        raise ValueError(
            "export_adapters needs draws of the weights; this posterior is of a random network, whose noise no adapter "
            "can hold."
        )
    there = sorted(path.name for path in folder.glob("draw-*"))
    if there:
        raise ValueError(f"folder must have no draws of an earlier export; {folder} has {', '.join(there[:3])}.")


def export_adapters(posterior: Posterior, folder: Path, draws: int, seed: int) -> list[Path]:
    """Draws as plain PEFT adapters, one folder each."""
    folders = [folder / f"draw-{draw}" for draw in range(draws)]
    for draw, path in enumerate(folders):
        write_adapter(posterior, posterior.law.row(draw, seed), path)
    return folders


def with_adapter(folder: Path, model: nn.Module) -> nn.Module:
    """A plain base model with the adapter of a saved posterior, as a private tree; other models as they are."""
    if is_adapted(model) or not (folder / CONFIG).exists():
        return model
    try:
        from peft import PeftConfig, PeftModel
    except ImportError as error:
        raise ValueError(
            f"posterior {folder} is one over adapters of PEFT; to load it on a plain base model install PEFT: "
            "pip install 'bayesformer[hf]'."
        ) from error
    if getattr(model, "peft_config", None) is not None:  # PEFT puts its layers into the very model that it is given
        raise ValueError(
            "model must be the plain base or the PEFT model around it; this is a base whose layers PEFT has replaced "
            "already. Give the PEFT model itself, or load the base anew."
        )
    names = [name for name, p in model.named_parameters() if p.is_floating_point()]
    private: Any = shadow(model, names[:1])
    try:
        config: Any = PeftConfig.from_pretrained(str(folder))
        if config.is_prompt_learning or not (folder / WEIGHTS).exists():
            return _fresh(private, config, _active(folder))
        with stream(0, "preparation"):  # PEFT draws initial weights before it reads those of the file
            return PeftModel.from_pretrained(private, str(folder), adapter_name=_active(folder), is_trainable=True)
    except (ValueError, RuntimeError, KeyError) as error:
        first = " ".join(line.strip() for line in str(error).splitlines()[:2])  # one mismatch of all that PEFT lists
        other = isinstance(error, RuntimeError)  # shapes; others are for PEFT to explain
        fault = "belongs to another base model" if other else "has an adapter that PEFT refuses"
        raise DamagedFileError(f"posterior {folder} {fault}: {first}") from error


def _fresh(model: Any, config: Any, name: str) -> nn.Module:
    """A model with an adapter, prompt or prefix as it is trained, whose weights are to come from the posterior's file.

    PEFT loads prompts for inference alone, without the network that may make them.
    """
    from peft import get_peft_model

    config.inference_mode = False
    if hasattr(config, "prompt_tuning_init"):
        config.prompt_tuning_init = "RANDOM"  # a text would need its tokenizer
    with stream(0, "preparation"):
        return get_peft_model(model, config, adapter_name=name)


def _active(folder: Path) -> str:
    """The name under which the adapter was active when the posterior was saved."""
    active = [name for names, *_ in read_json(folder / OWN, "posterior").get("adapters", []) for name in names]
    return str(active[0]) if active else "default"

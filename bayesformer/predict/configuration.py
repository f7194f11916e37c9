"""What settings say of a model's function, beside its weights: of transformers, of PEFT, and of the modules of torch.

Equal weights compute another function under another number of heads, another activation or another scale of an adapter.
A saved posterior holds the settings, and a model with others is refused. Modules of one's own have none that are known.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from bayesformer.core.storage import plain
from bayesformer.likelihoods.language import is_causal_language_model, unwrapped
from bayesformer.model.adapters import active_adapters, unwrapped_names, used_modules

OF_NO_WEIGHT = {  # settings of a model that leave its function as it is: where it is from, how it computes, its loss
    *("_name_or_path", "name_or_path", "_commit_hash", "transformers_version", "architectures", "auto_map"),
    *("dtype", "torch_dtype", "quantization_config", "chunk_size_feed_forward", "pretraining_tp", "use_cache"),
    *("attn_implementation", "experts_implementation", "return_dict", "output_attentions", "output_hidden_states"),
    *("id2label", "label2id", "problem_type", "loss_type", "tokenizer_class", "task_specific_params"),
    *("initializer_range", "initializer_factor", "init_std", "gradient_checkpointing", "torchscript"),
}
OF_NO_ADAPTER = {  # those of an adapter; where it sits is told by the names of its weights
    *("base_model_name_or_path", "revision", "peft_version", "auto_mapping", "inference_mode", "task_type"),
    *("target_modules", "exclude_modules", "modules_to_save", "layers_to_transform", "layers_pattern"),
    *("target_parameters", "init_lora_weights", "init_weights", "bias", "runtime_config", "megatron_config"),
    *("megatron_core", "loftq_config", "eva_config", "corda_config", "lora_ga_config", "ensure_weight_tying"),
    *("prompt_tuning_init", "prompt_tuning_init_text", "tokenizer_name_or_path", "tokenizer_kwargs"),
}
DROPOUT = "drop"  # part of the names of dropout rates, which count where draws are of dropout
TOKEN = "_token_id"
OF_A_MODULE = ("num_heads", "activation")  # settings of torch's modules beside those that they list themselves
OF_NO_OUTPUT = {"inplace"}
CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def configuration_of(model: nn.Module, dropout: bool) -> dict[str, Any]:
    """The settings that belong to the function of a model, as JSON, under "models", "adapters" and "modules".

    Args:
        model: with its adapters.
        dropout: whether rates of dropout belong to it.
    """
    left_out = OF_NO_WEIGHT | ({TOKEN} if is_causal_language_model(unwrapped(model)) else set())
    left_out |= set() if dropout else {DROPOUT}
    models: dict[str, Any] = {}
    for name, module in model.named_modules():
        config = vars(module).get("config")
        below = any(not above or name.startswith(f"{above}.") for above in models)
        if callable(getattr(config, "to_dict", None)) and not below:
            models[name] = _kept(config.to_dict(), left_out)
    known = getattr(model, "peft_config", None) or {}
    left_out = OF_NO_ADAPTER | (set() if dropout else {DROPOUT})
    adapters = {name: _kept(known[name].to_dict(), left_out) for name in active_adapters(model) if name in known}
    used = used_modules(model)
    names = unwrapped_names(model, used)
    modules = {names[name]: found for name, module in used.items() if (found := _of_torch(module, dropout))}
    parts = (("models", models), ("adapters", adapters), ("modules", modules))
    return {part: found for part, found in parts if found}


def _of_torch(module: nn.Module, dropout: bool) -> dict[str, Any]:
    """The class of a module of torch and its settings; nothing of other modules, nor of dropout that does not count."""
    kind = type(module)
    if not kind.__module__.startswith("torch.nn.modules") or isinstance(module, CONTAINERS):
        return {}
    if DROPOUT in kind.__name__.lower() and not dropout:
        return {}
    names = {*getattr(module, "__constants__", ()), *OF_A_MODULE} - OF_NO_OUTPUT
    settings = {n: _told(getattr(module, n)) for n in names if hasattr(module, n) and (dropout or DROPOUT not in n)}
    return {"class": kind.__name__, **dict(sorted(settings.items()))}


def _told(value: Any) -> Any:
    """A setting as JSON: a function, such as an activation, by its name."""
    return value.__name__ if callable(value) and hasattr(value, "__name__") else _listed(value)


def first_difference(saved: Mapping[str, Any], here: Mapping[str, Any], path: str = "") -> str | None:
    """The first setting that both have and that differs, in words.

    Releases add settings, and a Trainer gives numbers to special tokens that had none: neither is a difference.
    """
    for name in saved:
        if name not in here or (name.endswith(TOKEN) and None in (saved[name], here[name])):
            continue
        there, own, full = saved[name], here[name], ".".join(part for part in (path, name) if part)
        if isinstance(there, Mapping) and isinstance(own, Mapping):
            found = first_difference(there, own, full)
            if found is not None:
                return found
        elif there != own:
            return f"{full} is {there!r} in the file and {own!r} in the model"
    return None


def _kept(settings: Mapping[str, Any], left_out: set[str]) -> dict[str, Any]:
    """Settings without those that are left out, at every depth; a set in order."""
    parts = ("_attn", *({DROPOUT, TOKEN} & left_out))
    kept = {str(k): v for k, v in settings.items() if k not in left_out and not any(part in str(k) for part in parts)}
    return {name: _kept(v, left_out) if isinstance(v, Mapping) else _listed(v) for name, v in kept.items()}


def _listed(value: Any) -> Any:
    return plain(sorted(value) if isinstance(value, set) else value)

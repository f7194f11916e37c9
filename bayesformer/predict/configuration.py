"""What the configuration of a model of transformers or PEFT says of its function, beside its weights.

Equal weights compute another function under another number of heads, another epsilon or another scale of an adapter.
A saved posterior holds the configuration, and a model with another is refused. Plain modules have none.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from bayesformer.core.storage import plain
from bayesformer.likelihoods.language import is_causal_language_model, unwrapped
from bayesformer.model.adapters import active_adapters

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
}
DROPOUT = "drop"  # part of the names of dropout rates, which count where draws are of dropout
TOKEN = "_token_id"


def configuration_of(model: nn.Module, dropout: bool) -> dict[str, Any]:
    """The settings that belong to the function of a model, as JSON; empty for plain modules.

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
    return {part: found for part, found in (("models", models), ("adapters", adapters)) if found}


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

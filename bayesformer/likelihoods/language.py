"""Language models of transformers: which label belongs to which logits, and what a decoder is fed.

A causal language model answers at position t about the token at t + 1; an encoder-decoder model is fed the labels moved
one position to the right. Both are known by class names and configuration alone: transformers is never imported.
"""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bayesformer.core.types import Batch, Inputs
from bayesformer.data.batches import Batches
from bayesformer.data.mapped import Mapped
from bayesformer.likelihoods import AlignedToken, Categorical, Likelihood, as_likelihood

CAUSAL = ("ForCausalLM", "LMHeadModel")
"""ends of the names of transformers' causal language models"""
NOT_GENERATING = ("Classification", "QuestionAnswering")
"""parts of the names of encoder-decoder models whose labels are no tokens to be generated"""
POSITIONS = ("position_embeddings", "wpe")
"""names of tables of learned positions"""
DECODER_INPUTS = ("decoder_input_ids", "decoder_inputs_embeds")

logger = logging.getLogger("bayesformer")


def resolve(likelihood: Likelihood | str, model: nn.Module, batch: Batch) -> Likelihood:
    """The likelihood to use for this model and data, a batch of which is looked at.

    It is the one given, but for "categorical" (or Categorical() with `aligned` unset) on a causal language model:
    where labels equal input_ids wherever they are not ignored, NextToken is used, and one line of the log says so;
    other labels are an error that asks to choose. A model of one's own around a causal language model is changed to
    NextToken in the same way, but other labels are taken as they are. Categorical likelihoods that stay on a language
    model become AlignedToken, which is the same over a vocabulary.
    """
    known, base = as_likelihood(likelihood), unwrapped(model)
    if _is_encoder_decoder(base):
        if known.ahead:
            raise ValueError(
                f"likelihood must be Categorical() for an encoder-decoder model ({type(base).__name__}), whose decoder "
                f"is fed the labels moved by one position already; got {known}."
            )
        return _over_a_vocabulary(known) if generates_from_labels(base) else known
    shifted, outer = known.next_token, is_causal_language_model(base)
    inside = outer or any(is_causal_language_model(part) for part in base.modules())
    if shifted is None or batch.targets.dim() != 2 or not inside:
        return _over_a_vocabulary(known) if outer and batch.targets.dim() == 2 else known
    if _labels_are_inputs(known, batch):
        logger.warning(
            "labels equal input_ids on %s: the likelihood is NextToken(), logits at t against labels at t + 1.",
            type(base).__name__,
        )
        return shifted
    if outer:
        raise ValueError(
            f"likelihood must say how labels and logits of a causal language model ({type(base).__name__}) line up, "
            "since labels differ from input_ids; got 'categorical'. Use NextToken() if logits at position t are of "
            "the label at t + 1, as in transformers' own loss, or Categorical(aligned=True) if they are of the label "
            "at t."
        )
    return known


def _over_a_vocabulary(likelihood: Likelihood) -> Likelihood:
    """The same likelihood, with predictions that are reduced where they are over all tokens."""
    return AlignedToken.of(likelihood) if type(likelihood) is Categorical else likelihood


def batches_for(model: nn.Module, data: Batches, likelihood: Likelihood) -> Batches:
    """Labelled data as a model takes it: its padding token, decoder inputs made of labels, a column of real labels."""
    data, change = data.padded_with(padding_token(model)), _AsModelTakes(model, likelihood)
    first = data.first(1)
    made = change(first)
    same = made.inputs is first.inputs and made.targets is first.targets
    return data if same else Mapped(data, change)


@dataclass(frozen=True)
class _AsModelTakes:
    """Adds the decoder inputs that an encoder-decoder model makes of its labels, and gives real labels their axis."""

    model: nn.Module
    likelihood: Likelihood

    def __call__(self, batch: Batch) -> Batch:
        inputs = decoder_inputs(self.model, batch.inputs, batch.targets)
        return batch._replace(inputs=inputs, targets=regression_targets(self.model, batch.targets, self.likelihood))


def regression_targets(model: nn.Module, targets: Tensor, likelihood: Likelihood) -> Tensor:
    """Labels (B,) of a regression as (B, 1), the shape of the outputs of transformers' model for it.

    Whole numbers are real ones, too, where the likelihood has a target for every output.
    """
    base = unwrapped(model)
    single = getattr(getattr(base, "config", None), "num_labels", None) == 1
    if not single or "ForSequenceClassification" not in type(base).__name__:
        return targets
    real = targets.is_floating_point() or likelihood.elementwise or likelihood.target_dims > 0
    return targets[:, None] if targets.dim() == 1 and real else targets


def decoder_inputs(model: nn.Module, inputs: Inputs, labels: Tensor | None = None) -> Inputs:
    """Inputs of an encoder-decoder model with decoder_input_ids made from labels (B, T), as its own forward makes them.

    The logits are then those of `model(**inputs, labels=labels)`. Inputs of other models, and inputs that say what the
    decoder is fed, come back as they are. Without labels, as in prediction, there is nothing to make them from, and
    some models would silently feed the decoder their input_ids: that is an error.
    """
    base: Any = unwrapped(model)
    if not generates_from_labels(base) or _has_decoder_inputs(inputs):
        return inputs
    if labels is None:
        raise ValueError(
            f"inputs of an encoder-decoder model ({type(base).__name__}) must have decoder_input_ids where there are "
            f"no labels to make them from; got {_keys(inputs)}."
        )
    if labels.dim() != 2 or labels.is_floating_point() or labels.dtype == torch.bool:
        raise ValueError(
            f"labels of an encoder-decoder model ({type(base).__name__}) must be token numbers (B, T) to make "
            f"decoder_input_ids from; got {labels.dtype} {tuple(labels.shape)}."
        )
    ids = _shifted_right(base, labels.long().masked_fill(labels < 0, -100))  # transformers replaces -100 alone
    made = {**_as_keywords(base, inputs), "decoder_input_ids": ids}
    if _named(base, ("EncoderDecoderModel",), exact=True):  # the one class that also hides the padding it makes
        made.setdefault("decoder_attention_mask", (ids != base.config.pad_token_id).to(ids.dtype))
    return made


def check_tokens(model: nn.Module, inputs: Inputs, name: str) -> None:
    """Refuse token numbers that have no row among the model's embeddings, and more tokens than it has positions.

    Torch would say that an index is out of range, and not of what.
    """
    rows, ids = vocabulary(model), _input_ids(inputs)
    if rows is None or not isinstance(ids, Tensor) or ids.dim() != 2 or ids.is_floating_point() or not ids.numel():
        return
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= rows:
        raise ValueError(
            f"input_ids of {name} must lie in 0..{rows - 1}, the model's embeddings; got {low}..{high}. "
            "Does the tokenizer belong to this model?"
        )
    limit = _position_rows(model)
    if limit is not None and ids.shape[1] > limit:
        raise ValueError(
            f"{name} must have at most {limit} tokens each, the positions that the model has; got {ids.shape[1]}. "
            f"Cut them: tokenizer(..., truncation=True, max_length={limit})."
        )


def vocabulary(model: nn.Module) -> int | None:
    """Rows of the input embeddings, where the model says."""
    base: Any = unwrapped(model)
    try:
        embedding = base.get_input_embeddings() if callable(getattr(base, "get_input_embeddings", None)) else None
    except NotImplementedError:  # models of transformers without tokens
        return None
    return len(embedding.weight) if isinstance(embedding, nn.Embedding) else None


def _position_rows(model: nn.Module) -> int | None:
    """Positions that a model has learned embeddings of; None where it has none, or computes them."""
    for path, module in unwrapped(model).named_modules():
        if isinstance(module, nn.Embedding) and path.rpartition(".")[2] in POSITIONS:
            offset = 0 if module.padding_idx is None else module.padding_idx + 1
            return module.num_embeddings - offset
    return None


def padding_token(model: nn.Module) -> int:
    """The number of a model's padding token, 0 if it has none: classifiers with a decoder look for it at the end."""
    config = getattr(unwrapped(model), "config", None)
    for known in (config, getattr(config, "text_config", None)):
        if isinstance(token := getattr(known, "pad_token_id", None), int):
            return token
    return 0


def is_causal_language_model(model: nn.Module) -> bool:
    """Whether a model is one of transformers' causal language models, or derives from one."""
    return hasattr(model, "config") and _named(model, CAUSAL) and not _is_encoder_decoder(model)


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside PEFT's, torch.compile's and the parallel wrappers, any number of them."""
    inner: Any = model
    while True:
        if isinstance(inner, nn.DataParallel | nn.parallel.DistributedDataParallel):
            inner = inner.module
        elif type(inner).__name__ == "OptimizedModule":  # of torch.compile; the model is its only child
            inner = next(inner.children())
        elif callable(getattr(inner, "get_base_model", None)):
            inner = inner.get_base_model()
        else:
            return inner


def _named(model: nn.Module, names: tuple[str, ...], exact: bool = False) -> bool:
    classes = [kind.__name__ for kind in type(model).__mro__]
    return any(name in names if exact else name.endswith(names) for name in classes)


def _is_encoder_decoder(model: nn.Module) -> bool:
    return getattr(getattr(model, "config", None), "is_encoder_decoder", False) is True


def generates_from_labels(model: nn.Module) -> bool:
    """Whether labels of this model are the tokens that its decoder shall generate."""
    other = any(part in type(model).__name__ for part in NOT_GENERATING)
    return _is_encoder_decoder(model) and not other and "labels" in inspect.signature(model.forward).parameters


def _labels_are_inputs(likelihood: Likelihood, batch: Batch) -> bool:
    ids = _input_ids(batch.inputs)
    if ids is None or ids.shape != batch.targets.shape:
        return False
    kept = likelihood.kept(batch.targets, batch.mask)
    return bool((ids == batch.targets)[kept].all())


def warn_of_padding(likelihood: Likelihood, inputs: Inputs, targets: Tensor, mask: Tensor | None, label: str) -> None:
    """Say in the log that labels of tokens count although the attention mask calls their inputs padding.

    They count as in the loss of transformers: a label of padding is learned, and so is the first token after padding on
    the left, from the logits at a pad.
    """
    attended = inputs.get("attention_mask") if isinstance(inputs, Mapping) else None
    if not likelihood.ahead or attended is None or attended.shape != targets.shape:
        return
    kept, padding = likelihood.kept(targets, mask), attended == 0
    count, first = int((kept & padding).sum()), int((kept[:, 1:] & ~padding[:, 1:] & padding[:, :-1]).sum())
    if count:
        logger.warning("%s data: %d labels count where attention_mask is 0; -100 would leave them out.", label, count)
    if first:
        logger.warning(
            "%s data: %d labels are the first token after padding, predicted from a pad; -100 would leave them out.",
            label,
            first,
        )


def _input_ids(inputs: Inputs) -> Tensor | None:
    if isinstance(inputs, Tensor):
        return inputs
    if isinstance(inputs, Mapping):
        return inputs.get("input_ids")
    return inputs[0] if inputs else None


def _has_decoder_inputs(inputs: Inputs) -> bool:
    return isinstance(inputs, Mapping) and any(inputs.get(name) is not None for name in DECODER_INPUTS)


def _shifted_right(model: Any, labels: Tensor) -> Tensor:
    """Labels moved one position to the right by the model's own function for it."""
    if callable(getattr(model, "prepare_decoder_input_ids_from_labels", None)):
        return model.prepare_decoder_input_ids_from_labels(labels)
    modules = (vars(sys.modules[kind.__module__]) for kind in type(model).__mro__)
    shift = next((names["shift_tokens_right"] for names in modules if "shift_tokens_right" in names), None)
    if shift is None:
        raise ValueError(
            f"inputs must have decoder_input_ids for {type(model).__name__}, which has no public function that makes "
            "them from labels."
        )
    config = model.config
    if getattr(config, "decoder_start_token_id", None) is None and hasattr(config, "text_config"):
        config = config.text_config
    return shift(labels, config.pad_token_id, config.decoder_start_token_id)


def _as_keywords(model: Any, inputs: Inputs) -> dict[str, Tensor]:
    if isinstance(inputs, Mapping):
        return dict(inputs)
    if isinstance(inputs, Tensor):
        return {model.main_input_name: inputs}
    raise ValueError(f"inputs of an encoder-decoder model must be a dict by keyword; got a tuple of {len(inputs)}.")


def _keys(inputs: Inputs) -> str:
    return ", ".join(inputs) if isinstance(inputs, Mapping) else type(inputs).__name__

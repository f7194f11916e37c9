"""all-MiniLM-L6-v2 as the model of tasks on text: its heads, its adapters, its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Literal

import torch
from torch import Tensor, nn

from bayesformer.core.types import Inputs
from bayesformer.datasets.packaged_models import minilm_folder

HEADS = {
    "classes": "BertForSequenceClassification",
    "tokens": "BertForTokenClassification",
    "spans": "BertForQuestionAnswering",
}
TRAINED_HEADS = {"classes": "SEQ_CLS", "tokens": "TOKEN_CLS", "spans": "QUESTION_ANS"}
PADDING = 0
Learned = Literal["lora", "full"]


def encoder_model(head: str, labels: int, learned: Learned) -> nn.Module:
    """The pretrained encoder under a new head: all weights are learned, or adapters on query and value and the head."""
    import transformers

    says = transformers.logging
    before, bar = says.get_verbosity(), says.is_progress_bar_enabled()
    says.set_verbosity_error()  # that the head is new is no news
    says.disable_progress_bar()
    try:
        kind = getattr(transformers, HEADS[head])
        model: nn.Module = kind.from_pretrained(minilm_folder(), num_labels=labels)
    finally:
        says.set_verbosity(before)
        if bar:
            says.enable_progress_bar()
    model.train()  # transformers loads in evaluation mode, in which neither dropout nor attention would be drawn
    if learned == "full":
        return model
    from peft import LoraConfig, get_peft_model

    chosen = LoraConfig(r=8, lora_alpha=16, target_modules=["query", "value"], task_type=TRAINED_HEADS[head])
    return get_peft_model(model, chosen)


@lru_cache(maxsize=1)
def encoder_tokenizer() -> Any:
    """The tokenizer that belongs to the encoder, read once."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(minilm_folder())


def token_numbers(texts: Sequence[Sequence[str]], length: int) -> Tensor:
    """(N, T) token numbers of sentences or pairs of sentences, T the longest and at most `length`, padded with 0."""
    tokenizer = encoder_tokenizer()
    rows = [tokenizer(*text, truncation=True, max_length=length)["input_ids"] for text in texts]
    ids = torch.full((len(rows), max(map(len, rows))), PADDING)
    for row, numbers in zip(ids, rows, strict=True):
        row[: len(numbers)] = torch.tensor(numbers)
    return ids


def encoder_inputs(ids: Tensor) -> Inputs:
    """What the encoder is given for token numbers (N, T): with which of them count, and which are of a second text."""
    ends = (ids == encoder_tokenizer().sep_token_id).long()
    second = ((ends.cumsum(1) - ends) == 1) & (ids != PADDING)
    return {"input_ids": ids, "attention_mask": (ids != PADDING).long(), "token_type_ids": second.long()}

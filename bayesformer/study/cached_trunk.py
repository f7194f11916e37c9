"""The last layers of a causal language model on states of the layers below, which are computed once.

Where only the last layers learn, the layers below give the same states in every epoch, for every member and method.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn


class TopLayers(nn.Module):
    """The decoder layers from `first` on, the norm and the head of a Llama model: states (B, T, D) to logits (B, T, V).

    Sequences are padded on the right if at all: a causal model's real positions do not see what comes after.
    """

    def __init__(self, layers: nn.ModuleList, norm: nn.Module, rotary: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.layers, self.norm, self.rotary, self.head = layers, norm, rotary, head

    @classmethod
    def of(cls, model: Any, first: int) -> TopLayers:
        """Copies of the layers, into which adapters are put; the rest is the model's own."""
        inner = model.model
        return cls(deepcopy(inner.layers[first:]), inner.norm, inner.rotary_emb, model.lm_head)

    def fresh(self) -> TopLayers:
        """A model with layers of its own, which shares norm, rotary embedding and head with this one."""
        return TopLayers(deepcopy(self.layers), self.norm, self.rotary, self.head)

    def forward(self, states: Tensor) -> Tensor:
        """Logits of the next token at every position."""
        places = torch.arange(states.shape[1], device=states.device).unsqueeze(0)
        turned = self.rotary(states, position_ids=places)
        for layer in self.layers:
            states = layer(states, attention_mask=None, position_embeddings=turned, position_ids=places)
        return self.head(self.norm(states))


def trunk_states(model: Any, ids: Tensor, first: int, batch: int = 8) -> Tensor:
    """(N, T, D): what the decoder layer `first` is given for token numbers (N, T)."""
    found = []

    class _Reached(Exception):
        pass

    def keep(_module: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        found.append((given[0] if given else named["hidden_states"]).detach().clone())
        raise _Reached

    hook = model.model.layers[first].register_forward_pre_hook(keep, with_kwargs=True)
    try:
        for part in ids.split(batch):
            try:
                with torch.no_grad():
                    model(input_ids=part, use_cache=False)
            except _Reached:
                continue
    finally:
        hook.remove()
    return torch.cat(found)

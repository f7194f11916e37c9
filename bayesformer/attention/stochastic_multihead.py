"""`nn.MultiheadAttention` with a family: the same module, weights and all, of another class."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from bayesformer.attention.attend import attend, hides
from bayesformer.attention.family import AttentionFamily
from bayesformer.core.compat import NoFastPath
from bayesformer.model.multihead import multi_head_attention_forward


class StochasticMultihead(NoFastPath, nn.MultiheadAttention):
    """Made of an `nn.MultiheadAttention` by changing its class, so that its weights keep their names.

    A class survives copies and pickles, which a method bound to one instance does not.
    """

    attention_family: AttentionFamily

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Arguments and results as torch's."""
        own = query is key
        # One transposed tensor for one input: what is self-attention outside stays so inside.
        turned: dict[int, Tensor] = {}
        flips = self.batch_first and query.dim() == 3
        for x in (query, key, value):
            turned.setdefault(id(x), x.transpose(0, 1) if flips else x)

        def weighted(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
            valid, rate = _valid(key_padding_mask) if own else None, self.dropout if self.training else 0.0
            scale = math.sqrt(1 / q.shape[-1])
            return attend(self.attention_family, q, k, v, mask, scale, valid=valid, dropout=rate)

        out, weights = multi_head_attention_forward(
            turned[id(query)],
            turned[id(key)],
            turned[id(value)],
            self.embed_dim,
            self.num_heads,
            self.in_proj_weight,
            self.in_proj_bias,
            self.bias_k,
            self.bias_v,
            self.add_zero_attn,
            self.dropout,
            self.out_proj.weight,
            self.out_proj.bias,
            training=self.training,
            key_padding_mask=key_padding_mask,
            need_weights=need_weights,
            attn_mask=attn_mask,
            use_separate_proj_weight=self.in_proj_weight is None,
            q_proj_weight=self.q_proj_weight,
            k_proj_weight=self.k_proj_weight,
            v_proj_weight=self.v_proj_weight,
            average_attn_weights=average_attn_weights,
            is_causal=is_causal,
            attend=weighted,
        )
        return (out.transpose(0, 1) if flips else out), weights


def _valid(key_padding_mask: Tensor | None) -> Tensor | None:
    """(B, 1, T, 1): queries that are no padding, in self-attention."""
    if key_padding_mask is None:
        return None
    hidden = key_padding_mask if key_padding_mask.dtype == torch.bool else hides(key_padding_mask)
    return ~hidden.reshape(-1, 1, hidden.shape[-1], 1)

"""The CNN-LSTM for text of Wenzel et al. (2020), "How good is the Bayes posterior in deep neural networks really?".

Embedding, one convolution over words, max-pooling, an LSTM, and the logits from its last state: 2.64 million weights
with the sizes of the paper, nearly all of them in the embedding. The LSTM is written out of linear layers, so that
everything that works on linear layers, curvature and vmapped passes included, works on it.

Letters: B batch, T words, F filters, H hidden units, C classes.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bayesformer.attention.multi_head import Linear
from bayesformer.attention.ranges import check_positive
from bayesformer.models.transformer import Embedding


class LstmLayer(nn.Module):
    """A long short-term memory (Hochreiter and Schmidhuber 1997, with forget gates), from (B, T, D) to its last state.

    i, f, g, o = W x_t + U h_{t-1} + b,   c_t = σ(f) c_{t-1} + σ(i) tanh(g),   h_t = σ(o) tanh(c_t)
    """

    def __init__(self, inputs: int, hidden: int) -> None:
        super().__init__()
        check_positive(inputs=inputs, hidden=hidden)
        self.hidden = hidden
        self.of_input, self.of_state = Linear(inputs, 4 * hidden), Linear(hidden, 4 * hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(B, H): the state after the last step."""
        gates_of_input = self.of_input(x)  # all steps at once
        state = cell = x.new_zeros(*x.shape[:-2], self.hidden)
        for step in range(x.shape[-2]):
            i, f, g, o = (gates_of_input[..., step, :] + self.of_state(state)).chunk(4, -1)
            cell = torch.sigmoid(f) * cell + torch.sigmoid(i) * torch.tanh(g)
            state = torch.sigmoid(o) * torch.tanh(cell)
        return state


class CnnLstm(nn.Module):
    """Token numbers in, the logits of C classes out."""

    def __init__(
        self,
        vocabulary: int,
        classes: int = 2,
        dim: int = 128,
        filters: int = 64,
        kernel: int = 5,
        pool: int = 4,
        hidden: int = 70,
    ) -> None:
        super().__init__()
        check_positive(vocabulary=vocabulary, classes=classes, dim=dim, filters=filters, kernel=kernel, pool=pool)
        self.embedding, self.convolution = Embedding(vocabulary, dim), nn.Conv1d(dim, filters, kernel)
        self.pool, self.lstm = pool, LstmLayer(filters, hidden)
        self.projection = Linear(hidden, classes)

    def forward(self, input_ids: Tensor) -> Tensor:
        """From (B, T) to (B, C); a text is best padded in front, as its last state is read."""
        words = self.embedding(input_ids).transpose(-1, -2)  # (B, D, T)
        found = F.max_pool1d(F.relu(self.convolution(words)), self.pool)
        return self.projection(self.lstm(found.transpose(-1, -2)))

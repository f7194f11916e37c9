"""Inputs of encoder-decoder models for prediction: the decoder is fed what the labels say, batch by batch."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from bayesformer.core.types import Inputs
from bayesformer.data.unlabelled import Asked, InputBatches, TensorInputs
from bayesformer.likelihoods.language import decoder_inputs, generates_from_labels, unwrapped


def fed(model: nn.Module, data: InputBatches) -> InputBatches:
    """The data with the decoder inputs that their labels make, as in training; those of other models as they are.

    Data of an encoder-decoder model with neither are refused here, before anything is computed.
    """
    if not generates_from_labels(unwrapped(model)):
        return data
    if isinstance(data, TensorInputs):
        return TensorInputs(decoder_inputs(model, data.inputs, data.labels), "inputs", data.labels, data.mask)
    found = FedInputs(model, data)
    found.first(1)
    return found


class FedInputs:
    """Inputs of an encoder-decoder model with its decoder inputs."""

    def __init__(self, model: nn.Module, data: InputBatches) -> None:
        self.model, self.data, self.num_data = model, data, data.num_data

    def in_order(self, batch_size: int, device: torch.device | str | None = None) -> Iterator[Inputs]:
        """Every example once, in the data's own order."""
        for asked in self.labelled(batch_size, device):
            yield asked.inputs

    def labelled(self, batch_size: int, device: torch.device | str | None = None) -> Iterator[Asked]:
        """Batches of inputs in the data's own order, with the decoder inputs that their labels make."""
        for asked in self.data.labelled(batch_size, device):
            yield self._fed(asked)

    def first(self, count: int) -> Inputs:
        """The first examples, at most `count`."""
        return self.first_labelled(count).inputs

    def first_labelled(self, count: int) -> Asked:
        """At most `count` examples with their labels and decoder inputs."""
        return self._fed(self.data.first_labelled(count))

    def padded_with(self, token: int) -> FedInputs:
        """The same inputs, padded with `token`."""
        return FedInputs(self.model, self.data.padded_with(token))

    def _fed(self, asked: Asked) -> Asked:
        return asked._replace(inputs=decoder_inputs(self.model, asked.inputs, asked.labels))

"""Curvature of single batches against that of the same data in one sweep."""

import pytest
import torch

from bayesformer.core.draws import drawing_from
from bayesformer.core.vectors import THETA
from bayesformer.data import Data, as_batches
from bayesformer.jacobians import columns
from bayesformer.laplace.batch_curvature import BatchCurvature
from bayesformer.laplace.estimate import estimate
from bayesformer.likelihoods import Categorical, NextToken
from tests.laws import assert_mean
from tests.nets import Mlp, blobs, shell_of


def added(curvature, theta, data, sizes):
    """N times the mean over the batches, weighted by their sizes."""
    total, start = 0.0, 0
    for size in sizes:
        found = curvature({THETA: theta}, data.take(slice(start, start + size)))
        total, start = total + size * (found if torch.is_tensor(found) else found[THETA]), start + size
    return total


@pytest.mark.parametrize("structure", ["full", "diag"])
def test_batches_add_up_to_the_curvature_of_all_data_at_the_weights_given(structure):
    model, data = Mlp().double().eval(), blobs(20)
    data = Data(data.inputs.double(), data.targets)
    shell = shell_of(model)
    shell.module.eval()
    theta = shell.theta + 0.3
    found = added(BatchCurvature(shell, Categorical(), as_batches(data), structure), theta, data, [8, 1, 11])
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.3)
    whole = estimate(model, "categorical", data, structure)
    expected = torch.zeros_like(found)
    for place, block in zip(whole.places, whole.structures, strict=True):
        expected[place if structure == "diag" else (place, place)] = (
            block.diagonal() if structure == "diag" else block.dense()
        )
    torch.testing.assert_close(found, expected)


class Tokens(torch.nn.Module):
    """Logits of the next of four tokens at each of five positions."""

    def __init__(self):
        super().__init__()
        self.table, self.head = torch.nn.Embedding(4, 3), torch.nn.Linear(3, 4)

    def forward(self, tokens):
        return self.head(torch.tanh(self.table(tokens)))


@pytest.mark.parametrize("affordable", [True, False])
def test_outputs_at_every_position_are_exact_or_right_on_average(affordable, monkeypatch):
    if not affordable:
        monkeypatch.setattr(columns, "EXACT", 0)
    torch.manual_seed(0)
    model, tokens = Tokens().double().eval(), torch.randint(4, (6, 5))
    data = Data(tokens, tokens)
    shell = shell_of(model)
    shell.module.eval()
    curvature = BatchCurvature(shell, NextToken(), as_batches(data), "diag")
    with drawing_from(torch.Generator().manual_seed(0)):
        draws = 1 if affordable else 2000
        found = [curvature({THETA: shell.theta.clone()}, data.take(slice(0, 6)))[THETA] for _ in range(draws)]
    assert curvature.sweep.kind == ("ggn" if affordable else "mc")
    whole = estimate(model, NextToken(), data, "diag", kind="ggn")
    exact = torch.cat([block.diagonal() for block in whole.structures]) / 6
    if affordable:
        torch.testing.assert_close(found[0], exact)
    else:
        assert_mean(torch.stack(found), exact)

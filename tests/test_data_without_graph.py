"""What is trained on is data: it gets no gradient, and neither does what made it."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, default_collate

import bayesformer as bf
from bayesformer.data import as_batches

SHORT = bf.Training(epochs=2, batch_size=8)
X = torch.randn(24, 4, generator=torch.Generator("cpu").manual_seed(0))
Y = (X[:, 0] > 0).long()


def encoded(encoder):
    def collate(items):
        x, y = default_collate(items)
        return encoder(x), y

    return DataLoader(TensorDataset(X, Y), batch_size=8, collate_fn=collate)


def test_inputs_that_require_a_gradient_get_none():
    own = X.clone().requires_grad_()
    noisy = Y.float()[:, None].requires_grad_()
    bf.fit(nn.Linear(4, 2), (own, Y), likelihood="categorical", training=SHORT, progress=False)
    bf.fit(nn.Linear(4, 1), (own, noisy), likelihood=bf.Gaussian(1.0), training=SHORT, progress=False)
    bf.laplace(nn.Linear(4, 2).eval(), {"input": own, "labels": Y}, likelihood="categorical")
    assert own.grad is noisy.grad is None
    assert own.requires_grad


@pytest.mark.parametrize(
    "make", [lambda e: (e(X), Y), encoded, lambda e: [(e(x), y) for x, y in zip(X, Y, strict=True)]]
)
@pytest.mark.parametrize("role", ["data", "validation"])
def test_a_module_that_makes_the_inputs_gets_no_gradient(make, role):
    torch.manual_seed(0)
    encoder = nn.Linear(4, 3)
    with torch.no_grad():
        plain = encoder(X), Y
    parts = {"data": plain, "validation": None} | {role: make(encoder)}
    options = {"likelihood": "categorical", "training": SHORT, "method": bf.Mle(), "progress": False}
    model = nn.Linear(3, 2)
    found = bf.fit(model, parts["data"], validation=parts["validation"], **options)
    assert encoder.weight.grad is None
    expected = bf.fit(model, plain, validation=None if parts["validation"] is None else plain, **options)
    torch.testing.assert_close(found.theta, expected.theta)


def test_no_batch_has_a_graph():
    own = X.clone().requires_grad_()
    for data in ((own, Y), bf.Data({"x": (own, own)}, Y), encoded(nn.Linear(4, 3)), TensorDataset(own, Y)):
        batch = as_batches(data).first(2)
        tensors = batch.inputs["x"] if isinstance(batch.inputs, dict) else [batch.inputs]
        assert not any(tensor.requires_grad for tensor in tensors)

"""What is wrong with data or a call is said before work begins, with the argument, the rule and the value."""

import logging
from dataclasses import dataclass

import pytest
import torch
import transformers
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import bayesformer as bf
from bayesformer.likelihoods import Likelihood

SHORT = bf.Training(epochs=2, batch_size=8)
LIKELIHOODS = {"categorical": 9, "bernoulli": 2.0, "poisson": -1.0}


class OneBad(Dataset):
    """Its 40th of 45 targets cannot be."""

    def __init__(self, bad):
        self.bad = bad

    def __len__(self):
        return 45

    def __getitem__(self, i):
        value = self.bad if i == 40 else type(self.bad)(i % 2)
        return torch.ones(3) * i / 45, torch.tensor(value if isinstance(value, int) else [value])


@pytest.mark.parametrize("likelihood", LIKELIHOODS)
@pytest.mark.parametrize("method", ["mle", "sghmc"])
def test_a_target_that_cannot_be_is_named_wherever_it_stands(likelihood, method):
    bad = LIKELIHOODS[likelihood]
    model = nn.Linear(3, 2 if likelihood == "categorical" else 1)
    with pytest.raises(ValueError, match=rf"got {bad}"):
        bf.fit(model, OneBad(bad), likelihood=likelihood, method=method, training=SHORT, progress=False)


def test_loss_refuses_what_fit_refuses():
    model, x = nn.Linear(3, 2), torch.ones(4, 3)
    for targets in (torch.tensor([0, 1, 9, 0]), torch.tensor([0.0, 1.7, 0.0, 1.0])):
        with pytest.raises(ValueError, match="targets"):
            bf.loss(model, x, targets, likelihood="categorical", num_data=4)


def test_a_log_joint_refuses_names_that_the_model_has_not():
    value = bf.log_joint(nn.Linear(3, 2), "categorical", "normal(0, 1)", 4)
    batch = bf.Batch(torch.ones(4, 3), torch.zeros(4, dtype=torch.int64))
    with pytest.raises(ValueError, match="it has no 'bais'"):
        value({"weight": torch.zeros(2, 3), "bais": torch.zeros(2)}, batch)


class Endless:
    """Has no length."""

    def __init__(self, rows):
        self.rows = rows

    def __iter__(self):
        return iter(self.rows)


def test_a_stream_that_is_shorter_than_it_says_is_noticed(caplog):
    rows = Endless([(torch.ones(3), 0)] * 5)
    with caplog.at_level(logging.WARNING, "bayesformer"):
        bf.fit(nn.Linear(3, 2), bf.Stream(rows, num_data=8), likelihood="categorical", training=SHORT, progress=False)
    assert "ended after 5 examples; num_data is 8" in caplog.text


@dataclass(frozen=True)
class HalfLikelihood(Likelihood):
    name = "half"

    def log_density(self, outputs, targets):
        return -(outputs - targets).square()


class Graph:
    edge_index = torch.zeros(2, 1)


class Masked(nn.Linear):
    def forward(self, input_ids):
        return super().forward(input_ids)


def ragged():
    return [{"input_ids": [1.0] * (2 + i % 2), "labels": 0} for i in range(4)]


def llama():
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=10, **sizes))


XY = torch.ones(4, 3), torch.zeros(4, dtype=torch.int64)
IDS = torch.tensor([[1, 2, 12]])


def nan_weights():
    model = nn.Linear(3, 2)
    nn.init.constant_(model.weight, float("nan"))
    return model


MISTAKES = {
    "training": (lambda: fit(training={"epochs": 3}), "training must be a Training"),
    "infer": (lambda: fit(infer=3), "infer must be a pattern"),
    "prior": (lambda: fit(method=bf.Map(prior=3.0)), "prior must be a law"),
    "scale": (lambda: bf.Gaussian(scale="1"), "Gaussian.scale must be a positive finite number"),
    "half": (lambda: fit(likelihood=HalfLikelihood()), "likelihood must define predictive"),
    "graph": (lambda: fit(data=Graph()), "got a graph, Graph"),
    "mask": (lambda: fit(model=Masked(3, 2), data=ragged()), "is made here for sequences of unequal lengths"),
    "names": (lambda: fit(data=({"z": XY[0]}, XY[1])), "arguments of the model's forward, input; got z"),
    "nan": (lambda: fit(model=nan_weights()), "must be numbers; got NaN"),
    "tokens": (
        lambda: fit(model=llama(), data={"input_ids": IDS, "labels": IDS}, likelihood=bf.NextToken()),
        r"must lie in 0\.\.9",
    ),
    "builder": (lambda: bf.Posterior.load("nowhere", lambda: nn.Linear(3, 2)), "Call it, to give the model"),
    "keys": (lambda: fit(data=[{"input": [1.0], "labels": 0}, {"input": [1.0]}]), "number 1 of it"),
}


def fit(model=None, data=XY, likelihood="categorical", **more):
    return bf.fit(model or nn.Linear(3, 2), data, likelihood=likelihood, **{"training": SHORT, **more}, progress=False)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_of_a_call_are_named(mistake):
    act, text = MISTAKES[mistake]
    with pytest.raises(ValueError, match=text):
        act()


class OneNan(Dataset):
    """Its 40th of 45 inputs is no number."""

    def __len__(self):
        return 45

    def __getitem__(self, i):
        return torch.full((3,), float("nan") if i == 40 else 1.0), i % 2


NANS = torch.ones(45, 3)
NANS[40, 1:] = float("nan")
LABELS = torch.zeros(45, dtype=torch.int64)
BAD = LABELS.index_fill(0, torch.tensor([40, 43]), 9)
LABELLED = {"input": torch.ones(45, 3), "labels": BAD}
ROWS = {
    "NaN in tensors": (lambda: fit(data=(NANS, LABELS)), "got 2 NaN or infinite values, from row 40 on"),
    "NaN in a dataset": (lambda: fit(data=OneNan()), "got 3 NaN or infinite values, from row 40 on"),
    "NaN in a stream": (
        lambda: fit(data=bf.Stream(lambda: map(OneNan().__getitem__, range(45)), num_data=45)),
        "got 3 NaN or infinite values, from row 0 of a batch on",
    ),
    "NaN to predict on": (lambda: fit().predict(OneNan()), "^inputs must be finite; got 3 .* from row 40 on"),
    "label": (lambda: fit(data=(torch.ones(45, 3), BAD)), "train data: .* got 9. The first is in row 40.$"),
    "label of a dict": (lambda: fit(data=LABELLED), "got 9. The first is in row 40.$"),
    "label of a batch": (
        lambda: bf.laplace(nn.Linear(3, 2).eval(), OneBad(9), likelihood="categorical"),
        "got 9. The first is in row 40 of minibatch 0.$",
    ),
    "label in training": (lambda: fit(data=OneBad(9), method=bf.Mle()), r"got 9. The first is in row \d of a batch.$"),
    "count": (
        lambda: fit(data=(torch.ones(45, 3), BAD[:, None] - 1.0), likelihood="poisson", model=nn.Linear(3, 1)),
        "-1",
    ),
    "type of all": (lambda: fit(data=(torch.ones(45, 3), BAD.float())), "must be integers; got torch.float32.$"),
    "validation": (lambda: fit(validation=(XY[0][:0], XY[1][:0])), "validation: inputs must have at least one example"),
    "single examples": (
        lambda: fit(data=DataLoader(TensorDataset(*XY), batch_size=None)),
        "got a single number, the target of one example. A DataLoader with batch_size=None",
    ),
    "lists": (
        lambda: fit(data=(torch.ones(45, 3).tolist(), [0] * 45)),
        r"got \['float'\]. Give lists of numbers as torch.tensor",
    ),
    "targets to predict on": (
        lambda: fit().predict(XY),
        r"forward takes, input; got a tuple of 2, .* or give them as bf.Data\(inputs, targets\)",
    ),
}


@pytest.mark.parametrize("mistake", ROWS)
def test_errors_of_values_say_where_they_are(mistake):
    act, text = ROWS[mistake]
    with pytest.raises(ValueError, match=text) as caught:
        act()
    assert len(str(caught.value)) < 400


class Pair(nn.Linear):
    def forward(self, x, scale=None):
        return super().forward(x if scale is None else x * scale)


def test_a_tuple_is_the_inputs_of_a_model_that_takes_so_many():
    posterior = fit(Pair(3, 2), ((XY[0], 2 * XY[0]), XY[1]))
    one = posterior.predict((XY[0], 2 * XY[0]))
    torch.testing.assert_close(one.probs, posterior.predict(bf.Data((XY[0], 2 * XY[0]), XY[1])).probs)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_fit_works_where_gradients_are_switched_off(mode):
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    plain = fit(model)
    with mode():
        inside = fit(model, (XY[0] * 1.0, XY[1] * 1))
    assert torch.equal(plain.theta, inside.theta)


def test_one_output_cannot_tell_classes_apart():
    with pytest.raises(ValueError, match="needs at least two outputs, one for each class; the model has one"):
        bf.fit(nn.Linear(3, 1), (torch.randn(8, 3), torch.zeros(8, dtype=torch.int64)), likelihood="categorical")

"""What is wrong with data or a call is said before work begins, with the argument, the rule and the value."""

import logging
from dataclasses import dataclass

import pytest
import torch
import transformers
from torch import nn
from torch.utils.data import Dataset

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


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_fit_works_where_gradients_are_switched_off(mode):
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    plain = fit(model)
    with mode():
        inside = fit(model, (XY[0] * 1.0, XY[1] * 1))
    assert torch.equal(plain.theta, inside.theta)

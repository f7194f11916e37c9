"""Laplace for language models: thousands of outputs at every token, and never a matrix over two of them."""

import sys

import peft
import pytest
import torch
import transformers
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import bayesformer as bf
from bayesformer.data import InMemory
from bayesformer.laplace import estimate as curvature_of
from bayesformer.laplace.structures import KroneckerCurvature
from bayesformer.laws import GaussianLaw, gaussian
from bayesformer.model.space import Space
from bayesformer.predict import head, linearised
from tests.curvature_zoo import jacobian

F64 = torch.float64
C, D, T = 5000, 8, 3  # more outputs than a dense Kronecker factor may have


class Largest(TorchDispatchMode):
    """Remembers the largest tensor that was made, in forward and backward passes."""

    numbers, shape = 0, None

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        for x in tree_leaves(found):
            if not isinstance(x, torch.Tensor) or x.dtype == torch.uint8:  # bytes for the allocator, never touched
                continue
            numbers = x.untyped_storage().nbytes() // x.element_size()  # fewer than it shows, if expanded
            if numbers > self.numbers:
                self.numbers, self.shape = numbers, tuple(x.shape)
        return found


def llama(vocabulary=C, tied=False):
    config = transformers.LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=D,
        intermediate_size=12,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=8,
        tie_word_embeddings=tied,
        bos_token_id=1,
        eos_token_id=2,
    )
    return transformers.LlamaForCausalLM(config)


def problem(which):
    model = llama()
    if which == "lora":
        config = peft.LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        model = peft.get_peft_model(model, config)
    else:
        model.requires_grad_(False)
        model.lm_head.requires_grad_(True)
    ids = torch.randint(C, (4, T))
    return model.eval(), bf.Data({"input_ids": ids, "attention_mask": torch.ones_like(ids)}, torch.randint(C, (4, T)))


@pytest.mark.parametrize("structure", ["diag", "kron"])
@pytest.mark.parametrize("which", ["last layer", "lora"])
def test_nothing_is_as_large_as_a_square_of_the_outputs(which, structure):
    """Fit and predict. What is allowed: some numbers for each output of each token, and for each weight."""
    model, data = problem(which)
    inputs = {name: x[:2] for name, x in data.inputs.items()}
    aligned = bf.Categorical(aligned=True)
    with Largest() as largest:
        posterior = bf.laplace(model, data, likelihood=aligned, structure=structure, prior_precision=1.0)
        outputs = posterior.outputs(inputs)
        probs = posterior.predict(inputs, link="probit", full=True).probs
        posterior.predict(inputs, draws=3, full=True)
    assert largest.numbers < C * C / 10, f"{largest.shape} was made"
    assert largest.numbers > C * D  # it looks at all of it
    assert outputs.mean.shape == (2, T, C)
    assert (outputs.factor is None) == ((which, structure) == ("last layer", "diag"))
    torch.testing.assert_close(probs.sum(-1), torch.ones(2, T))


def exact(model, inputs, covariance):
    """J Σ Jᵀ for one example, output by output."""
    rows, outputs = jacobian(model, bf.Data(inputs, torch.zeros(1)).take(slice(0, 1)))
    return outputs, rows @ covariance @ rows.T


@pytest.mark.parametrize("tied", [False, True], ids=["apart", "tied"])
@pytest.mark.parametrize("law", ["diagonal", "low rank"])
def test_more_outputs_than_features_are_exact_whatever_is_random(law, tied):
    """All weights, the last layer among them: it moves outputs in ways that no feature can."""
    model = llama(40, tied).double().eval()
    size = Space.of(model).size
    mean = Space.of(model).pack(dict(model.named_parameters()))
    sd, factor = 0.1 + torch.rand(size, dtype=F64), torch.randn(2, size, dtype=F64)
    weights = gaussian(mean, sd) if law == "diagonal" else gaussian(mean, sd, factor)
    covariance = sd.square().diag() + (0 if law == "diagonal" else factor.T @ factor)
    ids = torch.tensor([[3, 5]])
    found = bf.Posterior(model, bf.Categorical(), weights).outputs({"input_ids": ids}, predictive="linearised")
    outputs, whole = exact(model, {"input_ids": ids}, covariance)
    torch.testing.assert_close(found.mean, outputs)
    blocks = torch.stack([whole[:40, :40], whole[40:, 40:]]).unsqueeze(0)
    # A Llama computes its norms and rotations in float32, whatever it is given.
    torch.testing.assert_close(found.covariance, blocks, rtol=1e-5, atol=1e-5)


def test_a_kronecker_head_that_must_be_cut_keeps_its_variances(monkeypatch):
    monkeypatch.setattr(head, "SQUARE", 10)
    model, x = nn.Linear(4, 30, bias=False).double().eval(), torch.randn(5, 4, dtype=F64)
    b, a = torch.randn(30, 6, dtype=F64), torch.randn(4, 4, dtype=F64)
    vectors, values, _ = torch.linalg.svd(b, full_matrices=False)
    pairs = torch.linalg.eigh(a @ a.T)
    curvature = KroneckerCurvature(values.square(), pairs[0], vectors, pairs[1])
    block = curvature.posterior(torch.tensor(0.7, dtype=F64))
    law = GaussianLaw(model.weight.detach().flatten(), (slice(0, 120),), (block,))
    posterior = bf.Posterior(model, bf.Categorical(), law, predictive="linearised")
    covariance = (curvature.dense() + 0.7 * torch.eye(120, dtype=F64)).inverse()
    rows = torch.stack([torch.kron(torch.eye(30, dtype=F64), row.unsqueeze(0)) for row in x])
    expected = (rows @ covariance @ rows.mT).diagonal(dim1=-2, dim2=-1)
    whole = posterior.outputs(x)
    monkeypatch.setattr(linearised, "FACTOR", 5 * 30 * 2)
    cut = bf.Posterior(model, bf.Categorical(), law, predictive="linearised").outputs(x)
    assert (whole.factor.shape[-1], cut.factor.shape[-1]) == (6, 2)
    torch.testing.assert_close(whole.variance, expected)
    torch.testing.assert_close(cut.variance, expected)


class Reading(InMemory):
    """Remembers how many examples were read at a time."""

    def __init__(self, data):
        super().__init__(data)
        self.sizes = []

    def in_order(self, batch_size, device=None):
        for batch in super().in_order(batch_size, device):
            self.sizes.append(len(batch.targets))
            yield batch


def test_minibatches_are_small_where_outputs_are_many(monkeypatch):
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 6)).double().eval()
    data = bf.Data(torch.randn(7, 3, dtype=F64), torch.randint(6, (7,)))
    whole = curvature_of(model, "categorical", data, "full")
    read = Reading(data)
    monkeypatch.setattr(sys.modules["bayesformer.laplace.estimate"], "OUTPUTS", 13)  # its name is a function's too
    found = curvature_of(model, "categorical", read, "full")
    assert read.sizes == [2, 2, 2, 1]
    torch.testing.assert_close(found.structures[0].dense(), whole.structures[0].dense())

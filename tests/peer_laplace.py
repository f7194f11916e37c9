"""laplace-torch and curvlinops on our problems, with their answers as matrices; tests that import this skip without."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import bayesformer as bf
from bayesformer.laplace import estimate as curvature_of
from bayesformer.model.calling import apply
from tests.curvature_zoo import assembled

laplace = pytest.importorskip("laplace")
curvlinops = pytest.importorskip("curvlinops")
backends = pytest.importorskip("laplace.curvature")

F64 = torch.float64
D, SIGMA = 1.7, 0.7  # precision of the prior, noise of a regression
SINGLE = 1e-6  # digits of a full matrix of laplace-torch, which it multiplies out with an identity in float32
LOSSES = {"classification": nn.CrossEntropyLoss(reduction="sum"), "regression": nn.MSELoss(reduction="sum")}


class PerToken(nn.Module):
    """Two layers shared by the positions of a series; with `pooled` the mean over positions is the output."""

    def __init__(self, pooled=False):
        super().__init__()
        self.pooled = pooled
        self.inner, self.outer = nn.Linear(3, 4), nn.Linear(4, 3)

    def forward(self, x):
        found = self.outer(torch.tanh(self.inner(x)))
        return found.mean(1) if self.pooled else found


def close(found, expected, rtol=1e-9):
    """Up to rounding, in units of the largest number."""
    torch.testing.assert_close(found, expected, rtol=rtol, atol=rtol * float(expected.abs().max()))


def likelihood_of(kind, sigma=SIGMA):
    return bf.Categorical() if kind == "classification" else bf.Gaussian(sigma)


def targets_of(kind, *shape):
    return torch.randint(3, shape) if kind == "classification" else torch.randn(*shape, 3, dtype=F64)


class Dicts(Dataset):
    """Keyword inputs with their labels, as Hugging Face has them."""

    def __init__(self, data):
        self.columns = {**data.inputs, "labels": data.targets}

    def __len__(self):
        return len(self.columns["labels"])

    def __getitem__(self, i):
        return {name: column[i] for name, column in self.columns.items()}


class OfDict(nn.Module):
    """A model of keyword inputs as a function of one dict: laplace-torch passes the batch on as it is."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, batch):
        return apply(self.model, {name: x for name, x in batch.items() if name != "labels"})


def fitted(model, kind, data, structure, backend="CurvlinopsGGN", subset="all", sigma=SIGMA, **options):
    """Their posterior, in two minibatches."""
    loader = Dicts(data) if isinstance(data.inputs, dict) else TensorDataset(data.inputs, data.targets)
    noise = {"sigma_noise": sigma} if kind == "regression" else {}
    theirs = laplace.Laplace(
        model,
        kind,
        subset_of_weights=subset,
        hessian_structure=structure,
        prior_precision=D,
        backend=getattr(backends, backend),
        **noise,
        **options,
    )
    theirs.fit(DataLoader(loader, batch_size=(len(data) + 1) // 2))
    return theirs


def matrix(found):
    """Their diagonal, Kronecker or full curvature as a matrix."""
    if isinstance(found, torch.Tensor):
        return found.diag() if found.dim() == 1 else found
    return found.to_matrix()


def operator(name, model, kind, data, **options):
    """A linear operator of curvlinops, multiplied out, for the curvature of -log p."""
    inputs, targets = data.inputs, data.targets
    parameters = [p for p in model.parameters() if p.requires_grad]
    if isinstance(inputs, dict):
        model, options = OfDict(model), {**options, "batch_size_fn": lambda batch: len(batch["input_ids"])}
    elif targets.dim() == 2 + (kind == "regression"):  # a target per token: their losses want tokens as a batch
        model, targets = nn.Sequential(model, nn.Flatten(0, 1)), targets.flatten(0, 1)
        options = {**options, "num_data": len(inputs)}
    found = getattr(curvlinops, name)(
        model, LOSSES[kind], parameters, [(inputs, targets)], check_deterministic=False, **options
    )
    scale = 1.0 if kind == "classification" else 0.5 / SIGMA**2  # from a squared error to -log p
    return scale * (found @ torch.eye(found.shape[0], dtype=F64))


def ours(model, likelihood, data, structure, **options):
    """Our curvature as a matrix."""
    found = curvature_of(model, likelihood, data, structure, **options)
    return assembled(found, sum(p.numel() for p in model.parameters() if p.requires_grad))


def covariance(weights):
    """(P, P) of a law made of blocks, 0 where there is no spread."""
    whole = torch.zeros(weights.size, weights.size, dtype=F64)
    for place, block in zip(weights.places, weights.blocks, strict=True):
        index = torch.arange(weights.size)[place]
        whole[index[:, None], index] = block.times(torch.eye(block.size, dtype=F64))
    return whole


def blocks(model):
    """Where each parameter lies in the flat vector, by name."""
    start, places = 0, {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            places[name] = slice(start, start + parameter.numel())
            start += parameter.numel()
    return places

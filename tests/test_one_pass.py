"""The one-pass rule as a predictor: posteriors in every form, limits, scale, sensitivity, errors."""

import math
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.func import functional_call, jacrev

from bayesformer.bench.tasks import TASKS
from bayesformer.core.types import GaussianOutputs
from bayesformer.data.inputs import first_tensor, map_inputs
from bayesformer.laws import Dense, Diagonal, GaussianLaw, Kronecker, LowRank, Samples, gaussian
from bayesformer.likelihoods import Categorical, Gaussian
from bayesformer.model.calling import apply
from bayesformer.model.space import Space
from bayesformer.posterior import Posterior
from bayesformer.predict import one_pass
from bayesformer.predict.one_pass import (
    OnePass,
    Settings,
    fit_scale,
    input_sensitivity,
    layer_shares,
    scaled_outputs,
)
from tests.laws import assert_mean
from tests.nets import Normed, Tied


def one_pass_outputs(model, space, law, inputs, settings=None, batch_size=256):
    """The outputs of inputs held as tensors, some at a time."""
    count = len(first_tensor(inputs))
    starts = range(0, count, batch_size)
    batches = (map_inputs(inputs, lambda x, a=a: x[a : a + batch_size]) for a in starts)
    return one_pass.one_pass_outputs(model, space, law, batches, settings, count)


FULL = Settings(propagate="full")


def prepared(model):
    """A model in float64 with its space and flat weights."""
    model = model.double().eval()
    space = Space.of(model)
    return model, space, space.pack(dict(model.named_parameters()))


def mlp(*widths, activation=nn.Tanh):
    layers = []
    for a, b in pairwise(widths):
        layers += [nn.Linear(a, b), activation()]
    return prepared(nn.Sequential(*layers[:-1]))


def positive(size):
    root = torch.randn(size, size, dtype=torch.float64)
    return root @ root.mT / size + 0.1 * torch.eye(size, dtype=torch.float64)


def kronecker_block(out, into, prior=0.3):
    """A block, and its covariance as a matrix."""
    B, A = positive(out), positive(into)
    (b, qb), (a, qa) = torch.linalg.eigh(B), torch.linalg.eigh(A)
    d = torch.tensor(prior, dtype=torch.float64)
    return Kronecker(b, a, d, qb, qa), torch.linalg.inv(torch.kron(B, A) + d * torch.eye(out * into).double())


def jacobian(model, space, theta, x):
    """(B, K, P): by brute force."""
    return jacrev(lambda t: functional_call(model, space.views(t), (x,)))(theta)


def glm(model, space, theta, x, sigma):
    J = jacobian(model, space, theta, x)
    return J @ sigma @ J.mT


def layer_weights(space, theta, structure):
    """A posterior over one linear layer (out, in) with bias, and its covariance as a matrix, in each form."""
    (out, into), size = space.shapes[-2], space.size
    start = size - out * into - out
    where = torch.arange(start, size)
    matrix, bias = where[: out * into].view(out, into), where[out * into :]
    sigma = torch.zeros(size, size, dtype=torch.float64)
    if structure == "diag":
        block, index = Diagonal(torch.rand(len(where), dtype=torch.float64)), slice(start, size)
        covariance = block.variance.diag()
        index_tensor = where
    elif structure == "dense":
        tril = torch.linalg.cholesky(positive(len(where)))
        block, index, index_tensor, covariance = Dense(tril), where, where, tril @ tril.mT
    elif structure == "kronecker":
        block, covariance = kronecker_block(out, into)
        index, index_tensor = slice(start, start + out * into), matrix.flatten()
    else:  # a Kronecker block over the weights with the bias as one more input
        block, covariance = kronecker_block(out, into + 1)
        index = index_tensor = torch.cat([matrix, bias[:, None]], 1).flatten()
    sigma[index_tensor[:, None], index_tensor] = covariance
    return GaussianLaw(theta, (index,), (block,)), sigma


STRUCTURES = ["diag", "dense", "kronecker", "kronecker with bias"]


@pytest.mark.parametrize("structure", STRUCTURES)
def test_one_linear_layer_and_a_last_layer_equal_the_linear_model(structure):
    """J Σ Jᵀ exactly, in both forms of propagation: nothing is approximated."""
    for widths in ((3, 2), (3, 5, 4)):
        model, space, theta = mlp(*widths)
        weights, sigma = layer_weights(space, theta, structure)
        x = torch.randn(6, 3, dtype=torch.float64)
        expected = glm(model, space, theta, x, sigma)
        full = one_pass_outputs(model, space, weights, x, FULL)
        diag = one_pass_outputs(model, space, weights, x)
        assert torch.allclose(full.covariance, expected, atol=1e-10)
        assert torch.allclose(diag.variance, expected.diagonal(dim1=-2, dim2=-1), atol=1e-10)
        assert torch.allclose(full.mean, apply(model, x))


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("propagate", ["diag", "full"])
def test_noisy_input_through_a_noisy_layer_against_draws(structure, propagate):
    """Two layers, no activation: the second meets an uncertain input, with every structure of its own weights."""
    model, space, theta = prepared(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3)))
    second, _ = layer_weights(space, theta, structure)
    first = Diagonal(torch.rand(16, dtype=torch.float64) * 0.3)
    weights = GaussianLaw(theta, (slice(0, 16), *second.places), (first, *second.blocks))
    x = torch.randn(2, 3, dtype=torch.float64)
    found = one_pass_outputs(model, space, weights, x, Settings(propagate=propagate))
    params = space.views(_rows(weights, 60_000))
    hidden = torch.einsum("bi,noi->nbo", x, params["0.weight"]) + params["0.bias"][:, None]
    draws = torch.einsum("nbi,noi->nbo", hidden, params["1.weight"]) + params["1.bias"][:, None]
    centred = draws - found.mean
    assert_mean(draws, found.mean)
    if propagate == "full":
        assert_mean(centred.unsqueeze(-1) * centred.unsqueeze(-2), found.covariance)
    else:  # independent inputs of the second layer: true here, as the first layer's weights are independent
        assert_mean(centred**2, found.variance)


def _rows(weights, draws):
    rows = weights.mean.expand(draws, -1).clone()
    for place, block in zip(weights.places, weights.blocks, strict=True):
        rows[:, place] += block.colour(torch.randn(draws, block.size, dtype=torch.float64))
    return rows


def test_kronecker_equals_dense_with_the_same_covariance_also_by_rows_transposed_and_low_rank():
    from bayesformer.predict.one_pass.weight_covariance import Complete, Factored

    block, sigma = kronecker_block(4, 3)
    low = Kronecker(block.out_values[:2], block.in_values, block.prior, block.out_vectors[:, :2], block.in_vectors)
    precision = torch.kron((low.out_vectors * low.out_values) @ low.out_vectors.mT,
                           (low.in_vectors * low.in_values) @ low.in_vectors.mT)  # fmt: skip
    low_sigma = torch.linalg.inv(precision + low.prior * torch.eye(12).double())
    m, S = torch.randn(5, 3, dtype=torch.float64), torch.stack([positive(3) for _ in range(5)])
    for one, matrix in ((block, sigma), (low, low_sigma)):
        pairs = [(Factored.of(one, "exact"), Complete(matrix.view(4, 3, 4, 3)))]
        pairs.append((pairs[0][0].rows(slice(1, 3)), pairs[0][1].rows(slice(1, 3))))
        for factored, complete in pairs:
            for v in (None, S.diagonal(dim1=-2, dim2=-1), S):
                assert torch.allclose(factored.covariance(m, v), complete.covariance(m, v), atol=1e-10)
                assert torch.allclose(factored.variance(m, v), complete.variance(m, v), atol=1e-10)
        turned = m.new_tensor([1.0, -2, 0.5, 3])[None]
        factored, complete = pairs[0][0].transposed(), pairs[0][1].transposed()
        assert torch.allclose(factored.covariance(turned, None), complete.covariance(turned, None), atol=1e-10)


def test_factored_damping_splits_the_prior_between_the_factors():
    """C_B = (B + √d I)⁻¹, C_A = (A + √d I)⁻¹, and S_h = C_B ⟨C_A, M⟩: less variance than the exact inverse."""
    from bayesformer.predict.one_pass.weight_covariance import Factored

    block, _ = kronecker_block(4, 3)
    B, A = ((q * v) @ q.mT for q, v in ((block.out_vectors, block.out_values), (block.in_vectors, block.in_values)))
    root = block.prior.sqrt()
    C_B, C_A = (torch.linalg.inv(F + root * torch.eye(len(F)).double()) for F in (B, A))
    m, S = torch.randn(3, dtype=torch.float64), positive(3)
    expected = C_B * (C_A * (torch.outer(m, m) + S)).sum()
    found = Factored.of(block, "factored")
    assert torch.allclose(found.covariance(m, S), expected, atol=1e-10)
    assert (found.variance(m, S) < Factored.of(block, "exact").variance(m, S)).all()


@pytest.mark.parametrize("parameter_order", [True, False])
def test_kronecker_blocks_of_a_weight_kept_transposed(parameter_order):
    """Hugging Face's Conv1D keeps (in, out): a block in that order, and one in the order of a linear layer."""
    from transformers.pytorch_utils import Conv1D

    model, space, theta = prepared(Conv1D(4, 3))
    block, covariance = kronecker_block(3, 4) if parameter_order else kronecker_block(4, 3)
    where = torch.arange(12) if parameter_order else torch.arange(12).view(3, 4).mT.flatten()
    sigma = torch.zeros(space.size, space.size, dtype=torch.float64)
    sigma[where[:, None], where] = covariance
    x = torch.randn(5, 3, dtype=torch.float64)
    found = one_pass_outputs(model, space, GaussianLaw(theta, (where,), (block,)), x, FULL)
    assert torch.allclose(found.covariance, glm(model, space, theta, x, sigma), atol=1e-10)


@pytest.mark.parametrize("options", [{}, {"stride": 2, "padding": 1}, {"padding": (2,), "dilation": 2, "bias": False}])
def test_correlated_weights_of_a_convolution_of_series(options):
    model, space, theta = prepared(nn.Sequential(nn.Conv1d(2, 3, 4, **options), nn.Flatten()))
    block, covariance = kronecker_block(3, 8)
    sigma = torch.zeros(space.size, space.size, dtype=torch.float64)
    sigma[:24, :24] = covariance
    x = torch.randn(2, 2, 9, dtype=torch.float64)
    found = one_pass_outputs(model, space, GaussianLaw(theta, (slice(0, 24),), (block,)), x)
    expected = glm(model, space, theta, x, sigma).diagonal(dim1=-2, dim2=-1)
    assert torch.allclose(found.variance, expected, atol=1e-10)


def test_convolutions_whose_correlations_have_no_rule_are_refused_with_the_way_out():
    model, space, theta = prepared(nn.Sequential(nn.Conv1d(2, 4, 3, groups=2), nn.Flatten()))
    block, _ = kronecker_block(4, 3)
    x = torch.randn(2, 2, 9, dtype=torch.float64)
    with pytest.raises(ValueError, match="use predictive='streamlined', which takes any layer"):
        one_pass_outputs(model, space, GaussianLaw(theta, (slice(0, 12),), (block,)), x)


def test_correlated_weights_of_a_convolution():
    model, space, theta = prepared(nn.Sequential(nn.Conv2d(2, 3, 2, stride=2), nn.Flatten()))
    block, covariance = kronecker_block(3, 8)
    sigma = torch.zeros(space.size, space.size, dtype=torch.float64)
    sigma[:24, :24] = covariance
    x = torch.randn(2, 2, 4, 4, dtype=torch.float64)
    found = one_pass_outputs(model, space, GaussianLaw(theta, (slice(0, 24),), (block,)), x)
    expected = glm(model, space, theta, x, sigma).diagonal(dim1=-2, dim2=-1)
    assert torch.allclose(found.variance, expected, atol=1e-10)


def test_no_variance_is_the_network_itself():
    task = TASKS["digits"]()
    model = task.model().eval()
    space = Space.of(model)
    theta = space.pack(dict(model.named_parameters()))
    x = torch.randn(3, 1, 8, 8)
    found = one_pass_outputs(model, space, gaussian(theta, torch.zeros_like(theta)), x)
    assert torch.equal(found.variance, torch.zeros(3, 10))
    with torch.no_grad():
        assert torch.equal(found.mean, model(x))


def test_small_noise_gives_the_jacobian_with_an_error_of_that_order():
    """S / ε → J Σ Jᵀ for an MLP with full propagation and blocks that do not span layers."""
    model, space, theta = mlp(3, 6, 5, 2)
    sizes = [space.sizes[i] + space.sizes[i + 1] for i in range(0, 6, 2)]
    trils = [torch.linalg.cholesky(positive(size)) for size in sizes]
    starts = [sum(sizes[:i]) for i in range(3)]
    x = torch.randn(4, 3, dtype=torch.float64)
    expected = glm(model, space, theta, x, torch.block_diag(*[t @ t.mT for t in trils]))
    errors = []
    for eps in (1e-2, 1e-4, 1e-6):
        places = tuple(slice(a, a + size) for a, size in zip(starts, sizes, strict=True))
        weights = GaussianLaw(theta, places, tuple(Dense(t * math.sqrt(eps)) for t in trils))
        found = one_pass_outputs(model, space, weights, x, FULL).covariance / eps
        errors.append(((found - expected).norm() / expected.norm()).item())
    assert errors[0] < 0.3
    assert errors[2] < 1e-4
    assert math.log10(errors[0] / errors[2]) == pytest.approx(4, abs=0.3)


def test_diag_is_the_diagonal_of_full_for_one_noisy_layer_and_not_for_two():
    model, space, theta = mlp(3, 6, 2)
    x = torch.randn(4, 3, dtype=torch.float64)
    sd = torch.full_like(theta, 0.1)
    one = sd.clone()
    one[: -(6 * 2 + 2)] = 0
    for spread, same in ((one, True), (sd, True), (sd, False)):
        network = (model, space, theta) if same else mlp(3, 6, 5, 2)
        weights = gaussian(network[2], spread if same else torch.full_like(network[2], 0.1))
        full, diag = (one_pass_outputs(*network[:2], weights, x, s).variance for s in (FULL, Settings()))
        assert torch.allclose(full, diag) == same


def test_a_noisy_packed_projection_equals_three_of_its_own():
    """nn.MultiheadAttention's packed weight: also by slices, for cross-attention, and with a Kronecker block."""

    class Cross(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

        def forward(self, x, y):
            return self.attention(x, y, y, need_weights=False)[0]

    class Self(Cross):
        def forward(self, x):
            return self.attention(x, x, x, need_weights=False)[0]

    x = torch.randn(2, 3, 4, dtype=torch.float64)
    for kind, inputs in ((Self, x), (Cross, (x, x.clone()))):
        torch.manual_seed(0)
        model, space, theta = prepared(kind())
        block, _ = kronecker_block(12, 4)
        weights = GaussianLaw(theta, (slice(0, 48),), (block,))
        found = one_pass_outputs(model, space, weights, inputs)
        # The same with the rows of W_v alone uncertain, in full: queries and keys are known by rule.
        complete = (block.colour(torch.eye(48).double()) @ block.colour(torch.eye(48).double()))[32:, 32:]
        rows = torch.linalg.cholesky((complete + complete.mT) / 2)
        W, b = model.attention.in_proj_weight, model.attention.in_proj_bias
        q, k = (nn.functional.linear(x, W[i : i + 4], b[i : i + 4]).view(2, 3, 2, 2).transpose(1, 2) for i in (0, 4))
        A = (q @ k.mT / math.sqrt(2)).softmax(-1)
        noise = torch.einsum("bti,kir->btkr", x, rows.view(4, 4, 16)).square().sum(-1)
        mixed = (A**2 @ noise.view(2, 3, 2, 2).transpose(1, 2)).transpose(1, 2).flatten(-2)
        expected = mixed @ model.attention.out_proj.weight.square().mT
        assert torch.allclose(found.variance, expected, atol=1e-10)


def test_tied_weights_and_running_averages():
    model, space, theta = prepared(Tied())
    x = torch.tensor([0, 3, 3, 1])
    found = one_pass_outputs(model, space, gaussian(theta, torch.full_like(theta, 0.1)), x)
    table = theta.view(5, 4)
    hidden = table[x].tanh()
    s = (1 - hidden**2) ** 2 * 0.01
    expected = 4 * (0.01 * (hidden**2).sum(1, keepdim=True) + s @ (table**2 + 0.01).mT)
    assert torch.allclose(found.variance, expected)
    model, space, theta = prepared(Normed())
    buffers = {"norm.running_mean": torch.randn(1, 6).double(), "norm.running_var": torch.rand(1, 6).double()}
    weights = gaussian(theta, torch.full_like(theta, 0.1), buffers=buffers)
    z = torch.randn(4, 3, dtype=torch.float64)
    found = one_pass_outputs(model, space, weights, z)
    for name, value in buffers.items():
        model.state_dict()[name].copy_(value[0])
    assert torch.allclose(found.mean, model(z))


def test_permuting_tokens_permutes_outputs():
    model, space, theta = prepared(nn.TransformerEncoderLayer(4, 2, 8, batch_first=True))
    weights = gaussian(theta, torch.full_like(theta, 0.1))
    x, order = torch.randn(2, 5, 4, dtype=torch.float64), torch.tensor([3, 1, 4, 0, 2])
    for settings in (Settings(), FULL, Settings(tokens="shared")):
        found = one_pass_outputs(model, space, weights, x, settings)
        moved = one_pass_outputs(model, space, weights, x[:, order], settings)
        assert torch.allclose(moved.mean, found.mean[:, order])
        assert torch.allclose(moved.variance, found.variance[:, order])


def test_batches_do_not_matter_and_gradients_are_off():
    model, space, theta = mlp(3, 6, 2)
    weights, x = gaussian(theta, torch.full_like(theta, 0.1)), torch.randn(7, 3, dtype=torch.float64)
    for settings in (Settings(), FULL):
        whole = one_pass_outputs(model, space, weights, x, settings)
        parts = one_pass_outputs(model, space, weights, x, settings, batch_size=3)
        assert torch.allclose(whole.covariance, parts.covariance)
        assert not whole.mean.requires_grad


def test_scale_is_fitted_and_never_worse():
    torch.manual_seed(0)
    mean = torch.randn(300, 4)
    truth = mean + 0.3 * torch.randn(300, 4)
    outputs = GaussianOutputs(mean, torch.full_like(mean, 9.0))
    fit = fit_scale(outputs, truth, Gaussian(scale=0.1))
    # The variance that maximises the likelihood is the mean square error, less the noise.
    best = 9.0 / ((truth - mean).square().mean().item() - 0.01)
    assert fit.c == pytest.approx(best, rel=1e-2)
    assert fit.after < fit.before
    assert torch.allclose(fit.apply(outputs).variance, outputs.variance / fit.c)
    labels = torch.randint(0, 4, (300,))
    fit = fit_scale(outputs, labels, Categorical())
    assert fit.after <= fit.before
    factor = GaussianOutputs(mean, torch.ones_like(mean), torch.randn(300, 4, 2))
    assert torch.allclose(scaled_outputs(factor, 4.0).covariance, factor.covariance / 4)


def test_a_large_scale_leaves_the_softmax_of_the_mean():
    mean = torch.randn(5, 4)
    outputs = scaled_outputs(GaussianOutputs(mean, torch.full_like(mean, 2.0)), 1e8)
    assert torch.allclose(Categorical().predictive(outputs).probs, mean.softmax(-1), atol=1e-3)


def test_scale_counts_only_what_counts():
    mean, targets = torch.zeros(4, 3, 1), torch.ones(4, 3, 1)
    mask = torch.tensor([True, True, False]).expand(4, 3)
    outputs = GaussianOutputs(mean, torch.ones_like(mean))
    hidden = targets.clone()
    hidden[:, 2] = 1e6
    assert fit_scale(outputs, hidden, Gaussian(scale=0.1), mask) == fit_scale(
        outputs, targets, Gaussian(scale=0.1), mask
    )


def test_input_sensitivity_is_the_squared_gradient_without_weight_noise():
    model, space, theta = mlp(3, 6, 5, 2)
    x = torch.randn(4, 3, dtype=torch.float64)
    predictor = OnePass(model, space, gaussian(theta, torch.zeros_like(theta)), FULL)
    gradient = torch.autograd.functional.jacobian(model, x).diagonal(dim1=0, dim2=2).permute(2, 0, 1)  # (4, 2, 3)
    assert torch.allclose(input_sensitivity(predictor, x, 1), gradient[:, 1] ** 2)
    assert torch.allclose(input_sensitivity(predictor, x), (gradient**2).sum(1))
    picked = input_sensitivity(predictor, x, torch.tensor([0, 1, 1, 0]))
    assert torch.allclose(picked[0], gradient[0, 0] ** 2)


def test_input_sensitivity_against_differences():
    from bayesformer.predict.one_pass import Uncertain

    model, space, theta = mlp(3, 6, 2, activation=nn.GELU)
    predictor = OnePass(model, space, gaussian(theta, torch.full_like(theta, 0.2)))
    x, step = torch.randn(1, 3, dtype=torch.float64), 1e-6
    found = input_sensitivity(predictor, x)
    base = predictor(x).variance.sum()
    for i in range(3):
        r = torch.zeros(1, 3, dtype=torch.float64)
        r[0, i] = step
        higher = predictor(Uncertain(x, r, predictor.context)).variance.sum()
        assert found[0, i].item() == pytest.approx(((higher - base) / step).item(), rel=1e-4)


def test_layer_shares_are_what_each_layer_adds():
    model, space, theta = mlp(3, 6, 2)
    x = torch.randn(4, 3, dtype=torch.float64)
    sd = torch.full_like(theta, 1e-3)
    shares = layer_shares(OnePass(model, space, gaussian(theta, sd)), x)
    assert sum(shares.values()) == pytest.approx(1, abs=1e-4)
    total = one_pass_outputs(model, space, gaussian(theta, sd), x).variance.sum()
    for name, part in space.views(torch.arange(len(theta))).items():
        alone = torch.zeros_like(sd)
        alone[part.flatten()] = 1e-3
        own = one_pass_outputs(model, space, gaussian(theta, alone), x).variance.sum()
        assert shares[name] == pytest.approx((own / total).item(), rel=1e-3)


def test_layer_shares_of_correlated_weights():
    """Kronecker factors over one layer, independent weights in the other."""
    model, space, theta = mlp(3, 6, 2)
    x = torch.randn(4, 3, dtype=torch.float64)
    block, _ = kronecker_block(6, 3)
    block = Kronecker(1e6 * block.out_values, block.in_values, 1e6 * block.prior, block.out_vectors, block.in_vectors)
    rest = Diagonal(torch.full((space.size - 18,), 1e-6, dtype=torch.float64))
    both = GaussianLaw(theta, (slice(0, 18), slice(18, space.size)), (block, rest))
    alone = GaussianLaw(theta, (slice(0, 18),), (block,))
    shares = layer_shares(OnePass(model, space, both), x)
    own, total = (one_pass_outputs(model, space, weights, x).variance.sum() for weights in (alone, both))
    assert sum(shares.values()) == pytest.approx(1, abs=1e-4)
    assert 0.05 < shares["0.weight"] == pytest.approx((own / total).item(), rel=1e-3)


def test_a_posterior_is_asked_in_batches_of_the_size_given(monkeypatch):
    model, _, theta = mlp(3, 6, 2)
    posterior = Posterior(model, Categorical(), gaussian(theta, torch.full_like(theta, 0.1)))
    x = torch.randn(7, 3, dtype=torch.float64)
    whole, sizes, call = posterior.outputs(x, predictive="one_pass"), [], OnePass.__call__
    monkeypatch.setattr(OnePass, "__call__", lambda self, some: sizes.append(len(some)) or call(self, some))
    parts = posterior.outputs(x, predictive="one_pass", batch_size=3)
    assert sizes == [3, 3, 1]
    torch.testing.assert_close(parts.variance, whole.variance)


def test_posteriors_that_cannot_be_used_are_refused():
    model, space, theta = mlp(3, 6, 2)
    x = torch.randn(4, 3, dtype=torch.float64)

    def refused(weights, message, settings=None):
        with pytest.raises(ValueError, match=message):
            one_pass_outputs(model, space, weights, x, settings)

    refused(Samples(theta[None]), "weights must be Gaussian for the one-pass rule; got Samples")
    refused(gaussian(theta[:-1]), "law must have 38 numbers for this model; got 37")
    factor = torch.randn(2, len(theta), dtype=torch.float64)
    swag = gaussian(theta, torch.ones_like(theta), factor)
    refused(swag, "cannot use a low-rank part that correlates all weights; it supports independent weights")
    dense = gaussian(theta, tril=torch.linalg.cholesky(positive(len(theta))))
    refused(dense, "cannot use a dense block over 4 parameters")
    low = LowRank.of(torch.ones_like(theta), factor.mT, torch.ones(2, dtype=torch.float64))
    refused(GaussianLaw(theta, (slice(0, len(theta)),), (low,)), "cannot use a LowRank block over 0.weight")
    refused(GaussianLaw(theta, (slice(0, 3),), (Diagonal(-torch.ones(3).double()),)),
            "variance of 0.weight must be finite and not negative; got -1.0")  # fmt: skip
    refused(gaussian(theta, torch.full_like(theta, math.nan)), "variance of 0.weight must be finite")
    strange = torch.tensor([[math.nan, 0, 0]]).double()
    with pytest.raises(ValueError, match="inputs must be finite; got 1 NaN"):
        Posterior(model, Categorical(), gaussian(theta, torch.ones_like(theta))).outputs(strange, predictive="one_pass")
    with pytest.raises(ValueError, match="must be finite; 1 of 1 examples have NaN or infinite values in their mean"):
        one_pass_outputs(model, space, gaussian(theta, torch.ones_like(theta)), strange)
    model.train()
    refused(
        gaussian(theta, torch.ones_like(theta)),
        r"model must be in eval mode: .* Call model.eval\(\)",
    )
    with pytest.raises(ValueError, match="propagate must be one of 'diag', 'full'; got 'all'"):
        Settings(propagate="all")


def test_correlations_can_be_dropped_on_request():
    model, space, theta = mlp(3, 6, 2)
    x = torch.randn(4, 3, dtype=torch.float64)
    drop = Settings(correlations="drop")
    factor = torch.randn(2, len(theta), dtype=torch.float64)
    swag = one_pass_outputs(model, space, gaussian(theta, torch.ones_like(theta), factor), x, drop)
    marginal = gaussian(theta, (1 + factor.square().sum(0)).sqrt())
    assert torch.allclose(swag.variance, one_pass_outputs(model, space, marginal, x).variance)
    # A dense posterior keeps the correlations within each parameter: with one layer noisy, all but those with the bias.
    tril = torch.linalg.cholesky(positive(len(theta)))
    dense = gaussian(theta, tril=tril)
    found = one_pass_outputs(model, space, dense, x, Settings(correlations="drop", propagate="full"))
    starts = torch.tensor([0, *space.sizes]).cumsum(0)
    sigma = torch.block_diag(*[(tril @ tril.mT)[a:b, a:b] for a, b in pairwise(starts.tolist())])
    places = tuple(slice(int(a), int(b)) for a, b in pairwise(starts.tolist()))
    blocks = tuple(Dense(torch.linalg.cholesky(sigma[p, p])) for p in places)
    expected = one_pass_outputs(model, space, GaussianLaw(theta, places, blocks), x, FULL)
    assert torch.allclose(found.covariance, expected.covariance)


def test_a_dense_block_over_a_part_of_a_layer_is_refused_or_dropped_to_variances():
    """A subnetwork that happens to lie in one matrix and its bias."""
    model = nn.Sequential(nn.Linear(3, 2))
    space = Space.of(model)
    theta = space.pack(dict(model.named_parameters()))
    few = torch.tensor([1, 4, 6])  # two entries of the matrix, one of the bias
    tril = torch.tensor([[1.0, 0.0, 0.0], [0.5, 1.0, 0.0], [0.2, 0.3, 0.7]])
    weights, x = GaussianLaw(theta, (few,), (Dense(tril),)), torch.randn(4, 3)
    with pytest.raises(ValueError, match="cannot use a dense block over 2 parameters"):
        one_pass_outputs(model.eval(), space, weights, x)
    variance = one_pass_outputs(model, space, weights, x, Settings(correlations="drop")).diagonal
    v = weights.variance()
    expected = torch.stack([x[:, 1] ** 2 * v[1] + v[6], x[:, 1] ** 2 * v[4]], 1)
    torch.testing.assert_close(variance, expected)

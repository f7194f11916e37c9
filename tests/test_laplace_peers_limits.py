"""Where laplace-torch 0.3 and curvlinops 3.0 are wrong or give up, each in the known way, and what is right there.

Ours is compared with the definition, one Jacobian or gradient after another (`curvature_zoo`). Should one of these fail
after an upgrade, the peer has been mended: move the case to `test_laplace_peers.py`.
"""

import pytest
import torch
from torch import nn

import bayesformer as bf
from bayesformer.laplace import estimate
from tests.curvature_zoo import build, empirical, ggn, jacobian
from tests.nets import Mlp
from tests.peer_laplace import F64, SIGMA, SINGLE, OfDict, PerToken, blocks, close, fitted, matrix, operator, ours

pytestmark = pytest.mark.filterwarnings("ignore")  # of the peers, which use what torch is about to drop

R = 5  # positions


class Encoder(nn.Module):
    """torch's own encoder layer, pooled."""

    def __init__(self):
        super().__init__()
        self.layer, self.head = nn.TransformerEncoderLayer(4, 2, 6, batch_first=True), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.layer(x).mean(1))


def regression():
    return Mlp(3, 4, 3).double().eval(), bf.Data(torch.randn(20, 3, dtype=F64), torch.randn(20, 3, dtype=F64))


def pooled():
    data = bf.Data(torch.randn(8, R, 3, dtype=F64), torch.randint(3, (8,)))
    return PerToken(pooled=True).double().eval(), data


def tokens(kind="classification"):
    x = torch.randn(8, R, 3, dtype=F64)
    y = torch.randint(3, (8, R)) if kind == "classification" else torch.randn(8, R, 3, dtype=F64)
    return PerToken().double().eval(), bf.Data(x, y)


@pytest.mark.parametrize("sigma", [1.0, SIGMA])
@pytest.mark.parametrize("backend", ["CurvlinopsEF", "AsdlEF"])
@pytest.mark.parametrize("structure", ["full", "diag"])
def test_the_empirical_fisher_of_a_regression_is_2_sigma_squared_times_too_large(structure, backend, sigma):
    """Gradients of the squared error are 2 σ² those of -log p; their square is divided by 2 σ² once, not twice."""
    model, data = regression()
    exact = empirical(model, bf.Gaussian(sigma), data)
    exact = exact.diagonal().diag() if structure == "diag" else exact
    close(ours(model, bf.Gaussian(sigma), data, structure, kind="fisher"), exact)
    theirs = fitted(model, "regression", data, structure, backend, sigma=sigma)
    close(matrix(theirs.H) / sigma**2, 2 * sigma**2 * exact, SINGLE)


def test_the_diagonal_empirical_fisher_of_a_last_layer_is_zero():
    """With curvlinops as its backend, and without a word: the posterior is the prior."""
    model, data = regression()
    data = bf.Data(data.inputs, torch.randint(3, (20,)))
    theirs = fitted(model, "classification", data, "diag", "CurvlinopsEF", subset="last_layer")
    assert (theirs.H == 0).all()
    found = estimate(model, "categorical", data, "diag", kind="fisher", subset="last_layer")
    exact = empirical(model, bf.Categorical(), data).diagonal()[16:]
    close(torch.cat([s.values for s in found.structures]), exact)
    assert (exact > 0).all()


def test_the_full_empirical_fisher_of_a_last_layer_fails_with_asdl():
    model, data = regression()
    data = bf.Data(data.inputs, torch.randint(3, (20,)))
    with pytest.raises(RuntimeError, match="must match the size of tensor"):
        fitted(model, "classification", data, "full", "AsdlEF", subset="last_layer")
    found = estimate(model, "categorical", data, "full", kind="fisher", subset="last_layer")
    close(found.structures[0].dense(), empirical(model, bf.Categorical(), data)[16:, 16:])


@pytest.mark.parametrize(
    ("backend", "structure", "error", "message"),
    [
        ("CurvlinopsGGN", "kron", NotImplementedError, "un-supported layers"),
        ("CurvlinopsEF", "kron", NotImplementedError, "un-supported layers"),
        ("AsdlGGN", "kron", RuntimeError, "must match the size of tensor"),
        ("BackPackGGN", "kron", RuntimeError, "does not have an extension"),
        ("AsdlGGN", "diag", ValueError, "no diagonal Fisher statistics"),
        ("BackPackGGN", "diag", RuntimeError, "does not have an extension"),
        ("CurvlinopsGGN", "full", NotImplementedError, "forward AD"),
        ("AsdlGGN", "full", RuntimeError, "Sizes of tensors must match"),
    ],
)
def test_an_encoder_layer_of_torch_fails(backend, structure, error, message):
    model, data = Encoder().double().eval(), bf.Data(torch.randn(6, R, 4, dtype=F64), torch.randint(3, (6,)))
    with pytest.raises(error, match=message):
        fitted(model, "classification", data, structure, backend)


def test_the_factors_of_an_encoder_layer_of_torch_are_exact_here_for_one_example_of_one_token():
    """There is one input and one place for gradients then, and B ⊗ A is the Gauss-Newton block itself."""
    model, data = Encoder().double().eval(), bf.Data(torch.randn(1, 1, 4, dtype=F64), torch.randint(3, (1,)))
    exact_blocks(model, bf.Categorical(), data)


@pytest.mark.parametrize("backend", ["CurvlinopsGGN", "AsdlGGN", "BackPackGGN"])
def test_the_factors_of_a_bert_with_everything_trainable_fail(backend):
    model, _, data = build("bert")
    with pytest.raises((NotImplementedError, RuntimeError, ValueError)):
        fitted(OfDict(model).eval(), "classification", data, "kron", backend)


def test_the_factors_of_a_bert_are_exact_here_for_one_example_of_one_token():
    model, likelihood, data = build("bert")
    inputs = {name: x[:1, :1] for name, x in data.inputs.items()}
    exact_blocks(model, likelihood, bf.Data(inputs, data.targets[:1]))


def exact_blocks(model, likelihood, data):
    exact = ggn(model, likelihood, data)
    found = estimate(model, likelihood, data, "kron", kind="ggn")
    covered = torch.zeros(len(exact), dtype=torch.bool)
    for place, structure in zip(found.places, found.structures, strict=True):
        covered[place] = True
        index = torch.arange(len(exact))[place]
        close(structure.dense(), exact[index[:, None], index])
    assert covered.all()


@pytest.mark.parametrize("backend", ["CurvlinopsGGN", "AsdlGGN", "CurvlinopsEF"])
@pytest.mark.parametrize("structure", ["full", "kron", "diag"])
def test_classes_at_every_token_fail(structure, backend):
    model, data = tokens()
    with pytest.raises((RuntimeError, ValueError)):
        fitted(model, "classification", data, structure, backend)


@pytest.mark.parametrize("structure", ["full", "kron"])
def test_a_regression_at_every_token_can_be_fitted_but_not_predict(structure):
    model, data = tokens("regression")
    theirs = fitted(model, "regression", data, structure)
    with pytest.raises((ValueError, AssertionError)):
        theirs._glm_predictive_distribution(data.inputs[:2])


def test_outputs_at_every_token_are_right_here():
    model, data = tokens()
    exact = ggn(model, bf.Categorical(), data)
    close(ours(model, bf.Categorical(), data, "full", kind="ggn"), exact)
    close(ours(model, bf.Categorical(), data, "diag", kind="ggn").diagonal(), exact.diagonal())
    settings = {"structure": "full", "curvature": "ggn", "prior_precision": 1.0}
    posterior = bf.laplace(model, data, likelihood="categorical", **settings)
    rows, _ = jacobian(model, data.take(slice(0, 1)))
    spread = rows @ (exact + torch.eye(len(exact), dtype=F64)).inverse() @ rows.T
    expected = torch.stack([spread[3 * t : 3 * t + 3, 3 * t : 3 * t + 3] for t in range(R)])
    close(posterior.outputs(data.inputs[:1]).covariance[0], expected)


def test_a_fit_that_fails_leaves_the_model_frozen():
    """With ASDL: a second attempt on the same model then finds nothing to train. Ours never touches the model."""
    model, data = tokens()
    with pytest.raises(ValueError, match="must be integers"):
        estimate(model, "categorical", bf.Data(data.inputs, data.targets.double()), "kron")
    assert all(p.requires_grad for p in model.parameters())
    with pytest.raises(RuntimeError):
        fitted(model, "classification", data, "diag", "AsdlGGN")
    assert not any(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize("fisher", [False, True], ids=["ggn", "fisher"])
def test_asdl_takes_every_token_for_an_example(fisher):
    """It squares the gradients of single positions and adds them up: cross terms of shared weights are lost."""
    model, data = pooled()
    kind, backend = ("fisher", "AsdlEF") if fisher else ("ggn", "AsdlGGN")
    exact = (empirical if fisher else ggn)(model, bf.Categorical(), data).diagonal()
    close(ours(model, bf.Categorical(), data, "diag", kind=kind).diagonal(), exact)
    theirs = fitted(model, "classification", data, "diag", backend).H
    place = blocks(model)["outer.bias"]  # every position has the same gradient there, so R² becomes R
    close(theirs[place], exact[place] / R)


def test_asdl_multiplies_the_factors_of_shared_weights_by_the_positions():
    model, data = pooled()
    theirs = matrix(fitted(model, "classification", data, "kron", "AsdlGGN").H)
    found = ours(model, bf.Categorical(), data, "kron", kind="ggn", approximation="expand")
    for name, place in blocks(model).items():
        if name.endswith("weight"):
            close(theirs[place, place], R * found[place, place])


def test_curvlinops_counts_padding_among_the_inputs():
    """Two more tokens of padding change nothing in the outputs, and so in the posterior."""
    model, likelihood, data = build("bert")
    model.requires_grad_(False)
    model.bert.encoder.layer[0].attention.self.value.requires_grad_(True)
    ids = torch.randint(1, 7, (4, 4))
    short = bf.Data({"input_ids": ids, "attention_mask": torch.ones_like(ids)}, data.targets)
    long = bf.Data({k: nn.functional.pad(v, (0, 2)) for k, v in short.inputs.items()}, data.targets)
    with torch.no_grad():
        close(model(**long.inputs).logits, model(**short.inputs).logits)
    options = {"fisher_type": "type-2"}
    theirs = [operator("KFACLinearOperator", model, "classification", d, **options) for d in (short, long)]
    mine = [ours(model, likelihood, d, "kron", kind="ggn", approximation="expand") for d in (short, long)]
    weight = slice(0, 16)
    close(mine[0][weight, weight], theirs[0][weight, weight])
    close(mine[0], mine[1])
    assert not torch.allclose(theirs[0], theirs[1], rtol=0.01)


def test_curvlinops_counts_ignored_tokens_among_the_losses():
    """What has no label must be as if it were not there: the exact matrix knows that, the factors do not."""
    model, data = tokens()
    labels = data.targets.clone()
    labels[:, 3:] = -100
    ignored, without = bf.Data(data.inputs, labels), bf.Data(data.inputs[:, :3], data.targets[:, :3])
    run = lambda d, name, **options: operator(name, model, "classification", d, **options)  # noqa: E731
    close(run(ignored, "GGNLinearOperator"), run(without, "GGNLinearOperator"))
    factors = [run(d, "KFACLinearOperator", fisher_type="type-2") for d in (ignored, without)]
    mine = [ours(model, bf.Categorical(), d, "kron", kind="ggn") for d in (ignored, without)]
    close(mine[0], mine[1])
    close(mine[1], factors[1])
    assert factors[0].trace() > 1.4 * factors[1].trace()  # all five of five tokens, not three


def test_curvlinops_reduces_tokens_with_cross_terms_that_its_own_draws_do_not_have():
    """Losses of separate tokens are independent: gradients of their draws are uncorrelated, and nothing is summed."""
    model, data = tokens()
    options = {"kfac_approx": "reduce"}
    run = lambda **more: operator("KFACLinearOperator", model, "classification", data, **options, **more)  # noqa: E731
    exact, drawn = run(fisher_type="type-2"), run(fisher_type="mc", mc_samples=200)
    found = ours(model, bf.Categorical(), data, "kron", kind="ggn", approximation="reduce")
    # A trace is a mean over 200 draws for 8 examples: relative error about √(2 / 1600) = 3.5 %.
    assert abs(drawn.trace() / found.trace() - 1) < 5 * 0.035
    assert exact.trace() > 2 * found.trace()


def test_low_rank_needs_a_package_that_its_requirements_do_not_bring():
    model, data = regression()
    with pytest.raises(ImportError, match="install the old asdfghjkl dependency"):
        fitted(model, "regression", data, "lowrank")
    found = ours(model, bf.Gaussian(SIGMA), data, "low_rank", kind="ggn", rank=31)
    close(found, ggn(model, bf.Gaussian(SIGMA), data), 1e-7)


def test_damping_is_lost():
    """(√d I + B) ⊗ (√d I + A), asked for, is B ⊗ A + d I all the same, the only form there is here."""
    model, data = regression()
    plain, damped = (fitted(model, "regression", data, "kron", damping=damping) for damping in (False, True))
    assert damped.H.damping
    assert torch.equal(plain.log_det_posterior_precision, damped.log_det_posterior_precision)

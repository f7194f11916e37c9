"""Against laplace-torch and curvlinops, where they are right: curvature, posterior, evidence and predictive.

What they get wrong or refuse is in `test_laplace_peers_limits.py`. They are installed by `make test`; the tests skip
where they are not.
"""

import pytest
import torch

import bayesformer as bf
from bayesformer.laplace import estimate
from tests.curvature_zoo import build, empirical, ggn
from tests.nets import Mlp
from tests.peer_laplace import (
    F64,
    SIGMA,
    SINGLE,
    D,
    PerToken,
    blocks,
    close,
    covariance,
    fitted,
    likelihood_of,
    matrix,
    operator,
    ours,
    targets_of,
)

pytestmark = pytest.mark.filterwarnings("ignore")  # of the peers, which use what torch is about to drop

KINDS = ("classification", "regression")
HEAD = slice(16, 31)  # the last layer of the network below in its flat vector


def problem(kind, count=30):
    model = Mlp(3, 4, 3).double().eval()
    return model, bf.Data(torch.randn(count, 3, dtype=F64), targets_of(kind, count))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("subset", ["all", "last_layer"])
@pytest.mark.parametrize("structure", ["full", "kron", "diag"])
def test_posterior_evidence_and_predictive_are_those_of_laplace_torch(kind, subset, structure):
    model, data = problem(kind)
    theirs = fitted(model, kind, data, structure, subset=subset)
    names = {} if subset == "all" else {"subset": "last_layer"}
    posterior = bf.laplace(
        model, data, likelihood=likelihood_of(kind), structure=structure, prior_precision=D, curvature="ggn", **names
    )
    rtol, part = SINGLE if structure == "full" else 1e-9, slice(0, 31) if subset == "all" else HEAD
    close(covariance(posterior.law)[part, part], matrix(theirs.posterior_precision).inverse(), rtol)
    assert posterior.facts["log_evidence"] == pytest.approx(float(theirs.log_marginal_likelihood()), rel=1e-7)
    x = torch.randn(5, 3, dtype=F64)
    mean, spread = theirs._glm_predictive_distribution(x)
    outputs = posterior.outputs(x)
    close(outputs.mean, mean)
    close(outputs.covariance, spread, rtol)
    if subset == "all":
        _, together = theirs._glm_predictive_distribution(x, joint=True)
        close(posterior.joint(x)[1], together, rtol)


def test_a_temperature_does_to_ours_what_it_does_to_theirs():
    model, data = problem("classification")
    theirs = fitted(model, "classification", data, "kron", temperature=0.5)
    posterior = bf.laplace(
        model, data, likelihood="categorical", structure="kron", prior_precision=D, curvature="ggn", temperature=0.5
    )
    close(covariance(posterior.law), matrix(theirs.posterior_precision).inverse())
    assert posterior.facts["log_evidence"] == pytest.approx(float(theirs.log_marginal_likelihood()), rel=1e-9)


@pytest.mark.parametrize("link", ["probit", "bridge", "bridge_norm"])
def test_the_links_give_the_probabilities_of_laplace_torch(link):
    model, data = problem("classification")
    theirs = fitted(model, "classification", data, "kron")
    posterior = bf.laplace(model, data, likelihood="categorical", structure="kron", prior_precision=D, curvature="ggn")
    x = torch.randn(5, 3, dtype=F64)
    close(posterior.predict(x, link=link).probs, theirs(x, pred_type="glm", link_approx=link))


@pytest.mark.parametrize("structure", ["full", "kron", "diag"])
def test_the_empirical_fisher_of_a_classifier_is_that_of_laplace_torch(structure):
    model, data = problem("classification")
    theirs = fitted(model, "classification", data, structure, backend="CurvlinopsEF")
    close(ours(model, bf.Categorical(), data, structure, kind="fisher"), matrix(theirs.H), SINGLE)


@pytest.mark.parametrize("kind", KINDS)
def test_gauss_newton_and_its_factors_are_those_of_curvlinops(kind):
    model, data = problem(kind)
    likelihood, run = likelihood_of(kind), lambda name, **options: operator(name, model, kind, data, **options)
    whole = run("GGNLinearOperator")
    close(ours(model, likelihood, data, "full", kind="ggn"), whole)
    close(ours(model, likelihood, data, "diag", kind="ggn").diagonal(), whole.diagonal())
    close(ours(model, likelihood, data, "kron", kind="ggn"), run("KFACLinearOperator", fisher_type="type-2"))


@pytest.mark.parametrize("kind", KINDS)
def test_the_empirical_fisher_and_its_factors_are_those_of_curvlinops(kind):
    """Their loss of a regression is twice σ² the negative log-likelihood; a product of two gradients has that twice."""
    model, data = problem(kind)
    scale = 1.0 if kind == "classification" else 0.5 / SIGMA**2
    whole = scale * operator("EFLinearOperator", model, kind, data)
    close(whole, empirical(model, likelihood_of(kind), data))
    close(ours(model, likelihood_of(kind), data, "full", kind="fisher"), whole)
    factors = scale * operator("KFACLinearOperator", model, kind, data, fisher_type="empirical")
    close(ours(model, likelihood_of(kind), data, "kron", kind="fisher"), factors)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("approximation", ["expand", "reduce"])
def test_factors_of_weights_shared_by_pooled_positions_are_those_of_curvlinops(kind, approximation):
    """Of the matrices, that is: curvlinops treats a bias like a matrix, ours have their exact block."""
    model = PerToken(pooled=True).double().eval()
    data = bf.Data(torch.randn(8, 5, 3, dtype=F64), targets_of(kind, 8))
    likelihood = likelihood_of(kind)
    found = ours(model, likelihood, data, "kron", kind="ggn", approximation=approximation)
    options = {"fisher_type": "type-2", "kfac_approx": approximation}
    theirs, exact = operator("KFACLinearOperator", model, kind, data, **options), ggn(model, likelihood, data)
    close(exact, operator("GGNLinearOperator", model, kind, data))
    for name, place in blocks(model).items():
        close(found[place, place], (exact if name.endswith("bias") else theirs)[place, place])
    bias = blocks(model)["outer.bias"]
    # The mean of R = 5 equal gradients: summed and squared 1, squared and summed 1 / R.
    close(theirs[bias, bias], exact[bias, bias] / (5 if approximation == "expand" else 1))


@pytest.mark.parametrize("kind", KINDS)
def test_a_loss_at_every_position_has_the_expanded_factors_of_curvlinops(kind):
    model = PerToken().double().eval()
    data = bf.Data(torch.randn(8, 5, 3, dtype=F64), targets_of(kind, 8, 5))
    likelihood = likelihood_of(kind)
    whole = operator("GGNLinearOperator", model, kind, data)
    close(ours(model, likelihood, data, "full", kind="ggn"), whole)
    close(ours(model, likelihood, data, "diag", kind="ggn").diagonal(), whole.diagonal())
    factors = operator("KFACLinearOperator", model, kind, data, fisher_type="type-2", kfac_approx="expand")
    close(ours(model, likelihood, data, "kron", kind="ggn"), factors)


def test_the_matrices_of_a_bert_have_the_expanded_factors_of_curvlinops():
    """All its linear layers, the rest frozen and nothing padded: that much curvlinops can do."""
    model, likelihood, data = build("bert")
    model.requires_grad_(False)
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            module.requires_grad_(True)
    ids = data.inputs["input_ids"].clamp_min(1)
    data = bf.Data({"input_ids": ids, "attention_mask": torch.ones_like(ids)}, data.targets)
    theirs = operator("KFACLinearOperator", model, "classification", data, fisher_type="type-2")
    found = estimate(model, likelihood, data, "kron", kind="ggn", approximation="expand")
    matrices = 0
    for (name,), place, structure in zip(found.names, found.places, found.structures, strict=True):
        if name.endswith("weight"):
            matrices += 1
            close(structure.dense(), theirs[place, place])
    assert matrices == 8


@pytest.mark.parametrize("kind", KINDS)
def test_diagonal_gauss_newton_and_linearised_variance_are_those_of_posteriors(kind):
    posteriors = pytest.importorskip("posteriors")
    model, data = problem(kind)
    likelihood, forward = likelihood_of(kind), posteriors.model_to_function(model)
    laplace = posteriors.laplace.diag_ggn.build(
        lambda p, batch: (forward(p, batch[0]), torch.tensor([])),
        lambda outputs, batch: likelihood.log_prob(outputs, batch[1]).sum(),
        init_prec_diag=D,
    )
    state, _ = laplace.update(laplace.init(dict(model.named_parameters())), (data.inputs, data.targets))
    precision = torch.cat([p.detach().flatten() for p in state.prec_diag.values()])
    posterior = bf.laplace(model, data, likelihood=likelihood, structure="diag", curvature="ggn", prior_precision=D)
    close(posterior.law.variance(), 1 / precision)
    x = torch.randn(5, 3, dtype=F64)
    sd = {name: p.rsqrt() for name, p in state.prec_diag.items()}
    _, root, _ = posteriors.linearized_forward_diag(
        lambda p, batch: (forward(p, batch), torch.tensor([])), dict(model.named_parameters()), x, sd
    )
    close(posterior.outputs(x).covariance, (root @ root.mT).detach())

"""Against laplace-torch, where it is installed: the full Gauss-Newton posterior, its evidence and its predictive.

Only cases where it is right are compared. It is not for its empirical Fisher of a regression (twice too large), for
draws of its low-rank and subnetwork posteriors (another covariance), and, with the ASDL backend, for weights shared by
tokens (cross terms between positions are lost).
"""

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import bayesformer as bf
from tests.nets import Mlp

laplace = pytest.importorskip("laplace")
curvlinops = pytest.importorskip("laplace.curvature.curvlinops")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["classification", "regression"])
def test_the_full_posterior_agrees(kind):
    model, x = Mlp(3, 4, 3).eval(), torch.randn(30, 3)
    y = torch.randint(3, (30,)) if kind == "classification" else torch.randn(30, 3)
    theirs = laplace.Laplace(
        model,
        kind,
        subset_of_weights="all",
        hessian_structure="full",
        prior_precision=1.7,
        backend=curvlinops.CurvlinopsGGN,
    )
    theirs.fit(DataLoader(TensorDataset(x, y), batch_size=10))
    likelihood = bf.Categorical() if kind == "classification" else bf.Gaussian(1.0)
    ours = bf.laplace(model.eval(), (x, y), likelihood=likelihood, structure="full", prior_precision=1.7)
    tril = ours.weights.blocks[0].tril
    torch.testing.assert_close(tril @ tril.mT, theirs.posterior_covariance, rtol=1e-3, atol=1e-5)
    assert ours.facts["log_evidence"] == pytest.approx(float(theirs.log_marginal_likelihood()), rel=1e-4)
    mean, covariance = theirs._glm_predictive_distribution(x[:5])
    found = ours.outputs(x[:5])
    torch.testing.assert_close(found.mean, mean, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found.covariance, covariance, rtol=1e-3, atol=1e-4)

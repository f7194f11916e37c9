"""The objective over all data: gradients, curvature and scores against dense matrices, and chains in the loop."""

import pytest
import torch

from bayesformer.core.draws import drawing_from
from bayesformer.core.types import Batch
from bayesformer.core.vectors import THETA
from bayesformer.data import Data, as_batches
from bayesformer.inference import stiff_baoab
from bayesformer.likelihoods import Categorical, Gaussian
from bayesformer.priors.prior import as_prior
from bayesformer.train.loop import train
from bayesformer.train.objective import Objective
from bayesformer.train.training import Training
from bayesformer.train.vector_prior import NamedPrior
from bayesformer.train.whole_data import WholeDataObjective
from tests.nets import Mlp, blobs, job_of, shell_of

N = 24


def regression(outputs=1):
    g = torch.Generator().manual_seed(0)
    return Data(torch.randn(N, 3, generator=g), torch.randn(N, outputs, generator=g))


def whole_of(data, likelihood, outputs, prior="normal(0, 0.5)", listed=False):
    torch.manual_seed(0)
    shell = shell_of(Mlp(hidden=5, outputs=outputs).double())
    shell.module.eval()
    joint = Objective(shell, likelihood, len(data), NamedPrior(as_prior(prior), shell.space))
    batches = as_batches([(x, y) for x, y in zip(data.inputs, data.targets, strict=True)] if listed else data)
    return WholeDataObjective(joint, batches, batch_size=7), {THETA: shell.theta.clone()}


@pytest.mark.parametrize("listed", [False, True], ids=["tensors", "dataset"])
def test_the_gradient_over_all_data_is_that_of_one_large_batch(listed):
    data = Data(regression().inputs.double(), regression().targets.double())
    whole, params = whole_of(data, Gaussian(0.3), 1, listed=listed)
    value, gradient = whole.over_all(params)
    gradient = gradient[THETA].clone()
    at_once, _, exact = whole.value_and_grad(params, Batch(data.inputs, data.targets))
    torch.testing.assert_close(value, at_once)
    torch.testing.assert_close(gradient, exact[THETA])


def test_curvature_is_that_of_a_linear_model_by_finite_differences():
    """At outputs that fit the targets exactly the Gauss-Newton matrix is the Hessian."""
    data = Data(regression().inputs.double(), regression().targets.double())
    whole, params = whole_of(data, Gaussian(0.3), 1)
    with torch.no_grad():
        fitted = whole.shell(data.inputs)
    batch = Batch(data.inputs[:9], fitted[:9])
    v = torch.randn_like(params[THETA])
    found = whole.curvature_times(params, batch, v)
    h = 1e-5
    ends = [whole.value_and_grad({THETA: params[THETA] + sign * h * v}, batch)[2][THETA].clone() for sign in (1, -1)]
    torch.testing.assert_close(found, (ends[1] - ends[0]) / (2 * h), rtol=1e-6, atol=1e-7)


def test_scores_are_gradients_of_examples_and_average_to_the_fisher_matrix():
    data = Data(regression().inputs.double(), torch.zeros(N, 3, dtype=torch.float64).long()[:, 0])
    whole, params = whole_of(data, Categorical(), 3)
    with drawing_from(torch.Generator().manual_seed(0)):
        rows = torch.cat([whole.scores(params, None, N) for _ in range(3000)])  # (n, P)
    eye, batch = torch.eye(len(params[THETA]), dtype=torch.float64), Batch(data.inputs, data.targets)
    fisher = torch.stack([whole.curvature_times(params, batch, e) for e in eye]) - 4.0 / N * eye
    found = rows.mT @ rows / len(rows)
    error = (rows[:, :, None] * rows[:, None, :]).std(0) / len(rows) ** 0.5
    assert ((found - fisher).abs() / (error + 1e-12))[error > 1e-9].max() < 5.5
    torch.testing.assert_close(rows.mean(0), torch.zeros_like(rows[0]), atol=6 * float(rows.std(0).max()) / 268, rtol=0)


def test_scores_of_data_that_are_read_come_from_the_batch():
    data = Data(regression().inputs.double(), regression().targets.double())
    whole, params = whole_of(data, Gaussian(0.3), 1, listed=True)
    batch = Batch(data.inputs[:4], data.targets[:4])
    with drawing_from(torch.Generator().manual_seed(0)):
        rows = whole.scores(params, batch, 10)
    assert rows.shape == (4, len(params[THETA]))
    whole.shell.load(params[THETA])
    slope = torch.autograd.grad(whole.shell(batch.inputs)[2, 0], list(whole.shell.weights.values()))
    slope = torch.cat([g.flatten() for g in slope])
    torch.testing.assert_close((rows[2] @ slope) ** 2, (rows[2] @ rows[2]) * (slope @ slope))


def chain_job(epochs):
    data, shell = blobs(40), shell_of(Mlp())
    joint = Objective(shell, Categorical(), 40, NamedPrior(as_prior("normal(0, 1)"), shell.space))
    whole = WholeDataObjective(joint_in_eval(joint), as_batches(data))
    settings = stiff_baoab.StiffSettings(1 / 40, 6.0, rows=8, every=3)
    transform = stiff_baoab.build(whole, torch.ones_like(shell.theta), settings)
    names = tuple(name for name, _ in shell.module.named_modules())
    training = Training(epochs=epochs, batch_size=10)
    return job_of(shell, transform, shell.theta, data, training, held=names)


def joint_in_eval(joint):
    joint.shell.module.eval()
    return joint


def test_a_chain_in_the_training_loop_goes_on_where_it_was_interrupted(tmp_path):
    torch.manual_seed(0)
    whole = train(chain_job(4))
    torch.manual_seed(0)
    job, count, update = chain_job(4), [0], None
    update = job.transform.update

    def interrupted(*args, **options):
        count[0] += 1
        if count[0] == 8:
            raise KeyboardInterrupt
        return update(*args, **options)

    broken = type(job.transform)(job.transform.init, interrupted)
    with pytest.raises(KeyboardInterrupt):
        train(job.__class__(**{**vars(job), "transform": broken}), tmp_path / "chain.safetensors", every_seconds=0.0)
    torch.manual_seed(0)
    resumed = train(chain_job(4), tmp_path / "chain.safetensors", every_seconds=0.0)
    assert torch.equal(resumed.theta, whole.theta)
    assert torch.equal(resumed.state.measured.kinetic, whole.state.measured.kinetic)
    assert resumed.steps == whole.steps == 16

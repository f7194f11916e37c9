"""Conformal prediction and temperature: levels that hold over many splits, exact small cases, errors."""

import math

import pytest
import torch
from torch import nn

import bayesformer as bf
from bayesformer.evaluate.conformal import answer_threshold, class_scores, conformal_quantile, residual_scores

SPLITS, CALIBRATION, TESTS = 1000, 99, 20
RATE = 1e-6  # of false alarms


def assert_share(hits, low, high):
    """hits (SPLITS, TESTS): splits are independent, tests of one split are not, so the error is taken over splits."""
    per_split = hits.double().mean(1)
    z = torch.special.ndtri(torch.tensor(1 - RATE / 2, dtype=torch.float64)).item()
    error = z * per_split.std().item() / math.sqrt(len(per_split))
    assert low - error <= per_split.mean().item() <= high + error, (per_split.mean().item(), low, high, error)


@pytest.mark.parametrize("level", [0.5, 0.9])
@pytest.mark.parametrize("classes", [3, 12])
def test_sets_have_their_level_over_a_thousand_splits(level, classes):
    g = torch.Generator().manual_seed(classes)
    logits = 2 * torch.randn(SPLITS, CALIBRATION + TESTS, classes, generator=g)
    truth = torch.distributions.Categorical(logits=0.3 * logits + torch.randn(classes, generator=g))  # over-confident
    torch.manual_seed(classes)
    labels = truth.sample()
    uniforms = torch.rand(labels.shape, generator=g, dtype=torch.float64)
    every = class_scores(logits.softmax(-1).flatten(0, 1), uniforms.flatten()).view(*labels.shape, classes)
    own = every.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    thresholds = torch.stack([conformal_quantile(row, level) for row in own[:, :CALIBRATION]])
    inside = own[:, CALIBRATION:] <= thresholds[:, None]
    assert_share(inside, level, level + 1 / (CALIBRATION + 1))


def test_intervals_have_their_level_over_a_thousand_splits():
    g = torch.Generator().manual_seed(0)
    means = torch.randn(SPLITS, CALIBRATION + TESTS, generator=g)
    sds = torch.rand(means.shape, generator=g) + 0.1
    targets = means + 3 * sds * torch.randn(means.shape, generator=g)  # three times the spread that is claimed
    scores = residual_scores(means, sds.square(), targets)
    thresholds = torch.stack([conformal_quantile(row, 0.8) for row in scores[:, :CALIBRATION]])
    assert_share(scores[:, CALIBRATION:] <= thresholds[:, None], 0.8, 0.8 + 1 / (CALIBRATION + 1))


def test_wrong_answers_stay_below_the_limit_over_a_thousand_splits():
    g = torch.Generator().manual_seed(1)
    uncertainty = torch.rand(SPLITS, CALIBRATION + TESTS, generator=g)
    wrong = torch.rand(uncertainty.shape, generator=g) < 0.6 * uncertainty  # .3 of all
    limits = torch.tensor([answer_threshold(u, w, 0.1) for u, w in zip(uncertainty, wrong, strict=True)])
    thresholds = [
        answer_threshold(u[:CALIBRATION], w[:CALIBRATION], 0.1) for u, w in zip(uncertainty, wrong, strict=True)
    ]
    answered = uncertainty[:, CALIBRATION:] < torch.tensor(thresholds)[:, None]
    bad = answered & wrong[:, CALIBRATION:]
    assert_share(bad, 0.1 - 2 / (CALIBRATION + 1), 0.1)
    assert answered.double().mean() > 0.3  # it does answer
    assert limits.isfinite().all()


def test_class_scores_are_those_of_the_paper():
    probs = torch.tensor([[0.2, 0.5, 0.3]], dtype=torch.float64)
    found = class_scores(probs, torch.tensor([0.25]), penalty=0.1, free=1)
    expected = [0.5 + 0.3 + 0.25 * 0.2 + 0.2, 0.25 * 0.5, 0.5 + 0.25 * 0.3 + 0.1]
    torch.testing.assert_close(found, torch.tensor([expected], dtype=torch.float64))


def test_thresholds_by_hand():
    scores = torch.arange(1.0, 10.0)  # 9 of them
    assert conformal_quantile(scores, 0.9).item() == 9
    assert conformal_quantile(scores, 0.5).item() == 5
    with pytest.raises(ValueError, match=r"at least 9 examples for level=0.9; got 8"):
        conformal_quantile(scores[:8], 0.9)
    uncertainty, wrong = torch.arange(9.0), torch.tensor([0, 1, 0, 1, 0, 0, 1, 0, 0]).bool()
    assert answer_threshold(uncertainty, wrong, 0.2) == 3  # ⌊10 · .2⌋ - 1 = 1 error may be answered: the one at 1
    assert answer_threshold(uncertainty, wrong, 0.1) == 1
    assert answer_threshold(uncertainty, wrong, 0.9) == math.inf
    with pytest.raises(ValueError, match=r"at least 19 examples for limit=0.05; got 9"):
        answer_threshold(uncertainty, wrong, 0.05)


def classifier():
    g = torch.Generator().manual_seed(3)
    x = torch.randn(400, 4, generator=g)
    y = (x[:, 0] + 0.5 * torch.randn(400, generator=g) > 0).long() + (x[:, 1] > 1).long()
    model = nn.Linear(4, 3)
    training = bf.Training(epochs=20, lr=3e-2)
    method = bf.Ensemble(members=3)
    return (
        bf.fit(model, (x[:200], y[:200]), likelihood="categorical", method=method, training=training, init="fresh"),
        x,
        y,
    )


def test_a_classifier_gives_sets_and_knows_when_to_be_silent(tmp_path):
    posterior, x, y = classifier()
    made = posterior.conformal((x[200:300], y[200:300]), level=0.8)
    sets = made.sets(x[300:])
    assert sets.shape == (100, 3)
    assert sets.dtype == torch.bool
    assert torch.equal(sets, made.sets(x[300:]))  # a value: asked again it answers the same
    assert 0.65 < sets.gather(1, y[300:, None]).double().mean() < 0.95
    chosen = made.risk(limit=0.1)
    labels, answered, uncertainty = chosen.answers(x[300:])
    assert answered.any()
    assert uncertainty[answered].max() < chosen.threshold <= uncertainty[~answered].min()
    assert ((labels != y[300:]) & answered).double().mean() < 0.25
    with pytest.raises(ValueError, match="use sets"):
        made.intervals(x[300:])
    with pytest.raises(ValueError, match="Did you mean 'epistemic'"):
        made.risk(uncertainty="epistemc")
    with pytest.raises(ValueError, match="at least 99 examples"):
        posterior.conformal((x[200:250], y[200:250]), level=0.99)


def test_intervals_of_a_regression():
    g = torch.Generator().manual_seed(4)
    x = torch.randn(300, 3, generator=g)
    y = torch.stack([x[:, 0], 2 * x[:, 1]], 1) + 0.1 * torch.randn(300, 2, generator=g)
    training = bf.Training(epochs=200, lr=3e-2)
    posterior = bf.fit(nn.Linear(3, 2), (x[:100], y[:100]), likelihood=bf.Gaussian(1.0), training=training)
    low, high = posterior.conformal((x[100:200], y[100:200])).intervals(x[200:])
    inside = (low <= y[200:]) & (y[200:] <= high)
    assert inside.shape == (100, 2)
    assert 0.75 < inside.double().mean() <= 1
    assert (high - low).mean() < 1  # a tenth of what the noise of 1 would give is needed
    with pytest.raises(ValueError, match="use intervals"):
        posterior.conformal((x[100:200], y[100:200])).sets(x)


def test_the_temperature_is_the_one_that_made_the_labels(tmp_path):
    """Labels drawn from softmax(logits / 2.5): the best temperature is 2.5, up to its sampling error."""
    g = torch.Generator().manual_seed(5)
    x = 4 * torch.randn(4000, 3, generator=g)
    y = torch.multinomial((x / 2.5).softmax(-1), 1, generator=g)[:, 0]
    model = nn.Linear(3, 3, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.eye(3))
    posterior = bf.fit(model, (x, y), likelihood="categorical", training=bf.Training(1, max_steps=1, lr=1e-8))
    calibrated = posterior.calibrate((x, y))
    assert abs(calibrated.tempering - 2.5) < 0.25
    facts = calibrated.facts["calibrated"]
    assert facts["after"] > facts["before"]
    torch.testing.assert_close(
        calibrated.predict(x[:5]).probs, (x[:5] / calibrated.tempering).softmax(-1), rtol=1e-4, atol=1e-5
    )
    parts = list(calibrated.predict_batches(x[:5]))
    assert torch.equal(parts[0].probs, calibrated.predict(x[:5]).probs)
    calibrated.save(tmp_path)
    loaded = bf.Posterior.load(tmp_path, model)
    assert loaded.tempering == calibrated.tempering
    assert torch.equal(loaded.predict(x[:5]).probs, calibrated.predict(x[:5]).probs)
    assert posterior.tempering == 1
    assert calibrated.calibrate((x, y)).tempering == pytest.approx(calibrated.tempering, rel=1e-3)


def test_a_gaussian_predictive_at_another_temperature_has_all_its_variance_scaled():
    predictive = bf.GaussianPredictive(torch.randn(5, 7, 2), torch.rand(5, 7, 2), torch.rand(5, 7, 2))
    wide = predictive.tempered(3.0)
    torch.testing.assert_close(wide.variance, 3 * predictive.variance)
    torch.testing.assert_close(wide.mean, predictive.mean)
    torch.testing.assert_close(wide.epistemic, 3 * predictive.epistemic)


def test_predictions_that_have_no_temperature_are_refused():
    x = torch.randn(50, 2)
    posterior = bf.fit(nn.Linear(2, 1), (x, torch.ones(50, 1)), likelihood="poisson", training=bf.Training(1))
    with pytest.raises(ValueError, match="got PoissonPredictive"):
        posterior.calibrate((x, torch.ones(50, 1)))
    with pytest.raises(ValueError, match="got PoissonPredictive"):
        posterior.conformal((x, torch.ones(50, 1)))

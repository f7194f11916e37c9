"""Streamlined prediction: laws of its rules, its calibration, and its size on a trained network."""

import math
import warnings
from dataclasses import replace

import pytest
import torch
from torch import nn

import bayesformer as bf
from bayesformer.laws import Diagonal, GaussianLaw, gaussian
from bayesformer.likelihoods import Categorical
from bayesformer.model.space import Space
from bayesformer.models import Encoder, Tagger, VisionTransformer
from bayesformer.posterior import Posterior
from bayesformer.predict import head
from bayesformer.predict.head import HeadCovariance, add_block, block_variance
from bayesformer.predict.one_pass import Settings
from bayesformer.predict.streamlined import Calibration, RuleSettings
from bayesformer.predict.streamlined.leading_outputs import LeadingOutputs
from bayesformer.predict.streamlined.output_calibration import FEW_OUTPUTS, WIDE_DRAWS
from bayesformer.predict.streamlined.second_moment import SecondMoment, root_of
from bayesformer.predict.streamlined.variance_check import variance_ratio
from tests.laws import assert_mean

F64 = torch.float64
EXACT = RuleSettings("exact")


def covariance(size, rank=None):
    root = torch.randn(size, rank or size, dtype=F64)
    return root @ root.mT


def posterior_of(model, sd=0.01, **how):
    model = model.eval()
    theta = Space.of(model).pack(dict(model.named_parameters()))
    return Posterior(model, Categorical(), gaussian(theta, torch.full_like(theta, sd)), **how)


def network(classes, dtype=F64):
    return VisionTransformer(4, 2, 1, classes, dim=8, depth=1, heads=2, mlp_ratio=2).to(dtype)


def images(count=8, dtype=F64):
    return torch.randn(count, 1, 4, 4, dtype=dtype)


# --- leading outputs --------------------------------------------------------------------------------------------------


def regression(average, rows, mean):
    rule = LeadingOutputs(root_of(average, None), torch.zeros(len(average), dtype=F64), rows)
    return rule, rule.regressions(mean)


@pytest.mark.parametrize("rows", [1, 3, 4, 7])
def test_leading_outputs_on_the_average_input_are_exact(rows):
    """Where M_x is c M, the regression leaves R and the size is τ = c: Cov f = c M, for every K."""
    average, mean = covariance(7), torch.randn(5, 7, dtype=F64)
    rule, chosen = regression(average, rows, mean)
    sizes = torch.rand(5, dtype=F64) + 0.5
    seen = chosen.rows @ (sizes[:, None, None] * average) @ chosen.rows.mT
    found = rule.covariance(chosen, seen)
    whole = found.factor @ found.factor.mT + torch.diag_embed(found.diagonal)
    torch.testing.assert_close(whole, sizes[:, None, None] * average)


def test_all_outputs_as_rows_are_exact_on_every_input():
    average, other, mean = covariance(5), covariance(5), torch.randn(3, 5, dtype=F64)
    rule, chosen = regression(average, 5, mean)
    found = rule.covariance(chosen, chosen.rows @ other @ chosen.rows.mT)
    torch.testing.assert_close(found.factor @ found.factor.mT, other.expand(3, 5, 5))


def test_the_likeliest_output_has_its_exact_variance_on_every_input():
    average, other, mean = covariance(6), covariance(6), torch.randn(4, 6, dtype=F64)
    rule, chosen = regression(average, 3, mean)
    found = rule.covariance(chosen, chosen.rows @ other @ chosen.rows.mT)
    top = mean.argmax(-1)
    torch.testing.assert_close(found.variance.gather(1, top[:, None])[:, 0], other.diagonal()[top])


def test_directions_without_spread_do_no_harm():
    """M of rank 2 with K = 3 rows: U M Uᵀ is singular, and outputs outside its span have no variance."""
    average = torch.zeros(6, 6, dtype=F64)
    average[:4, :4] = covariance(4, rank=2)
    mean = torch.randn(3, 6, dtype=F64)
    rule, chosen = regression(average, 3, mean)
    found = rule.covariance(chosen, chosen.rows @ average @ chosen.rows.mT)
    torch.testing.assert_close(found.variance, average.diagonal().expand(3, 6), atol=1e-6, rtol=1e-6)


def test_a_diagonal_rest_is_part_of_the_average():
    """M = L Lᵀ + diag(ρ) in full has the same answer as its own whole root."""
    root, rest, mean = torch.randn(6, 2, dtype=F64), torch.rand(6, dtype=F64), torch.randn(4, 6, dtype=F64)
    rule = LeadingOutputs(root, rest, 3)
    chosen, average = rule.regressions(mean), root @ root.mT + rest.diag()
    found = rule.covariance(chosen, chosen.rows @ average @ chosen.rows.mT)
    torch.testing.assert_close(found.variance, average.diagonal().expand(4, 6))


# --- moments ----------------------------------------------------------------------------------------------------------


def test_second_moments_about_zero_and_about_the_mean_of_draws():
    draws = torch.randn(9, 4, 2, 3, dtype=F64) + torch.randn(4, 2, 3, dtype=F64)
    seen, sums = SecondMoment(3), torch.zeros(4, 2, 3, dtype=F64)
    for one in draws:
        seen.add(one, sums)
    seen.close(sums, len(draws))
    flat = draws.reshape(9, 8, 3)
    torch.testing.assert_close(seen.about_zero(9), torch.einsum("nbi,nbj->ij", flat, flat) / 72)
    centred = flat - flat.mean(0)
    torch.testing.assert_close(seen.central(9), torch.einsum("nbi,nbj->ij", centred, centred) / 64)


def test_a_root_through_the_last_layer():
    moment, weight = covariance(3), torch.randn(5, 3, dtype=F64)
    root = root_of(moment, weight)
    torch.testing.assert_close(root @ root.mT, weight @ moment @ weight.mT)
    assert (root.square().sum(0).diff() < 0).all()


@pytest.mark.parametrize("kind", ["diagonal", "kronecker", "dense", "low_rank"])
def test_variances_of_the_last_layer_are_those_of_its_covariance(kind):
    from bayesformer.laws import Dense, Kronecker, LowRank

    values = torch.rand(4, dtype=F64), torch.rand(3, dtype=F64)
    vectors = [torch.linalg.qr(torch.randn(n, n, dtype=F64))[0] for n in (4, 3)]
    prior = torch.tensor(0.3, dtype=F64)
    block = {
        "diagonal": Diagonal(torch.rand(12, dtype=F64)),
        "kronecker": Kronecker(values[0][:2], values[1][:2], prior, vectors[0][:, :2], vectors[1][:, :2]),
        "dense": Dense(torch.linalg.cholesky(covariance(12) + torch.eye(12))),
        "low_rank": LowRank.of(torch.rand(12, dtype=F64) + 1, torch.randn(12, 2, dtype=F64), torch.ones(2, dtype=F64)),
    }[kind]
    features = torch.randn(5, 3, dtype=F64)
    parts = HeadCovariance(torch.zeros(5, 4, dtype=F64), 4)
    add_block(parts, block, [features])
    expected = parts.outputs(torch.zeros(5, 4, dtype=F64)).variance
    torch.testing.assert_close(block_variance(block, [features], 4), expected)


@pytest.mark.parametrize("kind", ["kronecker", "dense"])
def test_a_wide_last_layer_adds_few_columns_and_keeps_its_variances(kind, monkeypatch):
    """Beyond `SQUARE` outputs the directions of least spread are on the diagonal; the others are as they were."""
    from bayesformer.laws import Dense, Kronecker

    outputs, rank = 7, 3
    vectors = [torch.linalg.qr(torch.randn(n, n, dtype=F64))[0] for n in (outputs, 2)]
    if kind == "kronecker":
        values = torch.rand(outputs, dtype=F64), torch.rand(2, dtype=F64)
        block = Kronecker(*values, torch.tensor(0.3, dtype=F64), *vectors)
        features = torch.randn(5, 2, dtype=F64)
    else:  # of a bias, whose feature is 1, or -1 where it is taken away
        block = Dense(torch.linalg.cholesky(covariance(outputs)))
        features = torch.tensor([1.0, -1.0], dtype=F64).view(2, 1)
    mean = torch.zeros(len(features), outputs, dtype=F64)

    def of_rank(columns):
        parts = HeadCovariance(torch.zeros_like(mean), columns)
        add_block(parts, block, [features])
        return parts.outputs(mean)

    whole = of_rank(outputs)
    monkeypatch.setattr(head, "SQUARE", 4)
    cut = of_rank(rank)
    assert cut.factor.shape[-1] == rank
    torch.testing.assert_close(cut.variance, whole.variance)
    values = torch.linalg.eigvalsh(whole.covariance)
    if kind == "dense":
        kept = cut.factor @ cut.factor.mT
        torch.testing.assert_close(torch.linalg.eigvalsh(kept)[:, -rank:], values[:, -rank:])
    left = torch.linalg.eigvalsh(whole.covariance - cut.factor @ cut.factor.mT)
    assert (left > -1e-9).all()  # what is kept is a part of the whole


# --- which rule -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("classes", "rule"), [(FEW_OUTPUTS, "exact"), (6, "leading")])
def test_small_spreads_have_the_variance_of_the_jacobian(classes, rule):
    """κ → 1 where the network is linear over the posterior; all outputs as rows are exact."""
    posterior, x = posterior_of(network(classes), sd=1e-5), images(12)
    posterior = posterior.calibrated(x)
    calibration = posterior.calibration[1]
    assert calibration.rule == rule
    assert calibration.kappa == pytest.approx(1, abs=1e-3)
    exact = posterior.outputs(x, predictive="linearised")
    found = posterior.outputs(x, predictive="streamlined", settings=RuleSettings(outputs=classes))
    torch.testing.assert_close(found.covariance, exact.covariance, rtol=1e-2, atol=0.0)
    torch.testing.assert_close(found.mean, exact.mean)
    few = posterior.outputs(x, predictive="streamlined")
    assert 0.8 < (few.variance / exact.variance).median() < 1.25


def test_draws_and_the_pattern_at_every_token():
    model = Tagger(Encoder(8, 1, 2), 20, 12).double()
    posterior, tokens = posterior_of(model, sd=1e-4), torch.randint(20, (16, 6))
    posterior = posterior.calibrated(tokens)
    calibration = posterior.calibration[1]
    assert (calibration.rule, calibration.positions, calibration.apart) == ("draws", 6, True)
    exact = posterior.outputs(tokens, predictive="linearised").variance
    many = posterior.outputs(tokens, predictive="streamlined", settings=RuleSettings(draws=64)).variance
    few = posterior.outputs(tokens, predictive="streamlined").variance
    assert 0.8 < (few / exact).median() < 1.25
    spread = [(v / exact).log().std().item() for v in (many, few)]
    assert spread[0] < spread[1]


def test_a_last_layer_alone_is_closed_and_exact():
    model = network(5).eval()
    space = Space.of(model)
    theta, sd = space.pack(dict(model.named_parameters())), torch.zeros(space.size, dtype=F64)
    space.views(sd)["projection.weight"].fill_(0.5)
    posterior, x = Posterior(model, Categorical(), gaussian(theta, sd)), images()
    found = posterior.outputs(x, predictive="streamlined")
    torch.testing.assert_close(found.variance, posterior.outputs(x, predictive="linearised").variance)
    assert posterior.calibrated(x).calibration[1].rule == "closed"


@pytest.mark.filterwarnings("ignore::bayesformer.FidelityWarning")
def test_a_wide_posterior_is_drawn_from_and_says_so():
    posterior, x = posterior_of(network(6), sd=2.0), images(16)
    posterior = posterior.calibrated(x)
    calibration = posterior.calibration[1]
    assert (calibration.rule, calibration.wide) == ("draws", True)
    (doubt,) = [d for d in posterior.doubts if d.check == "linearisation"]
    assert f"follows the draws, by {WIDE_DRAWS} of them" in doubt.sentence
    assert doubt.value == calibration.kappa


# --- the calibration belongs to the posterior -------------------------------------------------------------------------


def fitted(**how):
    torch.manual_seed(0)
    data = bf.Data(torch.randn(60, 1, 4, 4), torch.randint(5, (60,)))
    settings = {"structure": "diag", "prior_precision": 1e4, "link": "probit", "progress": False}
    return bf.laplace(network(5, torch.float32).eval(), data, likelihood="categorical", **settings, **how), data


def test_predictions_do_not_depend_on_what_was_asked_before_and_survive_a_file(tmp_path):
    (first, data), (second, _) = fitted(), fitted()
    x, other = data.inputs[:7], torch.randn(9, 1, 4, 4)
    first.predict(other, predictive="streamlined")
    probs = first.predict(x, predictive="streamlined").probs
    assert torch.equal(second.predict(x, predictive="streamlined").probs, probs)
    loaded = bf.Posterior.load(first.save(tmp_path / "p"), network(5, torch.float32))
    assert torch.equal(loaded.predict(x, predictive="streamlined").probs, probs)
    assert loaded.calibration[1].facts() == first.calibrated().calibration[1].facts()


def test_a_posterior_whose_own_way_it_is_saves_its_calibration_unasked(tmp_path):
    posterior, data = fitted(predictive="streamlined")
    loaded = bf.Posterior.load(posterior.save(tmp_path / "p"), network(5, torch.float32))
    assert torch.equal(loaded.predict(data.inputs).probs, posterior.predict(data.inputs).probs)


def test_the_calibration_of_another_law_is_not_used():
    posterior = fitted()[0].calibrated()
    law = posterior.law
    wider = replace(posterior, law=GaussianLaw(law.mean, (slice(0, law.size),), (Diagonal(4 * law.variance()),)))
    assert wider.known_calibration is None
    assert posterior.known_calibration is posterior.calibration[1]


def test_errors_name_the_argument():
    posterior, x = posterior_of(network(5)), images()
    with pytest.raises(ValueError, match="data must be given to calibrate a posterior that keeps no training inputs"):
        posterior.calibrated()
    with pytest.raises(ValueError, match=r"settings must be a .*streamlined.RuleSettings .*got Settings"):
        posterior.outputs(x, predictive="streamlined", settings=Settings())
    with pytest.raises(ValueError, match="settings must be None for predictive='linearised'; got RuleSettings"):
        posterior.outputs(x, predictive="linearised", settings=EXACT)
    with pytest.raises(ValueError, match="rule must be one of 'auto', 'exact', 'leading', 'draws'; got 'mean'"):
        RuleSettings("mean")
    with pytest.raises(ValueError, match="draws must be a whole number, at least 1; got 0"):
        RuleSettings(draws=0)
    with pytest.raises(ValueError, match="a calibration must have rule, kappa"):
        Calibration.load({"rule": "exact"}, {})


@pytest.mark.parametrize("rows", [1, 2])
def test_other_numbers_of_passes_have_a_calibration_of_their_own(rows):
    """The sums of variances are right with fewer passes, too, and do not depend on what was asked before."""
    model, x = network(8), images(16)
    first, second = (posterior_of(model, sd=1e-3, examples=x) for _ in range(2))
    second.outputs(x, predictive="streamlined")
    exact = first.outputs(x, predictive="linearised").variance
    found = [
        p.outputs(x, predictive="streamlined", settings=RuleSettings(outputs=rows)).variance for p in (first, second)
    ]
    torch.testing.assert_close(found[0], found[1])
    assert 0.8 < float((found[0] / exact).median()) < 1.25


@pytest.mark.parametrize(("classes", "sd"), [(6, 0.05), (40, 0.05), (6, 0.5)])
def test_weights_of_few_bits_are_calibrated_by_draws(classes, sd):
    """Small steps round away in bfloat16, so draws are compared with all backward passes instead of tangents."""
    model, x = network(classes, torch.bfloat16), images(32, torch.bfloat16)
    posterior = posterior_of(model, sd=sd, examples=x)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", bf.FidelityWarning)
        found = posterior.outputs(x, predictive="streamlined").variance.double()
    drawn = posterior.outputs(x, 400, predictive="sampled").values.double().var(0)
    assert 0.7 < float((found / drawn).median()) < 1.4
    assert posterior.known_calibration.kappa != 1


# --- doubts -----------------------------------------------------------------------------------------------------------


def test_the_self_check_knows_a_right_rule_from_a_wrong_one():
    posterior, x = posterior_of(network(5), sd=1e-3), images(16)
    exact = posterior.outputs(x, predictive="linearised")
    with posterior.mean_passes.streamliner(x) as (streamliner, _):
        right = variance_ratio(streamliner, x, exact, posterior.likelihood)
        wrong = variance_ratio(streamliner, x, exact._replace(factor=exact.factor * 0.5), posterior.likelihood)
    # 16 inputs with 4 draws each of at least one dimension: relative error at most √(2 / 64) = .18
    assert abs(math.log(right)) < 5 * 0.18
    assert wrong == pytest.approx(right / 4)


def test_one_pass_is_doubted_where_logits_share_what_no_probability_sees():
    """Every logit of a linear softmax has the right variance, most of it a shift of all; differences have not."""
    torch.manual_seed(0)
    x = torch.randn(40, 3)
    y = (x @ torch.randn(3, 2)).argmax(-1)
    posterior = bf.fit(nn.Linear(3, 2), (x, y), likelihood="categorical", method="laplace", progress=False)
    exact = posterior.outputs(x, predictive="linearised").variance
    with pytest.warns(bf.FidelityWarning, match="one-pass variances are"):
        found = posterior.outputs(x, predictive="one_pass").variance
    torch.testing.assert_close(found, exact, rtol=0.05, atol=0.0)


def test_one_pass_variances_of_a_trained_transformer_are_doubted_once():
    data = learnable()
    posterior = trained(data)
    x = data.inputs[:16]
    with pytest.warns(bf.FidelityWarning, match=r"one-pass variances are 0\.\S+ times those of draws"):
        posterior.outputs(x, predictive="one_pass")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        posterior.outputs(x, predictive="one_pass")


def learnable():
    """Which of six patterns an image shows, under noise."""
    source = torch.Generator().manual_seed(2)
    kinds, labels = torch.randn(6, 1, 4, 4, generator=source), torch.randint(6, (300,), generator=source)
    return bf.Data(kinds[labels] + 0.3 * torch.randn(300, 1, 4, 4, generator=source), labels)


def trained(data):
    training = bf.Training(epochs=12, batch_size=50, lr=5e-3, patience=0)
    model = lambda: VisionTransformer(4, 2, 1, 6, dim=12, depth=2, heads=2, mlp_ratio=2)  # noqa: E731
    mode = bf.fit(model, data, likelihood="categorical", method=bf.Mle(), training=training, progress=False).module()
    settings = {"structure": "diag", "prior_precision": 1e3, "progress": False}
    return bf.laplace(mode, data, likelihood="categorical", **settings)


def test_variances_on_a_trained_network_are_those_of_draws():
    data = learnable()
    posterior = trained(data)
    x = data.inputs[100:124]
    assert (posterior.module()(x).argmax(-1) == data.targets[100:124]).double().mean() > 0.9
    truth = posterior.outputs(x, 600, predictive="sampled").values.var(0)
    found = posterior.outputs(x, predictive="streamlined").variance
    assert 0.75 < (found / truth).median() < 1.33


def test_draws_at_the_mean_have_the_tangents_of_the_jacobian():
    posterior, x = posterior_of(network(4), sd=1e-4), images(3)
    exact = posterior.outputs(x, predictive="linearised").variance
    with posterior.mean_passes.streamliner(x) as (streamliner, _):
        passes = streamliner.passes_of(False)
        pairs = list(passes.deviations(x, passes.at_mean(x), 400, 5, 0.03))
        theta = streamliner.shell.theta.clone()
    assert_mean(torch.stack([near for _, near in pairs]).square(), exact)
    assert torch.equal(theta, posterior.law.mean)


class Recurrent(nn.Module):
    """An LSTM, for which no rule of one pass exists."""

    def __init__(self):
        super().__init__()
        self.inner, self.head = nn.LSTM(3, 6, batch_first=True), nn.Linear(6, 5)

    def forward(self, x):
        return self.head(self.inner(x)[0][:, -1])


def test_any_model_is_predicted_by_backward_passes():
    posterior, x = posterior_of(Recurrent().double(), sd=1e-4), torch.randn(6, 4, 3, dtype=F64)
    exact = posterior.outputs(x, predictive="linearised").variance
    found = posterior.outputs(x, predictive="streamlined", settings=RuleSettings(outputs=5)).variance
    torch.testing.assert_close(found, exact, rtol=1e-2, atol=0.0)
    with pytest.raises(NotImplementedError, match=r"calls torch\.lstm .* Use predictive='streamlined'"):
        posterior.outputs(x, predictive="one_pass")


# --- where variance comes from ----------------------------------------------------------------------------------------


def test_layer_shares_are_those_of_the_layers_alone():
    posterior, x = posterior_of(network(4), sd=1e-3), images(3)
    shares, sd = posterior.layer_shares(x), posterior.law.sd
    assert sum(shares.values()) == pytest.approx(1)
    assert list(shares.values()) == sorted(shares.values(), reverse=True)
    total = posterior.outputs(x, predictive="linearised").variance.sum()
    for name in ("projection.weight", "embedding.weight"):
        alone = torch.zeros_like(sd)
        posterior.space.views(alone)[name].fill_(1e-3)
        one = replace(posterior, law=gaussian(posterior.law.mean, alone)).outputs(x, predictive="linearised")
        assert shares[name] == pytest.approx((one.variance.sum() / total).item())


def test_input_sensitivity_is_the_mean_squared_slope():
    """Against a finite difference under each draw of the weights."""
    posterior, x = posterior_of(network(4), sd=0.05), images(2)
    found = posterior.input_sensitivity(x, output=1, draws=3)
    expected, step = torch.zeros_like(x), 1e-5
    for draw in range(3):
        module = posterior.module(draw)
        with torch.no_grad():
            for place in torch.cartesian_prod(torch.arange(4), torch.arange(4)):
                nudge = torch.zeros_like(x)
                nudge[:, 0, place[0], place[1]] = step
                slope = (module(x + nudge) - module(x - nudge))[:, 1] / (2 * step)
                expected[:, 0, place[0], place[1]] += slope.square() / 3
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-9)
    every = sum(posterior.input_sensitivity(x, output=k, draws=3) for k in range(4))
    torch.testing.assert_close(posterior.input_sensitivity(x, draws=3), every)
    with pytest.raises(ValueError, match="inputs must be one tensor of real numbers"):
        posterior.input_sensitivity(torch.ones(2, 3, dtype=torch.int64))


@pytest.mark.parametrize("structure", ["kron", "diag"])
def test_variances_of_wide_posteriors_hold_where_the_noise_of_the_last_layer_meets_that_of_its_features(structure):
    """A ReLU classifier under the prior of the evidence: products of both kinds of noise are most of the variance."""
    g = torch.Generator().manual_seed(0)
    centres, y = 2 * torch.randn(5, 6, generator=g), torch.randint(5, (400,), generator=g)
    x = centres[y] + torch.randn(400, 6, generator=g)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 5))
    optimiser = torch.optim.AdamW(model.parameters(), 3e-3)
    for _ in range(150):
        optimiser.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimiser.step()
    for precision, wide in (("marglik", True), (30.0, False)):
        posterior = bf.laplace(
            model.eval(), (x, y), likelihood="categorical", structure=structure, prior_precision=precision
        ).calibrated()
        new = centres[y[:40]] + torch.randn(40, 6, generator=g)
        drawn = posterior.outputs(new, draws=400, predictive="sampled").values.var(0)
        ratio = posterior.outputs(new, predictive="streamlined").variance / drawn
        assert 0.75 < float(ratio.median()) < 1.35
        assert posterior.calibration[1].wide == wide
        assert not (wide and posterior.calibration[1].apart)

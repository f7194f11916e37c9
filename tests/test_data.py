"""Toy series against naive twins and exact integrals; the oracle; the digits and their probes."""

import math

import numpy as np
import pytest
import torch
from scipy import stats

from bayesformer.data import Data
from bayesformer.datasets import digits, toy
from bayesformer.likelihoods.predictive import GaussianPredictive
from tests.laws import assert_law, assert_mean

NAMES = list(toy.SERIES)
LENGTH = 24


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def fresh() -> torch.Generator:
    """A generator that follows the test's own seed, so that FREE_SEEDS frees it too."""
    return torch.Generator().manual_seed(int(torch.randint(2**31, ())))


def naive_means(name: str, past: list[float]) -> dict[float, float]:
    """Mean of the next value by its probability, in the words of the methods page, section 7."""
    x = past[-1]
    if name == "m1":
        return {1.0: 0.8 * x}
    if name == "m2":
        return {0.7: 0.9 * x, 0.3: 0.6 * 0.9 * x}
    if name == "m3":
        return {1.0: sum(math.cos(2 * math.pi * n / 5 * x + 1 / (n + 1)) / 5 for n in range(5))}
    if name == "m4":
        return {1.0: sum(0.8 / 5 * past[-1 - i] for i in range(5)) + past[0] / 5}
    return {1.0: sum(0.5 * math.cos(4 * math.pi * j / 2 * past[-1 - i]) for i in range(2) for j in range(2))}


ORDER = {"m1": 1, "m2": 1, "m3": 1, "m4": 5, "m5": 2}
NOISE = {"m1": 0.5, "m2": 0.3, "m3": 0.5, "m4": 0.5, "m5": 0.5}


@pytest.fixture(params=NAMES)
def series(request) -> toy.Series:
    return toy.SERIES[request.param]


def double(data: Data) -> Data:
    return Data(data.inputs.double(), data.targets.double(), data.mask)


# Generation


def test_data_are_one_sequence_shifted_and_the_mask_counts_the_process(series):
    data = toy.generate(series, 5, seeded())
    order = ORDER[series.name]
    assert data.inputs.shape == data.targets.shape == (5, order + LENGTH - 1, 1)
    assert torch.equal(data.inputs[:, 1:], data.targets[:, :-1])
    assert torch.equal(data.mask.sum(1), torch.full((5,), LENGTH))
    assert data.mask[:, order - 1 :].all()
    assert toy.generate(series, 2, seeded(), length=7).mask.sum() == 14


def test_a_seed_reproduces_the_data_and_the_global_stream_is_left_alone(series):
    state = torch.get_rng_state()
    first, again, other = (toy.generate(series, 50, seeded(seed)) for seed in (1, 1, 2))
    assert first.fingerprint() == again.fingerprint() != other.fingerprint()
    assert torch.equal(torch.get_rng_state(), state)


def test_generate_equals_a_naive_twin_on_the_same_noise(series):
    count, order = 20, ORDER[series.name]
    data, generator = toy.generate(series, count, seeded(3)), seeded(3)
    noise = torch.randn(order + LENGTH, count, generator=generator).double()
    uniform = torch.rand(LENGTH, count, generator=generator).double()
    values = torch.cat([data.inputs, data.targets[:, -1:]], 1)[..., 0].double()
    assert torch.equal(values[:, :order], noise[:order].T)
    for n in range(count):
        x = values[n].tolist()
        for step in range(LENGTH):  # from the values themselves: m5 is chaotic and doubles rounding errors
            means = list(naive_means(series.name, x[: order + step]).values())
            mean = means[0] if len(means) == 1 or uniform[step, n] < 0.7 else means[1]
            expected = mean + math.sqrt(NOISE[series.name]) * noise[order + step, n].item()
            assert x[order + step] == pytest.approx(expected, abs=1e-5)


def test_starting_values_are_standard_normal(series):
    data = toy.generate(series, 20_000, fresh(), length=1)
    for t in range(ORDER[series.name]):
        assert_law(data.inputs[:, t], stats.norm.cdf)


def test_targets_follow_the_conditional(series):
    """The probability integral transform of every scored target is uniform."""
    data = double(toy.generate(series, 2_000, fresh()))
    uniform = series.conditional(data.inputs).cdf(data.targets)[data.mask]
    assert_law(uniform, "uniform")
    assert_mean(uniform.view(2_000, LENGTH), 0.5)  # at every step
    assert_mean(uniform.view(2_000, LENGTH).square(), 1 / 3)


# The conditional


def test_conditional_equals_the_naive_mixture_of_scipy(series):
    data, order = double(toy.generate(series, 4, seeded())), ORDER[series.name]
    law = series.conditional(data.inputs)
    log_prob = law.log_prob(data.targets)
    for n in range(4):
        x = data.inputs[n, :, 0].tolist()
        for t, target in enumerate(data.targets[n, :, 0].tolist()):
            running = t >= order - 1
            parts = naive_means(series.name, x[: t + 1]) if running else {1.0: 0.0}
            sd = math.sqrt(NOISE[series.name]) if running else 1.0
            density = sum(p * stats.norm.pdf(target, mean, sd) for p, mean in parts.items())
            mean = sum(p * m for p, m in parts.items())
            assert log_prob[n, t].item() == pytest.approx(math.log(density), abs=1e-6)
            assert law.mean[n, t, 0].item() == pytest.approx(mean, abs=1e-6)
            spread = sum(p * m * m for p, m in parts.items()) - mean**2
            assert law.variance[n, t, 0].item() == pytest.approx(sd**2 + spread, abs=1e-6)


def test_density_integrates_to_one_with_the_stated_moments_and_cdf(series):
    inputs = 2 * torch.randn(3, 8, 1, dtype=torch.float64)
    law = series.conditional(inputs)
    grid = torch.linspace(-16, 16, 4001, dtype=torch.float64)
    density = torch.stack([law.log_prob(torch.full_like(inputs, y.item())).exp() for y in grid])  # (G, N, T)

    def integral(values):
        return torch.trapezoid(values, grid, dim=0)

    y = grid[:, None, None]
    mean = integral(y * density)
    torch.testing.assert_close(integral(density), torch.ones(3, 8, dtype=torch.float64), atol=1e-9, rtol=0)
    torch.testing.assert_close(mean, law.mean[..., 0], atol=1e-7, rtol=0)
    torch.testing.assert_close(integral((y - mean) ** 2 * density), law.variance[..., 0], atol=1e-6, rtol=0)
    below = torch.trapezoid(density[:2001], grid[:2001], dim=0)  # up to 0
    torch.testing.assert_close(below, law.cdf(torch.zeros_like(inputs))[..., 0], atol=1e-5, rtol=0)


def test_moments_are_those_of_process_samples(series):
    past = torch.randn(1, 9, 1, dtype=torch.float64)
    law, n = series.conditional(past), 20_000
    parts = naive_means(series.name, past.flatten().tolist())
    means = torch.tensor(list(parts.values()), dtype=torch.float64)
    component = torch.multinomial(torch.tensor(list(parts), dtype=torch.float64), n, replacement=True)
    draws = means[component] + math.sqrt(NOISE[series.name]) * torch.randn(n, dtype=torch.float64)
    assert_mean(draws, law.mean[0, -1, 0])
    assert_mean((draws - law.mean[0, -1, 0]).square(), law.variance[0, -1, 0])


def test_samples_of_the_conditional_follow_it(series):
    inputs = torch.randn(1, 6, 1, dtype=torch.float64)
    many = series.conditional(inputs.expand(5_000, 6, 1))
    draws = many.sample(fresh())
    assert draws.shape == (5_000, 6, 1)
    assert_law(many.cdf(draws), "uniform")
    assert_mean(draws, series.conditional(inputs).mean[0])


def test_nothing_of_the_future_enters_the_conditional(series):
    inputs = torch.randn(1, 9, 1)
    jacobian = torch.autograd.functional.jacobian(lambda x: series.conditional(x).mean, inputs).squeeze()  # (T, T)
    assert (jacobian.triu(1) == 0).all()
    order = ORDER[series.name]
    running = jacobian[order - 1 :]
    assert (running.diagonal(order - 1) != 0).all()  # the latest value
    reach = (jacobian[-1] != 0).nonzero().flatten().tolist()
    assert reach == sorted({*range(9 - order, 9), *([0] if series.name == "m4" else [])})
    assert (jacobian[: order - 1] == 0).all()  # before the process starts, the next value is N(0, 1)


def test_window_is_given_latest_value_first():
    """M4 and M5 weigh their window evenly; this process does not."""
    lags = toy.Series("lags", "", 3, 1e-6, lambda window, first: (window[..., 0] - 0.5 * window[..., 2])[None])
    data = toy.generate(lags, 4, seeded())
    x = data.inputs[..., 0]
    expected = x[:, 2:] - 0.5 * x[:, :-2]
    torch.testing.assert_close(data.targets[:, 2:, 0], expected, atol=0.01, rtol=0)
    torch.testing.assert_close(lags.conditional(data.inputs).mean[:, 2:, 0], expected)


# The oracle


@pytest.mark.parametrize(
    ("name", "reported"), [("m1", -25.77), ("m2", -20.43), ("m3", -25.74), ("m4", -25.72), ("m5", -25.72)]
)
def test_oracle_agrees_with_the_methods_page(name, reported):
    """Those values are themselves averages, to about .05; the exact ones are tested below."""
    series = toy.SERIES[name]
    values = series.log_likelihood(double(toy.generate(series, 20_000, fresh())))
    assert values.shape == (20_000,)
    assert values.mean().item() == pytest.approx(reported, abs=0.05 + 5 * values.std().item() / math.sqrt(20_000))
    assert values.std().item() == pytest.approx(3.5, abs=0.25)


@pytest.mark.parametrize("name", ["m1", "m3", "m4", "m5"])
def test_expected_oracle_is_the_entropy_of_the_noise(name):
    series = toy.SERIES[name]
    values = series.log_likelihood(double(toy.generate(series, 20_000, fresh())))
    assert_mean(values, -LENGTH * 0.5 * math.log(2 * math.pi * math.e * 0.5))


def test_expected_oracle_of_m2_is_its_entropy_by_quadrature():
    """The density of X_t carried from step to step on a grid, and the conditional entropy under it."""
    x = np.linspace(-8, 8, 801)
    width, sd = x[1] - x[0], math.sqrt(0.3)
    kernel = 0.7 * stats.norm.pdf(x, 0.9 * x[:, None], sd) + 0.3 * stats.norm.pdf(x, 0.54 * x[:, None], sd)
    entropy = -(kernel * np.log(kernel + 1e-300)).sum(1) * width  # at each x
    density, expected = stats.norm.pdf(x), 0.0
    for _ in range(LENGTH):
        expected -= (density * entropy).sum() * width
        density = density @ kernel * width
    assert expected == pytest.approx(-20.46, abs=0.01)
    series = toy.SERIES["m2"]
    assert_mean(series.log_likelihood(double(toy.generate(series, 20_000, fresh()))), expected)


def test_log_likelihood_counts_the_masked_steps_only(series):
    data = double(toy.generate(series, 6, seeded()))
    steps = series.conditional(data.inputs).log_prob(data.targets)
    expected = torch.stack([row[kept].sum() for row, kept in zip(steps, data.mask, strict=True)])
    torch.testing.assert_close(series.log_likelihood(data), expected)


def test_oracle_is_a_predictive_without_epistemic_uncertainty(series):
    data = toy.generate(series, 6, seeded())
    law = series.conditional(data.inputs)
    assert law.shape == data.mask.shape
    assert torch.equal(law.total, law.variance[..., 0])
    assert torch.equal(law.aleatoric + law.epistemic, law.total)
    assert (law.epistemic == 0).all()
    kept = law.select(data.mask)
    assert kept.shape == (6 * LENGTH,)
    torch.testing.assert_close(kept.log_prob(data.targets[data.mask]), law.log_prob(data.targets)[data.mask])


def test_equal_mixture_is_the_gaussian_predictive():
    means, variances, y = torch.randn(2, 4, 3, 1), torch.rand(2, 4, 3, 1) + 0.1, torch.randn(4, 3, 1)
    ours = toy.GaussianMixture(torch.tensor([0.5, 0.5]), means, variances)
    theirs = GaussianPredictive(means, variances)
    for a, b in [(ours.mean, theirs.mean), (ours.variance, theirs.variance)]:
        torch.testing.assert_close(a, b)
    torch.testing.assert_close(ours.log_prob(y), theirs.log_prob(y))
    torch.testing.assert_close(ours.cdf(y), theirs.cdf(y))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda s: toy.generate(s, 0, seeded()),
            "count and length must be at least 1; got count=0, length=24.",
        ),
        (lambda s: s.conditional(torch.zeros(3, 4)), r"inputs must have shape \(N, T, 1\); got \(3, 4\)."),
        (
            lambda s: s.conditional(torch.zeros(3, 4, 1)).log_prob(torch.zeros(3, 1, 1)),
            r"targets must have shape \(3, 4, 1\); got \(3, 1, 1\).",
        ),
        (
            lambda s: s.log_likelihood(Data(torch.zeros(3, 4, 1), torch.zeros(3, 4, 1))),
            "data must be what `generate` gives",
        ),
    ],
)
def test_toy_errors_name_argument_rule_and_value(call, message):
    with pytest.raises(ValueError, match=message):
        call(toy.SERIES["m1"])


# Digits


@pytest.fixture(scope="module")
def loaded() -> digits.Digits:
    return digits.load()


def rows(data: Data) -> set[bytes]:
    return {image.numpy().tobytes() for image in data.inputs}


def test_digits_are_split_in_three_disjoint_parts(loaded):
    parts = [loaded.train, loaded.validation, loaded.test]
    assert [len(part) for part in parts] == [1000, 297, 500]
    assert parts[0].inputs.shape[1:] == (1, 8, 8)
    assert len(set.union(*map(rows, parts))) == sum(len(rows(part)) for part in parts) == 1797
    for part in parts:  # every class has its share, to within one image at either end of its run
        share = torch.bincount(part.targets, minlength=10) / len(part)
        whole = torch.bincount(torch.cat([p.targets for p in parts]), minlength=10) / 1797
        assert (share - whole).abs().max() <= 2 / len(part)
    assert digits.load().test.fingerprint() == loaded.test.fingerprint()


def test_digits_are_standardised_by_the_training_part_alone(loaded):
    assert loaded.train.inputs.mean().item() == pytest.approx(0, abs=1e-6)
    assert loaded.train.inputs.std().item() == pytest.approx(1, abs=1e-6)
    assert loaded.test.inputs.mean().item() != pytest.approx(0, abs=1e-4)
    for part in [loaded.train, loaded.validation, loaded.test]:
        raw = part.inputs * loaded.std + loaded.mean
        torch.testing.assert_close(raw, raw.round(), atol=1e-4, rtol=0)
        assert raw.round().min() == 0
        assert raw.round().max() == 16


@pytest.mark.parametrize("patch_size", [2, 4])
def test_shuffled_images_have_the_same_patches_in_another_order(patch_size):
    """Every pixel carries its own number, so that the order can be read off."""
    grid, count = 8 // patch_size, 2_000
    image = torch.arange(2 * 64).view(1, 2, 8, 8).float()
    shuffled = digits.shuffled_patches(image.expand(count, 2, 8, 8), patch_size, fresh())
    expected = cut(image, grid)[0]  # (patches, pixels)
    found = cut(shuffled, grid)  # (N, patches, pixels)
    order = (found[:, :, None] == expected).all(-1)  # (N, place, patch)
    assert (order.sum(1) == 1).all()
    assert (order.sum(2) == 1).all()
    assert not order.diagonal(dim1=1, dim2=2).all(1).any()
    patches = grid * grid  # uniform over all orders but one: a patch stays put a little less than 1 in n
    stay = (1 / patches - 1 / math.factorial(patches)) / (1 - 1 / math.factorial(patches))
    assert_mean(order[:, 1, 1].float(), stay)


def cut(images: torch.Tensor, grid: int) -> torch.Tensor:
    """(N, patches, pixels), by slices."""
    size = 8 // grid
    corners = [(size * i, size * j) for i in range(grid) for j in range(grid)]
    return torch.stack([images[:, :, i : i + size, j : j + size].flatten(1) for i, j in corners], 1)


def test_two_patches_are_always_swapped():
    images = torch.randn(50, 1, 2, 4)
    expected = torch.cat([images[..., 2:], images[..., :2]], -1)
    assert torch.equal(digits.shuffled_patches(images, 2, seeded()), expected)


def test_noise_has_the_mean_and_spread_of_every_pixel(loaded):
    like = loaded.train.inputs
    draws = digits.noise(20_000, fresh(), like)
    assert draws.shape == (20_000, 1, 8, 8)
    std, mean = like.double().std(0), like.double().mean(0)
    moving = std > 0
    assert_mean(draws[:, moving], mean[moving])
    assert_law(((draws.double() - mean) / std)[:, moving][:, ::7], stats.norm.cdf)
    torch.testing.assert_close(draws[:, ~moving], like[:1, ~moving].expand(20_000, -1))


def test_probes_are_repeatable(loaded):
    images = loaded.test.inputs
    first, again = (digits.probes(images, seeded(5)) for _ in range(2))
    assert list(first) == ["shuffled", "noise"]
    for name, probe in first.items():
        assert probe.shape == images.shape
        assert torch.equal(probe, again[name])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: digits.shuffled_patches(torch.zeros(2, 1, 8, 8), 3, seeded()),
            r"patch_size must divide the images .* 2 patches; got patch_size=3, images \(2, 1, 8, 8\).",
        ),
        (
            lambda: digits.shuffled_patches(torch.zeros(2, 1, 8, 8), 8, seeded()),
            "at least 2 patches; got patch_size=8",
        ),
        (lambda: digits.noise(0, seeded(), torch.zeros(2, 1, 8, 8)), "count must be at least 1; got 0."),
    ],
)
def test_digits_errors_name_argument_rule_and_value(call, message):
    with pytest.raises(ValueError, match=message):
        call()

"""The weight study: fits against known laws and against scipy, intervals over networks, and priors that VI takes."""

import math
from dataclasses import asdict
from xml.etree import ElementTree

import pytest
import torch
from scipy import stats

from bayesformer import cli
from bayesformer.bench import command_parts
from bayesformer.bench.planning import plan
from bayesformer.core.errors import DamagedFileError
from bayesformer.core.storage import read_checked
from bayesformer.priors.distributions import FAMILIES, Cauchy, LaplaceDistribution, Logistic, Normal, StudentT
from bayesformer.priors.prior import parse_law
from bayesformer.study import prior_draws, prior_scale, weight_study
from bayesformer.study.weight_laws import cells_of, fit_family, fit_layer, law_of
from bayesformer.study.weight_networks import train_networks
from bayesformer.study.weight_shapes import correlations, kernel_density, off_diagonal, peaks, quantile_pairs, shape_of

LAWS = {
    "normal": Normal(0.3, 2.0),
    "student_t": StudentT(4.0, -0.2, 0.5),
    "laplace": LaplaceDistribution(0.1, 0.7),
    "cauchy": Cauchy(0.0, 1.5),
    "logistic": Logistic(1.0, 0.3),
}
SIZE = {"train": 40, "validation": 10, "test": 20, "dim": 8}


def drawn(law, networks=20, size=10_000):
    return law.sample(torch.empty(networks, size, dtype=torch.float64))


@pytest.mark.parametrize("family", LAWS)
def test_a_law_is_found_again_from_its_draws(family):
    law = LAWS[family]
    found = fit_layer(drawn(law), resamples=30)
    assert found.by_likelihood == family
    assert found.by_squared_error == family
    assert found.support["likelihood"][family] > 0.6
    fit = found.fits[family]
    # 200,000 draws: errors of location and scale are about 1.5 scale / √n, six of them are allowed.
    bound = 6 * 1.5 * law.scale / math.sqrt(200_000)
    assert abs(fit["loc"] - law.loc) < bound
    assert abs(fit["scale"] - law.scale) < bound
    if family == "student_t":
        low, high = found.df_interval
        assert low < found.df < high
        assert abs(found.df - 4) < 0.5
    assert sum(found.support["likelihood"].values()) == pytest.approx(1.0)


@pytest.mark.parametrize("family", ["student_t", "logistic", "cauchy", "laplace", "normal"])
def test_fits_agree_with_those_of_scipy(family):
    """scipy maximises the likelihood of single values; ours of cells, so that it differs by their width."""
    values = drawn(LAWS[family], networks=2, size=1500)
    ours = fit_family(family, cells_of(values), torch.ones(1, 2, dtype=torch.float64))
    law = {"student_t": stats.t, "normal": stats.norm}.get(family) or getattr(stats, family)
    *shape, loc, scale = law.fit(values.flatten().numpy())
    assert ours.loc.item() == pytest.approx(loc, abs=0.02 * scale)
    assert ours.scale.item() == pytest.approx(scale, rel=0.02)
    if shape:
        assert ours.df.item() == pytest.approx(shape[0], rel=0.05)
    level = law.logpdf(values.flatten().numpy(), *shape, loc, scale).mean()
    assert ours.log_density.item() == pytest.approx(level, abs=2e-3)


def test_intervals_are_over_networks_not_over_weights():
    scales = torch.linspace(0.5, 2.0, 16, dtype=torch.float64)[:, None]
    of_their_own = fit_layer(scales * torch.randn(16, 500, dtype=torch.float64), resamples=100)
    shuffled = (scales * torch.randn(16, 500, dtype=torch.float64)).flatten()[torch.randperm(16 * 500)].reshape(16, 500)
    mixed = fit_layer(shuffled, resamples=100)
    width, narrow = (high - low for low, high in (of_their_own.scale_interval, mixed.scale_interval))
    assert width > 3 * narrow  # networks that differ leave more doubt than as many weights without networks


def test_weights_that_are_all_equal_have_a_fit():
    found = fit_layer(torch.ones(3, 4), resamples=5)
    assert found.fits["normal"]["loc"] == 1.0
    with pytest.raises(ValueError, match="at least 2 networks; got 1"):
        fit_layer(torch.ones(1, 4))


@pytest.mark.parametrize("law", LAWS.values(), ids=LAWS)
def test_a_law_is_written_as_settings_have_it(law):
    assert parse_law(weight_study.law_text(law)) == law


def test_laws_are_rounded_and_centred():
    fit = {"loc": 0.004, "scale": 0.12345, "df": 150.0}
    assert law_of("student_t", fit) == Normal(0.0, 0.123)  # nothing tells it from a normal law
    assert law_of("student_t", {**fit, "df": 5.04321}) == StudentT(5.04, 0.0, 0.123)
    assert law_of("laplace", {**fit, "loc": 1.2345}) == LaplaceDistribution(1.23, 0.123)
    assert set(FAMILIES) == set(LAWS)


def test_modes_are_counted():
    one = torch.randn(10, 2000, dtype=torch.float64)
    assert len(peaks(*kernel_density(one))) == 1
    two = torch.cat([one - 3, one + 3], 1)
    found = peaks(*kernel_density(two))
    assert len(found) == 2
    torch.testing.assert_close(found.abs(), torch.full((2,), 3.0, dtype=torch.float64), atol=0.4, rtol=0)


def test_quantiles_of_normal_weights_are_on_the_diagonal():
    normal, own = quantile_pairs(torch.randn(200_000, dtype=torch.float64).sort().values)
    middle = normal.abs() < 2
    torch.testing.assert_close(own[middle], normal[middle], atol=0.05, rtol=0)
    _, heavy = quantile_pairs(drawn(Cauchy(), 1, 200_000).flatten().sort().values)
    assert heavy[-1] > 3 * normal[-1]


def test_correlations_of_independent_weights_have_the_known_spread():
    networks, count = 40, 200
    level = off_diagonal(correlations(torch.randn(networks, count, dtype=torch.float64)))
    # E r² = 1 / (N - 1) for independent normal weights; 19,900 pairs leave a relative error of about .7 %.
    assert level**2 == pytest.approx(1 / (networks - 1), rel=0.06)
    shared = torch.randn(networks, 1, dtype=torch.float64) + torch.randn(networks, count, dtype=torch.float64)
    found = shape_of(shared)
    assert found.correlation > found.null_interval[1]  # r = ½ by their common part
    alone = shape_of(torch.randn(networks, count))
    assert alone.null_interval[0] * 0.9 < alone.correlation < alone.null_interval[1] * 1.1


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return train_networks("toy/m1", 3, tmp_path_factory.mktemp("networks"), SIZE, {"epochs": 1})


def test_entropies_under_a_prior_are_those_of_its_draws(trained):
    found = prior_draws.prior_predictives(trained, {"*": "normal(0, 0.001)"})
    assert set(found) == {
        "plain, normal(0, 1)", "of this study", "published", "gaussian attention", "dirichlet attention",
    }  # fmt: skip
    # Weights of nearly 0 give mean 0 and scale softplus(0) wherever: one entropy, ½ log 2πe + log log 2.
    known = 0.5 * math.log(2 * math.pi * math.e) + math.log(math.log(2))
    assert found["of this study"].each == pytest.approx(known, abs=0.02)
    assert found["of this study"].together == pytest.approx(known, abs=0.02)
    plain = found["plain, normal(0, 1)"]
    assert plain.together > plain.each  # networks that disagree are less sure together
    width = plain.edges[1] - plain.edges[0]
    assert sum(plain.heights) * width == pytest.approx(1.0, abs=0.02)
    again = prior_draws.prior_predictives(trained, {"*": "normal(0, 0.001)"})
    assert asdict(again["dirichlet attention"]) == asdict(found["dirichlet attention"])


def test_the_command_writes_statistics_figures_and_priors_that_methods_take(trained, tmp_path, capsys):
    sizes = [f"--set=toy/m1.{name}={value}" for name, value in SIZE.items()]
    command = [
        "study",
        "weights",
        "toy/m1",
        "--networks",
        "3",
        "--folder",
        str(tmp_path / "networks"),
        "--quiet",
        *sizes,
    ]
    command += ["--results", str(tmp_path), "--set=training.epochs=1", "--out", str(tmp_path / "priors.toml")]
    assert cli.main([*command, "--train-only", "--export", str(tmp_path / "all.safetensors")]) == 0
    weights, facts = read_checked(tmp_path / "all.safetensors", "weights")
    assert weights["projection.weight"].shape == (3, 2, 8)
    assert facts["networks"] == 3
    assert not (tmp_path / "toy-m1.json").exists()
    assert cli.main(command) == 0
    assert "Weights of 3 networks trained on toy/m1" in capsys.readouterr().out
    study = weight_study.read(tmp_path / "toy-m1.json")
    assert study.facts["networks"] == 3
    assert study.facts["training"]["epochs"] == 1
    again = weight_study.write(study, tmp_path / "again.json")
    assert again.read_text() == (tmp_path / "toy-m1.json").read_text()
    for name in ("marginals", "quantiles", "tails", "correlations", "off_diagonal", "prior_predictive"):
        text = (tmp_path / f"toy-m1-{name}.svg").read_text()
        ElementTree.fromstring(text)
        assert "3 networks" in text or name == "prior_predictive"
    assert cli.main(["study", "weights", "all", "--stored", "--results", str(tmp_path / "none")]) == 2
    assert "must have been made before it is drawn" in capsys.readouterr().err
    again.unlink()
    page = ["study", "weights", "toy/m1", "--stored", "--results", str(tmp_path), "--figures", str(tmp_path / "page")]
    assert cli.main(page) == 0
    assert weight_study.table(study) in (tmp_path / "page" / "README.md").read_text()
    drawn_again = (tmp_path / "page" / "toy-m1-tails.svg").read_text()
    assert drawn_again == (tmp_path / "toy-m1-tails.svg").read_text()
    settings = command_parts.read_config(tmp_path / "priors.toml")
    (cell,) = plan(["toy/m1"], ["vi"], [0], {**settings, "toy/m1": SIZE})
    assert cell.method_settings["prior"] == study.priors()
    assert cli.main([*command[:3], "--networks", "1"]) == 2
    assert "networks must be a whole number of at least 2" in capsys.readouterr().err
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(DamagedFileError, match=r"must be of the format 'weight study 1'; got None"):
        weight_study.read(tmp_path / "other.json")


def test_the_log_likelihood_is_shown_against_the_scale_of_the_prior(trained, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(prior_scale, "SCALES", (0.1, 1.0))
    weights = tmp_path / "weights"
    weight_study.write(weight_study.study_weights(trained, resamples=3), weights / "toy-m1.json")
    sizes = [f"--set=toy/m1.{name}={value}" for name, value in SIZE.items()]
    command = ["study", "priors", "--tasks", "toy/m1", "--seeds", "1", "--weights", str(weights), "--quiet", *sizes]
    command += ["--set=training.epochs=1", "--results", str(tmp_path / "runs")]
    assert cli.main(command) == 0
    out = capsys.readouterr().out
    assert "4 cells run" in out
    assert "| task | N(0, 0.1²) | N(0, 1²) | weight study | MLE |" in out
    ElementTree.fromstring((tmp_path / "runs" / "priors.svg").read_text())
    assert cli.main(command) == 0
    assert "0 cells run, 4 were there already" in capsys.readouterr().out
    assert prior_scale.scale_of({"settings": {"method": {"prior": "normal(0, 0.03)"}}}) == 0.03
    with pytest.raises(ValueError, match="results must hold at least one result"):
        prior_scale.figure([], tmp_path / "none.svg")

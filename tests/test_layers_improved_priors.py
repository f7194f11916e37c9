"""The improved priors speak of every parameter of our models."""

import pytest

from bayesformer.layers import IMPROVED, convert, kl_divergence
from bayesformer.model.space import Space
from bayesformer.models import Encoder, Regressor, SequenceClassifier, Tagger, VisionTransformer
from bayesformer.priors.distributions import Cauchy, LaplaceDistribution, Logistic, Normal, StudentT
from bayesformer.priors.prior import Prior

MODELS = {
    "regressor": lambda: Regressor(Encoder(4, depth=2)),
    "learned positions": lambda: Regressor(Encoder(4, depth=2, positions="learned")),
    "tagger": lambda: Tagger(Encoder(4, depth=2), 7, 3),
    "classifier": lambda: SequenceClassifier(Encoder(4, depth=2), 7, 3),
    "vit": lambda: VisionTransformer(8, 4, 1, 3, dim=4),
}
# embedding, attention, MLP, projection, as in Cinquin et al. (2021)
TABLES = {
    "m1": (StudentT(13, 0, 0.03), StudentT(5, 0, 1e-4), StudentT(6, 0, 1e-4), Cauchy(0, 0.6)),
    "m2": (LaplaceDistribution(0, 0.035), StudentT(4, 0, 1e-4), StudentT(5, 0, 1.5e-4), LaplaceDistribution(0, 0.01)),
    "m3": (Normal(0, 0.6), Logistic(0, 0.001), StudentT(5, 0, 0.002), LaplaceDistribution(0, 0.1)),
    "m4": (LaplaceDistribution(0, 0.3), StudentT(3, 0, 1e-4), StudentT(5, 0, 1.5e-4), LaplaceDistribution(0, 0.01)),
    "m5": (LaplaceDistribution(0, 0.1), StudentT(6, 0, 1e-4), StudentT(4, 0, 1e-4), StudentT(1e4, 0, 0.2)),
    "pos": (Normal(0, 0.3), StudentT(12, 0, 1e-4), StudentT(1e4, 0, 2.5e-4), Normal(0, 0.3)),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("task", IMPROVED)
def test_every_parameter_has_the_law_of_its_group(task, name):
    model = MODELS[name]()
    laws = Prior(IMPROVED[task]).assign(Space.of(model).names)
    for parameter, law in laws.items():
        if "norm." in parameter:
            expected = Normal(1, 1) if parameter.endswith("weight") else Normal(0, 1)
        elif task == "mnist":
            expected = mnist(parameter)
        else:
            groups = dict(zip(("embedding", "attention", "mlp", "projection"), TABLES[task], strict=True))
            expected = groups[group(parameter)]
        assert law == expected, parameter


def group(parameter):
    if parameter.startswith(("embedding.", "encoder.positions.")):
        return "embedding"
    return parameter.split(".")[3] if parameter.startswith("encoder.blocks.") else parameter.split(".")[0]


def mnist(parameter):
    if group(parameter) in ("embedding", "projection"):
        return Normal(0, 0.02) if group(parameter) == "embedding" else Logistic(0, 0.1)
    block = int(parameter.split(".")[2])
    table = {
        (0, "attention"): Normal(0, 0.02),
        (0, "mlp"): StudentT(80, 0, 0.01),
        (1, "attention"): StudentT(26, 0, 2e-4),
        (1, "mlp"): StudentT(13, 0, 2e-4),
    }
    return table[block, group(parameter)]


@pytest.mark.parametrize("task", IMPROVED)
def test_models_convert_with_them_whole_or_in_part(task):
    for names in ("*", "*.attention.*"):
        value = kl_divergence(convert(MODELS["vit"](), "student_t", IMPROVED[task], names))
        assert value.isfinite()

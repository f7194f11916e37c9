"""The accuracy study: its Monte Carlo, its table and its files, on a posterior where the answer is known."""

import json

import pytest
import torch
from torch import nn

from bayesformer.laws import gaussian
from bayesformer.model.space import Space
from bayesformer.study import accuracy, trained_accuracy
from tests.laws import assert_mean


class Parts(nn.Module):
    """Linear in the weights of each part."""

    def __init__(self):
        super().__init__()
        self.body = nn.ModuleDict({"mlp": nn.Linear(3, 2), "attention": nn.Linear(3, 2)})

    def forward(self, x):
        return self.body["mlp"](x) + self.body["attention"](x)


def case(count=5):
    torch.manual_seed(0)
    model = Parts().eval()
    space = Space.of(model)
    theta = space.pack(dict(model.named_parameters()))
    weights = gaussian(theta, torch.rand_like(theta))
    return accuracy.Case("tiny", model, space, weights, torch.randn(64, 3), count)


def test_monte_carlo_estimates_the_variance():
    given = case()
    found = [accuracy.monte_carlo(given, given.inputs, 200, seed=seed) for seed in range(30)]
    sd = given.space.views(given.law.sd.double())
    squares = given.inputs.double().square()
    exact = sum(
        squares @ sd[f"body.{p}.weight"].square().mT + sd[f"body.{p}.bias"].square() for p in ("mlp", "attention")
    )
    assert_mean(torch.stack([one.diagonal for one in found]), exact)
    assert_mean(torch.stack([one.mean for one in found]), given.model(given.inputs).detach().double())


def test_spread_of_one_part_alone():
    given = case()
    kept = accuracy.with_spread_in(given, "mlp")
    sd = kept.space.views(kept.law.sd)
    assert not sd["body.attention.weight"].any()
    assert torch.equal(sd["body.mlp.weight"], given.space.views(given.law.sd)["body.mlp.weight"])
    assert kept.name == "tiny, mlp"


def test_the_command_writes_a_file_per_case_and_prints_the_table(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(accuracy, "CASES", {"tiny": case})
    monkeypatch.setattr(accuracy, "PARTS", {"tiny": ("mlp",)})
    accuracy.main(["--draws", "4000", "--output", str(tmp_path)])
    printed = capsys.readouterr().out
    assert printed.count("\n") == 2 + 2 * (len(accuracy.VARIANTS) + 2)
    content = json.loads((tmp_path / "tiny_mlp.json").read_text())
    assert content["uncertain"] == 8
    assert content["draws"] == 4000
    for row in json.loads((tmp_path / "tiny.json").read_text())["rows"]:
        if row["variant"] != accuracy.SAMPLED:  # linear in the weights: every rule is exact; 10 ratios of 4000 draws
            assert row["ratio"] == pytest.approx(1, abs=0.1)
            assert row["mean_error"] < 0.1
            assert row["rank"] == pytest.approx(1, abs=0.1)


def test_an_unknown_case_is_refused(capsys):
    with pytest.raises(SystemExit):
        accuracy.main(["resnet"])
    assert "cases must be among mlp, toy, vit, gpt2; got resnet" in capsys.readouterr().err


def test_the_command_on_trained_networks_writes_prints_and_judges(monkeypatch, tmp_path, capsys):
    def tiny():
        source = torch.Generator().manual_seed(0)
        x = torch.randn(120, 3, generator=source)
        y = (x[:, 0] > 0).long()
        data = [trained_accuracy.Data(x[part], y[part]) for part in (slice(80), slice(80, None))]
        return trained_accuracy.TrainedCase(lambda: nn.Linear(3, 2), *data, epochs=2, count=8)

    monkeypatch.setattr(trained_accuracy, "CASES", {"tiny": tiny})
    status = trained_accuracy.main(["--draws", "2000", "--output", str(tmp_path)])
    content = json.loads((tmp_path / "trained.json").read_text())["tiny"]
    assert capsys.readouterr().out.count("| tiny |") == len(trained_accuracy.STRUCTURES)
    assert status == 0  # linear in the weights: the last layer is all there is, and exact
    assert {row["way"] for row in content["rows"]} == set(trained_accuracy.WAYS)
    assert all(row["ratio"] == pytest.approx(1, abs=0.1) for row in content["rows"])
    content["rows"][0]["ratio"] = 0.5
    (tmp_path / "trained.json").write_text(json.dumps({"tiny": content}))
    assert trained_accuracy.main(["--stored", "--output", str(tmp_path)]) == 1
    with pytest.raises(SystemExit):
        trained_accuracy.main(["resnet"])

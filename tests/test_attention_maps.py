"""Attention maps: mean and spread against known laws and against draws kept one by one; the figure and the page."""

import math

import pytest
import torch
from torch import nn

import bayesformer as bf
from bayesformer.attention import Dirichlet, Learned, attention_maps, attention_mode, install
from bayesformer.attention.attention_maps import picture
from bayesformer.cli import main
from bayesformer.models.transformer import Encoder, Regressor
from bayesformer.study import map_study as study


def regressor(depth=2, heads=2):
    torch.manual_seed(0)
    return Regressor(Encoder(dim=8, heads=heads, depth=depth, causal=True))


def test_a_dirichlet_has_its_exact_moments():
    """Under symmetric logits a row of n keys is Dirichlet(s/n, ...): mean 1/n, variance (1/n)(1 - 1/n)/(s + 1)."""
    sharpness, keys, draws = 7.0, 5, 4000
    family = Dirichlet(Learned(sharpness, per_row=True))

    class Flat(nn.Module):
        def __init__(self):
            super().__init__()
            self.family = family

        def forward(self, x):
            return self.family(x.new_zeros(len(x), 1, 2, keys), torch.ones(1, 1, 1, keys, dtype=torch.bool))[0]

    (seen,) = attention_maps(Flat(), torch.zeros(3, 1), draws)
    sd = math.sqrt((1 / keys) * (1 - 1 / keys) / (sharpness + 1))
    assert seen.mean.shape == (3, 1, 2, keys)
    assert (seen.mean - 1 / keys).abs().max() < 5 * sd / math.sqrt(draws)
    torch.testing.assert_close(seen.sd, torch.full_like(seen.sd, sd), rtol=0.08, atol=0)


def test_maps_are_the_moments_of_separate_passes():
    model, x = install(regressor(), "weibull", spread=3.0).eval(), torch.randn(2, 6, 1)
    found = attention_maps(model, x, draws=12, seed=4)
    assert [m.name for m in found] == ["encoder.blocks.0.attention", "encoder.blocks.1.attention"]
    kept = [[], []]
    hooks = [
        block.attention.family.register_forward_hook(lambda _, __, out, i=i: kept[i].append(out.weights))
        for i, block in enumerate(model.encoder.blocks)
    ]
    torch.manual_seed(4)
    with torch.no_grad(), attention_mode(model, "draw"):
        for _ in range(12):
            model(x)
    for hook in hooks:
        hook.remove()
    for seen, draws in zip(found, kept, strict=True):
        each = torch.stack(draws).double()
        torch.testing.assert_close(seen.mean, each.mean(0))
        torch.testing.assert_close(seen.sd, each.std(0))
        future = torch.ones(6, 6).triu(1).bool()
        assert (seen.mean[..., future] == 0).all()
        assert (seen.sd[..., future] == 0).all()
    assert not model.training
    assert not model.encoder.blocks[0].attention.family._forward_hooks


def test_softmax_attention_has_no_spread_and_a_model_without_attention_is_refused():
    (seen, _) = attention_maps(regressor(), torch.randn(2, 6, 1), draws=3)
    assert seen.sd.max() < 1e-7
    torch.testing.assert_close(seen.mean.sum(-1), torch.ones(2, 2, 6, dtype=torch.float64))
    with pytest.raises(ValueError, match="must have attention that this library draws; Linear has none"):
        attention_maps(nn.Linear(2, 2), torch.randn(2, 2))
    with pytest.raises(ValueError, match="draws must be at least 2, for a spread; got 1"):
        attention_maps(regressor(), torch.randn(2, 6, 1), draws=1)


def test_hugging_face_models_show_their_maps():
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16, vocab_size=30
    )
    model = install(transformers.BertModel(config), "lognormal", spread=0.5)
    ids = torch.randint(0, 30, (2, 7))
    mask = torch.ones_like(ids)
    mask[1, 5:] = 0
    found = attention_maps(model, {"input_ids": ids, "attention_mask": mask}, draws=20)
    assert [m.mean.shape for m in found] == [(2, 2, 7, 7)] * 2
    assert all((m.mean[1, :, :, 5:] == 0).all() and (m.sd[0] > 0).all() for m in found)


def test_the_figure_the_page_and_the_command(tmp_path, capsys):
    small = ["train=64", "validation=20", "test=40", "dim=8"]
    given = [part for s in small for part in ("--set", f"toy/*.{s}")]
    command = ["run", "toy/m1", "--methods", "mle,attention", "--results", str(tmp_path), "--quiet", *given]
    assert main([*command, "--set", "training.epochs=2", "--set", "attention.draws=6"]) == 0
    assert main(["report", str(tmp_path)]) == 0
    page = (tmp_path / "report.html").read_text()
    assert "Where does it look, and how sure is it?" in page
    assert "standard deviation of the attention weights of encoder.blocks.0.attention" in page
    (folder,) = (p.parent for p in tmp_path.rglob("posterior.json") if "attention" in str(p))
    out = tmp_path / "maps.svg"
    assert main(["study", "attention", str(folder), "--output", str(out)]) == 0
    drawn = out.read_text()
    assert drawn.count("<image") == 2
    assert "encoder.blocks.0.attention" in drawn
    assert main(["study", "attention", str(folder), "--index", "99", "--output", str(out)]) != 0
    assert "--index must be in 0..39; got 99" in capsys.readouterr().err


def test_pictures_are_small_and_graphs_have_none():
    seen = bf.attention.AttentionMap("a", torch.rand(2, 3, 4, 5), torch.rand(2, 3, 4, 5))
    (first, _, third) = picture([seen])
    assert first["name"] == "a, head 1"
    torch.testing.assert_close(torch.tensor(third["sd"]), seen.sd[0, 2], atol=6e-4, rtol=0)
    edges = bf.attention.AttentionMap("g", torch.rand(1, 2, 1, 9), torch.rand(1, 2, 1, 9))
    assert picture([edges]) == []
    with pytest.raises(ValueError, match="along the edges of a graph"):
        study.figure([edges], "never.svg")
    with pytest.raises(ValueError, match=r"example must be in 0\.\.1; got 2"):
        study.figure([seen], "never.svg", 2)

"""SWAG along AdamW, as published for LoRA, and mixtures of several SWAGs."""

import peft
import pytest
import torch
import transformers
from torch import nn

import bayesformer as bf
from bayesformer.core.types import Batch
from bayesformer.core.vectors import THETA
from bayesformer.inference import schedules
from bayesformer.laws import Deviations, GaussianLaw, MixtureLaw, from_tensors, gaussian
from bayesformer.train import recipe
from tests import contract
from tests.laws import assert_mean

F64 = torch.float64
V = 30


def some_law(size=3, rank=2, buffers=None):
    mean, sd = torch.randn(size, dtype=F64), 0.5 + torch.rand(size, dtype=F64)
    return gaussian(mean, sd, torch.randn(rank, size, dtype=F64), buffers=buffers)


def covariance(law):
    (block,) = law.blocks
    assert isinstance(block, Deviations)
    return block.sd.square().diag() + block.factor.T @ block.factor


def test_the_rate_falls_linearly_and_stays():
    rate = schedules.annealed(0.1, 0.02, 4)
    found = [float(rate(torch.tensor(float(t)))) for t in (1, 2, 4, 9)]
    assert found == pytest.approx([0.08, 0.06, 0.02, 0.02])
    with pytest.raises(ValueError, match="steps must be at least 1; got 0"):
        schedules.annealed(0.1, 0.02, 0)


def quadratic(params, batch):
    theta = params[THETA]
    return -((theta - batch.inputs).square() @ torch.tensor([1.0, 4.0, 0.5], dtype=F64)), theta


def test_it_watches_adamw_as_torch_has_it():
    """Moments of the weights after every epoch of torch's own AdamW under SWALR's linear rate."""
    steps, per_epoch, epochs = 24, 4, 6
    training = bf.Training(epochs=epochs, lr=0.05, weight_decay=0.1, clip=float("inf"))
    method = bf.Swag(trajectory="adamw", anneal=2, swa_lr=0.01, rank=10)
    batches = torch.randn(steps, 3, dtype=F64)
    transform = method.build(quadratic, training, steps, 100, per_epoch=per_epoch)
    state = transform.init({THETA: torch.ones(3, dtype=F64)})
    theirs = nn.Parameter(torch.ones(3, dtype=F64))
    optimiser = torch.optim.AdamW([theirs], lr=0.05, weight_decay=0.1)
    taken = []
    for step, x in enumerate(batches, 1):
        state, _ = transform.update(state, Batch(x, x))
        for group in optimiser.param_groups:
            group["lr"] = 0.05 + (0.01 - 0.05) * min(step / (2 * per_epoch), 1)
        optimiser.zero_grad()
        (-quadratic({THETA: theirs}, Batch(x, x))[0]).backward()
        optimiser.step()
        if step % per_epoch == 0:
            taken.append(theirs.detach().clone())
    path = torch.stack(taken)
    assert int(state.snapshots) == epochs
    torch.testing.assert_close(state.params[THETA], path.mean(0))
    torch.testing.assert_close(state.variance[THETA], path.var(0, correction=0))


def regression(count=40):
    x = torch.randn(count, 3)
    return x, (x @ torch.tensor([[1.0], [-2.0], [0.5]]) + 0.3 * torch.randn(count, 1))


def fit(method, epochs=6, **more):
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
    training = bf.Training(epochs=epochs, batch_size=10, lr=0.02, warmup=1)
    more = {"likelihood": bf.Gaussian(0.3), "init": "fresh", "training": training, **more}
    return bf.fit(model, regression(), method=method, **more)


FEW = {"rank": 3, "draws": 5, "trajectory": "adamw"}


@pytest.mark.filterwarnings("ignore::bayesformer.FidelityWarning")
def test_it_starts_from_the_best_weights_on_validation_data(monkeypatch):
    """Targets of validation data are noise: the first epoch is the best, and the watch must begin there."""
    seen = []

    def spy(stage, members):
        starts = None if stage.starts is None else [start.theta.clone() for start in stage.starts]
        found = recipe_fit(stage, members)
        seen.append((starts, found.theta.clone(), found.facts))  # the next stage trains these very weights
        return found

    recipe_fit = recipe.fit_stage
    monkeypatch.setattr(recipe, "fit_stage", spy)
    x, _ = regression(20)
    fit(bf.Swag(**FEW), epochs=12, validation=(x, 3 * torch.randn(20, 1)))
    (_, mode, facts), (starts, _, _) = seen
    assert facts["best_epoch"][0] < facts["epochs"][0] - 1
    assert torch.equal(starts[0], mode[0])


@pytest.mark.filterwarnings("ignore::bayesformer.FidelityWarning")
def test_the_first_member_is_the_swag_alone_and_the_others_are_others():
    torch.manual_seed(0)
    alone = fit(bf.Swag(**FEW))
    torch.manual_seed(0)
    several = fit(bf.Swag(**FEW, members=3))
    assert isinstance(several.law, MixtureLaw)
    assert isinstance(alone.law, GaussianLaw)
    first, second, third = several.law.components
    torch.testing.assert_close(first.mean, alone.law.mean)
    torch.testing.assert_close(first.sd, alone.law.sd)
    assert not torch.allclose(first.mean, second.mean, atol=1e-2)
    assert not torch.allclose(second.mean, third.mean, atol=1e-2)
    assert several.predict(torch.randn(4, 3)).means.shape == (5, 4, 1)


def test_moments_of_a_mixture():
    law = MixtureLaw((some_law(), some_law()))
    means = torch.stack([part.mean for part in law.components])
    between = means.T.cov(correction=0)
    exact = sum(covariance(part) for part in law.components) / 2 + between
    rows = law.rows(40_000)
    assert_mean(rows, law.mean)
    centred = rows - law.mean
    assert_mean(torch.einsum("li,lj->lij", centred, centred), exact)


def test_any_draws_in_a_row_have_one_of_each_component():
    law = MixtureLaw((some_law(), some_law(), some_law()))
    assert torch.equal(law.rows(7, seed=2)[4], law.row(4, seed=2))
    for draw in range(6):
        assert torch.equal(law.row(draw, 1), law.components[draw % 3].row(draw, 1))


def test_a_mixture_is_saved_whole_with_the_buffers_of_every_component():
    parts = [some_law(buffers={"mean": torch.full((1, 2), float(i)), "count": torch.ones(1)}) for i in range(3)]
    law = MixtureLaw.of(parts)
    assert law.buffers["mean"].shape == (3, 2)
    assert law.buffers["count"].shape == (1,)
    again = from_tensors(law.tensors())
    assert isinstance(again, MixtureLaw)
    assert torch.equal(again.rows(5, seed=1), law.rows(5, seed=1))
    from bayesformer.laws import buffers_of

    assert [float(buffers_of(again, draw)["mean"][0]) for draw in range(4)] == [0.0, 1.0, 2.0, 0.0]
    with pytest.raises(ValueError, match=r"components must be laws over the same weights; got \[3, 4\]"):
        MixtureLaw((some_law(3), some_law(4)))


@pytest.mark.filterwarnings("ignore::bayesformer.FidelityWarning")
def test_adapters_of_a_language_model_are_saved_loaded_and_write_text(tmp_path):
    config = transformers.LlamaConfig(
        vocab_size=V, hidden_size=8, intermediate_size=12, num_hidden_layers=2, num_attention_heads=2
    )
    base = transformers.LlamaForCausalLM(config)
    model = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
    ids = torch.randint(3, V, (12, 6))
    data = {"input_ids": ids, "labels": ids}
    training = bf.Training(epochs=6, batch_size=4, lr=0.02, warmup=1)
    method = bf.Swag(**{**FEW, "draws": 4}, members=2)
    posterior = bf.fit(model, data, likelihood=bf.NextToken(), method=method, training=training)
    assert posterior.predict(data).epistemic.max() > 0
    posterior.save(tmp_path / "saved")
    loaded = bf.Posterior.load(tmp_path / "saved", model)
    assert torch.equal(loaded.predict(data).total, posterior.predict(data).total)
    prompt = {"input_ids": ids[:2, :3]}
    found = posterior.generate(prompt, draws=4, max_new_tokens=3)
    assert torch.equal(found.tokens, loaded.generate(prompt, draws=4, max_new_tokens=3).tokens)
    looped = posterior.predict(prompt, draws=4, full=True, strategy="looped")
    together = posterior.predict(prompt, draws=4, full=True)
    torch.testing.assert_close(together.log_probs, looped.log_probs, rtol=1e-4, atol=1e-4)
    assert len(posterior.export_adapters(tmp_path / "draws", draws=4)) == 4


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"members": 2, "predictive": "linearised"}, "swag.predictive must be 'sampled' with several members"),
        ({"members": 2, "coordinates": "whitened"}, "swag.coordinates must be 'plain' with several members"),
        ({"trajectory": "adamw", "coordinates": "whitened"}, "swag.coordinates must be 'plain' with several"),
        ({"members": 0}, "swag.members must be"),
        ({"trajectory": "adam"}, "swag.trajectory must be one of 'sgd', 'adamw'"),
        ({"swa_lr": 0.0}, "swag.swa_lr must be"),
        ({"anneal": 0}, "swag.anneal must be"),
    ],
)
def test_settings_are_checked(settings, message):
    with pytest.raises(ValueError, match=message):
        bf.Swag(**settings)


def test_too_short_a_watch_is_refused_before_training():
    with pytest.raises(ValueError, match=r"at least 2 snapshots.*with every=4 give 1"):
        fit(bf.Swag(**FEW), epochs=2)


@pytest.mark.filterwarnings("ignore::bayesformer.FidelityWarning")
def test_other_ways_of_predicting_are_refused():
    with pytest.raises(ValueError, match="this one is MixtureLaw. Use predictive='sampled'"):
        fit(bf.Swag(**FEW, members=2)).predict(torch.randn(2, 3), predictive="linearised")


@pytest.mark.parametrize("kind", ["all_weights", "frozen_base", "batch_norm", "lora"])
@pytest.mark.filterwarnings("ignore::bayesformer.FidelityWarning")
def test_a_mixture_keeps_every_promise(kind, tmp_path, monkeypatch):
    monkeypatch.setitem(contract.SETTINGS, "swag", {"draws": 4, "rank": 2, "every": 1, "members": 2})
    contract.check_cell("swag", kind, tmp_path)

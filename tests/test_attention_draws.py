"""Several draws of attention in one pass: the draws of separate passes, with shared work done once."""

from functools import partial

import pytest
import torch
from torch.nn.utils import parameters_to_vector

import bayesformer as bf
from bayesformer.attention import Softmax, Weibull, attention_kl, attention_mode
from bayesformer.core.draws import drawing_from, log_uniform_like, normal_like
from bayesformer.laws import Samples
from bayesformer.models.transformer import Encoder, Regressor, SequenceClassifier
from bayesformer.models.vit import VisionTransformer
from bayesformer.posterior import Posterior
from bayesformer.predict import sampled
from bayesformer.predict.by_draws import draw_plan
from tests.attention_zoo import STOCHASTIC


def posterior(model, likelihood="gaussian"):
    kinds = {"gaussian": bf.Gaussian(), "categorical": bf.Categorical()}
    theta = parameters_to_vector(model.parameters()).detach()
    return Posterior(model.eval(), kinds[likelihood], Samples(theta[None]), noisy_draws=5)


@pytest.mark.parametrize("name", STOCHASTIC)
def test_draws_made_together_are_the_draws_made_alone(name):
    model = Regressor(Encoder(dim=8, heads=2, depth=2, causal=True, family=STOCHASTIC[name]))
    made, x = posterior(model), torch.randn(7, 5, 1)
    alone = made.outputs(x, strategy="looped", batch_size=3).values
    together = made.outputs(x, strategy="batched", batch_size=3).values
    assert alone.shape == (5, 7, 5, 2)
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)
    assert not torch.equal(alone[0], alone[1])


def test_images_and_padded_text():
    family = STOCHASTIC["weibull"]
    image = posterior(VisionTransformer(8, 4, 1, 3, dim=8, heads=2, family=family), "categorical")
    text = posterior(SequenceClassifier(Encoder(dim=8, heads=2, family=family), 11, 3), "categorical")
    valid = (torch.arange(6) < torch.tensor([6, 2, 4])[:, None]).long()
    for made, inputs in [
        (image, torch.randn(3, 1, 8, 8)),
        (text, {"input_ids": torch.randint(11, (3, 6)), "attention_mask": valid}),
    ]:
        alone = made.outputs(inputs, strategy="looped").values
        torch.testing.assert_close(made.outputs(inputs, strategy="batched").values, alone, rtol=1e-4, atol=1e-5)


def test_what_comes_before_the_first_stochastic_layer_is_done_once():
    model = Regressor(Encoder(dim=8, heads=2, depth=2, family=STOCHASTIC["lognormal"]))
    seen = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_hook(lambda m, i, o, name=name: seen.__setitem__(name, o.shape))
    with attention_mode(model, "draw", draws=4):
        assert model(torch.randn(3, 5, 1)).shape == (4, 3, 5, 2)
    shared = {name for name, shape in seen.items() if len(shape) == 3}
    assert shared == {"embedding", *(f"encoder.blocks.0.attention.{part}" for part in ("query", "key", "value"))}


def test_other_noise_is_not_batched():
    """Dropout has no stream per draw: the two ways would give different draws, and that is seen."""
    for family in (partial(Softmax, dropout=0.5), STOCHASTIC["weibull"]):
        made = posterior(Regressor(Encoder(dim=8, heads=2, dropout=0.5, family=family)))
        with pytest.raises(ValueError, match="strategy 'batched' is not possible here"):
            made.outputs(torch.randn(3, 5, 1), strategy="batched")


def test_a_model_that_mixes_its_batch_is_not_batched():
    class Centred(Regressor):
        def forward(self, inputs):
            outputs = super().forward(inputs)
            return outputs - outputs.mean(0)

    made = posterior(Centred(Encoder(dim=8, heads=2, family=STOCHASTIC["weibull"])))
    with pytest.raises(ValueError, match="strategy 'batched' is not possible here"):
        made.outputs(torch.randn(3, 5, 1), strategy="batched")


def test_draws_per_pass_depend_on_the_size_of_a_batch():
    made = posterior(Regressor(Encoder(dim=8, heads=2, family=STOCHASTIC["weibull"])))
    for examples, draws, expected in [(64, 5, [2, 2, 1]), (1, 30, [30])]:  # 64 · 24 numbers per draw, and 24
        batch = torch.randn(examples, 24, 1)
        with made.shells.borrow() as shell:
            sampler = sampled.Sampler(shell, draw_plan(made, draws, 0), draws, batch[:2], "batched")
            assert [len(outputs) for _, _, outputs in sampler.passes([batch])] == expected


def test_a_stream_per_row_is_the_stream_of_that_row_alone():
    like = torch.empty(3, 4, 5)
    for noise in (normal_like, log_uniform_like):
        with drawing_from([torch.Generator().manual_seed(i) for i in range(3)]):
            rows = noise(like)
        for i, row in enumerate(rows):
            torch.manual_seed(i)
            assert torch.equal(noise(like[0]), row)


def test_log_uniform_is_never_zero_or_infinite(monkeypatch):
    for dtype in (torch.float32, torch.float64):
        half = torch.finfo(dtype).eps / 4
        for end in (half, 1 - 2 * half):
            monkeypatch.setattr(torch.Tensor, "uniform_", lambda x, low, high, generator=None, e=end: x.fill_(e))
            value = log_uniform_like(torch.empty(2, dtype=dtype))
            assert (value < 0).all()
            assert torch.isfinite(value.neg().log()).all()


def test_prediction_does_not_compute_a_kl(monkeypatch):
    made = posterior(Regressor(Encoder(dim=8, heads=2, family=STOCHASTIC["weibull"])))
    x = torch.randn(3, 5, 1)
    monkeypatch.setattr(Weibull, "_kl", lambda *_: pytest.fail("a KL was computed"))
    for strategy in ("looped", "batched"):
        assert made.outputs(x, strategy=strategy).values.shape == (5, 3, 5, 2)


def test_without_a_kl_none_is_on_record():
    model, x = Regressor(Encoder(dim=8, heads=2, family=STOCHASTIC["weibull"])), torch.randn(3, 5, 1)
    model(x)
    assert (attention_kl(model) > 0).all()
    with attention_mode(model, "draw", kl=False):
        model(x)
    with pytest.raises(ValueError, match="only to predict"):
        attention_kl(model)
    model(x)
    assert (attention_kl(model) > 0).all()

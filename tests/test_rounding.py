"""What half precision leaves of a spread, and that it is reported."""

import logging
from dataclasses import replace

import pytest
import torch

import bayesformer as bf
from bayesformer.train.rounding import half_steps
from tests.contract import TRAINING, fit
from tests.contract_zoo import build


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_a_step_is_where_rounding_turns(dtype):
    values = torch.tensor([1.0, 1.5, 0.75, 3.0, -2.0, 0.0625]).to(dtype).float()
    steps = half_steps(values, dtype)
    away = values + values.sign() * steps
    assert torch.equal((values + values.sign() * 0.98 * steps).to(dtype).float(), values)
    assert not torch.equal((values + values.sign() * 1.02 * steps).to(dtype).float(), values)
    assert torch.equal((away - values).abs(), steps)


def test_small_spreads_in_bfloat16_are_reported(caplog):
    example = build("bfloat16_weights")
    with caplog.at_level(logging.WARNING, "bayesformer"):
        narrow = _vi(example, -8.0)
    assert 0 < narrow.facts["rounded_spread"] < 1
    assert "weights in bfloat16 have a spread below half a step" in caplog.text
    share = _share(narrow)
    assert narrow.facts["rounded_spread"] == pytest.approx(share)
    caplog.clear()
    wide = _vi(example, 0.0)
    assert wide.facts["rounded_spread"] == 0
    assert "half a step" not in caplog.text


def _vi(example, log_sd):
    method, training = bf.Vi(log_sd=log_sd), replace(TRAINING, epochs=1)
    return bf.fit(
        example.model, example.data, likelihood="categorical", method=method, training=training, progress=False
    )


def _share(posterior):
    """By brute force: half a step up, does the weight change?"""
    staged = [name for name in posterior.space.names if not name.startswith("head")]  # the head computes in float32
    mean, sd = (posterior.space.views(v) for v in (posterior.law.mean, posterior.law.sd))
    lost = torch.cat([(sd[n] < _half(mean[n])).flatten() for n in staged])
    return lost.float().mean().item()


def _half(w):
    kept = w.abs()
    up = 2.0 ** torch.floor(torch.log2(kept)) * 2.0**-8
    return torch.where(kept == 0, torch.zeros(()), up)


def test_float32_weights_say_nothing():
    assert "rounded_spread" not in fit("vi", build("frozen_base")).facts
    assert "rounded_spread" not in fit("laplace", build("lora_bfloat16")).facts

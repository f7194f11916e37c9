"""NUTS of blackjax as a referee: the same logistic regression, the same mass and step, equal moments."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import bayesformer as bf
from bayesformer.core.draws import drawing_from
from bayesformer.core.vectors import THETA
from bayesformer.inference import nuts
from bayesformer.inference.diagnostics import effective_sample_size

if importlib.util.find_spec("blackjax") is None:
    pytest.skip("needs blackjax, which the tests' extra has", allow_module_level=True)

WEIGHTS, DATA, STEP, DRAWS = 4, 60, 0.35, 800


def problem():
    source = torch.Generator("cpu").manual_seed(5)
    x = torch.randn(DATA, WEIGHTS, generator=source) @ torch.tensor(
        [[1.0, 0.8, 0, 0], [0, 0.6, 0, 0], [0, 0, 1, -0.5], [0, 0, 0, 0.7]]
    )
    y = (torch.rand(DATA, generator=source) < torch.sigmoid(x @ torch.tensor([1.0, -1, 0.5, 2]))).float()
    return x, y


def referee(x, y):
    """Draws (S, P), leapfrogs (S,) and acceptance (S,) of blackjax's NUTS with unit mass.

    In a process of its own: JAX starts threads, and tests that fork after it could hang.
    """
    asked = json.dumps({"x": x.tolist(), "y": y.tolist(), "step": STEP, "draws": DRAWS})
    command = [sys.executable, str(Path(__file__).with_name("blackjax_referee.py"))]
    answer = subprocess.run(command, input=asked, capture_output=True, text=True, check=False, timeout=300)
    assert answer.returncode == 0, answer.stderr[-2000:]
    return tuple(torch.tensor(part, dtype=torch.float64) for part in json.loads(answer.stdout.splitlines()[-1]))


def ours(x, y):
    model = torch.nn.Linear(WEIGHTS, 1, bias=False)
    joint = bf.log_joint(model, bf.Bernoulli(), "normal(0, 1)", DATA)

    def log_joint(params, batch):
        return joint({"weight": params[THETA][None]}, batch)

    transform = nuts.build(log_joint, 1 / DATA, warm_up=0, step_size=STEP)
    state, batch = transform.init({THETA: torch.zeros(WEIGHTS)}), bf.Batch(x, y[:, None])
    draws, statistics = [], []
    with drawing_from(torch.Generator("cpu").manual_seed(0)):
        for _ in range(DRAWS):
            state, found = transform.update(state, batch, inplace=True)
            draws.append(state.params[THETA].clone())
            statistics.append(torch.stack(found))
    return torch.stack(draws).double(), torch.stack(statistics)


def test_nuts_has_the_moments_trees_and_acceptance_of_blackjax():
    x, y = problem()
    theirs, leapfrogs, acceptance = referee(x, y)
    draws, statistics = ours(x, y)
    values, expected = torch.cat([draws, draws**2], 1), torch.cat([theirs, theirs**2], 1)
    errors = [(v.var(0) / effective_sample_size(v[None], rank_normalised=False)).sqrt() for v in (values, expected)]
    z = (values.mean(0) - expected.mean(0)) / torch.stack(errors).norm(dim=0)
    assert z.abs().max() < 5.3, z
    assert statistics[:, 2].mean().item() == pytest.approx(leapfrogs.mean().item(), rel=0.15)
    assert statistics[:, 0].mean().item() == pytest.approx(acceptance.mean().item(), abs=0.02)

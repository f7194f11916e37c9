"""What is asked of a posterior, and what is refused before anything is computed."""

import math

import pytest
import torch
from torch import nn

import bayesformer as bf
from bayesformer.laws import Samples


@pytest.mark.parametrize("seed", [None, 1.5, "0", True])
def test_seeds_of_predictions_are_whole_numbers(seed):
    x = torch.randn(20, 3)
    posterior = bf.fit(nn.Linear(3, 2), (x, (x[:, 0] > 0).long()), likelihood="categorical", method=bf.Laplace())
    with pytest.raises(ValueError, match=f"seed must be a whole number; got {seed!r}"):
        posterior.predict(x, seed=seed)


def test_a_distance_to_the_mode_that_is_not_known_is_not_printed():
    model = nn.Linear(3, 2)
    posterior = bf.Posterior(
        model, bf.Categorical(), Samples(torch.zeros(2, 8)), facts={"coordinates": {"decrement": math.nan}}
    )
    assert "nan" not in repr(posterior)
    assert "convergence unknown" in repr(posterior)


def test_folders_that_are_files_are_refused(tmp_path):
    path, x = tmp_path / "model.pt", torch.randn(20, 3)
    path.write_text("weights")
    data, settings = (x, (x[:, 0] > 0).long()), {"likelihood": "categorical", "method": bf.Mle()}
    with pytest.raises(ValueError, match=r"checkpoint must be a folder; .*model\.pt is a file"):
        bf.fit(nn.Linear(3, 2), data, checkpoint=path, **settings)
    posterior = bf.fit(nn.Linear(3, 2), data, **settings)
    with pytest.raises(ValueError, match=r"folder must be a folder; .*model\.pt is a file"):
        posterior.save(path)
    assert path.read_text() == "weights"


def test_a_module_is_no_choice_of_weights():
    model, x = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)), torch.randn(20, 3)
    with pytest.raises(ValueError, match="infer must be a pattern of names, .* got a module, Linear"):
        bf.fit(model, (x, (x[:, 0] > 0).long()), likelihood="categorical", method=bf.Mle(), infer=model[1])

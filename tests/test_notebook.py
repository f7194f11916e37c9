"""What a posterior and its predictives show in a notebook."""

import re
from html.parser import HTMLParser

import pytest
import torch
from torch import nn

import bayesformer as bf
from bayesformer.core.doubts import Doubt, recorded
from bayesformer.core.types import Draws
from bayesformer.laws import Samples
from bayesformer.likelihoods.notebook_table import ROWS


class Balanced(HTMLParser):
    """Fails where a tag is closed that is not open."""

    def __init__(self):
        super().__init__()
        self.open, self.texts = [], []

    def handle_starttag(self, tag, attrs):
        self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


def texts(html):
    reader = Balanced()
    reader.feed(html)
    assert not reader.open
    return reader.texts


LIKELIHOODS = {
    "categorical": (bf.Categorical(), torch.randn(3, 25, 4), ["most probable", "probability"]),
    "per token": (bf.Categorical(), torch.randn(3, 5, 6, 4), ["example", "position"]),
    "gaussian": (bf.Gaussian(0.5), torch.randn(3, 4, 2), ["mean 0", "sd 1"]),
    "poisson": (bf.Poisson(), torch.randn(3, 4), ["mean", "sd"]),
}


@pytest.mark.parametrize("kind", LIKELIHOODS)
def test_a_predictive_is_a_table_of_its_first_questions(kind):
    likelihood, outputs, wanted = LIKELIHOODS[kind]
    predictive = likelihood.predictive(Draws(outputs))
    found = texts(predictive._repr_html_())
    assert set(wanted) | {"total", "aleatoric", "epistemic"} <= set(found)
    shown = min(ROWS, predictive.shape.numel())
    html = predictive._repr_html_()
    assert html.count("<tr>") == shown + 1
    assert (f"and {predictive.shape.numel() - shown} more" in html) == (shown < predictive.shape.numel())
    assert f"{float(predictive.epistemic.flatten()[0]):.4g}" in found


def test_the_numbers_are_those_of_the_questions_and_shades_their_epistemic_share():
    certain = torch.tensor([[[9.0, 0.0]], [[0.0, 9.0]]])  # two sure draws that contradict each other
    predictive = bf.Categorical().predictive(Draws(certain))
    html = predictive._repr_html_()
    share = float(predictive.epistemic[0] / predictive.total[0])
    assert share > 0.9
    assert f"rgba(251,143,68,{share:.3f})" in html


def test_positions_beyond_a_sequence_are_dashes():
    full = torch.full((1, 2), 0.5, dtype=torch.float64)
    full[0, 1] = torch.nan
    ids = torch.tensor([[[3], [-1]]])
    labels = torch.tensor([[7, -100]])
    shown = bf.TokenPredictive(full, full, full, ids, full.unsqueeze(-1), labels, full.nan_to_num(0.0))
    found = texts(shown._repr_html_())
    assert "log p(label)" in found
    assert found.count("–") == 6  # token, probability, label and three uncertainties of the second position


def test_a_posterior_says_what_it_is_and_what_it_doubts():
    law = Samples(torch.randn(2, 8), {})
    facts = {"method": {"name": "<b>mine</b>"}, "num_data": 1234, "converged": [True]}
    facts |= recorded([Doubt("mode", "Not at a mode & more.", 1.0, 0.3)])
    posterior = bf.Posterior(nn.Linear(3, 2), bf.Categorical(), law, tempering=1.25, facts=facts)
    html = posterior._repr_html_()
    assert "<b>mine" not in html
    found = texts(html)
    assert {"<b>mine</b>", "Linear", "8 in 2 parameters", "1,234", "yes", "1.25, by calibrate"} <= set(found)
    assert "Not at a mode & more." in found
    assert re.search("Doubts", bf.Posterior(nn.Linear(3, 2), bf.Categorical(), law)._repr_html_()) is None

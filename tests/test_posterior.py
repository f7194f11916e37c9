"""A posterior as a value: any form of inputs, one result, and files that come back bit for bit or not at all."""

import copy
import json
import math
import os
import pickle
import random
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import bayesformer as bf
from bayesformer.core.strategy import largest_tensor
from bayesformer.data import as_inputs
from bayesformer.laws import Samples, gaussian
from bayesformer.predict import assemble as assembling
from tests.laws import assert_mean
from tests.nets import Mlp, Normed, blobs

FAST = bf.Training(epochs=2, batch_size=16, lr=0.02, warmup=5)
DATA = Path(__file__).parent / "data"


@pytest.fixture
def posterior():
    return bf.fit(Mlp, blobs(60), likelihood="categorical", method=bf.Ensemble(3), training=FAST)


# --- inputs ---------------------------------------------------------------------------------------------------------

X = torch.randn(23, 3, generator=torch.Generator().manual_seed(4))


class Rows(Dataset):
    def __init__(self, labelled):
        self.labelled = labelled

    def __len__(self):
        return 23

    def __getitem__(self, index):
        return (X[index], index % 2) if self.labelled else X[index]


class Flow(IterableDataset):
    def __iter__(self):
        return iter(X)


FORMS = {
    "tensor": lambda: X,
    "numpy": X.numpy,
    "data": lambda: bf.Data(X, torch.zeros(23, dtype=torch.int64)),
    "labelled tensors": lambda: TensorDataset(X, torch.zeros(23)),
    "dataset": lambda: Rows(False),
    "labelled dataset": lambda: Rows(True),
    "loader": lambda: DataLoader(Rows(True), batch_size=5),
    "stream": lambda: bf.Stream(Flow(), num_data=23),
    "stream of unknown length": Flow,
    "one-element tuple": lambda: (X,),
}


@pytest.mark.parametrize("form", FORMS)
def test_predict_takes_every_form_of_inputs(posterior, form):
    expected = posterior.predict(X, strategy="looped", batch_size=23)
    found = posterior.predict(FORMS[form](), strategy="looped", batch_size=7)
    assert found.log_probs.shape == (3, 23, 2)
    torch.testing.assert_close(found.log_probs, expected.log_probs, atol=1e-6, rtol=1e-5)


class Tokens(nn.Module):
    """Logits for every position, or for the sequence."""

    def __init__(self, pooled=False):
        super().__init__()
        self.embed, self.head, self.pooled = nn.Embedding(11, 4), nn.Linear(4, 3), pooled

    def forward(self, input_ids, attention_mask, scale=1.0):
        states = self.embed(input_ids) * attention_mask.unsqueeze(-1)
        return self.head(states.sum(1) if self.pooled else states) * scale


def over(model, likelihood="categorical", rows=2):
    theta = torch.cat([p.detach().flatten() for p in model.parameters()])
    law = Samples(theta + 0.1 * torch.randn(rows, len(theta), generator=torch.Generator().manual_seed(0)))
    return bf.Posterior(model, bf.likelihoods.as_likelihood(likelihood), law)


LENGTHS = [3, 7, 2, 5, 5, 1, 6]


def ragged():
    source = torch.Generator().manual_seed(1)
    return [{"input_ids": torch.randint(11, (n,), generator=source).tolist()} for n in LENGTHS]


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_ragged_sequences_are_padded_and_padding_is_nan(size):
    """One token's logits do not see the others here: every counted position is that of the sequence alone."""
    posterior = over(Tokens())
    found = posterior.predict(ragged(), batch_size=size)
    assert found.log_probs.shape == (2, 7, 7, 3)
    for row, example in enumerate(ragged()):
        ids = torch.tensor([example["input_ids"]])
        alone = posterior.predict({"input_ids": ids, "attention_mask": torch.ones_like(ids)})
        torch.testing.assert_close(found.log_probs[:, row, : ids.shape[1]], alone.log_probs[:, 0])
        if size == 1:
            assert torch.isnan(found.log_probs[:, row, ids.shape[1] :]).all()
    pooled = over(Tokens(pooled=True))
    torch.testing.assert_close(
        pooled.predict(ragged(), batch_size=size).log_probs, pooled.predict(ragged(), batch_size=7).log_probs
    )


def test_dicts_and_values_that_are_not_tensors(posterior):
    model = over(Tokens(pooled=True))
    ids = torch.randint(11, (9, 4))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "scale": 2.0}
    torch.testing.assert_close(
        model.outputs(inputs, batch_size=4).values, 2 * model.outputs({**inputs, "scale": 1.0}, batch_size=3).values
    )
    with_labels = {**inputs, "labels": torch.zeros(9, dtype=torch.int64)}
    assert torch.equal(model.outputs(with_labels).values, model.outputs(inputs).values)


@pytest.mark.parametrize("strategy", ["looped", "batched"])
def test_batches_change_nothing(posterior, strategy):
    """Products of other sizes add up in another order: 1e-6."""
    whole = posterior.outputs(X, batch_size=23, strategy=strategy).values
    for size in (1, 2, 5, 22):
        part = posterior.outputs(X, batch_size=size, strategy=strategy).values
        torch.testing.assert_close(part, whole, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(posterior.outputs(X, strategy="looped").values, whole, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("known", [True, False])
def test_rounds_change_nothing(posterior, known, monkeypatch):
    """More examples than are computed per load of the weights, and streams that do not say how many they have."""
    whole = posterior.predict(X, batch_size=4, strategy="looped").log_probs
    monkeypatch.setattr(assembling, "_rounds", small_rounds)
    inputs = bf.Stream(Flow(), num_data=23) if known else Flow()
    torch.testing.assert_close(posterior.predict(inputs, batch_size=4, strategy="looped").log_probs, whole)
    model = over(Tokens())
    grown = model.predict(ragged(), batch_size=1).log_probs
    monkeypatch.undo()
    torch.testing.assert_close(model.predict(ragged(), batch_size=1).log_probs, grown, equal_nan=True)


REAL_ROUNDS = assembling._rounds


def small_rounds(batches, examples=8):
    return REAL_ROUNDS(batches, min(examples, 8))


def test_predict_batches_are_predict_in_parts(posterior):
    whole = posterior.predict(X, strategy="looped", batch_size=5).log_probs
    parts = list(posterior.predict_batches(X, strategy="looped", batch_size=5))
    torch.testing.assert_close(torch.cat([part.log_probs for part in parts], 1), whole)

    class Endless(IterableDataset):
        def __iter__(self):
            while True:
                yield torch.zeros(3)

    some = posterior.predict_batches(Endless())
    assert [next(some).log_probs.shape for _ in range(2)] == [(3, 4096, 2)] * 2
    some.close()


def test_predict_batches_of_large_outputs_are_small(monkeypatch):
    model = over(Tokens())
    ids = torch.randint(11, (40, 6))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    monkeypatch.setattr("bayesformer.predict.by_draws.ROUND_NUMBERS", 2 * 6 * 3 * 9)
    monkeypatch.setattr("bayesformer.predict.request.Request.examples_per_batch", lambda *_: 4)
    shapes = [part.log_probs.shape[1] for part in model.predict_batches(inputs)]
    assert shapes == [12, 12, 12, 4]  # nine examples would be enough numbers, in whole batches


@pytest.mark.filterwarnings("ignore::bayesformer.FidelityWarning")
@pytest.mark.parametrize("likelihood", ["categorical", "next_token"])
def test_a_batch_size_is_the_size_of_predicted_batches(likelihood, posterior):
    if likelihood == "next_token":
        ids = torch.randint(11, (40, 6))
        posterior = over(Tokens(), "next_token")
        asked, count = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, 40
    else:
        asked, count = X, len(X)
    sizes = [len(part.epistemic) for part in posterior.predict_batches(asked, batch_size=7)]
    assert sizes == [7] * (count // 7) + [count % 7] * (count % 7 > 0)


@pytest.mark.filterwarnings("ignore::bayesformer.FidelityWarning")
@pytest.mark.parametrize("way", ["linearised", "streamlined", "sampled"])
def test_batches_are_predicted_in_the_posteriors_own_way(way):
    torch.manual_seed(0)
    x, y = torch.randn(40, 3), torch.randint(2, (40,))
    posterior = bf.laplace(Mlp().eval(), (x, y), likelihood="categorical", predictive=way)
    parts = list(posterior.predict_batches(x, batch_size=16))
    for score in ("probs", "epistemic"):
        joined = torch.cat([getattr(part, score) for part in parts])
        torch.testing.assert_close(joined, getattr(posterior.predict(x, batch_size=16), score), atol=1e-5, rtol=1e-4)
    asked = torch.cat([part.probs for part in posterior.predict_batches(x, predictive="linearised", batch_size=7)])
    torch.testing.assert_close(asked, posterior.predict(x, predictive="linearised").probs, atol=1e-5, rtol=1e-4)


def test_outputs_that_do_not_fit_together_are_named():
    class Growing(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.calls = nn.Linear(3, 2), 0

        def forward(self, x):
            return self.linear(x).repeat(1, 1 + (len(x) == 1))

    with pytest.raises(ValueError, match=r"outputs of all batches must have one shape.* got \(2,\) and \(4,\) per ex"):
        over(Growing()).outputs(X, batch_size=11)  # 11, 11 and 1


# --- memory ---------------------------------------------------------------------------------------------------------

MEMORY = """
import torch
torch.set_num_threads(1)
from pathlib import Path
from torch import nn
import bayesformer as bf
from bayesformer.laws import Samples

class Language(nn.Module):
    def __init__(self, vocabulary=8192, width=16):
        super().__init__()
        self.embed, self.head = nn.Embedding(vocabulary, width), nn.Linear(width, vocabulary)
    def forward(self, ids):
        return self.head(self.embed(ids))

def memory(kind):
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(kind))
    return int(line.split()[1]) * 1024

torch.manual_seed(0)
model = Language()
theta = torch.cat([p.detach().flatten() for p in model.parameters()])
posterior = bf.Posterior(model, bf.Categorical(), Samples(theta.expand(2, -1).clone()))
ids = torch.randint(8192, (100, 32))
posterior.predict(ids[:2])  # whatever is made once
Path("/proc/self/clear_refs").write_text("5")  # the peak starts here
before = memory("VmRSS")
found = posterior.predict(ids)
print(found.log_probs.numel() * 4, memory("VmHWM") - before)
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="measured by Linux's own counters")
def test_a_language_models_prediction_is_in_memory_once():
    """A result of 210 MB: the peak is at most 1.2 times that."""
    command, root = [sys.executable, "-c", MEMORY], Path(__file__).parent.parent
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    size, peak = map(int, done.stdout.split())
    assert size == 2 * 100 * 32 * 8192 * 4
    assert size < peak < 1.2 * size, peak / size


def test_the_largest_tensor_of_a_prediction_is_its_result():
    """However many examples: nothing else grows with them."""
    model = over(Tokens())
    for count in (50, 200):
        ids = torch.randint(11, (count, 6))
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        model.predict(inputs, batch_size=5)
        largest = largest_tensor(lambda given=inputs: model.predict(given, batch_size=5))
        assert largest <= max(2 * count * 6 * 3, ids.numel())


# --- a value --------------------------------------------------------------------------------------------------------


def test_it_is_not_changed_by_being_asked_copied_or_pickled(posterior):
    first = posterior.predict(X).log_probs
    assert copy.deepcopy(posterior) is posterior
    again = pickle.loads(pickle.dumps(posterior))
    assert torch.equal(again.predict(X).log_probs, first)
    assert torch.equal(posterior.predict(X).log_probs, first)


def test_what_was_asked_before_does_not_change_an_answer(posterior):
    """Trial passes on short inputs do not decide how long ones run."""
    few = torch.randn(2, 3)
    fresh = bf.Posterior(posterior.model, posterior.likelihood, posterior.law, posterior.space)
    fresh.predict(few)
    assert torch.equal(fresh.predict(X).log_probs, posterior.predict(X).log_probs)
    assert torch.equal(posterior.predict(few).log_probs, fresh.predict(few).log_probs)


def test_a_model_that_was_changed_is_noticed(posterior):
    model = Mlp()
    model.net[0].requires_grad_(False)
    found = bf.fit(model, blobs(60), likelihood="categorical", training=FAST)
    found.predict(X)
    with torch.no_grad():
        model.net[0].weight.add_(1)
    with pytest.raises(ValueError, match=r"model must not be changed after the fit: net.0.weight was"):
        found.predict(X)


def test_threads_get_what_one_alone_gets(posterior):
    dropout = bf.fit(Mlp, blobs(60), likelihood="categorical", method=bf.MCDropout(0.3, draws=4), training=FAST)
    for asked in (posterior, dropout):
        expected = [asked.predict(X, seed=seed).log_probs for seed in range(6)]
        found = {}

        def ask(seed, asked=asked, found=found):
            found[seed] = asked.predict(X, seed=seed).log_probs

        threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert all(torch.equal(found[seed], expected[seed]) for seed in range(6))


def test_sample_gives_named_weights(posterior):
    weights = posterior.sample()
    assert weights["net.0.weight"].shape == (3, 8, 3)
    assert torch.equal(weights["net.3.bias"][1], posterior.module(1).net[3].bias)
    assert posterior.sample(2)["net.3.bias"].shape == (2, 2)


def test_outputs_can_be_differentiated_later(posterior):
    values = posterior.outputs(torch.randn(4, 3)).values
    scale = torch.ones((), requires_grad=True)
    (values * scale).sum().backward()
    assert scale.grad is not None


def test_wrong_questions_are_named(posterior):
    x = torch.randn(2, 3)
    with pytest.raises(ValueError, match="draws must be between 1 and 3, the draws it has; got 4"):
        posterior.predict(x, draws=4)
    with pytest.raises(ValueError, match="draws must be a whole number; got 2.0"):
        posterior.predict(x, draws=2.0)
    for size in (0, -1, 2.5, True, "a"):
        with pytest.raises(ValueError, match=f"batch_size must be a whole number, at least 1; got {size!r}"):
            posterior.predict(x, batch_size=size)
    with pytest.raises(ValueError, match="inputs must be finite; got 1 NaN"):
        posterior.predict(torch.tensor([[0.0, 1.0, float("nan")]]))
    with pytest.raises(ValueError, match="at least one example"):
        posterior.predict(torch.zeros(0, 3))
    with pytest.raises(ValueError, match="unknown predictive 'sample'. Did you mean 'sampled'"):
        posterior.predict(x, predictive="sample")
    with pytest.raises(ValueError, match="predictive='linearised' needs a posterior that is a Gaussian over"):
        posterior.predict(x, predictive="linearised")
    with pytest.raises(ValueError, match="law must have 50 numbers per draw for this model; got 7"):
        bf.Posterior(Mlp(), bf.Categorical(), Samples(torch.zeros(2, 7)))


# --- Gaussian laws --------------------------------------------------------------------------------------------------


def gaussian_weights(size, kind):
    mean, sd = torch.randn(size, dtype=torch.float64), torch.rand(size, dtype=torch.float64)
    factor = torch.randn(2, size, dtype=torch.float64)
    tril = torch.randn(size, size, dtype=torch.float64).tril()
    if kind == "diagonal":
        return gaussian(mean, sd), sd.square().diag()
    if kind == "low rank":
        return gaussian(mean, sd, factor), sd.square().diag() + factor.T @ factor
    return gaussian(mean, tril=tril), tril @ tril.T


@pytest.mark.parametrize("kind", ["diagonal", "low rank", "dense"])
def test_gaussian_weights_have_their_covariance(kind):
    weights, covariance = gaussian_weights(4, kind)
    draws = weights.rows(4000)
    assert_mean(draws, weights.mean)
    centred = draws - weights.mean
    assert_mean((centred.unsqueeze(-1) * centred.unsqueeze(-2)).flatten(1), covariance.flatten())


@pytest.mark.parametrize("kind", ["diagonal", "low rank", "dense"])
def test_gaussian_posteriors_are_saved_and_repeatable(kind, tmp_path):
    model = nn.Linear(3, 2).double()
    posterior = bf.Posterior(model, bf.Categorical(), gaussian_weights(8, kind)[0], default_draws=5)
    loaded = bf.Posterior.load(posterior.save(tmp_path / "p"), model)
    x = torch.randn(4, 3, dtype=torch.float64)
    first = posterior.outputs(x).values
    assert first.shape == (5, 4, 2)
    assert torch.equal(loaded.outputs(x).values, first)
    torch.testing.assert_close(posterior.outputs(x, 3, strategy="looped").values, first[:3])
    assert not torch.equal(posterior.outputs(x, seed=1).values, first)


class Drifting(nn.Module):
    """Every pass in training mode moves its buffer."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.register_buffer("shift", torch.zeros(()))

    def forward(self, x):
        if self.training:
            self.shift += 1
        return self.layer(x) + self.shift


@pytest.mark.parametrize("size", [4, 2])
def test_a_draw_starts_from_the_saved_buffers_whatever_the_draw_before_did(size):
    model, x = Drifting(), torch.randn(4, 3)
    theta = torch.cat([p.detach().flatten() for p in model.parameters()])
    weights = Samples(theta[None], {"shift": torch.zeros(1)})
    found = bf.Posterior(model, bf.Categorical(), weights, noisy_draws=3).outputs(x, strategy="looped", batch_size=size)
    torch.testing.assert_close(found.values, (model.layer(x) + 1).detach().expand(3, -1, -1))


# --- files ----------------------------------------------------------------------------------------------------------


def test_round_trip_is_bit_identical(posterior, tmp_path):
    loaded = bf.Posterior.load(posterior.save(tmp_path / "p"), Mlp())
    assert torch.equal(loaded.theta, posterior.theta)
    assert loaded.likelihood == posterior.likelihood
    assert loaded.facts == posterior.facts
    assert torch.equal(loaded.outputs(X, strategy="looped").values, posterior.outputs(X, strategy="looped").values)


def test_noise_and_running_averages_are_saved(tmp_path):
    dropout = bf.fit(Mlp, blobs(60), likelihood="categorical", method=bf.MCDropout(0.3, draws=4), training=FAST)
    model = Mlp()  # its own rate is 0: the file knows better
    loaded = bf.Posterior.load(dropout.save(tmp_path / "d"), model)
    assert model.net[2].p == 0
    assert torch.equal(loaded.outputs(X).values, dropout.outputs(X).values)
    assert loaded.draws == 4
    normed = bf.fit(Normed, blobs(60), likelihood="categorical", training=FAST)
    loaded = bf.Posterior.load(normed.save(tmp_path / "n"), Normed())
    assert torch.equal(loaded.outputs(X).values, normed.outputs(X).values)


def test_numbers_that_json_does_not_know_are_saved_as_text(tmp_path):
    """`clip=inf` is a documented setting."""
    training = bf.Training(epochs=1, batch_size=16, clip=math.inf)
    found = bf.fit(Mlp, blobs(60), likelihood="categorical", training=training)
    loaded = bf.Posterior.load(found.save(tmp_path / "p"), Mlp())
    assert loaded.facts["training"]["clip"] == "inf"
    assert torch.equal(loaded.predict(X).log_probs, found.predict(X).log_probs)


def test_nothing_is_pickled(posterior, tmp_path):
    folder = posterior.save(tmp_path / "p")
    assert sorted(p.name for p in folder.iterdir()) == ["posterior.json", "posterior.safetensors"]
    facts = json.loads((folder / "posterior.json").read_text())
    assert facts["facts"]["method"] == {"name": "ensemble", "members": 3, "adapter_penalty": 0.0}
    assert facts["facts"]["num_data"] == 60
    assert facts["format"] == 2


@pytest.mark.parametrize("keep", [0, 5, 200, -1])
def test_truncated_files_are_refused(posterior, tmp_path, keep):
    folder = posterior.save(tmp_path / "p")
    path = folder / "posterior.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(bf.DamagedFileError, match=r"posterior\.safetensors"):
        bf.Posterior.load(folder, Mlp())


def test_altered_files_are_refused(posterior, tmp_path):
    folder = posterior.save(tmp_path / "p")
    path = folder / "posterior.safetensors"
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)
    with pytest.raises(bf.DamagedFileError, match="was altered: its checksum differs"):
        bf.Posterior.load(folder, Mlp())
    for text, message in {
        '{"format": 1, ': "not valid JSON",
        '{"format": 99, "version": "7.0"}': "must have format 2; got 99, made by 7.0",
        '{"format": 1}': "was altered",
        "[1]": "must hold a JSON object; got list",
        '{"format": ' + "9" * 5000 + "}": "not valid JSON",
        "[" * 200_000: "not valid JSON",
        '{"a": ' * 200_000: "not valid JSON",
        "\x00": "not valid JSON",
    }.items():
        (folder / "posterior.json").write_text(text)
        with pytest.raises(bf.DamagedFileError, match=message):
            bf.Posterior.load(folder, Mlp())
    (folder / "posterior.json").write_bytes(b"\xff\xfe{")
    with pytest.raises(bf.DamagedFileError, match="not valid JSON"):
        bf.Posterior.load(folder, Mlp())
    (folder / "posterior.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"posterior .*posterior.json does not exist"):
        bf.Posterior.load(folder, Mlp())


@pytest.mark.parametrize("name", ["posterior.json", "posterior.safetensors"])
def test_pipes_folders_and_devices_are_refused_at_once(posterior, tmp_path, name):
    folder = posterior.save(tmp_path / "p")
    (folder / name).unlink()
    os.mkfifo(folder / name)
    with pytest.raises(bf.DamagedFileError, match="must be a regular file; it is a folder, a pipe or a device"):
        bf.Posterior.load(folder, Mlp())
    (folder / name).unlink()
    (folder / name).mkdir()
    with pytest.raises(bf.DamagedFileError, match="must be a regular file"):
        bf.Posterior.load(folder, Mlp())
    (folder / name).rmdir()
    (folder / name).symlink_to("/dev/zero")
    with pytest.raises(bf.DamagedFileError, match="must be a regular file"):
        bf.Posterior.load(folder, Mlp())


@pytest.mark.parametrize("name", ["posterior.json", "posterior.safetensors"])
def test_damage_anywhere_is_refused_or_harmless(posterior, tmp_path, name):
    """60 flipped bits, 30 replaced bytes, 20 cut or doubled stretches, all over the file: refused or harmless."""
    folder = posterior.save(tmp_path / "p")
    good, source, expected = (folder / name).read_bytes(), random.Random(7), posterior.predict(X).log_probs
    facts = json.loads((folder / "posterior.json").read_text())["facts"]
    damaged, refused = [], 0
    for place in [i * len(good) // 60 for i in range(60)]:
        bad = bytearray(good)
        bad[place] ^= 1 << source.randrange(8)
        damaged.append(bytes(bad))
    for _ in range(30):
        bad = bytearray(good)
        bad[source.randrange(len(good))] = source.randrange(256)
        damaged.append(bytes(bad))
    for _ in range(20):
        begin = source.randrange(len(good))
        end = begin + source.randrange(1, 40)
        damaged.append(good[:begin] + good[end:] if source.random() < 0.5 else good[:end] + good[begin:])
    for bad in damaged:
        (folder / name).write_bytes(bad)
        try:
            loaded = bf.Posterior.load(folder, Mlp())
        except bf.DamagedFileError:
            refused += 1
        else:  # the damage must have been in a place that says nothing
            assert torch.equal(loaded.predict(X).log_probs, expected)
            assert loaded.facts == facts
    assert refused > 0.8 * len(damaged)


def test_another_models_posterior_is_refused(posterior, tmp_path):
    folder = posterior.save(tmp_path / "p")
    with pytest.raises(bf.DamagedFileError, match=r"parameter 'net.0.weight' is \(8, 3\) in the file and \(9, 3\)"):
        bf.Posterior.load(folder, Mlp(hidden=9))
    with pytest.raises(bf.DamagedFileError, match=r"another model: it infers 'net.0.weight', which is absent"):
        bf.Posterior.load(folder, nn.Linear(3, 2))


def test_other_frozen_weights_are_refused(tmp_path):
    model = Mlp()
    model.net[0].requires_grad_(False)
    posterior = bf.fit(model, blobs(60), likelihood="categorical", training=FAST)
    folder = posterior.save(tmp_path / "p")
    assert torch.equal(bf.Posterior.load(folder, model).theta, posterior.theta)
    with torch.no_grad():
        model.net[0].weight[0, 0] += 1
    with pytest.raises(bf.DamagedFileError, match="the frozen weights differ"):
        bf.Posterior.load(folder, model)


def test_a_likelihood_that_is_not_registered_is_named(posterior, tmp_path):
    folder = posterior.save(tmp_path / "p")
    saved = json.loads((folder / "posterior.json").read_text())
    saved.pop("checksum")
    saved["likelihood"] = {"name": "gumbel"}
    from bayesformer.predict.saving import _sum

    tensors = load_file(folder / "posterior.safetensors")
    (folder / "posterior.json").write_text(json.dumps({**saved, "checksum": _sum(tensors, saved)}))
    with pytest.raises(ValueError, match="saved with likelihood 'gumbel', which is not registered here"):
        bf.Posterior.load(folder, Mlp())


# --- files of version 0.1.0, made by that version -------------------------------------------------------------------


@pytest.mark.parametrize("name", ["ensemble", "vi"])
def test_files_of_the_first_format_load(name):
    folder = DATA / "format1" / name
    expected = load_file(folder / "expected.safetensors")
    found = bf.Posterior.load(folder, Mlp()).outputs(expected["inputs"], strategy="looped").values
    torch.testing.assert_close(found, expected["outputs"], atol=1e-6, rtol=1e-5)


def test_dropout_of_the_first_format_keeps_its_weights_and_rate():
    """Its noise comes from other streams now: the weights are the same."""
    folder = DATA / "format1" / "mc_dropout"
    loaded = bf.Posterior.load(folder, Mlp())
    assert (loaded.dropout_rate, loaded.noisy_draws) == (0.3, 2)
    assert torch.equal(loaded.theta, load_file(folder / "posterior.safetensors")["theta"])


def test_wrapped_models_of_the_first_format_are_refused_with_the_version(tmp_path):
    with pytest.raises(bf.DamagedFileError, match="was made by version 0.1.0 for another model, or for one that its"):
        bf.Posterior.load(DATA / "format1" / "mean_field", Mlp())
    shutil.copytree(DATA / "format1" / "vi", tmp_path / "p")
    saved = json.loads((tmp_path / "p" / "posterior.json").read_text())
    for key in saved:
        if key in {"format", "bayesformer", "torch", "predictive", "link", "dropout"}:  # may be absent
            continue
        for value in (None, 3, "x", [], {}):
            (tmp_path / "p" / "posterior.json").write_text(json.dumps({**saved, key: value}))
            try:
                bf.Posterior.load(tmp_path / "p", Mlp())
            except ValueError as error:  # DamagedFileError, or a message that names the setting
                assert str(error)  # noqa: PT017
        (tmp_path / "p" / "posterior.json").write_text(json.dumps({k: v for k, v in saved.items() if k != key}))
        with pytest.raises(bf.DamagedFileError):
            bf.Posterior.load(tmp_path / "p", Mlp())


def test_numpy_integers_and_readers_are_inputs_too(posterior):
    assert as_inputs(np.zeros((4, 3), dtype=np.float32)).num_data == 4
    assert posterior.predict(np.zeros((4, 3), dtype=np.float32)).log_probs.shape == (3, 4, 2)


@pytest.mark.filterwarnings("ignore::bayesformer.FidelityWarning")
def test_numbers_of_draws_are_whole_and_there():
    x = torch.randn(12, 2)
    held = bf.fit(nn.Linear(2, 1), (x, x[:, :1]), likelihood=bf.Gaussian(1.0), method=bf.Ensemble(2))
    gaussian = bf.laplace(nn.Linear(2, 1).eval(), (x, x[:, :1]), likelihood=bf.Gaussian(1.0))
    for posterior in (held, gaussian):
        with pytest.raises(ValueError, match=r"draws must be a whole number; got 2\.5"):
            posterior.predict(x, draws=2.5)
    with pytest.raises(ValueError, match="draw must be a whole number, between 0 and 1, the last of its draws; got 2"):
        held.module(2)
    assert isinstance(gaussian.module(99), nn.Linear)
    joint = bf.log_joint(nn.Linear(2, 1), bf.Gaussian(1.0), None, 12)
    assert torch.equal(joint({}, (x, x[:, :1]))[0], joint({}, bf.Batch(x, x[:, :1]))[0])


def test_the_output_whose_sensitivity_is_asked_for_must_be_one():
    x = torch.randn(4, 3)
    data = (x, torch.arange(4) % 2)
    posterior = bf.fit(nn.Linear(3, 2), data, likelihood="categorical", method=bf.Laplace(prior_precision=1.0))
    for wrong in (2, -1):
        with pytest.raises(ValueError, match=f"output must be numbers from 0 to 1, .* got {wrong}"):
            posterior.input_sensitivity(x, output=wrong)

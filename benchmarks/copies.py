"""Memory of fit and predict on a Llama of 135 million weights, in copies of the model beyond a plain training step.

    python -m benchmarks.copies plain lora       # MiB at the peak of a plain PyTorch step, 8 x 16 tokens
    python -m benchmarks.copies mle lora         # the same for a method's fit and prediction with two draws
    python -m benchmarks.copies ratio mle lora   # (method - plain) / size of the model, from two processes

The weights are random. With "lora" rank 8 on queries and values is learned, with "all" every weight. Runs are short
(one chain, two draws): a peak does not grow with steps.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import torch
from torch import Tensor, nn

import bayesformer as bf
from bayesformer.bench.peak_memory import peak_of_process
from bayesformer.methods import ADAPTER_METHODS, METHODS, build_method
from benchmarks.harness import Memory

TEXTS, TOKENS = 8, 16
MODEL_MIB = 134_515_008 * 4 / 2**20
FEW = 0.3  # copies beyond a plain step, for a frozen base
ALL = 4.2  # copies in all where every weight is trained: weights, gradient and two moments, beside the user's model
SHORT = {"chains": 1, "draws": 2, "thin": 1, "warm_up": 2}
SETTINGS: dict[str, dict[str, object]] = {
    "ensemble": {"members": 2},
    "laplace": {"predictive": "sampled", "prior_precision": 1.0, "draws": 2},
    "swag": {"draws": 2, "every": 1, "warm_up": 0.25},
    "combined": {"settings": {"draws": 2, "burn_in": 0.0}},
    "hmc": {**SHORT, "max_leapfrogs": 3},
    "nuts": {**SHORT, "max_depth": 2},
    "vi": {"draws": 2, "epochs": 4},
    "ivon": {"draws": 2, "epochs": 4},
    "tfb": {"draws": 2, "iterations": 2},
}
CHAINS = ("sgld", "psgld", "sghmc", "sgnht", "baoab")


def comparisons() -> Iterator[Memory]:
    """Every method on LoRA weights; all weights by maximum likelihood."""
    for name in METHODS | ADAPTER_METHODS:
        title = f"copies of a 135 M Llama, LoRA, {name}, fit + predict, beyond a plain step"
        yield Memory(title, "benchmarks.copies", ("ratio", name, "lora"), FEW, unit="copies")
    title = "copies of a 135 M Llama, all weights, mle, in all"
    yield Memory(title, "benchmarks.copies", ("ratio", "mle", "all"), ALL, unit="copies")


def language_model(which: str) -> nn.Module:
    """SmolLM2-135M's sizes with random weights, and LoRA on it or not."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=49_152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=TOKENS,
        tie_word_embeddings=True,
    )
    model: nn.Module = LlamaForCausalLM(config)
    if which == "all":
        return model
    import peft

    return peft.get_peft_model(model, peft.LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"]))


def plain_step(model: nn.Module, ids: Tensor) -> None:
    """Two steps of Adam as a user would write them: in the second its moments are there."""
    weights = [p for p in model.parameters() if p.requires_grad]
    optimiser = torch.optim.Adam(weights, foreach=False)
    for _ in range(2):
        optimiser.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        optimiser.step()


def run(name: str, which: str) -> None:
    """The work itself: a plain step, or a method's fit and one prediction."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = language_model(which)
    ids = torch.randint(49_152, (TEXTS, TOKENS))
    if name == "base":
        return
    if name == "plain":
        plain_step(model, ids)
        return
    settings = SETTINGS.get(name, {})
    if name in CHAINS:
        settings = {"draws": 2, "burn_in": 0.0, "epochs": 4}
    elif not settings and "draws" in (METHODS | ADAPTER_METHODS)[name].__dataclass_fields__:
        settings = {"draws": 2}
    training = bf.Training(epochs=4, batch_size=TEXTS)
    data = {"input_ids": ids, "labels": ids}
    posterior = bf.fit(model, data, likelihood=bf.NextToken(), method=build_method(name, settings), training=training)
    prediction = posterior.predict({"input_ids": ids[:1]})
    assert prediction.shape == (1, TOKENS)


def ratio(name: str, which: str) -> float:
    """Copies of the model at the peak of a method, beyond the user's own and what a plain step computes with.

    Both processes give freed memory back at once (glibc would keep what lies below its threshold for later): the peak
    is then of what is in use, and the same in every run to a few MiB.
    """
    peaks, environment = [], {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(2**16)}
    for what in (name, "plain"):
        command = [sys.executable, "-m", "benchmarks.copies", what, which]
        done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
        peaks.append(float(done.stdout.split()[-1]))
    own = 3 if which == "all" else 0  # gradient and two moments that a plain step holds as well
    return (peaks[0] - peaks[1]) / MODEL_MIB + own


if __name__ == "__main__":
    if sys.argv[1] == "ratio":
        print(f"{ratio(*sys.argv[2:]):.3f}")
    else:
        run(*sys.argv[1:])
        print(peak_of_process())

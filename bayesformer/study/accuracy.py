"""How accurate is a Gaussian over outputs without sampling? Every rule against 10,000 draws of the same posterior.

    python -m bayesformer.study.accuracy

The posteriors are diagonal Gaussians from variational inference, briefly trained (half the epochs for a mode, half for
the variances; prior N(0, 1)), on an MLP and a vision transformer for digits, the transformer for a toy series, and a
small GPT-2 for counting sequences. `mlp` and `attention` keep the spread of those weights alone. Reported are

    mean error   |mean - mean of draws| / sd of draws, median
    ratio        variance / variance of draws, median over outputs (and 10th, 90th percentile)
    rank         Spearman correlation of the outputs' total variance with that of the draws, over inputs or positions
    cost         time in units of a plain forward pass on 64 inputs, preparation included
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any

import torch
from scipy import stats
from torch import nn

from bayesformer.bench.tasks import TASKS
from bayesformer.core.storage import read_json, write_json
from bayesformer.core.types import GaussianOutputs, Inputs
from bayesformer.data import Data, as_batches
from bayesformer.data.inputs import first_tensor, map_inputs
from bayesformer.datasets import digits
from bayesformer.laws import GaussianLaw, gaussian
from bayesformer.likelihoods import Categorical, Likelihood
from bayesformer.methods import Problem, Vi
from bayesformer.model.calling import apply
from bayesformer.model.skeleton import Skeleton
from bayesformer.model.space import Space
from bayesformer.predict.linearised import Linearised
from bayesformer.predict.one_pass import Settings, one_pass_outputs
from bayesformer.train.training import Training

DRAWS = 10_000
COST_INPUTS = 64

VARIANTS: dict[str, Settings] = {
    "diagonal": Settings(),
    "diagonal, exact ReLU": Settings(activations="exact"),
    "diagonal, LayerNorm Jacobian": Settings(layer_norm="jacobian"),
    "diagonal, uncertain queries": Settings(queries_keys="first_order"),
    "diagonal, shared tokens": Settings(tokens="shared"),
    "full": Settings(propagate="full"),
    "full, all options": Settings(
        propagate="full",
        layer_norm="jacobian",
        activations="exact",
        queries_keys="first_order",
        tokens="shared",
    ),
}
LINEARISED = "linearised"
SAMPLED = "50 draws"


@dataclass(frozen=True)
class Case:
    """A posterior with its model, and the inputs to predict."""

    name: str
    model: nn.Module
    space: Space
    law: GaussianLaw
    inputs: Inputs  # at least COST_INPUTS
    count: int  # inputs compared with draws


@dataclass(frozen=True)
class Row:
    """The accuracy and cost of one variant in one case."""

    case: str
    variant: str
    mean_error: float
    ratio: float
    ratio_low: float
    ratio_high: float
    rank: float
    cost: float


# ---------------------------------------------------------------------------------------------------- posteriors


def fitted(
    model: Callable[[], nn.Module], likelihood: Likelihood, data: Data, training: Training
) -> tuple[nn.Module, Space, GaussianLaw]:
    """Model at the mean, its space and the diagonal Gaussian of a short variational fit."""
    posterior = Vi(warm_up=0.5, log_sd=-4.0).fit(Problem(model, likelihood, as_batches(data), training=training))
    law = posterior.law
    assert isinstance(law, GaussianLaw)
    return posterior.skeleton.plain(law.mean).eval(), posterior.space, law


def with_spread_in(case: Case, part: str) -> Case:
    """The same posterior with spread in the weights of one part alone, e.g. "mlp"."""
    sd = case.law.sd.clone()
    for name, values in case.space.views(sd).items():
        if not fnmatch(name, f"*.{part}.*"):
            values.zero_()
    return replace(case, name=f"{case.name}, {part}", law=gaussian(case.law.mean, sd))


def mlp_case() -> Case:
    """Train a network 64-64-64-10 with ReLU on digits by variational inference; its posterior and test inputs."""
    data = digits.load()

    def build() -> nn.Module:
        return nn.Sequential(
            nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)
        )

    training = Training(epochs=30, batch_size=64, lr=3e-3, warmup=50, patience=0)
    return Case("mlp", *fitted(build, Categorical(), data.train, training), data.test.inputs, 64)


def vision_case() -> Case:
    """Train the vision transformer of the task "digits" by variational inference; its posterior and test inputs."""
    task = TASKS["digits"]()
    data = task.load()
    training = Training(epochs=24, batch_size=64, lr=3e-3, warmup=50, patience=0)
    return Case("vit", *fitted(task.model, task.likelihood, data.train, training), data.test.inputs, 32)


def toy_case() -> Case:
    """Train the transformer of the task "toy/m1" by variational inference; its posterior and test inputs."""
    task = TASKS["toy/m1"]()
    data = task.load()
    training = replace(task.training, epochs=16, lr=3e-3, patience=0)
    return Case("toy", *fitted(task.model, task.likelihood, data.train, training), data.test.inputs, 8)


def gpt2_case(length: int = 12, vocabulary: int = 32) -> Case:
    """GPT-2 with two blocks of width 32 on sequences that count up in steps."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=vocabulary,
        n_embd=32,
        n_layer=2,
        n_head=2,
        n_positions=length,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
    )
    source = torch.Generator().manual_seed(0)
    start, step = (torch.randint(low, vocabulary, (600, 1), generator=source) for low in (0, 1))
    tokens = (start + step * torch.arange(length + 1)) % vocabulary
    data = Data({"input_ids": tokens[:500, :-1]}, tokens[:500, 1:])
    training = Training(epochs=16, batch_size=50, lr=3e-3, warmup=50, patience=0)
    parts = fitted(lambda: GPT2LMHeadModel(config), Categorical(), data, training)
    return Case("gpt2", *parts, {"input_ids": tokens[500:, :-1]}, 4)


CASES: dict[str, Callable[[], Case]] = {"mlp": mlp_case, "toy": toy_case, "vit": vision_case, "gpt2": gpt2_case}
PARTS = {"vit": ("mlp", "attention")}


# ---------------------------------------------------------------------------------------------------- measurement


def monte_carlo(case: Case, inputs: Inputs, draws: int, seed: int = 0) -> GaussianOutputs:
    """Mean and variance of the outputs over draws of the weights, without keeping any."""
    model = Skeleton(case.model, case.space).shell(gradients=False)
    source = torch.Generator(case.law.mean.device).manual_seed(seed)
    with torch.inference_mode():
        origin = apply(case.model, inputs).double()
        total, squares = torch.zeros_like(origin), torch.zeros_like(origin)
        noise, sd = torch.empty_like(case.law.mean), case.law.sd
        for _ in range(draws):
            model.load(torch.addcmul(case.law.mean, sd, noise.normal_(generator=source)))
            deviation = model(inputs).double() - origin  # from one point, so that squares do not cancel
            total += deviation
            squares += deviation * deviation
    mean = total / draws
    return GaussianOutputs(origin + mean, (squares - draws * mean * mean) / (draws - 1))


def seconds_of(work: Callable[[], object], rounds: int = 20, enough: float = 1.0) -> float:
    """Processor seconds of some work: the median over rounds, fewer where they take long."""
    seconds: list[float] = []
    while len(seconds) < rounds and sum(seconds) < enough:
        start = time.process_time()
        work()
        seconds.append(time.process_time() - start)
    return statistics.median(seconds)


def compare(case: Case, variant: str, found: GaussianOutputs, truth: GaussianOutputs, cost: float) -> Row:
    """The row of one variant: its outputs compared with those of 10,000 draws."""
    ratio = found.variance.double() / truth.diagonal
    low, middle, high = torch.quantile(ratio.flatten(), torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)).tolist()
    error = ((found.mean.double() - truth.mean).abs() / truth.diagonal.sqrt()).median()
    ours, theirs = (v.sum(-1).flatten().double().numpy() for v in (found.variance, truth.diagonal))
    rank = float(stats.spearmanr(ours, theirs).statistic)
    return Row(
        case.name,
        variant,
        mean_error=round(float(error), 4),
        ratio=round(middle, 4),
        ratio_low=round(low, 4),
        ratio_high=round(high, 4),
        rank=round(rank, 4),
        cost=round(cost, 2),
    )


def measure(case: Case, draws: int) -> list[Row]:
    """Every variant of the rules, and sampling with 50 draws, in one case."""
    inputs, many = (map_inputs(case.inputs, lambda x, n=n: x[:n]) for n in (case.count, COST_INPUTS))
    truth = monte_carlo(case, inputs, draws)

    def plain() -> None:
        with torch.inference_mode():
            apply(case.model, many)

    unit = seconds_of(plain)
    rows = []
    for name, settings in VARIANTS.items():
        found = one_pass_outputs(case.model, case.space, case.law, [inputs], settings)
        work = partial(one_pass_outputs, case.model, case.space, case.law, [many], settings)
        rows.append(compare(case, name, found, truth, seconds_of(work) / unit))
    linearised = Linearised(case.model, case.space, case.law)
    cost = seconds_of(lambda: Linearised(case.model, case.space, case.law)(many)) / unit
    rows.append(compare(case, LINEARISED, linearised(inputs), truth, cost))
    sampled = monte_carlo(case, inputs, 50, seed=1)
    cost = seconds_of(partial(monte_carlo, case, many, 50, seed=1)) / unit
    rows.append(compare(case, SAMPLED, sampled, truth, cost))
    return rows


# ---------------------------------------------------------------------------------------------------- the command


def table(rows: list[Row]) -> str:
    """All rows as a table in Markdown."""
    lines = ["| case | rule | mean error | ratio [10 %, 90 %] | rank | cost |", "|---|---|---|---|---|---|"]
    lines += [
        f"| {r.case} | {r.variant} | {r.mean_error:.2f} | {r.ratio:.2f} [{r.ratio_low:.2f}, {r.ratio_high:.2f}] "
        f"| {r.rank:.2f} | {r.cost:.1f} |"
        for r in rows
    ]
    return "\n".join(lines)


def facts(case: Case, draws: int) -> Mapping[str, Any]:
    """The sizes and settings of a case, stored beside its rows."""
    spread = case.law.sd[case.law.sd > 0]
    return {
        "case": case.name,
        "draws": draws,
        "inputs": case.count,
        "input_shape": list(first_tensor(case.inputs).shape[1:]),
        "weights": case.space.size,
        "uncertain": len(spread),
        "median_sd": round(float(spread.median()), 5),
        "torch": torch.__version__,
    }


def stored_rows(folder: Path, cases: Sequence[str]) -> list[Row]:
    """The rows of stored measurements, each case followed by its parts; what was not measured is left out."""
    names = [name for case in cases for name in (case, *(f"{case}_{part}" for part in PARTS.get(case, ())))]
    paths = [folder / f"{name}.json" for name in names]
    return [Row(**row) for path in paths if path.exists() for row in read_json(path, "measurement")["rows"]]


def main(arguments: list[str] | None = None) -> None:
    """Measure all cases, write one JSON file each, and print the table; or print the table of what is stored."""
    parser = argparse.ArgumentParser(prog="python -m bayesformer.study.accuracy", description=__doc__.split("\n")[0])
    parser.add_argument("cases", nargs="*", default=list(CASES), help=f"some of {', '.join(CASES)}; all by default")
    parser.add_argument("--draws", type=int, default=DRAWS)
    parser.add_argument("--output", type=Path, default=Path("results/accuracy"))
    parser.add_argument("--stored", action="store_true", help="measure nothing, print what the folder holds")
    given = parser.parse_args(arguments)
    if unknown := set(given.cases) - set(CASES):
        parser.error(f"cases must be among {', '.join(CASES)}; got {', '.join(sorted(unknown))}")
    if given.stored:
        print(table(stored_rows(given.output, given.cases)))
        return
    torch.set_num_threads(1)
    rows: list[Row] = []
    for name in given.cases:
        whole = CASES[name]()
        for case in [whole, *(with_spread_in(whole, part) for part in PARTS.get(name, ()))]:
            found = measure(case, given.draws)
            rows += found
            content = {**facts(case, given.draws), "rows": [asdict(row) for row in found]}
            write_json(given.output / f"{case.name.replace(', ', '_')}.json", content)
    print(table(rows))


if __name__ == "__main__":
    main()

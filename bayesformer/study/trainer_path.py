"""A Hugging Face Trainer's own run, and the posteriors that come out of it: `bf.hf.Collect` and `bf.hf.laplace_after`.

    python -m bayesformer.study.trainer_path

all-MiniLM-L6-v2 learns MRPC by a plain Trainer; nothing of its script is ours but a callback and one call after it.
Scores are those of the task glue/mrpc on the same rows.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from bayesformer.bench.statistics import Result, finite
from bayesformer.bench.tasks.glue_sentences import GlueSentences
from bayesformer.bench.tasks.protocol import TaskData
from bayesformer.core.global_random import global_streams
from bayesformer.core.seeds import fold
from bayesformer.data import Data
from bayesformer.laws import Samples
from bayesformer.model.space import Space
from bayesformer.posterior import Posterior
from bayesformer.study.cell_log import CellLog, StudyCell

TASK = "trainer/mrpc"
SHOWN = ("accuracy", "log_likelihood", "ece", "brier", "auroc/errors")
WAYS = {"mle": "the Trainer's model", "collect": "Collect, swag", "laplace": "laplace_after, last layer"}


@dataclass(frozen=True)
class TrainerRun:
    """Settings of the Trainer and of what it learns."""

    epochs: int = 6
    batch: int = 32
    lr: float = 1e-3
    learned: str = "lora"


def examples(data: Data) -> list[dict[str, Any]]:
    """Rows as a Trainer's data set has them."""
    assert isinstance(data.inputs, dict)
    columns = [*data.inputs.items(), ("labels", data.targets)]
    return [{name: values[i] for name, values in columns} for i in range(len(data))]


def posteriors(task: GlueSentences, data: TaskData, run: TrainerRun, seed: int) -> dict[str, Posterior]:
    """Train as a user would, then what the callback and the call give, and the trained model itself."""
    from transformers import Trainer, TrainingArguments, default_data_collator

    from bayesformer.hf import Collect, laplace_after

    with global_streams(fold(seed, "trainer")):
        model = task.model()
    assert isinstance(data.train, Data)
    collect = Collect(method="swag", snapshots=20)
    with tempfile.TemporaryDirectory() as folder:
        settings = TrainingArguments(
            folder,
            num_train_epochs=run.epochs,
            per_device_train_batch_size=run.batch,
            learning_rate=run.lr,
            lr_scheduler_type="constant",
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            logging_strategy="no",
            use_cpu=True,
            seed=seed,
        )
        trainer = Trainer(
            model=model,
            args=settings,
            train_dataset=examples(data.train),
            data_collator=default_data_collator,
            callbacks=[collect],
        )
        trainer.train()
    trained: Any = trainer.model
    space = Space.of(trained)
    own = dict(trained.named_parameters(remove_duplicate=False))
    theta = space.pack({name: own[name].detach() for name in space.names}).clone()
    point = Posterior(trained.eval(), task.likelihood, Samples(theta[None], {}), space)
    around = laplace_after(trainer, structure="last_layer", validation=data.validation)
    return {"mle": point, "collect": collect.posterior(), "laplace": around}


def study(folder: Path, task: GlueSentences, run: TrainerRun, seeds: Sequence[int], say: Any = print) -> list[Result]:
    """Do the seeds that are missing; all stored results."""
    log = CellLog(folder / "trainer.jsonl")
    for seed in seeds:
        cells = {way: StudyCell(TASK, way, seed, {"task": asdict(task), **asdict(run)}) for way in WAYS}
        if all((cell.key, seed) in log.read() for cell in cells.values()):
            continue
        data, started = task.load(), time.perf_counter()
        for way, posterior in posteriors(task, data, run, seed).items():
            metrics = task.evaluate(posterior.predict, data).metrics
            log.add(cells[way], metrics, {"seconds": round(time.perf_counter() - started, 1)})
            say(f"{way}, seed {seed}: accuracy {metrics['accuracy']:.3f}")
    return list(log.read().values())


def table(results: Sequence[Result]) -> str:
    """Markdown: scores of the three, by seed."""
    lines = [f"| Trainer on MRPC | seed | {' | '.join(SHOWN)} |", "|---|---|" + "---|" * len(SHOWN)]
    for way, label in WAYS.items():
        for result in sorted((r for r in results if r["method"] == way), key=lambda r: r["seed"]):
            values = [finite(result["metrics"].get(name)) for name in SHOWN]
            told = ["–" if value is None else f"{value:.3f}" for value in values]
            lines.append(f"| {label} | {result['seed']} | {' | '.join(told)} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """The command: does what is missing, prints the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--results", type=Path, default=Path("results/trainer"), help="results folder")
    parser.add_argument("--seeds", type=int, default=1, help="training seeds (1)")
    parser.add_argument("--stored", action="store_true", help="run nothing, print the stored results")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    seeds = [] if given.stored else list(range(given.seeds))
    print(table(study(given.results, GlueSentences("mrpc", others=0), TrainerRun(), seeds)))


if __name__ == "__main__":
    main()

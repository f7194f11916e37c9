"""The section of docs/results.md on experiments with text, made of the stored results:

    python -m bayesformer.study.text_page docs/results.md

It replaces what stands between two marks in the file. An experiment without stored results is said not to have run.
"""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from bayesformer.bench.records import read_results
from bayesformer.bench.statistics import Result
from bayesformer.core.storage import write_atomically
from bayesformer.study import continual_table, sentence_table, trainer_path, unknown_table

WIDTH = 118
BEGIN, END = "<!-- experiments on text: begin -->", "<!-- experiments on text: end -->"


class TextExperiment(NamedTuple):
    """One experiment: its title, folder, command, and how its results become tables."""

    title: str
    folder: str
    command: str
    text: str
    tables: Callable[[Sequence[Result], Path], str]
    figure: str = ""


PARTS = (
    TextExperiment(
        "Continual learning of books",
        "continual",
        "bayesformer study continual",
        "SmolLM2-135M learns four books one after another, 60 steps of 4 × 64 tokens each, by adapters of rank 8 "
        "(after Duffield et al. 2024, 5.2). *Forgotten* is the rise of an earlier book's test loss up to the end, "
        "*learned* the loss right after a book above that of a model that learned it alone. The strength, how "
        "often the curvature of a book counts, is chosen on validation text; 1 is Bayes' rule.",
        lambda results, _: continual_table.table(results),
        "continual.svg",
    ),
    TextExperiment(
        "Does it know what it does not know?",
        "unknown",
        "bayesformer study unknown",
        "SmolLM2-135M learns science text and goes on with 100 scientific statements whose last word is missing, "
        "and with prompts that are foreign to it (after Duffield et al. 2024, 5.3). AUROC of the mean uncertainty "
        "over a prompt's tokens, with 95 % intervals over statements; wrong last words by the uncertainty at that "
        "word. English against Samoan is the paper's contrast; the rows of the pretrained model and of the number "
        "of tokens say how much of it is left to gain. The other contrasts were fixed before anything was run.",
        lambda results, _: unknown_table.table(results),
        "unknown.svg",
    ),
    TextExperiment(
        "Few labelled sentences",
        "glue",
        "bayesformer run --config experiments/glue.toml --networks NETWORKS --results results/glue --no-posteriors\n"
        "    bayesformer study glue results/glue",
        "640 rows of tasks of GLUE by all-MiniLM-L6-v2; the development files are the test sets, validation rows "
        "are split off the training files. Foreign are rows of the other tasks and of IMDB.",
        lambda results, folder: sentence_table.table(results, sentence_table.keep_errors(folder)),
    ),
    TextExperiment(
        "Regression, tags and answers by a pretrained encoder",
        "pretrained",
        "bayesformer run --config experiments/pretrained.toml --networks NETWORKS --results results/pretrained "
        "--no-posteriors\n    bayesformer study glue results/pretrained",
        "STS-B, parts of speech and SQuAD (its development set, split by article) by all-MiniLM-L6-v2: plain "
        "fine-tuning against contextual Weibull attention with the settings of Fan et al. (2020), table 9. With the "
        "whole divergence in the bound attention ends at chance: those of all its weights, many thousands per "
        "sentence, outweigh the likelihood. Rows with a temperature have that share of it.",
        lambda results, folder: sentence_table.table(results, sentence_table.keep_errors(folder)),
    ),
    TextExperiment(
        "Posteriors out of a Trainer's run",
        "trainer",
        "python -m bayesformer.study.trainer_path",
        "A Hugging Face Trainer learns 640 rows of MRPC; `bf.hf.Collect` watches it, `bf.hf.laplace_after` comes "
        "after it.",
        lambda results, _: trainer_path.table(results),
    ),
)


def section(results: Path) -> str:
    """The whole section in Markdown, of what the results folder holds."""
    parts = ["## Experiments on text"]
    for part in PARTS:
        parts += [
            f"### {part.title}",
            f"    {part.command}",
            textwrap.fill(part.text, WIDTH),
            _tables(results / part.folder, part),
        ]
        if part.figure and (results / part.folder / part.figure).exists():
            parts.append(f"Figure: [{part.figure}](../results/{part.folder}/{part.figure}).")
    return "\n\n".join(parts)


def _tables(folder: Path, part: TextExperiment) -> str:
    found = read_results(folder).results if folder.is_dir() else []
    if not found:
        return "Not run yet: there are no stored results."
    try:
        return part.tables(found, folder)
    except ValueError as error:  # cells are there, but none that a table shows
        return f"Not run far enough for a table: {error}"


def replaced(page: str, text: str) -> str:
    """The page with the text between its marks, which are put at its end if it has none."""
    if BEGIN not in page:
        page = f"{page.rstrip()}\n\n{BEGIN}\n{END}\n"
    before, rest = page.split(BEGIN, maxsplit=1)
    _, after = rest.split(END, maxsplit=1)
    return f"{before}{BEGIN}\n\n{text}\n\n{END}{after}"


def main(arguments: Sequence[str] | None = None) -> None:
    """The command: writes the section into a file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("page", type=Path, help="the file, docs/results.md")
    parser.add_argument("--results", type=Path, default=Path("results"), help="results folder (results/)")
    given = parser.parse_args(arguments)
    write_atomically(given.page, replaced(given.page.read_text(), section(given.results)).encode())
    print(f"wrote {given.page}")


if __name__ == "__main__":
    main()

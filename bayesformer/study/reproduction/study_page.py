"""The pages of the study: its tables, figures and sentences, and what holds of the claims; all from stored files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from bayesformer.bench.records import read_results
from bayesformer.bench.report import write_report
from bayesformer.bench.statistics import Result
from bayesformer.core.storage import write_atomically
from bayesformer.study.reproduction.agenda import StudyFolders
from bayesformer.study.reproduction.choices import read_choices
from bayesformer.study.reproduction.claims import CLAIMS, claims_table, evidence_table
from bayesformer.study.reproduction.description import Description
from bayesformer.study.reproduction.study_figures import FIGURES, SENTENCES, draw_figure, runs_of, sentence_lines
from bayesformer.study.reproduction.study_tables import TITLES, StoredStudy, beyond_table, choice_rows, thesis_table

COMMAND = "bayesformer study reproduce --report-only"
OPENING = f"""# The study of Bayesian transformers, run again

Made from stored results by `{COMMAND}`; nothing here is typed. A cell of a table of the thesis reads
"ours (published)"; ours is the mean over training seeds ± their standard deviation, the thesis's one network. "–" has
not been run. Every method was given the same epochs in all, and four tries on validation data for what nobody knows
([settings](#settings-chosen-on-validation-data)). [What holds and what does not](claims.md) tests the claims.
"""


def read_stored(description: Description, folders: StudyFolders) -> StoredStudy:
    """The study's stored results; none is no error, its tables are empty then."""
    results = read_results(folders.results).results if folders.results.is_dir() else []
    return StoredStudy(description, read_choices(folders.choices, description), results)


def other_results(folder: Path) -> dict[str, Sequence[Result]]:
    """Results of the other experiments that claims ask for, by name."""
    return {name: read_results(folder / name).results for name in ("cold", "graphs") if (folder / name).is_dir()}


def write_pages(description: Description, folders: StudyFolders, target: Path) -> list[Path]:
    """Write README.md, claims.md and figures into a folder, and report.html where there are results."""
    stored, other = read_stored(description, folders), other_results(folders.results.parent)
    written = [draw_figure(stored, number, target / f"figure-{number}.svg") for number in drawn(stored)]
    for name, text in texts(stored, other).items():
        write_atomically(target / name, text.encode())
        written.append(target / name)
    if stored.found:
        title = "The study of Bayesian transformers"
        written.append(write_report(list(stored.found.values()), folders.results / "report.html", title=title))
    return written


def drawn(stored: StoredStudy) -> list[str]:
    """The figures of the thesis that have runs to be drawn from."""
    return [number for number, figure in FIGURES.items() if runs_of(stored, figure)]


def texts(stored: StoredStudy, other: Mapping[str, Sequence[Result]]) -> dict[str, str]:
    """The pages as text by the names of their files."""
    return {"README.md": _page(stored), "claims.md": _claims(stored, other)}


def _page(stored: StoredStudy) -> str:
    lines, shown = [OPENING, *progress_lines(stored)], drawn(stored)
    for number, title in TITLES.items():
        lines += ["", f"## Table {number}. {title}", "", thesis_table(stored, number).markdown()]
    for name, (group, column) in SENTENCES.items():
        lines += ["", f"## Tables {name}. Sentences, {column}", "", *sentence_lines(stored, group, column)]
    for number, figure in FIGURES.items():
        lines += ["", f"## Figure {number}. {figure.caption}", ""]
        lines.append(f"![{figure.caption}](figure-{number}.svg)" if number in shown else "Not run yet.")
    lines += [
        "",
        "## Figures 3.3 to 3.9 and 3.14. Weights of trained networks, and predictions under priors",
        "",
        "On [their own page](../weights/README.md). Figure 3.10, log-likelihood against the scale of the prior, is "
        "that of `bayesformer study priors`.",
    ]
    for task in stored.description.tasks:
        table = beyond_table(stored, task)
        if table.rows:
            lines += ["", f"## {table.title}", "", table.markdown()]
    lines += ["", "## Settings chosen on validation data", "", choice_rows(stored.choices).markdown()]
    return "\n".join(lines).rstrip() + "\n"


def progress_lines(stored: StoredStudy) -> list[str]:
    """How much of the study has been run, by task."""
    lines = ["| task | columns with a result | of | most seeds |", "|---|---|---|---|"]
    for task in stored.description.tasks:
        columns = stored.description.on(task)
        have = sum(bool(stored.of(column, task)) for column in columns)
        lines.append(f"| {task} | {have} | {len(columns)} | {stored.seeds(columns, task)} |")
    return lines


def _claims(stored: StoredStudy, other: Mapping[str, Sequence[Result]]) -> str:
    lines = [
        "# What holds and what does not",
        "",
        f"Made from stored results by `{COMMAND}`. A claim is tested by differences of two columns over common "
        "training seeds, positive as claimed: `holds` and `reversed` are 95 % intervals on one side of 0 (Student's "
        "paired t-test, not corrected for the number of contrasts). Few seeds make wide intervals: `not seen` is not "
        "`false`.",
        "",
        claims_table(stored, other).markdown(),
    ]
    for number, claim in enumerate(CLAIMS, 1):
        lines += ["", f"## {number}. {claim.text}", "", f"{claim.source}.", ""]
        table = evidence_table(claim, stored, other)
        lines.append(table.markdown() if table.rows else table.note)
    return "\n".join(lines).rstrip() + "\n"

"""What commands share: reading stored results and settings, running cells, and refusing bad options."""

from __future__ import annotations

import argparse
import sys
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bayesformer.core.errors import unknown_name

if TYPE_CHECKING:
    from bayesformer.bench.records import Stored

MAX_LINES = 10
"""lines of one kind that are printed to standard error; of the others only their number"""


def stored_results(folder: Path) -> Stored:
    """What a folder holds, at least one result; what cannot be read, or is stored twice, is said on standard error."""
    from bayesformer.bench.records import read_results

    stored = read_results(folder)
    print_to_stderr([f"skipped: {text}" for text in stored.damaged])
    print_to_stderr(stored.repeated)
    if not stored.results:
        raise ValueError(f"results folder {folder} must hold at least one result that can be read; it holds none.")
    return stored


def print_to_stderr(lines: Sequence[str]) -> None:
    """The first lines on standard error, and how many there are besides."""
    for line in lines[:MAX_LINES]:
        print(line, file=sys.stderr)
    if len(lines) > MAX_LINES:
        print(f"and {len(lines) - MAX_LINES} more like this.", file=sys.stderr)


def run_and_report(
    cells: list[Any], folder: Path, workers: int, arguments: argparse.Namespace, title: str, note: str
) -> int:
    """Run cells and write the report page of all of them; returns the exit code."""
    from bayesformer.bench.records import read_results
    from bayesformer.bench.report import write_report

    code = run_cells(cells, folder, workers, arguments)
    keys = {(cell.task, cell.key, cell.seed) for cell in cells}
    results = [r for r in read_results(folder).results if (r["task"], r["key"], r["seed"]) in keys]
    if results:
        page = write_report(results, folder / "report.html", title=title, note=note)
        print(f"report page: {page}")
    return code


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """A context in which torch has this many threads; afterwards the process has as many as before.

    Small models gain little from threads, and lose by a factor of 30 where another process has the core.
    """
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def run_cells(cells: list[Any], folder: Path, workers: int, arguments: argparse.Namespace) -> int:
    """Run the cells that are missing and print their tables; returns 1 if one of them failed."""
    from bayesformer.bench.records import read_results
    from bayesformer.bench.report.wording import count
    from bayesformer.bench.runner import run
    from bayesformer.bench.tables import print_tables
    from bayesformer.bench.trial import Options
    from bayesformer.core.progress import bars

    if workers < 1:
        raise ValueError(f"--workers must be at least 1; got {workers}.")
    if arguments.threads < 1:
        raise ValueError(f"--threads must be at least 1; got {arguments.threads}.")
    options = Options(
        folder,
        workers,
        getattr(arguments, "strategy", "auto"),
        not getattr(arguments, "no_posteriors", False),
        networks=getattr(arguments, "networks", None),
    )
    with torch_threads(arguments.threads), bars(False if arguments.quiet else None, lines=["cells"]) as reporter:
        outcome = run(cells, options, reporter)
    keys = {(cell.task, cell.key, cell.seed) for cell in cells}
    print_tables([r for r in read_results(folder).results if (r["task"], r["key"], r["seed"]) in keys])
    print(f"{count(len(outcome.done), 'cell')} run, {outcome.skipped} were there already, results in {folder}/")
    for cell, problem in outcome.failed:
        print(f"FAILED {cell}: {problem}", file=sys.stderr)
    return 1 if outcome.failed else 0


def check_file(path: Path, name: str) -> None:
    """Refuse a folder where a file is to be written, before any work."""
    if path.is_dir():
        raise ValueError(f"{name} must be a file; {path} is a folder.")


def seed_list(count: Any) -> list[int]:
    """The seeds 0 to count - 1; a count that is no whole number or below 1 is refused."""
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise ValueError(f"seeds must be a whole number of at least 1; got {count!r}.")
    return list(range(count))


def read_config(path: Path | None) -> dict[str, Any]:
    """The settings of a TOML file, checked; none without a file."""
    if path is None:
        return {}
    if path.is_dir():
        raise ValueError(f"config {path} must be a TOML file; it is a folder.")
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise FileNotFoundError(f"config {path} does not exist.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"config {path} is not valid TOML: {error}.") from error


def merged_settings(config: dict[str, Any], assignments: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Groups of settings from a file, then those of --set on top."""
    from bayesformer.bench.tasks import TASKS
    from bayesformer.core.settings import parse_assignment
    from bayesformer.methods import EVERY_METHOD

    groups = ["training", *EVERY_METHOD, *TASKS]
    for name, value in config.items():
        if isinstance(value, dict):
            continue
        if name in groups:
            raise ValueError(f"{name} in the configuration must be a table of settings, [{name}]; got {value!r}.")
        raise unknown_name("entry of the configuration", name, ["tasks", "methods", "seeds", "training"])
    settings = {name: dict(values) for name, values in config.items()}
    for text in assignments:
        (group, name), value = parse_assignment(text)
        settings.setdefault(group, {})[name] = value
    return settings


def chosen_names(text: str, known: Sequence[str], option: str) -> list[str]:
    """Names from a comma-separated text, each one of those that are known."""
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in known:
            raise unknown_name(f"name of {option}", name, known)
    return names

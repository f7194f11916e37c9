"""The command line: one function per verb."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bayesformer.bench.arguments import parser
from bayesformer.bench.command_parts import (
    check_file,
    merged_settings,
    print_to_stderr,
    read_config,
    run_and_report,
    run_cells,
    seed_list,
    stored_results,
    torch_threads,
)
from bayesformer.core.storage import read_json


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line with these arguments, by default those of the process; returns the exit code."""
    arguments = parser().parse_args(argv)
    verbs = {"demo": demo, "run": run, "report": report, "list": list_, "predict": predict, "study": study}
    verb = {**verbs, "results": results, "reference": reference, "data": data, "generate": generate}[arguments.verb]
    try:
        return verb(arguments)
    except BrokenPipeError:
        raise
    except (ValueError, OSError) as error:
        print(f"bayesformer {arguments.verb}: {_in_words(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; finished results are kept, call again to resume.", file=sys.stderr)
        return 130


def entry() -> None:
    """The console script: ends the process with the exit code, quietly if the reader of its output has gone."""
    try:
        code = main()
        sys.stdout.flush()
    except BrokenPipeError:  # such as `bayesformer list | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what Python still wants to flush
        code = 141  # 128 + SIGPIPE, as shells say it
    sys.exit(code)


def _in_words(error: Exception) -> str:
    """An error as text; one of the system with the name of its file first."""
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{error.filename}: {error.strerror}."
    return str(error)


def demo(arguments: argparse.Namespace) -> int:
    """`bayesformer demo`: run its cells, print tables and write the report page."""
    from bayesformer.bench import demo as demo_comparison
    from bayesformer.core.workers import cores

    cells = demo_comparison.cells(seed_list(arguments.seeds))
    print(demo_comparison.NOTE)
    return run_and_report(
        cells,
        arguments.output,
        cores() if arguments.workers is None else arguments.workers,
        arguments,
        "bayesformer demo",
        demo_comparison.NOTE,
    )


def run(arguments: argparse.Namespace) -> int:
    """`bayesformer run`: plan the comparison and run the cells that have no result."""
    from bayesformer.bench.planning import plan
    from bayesformer.bench.runner import missing_cells
    from bayesformer.methods import METHODS

    config = read_config(arguments.config)
    tasks = arguments.tasks or config.pop("tasks", [])
    config.pop("tasks", None)
    if not tasks:
        raise ValueError("tasks must be given, on the command line or in the file; `bayesformer list` names them.")
    listed = config.pop("methods", list(METHODS))
    methods = arguments.methods.split(",") if arguments.methods is not None else listed
    seeds = config.pop("seeds", 1)
    seeds = arguments.seeds if arguments.seeds is not None else seeds
    settings = merged_settings(config, arguments.set)
    methods = [m.strip() if isinstance(m, str) else m for m in methods]
    cells = plan(tasks, methods, seed_list(seeds), settings)
    if arguments.dry_run:
        missing = missing_cells(cells, arguments.results)
        print("\n".join([*map(str, missing), f"{len(missing)} of {len(cells)} cells would run."]))
        return 0
    return run_cells(cells, arguments.results, arguments.workers, arguments)


def report(arguments: argparse.Namespace) -> int:
    """`bayesformer report`: write the HTML report of a results folder, or print a Markdown table; returns 0."""
    from bayesformer.bench.report import write_report

    target = arguments.output or arguments.results / "report.html"
    check_file(target, "--output")
    if arguments.metric and not arguments.markdown:
        raise ValueError(f"--metric goes with --markdown; a page shows every metric. Got --metric {arguments.metric}.")
    stored = stored_results(arguments.results)
    results = stored.results
    if arguments.markdown or arguments.choose:
        from bayesformer.bench import markdown

        choose, metric = arguments.choose, arguments.metric
        print(markdown.choice_table(results, choose) if choose else markdown.comparison(results, metric))
        return 0
    path = write_report(results, target, title=arguments.title, skipped=stored.damaged)
    print(f"wrote {path}")
    return 0


def list_(arguments: argparse.Namespace) -> int:
    """`bayesformer list`: print all tasks and methods, with --settings every setting."""
    from rich.console import Console
    from rich.table import Table

    from bayesformer.bench.tasks import TASKS, describe
    from bayesformer.core.settings import explain, summary
    from bayesformer.methods import EVERY_METHOD
    from bayesformer.train.training import Training

    console = Console()
    for title, rows in {
        "tasks": [(name, describe(name)) for name in TASKS],
        "methods": [(name, summary(kind)) for name, kind in EVERY_METHOD.items()],
    }.items():
        table = Table(title, "", box=None, header_style="bold")
        for row in rows:
            table.add_row(*row)
        console.print(table)
    if not arguments.settings:
        console.print("Settings of each: bayesformer list --settings")
        return 0
    groups: dict[str, Any] = {"training": Training, **EVERY_METHOD}
    groups |= {name: type(build()) for name, build in TASKS.items()}
    for name, kind in groups.items():
        table = Table(name, "default", "meaning", box=None, header_style="bold")
        for setting, default, text in explain(kind):
            table.add_row(f"  {setting}", default, text)
        console.print(table)
    return 0


def predict(arguments: argparse.Namespace) -> int:
    """`bayesformer predict`: predict the rows of a data file with a saved posterior."""
    from bayesformer.bench.predicting import check_predictions, load_posterior, read_rows, write_predictions

    if arguments.output is not None:
        check_file(arguments.output, "--output")
    task, posterior = load_posterior(arguments.posterior)
    rows = read_rows(arguments.data)
    predictive = task.answer(posterior.predict(task.inputs(rows), arguments.draws))
    check_predictions(predictive, rows)
    if arguments.output is None:
        write_predictions(predictive, sys.stdout)
    else:
        with arguments.output.open("w", newline="") as file:
            write_predictions(predictive, file)
        print(f"wrote {arguments.output}")
    return 0


def generate(arguments: argparse.Namespace) -> int:
    """`bayesformer generate`: continue a prompt, coloured by epistemic uncertainty, and write the page if asked for."""
    from bayesformer.generation.terminal import Streamer, read_model
    from bayesformer.generation.token_page import page
    from bayesformer.posterior import Posterior

    if arguments.html is not None:
        check_file(arguments.html, "--html")
    read_json(arguments.posterior / "posterior.json", "posterior")  # before the model, which takes its time
    try:
        model, tokenizer = read_model(arguments.model, arguments.gguf)
    except OSError as error:
        if Path(arguments.model).exists():
            raise
        what = f"model must be a folder of transformers; {arguments.model} does not exist, nor is it found on the Hub."
        raise ValueError(what) from error
    found = Posterior.load(arguments.posterior, model).generate(
        arguments.prompt,
        arguments.draws,
        max_new_tokens=arguments.max_new_tokens,
        do_sample=arguments.sample,
        temperature=arguments.temperature,
        top_p=arguments.top_p,
        seed=arguments.seed,
        tokenizer=tokenizer,
        on_step=Streamer(tokenizer),
    )
    total, epistemic = float(found.mean("total")[0]), float(found.mean("epistemic")[0])
    told = f"{total:.3f} nats per token, {epistemic:.3f} of it epistemic"
    print(f"\n\n{int(found.lengths[0])} tokens, {found.draws} draws: {told}")
    if arguments.html is not None:
        arguments.html.write_text(page(found), encoding="utf-8")
        print(f"wrote {arguments.html}")
    return 0


def study(arguments: argparse.Namespace) -> int:
    """`bayesformer study`: run or read what a study needs and show its answer."""
    from bayesformer.study.commands import STUDIES

    return STUDIES[arguments.name](arguments)


def results(arguments: argparse.Namespace) -> int:
    """`bayesformer results pack`: one file per folder; returns 1 if a file had to stay since it cannot be read."""
    from bayesformer.bench.packing import pack

    code = 0
    for folder in arguments.folders:
        packing = pack(folder)
        print(f"{packing.path}: {packing.cells} cells, {packing.moved} of them from files of their own")
        print_to_stderr([f"{cell}: of its results the latest was kept" for cell in packing.replaced])
        print_to_stderr([f"left: {text}" for text in packing.left])
        code = 1 if packing.left else code
    return code


def data(arguments: argparse.Namespace) -> int:
    """`bayesformer data`: list the data sets, fetch them, or make the one that has no source."""
    from bayesformer.datasets import inventory

    if arguments.name == "list":
        print("\n".join(inventory.lines()))
        return 0
    if arguments.name == "get":
        for name in inventory.names_of(arguments.sets):
            for path in inventory.get(name, lambda text: print(text, file=sys.stderr)):
                print(path)
        return 0
    from bayesformer.core.progress import bars
    from bayesformer.datasets.places import fetched_folder
    from bayesformer.study import ambiguous_digits

    recipe = ambiguous_digits.Recipe(images=arguments.images, seed=arguments.seed)
    with torch_threads(1), bars(False if arguments.quiet else None) as reporter:
        facts = ambiguous_digits.make(fetched_folder(), recipe, reporter)
    print(ambiguous_digits.told(facts))
    return 0


def reference(arguments: argparse.Namespace) -> int:
    """`bayesformer reference`: make, list or check posteriors that are known."""
    return {"make": _reference_make, "list": _reference_list, "check": _reference_check}[arguments.name](arguments)


def _reference_make(arguments: argparse.Namespace) -> int:
    """Compute and store, one problem after another; whether the chains agree is said, and is no failure."""
    from bayesformer.bench.planning import expand
    from bayesformer.core.progress import bars
    from bayesformer.reference import PROBLEMS
    from bayesformer.reference.checking import check
    from bayesformer.reference.making import make

    if arguments.workers < 1:
        raise ValueError(f"--workers must be at least 1; got {arguments.workers}.")
    for name in expand(arguments.problems, PROBLEMS, "reference problem"):
        with torch_threads(1), bars(False if arguments.quiet else None) as reporter:
            print(f"wrote {make(name, arguments.folder, reporter, arguments.workers)}")
        print("\n".join(f"  {finding.sentence}" for finding in check(name, arguments.folder)))
    return 0


def _reference_list(arguments: argparse.Namespace) -> int:
    """Print every problem, and what is stored of it."""
    from bayesformer.reference import PROBLEMS
    from bayesformer.reference.checking import state, table

    if arguments.markdown:
        print(table(arguments.folder))
        return 0
    for name, build in PROBLEMS.items():
        print(f"{name:<20}{build().description}\n{'':<20}{state(name, arguments.folder)}")
    return 0


def _reference_check(arguments: argparse.Namespace) -> int:
    """Check what is stored; returns 1 if anything is not as it must be."""
    from bayesformer.bench.planning import expand
    from bayesformer.reference import PROBLEMS
    from bayesformer.reference.checking import check
    from bayesformer.reference.stored import path_of

    names = expand(arguments.problems or ["*"], PROBLEMS, "reference problem")
    if not arguments.problems:
        names = [name for name in names if path_of(name, arguments.folder).exists()]
    findings = {name: check(name, arguments.folder) for name in names}
    for name, found in findings.items():
        for right, sentence in found:
            print(f"{'ok  ' if right else 'NOT '} {name}: {sentence}")
    return 0 if all(right for found in findings.values() for right, _ in found) else 1

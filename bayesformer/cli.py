"""The command line: verbs, one function each."""

from __future__ import annotations

import argparse
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bayesformer.core.errors import DamagedFileError, unknown_name
from bayesformer.version import __version__

EPILOG = """\
examples:
  bayesformer demo
      every first method on the five toy series and on handwritten digits, in a few minutes
  bayesformer run 'toy/*' --methods mle,ensemble --seeds 5 --workers 2
      the cells that are missing in runs/; call it again to resume or extend
  bayesformer run digits --methods mle,map --set map.prior="normal(0, 0.3)" --set training.epochs=40
  bayesformer report runs/ --output report.html
  bayesformer predict runs/posteriors/digits/ensemble-1a2b3c4d/seed0 pixels.csv
  bayesformer study cost runs/
  bayesformer list
"""


def parser() -> argparse.ArgumentParser:
    """All verbs and their options."""
    raw = argparse.RawDescriptionHelpFormatter
    main_parser = argparse.ArgumentParser(
        prog="bayesformer",
        description="Makes transformers Bayesian and shows whether that helped.",
        epilog=EPILOG,
        formatter_class=raw,
    )
    main_parser.add_argument("--version", action="version", version=f"bayesformer {__version__}")
    verbs = main_parser.add_subparsers(dest="verb", metavar="verb", required=True)

    demo = verbs.add_parser(
        "demo",
        help="compare the first methods on small data, and write a report page",
        description="Trains MLE, MAP, a deep ensemble and MC dropout on the five toy series and on scikit-learn's "
        "handwritten digits, with shorter training and fewer members than a benchmark would use; prints a table "
        "and writes a self-contained report page. Call it again to resume.",
    )
    demo.add_argument("--output", type=Path, default=Path("demo"), help="folder for results and page (demo/)")
    demo.add_argument("--seeds", type=int, default=2, help="training seeds (2)")
    _add_workers(demo, None)

    run = verbs.add_parser(
        "run",
        help="run the missing cells of a comparison",
        description="Runs every cell (task, method, seed) that has no result yet. Each result is one JSON line in "
        "a file of its own; an interrupted run resumes when called again, and no finished result is lost.",
        epilog="A configuration file is TOML:\n\n"
        '  tasks = ["toy/*", "digits"]\n  methods = ["mle", "ensemble"]\n  seeds = 5\n\n'
        "  [training]\n  epochs = 60\n\n  [ensemble]\n  members = 5\n\n"
        '  ["toy/m1"]\n  test = 1000\n  training = {epochs = 30}\n\n'
        "A method may also be a table with settings of its own; lists make one variant per value, {task} stands for "
        "the end of\nthe task's name:\n\n"
        '  methods = ["mle", {name = "vi", temperature = [1.0, 0.1], seeds = 1, tasks = "toy/*"}]\n\n'
        "Options on the command line win over the file. `bayesformer list --settings` "
        "names every setting.",
        formatter_class=raw,
    )
    run.add_argument("tasks", nargs="*", help="task names or patterns, e.g. toy/m1 'toy/*' digits")
    run.add_argument("--methods", help="comma-separated method names (all)")
    run.add_argument("--seeds", type=int, help="training seeds 0 to N-1 (1)")
    run.add_argument("--config", type=Path, help="a TOML file with tasks, methods, seeds and settings")
    run.add_argument(
        "--set", action="append", default=[], metavar="GROUP.NAME=VALUE", help="a setting; may be repeated"
    )
    run.add_argument("--results", type=Path, default=Path("runs"), help="results folder (runs/)")
    run.add_argument(
        "--strategy",
        default="auto",
        choices=["auto", "looped", "batched", "processes"],
        help="how the members of one cell run (auto: by their size)",
    )
    run.add_argument("--no-posteriors", action="store_true", help="do not keep the posteriors")
    run.add_argument("--dry-run", action="store_true", help="only say which cells would run")
    _add_workers(run, 1)

    report = verbs.add_parser("report", help="write the report page of a results folder")
    report.add_argument("results", type=Path, help="results folder, e.g. runs/")
    report.add_argument("--output", type=Path, help="the page (RESULTS/report.html)")
    report.add_argument("--title", default="bayesformer report", help="title of the page")
    report.add_argument("--markdown", action="store_true", help="print one table over all tasks instead of a page")
    report.add_argument("--metric", help="with --markdown: the metric (gap to the oracle, or the task's primary)")
    report.add_argument(
        "--choose", metavar="SETTING", help="with --markdown: validation scores of each value of a setting"
    )

    listing = verbs.add_parser("list", help="tasks and methods, each with one line")
    listing.add_argument("--settings", action="store_true", help="also every setting with its default and meaning")

    predict = verbs.add_parser(
        "predict",
        help="ask a saved posterior about a data file",
        description="Loads a posterior that `run` or `demo` kept and predicts every row of a data file. Toy series: "
        "rows of values. Digits: rows of 64 pixels from 0 to 16. Writes CSV.",
    )
    predict.add_argument("posterior", type=Path, help="a folder with posterior.json")
    predict.add_argument("data", type=Path, help="a .csv, .npy, .npz (key inputs) or .safetensors (key inputs) file")
    predict.add_argument("--output", type=Path, help="CSV file (standard output)")
    predict.add_argument("--draws", type=int, help="posterior draws (all)")
    _add_study(verbs)
    return main_parser


def _add_study(verbs: Any) -> None:
    study = verbs.add_parser("study", help="answer a question by many runs and one figure")
    names = study.add_subparsers(dest="name", metavar="study", required=True)
    cold = names.add_parser(
        "cold",
        help="the cold posterior effect",
        description="Log-likelihood against temperature for variational inference, SGHMC serial and parallel "
        "and Laplace, each against the MLE. Runs the missing cells, draws RESULTS/cold.svg and prints a table with "
        "the temperature that validation data choose. Call it again to resume or extend. "
        "The task imdb needs its files: see BAYESFORMER_DATA in the README.",
    )
    cold.add_argument("--tasks", default="toy/m1,imdb", help="comma-separated task names (toy/m1,imdb)")
    cold.add_argument("--seeds", type=int, default=3, help="training seeds (3)")
    cold.add_argument("--results", type=Path, default=Path("results/cold"), help="results folder (results/cold/)")
    _add_workers(cold, 1)
    cost = names.add_parser(
        "cost",
        help="quality against the cost of a prediction",
        description="Reads stored results, which `bayesformer run` made, and runs nothing. Draws one panel per task: "
        "gap to the oracle, or the task's primary metric, against the time of a prediction in multiples of the MLE's, "
        "numbers of draws of one method joined by a line. Prints the same as a table in Markdown.",
    )
    cost.add_argument("results", type=Path, help="results folder, e.g. results/laplace")
    cost.add_argument("--output", type=Path, help="the figure (RESULTS/cost.svg)")
    graphs = names.add_parser(
        "graphs",
        help="stochastic attention on citation graphs",
        description="Reads stored results of experiments/graphs.toml and runs nothing. Prints Table 1 of Fan et al. "
        "(2020), Bayesian Attention Modules, beside the paper's numbers, then log-likelihood, calibration and PAvPU, "
        "which the paper lacks, and whether its differences are seen.",
    )
    graphs.add_argument("results", type=Path, help="results folder, e.g. results/graphs")
    maps = names.add_parser(
        "attention",
        help="what a network attends to, and how sure it is",
        description="Loads a posterior with stochastic attention that `bayesformer run` kept and draws, for one test "
        "input of its task, the mean and the standard deviation of every attention map, per layer and head.",
    )
    maps.add_argument("posterior", type=Path, help="a folder with posterior.json")
    maps.add_argument("--index", type=int, default=0, help="which test input (0)")
    maps.add_argument("--draws", type=int, help="draws (those of a prediction)")
    maps.add_argument("--output", type=Path, default=Path("attention.svg"), help="the figure (attention.svg)")


def _add_workers(verb: argparse.ArgumentParser, default: int | None) -> None:
    text = "cells at the same time, in worker processes (all cores)" if default is None else "cells at once (1)"
    verb.add_argument("--workers", type=int, default=default, help=text)
    verb.add_argument("--threads", type=int, default=1, help="torch threads of a process that runs cells (1)")
    verb.add_argument("--quiet", action="store_true", help="no progress bars")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    arguments = parser().parse_args(argv)
    verb = {"demo": demo, "run": run, "report": report, "list": list_, "predict": predict, "study": study}[
        arguments.verb
    ]
    try:
        return verb(arguments)
    except (ValueError, FileNotFoundError, DamagedFileError) as error:
        print(f"bayesformer {arguments.verb}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; finished results are kept, call again to resume.", file=sys.stderr)
        return 130


def entry() -> None:
    """The console script."""
    sys.exit(main())


def demo(arguments: argparse.Namespace) -> int:
    """Compare the first methods with short training."""
    from bayesformer.bench import demo as demo_comparison
    from bayesformer.core.workers import cores

    cells = demo_comparison.cells(_seed_list(arguments.seeds))
    print(demo_comparison.NOTE)
    return _run_and_report(
        cells,
        arguments.output,
        arguments.workers or cores(),
        arguments,
        "bayesformer demo",
        demo_comparison.NOTE,
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the missing cells."""
    from bayesformer.bench import runner
    from bayesformer.methods import METHODS

    config = _read_config(arguments.config)
    tasks = arguments.tasks or config.pop("tasks", [])
    config.pop("tasks", None)
    if not tasks:
        raise ValueError("tasks must be given, on the command line or in the file; `bayesformer list` names them.")
    listed = config.pop("methods", list(METHODS))
    methods = arguments.methods.split(",") if arguments.methods else listed
    seeds = config.pop("seeds", 1)
    seeds = arguments.seeds if arguments.seeds is not None else seeds
    settings = _merge(config, arguments.set)
    methods = [m.strip() if isinstance(m, str) else m for m in methods]
    cells = runner.plan(tasks, methods, _seed_list(seeds), settings)
    if arguments.dry_run:
        missing = [cell for cell in cells if not (arguments.results / cell.path).exists()]
        print("\n".join([*map(str, missing), f"{len(missing)} of {len(cells)} cells would run."]))
        return 0
    return _run_cells(cells, arguments.results, arguments.workers, arguments)


def report(arguments: argparse.Namespace) -> int:
    """Write the report page."""
    from bayesformer.bench.report import write_report
    from bayesformer.bench.runner import load_results

    results = load_results(arguments.results)
    if not results:
        raise ValueError(f"results folder {arguments.results} must hold at least one result; it holds none.")
    if arguments.markdown or arguments.choose:
        from bayesformer.bench import markdown

        choose, metric = arguments.choose, arguments.metric
        print(markdown.choice_table(results, choose) if choose else markdown.comparison(results, metric))
        return 0
    path = write_report(results, arguments.output or arguments.results / "report.html", title=arguments.title)
    print(f"wrote {path}")
    return 0


def list_(arguments: argparse.Namespace) -> int:
    """Tasks and methods."""
    from rich.console import Console
    from rich.table import Table

    from bayesformer.bench.tasks import TASKS, describe
    from bayesformer.core.settings import explain, summary
    from bayesformer.methods import METHODS
    from bayesformer.train.training import Training

    console = Console()
    for title, rows in {
        "tasks": [(name, describe(name)) for name in TASKS],
        "methods": [(name, summary(kind)) for name, kind in METHODS.items()],
    }.items():
        table = Table(title, "", box=None, header_style="bold")
        for row in rows:
            table.add_row(*row)
        console.print(table)
    if not arguments.settings:
        console.print("Settings of each: bayesformer list --settings")
        return 0
    groups: dict[str, Any] = {"training": Training, **METHODS}
    groups |= {name: type(build()) for name, build in TASKS.items()}
    for name, kind in groups.items():
        table = Table(name, "default", "meaning", box=None, header_style="bold")
        for setting, default, text in explain(kind):
            table.add_row(f"  {setting}", default, text)
        console.print(table)
    return 0


def predict(arguments: argparse.Namespace) -> int:
    """Ask a saved posterior."""
    from bayesformer.bench.predicting import load_posterior, read_rows, write_predictions

    task, posterior = load_posterior(arguments.posterior)
    inputs = task.inputs(read_rows(arguments.data))
    predictive = task.answer(posterior.predict(inputs, arguments.draws))
    if arguments.output is None:
        write_predictions(predictive, sys.stdout)
    else:
        with arguments.output.open("w", newline="") as file:
            write_predictions(predictive, file)
        print(f"wrote {arguments.output}")
    return 0


def study(arguments: argparse.Namespace) -> int:
    """Answer a study's question."""
    verbs = {"cold": _study_cold, "cost": _study_cost, "graphs": _study_graphs, "attention": _study_attention}
    return verbs[arguments.name](arguments)


def _study_cold(arguments: argparse.Namespace) -> int:
    """Run the missing cells and draw the figure."""
    from bayesformer.bench.runner import load_results
    from bayesformer.study import cold

    cells = cold.cells([t.strip() for t in arguments.tasks.split(",")], _seed_list(arguments.seeds))
    arguments.no_posteriors = True
    code = _run_cells(cells, arguments.results, arguments.workers, arguments)
    keys = {(cell.task, cell.key) for cell in cells}  # with every seed that is stored
    results = [r for r in load_results(arguments.results) if (r["task"], r["key"]) in keys]
    if results:
        print(cold.table(results))
        print(f"figure: {cold.figure(results, arguments.results / 'cold.svg')}")
    return code


def _study_cost(arguments: argparse.Namespace) -> int:
    """Draw stored results."""
    from bayesformer.bench.runner import load_results
    from bayesformer.study import cost

    results = load_results(arguments.results)
    print(cost.table(results))
    print(f"figure: {cost.figure(results, arguments.output or arguments.results / 'cost.svg')}")
    return 0


def _study_graphs(arguments: argparse.Namespace) -> int:
    """Print stored results as the paper's table."""
    from bayesformer.bench.runner import load_results
    from bayesformer.study import graphs

    print(graphs.table(load_results(arguments.results)))
    return 0


def _study_attention(arguments: argparse.Namespace) -> int:
    """Draw the attention of a saved posterior."""
    from bayesformer.bench.predicting import load_posterior
    from bayesformer.study import maps

    task, posterior = load_posterior(arguments.posterior)
    test = task.load().test
    if not 0 <= arguments.index < len(test):
        raise ValueError(f"--index must be in 0..{len(test) - 1}; got {arguments.index}.")
    seen = posterior.attention_maps(test.take(slice(arguments.index, arguments.index + 1)).inputs, arguments.draws)
    print(f"figure: {maps.figure(seen, arguments.output)}")
    return 0


def _run_and_report(
    cells: list[Any], folder: Path, workers: int, arguments: argparse.Namespace, title: str, note: str
) -> int:
    from bayesformer.bench.report import write_report
    from bayesformer.bench.runner import load_results

    code = _run_cells(cells, folder, workers, arguments)
    keys = {(cell.task, cell.key, cell.seed) for cell in cells}
    results = [r for r in load_results(folder) if (r["task"], r["key"], r["seed"]) in keys]
    if results:
        page = write_report(results, folder / "report.html", title=title, note=note)
        print(f"report page: {page}")
    return code


def _run_cells(cells: list[Any], folder: Path, workers: int, arguments: argparse.Namespace) -> int:
    import torch

    from bayesformer.bench.runner import Options, load_results, run
    from bayesformer.bench.tables import print_tables
    from bayesformer.core.progress import bars

    if workers < 1:
        raise ValueError(f"--workers must be at least 1; got {workers}.")
    if arguments.threads < 1:
        raise ValueError(f"--threads must be at least 1; got {arguments.threads}.")
    # Small models gain little from threads, and lose by a factor of 30 where another process has the core.
    torch.set_num_threads(arguments.threads)
    options = Options(
        folder,
        workers,
        getattr(arguments, "strategy", "auto"),
        not getattr(arguments, "no_posteriors", False),
    )
    with bars(False if arguments.quiet else None, lines=["cells"]) as reporter:
        outcome = run(cells, options, reporter)
    keys = {(cell.task, cell.key, cell.seed) for cell in cells}
    print_tables([r for r in load_results(folder) if (r["task"], r["key"], r["seed"]) in keys])
    print(f"{len(outcome.done)} cells run, {outcome.skipped} were there already, results in {folder}/")
    for cell, problem in outcome.failed:
        print(f"FAILED {cell}: {problem}", file=sys.stderr)
    return 1 if outcome.failed else 0


def _seed_list(count: Any) -> list[int]:
    if not isinstance(count, int) or count < 1:
        raise ValueError(f"seeds must be a whole number of at least 1; got {count!r}.")
    return list(range(count))


def _read_config(path: Path | None) -> dict[str, Any]:
    if path is None:
        return {}
    try:
        return tomllib.loads(path.read_text())
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"config {path} is not valid TOML: {error}.") from error


def _merge(config: dict[str, Any], assignments: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Groups of settings from a file, then those of --set on top."""
    from bayesformer.core.settings import parse_assignment

    for name, value in config.items():
        if not isinstance(value, dict):
            raise unknown_name("entry of the configuration", name, ["tasks", "methods", "seeds", "training"])
    settings = {name: dict(values) for name, values in config.items()}
    for text in assignments:
        (group, name), value = parse_assignment(text)
        settings.setdefault(group, {})[name] = value
    return settings

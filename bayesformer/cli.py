"""The command line: one function per verb, and what they share."""

from __future__ import annotations

import argparse
import os
import sys
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bayesformer.bench.arguments import parser
from bayesformer.core.errors import unknown_name
from bayesformer.core.storage import read_json

if TYPE_CHECKING:
    from bayesformer.bench.records import Stored

MAX_LINES = 10
"""lines of one kind that are printed to standard error; of the others only their number"""


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

    cells = demo_comparison.cells(_seed_list(arguments.seeds))
    print(demo_comparison.NOTE)
    return _run_and_report(
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

    config = _read_config(arguments.config)
    tasks = arguments.tasks or config.pop("tasks", [])
    config.pop("tasks", None)
    if not tasks:
        raise ValueError("tasks must be given, on the command line or in the file; `bayesformer list` names them.")
    listed = config.pop("methods", list(METHODS))
    methods = arguments.methods.split(",") if arguments.methods is not None else listed
    seeds = config.pop("seeds", 1)
    seeds = arguments.seeds if arguments.seeds is not None else seeds
    settings = _merge(config, arguments.set)
    methods = [m.strip() if isinstance(m, str) else m for m in methods]
    cells = plan(tasks, methods, _seed_list(seeds), settings)
    if arguments.dry_run:
        missing = missing_cells(cells, arguments.results)
        print("\n".join([*map(str, missing), f"{len(missing)} of {len(cells)} cells would run."]))
        return 0
    return _run_cells(cells, arguments.results, arguments.workers, arguments)


def report(arguments: argparse.Namespace) -> int:
    """`bayesformer report`: write the page of a results folder, or print a table."""
    from bayesformer.bench.report import write_report

    target = arguments.output or arguments.results / "report.html"
    _check_file(target, "--output")
    if arguments.metric and not arguments.markdown:
        raise ValueError(f"--metric goes with --markdown; a page shows every metric. Got --metric {arguments.metric}.")
    stored = _read_results(arguments.results)
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
        _check_file(arguments.output, "--output")
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
        _check_file(arguments.html, "--html")
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
    """`bayesformer study`: run or read what the study needs and show its answer."""
    verbs = {"cold": _study_cold, "cost": _study_cost, "graphs": _study_graphs, "attention": _study_attention}
    verbs |= {"fidelity": _study_fidelity, "weights": _study_weights, "bars": _study_bars, "priors": _study_priors}
    verbs |= {"reproduce": _study_reproduce, "citations": _study_citations, "summary": _study_summary}
    verbs |= {"continual": _study_continual, "unknown": _study_unknown, "glue": _study_glue}
    return verbs[arguments.name](arguments)


def results(arguments: argparse.Namespace) -> int:
    """`bayesformer results pack`: one file per folder; returns 1 if a file had to stay since it cannot be read."""
    from bayesformer.bench.packing import pack

    code = 0
    for folder in arguments.folders:
        packing = pack(folder)
        print(f"{packing.path}: {packing.cells} cells, {packing.moved} of them from files of their own")
        _print_to_stderr([f"{cell}: of its results the latest was kept" for cell in packing.replaced])
        _print_to_stderr([f"left: {text}" for text in packing.left])
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
    with _threads(1), bars(False if arguments.quiet else None) as reporter:
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
        with _threads(1), bars(False if arguments.quiet else None) as reporter:
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


def _study_fidelity(arguments: argparse.Namespace) -> int:
    """Draw stored results of the tasks fidelity/* and print their tables."""
    from bayesformer.study import fidelity_cost

    target = arguments.output or arguments.results / "fidelity.svg"
    _check_file(target, "--output")
    results = _read_results(arguments.results).results
    print(fidelity_cost.overview(results) if arguments.brief else fidelity_cost.table(results))
    print(f"figure: {fidelity_cost.figure(results, target)}")
    return 0


def _study_bars(arguments: argparse.Namespace) -> int:
    """Run the fits that are missing and print how near to known posteriors they are."""
    from bayesformer.study import bars

    _check_file(arguments.output, "--output")
    chosen, methods = ([part.strip() for part in text.split(",")] for text in (arguments.problems, arguments.methods))
    seeds = _seed_list(arguments.seeds)
    if arguments.page is not None:
        bars.split_page(arguments.page)
    if arguments.add:
        bars.add_rows(arguments.output, arguments.add)
    rows = bars.run(chosen, methods, seeds, arguments.output, lambda line: print(line, file=sys.stderr))
    text = bars.report(rows, arguments.output.parent)
    print(text)
    if arguments.page is not None:
        bars.write_into(arguments.page, text)
    return 0


def _study_weights(arguments: argparse.Namespace) -> int:
    """Train or find the networks, then write statistics, figures and priors."""
    from bayesformer.core.progress import bars
    from bayesformer.datasets.places import cache_folder
    from bayesformer.study import weight_figures, weight_study
    from bayesformer.study.weight_networks import export, train_networks

    figures = arguments.figures or arguments.results
    if arguments.stored:
        studies = weight_study.stored(arguments.results, arguments.task)
        print(f"page: {weight_figures.write_page(studies, figures)}")
        return 0
    groups = _merge({}, arguments.set)
    if unknown := set(groups) - {arguments.task, "training"}:
        raise ValueError(f"--set must be of {arguments.task} or training; got {unknown.pop()!r}.")
    if arguments.out is not None:
        _check_file(arguments.out, "--out")
    folder = arguments.folder or cache_folder() / "networks"
    with _threads(arguments.threads), bars(False if arguments.quiet else None) as reporter:
        trained = train_networks(
            arguments.task,
            arguments.networks,
            folder,
            groups.get(arguments.task),
            groups.get("training"),
            reporter,
        )
        print(f"{arguments.task}: {len(trained.theta)} networks of {trained.space.size} weights in {folder}/")
        if arguments.export is not None:
            print(f"weights: {export(trained, arguments.export)}")
        if arguments.train_only:
            return 0
        study = weight_study.study_weights(trained, reporter=reporter)
    stem = arguments.task.replace("/", "-")
    print(weight_study.table(study))
    print(f"statistics: {weight_study.write(study, arguments.results / f'{stem}.json')}")
    print(f"priors: {weight_study.write_priors(study, arguments.out or arguments.results / f'{stem}.toml')}")
    for path in weight_figures.draw_all(study, figures):
        print(f"figure: {path}")
    return 0


def _study_priors(arguments: argparse.Namespace) -> int:
    """Run the missing cells and draw the figure."""
    from bayesformer.bench.records import read_results
    from bayesformer.study import prior_scale, weight_study

    tasks = [task.strip() for task in arguments.tasks.split(",")]
    files = {task: arguments.weights / f"{task.replace('/', '-')}.json" for task in tasks}
    derived = {task: weight_study.read(path).priors() for task, path in files.items() if path.exists()}
    cells = prior_scale.cells(tasks, _seed_list(arguments.seeds), derived, _merge({}, arguments.set))
    arguments.no_posteriors = True
    code = _run_cells(cells, arguments.results, arguments.workers, arguments)
    keys = {(cell.task, cell.key) for cell in cells}
    results = [r for r in read_results(arguments.results).results if (r["task"], r["key"]) in keys]
    if results:
        print(prior_scale.table(results))
        print(f"figure: {prior_scale.figure(results, arguments.results / 'priors.svg')}")
    return code


def _study_reproduce(arguments: argparse.Namespace) -> int:
    """Run what is missing of the study, or forecast it, and write its pages."""
    from bayesformer.core.progress import bars
    from bayesformer.core.workers import cores
    from bayesformer.datasets.places import cache_folder
    from bayesformer.study.reproduction import study_figures, study_page
    from bayesformer.study.reproduction.agenda import StudyFolders
    from bayesformer.study.reproduction.description import read_description
    from bayesformer.study.reproduction.reproduce import Reproduction, plan_text

    if arguments.hours is not None and arguments.hours <= 0:
        raise ValueError(f"--hours must be above 0; got {arguments.hours}.")
    workers = cores() if arguments.workers is None else arguments.workers
    if workers < 1:
        raise ValueError(f"--workers must be at least 1; got {workers}.")
    description = read_description(arguments.description)
    networks = arguments.networks or cache_folder() / "networks"
    folders = StudyFolders(arguments.results, arguments.weights, networks)
    if arguments.figure is not None:
        target = arguments.pages / f"figure-{arguments.figure}.svg"
        print(study_figures.draw_figure(study_page.read_stored(description, folders), arguments.figure, target))
        return 0
    code = 0
    if not arguments.report_only:
        shown = ["cells", "measuring"]
        with _threads(arguments.threads), bars(False if arguments.quiet else None, lines=shown) as reporter:
            study = Reproduction(description, folders, workers, reporter)
            if arguments.forecast:
                study.check_data(arguments.only)
                print(plan_text(study.forecast(arguments.only), workers))
                return 0
            ended = study.run(arguments.only, arguments.hours)
        print(f"{ended.done} cells run; {ended.left} steps of the plan are left, call again to go on.")
        for cell, problem in ended.failed:
            print(f"FAILED {cell}: {problem}", file=sys.stderr)
        code = 1 if ended.failed else 0
    for path in study_page.write_pages(description, folders, arguments.pages):
        print(f"wrote {path}")
    return code


def _study_cold(arguments: argparse.Namespace) -> int:
    """Run the missing cells and draw the figure."""
    from bayesformer.bench.records import read_results
    from bayesformer.study import cold

    cells = cold.cells([t.strip() for t in arguments.tasks.split(",")], _seed_list(arguments.seeds))
    if arguments.forecast:
        from bayesformer.study.reproduction.forecast import Forecaster, forecast_of

        with _threads(1):
            print(forecast_of(cells, Forecaster(kept=False)))
        return 0
    arguments.no_posteriors = True
    code = _run_cells(cells, arguments.results, arguments.workers, arguments)
    keys = {(cell.task, cell.key) for cell in cells}  # with every seed that is stored
    results = [r for r in read_results(arguments.results).results if (r["task"], r["key"]) in keys]
    if results:
        print(cold.table(results))
        print(f"figure: {cold.figure(results, arguments.results / 'cold.svg')}")
    return code


def _study_continual(arguments: argparse.Namespace) -> int:
    """Do the missing episodes, then print the table and draw the figure."""
    from bayesformer.bench.records import read_results
    from bayesformer.study import continual, continual_table

    places = _choices(arguments.places, continual.PLACES, "--places")
    if not arguments.stored:
        say = lambda line: print(line, file=sys.stderr, flush=True)  # noqa: E731
        course = continual.Course(continual.open_shelf, arguments.results, say=say)
        with _threads(1):
            course.all(places, _seed_list(arguments.seeds))
    results = read_results(arguments.results).results
    print(continual_table.table(results))
    print(f"figure: {continual_table.figure(results, arguments.results / 'continual.svg')}")
    return 0


def _study_unknown(arguments: argparse.Namespace) -> int:
    """Do the missing trainings and evaluations, then print the table and draw the figure."""
    from bayesformer.bench.records import read_results
    from bayesformer.study import unknown_prompts, unknown_table

    places = _choices(arguments.places, unknown_prompts.PLACES, "--places")
    ways = _choices(arguments.ways, unknown_prompts.WAYS, "--ways")
    if not arguments.stored:
        say = lambda line: print(line, file=sys.stderr, flush=True)  # noqa: E731
        study = unknown_prompts.Examination(unknown_prompts.open_questions, arguments.results, say=say)
        with _threads(1):
            study.all(places, ways)
    results = read_results(arguments.results).results
    print(unknown_table.table(results))
    print(f"figure: {unknown_table.figure(results, arguments.results / 'unknown.svg')}")
    return 0


def _study_glue(arguments: argparse.Namespace) -> int:
    """Print stored results of the tasks on a pretrained encoder."""
    from bayesformer.study import sentence_table

    results = _read_results(arguments.results).results
    print(sentence_table.table(results, sentence_table.keep_errors(arguments.results)))
    return 0


def _choices(text: str, known: Sequence[str], option: str) -> list[str]:
    """Names from a comma-separated text, each one of those that are known."""
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in known:
            raise unknown_name(f"name of {option}", name, known)
    return names


def _study_cost(arguments: argparse.Namespace) -> int:
    """Draw stored results."""
    from bayesformer.study import prediction_cost

    target = arguments.output or arguments.results / "cost.svg"
    _check_file(target, "--output")
    results = _read_results(arguments.results).results
    print(prediction_cost.table(results))
    print(f"figure: {prediction_cost.figure(results, target)}")
    return 0


def _study_graphs(arguments: argparse.Namespace) -> int:
    """Print stored results as the paper's table."""
    from bayesformer.study import citation_table

    print(citation_table.table(_read_results(arguments.results).results))
    return 0


def _study_citations(arguments: argparse.Namespace) -> int:
    """Run the baseline as often as asked for, and print what its accuracy depends on."""
    from bayesformer.study import citation_runs

    _check_file(arguments.output, "--output")
    if arguments.runs < 1:
        raise ValueError(f"--runs must be at least 1; got {arguments.runs}.")
    variants = [variant.strip() for variant in arguments.variants.split(",")]
    for variant in variants:
        citation_runs.seeds_of(variant, 0)
    with _threads(1):
        found = citation_runs.runs(
            arguments.graph, variants, arguments.runs, arguments.output, lambda line: print(line, file=sys.stderr)
        )
    for graph, mine in citation_runs.by_graph(found).items():
        print(f"{graph}\n\n{citation_runs.table(mine)}\n\n{citation_runs.spread_text(mine)}")
    return 0


def _study_summary(arguments: argparse.Namespace) -> int:
    """Write the tables that documents hold between markers, or say which are not up to date."""
    from bayesformer.study import summary_table

    stale = summary_table.write_documents(arguments.results, arguments.page, arguments.readme, arguments.check)
    for path in stale:
        print(f"{'not up to date:' if arguments.check else 'wrote'} {path}")
    return 1 if stale and arguments.check else 0


def _study_attention(arguments: argparse.Namespace) -> int:
    """Draw the attention of a saved posterior."""
    from bayesformer.bench.predicting import load_posterior
    from bayesformer.study import map_study

    _check_file(arguments.output, "--output")
    task, posterior = load_posterior(arguments.posterior)
    test = task.load().test
    if not 0 <= arguments.index < len(test):
        raise ValueError(f"--index must be in 0..{len(test) - 1}; got {arguments.index}.")
    seen = posterior.attention_maps(test.take(slice(arguments.index, arguments.index + 1)).inputs, arguments.draws)
    print(f"figure: {map_study.figure(seen, arguments.output)}")
    return 0


def _read_results(folder: Path) -> Stored:
    """What a folder holds, at least one result; what cannot be read, or is stored twice, is said on standard error."""
    from bayesformer.bench.records import read_results

    stored = read_results(folder)
    _print_to_stderr([f"skipped: {text}" for text in stored.damaged])
    _print_to_stderr(stored.repeated)
    if not stored.results:
        raise ValueError(f"results folder {folder} must hold at least one result that can be read; it holds none.")
    return stored


def _print_to_stderr(lines: Sequence[str]) -> None:
    """The first lines on standard error, and how many there are besides."""
    for line in lines[:MAX_LINES]:
        print(line, file=sys.stderr)
    if len(lines) > MAX_LINES:
        print(f"and {len(lines) - MAX_LINES} more like this.", file=sys.stderr)


def _run_and_report(
    cells: list[Any], folder: Path, workers: int, arguments: argparse.Namespace, title: str, note: str
) -> int:
    from bayesformer.bench.records import read_results
    from bayesformer.bench.report import write_report

    code = _run_cells(cells, folder, workers, arguments)
    keys = {(cell.task, cell.key, cell.seed) for cell in cells}
    results = [r for r in read_results(folder).results if (r["task"], r["key"], r["seed"]) in keys]
    if results:
        page = write_report(results, folder / "report.html", title=title, note=note)
        print(f"report page: {page}")
    return code


@contextmanager
def _threads(count: int) -> Iterator[None]:
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


def _run_cells(cells: list[Any], folder: Path, workers: int, arguments: argparse.Namespace) -> int:
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
    with _threads(arguments.threads), bars(False if arguments.quiet else None, lines=["cells"]) as reporter:
        outcome = run(cells, options, reporter)
    keys = {(cell.task, cell.key, cell.seed) for cell in cells}
    print_tables([r for r in read_results(folder).results if (r["task"], r["key"], r["seed"]) in keys])
    print(f"{count(len(outcome.done), 'cell')} run, {outcome.skipped} were there already, results in {folder}/")
    for cell, problem in outcome.failed:
        print(f"FAILED {cell}: {problem}", file=sys.stderr)
    return 1 if outcome.failed else 0


def _check_file(path: Path, name: str) -> None:
    """Refuse a folder where a file is to be written, before any work."""
    if path.is_dir():
        raise ValueError(f"{name} must be a file; {path} is a folder.")


def _seed_list(count: Any) -> list[int]:
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise ValueError(f"seeds must be a whole number of at least 1; got {count!r}.")
    return list(range(count))


def _read_config(path: Path | None) -> dict[str, Any]:
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


def _merge(config: dict[str, Any], assignments: Sequence[str]) -> dict[str, dict[str, Any]]:
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

"""`bayesformer study NAME`: one function per study, which runs or reads what it needs and shows the answer."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from bayesformer.bench.command_parts import (
    check_file,
    chosen_names,
    merged_settings,
    run_cells,
    seed_list,
    stored_results,
    torch_threads,
)


def _fidelity(arguments: argparse.Namespace) -> int:
    """Draw stored results of the tasks fidelity/* and print their tables."""
    from bayesformer.study import fidelity_cost

    target = arguments.output or arguments.results / "fidelity.svg"
    check_file(target, "--output")
    results = stored_results(arguments.results).results
    print(fidelity_cost.overview(results) if arguments.brief else fidelity_cost.table(results))
    print(f"figure: {fidelity_cost.figure(results, target)}")
    return 0


def _bars(arguments: argparse.Namespace) -> int:
    """Run the fits that are missing and print how near to known posteriors they are."""
    from bayesformer.study import bars

    check_file(arguments.output, "--output")
    chosen, methods = ([part.strip() for part in text.split(",")] for text in (arguments.problems, arguments.methods))
    seeds = seed_list(arguments.seeds)
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


def _weights(arguments: argparse.Namespace) -> int:
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
    groups = merged_settings({}, arguments.set)
    if unknown := set(groups) - {arguments.task, "training"}:
        raise ValueError(f"--set must be of {arguments.task} or training; got {unknown.pop()!r}.")
    if arguments.out is not None:
        check_file(arguments.out, "--out")
    folder = arguments.folder or cache_folder() / "networks"
    with torch_threads(arguments.threads), bars(False if arguments.quiet else None) as reporter:
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


def _priors(arguments: argparse.Namespace) -> int:
    """Run the missing cells and draw the figure."""
    from bayesformer.study import prior_scale, weight_study

    tasks = [task.strip() for task in arguments.tasks.split(",")]
    files = {task: arguments.weights / f"{task.replace('/', '-')}.json" for task in tasks}
    derived = {task: weight_study.read(path).priors() for task, path in files.items() if path.exists()}
    cells = prior_scale.cells(tasks, seed_list(arguments.seeds), derived, merged_settings({}, arguments.set))
    return _run_and_draw(cells, arguments, prior_scale, "priors.svg")


def _reproduce(arguments: argparse.Namespace) -> int:
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
        with torch_threads(arguments.threads), bars(False if arguments.quiet else None, lines=shown) as reporter:
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


def _cold(arguments: argparse.Namespace) -> int:
    """Run the missing cells and draw the figure."""
    from bayesformer.study import cold

    cells = cold.cells([t.strip() for t in arguments.tasks.split(",")], seed_list(arguments.seeds))
    if arguments.forecast:
        from bayesformer.study.reproduction.forecast import Forecaster, forecast_of

        with torch_threads(1):
            print(forecast_of(cells, Forecaster(kept=False)))
        return 0
    return _run_and_draw(cells, arguments, cold, "cold.svg")


def _run_and_draw(cells: list[Any], arguments: argparse.Namespace, study: Any, file: str) -> int:
    """Run the missing cells, then print the study's table of all seeds that are stored and draw its figure."""
    from bayesformer.bench.records import read_results

    arguments.no_posteriors = True
    code = run_cells(cells, arguments.results, arguments.workers, arguments)
    keys = {(cell.task, cell.key) for cell in cells}
    results = [r for r in read_results(arguments.results).results if (r["task"], r["key"]) in keys]
    if results:
        print(study.table(results))
        print(f"figure: {study.figure(results, arguments.results / file)}")
    return code


def _continual(arguments: argparse.Namespace) -> int:
    """Do the missing episodes, then print the table and draw the figure."""
    from bayesformer.bench.records import read_results
    from bayesformer.study import continual, continual_table

    places = chosen_names(arguments.places, continual.PLACES, "--places")
    if not arguments.stored:
        say = lambda line: print(line, file=sys.stderr, flush=True)  # noqa: E731
        course = continual.Course(continual.open_shelf, arguments.results, say=say)
        with torch_threads(1):
            course.all(places, seed_list(arguments.seeds))
    results = read_results(arguments.results).results
    print(continual_table.table(results))
    print(f"figure: {continual_table.figure(results, arguments.results / 'continual.svg')}")
    return 0


def _unknown(arguments: argparse.Namespace) -> int:
    """Do the missing trainings and evaluations, then print the table and draw the figure."""
    from bayesformer.bench.records import read_results
    from bayesformer.study import unknown_prompts, unknown_table

    places = chosen_names(arguments.places, unknown_prompts.PLACES, "--places")
    ways = chosen_names(arguments.ways, unknown_prompts.WAYS, "--ways")
    if not arguments.stored:
        say = lambda line: print(line, file=sys.stderr, flush=True)  # noqa: E731
        study = unknown_prompts.Examination(unknown_prompts.open_questions, arguments.results, say=say)
        with torch_threads(1):
            study.all(places, ways)
    results = read_results(arguments.results).results
    print(unknown_table.table(results))
    print(f"figure: {unknown_table.figure(results, arguments.results / 'unknown.svg')}")
    return 0


def _glue(arguments: argparse.Namespace) -> int:
    """Print stored results of the tasks on a pretrained encoder."""
    from bayesformer.study import sentence_table

    results = stored_results(arguments.results).results
    print(sentence_table.table(results, sentence_table.keep_errors(arguments.results)))
    return 0


def _cost(arguments: argparse.Namespace) -> int:
    """Draw stored results."""
    from bayesformer.study import prediction_cost

    target = arguments.output or arguments.results / "cost.svg"
    check_file(target, "--output")
    results = stored_results(arguments.results).results
    print(prediction_cost.table(results))
    print(f"figure: {prediction_cost.figure(results, target)}")
    return 0


def _graphs(arguments: argparse.Namespace) -> int:
    """Print stored results as the paper's table."""
    from bayesformer.study import citation_table

    print(citation_table.table(stored_results(arguments.results).results))
    return 0


def _citations(arguments: argparse.Namespace) -> int:
    """Run the baseline as often as asked for, and print what its accuracy depends on."""
    from bayesformer.study import citation_runs

    check_file(arguments.output, "--output")
    if arguments.runs < 1:
        raise ValueError(f"--runs must be at least 1; got {arguments.runs}.")
    variants = [variant.strip() for variant in arguments.variants.split(",")]
    for variant in variants:
        citation_runs.seeds_of(variant, 0)
    with torch_threads(1):
        found = citation_runs.runs(
            arguments.graph, variants, arguments.runs, arguments.output, lambda line: print(line, file=sys.stderr)
        )
    for graph, mine in citation_runs.by_graph(found).items():
        print(f"{graph}\n\n{citation_runs.table(mine)}\n\n{citation_runs.spread_text(mine)}")
    return 0


def _summary(arguments: argparse.Namespace) -> int:
    """Write the tables that documents hold between markers, or say which are not up to date."""
    from bayesformer.study import summary_table

    stale = summary_table.write_documents(arguments.results, arguments.page, arguments.readme, arguments.check)
    for path in stale:
        print(f"{'not up to date:' if arguments.check else 'wrote'} {path}")
    return 1 if stale and arguments.check else 0


def _attention(arguments: argparse.Namespace) -> int:
    """Draw the attention of a saved posterior."""
    from bayesformer.bench.predicting import load_posterior
    from bayesformer.study import map_study

    check_file(arguments.output, "--output")
    task, posterior = load_posterior(arguments.posterior)
    test = task.load().test
    if not 0 <= arguments.index < len(test):
        raise ValueError(f"--index must be in 0..{len(test) - 1}; got {arguments.index}.")
    seen = posterior.attention_maps(test.take(slice(arguments.index, arguments.index + 1)).inputs, arguments.draws)
    print(f"figure: {map_study.figure(seen, arguments.output)}")
    return 0


STUDIES = {
    "attention": _attention,
    "bars": _bars,
    "citations": _citations,
    "cold": _cold,
    "continual": _continual,
    "cost": _cost,
    "fidelity": _fidelity,
    "glue": _glue,
    "graphs": _graphs,
    "priors": _priors,
    "reproduce": _reproduce,
    "summary": _summary,
    "unknown": _unknown,
    "weights": _weights,
}
"""what `bayesformer study` is called with, by name: each takes the arguments and returns the exit code"""

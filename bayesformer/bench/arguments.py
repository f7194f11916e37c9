"""The verbs of the command line with their options and help texts."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from bayesformer.version import __version__

EPILOG = """\
examples:
  bayesformer demo
      what every method leaves open, on a curve, a series and handwritten digits, in a few minutes
  bayesformer list --settings
      tasks, methods and every setting of theirs
  bayesformer run 'toy/*' --methods mle,ensemble --seeds 5 --workers 2
      the cells (task, method, seed) that are missing in runs/; call it again to resume or extend
  bayesformer run digits --methods mle,map --set map.prior="normal(0, 0.3)" --set training.epochs=40
      settings other than the defaults
  bayesformer report runs/
      one self-contained HTML page, runs/report.html
  bayesformer report runs/ --markdown
      one table over all tasks
  bayesformer predict runs/posteriors/toy-m1/ensemble-1a2b3c4d/seed0 series.csv
      predictions of a stored posterior for the rows of a file, as CSV
  bayesformer generate my-model/ --posterior my-posterior/ "The capital of France is" --html page.html
      continue text with a posterior over a language model; tokens that its draws disagree about are coloured
  bayesformer study cold --tasks toy/m1
      log-likelihood against temperature, as a figure
  bayesformer study cost runs/
      quality against the cost of a prediction, as a figure
  bayesformer study graphs results/graphs
      stochastic attention on citation graphs, as a table
  bayesformer study attention runs/posteriors/toy-m1/attention-1a2b3c4d/seed0
      mean and spread of its attention maps, as a figure
  bayesformer study weights toy/m1 --networks 60
      the weights of trained networks: laws that fit them, figures, and priors made of these
  bayesformer study continual
      books one after another: what online Laplace on adapters keeps
  bayesformer study unknown
      does a language model know what it does not know?
  bayesformer study priors --tasks toy/m3
      log-likelihood against the scale of the prior, as a figure
  bayesformer study reproduce --forecast
      the study of Bayesian transformers: its plan and how long it takes; without the option, what is missing of it
  bayesformer study citations --runs 50
      what the accuracy of a graph attention network depends on, as a table
  bayesformer study summary
      the tables that open README.md and docs/results.md, from stored results
  bayesformer data get mnist
      a data set from its official source into the user's cache; `bayesformer data list` names them
  bayesformer study fidelity results/fidelity
      distance to the posterior against gradient evaluations, as a figure and a table
  bayesformer reference list
      problems whose posterior is known, and what is stored of them
  bayesformer results pack runs/
      a file per cell becomes one file of lines, runs/runs.jsonl; every command reads both
"""


def parser() -> argparse.ArgumentParser:
    """The parser of the command line, with all verbs and their options."""
    main_parser = argparse.ArgumentParser(
        prog="bayesformer",
        description="Makes transformers Bayesian and shows whether that helped.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    main_parser.add_argument("--version", action="version", version=f"bayesformer {__version__}")
    verbs = main_parser.add_subparsers(dest="verb", metavar="verb", required=True)
    first = (_add_demo, _add_run, _add_report, _add_list, _add_predict, _add_generate, _add_study)
    for add in (*first, _add_data, _add_results, _add_reference):
        add(verbs)
    return main_parser


def _add_demo(verbs: Any) -> None:
    demo = verbs.add_parser(
        "demo",
        help="see what every method leaves open, on small data, as a report page",
        description="Fits a network to a curve with a gap in its data, where the true posterior is known, by SGHMC, "
        "variational inference, a Laplace approximation, an ensemble and ordinary training; and these (without "
        "variational inference), MC dropout and stochastic attention to scikit-learn's handwritten digits and to a toy "
        "series, with shorter training and fewer members than a benchmark would use. Prints a table per task and "
        "writes a self-contained report page, OUTPUT/report.html, that opens with the curve. "
        "Takes about four minutes on two cores. Call it again to resume.",
    )
    demo.add_argument("--output", type=Path, default=Path("demo"), help="folder for results and page (demo/)")
    demo.add_argument("--seeds", type=int, default=3, help="training seeds (3)")
    _add_workers(demo, None)


def _add_run(verbs: Any) -> None:
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
        'With start = "mle" a method starts from the networks of maximum likelihood of its seed, and gets a training\n'
        'of its own: {name = "swag", start = "mle", warm_up = 0.0, training = {epochs = 10}}.\n\n'
        "Options on the command line win over the file. `bayesformer list --settings` "
        "names every setting.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
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
        help="how the members of one cell run (auto: by their size; processes: with one cell at once, on --workers)",
    )
    run.add_argument(
        "--networks",
        type=Path,
        help="folder of trained networks: those that are there are not trained again, and new ones are added; "
        "`bayesformer study weights` fills it (none)",
    )
    run.add_argument("--no-posteriors", action="store_true", help="do not keep the posteriors")
    run.add_argument("--dry-run", action="store_true", help="only say which cells would run")
    _add_workers(run, 1)


def _add_report(verbs: Any) -> None:
    report = verbs.add_parser(
        "report",
        help="write the report page of a results folder",
        description="Reads every result in a folder, in folders below it, too, and writes one self-contained page: "
        "which method ranks first on each task, whether that is more than seed noise, and figures of its uncertainty. "
        "With --markdown or --choose it prints a table instead.",
    )
    report.add_argument("results", type=Path, help="results folder, e.g. runs/")
    report.add_argument("--output", type=Path, help="the page (RESULTS/report.html)")
    report.add_argument("--title", default="bayesformer report", help="title of the page")
    report.add_argument("--markdown", action="store_true", help="print one table over all tasks instead of a page")
    report.add_argument("--metric", help="with --markdown: the metric (gap to the oracle, or the task's primary)")
    report.add_argument(
        "--choose", metavar="SETTING", help="print validation scores of each value of a setting instead of a page"
    )


def _add_list(verbs: Any) -> None:
    listing = verbs.add_parser("list", help="tasks and methods, each with one line")
    listing.add_argument("--settings", action="store_true", help="also every setting with its default and meaning")


def _add_predict(verbs: Any) -> None:
    predict = verbs.add_parser(
        "predict",
        help="ask a saved posterior about a data file",
        description="Loads a posterior that `run` or `demo` kept and predicts every row of a data file. Toy series: "
        "rows of values. Digits: rows of 64 pixels from 0 to 16. Writes CSV.",
    )
    predict.add_argument("posterior", type=Path, help="a folder with posterior.json")
    predict.add_argument("data", type=Path, help="a .csv, .npy, .npz (key inputs) or .safetensors (key inputs) file")
    predict.add_argument("--output", type=Path, help="CSV file (standard output)")
    predict.add_argument("--draws", type=int, help="draws of the weights or of the noise (as many as the method says)")


def _add_results(verbs: Any) -> None:
    results = verbs.add_parser("results", help="keep stored results: one file per experiment")
    names = results.add_subparsers(dest="name", metavar="action", required=True)
    pack = names.add_parser(
        "pack",
        help="from a file per cell to one file of JSON lines",
        description="Moves FOLDER/TASK/METHOD-KEY/seedN.json to lines of FOLDER/NAME.jsonl, where NAME is the folder's "
        "name: sorted, one cell per line, nothing changed. Cells that were run since are added to the file; of two "
        "results of a cell the later one stays. `report`, `study` and `run` read files and lines alike, so nothing "
        "needs to be unpacked. Files that cannot be read are named and stay where they are.",
    )
    pack.add_argument("folders", nargs="+", type=Path, metavar="FOLDER", help="results folder, e.g. runs/")


def _add_data(verbs: Any) -> None:
    data = verbs.add_parser(
        "data",
        help="list, fetch and make data sets",
        description="Data are read from the folder that BAYESFORMER_DATA names, or else from the user's cache "
        "(BAYESFORMER_CACHE), which `get` and `make` fill. Every file is checked against a hash when it is fetched and "
        "when it is read.",
    )
    names = data.add_subparsers(dest="name", metavar="action", required=True)
    names.add_parser("list", help="data sets, and which are there")
    get = names.add_parser("get", help="fetch data sets from their official sources")
    get.add_argument("sets", nargs="+", metavar="NAME", help="mnist, fashion_mnist, ud_english, imdb, planetoid or all")
    make = names.add_parser(
        "make",
        help="make a data set that has no source",
        description="ambiguous_mnist: digits that are several digits at once, made of MNIST by the recipe of Mukhoti "
        "et al. (2021), a variational autoencoder and a filter by an ensemble; about ten minutes on one core.",
    )
    make.add_argument("sets", choices=["ambiguous_mnist", "ambiguous-mnist"], metavar="NAME", help="ambiguous_mnist")
    make.add_argument("--seed", type=int, default=0, help="of all randomness (0)")
    make.add_argument("--images", type=int, default=12_000, help="images in all (12000)")
    make.add_argument("--quiet", action="store_true", help="no progress bars or lines")


def _add_reference(verbs: Any) -> None:
    reference = verbs.add_parser(
        "reference",
        help="posteriors that are known: make, list and check them",
        description="Reference posteriors, in closed form or by long Hamiltonian Monte Carlo, against which the tasks "
        "fidelity/NAME score every method. They are files in the folder that BAYESFORMER_REFERENCES names, else in "
        "references/.",
    )
    names = reference.add_subparsers(dest="name", metavar="action", required=True)
    make = names.add_parser(
        "make",
        help="compute and store",
        description="Computes the reference posteriors of these problems and stores each as one file. A sampler that "
        "was interrupted resumes when called again. sentence-head needs BAYESFORMER_DATA and its encoder.",
    )
    listing = names.add_parser("list", help="all problems, and what is stored of them")
    listing.add_argument("--markdown", action="store_true", help="what is stored as one table")
    check = names.add_parser(
        "check",
        help="check what is stored",
        description="Closed forms are computed again. Of chains, R-hat of every function value is to be below 1.02; "
        "the weights that are kept must give the outputs that are kept. Returns 1 if anything is not so.",
    )
    make.add_argument("problems", nargs="+", metavar="NAME", help="names or patterns, e.g. gap-mlp 'linear-*'")
    make.add_argument("--workers", type=int, default=1, help="chains at once, in worker processes if more than 1 (1)")
    make.add_argument("--quiet", action="store_true", help="no progress bars or lines")
    check.add_argument("problems", nargs="*", metavar="NAME", help="names or patterns (all that are stored)")
    for action in (make, listing, check):
        action.add_argument("--folder", type=Path, help="folder of the references (see above)")


def _add_generate(verbs: Any) -> None:
    generate = verbs.add_parser(
        "generate",
        help="continue text with a posterior over a language model",
        description="Continues a prompt with a causal language model of transformers and a posterior over its weights "
        "or adapters. Each token comes from the probabilities averaged over draws; the more the draws disagree about "
        "it, the stronger it is coloured (grey, yellow, orange, red). A line below sums up the whole answer.",
    )
    generate.add_argument("model", help="folder of the base model and its tokenizer, as transformers saves them")
    generate.add_argument("prompt", help="the text to continue")
    generate.add_argument("--posterior", type=Path, required=True, help="folder of a saved posterior")
    generate.add_argument("--gguf", help="name of a GGUF file in the model's folder to read it from")
    generate.add_argument("--draws", type=int, help="draws of the weights (8, or all there are if fewer)")
    generate.add_argument("--max-new-tokens", type=int, default=64, help="tokens to write, at most (64)")
    generate.add_argument("--sample", action="store_true", help="draw tokens instead of taking the most probable one")
    generate.add_argument("--temperature", type=float, default=1.0, help="of drawn tokens (1)")
    generate.add_argument("--top-p", type=float, default=1.0, help="draw from tokens of this probability in all (1)")
    generate.add_argument("--seed", type=int, default=0, help="of the draws (0)")
    generate.add_argument("--html", type=Path, help="also write a page that shows every draw's alternatives at a tap")


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
    cold.add_argument("--forecast", action="store_true", help="print how long it will take, by a few steps, and stop")
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
    distance = names.add_parser(
        "fidelity",
        help="distance to the posterior against gradient evaluations",
        description="Reads stored results of the tasks fidelity/* and runs nothing. Draws one panel per problem: mean "
        "distance of function values to the reference posterior, in its standard deviations, against the gradient "
        "evaluations of the fit in epochs. Prints the same as tables in Markdown, with ratios of spreads by region.",
    )
    distance.add_argument("results", type=Path, help="results folder, e.g. results/fidelity")
    distance.add_argument("--output", type=Path, help="the figure (RESULTS/fidelity.svg)")
    distance.add_argument("--brief", action="store_true", help="one row per method instead of one table per problem")
    _add_language_studies(names)
    bars = names.add_parser(
        "bars",
        help="do one-line calls give the posterior?",
        description="Fits methods with nothing set to problems whose posterior is known, unless the file holds that "
        "already, and prints errors of means, ratios of standard deviations, whether the bar holds, and how many right "
        "and wrong fits doubted themselves.",
    )
    bars.add_argument("--problems", default="*", help="patterns of names, e.g. 'linear*,logistic*' (*)")
    bars.add_argument("--methods", default="*", help="patterns of names, e.g. 'sg*,laplace kron' (*)")
    bars.add_argument("--seeds", type=int, default=5, help="data sets and fits of each (5)")
    bars.add_argument("--output", type=Path, default=Path("results/bars/bars.json"), help="(results/bars/bars.json)")
    bars.add_argument("--add", type=Path, nargs="*", default=[], help="files of other runs whose rows are added first")
    bars.add_argument("--page", type=Path, help="a Markdown page whose lines between <!-- bars --> marks are replaced")
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
    _add_weights(names)
    _add_priors(names)
    _add_reproduce(names)
    _add_citations(names)
    _add_summary(names)


def _add_weights(names: Any) -> None:
    weights = names.add_parser(
        "weights",
        help="the weights of trained networks, and priors made of them",
        description="Trains independent networks on a task, or finds them in a folder of networks, where "
        "`bayesformer run --networks` finds them too: network i is member i mod 10 of the ensemble of seed i div 10. "
        "For every layer: the law that fits its weights best, by squared error to the histogram and by likelihood, "
        "degrees of freedom, modes, correlations, with bootstrap intervals over networks. Writes statistics as JSON, "
        "figures as SVG and the best-fitting laws as priors: `bayesformer run TASK --methods vi --config priors.toml`. "
        "Call it again to resume or extend.",
    )
    weights.add_argument("task", metavar="TASK", help="task name, e.g. toy/m1")
    weights.add_argument("--networks", type=int, default=60, metavar="N", help="networks (60)")
    weights.add_argument("--out", type=Path, help="the priors, a TOML file (RESULTS/TASK.toml)")
    weights.add_argument(
        "--results", type=Path, default=Path("results/weights"), help="statistics and figures (results/weights/)"
    )
    weights.add_argument("--folder", type=Path, help="folder of trained networks (networks/ in the user's cache)")
    weights.add_argument("--figures", type=Path, help="folder of the figures (RESULTS)")
    weights.add_argument(
        "--stored",
        action="store_true",
        help="draw stored statistics and write README.md beside the figures, without networks; TASK may be all",
    )
    weights.add_argument("--export", type=Path, help="also write the weights of all networks to this safetensors file")
    weights.add_argument("--train-only", action="store_true", help="train the networks that are missing, and no more")
    weights.add_argument("--set", action="append", default=[], metavar="GROUP.NAME=VALUE", help="of task or training")
    weights.add_argument("--threads", type=int, default=1, help="torch threads (1)")
    weights.add_argument("--quiet", action="store_true", help="no progress bars or lines")


def _add_priors(names: Any) -> None:
    priors = names.add_parser(
        "priors",
        help="the log-likelihood against the scale of the prior",
        description="Variational inference with Gaussian priors of several scales and, where `bayesformer study "
        "weights` has written its statistics, with the priors made of them. Runs the missing cells, draws "
        "RESULTS/priors.svg and prints a table.",
    )
    priors.add_argument("--tasks", default="toy/m3,toy/m5", help="comma-separated task names (toy/m3,toy/m5)")
    priors.add_argument("--seeds", type=int, default=3, help="training seeds (3)")
    priors.add_argument("--weights", type=Path, default=Path("results/weights"), help="statistics (results/weights/)")
    priors.add_argument("--results", type=Path, default=Path("results/priors"), help="results folder (results/priors/)")
    priors.add_argument("--networks", type=Path, help="folder of trained networks (none)")
    priors.add_argument("--set", action="append", default=[], metavar="GROUP.NAME=VALUE", help="a setting")
    _add_workers(priors, 1)


def _add_citations(names: Any) -> None:
    citations = names.add_parser(
        "citations",
        help="what the accuracy of a graph attention network depends on",
        description="Trains the baseline of `study graphs` many times by a plain loop, with seeds of its own for the "
        "start and for the dropout noise, and judges every run by four rules of stopping. Prints mean accuracies with "
        "their standard errors and paired differences. Runs that the file holds are not made again.",
    )
    citations.add_argument("--graph", default="citeseer", choices=["cora", "citeseer"], help="which graph (citeseer)")
    citations.add_argument("--runs", type=int, default=50, help="runs of every variant (50)")
    citations.add_argument(
        "--variants", default="tied", help="comma-separated: tied, noise 0, noise 1, start 0, torch (tied)"
    )
    citations.add_argument(
        "--output",
        type=Path,
        default=Path("results/citations/citations.json"),
        help="(results/citations/citations.json)",
    )


def _add_summary(names: Any) -> None:
    summary = names.add_parser(
        "summary",
        help="the tables that open README.md and docs/results.md",
        description="Writes, between the markers of both documents, which method won on every task, by how much and at "
        "what cost, from stored results. The winner is chosen by validation data.",
    )
    summary.add_argument(
        "--check", action="store_true", help="write nothing; returns 1 if a document is not up to date"
    )
    summary.add_argument("--results", type=Path, default=Path("results"), help="folder of the experiments (results/)")
    summary.add_argument("--page", type=Path, default=Path("docs/results.md"), help="(docs/results.md)")
    summary.add_argument("--readme", type=Path, default=Path("README.md"), help="(README.md)")


def _add_reproduce(names: Any) -> None:
    reproduce = names.add_parser(
        "reproduce",
        help="the whole study of Bayesian transformers",
        description="Runs what is missing of the study of Bayesian transformers: networks, priors made of them, "
        "choices on validation data, and every column of its tables on five series, part-of-speech tags and MNIST, in "
        "the order that fills the tables soonest; then writes its pages. Before it begins it measures a few steps of "
        "each kind of cell, and says with every cell how long the rest will take. Kill it, call it again: it goes on "
        "where it was.",
    )
    reproduce.add_argument(
        "--only", metavar="PATTERN", help="what a pattern of task and column matches: 'toy/m1*Laplace'"
    )
    reproduce.add_argument("--hours", type=float, help="begin no cell after this time")
    reproduce.add_argument("--forecast", action="store_true", help="print the plan with its hours, and stop")
    reproduce.add_argument("--report-only", action="store_true", help="write the pages of what is stored, run nothing")
    reproduce.add_argument("--figure", metavar="NUMBER", help="draw one figure of the thesis, such as 3.2, and stop")
    reproduce.add_argument(
        "--results", type=Path, default=Path("results/study"), help="results folder (results/study/)"
    )
    reproduce.add_argument(
        "--weights", type=Path, default=Path("results/weights"), help="statistics of weights (results/weights/)"
    )
    reproduce.add_argument("--networks", type=Path, help="folder of trained networks (networks/ in the user's cache)")
    reproduce.add_argument("--pages", type=Path, default=Path("docs/study"), help="folder of the pages (docs/study/)")
    reproduce.add_argument("--description", type=Path, help="a TOML file in the place of the study's own")
    _add_workers(reproduce, None)


def _add_workers(verb: argparse.ArgumentParser, default: int | None) -> None:
    text = "all cores" if default is None else str(default)
    verb.add_argument(
        "--workers", type=int, default=default, help=f"cells at once, in worker processes if more than 1 ({text})"
    )
    verb.add_argument("--threads", type=int, default=1, help="torch threads with one worker (1); several have one each")
    verb.add_argument("--quiet", action="store_true", help="no progress bars or lines")


def _add_language_studies(names: Any) -> None:
    continual = names.add_parser(
        "continual",
        help="books one after another: what online Laplace keeps",
        description="SmolLM2 learns four books one after another by low-rank adapters: plainly, with the posterior "
        "after each book as the prior of the next, each book alone, and all at once. Does the missing episodes, prints "
        "a table and draws RESULTS/continual.svg. Needs `make experiments` and books/ in BAYESFORMER_DATA. Call it "
        "again to resume.",
    )
    continual.add_argument(
        "--places", default="last,all", help="adapters in the last attention layer, in all (last,all)"
    )
    continual.add_argument("--seeds", type=int, default=3, help="training seeds (3)")
    unknown = names.add_parser(
        "unknown",
        help="does a language model know what it does not know?",
        description="SmolLM2 learns science text as one network, an ensemble and SGHMC chains, and is asked to go on "
        "with statements and with foreign prompts. Does what is missing, prints losses and AUROCs of total and "
        "epistemic uncertainty, and draws RESULTS/unknown.svg. Needs `make experiments`, squad/ and statements_en_sm/ "
        "in BAYESFORMER_DATA. Call it again to resume.",
    )
    unknown.add_argument(
        "--places", default="lora,last", help="adapters in all layers, the last attention layer (lora,last)"
    )
    ways = "base,ensemble,tuned,parallel,serial"
    unknown.add_argument("--ways", default=ways, help=f"what is compared ({ways})")
    glue = names.add_parser(
        "glue",
        help="tasks on a pretrained encoder: scores, and what lies outside",
        description="Reads stored results of experiments/glue.toml or experiments/pretrained.toml and runs nothing. "
        "Prints scores of every method, and how well total and epistemic uncertainty tell errors and rows of other "
        "data sets. Methods that could not run stand there with their error.",
    )
    glue.add_argument("results", type=Path, help="results folder, e.g. results/glue")
    for study, name in ((continual, "continual"), (unknown, "unknown")):
        study.add_argument(
            "--results", type=Path, default=Path("results") / name, help=f"results folder (results/{name}/)"
        )
        study.add_argument("--stored", action="store_true", help="run nothing: table and figure of what is stored")

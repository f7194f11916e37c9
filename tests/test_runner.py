"""The runner and the command line: only what is missing, nothing lost, errors that help."""

import csv
import hashlib
import io
import json
import math
import os
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import asdict, fields
from pathlib import Path

import numpy as np
import pytest
import torch

from bayesformer import cli
from bayesformer.bench import arguments, demo, runner, tasks
from bayesformer.bench.costs import TIMED, TIMES
from bayesformer.bench.packing import pack
from bayesformer.bench.planning import REMOVED, Cell, plan
from bayesformer.bench.predicting import load_posterior, read_rows
from bayesformer.bench.records import CHECKPOINTS, POSTERIORS, read_results
from bayesformer.bench.trial import Options
from bayesformer.core.settings import explain, parse_assignment
from bayesformer.core.storage import with_numbers, write_json
from bayesformer.methods import EVERY_METHOD, METHODS
from bayesformer.posterior import Posterior
from bayesformer.train.training import Training

ROOT = Path(__file__).parent.parent
TINY = {"training": {"epochs": 2}, "toy/*": {"train": 60, "validation": 20, "test": 50, "dim": 8}}
SETS = [
    "--set=training.epochs=2",
    "--set=toy/*.train=60",
    "--set=toy/*.test=50",
    "--set=toy/*.dim=8",
    "--set=ensemble.members=2",
]


def test_a_cell_is_one_json_line_with_everything_in_it(tmp_path):
    cells = plan(["toy/m1"], ["mle"], [0], TINY)
    outcome = runner.run(cells, Options(tmp_path))
    assert not outcome.failed
    (path,) = outcome.done
    lines = path.read_text().splitlines()
    assert len(lines) == 1
    result = json.loads(lines[0])
    assert result["settings"]["training"]["epochs"] == 2
    assert result["settings"]["task"]["dim"] == 8
    assert {"commit", "versions", "seed", "device", "cost", "metrics", "oracle", "started"} <= result.keys()
    assert {"fit_seconds", "predict_ms", "parameters", "peak_mib"} <= result["cost"].keys()
    assert result["oracle"]["gap"] == pytest.approx(
        result["metrics"]["log_likelihood"] - result["oracle"]["log_likelihood"]
    )
    assert result["oracle"]["gap"] < 0


def test_a_second_run_does_only_what_is_missing(tmp_path):
    first = runner.run(plan(["toy/m1"], ["mle"], [0], TINY), Options(tmp_path))
    stamp = first.done[0].stat().st_mtime_ns
    more = runner.run(plan(["toy/m1"], ["mle", "map"], [0, 1], TINY), Options(tmp_path))
    assert (len(more.done), more.skipped) == (3, 1)
    assert first.done[0].stat().st_mtime_ns == stamp
    assert len(read_results(tmp_path).results) == 4


def test_other_settings_are_other_cells():
    one = plan(["toy/m1"], ["map"], [0], TINY)[0]
    other = plan(["toy/m1"], ["map"], [0], {**TINY, "map": {"prior": "normal(0, 0.3)"}})[0]
    assert one.key != other.key
    assert other.variant == "prior=normal(0, 0.3)"
    assert one.variant == ""


def test_a_setting_that_came_later_changes_no_key_at_its_default():
    """Stored results of mean_field know nothing of `predictive`, nor of `max_steps` in training, and still count."""
    (cell,) = plan(["toy/m1"], ["mean_field"], [0], TINY)
    later = {"predictive", "predict_local", "samples", "max_steps", "evaluate_every", "precision", "buffers"}
    before, training = (
        {name: value for name, value in settings.items() if name not in later}
        for settings in (cell.method_settings, cell.training)
    )
    assert (before.keys(), training.keys()) != (cell.method_settings.keys(), cell.training.keys())
    facts = [cell.task, cell.method, cell.task_settings, training, before]
    assert cell.key == hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:8]
    (other,) = plan(["toy/m1"], [{"name": "mean_field", "predictive": "streamlined"}], [0], TINY)
    assert other.key != cell.key


class Epochs:
    """Listens to a run and keeps the cell and the member of every epoch that is begun."""

    def __init__(self):
        self.begun = []

    def update(self, task, done, total, note=""):
        if task != "cells" and done < total:
            self.begun.append(task)


def test_every_stored_cell_still_counts():
    """Its settings, completed by the defaults of those that came later, give the key it was stored under."""
    stored = [result for result in read_results(ROOT / "results").results if result["task"] in tasks.TASKS]
    assert len(stored) > 2000
    for result in stored:
        settings, name = result["settings"], result["method"]
        gone = settings["method"].keys() - {f.name for f in fields(EVERY_METHOD[name])}
        if gone:  # stored before these settings were removed
            assert {k: settings["method"][k] for k in gone} == REMOVED[name]
        chosen = {k: v for k, v in settings["method"].items() if k not in gone}
        task = {**asdict(tasks.TASKS[result["task"]]()), **settings["task"]}
        training = {**asdict(Training()), **settings["training"]}
        every = {**asdict(EVERY_METHOD[name]()), **chosen}
        cell = Cell(result["task"], name, result["seed"], task, training, every, settings.get("start"))
        assert cell.key == result["key"]


def test_a_stored_ensemble_is_not_run_again(capsys):
    command = ["run", "--config", str(ROOT / "experiments/weight_space.toml"), "--methods", "ensemble", "--dry-run"]
    assert cli.main([*command, "--results", str(ROOT / "results/weight_space")]) == 0
    assert "0 of " in capsys.readouterr().out


def test_variants_that_differ_after_training_are_trained_once(tmp_path):
    epochs = Epochs()
    table = {"name": "laplace", "structure": ["diag", "last_layer"], "predictive": "sampled", "draws": [2, 3]}
    cells = plan(["toy/m1"], [table, {"name": "laplace", "start": 2.0}], [0, 1], TINY)
    assert len({cell.trained_in for cell in cells}) == 2 * 2
    assert not runner.run(cells, Options(tmp_path / "together", keep_posteriors=False), epochs).failed
    assert len(epochs.begun) == 2 * 2 * 2  # two seeds, two starts, two epochs
    assert not any((tmp_path / "together" / CHECKPOINTS).rglob("*.safetensors"))
    runner.run(cells[:1], Options(tmp_path / "alone", keep_posteriors=False))
    one, two = (json.loads((tmp_path / name / cells[0].path).read_text()) for name in ("together", "alone"))
    assert one["metrics"] == two["metrics"]
    assert all(r["cost"]["fit_seconds"] > 0.01 for r in read_results(tmp_path / "together").results)  # training counted


@pytest.mark.filterwarnings("ignore::bayesformer.FidelityWarning")
@pytest.mark.parametrize("chains", ["auto", 2])
def test_chains_start_at_trained_networks(tmp_path, chains):
    cells = plan(["toy/m1"], [{"name": "sghmc", "start": "mle", "chains": chains, "draws": 4, "epochs": 40}], [0], TINY)
    assert not runner.run(cells, Options(tmp_path, keep_posteriors=False)).failed


@pytest.mark.parametrize("name", [name for name in METHODS if hasattr(METHODS[name], "AFTER_TRAINING")])
def test_settings_after_training_exist(name):
    assert set(METHODS[name].AFTER_TRAINING) <= {f.name for f in fields(METHODS[name])}


def test_a_task_may_have_training_of_its_own():
    settings = {"training": {"epochs": 7, "lr": 0.5}, "toy/*": {"training": {"epochs": 3}, "dim": 8}}
    cells = plan(["toy/m1", "digits"], ["mle"], [0], settings)
    assert {cell.task: (cell.training["epochs"], cell.training["lr"]) for cell in cells} == {
        "toy/m1": (3, 0.5),
        "digits": (7, 0.5),
    }
    assert "training" not in cells[0].task_settings


def test_one_cell_of_a_shared_training_goes_first():
    table = {"name": "vi", "draws": [1, 2, 3]}
    cells = plan(["toy/m1", "toy/m2"], [table, "ensemble", "mle"], [0], TINY)
    order = [(cell.task, cell.method, cell.method_settings.get("draws")) for cell in runner.in_order(cells)]
    assert [method for _, method, _ in order[:2]] == ["ensemble"] * 2
    assert [draws for _, method, draws in order if method == "vi"] == [1, 1, 2, 2, 3, 3]


def test_prediction_is_timed_warm_on_a_fixed_number_of_examples(tmp_path, monkeypatch):
    asked = []
    real = Posterior.predict
    monkeypatch.setattr(
        Posterior, "predict", lambda self, x, *a, **k: (asked.append(len(x)), real(self, x, *a, **k))[1]
    )
    settings = {**TINY, "toy/*": {**TINY["toy/*"], "test": 200}}
    (path,) = runner.run(plan(["toy/m1"], ["mle"], [0], settings), Options(tmp_path)).done
    assert asked == [200, 20] + [TIMED] * (1 + TIMES)  # test, validation, then warm-up and repeats
    assert json.loads(path.read_text())["cost"]["predict_ms"] > 0


def test_worker_processes_give_the_same_metrics(tmp_path):
    cells = plan(["toy/m1", "toy/m4"], ["mle", "ensemble"], [0], {**TINY, "ensemble": {"members": 2}})
    runner.run(cells, Options(tmp_path / "a"))
    runner.run(cells, Options(tmp_path / "b", workers=2))
    for cell in cells:
        one, two = (json.loads((tmp_path / name / cell.path).read_text()) for name in "ab")
        assert one["metrics"] == pytest.approx(two["metrics"], rel=1e-5)


def test_a_failed_cell_is_kept_aside_and_the_others_go_on(tmp_path, monkeypatch):
    real = tasks.ToySeries.evaluate

    def leaky(self, ask, data):
        evaluation = real(self, ask, data)
        return evaluation._replace(gap=evaluation.gap._replace(mean=1.0, standard_error=0.1, z=10.0))

    cells = plan(["toy/m1", "digits"], ["mle"], [0], {"training": {"epochs": 1}, "toy/*": TINY["toy/*"]})
    monkeypatch.setattr(tasks.ToySeries, "evaluate", leaky)
    outcome = runner.run(cells, Options(tmp_path))
    assert len(outcome.done) == 1
    ((cell, problem),) = outcome.failed
    assert "above the true process" in problem
    assert "OracleBeatenError" in json.loads((tmp_path / "failed" / cell.path).read_text())["traceback"]
    assert len(read_results(tmp_path).results) == 1
    monkeypatch.setattr(tasks.ToySeries, "evaluate", real)  # mended: the cell runs, the failure goes
    assert len(runner.run(cells, Options(tmp_path)).done) == 1
    assert not (tmp_path / "failed" / cell.path).exists()


def test_variants_of_a_method_and_where_they_run():
    table = {"name": "vi", "temperature": [1.0, 0.1], "prior": ["normal(0, 1)", "improved/{task}"], "seeds": 1}
    cells = plan(["toy/m1", "toy/m2"], ["mle", {**table, "tasks": "toy/m2"}, "vi"], [0, 1], TINY)
    assert sorted((c.task, c.method, c.seed) for c in cells if c.method == "mle") == [
        (task, "mle", seed) for task in ("toy/m1", "toy/m2") for seed in (0, 1)
    ]
    ours = [c for c in cells if c.method == "vi"]
    # On m1 the plain method with two seeds; on m2 four variants with one, of which the plain one has two.
    assert sum(c.task == "toy/m1" for c in ours) == 2
    priors = {(c.method_settings["temperature"], c.method_settings["prior"]) for c in ours if c.task == "toy/m2"}
    assert priors == {(t, p) for t in (1.0, 0.1) for p in ("normal(0, 1)", "improved/m2")}
    assert sum(c.task == "toy/m2" for c in ours) == 5
    for wrong, text in [
        ({"temperature": 1.0}, "names or tables with a name"),
        ({"name": "vi", "seeds": 0}, "seeds of vi must be a whole number"),
        ({"name": "vi", "tasks": "tox/*"}, "unknown task 'tox/\\*'"),
        ({"name": "vi", "temprature": 1.0}, "unknown setting of vi 'temprature'"),
    ]:
        with pytest.raises(ValueError, match=text):
            plan(["toy/m1"], [wrong], [0], TINY)


def test_a_killed_run_resumes_to_the_same_result(tmp_path):
    settings = {"training": {"epochs": 60, "patience": 0}, "toy/*": TINY["toy/*"]}
    cells = plan(["toy/m1"], ["mle"], [0, 1], settings)
    runner.run(cells, Options(tmp_path / "whole"))
    program = (
        "import torch; torch.set_num_threads(1)\n"
        "from pathlib import Path\n"
        "from bayesformer.bench import runner\n"
        "from bayesformer.bench.planning import plan\n"
        "from bayesformer.bench.trial import Options\n"
        f"cells = plan(['toy/m1'], ['mle'], [0, 1], {settings!r})\n"
        f"runner.run(cells, Options(Path({str(tmp_path / 'killed')!r}), checkpoint_seconds=0))\n"
    )
    checkpoint = tmp_path / "killed" / CHECKPOINTS / cells[0].folder
    process = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT)
    while not checkpoint.exists() and process.poll() is None:
        time.sleep(0.01)
    time.sleep(0.3)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "killed" / cells[1].path).exists()  # it was stopped in the middle
    runner.run(cells, Options(tmp_path / "killed"))
    for cell in cells:
        one, two = (json.loads((tmp_path / name / cell.path).read_text()) for name in ("whole", "killed"))
        assert one["metrics"] == two["metrics"]
        assert one["figures"] == two["figures"]
    assert not checkpoint.exists()


class DeadlyWork(runner.CellWork):
    """Work on cells in which those of toy/m2 kill the process they run in."""

    def __call__(self, cell, reporter):
        if cell.task == "toy/m2":
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__call__(cell, reporter)


def deadly_run(folder, results):
    """Run four cells with two workers, of which those of toy/m2 kill their worker."""
    program = (
        "import sys\n"
        "from bayesformer import cli\n"
        "from bayesformer.bench import runner\n"
        "from tests.test_runner import DeadlyWork, SETS\n"
        "if __name__ == '__main__':\n"
        "    runner.CellWork = DeadlyWork\n"
        "    run = ['run', 'toy/m1', 'toy/m2', '--methods', 'mle', '--seeds', '2', '--workers', '2', *SETS]\n"
        f"    sys.exit(cli.main([*run, '--no-posteriors', '--results', {str(results)!r}]))\n"
    )
    script = folder / "deadly.py"
    script.write_text(program)
    return subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )


def test_a_killed_worker_fails_its_cell_and_the_others_go_on(tmp_path, capsys):
    ended = deadly_run(tmp_path, tmp_path / "runs")
    assert ended.returncode == 1
    assert "2 cells run, 0 were there already" in ended.stdout
    stored = read_results(tmp_path / "runs").results
    assert {(r["task"], r["seed"]) for r in stored} == {("toy/m1", 0), ("toy/m1", 1)}
    failed = [line for line in ended.stderr.splitlines() if line.startswith("FAILED")]
    assert len(failed) == 2
    assert all("toy/m2 mle seed" in line and "WorkerDiedError: a worker process died" in line for line in failed)
    aside = [json.loads(path.read_text()) for path in (tmp_path / "runs" / "failed").rglob("seed*.json")]
    assert [(each["task"], "signal SIGKILL" in each["error"]) for each in aside] == [("toy/m2", True)] * 2
    again = ["run", "toy/m1", "toy/m2", "--methods", "mle", "--seeds", "2", "--results", str(tmp_path / "runs"), *SETS]
    threads = torch.get_num_threads()
    assert cli.main([*again, "--no-posteriors", "--threads", str(threads + 1)]) == 0
    assert torch.get_num_threads() == threads  # the process that calls main keeps its own
    assert "2 cells run, 2 were there already" in capsys.readouterr().out


def test_ctrl_c_stops_two_workers_at_once(tmp_path):
    """The terminal sends it to all processes of the group."""
    many = ["--set=training.epochs=100000", *SETS[1:]]
    command = ["run", "toy/m1", "--methods", "mle", "--seeds", "6", "--workers", "2", "--results", str(tmp_path), *many]
    process = subprocess.Popen(
        [sys.executable, "-m", "bayesformer", *command],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    begun = time.monotonic()
    while len(list((tmp_path / CHECKPOINTS).rglob("*.safetensors"))) < 2:  # both workers train
        assert process.poll() is None
        assert time.monotonic() - begun < 120
        time.sleep(0.1)
    trained = {path.parent for path in (tmp_path / CHECKPOINTS).rglob("*.safetensors")}
    pressed = time.monotonic()
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert time.monotonic() - pressed < 10
    assert process.returncode == 130
    assert "interrupted; finished results are kept, call again to resume." in errors
    assert {path.parent for path in (tmp_path / CHECKPOINTS).rglob("*.safetensors")} == trained  # nothing was begun


def test_a_damaged_checkpoint_says_what_to_delete(tmp_path):
    (cell,) = plan(["toy/m1"], ["mle"], [0], TINY)
    folder = tmp_path / CHECKPOINTS / cell.trained_in
    folder.mkdir(parents=True)
    names = checkpoints_of(cell, tmp_path / "elsewhere")
    assert names
    for name in names:
        (folder / name).write_bytes(b"damaged")
    ((_, problem),) = runner.run([cell], Options(tmp_path)).failed
    assert f"checkpoint {folder}" in problem
    assert f"Delete the checkpoints in {folder} and run again: the cell is then trained anew." in problem
    for name in names:
        (folder / name).unlink()
    assert not runner.run([cell], Options(tmp_path)).failed


def checkpoints_of(cell, folder):
    """Names of the checkpoint files that training the cell writes; they stay if the cell fails afterwards."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tasks.ToySeries, "evaluate", lambda self, ask, data: 1 / 0)
        runner.run([cell], Options(folder, keep_posteriors=False))
    return {path.name for path in (folder / CHECKPOINTS / cell.trained_in).glob("*.safetensors")}


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["run", "toy/m6"], "unknown task 'toy/m6'. Did you mean 'toy/m"),
        (["run", "toy/m1", "--methods", "mlee"], "unknown method 'mlee'. Did you mean 'mle'?"),
        (["run", "toy/m1", "--set", "training.epoch=3"], "unknown setting of training 'epoch'. Did you mean 'epochs'?"),
        (["run", "toy/m1", "--set", "training.epochs=many"], "training.epochs must be int; got 'many'"),
        (["run", "toy/m1", "--set", "training.epochs=0"], "training.epochs must be a whole number, at least 1; got 0"),
        (
            ["run", "toy/m1", "--set", "trainin.epochs=3"],
            "unknown group of settings 'trainin'. Did you mean 'training'?",
        ),
        (["run", "toy/m1", "--set", "epochs=3"], "a setting must read like training.epochs=20"),
        (["run", "toy/m1", "--seeds", "0"], "seeds must be a whole number of at least 1; got 0"),
        (["run", "toy/m1", "--workers", "0"], "--workers must be at least 1; got 0"),
        (["run"], "tasks must be given"),
        (
            ["run", "toy/m1", "--methods", "mle", "--set", "mle.members=3"],
            "unknown setting of mle 'members'; there is none.",
        ),
        (["run", "toy/m1", "--methods", ""], "unknown method ''"),
        (["run", "toy/m1", "--set", "training.epochs=2.5"], "training.epochs must be int; got 2.5"),
        (
            ["run", "toy/m1", "--set", "training.batch_size=0"],
            "training.batch_size must be a whole number, at least 1; got 0",
        ),
        (["run", "toy/m1", "--config", "."], "config . must be a TOML file; it is a folder."),
        (["run", "toy/m1", "--config", "/nowhere.toml"], "config /nowhere.toml does not exist."),
        (["demo", "--workers", "0"], "--workers must be at least 1; got 0"),
        (["demo", "--seeds", "0"], "seeds must be a whole number of at least 1; got 0"),
        (["report", "results/ekf", "--output", "tests"], "--output must be a file; tests is a folder."),
        (["study", "cost", "results/laplace", "--output", "tests"], "--output must be a file; tests is a folder."),
        (["predict", "x", "y.csv", "--output", "tests"], "--output must be a file; tests is a folder."),
        (["predict", "README.md", "y.csv"], "posterior README.md/posterior.json cannot be read: Not a directory."),
        (
            ["report", "results/ekf", "--choose", "zzz"],
            "unknown setting of the methods in these results 'zzz'. Known: draws",
        ),
        (["report", "results/ekf", "--choose", "draws"], "setting 'draws' must have several values in the runs of one"),
        (["report", "results/ekf", "--metric", "crps"], "--metric goes with --markdown; a page shows every metric."),
        (["report", "/nowhere"], "results folder /nowhere does not exist"),
        (["predict", "/nowhere", "x.csv"], "does not exist"),
    ],
)
def test_the_command_line_explains_mistakes(arguments, text, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert cli.main(arguments) == 2
    assert text in capsys.readouterr().err


def test_run_report_and_predict_from_the_command_line(tmp_path, capsys):
    results = str(tmp_path / "runs")
    arguments = ["run", "toy/m1", "--methods", "mle,ensemble", "--seeds", "2", "--results", results, *SETS]
    assert cli.main([*arguments, "--dry-run"]) == 0
    assert "4 of 4 cells would run" in capsys.readouterr().out
    assert cli.main(arguments) == 0
    out = capsys.readouterr().out
    assert "ensemble" in out
    assert "4 cells run, 0 were there already" in out
    assert cli.main(["report", results, "--output", str(tmp_path / "page.html")]) == 0
    assert "toy/m1" in (tmp_path / "page.html").read_text()
    capsys.readouterr()

    posterior = next((tmp_path / "runs" / "posteriors").rglob("posterior.json")).parent
    data = tmp_path / "series.csv"
    data.write_text("a,b,c\n0.1,0.2,0.3\n1,2,3\n")
    assert cli.main(["predict", str(posterior), str(data)]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert len(rows) == 6
    assert rows[0].keys() == {"example", "position", "mean", "sd", "total", "aleatoric", "epistemic"}
    assert float(rows[0]["total"]) == pytest.approx(float(rows[0]["sd"]) ** 2, rel=1e-4)
    assert cli.main(["predict", str(posterior), str(data), "--output", str(tmp_path / "out.csv")]) == 0
    assert (tmp_path / "out.csv").read_text().startswith("example,position,mean")
    capsys.readouterr()
    data.write_text("0.1,0.2,0.3\n1,1e30,3\n")
    assert cli.main(["predict", str(posterior), str(data)]) == 2
    captured = capsys.readouterr()
    assert "the prediction of row 2 is not a finite number: the row holds values of up to 1e+30, too" in captured.err
    assert captured.out == ""


def test_a_configuration_file(tmp_path, capsys):
    config = tmp_path / "c.toml"
    config.write_text(
        'tasks = ["toy/m1"]\nmethods = ["mle"]\nseeds = 3\n[training]\nepochs = 2\n["toy/m1"]\ntest = 50\ndim = 8\n'
    )
    assert cli.main(["run", "--config", str(config), "--dry-run", "--results", str(tmp_path)]) == 0
    assert "3 of 3 cells" in capsys.readouterr().out
    assert cli.main(["run", "--config", str(config), "--dry-run", "--seeds", "1", "--results", str(tmp_path)]) == 0
    assert "1 of 1 cells" in capsys.readouterr().out
    config.write_text("tasks = [")
    assert cli.main(["run", "--config", str(config)]) == 2
    assert "is not valid TOML" in capsys.readouterr().err
    config.write_text('tasks = ["toy/m1"]\nepochs = 3\n')
    assert cli.main(["run", "--config", str(config)]) == 2
    assert "unknown entry of the configuration 'epochs'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"training = 3", "training in the configuration must be a table of settings, [training]; got 3."),
        (b"seeds = true", "seeds must be a whole number of at least 1; got True."),
        (b"methods = []", "methods must name at least one that runs on toy/m1; got []."),
        (b"methods = [{name='vi', tasks='digits'}]", "methods must name at least one that runs on toy/m1; got [{"),
        (
            b"methods = [{name='vi', temperature=[]}]",
            "methods: temperature of vi must list at least one value; got [].",
        ),
        (
            b"methods = [{name='vi', seeds=true}]",
            "methods: seeds of vi must be a whole number of at least 1; got True.",
        ),
        (b"seeds = '\xff'", "c.toml is not valid TOML: 'utf-8' codec can't decode byte"),
    ],
)
def test_mistakes_in_a_configuration_file(content, text, tmp_path, capsys):
    config = tmp_path / "c.toml"
    config.write_bytes(b'tasks = ["toy/m1"]\n' + content + b"\n")
    assert cli.main(["run", "--config", str(config), "--dry-run"]) == 2
    assert text in capsys.readouterr().err


def test_a_reader_that_goes_away_is_no_error():
    """As in `bayesformer list --settings | head -1`."""
    process = subprocess.Popen(
        [sys.executable, "-m", "bayesformer", "report", "results/weight_space", "--markdown"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    process.stdout.close()
    assert process.stderr.read() == ""
    process.stderr.close()
    assert process.wait() == 141


def test_options_refuse_no_workers(tmp_path):
    for workers in (0, -1, 1.5, True):
        with pytest.raises(ValueError, match=f"workers must be a whole number of at least 1; got {workers}"):
            Options(tmp_path, workers=workers)


def test_an_infinite_setting_is_recorded_and_read_back(tmp_path, capsys):
    arguments = ["run", "toy/m1", "--methods", "mle,map", "--results", str(tmp_path), *SETS, "--set=training.clip=inf"]
    assert cli.main(arguments) == 0
    assert "2 cells run, 0 were there already" in capsys.readouterr().out
    (mle,) = tmp_path.glob("toy-m1/mle-*/seed0.json")
    assert '"clip": "inf"' in mle.read_text()
    json.loads(mle.read_text(), parse_constant=pytest.fail)  # no Infinity, which JSON does not have
    pack(tmp_path)
    assert [r["settings"]["training"]["clip"] for r in read_results(tmp_path).results] == [math.inf] * 2
    assert cli.main(arguments) == 0
    assert "0 cells run, 2 were there already" in capsys.readouterr().out
    assert cli.main(["report", str(tmp_path)]) == 0


def test_a_score_that_is_not_a_number_loses_no_cell(tmp_path, monkeypatch):
    real = tasks.ToySeries.evaluate

    def strange(self, ask, data):
        evaluation = real(self, ask, data)
        evaluation.metrics.update(crps=math.nan, rmse=math.inf, process_mse=-math.inf)
        return evaluation

    monkeypatch.setattr(tasks.ToySeries, "evaluate", strange)
    outcome = runner.run(plan(["toy/m1"], ["mle"], [0], TINY), Options(tmp_path))
    assert not outcome.failed
    metrics = read_results(tmp_path).results[0]["metrics"]
    assert math.isnan(metrics["crps"])
    assert (metrics["rmse"], metrics["process_mse"]) == (math.inf, -math.inf)
    assert cli.main(["report", str(tmp_path)]) == 0
    assert cli.main(["report", str(tmp_path), "--markdown", "--metric", "crps"]) == 0


def test_texts_stand_for_numbers_that_json_lacks(tmp_path):
    value = {"a": [1.0, math.inf, {"b": -math.inf}], "c": (2, "x"), "d": None}
    write_json(tmp_path / "x.json", value)
    stored = json.loads((tmp_path / "x.json").read_text())
    assert stored == {"a": [1.0, "inf", {"b": "-inf"}], "c": [2, "x"], "d": None}
    assert with_numbers(stored) == {**value, "c": [2, "x"]}
    write_json(tmp_path / "y.json", math.nan)
    assert math.isnan(with_numbers(json.loads((tmp_path / "y.json").read_text())))


def test_what_cannot_be_recorded_is_refused_before_training(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(runner, "run_cell", pytest.fail)
    wrong = ["run", "toy/m1", "--methods", "combined", "--results", str(tmp_path), "--set"]
    assert cli.main([*wrong, "combined.attention={spread = 2026-01-01}"]) == 2
    text = (
        "combined.attention must be made of numbers, texts, lists and tables, to be recorded; got {'spread': datetime"
    )
    assert text in capsys.readouterr().err
    (tmp_path / "file").write_text("")
    assert cli.main(["run", "toy/m1", "--methods", "mle", "--results", str(tmp_path / "file")]) == 2
    assert "file must be a folder one can write to: File exists." in capsys.readouterr().err


def test_a_result_that_cannot_be_written_fails_its_cell_alone_and_is_not_trained_again(tmp_path, monkeypatch):
    cells = plan(["toy/m1", "toy/m4"], ["mle"], [0], TINY)
    real, full = runner.write_json, [cells[0].path]

    def write(path, value):
        if any(path.is_relative_to(tmp_path) and path.parts[-3:] == cell.parts for cell in full):
            raise OSError(28, "No space left on device")
        real(path, value)

    monkeypatch.setattr(runner, "write_json", write)
    outcome = runner.run(cells, Options(tmp_path, keep_posteriors=False))
    ((cell, problem),) = outcome.failed
    assert (cell, len(outcome.done)) == (cells[0], 1)
    assert "No space left on device (its error could not be written to a file: No space left on device)" in problem
    full.clear()
    epochs = Epochs()
    assert not runner.run(cells, Options(tmp_path, keep_posteriors=False), epochs).failed
    assert not epochs.begun  # the checkpoint of the whole training was there


def test_list_names_every_task_method_and_setting(capsys):
    assert cli.main(["list", "--settings"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in [*tasks.TASKS, *METHODS])
    assert all(text for _, _, text in explain(Training))
    assert all(text for kind in METHODS.values() for _, _, text in explain(kind))


def test_help_of_every_verb(capsys):
    for verb in ["demo", "run", "report", "list", "predict", "study", "results", "reference"]:
        with pytest.raises(SystemExit) as stop:
            cli.main([verb, "--help"])
        assert stop.value.code == 0
    assert "usage: bayesformer predict" in capsys.readouterr().out


def test_the_readme_and_the_help_show_the_same_commands():
    block = (ROOT / "README.md").read_text().split("## The command")[1].split("```")[1]
    readme, helped = (
        [line.split("#")[0].strip() for line in text.splitlines() if line.strip().startswith("bayesformer ")]
        for text in (block, arguments.EPILOG)
    )
    assert readme == helped
    verbs = set()
    for command in readme:
        verbs.add(arguments.parser().parse_args(shlex.split(command)[1:]).verb)  # an unknown option would exit
    assert all(f"\n    {verb}" in arguments.parser().format_help() for verb in verbs)
    assert verbs == {"demo", "run", "report", "list", "predict", "study", "data", "results", "reference", "generate"}


@pytest.mark.parametrize("method", METHODS)
def test_the_stored_posterior_of_every_method_predicts_as_it_did(method, tmp_path, capsys):
    """Loaded on the plain model: what a method wraps or installs comes back with it, and so do the scores."""
    training = {"epochs": 2, "batch_size": 1}  # small batches make enough steps for the draws of a chain
    short = {"draws": 2, "chains": 1, "warm_up": 3} if method in ("hmc", "nuts") else {}
    (cell,) = plan(["toy/m1"], [method], [0], {**TINY, "training": training, method: short})
    assert not runner.run([cell], Options(tmp_path)).failed
    folder = tmp_path / POSTERIORS / cell.folder
    task, posterior = load_posterior(folder)
    again = task.evaluate(posterior.predict, task.load()).metrics
    stored = read_results(tmp_path).results[0]
    assert again == pytest.approx({name: stored["metrics"][name] for name in again}, rel=1e-4)
    assert stored["fit"].keys() == {"epochs", "best_epoch", "strategy", "init", "converged"}
    (tmp_path / "series.csv").write_text("0.1,0.2,0.3\n1,2,3\n")
    assert cli.main(["predict", str(folder), str(tmp_path / "series.csv")]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    found = posterior.predict(task.inputs(torch.tensor([[0.1, 0.2, 0.3], [1.0, 2.0, 3.0]])))
    assert [float(row["mean"]) for row in rows] == pytest.approx(found.mean.flatten().tolist(), rel=1e-4, abs=1e-5)


def test_demo_shows_a_known_posterior_digits_and_a_series_with_its_oracle():
    cells = demo.cells([0, 1])
    shown = {task: {c.method for c in cells if c.task == task} for task in {c.task for c in cells}}
    everywhere = {"mle", "ensemble", "laplace", "sghmc"}
    assert shown == {
        "fidelity/gap-mlp": everywhere | {"vi", "attention"},
        "digits": everywhere | {"mc_dropout", "attention"},
        "toy/m1": everywhere | {"mc_dropout", "attention"},
    }
    assert len({(c.task, c.method, c.seed) for c in cells}) == len(cells) == 36
    (curve,) = (c for c in cells if (c.task, c.method, c.seed) == ("fidelity/gap-mlp", "laplace", 0))
    assert curve.method_settings["prior_precision"] == 1.0  # the posterior that is known has this prior
    assert curve.build()[0].reference.regions == ["in", "gap", "out"]  # stored, of this version
    networks = {c.method: c.task_settings["network"] for c in cells if c.task == "fidelity/gap-mlp"}
    assert {method for method, network in networks.items() if network == "attention"} == {"attention"}


def test_data_files(tmp_path):
    rows = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    np.save(tmp_path / "a.npy", rows.numpy())
    np.savez(tmp_path / "a.npz", inputs=rows.numpy(), other=np.zeros(3))
    (tmp_path / "a.csv").write_text("1,2\n3,4\n")
    from safetensors.torch import save_file

    save_file({"inputs": rows}, tmp_path / "a.safetensors")
    for name in ["a.npy", "a.npz", "a.csv", "a.safetensors"]:
        assert torch.equal(read_rows(tmp_path / name), rows)
    (tmp_path / "mark.csv").write_bytes(b"\xef\xbb\xbf1,2\n3,4\n")  # as spreadsheets write it
    assert torch.equal(read_rows(tmp_path / "mark.csv"), rows)
    (tmp_path / "head.csv").write_bytes(b"\xef\xbb\xbf,b\n1,2\n3,4\n")  # an empty name in the header
    assert torch.equal(read_rows(tmp_path / "head.csv"), rows)
    np.savez(tmp_path / "whole.npz", inputs=rows.numpy())
    whole = (tmp_path / "whole.npz").read_bytes()
    for name, content in {"cut.npz": whole[:-30], "flip.npz": whole.replace(b"\x80?", b"\x81?", 1)}.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=f"data file .*{name} cannot be read"):
            read_rows(tmp_path / name)
    np.save(tmp_path / "words.npy", np.array([["a", "b"]]))
    with pytest.raises(ValueError, match="words.npy must hold numbers; got an array of <U1"):
        read_rows(tmp_path / "words.npy")
    with pytest.raises(ValueError, match="must be a file; it is a folder or a device"):
        read_rows(tmp_path)
    (tmp_path / "latin.csv").write_bytes(b"1,2\n3,\xe4\n")
    with pytest.raises(ValueError, match="data file .*latin.csv is not text in UTF-8: 'utf-8' codec can't decode"):
        read_rows(tmp_path / "latin.csv")
    bad = {
        "empty.csv": (",2\n3,4\n", r"line 1: '' must be a number"),
        "mixed.csv": ("x,2\n3,4\n", r"line 1: 'x' must be a number"),
        "infinite.csv": ("1,2\n3,inf\n", r"row 2 must hold finite numbers of float32; got inf"),
        "huge.csv": ("1,2\n1e60,4\n", r"row 2 must hold finite numbers of float32; got 1e\+60"),
        "b.csv": ("1,2\n3\n", r"rows of one length; got \[1, 2\]"),
        "c.csv": ("1,2\n3,x\n", r"line 2: 'x' must be a number"),
        "d.txt": ("1", "must end in .csv"),
        "e.csv": ("", "must hold rows of numbers"),
        "f.npy": ("junk", "cannot be read"),
    }
    for name, (content, text) in bad.items():
        (tmp_path / name).write_text(content)
        with pytest.raises(ValueError, match=text):
            read_rows(tmp_path / name)


def test_digits_rows_are_scaled_like_the_training_images():
    task = tasks.TASKS["digits"]()
    data = task.load()
    from sklearn.datasets import load_digits

    raw = torch.tensor(load_digits().images[:5], dtype=torch.float32)
    scaled = task.inputs(raw.reshape(5, 64))
    everything = torch.cat([data.train.inputs, data.validation.inputs, data.test.inputs])
    assert all((everything - image).abs().amax((1, 2, 3)).min() < 1e-5 for image in scaled)
    with pytest.raises(ValueError, match="must have 64 pixels; got rows of shape"):
        task.inputs(torch.zeros(2, 63))


def test_assignments_are_toml_values():
    assert parse_assignment("training.lr=1e-3") == (["training", "lr"], 1e-3)
    assert parse_assignment("mc_dropout.rate=none") == (["mc_dropout", "rate"], None)
    assert parse_assignment("map.prior=normal(0, 1)") == (["map", "prior"], "normal(0, 1)")
    assert parse_assignment("toy/m1.test=10") == (["toy/m1", "test"], 10)


def test_none_in_a_file_of_settings_is_none_where_the_setting_takes_no_text():
    (cell,) = plan(["glue/sst2"], [{"name": "mc_dropout", "rate": "none"}], [0])
    assert cell.method_settings["rate"] is None
    with pytest.raises(ValueError, match="mc_dropout.draws must be int; got 'none'"):
        plan(["glue/sst2"], [{"name": "mc_dropout", "draws": "none"}], [0])

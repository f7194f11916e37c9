"""The runner and the command line: only what is missing, nothing lost, errors that help."""

import csv
import hashlib
import io
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
import torch

from bayesformer import cli
from bayesformer.bench import demo, runner, tasks
from bayesformer.bench.predicting import read_rows
from bayesformer.core.errors import DamagedFileError
from bayesformer.core.settings import explain, parse_assignment
from bayesformer.posterior import Posterior
from bayesformer.train import loop as training_loop
from bayesformer.train.loop import Training

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
    cells = runner.plan(["toy/m1"], ["mle"], [0], TINY)
    outcome = runner.run(cells, runner.Options(tmp_path))
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
    first = runner.run(runner.plan(["toy/m1"], ["mle"], [0], TINY), runner.Options(tmp_path))
    stamp = first.done[0].stat().st_mtime_ns
    more = runner.run(runner.plan(["toy/m1"], ["mle", "map"], [0, 1], TINY), runner.Options(tmp_path))
    assert (len(more.done), more.skipped) == (3, 1)
    assert first.done[0].stat().st_mtime_ns == stamp
    assert len(runner.load_results(tmp_path)) == 4


def test_other_settings_are_other_cells():
    one = runner.plan(["toy/m1"], ["map"], [0], TINY)[0]
    other = runner.plan(["toy/m1"], ["map"], [0], {**TINY, "map": {"prior": "normal(0, 0.3)"}})[0]
    assert one.key != other.key
    assert runner._variant(other) == "prior=normal(0, 0.3)"
    assert runner._variant(one) == ""


def test_a_setting_that_came_later_changes_no_key_at_its_default():
    """Stored results of mean_field know nothing of `predictive`, and still count."""
    (cell,) = runner.plan(["toy/m1"], ["mean_field"], [0], TINY)
    before = {name: value for name, value in cell.method_settings.items() if name != "predictive"}
    facts = [cell.task, cell.method, cell.task_settings, cell.training, before]
    assert cell.key == hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:8]
    (other,) = runner.plan(["toy/m1"], [{"name": "mean_field", "predictive": "streamlined"}], [0], TINY)
    assert other.key != cell.key


def test_variants_that_differ_after_training_are_trained_once(tmp_path, monkeypatch):
    steps = []
    real = training_loop._save
    monkeypatch.setattr(training_loop, "_save", lambda *args: (steps.append(args), real(*args)))
    table = {"name": "laplace", "structure": ["diag", "last_layer"], "predictive": "sampled", "draws": [2, 3]}
    cells = runner.plan(["toy/m1"], [table, {"name": "laplace", "start": 2.0}], [0, 1], TINY)
    assert len({cell.trained_in for cell in cells}) == 2 * 2
    assert not runner.run(cells, runner.Options(tmp_path / "together", keep_posteriors=False)).failed
    assert len(steps) == 2 * 2  # one checkpoint at the end of every training: two seeds, two starts
    assert not any((tmp_path / "together" / runner.CHECKPOINTS).rglob("*.safetensors"))
    runner.run(cells[:1], runner.Options(tmp_path / "alone", keep_posteriors=False))
    one, two = (json.loads((tmp_path / name / cells[0].path).read_text()) for name in ("together", "alone"))
    assert one["metrics"] == two["metrics"]
    assert all(r["cost"]["fit_seconds"] > 0.01 for r in runner.load_results(tmp_path / "together"))  # training counted


@pytest.mark.parametrize("name", [name for name in runner.METHODS if hasattr(runner.METHODS[name], "AFTER_TRAINING")])
def test_settings_after_training_exist(name):
    assert set(runner.METHODS[name].AFTER_TRAINING) <= {f.name for f in fields(runner.METHODS[name])}


def test_a_task_may_have_training_of_its_own():
    settings = {"training": {"epochs": 7, "lr": 0.5}, "toy/*": {"training": {"epochs": 3}, "dim": 8}}
    cells = runner.plan(["toy/m1", "digits"], ["mle"], [0], settings)
    assert {cell.task: (cell.training["epochs"], cell.training["lr"]) for cell in cells} == {
        "toy/m1": (3, 0.5),
        "digits": (7, 0.5),
    }
    assert "training" not in cells[0].task_settings


def test_one_cell_of_a_shared_training_goes_first():
    table = {"name": "vi", "draws": [1, 2, 3]}
    cells = runner.plan(["toy/m1", "toy/m2"], [table, "ensemble", "mle"], [0], TINY)
    order = [(cell.task, cell.method, cell.method_settings.get("draws")) for cell in runner._in_order(cells)]
    assert [method for _, method, _ in order[:2]] == ["ensemble"] * 2
    assert [draws for _, method, draws in order if method == "vi"] == [1, 1, 2, 2, 3, 3]


def test_prediction_is_timed_warm_on_a_fixed_number_of_examples(tmp_path, monkeypatch):
    asked = []
    real = Posterior.predict
    monkeypatch.setattr(
        Posterior, "predict", lambda self, x, *a, **k: (asked.append(len(x)), real(self, x, *a, **k))[1]
    )
    settings = {**TINY, "toy/*": {**TINY["toy/*"], "test": 200}}
    (path,) = runner.run(runner.plan(["toy/m1"], ["mle"], [0], settings), runner.Options(tmp_path)).done
    assert asked == [200, 20] + [runner.TIMED] * (1 + runner.TIMES)  # test, validation, then warm-up and repeats
    assert json.loads(path.read_text())["cost"]["predict_ms"] > 0


def test_worker_processes_give_the_same_metrics(tmp_path):
    cells = runner.plan(["toy/m1", "toy/m4"], ["mle", "ensemble"], [0], {**TINY, "ensemble": {"members": 2}})
    runner.run(cells, runner.Options(tmp_path / "a"))
    runner.run(cells, runner.Options(tmp_path / "b", workers=2))
    for cell in cells:
        one, two = (json.loads((tmp_path / name / cell.path).read_text()) for name in "ab")
        assert one["metrics"] == pytest.approx(two["metrics"], rel=1e-5)


def test_a_failed_cell_is_kept_aside_and_the_others_go_on(tmp_path, monkeypatch):
    real = tasks.ToySeries.evaluate

    def leaky(self, ask, data):
        evaluation = real(self, ask, data)
        return evaluation._replace(gap=evaluation.gap._replace(mean=1.0, standard_error=0.1, z=10.0))

    cells = runner.plan(["toy/m1", "digits"], ["mle"], [0], {"training": {"epochs": 1}, "toy/*": TINY["toy/*"]})
    monkeypatch.setattr(tasks.ToySeries, "evaluate", leaky)
    outcome = runner.run(cells, runner.Options(tmp_path))
    assert len(outcome.done) == 1
    ((cell, problem),) = outcome.failed
    assert "above the true process" in problem
    assert "OracleBeatenError" in json.loads((tmp_path / "failed" / cell.path).read_text())["traceback"]
    assert len(runner.load_results(tmp_path)) == 1
    monkeypatch.setattr(tasks.ToySeries, "evaluate", real)  # mended: the cell runs, the failure goes
    assert len(runner.run(cells, runner.Options(tmp_path)).done) == 1
    assert not (tmp_path / "failed" / cell.path).exists()


def test_variants_of_a_method_and_where_they_run():
    table = {"name": "vi", "temperature": [1.0, 0.1], "prior": ["normal(0, 1)", "improved/{task}"], "seeds": 1}
    cells = runner.plan(["toy/m1", "toy/m2"], ["mle", {**table, "tasks": "toy/m2"}, "vi"], [0, 1], TINY)
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
            runner.plan(["toy/m1"], [wrong], [0], TINY)


def test_a_killed_run_resumes_to_the_same_result(tmp_path):
    settings = {"training": {"epochs": 60, "patience": 0}, "toy/*": TINY["toy/*"]}
    cells = runner.plan(["toy/m1"], ["mle"], [0, 1], settings)
    runner.run(cells, runner.Options(tmp_path / "whole"))
    program = (
        "import torch; torch.set_num_threads(1)\n"
        "from pathlib import Path\n"
        "from bayesformer.bench import runner\n"
        f"cells = runner.plan(['toy/m1'], ['mle'], [0, 1], {settings!r})\n"
        f"runner.run(cells, runner.Options(Path({str(tmp_path / 'killed')!r}), checkpoint_seconds=0))\n"
    )
    checkpoint = tmp_path / "killed" / runner.CHECKPOINTS / cells[0].folder
    process = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT)
    while not checkpoint.exists() and process.poll() is None:
        time.sleep(0.01)
    time.sleep(0.3)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "killed" / cells[1].path).exists()  # it was stopped in the middle
    runner.run(cells, runner.Options(tmp_path / "killed"))
    for cell in cells:
        one, two = (json.loads((tmp_path / name / cell.path).read_text()) for name in ("whole", "killed"))
        assert one["metrics"] == two["metrics"]
        assert one["figures"] == two["figures"]
    assert not checkpoint.exists()


class Deadly(runner.CellWork):
    """Kills its own process at seed 1, as a system without memory would."""

    def __call__(self, cell, reporter):
        if cell.seed == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__call__(cell, reporter)


def test_a_killed_worker_fails_its_cell_and_no_other(tmp_path, monkeypatch):
    cells = runner.plan(["toy/m1"], ["mle"], [0, 1, 2], TINY)
    monkeypatch.setattr(runner, "CellWork", Deadly)
    outcome = runner.run(cells, runner.Options(tmp_path, workers=2))
    ((cell, problem),) = outcome.failed
    assert cell.seed == 1
    assert "WorkerDiedError: a worker process died" in problem
    assert "signal SIGKILL" in json.loads((tmp_path / "failed" / cell.path).read_text())["error"]
    monkeypatch.undo()
    assert [path.name for path in runner.run(cells, runner.Options(tmp_path)).done] == ["seed1.json"]


def test_damaged_results_are_named(tmp_path):
    (tmp_path / "toy").mkdir()
    path = tmp_path / "toy" / "seed0.json"
    path.write_text('{"task": ')
    with pytest.raises(DamagedFileError, match=r"result .*seed0.json is not valid JSON"):
        runner.load_results(tmp_path)
    path.write_text('{"task": "x"}')
    with pytest.raises(DamagedFileError, match=r"seed0.json lacks cost, method, metrics, seed"):
        runner.load_results(tmp_path)
    with pytest.raises(FileNotFoundError, match="does not exist"):
        runner.load_results(tmp_path / "no")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["run", "toy/m6"], "unknown task 'toy/m6'. Did you mean 'toy/m"),
        (["run", "toy/m1", "--methods", "mlee"], "unknown method 'mlee'. Did you mean 'mle'?"),
        (["run", "toy/m1", "--set", "training.epoch=3"], "unknown setting of training 'epoch'. Did you mean 'epochs'?"),
        (["run", "toy/m1", "--set", "training.epochs=many"], "training.epochs must be int; got 'many'"),
        (["run", "toy/m1", "--set", "training.epochs=0"], "training.epochs must be positive; got 0"),
        (
            ["run", "toy/m1", "--set", "trainin.epochs=3"],
            "unknown group of settings 'trainin'. Did you mean 'training'?",
        ),
        (["run", "toy/m1", "--set", "epochs=3"], "a setting must read like training.epochs=20"),
        (["run", "toy/m1", "--seeds", "0"], "seeds must be a whole number of at least 1; got 0"),
        (["run", "toy/m1", "--workers", "0"], "--workers must be at least 1; got 0"),
        (["run"], "tasks must be given"),
        (["report", "/nowhere"], "results folder /nowhere does not exist"),
        (["predict", "/nowhere", "x.csv"], "does not exist"),
    ],
)
def test_the_command_line_explains_mistakes(arguments, text, capsys):
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


def test_list_names_every_task_method_and_setting(capsys):
    assert cli.main(["list", "--settings"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in [*tasks.TASKS, *runner.METHODS])
    assert all(text for _, _, text in explain(Training))
    assert all(text for kind in runner.METHODS.values() for _, _, text in explain(kind))


def test_help_of_every_verb(capsys):
    for verb in ["demo", "run", "report", "list", "predict", "study"]:
        with pytest.raises(SystemExit) as stop:
            cli.main([verb, "--help"])
        assert stop.value.code == 0
    assert "usage: bayesformer predict" in capsys.readouterr().out


def test_demo_covers_the_first_tasks_and_methods():
    cells = demo.cells([0])
    assert {c.task for c in cells} == {"digits", *(name for name in tasks.TASKS if name.startswith("toy/"))}
    assert {c.method for c in cells} == {"mle", "map", "ensemble", "mc_dropout"}
    assert max(c.method_settings.get("members", 1) for c in cells) < runner.METHODS["ensemble"]().members


def test_data_files(tmp_path):
    rows = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    np.save(tmp_path / "a.npy", rows.numpy())
    np.savez(tmp_path / "a.npz", inputs=rows.numpy(), other=np.zeros(3))
    (tmp_path / "a.csv").write_text("1,2\n3,4\n")
    from safetensors.torch import save_file

    save_file({"inputs": rows}, tmp_path / "a.safetensors")
    for name in ["a.npy", "a.npz", "a.csv", "a.safetensors"]:
        assert torch.equal(read_rows(tmp_path / name), rows)
    bad = {
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

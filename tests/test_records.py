"""Stored results: both forms read alike, packing loses nothing, damage is named and skipped."""

import json
import random

import pytest

from bayesformer import cli
from bayesformer.bench import runner
from bayesformer.bench.markdown import comparison
from bayesformer.bench.packing import pack
from bayesformer.bench.planning import plan
from bayesformer.bench.records import cell_path, read_results
from bayesformer.bench.trial import Options


def result(task="toy/m1", method="mle", seed=0, value=-1.0, key="0a1b2c3d", started="2026-01-01T00:00:00+00:00"):
    return {
        "task": task,
        "method": method,
        "variant": "",
        "seed": seed,
        "key": key,
        "started": started,
        "settings": {"task": {}, "training": {}, "method": {}},
        "primary": "log_likelihood",
        "validation": value,
        "metrics": {"log_likelihood": value + 0.1 * seed, "ece": 0.1},
        "cost": {"fit_seconds": 1.0, "predict_ms": 0.5},
        "figures": {},
    }


def write(folder, *results):
    for r in results:
        path = folder / cell_path(r["task"], r["method"], r["key"], r["seed"])
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(r) + "\n")


def experiment(folder, seeds=12):
    found = [
        result(task, method, seed, value)
        for task in ("toy/m1", "digits")
        for method, value in (("mle", -2.0), ("vi", -1.5))
        for seed in range(seeds)
    ]
    write(folder, *found)
    return found


def test_packing_is_lossless_sorted_and_read_like_files(tmp_path):
    folder = tmp_path / "sample"
    found = experiment(folder)
    texts = {path.read_bytes() for path in folder.rglob("seed*.json")}
    before = read_results(folder)
    packing = pack(folder)
    assert (packing.path, packing.cells, packing.moved) == (folder / "sample.jsonl", 48, 48)
    assert [path.name for path in folder.iterdir()] == ["sample.jsonl"]  # emptied folders are gone
    lines = packing.path.read_bytes().splitlines(keepends=True)
    assert set(lines) == texts
    order = [(r["task"], r["method"], r["seed"]) for r in map(json.loads, lines)]
    assert order == sorted(order)  # seed 2 before seed 10
    after = read_results(folder)
    assert after.results == before.results  # in the same order, so that tables come out the same
    assert after.paths == before.paths
    assert len(after.results) == len(found)
    assert comparison(after.results) == comparison(before.results)
    assert pack(folder).path.read_bytes() == b"".join(lines)  # packing again changes nothing


def test_packed_bytes_do_not_depend_on_the_way_there(tmp_path):
    found = [result(seed=seed) for seed in range(11)]
    whole, parts = tmp_path / "whole" / "x", tmp_path / "parts" / "x"
    write(whole, *found)
    random.Random(0).shuffle(found)
    for r in found:
        write(parts, r)
        pack(parts)
    assert pack(whole).path.read_bytes() == (parts / "x.jsonl").read_bytes()


def test_figures_posteriors_and_failures_stay(tmp_path):
    write(tmp_path / "x", result())
    kept = [tmp_path / "x" / name for name in ("cost.svg", "failed/toy-m1/mle-0a1b2c3d/seed1.json", "posteriors/a/b/c")]
    for path in kept:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{}")
    pack(tmp_path / "x")
    assert all(path.exists() for path in kept)
    assert len(read_results(tmp_path / "x").results) == 1


def test_a_cell_in_both_forms_counts_once_and_the_newer_wins(tmp_path):
    folder = tmp_path / "x"
    write(folder, result(seed=0), result(seed=1))
    pack(folder)
    write(folder, result(seed=0), result(seed=1, value=-7.0, started="2026-02-01T00:00:00+00:00"), result(seed=2))
    stored = read_results(folder)
    assert [r["seed"] for r in stored.results] == [0, 1, 2]
    assert stored.results[1]["validation"] == -7.0
    same, newer = stored.repeated
    assert "cell toy-m1/mle-0a1b2c3d/seed0 is stored in" in same
    assert same.endswith("with the same content.")
    assert "x.jsonl, line 2" in newer
    assert newer.endswith("seed1.json, counts.")
    packing = pack(folder)
    assert (packing.cells, packing.moved) == (3, 3)
    assert packing.replaced == ["toy-m1/mle-0a1b2c3d/seed1"]
    assert not read_results(folder).repeated
    write(folder, result(seed=1, value=-9.0, started="2025-01-01T00:00:00+00:00"))
    assert read_results(folder).results[1]["validation"] == -7.0  # the line is newer than the file


def test_damage_is_named_and_the_rest_is_read(tmp_path):
    folder = tmp_path / "x"
    experiment(folder, seeds=2)
    path = pack(folder).path
    lines = path.read_bytes().split(b"\n")
    wrong_seed = lines[4].replace(b'"seed": 0', b'"seed": "a"')
    damaged = [lines[0][:100], b'{"task": "x"}', b"\xff\xfe", b"[" * 100000, wrong_seed]
    path.write_bytes(b"\n".join([*damaged, *lines[5:]]))
    own = folder / "toy-m1" / "mle-0a1b2c3d" / "seed7.json"
    own.parent.mkdir(parents=True)
    own.write_text('{"task": ')
    stored = read_results(folder)
    assert len(stored.results) == 8 - 5
    told = "\n".join(stored.damaged)
    for text in (
        r"x.jsonl, line 1 is not valid JSON",
        "x.jsonl, line 2 lacks cost, method, metrics, seed.",
        "x.jsonl, line 3 is not valid JSON",
        "x.jsonl, line 4 is not valid JSON",
        "x.jsonl, line 5: seed must be int; got 'a'.",
        "seed7.json is not valid JSON",
    ):
        assert text in told
    with pytest.raises(ValueError, match=r"line 1 .* Mend or delete the line before packing"):
        pack(folder)
    assert own.exists()
    with pytest.raises(FileNotFoundError, match="results folder .*no does not exist"):
        read_results(tmp_path / "no")


def test_a_file_that_cannot_become_a_line_stays(tmp_path, capsys):
    folder = tmp_path / "x"
    write(folder, result())
    moved = folder / "toy-m1" / "mle-0a1b2c3d" / "seed5.json"
    moved.write_text(json.dumps(result(seed=3)))
    broken = moved.with_name("seed6.json")
    broken.write_text("{")
    assert cli.main(["results", "pack", str(folder)]) == 1
    captured = capsys.readouterr()
    assert "x.jsonl: 1 cells, 1 of them from files of their own" in captured.out
    assert "seed5.json says that it belongs to" in captured.err
    assert "seed6.json is not valid JSON" in captured.err
    assert moved.exists()
    assert broken.exists()


def test_packing_nothing_is_an_error(tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    assert cli.main(["results", "pack", str(tmp_path / "empty")]) == 2
    assert "empty must hold cells, TASK/METHOD-KEY/seedN.json; got none." in capsys.readouterr().err
    assert cli.main(["results", "pack", str(tmp_path / "no")]) == 2
    assert "does not exist" in capsys.readouterr().err


def test_a_run_finds_what_is_packed_and_adds_what_is_missing(tmp_path, capsys):
    settings = {"training": {"epochs": 1}, "toy/*": {"train": 60, "validation": 20, "test": 50, "dim": 8}}
    folder = tmp_path / "x"
    cells = plan(["toy/m1"], ["mle"], [0, 1], settings)
    runner.run(cells[:1], Options(folder, keep_posteriors=False))
    pack(folder)
    assert runner.missing_cells(cells, folder) == cells[1:]
    outcome = runner.run(cells, Options(folder, keep_posteriors=False))
    assert (outcome.skipped, outcome.done) == (1, [folder / cells[1].path])
    assert cli.main(["report", str(folder), "--markdown"]) == 0
    assert "| mle |" in capsys.readouterr().out
    pack(folder)
    assert runner.missing_cells(cells, folder) == []
    (folder / "x.jsonl").write_bytes((folder / "x.jsonl").read_bytes()[:-20])  # the last line is cut
    assert runner.missing_cells(cells, folder) == cells[1:]


def test_the_report_says_what_it_skipped(tmp_path, capsys):
    folder = tmp_path / "x"
    experiment(folder, seeds=2)
    broken = folder / "digits" / "mle-0a1b2c3d" / "seed1.json"
    broken.write_bytes(broken.read_bytes()[:-30])
    assert cli.main(["report", str(folder)]) == 0
    assert f"skipped: result {broken} is not valid JSON" in capsys.readouterr().err
    assert "1 stored result that cannot be read." in (folder / "report.html").read_text()
    for path in folder.rglob("seed*.json"):
        path.write_text("[]")
    assert cli.main(["report", str(folder)]) == 2
    captured = capsys.readouterr().err
    assert "seed0.json must hold a JSON object; got list." in captured
    assert "must hold at least one result that can be read; it holds none" in captured

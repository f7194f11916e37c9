"""Many runs of the baseline on a citation graph: rules of stopping, seeds of start and noise, what is kept."""

import pytest
import torch

from bayesformer import cli
from bayesformer.bench.tasks import citation_graph
from bayesformer.core.storage import read_json
from bayesformer.datasets.graphs import Graph
from bayesformer.study import citation_runs
from bayesformer.study.citation_runs import EpochScore, Stopping


def small_graph():
    """A ring of twelve nodes of three classes, four nodes for each purpose."""
    source = torch.Generator().manual_seed(0)
    nodes = torch.arange(12)
    edges = torch.stack([nodes, (nodes + 1) % 12])
    masks = [(nodes % 3 == i) for i in range(3)]
    return Graph(torch.randn(12, 5, generator=source), edges, nodes // 4, *masks)


@pytest.fixture
def graph(monkeypatch):
    """A graph of twelve nodes in the place of every citation graph, and few epochs."""
    made = small_graph()
    monkeypatch.setattr(citation_graph, "load_graph", lambda name: made)
    monkeypatch.setattr(citation_runs, "load_graph", lambda name: made)
    monkeypatch.setattr(citation_runs, "LIMIT", 6)
    monkeypatch.setattr(citation_runs, "MOST", 8)
    return made


def followed(scores, monkeypatch, limit=4, patience=2):
    monkeypatch.setattr(citation_runs, "LIMIT", limit)
    monkeypatch.setattr(citation_runs, "PATIENCE", patience)
    monkeypatch.setattr(citation_runs, "MOST", len(scores))
    rules = Stopping.new()
    for epoch, (loss, accuracy) in enumerate(scores, 1):
        if not rules.see(epoch, EpochScore(loss, accuracy, epoch / 100)):
            break
    return {rule: at for rule, (at, _) in rules.kept.items()}, epoch


def test_every_rule_keeps_the_epoch_that_it_should(monkeypatch):
    # The loss is best at 2; accuracy rises until 5, where the loss is not as low: the paper's rule keeps 2 and goes on.
    scores = [(1.0, 0.5), (0.5, 0.6), (0.6, 0.6), (0.7, 0.7), (0.8, 0.8), (0.9, 0.1), (0.9, 0.1), (0.1, 0.9)]
    kept, last = followed(scores, monkeypatch)
    assert kept == {"likelihood": 2, "patience": 2, "paper": 2, "last": 4}
    assert last == 7  # two epochs after the fifth that are worse in both
    kept, last = followed(scores, monkeypatch, limit=8, patience=9)
    assert kept == {"likelihood": 8, "patience": 8, "paper": 8, "last": 8}


def test_starts_and_noise_have_seeds_of_their_own(graph):
    first, again = (citation_runs.train_gat("cora", 1, 2) for _ in range(2))
    assert first == again
    assert citation_runs.train_gat("cora", 1, 3) != first
    assert citation_runs.train_gat("cora", 2, 2) != first
    assert citation_runs.train_gat("cora", 1, 2, torch_start=True) != first
    assert citation_runs.seeds_of("noise 0", 3) == (3, 20_000)
    assert citation_runs.seeds_of("start 0", 3)[0] == citation_runs.seeds_of("start 0", 4)[0]
    with pytest.raises(ValueError, match="unknown variant 'noise'"):
        citation_runs.seeds_of("noise", 0)


def test_runs_are_kept_and_extended(graph, tmp_path, capsys):
    path = tmp_path / "runs.json"
    call = ["study", "citations", "--graph=cora", f"--output={path}"]
    assert cli.main([*call, "--runs=2", "--variants=tied,noise 0,noise 1"]) == 0
    before = read_json(path, "runs")["runs"]
    assert len(before) == 6
    capsys.readouterr()
    assert cli.main([*call, "--runs=3"]) == 0
    assert read_json(path, "runs")["runs"][:6] == before
    out, err = capsys.readouterr()
    assert len(err.splitlines()) == 1
    assert "| noise 1 - noise 0, likelihood |" in out
    assert "Fewer than twenty runs" in out
    assert cli.main([*call, "--runs=0"]) == 2
    assert "--runs must be at least 1" in capsys.readouterr().err


def test_the_spread_of_means_of_ten_is_told_beside_the_error_they_should_have():
    found = [
        {"graph": "cora", "variant": "tied", "run": i, "rules": {"likelihood": {"test": 0.7 + (i % 2) / 100}}}
        for i in range(40)
    ]
    numbers = citation_runs.spread_of_tens(found)
    assert numbers["spread of tens"] == pytest.approx(0.0, abs=1e-9)  # every ten has as many of each
    assert numbers["sd"] == pytest.approx(0.5, rel=0.02)
    assert numbers["tens"] == 4
    assert "standard deviation of 0.51 points" in citation_runs.spread_text(found)

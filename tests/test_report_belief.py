"""The page's section on doubts: what fits found out about themselves, and how far they are from known posteriors."""

from bayesformer.bench import runner
from bayesformer.bench.planning import plan
from bayesformer.bench.records import read_results
from bayesformer.bench.trial import Options
from tests.test_report import page_of, result

LONG = {"check": "length", "sentence": "the chain is <short>.", "value": 0.1, "threshold": 0.3}
HOT = {"check": "temperature", "sentence": "the chain is hot.", "value": 2.0, "threshold": 1.1}


def beliefs(page):
    return {row["Method"]: row for row in page.table("Doubts of every method")}


def words(page, method):
    return beliefs(page)[method]["What its fits found out about themselves"]


def test_doubts_are_counted_over_the_fits_that_were_checked(tmp_path):
    found = [[LONG], [LONG, HOT], [LONG], []]
    runs = [result(method="sghmc", seed=i, checks=checks) for i, checks in enumerate(found)]
    others = [result(method="map", checks=[]), result(method="map", seed=1, checks=[]), result(checks=None)]
    page = page_of([*runs, *others], tmp_path)
    assert words(page, "sghmc") == "3 of 4 fits the chain is <short>.1 of 4 fits the chain is hot."
    assert words(page, "map") == "Nothing found in 2 fits."
    assert words(page, "mle") == "Not checked."
    assert "Distance to the posterior, sd" not in beliefs(page)["map"]


def test_results_of_before_are_shown_with_what_they_have(tmp_path):
    results = [result(method="vi", doubts=["regime"]), result(doubts=[]), result(method="map", checks=[])]
    page = page_of(results, tmp_path)
    assert words(page, "vi").startswith("1 of 1 fit the check “regime” found something")
    assert words(page, "mle") == "Not recorded."
    assert "Can this be believed?" not in page_of([result(), result(method="map", doubts=[])], tmp_path).text


def test_distance_and_cost_stand_beside_the_doubts(tmp_path):
    def run(task, method, value, epochs):
        cost = {"gradient_epochs": epochs} if epochs else {}
        return result(task, method, 0, value, primary="wasserstein", cost=cost, checks=[])

    one = [run("fidelity/a", "sghmc", 0.464, 1234.4), run("fidelity/a", "mle", 1.5, None), result("t", "map")]
    rows = beliefs(page_of(one, tmp_path))
    both = [(rows[m]["Distance to the posterior, sd"], rows[m]["Gradient evaluations, epochs"]) for m in sorted(rows)]
    assert both == [("–", "–"), ("1.50", "–"), ("0.46", "1\u202f234")]
    several = beliefs(page_of([*one, run("fidelity/b", "sghmc", 0.2, 10)], tmp_path))
    assert several["sghmc"]["Distance to the posterior, sd"] == "0.46 a0.20 b"


def test_broken_checks_do_not_stop_the_page(tmp_path):
    page = page_of(
        [result(checks=[3, "x"]), result(method="map", checks="no"), result(method="vi", doubts=3)], tmp_path
    )
    assert words(page, "mle") == "Nothing found in 1 fit."


def test_a_run_stores_what_its_checks_found(tmp_path):
    settings = {"training": {"epochs": 2}, "vi": {"draws": 4}}
    cells = plan(["fidelity/linear-n200-k10"], ["map", "ensemble", "vi"], [0], settings | {"ensemble": {"members": 2}})
    assert not runner.run(cells, Options(tmp_path, keep_posteriors=False)).failed
    found = {r["method"]: r for r in read_results(tmp_path).results}
    assert [one["check"] for one in found["ensemble"]["checks"]] == ["training"]  # eight steps
    assert isinstance(found["map"]["checks"], list)  # checked, with or without a finding
    for one in found.values():
        assert [d["check"] for d in one["checks"] or []] == one["doubts"]
        assert all(set(d) == {"check", "sentence", "value", "threshold"} for d in one["checks"] or [])
    assert isinstance(found["vi"]["checks"], list)

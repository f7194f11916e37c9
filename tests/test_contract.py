"""Every method on four kinds of model, and every kind of model with four methods; `make contract` runs all of them."""

import logging
import os
from collections import Counter

import pytest

from bayesformer.methods import ADAPTER_METHODS, METHODS
from tests.contract import REFUSED, REFUSED_WAYS, check_cell, check_refusal
from tests.contract_zoo import KINDS

pytest.importorskip("transformers")
pytest.importorskip("peft")
pytest.importorskip("torch_geometric")

pytestmark = pytest.mark.filterwarnings("ignore::bayesformer.FidelityWarning")  # fits are as short as can be

SOME_KINDS = ("all_weights", "frozen_base", "batch_norm", "lora")
"""every method runs on these"""
SOME_METHODS = (("ensemble", "sghmc", "vi", "laplace"), ("mc_dropout", "mean_field", "swag", "ekf"))
"""every kind runs with one of these groups, in turn"""

ADAPTED = ("lora", "lora_bfloat16", "dora")
"""kinds with LoRA adapters, which methods for adapters alone run on"""

ALL = [(method, kind) for kind in KINDS for method in METHODS]
CHOSEN = [
    (method, kind)
    for method, kind in ALL
    if kind in SOME_KINDS or method in SOME_METHODS[list(KINDS).index(kind) % len(SOME_METHODS)]
]


ADAPTERS = [(method, kind) for method in ADAPTER_METHODS for kind in ADAPTED]


@pytest.mark.parametrize(("method", "kind"), [*(ALL if os.environ.get("WHOLE_CONTRACT") else CHOSEN), *ADAPTERS])
@pytest.mark.filterwarnings(
    "ignore::UserWarning:torch.nn", "ignore::FutureWarning", "ignore::bayesformer.FidelityWarning"
)
def test_every_promise(method, kind, tmp_path, caplog):
    caplog.set_level(logging.ERROR)
    check_cell(method, kind, tmp_path)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ADAPTED])
@pytest.mark.parametrize("method", ADAPTER_METHODS)
def test_methods_for_adapters_refuse_other_models(method, kind):
    check_refusal(method, kind, "LoRA adapters that are")


def test_the_default_run_covers_both_axes():
    assert all(sum(m == method for m, _ in CHOSEN) >= 4 for method in METHODS)
    assert all(sum(k == kind for _, k in CHOSEN) >= 4 for kind in KINDS)
    assert len(KINDS) >= 20


def test_refusals_are_few_and_of_things_that_exist():
    assert set(REFUSED) <= set(ALL)
    assert {kind for _, kind in REFUSED_WAYS} <= set(KINDS)
    per_kind = Counter(kind for _, kind in REFUSED)
    assert max(per_kind.values()) <= 3, per_kind

"""A shell stands in for the user's model: same numbers, same gradients, its own weights, the user's untouched."""

import pytest

from tests.shell_checks import check
from tests.shell_transformers import CASES as TRANSFORMERS
from tests.shell_zoo import CASES


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")  # torch's own, in the user's model
@pytest.mark.parametrize("name", CASES)
def test_shell_is_the_model(name):
    check(CASES[name]())


@pytest.mark.filterwarnings("ignore")  # of transformers and peft about themselves
@pytest.mark.parametrize("name", TRANSFORMERS)
def test_shell_is_the_transformer(name):
    pytest.importorskip("transformers")
    pytest.importorskip("peft")
    check(TRANSFORMERS[name]())

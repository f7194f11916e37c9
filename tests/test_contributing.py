"""The code in CONTRIBUTING.md is the code of the library, and runs."""

import ast
import re
from pathlib import Path

import torch

from bayesformer.likelihoods import poisson

ROOT = Path(__file__).parent.parent
BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL)


def the_class(text):
    (found,) = [node for node in ast.parse(text).body if isinstance(node, ast.ClassDef)]
    return found


def test_the_likelihood_shown_is_the_one_of_the_library():
    shown, own = the_class(BLOCKS[0]), the_class(Path(poisson.__file__).read_text())
    assert ast.dump(shown) == ast.dump(own)
    assert len(ast.unparse(own).splitlines()) < 45


def test_what_is_shown_runs_as_it_stands():
    names = {"__name__": "example"}
    exec(compile(BLOCKS[0], "CONTRIBUTING.md", "exec", dont_inherit=True), names)
    own, f, y = names["Poisson"](), torch.randn(3, 2), torch.randint(5, (3, 2))
    assert torch.equal(own.log_prob(f, y), poisson.Poisson().log_prob(f, y))
    exec(compile(BLOCKS[1], "CONTRIBUTING.md", "exec", dont_inherit=True), names)
    tests = [value for name, value in names.items() if name.startswith("test_")]
    assert len(tests) == 1
    tests[0]()

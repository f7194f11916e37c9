"""House rules that a machine can check: docstrings, names, private names of others, and what an import may touch."""

import ast
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "bayesformer"
FILES = sorted(PACKAGE.rglob("*.py"))
TREES = {path: ast.parse(path.read_text()) for path in FILES}
DEFINITIONS = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef

PRIVATE = re.compile(
    r"(?:from|import) (?:torch|transformers|peft)[\w.]*\._\w+"  # a private module
    r"|from (?:torch|transformers|peft)[\w.]* import (?:.*, )?_\w+"  # a private name of a public one
    r"|\b(?:torch|nn|F|transformers)(?:\.\w+)*\._(?!_)\w+"  # torch._C and the like
    r"|\._(?:parameters|buffers|modules|backward_hooks|forward_hooks|forward_pre_hooks|version|flat_weights|schema"
    r"|init_weights|reset_parameters|is_hf_initialized|attn_implementation_internal|qkv_same_embed_dim|conv_forward)\b"
    r"|[\"']_(?:parameters|buffers|modules|init_weights|reset_parameters|is_hf_initialized|attn_implementation\w*)[\"']"
)


def public(node, prefix=""):
    """(name, node) of every public class, function, method and property below a node."""
    for child in node.body:
        if isinstance(child, DEFINITIONS) and not child.name.startswith("_"):
            yield prefix + child.name, child
            if isinstance(child, ast.ClassDef):
                yield from public(child, f"{prefix}{child.name}.")


def is_overload(node):
    return any("overload" in ast.unparse(decorator) for decorator in node.decorator_list)


def test_every_public_docstring_is_a_sentence():
    short = [
        f"{path.relative_to(ROOT)}:{node.lineno} {name}"
        for path, tree in TREES.items()
        for name, node in public(tree)
        if len(ast.get_docstring(node) or "") < 30 and not is_overload(node)
    ]
    assert not short, f"{len(short)} public docstrings have fewer than 30 characters: {short}"


def test_no_class_has_the_name_of_another():
    names = Counter(n.name for tree in TREES.values() for n in ast.walk(tree) if isinstance(n, ast.ClassDef))
    assert {name: count for name, count in names.items() if count > 1 and not name.startswith("_")} == {}


def test_no_file_has_the_name_of_another():
    names = Counter(path.name for path in FILES if path.name != "__init__.py")
    assert {name: count for name, count in names.items() if count > 1} == {}


def test_the_top_level_holds_only_the_doors():
    assert len(list(PACKAGE.glob("*.py"))) <= 8


def test_private_names_of_others_are_in_compat_alone():
    found = [
        f"{path.relative_to(ROOT)}:{number} {line.strip()}"
        for path in FILES
        if path != PACKAGE / "core/compat.py"
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if PRIVATE.search(line)
    ]
    assert not found, found


def test_the_rule_for_private_names_sees_them():
    """The expression is not blind: compat itself breaks the rule, and so do these lines."""
    assert len(PRIVATE.findall((PACKAGE / "core/compat.py").read_text())) > 10
    assert PRIVATE.search("from torch.utils._pytree import tree_map")
    assert PRIVATE.search("from torch.nn import Linear, _reduction")
    assert PRIVATE.search("torch._C._functorch.is_batchedtensor(x)")
    assert not PRIVATE.search("torch.__version__")


def likelihood_classes():
    tree = [tree for path, tree in TREES.items() if path.parent.name == "likelihoods"]
    known, before = {"Likelihood"}, 0
    while len(known) > before:
        before = len(known)
        for node in (n for t in tree for n in ast.walk(t) if isinstance(n, ast.ClassDef)):
            if {ast.unparse(base) for base in node.bases} & known:
                known.add(node.name)
    return known - {"Likelihood"}


def test_likelihoods_are_not_told_apart_by_their_class():
    """What another room needs to know of a likelihood is an attribute or a method of it: the protocol is open."""
    classes = likelihood_classes()
    assert {"Categorical", "Gaussian", "Poisson"} <= classes
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno} {ast.unparse(node)}"
        for path, tree in TREES.items()
        if "likelihoods" not in path.parts
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) in {"isinstance", "issubclass"}
        if {n.id for n in ast.walk(node.args[1]) if isinstance(n, ast.Name)} & classes
    ]
    assert not found, found


IMPORT = """
import os, random, sys, threading, warnings
import numpy, torch

def process():
    return {
        "grad mode": torch.is_grad_enabled(),
        "default dtype": torch.get_default_dtype(),
        "threads of torch": (torch.get_num_threads(), torch.get_num_interop_threads()),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "attention backends": (torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.math_sdp_enabled()),
        "fast path of transformers": torch.backends.mha.get_fastpath_enabled(),
        "environment": dict(os.environ),
        "warnings": list(warnings.filters),
        "torch stream": torch.get_rng_state().tolist(),
        "numpy stream": str(numpy.random.get_state()),
        "random stream": random.getstate(),
        "threads": threading.active_count(),
        "excepthook": sys.excepthook,
        "recursion": sys.getrecursionlimit(),
    }

before = process()
called = []
import ctypes
real = ctypes.CDLL.__getattr__
def watched(self, name):  # mallopt is how a library would change the process's malloc
    called.append(name)
    return real(self, name)
ctypes.CDLL.__getattr__ = watched
import bayesformer
ctypes.CDLL.__getattr__ = real
after = process()
print(sorted(key for key in before if before[key] != after[key]), [name for name in called if "mall" in name])
"""


def test_an_import_changes_nothing_in_the_process():
    run = subprocess.run([sys.executable, "-c", IMPORT], capture_output=True, text=True, check=True, cwd=ROOT)
    assert run.stdout.strip() == "[] []"

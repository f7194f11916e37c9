"""The README's first example runs as it stands, and what it promises exists."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
SAYS = [
    "tensor",
    "Posterior(sghmc",
    "weights 0.0",
    "torch.Size([1, 39, 2])",
    "tensor",
    "torch.Size([2, 12, 5])",
    "tensor",
    "tensor",
    "attention",
]


@pytest.mark.parametrize(("number", "says"), list(enumerate(SAYS)))
def test_every_example_runs_as_a_file(number, says, tmp_path):
    """As a reader would: saved and run, in a folder of its own, without a main guard."""
    script = tmp_path / "example.py"
    script.write_text(BLOCKS[number])
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, str(script)]
    answer = subprocess.run(
        command, check=False, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=300
    )
    assert answer.returncode == 0, answer.stderr[-3000:]
    assert says in answer.stdout


def test_every_example_is_run():
    assert len(BLOCKS) == len(SAYS)


def test_it_opens_with_the_two_commands():
    start = README[:400]
    assert "make demo" in start
    assert "make test" in start
    assert (ROOT / ".ci/run").read_text().rstrip().endswith("make test")


def test_links_lead_somewhere():
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert (ROOT / target).exists(), target


def test_import_is_light():
    """Nothing heavy comes in with `import bayesformer` beyond torch itself."""
    program = (
        "import sys, torch; before = set(sys.modules)\n"
        "import bayesformer\n"
        "heavy = {'sklearn', 'scipy', 'rich', 'transformers', 'torchmetrics', 'matplotlib'}\n"
        "print(sorted(heavy & (set(sys.modules) - before)))\n"
    )
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    assert answer.stdout.strip() == "[]"


def test_architecture_names_every_room():
    text = (ROOT / "docs/architecture.md").read_text()
    for path in (ROOT / "bayesformer").iterdir():
        if path.suffix == ".py" and not path.name.startswith("_") and path.name != "version.py":
            assert f"`{path.name}`" in text, path.name
        elif path.is_dir() and (path / "__init__.py").exists():
            assert f"`{path.name}/`" in text, path.name

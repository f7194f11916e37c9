"""The README's first example runs as it stands, and what it promises exists."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_the_example_runs(capsys):
    example = re.search(r"```python\n(.*?)```", README, re.DOTALL).group(1)
    names = {}
    exec(compile(example, "README.md", "exec"), names)
    accuracy = (names["prediction"].labels == names["data"].test.targets).float().mean()
    assert accuracy > 0.7
    assert "tensor" in capsys.readouterr().out


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

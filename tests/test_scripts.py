"""Programs as people write them: no main guard, a model of their own, two workers, Ctrl-C."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parent.parent
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}

# The README's first example, with a model of the script's own, four members and two workers.
EXAMPLE = """
import bayesformer as bf
from bayesformer.datasets import digits
from bayesformer.models.vit import VisionTransformer

class Mine(VisionTransformer):
    def forward(self, images):
        return 2 * super().forward(images)

data = digits.load()
model = Mine(image_size=8, patch_size=2, channels=1, classes=10)
posterior = bf.fit(
    model,
    data.train,
    likelihood="categorical",
    method=bf.Ensemble(members=4),
    validation=data.validation,
    training=bf.Training(epochs=1),
    workers=2,
)
prediction = posterior.predict(data.test.inputs)
print("RESULT", posterior.facts["strategy"], len(posterior.theta), tuple(prediction.probs.shape))
"""
EXPECTED = "RESULT processes 4 (500, 10)"

NOTEBOOK = """
import sys, nbclient, nbformat
cells = [nbformat.v4.new_code_cell(part) for part in open(sys.argv[1]).read().split("data = ")]
cells[1].source = "data = " + cells[1].source
book = nbformat.v4.new_notebook(cells=cells)
nbclient.NotebookClient(book, timeout=120, kernel_name="python3").execute()
print("".join(output.get("text", "") for cell in book.cells for output in cell.outputs))
"""


def ended(process, seconds=60):
    """Its output, once it has ended."""
    out, err = process.communicate(timeout=seconds)
    assert process.returncode == 0, err
    return out


def start(*arguments, **options):
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": ENVIRONMENT, **options}
    return subprocess.Popen([sys.executable, *map(str, arguments)], **options)


@pytest.mark.parametrize("way", ["file", "command", "stdin", "notebook"])
def test_the_first_example_with_two_workers(way, tmp_path):
    path = tmp_path / "example.py"
    path.write_text(EXAMPLE)
    if way == "file":
        process = start(path, cwd=tmp_path)
    elif way == "command":
        process = start("-c", EXAMPLE, cwd=tmp_path)
    elif way == "notebook":
        process = start("-c", NOTEBOOK, path, cwd=tmp_path)
    else:
        with path.open() as program:
            process = start(stdin=program, cwd=tmp_path)
    assert ended(process, 150).count(EXPECTED) == 1  # and no worker ran the script again


LINGER = """
import os, sys, time
from pathlib import Path
from bayesformer.core.workers import run_in_processes

def linger(x, reporter):
    Path(f"task-{x}").touch()
    time.sleep(60)

list(run_in_processes(linger, range(6), 2))
"""


@pytest.fixture
def lingering(tmp_path):
    """A script in the middle of two of six tasks, and all its processes."""
    (tmp_path / "linger.py").write_text(LINGER)
    process = start(tmp_path / "linger.py", cwd=tmp_path, start_new_session=True)
    end = time.monotonic() + 60
    while len(list(tmp_path.glob("task-*"))) < 2 and time.monotonic() < end and process.poll() is None:
        time.sleep(0.05)
    family = psutil.Process(process.pid).children(recursive=True)
    assert len(family) >= 2
    yield process, family
    for one in (process, *family):
        if one.poll() is None if one is process else one.is_running():
            one.kill()
    process.stdout.close()
    process.stderr.close()


@pytest.mark.parametrize("everyone", [True, False], ids=["terminal", "parent"])
def test_ctrl_c_ends_everything_at_once_and_starts_nothing(lingering, everyone, tmp_path):
    """A terminal sends it to all processes, another program to the parent alone."""
    process, family = lingering
    began = time.monotonic()
    (os.killpg if everyone else os.kill)(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=20)
    assert time.monotonic() - began < 5
    assert process.returncode != 0
    assert err.rstrip().endswith("KeyboardInterrupt")
    assert err.count("Traceback") == 1  # of the parent; workers say nothing
    _, alive = psutil.wait_procs(family, 5)
    assert not alive
    assert len(list(tmp_path.glob("task-*"))) == 2


def test_workers_do_not_outlive_a_killed_parent(lingering):
    process, family = lingering
    process.kill()
    process.wait()
    _, alive = psutil.wait_procs(family, 10)
    assert not alive

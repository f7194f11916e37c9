"""A skeleton in another process: structure by value, tensors apart, classes of a script included."""

import copy
import pickle
import subprocess
import sys
import textwrap

import pytest
import torch
from torch import nn

from bayesformer.model.calling import apply
from bayesformer.model.skeleton import Skeleton
from bayesformer.model.space import Space
from tests.shell_transformers import CASES as TRANSFORMERS
from tests.shell_zoo import CASES, Net

SCRIPT = """
    import threading
    import torch
    from torch import nn
    from torch.nn.utils import parametrizations
    from bayesformer.model.skeleton import Skeleton
    from bayesformer.model.space import Space

    GAIN = 2.0

    class Mine(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = nn.GRU(3, 4, batch_first=True)
            self.mid = parametrizations.weight_norm(nn.Linear(4, 4))
            self.head = nn.Linear(4, 2)
            self.lock = threading.Lock()
            self.register_buffer("shift", torch.ones(2))

        def forward(self, x):
            return self.head(self.mid(self.rnn(x)[0]))

    def build():
        model = Mine().requires_grad_(False)

        def scale(module, args, output):
            return output * model.shift.sum() * GAIN

        model.head.register_forward_hook(scale)
        return model

    torch.manual_seed(0)
    model = build()
    x = torch.randn(2, 5, 3)
    skeleton = Skeleton(model, Space.of(model, "head*"))
    structure, tensors = skeleton.portable()
    folder = FOLDER
    torch.save(tensors, folder + "/tensors.pt")
    with open(folder + "/structure", "wb") as file:
        file.write(structure)
    torch.save((x, model(x).detach()), folder + "/expected.pt")
"""

ARRIVAL = """
    import torch
    from bayesformer.model.skeleton import Skeleton
    folder = FOLDER
    with open(folder + "/structure", "rb") as file:
        structure = file.read()
    tensors = torch.load(folder + "/tensors.pt", mmap=True)
    x, expected = torch.load(folder + "/expected.pt")
    skeleton = Skeleton.from_portable(structure, tensors)
    shell = skeleton.shell()
    assert torch.equal(shell(x), expected), (shell(x) - expected).abs().max()
    frozen = shell.module.rnn.weight_ih_l0
    assert any(frozen.data_ptr() == t.data_ptr() for t in tensors.values())
    shell(x).sum().backward()
    assert shell.grad.abs().sum() > 0
    shell.load(torch.zeros_like(shell.theta))
    assert shell(x).abs().max() == 0
    assert len(structure) < 40_000, len(structure)
    print("arrived", type(shell.module).__name__)
"""


def run(code, folder):
    code = textwrap.dedent(code).replace("FOLDER", repr(str(folder)))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_class_and_a_hook_of_a_script_arrive_in_a_fresh_process(tmp_path):
    run(SCRIPT, tmp_path)
    assert run(ARRIVAL, tmp_path).strip() == "arrived Mine"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [*CASES, *TRANSFORMERS])
def test_every_kind_of_model_survives_the_way(name):
    if name in TRANSFORMERS:
        pytest.importorskip("peft")
    if name == "unpicklable_leaves":
        pytest.skip("a generator cannot leave its process: refused below")
    case = (CASES | TRANSFORMERS)[name]()
    case.model.eval()
    skeleton = Skeleton(case.model, Space.of(case.model, case.infer))
    structure, tensors = skeleton.portable()
    arrived = Skeleton.from_portable(structure, {key: tensor.clone() for key, tensor in tensors.items()})
    assert arrived.space == skeleton.space
    with torch.no_grad():
        here, there = skeleton.shell()(case.inputs), arrived.shell()(case.inputs)
    torch.testing.assert_close(there, here, rtol=0, atol=0)


def test_tensors_travel_apart_from_the_structure():
    model = nn.Sequential(nn.Linear(1000, 100), nn.Linear(100, 2))
    structure, tensors = Skeleton(model, Space.of(model, "1.*")).portable()
    assert len(structure) < 10_000
    frozen = [t for t in tensors.values() if t.shape == (100, 1000)]
    assert [t.data_ptr() for t in frozen] == [model[0].weight.data_ptr()]


def test_pickle_and_deepcopy():
    model, x = Net(), torch.randn(2, 3)
    skeleton = Skeleton(model, Space.of(model))
    assert copy.deepcopy(skeleton) is skeleton
    assert torch.equal(pickle.loads(pickle.dumps(skeleton)).shell()(x), apply(model, x))


def test_what_cannot_leave_is_told():
    case = CASES["unpicklable_leaves"]()
    with pytest.raises(ValueError, match="model must be able to leave the process; something it holds is not: cannot"):
        Skeleton(case.model, Space.of(case.model)).portable()

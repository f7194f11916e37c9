"""Worker processes: results, progress, errors and deaths, shared memory. One pool of two serves most tests."""

import os
import signal
import sys
import threading
import time
from dataclasses import dataclass

import psutil
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from bayesformer.core import serving, workers
from bayesformer.core.errors import WorkerDiedError
from bayesformer.core.transfer import mapped_file, pack, pack_result, unpack
from bayesformer.core.workers import Failure, Workers, run_in_processes

DTYPES = [torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.bool, torch.complex64, torch.uint8]


@pytest.fixture(scope="module")
def pool():
    with Workers(2) as made:
        yield made


class Heard:
    """Keeps what it hears, and in which thread."""

    def __init__(self):
        self.news, self.threads = [], set()

    def update(self, *news):
        self.news.append(news)
        self.threads.add(threading.current_thread())


@dataclass
class Found:
    """A result that is no dictionary."""

    values: torch.Tensor
    name: str


class Awkward(Exception):
    """Cannot be made again from its arguments."""

    def __init__(self, one, two):
        super().__init__(f"{one} and {two}")


def in_order(results):
    return [result for _, result in sorted(results, key=lambda pair: pair[0])]


def note(folder, name):
    """Leave a mark that the other process sees."""
    (folder / f"{name}-{os.getpid()}-{time.monotonic_ns()}").touch()


def marks(folder, name):
    return len(list(folder.glob(f"{name}-*")))


def test_a_loader_with_workers_of_its_own_is_read_in_a_worker(pool):
    loader = DataLoader(TensorDataset(torch.arange(6.0)), batch_size=2, num_workers=1)
    (found,) = in_order(run_in_processes(lambda given, _: torch.cat([x for (x,) in given]), [loader], pool))
    assert found.tolist() == [0, 1, 2, 3, 4, 5]


def test_results_arrive_with_their_index_whatever_was_given(pool):
    offset = 10  # a closure and a lambda, which plain pickle refuses
    found = dict(run_in_processes(lambda x, _: (x + offset, os.getpid(), torch.get_num_threads()), range(6), pool))
    assert [found[i][0] for i in range(6)] == list(range(10, 16))
    assert {threads for _, _, threads in found.values()} == {1}
    assert os.getpid() not in {pid for _, pid, _ in found.values()}
    assert list(run_in_processes(print, [], 2)) == []


def test_tensors_of_every_dtype_and_shape_come_back_whole(pool):
    made = [torch.randn(s).mul(5).to(d) for d in DTYPES for s in [(), (3,), (0, 2), (2, 3)]]
    (back,) = in_order(run_in_processes(lambda tensors, _: {"found": Found(tensors, "x")}, [made], pool))
    assert back["found"].name == "x"
    for one, two in zip(made, back["found"].values, strict=True):
        assert (one.dtype, one.shape) == (two.dtype, two.shape)
        assert torch.equal(one, two)


def test_a_result_costs_what_it_holds_and_has_no_graph():
    large = torch.randn(1000, 1000, requires_grad=True)
    assert len(pack_result(large[3])) < 6000
    row = unpack(pack_result(large[3] * 2))
    assert not row.requires_grad
    assert torch.equal(row, large[3] * 2)
    assert torch.equal(unpack(pack_result(large.T.detach()[:2])), large.T[:2])
    wavy = torch.randn(3, dtype=torch.complex64).conj()
    assert torch.equal(unpack(pack_result(wavy)), wavy)
    assert torch.equal(unpack(pack_result(torch.eye(2).to_sparse())).to_dense(), torch.eye(2))


def test_tensors_that_share_memory_still_do_on_the_other_side():
    theta = torch.zeros(6)
    layer = nn.Linear(2, 2)
    layer.weight.data = theta[:4].view(2, 2)
    layer.weight.mark = "kept"
    flat, other = unpack(pack((theta, layer)))
    flat[1] = 7.0
    assert other.weight[0, 1] == 7.0
    assert isinstance(other.weight, nn.Parameter)
    assert other.weight.requires_grad
    assert other.weight.mark == "kept"
    assert theta[1] == 0.0


def test_progress_is_heard_in_the_thread_that_asks(pool):
    def steps(x, reporter):
        for i in range(3):
            reporter.update(f"task {x}", i + 1, 3, "ends" if i == 2 else "goes on")

    heard = Heard()
    list(run_in_processes(steps, range(2), pool, heard))
    assert {news for news in heard.news if news[1] == 3} == {("task 0", 3, 3, "ends"), ("task 1", 3, 3, "ends")}
    assert ("task 0", 1, 3, "goes on") in heard.news
    assert heard.threads == {threading.current_thread()}


def test_standard_error_of_workers_is_seen(pool, capsys):
    list(run_in_processes(lambda x, _: print("from a worker", file=sys.stderr), [0], pool))
    assert "from a worker" in capsys.readouterr().err


def test_an_exception_arrives_as_itself_with_the_traceback_of_the_worker(pool, tmp_path):
    def fails(x, _):
        note(tmp_path, "begun")
        if x == 1:
            while marks(tmp_path, "begun") < 2:  # until the other worker is busy, too
                time.sleep(0.01)
            raise KeyError("missing")
        time.sleep(30)

    began = time.monotonic()
    with pytest.raises(KeyError, match="missing") as caught:
        list(run_in_processes(fails, range(8), pool))
    assert time.monotonic() - began < 10
    assert marks(tmp_path, "begun") == 2  # none was started after the failure
    (text,) = caught.value.__notes__
    assert "in a worker process, at arguments[1]" in text
    assert 'raise KeyError("missing")' in text


def test_exceptions_that_cannot_travel_leave_their_text(pool):
    def fails(x, _):
        if x:
            sys.exit(4)
        raise Awkward("this", "that")

    awkward, left = in_order(run_in_processes(fails, range(2), pool, keep_going=True))
    assert type(awkward.error) is RuntimeError
    assert str(awkward.error).endswith("Awkward: this and that")
    assert str(left.error) == "SystemExit: 4"


def test_deaths_are_told_apart_and_the_others_go_on(pool, tmp_path):
    def work(x, _):
        note(tmp_path, x)
        if x == "exits":
            print("my last words", file=sys.stderr)
            os._exit(3)
        if x == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if x == "raises":
            raise ValueError("no")
        time.sleep(0.2)
        return x

    names = ["a", "exits", "b", "killed", "c", "raises", "d"]
    found = in_order(run_in_processes(work, names, pool, keep_going=True))
    assert [marks(tmp_path, name) for name in names] == [1] * 7  # a death of one worker is no death of another
    assert [x for x in found if not isinstance(x, Failure)] == ["a", "b", "c", "d"]
    exits, killed, raises = found[1], found[3], found[5]
    assert [exits.index, killed.index, raises.index] == [1, 3, 5]
    assert isinstance(exits.error, WorkerDiedError)
    assert "died at arguments[1] = 'exits': exit code 3" in str(exits.error)
    assert "my last words" in str(exits.error)
    assert "died at arguments[3] = 'killed': signal SIGKILL, perhaps by the system for want of" in str(killed.error)
    assert "wrote nothing to standard error" in str(killed.error)
    assert isinstance(raises.error, ValueError)


def test_a_death_is_an_error_within_seconds(pool):
    def crashes(x, _):
        if x:
            time.sleep(60)
        import ctypes

        ctypes.string_at(0)

    list(run_in_processes(lambda x, _: x, range(2), pool))  # workers are there
    began = time.monotonic()
    with pytest.raises(WorkerDiedError, match=r"signal SIGSEGV(.|\n)*Segmentation fault"):
        list(run_in_processes(crashes, range(2), pool))
    assert time.monotonic() - began < 5


def test_a_caller_that_stops_early_leaves_no_work_behind(pool, tmp_path):
    def work(x, _):
        note(tmp_path, "begun")
        time.sleep(30 if x else 0)
        return os.getpid()

    results = run_in_processes(work, range(5), pool)
    next(results)
    before = psutil.Process().children(recursive=True)
    results.close()
    begun = marks(tmp_path, "begun")
    assert begun <= 3
    gone, _ = psutil.wait_procs(before, 1)
    assert gone  # those that were busy
    assert len(list(run_in_processes(lambda x, _: x, range(4), pool))) == 4
    assert marks(tmp_path, "begun") == begun


def test_an_interrupt_is_for_the_parent_to_act_on(pool):
    def interrupted(x, _):
        os.kill(os.getpid(), signal.SIGINT)
        return x

    assert in_order(run_in_processes(interrupted, range(2), pool)) == [0, 1]


def test_a_worker_that_dies_idle_or_forgets_is_replaced(pool):
    pids = {pid for _, pid in run_in_processes(lambda x, _: (time.sleep(0.3), os.getpid())[1], range(2), pool)}
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    time.sleep(0.5)

    def forgets(x, _):  # as a process that loky started anew between two tasks would
        serving.drop_function()
        return x

    assert sorted(run_in_processes(forgets, range(5), pool)) == [(i, i) for i in range(5)]


def test_inside_a_worker_everything_runs_in_the_loop(pool):
    def nested(x, reporter):
        inner = run_in_processes(lambda y, _: os.getpid(), range(3), 2, reporter)
        return serving.in_worker(), workers.cores(), {pid for _, pid in inner} == {os.getpid()}

    assert in_order(run_in_processes(nested, range(2), pool)) == [(True, 1, True)] * 2
    assert not serving.in_worker()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_shared_base_is_private_to_no_worker(pool):
    base = nn.Linear(2500, 5000).requires_grad_(False)  # 50 MB

    def work(x, _):
        before = dirty()
        total = base.weight.sum().item()
        return total, before, dirty()

    def changes(x, _):
        base.weight.fill_(1.0)
        return dirty()

    total = base.weight.sum().item()
    given = dict(base.named_parameters())
    shared = in_order(run_in_processes(work, range(2), pool, shared=given))
    sent = in_order(run_in_processes(work, range(2), pool))
    assert all(result[0] == total for result in shared + sent)
    assert max(after for _, _, after in shared) < min(before for _, before, _ in sent) - 40
    (changed,) = in_order(run_in_processes(changes, [0], pool, shared=given))
    assert changed > max(after for _, _, after in shared) + 40  # a copy of its own
    assert base.weight.sum().item() == total


def dirty():
    """MB of this process that no file backs: its own memory, and pages of a mapped file that it has changed."""
    return sum(m.anonymous for m in psutil.Process().memory_maps()) / 1e6


def test_the_file_of_shared_tensors_is_removed_in_the_end(pool, tmp_path):
    def fails(x, _):
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        list(run_in_processes(fails, range(2), pool, shared={"w": torch.zeros(5)}))
    assert not [name for name in os.listdir(pool._folder.name) if name.startswith("shared")]
    path = tmp_path / "shared.pt"
    tensors = {"w": torch.arange(3.0), "none": torch.zeros(0)}
    with mapped_file(path, tensors) as mapped:
        assert torch.equal(unpack(pack(tensors["w"][1:], mapped)), torch.tensor([1.0, 2.0]))
        assert torch.load(path, weights_only=True)  # tensors, nothing else
    assert not path.exists()
    with (
        pytest.raises(ValueError, match="shared tensors must be on the CPU; 'm' is on meta"),
        mapped_file(path, {"m": torch.zeros(2, device="meta")}),
    ):
        pass


@pytest.mark.parametrize("wrong", [0, -1, 2.0, "2", True, None])
def test_wrong_numbers_of_workers(wrong):
    with pytest.raises(ValueError, match=rf"workers must be a whole number of at least 1; got {wrong!r}\."):
        run_in_processes(print, [1], wrong)
    with pytest.raises(ValueError, match="workers must be"):
        Workers(wrong)


def test_what_cannot_be_sent_is_named(pool):
    lock = threading.Lock()
    with pytest.raises(ValueError, match="fn must be able to leave this process .* pickle .* leave out workers"):
        list(run_in_processes(lambda x, _: lock, [1], pool))
    with pytest.raises(ValueError, match=r"arguments\[1\] must be able to leave this process"):
        list(run_in_processes(lambda x, _: x, [1, lock], pool))


def test_one_call_at_a_time(pool):
    results = run_in_processes(lambda x, _: x, range(3), pool)
    next(results)
    with pytest.raises(RuntimeError, match="busy with another call"):
        next(run_in_processes(lambda x, _: x, range(3), pool))
    assert len(list(results)) == 2


def test_a_pool_of_one_call_leaves_nothing():
    with Workers(1) as own:
        (pid,) = in_order(run_in_processes(lambda x, _: os.getpid(), [0], own))
        folder = own._folder.name
    assert not psutil.pid_exists(pid)
    assert not os.path.exists(folder)

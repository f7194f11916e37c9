"""What a shell, a shadow and a plain module promise, and what is refused with a sentence."""

import copy
import gc
import types
import weakref

import pytest
import torch
from torch import nn

from bayesformer.model.skeleton import Skeleton, shadow
from bayesformer.model.space import Space
from tests.shell_checks import assert_same, record
from tests.shell_zoo import Net, Shared, batch_norm, counting


def skeleton_of(model, infer=None):
    return Skeleton(model, Space.of(model, infer))


def test_frozen_weights_are_the_users_memory_and_inferred_ones_views_of_theta():
    model = Net()
    shell = skeleton_of(model, "second*").shell()
    own = dict(shell.module.named_parameters())
    assert own["first.weight"].data_ptr() == model.first.weight.data_ptr()
    assert own["first.weight"] is not model.first.weight
    assert not own["first.weight"].requires_grad
    assert own["second.weight"].data_ptr() == shell.theta.data_ptr()
    assert own["second.weight"].grad.data_ptr() == shell.grad.data_ptr()
    assert own["second.weight"].requires_grad
    assert shell.theta.data_ptr() != model.second.weight.data_ptr()
    assert str(shell.facts) == "15 inferred; 16 shared with the model; 0 bytes copied"
    assert repr(shell) == f"Shell(Net: {shell.facts})"


def test_a_shell_for_prediction_has_no_gradient():
    shell = skeleton_of(Net()).shell(gradients=False)
    assert shell.grad is None
    assert not any(p.requires_grad or p.grad is not None for p in shell.module.parameters())


def test_load_copies_values_and_is_free_for_its_own_vector():
    shell = skeleton_of(Net()).shell()
    other, version = torch.randn_like(shell.theta), shell.theta._version
    shell.load(shell.theta)
    assert shell.theta._version == version
    shell.load(other)
    assert torch.equal(shell.theta, other)
    assert shell.theta.data_ptr() != other.data_ptr()
    assert torch.equal(shell.module.first.weight.reshape(-1), other[:12])


def test_a_given_vector_is_used_without_a_copy():
    skeleton = skeleton_of(Net())
    theta = torch.randn(31)
    shell = skeleton.shell(theta=theta)
    assert shell.theta.data_ptr() == theta.data_ptr()
    assert torch.equal(shell.module.second.bias, theta[-3:])
    with pytest.raises(
        ValueError, match=r"theta must be .*\(31,\), torch.float32, cpu; got \(30,\), torch.float32, cpu"
    ):
        skeleton.shell(theta=torch.randn(30))


def test_buffers_are_live_own_and_loaded_by_value():
    case = batch_norm()
    skeleton = skeleton_of(case.model)
    shell, other = skeleton.shell(), skeleton.shell()
    before = record(case.model)
    saved = {name: tensor.clone() for name, tensor in shell.buffers.items()}
    shell.module.train()(case.inputs)
    assert not torch.equal(shell.buffers["1.running_mean"], saved["1.running_mean"])
    assert torch.equal(other.buffers["1.running_mean"], saved["1.running_mean"])
    place = shell.buffers["1.running_mean"].data_ptr()
    shell.load_buffers(saved)
    assert torch.equal(shell.buffers["1.running_mean"], saved["1.running_mean"])
    assert shell.buffers["1.running_mean"].data_ptr() == place
    assert_same(before, record(case.model))
    with pytest.raises(ValueError, match="it has no 7.mean"):
        shell.load_buffers({"7.mean": torch.ones(1)})


def test_buffers_that_a_pass_replaces_or_resizes_are_seen_and_put_back():
    class Replacing(Net):
        def __init__(self):
            super().__init__()
            self.register_buffer("past", torch.zeros(1))

        def forward(self, x):
            self.past = torch.cat([self.past, x.detach()[0]])
            return super().forward(x)

    shell = skeleton_of(Replacing()).shell()
    saved = {name: tensor.clone() for name, tensor in shell.buffers.items()}
    shell(torch.randn(2, 3))
    assert shell.buffers["past"].shape == (4,)
    shell.load_buffers(saved)
    assert torch.equal(shell.module.past, torch.zeros(1))


def test_non_persistent_buffers_and_plain_tensors_are_own():
    case = counting()
    shell = skeleton_of(case.model).shell()
    shell(case.inputs)
    assert "big" in shell.buffers
    assert shell.module.seen.item() == shell.module.calls == 1
    assert case.model.seen.item() == case.model.calls == case.model.big.max() == 0


def test_new_shells_start_from_what_the_skeleton_saw():
    case = batch_norm()
    skeleton = skeleton_of(case.model)
    seen = case.model[1].running_mean.clone()
    case.model.train()(case.inputs)
    assert torch.equal(skeleton.shell().buffers["1.running_mean"], seen)


def test_verify_tells_lost_views():
    shell = skeleton_of(Net()).shell()
    shell.module.zero_grad()
    with pytest.raises(RuntimeError, match="the gradient of first.weight was replaced"):
        shell.verify()
    shell = skeleton_of(Net()).shell()
    shell.module.second.bias = nn.Parameter(torch.zeros(3))
    with pytest.raises(RuntimeError, match="second.bias of the shell was replaced"):
        shell.verify()
    with pytest.raises(TypeError, match="a Shell cannot be copied or pickled; make another one by skeleton.shell"):
        copy.deepcopy(shell)


def test_shells_die_with_their_last_reference():
    shell = skeleton_of(Net()).shell()
    module = weakref.ref(shell.module)
    del shell
    gc.collect()
    assert module() is None


def test_changed_names_the_first_weight_of_the_base_that_was_written():
    model = Net()
    skeleton = skeleton_of(model, "second*")
    model.second.weight.data.add_(1)  # inferred: has its own copy
    assert skeleton.changed() is None
    with torch.no_grad():
        model.first.bias.add_(1)
    assert skeleton.changed() == "first.bias"
    other = skeleton_of(model, "second*")
    model.load_state_dict(Net().state_dict())
    assert other.changed() == "first.weight"


def test_made_and_used_under_inference_mode():
    with torch.inference_mode():
        model = Net()
        model.register_buffer("shift", torch.ones(1))
        skeleton = skeleton_of(model, "second*")
        shell = skeleton.shell()
    assert not any(t.is_inference() for t in (*shell.module.parameters(), *shell.module.buffers()))
    shell(torch.randn(2, 3)).sum().backward()
    assert shell.grad.abs().max() > 0
    with torch.inference_mode():
        shell.load(shell.theta + 1)
        shell.load_buffers({"shift": torch.zeros(1)})
        shell(torch.randn(2, 3))
    shell(torch.randn(2, 3)).sum().backward()


def test_a_plain_module_stands_alone():
    model = Net()
    model.first.weight.requires_grad_(False)
    model.register_buffer("count", torch.zeros(1))
    before = record(model)
    skeleton = skeleton_of(model, "first.weight")
    theta = torch.randn(12)
    plain = skeleton.plain(theta, {"count": torch.ones(1)})
    assert torch.equal(plain.first.weight.reshape(-1), theta)
    assert [p.requires_grad for p in plain.parameters()] == [p.requires_grad for p in model.parameters()]
    assert plain.count.item() == 1
    optimiser = torch.optim.SGD(plain.parameters(), 0.1)
    plain(torch.randn(4, 3)).sum().backward()
    optimiser.step()
    theta.zero_()
    assert plain.first.weight.abs().sum() > 0
    copy.deepcopy(plain)
    assert_same(before, record(model))


def test_a_shadow_is_free_to_change():
    model = Shared()
    model.config = types.SimpleNamespace(kind="eager", nested={"a": [1]})
    model.train()
    before = record(model)
    config = copy.deepcopy(vars(model.config))
    copied = shadow(model, "head*")
    assert {name for name, p in copied.named_parameters() if p.requires_grad} == {"embed.weight"}
    assert copied.head.weight is copied.embed.weight
    assert copied.embed.weight.data_ptr() == model.embed.weight.data_ptr()
    assert copied.training
    copied.config.kind = "other"
    copied.config.nested["a"].append(2)
    copied.layer = nn.Sequential(copied.layer, nn.Dropout(0.5))
    copied.head.register_forward_hook(lambda m, a, y: y * 2)
    copied.eval()
    space = Space.of(copied)
    assert torch.equal(space.pack(dict(copied.named_parameters())), model.embed.weight.reshape(-1))
    shell = Skeleton(copied, space).shell()
    ids = torch.randint(7, (2, 3))
    assert torch.equal(shell(ids), 2 * model.eval()(ids))
    model.train()
    shell(ids).sum().backward()
    assert_same(before, record(model))
    assert vars(model.config) == config


def test_refusals_name_what_and_why():
    def refused(model, text, infer="*"):
        with pytest.raises(ValueError, match=text):
            skeleton_of(model, infer)

    model = nn.Sequential(Net(), torch.jit.trace(Net(), torch.randn(1, 3)))
    refused(model, r"must be plain Python; 1 is a TopLevelTracedModule of torch.jit", "0.*")
    refused(nn.Sequential(Net(), nn.Linear(3, 2, device="meta")), "1.weight is on the meta device")
    refused(nn.Sequential(nn.LazyLinear(3)), "0.weight has no shape yet. Call the model once")
    model = Net()
    model.second.weight = nn.Parameter(model.first.weight.data.view(3, 4))
    refused(model, "must not share memory with another Parameter; first.weight and second.weight overlap")
    model = nn.Sequential(nn.Embedding(3, 4, max_norm=1.0))
    refused(model, "0.weight belongs to an embedding with max_norm")
    model = Net()
    model.kept = model.first.weight.t()
    refused(model, "must not keep a view of the inferred weight first.weight as an attribute")
    with pytest.raises(TypeError, match="model must be a torch.nn.Module; got dict"):
        Space.of({})


def test_a_deep_chain_is_refused():
    model = nn.Linear(2, 2)
    for _ in range(400):
        holder = nn.Module()
        holder.inner = model
        model = holder
    with pytest.raises(ValueError, match=r"must not be nested deeper than Python's recursion limit.*\(limit \d+\)"):
        skeleton_of(model)


def test_a_space_must_fit_the_model():
    with pytest.raises(ValueError, match="it has no embed.weight"):
        Skeleton(Net(), Space.of(Shared()))
    with pytest.raises(ValueError, match=r"first.weight is \(5, 3\), not \(4, 3\)"):
        Skeleton(Net(width=5), Space.of(Net()))


def test_frozen_parameters_may_overlap_and_gaps_in_one_storage_are_fine():
    flat = torch.randn(31)
    model = Net()
    for p, part in zip(model.parameters(), flat.split([12, 4, 12, 3]), strict=True):
        p.data = part.view(p.shape)  # as cuDNN lays out the weights of an LSTM
    shell = skeleton_of(model).shell()
    assert torch.equal(shell.theta, flat)


def test_a_parameter_subclass_keeps_its_class_where_frozen():
    class Coded(nn.Parameter):
        pass

    model = Net()
    model.first.weight = Coded(model.first.weight.data, requires_grad=False)
    model.first.weight.scale = 2.0
    own = skeleton_of(model, "second*").shell().module.first.weight
    assert isinstance(own, Coded)
    assert own.scale == 2.0
    assert own.data_ptr() == model.first.weight.data_ptr()


def test_shared_objects_are_told():
    import threading

    model = Net()
    model.locks = [threading.Lock(), threading.Lock()]
    skeleton = skeleton_of(model)
    assert skeleton.facts.shared == ("lock × 2",)
    assert skeleton.shell().module.locks[0] is model.locks[0]


def test_sentinels_keep_their_identity_and_weak_targets_outside_the_tree_live():
    class Outside:
        pass

    model, outside = Net(), Outside()
    model.marker = object()
    model.link = weakref.ref(outside)
    shell = skeleton_of(model).shell()
    gc.collect()
    assert shell.module.marker is model.marker
    assert isinstance(shell.module.link(), Outside)
    assert shell.module.link() is not outside


def test_an_object_that_cannot_be_built_again_is_told():
    class Broken:
        def __reduce__(self):
            return int, ("no number",)

    model = Net()
    model.broken = Broken()
    with pytest.raises(ValueError, match="model must hold only what can be copied; copying it failed: invalid literal"):
        skeleton_of(model).shell()


@pytest.fixture
def process_group(tmp_path):
    dist = torch.distributed
    if not dist.is_available():
        pytest.skip("torch without torch.distributed")
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore")
def test_distributed_wrappers(process_group):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_tensor

    model, x = Net(), torch.randn(2, 3)
    wrapped = nn.parallel.DistributedDataParallel(model)
    shell = skeleton_of(wrapped).shell()
    assert shell.space.names[0] == "first.weight"
    assert torch.equal(shell(x), model(x))
    model.first.weight = nn.Parameter(distribute_tensor(model.first.weight.data, init_device_mesh("cpu", (1,))))
    with pytest.raises(ValueError, match="must hold whole weights; first.weight is a DTensor"):
        skeleton_of(model)

"""Tensors in files lie in memory as they did: what is computed with them is the same, bit for bit."""

import pytest
import torch
from torch import nn

import bayesformer as bf
from bayesformer.core.errors import DamagedFileError
from bayesformer.core.storage import checksum, read_checked, write_tensors


def test_files_keep_the_order_of_axes(tmp_path):
    first = torch.arange(24.0).view(2, 3, 4)
    tensors = {
        "rows": first,
        "columns": torch.arange(6.0).view(2, 3).mT,
        "turned": first.permute(2, 0, 1),
        "part": first[:, 1],  # with gaps: only its values and order can be kept
        "wide": torch.ones(3, 1).expand(3, 4),
    }
    write_tensors(tmp_path / "file", tensors, {"a": 1})
    found, facts = read_checked(tmp_path / "file", "file")
    assert facts == {"a": 1}
    for name, tensor in tensors.items():
        assert torch.equal(found[name], tensor)
    for name in ("rows", "columns", "turned"):
        assert found[name].stride() == tensors[name].stride()


def test_the_order_is_under_the_checksum(tmp_path):
    from safetensors.torch import save_file

    tensors = {"a": torch.ones(2, 3)}
    known = {"facts": "{}", "orders": '{"a": [1, 0]}', "checksum": checksum(tensors, "{}")}
    save_file(tensors, tmp_path / "file", metadata=known)
    with pytest.raises(DamagedFileError, match="its checksum differs"):
        read_checked(tmp_path / "file", "file")


@pytest.mark.filterwarnings("ignore::bayesformer.FidelityWarning")
@pytest.mark.parametrize("method", [bf.Vi(kind="kron", epochs=2), bf.Vi(kind="dense", epochs=2)], ids=["kron", "dense"])
def test_a_loaded_posterior_predicts_bit_for_bit(method, tmp_path):
    for seed in range(4):
        torch.manual_seed(seed)
        x = torch.randn(45, 4)
        model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
        options = {"likelihood": "categorical", "infer": "2.*", "training": bf.Training(epochs=3)}
        posterior = bf.fit(model, (x, (x[:, 0] * x[:, 1] > 0).long()), method=method, **options)
        posterior.save(tmp_path / str(seed))
        loaded = bf.Posterior.load(tmp_path / str(seed), model)
        assert torch.equal(loaded.predict(x[:4]).probs, posterior.predict(x[:4]).probs)

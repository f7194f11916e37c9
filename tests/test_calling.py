"""How a model is called, and which output counts."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from bayesformer.model.calling import apply, call, select_output, split_inputs
from tests.shell_zoo import Net


class Picky(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x, *, use_cache, layers):
        assert use_cache is False
        assert layers == [1, 2]
        return {"logits": self.layer(x), "loss": None}


def test_values_that_are_no_tensors_pass_through():
    model, x = Picky(), torch.randn(4, 3)
    inputs = {"x": x, "use_cache": False, "layers": [1, 2]}
    assert torch.equal(apply(model, inputs), model.layer(x))
    zero = {"layer.weight": torch.zeros(2, 3)}
    assert torch.equal(call(model, zero, inputs), model.layer.bias.expand(4, 2))
    assert torch.equal(apply(model, inputs), model.layer(x))


def test_inputs_are_one_tensor_a_tuple_a_mapping_or_one_object():
    x, graph = torch.ones(2), SimpleNamespace(edges=3)
    for given, expected in ((x, ((x,), {})), ((x, None), ((x, None), {})), ({"x": x}, ((), {"x": x}))):
        torch.testing.assert_close(split_inputs(given), expected)
    assert split_inputs(graph) == ((graph,), {})


def test_tensors_are_handed_over_as_copies_unless_they_are_differentiated():
    x, followed = torch.ones(2), torch.ones(2, requires_grad=True)
    (mine, theirs), _ = split_inputs((x, followed))
    assert mine.data_ptr() != x.data_ptr()
    assert theirs is followed


def test_logits_are_found():
    x = torch.ones(2, 3)
    assert select_output(x) is x
    assert select_output({"loss": None, "logits": x}) is x
    assert select_output(SimpleNamespace(logits=x)) is x
    assert select_output((x, "state")) is x
    single = torch.tensor(3.0)
    assert select_output((single,)) is single


@pytest.mark.parametrize(
    ("output", "text"),
    [
        ((torch.tensor(1.0), torch.ones(2, 3)), r"single number, as in \(loss, logits\). Call it without labels"),
        ({"last_hidden_state": torch.ones(2)}, "got dict with keys \\['last_hidden_state'\\]. Wrap it"),
        ((None, torch.ones(2)), "its first entry is NoneType"),
        ((), "got tuple"),
        (3.0, "got float"),
    ],
)
def test_other_outputs_are_refused(output, text):
    with pytest.raises(ValueError, match=text):
        select_output(output)


def test_call_reaches_recurrent_and_tied_weights():
    model, x = nn.LSTM(3, 4), torch.randn(5, 2, 3)
    zeros = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    assert call(model, zeros, x).abs().max() == 0
    assert apply(model, x).abs().max() > 0
    assert apply(Net(), torch.randn(2, 3)).shape == (2, 3)


def test_an_error_of_the_forward_says_which_inputs_it_was_given() -> None:
    inputs = {"x": torch.zeros(2, 5), "flag": True}

    class Named(nn.Module):
        """A layer whose input has a name."""

        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 1)

        def forward(self, x: torch.Tensor, flag: bool) -> torch.Tensor:
            """(B, 1)."""
            return self.layer(x)

    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as caught:
        apply(Named(), inputs)
    assert caught.value.__notes__ == [
        "The model's forward was called with inputs of the data: (x=(2, 5) float32, flag=bool); the first dimension "
        "counts examples."
    ]


def test_an_error_of_types_says_to_which_the_inputs_are_converted() -> None:
    with pytest.raises(RuntimeError, match="same dtype") as caught:
        apply(nn.Linear(4, 1), torch.zeros(2, 4, dtype=torch.float64))
    assert caught.value.__notes__[0].endswith("convert inputs that are numbers, as x.to(torch.float32) does.")

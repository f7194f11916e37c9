"""Which weights are inferred: choice by pattern, predicate and flags, places in one vector, files."""

import json

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from bayesformer.model.space import Space
from tests.shell_zoo import Net, Scalar, Shared


def test_by_default_what_requires_a_gradient_in_the_order_of_the_model():
    model = Net()
    model.first.weight.requires_grad_(False)
    space = Space.of(model)
    assert space.names == ("first.bias", "second.weight", "second.bias")
    assert space.shapes == ((4,), (3, 4), (3,))
    assert (space.size, space.sizes, space.dtype) == (19, [4, 12, 3], torch.float32)


@pytest.mark.parametrize(
    ("infer", "names"),
    [
        ("*.bias", ("first.bias", "second.bias")),
        (["second.bias", "first.*"], ("first.weight", "first.bias", "second.bias")),
        (lambda name, p: p.dim() == 2, ("first.weight", "second.weight")),
        (iter(["first.bias"]), ("first.bias",)),
        ("second.weight", ("second.weight",)),
    ],
)
def test_infer_takes_patterns_and_predicates_and_ignores_the_flags(infer, names):
    model = Net().requires_grad_(False)
    assert Space.of(model, infer).names == names
    assert not any(p.requires_grad for p in model.parameters())


def test_tied_weights_are_one_member_found_by_any_of_their_names():
    model = Shared()
    assert Space.of(model).names == ("embed.weight", "layer.weight", "layer.bias")
    found = Space.of(model, "head*")
    assert found.names == ("embed.weight",)
    assert found.aliases == (("head.weight",),)
    assert Space.of(model, lambda name, p: name == "again.bias").names == ("layer.bias",)
    assert Space.of(model).select("again.*").names == ("layer.weight", "layer.bias")


def test_two_parameters_that_are_one_view_of_one_memory_are_tied():
    model = Shared()
    model.head.weight = nn.Parameter(model.embed.weight.data)
    assert Space.of(model).names == ("embed.weight", "layer.weight", "layer.bias")


def test_scalars_and_originals_of_parametrised_weights_are_members():
    assert "scale" in Space.of(Scalar()).names
    model = parametrizations.weight_norm(nn.Linear(3, 2))
    assert set(Space.of(model).names) == {
        "bias",
        "parametrizations.weight.original0",
        "parametrizations.weight.original1",
    }


def test_names_with_pattern_characters_are_found_by_themselves():
    model = nn.Module()
    model.table = nn.ParameterDict({"a[0]": nn.Parameter(torch.ones(2))})
    assert Space.of(model, "table.a[0]").names == ("table.a[0]",)


def test_wrapped_models_have_the_names_of_what_is_inside():
    model = Net()
    assert Space.of(torch.compile(model, backend="eager")) == Space.of(model)
    assert Space.of(nn.DataParallel(model)) == Space.of(model)


@pytest.mark.parametrize(
    ("infer", "text"),
    [
        ("frist*", "infer='frist\\*' matches no weight. Nearest names: first.bias"),
        (["first*", "zzz"], "infer='zzz' matches no weight"),
        ([], "infer must name at least one pattern; got an empty list"),
        (lambda name, p: False, "infer must choose at least one weight; the predicate chose none of 4"),
    ],
)
def test_a_choice_that_matches_nothing_is_an_error(infer, text):
    with pytest.raises(ValueError, match=text):
        Space.of(Net(), infer)


def test_a_pattern_must_be_text():
    with pytest.raises(TypeError, match="infer must be a pattern, several, or a predicate; got int among them"):
        Space.of(Net(), [3])


def test_a_frozen_model_needs_infer():
    with pytest.raises(ValueError, match="at least one parameter with requires_grad=True; it has none. Say which"):
        Space.of(Net().requires_grad_(False))


def test_dtype_is_double_if_a_weight_is_and_half_weights_are_allowed():
    model = Net()
    model.second.double()
    assert Space.of(model).dtype == torch.float64
    assert Space.of(model, "first*").dtype == torch.float32
    assert Space.of(Net().bfloat16()).dtype == torch.float32


def test_complex_and_integer_weights_are_refused_by_name():
    model = Net()
    model.wave = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    model.codes = nn.Parameter(torch.ones(2, dtype=torch.int8), requires_grad=False)
    with pytest.raises(ValueError, match="must be real; wave is torch.complex64"):
        Space.of(model)
    with pytest.raises(ValueError, match="must be (floating|one of .*); codes is torch.int8"):
        Space.of(model, "codes")
    assert "wave" not in Space.of(model, "first*").names


def test_select_and_without_split_a_space():
    space = Space.of(Net())
    biases = space.select("*.bias")
    rest = space.without(biases)
    assert biases.names == ("first.bias", "second.bias")
    assert rest.names == ("first.weight", "second.weight")
    assert space.select(None) is space
    assert space.select(lambda name, w: w.shape == (4,)).names == ("first.bias",)
    assert space.without(space).size == 0
    with pytest.raises(ValueError, match="subset='head' matches no weight"):
        space.select("head")
    with pytest.raises(ValueError, match="must lie in this one; first.weight is not in it"):
        biases.without(space)


def test_places_are_a_slice_of_neighbours_or_an_index():
    space = Space.of(Net())
    flat = torch.arange(space.size)
    assert space.places(space.select("second*")) == slice(16, 31)
    index = space.places(space.select("*.bias"))
    assert index.dtype == torch.int64
    biases = space.views(flat)
    assert torch.equal(flat[index], torch.cat([biases["first.bias"], biases["second.bias"]]))


def test_views_and_pack_are_inverse_for_a_vector_and_keep_members_in_front():
    model, space = Net(), Space.of(Net())
    params = dict(model.named_parameters())
    flat = space.pack(params)
    assert all(torch.equal(view, params[name]) for name, view in space.views(flat).items())
    assert not flat.requires_grad
    flat.zero_()
    assert params["first.bias"].abs().sum() > 0  # a new vector, not a view
    rows = torch.arange(3.0 * space.size).view(3, -1)
    views = space.views(rows)
    assert views["second.weight"].shape == (3, 3, 4)
    assert torch.equal(views["first.weight"][2].reshape(-1), rows[2, :12])
    views["first.bias"].zero_()
    assert rows[:, 12:16].abs().sum() == 0  # views
    one = Space.of(model, "first.bias")
    one.pack(params).zero_()
    assert params["first.bias"].abs().sum() > 0


def test_pack_casts_and_checks():
    space = Space.of(Net())
    params = dict(Net().bfloat16().named_parameters())
    assert space.pack(params).dtype == torch.float32
    with pytest.raises(ValueError, match="params must hold every weight of the space; first.weight is missing"):
        space.pack({})
    with pytest.raises(ValueError, match=r"first.bias is \(4, 1\), not \(4,\)"):
        space.pack({**params, "first.bias": torch.ones(4, 1)})
    with pytest.raises(ValueError, match=r"axis of 31 numbers; got shape \(30,\)"):
        space.views(torch.ones(30))


def test_a_space_is_a_value_and_survives_a_file():
    space = Space.of(Shared())
    back = Space.from_json(json.loads(json.dumps(space.to_json())))
    assert back == space
    assert back.aliases == space.aliases
    assert len({space, back}) == 1
    assert Space.of(Net()) != space
    with pytest.raises(ValueError, match="must be float32 or float64; got 'int8'"):
        Space.from_json({"names": [], "shapes": [], "dtype": "int8"})

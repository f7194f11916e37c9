"""What each torch function does with a followed parameter, as a site: one rule per kind of function.

A rule is called after its function, `rule(recorder, function, result, *args, **kwargs) -> bool`, with the arguments
that the function had. It adds a site to the recorder, or follows the result in place of the parameter, and returns
whether the use is covered. `RULES` at the end of the file maps functions to rules:

    functions                            rule            what is recorded
    linear, addmm, matmul                _linear, ...    a linear site of the weight, an element site of the bias
    layer_norm, rms_norm                 _norm           element sites of gain and bias
    embedding                            _embedding      an embedding site; or its rows, if looked up without a batch
    conv1d, conv2d without groups        _convolution    a linear site whose inputs are patches
    add, sub                             _add            an element site; or the sum, if the batch is not in it
    mul                                  _multiply       an element site with inputs
    expand, repeat                       _expand         an element site (class tokens); or the result
    to, float, contiguous                _cast           the result, as the same numbers
    view, indexing, transpose, split     _view           the results, with the places of the numbers that they show

Functions that are not here leave the parameter to a backward pass per example.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from bayesformer.jacobians.sites import ElementSite, EmbeddingSite, LinearSite, Output, Part

if TYPE_CHECKING:
    from bayesformer.jacobians.use_recorder import UseRecorder


def _arguments(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterable[Any]:
    for x in (*args, *kwargs.values()):
        if isinstance(x, tuple | list):
            yield from x
        else:
            yield x


def _linear(
    recorder: UseRecorder, _: Any, out: Tensor, input: Tensor, weight: Tensor, bias: Tensor | None = None
) -> bool:
    return _matrix_product(recorder, out, input, weight, bias, turned=False)


def _addmm(
    recorder: UseRecorder, _: Any, out: Tensor, bias: Tensor, input: Tensor, weight: Tensor, **scales: float
) -> bool:
    return not scales and _matrix_product(recorder, out, input, weight, bias, turned=True)


def _matmul(recorder: UseRecorder, _: Any, out: Tensor, input: Tensor, weight: Tensor) -> bool:
    return weight.dim() == 2 and _matrix_product(recorder, out, input, weight, None, turned=True)


def _matrix_product(
    recorder: UseRecorder, out: Tensor, input: Tensor, weight: Tensor, bias: Tensor | None, turned: bool
) -> bool:
    if recorder.part(input) is not None:
        return False
    part, shift = recorder.part(weight), recorder.part(bias)
    axis = recorder.axis(part or shift, out.shape, range(out.dim() - 1))  # type: ignore[arg-type]
    if axis is None:
        return False
    output = recorder.output(out, axis)
    if part is not None:
        a = axis.front(input.detach().to(recorder.dtype))
        a = a if a.dim() == 3 else a.reshape(len(a), -1, a.shape[-1])
        recorder.sites.append(LinearSite(part, output, a, turned))
    return shift is None or _element(recorder, shift, output, bias)  # type: ignore[arg-type]


def _element(
    recorder: UseRecorder, part: Part, output: Output, p: Tensor, inputs: Tensor | None = None, sign: int = 1
) -> bool:
    """Note a use of `p`, broadcast to the output; `inputs` multiply it."""
    shape, axis = list(p.shape), output.axis
    shape = [1] * (len(output.shape) - len(shape)) + shape
    if shape.pop(axis.number) != 1:
        return False
    if axis.flat:
        shape.insert(0, 1)
    if inputs is not None:
        inputs = axis.front(inputs.detach().to(recorder.dtype).expand(output.shape))
    recorder.sites.append(ElementSite(part, output, torch.Size(shape), inputs, sign))
    return True


def _free(out: Tensor, p: Tensor) -> list[int]:
    """Axes of `out` along which `p` is broadcast: one of them may be the batch."""
    missing = out.dim() - p.dim()
    return [i for i in range(out.dim()) if i < missing or p.shape[i - missing] == 1]


def _add(recorder: UseRecorder, func: Any, out: Tensor, left: Any, right: Any, **options: Any) -> bool:
    if options:
        return False
    parts = recorder.part(left), recorder.part(right)
    if None not in parts:
        return False
    p, part, is_right = (right, parts[1], True) if parts[0] is None else (left, parts[0], False)
    assert part is not None
    negative = is_right and func in SUBTRACTIONS
    axis = recorder.axis(part, out.shape, _free(out, p))
    if axis is not None:
        return _element(recorder, part, recorder.output(out, axis), p, sign=-1 if negative else 1)
    if negative:
        return False
    # No batch here: the sum moves as the parameter does, so it is followed in its place.
    recorder.alias(out, Part(part.name, part.shape, part.places(out).view(p.shape).expand(out.shape)))
    return True


def _multiply(recorder: UseRecorder, _: Any, out: Tensor, left: Any, right: Any) -> bool:
    parts = recorder.part(left), recorder.part(right)
    if None not in parts:
        return False
    p, x, part = (right, left, parts[1]) if parts[0] is None else (left, right, parts[0])
    assert part is not None
    axis = recorder.axis(part, out.shape, _free(out, p))
    if axis is None or not isinstance(x, Tensor):
        return False
    return _element(recorder, part, recorder.output(out, axis), p, inputs=x)


def _norm(recorder: UseRecorder, func: Any, out: Tensor, input: Tensor, shape: Any, *args: Any, **kwargs: Any) -> bool:
    """LayerNorm and RMSNorm: a gain on what is normalised already, and a bias."""
    names = ["weight", "bias", "eps"] if func is F.layer_norm else ["weight", "eps"]
    options = dict(zip(names, args, strict=False)) | kwargs
    weight, bias = options.pop("weight", None), options.pop("bias", None)
    gain, shift = recorder.part(weight), recorder.part(bias)
    axis = recorder.axis(gain or shift, out.shape, range(out.dim() - len(shape)))  # type: ignore[arg-type]
    if axis is None or recorder.part(input) is not None:
        return False
    output, covered = recorder.output(out, axis), True
    if gain is not None:
        with torch.no_grad():
            if recorder.moments and out is recorder.moments[0]:
                normalised = (input - recorder.moments[1]).mul_(recorder.moments[2]).to(out.dtype)
            else:  # RMSNorm, or mixed precision
                normalised = func(input, shape, **options)
        covered = _element(recorder, gain, output, weight, inputs=normalised)
    return covered and (shift is None or _element(recorder, shift, output, bias))


def _embedding(
    recorder: UseRecorder,
    _: Any,
    out: Tensor,
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,  # noqa: ARG001
    scale_grad_by_freq: bool = False,
    sparse: bool = False,  # noqa: ARG001
) -> bool:
    part = recorder.part(weight)
    if part is None or max_norm is not None or scale_grad_by_freq:
        return False
    axis = recorder.axis(part, input.shape, range(input.dim()))
    if axis is not None and part.index is None:
        tokens = axis.front(input)
        padding = None if padding_idx is None else padding_idx % len(weight)
        tokens = tokens.reshape(len(tokens), -1)
        recorder.sites.append(EmbeddingSite(part, recorder.output(out, axis), tokens, padding))
        return True
    if axis is not None or padding_idx is not None:
        return False
    # Looked up once for all examples (positions): the rows are followed in place of the table.
    rows = part.index[input] if part.index is not None else _rows(input, weight.shape[1])
    recorder.alias(out, Part(part.name, part.shape, rows))
    return True


def _rows(tokens: Tensor, width: int) -> Tensor:
    return tokens.unsqueeze(-1) * width + torch.arange(width, device=tokens.device)


def _convolution(
    recorder: UseRecorder,
    _: Any,
    out: Tensor,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> bool:
    part, shift = recorder.part(weight), recorder.part(bias)
    spatial = weight.dim() - 2
    if groups != 1 or isinstance(padding, str) or out.dim() != weight.dim() or recorder.part(input) is not None:
        return False
    axis = recorder.axis(part or shift, out.shape, [0])  # type: ignore[arg-type]
    if axis is None or axis.flat:
        return False
    output, covered = recorder.output(out, axis), True
    if part is not None:
        stride, padding, dilation = (_each(x, spatial) for x in (stride, padding, dilation))
        kernel, images = tuple(weight.shape[2:]), input.detach().to(recorder.dtype)
        if spatial == 1:  # an image of height 1
            images, kernel = images.unsqueeze(2), (1, *kernel)
            stride, padding, dilation = (1, *stride), (0, *padding), (1, *dilation)
        patches = F.unfold(images, kernel, dilation, padding, stride).mT  # (B, R, in)
        recorder.sites.append(LinearSite(part, output, patches, channels_second=True))
    if shift is not None:
        covered = _element(recorder, shift, output, bias.view(-1, *[1] * spatial))  # type: ignore[union-attr]
    return covered


def _each(value: Any, count: int) -> tuple[int, ...]:
    return (value,) * count if isinstance(value, int) else tuple(value) * (count if len(value) == 1 else 1)


def _view(recorder: UseRecorder, func: Any, out: Any, tensor: Tensor, *args: Any, **kwargs: Any) -> bool:
    """A view of a parameter is followed as a part: the same function on the parameter's indices tells which one."""
    part = recorder.part(tensor)
    if part is None or any(recorder.part(x) is not None for x in _arguments(args, kwargs)):
        return False
    places = func(part.places(tensor), *args, **kwargs)
    for t, index in zip(*((x,) if isinstance(x, Tensor) else x for x in (out, places)), strict=True):
        recorder.alias(t, Part(part.name, part.shape, index))
    return True


def _expand(recorder: UseRecorder, func: Any, out: Tensor, tensor: Tensor, *args: Any, **kwargs: Any) -> bool:
    """A parameter written out, once per example (a class token) or along other axes."""
    part = recorder.part(tensor)
    if part is None:
        return False
    index = func(part.places(tensor), *args, **kwargs)
    axis = recorder.axis(part, out.shape, [0] if bool((index == index[:1]).all()) else [])
    if axis is None or axis.flat:
        recorder.alias(out, Part(part.name, part.shape, index))
        return True
    one = Part(part.name, part.shape, index[0])
    recorder.sites.append(ElementSite(one, recorder.output(out, axis), index.shape[1:]))
    return True


def _cast(recorder: UseRecorder, _: Any, out: Tensor, tensor: Tensor, *args: Any, **kwargs: Any) -> bool:  # noqa: ARG001
    """The same numbers in another form."""
    part = recorder.part(tensor)
    if part is not None:
        recorder.alias(out, part)
    return part is not None


T = Tensor
SUBTRACTIONS = {T.sub, T.sub_, torch.sub, T.__sub__}
RULES: dict[Any, Callable[..., bool]] = {
    F.linear: _linear,
    torch.addmm: _addmm,
    T.addmm: _addmm,
    F.layer_norm: _norm,
    F.rms_norm: _norm,
    F.embedding: _embedding,
    **dict.fromkeys([F.conv1d, F.conv2d], _convolution),
    **dict.fromkeys([torch.matmul, T.matmul, torch.mm, T.mm, T.__matmul__], _matmul),
    **dict.fromkeys([torch.add, T.add, T.add_, T.__add__, T.__radd__, T.__iadd__, *SUBTRACTIONS], _add),
    **dict.fromkeys([torch.mul, T.mul, T.__mul__, T.__rmul__, torch.multiply], _multiply),
    **dict.fromkeys([T.expand, T.expand_as, T.repeat, torch.broadcast_to], _expand),
    **dict.fromkeys([T.to, T.float, T.double, T.bfloat16, T.half, T.type_as, T.contiguous], _cast),
    **dict.fromkeys([T.__getitem__, T.view, T.view_as, T.reshape, torch.reshape, T.unflatten, T.narrow], _view),
    **dict.fromkeys([T.transpose, torch.transpose, T.t, torch.t, T.permute, torch.permute], _view),
    **dict.fromkeys([T.T.__get__, T.mT.__get__], _view),  # type: ignore[attr-defined]
    **dict.fromkeys([T.unsqueeze, torch.unsqueeze, T.squeeze, torch.squeeze, T.flatten, torch.flatten], _view),
    **dict.fromkeys([T.chunk, torch.chunk, T.split, torch.split, T.unbind, torch.unbind, T.select], _view),
}

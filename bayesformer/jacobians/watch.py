"""Seeing every use of some parameters during an ordinary forward pass.

`UseRecorder` is a `TorchFunctionMode`: it looks at each torch function whose arguments hold a parameter it follows (by
identity, or a view of one), lets the function run, and notes a site. A use it has no rule for is noted as
uncovered, with the function's name. Rules are in `RULES`, one per kind of function.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode, resolve_name

from bayesformer.jacobians.batched_backward import REPLACEMENTS
from bayesformer.jacobians.sites import Axis, ElementSite, EmbeddingSite, LinearSite, Output, Part, Site
from bayesformer.model.multihead import multi_head_attention_forward

UseKey = tuple[str, int]
"""A use: the parameter's name, and its number among the uses of that parameter in a pass."""


class UseRecorder(TorchFunctionMode):
    """Follows parameters, each with its part, through one pass of `examples` examples. `axes` are batch axes known from
    before; `columns` how many will go back, where that is known."""

    def __init__(
        self,
        parameters: Iterable[tuple[Tensor, Part]],
        examples: int,
        axes: Mapping[UseKey, Axis | None],
        columns: int | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.moments: list[Tensor] = []  # of the last LayerNorm: its output, means, 1 / deviations
        self.faster: dict[Any, Callable[..., Any]] = {F.layer_norm: partial(_layer_norm, self.moments)}
        if columns != 1:
            self.faster |= REPLACEMENTS
        # The tensors are kept with their parts: an id stays true only while its object lives.
        self.parts = {id(entry[0]): entry for entry in parameters}
        self.examples, self.known, self.dtype = examples, axes, dtype
        self.axes: dict[UseKey, Axis | None] = {}
        self.sites: list[Site] = []
        self.uncovered: dict[str, str] = {}
        self.uses: Counter[str] = Counter()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the function, and note what it did with the parameters."""
        kwargs = kwargs or {}
        found = self._found(args, kwargs)
        if not found:
            return self.faster.get(func, func)(*args, **kwargs)
        if func is F.multi_head_attention_forward:
            with self:  # in plain functions, which are seen here again
                return multi_head_attention_forward(*args, **kwargs)
        rule = RULES.get(func)
        out = self.faster.get(func, func)(*args, **kwargs)
        if not _moves(out) or (rule is not None and rule(self, func, out, *args, **kwargs)):
            return out
        self.uncovered |= {part.name: resolve_name(func) or str(func) for part in found}
        return out

    def _found(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Part]:
        """The parts among the arguments; written out, for every function of the pass comes through here."""
        parts, found = self.parts, []
        for x in args:
            if id(x) in parts:
                found.append(parts[id(x)][1])
            elif type(x) in {tuple, list}:
                found += [parts[id(y)][1] for y in x if id(y) in parts]
        for x in kwargs.values():
            if id(x) in parts:
                found.append(parts[id(x)][1])
        return found

    def part(self, x: Any) -> Part | None:
        """What `x` is of a followed parameter, if it is."""
        entry = self.parts.get(id(x))
        return None if entry is None else entry[1]

    def alias(self, tensor: Tensor, part: Part) -> None:
        """From now on follow `tensor` too."""
        self.parts[id(tensor)] = (tensor, part)

    def axis(self, part: Part, shape: torch.Size, free: Iterable[int]) -> Axis | None:
        """The batch axis of a tensor among the axes `free`: as it was before, or the first that is long enough."""
        key, free = (part.name, self.uses[part.name]), list(free)
        self.uses[part.name] += 1
        if key in self.known:
            before = self.known[key]
            found = None if before is None else self._again(before, shape)
        else:
            found = self._new(shape, free)
        self.axes[key] = found
        return found

    def _again(self, before: Axis, shape: torch.Size) -> Axis | None:
        length = shape[before.number]
        fits = length and length % self.examples == 0 if before.flat else length == self.examples
        return Axis(before.number, self.examples, before.flat) if fits else None

    def _new(self, shape: torch.Size, free: list[int]) -> Axis | None:
        for number in free:
            if shape[number] == self.examples:
                return Axis(number, self.examples)
        if 0 in free and shape[0] and shape[0] % self.examples == 0:
            return Axis(0, self.examples, flat=True)
        return None

    def output(self, tensor: Tensor, axis: Axis) -> Output:
        """A site's output. The edge, not the tensor: an operation in place may change the tensor afterwards."""
        return Output(get_gradient_edge(tensor), tensor.shape, axis, self.dtype, tensor.device)


def _moves(out: Any) -> bool:
    """Whether a gradient flows through it."""
    if isinstance(out, Tensor):
        return out.requires_grad
    return isinstance(out, tuple | list) and any(isinstance(t, Tensor) and t.requires_grad for t in out)


def _arguments(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterable[Any]:
    for x in (*args, *kwargs.values()):
        if isinstance(x, tuple | list):
            yield from x
        else:
            yield x


# Rules: (watch, func, out, *args, **kwargs) -> whether the use is covered.


def _linear(watch: UseRecorder, _: Any, out: Tensor, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> bool:
    return _matrix_product(watch, out, input, weight, bias, turned=False)


def _addmm(
    watch: UseRecorder, _: Any, out: Tensor, bias: Tensor, input: Tensor, weight: Tensor, **scales: float
) -> bool:
    return not scales and _matrix_product(watch, out, input, weight, bias, turned=True)


def _matmul(watch: UseRecorder, _: Any, out: Tensor, input: Tensor, weight: Tensor) -> bool:
    return weight.dim() == 2 and _matrix_product(watch, out, input, weight, None, turned=True)


def _matrix_product(
    watch: UseRecorder, out: Tensor, input: Tensor, weight: Tensor, bias: Tensor | None, turned: bool
) -> bool:
    if watch.part(input) is not None:
        return False
    part, shift = watch.part(weight), watch.part(bias)
    axis = watch.axis(part or shift, out.shape, range(out.dim() - 1))  # type: ignore[arg-type]
    if axis is None:
        return False
    output = watch.output(out, axis)
    if part is not None:
        a = axis.front(input.detach().to(watch.dtype))
        a = a if a.dim() == 3 else a.reshape(len(a), -1, a.shape[-1])
        watch.sites.append(LinearSite(part, output, a, turned))
    return shift is None or _element(watch, shift, output, bias)  # type: ignore[arg-type]


def _element(
    watch: UseRecorder, part: Part, output: Output, p: Tensor, inputs: Tensor | None = None, sign: int = 1
) -> bool:
    """Note a use of `p`, broadcast to the output; `inputs` multiply it."""
    shape, axis = list(p.shape), output.axis
    shape = [1] * (len(output.shape) - len(shape)) + shape
    if shape.pop(axis.number) != 1:
        return False
    if axis.flat:
        shape.insert(0, 1)
    if inputs is not None:
        inputs = axis.front(inputs.detach().to(watch.dtype).expand(output.shape))
    watch.sites.append(ElementSite(part, output, torch.Size(shape), inputs, sign))
    return True


def _free(out: Tensor, p: Tensor) -> list[int]:
    """Axes of `out` along which `p` is broadcast: one of them may be the batch."""
    missing = out.dim() - p.dim()
    return [i for i in range(out.dim()) if i < missing or p.shape[i - missing] == 1]


def _add(watch: UseRecorder, func: Any, out: Tensor, left: Any, right: Any, **options: Any) -> bool:
    if options:
        return False
    parts = watch.part(left), watch.part(right)
    if None not in parts:
        return False
    p, part, is_right = (right, parts[1], True) if parts[0] is None else (left, parts[0], False)
    assert part is not None
    negative = is_right and func in SUBTRACTIONS
    axis = watch.axis(part, out.shape, _free(out, p))
    if axis is not None:
        return _element(watch, part, watch.output(out, axis), p, sign=-1 if negative else 1)
    if negative:
        return False
    # No batch here: the sum moves as the parameter does, so it is followed in its place.
    watch.alias(out, Part(part.name, part.shape, part.places(out).view(p.shape).expand(out.shape)))
    return True


def _multiply(watch: UseRecorder, _: Any, out: Tensor, left: Any, right: Any) -> bool:
    parts = watch.part(left), watch.part(right)
    if None not in parts:
        return False
    p, x, part = (right, left, parts[1]) if parts[0] is None else (left, right, parts[0])
    assert part is not None
    axis = watch.axis(part, out.shape, _free(out, p))
    if axis is None or not isinstance(x, Tensor):
        return False
    return _element(watch, part, watch.output(out, axis), p, inputs=x)


def _layer_norm(
    moments: list[Tensor],
    input: Tensor,
    normalized_shape: Any,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """What torch does there, with the moments that it does not give away."""
    if torch.is_autocast_enabled(input.device.type):
        return F.layer_norm(input, normalized_shape, weight, bias, eps)
    moments[:] = torch.native_layer_norm(input, normalized_shape, weight, bias, eps)
    return moments[0]


def _norm(watch: UseRecorder, func: Any, out: Tensor, input: Tensor, shape: Any, *args: Any, **kwargs: Any) -> bool:
    """LayerNorm and RMSNorm: a gain on what is normalised already, and a bias."""
    names = ["weight", "bias", "eps"] if func is F.layer_norm else ["weight", "eps"]
    options = dict(zip(names, args, strict=False)) | kwargs
    weight, bias = options.pop("weight", None), options.pop("bias", None)
    gain, shift = watch.part(weight), watch.part(bias)
    axis = watch.axis(gain or shift, out.shape, range(out.dim() - len(shape)))  # type: ignore[arg-type]
    if axis is None or watch.part(input) is not None:
        return False
    output, covered = watch.output(out, axis), True
    if gain is not None:
        with torch.no_grad():
            if watch.moments and out is watch.moments[0]:
                normalised = (input - watch.moments[1]).mul_(watch.moments[2]).to(out.dtype)
            else:  # RMSNorm, or mixed precision
                normalised = func(input, shape, **options)
        covered = _element(watch, gain, output, weight, inputs=normalised)
    return covered and (shift is None or _element(watch, shift, output, bias))


def _embedding(
    watch: UseRecorder,
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
    part = watch.part(weight)
    if part is None or max_norm is not None or scale_grad_by_freq:
        return False
    axis = watch.axis(part, input.shape, range(input.dim()))
    if axis is not None and part.index is None:
        tokens = axis.front(input)
        padding = None if padding_idx is None else padding_idx % len(weight)
        tokens = tokens.reshape(len(tokens), -1)
        watch.sites.append(EmbeddingSite(part, watch.output(out, axis), tokens, padding))
        return True
    if axis is not None or padding_idx is not None:
        return False
    # Looked up once for all examples (positions): the rows are followed in place of the table.
    rows = part.index[input] if part.index is not None else _rows(input, weight.shape[1])
    watch.alias(out, Part(part.name, part.shape, rows))
    return True


def _rows(tokens: Tensor, width: int) -> Tensor:
    return tokens.unsqueeze(-1) * width + torch.arange(width, device=tokens.device)


def _convolution(
    watch: UseRecorder,
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
    part, shift = watch.part(weight), watch.part(bias)
    spatial = weight.dim() - 2
    if groups != 1 or isinstance(padding, str) or out.dim() != weight.dim() or watch.part(input) is not None:
        return False
    axis = watch.axis(part or shift, out.shape, [0])  # type: ignore[arg-type]
    if axis is None or axis.flat:
        return False
    output, covered = watch.output(out, axis), True
    if part is not None:
        stride, padding, dilation = (_each(x, spatial) for x in (stride, padding, dilation))
        kernel, images = tuple(weight.shape[2:]), input.detach().to(watch.dtype)
        if spatial == 1:  # an image of height 1
            images, kernel = images.unsqueeze(2), (1, *kernel)
            stride, padding, dilation = (1, *stride), (0, *padding), (1, *dilation)
        patches = F.unfold(images, kernel, dilation, padding, stride).mT  # (B, R, in)
        watch.sites.append(LinearSite(part, output, patches, channels_second=True))
    if shift is not None:
        covered = _element(watch, shift, output, bias.view(-1, *[1] * spatial))  # type: ignore[union-attr]
    return covered


def _each(value: Any, count: int) -> tuple[int, ...]:
    return (value,) * count if isinstance(value, int) else tuple(value) * (count if len(value) == 1 else 1)


def _view(watch: UseRecorder, func: Any, out: Any, tensor: Tensor, *args: Any, **kwargs: Any) -> bool:
    """Another look at a parameter: the same look at the places of its numbers tells which it sees."""
    part = watch.part(tensor)
    if part is None or any(watch.part(x) is not None for x in _arguments(args, kwargs)):
        return False
    places = func(part.places(tensor), *args, **kwargs)
    for t, index in zip(*((x,) if isinstance(x, Tensor) else x for x in (out, places)), strict=True):
        watch.alias(t, Part(part.name, part.shape, index))
    return True


def _expand(watch: UseRecorder, func: Any, out: Tensor, tensor: Tensor, *args: Any, **kwargs: Any) -> bool:
    """A parameter written out, once per example (a class token) or along other axes."""
    part = watch.part(tensor)
    if part is None:
        return False
    index = func(part.places(tensor), *args, **kwargs)
    axis = watch.axis(part, out.shape, [0] if bool((index == index[:1]).all()) else [])
    if axis is None or axis.flat:
        watch.alias(out, Part(part.name, part.shape, index))
        return True
    one = Part(part.name, part.shape, index[0])
    watch.sites.append(ElementSite(one, watch.output(out, axis), index.shape[1:]))
    return True


def _cast(watch: UseRecorder, _: Any, out: Tensor, tensor: Tensor, *args: Any, **kwargs: Any) -> bool:  # noqa: ARG001
    """The same numbers in another form."""
    part = watch.part(tensor)
    if part is not None:
        watch.alias(out, part)
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

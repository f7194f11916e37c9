"""Several draws of the weights in one pass over an expanded batch, sharing everything that is the same in all of them.

Where all weights that differ between draws belong to `nn.Linear` modules (the A and B of LoRA are such, so is a head),
each of these is replaced by a `MemberLinear` that holds the weights of all M draws and takes rows in the order
(draw, example). Below the first block that has one, all draws compute the same: those blocks see the plain batch, and a
hook expands it when it reaches the first that does not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bayesformer.core.compat import has_forward_hooks
from bayesformer.core.types import Params
from bayesformer.model.shell import Shell

LARGEST_CHUNK = 8  # draws in one pass above a common trunk
TOKENS = 512  # of all draws in one pass; beyond, reading the shared weights once saves nothing
SHARE = 0.3  # of a model's weights that may differ between draws for the rest to count as a shared base


@dataclass(frozen=True)
class SharedBase:
    """Where draws differ on a model most of whose weights they share."""

    paths: tuple[str, ...]  # of the linear layers
    differing: tuple[str, ...]  # names of their weights
    trunk: float  # share of the blocks that come before the first that differs
    block: str | None = None  # path of that block; None where the whole model is expanded

    def draws_per_pass(self, tokens: int) -> int:
        """How many draws go through one pass over this many tokens, at least 1.

        Above `TOKENS` in all a pass is bound by arithmetic, of which every draw needs its own. A long common trunk
        pays at any size: it is run once for all.
        """
        fits = max(1, TOKENS // max(tokens, 1))
        return max(fits, LARGEST_CHUNK) if self.trunk >= 1 / 3 else fits

    @contextmanager
    def holding(self, shell: Shell, rows: Tensor) -> Iterator[None]:
        """The shell's module with the weights of several draws, rows (M, P): B examples give M · B rows of outputs."""
        shell.load(rows[0])
        if any(part.training for part in shell.module.modules()):
            shell.module.eval()
        views = shell.space.views(rows)
        weights = {name: views[name].to(shell.weights[name]) for name in self.differing}
        with expanded(shell.module, weights, self.paths, len(rows), self.block):
            yield


def find_shared_base(shell: Shell, rows: Tensor) -> SharedBase | None:
    """Where draws (M, P) differ, if that is in plain linear layers alone and in a small part of the model.

    Rows are those of `telling_rows`: all draws there are; two of a Gaussian, whose weights differ in every draw or in
    none; or one of each part of a mixture.
    """
    whole, parts = sum(p.numel() for p in shell.module.parameters()), shell.space.views(rows)
    differing: tuple[str, ...] = ()
    for name, part in parts.items():
        if any(not torch.equal(row, part[0]) for row in part[1:]):
            differing += (name,)
            if sum(part[0].numel() for name in differing) > SHARE * whole:
                return None
    if not differing:
        return None
    paths = linear_modules(shell.module, list(differing))
    if paths is None:
        return None
    block = first_block(shell.module, paths)
    if block is None:
        return SharedBase(tuple(paths), differing, 0.0)
    listed, _, number = block.rpartition(".")
    blocks = shell.module.get_submodule(listed)
    assert isinstance(blocks, nn.ModuleList)
    return SharedBase(tuple(paths), differing, int(number) / len(blocks), block)


class MemberLinear(nn.Module):
    """y = x W_mᵀ + b_m for rows x of draw m, all draws by one batched product."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.weight = weight  # (M, out, in), or (out, in) where it is the same in all draws
        self.bias = bias  # (M, out), (out,) or None

    def forward(self, x: Tensor) -> Tensor:
        """(M · B, ..., in) -> (M · B, ..., out), rows in the order (draw, example)."""
        if self.weight.dim() == 2:
            y = nn.functional.linear(x, self.weight)
            return y if self.bias is None else self._shifted(y)
        members, out, width = self.weight.shape
        rows = x.reshape(members, -1, width)
        if self.bias is None:
            return torch.bmm(rows, self.weight.mT).view(*x.shape[:-1], out)
        bias = self.bias.expand(members, out).unsqueeze(1)
        return torch.baddbmm(bias, rows, self.weight.mT).view(*x.shape[:-1], out)

    def _shifted(self, y: Tensor) -> Tensor:
        assert self.bias is not None
        if self.bias.dim() == 1:
            return y + self.bias
        members = len(self.bias)
        return (y.reshape(members, -1, y.shape[-1]) + self.bias.unsqueeze(1)).view_as(y)


def linear_modules(module: nn.Module, names: list[str]) -> list[str] | None:
    """Paths of the `nn.Linear` modules that hold the named weights; None if any of them is somewhere else.

    A module that is such a layer itself has no place in which another could stand: None.
    """
    paths = dict.fromkeys(name.rpartition(".")[0] for name in names)
    holders = dict(module.named_modules())
    plain = "" not in paths and all(
        type(holders.get(path)) is nn.Linear and not has_forward_hooks(holders[path]) for path in paths
    )
    return list(paths) if plain else None


def first_block(module: nn.Module, paths: Sequence[str]) -> str | None:
    """Path of the first block that holds one of these modules; None if the whole model has to be expanded.

    Blocks are the entries of the outermost `nn.ModuleList` around the first of the modules. All others must be in the
    same list, or come after it in the model (a final norm, a head).
    """
    order = {name: number for number, (name, _) in enumerate(module.named_modules())}
    first = min(paths, key=lambda path: order[path])
    parts = first.split(".")
    for depth in range(1, len(parts)):
        if isinstance(module.get_submodule(".".join(parts[:depth])), nn.ModuleList):
            listed = ".".join(parts[:depth])
            block = min(
                (int(path[len(listed) + 1 :].split(".")[0]) for path in paths if path.startswith(f"{listed}.")),
            )
            return f"{listed}.{block}"
    return None


@contextmanager
def expanded(
    module: nn.Module, weights: Params, paths: Sequence[str], members: int, block: str | None
) -> Iterator[None]:
    """The module with M draws of some of its weights at once: called with B examples it returns M · B rows.

    Args:
        module: of a shell that nobody else uses.
        weights: by name, each (M, ...); those that are the same in all draws are in the module already.
        paths: of the Linear modules that hold them, from `linear_modules`.
        members: M.
        block: path of the first block that holds one of them, from `first_block`.
    """
    replaced = []
    for path in paths:
        parent, _, name = path.rpartition(".")
        owner = module.get_submodule(parent)
        own = owner.get_submodule(name)
        assert isinstance(own, nn.Linear)
        bias: Tensor | None = weights.get(f"{path}.bias", own.bias)
        setattr(owner, name, MemberLinear(weights.get(f"{path}.weight", own.weight), bias))
        replaced.append((owner, name, own))
    blocks = blocks_from(module, block)
    expand = _Expand(members, blocks[0])
    hooks = [block.register_forward_pre_hook(expand, with_kwargs=True) for block in blocks]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for owner, name, own in replaced:
            setattr(owner, name, own)


def blocks_from(module: nn.Module, first: str | None) -> list[nn.Module]:
    """The first expanded block and those after it in its list: each is given masks and positions of the plain batch."""
    if first is None:
        return [module]
    listed, _, number = first.rpartition(".")
    blocks = module.get_submodule(listed)
    assert isinstance(blocks, nn.ModuleList)
    return list(blocks)[int(number) :]


class _Expand:
    """Repeats, for each draw, the rows of every tensor that has one per example: features, masks, positions.

    A block after the first gets features that are expanded already, and masks and positions that are not.
    """

    def __init__(self, members: int, first: nn.Module) -> None:
        self.members, self.first = members, first
        self.examples = 1  # B, seen where the first block is called

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if module is self.first:
            self.examples = next(len(x) for x in (*args, *kwargs.values()) if isinstance(x, Tensor) and x.dim() > 1)
        return tuple(map(self._each, args)), {name: self._each(value) for name, value in kwargs.items()}

    def _each(self, value: Any) -> Any:
        if type(value) is tuple:  # the cosines and sines of rotary positions
            return tuple(map(self._each, value))
        if not isinstance(value, Tensor) or len(value.shape) < 2 or len(value) != self.examples:
            return value
        return value.repeat(self.members, *[1] * (value.dim() - 1))  # the rows of draw 0, then those of draw 1, ...

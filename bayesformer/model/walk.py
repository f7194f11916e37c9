"""A walk over everything that a module holds, by pickle's two public hooks, so that it can be built again and again.

`persistent_id` keeps tensors, classes and other things that are not rebuilt out of the bytes: they go to a table.
`reducer_override` says how the rest is built: modules by their attributes (their own `__getstate__` and
`__deepcopy__` are not asked), closures cell by cell, bound methods and weak references by what they point to. Hooks,
lambdas and replaced `forward`s that hold the model therefore hold the new one. The bytes stay in memory.
"""

from __future__ import annotations

import copyreg
import io
import logging
import pickle
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from bayesformer.core.compat import COMPILED_CALL
from bayesformer.model.admission import refuse_module

log = logging.getLogger("bayesformer")

PLAIN = frozenset({str, int, float, bool, type(None), tuple, list, dict, bytes, set, frozenset, complex})
REFERRED = (
    Tensor,
    type,
    CodeType,
    ModuleType,
    torch.fx.Graph,
)  # a graph's nodes form a chain that no recursion can follow
RUNNING = (threading.Thread, Executor, threading.Event, threading.Condition, threading.Semaphore)
ORIGIN = "_bayesformer_origin"  # on a shadow's root: whose shadow it is; not part of what is built from it
DROPPED = (COMPILED_CALL, ORIGIN)
ALIVE = 0  # the first place of the table: a list that keeps the targets of weak references alive


class Reference:
    """Marks a value, of whatever kind, that goes to the table instead of being rebuilt."""

    def __init__(self, value: Any) -> None:
        self.value = value


class Scope:
    """The global variables of rebuilt functions: in this process the very dict, in another one what they use of it."""

    def __init__(self, variables: dict[str, Any]) -> None:
        self.variables = variables
        self.codes = list[CodeType]()

    def __reduce__(self) -> Any:
        name = self.variables.get("__name__", "__main__")
        module = sys.modules.get(name)
        if name != "__main__" and module is not None and module.__dict__ is self.variables:
            return _scope_of, (module,)
        used = {name for code in self.codes for name in _used(code)} | {"__name__"}
        return Scope, ({name: self.variables[name] for name in used if name in self.variables},)


def _scope_of(module: ModuleType) -> Scope:
    return Scope(module.__dict__)


def _used(code: CodeType) -> set[str]:
    """Global names that a function and the functions inside it may use."""
    inner = [_used(constant) for constant in code.co_consts if isinstance(constant, CodeType)]
    return set(code.co_names).union(*inner)


class Alive:
    """Stands for the list that keeps the targets of weak references alive."""


class Walk(pickle.Pickler):
    """Pickles a structure; `table` holds what is not in the bytes, at the places that the bytes name."""

    def __init__(self, names: dict[int, str]) -> None:
        self.file = io.BytesIO()
        super().__init__(self.file, protocol=pickle.HIGHEST_PROTOCOL)
        self.names = names  # of modules, by identity, for messages
        self.table: list[Any] = [None]
        self.shared = dict[str, int]()  # kinds of object that could not be rebuilt, and how many
        self._places = dict[int, int]()
        self._scopes = dict[int, Scope]()

    def run(self, root: Any) -> bytes:
        """The bytes from which `root` can be built again, given the objects in `table`."""
        try:
            self.dump(root)
        except RecursionError:
            raise ValueError(
                "model must not be nested deeper than Python's recursion limit; it holds a chain of objects or modules "
                f"that is (limit {sys.getrecursionlimit()}). Flatten it, or raise sys.setrecursionlimit."
            ) from None
        return self.file.getvalue()

    def persistent_id(self, obj: Any) -> int | None:
        """A place in the table for what is not rebuilt, None for the rest."""
        kind = type(obj)
        if kind in PLAIN:
            return None
        if kind is Alive:
            return ALIVE
        if kind is Reference:
            return self._place(obj.value)
        return self._place(obj) if issubclass(kind, REFERRED) or kind is object or _is_constant(obj) else None

    def reducer_override(self, obj: Any) -> Any:
        """How an object is built again: a pickle protocol hook, called once for every object."""
        if issubclass(type(obj), nn.Module):
            return self._module(obj)
        if type(obj) is FunctionType:
            return self._function(obj)
        special = SPECIAL.get(type(obj))
        return self._reduce(obj) if special is None else special(obj)

    def _place(self, obj: Any) -> int:
        place = self._places.get(id(obj))
        if place is None:
            place = self._places[id(obj)] = len(self.table)
            self.table.append(obj)  # the table also keeps the object alive, so that its id stays its own
        return place

    def _module(self, module: nn.Module) -> Any:
        refuse_module(module, self.names.get(id(module), "a module among its attributes"))
        return reduce_module(module)

    def _function(self, function: FunctionType) -> Any:
        scope = self._scopes.setdefault(id(function.__globals__), Scope(function.__globals__))
        scope.codes.append(function.__code__)
        parts = function.__code__, Reference(scope), function.__name__, function.__closure__
        return _function, parts, _function_state(function), None, None, _dress

    def _reduce(self, obj: Any) -> Any:
        if isinstance(obj, RUNNING):
            return self._share(obj)
        reducer = copyreg.dispatch_table.get(type(obj))
        try:
            return reducer(obj) if reducer is not None else obj.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        except Exception as error:  # an object's own code refuses to be copied, by whatever error: locks, files, ...
            log.debug("an object of %s is shared, not copied: %r", type(obj).__qualname__, error)
            return self._share(obj)

    def _share(self, obj: Any) -> Any:
        kind = type(obj).__name__
        self.shared[kind] = self.shared.get(kind, 0) + 1
        return _same, (Reference(obj),)


class Build(pickle.Unpickler):
    """Builds the structure of a walk from its bytes and a table with other tensors."""

    def __init__(self, data: bytes, table: Sequence[Any]) -> None:
        super().__init__(io.BytesIO(data))
        self.table = table

    def persistent_load(self, place: int) -> Any:
        """What the table has at a place."""
        return self.table[place]


def _is_constant(obj: Any) -> bool:
    """Whether this is a function that carries nothing of the model, by what one can see from outside."""
    if type(obj) is BuiltinFunctionType:
        return isinstance(obj.__self__, ModuleType | type(None))
    return type(obj) is FunctionType and not _holds_something(obj)


def reduce_module(module: nn.Module) -> Any:
    """A module by its attributes, whatever its own ways of being copied."""
    state = {key: value for key, value in module.__dict__.items() if key not in DROPPED}
    return object.__new__, (type(module),), (state, _slots(module)), None, None, _set_state


def _holds_something(function: FunctionType) -> bool:
    """Whether a function carries values of its own: a closure, defaults or attributes that are not simple."""
    cells = [_contents(cell) for cell in function.__closure__ or ()]
    held = [value for content in cells if content for value in content]
    if _importable(function):
        return any(isinstance(value, nn.Module | Tensor | MethodType) for value in held)
    defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    return bool(cells) or any(type(value) not in PLAIN for value in defaults) or bool(function.__dict__)


def _importable(function: FunctionType) -> bool:
    found: Any = sys.modules.get(function.__module__ or "")
    for part in function.__qualname__.split("."):
        found = getattr(found, "__dict__", {}).get(part)
    return getattr(found, "__func__", found) is function


def _function(code: CodeType, scope: Scope, name: str, closure: tuple[CellType, ...] | None) -> FunctionType:
    return FunctionType(code, scope.variables, name, None, closure)


def _function_state(function: FunctionType) -> dict[str, Any]:
    kept = ("__defaults__", "__kwdefaults__", "__qualname__", "__module__", "__doc__")
    return {**{key: getattr(function, key) for key in kept}, "__dict__": function.__dict__}


def _dress(function: FunctionType, state: dict[str, Any]) -> None:
    function.__dict__.update(state.pop("__dict__"))
    for key, value in state.items():
        setattr(function, key, value)


def _cell() -> CellType:
    return CellType()


def _contents(cell: CellType) -> tuple[Any] | None:
    try:
        return (cell.cell_contents,)
    except ValueError:  # Python's way to say that the cell is empty
        return None


def _fill(cell: CellType, contents: tuple[Any]) -> None:
    cell.cell_contents = contents[0]


def _same(value: Any) -> Any:
    return value


def _weak(target: Any, callback: Callable[..., Any] | None, alive: list[Any]) -> Any:
    if target is None:
        return weakref.ref(_Gone())  # dead from the start, as the one it stands for
    alive.append(target)
    return weakref.ref(target, callback) if callback is not None else weakref.ref(target)


class _Gone:
    """Something to have pointed to."""


def _proxy(target: Any, alive: list[Any]) -> Any:
    alive.append(target)
    return weakref.proxy(target)


def _slots(obj: Any) -> dict[str, Any]:
    names = [name for kind in type(obj).__mro__ for name in _slot_names(kind)]
    return {name: getattr(obj, name) for name in names if hasattr(obj, name)}


def _slot_names(kind: type) -> list[str]:
    slots = kind.__dict__.get("__slots__", ())
    names = [slots] if isinstance(slots, str) else list(slots)
    return [
        f"_{kind.__name__.lstrip('_')}{name}" if name.startswith("__") and not name.endswith("__") else name
        for name in names
        if name not in ("__dict__", "__weakref__")
    ]


def _set_state(obj: Any, state: tuple[dict[str, Any], dict[str, Any]]) -> None:
    attributes, slots = state
    obj.__dict__.update(attributes)
    for name, value in slots.items():
        object.__setattr__(obj, name, value)


SPECIAL: dict[type, Callable[[Any], Any]] = {
    CellType: lambda cell: (_cell, (), _contents(cell), None, None, _fill),
    MethodType: lambda method: (MethodType, (method.__func__, method.__self__)),
    weakref.ReferenceType: lambda ref: (_weak, (ref(), ref.__callback__, Alive())),
    weakref.ProxyType: lambda proxy: (_proxy, (proxy.__repr__.__self__, Alive())),
    weakref.CallableProxyType: lambda proxy: (_proxy, (proxy.__repr__.__self__, Alive())),
}

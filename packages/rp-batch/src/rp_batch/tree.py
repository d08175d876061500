"""Trees: what is a node, what is a leaf, and how each leaf is called. The only file that knows optree."""

from __future__ import annotations

import atexit
import dataclasses
import itertools
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, TypeAlias, TypeVar, cast

import optree
import torch
from optree import PyTreeSpec
from torch.utils import _pytree as torch_pytree

from rp_batch.errors import DepthError
from rp_batch.same import same

__all__ = ["TreeDef", "children", "flatten", "leaf", "map_leaves", "paths", "rebuild", "unflatten"]

# Trees hold values of any type: `Any` is what they are made of.
Tree: TypeAlias = Any
TreeDef: TypeAlias = PyTreeSpec
_Class = TypeVar("_Class", bound=type)

_NAMESPACE = "rp_batch"
# optree's types allow only metadata and children of its own kind; at run time anything hashable goes.
_register_node = cast("Callable[..., object]", getattr(optree, "register_pytree_node"))  # noqa: B009
# Of a path that is too long to read.
_SHOWN_LEVELS = 12
_registering = threading.Lock()
_registered: set[type] = set()
_leaf_types: set[type] = set()

# optree sorts the keys of dicts unless told otherwise, and forgets it when this object is collected.
_insertion_order = optree.dict_insertion_ordered(True, namespace=_NAMESPACE)
_insertion_order.__enter__()
atexit.register(_insertion_order.__exit__, None, None, None)


def flatten(tree: Tree) -> tuple[list[Any], TreeDef]:
    """Take a tree apart into its leaves, in order, and what puts them together again.

    >>> leaves, treedef = flatten({"b": [1, None], "a": (2,)})
    >>> leaves
    [1, None, 2]
    >>> unflatten(treedef, leaves)
    {'b': [1, None], 'a': (2,)}

    Nodes are tuples, lists, dicts (in insertion order), named tuples, dataclasses, deques, what is registered with
    optree for every namespace, and what is registered with torch's pytree, even after this package was imported.
    `None` is a leaf, as it is for torch: it has a path, a spec may stand at its place, and a part that holds
    `None` where another holds a tensor is reported there. Everything else is a leaf too, and so are other
    subclasses of list and dict.

    Raises `DepthError` for a tree that holds itself, or has more than 1,000 levels.
    """
    return flatten_named(tree, "")


def flatten_named(tree: Tree, *roots: str) -> tuple[list[Any], TreeDef]:
    """Do as `flatten`, for a tree that errors call by this name; several names are those of a tuple's items."""
    try:
        leaves, treedef = optree.tree_flatten(tree, none_is_leaf=True, namespace=_NAMESPACE)
    except RecursionError as error:
        # A node's own code may also recurse without end.
        raise _find_endless(tree, roots) or error from None
    if _register_nodes(leaves):
        return flatten_named(tree, *roots)
    return leaves, treedef


def unflatten(treedef: TreeDef, leaves: Iterable[Any]) -> Tree:
    """Put leaves together into the tree that `flatten` took apart; the inverse of `flatten`.

    >>> unflatten(flatten((0, {"x": 0}))[1], ["one", "two"])
    ('one', {'x': 'two'})
    """
    return treedef.unflatten(leaves)


def flatten_like(treedef: TreeDef, types: list[type], tree: Tree) -> list[Any] | None:
    """The leaves of a tree with the structure of another, whose leaves have these `types`; None if it is not sure.

    Several times faster than `flatten`, which asks of each leaf whether it is one: here its type must be that of
    the leaf in the same place.
    """
    try:
        found = treedef.flatten_up_to(tree)
    except ValueError:
        return None
    return found if list(map(type, found)) == types else None


def paths(tree: Tree) -> list[str]:
    """Tell how Python reaches each leaf of a tree, in the order of `flatten`.

    >>> paths(({"ids": 1}, [2, (3,)]))
    ["[0]['ids']", '[1][0]', '[1][1][0]']
    """
    return paths_of(flatten(tree)[1], "")


def paths_of(treedef: TreeDef, root: str) -> list[str]:
    """Tell how Python reaches each leaf from a variable called `root`."""
    return [accessor.codify(root) for accessor in treedef.accessors()]


def paths_below(treedef: TreeDef, roots: Sequence[str]) -> list[str]:
    """Tell how Python reaches each leaf of a tuple from the variables that hold its items."""
    return [accessor[1:].codify(roots[int(accessor[0].entry)]) for accessor in treedef.accessors()]


def leaf_count(treedef: TreeDef, child: int) -> int:
    """The number of leaves below one child of the root."""
    return treedef.child(child).num_leaves


def map_leaves(function: Callable[[Any], Any], tree: Tree) -> Tree:
    """Build the tree that has `function(leaf)` where this one has a leaf.

    >>> map_leaves(lambda number: number + 1, {"a": [1, 2]})
    {'a': [2, 3]}
    """
    leaves, treedef = flatten(tree)
    return treedef.unflatten(map(function, leaves))


def leaf(cls: _Class) -> _Class:
    """Mark a class, usually a dataclass, whose instances are never taken apart; usable as a decorator.

    >>> @leaf
    ... @dataclasses.dataclass
    ... class Settings:
    ...     depth: int = 2
    >>> flatten([Settings()])[0]
    [Settings(depth=2)]

    Mark a class before its instances are used in a tree.
    """
    _leaf_types.add(cls)
    return cls


@dataclasses.dataclass(frozen=True, slots=True)
class Children:
    """One level of a tree: the names of a node's children (a position, a key or a field), and the children."""

    names: tuple[Any, ...]
    steps: tuple[str, ...]
    values: tuple[Any, ...]
    treedef: TreeDef


def children(tree: Tree) -> Children | None:
    """Open one level of a tree; None if it is a leaf."""
    # The first that is asked about is the root; by its identity it would be opened again where it holds itself.
    answers = itertools.chain([False], itertools.repeat(True))
    values, treedef = optree.tree_flatten(
        tree, is_leaf=lambda _: next(answers), none_is_leaf=True, namespace=_NAMESPACE
    )
    if treedef.is_leaf():
        return children(tree) if _register_nodes([tree]) else None
    entries = [accessor[0] for accessor in treedef.accessors()]
    steps = tuple(entry.codify("") for entry in entries)
    return Children(tuple(map(_name, entries)), steps, tuple(values), treedef)


def rebuild(opened: Children, values: Iterable[Any]) -> Tree:
    """Build a node like the opened one, with other children."""
    return opened.treedef.unflatten(values)


# --- Trees that have no end --------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class _Level:
    """A node on the way down, the step from the one above, and the children still to be looked at."""

    node: Any
    step: str
    rest: Iterator[tuple[str, Any]]


def _find_endless(tree: Tree, roots: Sequence[str]) -> DepthError | None:
    """The error for the first node that is its own ancestor, or too deep; None if there is none.

    In the order of `flatten`, and without recursion.
    """
    way = [_level(tree, "")]
    while way:
        step, node = next(way[-1].rest, ("", None))
        if not step:
            way.pop()
            continue
        above = [level.node is node for level in way]
        way.append(_level(node, step))
        if True in above:
            start = _written(way[: above.index(True) + 1], roots) or "the whole tree"
            return DepthError(_written(way, roots), f"must not be {start} again, which holds it; break the cycle")
        if len(way) > optree.MAX_RECURSION_DEPTH:
            return DepthError(
                f"{_written(way[:_SHOWN_LEVELS], roots)}...",
                f"a tree must not have more than {optree.MAX_RECURSION_DEPTH} levels, but this one has more; "
                "hand on a list of its nodes, or mark their class with rp_batch.leaf",
            )
    return None


def _level(node: Any, step: str) -> _Level:
    opened = children(node)
    return _Level(node, step, iter(()) if opened is None else zip(opened.steps, opened.values, strict=True))


def _written(way: Sequence[_Level], roots: Sequence[str]) -> str:
    """How Python reaches the last of these nodes."""
    steps = [level.step for level in way[1:]]
    if len(roots) > 1 and steps:
        names = {f"[{index}]": name for index, name in enumerate(roots)}
        return names[steps[0]] + "".join(steps[1:])
    return "".join((*roots[:1], *steps))


# --- Nodes that optree does not know: torch's registry and plain dataclasses ------------------------------------


def _register_nodes(leaves: Iterable[Any]) -> bool:
    """Register those of the leaves' types that are nodes after all; tell whether there were any."""
    fresh = [cls for cls in set(map(type, leaves)) if _is_node_type(cls)]
    for cls in fresh:
        _register(cls)
    return bool(fresh)


def _is_node_type(cls: type) -> bool:
    if cls in _leaf_types:
        return False
    return cls in torch_pytree.SUPPORTED_NODES or _is_plain_dataclass(cls)


def _is_plain_dataclass(cls: type) -> bool:
    # A class with a `__new__` of its own (tensors, enums, exceptions, builtins) cannot be rebuilt from its fields.
    if not dataclasses.is_dataclass(cls) or cls.__new__ is not object.__new__:
        return False
    return not issubclass(cls, torch.nn.Module)


def _register(cls: type) -> None:
    with _registering:
        if cls not in _registered:
            _register_node(cls, _open, _close, path_entry_type=_Step, namespace=_NAMESPACE)
            _registered.add(cls)


class _Step(optree.PyTreeEntry):
    """A step of a path whose entry is one of torch's keys, which know how they are written."""

    def __call__(self, obj: Any) -> Any:
        return self.entry.get(obj)

    def codify(self, /, node: str = "") -> str:
        return f"{node}{self.entry}"


@dataclasses.dataclass(frozen=True, slots=True)
class _Unnamed:
    """The key of a child that its registration gives no name; written so that nobody takes it for Python."""

    index: int

    def get(self, node: Any) -> Any:
        return _open(node)[0][self.index]

    def __str__(self) -> str:
        return f"<child {self.index}>"


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Frame:
    """A node less its children: what rebuilds it, and the data that this needs."""

    rebuild: Callable[[Iterable[Any], Any], Any]
    context: Any

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Frame):
            return NotImplemented
        return self.rebuild == other.rebuild and same(self.context, other.context)

    def __hash__(self) -> int:
        return hash(self.rebuild)


def _close(frame: _Frame, values: Iterable[Any]) -> Any:
    return frame.rebuild(values, frame.context)


def _open(node: object) -> tuple[list[Any], _Frame, list[Any]]:
    # torch's registry is asked each time: a dataclass may have been registered after its first use here.
    registered = torch_pytree.SUPPORTED_NODES.get(type(node))
    if registered is None:
        return _open_dataclass(node)
    values, context = registered.flatten_fn(node)
    return values, _Frame(registered.unflatten_fn, context), _torch_keys(node, values, registered)


def _torch_keys(node: Any, values: list[Any], registered: torch_pytree.NodeDef) -> list[Any]:
    if registered.flatten_with_keys_fn is not None:
        return [key for key, _ in registered.flatten_with_keys_fn(node)[0]]
    if isinstance(node, Mapping) and len(cast("Mapping[Any, Any]", node)) == len(values):
        return [torch_pytree.MappingKey(key) for key in cast("Mapping[Any, Any]", node)]
    attributes = _attributes_by_identity(node)
    return [
        torch_pytree.GetAttrKey(attributes[id(value)].popleft()) if attributes[id(value)] else _Unnamed(index)
        for index, value in enumerate(values)
    ]


def _attributes_by_identity(node: Any) -> dict[int, deque[str]]:
    """The names of a node's attributes, in order, by the identity of their value: several if it stands twice."""
    attributes: dict[str, Any] = getattr(node, "__dict__", {})
    names: dict[int, deque[str]] = defaultdict(deque)
    for name, value in attributes.items():
        names[id(value)].append(name)
    return names


def _open_dataclass(node: Any) -> tuple[list[Any], _Frame, list[Any]]:
    names = tuple(field.name for field in dataclasses.fields(node) if hasattr(node, field.name))
    frame = _Frame(_close_dataclass, (type(node), names, _beside_fields(node, names)))
    return [getattr(node, name) for name in names], frame, [torch_pytree.GetAttrKey(name) for name in names]


def _beside_fields(node: object, fields: tuple[str, ...]) -> dict[str, Any]:
    """What the instance holds beside its fields, less cached properties: they would be stale in a part."""
    cls = type(node)
    attributes: dict[str, Any] = getattr(node, "__dict__", {})
    beside = {name: value for name, value in attributes.items() if name not in fields}
    return {k: v for k, v in beside.items() if not isinstance(getattr(cls, k, None), cached_property)}


def _close_dataclass(values: Iterable[Any], context: Any) -> Any:
    # Not through `__init__`: it may convert or refuse, and a node must come back as it was.
    cls, names, beside = context
    node = object.__new__(cls)
    for name, value in zip(names, values, strict=True):
        object.__setattr__(node, name, value)
    for name, value in beside.items():
        object.__setattr__(node, name, value)
    return node


def _name(entry: Any) -> Any:
    """The bare name of a child: a position, a key or a field."""
    if isinstance(entry, optree.NamedTupleEntry):
        return entry.field
    return _bare(entry.entry) if isinstance(entry, _Step) else entry.entry


def _bare(key: Any) -> Any:
    if isinstance(key, torch_pytree.GetAttrKey):
        return key.name
    if isinstance(key, torch_pytree.SequenceKey):
        return cast("torch_pytree.SequenceKey[Any]", key).idx
    if isinstance(key, torch_pytree.MappingKey):
        return cast("torch_pytree.MappingKey[Any, Any]", key).key
    return key.index

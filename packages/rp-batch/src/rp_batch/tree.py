"""Pytrees: flatten, rebuild, and the path of each leaf. The only file that imports optree."""

from __future__ import annotations

import atexit
import dataclasses
import itertools
import threading
import warnings
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, TypeAlias, TypeVar, cast

import optree
import torch
from optree import PyTreeSpec
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree as torch_pytree

from rp_batch.endless import find_endless
from rp_batch.records import close_record, is_record, open_record
from rp_batch.same import same

__all__ = ["TreeDef", "children", "flatten", "leaf", "map_leaves", "paths", "rebuild", "unflatten"]

# Trees hold values of any type, hence `Any`.
Tree: TypeAlias = Any
TreeDef: TypeAlias = PyTreeSpec
_Class = TypeVar("_Class", bound=type)

_NAMESPACE = "rp_batch"
# optree's type stubs are too narrow: at run time it accepts any hashable metadata.
_register_node = cast("Callable[..., object]", getattr(optree, "register_pytree_node"))  # noqa: B009
_registering = threading.Lock()
_registered: set[type] = set()
# Torch registers its sizes as nodes, but rebuilds them as plain tuples, which have no `numel`.
_leaf_types: set[type] = {torch.Size}

# optree sorts dict keys by default. This setting ends when the object is garbage collected, so keep it.
_insertion_order = optree.dict_insertion_ordered(True, namespace=_NAMESPACE)
_insertion_order.__enter__()
atexit.register(_insertion_order.__exit__, None, None, None)


def _open_packed(packed: PackedSequence) -> tuple[tuple[Any, ...], None, tuple[str, ...]]:
    return tuple(packed), None, PackedSequence._fields


def _close_packed(_: None, values: Iterable[Any]) -> PackedSequence:
    # Its constructor reads the tensors: it could not hold rules in their places.
    return cast("Any", tuple).__new__(PackedSequence, values)


with warnings.catch_warnings():
    # Optree says that it knew named tuples already.
    warnings.simplefilter("ignore", UserWarning)
    _register_node(
        PackedSequence,
        _open_packed,
        _close_packed,
        path_entry_type=optree.GetAttrEntry,
        namespace=_NAMESPACE,
    )


def flatten(tree: Tree) -> tuple[list[Any], TreeDef]:
    """Return the leaves of a tree, in order, and the treedef that rebuilds it.

    >>> leaves, treedef = flatten({"b": [1, None], "a": (2,)})
    >>> leaves
    [1, None, 2]
    >>> unflatten(treedef, leaves)
    {'b': [1, None], 'a': (2,)}

    Nodes are tuples, lists, dicts (in insertion order), named tuples, dataclasses, deques, classes registered with
    optree for every namespace, and classes registered with torch's pytree, even after this package was imported.
    So are subclasses of dict, `UserDict` and `SimpleNamespace`, rebuilt as they were, without `__init__`.
    `None` is a leaf, as in torch: it has a path and may have a spec, and if one part has `None` where another has
    a tensor, the error names that path. Everything else is a leaf, including subclasses of list and tuple, such as
    `torch.Size`.

    Raises `DepthError` for a tree that contains itself or has more than 1,000 levels.
    """
    # A tensor is what most layers take and return.
    return ([tree], _LEAF) if type(tree) is torch.Tensor else flatten_named(tree, "")


def flatten_named(tree: Tree, *roots: str) -> tuple[list[Any], TreeDef]:
    """Like `flatten`, with a name for the tree in errors, or with one name per item of a tuple."""
    if (found := _plain(tree)) is not None:
        return found
    try:
        leaves, treedef = optree.tree_flatten(tree, none_is_leaf=True, namespace=_NAMESPACE)
    except RecursionError as error:
        # If no cycle is found, a node's own code recursed: raise its error.
        raise find_endless(tree, roots, _steps, optree.MAX_RECURSION_DEPTH) or error from None
    if _register_nodes(leaves):
        return flatten_named(tree, *roots)
    return leaves, treedef


def _plain(tree: Tree) -> tuple[list[Any], TreeDef] | None:
    """Flatten a tensor or a tuple of tensors; None for any other tree.

    For each tensor that optree looks up, it lets go of the GIL twice.
    """
    if type(tree) is torch.Tensor:
        return [tree], _LEAF
    if type(tree) is tuple and all(type(one) is torch.Tensor for one in cast("tuple[Any, ...]", tree)):
        leaves = list(cast("tuple[Any, ...]", tree))
        return leaves, _tuple_treedef(len(leaves))
    return None


@lru_cache
def _tuple_treedef(length: int) -> TreeDef:
    """Return the treedef of a tuple of so many leaves."""
    return _treedef((0,) * length)


def _treedef(tree: Tree) -> TreeDef:
    return optree.tree_structure(tree, none_is_leaf=True, namespace=_NAMESPACE)


_LEAF = _treedef(0)


def unflatten(treedef: TreeDef, leaves: Iterable[Any]) -> Tree:
    """Build a tree from a treedef and leaves: the inverse of `flatten`.

    >>> unflatten(flatten((0, {"x": 0}))[1], ["one", "two"])
    ('one', {'x': 'two'})
    """
    return treedef.unflatten(leaves)


def flatten_like(treedef: TreeDef, types: list[type], tree: Tree) -> list[Any] | None:
    """Return the leaves of a tree with the structure `treedef` and leaves of these `types`; else maybe None.

    Several times faster than `flatten`, which must test whether each leaf is a node; here comparing types is
    enough.
    """
    try:
        leaves = treedef.flatten_up_to(tree)
    except ValueError:
        return None
    return leaves if list(map(type, leaves)) == types else None


def paths(tree: Tree) -> list[str]:
    """Return the path of each leaf as a Python expression, in the order of `flatten`.

    >>> paths(({"ids": 1}, [2, (3,)]))
    ["[0]['ids']", '[1][0]', '[1][1][0]']
    """
    return paths_of(flatten(tree)[1], "")


def paths_of(treedef: TreeDef, root: str) -> list[str]:
    """Return the path of each leaf, starting from a variable named `root`."""
    return [accessor.codify(root) for accessor in treedef.accessors()]


def paths_below(treedef: TreeDef, roots: Sequence[str]) -> list[str]:
    """Return the path of each leaf of a tuple, starting from one variable per item, named by `roots`."""
    return [accessor[1:].codify(roots[int(accessor[0].entry)]) for accessor in treedef.accessors()]


def leaf_count(treedef: TreeDef, child: int) -> int:
    """Return the number of leaves in one child of the root."""
    return treedef.child(child).num_leaves


def map_leaves(function: Callable[[Any], Any], tree: Tree) -> Tree:
    """Return a copy of the tree with each leaf replaced by `function(leaf)`.

    >>> map_leaves(lambda number: number + 1, {"a": [1, 2]})
    {'a': [2, 3]}
    """
    leaves, treedef = flatten(tree)
    return treedef.unflatten(map(function, leaves))


def leaf(cls: _Class) -> _Class:
    """Mark a class, usually a dataclass, as a leaf: its instances are not flattened. Usable as a decorator.

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


def is_marked(value: object) -> bool:
    """Return whether the class of a value was marked as a leaf."""
    return type(value) in _leaf_types


@dataclasses.dataclass(frozen=True, slots=True)
class Children:
    """The direct children of one node.

    `names`: each child's position, key or field. `steps`: the Python text that reaches it, such as `['x']` or
    `.x`.
    """

    names: tuple[Any, ...]
    steps: tuple[str, ...]
    values: tuple[Any, ...]
    treedef: TreeDef


def children(tree: Tree) -> Children | None:
    """Return the children of a node; None for a leaf."""
    # optree asks about the root first. Comparing with `is` instead would fail on a tree that contains itself.
    answers = itertools.chain([False], itertools.repeat(True))
    values, treedef = optree.tree_flatten(
        tree, is_leaf=lambda _: next(answers), none_is_leaf=True, namespace=_NAMESPACE
    )
    if treedef.is_leaf():
        return children(tree) if _register_nodes([tree]) else None
    entries = [accessor[0] for accessor in treedef.accessors()]
    steps = tuple(entry.codify("") for entry in entries)
    return Children(tuple(map(_name, entries)), steps, tuple(values), treedef)


def _steps(tree: Tree) -> Iterable[tuple[str, Any]]:
    node = children(tree)
    return () if node is None else zip(node.steps, node.values, strict=True)


def rebuild(node: Children, values: Iterable[Any]) -> Tree:
    """Build a node like `node`, with other children."""
    return node.treedef.unflatten(values)


# --- Nodes that optree does not know: torch's registry and records ----------------------------------------------


def _register_nodes(leaves: Iterable[Any]) -> bool:
    """Register leaf types that should be nodes; return whether there were any."""
    fresh = [cls for cls in set(map(type, leaves)) if _is_node_type(cls)]
    for cls in fresh:
        _register(cls)
    return bool(fresh)


def _is_node_type(cls: type) -> bool:
    # Most leaves are tensors, so test for them first.
    if cls is torch.Tensor or cls in _leaf_types:
        return False
    return cls in torch_pytree.SUPPORTED_NODES or is_record(cls)


def _register(cls: type) -> None:
    with _registering:
        if cls not in _registered:
            _register_node(cls, _open, _close, path_entry_type=_Step, namespace=_NAMESPACE)
            _registered.add(cls)


class _Step(optree.PyTreeEntry):
    """A step of a path whose entry is a torch pytree key; `str(key)` is its Python text."""

    def __call__(self, obj: Any) -> Any:
        return self.entry.get(obj)

    def codify(self, /, node: str = "") -> str:
        return f"{node}{self.entry}"


@dataclasses.dataclass(frozen=True, slots=True)
class _Unnamed:
    """The key of a child whose registration gives no name; its text is deliberately not valid Python."""

    index: int

    def get(self, node: Any) -> Any:
        return _open(node)[0][self.index]

    def __str__(self) -> str:
        return f"<child {self.index}>"


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Frame:
    """A node without its children: a function that rebuilds it, and the context for that function."""

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
    # Look in torch's registry each time: a dataclass may be registered after its first use here.
    registered = torch_pytree.SUPPORTED_NODES.get(type(node))
    if registered is None:
        values, context, keys = open_record(node)
        return values, _Frame(close_record, context), keys
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
    """Map the `id` of each attribute's value to the names of the attributes that have it, in order."""
    attributes: dict[str, Any] = getattr(node, "__dict__", {})
    names: dict[int, deque[str]] = defaultdict(deque)
    for name, value in attributes.items():
        names[id(value)].append(name)
    return names


def _name(entry: Any) -> Any:
    """Return the bare name of a child: a position, a key or a field."""
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

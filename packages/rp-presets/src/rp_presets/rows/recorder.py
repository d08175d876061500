"""`CallRecorder`: records the calls of a list of layers that do not run, with placeholders for their results."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NoReturn, cast

import torch
from torch import Tensor

from rp_presets.caches.before import is_state
from rp_presets.rows.absent import Absent, AbsentTensor, Spec
from rp_presets.rows.carry import BoxKey, LayerCall, Value
from rp_presets.rows.layout import Like
from rp_presets.rows.trees import Box, contents_of, emptied, is_box, is_plain, leaves, like_tuple, mapped, same


class CallRecorder:
    """Records the calls of a list of layers.

    `values`: the tensors in their arguments that no layer computed, by key. `touched`: see `Absent`. `refuse`:
    raises an error with a reason.
    """

    def __init__(
        self, device: torch.device, touched: Callable[[str], Any], refuse: Callable[[str], NoReturn]
    ) -> None:
        self._device = device
        self._touched = touched
        self._refuse = refuse
        self.values: dict[int, Tensor] = {}
        # Shapes and dtypes of the layers' results, by key.
        self.specs: dict[int, Spec | None] = {}
        self._count = 0
        self._boxes: dict[int, Box] = {}
        self._at_first: dict[int, Any] = {}
        # Results by key, as weak references, which tell whether the model's code still holds them.
        self._computed: dict[int, weakref.ref[Tensor]] = {}
        self._recorded: list[tuple[Any, Any]] = []
        # Of `values`, by `id`.
        self._keys: dict[int, Value] = {}

    def record(self, arguments: Any, like: Any) -> Any:
        """Record a layer's call; return its result, with placeholders in place of tensors."""
        encoded, given = _encoded(self._key, arguments), direct_tensors(arguments)
        result = mapped(lambda leaf: self._placeholder(leaf, given) if isinstance(leaf, Like) else leaf, like)
        self._recorded.append((encoded, mapped(self._result_key, result)))
        return result

    def calls(self) -> list[LayerCall]:
        """Return the recorded calls.

        Call it while the frames of the model's forward are alive: results that they still hold are kept for the
        code after the layers.
        """
        alive = {key for key, weak in self._computed.items() if weak() is not None}
        last_use, last_box = self._last_uses()
        return [
            LayerCall(
                encoded,
                tuple(leaf.key for leaf in leaves(encoded) if isinstance(leaf, BoxKey)) if self._boxes else (),
                result,
                frozenset(key for key, last in last_use.items() if last == index and key not in alive),
                frozenset(key for key, last in last_box.items() if last == index),
            )
            for index, (encoded, result) in enumerate(self._recorded)
        ]

    def empty(self) -> dict[int, Box]:
        """Return an empty copy of each container in the arguments, by key."""
        return {key: emptied(box) for key, box in self._boxes.items()}

    def contents(self) -> dict[int, Any]:
        """Return each container's contents at the first call of a layer with it, by key."""
        return self._at_first

    def _last_uses(self) -> tuple[dict[int, int], dict[int, int]]:
        values: dict[int, int] = {}
        boxes: dict[int, int] = {}
        for index, tree in enumerate(self._recorded):
            for leaf in leaves(tree):
                if isinstance(leaf, Value):
                    values[leaf.key] = index
                elif isinstance(leaf, BoxKey):
                    boxes[leaf.key] = index
        return values, boxes

    def _next(self) -> int:
        self._count += 1
        return self._count - 1

    def _placeholder(self, leaf: Like, given: list[Tensor]) -> Absent:
        absent = Absent.make(leaf.spec(given), self._device, self._touched)
        self.specs[self._count] = absent.spec
        key = absent.key = self._next()
        self._computed[key] = weakref.ref(absent)
        return absent

    def _result_key(self, leaf: Any) -> Any:
        return Value(leaf.key) if isinstance(leaf, Absent) and leaf.key is not None else leaf

    def _key(self, leaf: Any) -> Any:
        # Most are what the layers before were handed, too. One may have become a stand-in since.
        if (same := self._keys.get(id(leaf))) is not None and leaf.__class__ is not AbsentTensor:
            return same
        if is_box(leaf):
            return self._box_key(leaf)
        if isinstance(leaf, Absent):
            known = None if leaf.key is None else self._computed.get(leaf.key)
            if leaf.key is None or known is None or known() is not leaf:
                self._refuse("a layer is handed what a layer of another list returned")
            return Value(leaf.key)
        if isinstance(leaf, AbsentTensor):
            self._refuse("a layer is handed what is computed from what the row does not hand on")
        if isinstance(leaf, Tensor):
            key = self._next()
            self.values[key] = leaf
            return self._keys.setdefault(id(leaf), Value(key))
        if not (is_plain(leaf) or is_state(leaf)):
            self._refuse(
                f"its layers are handed a {type(leaf).__name__}, which cannot be handed on: it may be written, or "
                "hold tensors"
            )
        return leaf

    def _box_key(self, box: Box) -> BoxKey:
        key = next((key for key, known in self._boxes.items() if known is box), None)
        contents = contents_of(box)
        if any(map(is_box, _items(contents))):
            self._refuse("its layers are handed a container inside a container, whose writes cannot be followed")
        if any(isinstance(leaf, Absent) for leaf in leaves(contents)):
            self._refuse("the model writes what a layer returned into a container between its layers")
        if key is None:
            key = len(self._boxes)
            self._boxes[key] = box
            self._at_first[key] = contents
        elif not same(contents, self._at_first[key]):
            self._refuse("the model writes a container between its layers that they are handed")
        return BoxKey(key)


def _encoded(key: Callable[[Any], Any], tree: Any) -> Any:
    """Replace each leaf of a call's ``(args, kwargs)`` by `key(leaf)`. Containers inside count as leaves."""
    args, kwargs = tree
    return (
        tuple(_through_tuples(key, arg) for arg in args),
        {name: _through_tuples(key, value) for name, value in kwargs.items()},
    )


def _through_tuples(key: Callable[[Any], Any], tree: Any) -> Any:
    if not isinstance(tree, tuple) or isinstance(tree, torch.Size):
        return key(tree)
    items = cast("tuple[Any, ...]", tree)
    return like_tuple(items, [_through_tuples(key, item) for item in items])


def _items(contents: Any) -> list[Any]:
    """Return the items of a container, also those in tuples. Containers inside count as items."""
    items: list[Any] = []
    values: Any = contents.values() if isinstance(contents, dict) else contents  # pyright: ignore
    _through_tuples(items.append, tuple(values))
    return items


def _direct(arguments: Any) -> list[Any]:
    """Return the leaves of a call's arguments, with containers as leaves."""
    direct: list[Any] = []
    _encoded(direct.append, arguments)
    return direct


def boxes_of(arguments: Any) -> list[Box]:
    """Return the containers in a call's arguments."""
    return [leaf for leaf in _direct(arguments) if is_box(leaf)]


def direct_tensors(arguments: Any) -> list[Tensor]:
    """Return the tensors in a call's arguments that are not in a container."""
    return [leaf for leaf in _direct(arguments) if isinstance(leaf, Tensor)]

"""One layer of the model in a row, and what all layers of a row have in common."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

from torch import Tensor, nn

from rp_presets.errors import UnsupportedModel
from rp_presets.rows.capture import capturing
from rp_presets.rows.carry import BoxKey, Carry, LayerCall, Value
from rp_presets.rows.layout import Layout
from rp_presets.rows.trees import contents_of, filled, leaves, mapped, same


class SharesConfigs(nn.Module):
    """A module whose copies have its submodules' configs themselves: a setting may change between calls.

    >>> from types import SimpleNamespace
    >>> layer = SharesConfigs()
    >>> layer.config = SimpleNamespace(output_hidden_states=False)
    >>> copy.deepcopy(layer).config is layer.config
    True
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> SharesConfigs:
        memo.update((id(config), config) for config in _configs(self))
        found = memo[id(self)] = type(self).__new__(type(self))
        vars(found).update(copy.deepcopy(vars(self), memo))
        return found


class Layer(SharesConfigs):
    """Calls one of the model's layers as the model does.

    `layer`: the model's own module. `index`: its place among the layers. `layout`: what was observed of the model.
    """

    # An engine that compiles layers compiles these submodules: the code around them differs from layer to layer.
    compiled_submodules = ("layer",)

    def __init__(self, layer: nn.Module, index: int, layout: Layout) -> None:
        super().__init__()
        self.layer = layer
        self.index = index
        self.layout = layout
        self.training = layer.training

    def forward(self, carry: Carry) -> Carry:
        """Run the layer; replace in the carry what it computes.

        Raises `UnsupportedModel` if the layer returns other things than when the model was observed.
        """
        call = carry.program.calls[self.index]
        boxes = {key: filled(carry.program.empty[key], carry.boxes[key]) for key in _boxes(call)}
        args, kwargs = mapped(lambda leaf: _read(leaf, carry, boxes), call.arguments)
        with capturing(carry.collected) as collected:
            result = self._callable(collected)(*args, **kwargs)
        self._forget()
        after = {key: contents_of(box) for key, box in boxes.items()}
        written = carry.written | {key for key, now in after.items() if not same(now, carry.boxes[key])}
        return carry._replace(
            values=self._values(carry, call, result),
            boxes=_kept(carry.boxes | after, call, written),
            written=written,
            collected=collected,
        )

    def _callable(self, collected: Mapping[str, Any]) -> Callable[..., Any]:
        # A module's call without its compilation; torch leaves its type open.
        uncompiled = cast("Callable[..., Any]", self.layer._call_impl)  # pyright: ignore[reportUnknownMemberType]
        return uncompiled if collected and self.layout.hooks.are_late else self.layer

    def _forget(self) -> None:
        # What a layer leaves in its attributes would keep the graph alive, and cannot be copied.
        for module in self.layer.modules() if self.layout.written else ():
            for name in self.layout.written & vars(module).keys():
                vars(module)[name] = mapped(_detached, vars(module)[name])

    def _values(self, carry: Carry, call: LayerCall, result: Any) -> dict[int, Tensor]:
        expected, found = list(leaves(call.result)), list(leaves(result))
        if len(expected) != len(found) or not all(map(_fits, expected, found)):
            raise UnsupportedModel(
                f"layer {self.index} ({type(self.layer).__name__}) returned {_shown(found)}, but returned "
                f"{_shown(expected)} when the model was observed; observe it with arguments like these: "
                "to_sequential(model, example_inputs=...)"
            )
        computed = {
            wanted.key: value for wanted, value in zip(expected, found, strict=True) if isinstance(wanted, Value)
        }
        return {key: value for key, value in (carry.values | computed).items() if key not in call.done}


def _configs(module: nn.Module) -> Iterator[Any]:
    for one in module.modules():
        yield from (value for name, value in vars(one).items() if name.endswith("config"))


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, Tensor) else leaf


def _boxes(call: LayerCall) -> list[int]:
    return [leaf.key for leaf in leaves(call.arguments) if isinstance(leaf, BoxKey)]


def _read(leaf: Any, carry: Carry, boxes: dict[int, Any]) -> Any:
    if isinstance(leaf, Value):
        return carry.values[leaf.key]
    return boxes[leaf.key] if isinstance(leaf, BoxKey) else leaf


def _kept(boxes: dict[int, Any], call: LayerCall, written: frozenset[int]) -> dict[int, Any]:
    # What was written is kept for the code after the layers.
    return {key: box for key, box in boxes.items() if key in written or key not in call.done_boxes}


def _fits(expected: Any, found: Any) -> bool:
    return isinstance(found, Tensor) if isinstance(expected, Value) else found is None


def _shown(found: Sequence[Any]) -> str:
    names = ["Tensor" if isinstance(leaf, Value) else type(leaf).__name__ for leaf in found]
    return f"({', '.join(names)})"

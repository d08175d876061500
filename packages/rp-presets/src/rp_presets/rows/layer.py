"""`Layer`, one layer of the model in a row, and `SharesConfigs`, the base class of all layers of a row."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

from torch import Tensor, nn

from rp_presets.caches.before import is_state
from rp_presets.caches.devices import bring, indices_in_caches
from rp_presets.errors import UnsupportedModel
from rp_presets.rows.capture import capturing
from rp_presets.rows.carry import BoxKey, Carry, LayerCall, Value
from rp_presets.rows.layout import RowLayout
from rp_presets.rows.trees import contents_of, filled, leaves, mapped, same


class SharesConfigs(nn.Module):
    """A module whose copies share the configs of its submodules, since settings may change between calls.

    >>> from types import SimpleNamespace
    >>> layer = SharesConfigs()
    >>> layer.config = SimpleNamespace(output_hidden_states=False)
    >>> copy.deepcopy(layer).config is layer.config
    True
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> SharesConfigs:
        memo.update((id(config), config) for config in _configs(self))
        copied = memo[id(self)] = type(self).__new__(type(self))
        vars(copied).update(copy.deepcopy(vars(self), memo))
        return copied


class Layer(SharesConfigs):
    """Calls one of the model's layers as the model does.

    `layer`: the model's module. `index`: its index in its list of layers. `layout`: the observation of the model.
    """

    # The submodules that an engine compiles. The code around them differs from layer to layer.
    compiled_submodules = ("layer",)

    def __init__(self, layer: nn.Module, index: int, layout: RowLayout) -> None:
        super().__init__()
        self.layer = layer
        self.index = index
        self.layout = layout
        self.training = layer.training
        self.cache_indices = indices_in_caches(layer)

    def forward(self, carry: Carry) -> Carry:
        """Run the layer; return the carry with its results replaced.

        Raises `UnsupportedModel` if the types of its results differ from those that were observed.
        """
        call = carry.program.calls[self.index]
        boxes = {key: filled(carry.program.empty[key], carry.boxes[key]) for key in call.boxes}
        args, kwargs = mapped(lambda leaf: _read(leaf, carry, boxes), call.arguments)
        self._bring_caches((args, kwargs))
        with capturing(carry.collected) as collected:
            result = self._callable(collected)(*args, **kwargs)
        self._detach_attributes()
        after = {key: contents_of(box) for key, box in boxes.items()}
        written = carry.written | {key for key, now in after.items() if not same(now, carry.boxes[key])}
        return carry._replace(
            values=self._values(carry, call, result),
            boxes=_kept(carry.boxes | after, call, written),
            written=written,
            collected=collected,
        )

    def _callable(self, collected: Mapping[str, Any]) -> Callable[..., Any]:
        # `_call_impl` calls a module without its compiled code; torch has no type for it.
        uncompiled = cast("Callable[..., Any]", self.layer._call_impl)  # pyright: ignore[reportUnknownMemberType]
        return uncompiled if collected and self.layout.hooks.are_late else self.layer

    def _bring_caches(self, arguments: Any) -> None:
        given = list(leaves(arguments))
        device = next((leaf.device for leaf in given if isinstance(leaf, Tensor)), None)
        for leaf in given:
            if device is not None and is_state(leaf):
                bring(leaf, self.cache_indices, device)

    def _detach_attributes(self) -> None:
        # Tensors in the attributes that a layer sets would keep the graph alive, and could not be copied.
        for module in self.layer.modules() if self.layout.written else ():
            for name in self.layout.written & vars(module).keys():
                vars(module)[name] = mapped(_detached, vars(module)[name])

    def _values(self, carry: Carry, call: LayerCall, result: Any) -> dict[int, Tensor]:
        expected, actual = list(leaves(call.result)), list(leaves(result))
        if len(expected) != len(actual) or not all(map(_fits, expected, actual)):
            raise UnsupportedModel(
                f"layer {self.index} ({type(self.layer).__name__}) returned {_shown(actual)}, but returned "
                f"{_shown(expected)} when the model was observed; observe it with arguments like these: "
                "to_sequential(model, example_inputs=...)"
            )
        computed = {
            wanted.key: value for wanted, value in zip(expected, actual, strict=True) if isinstance(wanted, Value)
        }
        return {key: value for key, value in (carry.values | computed).items() if key not in call.done}


def _configs(module: nn.Module) -> Iterator[Any]:
    for one in module.modules():
        yield from (value for name, value in vars(one).items() if name.endswith("config"))


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, Tensor) else leaf


def _read(leaf: Any, carry: Carry, boxes: dict[int, Any]) -> Any:
    if isinstance(leaf, Value):
        return carry.values[leaf.key]
    return boxes[leaf.key] if isinstance(leaf, BoxKey) else leaf


def _kept(boxes: dict[int, Any], call: LayerCall, written: frozenset[int]) -> dict[int, Any]:
    # Keep containers that were written, for the code after the layers.
    return {key: box for key, box in boxes.items() if key in written or key not in call.done_boxes}


def _fits(expected: Any, actual: Any) -> bool:
    return isinstance(actual, Tensor) if isinstance(expected, Value) else actual is None


def _shown(results: Sequence[Any]) -> str:
    names = ["Tensor" if isinstance(leaf, Value) else type(leaf).__name__ for leaf in results]
    return f"({', '.join(names)})"

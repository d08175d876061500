"""What is seen of a model's modules between calls: each change of a plain attribute, and all modules in order."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from rp_state.modules.seen import SeenModules
from rp_state.modules.signature import modules_of
from torch import nn


class Named(nn.Module):
    """Has attributes of several kinds, as adapters have."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = 1.0
        self.scaling = {"default": 2.0}
        self.merged = ["first"]
        self.inner = nn.Linear(2, 2)


class Wider(nn.Module):
    """Tells of a module that it does not hold."""

    def __init__(self, other: nn.Module) -> None:
        super().__init__()
        self.others = (other,)

    def named_modules(self, *_: object, **__: object) -> Iterator[tuple[str, nn.Module]]:
        yield "", self
        yield "other", self.others[0]


def seen(layer: nn.Module) -> SeenModules:
    found = SeenModules([layer], {})
    found.have_changed([layer])
    return found


def test_modules_are_those_of_torch_in_its_order() -> None:
    shared = nn.Linear(2, 2)
    model = nn.Sequential(shared, nn.Sequential(nn.Tanh(), shared), nn.ModuleDict({"a": nn.ReLU()}))
    model.register_module("nothing", None)

    assert modules_of(model) == tuple(model.modules())


def test_a_module_may_tell_of_others_than_it_holds() -> None:
    model = nn.Sequential(Wider(nn.Tanh()), nn.ReLU())

    assert modules_of(model) == tuple(model.modules())
    assert len(modules_of(model)) == 4


CHANGES: dict[str, Callable[[Named], object]] = {
    "a number": lambda layer: setattr(layer, "scale", 2.0),
    "an equal number of another type": lambda layer: setattr(layer, "scale", 1),
    "an entry": lambda layer: layer.scaling.update(default=3.0),
    "a new entry": lambda layer: layer.scaling.update(other=2.0),
    "an item": lambda layer: layer.merged.append("second"),
    "a new attribute": lambda layer: setattr(layer.inner, "p", 1),
    "a name": lambda layer: setattr(layer, "strength", layer.__dict__.pop("scale")),
    "a function": lambda layer: setattr(layer.inner, "forward", layer.forward),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_each_change_of_an_attribute_is_seen_once(change: Callable[[Named], object]) -> None:
    layer = Named()
    before = seen(layer)
    assert not before.note_attributes()

    change(layer)
    before.have_changed([layer])

    assert [before.note_attributes(), before.note_attributes()] == [True, False]


def test_what_else_modules_hold_is_no_attribute() -> None:
    layer = Named()
    before = seen(layer)

    layer.eval()
    layer.inner.register_forward_hook(lambda *_: None)
    before.have_changed([layer])

    assert not before.note_attributes()


def test_a_parameter_that_is_frozen_is_seen() -> None:
    layer = Named()
    before = seen(layer)

    layer.inner.weight.requires_grad_(False)

    assert [before.note_attributes(), before.note_attributes()] == [True, False]

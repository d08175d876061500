"""The layers of a row around the model's own: each runs part of the model's forward on a skeleton."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from rp_presets.errors import UnsupportedModel
from rp_presets.rows.absent import Absent, Spec, standing_in
from rp_presets.rows.carry import Carry
from rp_presets.rows.layout import Layout
from rp_presets.rows.session import Reached, Run
from rp_presets.rows.skeleton import in_session, skeleton
from rp_presets.rows.trees import leaves, mapped


class Glue(nn.Module):
    """Runs the code of a model between two of its lists of layers.

    `stage`: 0 for the code before the first list.
    """

    # An engine that compiles layers compiles none of this: it is the model's own code around its layers.
    compiled_submodules = ()

    def __init__(self, model: nn.Module, layout: Layout, stage: int) -> None:
        super().__init__()
        self.layout = layout
        self.stage = stage
        held = layout.parts[stage]
        self.at_its_code: Callable[[], object] = _nothing
        self.model = skeleton(model, layout.numbers(), held.__contains__, layout.spine)
        self.training = model.training

    def ahead(self, args: tuple[Any, ...], kwargs: dict[str, Any], before: Carry | None, travelling: Any) -> Carry:
        """Run up to the layers of this stage; return what they are handed."""
        run = Run(self.stage, self.layout, _device((args, kwargs, before)), before, self.at_its_code)
        with in_session(run):
            try:
                held = self.model(*args, **kwargs)
            except Reached:
                # Inside this block the traceback keeps the frames of forward alive.
                return run.carry(travelling)
            found = run.carry(travelling)
            del held
            return found


class Prologue(Glue):
    """The first layer of a row: takes the model's arguments, and runs what comes before its layers."""

    def __init__(self, model: nn.Module, layout: Layout) -> None:
        super().__init__(model, layout, 0)

    def forward(self, *args: Any, **kwargs: Any) -> Carry:
        """Run with the model's arguments.

        Raises `ValueError` for a cache, and `UnsupportedModel` where the model does not treat its layers as a row.
        """
        args, kwargs = _without_cache(self.model, self.layout, args, kwargs)
        return self.ahead(args, kwargs, None, _travelling(self.model, self.layout, args, kwargs))


class Interlude(Glue):
    """The layer between two lists of layers, such as an encoder's and a decoder's."""

    def forward(self, carry: Carry) -> Carry:
        """Run what comes between them."""
        args, kwargs = standing_in(carry.arguments, _device(carry))
        return self.ahead(args, kwargs, carry, carry.arguments)


class Epilogue(Glue):
    """The last layer of a row: runs what comes behind the layers, and returns the model's output."""

    def __init__(self, model: nn.Module, layout: Layout) -> None:
        super().__init__(model, layout, len(layout.segments))

    def forward(self, carry: Carry) -> Any:
        """Run to the end of the model's forward."""
        device = _device(carry)
        args, kwargs = standing_in(carry.arguments, device)
        with in_session(Run(self.stage, self.layout, device, carry, self.at_its_code)):
            output = self.model(*args, **kwargs)
        if any(isinstance(leaf, Absent) for leaf in leaves(output)):
            raise UnsupportedModel(
                f"the output ({type(output).__name__}) holds what a layer returned and the row did not hand on"
            )
        return output


def _nothing() -> None:
    pass


def _device(tree: Any) -> torch.device:
    found = next(
        (leaf for leaf in leaves(tree) if isinstance(leaf, Tensor) and not isinstance(leaf, Absent)), None
    )
    return torch.device("cpu") if found is None else found.device


def _without_cache(
    model: nn.Module, layout: Layout, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    parameters = inspect.signature(type(model).forward).parameters
    names = [name for name in parameters if name != "self"]
    given = dict(zip(names, args, strict=False)) | kwargs
    for name in ("past_key_values", "cache_params"):
        if given.get(name) is not None:
            raise ValueError(
                f"{name} must be None, but is a {type(given[name]).__name__}: a row of layers keeps no key-value "
                "cache; generate text with the model itself"
            )
    if not layout.cache_argument:
        return args, kwargs
    if "use_cache" in names and names.index("use_cache") < len(args):
        place = names.index("use_cache")
        return (*args[:place], False, *args[place + 1 :]), kwargs
    return args, {**kwargs, "use_cache": False}


def _travelling(model: nn.Module, layout: Layout, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    # Large tensors such as embeddings and images are read before the layers only: their shapes travel.
    names = [name for name in inspect.signature(type(model).forward).parameters if name != "self"]
    keep: Callable[[str, Any], Any] = lambda name, value: (  # noqa: E731
        value if "label" in name or (-1, name, 0) in layout.needed else mapped(_small, value)
    )
    padded = [*names, *["" for _ in args]]
    return (
        tuple(keep(name, value) for name, value in zip(padded, args, strict=False)),
        {name: keep(name, value) for name, value in kwargs.items()},
    )


def _small(leaf: Any) -> Any:
    is_large = isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.dim() > 0
    return Spec.of(leaf) if is_large else leaf

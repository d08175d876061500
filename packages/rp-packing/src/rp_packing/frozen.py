"""`pack_frozen` and `unpack_frozen`: replace a model's frozen matrices by packed ones, and back."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from rp_packing.format import Format
from rp_packing.formats.by_name import format_of
from rp_packing.weight import PackedWeight, as_parameter

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


class PackedBytes(NamedTuple):
    """Bytes of the packed weights, before and after packing. `weights`: their number."""

    weights: int
    before: int
    after: int


def pack_frozen(
    model: nn.Module,
    format: str,
    *,
    select: Callable[[str, nn.Parameter], bool] | None = None,
    each: Callable[[PackedWeight], object] | None = None,
) -> PackedBytes:
    """Pack the frozen matrices of a model, in place, before it is wrapped.

    Args:
        model: on the host. Names, shapes and dtypes of its parameters stay.
        format: ``"fp8"``, ``"fp8-rows"``, ``"int8"``, ``"nf4"`` or ``"mxfp4"``.
        select: returns whether to pack a parameter, given its name and itself; called for those of two dimensions
            or more. Default: weights of linear layers and stacked experts (of three dimensions), without the
            output head.
        each: called with each packed weight before the next one is packed: it may move the codes and scales, to
            disk for example.

    Only frozen parameters are packed: freeze a model or a tower first, or add adapters, which freezes the rest.
    Packing rounds. On devices the weights arrive packed and are expanded for the layer that runs.

    >>> import torch
    >>> tower = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Tanh()).requires_grad_(False)
    >>> pack_frozen(tower, "nf4")
    PackedBytes(weights=1, before=16384, after=2304)
    >>> tower[0].weight
    PackedWeight(nf4, shape=(64, 64), dtype=torch.float32)

    Raises `TypeError` if `model` is not a module; `ValueError` for an unknown format, a model without frozen
    matrices, a weight that does not fit the format, and a parameter that `select` chooses although it is trained,
    or of another dtype than float32, bfloat16 and float16. Nothing is packed then. `ValueError` for a weight with
    a NaN or an infinity: the weights before it are packed.
    """
    if not isinstance(model, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance] - users need not check types
        raise TypeError(f"model must be a torch.nn.Module, but is {model!r}")
    format_of(format)
    heads = _heads(model)
    chosen = [place for place in _places(model) if _is_chosen(place, select, heads)]
    if not chosen:
        raise ValueError(_nothing_chosen(model, is_selected=select is not None))
    forms = [format_of(format, transposed=bool(getattr(place.module, "is_transposed", False))) for place in chosen]
    _check_all(zip(chosen, forms, strict=True))
    before = sum({id(place.parameter): place.parameter.nbytes for place in chosen}.values())
    todo = deque(zip(chosen, forms, strict=True))
    # The queue holds the last references to the weights: each is freed before the next one is packed.
    del chosen
    packed = _pack_each(todo, each)
    return PackedBytes(len(packed), before, sum(cast(PackedWeight, one).packed_nbytes for one in packed))


def unpack_frozen(model: nn.Module) -> int:
    """Expand all packed weights of a model, in place, and return their number; they stay frozen.

    >>> tower = nn.Sequential(nn.Linear(64, 64)).requires_grad_(False)
    >>> _ = pack_frozen(tower, "int8")
    >>> unpack_frozen(tower), type(tower[0].weight).__name__
    (1, 'Parameter')
    """
    expanded: dict[int, nn.Parameter] = {}
    for place in _places(model):
        if isinstance(place.parameter, PackedWeight):
            if id(place.parameter) not in expanded:
                weight: PackedWeight = place.parameter
                expanded[id(weight)] = nn.Parameter(weight.expanded(), requires_grad=False)
            place.put(expanded[id(place.parameter)])
    return len(expanded)


class _Place(NamedTuple):
    """A module and the name of one of its parameters."""

    module: nn.Module
    own: str
    name: str
    parameter: nn.Parameter

    def put(self, parameter: nn.Parameter) -> None:
        """Replace the parameter by another one."""
        self.module.register_parameter(self.own, parameter)


def _places(model: nn.Module) -> Iterator[_Place]:
    modules: Any = model
    for name, module in cast("Iterator[tuple[str, nn.Module]]", modules.named_modules()):
        for own, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            yield _Place(module, own, f"{name}.{own}" if name else own, parameter)


def _is_chosen(place: _Place, select: Callable[[str, nn.Parameter], bool] | None, heads: set[int]) -> bool:
    if isinstance(place.parameter, PackedWeight) or place.parameter.ndim < 2:
        return False
    if select is not None:
        return select(place.name, place.parameter)
    return _is_matrix(place) and not place.parameter.requires_grad and id(place.parameter) not in heads


def _is_matrix(place: _Place) -> bool:
    """Return whether the parameter is a linear layer's weight, or stacked experts."""
    if place.parameter.dtype not in _FLOATS:
        return False
    if isinstance(place.module, nn.Linear) or type(place.module).__name__ == "Conv1D":
        return place.own == "weight"
    is_convolution = isinstance(place.module, nn.modules.conv._ConvNd)  # pyright: ignore[reportPrivateUsage] - the class of all
    # A first dimension of 1 is not a stack: vision towers have position embeddings of shape (1, patches, width).
    return place.parameter.ndim == 3 and not is_convolution and min(place.parameter.shape) > 1


def _heads(model: nn.Module) -> set[int]:
    """Return the ids of the output head's weight and of those of embeddings, to which it may be tied."""
    heads = {id(one.weight) for one in model.modules() if isinstance(one, nn.Embedding)}
    for module in model.modules():
        get: Any = getattr(module, "get_output_embeddings", None)
        head = get() if callable(get) else None
        if isinstance(head, nn.Module):
            heads |= {id(parameter) for parameter in head.parameters()}
    return heads


def _pack_each(
    todo: deque[tuple[_Place, Format]], each: Callable[[PackedWeight], object] | None
) -> list[nn.Parameter]:
    """Pack the weights in these places, each once."""
    packed: dict[int, nn.Parameter] = {}
    while todo:
        place, form = todo.popleft()
        if id(place.parameter) not in packed:
            weight = _packed(place, form)
            if each is not None:
                each(weight)
            packed[id(place.parameter)] = as_parameter(weight)
        place.put(packed[id(place.parameter)])
    return list(packed.values())


def _packed(place: _Place, form: Format) -> PackedWeight:
    try:
        return PackedWeight.of(form, place.parameter)
    except ValueError as error:
        raise ValueError(f"{place.name}: {error}") from None


def _nothing_chosen(model: nn.Module, *, is_selected: bool) -> str:
    if is_selected:
        return "select chose no parameter; it is called with name and parameter"
    packed = next((one for one in model.parameters() if isinstance(one, PackedWeight)), None)
    if packed is not None:
        return (
            f"all frozen matrices are packed already, as {packed.format.name}; to change the format, call "
            "unpack_frozen(model) first"
        )
    return (
        "there is no frozen matrix to pack, of float32, bfloat16 or float16; freeze the model first, as in "
        "model.requires_grad_(False), or add adapters"
    )


def _check_all(chosen: Iterable[tuple[_Place, Format]]) -> None:
    for place, form in chosen:
        _check(place, form)


def _check(place: _Place, form: Format) -> None:
    if place.parameter.requires_grad:
        raise ValueError(
            f"{place.name} is trained, but packed weights are frozen: freeze it first, or do not select it"
        )
    if place.parameter.dtype not in _FLOATS:
        raise ValueError(f"{place.name} is {place.parameter.dtype}, but weights to pack must be one of {_FLOATS}")
    try:
        form.specs(place.parameter.shape)
    except ValueError as error:
        raise ValueError(f"{place.name}: {error}") from None

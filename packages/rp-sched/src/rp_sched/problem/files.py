"""Read costs and limits from JSON files."""

import json
from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar, cast

from rp_sched.errors import InvalidCost
from rp_sched.problem import bounds
from rp_sched.problem.checks import at_most, shown, whole
from rp_sched.problem.costs import LayerCost
from rp_sched.problem.limits import Device, Host, Limits, Switch

_LAYER = tuple(field.name for field in fields(LayerCost))
_Kind = TypeVar("_Kind", Device, Host, Limits, Switch)

# Far more than the largest allowed problem needs; larger files, such as endless pipes, are refused.
MOST_COSTS_BYTES = 16 * 2**20
MOST_TASKS_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True)
class Problem:
    """The contents of a costs file."""

    costs: tuple[LayerCost, ...]
    limits: Limits


def read(path: Path) -> Problem:
    """Read a costs file. Raises `InvalidCost`, whose message names file and field in one line, or `OSError`."""
    try:
        return parse(read_text(path, most_bytes=MOST_COSTS_BYTES))
    except (ValueError, TypeError) as error:
        raise InvalidCost(f"{path}: {error}") from error


def read_text(path: Path, *, most_bytes: int) -> str:
    """Return the text of a file or pipe. Raises `ValueError` after reading more than `most_bytes`."""
    with path.open("rb") as file:
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise ValueError(f"the file must have at most {most_bytes} bytes, but has more; make it shorter")
    return content.decode("utf-8")


def parse(text: str) -> Problem:
    """Read costs and limits from JSON text.

    >>> problem = parse('{"layers": [{"forward_ms": 2, "repeat": 3}], "limits": {"hop_ms": 0.5}}')
    >>> len(problem.costs), problem.limits.hop_ms
    (3, 0.5)
    >>> parse('{"layers": [{"forward_ms": 1, "repeat": 0}]}')
    Traceback (most recent call last):
    rp_sched.errors.InvalidCost: layers[0]: repeat must be at least 1, but is 0 instead

    A layer has the fields of `LayerCost`, and optionally `repeat`, the number of equal layers. `limits` has the
    fields of `Limits`: `host` is an object with the fields of `Host`, `switches` and `devices` are lists of
    objects with those of `Switch` and `Device`. Sizes may be written as 7e9.
    """
    top = _object("the file", _json(text), {"layers", "limits"})
    if "layers" not in top:
        raise InvalidCost("layers must be a list of layers, but there is none")
    layers = top["layers"]
    if not isinstance(layers, list) or not layers:
        raise InvalidCost(f"layers must be a list of at least one layer, but is {shown(layers)} instead")
    costs: list[LayerCost] = []
    for at, layer in enumerate(cast(list[object], layers)):
        costs += _layer(f"layers[{at}]", layer)
        at_most("the number of layers", len(costs), bounds.LAYERS, error=InvalidCost)
    return Problem(tuple(costs), _limits(top.get("limits", {})))


def _json(text: str) -> object:
    # Python's parser also accepts Infinity and NaN, which are not JSON; the checks of the fields refuse them.
    try:
        return json.loads(text)
    except ValueError as error:
        raise InvalidCost(f"the file must be JSON, but is not: {error}") from error
    except RecursionError as error:
        raise InvalidCost("the file must be lists of objects, but is nested too deeply to be read") from error


def _layer(where: str, value: object) -> Iterable[LayerCost]:
    layer = _object(where, value, {*_LAYER, "repeat"})
    repeat = layer.pop("repeat", 1)
    if "forward_ms" not in layer:
        raise InvalidCost(f"{where}: forward_ms must be given, but is missing")
    try:
        return [LayerCost(**layer)] * whole("repeat", repeat, least=1, bound=bounds.LAYERS)
    except (ValueError, TypeError) as error:
        raise InvalidCost(f"{where}: {error}") from error


def _limits(value: object) -> Limits:
    limits = _fields("limits", value, Limits)
    if "devices" in limits:
        limits["devices"] = _list("limits.devices", limits["devices"], Device)
    if "switches" in limits:
        limits["switches"] = _list("limits.switches", limits["switches"], Switch)
    if "host" in limits:
        limits["host"] = _parsed("limits.host", limits["host"], Host)
    return _build("limits", Limits, limits)


def _list(where: str, value: object, kind: type[_Kind]) -> tuple[_Kind, ...]:
    if not isinstance(value, list):
        raise InvalidCost(f"{where} must be a list of objects, but is {shown(value)} instead")
    return tuple(_parsed(f"{where}[{at}]", one, kind) for at, one in enumerate(cast(list[object], value)))


def _parsed(where: str, value: object, kind: type[_Kind]) -> _Kind:
    return _build(where, kind, _fields(where, value, kind))


def _build(where: str, kind: type[_Kind], values: dict[str, Any]) -> _Kind:
    try:
        return kind(**values)
    except (ValueError, TypeError) as error:
        raise InvalidCost(f"{where}: {error}") from error


def _fields(where: str, value: object, kind: type[Device | Host | Limits | Switch]) -> dict[str, Any]:
    return _object(where, value, {field.name for field in fields(kind)})


def _object(where: str, value: object, names: set[str]) -> dict[str, Any]:
    # Any, since LayerCost and Limits check the values.
    if not isinstance(value, dict):
        raise InvalidCost(f"{where} must be an object, but is {shown(value)} instead")
    given = cast(dict[str, Any], value)
    for name in given:
        if name not in names:
            raise InvalidCost(f"{where}: unknown field {shown(name)}; the fields are {', '.join(sorted(names))}")
    return {name: _number(name, field) for name, field in given.items()}


def _number(name: str, value: object) -> object:
    """Convert a size written as 7e9, which JSON reads as a float, to an int."""
    is_size = name.endswith("_bytes") and isinstance(value, float) and value.is_integer()
    return int(cast(float, value)) if is_size else value

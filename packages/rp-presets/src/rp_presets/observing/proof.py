"""Prove that a model is a row: the code around its layers runs alone and gets everything that it reads."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from rp_presets.errors import NotARow, UnsupportedModel
from rp_presets.observing.randomness import seed_generators
from rp_presets.observing.trace import LayersSeen
from rp_presets.rows.carry import Carry, Origin, Value
from rp_presets.rows.glue import Epilogue, Glue, Interlude, Prologue
from rp_presets.rows.layout import RowLayout
from rp_presets.rows.session import remembering_towers
from rp_presets.rows.trees import leaves

_SEEDS = (1, 2, 3)


def proven(
    model: nn.Module, layout: RowLayout, seen: Sequence[LayersSeen], inputs: Mapping[str, Any]
) -> RowLayout:
    """Prove that the layout is a row; return it with everything that the code after layers needs from before them.

    Raises `NotARow` if a list of layers is not a row.
    """
    with remembering_towers():
        return _proven(model, layout, seen, inputs)


def _proven(
    model: nn.Module, layout: RowLayout, seen: Sequence[LayersSeen], inputs: Mapping[str, Any]
) -> RowLayout:
    floats = {(-1, name, 0) for name, value in inputs.items() if isinstance(value, Tensor)}
    for stage in range(1, len(layout.segments) + 1):
        origins = _origins(model, layout, seen, inputs, stage)
        observed = layout.observed | origins | floats
        everything = replace(layout, needed=layout.needed | floats | origins, observed=observed)
        reference = _outcome(model, everything, seen, inputs, stage)
        for origin in sorted(everything.needed - layout.needed):
            fewer = replace(everything, needed=everything.needed - {origin})
            if _is_enough(lambda layout=fewer: _outcome(model, layout, seen, inputs, stage), reference):  # noqa: B023
                everything = fewer
        if not _same(_outcome(model, everything, seen, inputs, stage, seed=_SEEDS[1]), reference):
            _refuse_nonfinite_weights(model)
            raise NotARow(
                layout.segments[stage - 1].path,
                "the code behind its layers reads random numbers that are drawn before them, as by a dropout",
            )
        layout = everything
    _refuse_memory(model, layout, seen, inputs)
    return layout


def _refuse_memory(
    model: nn.Module, layout: RowLayout, seen: Sequence[LayersSeen], inputs: Mapping[str, Any]
) -> None:
    """Refuse code whose result depends on how often it ran: each device has a copy, which runs at other times."""
    later = range(1, len(layout.segments))
    glues = [
        Prologue(model, layout),
        *(Interlude(model, layout, number) for number in later),
        Epilogue(model, layout),
    ]
    once, again = (_all_outcomes(glues, seen, inputs) for _ in range(2))
    for number, (one, other) in enumerate(zip(once, again, strict=True)):
        if not _same(one, other):
            _refuse_nonfinite_weights(model)
            raise NotARow(
                layout.segments[max(number - 1, 0)].path,
                f"the code {'behind' if number else 'before'} its layers depends on how often it ran, "
                "as on a number of steps that it counts",
            )


def _refuse_nonfinite_weights(model: nn.Module) -> None:
    """Refuse weights that are NaN or infinite, since NaN results never compare as equal."""
    for name, weight in model.named_parameters():
        if not bool(weight.detach().isfinite().all()):
            raise UnsupportedModel(
                f"its weight {name} has numbers that are NaN or infinite; fetch it or save it again"
            )


def _all_outcomes(glues: Sequence[Glue], seen: Sequence[LayersSeen], inputs: Mapping[str, Any]) -> list[list[Any]]:
    """Run the code of all stages with the observed results of the layers; return what each stage computes."""
    outcomes: list[list[Any]] = []
    result: Any = None
    for number, glue in enumerate(glues):
        seed_generators(_SEEDS[0])
        result = glue(**inputs) if number == 0 else glue(_after_layers(result, seen[number - 1]))
        outcomes.append(_computed(result, number))
    return outcomes


def _is_enough(outcome: Callable[[], list[Any]], reference: list[Any]) -> bool:
    try:
        return _same(outcome(), reference)
    except Exception:  # the model's own code, which reads values of a stand-in, may raise anything
        return False


def _origins(
    model: nn.Module, layout: RowLayout, seen: Sequence[LayersSeen], inputs: Mapping[str, Any], stage: int
) -> set[Origin]:
    """Return the origins of everything that is computed before the code of a stage."""
    carry = _passed_to_stage(model, layout, seen, inputs, stage, _SEEDS[0])
    layers = {(number, "", index) for number in range(stage - 1) for index in range(len(seen[number].results))}
    return {origin for origin in carry.program.past if origin[1]} | layers


def _passed_to_stage(
    model: nn.Module,
    layout: RowLayout,
    seen: Sequence[LayersSeen],
    inputs: Mapping[str, Any],
    stage: int,
    seed: int,
) -> Carry:
    """Return the carry that the code of a stage gets if the layers return their observed results."""
    seed_generators(seed)
    carry: Any = None
    for number in range(stage):
        glue = Prologue(model, layout) if number == 0 else Interlude(model, layout, number)
        carry = glue(**inputs) if number == 0 else glue(carry)
        carry = _after_layers(carry, seen[number])
    return carry


def _after_layers(carry: Carry, seen: LayersSeen) -> Carry:
    computed = {
        expected.key: leaf
        for call, result in zip(carry.program.calls, seen.results, strict=True)
        for expected, leaf in zip(leaves(call.result), leaves(result), strict=True)
        if isinstance(expected, Value)
    }
    done = frozenset[int]().union(*(call.done for call in carry.program.calls))
    values = {key: value for key, value in (carry.values | computed).items() if key not in done}
    return carry._replace(
        values=values,
        boxes=dict(seen.written),
        written=frozenset(seen.written),
        collected=carry.collected
        | {key: [*carry.collected.get(key, ()), *values] for key, values in seen.collected.items()},
    )


def _outcome(
    model: nn.Module,
    layout: RowLayout,
    seen: Sequence[LayersSeen],
    inputs: Mapping[str, Any],
    stage: int,
    *,
    seed: int = _SEEDS[0],
) -> list[Any]:
    """Return what the code of a stage computes. `seed`: for random numbers before it; its own are fixed."""
    carry = _passed_to_stage(model, layout, seen, inputs, stage, _SEEDS[0])
    seed_generators(seed)
    is_last = stage == len(layout.segments)
    glue: Glue = Epilogue(model, layout) if is_last else Interlude(model, layout, stage)
    glue.at_its_code = lambda: seed_generators(_SEEDS[2])
    return _computed(glue(carry), stage)


def _computed(result: Any, stage: int) -> list[Any]:
    if isinstance(result, Carry):
        own = [part for origin, part in result.parts.items() if origin[0] == stage]
        # Drop addresses: functions that are created in each run have other ones.
        calls = re.sub(r"0x[0-9a-f]+", "", repr(result.program.calls))
        return [*leaves(result.values), *leaves(result.boxes), *leaves(own), calls]
    return list(leaves(result))


def _same(ones: Sequence[Any], others: Sequence[Any]) -> bool:
    return len(ones) == len(others) and all(map(_equal, ones, others))


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other)
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return False
    return one == other

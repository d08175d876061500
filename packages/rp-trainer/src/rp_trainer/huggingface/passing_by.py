"""Refuse trainers that would run models past RoundPipe: the user's own to generate text, or others beside it."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from types import CodeType, FunctionType

from roundpipe import AutoRoundPipe, RoundPipe
from torch import nn
from transformers import PreTrainedModel, Trainer

from rp_trainer.on_devices import OnDevices

# Attributes of trainers whose models are wrapped.
_WRAPPED = frozenset({"model", "model_wrapped", "ref_model", "reward_funcs"})
_WHOLE = "unwrap_model_for_generation"


def refuse_generating(kind: type[object]) -> None:
    """Raise `ValueError` for a trainer's class that generates text with the user's own model, on the host.

    TRL's trainers generate with what `unwrap_model_for_generation` gives them. A method that calls it neither
    with ``self.model_wrapped`` nor with an argument `model`, which is the same, gives it the model on the host.
    """
    for place in _generating_on_host(kind):
        raise ValueError(
            f"{place} generates text with trainer.model, whose weights are the host's; RoundPipe generates with "
            "trainer.model_wrapped: override that method, or use a trainer that does"
        )


def refuse_models(trainer: object) -> None:
    """Raise `ValueError` for a Transformers model, such as a teacher, that would stay on the host."""
    for name, value in vars(trainer).items():
        if name not in _WRAPPED and _is_on_host(value):
            raise ValueError(
                f"{name} of {type(trainer).__name__} is a model that RoundPipe does not run: only model, "
                "ref_model and reward_funcs go to the devices; use another trainer, or give it a model that "
                "wrap_model_to_roundpipe has wrapped"
            )


def _generating_on_host(kind: type[object]) -> Iterator[str]:
    for owner in kind.__mro__[: _own_classes(kind)]:
        for name, method in vars(owner).items():
            if (code := _code(method)) is None:
                continue
            used = {one for part in _parts(code) for one in (*part.co_names, *part.co_freevars)}
            if _WHOLE in used and "model_wrapped" not in used and "model" not in _arguments(code):
                yield f"{owner.__name__}.{name}"


def _own_classes(kind: type[object]) -> int:
    order = kind.__mro__
    return order.index(Trainer) if Trainer in order else len(order)


def _is_on_host(value: object) -> bool:
    if not isinstance(value, nn.Module) or isinstance(value, OnDevices | RoundPipe | AutoRoundPipe):
        return False
    return isinstance(value, PreTrainedModel) or hasattr(value, "peft_config")


def _code(method: object) -> CodeType | None:
    function: object = getattr(method, "__func__", method)
    function = inspect.unwrap(function) if callable(function) else function
    return function.__code__ if isinstance(function, FunctionType) else None


def _parts(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _parts(constant)


def _arguments(code: CodeType) -> tuple[str, ...]:
    return code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]

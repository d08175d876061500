"""The verdict on a program: equal to plain PyTorch, refused in words, or wrong."""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import roundpipe
import torch

from fuzzing.kinds.layers import Mixed
from fuzzing.our_side import Ours
from fuzzing.plain_side import Plain
from fuzzing.program import DTYPES, Op, Program
from fuzzing.sides import Record, carry_out

Outcome = Literal["equal", "refused", "wrong", "invalid"]
OUR_SOURCES = str(Path(roundpipe.__file__).parents[3])
# Relative to the norm of each tensor. Sums of other order; fp32 inside of fp64 rows; fp32.
EXACT, WITHIN_FP64, WITHIN_FP32 = 1e-9, 1e-4, 2e-3
# A training that diverges has no truth: it makes of roundings what it likes.
DIVERGED = 1e6
# What is smaller counts as so large; and so does what is so much smaller than others of the same kind, such as the
# gradient of a bias before batch norm, of which only rounding errors are left.
SMALL, BESIDE_OTHERS = 1e-2, 1e-3
# In fewer bits than fp64 rounding errors of large gradients are as large as gradients through a saturated tanh.
BESIDE_OTHERS_ROUNDED = 1e-2
# In fewer bits: so many times plain PyTorch's own distance from fp64, and at least so much in 16.
NOISES, LEAST_16 = 8.0, 0.06


@dataclass(frozen=True)
class Verdict:
    """`words`: what was refused, or how it is wrong. "invalid": plain PyTorch raises, so there is no truth."""

    outcome: Outcome
    words: str = ""

    def __str__(self) -> str:
        return f"{self.outcome.upper()}: {self.words}" if self.words else self.outcome.upper()


def judge(program: Program) -> Verdict:
    """Run both sides."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return _judged(program)
        except Exception:
            return Verdict("wrong", "the comparison itself fails:\n" + traceback.format_exc())


def _judged(program: Program) -> Verdict:
    ours, found = _ours(program)
    truth = carry_out(program, Plain(program, DTYPES[program.dtype], told=found), DTYPES[program.dtype])
    if truth[-1].error is not None:
        return Verdict("invalid", f"plain PyTorch raises at {truth[-1].op}: {truth[-1].error}")
    if any(
        tensor.double().norm() > DIVERGED for record in truth for tensor in _tensors(list(record.values.values()))
    ):
        return Verdict("invalid", "the training diverges")
    if (difference := _first_difference(program, found, truth)) is not None:
        return Verdict("wrong", difference)
    if found[-1].error is not None:
        return _of_error(program, ours, found[-1])
    return _alike_elsewhere(program, found)


def _ours(program: Program) -> tuple[Ours | None, list[Record]]:
    try:
        side = Ours(program)
    except Exception as error:
        return None, [Record(Op("wrap"), error=error)]
    return side, carry_out(program, side, DTYPES[program.dtype])


def _alike_elsewhere(program: Program, found: list[Record]) -> Verdict:
    """What layers draw does not depend on devices and plans either."""
    if program.family == "draws":
        devices = "cpu:1" if program.devices != "cpu:1" else "cpu:2"
        # How many microbatches there are may depend on the devices.
        count = program.microbatches or int(program.devices.removeprefix("cpu:")) + 1
        elsewhere = replace(program, devices=devices, plan=None, grain=None, microbatches=count)
        _, other = _ours(elsewhere)
        if other[-1].error is not None:
            return Verdict("wrong", f"on {devices}, with the default plan: {_told(other[-1])}")
        if (difference := _first_difference(program, other, found)) is not None:
            return Verdict("wrong", f"on {devices}, with the default plan, numbers are others: {difference}")
    return Verdict("equal")


# Errors


def _of_error(program: Program, ours: Ours | None, record: Record) -> Verdict:
    error = record.error
    assert error is not None
    if not program.refusable():
        return Verdict("wrong", f"nothing in it may be refused, but {_told(record)}")
    if not is_own(error):
        return Verdict("wrong", f"a foreign error: {_told(record)}")
    if ours is not None:
        try:
            ours.recover()
        except Exception as later:
            if not is_own(later):
                return Verdict("wrong", f"after {_told(record)}\nthe model is not usable: {later!r}")
    return Verdict("refused", f"{record.op.what}: {type(error).__name__}: {error}")


def is_own(error: Exception) -> bool:
    """Whether it is one of the library's errors, raised in its own lines, in words."""
    frames = traceback.extract_tb(error.__traceback__)
    raised_by_us = bool(frames) and frames[-1].filename.startswith(OUR_SOURCES)
    kinds = (roundpipe.RoundPipeError, ValueError, TypeError, NotImplementedError)
    return raised_by_us and isinstance(error, kinds) and len(str(error).split()) > 5


def _told(record: Record) -> str:
    assert record.error is not None
    lines = "".join(traceback.format_exception(record.error)[-4:])
    return f"{record.op} raises {type(record.error).__name__}: {record.error}\n{lines}"


# Numbers


def _first_difference(program: Program, found: Sequence[Record], truth: Sequence[Record]) -> str | None:
    noise = _noise(program, truth)
    for number, (one, wanted) in enumerate(zip(found, truth, strict=False)):
        if one.error is not None:
            return None
        if list(one.values) != list(wanted.values):
            return f"operation {number}, {one.op}: {list(one.values)} instead of {list(wanted.values)}"
        beside_others = BESIDE_OTHERS if program.dtype == "fp64" else BESIDE_OTHERS_ROUNDED
        small = max(SMALL, beside_others * _largest_gradient(wanted))
        for name, value in one.values.items():
            allowed = _tolerance(program, noise, number, name)
            if (difference := _difference(value, wanted.values[name], allowed, small)) is not None:
                return f"operation {number}, {one.op}: {name}: {difference}"
    return None


def _tolerance(program: Program, noise: dict[tuple[int, str], float], number: int, name: str) -> float:
    if program.dtype == "fp64" and not _is_mixed(program):
        return EXACT
    least = WITHIN_FP64 if program.dtype == "fp64" else LEAST_16 if program.is_coarse else WITHIN_FP32
    return max(least, NOISES * noise.get((number, name), 0.0))


def _is_mixed(program: Program) -> bool:
    return "mixed dtype" in program.segments


def _noise(program: Program, truth: Sequence[Record]) -> dict[tuple[int, str], float]:
    """How far plain PyTorch itself is from fp64, for each value that a program with fewer bits in it gives."""
    if program.dtype == "fp64" and not _is_mixed(program):
        return {}
    before, Mixed.is_exact = Mixed.is_exact, True
    try:
        exact = carry_out(program, Plain(program, torch.float64), torch.float64, is_exact=True)
    finally:
        Mixed.is_exact = before
    return {
        (number, name): max(map(_distance, _tensors(one.values[name]), _tensors(value)), default=0.0)
        for number, (one, wanted) in enumerate(zip(truth, exact, strict=True))
        for name, value in wanted.values.items()
    }


def _largest_gradient(record: Record) -> float:
    found = [value for name, value in record.values.items() if name.startswith("gradient") and value is not None]
    return max((value.double().norm().item() for value in found), default=0.0)


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for one in value for tensor in _tensors(one)] if isinstance(value, list) else []


def _distance(found: torch.Tensor, wanted: torch.Tensor, small: float = SMALL) -> float:
    found, wanted = found.detach().double(), wanted.detach().double()
    if torch.equal(found, wanted):
        return 0.0
    distance = ((found - wanted).norm() / (wanted.norm() + small)).item()
    return distance if distance == distance else float("inf")


def _difference(found: Any, wanted: Any, tolerance: float, small: float) -> str | None:
    if isinstance(found, list) and isinstance(wanted, list):
        if len(found) != len(wanted):
            return f"{len(found)} tensors instead of {len(wanted)}"
        several = (_difference(*pair, tolerance, small) for pair in zip(found, wanted, strict=True))
        return next((one for one in several if one is not None), None)
    if not isinstance(found, torch.Tensor) or not isinstance(wanted, torch.Tensor):
        return None if found is wanted else f"{found} instead of {wanted}"
    if found.shape != wanted.shape:
        return f"shape {tuple(found.shape)} instead of {tuple(wanted.shape)}"
    distance = _distance(found, wanted, small)
    return None if distance <= tolerance else f"off by {distance:.3g} of its norm:\n{found}\ninstead of\n{wanted}"

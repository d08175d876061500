"""The smallest program that goes wrong in the same way."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from fuzzing.kinds import apart
from fuzzing.program import CALLS, Op, Program
from fuzzing.verdict import Verdict, judge

# What each setting is where it does nothing.
IDLE: dict[str, Any] = {
    "devices": "cpu:1", "plan": None, "grain": None, "double_buffer": None, "pin": "alloc", "clips": False,
    "scales": False, "optimizer": "sgd", "microbatches": 1, "end": "tensor", "label": "tensor", "dtype": "fp64",
    "optim_dtype": None, "autocasts": False,
    "master": "whole",
}  # fmt: skip


def smallest(program: Program, tries: int = 100) -> Program:
    """Leave out what can be left out, one thing after the other, while the program stays wrong in the same way."""
    way = _way(judge(program))
    candidates = _smaller(program)
    for _ in range(tries):
        smaller = next(candidates, None)
        if smaller is None:
            break
        if _way(judge(smaller)) == way:
            program, candidates = smaller, _smaller(smaller)
    return program


def _way(verdict: Verdict) -> str:
    """How a program is wrong, whatever its numbers and names."""
    kind = re.search(r"raises \w+|: (losses|outputs|gradient|weight|buffer)", verdict.words)
    return f"{verdict.outcome} {kind and kind[0]}"


def _smaller(program: Program) -> Iterator[Program]:
    for place in range(len(program.segments)):
        segments = program.segments[:place] + program.segments[place + 1 :]
        if not program.is_apart or apart.is_valid(segments):
            yield replace(program, segments=segments)
    for place in range(len(program.loop) - 1):
        loop = program.loop[:place] + program.loop[place + 1 :]
        if _is_loop(loop):
            yield replace(program, loop=loop)
    idle = {**IDLE, "start": "numbers"} if program.is_apart else {**IDLE, "start": "tensor", "wrap": "row"}
    for name, value in idle.items():
        if getattr(program, name) != value:
            yield replace(program, **{name: value})


def _is_loop(loop: tuple[Op, ...]) -> bool:
    """Whether something is called, and what is loaded was saved."""
    whats = [op.what for op in loop]
    saves = "load" not in whats or "save" in whats[: whats.index("load")]
    return saves and any(what in CALLS for what in whats)

"""What both sides of a comparison share: the batches of a loop, and how operations are recorded."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy
import roundpipe
import torch
from torch import nn

from fuzzing.kinds import apart, ends
from fuzzing.kinds.impure import aux_losses
from fuzzing.kinds.layers import WIDTH
from fuzzing.program import CALLS, DTYPES, Op, Program

SCALE = 1024.0


@dataclass(frozen=True)
class Batch:
    """What one call is given: `x` whose gradient is asked for, or not; `beside` for inputs of two tensors."""

    x: torch.Tensor
    beside: torch.Tensor
    target: torch.Tensor

    def __getitem__(self, rows: slice) -> Batch:
        return Batch(self.x[rows], self.beside[rows], self.target[rows])

    def arguments(self, program: Program) -> ends.Call:
        if program.is_apart:
            return (self.x,), {}
        return ends.STARTS[program.start].pack(self.x, self.beside)

    def label(self, program: Program) -> Any:
        return ends.LABELS[program.label].pack(self.target)


def batch_of(program: Program, call: int, op: Op, dtype: torch.dtype) -> Batch:
    """The numbers of one call, rounded to the program's dtype."""
    generator = torch.Generator().manual_seed(1000 * program.seed + call)

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(DTYPES[program.dtype]).to(dtype)

    if not program.is_apart:
        x, target = numbers(op.rows, WIDTH), numbers(op.rows, ends.OUT)
    elif program.start == "numbers":
        x, target = numbers(op.rows, op.time, WIDTH), numbers(1, 1, apart.VOCABULARY)
    else:
        x = torch.randint(apart.VOCABULARY, (op.rows, op.time), generator=generator)
        target = numbers(1, 1, apart.VOCABULARY)
    asks = op.what.endswith("input") or "grad" in op.what.split() or op.what == "penalty"
    return Batch(
        x.requires_grad_(asks and op.what != "no grad" and x.is_floating_point()), numbers(op.rows, WIDTH), target
    )


def losses(program: Program, layers: nn.Module, outputs: Any, label: Any) -> list[torch.Tensor]:
    """The losses of outputs, which sum to the loss. `layers`: the model, whose layers may have left some, too."""
    if program.is_apart:
        return [(outputs - label).square().sum()]
    if program.family == "draws":
        outputs = outputs[0]
    first, *others = ends.loss_of(outputs, label, program.label)
    return [first + aux_losses([layers]), *others]


@dataclass(frozen=True)
class Record:
    """What an operation has given: values by name, or an error."""

    op: Op
    values: dict[str, Any] = field(default_factory=dict)
    error: Exception | None = None


class Side(Protocol):
    """A model in plain PyTorch, or in RoundPipe."""

    def call(self, op: Op, batch: Batch) -> dict[str, Any]: ...

    def between(self, op: Op) -> dict[str, Any]: ...


def seed_all(number: int) -> None:
    """Seed the generators of the process.

    Not by ``torch.manual_seed``, which takes 3 ms without a GPU: it formats a stack for each kind of device.
    """
    torch.default_generator.manual_seed(number)
    random.seed(number)
    numpy.random.seed(number)


def carry_out(program: Program, side: Side, dtype: torch.dtype, *, is_exact: bool = False) -> list[Record]:
    """Run the loop; the last record is that of the first error, if there is one. `is_exact`: without autocast."""
    records: list[Record] = []
    for number, op in enumerate(program.loop):
        seed_all(number)
        try:
            with torch.autocast("cpu", torch.bfloat16, enabled=program.autocasts and not is_exact):
                values = _carried_out(side, program, number, op, dtype)
        except Exception as error:
            return [*records, Record(op, error=error)]
        records.append(Record(op, values))
    return records


def _carried_out(side: Side, program: Program, number: int, op: Op, dtype: torch.dtype) -> dict[str, Any]:
    if op.what in CALLS:
        return side.call(op, batch_of(program, number, op, dtype))
    return side.between(op)


def state_of(module: nn.Module) -> dict[str, Any]:
    """Gradients, weights and buffers, by name."""
    found: dict[str, Any] = {}
    for name, parameter in module.named_parameters():
        found[f"gradient of {name}"] = None if parameter.grad is None else parameter.grad.detach().clone()
        found[f"weight {name}"] = parameter.detach().clone()
    return {**found, **{f"buffer {name}": buffer.detach().clone() for name, buffer in module.named_buffers()}}


def flattened(tree: Any) -> list[torch.Tensor]:
    """Copies of the floating tensors of outputs."""
    return [tensor.detach().clone() for tensor in ends.tensors_in(tree)]


def some_module(module: nn.Module, number: int) -> nn.Module:
    """A module with parameters of its own, neither the first nor the last."""
    owners = [one for one in module.modules() if next(one.parameters(recurse=False), None) is not None]
    return owners[1:-1][number % (len(owners) - 2)] if len(owners) > 2 else owners[0]


def freeze(module: nn.Module) -> list[nn.Parameter]:
    """Freeze what trains in a module, or, if nothing does, let it train; return what has changed."""
    own = list(module.parameters(recurse=False))
    trains = any(one.requires_grad for one in own)
    changed = [one for one in own if one.requires_grad == trains]
    for parameter in changed:
        parameter.requires_grad_(not trains)
    return changed


_TORCHS = {
    "sgd": lambda some: torch.optim.SGD(some, lr=0.001),
    "momentum": lambda some: torch.optim.SGD(some, lr=0.001, momentum=0.9),
    # A large epsilon: otherwise the sign of rounding errors decides where a gradient is 0.
    "adam": lambda some: torch.optim.Adam(some, lr=0.003, eps=0.01),
    "adamw": lambda some: torch.optim.AdamW(some, lr=0.003, eps=0.01, weight_decay=0.1),
}
_OURS = {
    "our sgd": lambda some: roundpipe.optim.SGD(some, lr=0.001),
    "our adam": lambda some: roundpipe.optim.Adam(some, lr=0.003, eps=0.01),
    "our adamw": lambda some: roundpipe.optim.AdamW(some, lr=0.003, eps=0.01, weight_decay=0.1),
}


def optimizer_of(name: str, parameters: list[nn.Parameter], *, plain: bool) -> torch.optim.Optimizer:
    """The optimizer of a name; in plain PyTorch, torch's with the same arguments."""
    if plain or name not in _OURS:
        return _TORCHS[name.removeprefix("our ")](parameters)
    return _OURS[name](parameters)

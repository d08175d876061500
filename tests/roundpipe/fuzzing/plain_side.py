"""A program in plain PyTorch: microbatch by microbatch where it says how it is split, otherwise whole."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from rp_recompute.randomness import draw_seed, mix
from torch import nn

from fuzzing.kinds.impure import Drawing, aux_losses
from fuzzing.program import CALLS, DTYPES, Op, Program
from fuzzing.sides import (
    SCALE,
    Batch,
    Record,
    flattened,
    freeze,
    losses,
    optimizer_of,
    some_module,
    state_of,
)


class Plain:
    """The slow truth. `dtype`: that of its weights. `told`: records of a run whose draws it takes."""

    def __init__(self, program: Program, dtype: torch.dtype, told: Sequence[Record] = ()) -> None:
        self.program, self.dtype, self.told = program, dtype, [one for one in told if one.op.what in CALLS]
        self.module = program.module().to(dtype)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=SCALE) if program.scales else None
        self.saved: dict[str, torch.Tensor] = {}
        self._make_masters()

    # Calls

    def call(self, op: Op, batch: Batch) -> dict[str, Any]:
        draws = self._draws()
        match op.what:
            case "fb" | "fb input":
                return self._fused(batch, draws)
            case "train" | "train input":
                return self._train(batch, draws)
            case "grad" | "grad graph":
                return self._gradient(op, batch, draws)
            case "penalty":
                return self._penalty(batch)
            case "frozen between":
                return self._frozen_between(batch)
            case _:
                self.module.train(op.what != "eval")
                with torch.no_grad():
                    outputs = self._whole(batch, draws)[0]
                self.module.train()
                return {"outputs": flattened(outputs)}

    def _draws(self) -> list[float]:
        """What the engine's layers drew in this call, microbatch by microbatch, if they tell it."""
        if not self.told:
            return []
        outputs = self.told.pop(0).values.get("outputs", [])
        return [] if self.program.family != "draws" or not outputs else outputs[-1].tolist()

    def _microbatches(self, rows: int) -> Iterator[slice]:
        devices = int(self.program.devices.removeprefix("cpu:"))
        # Only what says how it is split is split unseen: any other model has the numbers of the whole batch.
        count = min(self.program.microbatches or devices + 1, rows) if self.program.says_split else 1
        begin = 0
        for place in range(count):
            end = begin + rows // count + (place < rows % count)
            yield slice(begin, end)
            begin = end

    def _parts(self, batch: Batch, draws: list[list[float]]) -> Iterator[tuple[Any, Batch]]:
        """The outputs of each microbatch, and its batch."""
        seed, callers = draw_seed(), torch.get_rng_state()
        for number, where in enumerate(self._microbatches(len(batch.x))):
            part = batch[where]
            if draws:
                self._tell(draws[where])
            yield self._run(part, seed, number), part
        torch.set_rng_state(callers)

    def _tell(self, draws: list[list[float]]) -> None:
        assert all(row == draws[0] for row in draws), "the rows of a microbatch have the same draws"
        layers = [layer for layer in self.module.modules() if isinstance(layer, Drawing)]
        for layer, draw in zip(layers, draws[0], strict=True):
            layer.told = [draw]

    def _run(self, part: Batch, seed: int, number: int) -> Any:
        args, kwargs = part.arguments(self.program)
        layers = list(self._layers())
        for index, layer in enumerate(layers):
            torch.default_generator.manual_seed(mix(seed, index, number))
            args, kwargs = (layer(*args, **kwargs),), {}
        return args[0]

    def _layers(self) -> Iterator[nn.Module]:
        if self.program.is_apart:
            return iter([self.module])
        return _flat(self.module) if self.program.wrap == "flat" else iter(self.module)

    def _whole(self, batch: Batch, draws: list[list[float]]) -> tuple[Any, torch.Tensor | float]:
        """The outputs of the batch, and what its layers have left for the loss."""
        outputs, sizes, left = [], [], 0.0
        for output, part in self._parts(batch, draws):
            outputs.append(output)
            sizes.append(len(part.x))
            left = left + aux_losses([self.module])
        return _merged(outputs, sizes), left

    def _loss(self, batch: Batch, draws: list[list[float]]) -> tuple[torch.Tensor, Any]:
        outputs, left = self._whole(batch, draws)
        found = losses(self.program, nn.Module(), outputs, self._label(batch))
        return sum(found, start=torch.zeros((), dtype=self.dtype)) + left, outputs

    def _label(self, batch: Batch) -> Any:
        return batch.target if self.program.is_apart else batch.label(self.program)

    def _fused(self, batch: Batch, draws: list[list[float]]) -> dict[str, Any]:
        outputs, sizes, several = [], [], []
        for output, part in self._parts(batch, draws):
            found = [self._scaled(one) for one in losses(self.program, self.module, output, self._label(part))]
            sum(found).backward()
            several.append([one.detach() for one in found])
            outputs.append(output)
            sizes.append(len(part.x))
        sums = [sum(ones) for ones in zip(*several, strict=True)]
        if self.program.steps_inside:
            self._step(keep=False)
            self._publish()
        return {"losses": sums, "outputs": flattened(_merged(outputs, sizes)), "gradient of x": batch.x.grad}

    def _scaled(self, loss: torch.Tensor) -> torch.Tensor:
        return loss if self.scaler is None else self.scaler.scale(loss)

    def _train(self, batch: Batch, draws: list[list[float]]) -> dict[str, Any]:
        loss, outputs = self._loss(batch, draws)
        self._scaled(loss).backward()
        return {"losses": loss.detach(), "outputs": flattened(outputs), "gradient of x": batch.x.grad}

    def _gradient(self, op: Op, batch: Batch, draws: list[list[float]]) -> dict[str, Any]:
        if not batch.x.is_floating_point():
            return self._train(batch, draws)
        loss, outputs = self._loss(batch, draws)
        (gradient,) = torch.autograd.grad(loss, batch.x, create_graph=op.what == "grad graph")
        return {"losses": loss.detach(), "outputs": flattened(outputs), "gradient of x": gradient.detach()}

    def _penalty(self, batch: Batch) -> dict[str, Any]:
        loss, _ = self._loss(batch, [])
        (gradient,) = torch.autograd.grad(loss, batch.x, create_graph=True)
        loss = (gradient.norm(dim=1) - 1).square().sum()
        loss.backward()
        return {"losses": loss.detach()}

    def _frozen_between(self, batch: Batch) -> dict[str, Any]:
        loss, _ = self._loss(batch, [])
        changed = freeze(some_module(self.module, 1))
        with torch.no_grad():
            outputs = self._whole(batch, [])[0]
        for parameter in changed:
            parameter.requires_grad_(not parameter.requires_grad)
        loss.backward()
        return {"losses": loss.detach(), "outputs": flattened(outputs)}

    # Between calls

    def between(self, op: Op) -> dict[str, Any]:
        match op.what:
            case "step" | "step async" | "step keep":
                self._step(keep=op.what == "step keep")
                if op.what != "step async":
                    self._publish()
            case "sync":
                self._publish()
                return state_of(self.module)
            case "zero":
                self.module.zero_grad()
            case "freeze":
                self._publish()
                freeze(some_module(self.module, op.rows))
                self._make_masters()
            case "save":
                self._publish()
                self.saved = {name: value.detach().clone() for name, value in self.module.state_dict().items()}
                return {"state dict": list(self.saved.values())}
            case "load":
                self._publish()
                self.module.load_state_dict(self.saved)
                self._read_masters()
            case _:
                raise AssertionError(op)
        return {}

    def _make_masters(self) -> None:
        self.weights = [one for one in self.module.parameters() if one.requires_grad]
        name = self.program.optim_dtype
        wanted = None if name is None or self.dtype == torch.float64 else DTYPES[name]
        self.masters = [nn.Parameter(one.detach().clone().to(wanted or one.dtype)) for one in self.weights]
        self.optimizer = optimizer_of(self.program.optimizer, self.masters, plain=True)
        self.pending = False

    def _read_masters(self) -> None:
        with torch.no_grad():
            for master, weight in zip(self.masters, self.weights, strict=True):
                master.copy_(weight)

    def _publish(self) -> None:
        """Make the last step's result what calls read."""
        if not self.pending:
            return
        self.pending = False
        with torch.no_grad():
            for master, weight in zip(self.masters, self.weights, strict=True):
                weight.copy_(master)

    def _step(self, *, keep: bool) -> None:
        self._publish()
        for master, weight in zip(self.masters, self.weights, strict=True):
            master.grad = None if weight.grad is None else weight.grad.to(master.dtype, copy=True)
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        if self.program.clips:
            torch.nn.utils.clip_grad_norm_(self.masters, 1.0)
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        self.pending = True
        if not keep:
            self.module.zero_grad()


def _flat(row: nn.Sequential) -> Iterator[nn.Module]:
    for layer in row:
        if type(layer) is nn.Sequential:
            yield from _flat(layer)
        else:
            yield layer


def _merged(outputs: list[Any], sizes: list[int]) -> Any:
    """Outputs of microbatches as one tree: rows one after another, means weighted by rows."""
    first = outputs[0]
    match first:
        case torch.Tensor() if first.dim() == 0:
            return sum(one * size for one, size in zip(outputs, sizes, strict=True)) / sum(sizes)
        case torch.Tensor():
            return torch.cat(outputs)
        case dict():
            return {key: _merged([one[key] for one in outputs], sizes) for key in first}
        case list() | tuple():
            return type(first)(_merged(list(ones), sizes) for ones in zip(*outputs, strict=True))
        case _ if hasattr(first, "more"):
            return type(first)(
                _merged([one.h for one in outputs], sizes), _merged([one.more for one in outputs], sizes)
            )
        case _:
            return first

"""A program in RoundPipe."""

from __future__ import annotations

from typing import Any

import roundpipe
import rp_batch
import torch
from roundpipe import RoundPipe, RoundPipeRunConfig, Runtime, wrap_model_to_roundpipe
from torch import nn

from fuzzing.program import DTYPES, Op, Program
from fuzzing.sides import SCALE, Batch, flattened, freeze, losses, optimizer_of, some_module, state_of

LARGE = 1 << 30


_RUNTIMES: dict[str, Runtime] = {}


def runtime_of(devices: str) -> Runtime:
    """One runtime for all programs on these devices: what a program leaves behind disturbs the next one."""
    if devices not in _RUNTIMES:
        _RUNTIMES[devices] = Runtime(devices)
    return _RUNTIMES[devices]


def close_runtimes() -> None:
    """Close what `runtime_of` has opened, after the last program."""
    while _RUNTIMES:
        _RUNTIMES.popitem()[1].close()


class Ours:
    """The engine."""

    def __init__(self, program: Program) -> None:
        self.program, self.module = program, program.module()
        self.runtime = runtime_of(program.devices)
        self.model: Any = self._wrapped()
        self.scaler = roundpipe.GradScaler(init_scale=SCALE, runtime=self.runtime) if program.scales else None
        self.saved: dict[str, torch.Tensor] = {}
        self._make_optimizer()

    def _wrapped(self) -> Any:
        program = self.program
        options: dict[str, Any] = {
            "runtime": self.runtime,
            "optim_dtype": None if program.optim_dtype is None else DTYPES[program.optim_dtype],
            "double_buffer": program.double_buffer,
            "pin_model": program.pin,
            "master": program.master,
            "step_in_backward": program.steps_inside,
        }
        config = RoundPipeRunConfig(
            num_microbatch=program.microbatches, recompute_grain=program.grain, launch=program.launch
        )
        match program.wrap:
            case "row":
                return RoundPipe(self.module, model_run_config=self._planned(config, len(self.module)), **options)
            case "nested" | "flat":
                upper = LARGE if program.wrap == "nested" else 0
                layers = len(self.module) if program.wrap == "nested" else _count(self.module)
                planned = self._planned(config, layers)
                return wrap_model_to_roundpipe(
                    self.module, upper_threshold=upper, model_run_config=planned, **options
                )
            case "parts":
                return wrap_model_to_roundpipe(self.module, lower_threshold=1, model_run_config=config, **options)
            case "whole":
                return wrap_model_to_roundpipe(self.module, model_run_config=config, **options)

    def _planned(self, config: RoundPipeRunConfig, layers: int) -> RoundPipeRunConfig:
        split = _samples_first if self.program.says_split else None
        return RoundPipeRunConfig(execute_plan=self.program.execute_plan(layers), split_input=split).over(config)

    def _make_optimizer(self) -> None:
        self.optimizer = optimizer_of(self.program.optimizer, list(self.model.optim_parameters()), plain=False)

    # Calls

    def call(self, op: Op, batch: Batch) -> dict[str, Any]:
        match op.what:
            case "fb" | "fb input":
                return self._fused(batch)
            case "train" | "train input":
                return self._train(batch)
            case "grad" | "grad graph":
                return self._gradient(op, batch)
            case "penalty":
                return self._penalty(batch)
            case "frozen between":
                return self._frozen_between(batch)
            case _:
                self.model.train(op.what != "eval")
                with torch.no_grad():
                    outputs = self._outputs(batch)
                self.model.train()
                return {"outputs": flattened(outputs)}

    def _outputs(self, batch: Batch) -> Any:
        args, kwargs = batch.arguments(self.program)
        return self.model(*args, **kwargs)

    def _label(self, batch: Batch) -> Any:
        return batch.target if self.program.is_apart else batch.label(self.program)

    def _scaled(self, loss: Any) -> Any:
        return loss if self.scaler is None else self.scaler.scale(loss)

    def _fused(self, batch: Batch) -> dict[str, Any]:
        args, kwargs = batch.arguments(self.program)
        sums, outputs = self.model.forward_backward(
            args,
            kwargs,
            self._label(batch),
            lambda out, label: [self._scaled(one) for one in losses(self.program, self.module, out, label)],
            return_outputs=True,
            optimizer=self.optimizer if self.program.steps_inside else None,
        )
        return {"losses": sums, "outputs": flattened(outputs), "gradient of x": batch.x.grad}

    def _loss(self, batch: Batch) -> tuple[torch.Tensor, Any]:
        outputs = self._outputs(batch)
        found = losses(self.program, self.module, outputs, self._label(batch))
        return sum(found, start=torch.zeros((), dtype=found[0].dtype)), outputs

    def _train(self, batch: Batch) -> dict[str, Any]:
        loss, outputs = self._loss(batch)
        self._scaled(loss).backward()
        return {"losses": loss.detach(), "outputs": flattened(outputs), "gradient of x": batch.x.grad}

    def _gradient(self, op: Op, batch: Batch) -> dict[str, Any]:
        if not batch.x.is_floating_point():
            return self._train(batch)
        loss, outputs = self._loss(batch)
        (gradient,) = torch.autograd.grad(loss, batch.x, create_graph=op.what == "grad graph")
        return {"losses": loss.detach(), "outputs": flattened(outputs), "gradient of x": gradient.detach()}

    def _penalty(self, batch: Batch) -> dict[str, Any]:
        loss, _ = self._loss(batch)
        (gradient,) = torch.autograd.grad(loss, batch.x, create_graph=True)
        loss = (gradient.norm(dim=1) - 1).square().sum()
        loss.backward()
        return {"losses": loss.detach()}

    def _frozen_between(self, batch: Batch) -> dict[str, Any]:
        loss, _ = self._loss(batch)
        changed = freeze(some_module(self.module, 1))
        with torch.no_grad():
            outputs = self._outputs(batch)
        for parameter in changed:
            parameter.requires_grad_(not parameter.requires_grad)
        loss.backward()
        return {"losses": loss.detach(), "outputs": flattened(outputs)}

    # Between calls

    def between(self, op: Op) -> dict[str, Any]:
        match op.what:
            case "step" | "step async" | "step keep":
                self.model.step(lambda: self._step(keep=op.what == "step keep"), is_async=op.what == "step async")
                if self.scaler is not None:
                    self.scaler.update()
            case "sync":
                self.model.synchronize()
                return state_of(self.module)
            case "zero":
                self.model.zero_grad()
            case "freeze":
                self.model.synchronize()
                freeze(some_module(self.module, op.rows))
                self._make_optimizer()
            case "save":
                state = self.model.state_dict()
                self.saved = {name: value.detach().clone() for name, value in state.items()}
                return {"state dict": list(self.saved.values())}
            case "load":
                self.model.load_state_dict(self.saved)
            case _:
                raise AssertionError(op)
        return {}

    def _step(self, *, keep: bool) -> None:
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        if self.program.clips:
            ours = self.program.optimizer.startswith("our")
            clip = roundpipe.optim.clip_grad_norm_ if ours else torch.nn.utils.clip_grad_norm_
            clip(self.model.optim_parameters(), 1.0)
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
        if not keep:
            self.optimizer.zero_grad()

    # After a refusal

    def recover(self) -> None:
        """Whatever was refused, gradients can be dropped and the weights read."""
        self.model.zero_grad()
        self.model.synchronize()
        self.model.state_dict()


def _count(row: nn.Sequential) -> int:
    return sum(_count(layer) if type(layer) is nn.Sequential else 1 for layer in row)


def _samples_first(args: tuple[Any, ...], kwargs: dict[str, Any], count: int) -> rp_batch.Parts[Any]:
    return rp_batch.split((args, kwargs), count)

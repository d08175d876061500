"""Small trainings that tests of checkpoints share; as a program, it runs ones that save all along."""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import roundpipe
import torch
from plain import batch, mlp, square_error
from roundpipe import CheckpointManager, GradScaler, RoundPipe, RoundPipeRunConfig, Runtime
from rp_sched import Plan
from torch import nn

PLAN = Plan([range(0, 2)], range(2, 5), [range(0, 2)])


@dataclass
class Job:
    """A training whose every step is given by its number."""

    model: Any
    optimizer: torch.optim.Optimizer
    is_async: bool = True
    scheduler: Any = None
    scaler: GradScaler | None = None
    dtype: torch.dtype = torch.float32
    losses: list[float] = field(default_factory=list[float])

    def train(self, first: int, last: int) -> list[float]:
        """Take the steps from `first` up to `last`; return their losses."""
        found = [self.step(step) for step in range(first, last)]
        self.losses += found
        return found

    def step(self, step: int) -> float:
        """One call and one step."""
        inputs, labels = batch(8, step)
        loss = self.model.forward_backward(
            input_args=(inputs.to(self.dtype),), label=labels.to(self.dtype), loss_fn=self.loss
        )
        self.model.step(self.update, is_async=self.is_async)
        if self.scaler is not None:
            self.scaler.update(is_async=self.is_async)
        return loss.item()

    def loss(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The loss of a microbatch, scaled."""
        loss = square_error(outputs.float(), labels.float())
        return loss if self.scaler is None else self.scaler.scale(loss)

    def update(self) -> None:
        """The step function."""
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
        self.optimizer.zero_grad()
        if self.scheduler is not None:
            self.scheduler.step()

    def weights(self) -> dict[str, torch.Tensor]:
        """A copy of all weights and masters, with the last step's result."""
        self.model.synchronize()
        found = {name: value.clone() for name, value in self.model.state_dict().items()}
        masters = self.model.optim_named_parameters()
        return found | {f"master of {name}": master.detach().clone() for name, master in masters}

    @property
    def parts(self) -> dict[str, Any]:
        """What is saved and loaded beside the model and the optimizer."""
        return {"scaler": self.scaler, "schedulers": () if self.scheduler is None else self.scheduler}


def job(
    runtime: Runtime,
    *,
    layers: nn.Module | None = None,
    dtype: torch.dtype = torch.float32,
    optim_dtype: torch.dtype | None = torch.float32,
    optimizer: Callable[..., torch.optim.Optimizer] = roundpipe.optim.AdamW,
    is_async: bool = True,
    scaler: bool = False,
    num_microbatch: int = 2,
    plan: Plan | None = PLAN,
    **kwargs: Any,
) -> Job:
    """A training on `layers`, of which the default draws random numbers."""
    row = with_dropout() if layers is None else layers
    config = RoundPipeRunConfig(num_microbatch=num_microbatch, execute_plan=plan)
    model = RoundPipe(row.to(dtype), optim_dtype=optim_dtype, runtime=runtime, model_run_config=config, **kwargs)
    made = optimizer(model.optim_parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(made, T_max=20)
    scaled = GradScaler(init_scale=8.0, growth_interval=2, runtime=runtime) if scaler else None
    return Job(model, made, is_async, scheduler, scaled, dtype)


def with_dropout(seed: int = 0) -> nn.Sequential:
    """Five layers, (batch, 4) to (batch, 3)."""
    row = mlp(seed=seed)
    row[1] = nn.Dropout(0.5)
    return row


def equal(found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> bool:
    """Whether these are the same to the last bit."""
    return found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)


# As a program: trains and saves after every step, in the folder that is its argument, from where that ends

LAST = 12


def run(folder: Path) -> None:
    """Train to the end; losses are appended to a file as they come, and the last weights' sums written last."""
    torch.manual_seed(7)
    with Runtime("cpu:1") as runtime:
        own = job(runtime, dtype=torch.bfloat16, scaler=True, double_buffer=True)
        manager = CheckpointManager(folder / "checkpoints", keep_last=2)
        loaded = manager.load_latest(own.model, own.optimizer, **own.parts)
        first = 0 if loaded is None else loaded.step
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        with (folder / "losses").open("a") as told:
            for step in range(first, LAST):
                own.train(step, step + 1)
                manager.save(own.model, own.optimizer, step=step + 1, data={"next": step + 1}, **own.parts)
                told.write(json.dumps([step, own.losses[-1]]) + "\n")
                told.flush()
                sys.stdout.write("step\n")
                sys.stdout.flush()
        manager.wait()
        sums = {name: value.double().sum().item().hex() for name, value in own.weights().items()}
        (folder / "weights").write_text(json.dumps(sums))


def serve() -> None:
    """Run in each folder that a line of the input names, in a process of its own; tell when it begins and ends."""
    # Torch imports much when the first state dict is made; here, since no process that is forked keeps it.
    torch.optim.SGD([torch.zeros(1, requires_grad=True)]).state_dict()
    for line in sys.stdin:
        if (child := os.fork()) == 0:
            try:
                run(Path(line.strip()))
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        sys.stdout.write(f"started {child}\n")
        sys.stdout.flush()
        _, status = os.waitpid(child, 0)
        sys.stdout.write(f"ended {status}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    serve()

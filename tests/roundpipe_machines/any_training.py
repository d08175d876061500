"""Trainings told as plain values, so that processes that wait for some can run them: one machine, or several."""

from __future__ import annotations

import ast
from itertools import pairwise
from typing import TypedDict

import rp_batch
import torch
from machine_trainings import Found, square_error, weights
from roundpipe import GradScaler, RoundPipe, RoundPipeRunConfig, Runtime
from roundpipe.optim import SGD, AdamW, clip_grad_norm_
from rp_dist import Machines
from rp_sched import Plan
from torch import nn

STEPS = 2


class Tied(nn.Module):
    """Multiplies by another layer's weight."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The product."""
        return x @ self.weight.T


class Unused(nn.Module):
    """Has a parameter that no loss depends on, and one that only some microbatches use."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.rarely, self.unused = nn.Linear(4, 4), nn.Linear(4, 4), nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The layer's output, and the other's for some."""
        out = self.linear(x)
        return out + self.rarely(x) if float(x.detach()[0, 0]) > 0 else out


class Adapted(nn.Module):
    """A frozen layer with a low-rank adapter."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(4, 4).requires_grad_(False)
        self.down, self.up = nn.Linear(4, 1, bias=False), nn.Linear(1, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of both."""
        return self.base(x) + self.up(self.down(x))


MAKE = {
    "linear": lambda: nn.Linear(4, 4),
    "wide": lambda: nn.Sequential(nn.Linear(4, 40), nn.Tanh(), nn.Linear(40, 4)),
    "tanh": nn.Tanh,
    "norm": lambda: nn.LayerNorm(4),
    "frozen": lambda: nn.Linear(4, 4).requires_grad_(False),
    "dropout": lambda: nn.Dropout(0.5),
    "unused": Unused,
    "adapted": Adapted,
}


class Recipe(TypedDict):
    """A training.

    `separate`: by forward and backward. `cuts`: of forward, backward and the microbatches, in parts of the whole.
    """

    seed: int
    layers: list[str]
    dtype: str
    devices: int
    size: int
    microbatches: int
    separate: bool
    top: float | None
    cuts: list[list[float]]
    in_turn: bool
    grain: str
    is_async: bool
    double_buffer: bool | None
    master: str
    pin: str
    optimizer: str
    calls: int
    drops: bool
    clip: float | None
    scale: float | None


def layers_of(recipe: Recipe) -> nn.Sequential:
    """(batch, 4) to (batch, 3)."""
    torch.manual_seed(recipe["seed"])
    layers: list[nn.Module] = [nn.Linear(4, 4)]
    for kind in recipe["layers"]:
        match kind:
            case "tied":
                layers.append(Tied(layers[0].weight))
            case "same":
                layers.append(layers[-1])
            case _:
                layers.append(MAKE[kind]())
    return nn.Sequential(*layers, nn.Linear(4, 3)).to(getattr(torch, recipe["dtype"]))


def _cut(stop: int, places: list[float]) -> tuple[range, ...]:
    """The range cut at these places."""
    edges = sorted({0, stop, *(int(place * stop) for place in places)})
    return tuple(range(begin, end) for begin, end in pairwise(edges))


def plan_of(recipe: Recipe, layers: int, microbatches: int) -> Plan | None:
    """The plan of a machine that has so many microbatches."""
    if recipe["top"] is None:
        return None
    top = int(recipe["top"] * layers)
    forward, backward, *places = recipe["cuts"]
    groups = [_cut(microbatches, each) if each else () for each in places]
    passes = _cut(top, forward), range(top, layers), _cut(top, backward)[::-1]
    if not recipe["separate"]:
        return Plan(*passes, *groups, in_turn=recipe["in_turn"])
    return Plan(
        (*passes[0], passes[1]),
        None,
        (passes[1], *passes[2]),
        forward_groups=groups[0],
        backward_groups=groups[1],
        in_turn=recipe["in_turn"],
    )


def trained(recipe: Recipe, machines: Machines | bool = False) -> Found:
    """Losses and weights."""
    layers = layers_of(recipe)
    with Runtime(f"cpu:{recipe['devices']}", machines=machines) as runtime:
        count = recipe["microbatches"]
        rank, size = runtime.peers.rank, runtime.peers.size
        own = (rank + 1) * count // size - rank * count // size
        config = RoundPipeRunConfig(
            num_microbatch=count,
            execute_plan=plan_of(recipe, len(layers), own),
            recompute_grain=recipe["grain"],
            # A trial shows no split of layers that write buffers which the next microbatch reads.
            split_input=((rp_batch.Split(),), None),
        )
        model = RoundPipe(
            layers,
            runtime=runtime,
            name="m",
            model_run_config=config,
            double_buffer=recipe["double_buffer"],
            pin_model=recipe["pin"],
            optim_dtype=torch.float32 if recipe["dtype"] == "bfloat16" else None,
            master=recipe["master"] if recipe["dtype"] == "bfloat16" else "whole",
        )
        return _run(recipe, model, layers, runtime)


def _may_be_async(recipe: Recipe) -> bool:
    """Masters in halves need second blocks for that."""
    is_split = recipe["master"] == "split" and recipe["dtype"] == "bfloat16"
    return not is_split or (recipe["double_buffer"] is not False and recipe["pin"] == "alloc")


def _run(recipe: Recipe, model: RoundPipe, layers: nn.Sequential, runtime: Runtime) -> Found:
    if recipe["optimizer"] == "adamw":
        # Large enough that the last bits of small gradients stay last bits.
        optimizer: torch.optim.Optimizer = AdamW(model.optim_parameters(), lr=1e-2, eps=1e-1)
    else:
        optimizer = SGD(model.optim_parameters(), lr=1e-3, momentum=0.9)
    scale = recipe["scale"]
    scaler = GradScaler(init_scale=scale or 1.0, growth_interval=1, enabled=scale is not None, runtime=runtime)
    losses: list[torch.Tensor] = []
    norms: list[torch.Tensor] = []

    def step() -> None:
        if recipe["clip"] is not None:
            scaler.unscale_(optimizer)
            norms.append(clip_grad_norm_(model.optim_parameters(), recipe["clip"]))
        scaler.step(optimizer)
        if recipe["drops"]:
            optimizer.zero_grad()

    def loss_fn(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return scaler.scale(square_error(outputs, labels))

    for number in range(STEPS * recipe["calls"]):
        generator = torch.Generator().manual_seed(number)
        x, y = (torch.randn(recipe["size"], n, generator=generator).to(layers[0].weight.dtype) for n in (4, 3))
        if recipe["separate"]:
            loss = loss_fn(model(x), y)
            loss.backward()
        else:
            loss = model.forward_backward((x,), label=y, loss_fn=loss_fn)
        losses.append(loss.detach().float())
        if number % recipe["calls"] == recipe["calls"] - 1:
            model.step(step, is_async=recipe["is_async"] and _may_be_async(recipe))
            scaler.update()
    model.synchronize()
    return {"losses": losses, "norms": norms, "weights": weights(layers)}


def serve(requests: str, answers: str) -> None:
    """Run each training whose recipe comes on a line, and answer with a file, or with the words of an error."""
    with (
        Machines.open(connections=1, timeout_s=30) as machines,
        open(requests) as lines,
        open(answers, "w") as out,
    ):
        for number, line in enumerate(lines):
            path = f"{answers}-{number}"
            try:
                torch.save(trained(ast.literal_eval(line), machines), path)
                words = path
            except Exception as error:
                words = f"failed: {type(error).__name__}: {error}".replace("\n", " ")
            out.write(f"{words}\n")
            out.flush()

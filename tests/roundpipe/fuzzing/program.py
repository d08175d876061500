"""A program: a model, the loop that trains it, and how it is planned. It is drawn from a seed, and prints."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import torch
from roundpipe import ModelExecutePlan
from torch import nn

from fuzzing.kinds import apart, ends, handed_on, impure, layers

SEGMENTS = {**layers.ORDINARY, **layers.UNUSUAL, **handed_on.HANDED, **impure.DRAWS, **impure.KEEPS}
DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16}
OPTIMIZERS = ("sgd", "momentum", "adam", "our sgd", "our adam", "our adamw")
# Operations that call the model on a batch.
CALLS = frozenset(
    {
        "fb",
        "fb input",
        "train",
        "train input",
        "grad",
        "grad graph",
        "penalty",
        "eval",
        "no grad",
        "frozen between",
    }
)
REFUSABLE_OPERATIONS = frozenset({"penalty"})
Family = Literal["plain", "alias", "box", "draws", "keeps", "labels", "apart", "penalty"]
# Of a hundred programs.
SHARES: dict[Family, int] = {
    "plain": 29, "alias": 12, "box": 10, "draws": 9, "keeps": 6, "labels": 2, "apart": 28, "penalty": 4
}  # fmt: skip


class Op(NamedTuple):
    """One operation of a loop; `rows` and `time` are the sizes of a call's batch."""

    what: str
    rows: int = 0
    time: int = 0


@dataclass(frozen=True, kw_only=True)
class Program:
    """What is run. `segments`: of a row, or the steps of a model that is taken apart.

    `plan`: None, ``"layers"`` for one stage a layer, or the seed of a random plan. `wrap`: how it is wrapped;
    "flat" takes nested rows apart, "parts" a module, "whole" makes a module one layer. `steps_inside`: the
    optimizer steps in each training call. `launch`: of its calls; with graphs a loop is made often enough for
    replays.
    """

    seed: int
    family: Family
    segments: tuple[str, ...]
    loop: tuple[Op, ...]
    start: str = "tensor"
    end: str = "tensor"
    label: str = "tensor"
    dtype: str = "fp64"
    optim_dtype: str | None = None
    optimizer: str = "sgd"
    clips: bool = False
    scales: bool = False
    autocasts: bool = False
    steps_inside: bool = False
    master: str = "whole"
    microbatches: int | None = 1
    devices: str = "cpu:1"
    plan: int | Literal["layers"] | None = None
    grain: str | None = None
    double_buffer: bool | None = None
    pin: str = "alloc"
    wrap: Literal["row", "nested", "flat", "parts", "whole"] = "row"
    launch: Literal["eager", "graphs"] = "eager"

    @property
    def is_coarse(self) -> bool:
        """Whether it computes in 16 bits."""
        return self.dtype == "bf16" or self.autocasts

    # The model

    @property
    def is_apart(self) -> bool:
        return self.family == "apart"

    @property
    def says_split(self) -> bool:
        """Whether it says that samples are first, as where microbatches give something else than the batch."""
        differs = layers.BY_MICROBATCH | layers.WRITES_BUFFERS | impure.DRAWS.keys()
        return self.wrap == "row" and not differs.isdisjoint(self.segments)

    def module(self) -> nn.Module:
        """The user's model, always the same numbers."""
        torch.default_generator.manual_seed(self.seed)
        model = apart.Apart(self.segments, self.start) if self.is_apart else nn.Sequential(*self._layers())
        return model.to(DTYPES[self.dtype])

    def _layers(self) -> Iterator[nn.Module]:
        building = layers.Building()
        building.layers.append(ends.Starting(self.start))
        for segment in self.segments:
            building.layers += SEGMENTS[segment](building)
        building.layers.append(ends.Ending(self.end))
        if self.family != "draws":
            return iter(building.layers)
        return iter([impure.WithDraws(building.layers[0]), *map(impure.beside_draws, building.layers[1:])])

    def execute_plan(self, num_layers: int) -> ModelExecutePlan | None:
        """The plan for a row of so many layers."""
        if self.plan is None:
            return None
        chance = random.Random(self.plan)
        if self.plan == "layers":
            top = num_layers - 1
            return ModelExecutePlan(
                [range(layer, layer + 1) for layer in range(top)],
                [range(layer, layer + 1) for layer in reversed(range(num_layers))],
            )
        top = chance.randint(0, num_layers - 1)
        forward, backward = (_cut(top, chance) for _ in range(2))
        return ModelExecutePlan(forward, [range(top, num_layers), *backward[::-1]])

    # What is in it

    def kinds(self) -> frozenset[str]:
        """The names of all that is in it, to be counted by."""
        named = {
            f"family {self.family}",
            f"{self.devices}",
            f"{self.dtype}",
            f"wrap {self.wrap}",
            f"pin {self.pin}",
            f"launch {self.launch}",
        }
        named |= {f"segment {segment}" if not self.is_apart else f"step {segment}" for segment in self.segments}
        named |= {f"op {op.what}" for op in self.loop}
        named |= {name for name in ("autocasts", "steps_inside", "clips", "scales") if getattr(self, name)}
        named |= {f"master {self.master}"}
        named |= {f"start {self.start}", f"end {self.end}", f"label {self.label}", f"M {self.microbatches}"}
        named |= {f"optimizer {self.optimizer}", f"grain {self.grain}", f"optim dtype {self.optim_dtype}"}
        named |= {f"plan {'random' if isinstance(self.plan, int) else self.plan}"}
        return frozenset(named)

    def refusable(self) -> frozenset[str]:
        """What in it the library may refuse, by the names of `kinds`."""
        may = {f"segment {name}" for name in handed_on.REFUSABLE_HANDED | impure.REFUSABLE_IMPURE}
        may |= {f"label {name}" for name in ends.REFUSABLE_LABELS} | {
            f"op {name}" for name in REFUSABLE_OPERATIONS
        }
        return self.kinds() & may

    def __str__(self) -> str:
        """All that is not as it is by default, one thing a line."""
        shown = []
        for field in fields(self):
            value = getattr(self, field.name)
            if value != field.default:
                shown.append(f"    {field.name}={_shown(value)},")
        return "\n".join(["Program(", *shown, ")"])


def _shown(value: Any) -> str:
    if isinstance(value, tuple) and value and isinstance(value[0], Op):
        return "(" + ", ".join(f"Op{tuple(op)!r}" for op in value) + ",)"
    return repr(value)


def _cut(stop: int, chance: random.Random) -> list[range]:
    """range(stop), cut anywhere."""
    inner = sorted(chance.sample(range(1, stop), chance.randint(0, stop - 1))) if stop > 1 else []
    return [range(a, b) for a, b in pairwise([0, *inner, stop]) if b > a]


def read(listing: str) -> Program:
    """The program that was printed."""
    return eval(listing, {"Program": Program, "Op": Op})


# Drawing


def draw(seed: int) -> Program:
    """The program of a seed."""
    chance = random.Random(seed)
    family = chance.choices(list(SHARES), list(SHARES.values()))[0]
    drawn = _draw_apart(chance, seed) if family == "apart" else _draw_row(chance, seed, family)
    if family in ("plain", "alias", "box") and drawn.wrap == "row" and chance.random() < 0.15:
        drawn = replace(drawn, steps_inside=True, optimizer=f"our {chance.choice(['sgd', 'adam', 'adamw'])}")
        drawn = replace(drawn, clips=False, scales=False)
    if drawn.optim_dtype == "fp32" and chance.random() < 0.5:
        # Asynchronous steps of halves need second blocks.
        drawn = replace(drawn, master="split", pin="alloc", double_buffer=chance.choice([None, True]))
    drawn = replace(drawn, loop=_draw_loop(chance, drawn))
    if (drawn.microbatches or 1) > 2 and chance.random() < 0.4:
        # Seen, captured and tried before they are replayed.
        return replace(drawn, launch="graphs", loop=(*drawn.loop[:-1] * 4, drawn.loop[-1]))
    return drawn


def _draw_apart(chance: random.Random, seed: int) -> Program:
    steps = apart.draw_steps(chance, 6)
    microbatches = chance.choice([None, 1, 2, 3, 5])
    return Program(
        seed=seed,
        family="apart",
        segments=steps,
        loop=(),
        start=chance.choice(["numbers", "ids", "tied ids"]),
        dtype=chance.choice(["fp64", "fp64", "fp32"]),
        # Statistics of microbatches are documented to be those of microbatches.
        microbatches=1 if "batch norm" in steps else microbatches,
        wrap=chance.choice(["parts", "parts", "whole"]),
        **_draw_settings(chance),
    )


def _draw_row(chance: random.Random, seed: int, family: Family) -> Program:
    ordinary, unusual = list(layers.ORDINARY), list(layers.UNUSUAL)
    segments = chance.choices(ordinary, k=chance.randint(1, 3)) + chance.choices(unusual, k=chance.randint(0, 2))
    if family == "penalty":
        segments = [name for name in segments if name not in layers.ONCE_DIFFERENTIABLE]
    chance.shuffle(segments)
    start, end = chance.choice(list(ends.STARTS)), chance.choice(list(ends.ENDS))
    label = chance.choice(sorted(set(ends.LABELS) - ends.REFUSABLE_LABELS))
    match family:
        case "alias" | "box":
            names = [name for name in handed_on.HANDED if name.startswith(family)]
            segments.insert(chance.randint(0, len(segments)), chance.choice(names))
        case "draws":
            segments += chance.choices(list(impure.DRAWS), k=chance.choice([1, 1, 2]))
            chance.shuffle(segments)
        case "keeps":
            segments.insert(chance.randint(0, len(segments)), chance.choice(list(impure.KEEPS)))
        case "labels":
            label = chance.choice(sorted(ends.REFUSABLE_LABELS))
        case _:
            pass
    dtype = chance.choice(["fp64", "fp64", "fp64", "fp32", "bf16"]) if family == "plain" else "fp64"
    # What draws differently in each microbatch has no other truth than a row's.
    wrap = chance.choice(["row", "row", "nested", "flat"]) if family != "draws" else "row"
    microbatches = chance.choice([None, 1, 2, 3, 5])
    # Microbatches have no gaps in their memory; whole batches come as they are.
    autocasts = dtype == "fp32" and chance.random() < 0.4
    # Each microbatch writes buffers, which later layers may hide from the outputs.
    differs = layers.BY_MICROBATCH | layers.WRITES_BUFFERS
    is_whole = start == "strides" or (wrap != "row" and bool(differs & set(segments)))
    if dtype == "bf16" or autocasts:
        segments = [name for name in segments if name not in layers.STEEP]
    return Program(
        seed=seed,
        family=family,
        segments=tuple(segments),
        loop=(),
        start=start,
        end=end,
        label=label,
        dtype=dtype,
        optim_dtype=chance.choice([None, "fp32"]) if dtype == "bf16" else None,
        autocasts=autocasts,
        microbatches=1 if is_whole else microbatches,
        plan=chance.choice([None, "layers", chance.randint(1, 999), chance.randint(1, 999)]),
        wrap=wrap,
        **_draw_settings(chance),
    )


def _draw_settings(chance: random.Random) -> dict[str, Any]:
    return {
        "devices": chance.choice(["cpu:1", "cpu:2", "cpu:4"]),
        "grain": chance.choice([None, "layer"]),
        "double_buffer": chance.choice([None, False, True]),
        "pin": chance.choice(["alloc", "alloc", "register", "off"]),
        "optimizer": chance.choice(OPTIMIZERS),
        "clips": chance.random() < 0.25,
        "scales": chance.random() < 0.15,
    }


def _draw_loop(chance: random.Random, program: Program) -> tuple[Op, ...]:
    """One to three rounds of calls, each perhaps with a step at its end."""
    trains = [] if program.steps_inside else ["train", "train input"]
    trains += [] if program.is_apart else ["fb"] * 4 + ["fb input"] * 2
    # Torch's reentrant checkpoint refuses `autograd.grad`, and a scaler a step without gradients.
    plainly = not program.scales and not program.steps_inside and "checkpoint, reentrant" not in program.segments
    trains += ["grad", "grad graph"] if plainly else []
    loop: list[Op] = []
    rows, time = chance.randint(2, 7), chance.randint(2, 5)
    time = rows if chance.random() < 0.3 else time
    for _ in range(chance.randint(1, 3)):
        if chance.random() < 0.3:
            rows, time = chance.randint(1, 7), chance.randint(2, 5)
        loop += [Op(chance.choice(trains), rows, time) for _ in range(chance.choice([1, 1, 2]))]
        if program.family == "penalty":
            loop.append(Op(chance.choice(["penalty", "frozen between"]), rows, time))
        loop += [Op(chance.choice(["eval", "no grad"]), rows, time)] * (chance.random() < 0.25)
        loop += _draw_between(chance, program, saved=Op("save") in loop)
    return (*loop, Op("sync"))


def _draw_between(chance: random.Random, program: Program, *, saved: bool) -> list[Op]:
    """What happens between rounds."""
    steps = ["step", "step async"] if program.clips or program.scales else ["step", "step async", "step keep"]
    found = chance.random()
    if program.steps_inside:
        return [Op(chance.choice(["sync", "load" if saved else "save"]))] if found < 0.7 else []
    if found < 0.6:
        return [Op(chance.choice(steps))]
    if found < 0.7:
        return [Op("sync"), Op("step"), Op("zero"), Op("freeze", chance.randint(1, 9))]
    if found < 0.8:
        return [Op("step"), Op("load" if saved else "save")]
    return [Op(chance.choice(["sync", "zero"]))]

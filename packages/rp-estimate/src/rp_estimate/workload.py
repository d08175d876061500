"""A model to train: the costs of its layers for a plan, and its host memory by the engine's forecast."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, cast

import torch
from rp_engine import HostOptions
from rp_engine.estimates import (
    FORWARD_PART,
    LAUNCH_MS,
    REPLAY_LAUNCH_MS,
    SECOND_BLOCKS_SHARE,
    HostBytes,
    MemoryForecast,
    Owners,
    Shards,
    Undivided,
    coded_indices,
    device_nbytes,
    gradient_itemsize,
    held_at_once,
    needed_by,
)
from rp_engine.wrapping import FrozenDisk, MasterKind
from rp_optim import Disk, Muon, muon_groups
from rp_optim.optimizers.muon import iteration_of
from rp_optim.places.on_disk import memory_for
from rp_packing import expansion_bytes, packed_weights
from rp_sched import LayerCost, Task
from rp_transfer import BlockGroup, HostLimit, group
from torch import nn

from rp_estimate.machine.cards import Card
from rp_estimate.machine.drive import NO_DISK, Drive
from rp_estimate.machine.hardware import Machine
from rp_estimate.meta.facts import Observed
from rp_estimate.meta.fp8_share import Fp8Share
from rp_estimate.meta.meta_model import FrozenPacking
from rp_estimate.meta.observe import observe
from rp_estimate.meta.towers import Shown, tower_layers, with_towers
from rp_estimate.optimizers import muon_state_of, state_of

# The part of a card's dense bf16 rate that compiled layers reach as model operations, recomputation not counted:
# full fine-tuning, and adapters, whose thin products take time and are few operations (docs/planning.md).
UTILISATION, ADAPTERS_UTILISATION = 0.5, 0.38
# Compiled layers keep this part of the bytes that autograd keeps in layers that are not compiled.
COMPILED_SHARE = 0.85
# Rows of logits that the loss computes at once, and bytes of each logit, which the kernel overwrites.
LOSS_ROWS, LOGIT_BYTES = 2048, 2
OPTIM_DTYPE = torch.float32
# Gradient, master and moments are read; master, moments and weight are written. The upper half of a split master
# is the weight.
_STEP_BYTES, _SPLIT_STEP_BYTES, _STEP_STATE_TIMES = 12, 10, 2
# Codes are made of the weights, and written.
_CODE_STEP_BYTES = 3
# State on disk also comes to memory and leaves it.
_DISK_STATE_TIMES = 4
_WEIGHT_BYTES = 2
# The lower half of a master.
_REMAINDER_BYTES = 2
# Where it is does not change what it takes.
_SOME_DISK = Disk("planned")
_SOME_FROZEN_DISK = FrozenDisk(("planned",))
# Pinned memory of each device for frozen weights on their way from a disk.
_RING_BYTES = 128 << 20
# Operations of Muon's matrix products in the time of a byte of host memory: 5e12 a second, for some 16 cores with
# AMX (two reach 0.5e12 to 0.8e12, benchmarks/results/performance.md), beside 165 GB/s.
_MUON_FLOPS_PER_BYTE = 30


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSetup:
    """How a model is trained. `sequence`: tokens of each sequence. `optim_dtype`: of masters and moments.

    `is_sync`: whether steps are synchronous; masters in halves have second blocks of weights only if they are not.
    `master`: "whole", "split", or "disk": in halves, of which `drive` has the lower one. `utilisation`: the part
    of the card's dense rate; None for the usual one. `drive`: where the state is; `frozen`: frozen weights.
    `compute`: how layers multiply; `chooses_compute`: as is faster by a card's rates, see `Workload.on`.
    `launch`: "eager" or "graphs"; `chooses_launch`: as is faster, see `foretell`.
    """

    sequence: int
    optimizer: str = "adamw"
    optimizer_state: str = "fp32"
    master: str = "whole"
    step_in_backward: bool = False
    compute: str = "bf16"
    chooses_compute: bool = False
    launch: str = "eager"
    chooses_launch: bool = False
    is_adapted: bool = False
    is_sync: bool = True
    optim_dtype: torch.dtype = OPTIM_DTYPE
    utilisation: float | None = None
    drive: Drive = NO_DISK
    frozen: Drive = NO_DISK

    @classmethod
    def of(cls, options: Any, **more: Any) -> TrainingSetup:
        """Return what a `Request`, or other options with these names, say; `more`: what only one of them has."""
        same = ("sequence", "optimizer", "optimizer_state", "master", "step_in_backward")
        chooses_compute, chooses_launch = options.compute == "auto", options.launch == "auto"
        found = {name: getattr(options, name) for name in same}
        compute = "bf16" if chooses_compute else options.compute
        return cls(
            **found,
            compute=compute,
            chooses_compute=chooses_compute,
            launch="eager" if chooses_launch else options.launch,
            chooses_launch=chooses_launch,
            is_adapted=options.is_adapted,
            **more,
        )

    @property
    def master_kind(self) -> MasterKind:
        """Whether masters are in halves."""
        return "whole" if self.master == "whole" else "split"

    @property
    def host(self) -> HostOptions:
        """What the engine would be told."""
        disk = _SOME_DISK if self.master == "disk" else None
        frozen = _SOME_FROZEN_DISK if self.frozen.is_there else None
        return HostOptions("alloc", self.optim_dtype, None, self.master_kind, self.step_in_backward, disk, frozen)


@dataclass(frozen=True)
class Workload:
    """Training a model.

    `expanded_bytes`: the largest size of one layer's packed weights when expanded. `expansion_bytes`: the same
    with the workspace of expanding them. `hidden`: the trained weights that Muon would orthogonalize. `named`:
    the class that the config names, if that is another than `name`. `tower_layers`: that run on images. `shown`: a
    line on these.
    """

    name: str
    named: str
    observed: Observed
    groups: tuple[BlockGroup, ...]
    how: TrainingSetup
    expanded_bytes: int
    expansion_bytes: int
    hidden: frozenset[torch.Tensor]
    tower_layers: int = 0
    shown: str = ""

    @classmethod
    def of(
        cls,
        model: nn.Module,
        how: TrainingSetup,
        packing: FrozenPacking | None = None,
        images: Shown | None = None,
    ) -> Workload:
        """Create the workload of a model on the meta device, whose frozen weights are packed here.

        `images`: of each sequence, whose tokens `how` counts already.
        """
        observed = observe(model, how.sequence)
        if images is not None and images.is_of_data and not observed.is_counted:
            # Nobody has asked for it, and the training goes on without.
            images = None
        if images is not None:
            observed = with_towers(observed, model, images)
        if packing is not None:
            packing.pack(model)
        modules = observed.modules
        expanded, expansion = max(map(_expanded_bytes, modules)), max(map(expansion_bytes, modules))
        name, named = type(model).__name__, _named_otherwise(model)
        layers, shown = (0, "") if images is None else (tower_layers(model), images.line)
        return cls(name, named, observed, group(modules), how, expanded, expansion, _hidden(model), layers, shown)

    def on(self, card: Card) -> Workload:
        """Return this workload as it multiplies on a card: with ``compute="auto"``, as is faster by its rates."""
        if not self.how.chooses_compute:
            return self
        compute = "fp8" if Fp8Share.of(self.observed.modules).pays(card) else "bf16"
        return self if compute == self.how.compute else replace(self, how=replace(self.how, compute=compute))

    @property
    def utilisation(self) -> float:
        """The part of the card's dense rate that layers reach."""
        return self.how.utilisation or (ADAPTERS_UTILISATION if self.how.is_adapted else UTILISATION)

    @cached_property
    def parameters(self) -> int:
        """The number of elements of weights."""
        own = {id(weight): weight for module in self.observed.modules for weight in module.parameters()}
        return sum(weight.numel() for weight in own.values())

    @cached_property
    def trained(self) -> int:
        """The number of elements of trained weights."""
        return sum(tensor.numel() for one in self._trainable for tensor in one.tensors)

    @cached_property
    def optimizer_bytes(self) -> int:
        """Bytes of the optimizer's state."""
        return self._state_bytes(self.how.optimizer_state, self.shards(1))

    def _state_bytes(self, kind: str, shards: Owners) -> int:
        tensors = [tensor for one in self._trainable for tensor in one.tensors]
        own = list(filter(shards.owns, tensors))
        shapes = [tensor.shape for tensor in own]
        if self.how.optimizer == "muon":
            hidden = [tensor.shape for tensor in own if tensor in self.hidden]
            others = [tensor.shape for tensor in own if tensor not in self.hidden]
            return muon_state_of(hidden, others, self.how.optim_dtype, kind)
        return state_of(self.how.optimizer, shapes, self.how.optim_dtype, kind)

    def disk_bytes(self, machines: int = 1) -> int:
        """Return the bytes on the disk of the machine that owns most: of state, and of lower halves of masters."""
        if not self.how.drive.is_there:
            return 0
        shards = self.shards(machines)
        return self._state_bytes(self.how.optimizer_state, shards) + self._remainder_bytes(shards)

    @cached_property
    def frozen_bytes(self) -> int:
        """Bytes of frozen weights."""
        return sum(one.layout.nbytes for one in self._frozen)

    def read_bytes(self, tasks: Sequence[Task]) -> int:
        """Return the bytes of frozen weights that a machine's tasks read from disk: each those of its layers."""
        if not self.how.frozen.is_there:
            return 0
        uses = ((one, task.layers) for task in tasks for one in self._frozen)
        return sum(one.layout.nbytes for one, layers in uses if any(user in layers for user in one.users))

    @property
    def _frozen(self) -> list[BlockGroup]:
        return [one for one in self.groups if one.kind == "frozen"]

    def _remainder_bytes(self, shards: Owners) -> int:
        if self.how.master != "disk":
            return 0
        owned = (tensor for one in self._trainable for tensor in one.tensors if shards.owns(tensor))
        return sum(_REMAINDER_BYTES * tensor.numel() for tensor in owned if tensor.dtype == torch.bfloat16)

    def _state_memory_bytes(self, shards: Owners) -> int:
        """Return the host memory for the state: all of it, or the blocks of it that are not on disk just then."""
        state = self._state_bytes(self.how.optimizer_state, shards)
        if not self.how.drive.is_there or not state:
            return state
        tensors = [tensor for one in self._trainable for tensor in one.tensors if shards.owns(tensor)]
        largest = max(tensors, key=torch.Tensor.numel).numel()
        return memory_for(state, -(-state * largest // max(shards.numel, 1)))

    def shards(self, machines: int) -> Owners:
        """Return the owners of parameters, for the machine that owns most."""
        every = [Shards(rank, machines) if machines > 1 else Undivided() for rank in range(machines)]
        for each in every:
            each.assign([one.tensors for one in self._trainable])
        return max(every, key=lambda each: each.numel)

    def traffic_bytes(self, machines: int, tasks: Sequence[Task]) -> int:
        """Return the bytes that the busiest machine sends or receives in a step, whichever are more.

        Gradients go to the owners, in fp32 if several tasks of a machine add to them, and weights come back.
        """
        shards = self.shards(machines)
        spans = [task.layers for task in tasks if task.adds_gradients]
        return shards.traffic_bytes(
            (one.tensors, gradient_itemsize(one, spans), one.layout.dtype.itemsize) for one in self._trainable
        )

    def step_bytes(self, machines: int = 1) -> float:
        """Return the host memory traffic of a step, or of as long a time, for every two bytes of trained weights.

        With several machines, each steps the parameters that it owns.
        """
        owned = self.shards(machines).numel if self.trained else 1
        return self._whole_step_bytes * owned / max(self.trained, 1)

    @property
    def _whole_step_bytes(self) -> float:
        nbytes = self._trained_bytes
        # In 8 bits a step moves less, but on some tens of cores packing takes as much time as that saves.
        state = (
            self._state_bytes("fp32", self.shards(1))
            if self.how.optimizer_state == "8bit"
            else self.optimizer_bytes
        )
        own = _SPLIT_STEP_BYTES if self.how.master_kind == "split" else _STEP_BYTES
        times = _DISK_STATE_TIMES if self.how.drive.is_there else _STEP_STATE_TIMES
        moved = own * self.trained + times * state + _CODE_STEP_BYTES * self._coded
        moved += self._muon_flops / _MUON_FLOPS_PER_BYTE
        return moved * _WEIGHT_BYTES / nbytes if nbytes else 0.0

    @cached_property
    def _muon_flops(self) -> int:
        """The number of operations of a step's matrix products."""
        if self.how.optimizer != "muon":
            return 0
        group = Muon([nn.Parameter(torch.zeros(1, 1))]).param_groups[0]
        return sum(iteration_of(group).flops(one.shape) for one in self.hidden)

    @property
    def _trainable(self) -> list[BlockGroup]:
        return [one for one in self.groups if one.kind == "trainable"]

    def costs(self, sequences: int, card: Card) -> list[LayerCost]:
        """Return the cost of each part of the row, for microbatches of `sequences`.

        Raises `Refused` for a card that does not multiply as wanted.
        """
        tflops = card.fp16_sums_tflops if self.how.compute == "fp16-sums" else card.tflops
        flops_ms = 1 / (tflops * self.utilisation * 1e9)
        tokens = sequences * self.how.sequence
        costs: list[LayerCost] = []
        for at, facts in enumerate(self.observed.facts):
            # The part before the layers is an embedding, whose launch takes little time, and the tower's layers.
            launch_ms = LAUNCH_MS if at else LAUNCH_MS * self.tower_layers
            costs.append(
                LayerCost(
                    facts.forward_flops.of(sequences) * flops_ms - tokens * self._fp8.saved_forward_ms(at, card),
                    facts.backward_flops.of(sequences) * flops_ms - tokens * self._fp8.saved_backward_ms(at, card),
                    weight_bytes=sum(
                        device_nbytes(one.layout, one.tensors, self._fp8.coded) for one in self._blocks.get(at, ())
                    ),
                    trainable_bytes=sum(
                        one.layout.nbytes for one in self._blocks.get(at, ()) if one.kind == "trainable"
                    ),
                    disk_bytes=self._on_disk(at),
                    boundary_bytes=sequences * facts.boundary_bytes,
                    kept_bytes=int(facts.kept_bytes.of(sequences, COMPILED_SHARE)) + self._fp8.codes_bytes(at),
                    forward_launch_ms=FORWARD_PART * launch_ms,
                    backward_launch_ms=(1 - FORWARD_PART) * launch_ms,
                    replay_launch_ms=REPLAY_LAUNCH_MS if self._may_replay(at) else None,
                )
            )
        return costs

    def _on_disk(self, at: int) -> int:
        """Bytes of a part's weights that each upload reads from disk."""
        if not self.how.frozen.is_there:
            return 0
        return sum(one.layout.nbytes for one in self._blocks.get(at, ()) if one.kind == "frozen")

    def _may_replay(self, at: int) -> bool:
        """Whether graphs launch a part: not what runs before the layers, the head, nor layers that are packed."""
        is_layer = 0 < at < len(self.observed.facts) - 1
        return self.how.launch == "graphs" and is_layer and not _expanded_bytes(self.observed.modules[at])

    def pool_bytes(self, sequences: int) -> int:
        """Return what layers work in where graphs launch them, which is memory of these alone."""
        return self.working_bytes(sequences) if self.how.launch == "graphs" else 0

    @cached_property
    def _fp8(self) -> Fp8Share:
        is_fp8 = self.how.compute in ("fp8", "fp8-cast")
        return Fp8Share.of(self.observed.modules if is_fp8 else [], travels=self.how.compute == "fp8")

    @cached_property
    def _blocks(self) -> dict[int, list[BlockGroup]]:
        """The blocks by the last layer that uses them: a stage uploads each once."""
        blocks: dict[int, list[BlockGroup]] = {}
        for one in self.groups:
            blocks.setdefault(max(one.users), []).append(one)
        return blocks

    @cached_property
    def _coded(self) -> int:
        """The number of elements of weights that travel as codes."""
        found = ((one, coded_indices(one.tensors, self._fp8.coded)) for one in self._trainable)
        return sum(one.tensors[index].numel() for one, indices in found for index in indices)

    @cached_property
    def _trained_bytes(self) -> int:
        return sum(one.layout.nbytes for one in self._trainable)

    def working_bytes(self, sequences: int) -> int:
        """Return the most bytes of a layer on a device beyond weights, gradients and kept activations."""
        layers = max(facts.working_bytes(sequences, COMPILED_SHARE) for facts in self.observed.facts)
        own = layers + self.expansion_bytes
        return max(own, self._loss_bytes(sequences))

    def _loss_bytes(self, sequences: int) -> int:
        """Return the bytes of logits of some rows, and of the head's gradient from these rows."""
        rows = min(LOSS_ROWS, sequences * self.how.sequence)
        return self.observed.vocabulary * (rows + self.observed.hidden) * LOGIT_BYTES

    def forecast(
        self, tasks: Sequence[Task], microbatches: int, sequences: int, machine: Machine, machines: int = 1
    ) -> MemoryForecast:
        """Return the host memory for training under a plan's tasks, as `RoundPipe.memory_forecast` does.

        With several machines: that of the machine that owns most, with its own microbatches.
        """
        additions = 1 if self.how.step_in_backward else max(_additions(tasks, len(self.observed.facts)), default=1)
        inputs = [0, *(sequences * facts.boundary_bytes for facts in self.observed.facts)]
        rings = machine.devices * _RING_BYTES if self.how.frozen.is_there else 0
        activations = microbatches * held_at_once(tasks, inputs) + rings
        limit = machine.ram or HostLimit("the machine", 2**63, 2**63)
        is_double = self.is_double(machine.ram, machines)
        shards = self.shards(machines)
        return self._forecast(
            limit, activations, second_blocks=is_double, additions=max(additions, 1), shards=shards
        )

    def is_double(self, ram: HostLimit | None, machines: int = 1) -> bool:
        """Return whether weights get second blocks by default, by the engine's rule."""
        if self.how.master_kind == "split":
            return not self.how.is_sync
        if ram is None:
            return False
        is_little = self._trained_bytes <= ram.total_bytes * SECOND_BLOCKS_SHARE
        shards = self.shards(machines)
        return is_little and self._forecast(ram, 0, second_blocks=True, additions=1, shards=shards).fits

    def _forecast(
        self, limit: HostLimit, activations: int, *, second_blocks: bool, additions: int, shards: Owners
    ) -> MemoryForecast:
        blocks = needed_by(
            self.groups,
            self.how.host,
            second_blocks=second_blocks,
            additions=additions,
            shards=shards,
            coded=self._fp8.coded,
        )
        state = self._state_memory_bytes(shards)
        more = HostBytes(optimizer_state=state, activations=activations)
        return MemoryForecast(self.name, "to train", blocks + more, HostBytes(), limit)


def _named_otherwise(model: nn.Module) -> str:
    """The class that the model's config names, if it is another, such as a classifier."""
    names: Any = getattr(cast(Any, model).config, "architectures", None) or ()
    return "" if type(model).__name__ in names else ", ".join(names)


def _expanded_bytes(module: nn.Module) -> int:
    return sum(weight.expanded_nbytes for weight in packed_weights(module))


def _hidden(model: nn.Module) -> frozenset[torch.Tensor]:
    groups = muon_groups(model, lr=0.0)
    return frozenset(one for group in groups if group["use_muon"] for one in group["params"])


def _additions(tasks: Sequence[Task], layers: int) -> list[int]:
    """Count the tasks of a call that add to each layer's gradients."""
    return [sum(task.adds_gradients and layer in task.layers for task in tasks) for layer in range(layers)]


def size_of(batch: int, microbatches: int) -> int:
    """Return the number of sequences of the largest microbatch."""
    return math.ceil(batch / microbatches)

"""A model to train: the costs of its layers for a plan, and its host memory by the engine's own forecast."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import torch
from rp_optim import Muon, muon_groups
from rp_optim.optimizers.muon import iteration_of
from rp_sched import LayerCost, Task
from rp_transfer import Group, HostLimit, group
from torch import nn

from roundpipe.cli.estimate.hardware import Machine
from roundpipe.cli.estimate.meta.meta_model import Packing
from roundpipe.cli.estimate.meta.observe import Observed, observe
from roundpipe.cli.estimate.optimizers import muon_state_of, state_of
from roundpipe.engine.boundaries import held_at_once
from roundpipe.engine.forecast import MemoryForecast
from roundpipe.engine.foresight import SECOND_BLOCKS_SHARE
from roundpipe.engine.host_bytes import HostBytes, needed_by
from roundpipe.packing.weight import expansion_bytes, packed_weights
from roundpipe.planning.pricing import FORWARD_PART, LAUNCH_MS, gradient_itemsize
from roundpipe.state.model_state import HostOptions, MasterKind
from roundpipe.state.shards import Shards

# The part of a card's dense bf16 rate that compiled layers reach as model operations, recomputation not counted:
# full fine-tuning, and adapters, whose thin products take time and are few operations (docs/planning.md).
UTILISATION, ADAPTERS_UTILISATION = 0.5, 0.38
# Of what autograd keeps in layers that run as written, compiled ones keep so much.
COMPILED_SHARE = 0.85
# Rows of logits that the loss has at once, and bytes of each: as computed, and as the kernel writes over them.
LOSS_ROWS, LOGIT_BYTES = 2048, 2
OPTIM_DTYPE = torch.float32
# Gradient, master and moments read, master, moments and weight written. Of masters in halves one is the weight.
_STEP_BYTES, _SPLIT_STEP_BYTES, _STEP_STATE_TIMES = 12, 10, 2
_WEIGHT_BYTES = 2
# Operations of Muon's matrix products in the time of a byte of host memory: 5e12 a second, for some 16 cores with
# AMX (two reach 0.5e12 to 0.8e12, docs/performance.md), beside 165 GB/s.
_MUON_FLOPS_PER_BYTE = 30


@dataclass(frozen=True)
class Workload:
    """Training a model. `sequence`: tokens of each sequence. `utilisation`: of the card's dense rate.

    `expanded_bytes`: of the packed weights of one layer, expanded; the most of any. `expansion_bytes`: with what
    expanding them takes beside.
    `hidden`: the trained weights that Muon would orthogonalize. `is_sync`: of the steps, which counts for masters
    in halves: these have second blocks of weights beside asynchronous ones alone. `named`: the class that the
    config names, if that is another than `name`. `optim_dtype`: of masters and moments.
    """

    name: str
    observed: Observed
    groups: tuple[Group, ...]
    sequence: int
    optimizer: str
    utilisation: float
    is_adapted: bool = False
    optimizer_state: str = "fp32"
    expanded_bytes: int = 0
    expansion_bytes: int = 0
    hidden: frozenset[torch.Tensor] = frozenset()
    master: MasterKind = "whole"
    is_sync: bool = True
    step_in_backward: bool = False
    named: str = ""
    optim_dtype: torch.dtype = OPTIM_DTYPE

    @classmethod
    def of(
        cls,
        model: nn.Module,
        *,
        sequence: int,
        optimizer: str = "adamw",
        utilisation: float | None = None,
        is_adapted: bool = False,
        optimizer_state: str = "fp32",
        packing: Packing | None = None,
        master: str = "whole",
        is_sync: bool = True,
        step_in_backward: bool = False,
        optim_dtype: torch.dtype = OPTIM_DTYPE,
    ) -> Workload:
        """Of a model on the meta device, whose frozen weights are packed here."""
        observed = observe(model, sequence)
        if packing is not None:
            packing.pack(model)
        usual = ADAPTERS_UTILISATION if is_adapted else UTILISATION
        return cls(
            type(model).__name__,
            observed,
            group(observed.modules),
            sequence,
            optimizer,
            utilisation or usual,
            is_adapted,
            optimizer_state,
            max(map(_expanded_bytes, observed.modules)),
            max(map(expansion_bytes, observed.modules)),
            _hidden(model),
            "split" if master == "split" else "whole",
            is_sync,
            step_in_backward,
            _named_otherwise(model),
            optim_dtype,
        )

    @cached_property
    def parameters(self) -> int:
        """Elements of weights."""
        own = {id(weight): weight for module in self.observed.modules for weight in module.parameters()}
        return sum(weight.numel() for weight in own.values())

    @cached_property
    def trained(self) -> int:
        """Elements of weights that are trained."""
        return sum(tensor.numel() for found in self._trainable for tensor in found.tensors)

    @cached_property
    def optimizer_bytes(self) -> int:
        """Bytes of the optimizer's state."""
        return self._state_bytes(self.optimizer_state)

    def _state_bytes(self, kind: str, shards: Shards | None = None) -> int:
        tensors = [tensor for found in self._trainable for tensor in found.tensors]
        own = [tensor for tensor in tensors if shards is None or shards.owns(tensor)]
        shapes = [tensor.shape for tensor in own]
        if self.optimizer == "muon":
            hidden = [tensor.shape for tensor in own if tensor in self.hidden]
            others = [tensor.shape for tensor in own if tensor not in self.hidden]
            return muon_state_of(hidden, others, self.optim_dtype, kind)
        return state_of(self.optimizer, shapes, self.optim_dtype, kind)

    def shards(self, machines: int) -> Shards | None:
        """Who owns which parameter, as the machine sees it that owns most; None for one machine."""
        if machines == 1:
            return None
        every = [Shards(rank, machines) for rank in range(machines)]
        for each in every:
            each.assign([found.tensors for found in self._trainable])
        return max(every, key=lambda each: each.numel)

    def traffic_bytes(self, machines: int, tasks: Sequence[Task]) -> int:
        """What a machine sends in a step, and receives: the most of any, of either way.

        Gradients go to the owners, in fp32 where several tasks of a machine add to them, and weights come back.
        """
        shards = self.shards(machines)
        if shards is None:
            return 0
        spans = [task.layers for task in tasks if task.adds_gradients]
        return shards.traffic_bytes(
            (found.tensors, gradient_itemsize(found, spans), found.layout.dtype.itemsize)
            for found in self._trainable
        )

    def step_bytes(self, machines: int = 1) -> float:
        """Host memory that a step moves, or could in its time, for every two bytes of trained weights.

        Of several machines each steps what it owns.
        """
        shards = self.shards(machines)
        return self._whole_step_bytes * (1.0 if shards is None else shards.numel / max(self.trained, 1))

    @property
    def _whole_step_bytes(self) -> float:
        nbytes = sum(found.layout.nbytes for found in self._trainable)
        # In 8 bits a step moves less, but packing takes as long as that saves on some tens of cores.
        state = self._state_bytes("fp32") if self.optimizer_state == "8bit" else self.optimizer_bytes
        own = _SPLIT_STEP_BYTES if self.master == "split" else _STEP_BYTES
        moved = own * self.trained + _STEP_STATE_TIMES * state + self._muon_flops / _MUON_FLOPS_PER_BYTE
        return moved * _WEIGHT_BYTES / nbytes if nbytes else 0.0

    @cached_property
    def _muon_flops(self) -> int:
        """Operations of the matrix products of a step."""
        if self.optimizer != "muon":
            return 0
        group = Muon([nn.Parameter(torch.zeros(1, 1))]).param_groups[0]
        return sum(iteration_of(group).flops(one.shape) for one in self.hidden)

    @property
    def _trainable(self) -> list[Group]:
        return [found for found in self.groups if found.kind == "trainable"]

    def costs(self, sequences: int, card_tflops: float) -> list[LayerCost]:
        """The cost of each part of the row, for microbatches of so many sequences."""
        flops_ms = 1 / (card_tflops * self.utilisation * 1e9)
        found: list[LayerCost] = []
        for at, facts in enumerate(self.observed.facts):
            # What runs before the layers is an embedding, a small part of a layer's launching.
            launch_ms = LAUNCH_MS if at else 0.0
            found.append(
                LayerCost(
                    sequences * facts.forward_flops * flops_ms,
                    sequences * facts.backward_flops * flops_ms,
                    weight_bytes=self._block_bytes(at, {"trainable", "frozen", "buffer"}),
                    trainable_bytes=self._block_bytes(at, {"trainable"}),
                    boundary_bytes=sequences * facts.boundary_bytes,
                    kept_bytes=int(sequences * facts.kept_bytes * COMPILED_SHARE),
                    forward_launch_ms=FORWARD_PART * launch_ms,
                    backward_launch_ms=(1 - FORWARD_PART) * launch_ms,
                )
            )
        return found

    def _block_bytes(self, at: int, kinds: set[str]) -> int:
        # A block that several layers share is uploaded once for a stage, so only its last layer counts it.
        own = [found for found in self.groups if max(found.users) == at and found.kind in kinds]
        return sum(found.layout.nbytes for found in own)

    def working_bytes(self, sequences: int) -> int:
        """The most that a layer has on a device beyond weights, gradients and what it keeps."""
        layers = max(facts.working_bytes for facts in self.observed.facts)
        own = int(sequences * layers * COMPILED_SHARE) + self.expansion_bytes
        return max(own, self._loss_bytes(sequences))

    def _loss_bytes(self, sequences: int) -> int:
        """Logits of some rows, and the gradient of the head's weight of these rows."""
        rows = min(LOSS_ROWS, sequences * self.sequence)
        return self.observed.vocabulary * (rows + self.observed.hidden) * LOGIT_BYTES

    def forecast(
        self, tasks: Sequence[Task], microbatches: int, sequences: int, machine: Machine, machines: int = 1
    ) -> MemoryForecast:
        """The host memory to train under a plan's tasks, as `RoundPipe.memory_forecast` sums it up.

        Of several machines: that of the one that owns most, with its own microbatches.
        """
        additions = 1 if self.step_in_backward else max(_additions(tasks, len(self.observed.facts)), default=1)
        inputs = [0, *(sequences * facts.boundary_bytes for facts in self.observed.facts)]
        activations = microbatches * held_at_once(tasks, inputs)
        limit = machine.ram or HostLimit("the machine", 2**63, 2**63)
        is_double = self.is_double(machine.ram, machines)
        shards = self.shards(machines)
        return self._forecast(
            limit, activations, second_blocks=is_double, additions=max(additions, 1), shards=shards
        )

    def is_double(self, ram: HostLimit | None, machines: int = 1) -> bool:
        """Whether weights get second blocks by default, as the engine decides it."""
        if self.master == "split":
            return not self.is_sync
        if ram is None:
            return False
        nbytes = sum(found.layout.nbytes for found in self._trainable)
        is_little = nbytes <= ram.total_bytes * SECOND_BLOCKS_SHARE
        shards = self.shards(machines)
        return is_little and self._forecast(ram, 0, second_blocks=True, additions=1, shards=shards).fits

    def _forecast(
        self, limit: HostLimit, activations: int, *, second_blocks: bool, additions: int, shards: Shards | None
    ) -> MemoryForecast:
        blocks = needed_by(
            self.groups,
            HostOptions("alloc", self.optim_dtype, None, self.master, self.step_in_backward),
            second_blocks=second_blocks,
            additions=additions,
            shards=shards,
        )
        state = self._state_bytes(self.optimizer_state, shards)
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
    """How many tasks of a call add to each layer's gradients."""
    return [sum(task.adds_gradients and layer in task.layers for task in tasks) for layer in range(layers)]


def size_of(batch: int, microbatches: int) -> int:
    """The sequences of the largest microbatch."""
    return math.ceil(batch / microbatches)

"""A model's state on the host: blocks of weights, gradients and buffers, and the master weights."""

from __future__ import annotations

import threading
import weakref
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Literal

import torch
from rp_optim import write_weights
from rp_transfer import Backend, Group, Kind, MappedFiles, Turns, give_back_freed, group, inner_tensors, tensors_of

from roundpipe.state.gradient import Gradient
from roundpipe.state.halves import TellsWhole, can_split, same_bits, tell_kept_whole
from roundpipe.state.master import (
    CONSUMED,
    PENDING,
    EngineMaster,
    EngineSplitMaster,
    is_in_optimizer,
    is_split,
    published,
    refuse_reads,
    watch_reads,
    watch_whole,
)
from roundpipe.state.passing import Place, sharing
from roundpipe.state.shards import Segment, Shards

PinMode = Literal["alloc", "register", "off"]
MasterKind = Literal["whole", "split"]


class Block:
    """Tensors of one kind and dtype that the same layers use, and `turns`, the order of access to them.

    `memory`: one contiguous block (numel,), or None if the tensors stay in their own storages, which
    `registration` keeps pinned if they are registered. `is_staged`: some of this memory is not pinned, so the host
    copies it to pinned memory for each upload. `writes`: whether a layer was seen to write these buffers; None
    until one has run in this mode. `looked_at`: the layers that were checked for that.

    `back`: a second block or None. A step writes its result there while devices read `memory`; publication swaps
    the two. `complete`: the parameters whose result is in `back`, as index and master's version at that time.
    `segments`: which machine owns which part.
    """

    def __init__(
        self,
        backend: Backend,
        found: Group,
        files: MappedFiles,
        memory: torch.Tensor | None = None,
        registration: object = None,
    ) -> None:
        self.kind: Kind = found.kind
        self.users = found.users
        self.tensors = found.tensors
        self.layout = found.layout
        self.turns = Turns()
        self.gradient = Gradient(backend, self.layout) if found.kind == "trainable" else None
        self.memory = memory
        self.registration = registration
        self.writes: bool | None = None
        self.looked_at: set[int] = set()
        self.back: torch.Tensor | None = None
        self.back_values: list[torch.Tensor] = []
        self.complete: dict[int, int] = {}
        # Of trained weights, on several machines.
        self.segments: tuple[Segment, ...] = ()
        self.rank: int | None = None
        if memory is not None:
            self.layout.move_in(memory, self.tensors, files)
        # The engine writes through `.data`, which leaves the parameters' version counters to detect other writers.
        self.values = [tensor.data for tensor in self.tensors]
        self.seen = [tensor._version for tensor in self.tensors]
        self.is_staged = not all(map(backend.is_pinned, self.host_tensors()))

    @property
    def owned(self) -> list[int]:
        """The indices of the parameters that this machine updates."""
        if self.rank is None:
            return list(range(len(self.tensors)))
        return [index for segment in self.segments if segment.owner == self.rank for index in segment.indices]

    @property
    def passes_gradients_on(self) -> bool:
        """Whether the memory of its gradients is another block's once a step has read them."""
        return self.gradient is not None and self.gradient.place is not None

    def __str__(self) -> str:
        """Names the layers that use it, such as ``layer 3`` or ``layers 0, 27``."""
        layers = sorted(self.users)
        return f"layer{'s' if len(layers) > 1 else ''} {', '.join(map(str, layers))}"

    @property
    def nbytes(self) -> int:
        """Bytes on a device."""
        return self.layout.nbytes

    def pieces(self, target: torch.Tensor) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
        """Pairs (slice of `target`, host tensor) that together copy the block; `target`: (numel,) on a device."""
        if self.memory is not None:
            yield target, self.memory
            return
        for span, value in zip(self.layout.spans, self.values, strict=True):
            yield target[span.offset : span.offset + span.numel], value.view(-1)

    def host_tensors(self) -> Sequence[torch.Tensor]:
        """The host memory that `pieces` reads."""
        return self.values if self.memory is None else (self.memory,)

    def make_back(self, backend: Backend) -> None:
        """Allocate the second block."""
        self.back = backend.host_empty((self.layout.numel,), self.layout.dtype)
        self.back_values = self.layout.storages(self.back)

    def publish(self, backend: Backend, masters: Sequence[torch.Tensor]) -> None:
        """Write the masters to the weights or swap in the second block; the caller holds the write turn."""
        self.write(backend, masters)
        self.swap()

    def write(self, backend: Backend, masters: Sequence[torch.Tensor]) -> None:
        """Write the masters whose result is not there yet to the second block or, without one, to the weights.

        Masters of other machines are left out. With a second block no turn is needed.
        """
        here = [i for i, master in enumerate(masters) if not master.is_meta]
        stale = [i for i in here if self.complete.get(i) != masters[i]._version]
        targets = self.values if self.back is None else self.back_values
        written = self.host_tensors() if self.back is None else (self.back,)
        backend.host_touch(write=written, what="publishing weights")
        write_weights([masters[i] for i in stale], [targets[i] for i in stale])
        for i in stale:
            if is_split(master := masters[i]):
                master.move_to(targets[i])
        if self.back is not None:
            self.complete.update((i, masters[i]._version) for i in stale)

    def swap(self) -> None:
        """Swap in the second block, if there is one; the caller holds the write turn."""
        if self.back is not None:
            self._change_places()

    def gathered(self) -> list[tuple[int, torch.Tensor]]:
        """The memory that `write` writes, in pieces (numel,), each with the rank of its owner."""
        if self.back is not None or self.memory is not None:
            memory = self.memory if self.back is None else self.back
            assert memory is not None
            return [(segment.owner, segment.of(memory)) for segment in self.segments]
        return [
            (segment.owner, self.values[index].view(-1))
            for segment in self.segments
            for index in segment.indices
            if self.values[index].numel()
        ]

    def _change_places(self) -> None:
        self.complete = {}
        self.memory, self.back = self.back, self.memory
        self.values, self.back_values = self.back_values, self.values
        for tensor, old, new in zip(self.tensors, self.back_values, self.values, strict=True):
            # A parameter that was moved to other memory, as by ``to(dtype)``, keeps that.
            if tensor.data_ptr() == old.data_ptr():
                tensor.data = new

    def note_written(self, chosen: set[int]) -> None:
        """Raise the version counters of the tensors with these ids, which graphs on the host may have saved."""
        for index, tensor in enumerate(self.tensors):
            if id(tensor) in chosen:
                torch.autograd.graph.increment_version(tensor)
                self.seen[index] += 1

    def changed_outside(self) -> list[int]:
        """Indices of the tensors that code outside the engine has written since the last call of this."""
        changed = [i for i, tensor in enumerate(self.tensors) if tensor._version != self.seen[i]]
        for index in changed:
            self.seen[index] = self.tensors[index]._version
        return changed


def in_turn(blocks: Iterable[Block]) -> list[Block]:
    """In the order in which gradients leave a task: memory is passed on from the last layer to the first."""
    return sorted(blocks, key=lambda block: -max(block.users) if block.passes_gradients_on else 1)


@dataclass(frozen=True, slots=True)
class LayerState:
    """One layer on the host with the blocks it uses."""

    index: int
    module: torch.nn.Module
    blocks: tuple[Block, ...]

    def __str__(self) -> str:
        """Names its index and type, such as ``layer 3 (Linear)``."""
        return f"layer {self.index} ({type(self.module).__name__})"

    @property
    def trainable(self) -> bool:
        """Whether any of its parameters is trained."""
        return any(block.kind == "trainable" for block in self.blocks)

    @property
    def has_buffers(self) -> bool:
        """Whether it has buffers, which its forward may write."""
        return any(block.kind == "buffer" for block in self.blocks)

    def nbytes(self, *kinds: Kind) -> int:
        """Bytes of its blocks of these kinds, or of all."""
        return sum(block.nbytes for block in self.blocks if not kinds or block.kind in kinds)


Signature = tuple[object, ...]


# All modules of each layer, in the order of ``modules()``. Kept since torch's walk is slow and calls need several.
Walk = tuple[tuple[torch.nn.Module, ...], ...]


def walk(layers: Sequence[torch.nn.Module]) -> Walk:
    """List the layers' current modules."""
    return tuple(tuple(layer.modules()) for layer in layers)


def signature(walked: Walk, places: Mapping[int, int]) -> Signature:
    """What blocks and twins depend on: all modules and, for each tensor, its identity, requires_grad and address.

    `places`: maps an address in a second block to that in the first, since publication swaps the two.
    """
    tensors = tuple(
        (id(inner), tensor.requires_grad, _place(inner, places), _has_hooks(tensor))
        for modules in walked
        for module in modules
        for table in (module._parameters, module._buffers)  # pyright: ignore[reportPrivateUsage] - as `tensors_of` goes by
        for tensor in table.values()
        if tensor is not None
        for inner in inner_tensors(tensor)
    )
    return walked, tensors


def _place(tensor: torch.Tensor, places: Mapping[int, int]) -> int:
    # Read once: the optimizer's thread may swap the parameter's memory concurrently.
    address = tensor.data_ptr()
    return places.get(address, address)


# Attributes that torch sets on every module; others are set by the module's class or by the user.
_OWN = frozenset(vars(torch.nn.Module()))


def attributes(walked: Walk) -> list[tuple[str, object]]:
    """Names and values of all modules' plain attributes, such as a dropout's ``p`` or a patched ``forward``."""
    every = (module for modules in walked for module in modules)
    return [(name, value) for module in every for name, value in vars(module).items() if name not in _OWN]


def training_flags(walked: Walk) -> tuple[tuple[bool, ...], ...]:
    """The training flag of every module of every layer, in the order of ``modules()``."""
    return tuple(tuple(module.training for module in modules) for modules in walked)


def _has_hooks(tensor: torch.Tensor) -> bool:
    return bool(tensor._backward_hooks) or bool(getattr(tensor, "_post_accumulate_grad_hooks", None))


# Called with the groups of a model's tensors before their blocks are allocated; may raise to prevent that.
Foresee = Callable[[Sequence[Group]], None]


def build_layers(
    backend: Backend, modules: Sequence[torch.nn.Module], pin: PinMode, foresee: Foresee
) -> tuple[LayerState, ...]:
    """Group the layers' tensors into blocks.

    The tensors of a block are used by exactly the same layers. So a tied parameter gets a block of its own, and a
    module that occurs twice in the sequence has one block for both.

    Raises what `foresee` raises, and `ValueError` for tensors that are not on the host, sparse tensors, parameters
    with hooks, and buffers that require grad.
    """
    for index, module in enumerate(modules):
        for kind, tensor in tensors_of(module):
            _check_tensor(index, module, kind, tensor)
    groups = group(modules)
    foresee(groups)
    blocks = _build_blocks(backend, groups, pin)
    return tuple(
        LayerState(index, module, tuple(block for block in blocks if index in block.users))
        for index, module in enumerate(modules)
    )


def _build_blocks(backend: Backend, groups: Sequence[Group], pin: PinMode) -> list[Block]:
    moving = [found for found in groups if moves(found, pin)]
    memories = backend.host_blocks([found.layout for found in moving])
    files = MappedFiles.now()
    for tensor in (tensor for found in moving for tensor in found.tensors):
        # What code before has read, such as the observation of the model.
        files.give_back(tensor)
    moved: dict[Group, Block] = {}
    # Each block is allocated when the tensors of the one before have moved: no two are in memory twice.
    for found, memory in zip(moving, memories, strict=True):
        moved[found] = Block(backend, found, files, memory)
        give_back_freed()
    staying = [tensor for found in groups if found not in moved for tensor in found.tensors]
    registration = backend.register(staying) if pin == "register" else None
    return [moved.get(found) or Block(backend, found, files, registration=registration) for found in groups]


def moves(found: Group, pin: PinMode) -> bool:
    """Whether these tensors move into a block, rather than stay in the memory where they are."""
    return pin == "alloc" or found.kind == "buffer" or not all(tensor.is_contiguous() for tensor in found.tensors)


def _check_tensor(index: int, module: torch.nn.Module, kind: Kind, tensor: torch.Tensor) -> None:
    where = f"layer {index} ({type(module).__name__})"
    if tensor.device.type != "cpu":
        raise ValueError(f"{where} has a tensor on {tensor.device}, but the model must be on the CPU; call .cpu()")
    if tensor.layout != torch.strided:
        raise ValueError(f"{where} has a {tensor.layout} tensor, but weights must be dense (torch.strided)")
    if _has_hooks(tensor):
        raise ValueError(
            f"{where} has a hook on a parameter, which the devices' copies would not run; register it on the "
            "module, or change gradients in the step function"
        )
    if kind == "buffer" and tensor.requires_grad:
        raise ValueError(f"{where} has a buffer that requires grad; register it as a parameter")


@dataclass(frozen=True, slots=True)
class Broken:
    """The earliest run that failed and left part of its gradients: its number, and its error in words."""

    run: int
    error: str


class _Reads:
    """What to say of a master's gradient that is read where it is not: once, where a step would have or had it."""

    def __init__(self, state: ModelState) -> None:
        self._state = weakref.ref(state)
        self._is_told = False

    def __call__(self) -> str | None:
        state = self._state()
        if self._is_told or state is None or state.is_stepping:
            return None
        if state.num_runs == (0 if state.steps_in_backward else state.stepped_runs):
            return None
        if state.steps_in_backward and is_in_optimizer():
            # One over several models looks for gradients of each in each model's step.
            return None
        self._is_told = True
        return CONSUMED if state.steps_in_backward else PENDING


class ModelState:
    """The host side of one model. The launcher changes it.

    `version`: number of launched publications of new weights. `unpublished`: the optimizer has a result that is
    not published yet. `quiet`: see `Randomness`. `num_runs`: number of launched runs that add gradients;
    `stepped_runs`: those of them whose gradients a step takes or somebody dropped. `broken`: the first of them
    that failed and left part of its gradients. `failed`: the error of a step that left part of its update. Both
    store text: an error object would keep its frames alive. `mixed`: why some weights are of one step and some of
    the next, until a state is loaded: publishing them failed, as where a machine was lost. `shards`: which machine
    owns which parameter; None for one machine. `is_stepping`: a step function is running; only the
    optimizer's thread uses it. `is_part`: another model is stepped together with this one. `double_buffer`:
    whether trained weights have second blocks; None until that is decided. `master`: whether bf16 weights are the
    upper halves of their masters. `steps_in_backward`: the optimizer steps during each training call, and layers
    pass their gradients' memory on. `torn`: why some weights are of one step and some of the next, until a state
    is loaded: the step that wrote them in place has failed.
    """

    def __init__(
        self,
        backend: Backend,
        modules: Sequence[torch.nn.Module],
        pin: PinMode,
        optim_dtype: torch.dtype | None,
        double_buffer: bool | None = False,
        foresee: Foresee = lambda _: None,
        shards: Shards | None = None,
        master: MasterKind = "whole",
        name: str = "unnamed",
        *,
        steps_in_backward: bool = False,
    ) -> None:
        self.master: MasterKind = master
        self.steps_in_backward = steps_in_backward
        self._name = name
        self._tell_whole = TellsWhole(name)
        self._is_told_whole = False
        self.torn: str | None = None
        self.shards = shards
        # On several machines: a number that tells the trained parameters and their owners from others.
        self.digest = 0
        self.double_buffer = double_buffer
        self.backend = backend
        self.modules = tuple(modules)
        self.pin: PinMode = pin
        self.optim_dtype = optim_dtype
        self.version = 0
        self.unpublished = False
        self.quiet: set[tuple[str, int]] = set()
        self.masters: dict[torch.Tensor, torch.nn.Parameter] = {}
        self.num_runs = 0
        self.stepped_runs = 0
        self._reads = _Reads(self)
        self.broken: Broken | None = None
        self._breaking = threading.Lock()
        self.failed: str | None = None
        self.mixed: str | None = None
        self.is_stepping = False
        self.is_part = False
        self.build(foresee)

    @torch.inference_mode(False)
    def build(self, foresee: Foresee) -> None:
        """Build all blocks from the current layers; nothing may be running."""
        self.layers = build_layers(self.backend, self.modules, self.pin, foresee)
        self.blocks = tuple(dict.fromkeys(block for layer in self.layers for block in layer.blocks))
        self.trainable = tuple(block for block in self.blocks if block.kind == "trainable")
        if self.shards is not None:
            self._divide(self.shards)
        if self.steps_in_backward:
            self._share_gradients()
        self._places: dict[int, int] = {}
        self._walked = walk(self.modules)
        self.signature = signature(self._walked, self._places)
        self.flags = training_flags(self._walked)
        self.attributes = attributes(self._walked)

    def _share_gradients(self) -> None:
        for blocks in sharing(self.trainable):
            place = Place(self.backend, blocks[0].layout)
            for block in blocks:
                assert block.gradient is not None
                block.gradient.share(place)

    def keep_apart(self, blocks: Iterable[Block]) -> None:
        """Give these blocks, to whose gradients several tasks add, memory of their own; nothing may be running."""
        for block in blocks:
            if block.gradient is not None:
                block.gradient.move_out()

    def _divide(self, shards: Shards) -> None:
        shards.assign([block.tensors for block in self.trainable])
        for block in self.trainable:
            block.segments = shards.segments(block.layout, block.tensors)
            block.rank = shards.rank
        self.digest = zlib.crc32(
            repr([(*block.users, *block.segments, block.layout) for block in self.trainable]).encode()
        )

    def changed(self) -> bool:
        """Whether modules, parameters or buffers were added, replaced, moved, frozen or unfrozen since `build`.

        Also walks the modules, for `note_flags` and `note_attributes`.
        """
        self._walked = walk(self.modules)
        return signature(self._walked, self._places) != self.signature

    def written_outside(self) -> list[torch.Tensor]:
        """The trainable parameters that code outside the engine has written since the last call of this."""
        return [block.tensors[index] for block in self.trainable for index in block.changed_outside()]

    def moved_outside(self) -> list[torch.Tensor]:
        """The trainable parameters that were moved to other memory since `build`."""
        return [
            tensor
            for block in self.trainable
            for tensor, value in zip(block.tensors, block.values, strict=True)
            if tensor.data_ptr() != value.data_ptr()
        ]

    def rebuild(self, foresee: Foresee) -> None:
        """`build` again, and keep the gradients of the parameters that are still trained."""
        held = {
            tensor: block.gradient.view(index).clone()
            for block in self.trainable
            if block.gradient is not None and not self.steps_in_backward
            for index, tensor in enumerate(block.tensors)
            if index in block.gradient.written
        }
        trained = set(self.trainable_tensors())
        self.build(foresee)
        self._move_halves()
        self._take_over_thawed(trained)
        for block in self.trainable:
            for index, tensor in enumerate(block.tensors):
                if block.gradient is not None and tensor in held:
                    block.gradient.put(index, held[tensor])

    def _move_halves(self) -> None:
        """Move upper halves from the blocks before into those of now; where there is none, to their own memory."""
        places = {
            tensor: value
            for block in self.trainable
            for tensor, value in zip(block.tensors, block.values, strict=True)
        }
        for tensor, master in self.masters.items():
            if is_split(master):
                upper, value = master.halves[0], places.get(tensor)
                is_same = value is not None and can_split(value) and same_bits(upper, value)
                master.move_to(value if is_same and value is not None else upper.clone())

    def _take_over_thawed(self, trained: Set[torch.Tensor]) -> None:
        """Set masters from weights that were written while they were frozen. `trained`: were not frozen."""
        for block in self.trainable:
            for tensor, value in zip(block.tensors, block.values, strict=True):
                master = self.masters.get(tensor)
                if master is None or master.is_meta or tensor in trained:
                    continue
                if not torch.equal(published(master, value.dtype).to(value.dtype), value):
                    self.set_master(tensor)

    def trainable_tensors(self) -> list[torch.Tensor]:
        """All trainable parameters."""
        return [tensor for block in self.trainable for tensor in block.tensors]

    def lines(self) -> list[Turns]:
        """The turns of all blocks and gradients."""
        return [block.turns for block in self.blocks] + [
            block.gradient.turns for block in self.trainable if block.gradient is not None
        ]

    def note_broken(self, run: int, error: str) -> None:
        """Record, on any thread, that a run failed and left part of its gradients; the earliest run counts."""
        with self._breaking:
            if self.broken is None or run < self.broken.run:
                self.broken = Broken(run, error)

    def describe_broken(self, run: int, error: str) -> None:
        """Replace the recorded error of this run by a fuller description."""
        with self._breaking:
            if self.broken is not None and run == self.broken.run:
                self.broken = Broken(run, error)

    def note_flags(self) -> None:
        """Record the layers' current training flags."""
        flags = training_flags(self._walked)
        if flags != self.flags:
            self.flags = flags
            self._forget_habits()

    def note_attributes(self) -> bool:
        """Record the modules' plain attributes; return whether any was added, replaced or deleted."""
        found = attributes(self._walked)
        same = len(found) == len(self.attributes) and all(
            name == old_name and value is old
            for (name, value), (old_name, old) in zip(found, self.attributes, strict=True)
        )
        if not same:
            self.attributes = found
            self._forget_habits()
        return not same

    def _forget_habits(self) -> None:
        # In another mode a layer may draw random numbers and write buffers that it did not before.
        self.quiet = set()
        for block in self.blocks:
            block.writes = None
            block.looked_at = set()

    @torch.inference_mode(False)
    def make_masters(self) -> None:
        """Create a master, in the optimizer's dtype, for each trainable parameter that has none.

        That of another machine's parameter is on the meta device: it has no memory, and no value can be read.
        """
        for block in self.trainable:
            for parameter, value in zip(block.tensors, block.values, strict=True):
                if parameter not in self.masters:
                    self.masters[parameter] = self._master(parameter, value)
        if self.master == "split" and not self._is_told_whole:
            self._is_told_whole = True
            tell_kept_whole(self._name, [value for block in self.trainable for value in block.values])

    def _master(self, parameter: torch.Tensor, value: torch.Tensor) -> EngineMaster | EngineSplitMaster:
        if self.master == "split" and can_split(value) and self._has_here(parameter):
            master = EngineSplitMaster(value)
            watch_whole(master, self._tell_whole)
        else:
            master = self._whole_master(parameter, value)
        watch_reads(master, self._reads)
        if self.shards is not None:
            refuse_reads(master)
        return master

    def _has_here(self, parameter: torch.Tensor) -> bool:
        """Whether this machine has the parameter's master."""
        return self.shards is None or self.shards.owns(parameter)

    def _whole_master(self, parameter: torch.Tensor, value: torch.Tensor) -> EngineMaster:
        dtype = self.optim_dtype or parameter.dtype
        return EngineMaster(
            value.to(dtype, copy=True).contiguous()
            if self._has_here(parameter)
            else torch.empty(value.shape, dtype=dtype, device="meta")
        )

    def trains_halves(self) -> bool:
        """Whether any trained parameter has, or will get, a master in halves.

        Of several machines all say the same, also where one has made its own masters whole.
        """
        return self.master == "split" and any(
            is_split(self.masters[tensor]) if tensor in self.masters and self.shards is None else can_split(value)
            for block in self.trainable
            for tensor, value in zip(block.tensors, block.values, strict=True)
        )

    def may_be_behind(self) -> bool:
        """Whether it may get the second blocks that masters in halves need where calls read older weights."""
        has_memory = all(block.memory is not None for block in self.trainable)
        return self.trains_halves() and self.double_buffer is not False and has_memory

    def place_halves(self, *, behind: bool) -> None:
        """Move upper halves, whose values do not count now, into the weights, or into those to be swapped in."""
        for block in self.trainable:
            values = block.back_values if behind and block.back is not None else block.values
            for tensor, value in zip(block.tensors, values, strict=True):
                master = self.masters.get(tensor)
                if master is not None and is_split(master):
                    master.move_to(value)

    def has_results_apart(self) -> bool:
        """Whether masters may have results that weights have not: in halves without second blocks they are one."""
        return not self.trains_halves() or all(block.back is not None for block in self.trainable)

    def set_master(self, parameter: torch.Tensor) -> None:
        """Set a parameter's master, if it has one, to its weight."""
        if (master := self.masters.get(parameter)) is None:
            return
        weight = parameter.detach()
        if is_split(master) and can_split(weight):
            master.start_from(weight)
        else:
            with torch.no_grad():
                master.copy_(weight)

    @torch.inference_mode(False)
    def make_backs(self) -> None:
        """Create missing second blocks for trainable blocks, if `double_buffer`."""
        # Masters in halves need none before the first asynchronous step.
        assert self.double_buffer is not None or self.master == "split"
        for block in self.trainable if self.double_buffer else ():
            if block.memory is not None and block.back is None:
                block.make_back(self.backend)
                for value, back in zip(block.values, block.back_values, strict=True):
                    self._places[back.data_ptr()] = value.data_ptr()

    def first_trainable(self) -> int:
        """The lowest layer that is trained; the number of layers if none is."""
        return next((layer.index for layer in self.layers if layer.trainable), len(self.layers))

"""A model's state on the host: its layers with their blocks, and the master weights."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, MutableMapping, Sequence, Set
from dataclasses import replace

import torch
from rp_errors import RoundPipeError
from rp_optim import Remainders
from rp_transfer import Backend, Turns
from torch.utils.weak import WeakIdKeyDictionary

from rp_state.block import Block
from rp_state.codes.layout import CodedLayout, coded_indices
from rp_state.frozen.store import FrozenStore
from rp_state.grad_attribute.missing import MissingOfMaster, MissingOfParameter
from rp_state.grad_attribute.reads import watch_parameters
from rp_state.halves import TellsWhole, can_split, same_bits, tell_kept_whole
from rp_state.health import Health
from rp_state.layers import Foresee, build_layers
from rp_state.master import (
    EngineMaster,
    EngineSplitMaster,
    is_split,
    published,
    refuse_reads,
    watch_reads,
    watch_whole,
)
from rp_state.memory.passed_memory import PassedMemory, sharing
from rp_state.modules.habits import Habits
from rp_state.modules.seen import SeenModules
from rp_state.options import Coded, HostOptions
from rp_state.publications import Publications
from rp_state.shards import Owners


class ModelState:
    """The host side of one model. The launcher changes it.

    `name`: the model's. `unpublished`: the optimizer has a result that is not published yet. `publications`: is
    told of published blocks. `habits`: what its layers were seen to do. `num_runs`: number of launched runs that
    add gradients; `stepped_runs`: those of them whose gradients a step takes or the user dropped. `health`: what
    failures have left of gradients, steps and
    weights. `shards`: which machine owns which parameter. `is_stepping`: a step function is running; only the
    optimizer's thread uses it. `shows_gradients`: parameters have their ``.grad``, for code outside. `absent`:
    gradients, by parameter, of those that were in a trained block and are in none now. `is_part`: another model is
    stepped together with this one. `is_inside`: a module's own forward calls this model, and sees what it does to
    its inputs. `double_buffer`: whether trained weights have second blocks, from the options or decided later.
    `coded`: see `HostOptions`.
    """

    def __init__(
        self,
        name: str,
        backend: Backend,
        modules: Sequence[torch.nn.Module],
        options: HostOptions,
        foresee: Foresee,
        shards: Owners,
    ) -> None:
        self.name = name
        self.options = options
        self._tell_whole = TellsWhole(name, on_disk=options.disk is not None)
        self._is_told_whole = False
        self.health = Health(name)
        self.shards = shards
        # A checksum of the trained parameters and their owners.
        self.digest = 0
        self.double_buffer = options.double_buffer
        self.backend = backend
        self.modules = tuple(modules)
        self._store = FrozenStore.on(options.frozen) if options.frozen else None
        self.unpublished = False
        self.publications = Publications()
        self.habits = Habits()
        self.masters: dict[torch.Tensor, torch.nn.Parameter] = {}
        # None if they are in memory.
        self.remainders = None if options.disk is None else Remainders(options.disk)
        self.num_runs = 0
        self.stepped_runs = 0
        self.is_stepping = False
        self.shows_gradients = False
        self.absent: MutableMapping[torch.Tensor, torch.Tensor] = WeakIdKeyDictionary()
        self._reads = MissingOfMaster(self)
        self._own_reads = MissingOfParameter(self)
        # Whether a step has used gradients that the step before it had used, and whether that was told.
        self.reuses_gradients = False
        self.is_reuse_told = False
        self.is_unseen_told = False
        self.is_part = False
        self.is_inside = False
        self.build(foresee)

    @torch.inference_mode(False)
    def build(self, foresee: Foresee, kept: Sequence[Block] = ()) -> None:
        """Build all blocks but those `kept` from the current layers; nothing may be running."""
        self.layers = build_layers(self.backend, self.modules, self.options.pin, foresee, kept, self._store)
        self.blocks = tuple(dict.fromkeys(block for layer in self.layers for block in layer.blocks))
        self.trainable = tuple(block for block in self.blocks if block.kind == "trainable")
        self.coded = self.options.coded(self.modules)
        self._has_given = _has_given(self.modules)
        self._divide(self.shards)
        if self.options.steps_in_backward:
            self._share_gradients()
        watch_parameters(self.trainable_tensors(), self._own_reads)
        self._seen = SeenModules(self.modules, _places(kept))

    def refuse_given(self) -> None:
        """Raise `RoundPipeError` if a call is to train weights that are no parameters of the model."""
        if self._has_given:
            raise RoundPipeError(
                f"model {self.name!r} has tensors that require grad in the place of parameters, as "
                "torch.func.functional_call puts there for a call: devices would not return their gradients. Call "
                "it with values, that is under torch.no_grad() or with detached tensors, or differentiate through "
                "a model that is not wrapped"
            )

    def _share_gradients(self) -> None:
        for blocks in sharing(self.trainable):
            place = PassedMemory(self.backend, blocks[0].layout)
            for block in blocks:
                block.gradient.share(place)

    def _divide(self, shards: Owners) -> None:
        shards.assign([block.tensors for block in self.trainable])
        for block in self.trainable:
            block.segments = shards.segments(block.layout, block.tensors)
        self.digest = zlib.crc32(
            repr([(*block.users, *block.segments, block.layout) for block in self.trainable]).encode()
        )

    @property
    def version(self) -> int:
        """See `Health`."""
        return self.health.version

    def changed(self) -> bool:
        """Return whether modules, parameters or buffers have changed since `build`.

        They were added, replaced or moved then. Also walks the modules, for `note_flags` and `note_attributes`.
        """
        return self._seen.have_changed(self.modules)

    @property
    def flags(self) -> tuple[tuple[bool, ...], ...]:
        """The training flags of each layer's modules, when they were last noted."""
        return self._seen.flags

    def frozen(self) -> list[tuple[Block, int]]:
        """Return the parameters in trainable blocks that do not require grad now, each as block and index."""
        return [
            (block, index)
            for block in self.trainable
            for index, tensor in enumerate(block.tensors)
            if isinstance(tensor, torch.nn.Parameter) and not tensor.requires_grad
        ]

    def unfrozen(self) -> set[Block]:
        """Return the blocks of other kinds that hold tensors which require grad now."""
        return {
            block
            for block in self.blocks
            if block.kind != "trainable" and any(tensor.requires_grad for tensor in block.tensors)
        }

    def written_outside(self, *, samples: bool = False) -> list[torch.Tensor]:
        """Return the trainable parameters that code outside the engine has written since the last such call.

        `samples`: see `Block.changed_outside`.
        """
        return [block.tensors[i] for block in self.trainable for i in block.changed_outside(samples=samples)]

    def is_written_unseen(self) -> bool:
        """Return whether code outside the engine was found to write weights past their version counters."""
        return any(block.is_written_unseen for block in self.trainable)

    def has_backs(self) -> bool:
        """Return whether all trained weights have second blocks."""
        return all(block.has_back for block in self.trainable)

    def settle_written(self, *, samples: bool = False) -> list[torch.Tensor]:
        """Let results take the place of what code outside the engine has written; return such parameters.

        `samples`: see `Block.changed_outside`.
        """
        found: list[torch.Tensor] = []
        for block in self.trainable:
            block.changed_outside(samples=samples)
            if written := sorted(block.written()):
                found += [block.tensors[index] for index in written]
                block.settle()
        return found

    def moved_outside(self) -> list[torch.Tensor]:
        """Return the trainable parameters that were moved to other memory since `build`."""
        return [
            tensor
            for block in self.trainable
            for tensor, value in zip(block.tensors, block.values, strict=True)
            if tensor.data_ptr() != value.data_ptr()
        ]

    def rebuild(self, foresee: Foresee, kept: Sequence[Block] = ()) -> None:
        """Build again, except for the blocks that are `kept`; keep all gradients, some of them in `absent`."""
        held = {
            tensor: block.gradient.view(index).clone()
            for block in self.trainable
            if not self.options.steps_in_backward and block not in kept
            for index, tensor in enumerate(block.tensors)
            if index in block.gradient.written
        }
        self.absent.update(held)
        trained = set(self.trainable_tensors())
        self.build(foresee, kept)
        self._move_halves(kept)
        self._take_over_unfrozen(trained)
        for block in self.trainable:
            for index in [i for i, tensor in enumerate(block.tensors) if tensor in self.absent]:
                block.gradient.put(index, self.absent.pop(block.tensors[index]))

    def _move_halves(self, kept: Sequence[Block]) -> None:
        """Move upper halves from the old blocks into the new ones, or to separate memory where there is none."""
        staying = {tensor for block in kept for tensor in block.tensors}
        places = {
            tensor: value
            for block in self.trainable
            for tensor, value in zip(block.tensors, block.values, strict=True)
        }
        for tensor, master in self.masters.items():
            if is_split(master) and tensor not in staying:
                upper = master.upper
                is_same = tensor in places and can_split(places[tensor]) and same_bits(upper, places[tensor])
                master.move_to(places[tensor] if is_same else upper.clone())

    def _take_over_unfrozen(self, trained: Set[torch.Tensor]) -> None:
        """Set masters from weights that were written while frozen. `trained`: parameters that were not frozen."""
        for block in self.trainable:
            for tensor, value in zip(block.tensors, block.values, strict=True):
                if tensor in self.masters and tensor not in trained and self._is_another(tensor, value):
                    self.set_master(tensor)

    def _is_another(self, parameter: torch.Tensor, weight: torch.Tensor) -> bool:
        """Whether a weight is not what publication makes of its master."""
        master = self.masters[parameter]
        return not (master.is_meta or torch.equal(published(master, weight.dtype).to(weight.dtype), weight))

    def trainable_tensors(self) -> list[torch.Tensor]:
        """Return all trainable parameters."""
        return [tensor for block in self.trainable for tensor in block.tensors]

    def lines(self) -> list[Turns]:
        """Return the turns of all blocks and gradients."""
        return [block.turns for block in self.blocks] + [block.gradient.turns for block in self.trainable]

    def note_flags(self) -> None:
        """Record the layers' current training flags."""
        if self._seen.note_flags():
            self._forget_habits()

    def note_attributes(self) -> bool:
        """Record the modules' plain attributes, and which tensors require grad; return whether one has changed."""
        has_changed = self._seen.note_attributes()
        if has_changed:
            self._forget_habits()
        return has_changed

    def _forget_habits(self) -> None:
        # In another mode a layer may draw random numbers and write buffers that it did not before.
        self.habits = Habits()
        for block in self.blocks:
            block.writes = None
            block.looked_at = set()

    @torch.inference_mode(False)
    def make_masters(self) -> None:
        """Create a master, in the optimizer's dtype, for each trainable parameter that has none.

        The master of another machine's parameter is on the meta device, without memory or values.
        """
        for block in self.trainable:
            for parameter, value in zip(block.tensors, block.values, strict=True):
                if parameter not in self.masters:
                    self.masters[parameter] = self._master(parameter, value)
        if self.options.master == "split" and not self._is_told_whole:
            self._is_told_whole = True
            tell_kept_whole(self.name, [value for block in self.trainable for value in block.values])

    def _master(self, parameter: torch.Tensor, value: torch.Tensor) -> EngineMaster | EngineSplitMaster:
        if self.options.master == "split" and can_split(value) and self.shards.owns(parameter):
            master = EngineSplitMaster(value, remainders=self.remainders)
            watch_whole(master, self._tell_whole)
        else:
            master = self._whole_master(parameter, value)
        watch_reads(master, self._reads)
        if self.shards.is_divided:
            refuse_reads(master)
        return master

    def _whole_master(self, parameter: torch.Tensor, value: torch.Tensor) -> EngineMaster:
        dtype = self.options.optim_dtype or parameter.dtype
        return EngineMaster(
            value.to(dtype, copy=True).contiguous()
            if self.shards.owns(parameter)
            else torch.empty(value.shape, dtype=dtype, device="meta")
        )

    def trains_halves(self) -> bool:
        """Return whether any trained parameter has, or will get, a master in halves.

        The same on all machines, even if one of them has made its masters whole.
        """
        return self.options.master == "split" and any(
            is_split(self.masters[tensor])
            if tensor in self.masters and not self.shards.is_divided
            else can_split(value)
            for block in self.trainable
            for tensor, value in zip(block.tensors, block.values, strict=True)
        )

    def may_be_behind(self) -> bool:
        """Return whether it may get second blocks, which masters in halves need if calls read older weights."""
        has_memory = all(block.host.is_one_piece for block in self.trainable)
        return self.trains_halves() and self.double_buffer is not False and has_memory

    def place_halves(self, *, behind: bool) -> None:
        """Move upper halves, without their values, into the weights or, if `behind`, the second blocks."""
        for block in self.trainable:
            place = block.results if behind else block.host
            for tensor, value in zip(block.tensors, place.values, strict=True):
                if tensor in self.masters and is_split(master := self.masters[tensor]):
                    master.move_to(value)

    def has_results_apart(self) -> bool:
        """Return whether masters may be newer than weights; halves without second blocks share their memory."""
        return not self.trains_halves() or self.has_backs()

    def set_master(self, parameter: torch.Tensor) -> None:
        """Set a parameter's master, if it has one, to its weight."""
        if parameter not in self.masters:
            return
        master, weight = self.masters[parameter], parameter.detach()
        if is_split(master) and can_split(weight):
            master.start_from(weight)
        else:
            with torch.no_grad():
                master.copy_(weight)

    @torch.inference_mode(False)
    def make_backs(self) -> None:
        """Create missing second blocks for trainable blocks, if `double_buffer`."""
        # Masters in halves need none before the first asynchronous step.
        assert self.double_buffer is not None or self.options.master == "split"
        for block in self.trainable if self.double_buffer else ():
            if block.host.is_one_piece and not block.has_back:
                block.make_back(self.backend)
                self._seen.note_places(_places([block]))

    def note_rewritten(self) -> None:
        """Any of the weights may have been written, past their version counters."""
        for block in self.trainable:
            block.note_changed(range(len(block.tensors)))

    def publish_codes(self, coded: Coded) -> None:
        """Let the codes of other weights be published from now on; those that are there already stay."""
        self.options = replace(self.options, coded=coded)
        self.coded = coded(self.modules)

    @torch.inference_mode(False)
    def make_codes(self) -> None:
        """Allocate the codes that are to be published; nothing may be running."""
        for block in self.trainable:
            indices = coded_indices(block.tensors, self.coded)
            if indices and not block.codes.are_there:
                block.make_codes(self.backend, CodedLayout(block.layout, indices))

    def first_trainable(self) -> int:
        """Return the lowest layer that is trained; the number of layers if none is."""
        return next((layer.index for layer in self.layers if layer.trainable), len(self.layers))


def _has_given(modules: Iterable[torch.nn.Module]) -> bool:
    """Whether a tensor that requires grad, and is no parameter, has the place of one."""
    found = (each for module in modules for each in module.parameters())
    return any(each.requires_grad and not isinstance(each, torch.nn.Parameter) for each in found)  # pyright: ignore[reportUnnecessaryIsInstance] - `functional_call` puts others there


def _places(blocks: Iterable[Block]) -> dict[int, int]:
    """The addresses of tensors in the second blocks of these, each with that in the first."""
    return {
        back.data_ptr(): value.data_ptr()
        for block in blocks
        if block.has_back
        for value, back in zip(block.values, block.results.values, strict=True)
    }

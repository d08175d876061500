"""A block: tensors of one kind and dtype that the same layers use, with the order of access to them."""

from __future__ import annotations

import threading
from collections.abc import Container, Iterable, Sequence

import torch
from rp_optim import write_weights
from rp_transfer import Backend, BlockGroup, Kind, MappedFiles, Piece, Turns

from rp_state.codes.layout import DTYPE, CodedLayout, CodedWeight
from rp_state.codes.published import Codes, NoCodes, PublishedCodes
from rp_state.frozen.source import DiskPart
from rp_state.gradient import Gradient
from rp_state.master import is_split
from rp_state.memory.form import CodedForm, Form, PlainForm
from rp_state.memory.host_tensors import HostTensors, OnePiece, Scattered
from rp_state.modules.sample import NoSample, Sample, SamplesWrites
from rp_state.shards import OwnedSegment

# Of version counters with what they were when the engine looked, which the optimizer's thread compares, too.
_VERSIONS = threading.Lock()


class Block:
    """Tensors of one kind and dtype that the same layers use, and `turns`, the order of access to them.

    `host`: the memory that calls read: one piece, or the tensors' own storages, which `registration` keeps pinned
    if they are registered. `on_disk`: where frozen weights are read for each upload; the tensors are then mapped
    to files. `is_staged`: some of this memory is not pinned, so the host copies it to
    pinned memory for each upload. `writes`: whether a layer was seen to write these buffers; None until one has
    run in this mode. `looked_at`: the layers that were checked for that. `counts_writes`: whether
    torch's version counters have shown a write, which a layer may make in some microbatches only. `is_persistent`:
    whether some of these buffers are in state dicts.

    `results`: the memory that a step writes its result to: a second block, which publication swaps with `host`, or
    `host` itself. `complete`: the parameters whose result is in a second block, as index and master's version at
    that time.
    `is_written_unseen`: whether code outside was found to write some of these weights past their version counters.
    What it has written stays, whatever a step that is under way has computed, until `settle`.
    `codes`: FP8 codes of some of the weights, which may travel in their place. `gradient`: empty unless trained.
    `segments`: which machine owns which part. `additions`: how often the last microbatch of any task added to each
    gradient; 0 if there was none. `leaves_early`: whether its gradients may leave before a task's end.
    """

    def __init__(
        self,
        backend: Backend,
        group: BlockGroup,
        files: MappedFiles,
        memory: torch.Tensor | None = None,
        registration: object = None,
        on_disk: Sequence[DiskPart] = (),
    ) -> None:
        self.kind: Kind = group.kind
        self.users = group.users
        self.tensors = group.tensors
        self.layout = group.layout
        self.turns = Turns()
        self.gradient = Gradient(backend, self.layout)
        self.registration = registration
        self.on_disk = tuple(on_disk)
        self.writes: bool | None = None
        self.looked_at: set[int] = set()
        self.counts_writes = False
        self.is_persistent = True
        self.complete: dict[int, int] = {}
        self.codes: Codes = NoCodes()
        self._plain: Form = PlainForm(self.layout)
        self._coded = self._plain
        self.additions = [0] * len(group.tensors)
        self.leaves_early = True
        # Only blocks of trained weights are divided among machines.
        self.segments: tuple[OwnedSegment, ...] = ()
        self.host = self._moved_in(files, memory)
        self.results = self.host
        self.seen = [tensor._version for tensor in self.tensors]
        self.is_written_unseen = False
        # How often the engine has raised their version counters.
        self._own_writes = 0
        self._written: set[int] = set()
        # Those of them that a publication has found.
        self._overtaken: set[int] = set()
        is_trained = group.kind == "trainable"
        self._sample: SamplesWrites = Sample(self.layout, self.host.memories) if is_trained else NoSample()
        self.is_staged = not all(map(backend.is_pinned, self.host_tensors()))

    def _moved_in(self, files: MappedFiles, memory: torch.Tensor | None) -> HostTensors:
        # The engine writes through `.data`, which leaves the parameters' version counters to detect other writers.
        if memory is None:
            return Scattered(self.layout, [tensor.data for tensor in self.tensors])
        self.layout.move_in(memory, self.tensors, files)
        return OnePiece(memory, [tensor.data for tensor in self.tensors])

    @property
    def values(self) -> list[torch.Tensor]:
        """The tensors that calls read, without version counters."""
        return self.host.values

    @property
    def has_back(self) -> bool:
        """Whether results go to a second block."""
        return self.results is not self.host

    @property
    def is_read_only(self) -> bool:
        """Whether no layer is expected to write these buffers: none was seen to, and they are no layer's state.

        Persistent buffers are state, which a layer may begin to write at any time; others are computed from
        something else, such as the frequencies of rotary positions.
        """
        return not self.is_persistent and not self.counts_writes and self.writes is False

    @property
    def is_written_by_layers(self) -> bool:
        """Whether a layer was seen to write these buffers."""
        return bool(self.writes) or self.counts_writes

    @property
    def passes_gradients_on(self) -> bool:
        """Whether another block uses the memory of its gradients once a step has read them."""
        return self.gradient.memory.passes_on

    def __str__(self) -> str:
        """Return the layers that use it, such as ``layer 3`` or ``layers 0, 27``."""
        layers = sorted(self.users)
        return f"layer{'s' if len(layers) > 1 else ''} {', '.join(map(str, layers))}"

    @property
    def nbytes(self) -> int:
        """Bytes on a device, without codes."""
        return self.layout.nbytes

    def form(self, *, coded: bool) -> tuple[int, torch.dtype]:
        """Return the elements and the dtype of its memory on a device; `coded`: with codes in place of weights."""
        form = self._coded if coded else self._plain
        return form.numel, form.dtype

    def _form_of(self, memory: torch.Tensor) -> Form:
        # Memory with codes is bytes, and only weights in bf16 have codes.
        return self._coded if memory.dtype == DTYPE else self._plain

    def pieces(self, target: torch.Tensor) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
        """Pairs (slice of `target`, host tensor) that together copy the block; `target`: one of its forms."""
        return self._form_of(target).pieces(self.host, target)

    def views(self, memory: torch.Tensor) -> Sequence[torch.Tensor | CodedWeight]:
        """View all tensors in memory on a device, of one of its forms; weights with codes there as these."""
        return self._form_of(memory).views(memory)

    def pieces_on_disk(self, target: torch.Tensor) -> Iterable[Piece]:
        """Pairs (slice of `target`, what is read into it), as `pieces`, of a block on disk."""
        return [(target[part.start : part.stop], part.source) for part in self.on_disk]

    def host_tensors(self) -> Sequence[torch.Tensor]:
        """Return the host memory that `pieces` reads."""
        return self.host.memories

    def read_tensors(self) -> Sequence[torch.Tensor]:
        """Return the host memory that uploads read, in any form."""
        return (*self.host.memories, *self.codes.memories)

    def make_back(self, backend: Backend) -> None:
        """Allocate the second block."""
        memory = backend.host_empty((self.layout.numel,), self.layout.dtype)
        self.results = OnePiece(memory, self.layout.storages(memory))
        self.codes.make_back(backend)

    def make_codes(self, backend: Backend, layout: CodedLayout) -> None:
        """Allocate codes of some weights, to be made by `PublishedCodes.renew`; no step may be running."""
        codes = PublishedCodes(backend, layout)
        if self.has_back:
            codes.make_back(backend)
        self.codes, self._coded = codes, CodedForm(codes)

    def begin_results(self) -> None:
        """Forget the results of a step that has failed, before the next one makes some."""
        self.complete = {}
        self.codes.begin()

    def written_tensors(self) -> Sequence[torch.Tensor]:
        """Return the host memory that results are written to."""
        return (*self.results.memories, *self.codes.targets)

    def note_result(self, index: int, version: int) -> None:
        """A result was written where results go: make its codes, if it has some. `version`: its master's."""
        self.codes.make(index, self.results.values[index], version)

    def note_changed(self, indices: Iterable[int]) -> None:
        """Weights that calls read were written, but not by a publication."""
        self.codes.note_changed(indices)

    def publish(self, backend: Backend, masters: Sequence[torch.Tensor]) -> None:
        """Write the masters to the weights or swap in the second block; the caller holds the write turn."""
        self.write(backend, masters)
        self.swap()

    def write(self, backend: Backend, masters: Sequence[torch.Tensor]) -> None:
        """Write the masters that have changed to the second block or, without one, to the weights.

        Masters of other machines are skipped. With a second block the caller needs no turn.
        """
        here = [i for i, master in enumerate(masters) if not master.is_meta]
        # Without a second block a result would take the place of what code outside has written.
        kept = () if self.has_back else self.written()
        stale = [i for i in here if self.complete.get(i) != masters[i]._version and i not in kept]
        targets = self.results.values
        backend.host_touch(write=self.written_tensors(), what="publishing weights")
        write_weights([masters[i] for i in stale], [targets[i] for i in stale])
        for i in stale:
            master, is_there = masters[i], False
            if is_split(master):
                is_there = master.upper.data_ptr() == targets[i].data_ptr()
                master.move_to(targets[i])
            # A step in place has made the codes, too.
            if not (is_there and self.codes.is_made(i, master._version)):
                self.note_result(i, master._version)
        if self.has_back:
            self.complete.update((i, masters[i]._version) for i in stale)

    def swap(self) -> None:
        """Swap in the second block, if there is one; the caller holds the write turn."""
        self.codes.publish(self.results.values)
        with _VERSIONS:
            if self.has_back:
                self._change_places()
            self._sample.take(self.host.memories)

    def gathered(self) -> list[tuple[int, torch.Tensor]]:
        """Return the memory that `write` writes, in pieces (numel,), each with the rank of its owner."""
        return [(segment.owner, part) for segment in self.segments for part in self.results.parts(segment)]

    def _change_places(self) -> None:
        self.complete = {}
        self._overtaken.update(self._unseen())
        self.host, self.results = self.results, self.host
        kept = self._now_written() | self._overtaken
        for index, (tensor, old, new) in enumerate(
            zip(self.tensors, self.results.values, self.values, strict=True)
        ):
            # A parameter that was moved to other memory, as by ``to(dtype)``, keeps that.
            if tensor.data_ptr() == old.data_ptr():
                if index in kept:
                    new.copy_(old)
                tensor.data = new
        self.note_changed(kept)

    def note_written(self, chosen: Container[int]) -> None:
        """Raise the version counters of the tensors with these ids, which graphs may have saved."""
        with _VERSIONS:
            for index, tensor in enumerate(self.tensors):
                if id(tensor) in chosen:
                    torch.autograd.graph.increment_version(tensor)
                    self.seen[index] += 1
                    self._own_writes += 1

    def writes_outside(self) -> int:
        """Return how often code outside the engine has written its tensors, as their version counters show."""
        with _VERSIONS:
            return sum(tensor._version for tensor in self.tensors) - self._own_writes

    def unseen_writes(self) -> set[int]:
        """Return the indices of tensors that code outside has written past their version counters.

        Nothing is noted. Without a second block, no step may be running.
        """
        with _VERSIONS:
            return self._overtaken | self._sampled()

    def changed_outside(self, *, samples: bool = False) -> list[int]:
        """Return the indices of the tensors that code outside the engine has written since the last such call.

        `samples`: also look for writes that version counters do not show, by a few numbers of each tensor. Without
        a second block, no step may be running then.
        """
        with _VERSIONS:
            found = self._overtaken | (self._unseen() if samples else set[int]())
            self._overtaken = set()
            changed = sorted({*self._newly_written(), *found})
            for index in changed:
                self.seen[index] = self.tensors[index]._version
            self._written.update(changed)
        self.note_changed(changed)
        return changed

    def written(self) -> set[int]:
        """Return the indices of the tensors that code outside the engine has written since the last `settle`."""
        with _VERSIONS:
            return self._now_written()

    def settle(self) -> None:
        """Whatever code outside the engine has written so far, results may take its place from now on."""
        self.changed_outside()
        with _VERSIONS:
            self._written.clear()
            self._sample.take(self.host.memories)

    def _unseen(self) -> set[int]:
        """Return the indices of tensors that were written past their version counters, as a sample shows."""
        found = self._sampled()
        self.is_written_unseen |= bool(found)
        return found

    def _sampled(self) -> set[int]:
        return {*self._sample.changed(self.host.memories)} - self._now_written()

    def _now_written(self) -> set[int]:
        return self._written | set(self._newly_written())

    def _newly_written(self) -> list[int]:
        return [i for i, tensor in enumerate(self.tensors) if tensor._version != self.seen[i]]


def in_turn(blocks: Iterable[Block]) -> list[Block]:
    """Sort blocks in the order in which their gradients leave a task: from the last layer to the first.

    Backward completes them in this order, and an optimizer waits for them in it (`rp_optim`). Blocks whose
    gradient memory is passed on come before the others.
    """
    return sorted(blocks, key=lambda block: (not block.passes_gradients_on, -min(block.users)))

"""A block: tensors of one kind and dtype that the same layers use, with the order of access to them."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence

import torch
from rp_optim import write_weights
from rp_transfer import Backend, Group, Kind, MappedFiles, Piece, Turns

from rp_state.codes.layout import DTYPE, CodedLayout, CodedWeight
from rp_state.codes.published import PublishedCodes
from rp_state.frozen.source import DiskPart
from rp_state.gradient import Gradient
from rp_state.master import is_split
from rp_state.modules.sample import Sample
from rp_state.shards import Segment

# Of version counters with what they were when the engine looked, which the optimizer's thread compares, too.
_VERSIONS = threading.Lock()


class Block:
    """Tensors of one kind and dtype that the same layers use, and `turns`, the order of access to them.

    `memory`: one contiguous block (numel,), or None if the tensors stay in their own storages, which
    `registration` keeps pinned if they are registered. `on_disk`: where frozen weights are read for each upload;
    the tensors are then mapped to files. `is_staged`: some of this memory is not pinned, so the host copies it to
    pinned memory for each upload. `writes`: whether a layer was seen to write these buffers; None until one has
    run in this mode. `looked_at`: the layers that were checked for that. `counts_writes`: whether
    torch's version counters have shown a write, which a layer may make in some microbatches only. `is_persistent`:
    whether some of these buffers are in state dicts.

    `back`: a second block or None. A step writes its result there while devices read `memory`; publication swaps
    the two. `complete`: the parameters whose result is in `back`, as index and master's version at that time.
    `is_written_unseen`: whether code outside was found to write some of these weights past their version counters.
    What it has written stays, whatever a step that is under way has computed, until `settle`.
    `codes`: FP8 codes of some of the weights, which may travel in their place; None: it has none.
    `segments`: which machine owns which part. `additions`: how often the last microbatch of any task added to each
    gradient; 0 if there was none. `leaves_early`: whether its gradients may leave before a task's end.
    """

    def __init__(
        self,
        backend: Backend,
        group: Group,
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
        self.gradient = Gradient(backend, self.layout) if group.kind == "trainable" else None
        self.memory = memory
        self.registration = registration
        self.on_disk = tuple(on_disk)
        self.writes: bool | None = None
        self.looked_at: set[int] = set()
        self.counts_writes = False
        self.is_persistent = True
        self.back: torch.Tensor | None = None
        self.back_values: list[torch.Tensor] = []
        self.complete: dict[int, int] = {}
        self.codes: PublishedCodes | None = None
        self.additions = [0] * len(group.tensors)
        self.leaves_early = True
        # Only blocks of trained weights are divided among machines.
        self.segments: tuple[Segment, ...] = ()
        if memory is not None:
            self.layout.move_in(memory, self.tensors, files)
        # The engine writes through `.data`, which leaves the parameters' version counters to detect other writers.
        self.values = [tensor.data for tensor in self.tensors]
        self.seen = [tensor._version for tensor in self.tensors]
        self.is_written_unseen = False
        self._written: set[int] = set()
        # Those of them that a publication has found.
        self._overtaken: set[int] = set()
        self._sample = Sample(self.layout) if group.kind == "trainable" and memory is not None else None
        self._take_sample()
        self.is_staged = not all(map(backend.is_pinned, self.host_tensors()))

    @property
    def is_read_only(self) -> bool:
        """Whether no layer is expected to write these buffers: none was seen to, and they are no layer's state.

        Persistent buffers are state, which a layer may begin to write at any time; others are computed from
        something else, such as the frequencies of rotary positions.
        """
        return not self.is_persistent and not self.counts_writes and self.writes is False

    @property
    def passes_gradients_on(self) -> bool:
        """Whether another block uses the memory of its gradients once a step has read them."""
        return self.gradient is not None and self.gradient.place is not None

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
        if coded and self.codes is not None:
            return self.codes.layout.nbytes, DTYPE
        return self.layout.numel, self.layout.dtype

    def carries_codes(self, memory: torch.Tensor) -> PublishedCodes | None:
        """Return the codes if memory on a device, of one of its forms, has some."""
        return self.codes if self.layout.dtype != DTYPE and memory.dtype == DTYPE else None

    def pieces(self, target: torch.Tensor) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
        """Pairs (slice of `target`, host tensor) that together copy the block; `target`: one of its forms."""
        if (codes := self.carries_codes(target)) is not None:
            yield target[: codes.layout.codes_nbytes], codes.memory
            yield from self._pieces_beside(codes.layout, target)
        elif self.memory is not None:
            yield target, self.memory
        else:
            yield from self._pieces_of(range(len(self.values)), target)

    def _pieces_of(
        self, indices: Iterable[int], target: torch.Tensor
    ) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
        for index in indices:
            span = self.layout.extents[index]
            yield target[span.offset : span.offset + span.numel], self.values[index].view(-1)

    def _pieces_beside(
        self, layout: CodedLayout, target: torch.Tensor
    ) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
        if self.memory is None:
            for index, view in layout.others(target).items():
                yield view.view(-1), self.values[index].view(-1)
            return
        for start, stop, place in layout.rest:
            nbytes = (stop - start) * self.layout.dtype.itemsize
            yield target[place : place + nbytes].view(self.layout.dtype), self.memory[start:stop]

    def views(self, memory: torch.Tensor) -> list[torch.Tensor | CodedWeight]:
        """View all tensors in memory on a device, of one of its forms; weights with codes there as these."""
        if (codes := self.carries_codes(memory)) is None:
            return [*self.layout.views(memory)]
        found = {**codes.layout.weights(memory), **codes.layout.others(memory)}
        return [found[index] for index in range(len(self.tensors))]

    def pieces_on_disk(self, target: torch.Tensor) -> Iterable[Piece]:
        """Pairs (slice of `target`, what is read into it), as `pieces`, of a block on disk."""
        return [(target[part.start : part.stop], part.source) for part in self.on_disk]

    def host_tensors(self) -> Sequence[torch.Tensor]:
        """Return the host memory that `pieces` reads."""
        return self.values if self.memory is None else (self.memory,)

    def read_tensors(self) -> Sequence[torch.Tensor]:
        """Return the host memory that uploads read, in any form."""
        return self.host_tensors() if self.codes is None else (*self.host_tensors(), self.codes.memory)

    def make_back(self, backend: Backend) -> None:
        """Allocate the second block."""
        self.back = backend.host_empty((self.layout.numel,), self.layout.dtype)
        self.back_values = self.layout.storages(self.back)
        if self.codes is not None:
            self.codes.make_back(backend)

    def make_codes(self, backend: Backend, layout: CodedLayout) -> None:
        """Allocate codes of some weights, to be made by `PublishedCodes.renew`; no step may be running."""
        self.codes = PublishedCodes(backend, layout)
        if self.back is not None:
            self.codes.make_back(backend)

    def begin_results(self) -> None:
        """Forget the results of a step that has failed, before the next one makes some."""
        self.complete = {}
        if self.codes is not None:
            self.codes.begin()

    def written_tensors(self) -> Sequence[torch.Tensor]:
        """Return the host memory that results are written to."""
        written = self.host_tensors() if self.back is None else (self.back,)
        return written if self.codes is None else (*written, self.codes.target)

    def note_result(self, index: int, version: int) -> None:
        """A result was written where results go: make its codes, if it has some. `version`: its master's."""
        if self.codes is not None:
            self.codes.make(index, (self.values if self.back is None else self.back_values)[index], version)

    def note_changed(self, indices: Iterable[int]) -> None:
        """Weights that calls read were written, but not by a publication."""
        if self.codes is not None:
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
        kept = self.written() if self.back is None else ()
        stale = [i for i in here if self.complete.get(i) != masters[i]._version and i not in kept]
        targets = self.values if self.back is None else self.back_values
        backend.host_touch(write=self.written_tensors(), what="publishing weights")
        write_weights([masters[i] for i in stale], [targets[i] for i in stale])
        for i in stale:
            master, is_there = masters[i], False
            if is_split(master):
                is_there = master.upper.data_ptr() == targets[i].data_ptr()
                master.move_to(targets[i])
            # A step in place has made the codes, too.
            if not (is_there and self.codes is not None and self.codes.is_made(i, master._version)):
                self.note_result(i, master._version)
        if self.back is not None:
            self.complete.update((i, masters[i]._version) for i in stale)

    def swap(self) -> None:
        """Swap in the second block, if there is one; the caller holds the write turn."""
        if self.codes is not None:
            self.codes.publish(self.values if self.back is None else self.back_values)
        with _VERSIONS:
            if self.back is not None:
                self._change_places()
            self._take_sample()

    def gathered(self) -> list[tuple[int, torch.Tensor]]:
        """Return the memory that `write` writes, in pieces (numel,), each with the rank of its owner."""
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
        self._overtaken.update(self._unseen())
        self.memory, self.back = self.back, self.memory
        self.values, self.back_values = self.back_values, self.values
        kept = self._now_written() | self._overtaken
        for index, (tensor, old, new) in enumerate(zip(self.tensors, self.back_values, self.values, strict=True)):
            # A parameter that was moved to other memory, as by ``to(dtype)``, keeps that.
            if tensor.data_ptr() == old.data_ptr():
                if index in kept:
                    new.copy_(old)
                tensor.data = new
        self.note_changed(kept)

    def note_written(self, chosen: set[int] | None = None) -> None:
        """Raise the version counters of the tensors with these ids, or of all, which graphs may have saved."""
        with _VERSIONS:
            for index, tensor in enumerate(self.tensors):
                if chosen is None or id(tensor) in chosen:
                    torch.autograd.graph.increment_version(tensor)
                    self.seen[index] += 1

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
            self._take_sample()

    def _take_sample(self) -> None:
        if self._sample is not None and self.memory is not None:
            self._sample.take(self.memory)

    def _unseen(self) -> set[int]:
        """Return the indices of tensors that were written past their version counters, as a sample shows."""
        if self._sample is None or self.memory is None:
            return set()
        found = {*self._sample.changed(self.memory)} - self._now_written()
        self.is_written_unseen |= bool(found)
        return found

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

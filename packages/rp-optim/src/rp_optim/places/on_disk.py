"""State on disk: a step takes it block by block, and memory holds a few blocks only."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import torch

from rp_optim.disk.blocks import Blocks
from rp_optim.disk.system import SYSTEM, System
from rp_optim.disk.volume import STALL_S, STRIPE_BYTES, Volume
from rp_optim.errors import DiskError, DiskFull, InvalidOption, InvalidParameter
from rp_optim.kernels.kept import check_kind
from rp_optim.kernels.packed import StateKind
from rp_optim.places.deferred import Deferred
from rp_optim.places.place import IN_MEMORY, Outline, Outlines, State, StatePlace, States, bytes_of

_Item = TypeVar("_Item")

_ON = "disk:"
BLOCK_BYTES = 64 << 20
# Tensors in a block begin at multiples of this, so that vectors of them do not cross cache lines.
_CACHE_LINE = 64
# Blocks in memory beside the largest. With one that is read and one that is written the disk would often wait for
# the step: with six a simulated one is busy for 0.98 of the time, with three 0.93 (0.89 and 0.62 with blocks of
# two stripes).
_AHEAD = 6


@dataclass(frozen=True, slots=True)
class Disk:
    """State on disk, striped over directories; ``"disk:DIR[,DIR...]"`` and ``"8bit disk:DIR"`` for short.

    `kind`: the format, "fp32", "bf16" or "8bit". `block_bytes`: how much state is read and written at once.
    `stripe_bytes`: how much of it lies in one directory before the next. `stall_s`: the most seconds that a disk
    may take for one transfer. `system`: the calls to the operating system.

    >>> Disk("/tmp").directories
    ('/tmp',)

    Raises `InvalidOption` without directories, or for sizes and times that are not positive.
    """

    directories: tuple[str, ...]
    kind: StateKind = "fp32"
    block_bytes: int = BLOCK_BYTES
    stripe_bytes: int = STRIPE_BYTES
    stall_s: float = STALL_S
    system: System = field(default=SYSTEM, repr=False)

    def __init__(
        self,
        *directories: str,
        kind: StateKind = "fp32",
        block_bytes: int = BLOCK_BYTES,
        stripe_bytes: int = STRIPE_BYTES,
        stall_s: float = STALL_S,
        system: System = SYSTEM,
    ) -> None:
        if not directories or not all(directories):
            raise InvalidOption('a disk needs at least one directory, as in "disk:/mnt/nvme"')
        if min(block_bytes, stripe_bytes, stall_s) <= 0:
            raise InvalidOption("block_bytes, stripe_bytes and stall_s of a disk must be positive")
        for name, value in (
            ("directories", directories),
            ("kind", check_kind("a disk", kind)),
            ("block_bytes", block_bytes),
            ("stripe_bytes", stripe_bytes),
            ("stall_s", stall_s),
            ("system", system),
        ):
            object.__setattr__(self, name, value)

    def memory_for(self, sizes: Sequence[int]) -> int:
        """Return the host memory for parameters with so many bytes on this disk; no files are opened.

        >>> Disk("/mnt/nvme").memory_for([1000, 2000])
        3000
        """
        return memory_for(sum(sizes), max(sizes, default=0), self.block_bytes)

    def volume(self) -> Volume:
        """Open new files. Raises `DiskError` if that fails."""
        return Volume(self.directories, system=self.system, stripe_bytes=self.stripe_bytes, stall_s=self.stall_s)


StateOption = StateKind | str | Disk


def read_option(optimizer: str, state: StateOption) -> tuple[str, StatePlace]:
    """Return the format and the place of state that an option names.

    ``"8bit"``: a format, in memory. ``"disk:DIR[,DIR...]"``: fp32, on disk. ``"8bit disk:DIR"`` or a `Disk`: both.

    Raises `InvalidOption` for something else, and `DiskError` for directories in which no files can be opened.
    """
    if isinstance(state, Disk):
        return state.kind, OnDisk(state)
    kind, on, directories = str(state).partition(_ON)
    if not on:
        return kind, IN_MEMORY
    names = [name.strip() for name in directories.split(",")]
    disk = Disk(*names, kind=check_kind(optimizer, kind.strip() or "fp32"))
    return disk.kind, OnDisk(disk)


def memory_for(state_bytes: int, largest_bytes: int, block_bytes: int = BLOCK_BYTES) -> int:
    """Return the host memory for so much state on disk. `largest_bytes`: that of the parameter with most.

    >>> memory_for(64 << 30, 2 << 30) >> 30
    4
    """
    largest = max(largest_bytes, min(block_bytes, state_bytes))
    return min(state_bytes, largest + max(largest, _AHEAD * block_bytes))


@dataclass(slots=True)
class _Home:
    """Where a parameter's state is: its block, and each tensor's offset there. `present`: those with values."""

    block: int
    outline: Outline
    offsets: Mapping[str, int]
    present: set[str] = field(default_factory=set[str])

    def view(self, memory: torch.Tensor, name: str) -> torch.Tensor:
        """Return a tensor of this state in the block's memory."""
        shape, dtype = self.outline[name]
        start = self.offsets[name]
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        return memory[start : start + nbytes].view(dtype).view(shape)


class _Layout:
    """The homes of parameters in blocks of files of their own, which end when nobody references them."""

    def __init__(self, disk: Disk, outlines: Mapping[torch.Tensor, Outline]) -> None:
        self.homes, sizes = _laid_out(outlines, disk.block_bytes)
        memory_bytes = memory_for(sum(sizes), max(sizes), disk.block_bytes)
        self.blocks = Blocks(disk.volume(), sizes if outlines else (), memory_bytes)

    def deferred(self, home: _Home) -> dict[str, Deferred]:
        """Return all tensors of a state, to be read before the next step."""
        return {name: self._deferred(home, name) for name in home.outline if name in home.present}

    def _deferred(self, home: _Home, name: str) -> Deferred:
        shape, dtype = home.outline[name]
        return Deferred(dtype, shape, partial(self._read, home, name, self.blocks.steps))

    def _read(self, home: _Home, name: str, steps: int, start: int, stop: int) -> torch.Tensor:
        if steps != self.blocks.steps:
            raise DiskError(
                f"{name!r} of a deferred state dict is read after a later step, which has changed it on disk; "
                "read it before, or ask for another one"
            )
        memory = self.blocks.take(home.block)
        try:
            return home.view(memory, name).view(-1)[start:stop].clone()
        finally:
            self.blocks.give_back(changed=False)

    def keep(self, state: State, home: _Home) -> None:
        """Move the tensors of a state to the disk."""
        if not home.outline:
            return
        memory = self.blocks.take(home.block)
        try:
            _put(state, home, memory)
        finally:
            self.blocks.give_back(changed=True)


class OnDisk:
    """State in files of a `Disk`: see `StatePlace`. Counters stay in memory.

    A block has the state of parameters that follow each other in the optimizer. The files are opened at once, and
    space is reserved when the parameters are known, before the first step.
    """

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self._layout = _Layout(disk, {})

    @property
    def blocks(self) -> Blocks:
        """The blocks, which count what was read and written."""
        return self._layout.blocks

    @property
    def _homes(self) -> Mapping[torch.Tensor, _Home]:
        return self._layout.homes

    def begin_step(self, states: States, outlines: Outlines) -> None:
        """See `StatePlace`."""
        wanted = outlines()
        if any(not _covers(self._homes.get(parameter), outline) for parameter, outline in wanted.items()):
            self._move(states, wanted)
        self.blocks.begin_step()

    def _move(self, states: States, wanted: Mapping[torch.Tensor, Outline]) -> None:
        """Lay out anew, for more parameters or more tensors of them, and take over what there is.

        After an error the layout is the one before. Parameters that are not in the optimizer now, but have a
        state, as frozen ones, keep it.
        """
        before = self._layout
        before.blocks.drain()
        absent = [parameter for parameter in before.homes if parameter in states and parameter not in wanted]
        outlines = {
            parameter: _joined(before.homes.get(parameter), wanted.get(parameter, {}))
            for parameter in (*wanted, *absent)
        }
        layout = _Layout(self._disk, outlines)
        for parameter, home in layout.homes.items():
            if (there := before.homes.get(parameter)) is not None and there.present:
                layout.keep({name: each.read() for name, each in before.deferred(there).items()}, home)
        self._layout = layout

    def parts(
        self, items: Sequence[_Item], parameter_of: Callable[[_Item], torch.Tensor]
    ) -> Iterable[Sequence[_Item]]:
        """See `StatePlace`."""
        parts: dict[int, list[_Item]] = {}
        for item in items:
            parts.setdefault(self._homes[parameter_of(item)].block, []).append(item)
        return parts.values()

    @contextmanager
    def reach(self, states: States, parameters: Sequence[torch.Tensor]) -> Generator[None]:
        """See `StatePlace`."""
        homes = [self._homes[parameter] for parameter in parameters]
        if not any(home.outline for home in homes):
            yield
            return
        memory = self.blocks.take(homes[0].block)
        for parameter, home in zip(parameters, homes, strict=True):
            states[parameter].update((name, home.view(memory, name)) for name in home.present)
        try:
            yield
        finally:
            try:
                for parameter, home in zip(parameters, homes, strict=True):
                    _put(states[parameter], home, memory)
            finally:
                self.blocks.give_back(changed=True)

    @contextmanager
    def whole(self, states: States) -> Generator[States]:
        """See `StatePlace`."""
        with self._replaced(states, lambda deferred: deferred.read()):
            yield copy(states)

    @contextmanager
    def deferred(self, states: States) -> Generator[States]:
        """See `StatePlace`."""
        with self._replaced(states, lambda deferred: deferred):
            yield copy(states)

    @contextmanager
    def _replaced(self, states: States, told: Callable[[Deferred], torch.Tensor | Deferred]) -> Generator[None]:
        self.blocks.drain()
        # Torch's state dicts have the very dicts of `states`, so others take their places meanwhile.
        own = dict(states)
        try:
            for parameter, home in self._homes.items():
                there = {name: told(deferred) for name, deferred in self._layout.deferred(home).items()}
                if there or parameter in own:
                    states[parameter] = {**own.get(parameter, {}), **there}
            yield
        finally:
            for parameter in self._homes:
                if parameter in own:
                    states[parameter] = own[parameter]
                else:
                    states.pop(parameter, None)

    @contextmanager
    def renewed(self, outlines: Outlines) -> Generator[None]:
        """See `StatePlace`."""
        try:
            self._layout = self._fresh(outlines())
            yield
        except BaseException as error:
            self.blocks.note_torn(f"a state was loaded in part only ({error})")
            raise

    def _fresh(self, outlines: Mapping[torch.Tensor, Outline]) -> _Layout:
        """Return an empty layout, in the space of the one before if there is no other."""
        try:
            return _Layout(self._disk, outlines)
        except DiskFull:
            self._layout = _Layout(self._disk, {})
        return _Layout(self._disk, outlines)

    def keep(self, states: States, parameter: torch.Tensor) -> None:
        """See `StatePlace`."""
        home = self._homes.get(parameter)
        if home is not None and parameter in states:
            self._layout.keep(states[parameter], home)

    def memory_bytes(self, outlines: Outlines) -> int:
        """See `StatePlace`."""
        _, sizes = _laid_out(outlines(), self._disk.block_bytes)
        return memory_for(sum(sizes), max(sizes), self._disk.block_bytes)

    def memory_bytes_now(self) -> int:
        """See `StatePlace`."""
        return self.blocks.memory_bytes


def _put(state: State, home: _Home, memory: torch.Tensor) -> None:
    """Move the tensors of a state into the block's memory."""
    home.present.clear()
    for name in home.outline:
        tensor = state.pop(name, None)
        if tensor is None:
            continue
        there = home.view(memory, name)
        if tensor.shape != there.shape:
            raise InvalidParameter(
                f"the state {name!r} must have the shape {tuple(there.shape)} here, but has {tuple(tensor.shape)} "
                "instead; load the state of the same model"
            )
        if tensor.data_ptr() != there.data_ptr():
            there.copy_(tensor)
        home.present.add(name)


def _covers(home: _Home | None, outline: Outline) -> bool:
    return home is not None and all(home.outline.get(name) == entry for name, entry in outline.items())


def _joined(home: _Home | None, outline: Outline) -> Outline:
    return {**({} if home is None else home.outline), **outline}


def _laid_out(
    outlines: Mapping[torch.Tensor, Outline], block_bytes: int
) -> tuple[dict[torch.Tensor, _Home], list[int]]:
    """Return each parameter's home, and the sizes of blocks: a parameter's state lies in one of them."""
    homes: dict[torch.Tensor, _Home] = {}
    sizes = [0]
    for parameter, outline in outlines.items():
        if sizes[-1] and sizes[-1] + bytes_of(outline) > block_bytes:
            sizes.append(0)
        offsets = dict(_offsets(outline, sizes[-1]))
        homes[parameter] = _Home(len(sizes) - 1, outline, offsets)
        sizes[-1] = max([sizes[-1], *(_end_of(outline, offsets, name) for name in outline)])
    return homes, sizes


def _offsets(outline: Outline, start: int) -> Iterator[tuple[str, int]]:
    for name, (shape, dtype) in outline.items():
        start = -(-start // _CACHE_LINE) * _CACHE_LINE
        yield name, start
        start += torch.Size(shape).numel() * dtype.itemsize


def _end_of(outline: Outline, offsets: Mapping[str, int], name: str) -> int:
    shape, dtype = outline[name]
    return offsets[name] + torch.Size(shape).numel() * dtype.itemsize

"""`FrozenStore`: frozen weights on disk, written once, layer by layer, or left in a checkpoint's files."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import torch
from rp_optim.disk.memory import empty_memory
from rp_optim.disk.system import SYSTEM, System
from rp_optim.disk.volume import STALL_S, Transfer
from rp_transfer import Layout, MappedFiles, give_back_freed

from rp_state.frozen.files import FrozenFile
from rp_state.frozen.mapping import Mapping, Stretch
from rp_state.frozen.places import FilePlaces
from rp_state.frozen.source import DiskPart, parts_of

# How much lies in one directory before the next: one slot of the ring that uploads read into, so all read at once.
STRIPE_BYTES = 16 << 20
_ON = "disk:"


@dataclass(frozen=True, eq=False, slots=True, weakref_slot=True)
class FrozenDisk:
    """Frozen weights on disk, striped over directories; ``"disk:DIR[,DIR...]"`` for short.

    Models that are given the same object share its files.

    `stripe_bytes`: how much lies in one directory before the next. `stall_s`: the most seconds that a disk may
    take for one transfer. `system`: the calls to the operating system.

    >>> FrozenDisk.of("disk:/mnt/a, /mnt/b").directories
    ('/mnt/a', '/mnt/b')

    Raises `ValueError` without directories, or for sizes and times that are not positive.
    """

    directories: tuple[str, ...]
    stripe_bytes: int = STRIPE_BYTES
    stall_s: float = STALL_S
    system: System = field(default=SYSTEM, repr=False)

    def __post_init__(self) -> None:
        if not self.directories or not all(self.directories):
            raise ValueError('a disk needs at least one directory, as in "disk:/mnt/nvme"')
        if self.stripe_bytes < 1 or self.stall_s <= 0:
            raise ValueError(
                f"stripe_bytes and stall_s must be positive, but are {self.stripe_bytes} and {self.stall_s}"
            )

    @classmethod
    def of(cls, option: object) -> FrozenDisk | None:
        """Return what the option `frozen` says; None for ``"memory"``. Raises `ValueError` for anything else."""
        if isinstance(option, FrozenDisk) or option == "memory":
            return option if isinstance(option, FrozenDisk) else None
        if isinstance(option, str) and option.startswith(_ON):
            return cls(tuple(name.strip() for name in option.removeprefix(_ON).split(",")))
        raise ValueError(
            f'frozen must be "memory", "disk:DIR[,DIR...]" or a FrozenDisk, but is {option!r} instead'
        )


class FrozenStore:
    """One file, without a name, in each of several directories; each block is striped over all of them.

    With one directory, weights that lie in files on the same disk, such as those of a checkpoint that transformers
    has mapped, are read where they are.

    Raises `DiskError` for directories in which no file can be opened.
    """

    @classmethod
    def on(cls, disk: FrozenDisk) -> FrozenStore:
        """Return the store of a disk: one for all who have the same object, such as the parts of a model."""
        if (found := _STORES.get(disk)) is None:
            found = _STORES[disk] = cls(disk)
        return found

    def __init__(self, disk: FrozenDisk) -> None:
        self._system = disk.system
        self._files = [FrozenFile.new(each, disk.system, disk.stall_s) for each in disk.directories]
        self._alignment = max(file.alignment for file in self._files)
        self._stripe = max(disk.stripe_bytes // self._alignment, 1) * self._alignment
        # Bytes of each file that are reserved and those that are used.
        self._reserved = self._used = 0
        self._opened: dict[int, FrozenFile] = {}

    def places(self, files: MappedFiles) -> FilePlaces:
        """Return where tensors lie now."""
        beside = self._files[0] if len(self._files) == 1 else None
        return FilePlaces(files, beside, self._opened, self._system)

    def reserve(self, groups: Iterable[Sequence[torch.Tensor]], files: MappedFiles) -> None:
        """Reserve space for those of the tensors that are in no file. Raises `DiskFull` if it is too little."""
        places = self.places(files)
        rests = [[one for one in tensors if places.of(one) is None] for tensors in groups]
        nbytes = sum(self._share(Layout.of(rest)) for rest in rests if rest)
        self._reserve(self._used + nbytes)

    def _reserve(self, nbytes: int) -> None:
        if nbytes > self._reserved:
            for file in self._files:
                file.reserve(nbytes - self._reserved, self._reserved)
            self._reserved = nbytes

    def take_in(self, tensors: Sequence[torch.Tensor], files: MappedFiles) -> tuple[DiskPart, ...]:
        """Write those of the tensors that are in no file, let go of their memory, and return where all are read.

        The tensors, of one dtype, stay the same objects; their values are mapped from then on.

        Raises `DiskError`; the tensors are then as before.
        """
        places = self.places(files)
        rest = [one for one in tensors if places.of(one) is None]
        if rest:
            self._write(rest, files)
            give_back_freed()
            places = self.places(files)
        return parts_of(Layout.of(tensors), tuple(tensors), places)

    def _share(self, layout: Layout) -> int:
        """Bytes of a block in each file."""
        whole = self._whole(layout)
        stripes = -(-whole // self._stripe)
        return whole if stripes == 1 or len(self._files) == 1 else -(-stripes // len(self._files)) * self._stripe

    def _whole(self, layout: Layout) -> int:
        return -(-layout.nbytes // self._alignment) * self._alignment

    def _stretches(self, layout: Layout) -> list[Stretch]:
        """Where a new block goes."""
        whole, count = self._whole(layout), len(self._files)
        step = whole if count == 1 else self._stripe
        return [
            Stretch(
                self._files[index % count], self._used + index // count * step, min(step, whole - index * step)
            )
            for index in range(-(-whole // step))
        ]

    def _write(self, tensors: Sequence[torch.Tensor], files: MappedFiles) -> None:
        layout = Layout.of(tensors)
        self._reserve(self._used + self._share(layout))
        memory, stretches = empty_memory(self._whole(layout)), self._stretches(layout)
        whole = torch.frombuffer(memory, dtype=torch.uint8)[: layout.nbytes].view(layout.dtype)
        with torch.no_grad():
            for view, tensor in zip(layout.views(whole), tensors, strict=True):
                files.copy(view, tensor.detach())
        self._write_all(memoryview(memory), stretches)
        self._used += self._share(layout)
        mapped = Mapping(stretches).tensor(layout.nbytes).view(layout.dtype)
        for tensor, own in zip(tensors, layout.storages(mapped), strict=True):
            tensor.data = own

    def _write_all(self, memory: memoryview, stretches: Sequence[Stretch]) -> None:
        under_way: list[Transfer] = []
        for each in stretches:
            under_way.append(each.file.write(each.offset, memory[: each.nbytes]))
            memory = memory[each.nbytes :]
        for transfer in under_way:
            transfer.wait()
        for file in self._files:
            file.note_complete()


_STORES: WeakKeyDictionary[FrozenDisk, FrozenStore] = WeakKeyDictionary()

"""Graphs of a virtual device: the operations of a body over fixed memory, run again by the race detector's rules.

A replay knows only addresses, as on a GPU. What the body made is poisoned before each replay, memory from before
must still be allocated, and the whole replay is one use of all of it. So a forgotten copy into an input, a missing
wait, and a value that was made in Python fail a plain test. Unseen: what compiled layers do inside, `tolist()`
and NumPy, which read memory by themselves.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch._ops import OpOverload
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from rp_transfer.cpu.counted import uncounted
from rp_transfer.cpu.queued import poison
from rp_transfer.cpu.streams import CpuStream
from rp_transfer.errors import Closed, NotCapturable, Unordered

_Result = TypeVar("_Result")
# Operations whose result has no values yet.
_EMPTY = ("aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty", "aten::new_empty_strided")
_HOST_TAGS = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)


@dataclass(frozen=True, slots=True)
class _TensorRef:
    """A tensor by its memory. `made`: the storage, if the body made it; memory from before is not kept alive."""

    storage: StorageWeakRef
    made: torch.UntypedStorage | None
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def tensor(self) -> torch.Tensor:
        # From a weak reference to memory that was freed torch makes no storage.
        storage: Any = self.made or torch.UntypedStorage._new_with_weak_ptr(self.storage.cdata)  # pyright: ignore
        if storage is None:
            raise Unordered(
                f"a graph uses memory, {self.shape} of {self.dtype}, that was freed after it was captured; keep "
                "what a graph uses until it is closed"
            )
        return torch.empty(0, dtype=self.dtype).set_(storage, self.offset, self.shape, self.strides)  # pyright: ignore


@dataclass(frozen=True, slots=True)
class _Step:
    """One operation. `outputs`: the places of what it made anew. `draws`: where its random numbers belong."""

    operation: OpOverload[Any, Any]
    arguments: list[Any]
    spec: Any
    outputs: list[_TensorRef | None]
    draws: int | None

    def run(self) -> None:
        args, kwargs = tree_unflatten(list(map(_tensor_of, self.arguments)), self.spec)
        found = tree_leaves(self.operation(*args, **kwargs))
        for place, value in zip(self.outputs, found, strict=True):
            if place is not None:
                place.tensor().copy_(value)


@dataclass(eq=False)
class CpuGraphPool:
    """The graphs that share memory, in the order in which they were captured."""

    graphs: list[CpuGraph] = field(default_factory=list["CpuGraph"])

    @property
    def nbytes(self) -> int:
        """The bytes of all that the bodies made; unlike on a GPU, each has memory of its own."""
        return sum(storage.nbytes() for graph in self.graphs for storage in graph.made)


class CpuGraph:
    """The operations of one body. See `rp_transfer.api.Graph`."""

    def __init__(self, stream: CpuStream, pool: CpuGraphPool, log: _Log) -> None:
        self._stream = stream
        self._pool = pool
        self._steps = log.steps
        self._reads, self._writes = list(log.reads), list(log.writes)
        self.made = list(log.made.values())
        self._num_draws = log.num_draws
        self._is_closed = False
        pool.graphs.append(self)
        self.spoil()

    def replay(self, seeds: Sequence[int] = ()) -> None:
        """Run all operations again."""
        if self._is_closed:
            raise Closed("this graph was closed; capture it again")
        if len(seeds) != self._num_draws:
            raise ValueError(f"this graph draws at {self._num_draws} places, but got {len(seeds)} seeds")
        later = self._pool.graphs[self._pool.graphs.index(self) :]
        made = [_bytes_of(storage) for graph in later for storage in graph.made if storage.nbytes()]
        writes = [place.tensor() for place in self._writes]
        self._stream.touch(read=[one.tensor() for one in self._reads], write=[*writes, *made], what="replay")
        for graph in later:
            graph.spoil()
        # Below autograd no version counter moves, as on a GPU.
        below = torch._C._AutoDispatchBelowADInplaceOrView()  # pyright: ignore
        draws = _drawing_from(seeds)
        with uncounted(), torch.no_grad(), below:
            for step in self._steps:
                draws(step.draws, step.run)

    def spoil(self) -> None:
        """Poison all that the body made."""
        if self._stream.group.strict:
            for storage in self.made:
                poison(storage.data_ptr(), storage.nbytes(), torch.uint8)

    def close(self) -> None:
        """Drop the operations and their memory."""
        if not self._is_closed:
            self._is_closed = True
            self._pool.graphs.remove(self)
            self._steps, self.made = [], []


def capture(
    stream: CpuStream, pool: CpuGraphPool, body: Callable[[_Log], _Result], num_draws: int
) -> tuple[_Result, CpuGraph]:
    """Run a body once to see its operations; what it writes to memory from before is set back."""
    log = _Log(num_draws)
    try:
        with log:
            result = body(log)
    except (NotCapturable, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise NotCapturable(f"{type(error).__name__}: {error}") from error
    finally:
        log.set_back()
    return result, CpuGraph(stream, pool, log)


class _Log(TorchDispatchMode):
    """Notes the operations that run under it. See `rp_transfer.api.Capture`."""

    def __init__(self, num_draws: int) -> None:
        super().__init__()  # pyright: ignore[reportUnknownMemberType]
        self.num_draws = num_draws
        self.steps: list[_Step] = []
        # By address, which nothing else can have meanwhile: storages are kept, or belong to the caller.
        self.made: dict[int, torch.UntypedStorage] = {}
        # What the body uses of memory from before it.
        self.reads: dict[_TensorRef, None] = {}
        self.writes: dict[_TensorRef, None] = {}
        self._before: dict[int, tuple[torch.UntypedStorage, bytes]] = {}
        self._draws: int | None = None
        # The generator belongs to the process: what draws nothing leaves it to other threads.
        self._callers: torch.Tensor | None = None

    @contextmanager
    def drawing(self, place: int) -> Generator[None]:
        """Let the operations inside draw random numbers, in replays from the seed of this place."""
        if not 0 <= place < self.num_draws:
            raise ValueError(f"a graph with {self.num_draws} places to draw at has no place {place}")
        before, self._draws = self._draws, place
        try:
            yield
        finally:
            self._draws = before

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operation and note it."""
        del types
        _refuse_host_reads(func)
        leaves, spec = tree_flatten((tuple(args), dict(kwargs or {})))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        for leaf in leaves:
            _check(leaf, func)
        known = [tensor.untyped_storage().data_ptr() for tensor in tensors]
        written = _written(func, args, kwargs or {})
        for tensor in written:
            self._keep_before(tensor)
        state = torch.default_generator.get_state() if torch.Tag.nondeterministic_seeded in func.tags else None
        places = [self._place(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        result = func(*args, **(kwargs or {}))
        outputs = [self._output(value, known) for value in tree_leaves(result)]
        self._note_uses(places, list(map(self._place, written)))
        draws = self._drawn(func, state)
        if written or (any(outputs) and func.name().split(".")[0] not in _EMPTY):
            self.steps.append(_Step(func, places, spec, outputs, draws))
        return result

    def _drawn(self, func: Any, state: torch.Tensor | None) -> int | None:
        if state is None or torch.equal(state, torch.default_generator.get_state()):
            return None
        self._callers = state if self._callers is None else self._callers
        if self._draws is None:
            raise NotCapturable(f"{func} draws random numbers outside of the places that were given for it")
        return self._draws

    def _place(self, tensor: torch.Tensor) -> _TensorRef:
        storage = tensor.untyped_storage()
        made = self.made.get(storage.data_ptr()) if storage.nbytes() else storage
        shape, strides = tuple(tensor.shape), tuple(tensor.stride())
        return _TensorRef(
            StorageWeakRef(storage), made, tensor.dtype, int(tensor.storage_offset()), shape, strides
        )

    def _output(self, value: Any, known: Sequence[int]) -> _TensorRef | None:
        if not isinstance(value, torch.Tensor):
            return None
        _check(value, "an operation")
        storage = value.untyped_storage()
        if storage.data_ptr() in known or not storage.nbytes():
            return None
        self.made[storage.data_ptr()] = storage
        return self._place(value)

    def _note_uses(self, places: Iterable[Any], written: Iterable[_TensorRef]) -> None:
        for uses, some in ((self.reads, places), (self.writes, written)):
            for place in some:
                if isinstance(place, _TensorRef) and place.made is None:
                    uses[place] = None

    # What a body writes to memory from before and draws is undone: on a GPU nothing would have run.

    def _keep_before(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if address not in self.made and address not in self._before:
            self._before[address] = (storage, ctypes.string_at(address, storage.nbytes()))

    def set_back(self) -> None:
        """Set memory from before the capture and the generator back to what they were."""
        if self._callers is not None:
            torch.default_generator.set_state(self._callers)
        for address, (_, content) in self._before.items():
            ctypes.memmove(address, content, len(content))
        self._before.clear()


def _refuse_host_reads(func: Any) -> None:
    if not isinstance(func, OpOverload):
        raise NotCapturable(f"{func} is no plain operation of torch")
    if any(tag in func.tags for tag in _HOST_TAGS):
        raise NotCapturable(f"{func} reads values of the device on the host")
    if func.name() == "aten::lift_fresh":
        raise NotCapturable("a tensor is made of values of Python, which replays would not see change")


def _check(leaf: Any, operation: object) -> None:
    if isinstance(leaf, torch.Generator):
        raise NotCapturable(f"{operation} draws from a generator of its own")
    if not isinstance(leaf, torch.Tensor):
        return
    if type(leaf) not in (torch.Tensor, torch.nn.Parameter) or leaf.layout != torch.strided:
        raise NotCapturable(f"{operation} takes or makes a {type(leaf).__name__} of layout {leaf.layout}")
    if leaf.is_conj() or leaf.is_neg():
        raise NotCapturable(f"{operation} takes or makes a tensor that is conjugated or negated when it is read")


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """The tensors that an operation writes, by its schema."""
    schema = func._schema.arguments
    named = dict(zip((one.name for one in schema), args, strict=False)) | dict(kwargs)
    writing = [one.name for one in schema if one.alias_info and one.alias_info.is_write]
    return [leaf for name in writing for leaf in tree_leaves(named.get(name)) if isinstance(leaf, torch.Tensor)]


def _tensor_of(leaf: Any) -> Any:
    return leaf.tensor() if isinstance(leaf, _TensorRef) else leaf


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(storage)  # pyright: ignore


def _drawing_from(seeds: Sequence[int]) -> Callable[[int | None, Callable[[], None]], None]:
    """Return a function that runs an operation with the generator of a place; the caller's state is restored."""
    states: dict[int, torch.Tensor] = {}

    def run(place: int | None, operation: Callable[[], None]) -> None:
        if place is None:
            # Other threads may draw meanwhile.
            operation()
            return
        callers = torch.default_generator.get_state()
        try:
            if place in states:
                torch.default_generator.set_state(states[place])
            else:
                torch.default_generator.manual_seed(seeds[place])
            operation()
            states[place] = torch.default_generator.get_state()
        finally:
            torch.default_generator.set_state(callers)

    return run

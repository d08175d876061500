"""Call the compiled kernels through ctypes, which releases the GIL while they run."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from rp_optim.kernels.updates import (
    AdamNumbers,
    AdamUpdate,
    Factors,
    LionNumbers,
    LionUpdate,
    Matrices,
    MomentumUpdate,
    ParameterMove,
    SGDNumbers,
    SGDUpdate,
    Small,
    Spot,
)

# Complex numbers are passed as pairs of real ones.
_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.complex64: 0}
NATIVE_DTYPES = frozenset(_TYPES)
_HALVES = 3

_AMSGRAD, _MOMENTUM, _FIRST, _NESTEROV, _STREAM = 1, 2, 4, 8, 16
_BF16_STATE, _8BIT_STATE = 1, 2

# From this many elements on, weights are written past the cache. Fewer may still be cached when they are read
# next.
_STREAM_FROM = 1 << 16

_int64, _double, _pointer = ctypes.c_int64, ctypes.c_double, ctypes.c_void_p


class _Job(ctypes.Structure):
    """`rpo_job` of ``csrc/rp_optim.h``, field by field; an `rpo_array` is two fields."""

    _fields_ = (
        ("count", _int64),
        ("threads", ctypes.c_int32),
        ("flags", ctypes.c_int32),
        ("param", _pointer),
        ("param_type", ctypes.c_int32),
        ("grad", _pointer),
        ("grad_type", ctypes.c_int32),
        ("more", _pointer),
        ("more_type", ctypes.c_int32),
        ("weight", _pointer),
        ("weight_type", ctypes.c_int32),
        ("rest", _pointer),
        ("state", _pointer * 3),
        ("factor", _double),
        ("l2", _double),
        ("shrink", _double),
        ("rate", _double),
        ("beta1", _double),
        ("beta2", _double),
        ("gain1", _double),
        ("gain2", _double),
        ("root", _double),
        ("eps", _double),
        ("packing", ctypes.c_int32),
        ("key", ctypes.c_uint32 * 2),
        ("scales", _pointer * 3),
        ("batch", _int64),
        ("rows", _int64),
        ("cols", _int64),
        ("row", _pointer),
        ("col", _pointer),
        ("row_sums", _pointer),
        ("col_sums", _pointer),
        ("codes", _pointer),
        ("code_scales", _pointer),
        ("result", _double),
    )


def _fields_of(numbers: AdamNumbers | SGDNumbers | LionNumbers | ParameterMove) -> dict[str, float]:
    # dataclasses.asdict makes deep copies, which took a third of the time of a small parameter's update.
    return {name: getattr(numbers, name) for name in numbers.__dataclass_fields__}


def _job(
    spot: Spot,
    state: Sequence[torch.Tensor | None] = (),
    flags: int = 0,
    numbers: dict[str, float] | None = None,
    small: Small | None = None,
) -> _Job:
    return _filled(_Job(**(numbers or {})), spot, state, flags, small)


def _filled(
    job: _Job, spot: Spot, state: Sequence[torch.Tensor | None], flags: int = 0, small: Small | None = None
) -> _Job:
    """Set all fields of a job but its numbers; return it."""
    # Field by field: making a structure of fields by name takes four times as long.
    count, is_halved = spot.count, spot.is_halved
    job.count, job.threads, job.factor = count, torch.get_num_threads(), spot.factor
    # A weight that is also read is in the cache already.
    job.flags = flags | (_STREAM if count >= _STREAM_FROM and spot.weight is not spot.param else 0)
    job.param, job.param_type = _array(spot.param, is_halved)
    job.grad, job.grad_type = _array(spot.grad, is_halved and spot.grad is spot.param)
    if spot.more is not None:
        job.more, job.more_type = _array(spot.more)
    if spot.weight is not None:
        job.weight, job.weight_type = _array(spot.weight, spot.writes_halves)
    if spot.rest is not None:
        job.rest = spot.rest.data_ptr()
    _point(job.state, state)
    if small is not None:
        job.packing = _8BIT_STATE if small.scales else _BF16_STATE
        job.key[:] = small.noise.key
        _point(job.scales, small.scales)
    return job


def _array(tensor: torch.Tensor, is_halved: bool = False) -> tuple[int, int]:
    return tensor.data_ptr(), _HALVES if is_halved else _TYPES[tensor.dtype]


def _point(pointers: ctypes.Array[ctypes.c_void_p], tensors: Sequence[torch.Tensor | None]) -> None:
    for index, tensor in enumerate(tensors):
        if tensor is not None:
            pointers[index] = tensor.data_ptr()


def _matrix_job(spot: Spot, shape: Matrices, factors: Factors, numbers: dict[str, float] | None = None) -> _Job:
    job = _job(spot, numbers=numbers)
    job.eps = factors.least
    job.batch, job.rows, job.cols = shape.batch, shape.rows, shape.cols
    job.row, job.col = factors.row.data_ptr(), factors.col.data_ptr()
    return job


def _adam_jobs(updates: Sequence[AdamUpdate]) -> Iterator[_Job]:
    # Nearly all updates share an object of numbers, whose fields are set once.
    begun = {id(update.numbers): update.numbers for update in updates}
    jobs = {key: _Job(**_fields_of(numbers), **_gains(numbers)) for key, numbers in begun.items()}
    for update in updates:
        job, last = _Job.from_buffer_copy(jobs[id(update.numbers)]), update.max_exp_avg_sq
        state, flags = (update.exp_avg, update.exp_avg_sq, last), 0 if last is None else _AMSGRAD
        yield _filled(job, update.spot, state, flags, update.small)


def _sgd_job(update: SGDUpdate) -> _Job:
    numbers = update.numbers
    flags = 0 if update.buffer is None else _MOMENTUM
    flags |= (_FIRST if numbers.first else 0) | (_NESTEROV if numbers.nesterov else 0)
    fields = {"l2": numbers.l2, "rate": numbers.rate, "beta1": numbers.keep, "gain1": numbers.gain}
    return _job(update.spot, (update.buffer,), flags, fields, update.small)


def _lion_job(update: LionUpdate) -> _Job:
    numbers = _fields_of(update.numbers) | _gains(update.numbers)
    return _job(update.spot, (update.exp_avg,), numbers=numbers, small=update.small)


def _momentum_job(update: MomentumUpdate) -> _Job:
    numbers = {"beta1": update.keep, "gain1": 1 - update.keep}
    flags = _NESTEROV if update.nesterov else 0
    return _job(update.spot, (update.buffer,), flags, numbers, update.small)


def _gains(numbers: AdamNumbers | LionNumbers) -> dict[str, float]:
    return {"gain1": 1 - numbers.beta1, "gain2": 1 - numbers.beta2}


class Library:
    """The shared library of compiled kernels.

    Raises `OSError` if it cannot be loaded, or if the hash of its sources is not `source_hash`.
    """

    def __init__(self, path: Path, source_hash: str) -> None:
        self.path = path
        self._library = ctypes.CDLL(str(path))
        try:
            self._library.rpo_source.restype = ctypes.c_char_p
            self._library.rpo_variant_name.restype = ctypes.c_char_p
            self._library.rpo_job_bytes.restype = _int64
        except AttributeError as error:
            raise OSError(f"{path} is not a library of these kernels: {error}") from error
        if self._library.rpo_source() != source_hash.encode():
            raise OSError(f"{path} was compiled from other sources than these")
        if self._library.rpo_job_bytes() != ctypes.sizeof(_Job):
            raise AssertionError("rpo_job in csrc/rp_optim.h and _Job differ")

    @property
    def openmp(self) -> bool:
        """Whether the library was compiled with OpenMP, and so divides work among threads."""
        return bool(self._library.rpo_has_openmp())

    def variants(self) -> dict[str, int]:
        """Return the name and number of each variant that this processor can run, the fastest first."""
        return {name: number for number, name in enumerate(self._names()) if name}

    def _names(self) -> Iterator[str]:
        number = 0
        while (name := self._library.rpo_variant_name(number)) is not None:
            yield name.decode()
            number += 1

    def call(self, name: str, variant: int, jobs: Sequence[_Job]) -> list[float]:
        """Run jobs of one kind; return each job's sum (zero for kinds without one).

        Raises `MemoryError` if there is no memory for partial sums.
        """
        row = (_Job * len(jobs))(*jobs)
        if any(job.count for job in jobs) and self._library[f"rpo_{name}"](variant, row, _int64(len(jobs))) != 0:
            raise MemoryError(f"no memory for the sums of {name} over {sum(job.count for job in jobs)} elements")
        return [job.result for job in row]


class NativeKernel:
    """One variant of the library, as a `Kernel`."""

    def __init__(self, library: Library, name: str) -> None:
        self._library = library
        self._name = name
        self._variant = library.variants()[name]

    @property
    def name(self) -> str:
        """The instruction set that the variant was compiled for."""
        return self._name

    def _call(self, name: str, *jobs: _Job) -> list[float]:
        return self._library.call(name, self._variant, jobs)

    def adam(self, updates: Sequence[AdamUpdate]) -> None:
        """See `Kernel.adam`."""
        self._call("adam", *_adam_jobs(updates))

    def sgd(self, updates: Sequence[SGDUpdate]) -> None:
        """See `Kernel.sgd`."""
        self._call("sgd", *map(_sgd_job, updates))

    def lion(self, updates: Sequence[LionUpdate]) -> None:
        """See `Kernel.lion`."""
        self._call("lion", *map(_lion_job, updates))

    def add_to_pair(self, spot: Spot) -> None:
        """See `Kernel.add_to_pair`."""
        self._call("add_to_pair", _job(spot))

    def squares(self, spots: Sequence[Spot]) -> list[float]:
        """See `Kernel.squares`."""
        return self._call("squares", *map(_job, spots))

    def matrix_squares(self, spot: Spot, shape: Matrices) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Kernel.matrix_squares`."""
        rows = torch.zeros(shape.batch * shape.rows, dtype=torch.float64, device="cpu")
        cols = torch.zeros(shape.batch * shape.cols, dtype=torch.float64, device="cpu")
        job = _matrix_job(spot, shape, Factors(rows, cols, 0.0))
        job.row_sums, job.col_sums = rows.data_ptr(), cols.data_ptr()
        self._call("matrix_squares", job)
        return rows, cols

    def matrix_norm(self, spot: Spot, shape: Matrices, factors: Factors) -> float:
        """See `Kernel.matrix_norm`."""
        return self._call("matrix_norm", _matrix_job(spot, shape, factors))[0]

    def matrix_apply(self, spot: Spot, shape: Matrices, factors: Factors, move: ParameterMove) -> None:
        """See `Kernel.matrix_apply`."""
        self._call("matrix_apply", _matrix_job(spot, shape, factors, _fields_of(move)))

    def vector_variance(self, spot: Spot, variance: torch.Tensor, gain: float, least: float) -> float:
        """See `Kernel.vector_variance`."""
        numbers = {"gain2": gain, "beta2": 1 - gain, "eps": least}
        return self._call("vector_variance", _job(spot, (variance,), numbers=numbers))[0]

    def vector_apply(self, spot: Spot, variance: torch.Tensor, least: float, move: ParameterMove) -> None:
        """See `Kernel.vector_apply`."""
        self._call("vector_apply", _job(spot, (variance,), numbers={"eps": least} | _fields_of(move)))

    def momentum(self, update: MomentumUpdate) -> None:
        """See `Kernel.momentum`."""
        self._call("momentum", _momentum_job(update))

    def move(self, spot: Spot, move: ParameterMove) -> None:
        """See `Kernel.move`."""
        self._call("move", _job(spot, numbers=_fields_of(move)))

    def to_weight(self, spots: Sequence[Spot]) -> None:
        """See `Kernel.to_weight`."""
        self._call("to_weight", *map(_job, spots))

    def code_rows(self, weight: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> None:
        """See `Kernel.code_rows`."""
        job = _job(Spot(weight, weight, None, 1.0))
        job.batch, (job.rows, job.cols) = 1, weight.shape
        job.codes, job.code_scales = codes.data_ptr(), scales.data_ptr()
        self._call("code_rows", job)

    # For benchmarks only: the speed that the memory bandwidth allows.

    def rewrite(self, arrays: Sequence[tuple[Spot, torch.Tensor, torch.Tensor]]) -> None:
        """Read, change and write all of Adam's arrays in place: 32 bytes per parameter."""
        self._call("rewrite", *(_job(spot, moments) for spot, *moments in arrays))

    def traffic(self, arrays: Sequence[tuple[Spot, torch.Tensor, torch.Tensor]]) -> None:
        """Read and write the same memory as an Adam step, 28 bytes per parameter, with almost no arithmetic."""
        self._call("traffic", *(_job(spot, moments) for spot, *moments in arrays))

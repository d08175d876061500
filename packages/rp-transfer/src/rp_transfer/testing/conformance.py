"""The entry points of the conformance suite: random programs, forgotten waits, and single promises."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

from rp_transfer.api import Backend, Device
from rp_transfer.errors import NotConforming, Unordered
from rp_transfer.testing.contract import PROMISES, Promise, closing_is_final
from rp_transfer.testing.hazards import hazards, needed_waits
from rp_transfer.testing.interpreters import Interpreter, Results, in_order
from rp_transfer.testing.programs import Program, without
from rp_transfer.testing.random_programs import random_program
from rp_transfer.testing.timeout import bounded


def run_in_order(program: Program) -> Results:
    """Run the program sequentially; return what the host reads when each step finishes before the next starts.

    >>> from rp_transfer.testing.programs import MemoryRange, Read, Allocate, Write
    >>> import torch
    >>> piece = MemoryRange("h", 0, 2)
    >>> run_in_order(Program(1, torch.int64, (Allocate("h", 2, None), Write(piece, 7), Read(piece))))
    [[7.0, 8.0]]
    """
    return in_order(program)


def run_on(backend: Backend, program: Program, *, unit: int = 1) -> Results:
    """Run the program on a backend, in a new thread; return what the host reads.

    Each of the program's elements becomes `unit` elements. With a million of them, copies take long enough on real
    hardware that a lost wait shows. Do not run programs with a hazard in a `Free` on real hardware: such a program
    may crash the device.

    >>> from rp_transfer.cpu.backend import CpuBackend
    >>> program = random_program(1, devices=1)
    >>> run_on(CpuBackend(1), program) == run_in_order(program)
    True

    Raises what the backend raises, `NotConforming` if it hangs, and `ValueError` if it has too few devices.
    """
    if len(backend.devices) < program.devices:
        raise ValueError(
            f"the program needs {program.devices} devices, but the backend has {len(backend.devices)}; open more"
        )
    return bounded(partial(_run, backend, program, unit))


def _run(backend: Backend, program: Program, unit: int) -> Results:
    machine = Interpreter(backend, program.dtype, unit)
    machine.run(program.steps)
    return machine.results


def check(backend: Backend, seeds: Iterable[int], *, length: int = 24, unit: int = 1) -> None:
    """Check one random program per seed, on all of the backend's devices. `unit`: see `run_on`.

    Raises `NotConforming`, naming the seed and the program.
    """
    for seed in seeds:
        program = random_program(seed, len(backend.devices), length=length)
        check_program(backend, program, title=f"seed {seed}", unit=unit)


def check_program(backend: Backend, program: Program, *, title: str = "this program", unit: int = 1) -> None:
    """Check that a correct program gives the results of a sequential run, and frees all memory.

    Raises `NotConforming`, naming `title` and the program.
    """
    wanted, before = run_in_order(program), _used_bytes(backend)
    try:
        results = run_on(backend, program, unit=unit)
    except Exception as error:
        raise NotConforming(f"{title} is correct but raised {error!r}\n{program}") from error
    if results != wanted:
        raise NotConforming(f"{title} must give {wanted}, but gave {results}\n{program}")
    after = _used_bytes(backend)
    if after != before:
        raise NotConforming(f"{title} must leave {before} bytes in use, but leaves {after}\n{program}")


def _used_bytes(backend: Backend) -> dict[str, int]:
    used = {device.name: device.memory().used_bytes for device in backend.devices}
    return {"host": backend.host_memory().used_bytes, **used}


def check_caught(open_one: Callable[[], Backend], seeds: Iterable[int], *, length: int = 24) -> None:
    """Check that a backend detects forgotten waits: without one a program must raise or give wrong results.

    Args:
        open_one: opens a new backend that checks order; one for each run, since a failed run leaves work behind.
        seeds: one random program each. Every wait that no other step implies is removed in turn.

    Raises `NotConforming`, naming the seed, the wait and the program.
    """
    for seed in seeds:
        _check_caught(open_one, seed, length)


def _check_caught(open_one: Callable[[], Backend], seed: int, length: int) -> None:
    backend = open_one()
    devices = len(backend.devices)
    backend.close()
    program = random_program(seed, devices, length=length)
    wanted = run_in_order(program)
    for index in needed_waits(program):
        if not _is_seen(open_one, without(program, index), wanted):
            left = hazards(without(program, index))[0]
            raise NotConforming(
                f"seed {seed}: without step {index} ({program.steps[index]}) there is {left}, "
                f"but nothing was raised and the results are right\n{program}"
            )


def _is_seen(open_one: Callable[[], Backend], program: Program, wanted: Results) -> bool:
    backend = open_one()
    try:
        return run_on(backend, program) != wanted
    except Unordered:
        return True
    finally:
        backend.close()


def check_promises(backend: Backend, promises: Iterable[Promise] = PROMISES) -> None:
    """Check each promise on every device, each in a new thread.

    Raises `NotConforming`, naming the device, the promise and its docstring.
    """
    for device in backend.devices:
        for promise in promises:
            _check_promise(backend, device, promise)


def _check_promise(backend: Backend, device: Device, promise: Promise) -> None:
    try:
        bounded(partial(_attached, backend, device, promise))
    except Exception as error:
        promised = f"{device.name} breaks {promise.__name__} ({promise.__doc__})"
        raise NotConforming(f"{promised}: {error}") from error


def _attached(backend: Backend, device: Device, promise: Promise) -> None:
    device.attach_thread()
    promise(backend, device)
    device.synchronize()


def check_closing(backend: Backend) -> None:
    """Close the backend, and check that it refuses to allocate and keeps allocated memory intact.

    >>> from rp_transfer.cpu.backend import CpuBackend
    >>> check_closing(CpuBackend(1))
    """
    bounded(partial(closing_is_final, backend))

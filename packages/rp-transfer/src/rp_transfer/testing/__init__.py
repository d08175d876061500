"""A conformance suite that authors of backends run.

It needs torch and the standard library only. These calls, and `check_closing`, run all of it:

>>> from rp_transfer import CpuBackend
>>> backend = CpuBackend(2)
>>> check(backend, range(3))
>>> check_promises(backend)
>>> check_caught(lambda: CpuBackend(2), range(3))
>>> backend.close()

`check` runs random programs of copies, computations, waits and frees, and compares their results with those of a
sequential run. `check_promises` checks the sentences of `rp_transfer.api` one by one, except those about closing.
`check_caught` is for backends that check order: it removes each needed wait in turn, and requires `Unordered` or a
wrong result.

`Recording` wraps a backend and records what its streams ran, and which operations overlapped.
"""

from rp_transfer.errors import NotConforming
from rp_transfer.testing.conformance import (
    check,
    check_caught,
    check_closing,
    check_program,
    check_promises,
    run_in_order,
    run_on,
)
from rp_transfer.testing.hazards import Hazard, hazards, needed_waits
from rp_transfer.testing.interpreters import Results
from rp_transfer.testing.programs import Program, Step, without
from rp_transfer.testing.random_programs import random_program
from rp_transfer.testing.recording import Operation, Recording

__all__ = [
    "Hazard",
    "NotConforming",
    "Operation",
    "Program",
    "Recording",
    "Results",
    "Step",
    "check",
    "check_caught",
    "check_closing",
    "check_program",
    "check_promises",
    "hazards",
    "needed_waits",
    "random_program",
    "run_in_order",
    "run_on",
    "without",
]

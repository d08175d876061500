"""What rp-packing is lent: worker threads that bear Ctrl-C, and what every allocator says when memory is short."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from rp_optim.jobs import Worker
from rp_optim.worker import compute_with
from rp_packing import Services
from rp_transfer import is_out_of_memory


def _run_on_threads(num_threads: int, body: Callable[[], None], skip_the_rest: Callable[[], None]) -> None:
    workers = [Worker(f"roundpipe-packing-{number}", partial(compute_with, 1)) for number in range(num_threads)]
    try:
        for outcome in [worker.submit(body) for worker in workers]:
            outcome.result()
    finally:
        skip_the_rest()
        for worker in workers:
            worker.close()


PACKING_SERVICES = Services(_run_on_threads, is_out_of_memory)

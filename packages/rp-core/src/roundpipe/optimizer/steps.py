"""A step on the optimizer's thread: all models of it take it and publish their results, or none does.

A step reads gradients in place as they arrive (`gradient_loan.py`) and updates the master weights.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager

from rp_sched import Host

from roundpipe.context import OptimizerCtx
from roundpipe.errors import add_note, class_name, in_words
from roundpipe.optimizer.gathering import Gathering
from roundpipe.optimizer.gradient_loan import Loan, abandon, take_back
from roundpipe.optimizer.reduction import Incomplete
from roundpipe.optimizer.shared_step import SharedStep
from roundpipe.optimizer.step_part import Part
from roundpipe.optimizer.watched import tell_reuse
from roundpipe.state.master import note_optimizer
from roundpipe.telemetry.machine import Machine
from roundpipe.telemetry.tracing import OPTIMIZER, SILENT, Tracer


def run_step(
    name: str,
    parts: Sequence[Part],
    step_fn: Callable[[], object],
    tracer: Tracer = SILENT,
    *,
    shared: SharedStep | None = None,
) -> None:
    """Run a step function over the gradients of all parts; publish all results or, if it failed, none."""
    try:
        _publish_before(parts, tracer, shared)
        is_taken = True
        if all(part.state.failed is None for part in parts):
            with tracer.on_host(OPTIMIZER, "step", f"step of {name}"):
                is_taken = _update(name, parts, step_fn, tracer, shared)
        for part in parts if is_taken or shared is None else ():
            part.after.run(tracer)
        for part in parts:
            tell_reuse(part.name, part.state)
    finally:
        if shared is not None:
            shared.settle(tracer)
        for part in parts:
            part.leave()


def _publish_before(parts: Sequence[Part], tracer: Tracer, shared: SharedStep | None) -> None:
    try:
        for part in parts:
            part.before.run(tracer)
    except BaseException as error:
        if shared is not None:
            shared.tell(error)
        for part in parts:
            if part.gathering is not None:
                part.gathering.skip()
        raise


def _update(
    name: str, parts: Sequence[Part], step_fn: Callable[[], object], tracer: Tracer, shared: SharedStep | None
) -> bool:
    """Take the step; return whether there were gradients for it."""
    loans = [loan for part in parts for loan in part.loans(tracer, shared)]
    gatherings = [part.gathering for part in parts if part.gathering is not None]
    try:
        _take(parts, loans, gatherings, step_fn, shared)
    except Incomplete as incomplete:
        _note_incomplete(parts, loans, incomplete, shared)
        abandon(loans)
        _give_up(gatherings)
        if incomplete.cause is not None:
            raise incomplete.cause from None
        return False
    except BaseException as error:
        _note_failed(parts, class_name(error))
        _note_torn(parts, loans, error, in_words(error))
        if shared is not None:
            shared.tell(error)
        abandon(loans)
        _give_up(gatherings)
        add_note(error, f"RoundPipe: in model {name!r}, in the step function, on the optimizer's thread")
        _note_failed(parts, in_words(error))
        _note_reduced(parts, in_words(error), shared)
        raise
    return True


def _take(
    parts: Sequence[Part],
    loans: Sequence[Loan],
    gatherings: Sequence[Gathering],
    step_fn: Callable[[], object],
    shared: SharedStep | None,
) -> None:
    # First: the others expect what this machine owns, also if it fails from here on.
    for gathering in gatherings:
        gathering.expect()
    for loan in loans:
        loan.lend()
    begun = time.perf_counter()
    with OptimizerCtx(), _stepping(parts):
        step_fn()
    _note_speed(parts[0].machine, loans, time.perf_counter() - begun)
    take_back(loans)
    if shared is not None:
        _end(gatherings, loans, shared)


def _end(gatherings: Sequence[Gathering], loans: Sequence[Loan], shared: SharedStep) -> None:
    """All machines have taken the step: the others get the rest of their results."""
    told = shared.end([gathering.changed() for gathering in gatherings], [loan.dropped for loan in loans])
    for number, gathering in enumerate(gatherings):
        gathering.complete([changed[number] for changed in told])


def _give_up(gatherings: Sequence[Gathering]) -> None:
    for gathering in gatherings:
        gathering.give_up()


def _note_incomplete(
    parts: Sequence[Part], loans: Sequence[Loan], incomplete: Incomplete, shared: SharedStep | None
) -> None:
    # The failed call raises its own error. Masters that the step has already updated cannot be restored.
    changed = any(loan.has_changed() for loan in loans)
    if changed if shared is None else shared.has_changed(changed):
        _note_failed(parts, "a call failed while its step was under way")
    _note_torn(parts, loans, incomplete.cause or incomplete, str(incomplete))
    _note_reduced(parts, str(incomplete), shared)


def _note_torn(parts: Sequence[Part], loans: Sequence[Loan], error: BaseException, words: str) -> None:
    """Record of each model whether weights that calls read are of two steps now."""
    for part in parts:
        if any(loan.is_torn() for loan in loans if loan.of(part.state)):
            part.state.torn = words
            note_torn_weights(part.name, error)


def note_torn_weights(name: str, error: BaseException) -> None:
    """Say on an error, once, that it has left some of a model's weights updated and others not."""
    words = (
        f"RoundPipe: the step had begun to update weights of model {name!r} in place, as "
        'master="split" does without second blocks, so they are torn: load a state, or start from a '
        "checkpoint. With double_buffer=True a failed step leaves the weights whole"
    )
    if words not in getattr(error, "__notes__", ()):
        add_note(error, words)


def _note_reduced(parts: Sequence[Part], words: str, shared: SharedStep | None) -> None:
    # The gradients of some blocks may be the sums over machines already.
    for part in parts if shared is not None else ():
        part.note_broken(words)


def _note_speed(machine: Machine, loans: Sequence[Loan], seconds: float) -> None:
    """Tell what a step takes, without its waits. One that left parameters as they are tells nothing of them."""
    numel = sum(loan.block.layout.numel for loan in loans if loan.has_changed())
    machine.note_step(Host().optimizer_bytes * numel, seconds - sum(loan.waited_s for loan in loans))


@contextmanager
def _stepping(parts: Sequence[Part]) -> Generator[None]:
    note_optimizer(steps=False)
    for part in parts:
        part.state.is_stepping = True
    try:
        yield
    finally:
        for part in parts:
            part.state.is_stepping = False


def _note_failed(parts: Sequence[Part], words: str) -> None:
    for part in parts:
        part.state.failed = words

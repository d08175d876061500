"""A step on the optimizer's thread: all models of it take it and publish their results, or none does.

A step reads gradients in place as they arrive (`linked_block.py`) and updates the master weights.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager

from rp_sched import Host
from rp_state.master import note_optimizer, stepping
from rp_state.telling.gradients import tell_reuse
from rp_state.telling.weights import tell_written_in_step
from rp_telemetry.measurements import Measurements
from rp_telemetry.tracing import OPTIMIZER, SILENT, Tracer

from rp_engine.context import OptimizerCtx
from rp_engine.errors import add_note, class_name, in_words
from rp_engine.optimizer.linked_block import LinkedBlock, abandon, unlink_all
from rp_engine.optimizer.model_step import ModelStep
from rp_engine.peers.step import Incomplete, Results, SharedStep


def run_step(
    name: str,
    parts: Sequence[ModelStep],
    step_fn: Callable[[], object],
    shared: SharedStep,
    tracer: Tracer = SILENT,
) -> None:
    """Run a step function over the gradients of all parts; publish all results or, if it failed, none."""
    try:
        _publish_before(parts, tracer, shared)
        is_taken = True
        if all(part.state.health.has_whole_step for part in parts):
            with tracer.on_host(OPTIMIZER, "step", f"step of {name}"):
                is_taken = _update(name, parts, step_fn, tracer, shared)
        for part in parts:
            if not part.is_async:
                tell_written_in_step(part.name, part.state)
        for part in parts if shared.publishes(is_taken=is_taken) else ():
            part.turns.after.run(tracer)
        for part in parts:
            tell_reuse(part.name, part.state)
    finally:
        shared.settle(tracer)
        for part in parts:
            part.state.publications.note_step_over()
        for part in parts:
            part.leave()


def _publish_before(parts: Sequence[ModelStep], tracer: Tracer, shared: SharedStep) -> None:
    try:
        for part in parts:
            part.turns.before.run(tracer)
    except BaseException as error:
        shared.tell(error)
        for part in parts:
            part.results.skip()
        raise


def _update(
    name: str, parts: Sequence[ModelStep], step_fn: Callable[[], object], tracer: Tracer, shared: SharedStep
) -> bool:
    """Take the step; return whether there were gradients for it."""
    linked_blocks = [linked for part in parts for linked in part.linked_blocks(tracer, shared)]
    try:
        _take(parts, linked_blocks, step_fn, shared)
    except Incomplete as incomplete:
        _note_incomplete(parts, linked_blocks, incomplete, shared)
        abandon(linked_blocks)
        _give_up(parts)
        if incomplete.cause is not None:
            raise incomplete.cause from None
        return False
    except BaseException as error:
        _note_failed(parts, class_name(error))
        # Before others are told, which may take as long as a network does: calls come meanwhile.
        _note_failed(parts, in_words(error))
        _note_torn(parts, linked_blocks, error, in_words(error))
        shared.tell(error)
        abandon(linked_blocks)
        _give_up(parts)
        add_note(error, f"RoundPipe: in model {name!r}, in the step function, on the optimizer's thread")
        _note_reduced(parts, in_words(error), shared)
        raise
    return True


def _take(
    parts: Sequence[ModelStep],
    linked_blocks: Sequence[LinkedBlock],
    step_fn: Callable[[], object],
    shared: SharedStep,
) -> None:
    # First: the others expect what this machine owns, also if it fails from here on.
    for part in parts:
        part.results.expect()
    for linked in linked_blocks:
        linked.link()
    begun = time.perf_counter()
    with OptimizerCtx(), _stepping(parts):
        step_fn()
    _note_speed(parts[0].measurements, linked_blocks, time.perf_counter() - begun)
    unlink_all(linked_blocks)
    _end([part.results for part in parts], linked_blocks, shared)


def _end(results: Sequence[Results], linked_blocks: Sequence[LinkedBlock], shared: SharedStep) -> None:
    """All machines have taken the step: the others get the rest of their results."""
    told = shared.end([each.changed() for each in results], [linked.dropped for linked in linked_blocks])
    for number, each in enumerate(results):
        each.complete([changed[number] for changed in told])


def _give_up(parts: Sequence[ModelStep]) -> None:
    for part in parts:
        part.results.give_up()


def _note_incomplete(
    parts: Sequence[ModelStep], linked_blocks: Sequence[LinkedBlock], incomplete: Incomplete, shared: SharedStep
) -> None:
    # The failed call raises its own error. Masters that the step has already updated cannot be restored.
    changed = any(linked.has_changed() for linked in linked_blocks)
    if shared.has_changed(changed):
        _note_failed(parts, "a call failed while its step was under way")
    _note_torn(parts, linked_blocks, incomplete.cause or incomplete, str(incomplete))
    _note_reduced(parts, str(incomplete), shared)


def _note_torn(
    parts: Sequence[ModelStep], linked_blocks: Sequence[LinkedBlock], error: BaseException, words: str
) -> None:
    """Record of each model whether weights that calls read are of two steps now."""
    for part in parts:
        if any(linked.is_torn() for linked in linked_blocks if linked.of(part.state)):
            part.state.health.note_torn(words)
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


def _note_reduced(parts: Sequence[ModelStep], words: str, shared: SharedStep) -> None:
    # The gradients of some blocks may be the sums over machines already.
    for part in parts if shared.sums else ():
        part.note_incomplete(words)


def _note_speed(measurements: Measurements, linked_blocks: Sequence[LinkedBlock], seconds: float) -> None:
    """Tell what a step takes, without its waits. One that left parameters as they are tells nothing of them."""
    numel = sum(linked.block.layout.numel for linked in linked_blocks if linked.has_changed())
    measurements.note_step(
        Host().optimizer_bytes * numel, seconds - sum(linked.waited_s for linked in linked_blocks)
    )


@contextmanager
def _stepping(parts: Sequence[ModelStep]) -> Generator[None]:
    note_optimizer(steps=False)
    for part in parts:
        part.state.is_stepping = True
    try:
        with stepping(parts[0].name):
            yield
    finally:
        for part in parts:
            part.state.is_stepping = False


def _note_failed(parts: Sequence[ModelStep], words: str) -> None:
    for part in parts:
        part.state.health.note_failed_step(words)

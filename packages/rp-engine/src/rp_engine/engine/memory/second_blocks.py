"""Whether a model gets second weight blocks, decided when a step or a checkpoint needs them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rp_state.model_state import ModelState

from rp_engine.engine.memory.memory_check import HostMemoryCheck


def decided(states: Sequence[ModelState]) -> list[bool | None]:
    """Return whether each of these has second blocks; None where nothing is decided."""
    return [state.double_buffer for state in states]


def decide(memory_check: HostMemoryCheck, states: Sequence[ModelState], want: Callable[[], None]) -> None:
    """Have `want` ask for second blocks, and check that training fits with them.

    Raises `HostMemoryShort` if it does not, and what `want` raises; then nothing is decided.
    """
    before = decided(states)
    try:
        want()
        memory_check.check_training(states)
    except BaseException:
        # Synchronous steps may fit still.
        for state, had in zip(states, before, strict=True):
            state.double_buffer = had
        raise


def agree(states: Sequence[ModelState], told: Sequence[Sequence[bool | None]]) -> None:
    """Have second blocks where every machine can. `told`: what is `decided` on each machine.

    Machines may differ in memory, and so in what they have decided by default.
    """
    for state, *has_room in zip(states, *told, strict=True):
        # With masters in halves nothing is decided before the first asynchronous step.
        if None not in has_room:
            state.double_buffer = all(has_room)


def want_for_step(name: str, state: ModelState, *, is_async: bool) -> None:
    """With masters in halves, ask for second blocks before an asynchronous step; a synchronous one needs none.

    Raises `ValueError` if the model cannot have them.
    """
    if not is_async or not state.trains_halves():
        return
    if state.double_buffer is False or not all(block.host.is_one_piece for block in state.trainable):
        raise ValueError(
            f'an asynchronous step of model {name!r} needs second weight blocks with master="split", '
            "since calls still read the weights that it would overwrite, but "
            + (
                "double_buffer is False"
                if state.double_buffer is False
                else f"pin_model is {state.options.pin!r}, which has none"
            )
            + '; take synchronous steps (is_async=False), change that setting, or wrap with master="whole"'
        )
    state.double_buffer = True


def want_for_restoring(state: ModelState, *, is_behind: bool) -> None:
    """Ask for second blocks if halves of masters are loaded whose result calls do not read yet.

    Unless the user wants none. `is_behind`: see `ModelBetweenSteps`.
    """
    if is_behind and state.may_be_behind():
        state.double_buffer = True

"""A step that several machines take together: either all take it, or none publishes it."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from rp_dist import Disagreement
from rp_engine.connecting import Tracer
from rp_engine.errors import RoundPipeError

from rp_machines.group import MachineGroup
from rp_machines.reduction import ReducedBlock, StepReduction


class SharedStep:
    """A step's communication with the other machines; used on the optimizer's thread.

    Gradients are reduced from now on, as they arrive. Once a machine has reported that its step has failed, no
    machine waits for another one in this step. `stepped`: returns which optimizers have stepped in it, and with
    what settings.
    """

    sums: bool = True

    def __init__(
        self, group: MachineGroup, blocks: Sequence[ReducedBlock], stepped: Callable[[], list[str]]
    ) -> None:
        self._stepped = stepped
        self._group = group
        self._reduction = StepReduction(group, blocks)
        self._is_over = False

    def publishes(self, *, is_taken: bool) -> bool:
        """Publish only what all machines have taken."""
        return is_taken

    def share(self, purpose: str, values: Sequence[float | None], /) -> list[float | None]:
        """See `rp_optim.masters.MasterExchange`."""
        from_all: list[list[float | None]] = self._say(purpose, list(values))
        if len({len(each) for each in from_all}) > 1:
            self._is_over = True
            raise Disagreement(
                f"a norm is of {len(values)} parameters on this machine, but of "
                f"{[len(each) for each in from_all]} on all; pass the same "
                "parameters on every machine, as model.optim_parameters() does"
            )
        columns = zip(*from_all, strict=True)
        return [next((value for value in column if value is not None), None) for column in columns]

    def _say(self, kind: str, value: Any = None, *, error: BaseException | None = None) -> list[Any]:
        return self._speak(lambda: self._group.steps.say(kind, value, error=error))

    def _speak(self, speak: Callable[[], list[Any]]) -> list[Any]:
        if self._is_over:
            raise RoundPipeError("this step has failed already, on this machine or on another one")
        try:
            return speak()
        except BaseException:
            self._is_over = True
            raise

    def end(self, changed: object, dropped: Sequence[Sequence[int]]) -> list[Any]:
        """End the step function; return the `changed`, JSON, of each machine: its changes since it has sent.

        `dropped`: for each block, the parameters whose gradients were dropped or set to zero.

        Raises as `Talk.say` does if the step has failed elsewhere, and `rp_dist.Disagreement` if other optimizers
        have stepped there, or other gradients were dropped.
        """
        count = sum(map(len, dropped))
        facts = {
            "what optimizers stepped": self._stepped(),
            "gradients that the step function dropped or set to zero": f"{count}, {_digest(dropped)}",
        }
        try:
            return self._speak(lambda: self._group.steps.agree("ending a step", facts, changed, where="a step"))
        finally:
            self._is_over = True

    def tell(self, error: BaseException) -> None:
        """Report to the other machines that the step has failed here."""
        with suppress(Exception):
            self._say("ending a step", error=error)

    def has_changed(self, here: bool) -> bool:
        """Return whether a step without all of its gradients has changed a master on any machine."""
        try:
            return any(self._say("ending a step", here))
        except Exception:
            # A machine that cannot answer may have changed one.
            return True
        finally:
            self._is_over = True

    def settle(self, tracer: Tracer) -> None:
        """Wait until nothing reads or writes gradients for this step any more."""
        self._reduction.settle(tracer)


def _digest(value: object) -> str:
    return f"{zlib.crc32(repr(value).encode()):08x}"

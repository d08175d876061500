"""One step that several machines take together: all take it, or none publishes it."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from rp_dist import Disagreement

from roundpipe.errors import RoundPipeError
from roundpipe.optimizer.reduction import ReducedBlock, Reduction
from roundpipe.runtime.machines import MachineGroup, check_same
from roundpipe.telemetry.tracing import Tracer


class SharedStep:
    """What a step needs of the other machines; used on the optimizer's thread.

    Gradients are reduced from now on, as they arrive. Once a machine has told that its step has failed, no machine
    waits for another one in this step. `stepped`: which optimizers have stepped in it, and with what settings.
    """

    def __init__(
        self, group: MachineGroup, blocks: Sequence[ReducedBlock], stepped: Callable[[], list[str]]
    ) -> None:
        self._stepped = stepped
        self._group = group
        self._reduction = Reduction(group, blocks)
        self._is_over = False

    def share(self, purpose: str, values: Sequence[float | None], /) -> list[float | None]:
        """See `rp_optim.masters.Share`."""
        told: list[list[float | None]] = self._say(purpose, list(values))
        if len({len(each) for each in told}) > 1:
            self._is_over = True
            raise Disagreement(
                f"a norm is of {len(values)} parameters on this machine, but of {[len(each) for each in told]} on "
                "all; give the same parameters on every machine, as model.optim_parameters() does"
            )
        columns = zip(*told, strict=True)
        return [next((value for value in column if value is not None), None) for column in columns]

    def _say(self, kind: str, value: Any = None, *, error: BaseException | None = None) -> list[Any]:
        if self._is_over:
            raise RoundPipeError("this step has failed already, on this machine or on another one")
        try:
            return self._group.steps.say(kind, value, error=error)
        except BaseException:
            self._is_over = True
            raise

    def end(self, changed: object, dropped: Sequence[Sequence[int]]) -> list[Any]:
        """The step function has ended; returns what each machine has `changed`, JSON, since it was sent.

        `dropped`: of which parameters of each block it has dropped the gradients, or set them to zero.

        Raises as `Talk.say` does if it has failed elsewhere, and `rp_dist.Disagreement` if optimizers have
        stepped otherwise there, or gradients were dropped otherwise.
        """
        count = sum(map(len, dropped))
        facts = {
            "what optimizers stepped": self._stepped(),
            "gradients that the step function dropped or set to zero": f"{count}, {_digest(dropped)}",
        }
        told = self._say("ending a step", [facts, changed])
        self._is_over = True
        check_same("a step", [facts for facts, _ in told])
        return [found for _, found in told]

    def tell(self, error: BaseException) -> None:
        """The step has failed here."""
        with suppress(Exception):
            self._say("ending a step", error=error)

    def has_changed(self, here: bool) -> bool:
        """Whether a step without all of its gradients has changed any master on any machine."""
        try:
            return any(self._say("ending a step", here))
        except Exception:
            # Whoever cannot tell may have.
            return True
        finally:
            self._is_over = True

    def settle(self, tracer: Tracer) -> None:
        """Wait until nothing reads or writes gradients for this step any more."""
        self._reduction.settle(tracer)


def _digest(found: object) -> str:
    return f"{zlib.crc32(repr(found).encode()):08x}"

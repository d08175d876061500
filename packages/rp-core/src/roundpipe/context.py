"""What the code that runs now is doing: whether it is inside an optimizer step."""

from __future__ import annotations

import threading
from types import TracebackType


class _Flags(threading.local):
    optimizer_depth = 0


_FLAGS = _Flags()


class OptimizerCtx:
    """Within it, ``model.parameters()`` gives the optimizer's parameters.

    >>> with OptimizerCtx():
    ...     doing_optimizer()
    True
    """

    def __enter__(self) -> OptimizerCtx:
        _FLAGS.optimizer_depth += 1
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _FLAGS.optimizer_depth -= 1


def doing_optimizer() -> bool:
    """Whether the calling thread is inside an `OptimizerCtx`, as it is in a step function."""
    return _FLAGS.optimizer_depth > 0

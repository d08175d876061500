"""The exceptions that rp_sched raises.

::

    SchedError (ValueError)
    ├── InvalidCost    an invalid cost or limit
    ├── InvalidPlan    a plan that does not cover all layers, or all microbatches, exactly once
    ├── InvalidTask    an invalid task, or text that is not a task
    ├── InvalidOrder   a task list that runs a layer twice, never, or before its inputs exist
    └── Infeasible     no plan is within the limits
"""


class SchedError(ValueError):
    """Base class of all errors in costs, plans and task lists."""


class InvalidCost(SchedError):
    """A cost or a limit is negative, not finite, or contradicts another one."""


class InvalidPlan(SchedError):
    """A plan has a gap, an overlap, an empty stage or a missing tail; the message says where."""


class InvalidTask(SchedError):
    """A task has an unknown kind, an empty range or a negative number."""


class InvalidOrder(SchedError):
    """A task list would run a layer twice, never, or before its inputs exist; the message names the task."""


class Infeasible(SchedError):
    """No plan is within the limits: a layer is too large for a device, or the model for the host.

    >>> error = Infeasible(3, 900, 800)
    >>> error.layer, error.need_bytes, error.limit_bytes
    (3, 900, 800)

    `layer` is None if host memory is too small.
    """

    def __init__(self, layer: int | None, need_bytes: int, limit_bytes: int) -> None:
        super().__init__(layer, need_bytes, limit_bytes)
        self.layer = layer
        self.need_bytes = need_bytes
        self.limit_bytes = limit_bytes

    def __str__(self) -> str:
        if self.layer is None:
            return (
                f"the model needs {self.need_bytes} bytes on the host, but Limits.host_memory_bytes is "
                f"{self.limit_bytes}; use fewer or smaller microbatches or raise the limit"
            )
        return (
            f"layer {self.layer} needs {self.need_bytes} bytes on a device, but Limits.device_memory_bytes is "
            f"{self.limit_bytes}; split the layer, use smaller microbatches or raise the limit"
        )

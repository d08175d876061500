"""What rp_sched raises.

SchedError (a ValueError)
  ├── InvalidCost    a cost or limit that cannot be
  ├── InvalidPlan    a plan that does not cover the model, or the microbatches, exactly once
  ├── InvalidTask    a task that cannot be, or a text that is not one
  ├── InvalidOrder   a task list that runs something twice, never, or before what it needs
  └── Infeasible     no plan fits in the limits
"""


class SchedError(ValueError):
    """Any mistake in costs, plans and task lists; each kind has a class of its own."""


class InvalidCost(SchedError):
    """A cost or a limit is negative, not finite, or contradicts another one."""


class InvalidPlan(SchedError):
    """A plan has a gap, an overlap, an empty stage or a missing tail; the message says where."""


class InvalidTask(SchedError):
    """A task has an unknown kind, an empty range or a negative number."""


class InvalidOrder(SchedError):
    """A task list would run something twice, never, or before what it needs; the message names the task."""


class Infeasible(SchedError):
    """No plan fits: one layer is larger than a device, or the model than the host.

    >>> error = Infeasible(3, 900, 800)
    >>> error.layer, error.need_bytes, error.limit_bytes
    (3, 900, 800)

    `layer` is None where the host is too small.
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
                f"{self.limit_bytes}; take fewer or smaller microbatches or raise the limit"
            )
        return (
            f"layer {self.layer} needs {self.need_bytes} bytes on a device, but Limits.device_memory_bytes is "
            f"{self.limit_bytes}; split the layer, take smaller microbatches or raise the limit"
        )

"""What a task is doing, in words for an error's note."""

from __future__ import annotations

from rp_sched import Task

from rp_engine.execution.call import Call


class TaskActivity:
    """The latest activity of a task.

    `current`: words, layer and microbatch; in the words ``{0}`` is the layer's name, ``{1}`` the microbatch.
    """

    def __init__(self, call: Call, task: Task, device_name: str) -> None:
        self._call = call
        self._task = task
        self._device_name = device_name
        self.current: tuple[str, int, int] | None = None

    def where(self) -> str:
        """Name the activity, its place in the model, and the device."""
        if self.current is None:
            return f"{self._task!r}, on {self._device_name}"
        words, layer, microbatch = self.current
        number = microbatch + self._call.first_microbatch
        return f"{words.format(self._call.where(layer), number)}, on {self._device_name}"

"""A training in which a machine dies, stops or is late at some moment; what it told, and what it left."""

from __future__ import annotations

import faulthandler
import os
import signal
import time
from collections.abc import Callable
from functools import wraps
from typing import Any
from zlib import crc32

import torch
from machine_trainings import adamw, batch, row, square_error, wrapped
from roundpipe import CheckpointManager, RoundPipe, Runtime
from rp_checkpoint.files.writer import FileWriter
from rp_checkpoint.saving.shared import SharedCheckpoint
from rp_dist import Machines
from rp_dist.opening.opening import Opening
from rp_machines.group import MachineGroup
from rp_machines.shared_step import SharedStep
from rp_optim.host import HostOptimizer
from rp_state.block import Block
from torch import nn

STEPS = 5
# The step, from 0, in which the fault happens.
AT = 3
TIMEOUT_S = 3.0
Tell = Callable[[Any], None]

FAULTS: dict[str, Callable[[], None]] = {
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    # Until the test lets it go on.
    "stopped": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    # Its threads run, so that others hear of it.
    "late": lambda: time.sleep(TIMEOUT_S + 0.5),
    "none": lambda: None,
}


class Moment:
    """Where the fault happens, once: when `phase` is reached in step `AT` or later."""

    def __init__(self, phase: str, fault: str, tell: Tell) -> None:
        self._phase = phase
        self._fault = fault
        self._tell = tell
        self.number = 0
        self._is_over = fault == "none"

    def __deepcopy__(self, _: object) -> Moment:
        # Twins of layers share it.
        return self

    def reach(self, phase: str) -> None:
        """The training is there."""
        is_early = self.number < AT and phase != "opening"
        if self._is_over or phase != self._phase or is_early:
            return
        self._is_over = True
        self._tell("now")
        FAULTS[self._fault]()

    def before(self, owner: type, method: str, phase: str) -> None:
        """This method's calls reach a phase."""
        self._hook(owner, method, lambda _: self.reach(phase), lambda: None)

    def after(self, owner: type, method: str, phase: str) -> None:
        """The end of this method's calls reaches a phase."""
        self._hook(owner, method, lambda _: None, lambda: self.reach(phase))

    def _hook(
        self, owner: type, method: str, before: Callable[[Any], object], after: Callable[[], object]
    ) -> None:
        original = getattr(owner, method)

        @wraps(original)
        def hooked(*args: Any, **kwargs: Any) -> Any:
            before(args)
            try:
                return original(*args, **kwargs)
            finally:
                after()

        setattr(owner, method, hooked)

    def saying(self) -> None:
        """What machines tell each other of a checkpoint reaches phases."""
        self._hook(SharedCheckpoint, "say", lambda args: self.reach(f"checkpoint, {args[1]}"), lambda: None)


# Every moment is on the machine that is lost: its hooks, and what is told of them.
PHASES = (
    "opening",
    "forward",
    "backward",
    "reduction",
    "step function",
    "update",
    "end of the step",
    "gathering",
    "publication",
    "between calls",
    "checkpoint, the folder",
    "checkpoint, the contents",
    "checkpoint, writing",
    "checkpoint, the files",
    "checkpoint, the end",
    "closing",
)


def hook(moment: Moment) -> None:
    """Have the engine reach the phases."""
    moment.before(Opening, "groups", "opening")
    moment.after(MachineGroup, "reduce", "reduction")
    moment.after(HostOptimizer, "_update_some", "update")
    moment.before(SharedStep, "end", "end of the step")
    moment.after(MachineGroup, "gather", "gathering")
    moment.after(Block, "swap", "publication")
    moment.before(FileWriter, "write", "checkpoint, writing")
    moment.saying()


class Passes(nn.Module):
    """Reaches phases in forward and backward."""

    def __init__(self, moment: Moment) -> None:
        super().__init__()
        self.moment = moment

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The input."""
        self.moment.reach("forward")
        x = x * 1.0
        if x.requires_grad:
            x.register_hook(lambda _: self.moment.reach("backward"))
        return x


class Training:
    """A model that is saved after each step, and the weights that its calls have read."""

    def __init__(
        self, runtime: Runtime, folder: str, moment: Moment, *, is_async: bool, double_buffer: bool
    ) -> None:
        self.layers = row(dropout=0.2)
        self.layers.insert(1, Passes(moment))
        self.model: RoundPipe = wrapped(runtime, self.layers, double_buffer=double_buffer)
        self.optimizer = adamw(self.model.optim_parameters())
        self.manager = CheckpointManager(folder, keep_last=2)
        self.is_async = is_async
        self._moment = moment
        self.losses: list[float] = []
        self.read: list[int] = []
        # What state dicts had after each step: also its result that calls do not read yet.
        self.results: list[int | str] = []

    def run(self, steps: int) -> int:
        """Go on from the newest checkpoint; return the number of its step."""
        loaded = self.manager.load_latest(self.model, optimizer=self.optimizer)
        first = 0 if loaded is None else loaded.step
        for number in range(first, steps):
            self._moment.number = number
            self._step(number)
            self.manager.save(self.model, step=number + 1, optimizer=self.optimizer, wait=True)
            self.results.append(self.said())
            self._moment.reach("between calls")
        self.model.synchronize()
        self.read.append(self.weights())
        self._moment.reach("closing")
        return first

    def _step(self, number: int) -> None:
        x, y = batch(number)
        loss = self.model.forward_backward((x,), label=y, loss_fn=square_error)
        self.losses.append(float(loss))
        # The next publication is in the step.
        self.read.append(self.weights())

        def step() -> None:
            self._moment.reach("step function")
            self.optimizer.step()
            self.optimizer.zero_grad()

        self.model.step(step, is_async=self.is_async)

    def weights(self) -> int:
        """What tells the weights that calls read from others."""
        return checksum([parameter.detach() for parameter in self.layers.parameters()])

    def said(self) -> int | str:
        """What a state dict has, or why it is refused."""
        try:
            return checksum(list(self.model.state_dict().values()))
        except Exception as error:
            return f"{type(error).__name__}: {error}"


def checksum(tensors: list[torch.Tensor]) -> int:
    """A number that tells these values from others."""
    found = 0
    for tensor in tensors:
        found = crc32(tensor.contiguous().numpy().tobytes(), found)
    return found


def take_part(
    tell: Tell,
    *,
    folder: str,
    phase: str = "",
    fault: str = "none",
    lost: int = -1,
    steps: int = STEPS,
    is_async: bool,
    double_buffer: bool,
) -> None:
    """Train, and tell the losses, the weights and the error that ended it, if any."""
    # A program that hangs says where: not before machines that are busy with other tests have trained.
    faulthandler.dump_traceback_later(150, exit=True)
    moment = Moment(phase, fault if int(os.environ["RANK"]) == lost else "none", tell)
    hook(moment)
    found: dict[str, Any] = {"error": None, "first": None, "left": [], "losses": [], "read": [], "results": []}
    try:
        with (
            Machines.open(connections=1, timeout_s=TIMEOUT_S) as machines,
            Runtime("cpu:1", machines=machines) as runtime,
        ):
            training = Training(runtime, folder, moment, is_async=is_async, double_buffer=double_buffer)
            found |= {"losses": training.losses, "read": training.read, "results": training.results}
            try:
                found["first"] = training.run(steps)
                found["weights"] = [each.tolist() for each in training.layers.parameters()]
            except Exception:
                # What could be read or saved now.
                found["left"] = [training.said(), training.said()]
                raise
    except Exception as error:
        found["error"] = [type(error).__name__, getattr(error, "rank", None), str(error)]
    tell(found)

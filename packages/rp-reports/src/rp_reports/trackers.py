"""Report a training to TensorBoard, Weights & Biases, Trackio or MLflow, through Accelerate's trackers."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any, cast

from rp_trainer.errors import Refused, Unwritable
from rp_trainer.finetuning.files import TRACKERS
from rp_trainer.finetuning.reports import StepFigures

# What must be imported, and what installs it.
_PACKAGES = {
    "tensorboard": ("torch.utils.tensorboard", "tensorboard"),
    "wandb": ("wandb", "wandb"),
    "trackio": ("trackio", "trackio"),
    "mlflow": ("mlflow", "mlflow"),
}
# What is said where one cannot begin, for example because there is no network.
_HINTS = {
    "wandb": "; run `wandb login`, or set WANDB_MODE=offline",
    "mlflow": "; set MLFLOW_TRACKING_URI, or nothing for a file in --output",
}
_PROJECT = "roundpipe"
# By these, torchrun and MPI tell Accelerate of other processes. Only the first one reports.
_OTHERS = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "PMI_SIZE",
    "PMI_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "MV2_COMM_WORLD_SIZE",
)


def check_trackers(kinds: Sequence[str]) -> None:
    """Raise `Refused` for the first kind of report whose package is not installed."""
    for kind in kinds:
        if kind in _PACKAGES:
            _check_installed(kind)


def _check_installed(kind: str) -> None:
    module, package = _PACKAGES[kind]
    try:
        import_module(module)
    except ImportError:
        raise Refused(f"--report {kind} needs {package}: pip install {package}") from None


class Tracked:
    """Sends the same measurements as `Metrics` has to a tracker.

    Args:
        kind: ``tensorboard``, ``wandb``, ``trackio`` or ``mlflow``.
        output: the run's folder. TensorBoard's files are in it, wandb's and, without ``MLFLOW_TRACKING_URI``,
            MLflow's.
        options: told to the tracker, but for TensorBoard, which would show them as a run of their own.
        after: continue the report of a run that is gone on with, after this step.

    ``WANDB_PROJECT``, ``TRACKIO_PROJECT`` and ``MLFLOW_EXPERIMENT_NAME`` name the project. Raises `Refused` if the
    tracker is not installed or cannot begin.
    """

    def __init__(self, kind: str, output: Path, options: Mapping[str, Any], *, after: int | None = None) -> None:
        self._kind, self._output, self._options = kind, output, options
        self._failure: Unwritable | None = None
        self._tracker: Any = None  # Any: Accelerate leaves it untyped
        self._purged = None if after is None else after + 1
        self._run = None if after is None else _known(output).get(kind)
        check_trackers([kind])
        try:
            self._tracker = self._opened()
        except OSError as error:
            raise self._unwritable(error) from error
        except Exception as error:
            raise Refused(f"--report {kind} cannot begin: {error}{_HINTS.get(kind, '')}") from error

    def step(self, figures: StepFigures) -> None:
        """Record one training step."""
        self._log(_scalars(figures), figures.step)

    def evaluating(self, done: int, batches: int) -> None:
        """Record nothing: the loss comes."""

    def held_out(self, step: int, loss: float) -> None:
        """Record the held-out loss after step `step`."""
        self._log({"held_out/loss": loss}, step)

    def follow(self, folder: Path) -> None:
        """Write in this folder from now on; the values of before stay where they are."""
        self._output = folder
        if self._kind == "tensorboard":
            self._tracker = None

    def close(self) -> None:
        """Write the rest. Raises an earlier error again, since the values of that time are lost."""
        if self._tracker is not None:
            with self._noting_failure():
                self._tracker.finish()
        if self._failure is not None:
            raise self._failure

    def _log(self, values: Mapping[str, float], step: int) -> None:
        with self._noting_failure():
            if self._tracker is None:
                self._tracker = self._opened()
            self._tracker.log(dict(values), step=step)

    @contextmanager
    def _noting_failure(self) -> Generator[None]:
        """Raise `Unwritable`; begin anew with the next value: a writer that has failed writes no more."""
        try:
            yield
        # A tracker raises what it likes, such as errors of its network's library.
        except Exception as error:
            self._failure, self._tracker = self._unwritable(error), None
            raise self._failure from error

    def _unwritable(self, error: Exception) -> Unwritable:
        return Unwritable(f"--report {self._kind} of --output {self._output} cannot be written ({error})")

    def _opened(self) -> Any:
        # By name, since Accelerate leaves all of it untyped. Late, since it takes long to import.
        with _alone():
            # Trackers log, which asks for the state of the processes.
            import_module("accelerate.state").PartialState()
        tracker = import_module("accelerate.tracking").LOGGER_TYPE_TO_CLASS[self._kind](
            *self._named(), **self._arguments()
        )
        tracker.main_process_only = False
        tracker.start()
        self._purged = None
        if self._kind != "tensorboard":
            self._note_run(tracker)
            tracker.store_init_configuration(_plain(self._options))
        return tracker

    def _named(self) -> tuple[str, ...]:
        match self._kind:
            case "tensorboard":
                return self._kind, str(self._output)
            case "mlflow":
                return (os.environ.get("MLFLOW_EXPERIMENT_NAME", _PROJECT),)
            case kind:
                return (os.environ.get(f"{kind.upper()}_PROJECT", _PROJECT),)

    def _arguments(self) -> dict[str, Any]:
        name = self._output.absolute().name
        match self._kind:
            case "tensorboard":
                return {} if self._purged is None else {"purge_step": self._purged}
            case "mlflow":
                self._place_mlflow()
                return {"run_name": name, "run_id": self._run}
            case "wandb":
                self._run = self._run or secrets.token_hex(4)
                return {"name": name, "id": self._run, "resume": "allow", "dir": str(self._output)}
            case _:
                self._run = self._run or f"{name}-{secrets.token_hex(4)}"
                return {"name": self._run, "resume": "allow"}

    def _place_mlflow(self) -> None:
        if "MLFLOW_TRACKING_URI" not in os.environ:
            uri = f"sqlite:///{self._output.absolute()}/mlflow.db"
            import_module("mlflow").set_tracking_uri(uri)

    def _note_run(self, tracker: Any) -> None:
        """Keep by which name the tracker knows the run, for when it goes on."""
        if self._kind == "mlflow":
            self._run = tracker.active_run.info.run_id
        known = {**_known(self._output), self._kind: self._run}
        (self._output / TRACKERS).write_text(json.dumps(known) + "\n", encoding="utf-8")


@contextmanager
def _alone() -> Generator[None]:
    """Inside the context nothing tells of other processes."""
    hidden = {name: os.environ.pop(name) for name in _OTHERS if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(hidden)


def _known(output: Path) -> dict[str, str]:
    """Return the names by which trackers know the run of a folder."""
    with suppress(OSError, ValueError):
        read: Any = json.loads((output / TRACKERS).read_bytes())
        if isinstance(read, dict):
            return {str(kind): str(run) for kind, run in cast("dict[Any, Any]", read).items()}
    return {}


def _scalars(figures: StepFigures) -> dict[str, float]:
    """Return the figures by name; of several devices, one for each."""
    scalars: dict[str, float] = {}
    for name, value in asdict(figures).items():
        if isinstance(value, list | tuple):
            each = cast("Sequence[float]", value)
            scalars |= {f"training/{name}_{device}": one for device, one in enumerate(each)}
        elif value is not None and name != "step":
            scalars[f"training/{name}"] = value
    return scalars


def _plain(options: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: value if isinstance(value, str | int | float) else json.dumps(value)
        for name, value in options.items()
        if value is not None
    }

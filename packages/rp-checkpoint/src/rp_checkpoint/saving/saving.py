"""`SavingCheckpoint`: a checkpoint that is being written, on the optimizer's thread and threads of its own."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path

from rp_engine import Runtime
from rp_engine.connecting import ALONE
from rp_engine.errors import RoundPipeError, in_words
from rp_engine.saving import ModelBetweenSteps
from rp_errors import warn_user
from rp_optim.jobs import Outcome, Worker

from rp_checkpoint.errors import CheckpointError, CheckpointWarning
from rp_checkpoint.files.disk import new_folder_for, put_in_place, sync_tree, write_durably
from rp_checkpoint.files.manifest import DESCRIPTION, OWN, Checksum, seal
from rp_checkpoint.files.writer import FileWriter
from rp_checkpoint.model.layout import CheckpointLayout
from rp_checkpoint.model.saveable import Saveable
from rp_checkpoint.saving.shared import SharedCheckpoint
from rp_checkpoint.saving.snapshot import Snapshot
from rp_checkpoint.training import TrainingObjects

_LOG = logging.getLogger(__name__)


class SavingCheckpoint:
    """A checkpoint that is being written, or was. `path`: its folder when complete. `step`: as given.

    Ctrl-C may come between any two instructions of the thread that saves, which only queues the work and waits.
    The optimizer's thread creates the folder and the files, and submits `_finish`, which closes or removes all
    that was made. So nothing is left over, wherever the caller was interrupted.
    """

    def __init__(self, path: Path, step: int) -> None:
        self.path = path
        self.step = step
        # All that is small was read, or could not be, when `_is_refused` tells.
        self._small: Outcome[None] = Outcome(_nothing)
        # The large tensors are in the buffer or on the disk, or could not be read.
        self._taken: Outcome[None] = Outcome(_nothing)
        self._outcome: Outcome[None] = Outcome(self._finish)
        self._runtime: Runtime | None = None
        self._captured: Outcome[None] | None = None
        self._shared = SharedCheckpoint.of(ALONE, path)
        self._snapshot: Snapshot | None = None
        self._layout: CheckpointLayout | None = None
        self._made: Path | None = None
        self._writer: FileWriter | None = None
        self._error: BaseException | None = None
        self._is_refused = False
        self._finisher = Worker("roundpipe-checkpoint")
        self._waited_s = 0.0

    def begin(self, model: Saveable, training: TrainingObjects, buffer_bytes: int, shard_bytes: int) -> None:
        """Queue the checkpoint, and wait until all small values have been read."""
        self._layout = model.checkpoint_layout()
        peers = model.runtime.peers
        # In the order of calls: a machine that saves while others go on training would wait for them forever.
        model.runtime.visit(partial(peers.agree, "saving a checkpoint", dict, None))
        shared = self._shared = SharedCheckpoint.of(peers, self.path)
        self._snapshot = Snapshot(self._layout, training, shared)
        self._runtime = model.runtime
        try:
            most = min(buffer_bytes, model.runtime.host_limit().free_bytes // 2)
            captured = model.whole.capture(partial(self._read, most, shard_bytes), self._note_captured)
        except BaseException as error:
            shared.tell("the folder", error)
            raise
        self._await_small(captured)
        if self._is_refused:
            # What it was given, or the folder.
            self._outcome.result()

    def _await_small(self, captured: Outcome[None]) -> None:
        while not self._small.wait(0.1):
            if captured.done() and not self._small.done():
                # It was cancelled before it began, as where the runtime was closed.
                captured.result()
                break
        snapshot = self._snapshot
        if snapshot is not None and snapshot.has_gradients:
            warn_user(
                "gradients of calls since the last step are not in the checkpoint; save after model.step(...)",
                CheckpointWarning,
            )

    # On the launcher

    def _note_captured(self, captured: Outcome[None]) -> None:
        self._captured = captured

    # On the optimizer's thread

    def _read(self, buffer_bytes: int, shard_bytes: int, capture: Callable[[], ModelBetweenSteps]) -> None:
        phase, snapshot = "the folder", self._snapshot
        assert snapshot is not None
        is_submitted = False
        try:
            self._is_refused = True
            writer = self._create(buffer_bytes)
            phase = "the contents"
            # Behind the writer's threads: at exit, those that were started later end first.
            self._finisher.submit(self._outcome.carry_out)
            is_submitted = True
            snapshot.note_small(capture())
            self._is_refused = False
            self._small.carry_out()
            snapshot.write_large(writer, shard_bytes)
        except BaseException as error:
            self._error = error
            self._shared.tell(phase, error)
        finally:
            self._taken.carry_out()
            if not is_submitted:
                self._outcome.carry_out()
            self._small.carry_out()

    def _create(self, buffer_bytes: int) -> FileWriter:
        """Create the folder, or learn which the first machine has created, and open the writer."""
        shared = self._shared
        if shared.is_first:
            _refuse_taken(self.path)
            self._made = new_folder_for(self.path)
            (self._made / OWN).mkdir()
            assert self._layout is not None
            if self._layout.write_configuration is not None:
                self._layout.write_configuration(self._made)
        self._made, self.path = shared.agree_on_folder(self._made, self.path)
        writer = self._writer = FileWriter(self._made, buffer_bytes)
        writer.start()
        return writer

    # On the finisher's thread

    def _finish(self) -> None:
        self._taken.wait()
        writer, snapshot, layout = self._writer, self._snapshot, self._layout
        assert snapshot is not None
        assert layout is not None
        try:
            sums = {} if writer is None else writer.finish()
            if self._error is not None:
                raise self._error
            assert self._made is not None
            self._end(self._made, layout, snapshot, sums)
        except BaseException as error:
            self._give_up(self._made, "the files", error)
            named = self._error = self._named(error)
            if not self._is_refused:
                _LOG.error("%s", named)
            if named is not error:
                raise named from error
            raise
        finally:
            if writer is not None and writer.waited_s:
                self._waited_s = writer.waited_s
                _LOG.info("the checkpoint %s held up the next step: %.3f s", self.path, writer.waited_s)
            self._writer = self._snapshot = self._layout = None

    def _end(self, made: Path, layout: CheckpointLayout, snapshot: Snapshot, sums: dict[str, Checksum]) -> None:
        shared = self._shared
        if not shared.is_alone:
            # The first machine seals what others have written.
            sync_tree(made)
        from_all = shared.say("the files", {name: asdict(each) for name, each in sums.items()})
        sums = {name: Checksum(**each) for own in from_all for name, each in own.items()}
        if shared.is_first:
            try:
                _write_rest(made, layout, snapshot)
                seal(made, sums)
                put_in_place(made, self.path)
            except BaseException as error:
                self._give_up(made, "the end", error)
                raise
        shared.say("the end")
        shared.is_over = True

    def _give_up(self, made: Path | None, what: str = "", error: BaseException | None = None) -> None:
        """Remove the unfinished folder; report the error to the other machines."""
        if error is not None:
            self._shared.tell(what, error)
        _remove(made)

    def _named(self, error: BaseException) -> BaseException:
        """Return the error to raise: that of a lost machine, if there is one."""
        is_of_machines = self._shared.talk.is_of_machines(error)
        return self._shared.lost or (error if is_of_machines else _in_context(self.path, error))

    # For users

    @property
    def waited_s(self) -> float:
        """Seconds that the full buffer has waited for the disk, for which the next step may have waited, too."""
        return self._waited_s if self._writer is None else self._writer.waited_s

    @property
    def is_first(self) -> bool:
        """Whether this machine has created the folder: the only machine, or the first of several."""
        return self._shared.is_first

    def done(self) -> bool:
        """Return whether it is written, or has failed."""
        return self._outcome.done()

    def is_begun(self) -> bool:
        """Return whether it was queued; what Ctrl-C has interrupted may have been, or not."""
        if self._captured is None and self._runtime is not None:
            # Behind whatever was launched before.
            self._runtime.visit(_nothing)
        return self._captured is not None

    def wait(self, timeout_s: float | None = None) -> Path:
        """Wait until the checkpoint is on the disk; return its folder.

        Raises `CheckpointError` if it could not be written, `TimeoutError` after `timeout_s` seconds.
        """
        self._outcome.result(timeout_s)
        return self.path


def _write_rest(made: Path, layout: CheckpointLayout, snapshot: Snapshot) -> None:
    if layout.write_adapters is not None and snapshot.adapters:
        layout.write_adapters(made, snapshot.adapters)
    if (index := snapshot.description.pop("index", None)) is not None:
        write_durably(made / "model.safetensors.index.json", json.dumps(index, indent=2).encode())
    write_durably(made / DESCRIPTION, json.dumps(snapshot.description, indent=1).encode())


def _in_context(path: Path, error: BaseException) -> BaseException:
    """Return an error that names the checkpoint; errors of the engine stay as they are."""
    if isinstance(error, RoundPipeError) or not isinstance(error, Exception):
        return error
    cause = error.strerror or str(error) if isinstance(error, OSError) else in_words(error)
    return CheckpointError(
        f"the checkpoint {path} could not be written: {cause}; training can go on, and other checkpoints are "
        "unchanged"
    )


def _remove(made: Path | None) -> None:
    if made is not None:
        with suppress(OSError):
            shutil.rmtree(made, ignore_errors=True)


def _refuse_taken(target: Path) -> None:
    try:
        is_taken = target.exists() and (not target.is_dir() or any(target.iterdir()))
    except OSError as error:
        raise _in_context(target, error) from error
    if is_taken:
        raise CheckpointError(
            f"{target} exists already and is not replaced; choose another folder, or remove it first"
        )


def _nothing() -> None:
    pass
